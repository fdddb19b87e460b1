"""The server and the daemons of a run, each a real process, and what can be asked of them."""

import http.client
import json
import os
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from chaos.crew import FAR_MS
from chaos.history import PLACES, Position
from emqtimerd import wire
from emqtimerd.demo import DaemonProcess

SOON_MS = FAR_MS // 2
"""What is due later than this is left over on purpose."""

Counted = Counter[tuple[str, ...]]
"""A daemon's counters: (name, label values...) to value."""


@dataclass
class Snapshot:
    """What the server holds at the end."""

    sets: dict[tuple[str, str], dict[bytes, bytes]] = field(default_factory=dict)
    """Each queue's places: ids with their scores."""
    states: dict[bytes, bytes] = field(default_factory=dict)
    """The `state` of each row that is in one of them, by the row's key."""
    completed: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def size(self, *places: str) -> int:
        """How many ids these places hold in all queues."""
        return sum(len(ids) for (_, place), ids in self.sets.items() if place in places)


def snapshot(client_of: Callable[[str], Any], queues: Sequence[str]) -> Snapshot:
    """Read what the servers hold now, each queue from the one that has it."""
    seen = Snapshot()
    for queue in queues:
        client = client_of(queue)
        for place in PLACES:
            found = client.zrange(wire.queue_key(queue, place), 0, -1, withscores=True)
            seen.sets[queue, place] = {job_id: b"%d" % score for job_id, score in found}
            rows = [wire.row_key(queue, job_id) for job_id, _ in found]
            for start in range(0, len(rows), 1_000):
                pipeline = client.pipeline(transaction=False)
                for row in rows[start : start + 1_000]:
                    pipeline.hget(row, "state")
                states = zip(rows[start : start + 1_000], pipeline.execute(), strict=True)
                seen.states.update((row, state or b"") for row, state in states)
        for name, counts in (("completed", seen.completed), ("failed", seen.failed)):
            counts[queue] = int(client.hget(wire.queue_key(queue, f"metrics:{name}"), "count") or 0)
    return seen


def open_jobs(client_of: Callable[[str], Any], queues: Sequence[str]) -> int:
    """How many jobs have not come to their end; -1 while a server does not say."""
    count = 0
    with suppress(redis.RedisError):
        for queue in queues:
            client = client_of(queue)
            now_ms = client.time()[0] * 1_000
            pipeline = client.pipeline(transaction=False)
            pipeline.zcard(wire.queue_key(queue, "pending"))
            pipeline.zcard(wire.queue_key(queue, "active"))
            pipeline.zcount(wire.queue_key(queue, "schedule"), "-inf", now_ms + SOON_MS)
            count += sum(pipeline.execute())
        return count
    return -1


