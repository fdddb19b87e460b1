"""When each queue is swept: cadences in phases, and wakes at due times. Nothing else decides when.

APScheduler (3.x) runs one job for each phase of a cadence and one for the earliest wakes. Its own
interval trigger lives on the wall clock and lists every missed fire time; ours answers with the
next point of a fixed grid, however late it is asked, so a late round runs once and a missed one is
not made up for.
"""

import heapq
import math
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, JobEvent, JobExecutionEvent
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from emqtimerd.sweeper import VERBS, Verb

QUEUES_PER_PHASE = 1_000
"""Ten thousand queues a second are then 16 jobs a second, each a pipeline of some 600 queues: the
fixed price of a job, an APScheduler run and two threads that wake up, is shared by many."""

PHASE_SECONDS = 1.0
"""A long interval is spread so that its queues do not share one moment: a phase a second..."""

MOST_PHASES = 64
"""... but no more phases than this, since each of them is a job of the scheduler."""

FIRST_SWEEPS_SECONDS = 5.0
"""All queues have had their first sweep after this long, however long their interval: just after
a start is when a sweep is needed most."""

WAKE_GRID_SECONDS = 0.004
"""Wakes are rounded up to this grid, so that neighbours share a pipeline. It costs 2 ms of
lateness on average and keeps a thousand due jobs a second from being a thousand round trips."""

ROUND_THREADS = 8
"""Rounds that may wait for a server at the same time. A round waits for I/O or holds Python's
lock, so more threads would not make them faster; a black hole fills these and no more."""

WAKE_RUNS = 4
"""Runs of the wake job that may overlap: one that waits for a slow server must not keep the
others' due jobs, and half of the threads stay free for the cadences."""

POINT_SECONDS = 0.000_5
"""How close to a point of a grid a moment counts as being on it; intervals are 10 ms and more."""

JUMP_SECONDS = 0.5
"""From here on a difference between the clocks is a step: slewing moves a clock 0.5 ms a second."""


class Grid(BaseTrigger):  # type: ignore[misc]  # APScheduler has no type information
    """Fires on the points of a grid, `anchor + n * interval`; a point that was missed is gone."""

    def __init__(self, interval_seconds: float, anchor: datetime) -> None:
        self.interval_seconds = interval_seconds
        self.anchor = anchor

    def get_next_fire_time(self, _previous: datetime | None, now: datetime) -> datetime:
        """Return the first point after `now`, whatever was fired before."""
        return now + timedelta(seconds=self.seconds_to_next(now))

    def seconds_past(self, now: datetime) -> float:
        """Return how long ago the last point was."""
        return max(self._past(now), 0.0)

    def seconds_to_next(self, now: datetime) -> float:
        """Return how long it is to the next point."""
        return self.interval_seconds - self._past(now)

    def _past(self, now: datetime) -> float:
        # A fire time is rounded to microseconds, perhaps to just before its point: a moment so
        # close to a point counts as after it, or the same point would be fired twice.
        elapsed = (now - self.anchor).total_seconds() + POINT_SECONDS
        return elapsed % self.interval_seconds - POINT_SECONDS


class Resting(BaseTrigger):  # type: ignore[misc]  # as above
    """Never fires by itself: its job runs when somebody sets the next time by hand."""

    def get_next_fire_time(self, _previous: datetime | None, now: datetime) -> datetime:
        """Return a moment so far away that another one will have been set by then."""
        return now + timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Cadence:
    """The queues that are swept with one verb at one interval (seconds)."""

    verb: Verb
    interval_seconds: float


def phases_of(interval_seconds: float, queues: Sequence[str]) -> list[tuple[str, ...]]:
    """Share a cadence's queues out to its phases; a queue keeps its phase while their number does.

    Empty phases are kept, so that a phase's position in the interval stays the same.
    """
    by_size = math.ceil(len(queues) / QUEUES_PER_PHASE)
    by_time = min(math.ceil(interval_seconds / PHASE_SECONDS), len(queues), MOST_PHASES)
    count = max(by_size, by_time, 1)
    # A power of two: a queue more or less then seldom moves all the others to another phase.
    count = 1 << (count - 1).bit_length()
    shares: list[list[str]] = [[] for _ in range(count)]
    for queue in queues:
        shares[zlib.crc32(queue.encode()) % count].append(queue)
    return [tuple(share) for share in shares]


