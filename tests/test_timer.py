"""The timer: points of a grid, phases, wakes, steps of the clock, and a scheduler that goes on.

Everything that is pure is tested with a clock in the test's hand; the scheduler's own behaviour
with real threads and short intervals, waiting for events.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from apscheduler.schedulers import SchedulerNotRunningError
from apscheduler.schedulers import base as scheduling
from conftest import wait_until
from hypothesis import given
from hypothesis import strategies as st

from emqtimerd import timer as timing
from emqtimerd.sweeper import Verb
from emqtimerd.timer import (
    MOST_PHASES,
    QUEUES_PER_PHASE,
    WAKE_RUNS,
    Cadence,
    ClockWatch,
    Grid,
    Timer,
    Wake,
    Wakes,
    phases_of,
)

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)

intervals = st.sampled_from([0.01, 0.25, 1.0, 1.7, 5.0, 30.0, 86_400.0])


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


# --- the grid -----------------------------------------------------------------------------------


@given(intervals, st.floats(-1e6, 1e8))
def test_the_next_point_is_the_first_one_after_now(interval: float, now: float) -> None:
    """It lies ahead, less than an interval away, and on the grid."""
    grid = Grid(interval, EPOCH)
    point = grid.get_next_fire_time(None, at(now))
    ahead = (point - at(now)).total_seconds()
    assert 0 < ahead <= interval + timing.POINT_SECONDS
    off = (point - EPOCH).total_seconds() % interval
    assert min(off, interval - off) < 1e-4
    assert grid.seconds_to_next(at(now)) == pytest.approx(ahead, abs=2e-6)


@given(intervals, st.floats(0, 1e7))
def test_however_late_it_is_asked_only_one_point_follows(interval: float, late: float) -> None:
    """Misfires: what was missed is gone, so nothing is ever listed or made up for."""
    grid = Grid(interval, EPOCH)
    now = at(late)
    assert grid.get_next_fire_time(EPOCH, now) == grid.get_next_fire_time(None, now) > now


@given(intervals, st.integers(0, 10_000), st.floats(-0.4e-3, 5e-3))
def test_no_point_is_fired_twice(interval: float, number: int, off: float) -> None:
    """Asked just before or just after a point, as a rounded fire time may be, the next is a whole
    interval away."""
    point = at(number * interval)
    grid = Grid(interval, EPOCH)
    following = grid.get_next_fire_time(point, point + timedelta(seconds=off))
    assert (following - point).total_seconds() == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize("step", [-3600.0, -1.0, 3600.0, 30 * 86_400.0])
def test_after_a_step_of_the_clock_the_next_point_is_near(step: float) -> None:
    """Clock jumps: a grid that is asked at another time of day answers for that one."""
    grid = Grid(10.0, EPOCH)
    fired = grid.get_next_fire_time(None, at(5))
    following = grid.get_next_fire_time(fired, at(5 + step))
    assert 0 < (following - at(5 + step)).total_seconds() <= 10.001


def test_how_long_ago_the_last_point_was() -> None:
    """Lateness is told from the grid itself, never negative."""
    grid = Grid(10.0, EPOCH)
    assert grid.seconds_past(at(23.5)) == pytest.approx(3.5)
    assert grid.seconds_past(at(19.9999)) == 0.0
    assert grid.seconds_to_next(at(23.5)) == pytest.approx(6.5)


# --- phases -------------------------------------------------------------------------------------

names = st.lists(st.text("abcdefgh-", min_size=1, max_size=8), unique=True, max_size=300)


@given(intervals, names)
def test_each_queue_is_in_exactly_one_phase(interval: float, queues: list[str]) -> None:
    """Whatever the interval, the phases together are the queues, each once."""
    phases = phases_of(interval, queues)
    assert Counter(queue for phase in phases for queue in phase) == Counter(queues)
    assert len(phases) & (len(phases) - 1) == 0


@given(intervals, names, st.text("xyz", min_size=1, max_size=8))
def test_a_queue_keeps_its_phase_when_another_comes(
    interval: float, queues: list[str], new: str
) -> None:
    """While the number of phases stays, nobody moves for a new queue."""
    before, after = phases_of(interval, queues), phases_of(interval, [*queues, new])
    if len(before) == len(after):
        assert [tuple(q for q in phase if q != new) for phase in after] == before


def test_one_queue_more_seldom_changes_the_number_of_phases() -> None:
    """From one queue to ten thousand, the number of phases changes a handful of times."""
    queues = [f"queue-{n}" for n in range(10_000)]
    counts = [len(phases_of(30.0, queues[:size])) for size in range(1, 10_001, 37)]
    assert sum(one != other for one, other in pairwise(counts)) <= 6


def test_ten_thousand_queues_a_second_are_a_few_dozen_even_phases() -> None:
    """No burst, and no more jobs of the scheduler than needed."""
    queues = [f"queue-{n}" for n in range(10_000)]
    sizes = [len(phase) for phase in phases_of(1.0, queues)]
    assert 10_000 / QUEUES_PER_PHASE <= len(sizes) <= 64
    assert max(sizes) < 1.25 * statistics.mean(sizes)


def test_a_long_interval_is_spread_and_a_short_one_is_not() -> None:
    """One moment for all: 200 queues of a minute share 64 phases, those of a second share one."""
    queues = [f"queue-{n}" for n in range(200)]
    assert len(phases_of(60.0, queues)) == MOST_PHASES
    assert len(phases_of(1.0, queues)) == 1
    assert phases_of(60.0, []) == [()]


# --- wakes --------------------------------------------------------------------------------------


def test_wakes_come_up_in_order_and_once() -> None:
    """What is due is taken away; what is not stays."""
    wakes = Wakes()
    assert wakes.earliest() is None
    wakes.set("promote", "a", 3.0)
    wakes.set("promote", "b", 1.0)
    wakes.set("stalled_check", "a", 2.0)
    assert wakes.earliest() == 1.0
    assert wakes.take(2.0) == {"promote": ["b"], "stalled_check": ["a"]}
    assert wakes.earliest() == 3.0
    assert wakes.take(2.9) == {"promote": [], "stalled_check": []}
    assert wakes.take(3.0) == {"promote": ["a"], "stalled_check": []}
    assert wakes.earliest() is None


orders = st.tuples(st.sampled_from("abcde"), st.integers(0, 20))


@given(st.lists(st.one_of(orders, st.integers(0, 20)), max_size=200))
def test_the_latest_word_on_a_queue_counts(steps: list[tuple[str, int] | int]) -> None:
    """A later wake replaces an earlier one, sooner or later than it: like a plain dictionary."""
    wakes, model = Wakes(), dict[str, float]()
    for step in steps:
        if isinstance(step, tuple):
            queue, moment = step
            wakes.set("promote", queue, moment)
            model[queue] = moment
        else:
            due = {queue for queue, moment in model.items() if moment <= step}
            taken = wakes.take(step)["promote"]
            assert set(taken) == due
            assert len(taken) == len(due)
            assert [model[queue] for queue in taken] == sorted(model[queue] for queue in due)
            model = {queue: moment for queue, moment in model.items() if queue not in due}
        assert wakes.earliest() == min(model.values(), default=None)


def test_a_head_that_changes_all_day_costs_no_memory() -> None:
    """Replaced wakes are thrown away before they outnumber the living."""
    wakes = Wakes()
    for moment in range(10_000):
        wakes.set("promote", "orders", float(moment))
    assert len(wakes._heap) < 100
    assert wakes.take(1e9)["promote"] == ["orders"]


# --- the watch ----------------------------------------------------------------------------------


class Clocks:
    """A wall clock and a monotonic one, in the test's hand."""

    def __init__(self) -> None:
        self.wall = 1_800_000_000.0
        self.monotonic = 100.0
        self.watch = ClockWatch(lambda: self.wall, lambda: self.monotonic)

    def pass_(self, seconds: float, step: float = 0.0) -> float | None:
        self.monotonic += seconds
        self.wall += seconds + step
        return self.watch.jump()


