"""DevNode: one server with the job core, its port, its directory, and whose data that may be."""

import contextlib
import fcntl
import os
import random
import shlex
import shutil
import signal
import socket
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from emqtimerd.devnode.parts import (
    DirectoryInUse,
    ForeignData,
    PortInUse,
    ServerFailed,
    find_server,
    jobcore_path,
)
from emqtimerd.devnode.process import Process, Reply, ReplyError, ask, end, spawn
from emqtimerd.wire import BRAND, BRAND_KEY

START_SECONDS = 30.0
"""How long a server may take to answer: 300 times what it takes, for valgrind and busy machines."""

HANDOVER_SECONDS = 2.0
"""How long to wait for a directory: a server whose parent was just killed may not be gone yet."""

PORT_ATTEMPTS = 20
"""How many free ports to try: each one can be taken between our look and the server's."""

ASK_SECONDS = 0.5
"""How long one question to a server may take: a thousand times what it does. Whoever else may have
the port need not answer at all, and our own server ends then."""

LOG_LINES = 15
"""How much of the server's log an error shows: its reason and the notices around it."""

LOCK_NAME = "emqtimerd-devnode.lock"
"""Held by the server that uses the directory, and the mark of a directory that is ours."""


class _Remains:
    """What a node leaves behind unless it is cleared away: a process, a temporary directory."""

    def __init__(self, directory: Path | None) -> None:
        self.process: Process | None = None
        self.temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="emqtimerd-devnode-"))

    def end_process(self, how: signal.Signals) -> None:
        if self.process is not None:
            end(self.process, how)

    def clear(self) -> None:
        self.end_process(signal.SIGTERM)
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