class Wakes:
    """The moments at which queues come due, earliest first, by the monotonic clock (seconds)."""

    def __init__(self) -> None:
        self._at: dict[tuple[Verb, str], float] = {}
        self._heap: list[tuple[float, Verb, str]] = []

    def set(self, verb: Verb, queue: str, at: float) -> None:
        """Wake this queue at `at`; a later call replaces an earlier one."""
        self._at[verb, queue] = at
        heapq.heappush(self._heap, (at, verb, queue))
        # Replaced entries stay in the heap until they come up: rebuilt before they outnumber the
        # living, so that a queue whose head changes all day costs no memory.
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, verb, queue) for (verb, queue), at in self._at.items()]
            heapq.heapify(self._heap)

    def earliest(self) -> float | None:
        """The next moment, None when nothing is awaited."""
        while self._heap:
            at, verb, queue = self._heap[0]
            if self._at.get((verb, queue)) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def take(self, now: float) -> dict[Verb, list[str]]:
        """Remove and return what is due."""
        due: dict[Verb, list[str]] = {verb: [] for verb in VERBS}
        while (at := self.earliest()) is not None and at <= now:
            _, verb, queue = heapq.heappop(self._heap)
            del self._at[verb, queue]
            due[verb].append(queue)
        return due


class ClockWatch:
    """Notices when the wall clock was set: it then runs ahead of the monotonic one, or behind."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._distance = wall() - monotonic()

    def jump(self) -> float | None:
        """Return by how many seconds the wall clock was set since the last call, if it was."""
        distance = self._wall() - self._monotonic()
        jumped, self._distance = distance - self._distance, distance
        return jumped if abs(jumped) >= JUMP_SECONDS else None


@dataclass(frozen=True, slots=True)
class Wake:
    """A queue that wants to be swept with this verb at a moment of the monotonic clock."""

    verb: Verb
    queue: str
    at: float


Run = Callable[[Verb, Sequence[str]], Iterable[Wake]]
"""What the timer calls in a thread of its pool: sweep these queues now, and say which of them want
to be swept again before their next turn."""


@dataclass(slots=True)
class _Phase:
    """One job of a cadence: some of its queues, and where on the interval they stand."""

    verb: Verb
    queues: tuple[str, ...]
    trigger: Grid
    fired: bool = False


class Timer:
    """Calls `run` for the queues whose turn it is; no verb of a queue runs twice at one time.

    `on_lateness` hears how late (seconds) each phase began, `on_skip` which verb's phase was left
    out because its last round was still going, `on_beat` that the scheduler's own thread turns,
    and `on_error` what a round raised; its next turn comes all the same.

    Whoever waits for a server holds a thread of the pool and the turns of its queues until then.
    So a timer is for the same servers all its life: with others begins another timer.
    """

    def __init__(
        self,
        run: Run,
        *,
        on_lateness: Callable[[Verb, float], None],
        on_skip: Callable[[Verb], None],
        on_beat: Callable[[], None],
        on_error: Callable[[BaseException], None],
        beat_seconds: float,
    ) -> None:
        self._run = run
        self._on_error = on_error
        self._on_lateness = on_lateness
        self._on_skip = on_skip
        # Guards all below. The scheduler's own lock is only ever taken inside it, never around it.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._stopping = False
        self._wakes = Wakes()
        self._armed: float | None = None
        self._busy: dict[Verb, list[frozenset[str]]] = {verb: [] for verb in VERBS}
        self._cadences: dict[Cadence, tuple[str, ...]] = {}
        self._phases: dict[Cadence, list[_Phase]] = {}
        self._phase_of: dict[tuple[Verb, str], _Phase] = {}
        self._side: dict[str, Grid] = {}
        self._watch = ClockWatch()
        self._beat = Grid(beat_seconds, _now())
        pool = {"thread_name_prefix": "emqtimerd-round"}
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            executors={
                "default": ThreadPoolExecutor(ROUND_THREADS, pool_kwargs=pool),
                # Runs in the scheduler's own thread: its beat then proves that this thread turns,
                # also while every thread of the pool waits for a server that does not answer.
                "inline": DebugExecutor(),
            },
            # A late round still runs, once. The default drops whatever is over a second late.
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        self._scheduler.add_listener(self._skipped, EVENT_JOB_MAX_INSTANCES)
        self._scheduler.add_listener(self._failed, EVENT_JOB_ERROR)
        self._scheduler.add_job(self._wake, Resting(), id=WAKE_JOB, max_instances=WAKE_RUNS)
        # The first one at once: a timer that follows another must not look dead until then.
        self._scheduler.add_job(
            on_beat, self._beat, id=BEAT_JOB, executor="inline", next_run_time=_now()
        )

    def start(self) -> None:
        """Start the scheduler's thread."""
        self._scheduler.start()

    def is_alive(self) -> bool:
        """Tell whether the scheduler's thread still runs."""
        thread = self._scheduler._thread
        return thread is not None and thread.is_alive()

    def halt(self) -> None:
        """Start no further round; the scheduler itself goes on, and so does its beat."""
        with self._lock:
            self._stopping = True

    def wait_idle(self, seconds: float) -> bool:
        """Wait, at most so long, until no round runs; tell whether none does."""
        with self._lock:
            return self._idle.wait_for(lambda: not any(self._busy.values()), seconds)

    def running(self) -> dict[Verb, set[str]]:
        """Return the queues that are being swept just now, by their verb."""
        with self._lock:
            return {verb: set().union(*busy) for verb, busy in self._busy.items() if busy}

    def close(self) -> None:
        """End the scheduler; rounds that run are left to their own deadlines."""
        self.halt()
        self._scheduler.shutdown(wait=False)

    def set_side_job(
        self, name: str, work: Callable[[], None], interval_seconds: float | None
    ) -> None:
        """Run some other work at an interval, in a thread of the pool; at no interval, no more."""
        with self._lock:
            known = self._side.pop(name, None)
            if known and known.interval_seconds == interval_seconds:
                self._side[name] = known
                return
            if known:
                self._scheduler.remove_job(name)
            if interval_seconds is not None:
                self._side[name] = Grid(interval_seconds, _now())
                self._scheduler.add_job(work, self._side[name], id=name)

    # --- cadences -------------------------------------------------------------------------------

    def set_cadences(self, wanted: Mapping[Cadence, Sequence[str]]) -> None:
        """Sweep these queues at these intervals from now on; touch only what has changed."""
        with self._lock:
            for cadence in self._cadences.keys() - wanted.keys():
                self._remove(cadence)
            for cadence, queues in wanted.items():
                if self._cadences.get(cadence) != tuple(queues):
                    self._place(cadence, tuple(queues))
            known, self._phase_of = (
                self._phase_of,
                {
                    (phase.verb, queue): phase
                    for phases in self._phases.values()
                    for phase in phases
                    for queue in phase.queues
                },
            )
            for (verb, queue), phase in self._phase_of.items():
                if phase.fired and known.get((verb, queue)) is not phase:
                    # It is new here, and its turn may be a day away.
                    share = zlib.crc32(queue.encode()) / 2**32
                    soon = share * min(phase.trigger.interval_seconds, FIRST_SWEEPS_SECONDS)
                    self._await(Wake(verb, queue, time.monotonic() + soon))
            self._arm()

    def _place(self, cadence: Cadence, queues: tuple[str, ...]) -> None:
        shares = phases_of(cadence.interval_seconds, queues)
        phases = self._phases.get(cadence, [])
        if len(shares) == len(phases):
            for phase, share in zip(phases, shares, strict=True):
                phase.queues = share
        else:
            self._remove(cadence)
            self._phases[cadence] = self._add(cadence, shares)
        self._cadences[cadence] = queues

    def _add(self, cadence: Cadence, shares: Sequence[tuple[str, ...]]) -> list[_Phase]:
        interval, now = cadence.interval_seconds, _now()
        # At random, so that two replicas that started together do not march in step.
        anchor = now - timedelta(seconds=random.uniform(0, interval))
        phases = []
        for number, share in enumerate(shares):
            place = number / len(shares)
            phase = _Phase(
                cadence.verb, share, Grid(interval, anchor + timedelta(seconds=place * interval))
            )
            first = now + timedelta(seconds=place * min(interval, FIRST_SWEEPS_SECONDS))
            self._scheduler.add_job(
                self._fire,
                phase.trigger,
                args=(phase,),
                id=_job_id(cadence, number),
                next_run_time=first,
            )
            phases.append(phase)
        return phases

    def _remove(self, cadence: Cadence) -> None:
        for number in range(len(self._phases.pop(cadence, ()))):
            self._scheduler.remove_job(_job_id(cadence, number))
        self._cadences.pop(cadence, None)

    def _fire(self, phase: _Phase) -> None:
        if self._stopping:
            # It waited for a thread of the pool until now.
            return
        if phase.fired:
            self._on_lateness(phase.verb, phase.trigger.seconds_past(_now()))
        # The first run stands outside the grid, so that it comes soon after the start.
        phase.fired = True
        self._sweep(phase.verb, phase.queues)

    def _skipped(self, event: JobEvent) -> None:
        if (verb := event.job_id.partition("/")[0]) in VERBS:
            self._on_skip(verb)
        elif event.job_id == WAKE_JOB:
            # All its runs were busy: the wakes that are due are still there, and want to be tried
            # again at the next point of the grid.
            with self._lock:
                self._armed = None
                self._arm()

    def _failed(self, event: JobExecutionEvent) -> None:
        self._on_error(event.exception)

    # --- sweeping -------------------------------------------------------------------------------

    def _sweep(self, verb: Verb, queues: Sequence[str]) -> None:
        busy = self._busy[verb]
        taken = frozenset(queues)
        with self._lock:
            if self._stopping:
                return
            if not all(map(taken.isdisjoint, busy)):
                # A queue whose sweep is still going is left to it: that one says when it is due.
                taken = taken.difference(*busy)
                queues = [queue for queue in queues if queue in taken]
            busy.append(taken)
        wakes: Iterable[Wake] = ()
        try:
            if queues:
                wakes = self._run(verb, queues)
        finally:
            with self._lock:
                busy.remove(taken)
                for wake in wakes:
                    self._await(wake)
                self._arm()
                self._idle.notify_all()

    def _await(self, wake: Wake) -> None:
        phase = self._phase_of.get((wake.verb, wake.queue))
        if phase is None:
            return
        turn = time.monotonic() + phase.trigger.seconds_to_next(_now())
        if wake.at < turn:
            self._wakes.set(wake.verb, wake.queue, wake.at)

    def _wake(self) -> None:
        with self._lock:
            due = self._wakes.take(time.monotonic())
            self._armed = None
            self._arm()
            # Not those that have left the configuration while their wake was to come.
            due = {verb: [q for q in due[verb] if (verb, q) in self._phase_of] for verb in due}
        for verb, queues in due.items():
            if queues:
                self._sweep(verb, queues)

    def _arm(self) -> None:
        """Have the wake job run when the earliest wake is due."""
        earliest = self._wakes.earliest()
        if earliest is None or earliest == self._armed or self._stopping:
            return
        # Never in the past: what is due already joins its neighbours at the next point.
        at = max(earliest, time.monotonic())
        at = math.ceil(at / WAKE_GRID_SECONDS) * WAKE_GRID_SECONDS
        moment = _now() + timedelta(seconds=at - time.monotonic())
        self._scheduler.modify_job(WAKE_JOB, next_run_time=moment)
        self._armed = earliest

    # --- the wall clock -------------------------------------------------------------------------

    def check_clock(self) -> float | None:
        """Re-arm everything if the wall clock was set; return by how many seconds it was.

        APScheduler lives on the wall clock, the queues on the monotonic one: after a step, or a
        suspend, the grids move with the wall clock, and every phase keeps its place.
        """
        jumped = self._watch.jump()
        if jumped is None:
            return None
        with self._lock:
            for cadence, phases in self._phases.items():
                for number, phase in enumerate(phases):
                    self._shift(_job_id(cadence, number), phase.trigger, jumped, phase.fired)
            for name, grid in ((BEAT_JOB, self._beat), *self._side.items()):
                self._shift(name, grid, jumped)
            self._armed = None
            self._arm()
        return jumped

    def _shift(self, name: str, grid: Grid, seconds: float, on_grid: bool = True) -> None:
        jumped = timedelta(seconds=seconds)
        grid.anchor += jumped
        job = self._scheduler.get_job(name)
        # A first run stands outside the grid: clocks are set just after a boot, too.
        at = grid.get_next_fire_time(None, _now()) if on_grid else job.next_run_time + jumped
        job.modify(next_run_time=at)


WAKE_JOB = "wake"
BEAT_JOB = "beat"


def _job_id(cadence: Cadence, number: int) -> str:
    return f"{cadence.verb}/{cadence.interval_seconds!r}/{number}"


def _now() -> datetime:
    return datetime.now(UTC)