@pytest.mark.parametrize("step", [-3600.0, -0.6, 0.6, 3600.0, 1.8e9])
def test_a_step_of_the_wall_clock_is_noticed_once(step: float) -> None:
    """Clock jumps: forward (a suspend looks the same), backward, and from 1970 to today."""
    clocks = Clocks()
    assert clocks.pass_(0.5) is None
    assert clocks.pass_(0.5, step) == pytest.approx(step)
    assert clocks.pass_(0.5) is None


def test_slewing_and_stillness_are_no_steps() -> None:
    """A clock that is slewed moves 0.5 ms a second; a process that was stopped lost no clock."""
    clocks = Clocks()
    assert all(clocks.pass_(0.5, 0.000_25) is None for _ in range(10_000))
    assert clocks.pass_(600.0) is None


# --- the scheduler ------------------------------------------------------------------------------


class Record:
    """What a timer called and when; it can be told to answer with wakes, to block or to raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Verb, tuple[str, ...]]] = []
        self.wakes: Callable[[Verb, Sequence[str]], Iterable[Wake]] = lambda _verb, _queues: ()
        self.latenesses: list[float] = []
        self.points: list[float] = []
        """The points of their grid that the sweeps belong to, however late each one was."""
        self.skips: Counter[Verb] = Counter()
        self.beats: list[float] = []
        self.errors: list[BaseException] = []
        self.most_at_once: Counter[tuple[Verb, str]] = Counter()
        self._running: Counter[tuple[Verb, str]] = Counter()
        self._lock = threading.Lock()

    def run(self, verb: Verb, queues: Sequence[str]) -> Iterable[Wake]:
        mine = [(verb, queue) for queue in queues]
        with self._lock:
            self.calls.append((time.monotonic(), verb, tuple(queues)))
            self._running.update(mine)
            for each in mine:
                self.most_at_once[each] = max(self.most_at_once[each], self._running[each])
        try:
            return self.wakes(verb, queues)
        finally:
            with self._lock:
                self._running.subtract(mine)

    def late(self, _verb: Verb, seconds: float) -> None:
        self.points.append(time.monotonic() - seconds)
        self.latenesses.append(seconds)

    def swept(self) -> set[str]:
        """Every queue that was swept."""
        with self._lock:
            return {queue for _, _, queues in self.calls for queue in queues}

    def moments(self, queue: str, verb: Verb = "promote") -> list[float]:
        """When a queue was swept."""
        with self._lock:
            return [when for when, each, queues in self.calls if each == verb and queue in queues]


@pytest.fixture
def record() -> Record:
    return Record()


@pytest.fixture
def start(record: Record) -> Iterator[Callable[..., Timer]]:
    """Starts timers that call `record`, or another one; all are stopped with the test."""
    with ExitStack() as stack:

        def start(
            cadences: Mapping[Cadence, Sequence[str]] = {}, to: Record = record, **options: Any
        ) -> Timer:
            timer = Timer(
                to.run,
                on_lateness=to.late,
                on_skip=lambda verb: to.skips.update([verb]),
                on_beat=lambda: to.beats.append(time.monotonic()),
                on_error=to.errors.append,
                **{"beat_seconds": 0.1, **options},
            )
            timer.set_cadences(cadences)
            timer.start()
            stack.callback(_stop, timer)
            return timer

        yield start


def _stop(timer: Timer) -> None:
    timer.halt()
    timer.wait_idle(5.0)
    with suppress(SchedulerNotRunningError):
        timer.close()


def promote(interval: float) -> Cadence:
    return Cadence("promote", interval)


def off_grid(moments: Sequence[float], origin: float, interval: float) -> float:
    """How far the moments are from the points of a grid, at most."""
    return max(abs((each - origin + interval / 2) % interval - interval / 2) for each in moments)


def pace(moments: Sequence[float]) -> float:
    """The usual time between two sweeps: one or two are late on a machine that stands still."""
    return statistics.median(b - a for a, b in pairwise(moments))


def test_a_queue_is_swept_at_its_interval(
    start: Callable[..., Timer], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sweep comes at once, the others on a grid; each one says how late it began."""
    monkeypatch.setattr(timing, "FIRST_SWEEPS_SECONDS", 3600.0)
    start({promote(0.1): ["orders"], promote(7200.0): ["emails"]})
    wait_until(lambda: record.moments("emails"), "the first sweep of a queue with a long interval")
    wait_until(lambda: len(record.moments("orders")) >= 10, "ten sweeps")
    moments = record.moments("orders")
    assert pace(moments[1:]) == pytest.approx(0.1, abs=0.03)
    assert off_grid(record.points, record.points[0], 0.1) < 0.02
    # All but the first, and perhaps one that is just about to begin.
    assert len(moments) - 1 <= len(record.latenesses) <= len(record.moments("orders"))
    assert min(record.latenesses) >= 0


