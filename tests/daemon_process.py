"""The daemon as tests meet it: a process of its own, or a thread of the test's process."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from conftest import wait_until
from prometheus_client.parser import text_string_to_metric_families

from emqtimerd.config import Config, Settings
from emqtimerd.daemon import Daemon
from emqtimerd.log import open_log

Line = dict[str, Any]


class Told:
    """Log lines as they come, and the web server whose port one of them names."""

    def __init__(self) -> None:
        self._lines: list[Line] = []

    def told(self, event: str, **fields: Any) -> list[Line]:
        """The lines of an event so far, as far as they have these fields."""
        return [
            line
            for line in self.lines()
            if line["event"] == event and fields.items() <= line.items()
        ]

    def lines(self) -> list[Line]:
        """All lines so far."""
        return list(self._lines)

    def running(self) -> bool:
        """Whether the daemon has not ended."""
        raise NotImplementedError

    def wait_told(self, event: str, times: int = 1, timeout: float = 30.0, **fields: Any) -> Line:
        """Wait for so many lines of an event, and return the last of them."""
        wait_until(
            lambda: len(self.told(event, **fields)) >= times or not self.running(),
            f"{event!r} {fields or ''} told {times} times; told was {self.lines()}",
            timeout,
        )
        found = self.told(event, **fields)
        if len(found) < times:
            pytest.fail(f"ended without {event!r}; told was {self.lines()}")
        return found[times - 1]

    def port(self) -> int:
        """Where the daemon's web server listens."""
        # A loaded machine may take long to start an interpreter.
        return int(self.wait_told("started", timeout=40)["http"].rpartition(":")[2])

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, str]:
        """Status and text of one answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=timeout)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def scrape(self) -> dict[str, float]:
        """Every sample, by its name and its labels as they are written: `name{label="value"}`."""
        status, text = self.get("/metrics")
        assert status == 200, text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
                name = f"{sample.name}{{{labels}}}" if labels else sample.name
                assert name not in samples, f"{name} twice"
                samples[name] = sample.value
        return samples

    def value(self, name: str) -> float | None:
        """One sample; None where there is none."""
        return self.scrape().get(name)

    def wait_value(self, name: str, wanted: float, timeout: float = 30.0) -> None:
        """Wait until a sample has a value."""
        wait_until(
            lambda: self.value(name) == wanted,
            f"{name} is {wanted}, not {self.value(name)}",
            timeout,
        )

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Wait until the daemon says that it does its work."""
        wait_until(lambda: self.get("/readyz")[0] == 200, f"ready: {self.get('/readyz')}", timeout)