class Clock:
    """The wall clock of one daemon, which can be set; no other clock of it, and of nobody else."""

    SOURCE = Path(__file__).with_name("wallclock.c")

    def __init__(self, place: Path) -> None:
        """Raises OSError or CalledProcessError where there is no C compiler."""
        self._file = place / "clock"
        self._library = place / "wallclock.so"
        command = ["cc", "-shared", "-fPIC", "-o", str(self._library), str(self.SOURCE)]
        subprocess.run(command, check=True, capture_output=True)
        self.ahead = 0
        self.set(0)

    @property
    def environ(self) -> Mapping[str, str]:
        """What a process needs to go by this clock."""
        return {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """Set it so many seconds ahead of the machine's clock, or back with less than none."""
        # In place: the process has the file in its memory.
        with self._file.open("r+b" if self._file.exists() else "wb") as stream:
            stream.write(struct.pack("q", seconds))
        self.ahead = seconds


class Daemon(DaemonProcess):
    """One daemon, which may be stopped, killed and started again; its counters add up.

    `network` is where it runs, and can be talked to; `clock` what it takes the time from.
    """

    def __init__(
        self,
        name: str,
        config: str,
        directory: Path,
        network: AbstractContextManager[object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.directory = directory
        self._network = network or nullcontext()
        self._environ = {**os.environ, **(clock.environ if clock else {})}
        self.counted: Counted = Counter()
        """What its earlier processes had counted when they were last asked."""
        self.log: list[dict[str, object]] = []
        """What its earlier processes logged."""
        self.disturbed = 0
        """How often it was stopped, killed or started: an answer from meanwhile says nothing."""
        self.up = True
        self.noise: list[str] = []
        """What it wrote that is no log line."""
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        self._start(config)

    def _start(self, config: str) -> None:
        with self._network:
            super().__init__(config, self.directory, self._environ)

    def _read(self) -> None:
        for line in self.process.stderr or ():
            with (self.directory / "log").open("a") as kept:
                kept.write(line)
            try:
                record = json.loads(line)
            except ValueError:
                # The last line of one that was killed may be cut short.
                if line.endswith("\n"):
                    self.noise.append(line.rstrip())
                continue
            self.lines.append(record)
            if record["event"] == "started":
                self._address = record["http"]
                self._started.set()

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, str]:
        """Status and text of one answer. Raises OSError or HTTPException."""
        address = self.page.removeprefix("http://").rstrip("/")
        with (
            self._network,
            closing(http.client.HTTPConnection(address, timeout=timeout)) as (connection),
        ):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def ready(self) -> bool:
        """Whether it says that it does its work."""
        with suppress(OSError, http.client.HTTPException):
            return self.get("/readyz")[0] == 200
        return False

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Scrape it."""
        with self._network:
            return super().metrics()

    def totals(self) -> Counted:
        """What all its processes have counted so far, of which the last is asked now."""
        return self.counted + self.counters()

    def counters(self) -> Counted:
        """What its process has counted."""
        found = self.metrics().items()
        return Counter({key: round(n) for key, n in found if key[0].endswith("_total")})

    def signal(self, number: int) -> None:
        """Send a signal; one that stops it or lets it go on is remembered."""
        with self._lock:
            self.disturbed += 1
            self.up = number != signal.SIGSTOP
            self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL it, just after it was asked what it has counted."""
        last = self.counters()
        with self._lock:
            self.disturbed += 1
            self.up = False
            self.process.kill()
            self.process.wait()
        self.counted += last
        self.log += self.lines

    def restart(self, config: str) -> None:
        """Start it again after a kill."""
        self._start(config)
        with self._lock:
            self.disturbed += 1
            self.up = True

    def reload(self, config: str) -> bool:
        """Have other settings taken over; tell whether it says so."""
        known = self._told("reloaded")
        (self.directory / "emqtimerd.toml").write_text(config)
        self.signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while self._told("reloaded") == known and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._told("reloaded") > known

    def _told(self, event: str) -> int:
        return sum(line["event"] == event for line in self.lines)

    def records(self, event: str) -> list[dict[str, object]]:
        """The lines of an event that all its processes logged."""
        return [line for line in (*self.log, *self.lines) if line["event"] == event]

    def end(self) -> int:
        """Stop it as a service manager would, and return its exit code."""
        self.process.send_signal(signal.SIGCONT)
        with self._lock:
            self.disturbed += 1
            self.up = False
        return self.stop()


def settled(daemons: Iterable[Daemon]) -> Counted:
    """What all of them have counted, once no sweep is under way that has still to be counted."""
    before: Counted | None = None
    while True:
        total = sum((daemon.totals() for daemon in daemons), Counted())
        moves = Counter({k: n for k, n in total.items() if k[0].startswith(("jobs_", "lease_"))})
        if moves == before:
            return total
        before = moves
        # A sweep that nobody answers takes longer, and is then counted as unknown.
        time.sleep(1)


class Watch:
    """Asks each daemon now and then whether it is alive and ready, and how long the file has grown.

    Alive it must be always; ready within its patience once all faults are mended.
    """

    INTERVAL_SECONDS = 0.2

    def __init__(self, position: Callable[[], Position], daemons: Iterable[Daemon]) -> None:
        self._daemons = tuple(daemons)
        self._position = position
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self._began = time.monotonic()
        self._positions: list[tuple[float, Position]] = []
        self._ready_by: Mapping[str, float] | None = None
        self.asked = 0
        self.not_ready = 0
        self.failures: list[str] = []
        self.unready: list[str] = []

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no more."""
        if not self._thread.is_alive() and not self._ended.is_set():
            self.failures.append("the watch has died")
        self._ended.set()
        self._thread.join()

    def calm(self, patience: Mapping[str, float] | None) -> None:
        """All faults are mended, and each daemon is to be ready after so long; None: not so."""
        now = time.monotonic()
        self._ready_by = patience and {name: now + seconds for name, seconds in patience.items()}

    def position_before(self, seconds: float) -> Position:
        """How long the history was so long ago, or somewhat earlier."""
        when = time.monotonic() - seconds
        earlier = [position for at, position in self._positions if at <= when]
        return earlier[-1] if earlier else tuple(0 for _ in self._position())

    def _run(self) -> None:
        while not self._ended.wait(self.INTERVAL_SECONDS):
            self._positions.append((time.monotonic(), self._position()))
            for daemon in self._daemons:
                self._look(daemon)

    def _look(self, daemon: Daemon) -> None:
        ready_by, before = self._ready_by, daemon.disturbed
        if not daemon.up:
            return
        began = time.monotonic()
        alive, why = self._ask(daemon, "/healthz")
        ready, why_not = self._ask(daemon, "/readyz")
        # Stopped, killed or started while it was asked: the answer is about nobody.
        if daemon.disturbed != before or not daemon.up:
            return
        self.asked += 1
        self.not_ready += not ready
        where = f"{daemon.name} at {began - self._began:.1f} s"
        if not alive:
            self.failures.append(f"{where}: {why}")
        late = ready_by is not None and began > ready_by[daemon.name]
        if late and not ready and self._ready_by is ready_by:
            self.unready.append(f"{where}: {why_not}")

    @staticmethod
    def _ask(daemon: Daemon, path: str) -> tuple[bool, str]:
        began = time.monotonic()
        try:
            status, text = daemon.get(path)
        except (OSError, http.client.HTTPException) as error:
            took = time.monotonic() - began
            return False, f"{type(error).__name__} {error} after {took:.1f} s"
        return status == 200, f"{status} {text.strip()}"