def test_first_sweeps_come_soon_and_spread(
    start: Callable[..., Timer], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First sweep soon: with an interval of a minute every queue is swept within seconds, and not
    all of them at one moment."""
    monkeypatch.setattr(timing, "FIRST_SWEEPS_SECONDS", 0.5)
    queues = [f"queue-{n}" for n in range(200)]
    begun = time.monotonic()
    start({promote(60.0): queues})
    wait_until(lambda: record.swept() == set(queues), "200 queues swept")
    assert max(len(swept) for _, _, swept in record.calls) <= 20
    assert 0.3 < record.calls[-1][0] - begun < 5


def test_replicas_are_not_in_step(start: Callable[..., Timer]) -> None:
    """All jobs share one instant: those that start together draw their own place on the
    interval."""
    records = [Record() for _ in range(8)]
    for each in records:
        start({promote(0.2): ["orders"]}, each)
    wait_until(lambda: all(each.points for each in records), "a turn of each")
    places = sorted(each.points[0] % 0.2 for each in records)
    # Eight draws leave nine tenths of the interval empty once in a million times.
    assert max(b - a for a, b in pairwise([*places, places[0] + 0.2])) < 0.18


def test_only_what_has_changed_is_touched(
    start: Callable[..., Timer], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload that changes one queue leaves the rhythm of the others alone."""
    # Whatever is laid out anew draws its place on the interval.
    drawn: list[float] = []
    monkeypatch.setattr(random, "uniform", lambda _, most: drawn.append(most) or most)  # type: ignore[func-returns-value]
    timer = start({promote(0.2): ["orders"], promote(30.0): ["emails"]})
    wait_until(lambda: len(record.moments("orders")) >= 2, "two sweeps")
    timer.set_cadences({promote(0.2): ["orders"], promote(20.0): ["emails"]})
    wait_until(lambda: len(record.moments("emails")) == 2, "the changed queue swept anew")
    timer.set_cadences({promote(0.2): ["orders"]})
    wait_until(lambda: len(record.points) >= 5, "five turns")
    # Only its sweeps have turns: the others' are the first on their intervals.
    assert off_grid(record.points, record.points[0], 0.2) < 0.02
    assert drawn == [0.2, 30.0, 20.0]
    assert len(record.moments("emails")) == 2


def test_a_queue_that_joins_is_swept_soon(
    start: Callable[..., Timer], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First sweep soon: also for a queue that a reload or a discovery adds to a long interval."""
    monkeypatch.setattr(timing, "FIRST_SWEEPS_SECONDS", 0.5)
    timer = start({promote(3600.0): ["one", "two", "three"]})
    wait_until(lambda: all(phase.fired for phase in timer._phase_of.values()), "first sweeps")
    calls = len(record.calls)
    timer.set_cadences({promote(3600.0): ["one", "two", "three", "joined"]})
    wait_until(lambda: record.moments("joined"), "the new queue swept")
    assert [queues for _, _, queues in record.calls[calls:]] == [("joined",)]


def test_a_queue_that_slows_down_is_swept_once_more(
    start: Callable[..., Timer], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue whose interval grows from a moment to an hour has a head that nobody awaits yet: one
    sweep at once finds it."""
    # Three or four of them have the same number of phases, so that none is laid out anew.
    slow = ["one", "two", "three"]
    monkeypatch.setattr(timing, "FIRST_SWEEPS_SECONDS", 0.5)
    timer = start({promote(3600.0): slow, promote(0.1): ["orders"]})
    wait_until(lambda: all(phase.fired for phase in timer._phase_of.values()), "first sweeps")
    phases = list(timer._phases[promote(3600.0)])
    due = time.monotonic() + 1.0
    record.wakes = lambda verb, _: [Wake(verb, "orders", due)] if time.monotonic() < due else []
    timer.set_cadences({promote(3600.0): [*slow, "orders"]})
    assert list(timer._phases[promote(3600.0)]) == phases
    moved = time.monotonic()
    wait_until(lambda: record.moments("orders")[-1] > max(due, moved), "the head's wake")


def test_a_removed_queue_is_left_alone(start: Callable[..., Timer], record: Record) -> None:
    """Neither its turn nor its wake comes any more."""
    due = time.monotonic() + 1.0
    record.wakes = lambda verb, _: [Wake(verb, "gone", due)]
    timer = start({promote(30.0): ["gone"], promote(0.1): ["orders"]})
    wait_until(lambda: record.moments("gone"), "the first sweep")
    timer.set_cadences({promote(0.1): ["orders"]})
    wait_until(lambda: record.moments("orders")[-1:] > [due + 0.2], "the time of its wake to pass")
    assert len(record.moments("gone")) == 1


def test_intervals_that_look_alike_are_told_apart(
    start: Callable[..., Timer], record: Record
) -> None:
    """Two intervals that differ in the seventh digit are two cadences."""
    timer = start({promote(1234.5678): ["a"], promote(1234.5679): ["b"]})
    wait_until(lambda: record.moments("a") and record.moments("b"), "both queues swept")
    timer.set_cadences({promote(1234.5679): ["b"]})
    timer.set_cadences({})


def test_a_slow_round_never_overlaps_itself(start: Callable[..., Timer], record: Record) -> None:
    """Overrun: on a fixed grid the points that a round sleeps through are left out and counted,
    and no queue is swept twice at one time, by turns or by wakes."""
    wake_at_once = [Wake("promote", "orders", 0.0)]

    def slow(_verb: Verb, _queues: Sequence[str]) -> list[Wake]:
        time.sleep(0.25)
        return wake_at_once

    record.wakes = slow
    start({promote(0.1): ["orders", "emails"]})
    wait_until(lambda: len(record.moments("orders")) >= 5, "five sweeps")
    assert max(record.most_at_once.values()) == 1
    assert record.skips["promote"] > 0


def test_after_an_overrun_the_next_point_counts(
    start: Callable[..., Timer], record: Record
) -> None:
    """Overrun: the sweep after a slow one comes with the next point, and each point that was slept
    through is one skip."""
    release = threading.Event()
    hold = iter([True])

    def slow_once(_verb: Verb, _queues: Sequence[str]) -> tuple[()]:
        if next(hold, False):
            release.wait(10)
        return ()

    def next_point() -> float:
        (phase,) = (job for job in timer._scheduler.get_jobs() if job.func == timer._fire)
        return float(phase.next_run_time.timestamp())

    record.wakes = slow_once
    timer = start({promote(0.1): ["orders"]})
    wait_until(lambda: record.calls, "the sweep that is slow")
    first = next_point()
    wait_until(
        lambda: record.skips["promote"] == round((next_point() - first) / 0.1) >= 5,
        "each point slept through is a skip",
    )
    assert len(record.calls) == 1
    release.set()
    freed, skipped = time.monotonic(), record.skips["promote"]
    wait_until(lambda: len(record.calls) >= 3, "the sweeps to go on")
    # The next point is 0.1 s away, and a machine may stand still for a moment.
    assert record.calls[1][0] - freed < 1
    assert record.skips["promote"] - skipped <= 1


def test_a_wake_comes_when_it_is_due(start: Callable[..., Timer], record: Record) -> None:
    """A queue that comes due between its turns is swept then: never early, a few ms late."""
    lates: list[float] = []
    due = 0.0

    def again(_verb: Verb, _queues: Sequence[str]) -> list[Wake]:
        nonlocal due
        if due:
            lates.append(time.monotonic() - due)
        due = time.monotonic() + 0.03
        return [Wake("promote", "orders", due)]

    record.wakes = again
    start({promote(3600.0): ["orders"]})
    wait_until(lambda: len(lates) >= 30, "thirty wakes")
    assert min(lates) >= 0
    # A machine with more to do than it has cores makes any thread wait for its turn.
    free = os.getloadavg()[0] < (os.cpu_count() or 1)
    assert sorted(lates)[len(lates) // 4] < (0.010 if free else 1.0)


def test_a_backlog_goes_on_at_once(start: Callable[..., Timer], record: Record) -> None:
    """A wake that is due already runs now, not at the next turn."""
    left = iter(range(20))

    def backlog(_verb: Verb, _queues: Sequence[str]) -> list[Wake]:
        return [Wake("promote", "orders", time.monotonic())] if next(left, None) is not None else []

    record.wakes = backlog
    begun = time.monotonic()
    start({promote(3600.0): ["orders"]})
    wait_until(lambda: len(record.calls) == 21, "the backlog's sweeps")
    assert time.monotonic() - begun < 2


def test_a_wake_is_only_for_before_the_next_turn(
    start: Callable[..., Timer], record: Record
) -> None:
    """What its turn would sweep anyway, and what nobody knows, is not woken for."""
    record.wakes = lambda verb, queues: [
        Wake(verb, queues[0], time.monotonic() + 0.5),
        Wake("stalled_check", queues[0], time.monotonic()),
        Wake(verb, "unknown", time.monotonic()),
    ]
    timer = start({promote(0.1): ["orders"]})
    wait_until(lambda: len(record.calls) >= 4, "four sweeps")
    assert timer._wakes.earliest() is None
    assert {(verb, queues) for _, verb, queues in record.calls} == {("promote", ("orders",))}


def test_wakes_go_on_after_a_server_was_slow(
    start: Callable[..., Timer], record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When as many wakes wait for a server as may wait, the others come as soon as one is back."""
    queues = [f"queue-{n}" for n in range(WAKE_RUNS + 3)]
    monkeypatch.setattr(timing, "phases_of", lambda _, queues: [tuple(queues)])
    release = threading.Event()

    def stuck(verb: Verb, swept: Sequence[str]) -> list[Wake]:
        if len(swept) == len(queues):
            # The first sweep of all; then each comes due alone, a little after the one before.
            now = time.monotonic()
            return [Wake(verb, queue, now + 0.05 * n) for n, queue in enumerate(swept, 1)]
        release.wait(10)
        return []

    record.wakes = stuck
    timer = start({promote(3600.0): queues})
    wait_until(lambda: len(record.calls) == 1 + WAKE_RUNS, "every wake run stuck")
    overdue = time.monotonic() + 0.05 * 5
    wait_until(lambda: time.monotonic() > overdue, "the other wakes to be overdue")
    assert timer._wakes.earliest() is not None
    release.set()
    wait_until(lambda: {q for _, _, s in record.calls[1:] for q in s} == set(queues), "all wakes")


def test_a_round_that_raises_is_told_and_the_next_one_comes(
    start: Callable[..., Timer], record: Record
) -> None:
    """Loop dies on one failure: whatever a round raises, its next turn comes."""
    errors = iter([ValueError("a"), KeyError("b"), RecursionError("c")])

    def raise_(_verb: Verb, _queues: Sequence[str]) -> tuple[()]:
        if error := next(errors, None):
            raise error
        return ()

    record.wakes = raise_
    start({promote(0.05): ["orders"]})
    wait_until(lambda: len(record.calls) >= 5, "sweeps after the errors")
    assert [type(error) for error in record.errors] == [ValueError, KeyError, RecursionError]


def test_wakes_that_cannot_be_read_leave_the_queue_free(
    start: Callable[..., Timer], record: Record
) -> None:
    """Also what fails after a round does not keep its queues busy for ever."""

    def broken(_verb: Verb, _queues: Sequence[str]) -> Iterator[Wake]:
        yield from ()
        raise ValueError("while the wakes were read")

    record.wakes = broken
    start({promote(0.05): ["orders"]})
    wait_until(lambda: len(record.calls) >= 3, "further sweeps")


def test_a_halt_lets_running_rounds_end_and_starts_no_other(
    start: Callable[..., Timer], record: Record
) -> None:
    """SIGTERM in mid-sweep: what runs is finished, and named until then; what waits does not
    begin. The beat goes on meanwhile."""
    begun, release = threading.Event(), threading.Event()

    def slow(_verb: Verb, _queues: Sequence[str]) -> tuple[()]:
        begun.set()
        release.wait(10)
        return ()

    record.wakes = slow
    timer = start(
        {promote(0.05): ["orders", "emails"], Cadence("stalled_check", 0.05): ["orders"]},
        beat_seconds=0.05,
    )
    assert begun.wait(10)
    wait_until(lambda: len(record.calls) == 2, "a round of each verb")
    timer.halt()
    assert not timer.wait_idle(0)
    assert timer.running() == {"promote": {"emails", "orders"}, "stalled_check": {"orders"}}
    beats = len(record.beats)
    wait_until(lambda: len(record.beats) > beats + 2, "further beats")
    threading.Timer(0.1, release.set).start()
    assert timer.wait_idle(5.0)
    assert timer.running() == {}
    assert release.is_set()
    assert len(record.calls) == 2


def test_a_closed_timer_waits_for_nobody(start: Callable[..., Timer], record: Record) -> None:
    """Rounds that hang are left to their own deadlines; turns that wait for a thread, and wakes
    that were to come, find nothing to do and count nowhere."""
    release = threading.Event()

    def slow(verb: Verb, queues: Sequence[str]) -> list[Wake]:
        release.wait(10)
        return [Wake(verb, queue, 0.0) for queue in queues]

    record.wakes = slow
    timer = start({promote(0.05 + n / 1000): [f"queue-{n}"] for n in range(12)})
    wait_until(lambda: len(record.calls) == timing.ROUND_THREADS, "all threads waiting")
    late = len(record.latenesses)
    try:
        asked = time.monotonic()
        timer.close()
        assert time.monotonic() - asked < 5
        assert not timer.is_alive()
    finally:
        release.set()
    assert timer.wait_idle(5.0)
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("emqtimerd-round")],
        "the threads to end",
    )
    assert len(record.calls) == timing.ROUND_THREADS
    assert len(record.latenesses) == late


def test_nothing_is_left_after_a_stop(start: Callable[..., Timer], record: Record) -> None:
    """The scheduler's thread and the pool's are gone."""
    before = set(threading.enumerate())
    timer = start({promote(0.02): ["orders"]})
    wait_until(lambda: len(record.calls) > 3, "sweeps")
    timer.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "the threads to end")


def test_the_beat_goes_on_while_every_thread_waits(
    start: Callable[..., Timer], record: Record
) -> None:
    """Watchdog: a black hole that holds all rounds does not stop the sign of life."""
    release = threading.Event()

    def slow(_verb: Verb, _queues: Sequence[str]) -> tuple[()]:
        release.wait(10)
        return ()

    record.wakes = slow
    cadences = {promote(1.0 + n / 10): [f"queue-{n}"] for n in range(20)}
    start(cadences, beat_seconds=0.05)
    try:
        wait_until(lambda: len(record.calls) == timing.ROUND_THREADS, "all threads waiting")
        beats = len(record.beats)
        wait_until(lambda: len(record.beats) >= beats + 5, "further beats")
    finally:
        release.set()
    wait_until(lambda: len(record.swept()) == 20, "every queue swept")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_scheduler_is_noticed(start: Callable[..., Timer], record: Record) -> None:
    """The thread that decides when is asked whether it lives."""
    timer = start({promote(0.05): ["orders"]})
    assert timer.is_alive()

    def die() -> float:
        raise SystemExit

    timer._scheduler._process_jobs = die
    wait_until(lambda: not timer.is_alive(), "the thread's death noticed")


# --- the wall clock -----------------------------------------------------------------------------


class Wall:
    """A wall clock that can be set, for the timer and the scheduler alike."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:
        return time.time() + self.offset


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=wall.offset)

    monkeypatch.setattr(timing, "datetime", Shifted)
    monkeypatch.setattr(scheduling, "datetime", Shifted)
    monkeypatch.setattr(timing, "ClockWatch", lambda: ClockWatch(wall.time))
    return wall


@pytest.mark.parametrize("step", [-3600.0, 3600.0, 30 * 86_400.0, -50 * 365 * 86_400.0])
def test_sweeps_keep_their_rhythm_when_the_clock_is_set(
    start: Callable[..., Timer], record: Record, wall: Wall, step: float
) -> None:
    """Clock jumps: cadences, wakes and beats go on, with at most one sweep too many."""
    due = time.monotonic() + 1.0
    record.wakes = lambda verb, queues: (
        [Wake(verb, "late", due)] if "late" in queues and time.monotonic() < due else ()
    )
    timer = start({promote(0.1): ["orders"], promote(3600.0): ["late"]})
    wait_until(lambda: len(record.moments("orders")) >= 3, "sweeps before the step")
    assert timer.check_clock() is None
    wall.offset = step
    stepped = time.monotonic()
    before = len(record.moments("orders"))
    assert timer.check_clock() == pytest.approx(step, abs=0.1)
    assert timer.check_clock() is None
    wait_until(lambda: len(record.moments("orders")) >= before + 8, "sweeps after the step")
    beats = len(record.beats)
    wait_until(lambda: len(record.beats) >= beats + 3, "beats after the step")
    wait_until(lambda: record.moments("late")[-1] >= due, "the wake", timeout=3)
    since = [moment for moment in record.moments("orders") if moment > stepped]
    assert since[7] - stepped > 0.55
    assert pace(since) == pytest.approx(0.1, abs=0.03)
    assert off_grid(record.points, record.points[0], 0.1) < 0.02
    assert len(record.moments("late")) <= 3


def test_side_work_goes_on_when_the_clock_is_set(start: Callable[..., Timer], wall: Wall) -> None:
    """Clock jumps: an hour back does not stop discovery, or the upkeep of nodes, for an hour."""
    timer, done = start(), Counter[str]()
    timer.set_side_job("work", lambda: done.update(["work"]), 0.05)
    wait_until(lambda: done["work"] >= 2, "the work before the step")
    wall.offset = -3600.0
    timer.check_clock()
    before = done["work"]
    wait_until(lambda: done["work"] >= before + 3, "the work after the step", timeout=3)


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_first_sweep_is_not_put_off_by_a_step(
    start: Callable[..., Timer],
    record: Record,
    wall: Wall,
    monkeypatch: pytest.MonkeyPatch,
    step: float,
) -> None:
    """Clocks are set just after a boot, when a daemon has just started: its first sweeps still
    come soon, and not an interval later."""
    monkeypatch.setattr(timing, "FIRST_SWEEPS_SECONDS", 1.0)
    queues = [f"queue-{n}" for n in range(100)]
    timer = start({promote(3600.0): queues})
    wait_until(lambda: record.calls, "the first sweeps")
    wall.offset = step
    timer.check_clock()
    wait_until(lambda: record.swept() == set(queues), "all first sweeps", timeout=3)