class DaemonProcess(Told):
    """`emqtimerd run` in a process, on a configuration file in `directory`; a context manager."""

    def __init__(
        self,
        directory: Path,
        config: str | None,
        *arguments: str,
        environ: Mapping[str, str] = {},
        command: Sequence[str] = (sys.executable, "-m", "emqtimerd"),
        output: int = subprocess.PIPE,
    ) -> None:
        super().__init__()
        self.file = directory / "emqtimerd.toml"
        options = list(arguments)
        if config is not None:
            self.configure(config)
            options += ["--config", str(self.file)]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EMQTIMERD_", "NOTIFY_", "WATCHDOG_", "JOURNAL_"))
        }
        self.errors = ""
        """What was written and is no log line."""
        self.process = subprocess.Popen(
            [*command, "run", *options],
            env={**inherited, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
        self._reader = threading.Thread(target=self._read, name="daemon-log", daemon=True)
        if output == subprocess.PIPE:
            self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self._lines.append(json.loads(line))
            except ValueError:
                self.errors += line.decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        if self._reader.is_alive():
            self._reader.join()
        if self.process.stderr:
            self.process.stderr.close()
        for line in self.lines():
            print(line)  # noqa: T201 - pytest shows it beside a failure
        print(self.errors)  # noqa: T201 - as above

    def configure(self, config: str) -> None:
        """Write another configuration file."""
        self.file.write_text(config)

    def reload(self, config: str | None = None, timeout: float = 30.0) -> Line:
        """Have the file, or another one, read anew; return the line that says how it went."""
        if config is not None:
            self.configure(config)
        ends = ("reloaded", "reload refused, nothing changed", "reload failed, nothing changed")

        def ended() -> list[Line]:
            return [line for line in self.lines() if line["event"] in ends]

        known = len(ended())
        self.send(signal.SIGHUP)
        wait_until(lambda: len(ended()) > known or not self.running(), "a reload", timeout)
        assert self.running(), f"ended by a reload: {self.lines()} {self.errors}"
        return ended()[known]

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def ends(self, timeout: float = 20.0) -> int:
        """Wait for the end; return the exit code, negative for a signal."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"has not ended within {timeout:g} s; told was {self.lines()}")
        if self._reader.ident is not None:
            self._reader.join()
        return code

    def stop(self, timeout: float = 20.0) -> int:
        """Ask it to stop and wait for its end."""
        self.send(signal.SIGTERM)
        return self.ends(timeout)

    def has_handler(self, number: int) -> bool:
        """Whether a signal would not meet its default action (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        masks = [
            int(line.split()[1], 16)
            for line in status.splitlines()
            if line.startswith(("SigIgn", "SigCgt"))
        ]
        return any(mask & 1 << (number - 1) for mask in masks)


class Switchboard:
    """In place of the daemon's `Signals`: the test sends them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[int] = queue.SimpleQueue()

    def send(self, number: int) -> None:
        self._queue.put(number)

    def wake(self) -> None:
        # No signal has this number.
        self._queue.put(0)

    def wait(self, seconds: float) -> set[int]:
        came = set()
        with contextlib.suppress(queue.Empty):
            came.add(self._queue.get(timeout=seconds) if seconds else self._queue.get_nowait())
            while True:
                came.add(self._queue.get_nowait())
        return came


class DaemonThread(Told):
    """The daemon in a thread of this process, so that a test can reach into it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._output = io.StringIO()
        self.settings = settings
        config = self._load()
        self.log = open_log(config.settings.log, self._output, {})
        self.daemon = Daemon(config, self._load, self.log)
        self.signals = Switchboard()
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, name="daemon-main", daemon=True)

    def _load(self) -> Config:
        tree = {"http": {"listen": "127.0.0.1:0"}, **self.settings}
        return Config(Settings.model_validate(tree), {})

    def _run(self) -> None:
        self.code = self.daemon.run(self.signals)  # type: ignore[arg-type]  # it waits alike

    def start(self) -> Self:
        self._thread.start()
        self.wait_told("started")
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        print(self._output.getvalue())  # noqa: T201 - pytest shows it beside a failure

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self._output.getvalue().splitlines()]

    def running(self) -> bool:
        return self._thread.is_alive()

    def reload(self, **settings: Any) -> None:
        """Change some settings and have all of them read anew."""
        self.settings = {**self.settings, **settings}
        known = len(self.told("reloaded"))
        self.signals.send(signal.SIGHUP)
        self.wait_told("reloaded", known + 1)

    def stop(self, timeout: float = 15.0) -> int | None:
        """Ask it to stop and wait for its end."""
        self.signals.send(signal.SIGTERM)
        self._thread.join(timeout)
        assert not self.running(), f"has not ended; told was {self.lines()}"
        return self.code


class Manager:
    """A service manager's socket that keeps what it is told; a context manager."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self.messages: list[tuple[float, str]] = []
        """Each with the monotonic time of its coming."""
        self._thread = threading.Thread(target=self._receive, name="manager", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would not wake the thread that waits on it.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(65_536):
                self.messages.append((time.monotonic(), data.decode()))

    def told(self, start: str) -> list[float]:
        """When messages came that have a line which begins so."""
        return [
            when
            for when, text in list(self.messages)
            if any(line.startswith(start) for line in text.splitlines())
        ]

    def wait_told(self, start: str, times: int = 1, timeout: float = 30.0) -> None:
        wait_until(
            lambda: len(self.told(start)) >= times, f"{start} told; it was {self.messages}", timeout
        )


class Book:
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Callable[..., None]:
        return partial(self._note, level)

    def _note(self, level: str, event: str, **fields: Any) -> None:
        self.lines.append((level, event, fields))

    def take(self) -> list[str]:
        """The events since the last call, without the debug ones."""
        events = [event for level, event, _ in self.lines if level != "debug"]
        self.lines.clear()
        return events

    def last(self, event: str) -> dict[str, Any]:
        """The fields of the last line of an event."""
        return [fields for _, each, fields in self.lines if each == event][-1]
