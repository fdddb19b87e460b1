"""The server and the daemons of a run, each a real process, and what can be asked of them."""

import http.client
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from chaos.crew import FAR_MS
from chaos.history import PLACES
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


def snapshot(client: Any, queues: Sequence[str]) -> Snapshot:
    """Read what the server holds now."""
    seen = Snapshot()
    for queue in queues:
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


def open_jobs(client: Any, queues: Sequence[str]) -> int:
    """How many jobs have not come to their end; -1 while the server does not say."""
    with suppress(redis.RedisError):
        now_ms = client.time()[0] * 1_000
        pipeline = client.pipeline(transaction=False)
        for queue in queues:
            pipeline.zcard(wire.queue_key(queue, "pending"))
            pipeline.zcard(wire.queue_key(queue, "active"))
            pipeline.zcount(wire.queue_key(queue, "schedule"), "-inf", now_ms + SOON_MS)
        return sum(pipeline.execute())
    return -1


class Daemon(DaemonProcess):
    """One daemon, which may be stopped, killed and started again; its counters add up."""

    def __init__(self, name: str, config: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
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
        directory.mkdir(parents=True)
        super().__init__(config, directory)

    def _read(self) -> None:
        for line in self.process.stderr or ():
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
        with closing(http.client.HTTPConnection(address, timeout=timeout)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def ready(self) -> bool:
        """Whether it says that it does its work."""
        with suppress(OSError, http.client.HTTPException):
            return self.get("/readyz")[0] == 200
        return False

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
        DaemonProcess.__init__(self, config, self.directory)
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

    def __init__(self, position: Callable[[], int], daemons: Iterable[Daemon]) -> None:
        self._daemons = tuple(daemons)
        self._position = position
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self._began = time.monotonic()
        self._positions: list[tuple[float, int]] = []
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

    def position_before(self, seconds: float) -> int:
        """How long the history was so long ago, or somewhat earlier."""
        when = time.monotonic() - seconds
        return max((position for at, position in self._positions if at <= when), default=0)

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
