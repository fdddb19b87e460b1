"""The daemon: what starts in which order, what stops in which order, and the loop in between."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import FrameType
from typing import Self, TypeVar

from emqtimerd import __version__
from emqtimerd.chronicle import Chronicle
from emqtimerd.config import Config, ConfigError, Settings
from emqtimerd.discovery import STEP_SECONDS, Discovery
from emqtimerd.http import Application, CannotListen, HttpServer
from emqtimerd.ledger import Ledger
from emqtimerd.log import Log, open_log
from emqtimerd.notify import Notifier
from emqtimerd.rounds import Rounds
from emqtimerd.shard import owner
from emqtimerd.sweeper import Verb
from emqtimerd.timer import Timer
from emqtimerd.topology import TEND_SECONDS, Nodes, open_nodes

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

TICK_SECONDS = 1.0
"""How often the main thread looks at the clock, the threads and the watchdog, and how often the
scheduler shows that it turns; a short watchdog makes it more often. Signals do not wait for it."""

HURRY_SECONDS = 0.1
"""How often a stop looks whether somebody has lost patience with it, and gives a sign of life."""

CLOSING_SECONDS = 5.0
"""What a stop takes beyond the grace at the most, part by part: the web server's last answers, the
slowest of them, have a second. A manager must not lose patience on these last yards."""

STATUS_SECONDS = 5.0
"""How often the service manager's status line is renewed: for people who look, not for machines."""


T = TypeVar("T")


class Signals:
    """SIGTERM, SIGINT and SIGHUP, noted and told when asked: a handler that does anything more can
    meet a lock that its own thread holds."""

    def __init__(self) -> None:
        self._came: set[int] = set()
        # Only wakes the waiting: a pipe can be full, and then it would keep a signal to itself.
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in HANDLED}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, seconds: float) -> set[int]:
        """Wait for signals, at most so long, and return those that came; a burst counts once."""
        if select.select([self._reader], [], [], seconds)[0]:
            # 64 kB is all that a pipe holds.
            os.read(self._reader, 65_536)
        came, self._came = self._came, set()
        return came

    def wake(self) -> None:
        """Have whoever waits for signals look up; for other threads."""
        # Full is as good: then it is awake already. Closed: then nobody waits any more.
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._came.add(number)


HANDLED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})


def run(load: Callable[[], Config], config: Config) -> int:
    """Run until SIGTERM or SIGINT, and return the exit code; `load` reads the settings anew.

    0: stopped on request. 1: the grace was exceeded, or a thread died. 2: the port is in use.
    """
    with Signals() as signals:
        log = open_log(config.settings.log)
        try:
            return Daemon(config, load, log).run(signals)
        except CannotListen as error:
            log.error("cannot listen", reason=str(error))
            return EXIT_USAGE


