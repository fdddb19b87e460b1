"""The daemon: what starts in which order, what stops in which order, and the loop in between."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Self

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
from emqtimerd.timer import Timer, Wake
from emqtimerd.topology import TEND_SECONDS, Nodes, open_nodes

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

TICK_SECONDS = 1.0
"""How often the main thread looks at the clock, the threads and the watchdog, and how often the
scheduler shows that it turns. Signals do not wait for it."""

STATUS_SECONDS = 5.0
"""How often the service manager's status line is renewed: for people who look, not for machines."""


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


@dataclass(slots=True)
class _Work:
    """What belongs to the nodes, and is replaced as a whole when their settings change."""

    nodes: Nodes
    rounds: Rounds
    discovery: Discovery


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
        self._queues: list[str] = []
        self._found: frozenset[str] = frozenset()
        self._found_new: frozenset[str] | None = None
        self._dropped = 0
        self._work = self._open_work(config.settings)
        self._listen = config.settings.http.listen
        self._http = HttpServer(self._listen.host, self._listen.port, Application(self._ledger))
        self._timer = Timer(
            self._run_round,
            on_lateness=self._ledger.round_late,
            on_skip=self._ledger.round_skipped,
            on_beat=self._ledger.beat,
            on_error=self._round_failed,
            beat_seconds=self._beat_seconds(),
        )
        self._apply(config.settings)

    # --- start and stop, in order ---------------------------------------------------------------

    def run(self, signals: Signals) -> int:
        """Start, loop, stop. Raises CannotListen; then nothing was started."""
        self._http.start()
        self._timer.start()
        self._log.info(
            "started",
            version=__version__,
            node=self._work.nodes.name,
            queues=len(self._queues),
            http=str(replace(self._listen, port=self._http.port)),
        )
        self._notifier.ready(self._status())
        try:
            reason = self._loop(signals)
        except Exception:  # noqa: BLE001 - the edge: whatever it was, the stop order is kept
            self._log.exception("the main loop failed")
            reason = "the main loop failed"
        return self._stop(signals, reason)

    def _stop(self, signals: Signals, reason: str | None) -> int:
        settings = self._settings
        self._stopping = True
        self._ledger.stopping()
        self._notifier.stopping("finishing the running sweeps")
        self._log.info("stopping", reason=reason or "signal", grace=settings.shutdown_grace_seconds)
        left = self._timer.stop(
            settings.shutdown_grace_seconds, hurry=lambda: bool(signals.wait(0) & STOPPING)
        )
        self._http.stop()
        self._work.nodes.close()
        if left:
            self._log.error("grace exceeded, sweeps abandoned", **left)
        self._log.info("stopped")
        return EXIT_FAILED if reason or left else EXIT_STOPPED

    def _loop(self, signals: Signals) -> str | None:
        """Turn until a signal asks to stop (None) or something that must live is dead (why)."""
        tick = min(TICK_SECONDS, (self._notifier.watchdog_seconds or TICK_SECONDS) / 4)
        next_status = 0.0
        while True:
            came = signals.wait(tick)
            if came & STOPPING:
                return None
            if signal.SIGHUP in came:
                self._reload()
            if (jumped := self._timer.check_clock()) is not None:
                self._log.warning("the wall clock was set", seconds=round(jumped, 3))
            if self._found_new is not None:
                self._found, self._found_new = self._found_new, None
                self._apply(self._settings)
            if not self._timer.is_alive():
                return "the scheduler's thread has died"
            if not self._http.running:
                return "the HTTP server's thread has died"
            if self._ledger.beat_age() <= self._beat_patience():
                self._notifier.alive()
            if (now := time.monotonic()) >= next_status:
                next_status = now + STATUS_SECONDS
                self._notifier.status(self._status())

    # --- settings -------------------------------------------------------------------------------

    def _reload(self) -> None:
        """Read the settings anew: all of them are taken over, or none."""
        self._notifier.reloading()
        try:
            config = self._load()
        except ConfigError as error:
            problems = str(error)
            self._ledger.reloaded(problems)
            self._log.error("reload refused, nothing changed", problems=problems.splitlines())
        except Exception as error:  # noqa: BLE001 - no file, however odd, ends a daemon that runs
            self._ledger.reloaded(f"{type(error).__name__}: {error}")
            self._log.exception("reload failed, nothing changed")
        else:
            self._replace(config.settings)
            self._ledger.reloaded()
            self._log.info("reloaded", queues=len(self._queues))
        # Also after a refusal: the manager waits for it, and the daemon works as before.
        self._notifier.ready(self._status())

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
        if settings.node != self._settings.node:
            old_nodes = self._work.nodes
            self._chronicle.forget_nodes()
            self._work = self._open_work(settings)
            old_nodes.close()
            self._found, self._found_new = frozenset(), None
        else:
            self._work.discovery.configure(settings)
            # The next search is a while away, and what it found so far need not wait for it.
            self._found = frozenset(filter(settings.discovers, self._found))
        self._settings = settings
        self._apply(settings)

    def _open_work(self, settings: Settings) -> _Work:
        nodes = open_nodes(settings.node)
        rounds = Rounds(nodes, self._ledger, self._chronicle, lambda: self._stopping)
        return _Work(nodes, rounds, Discovery(nodes, settings))

    def _apply(self, settings: Settings) -> None:
        """Have exactly these queues swept: the listed and the found ones that are our part."""
        shard = settings.shard
        wanted = dict.fromkeys((*settings.queues, *sorted(self._found)))
        queues = [q for q in wanted if owner(q, shard.count) == shard.index]
        gone = set(self._queues) - set(queues)
        self._queues = queues
        self._ledger.set_queues(queues)
        self._ledger.set_shard(shard.index, shard.count)
        self._chronicle.forget(gone)
        cadences = self._work.rounds.configure(settings, queues)
        fastest: dict[Verb, float] = {}
        for cadence in cadences:
            known = fastest.get(cadence.verb, cadence.interval_seconds)
            fastest[cadence.verb] = min(known, cadence.interval_seconds)
        self._ledger.expect(fastest)
        self._timer.set_cadences(cadences)
        step = STEP_SECONDS if settings.discovery.enabled else None
        self._timer.set_side_job("discover", self._discover, step)
        # A single server is looked after by its sweeps, where it has any.
        tended = self._work.nodes.watched or not queues
        self._timer.set_side_job("tend", self._tend, TEND_SECONDS if tended else None)

    # --- what the timer calls -------------------------------------------------------------------

    def _run_round(self, verb: Verb, queues: Sequence[str]) -> Iterable[Wake]:
        return self._work.rounds.run(verb, queues)

    def _round_failed(self, error: BaseException) -> None:
        self._log.error("a round failed, the next one goes on", exc_info=error)

    def _tend(self) -> None:
        self._work.rounds.tend()

    def _discover(self) -> None:
        discovery = self._work.discovery
        found = discovery.step()
        if found is None or discovery is not self._work.discovery:
            return
        if found != self._found:
            # Applied by the main thread, which also reloads: one of them at a time.
            self._found_new = found
        if discovery.dropped != self._dropped:
            self._dropped = discovery.dropped
            self._log.warning("queues beyond discovery.max_queues", not_swept=self._dropped)

    # --- signs of life --------------------------------------------------------------------------

    def _beat_seconds(self) -> float:
        """The scheduler beats so often that a watchdog of any length hears of each beat in time."""
        watchdog = self._notifier.watchdog_seconds
        return min(TICK_SECONDS, watchdog / 4) if watchdog else TICK_SECONDS

    def _beat_patience(self) -> float:
        """How old a beat may be before the watchdog hears nothing: half of its own time limit."""
        return (self._notifier.watchdog_seconds or 2.0) / 2

    def _status(self) -> str:
        """How things stand, in a line."""
        return self._ledger.status()