class DevNode:
    """An EMQ node on the loopback interface, as a context manager or with `start` and `stop`.

    The data lies in `directory`, or in a temporary one that goes when the context, this object or
    this process ends. Port 0 picks a free port once; it stays the same over stops, kills and
    restarts. `extra_args` come last on the server's command line.

    Data that is empty gets the brand, unless `brand` is false. A replica's brand is its primary's,
    and in Cluster mode one primary of several holds it: there, it is left to whoever set that up.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        server: str | None = None,
        appendonly: bool = True,
        extra_args: Sequence[str] = (),
        brand: bool = True,
    ) -> None:
        self._server = server
        self._appendonly = appendonly
        self._extra_args = tuple(extra_args)
        self._brand = brand
        self._port = port
        self._info: dict[str, str] = {}
        self._log_start = 0
        self._remains = _Remains(directory and directory.absolute())
        # A node that is forgotten, or runs when Python ends, is cleared away like any other.
        weakref.finalize(self, self._remains.clear)

    @property
    def directory(self) -> Path:
        """Where the data and the log are."""
        return self._remains.directory

    @property
    def temporary(self) -> bool:
        """Whether the directory goes with this object."""
        return self._remains.temporary

    @property
    def port(self) -> int:
        """The port on 127.0.0.1; 0 until the first start has picked one."""
        return self._port

    @property
    def url(self) -> str:
        """The node's address, as every command of emqtimerd takes it."""
        return f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """The process id of the server itself, of the last start."""
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self._remains.process is not None and self._remains.process.poll() is None

    @property
    def version(self) -> str:
        """The server's name and version, for example `valkey 9.1.2`."""
        name = "valkey" if "valkey_version" in self._info else "redis"
        return f"{name} {self._info.get(f'{name}_version', 'unknown')}"

    @property
    def log(self) -> Path:
        """The server's own log, of all its starts in this directory."""
        return self.directory / "server.log"

    def log_tail(self) -> str:
        """Return the last lines that the server logged since its last start."""
        with self.log.open("rb") as stream:
            stream.seek(self._log_start)
            lines = stream.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-LOG_LINES:])

    def start(self) -> Self:
        """Start the server; return when it answers, holds its data and has the brand."""
        if self.running:
            return self
        module = jobcore_path()
        server = find_server(self._server)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._refuse_foreign_files(server)
        lock = self._lock_directory()
        try:
            self._launch(server, module, lock)
            self._claim_data()
        except BaseException:
            # Whatever went wrong, Ctrl-C included: nobody would stop this server for us.
            self.stop()
            raise
        finally:
            # The server alone holds the lock from now on, so it is free as soon as none runs.
            os.close(lock)
        return self

    def stop(self) -> None:
        """End the server in order (SIGTERM) and wait for it; its data stays for another start."""
        self._remains.end_process(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL); its data stays for another start."""
        self._remains.end_process(signal.SIGKILL)

    def restart(self) -> Self:
        """Stop the server if it runs, and start it again on the same port and data."""
        self.stop()
        return self.start()

    def wait(self) -> int:
        """Wait until the server has ended, and return its exit status."""
        return self._started().wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remains.clear()

    def _started(self) -> Process:
        if self._remains.process is None:
            raise ServerFailed("This node was never started.")
        return self._remains.process

    def _launch(self, server: Path, module: Path, lock: int) -> None:
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = self._port or free_port()
            self._log_start = self.log.stat().st_size if self.log.exists() else 0
            process = spawn(self._command(server, module, port), self.log, pass_fds=(lock,))
            self._remains.process = process
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"redis://127.0.0.1:{port}/0, process {process.pid}".encode(), 0)
            try:
                self._info = self._await_answer(process, port)
            except PortInUse:
                # A port that was given, or picked before, is kept: its clients know it.
                if self._port or attempt == PORT_ATTEMPTS:
                    raise
            else:
                self._port = port
                return

    def _command(self, server: Path, module: Path, port: int) -> list[str]:
        # Another program around the server: `env LD_PRELOAD=…` or `valgrind …` (make sanitize).
        wrapper = shlex.split(os.environ.get("EMQ_SERVER_WRAPPER", ""))
        settings = {
            "--port": str(port),
            "--bind": "127.0.0.1",
            "--protected-mode": "yes",
            "--dir": str(self.directory),
            "--appendonly": "yes" if self._appendonly else "no",
            # The append-only file is the data; snapshots beside it could only differ from it.
            "--save": "",
            "--loadmodule": str(module),
        }
        pairs = [word for pair in settings.items() for word in pair]
        return [*wrapper, str(server), *pairs, *self._extra_args]

    def _await_answer(self, process: Process, port: int) -> dict[str, str]:
        deadline = time.monotonic() + START_SECONDS
        last = "no answer"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                tail = self.log_tail()
                if "Address already in use" in tail or "Failed listening on port" in tail:
                    raise PortInUse(
                        f"Port {port} of 127.0.0.1 is in use by another process. "
                        "Name another with --port, or --port 0 for any free one."
                    )
                raise ServerFailed(f"The server ended while starting. Its last words:\n{tail}")
            try:
                info = self._read_info(port)
            except (OSError, ReplyError) as error:
                last = str(error)
            else:
                # Another server may have taken the port before ours, which will find out and end.
                if info["process_id"] == str(process.pid):
                    if info["loading"] == "0":
                        return info
                    # Reading a large file takes what it takes; the server would end if it failed.
                    deadline = time.monotonic() + START_SECONDS
                last = f"answered by process {info['process_id']}"
            # Nothing to await here but the answer itself: no event tells that a server listens.
            time.sleep(0.01)
        raise ServerFailed(
            f"The server did not answer on port {port} within {START_SECONDS:g} s ({last}). "
            f"Its last words:\n{self.log_tail()}"
        )

    def _ask(self, port: int, *commands: Sequence[str | bytes]) -> list[Reply]:
        """Ask as the operator: with the password, when the extra arguments set one."""
        if "--requirepass" not in self._extra_args:
            return ask(port, *commands, timeout=ASK_SECONDS)
        password = self._extra_args[self._extra_args.index("--requirepass") + 1]
        return ask(port, ["AUTH", password], *commands, timeout=ASK_SECONDS)[1:]

    def _read_info(self, port: int) -> dict[str, str]:
        (text,) = self._ask(port, ["INFO"])
        lines = text.decode(errors="replace").splitlines() if isinstance(text, bytes) else []
        return {name: value for name, colon, value in (line.partition(":") for line in lines)}

    def _claim_data(self) -> None:
        """Brand data that is empty, and refuse data of anybody else."""
        if (
            not self._brand
            or self._info["role"] != "master"
            or self._info["cluster_enabled"] == "1"
        ):
            return
        problem = self._data_problem()
        if problem is not None:
            raise self._foreign(problem)
        self._ask(self._port, ["SET", BRAND_KEY, BRAND, "NX"])

    def _data_problem(self) -> str | None:
        """Say what tells that this data is not an EMQ node's, or None; no data is no problem."""
        try:
            (brand,) = self._ask(self._port, ["GET", BRAND_KEY])
        except ReplyError as error:
            return f"{BRAND_KEY.decode()} is not a string ({error})"
        empty = not any(name.startswith("db") and name[2:].isdigit() for name in self._info)
        if brand == BRAND or (brand is None and empty):
            return None
        return f"{BRAND_KEY.decode()} is {'missing' if brand is None else repr(brand)[1:]}"

    def _foreign(self, problem: str) -> ForeignData:
        return ForeignData(
            f"The data in {self.directory} is not an EMQ node's: {problem}, where an EMQ node has "
            f"{BRAND.decode()!r}. Nothing was changed. Name an empty directory with --dir, or "
            "move the data away."
        )

    def _refuse_foreign_files(self, server: Path) -> None:
        """Refuse data files that the server would not read, or that are not an EMQ node's."""
        names = ("appendonlydir", "appendonly.aof")  # the second is the layout before Redis 7
        appended = [path for name in names if (path := self.directory / name).exists()]
        snapshots = sorted(self.directory.glob("*.rdb"))
        if self._appendonly and snapshots and not appended:
            raise ForeignData(
                f"{self.directory} holds {snapshots[0].name} and no append-only file. A server "
                "that keeps such a file reads no snapshot and would start empty. Name an empty "
                "directory with --dir, or move the snapshot away."
            )
        ours = (self.directory / LOCK_NAME).exists()
        if ours or not self._brand or not (appended or snapshots):
            return
        # Loading alone may rewrite files (keys that expired, an older layout): so load a copy.
        with tempfile.TemporaryDirectory(prefix="emqtimerd-devnode-look-") as copy:
            for path in (*appended, *snapshots):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, Path(copy, path.name))
            with DevNode(
                Path(copy), server=str(server), appendonly=self._appendonly, brand=False
            ) as look:
                problem = look._data_problem()
        if problem is not None:
            raise self._foreign(problem)

    def _lock_directory(self) -> int:
        """Return the directory's lock, for the server to inherit and hold while it runs."""
        lock = os.open(self.directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + HANDOVER_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                holder = os.pread(lock, 200, 0).decode(errors="replace")
                os.close(lock)
                raise DirectoryInUse(
                    f"{self.directory} is in use by the development node at {holder}. "
                    "Stop that one, or name another directory with --dir."
                ) from None
            return lock


def free_port() -> int:
    """Return a port that nobody uses now, nor the one 10,000 above it (the cluster bus).

    From below the ports that systems give to outgoing connections (32768 up on Linux, 49152 up on
    macOS): such a connection could take the port of a server that is down for a restart.
    """
    for _ in range(PORT_ATTEMPTS):
        port = random.randrange(10_000, 22_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for each in (port, port + 10_000):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", each))
            return port
    raise PortInUse(f"{PORT_ATTEMPTS} ports between 10000 and 22000 are all in use.")