def _apart(work: Callable[[], T], name: str, done: Callable[[], None] = lambda: None) -> Future[T]:
    """Do some work that may hang in a thread of its own, and call `done` there: the main thread has
    signals to hear and signs of life to give."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the main thread says what becomes of it
            future.set_exception(error)
        done()

    threading.Thread(target=run, name=f"emqtimerd-{name}", daemon=True).start()
    return future


@dataclass(slots=True)
class _Work:
    """What belongs to the nodes, and is replaced as a whole when their settings change: who waits
    for a server of the old ones then keeps nobody from the new ones."""

    nodes: Nodes
    rounds: Rounds
    discovery: Discovery
    timer: Timer
    found: SimpleQueue[frozenset[str]] = field(default_factory=SimpleQueue)
    """What each search found, until the main thread takes it over: that one also reloads, so there
    is one of the two at a time."""

    def search(self) -> None:
        """Look for queues, a step further."""
        if (found := self.discovery.step()) is not None:
            self.found.put(found)

    def leave(self) -> None:
        """Begin nothing more, and tell nothing more but what moved; what runs ends by itself."""
        self.rounds.leave()
        self.timer.close()
        self.nodes.close()


class Daemon:
    """All rooms, wired."""

    def __init__(self, config: Config, load: Callable[[], Config], log: Log) -> None:
        self._settings = config.settings
        self._load = load
        self._log = log
        self._notifier = Notifier()
        self._ledger = Ledger()
        self._chronicle = Chronicle(log)
        self._stopping = False
        self._reload_wanted = False
        self._reading: Future[Config] | None = None
        self._queues: list[str] = []
        self._found: frozenset[str] = frozenset()
        self._dropped = 0
        self._work = self._open_work(config.settings)
        self._former: list[_Work] = []
        self._listen = config.settings.http.listen
        self._http = HttpServer(self._listen.host, self._listen.port, Application(self._ledger))
        self._apply(config.settings)

    # --- start and stop, in order ---------------------------------------------------------------

    def run(self, signals: Signals) -> int:
        """Start, loop, stop. Raises CannotListen; then nothing was started."""
        self._http.start()
        self._work.timer.start()
        self._log.info(
            "started",
            version=__version__,
            node=self._work.nodes.name,
            queues=len(self._queues),
            http=str(replace(self._listen, port=self._http.port)),
        )
        self._notifier.ready(self._ledger.status())
        try:
            reason = self._loop(signals)
        except Exception:  # noqa: BLE001 - the edge: whatever it was, the stop order is kept
            self._log.exception("the main loop failed")
            reason = "the main loop failed"
        return self._stop(signals, reason)

    def _stop(self, signals: Signals, reason: str | None) -> int:
        grace = self._settings.shutdown_grace_seconds
        self._stopping = True
        self._ledger.stopping()
        self._notifier.stopping("finishing the running sweeps")
        self._notifier.extend(grace + CLOSING_SECONDS)
        self._log.info("stopping", reason=reason or "signal", grace=grace)
        works = [self._work, *self._former]
        for work in works:
            work.timer.halt()
        left = self._finish(works, signals, grace)
        ended = [
            self._end("the scheduler", self._work.timer.close),
            self._end("the web server", self._http.stop),
            self._end("the connections", self._work.nodes.close),
        ]
        if left:
            self._log.error("grace exceeded, sweeps abandoned", **left)
        self._log.info("stopped")
        return EXIT_FAILED if reason or left or not all(ended) else EXIT_STOPPED

    def _finish(
        self, works: Sequence[_Work], signals: Signals, grace_seconds: float
    ) -> dict[Verb, list[str]]:
        """Wait for the running rounds, until the grace is over or a second signal comes; return
        what is left."""
        deadline = time.monotonic() + grace_seconds
        hurry = False
        for work in works:
            while (left := deadline - time.monotonic()) > 0 and not hurry:
                if work.timer.wait_idle(min(left, HURRY_SECONDS)):
                    break
                self._notifier.alive()
                hurry = bool(signals.wait(0) & STOPPING)
        running: dict[Verb, set[str]] = {}
        for work in works:
            for verb, queues in work.timer.running().items():
                running.setdefault(verb, set()).update(queues)
        return {verb: sorted(queues) for verb, queues in running.items()}

    def _end(self, what: str, end: Callable[[], None]) -> bool:
        """End a part; whatever goes wrong there, the others are ended too."""
        # Anew for each part: what the ones before took is not this one's.
        self._notifier.extend(2 * CLOSING_SECONDS)
        ending, deadline = _apart(end, "end"), time.monotonic() + CLOSING_SECONDS
        while not wait([ending], HURRY_SECONDS).done and time.monotonic() < deadline:
            self._notifier.alive()
        error = ending.exception() if ending.done() else TimeoutError("it takes too long")
        if error is not None:
            self._log.error("could not be ended", what=what, exc_info=error)
        return error is None

    def _loop(self, signals: Signals) -> str | None:
        """Turn until a signal asks to stop (None) or something that must live is dead (why)."""
        watchdog = self._notifier.watchdog_seconds
        next_status = 0.0
        while True:
            came = signals.wait(self._beat_seconds())
            if came & STOPPING:
                return None
            self._reload_wanted |= signal.SIGHUP in came
            self._follow_reload(signals.wake)
            self._take_found()
            if (jumped := self._work.timer.check_clock()) is not None:
                self._log.warning("the wall clock was set", seconds=round(jumped, 3))
            if not self._work.timer.is_alive():
                return "the scheduler's thread has died"
            if not self._http.running:
                return f"the HTTP server's thread has died: {self._http.failure!r}"
            self._former = [work for work in self._former if not work.timer.wait_idle(0)]
            # A beat that is older than half of the watchdog's own time limit is no sign of life.
            if watchdog and self._ledger.beat_age() <= watchdog / 2:
                self._notifier.alive()
            if (now := time.monotonic()) >= next_status:
                next_status = now + STATUS_SECONDS
                self._notifier.status(self._ledger.status())

    # --- settings -------------------------------------------------------------------------------

    def _follow_reload(self, wake: Callable[[], None]) -> None:
        """Begin to read the settings anew if that is wanted, and take them over once they are."""
        if self._reading and self._reading.done():
            self._reload(self._reading)
            self._reading = None
        if self._reload_wanted and not self._reading:
            # Not before: a hangup while the file is being read may be about a newer one.
            self._reload_wanted = False
            self._notifier.reloading()
            self._reading = _apart(self._load, "settings", wake)

    def _reload(self, reading: Future[Config]) -> None:
        """Take over what was read: all of it, or nothing."""
        try:
            settings = reading.result().settings
        except ConfigError as error:
            problems = str(error)
            self._ledger.reloaded(problems)
            self._log.error("reload refused, nothing changed", problems=problems.splitlines())
        except Exception as error:  # noqa: BLE001 - no file, however odd, ends a daemon that runs
            self._ledger.reloaded(f"{type(error).__name__}: {error}")
            self._log.exception("reload failed, nothing changed")
        else:
            self._replace(settings)
            self._ledger.reloaded()
            self._log.info("reloaded", queues=len(self._queues))
        # Also after a refusal: the manager waits for it, and the daemon works as before.
        self._notifier.ready(self._ledger.status())

    def _replace(self, settings: Settings) -> None:
        if settings.http.listen != self._listen:
            # A daemon that lost its old port and could not get the new one would be blind.
            self._log.warning(
                "http.listen is taken over by a restart only",
                listen=str(settings.http.listen),
                until_then=str(self._listen),
            )
        if settings.log != self._settings.log:
            self._log = open_log(settings.log)
            self._chronicle.tell_to(self._log)
        former = self._work
        # The next search is a while away, and what was found so far need not wait for it.
        found = frozenset(filter(settings.discovers, self._found))
        if settings.node == self._settings.node:
            former.discovery.configure(settings)
        else:
            former.leave()
            self._former.append(former)
            self._chronicle.begin_anew()
            self._work = self._open_work(settings)
            self._work.nodes.go_on_from(former.nodes)
            if self._work.nodes.name == former.nodes.name:
                self._work.discovery.go_on_from(former.discovery)
            else:
                found = frozenset()
        self._found = found
        self._settings = settings
        self._apply(settings)
        if self._work is not former:
            self._work.timer.start()

    def _open_work(self, settings: Settings) -> _Work:
        nodes = open_nodes(settings.node)
        rounds = Rounds(nodes, self._ledger, self._chronicle, lambda: self._stopping)
        timer = Timer(
            rounds.run,
            on_lateness=self._ledger.round_late,
            on_skip=self._ledger.round_skipped,
            on_beat=self._ledger.beat,
            on_error=self._round_failed,
            beat_seconds=self._beat_seconds(),
        )
        return _Work(nodes, rounds, Discovery(nodes, settings), timer)

    def _apply(self, settings: Settings) -> None:
        """Have exactly these queues swept: the listed and the found ones that are our part."""
        work, shard = self._work, settings.shard
        wanted = dict.fromkeys((*settings.queues, *sorted(self._found)))
        self._queues = [q for q in wanted if owner(q, shard.count) == shard.index]
        self._ledger.set_shard(shard.index, shard.count)
        cadences = work.rounds.configure(settings, self._queues)
        fastest: dict[Verb, float] = {}
        for cadence in cadences:
            known = fastest.get(cadence.verb, cadence.interval_seconds)
            fastest[cadence.verb] = min(known, cadence.interval_seconds)
        self._ledger.expect(fastest)
        work.timer.set_cadences(cadences)
        step = STEP_SECONDS if settings.discovery.enabled else None
        work.timer.set_side_job("discover", work.search, step)
        # A single server is looked after by its sweeps, where it has any.
        tended = work.nodes.watched or not self._queues
        work.timer.set_side_job("tend", work.rounds.tend, TEND_SECONDS if tended else None)

    def _take_found(self) -> None:
        """Have the queues swept that a search found, as far as a reload has left them wanted."""
        while not self._work.found.empty():
            found = frozenset(filter(self._settings.discovers, self._work.found.get()))
            if found != self._found:
                self._found = found
                self._apply(self._settings)
            before, self._dropped = self._dropped, self._work.discovery.dropped
            if self._dropped and self._dropped != before:
                self._log.warning("queues beyond discovery.max_queues", not_swept=self._dropped)
            elif before and not self._dropped:
                self._log.info("no queue is beyond discovery.max_queues any more")

    # --- what the timer calls -------------------------------------------------------------------

    def _round_failed(self, error: BaseException) -> None:
        self._log.error("a round failed, the next one goes on", exc_info=error)

    # --- signs of life --------------------------------------------------------------------------

    def _beat_seconds(self) -> float:
        """How often the scheduler beats and the main thread looks: a watchdog of any length hears
        of each beat in time."""
        watchdog = self._notifier.watchdog_seconds
        return min(TICK_SECONDS, watchdog / 4) if watchdog else TICK_SECONDS
