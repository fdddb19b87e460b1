"""The ledger: what rounds report is what readers find, and health follows from work done."""

import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter

import pytest

from emqtimerd.ledger import Ledger
from emqtimerd.node import Identity
from emqtimerd.sweeper import Blocked, Expiry, Failure, Round, SweepResult

NODE = "127.0.0.1:6379"


class Clock:
    """A monotonic clock in the test's hand, and a wall clock that goes with it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    """A ledger with one node and two queues, nothing swept."""
    ledger = Ledger(monotonic=clock, wall=clock.wall)
    ledger.set_nodes([NODE])
    ledger.set_queues(["orders", "emails"])
    return ledger


def identity(run_id: str = "a" * 40) -> Identity:
    return Identity(run_id, "9.1.2", "echomq:6.0.0", ("promote", "stalled.check"), 0.0)


def names(ledger: Ledger) -> list[str]:
    return [queue.name for queue in ledger.queues()]


def orders(ledger: Ledger) -> object:
    """Everything that is known of the queue `orders`."""
    (queue,) = (queue for queue in ledger.queues() if queue.name == "orders")
    return queue


# --- queues -------------------------------------------------------------------------------------


def test_a_queue_that_leaves_is_forgotten_at_once_and_its_late_results_are_too(
    ledger: Ledger,
) -> None:
    """Nothing brings a queue back but its configuration."""
    ledger.set_queues(["emails"])
    ledger.record("promote", [SweepResult("orders", "promote", passes=1, promoted=7)], 0.1)
    assert names(ledger) == ["emails"]
    assert ledger.overview().queues == 1
    assert ledger.overview().lateness["promote"].cumulative[-1] == 0


def test_a_queue_that_comes_back_starts_at_zero(ledger: Ledger) -> None:
    """The time between is not known, so nothing is carried over it."""
    ledger.record("promote", [SweepResult("orders", "promote", passes=1, promoted=7)], 0.1)
    ledger.set_queues(["emails"])
    ledger.set_queues(["emails", "orders"])
    assert [queue.promoted for queue in ledger.queues()] == [0, 0]


def test_a_queue_that_stays_keeps_its_counts(ledger: Ledger) -> None:
    """Counters go on across fifty reloads."""
    for _ in range(50):
        ledger.record("promote", [SweepResult("orders", "promote", passes=1, promoted=7)], 0.1)
        ledger.set_queues(["orders", "new"])
    assert {queue.name: queue.promoted for queue in ledger.queues()} == {"orders": 350, "new": 0}


def test_ten_thousand_queues_one_after_another_leave_nothing_behind(ledger: Ledger) -> None:
    """Discovered and dropped queues do not pile up."""
    for number in range(10_000):
        name = f"q{number}"
        ledger.set_queues([name])
        ledger.record("promote", [SweepResult(name, "promote", passes=1)], 0.1)
        ledger.set_queues([])
    assert ledger.queues() == []


def test_a_copy_is_not_touched_by_later_rounds(ledger: Ledger) -> None:
    """Readers look at one instant."""
    before = orders(ledger)
    failed = SweepResult("orders", "promote", promoted=1, failure=Failure("ERR", "ERR no"))
    ledger.record("promote", [failed], 0.1)
    assert before != orders(ledger)
    ledger.set_queues(["fresh"])
    assert before != ledger.queues()[0]


# --- results ------------------------------------------------------------------------------------


def test_a_result_counts_what_moved_and_why(ledger: Ledger, clock: Clock) -> None:
    """Counts, causes, gauges and times all land in their place."""
    expiries = [
        Expiry(b"JOB1", "restart"),
        Expiry(b"JOB2", "stall"),
        Expiry(b"JOB3", "stall"),
        Expiry(b"JOB4", "unstamped"),
        Expiry(b"JOB5", "unattributed"),
    ]
    check = SweepResult(
        "orders",
        "stalled_check",
        NODE,
        passes=2,
        recovered=[b"JOB1", b"JOB2", b"JOB4"],
        dead=[b"JOB3", b"JOB5"],
        expiries=expiries,
        lateness_ms=[1_500.0],
        finished_at=1_234.5,
        jobs=(1, 2, 3, 4),
        leases=(5, 6, 7),
    )
    ledger.record("stalled_check", [check], 0.2)
    promotion = SweepResult(
        "orders", "promote", NODE, passes=3, promoted=250, lateness_ms=[7.0, 3.0], finished_at=99.5
    )
    ledger.record("promote", [promotion], 0.1)
    queue = ledger.queues()[0]
    assert (queue.promoted, queue.recovered, queue.dead_lettered) == (250, 3, 2)
    assert (queue.restart, queue.stall, queue.unstamped, queue.unattributed) == (1, 2, 1, 1)
    assert (queue.jobs, queue.leases, queue.node) == ((1, 2, 3, 4), (5, 6, 7), NODE)
    assert (queue.promote.ok, queue.promote.last_sweep) == (3, 99.5)
    assert (queue.stalled_check.ok, queue.stalled_check.last_sweep) == (2, 1_234.5)
    assert queue.promote.lateness_seconds == 0.007
    overview = ledger.overview()
    assert overview.lateness["promote"].cumulative[-1] == 2
    assert overview.lateness["promote"].sum_seconds == pytest.approx(0.010)
    assert overview.lateness["stalled_check"].sum_seconds == pytest.approx(1.5)
    assert overview.rounds["promote"].sum_seconds == pytest.approx(0.1)


def test_a_value_on_a_bound_counts_under_it(ledger: Ledger) -> None:
    """Prometheus' buckets hold what is less than or equal to their bound."""
    moved = SweepResult("orders", "promote", passes=1, promoted=1, lateness_ms=[5.0])
    ledger.record("promote", [moved], 0.1)
    lateness = ledger.overview().lateness["promote"]
    assert lateness.cumulative[lateness.bounds.index(0.005)] == 1
    assert lateness.cumulative[lateness.bounds.index(0.0025)] == 0


FAILURE = Failure("NOPERM", "NOPERM no")

OUTCOMES = {
    "quiet": (SweepResult("orders", "promote", passes=1), (1, 0, 0), {}),
    "drained": (SweepResult("orders", "promote", passes=4, promoted=400), (4, 0, 0), {}),
    "failed": (SweepResult("orders", "promote", failure=FAILURE), (0, 1, 0), {"NOPERM": 1}),
    "failed later": (
        SweepResult("orders", "promote", passes=2, promoted=9, failure=FAILURE),
        (2, 1, 0),
        {"NOPERM": 1},
    ),
    "blocked": (
        SweepResult("orders", "promote", blocked=Blocked(b"JOB1", "EMQSTATE")),
        (0, 1, 0),
        {"EMQSTATE": 1},
    ),
    "blocked by another type": (
        SweepResult("orders", "promote", blocked=Blocked(b"JOB1", "WRONGTYPE Operation")),
        (0, 1, 0),
        {"WRONGTYPE": 1},
    ),
    "unknown": (
        SweepResult("orders", "promote", unknown=1, failure=Failure("timeout", "late")),
        (0, 0, 1),
        {"timeout": 1},
    ),
    "an odd code": (
        SweepResult("orders", "promote", failure=Failure("DONTPANIC", "DONTPANIC 42")),
        (0, 1, 0),
        {"other": 1},
    ),
    "backing off": (
        SweepResult("orders", "promote", skipped=True, failure=Failure("connection", "no")),
        (0, 0, 0),
        {},
    ),
    "no time": (SweepResult("orders", "promote", skipped=True), (0, 0, 0), {}),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_each_outcome_is_counted_once(ledger: Ledger, case: str) -> None:
    """What was answered, refused or lost is told apart; what was not sent counts nowhere."""
    result, counts, errors = OUTCOMES[case]
    ledger.record("promote", [result], 0.1)
    facts = ledger.queues()[0].promote
    assert (facts.ok, facts.error, facts.unknown) == counts
    assert dict(facts.errors) == errors


def test_a_block_lasts_until_a_sweep_succeeds(ledger: Ledger) -> None:
    """A failure in between says nothing about the row."""
    blocked = Blocked(b"JOB1", "EMQSTATE lane row, not native")
    ledger.record("promote", [SweepResult("orders", "promote", blocked=blocked)], 0.1)
    assert ledger.queues()[0].promote.blocked == blocked
    ledger.record("promote", [SweepResult("orders", "promote", failure=FAILURE)], 0.1)
    assert ledger.queues()[0].promote.blocked == blocked
    assert ledger.queues()[0].promote.failure == FAILURE
    ledger.record("promote", [SweepResult("orders", "promote", passes=1)], 0.1)
    facts = ledger.queues()[0].promote
    assert (facts.blocked, facts.failure) == (None, None)
    assert ledger.queues()[0].stalled_check.ok == 0


def test_a_sweep_that_moved_the_prefix_is_still_blocked(ledger: Ledger) -> None:
    """Progress before the row does not hide the row."""
    blocked = Blocked(b"JOB1", "EMQSTATE")
    result = SweepResult("orders", "promote", passes=2, promoted=60, blocked=blocked)
    ledger.record("promote", [result], 0.1)
    facts = ledger.queues()[0].promote
    assert (facts.blocked, facts.ok, facts.error) == (blocked, 2, 1)


def test_what_a_former_node_did_counts_and_says_nothing(ledger: Ledger, clock: Clock) -> None:
    """A round that ends after its nodes were replaced: its moves, its errors and its time are
    counted; last sweep, due head, block, failure, sizes and readiness stay as they are."""
    before = ledger.queues(["orders"])[0]
    moved = SweepResult(
        "orders",
        "stalled_check",
        NODE,
        passes=1,
        recovered=[b"JOB1"],
        expiries=[Expiry(b"JOB1", "restart")],
        lateness_ms=[1_500.0],
        finished_at=1_234.5,
        jobs=(1, 2, 3, 4),
        leases=(5, 6, 7),
        failure=FAILURE,
        unknown=1,
    )
    blocked = SweepResult("emails", "stalled_check", NODE, blocked=Blocked(b"JOB2", "EMQSTATE"))
    gone = SweepResult("gone", "stalled_check", NODE, passes=1, recovered=[b"JOB3"])
    done = Round([moved, blocked, gone], ["orders", "gone"], 1_234.5)
    ledger.record_former("stalled_check", done, 7.0)
    orders, emails = ledger.queues()
    assert (orders.recovered, orders.restart) == (1, 1)
    facts = orders.stalled_check
    assert (facts.ok, facts.error, facts.unknown, facts.errors) == (2, 0, 1, {"NOPERM": 1})
    assert (emails.stalled_check.error, emails.stalled_check.errors) == (1, {"EMQSTATE": 1})
    for queue in (orders, emails):
        facts = queue.stalled_check
        assert (facts.last_sweep, facts.due, facts.blocked, facts.failure) == (0, None, None, None)
        assert (queue.jobs, queue.leases, queue.node) == (before.jobs, before.leases, "")
    overview = ledger.overview()
    assert overview.lateness["stalled_check"].sum_seconds == 1.5
    assert overview.rounds["stalled_check"].sum_seconds == 7.0
    ledger.node_seen(NODE, identity())
    ledger.expect({"stalled_check": 30.0})
    assert "no queue has been swept yet" in ledger.health().reasons[0]
    assert "last fault" not in ledger.status()


# --- overdue ------------------------------------------------------------------------------------


def overdue(ledger: Ledger) -> float:
    return ledger.queues()[0].overdue_seconds(ledger.overview().now)


def test_overdue_grows_from_the_instant_the_head_came_due(ledger: Ledger, clock: Clock) -> None:
    """Until then it is zero, and a sweep that leaves nothing due ends it."""
    due = SweepResult("orders", "promote", passes=1, next_due=clock.now + 5)
    ledger.record("promote", [due], 0.1)
    assert overdue(ledger) == 0
    clock.now += 7
    assert overdue(ledger) == pytest.approx(2)
    ledger.record("promote", [SweepResult("orders", "promote", failure=FAILURE)], 0.1)
    clock.now += 1
    assert overdue(ledger) == pytest.approx(3)
    ledger.record("promote", [SweepResult("orders", "promote", passes=1, promoted=1)], 0.1)
    assert overdue(ledger) == 0


def test_a_blocked_queue_is_overdue_from_when_it_was_first_seen_so(
    ledger: Ledger, clock: Clock
) -> None:
    """Round after round refuses; the clock goes on."""
    blocked = SweepResult("orders", "promote", blocked=Blocked(b"JOB1", "EMQSTATE"))
    for _ in range(3):
        ledger.record("promote", [blocked], 0.1)
        clock.now += 10
    assert overdue(ledger) == pytest.approx(30)


@pytest.mark.parametrize("how", ["blocked", "backlog"])
def test_a_head_that_was_left_is_as_overdue_as_the_sweep_saw(
    ledger: Ledger, clock: Clock, how: str
) -> None:
    """A daemon that has just started does not say that an old trouble is a new one."""
    left = SweepResult("orders", "promote", overdue_ms=3_600_000.0)
    if how == "blocked":
        left.blocked = Blocked(b"JOB1", "EMQSTATE")
    else:
        left.passes, left.lateness_ms, left.backlog = 2, [3_900_000.0], True
    ledger.record("promote", [left], 0.1)
    clock.now += 1
    assert overdue(ledger) == pytest.approx(3_601)


def test_a_backlog_is_as_overdue_as_its_last_pass_was(ledger: Ledger, clock: Clock) -> None:
    """The round ended before the queue did."""
    left = SweepResult(
        "orders", "promote", passes=2, promoted=200, lateness_ms=[9_000.0, 8_000.0], backlog=True
    )
    ledger.record("promote", [left], 0.1)
    clock.now += 1
    assert overdue(ledger) == pytest.approx(9)


def test_a_queue_that_somebody_else_emptied_is_not_overdue(ledger: Ledger, clock: Clock) -> None:
    """Another replica promotes the job that this one awaited: the next round finds nothing, and its
    sweep counts like any other."""
    due = SweepResult("orders", "promote", passes=1, next_due=clock.now + 5, finished_at=90.0)
    ledger.record("promote", [due], 0.1)
    clock.now += 7
    assert overdue(ledger) == pytest.approx(2)
    ledger.record_quiet("promote", ["orders", "gone"], 99.0)
    facts = ledger.queues()[0].promote
    assert (overdue(ledger), facts.due) == (0, None)
    assert (facts.ok, facts.last_sweep) == (2, 99.0)


def test_what_is_left_after_one_pass_that_moved_nothing_is_overdue(
    ledger: Ledger, clock: Clock
) -> None:
    """A page of ghosts, and then the round was over."""
    ledger.record("promote", [SweepResult("orders", "promote", passes=1, backlog=True)], 0.1)
    clock.now += 3
    assert overdue(ledger) == pytest.approx(3)


# --- nodes --------------------------------------------------------------------------------------


def test_another_run_id_is_a_restart_and_the_same_is_not(ledger: Ledger) -> None:
    """Reconnections, downs and a hidden run_id are no restarts."""
    ledger.node_seen(NODE, identity("a" * 40))
    ledger.node_seen(NODE, identity("a" * 40))
    ledger.node_down(NODE, "connection refused")
    ledger.node_seen(NODE, identity("a" * 40))
    ledger.node_seen(NODE, identity(""))
    assert ledger.overview().nodes[0].restarts == 0


def test_restarts_add_up(ledger: Ledger) -> None:
    """Each change of the process counts one."""
    for run_id in "abca":
        ledger.node_seen(NODE, identity(run_id * 40))
    node = ledger.overview().nodes[0]
    assert (node.restarts, node.up) == (3, True)


def test_a_node_that_left_does_not_come_back_by_itself(ledger: Ledger) -> None:
    """A late connection to the old address is not a node of this configuration."""
    ledger.set_nodes(["other:6379"])
    ledger.node_seen(NODE, identity())
    ledger.node_down(NODE)
    assert [node.name for node in ledger.overview().nodes] == ["other:6379"]


STATE = SweepResult(
    "orders",
    "promote",
    NODE,
    passes=1,
    promoted=3,
    jobs=(1, 2, 3, 4),
    leases=(5, 6, 7),
    finished_at=1_234.5,
    blocked=Blocked(b"JOB1", "EMQSTATE"),
)


def test_what_a_node_said_of_its_queues_goes_with_it(ledger: Ledger, clock: Clock) -> None:
    """A reload leads to another node: until that one says something, nothing is known of the
    queues. What was counted stays, and when it was."""
    failed = SweepResult("emails", "promote", NODE, failure=FAILURE)
    ledger.record("promote", [STATE, failed], 0.1)
    ledger.guard("orders", raised=True)
    ledger.set_nodes(["other:6379"])
    queue, emails = ledger.queues()
    assert (emails.promote.failure, emails.promote.error) == (None, 1)
    assert (queue.jobs, queue.leases, queue.guarded, queue.node) == ((0,) * 4, (0,) * 3, None, "")
    assert (queue.promote.blocked, queue.promote.due) == (None, None)
    assert (queue.promoted, queue.promote.ok, queue.promote.error) == (3, 1, 1)
    assert queue.promote.last_sweep == 1_234.5
    ledger.node_seen("other:6379", identity())
    ledger.expect({"promote": 1.0})
    assert "no queue has been swept yet" in ledger.health().reasons[0]


@pytest.mark.parametrize("heirs", [{}, {"heir:6379": NODE}])
def test_a_node_that_stays_or_has_an_heir_keeps_what_it_said(
    ledger: Ledger, heirs: dict[str, str]
) -> None:
    """Another password for the same server, or a failover: the queues stand as they stood."""
    ledger.record("promote", [STATE], 0.1)
    names = [*heirs, "more:6379"] if heirs else [NODE, "more:6379"]
    ledger.set_nodes(names, heirs)
    queue = ledger.queues()[0]
    assert (queue.jobs, queue.promote.blocked) == (STATE.jobs, STATE.blocked)


def test_a_restart_behind_a_hidden_run_id_is_one(ledger: Ledger) -> None:
    """An ACL hid INFO while the server was restarted: two processes were known, so it counts."""
    for run_id in ("a", "", "", "b", "", "b"):
        ledger.node_seen(NODE, identity(run_id * 40))
    node = ledger.overview().nodes[0]
    assert node.restarts == 1
    ledger.set_nodes(["heir"], {"heir": NODE})
    ledger.node_seen("heir", identity("c" * 40))
    assert ledger.overview().nodes[0].restarts == 2


# --- health -------------------------------------------------------------------------------------


@pytest.fixture
def working(ledger: Ledger, clock: Clock) -> Callable[..., None]:
    """Reaches the node, and lets both verbs succeed now (or the named ones)."""
    ledger.expect({"promote": 1.0, "stalled_check": 30.0})

    def work(*verbs: str) -> None:
        ledger.beat()
        ledger.node_seen(NODE, identity())
        for verb in verbs or ("promote", "stalled_check"):
            assert verb in ("promote", "stalled_check")
            ledger.record(verb, [SweepResult("orders", verb, passes=1)], 0.1)  # type: ignore[arg-type]

    return work


def test_ready_needs_the_fence_and_a_round(ledger: Ledger, clock: Clock) -> None:
    """The reasons say what is missing, one after the other."""
    ledger.expect({"promote": 1.0, "stalled_check": 30.0})
    assert ledger.health().reasons == (f"node {NODE} is not reached yet",)
    ledger.node_seen(NODE, identity())
    assert "swept yet" in ledger.health().reasons[0]
    ledger.record("promote", [SweepResult("orders", "promote", passes=1)], 0.1)
    assert ledger.health().ready
    assert ledger.health().reasons == ()


def test_reloads_give_no_more_time(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """Who is told the same intervals again and again still loses patience with the rounds."""
    working()
    for _ in range(30):
        clock.now += 1
        ledger.beat()
        ledger.expect({"promote": 1.0, "stalled_check": 30.0})
    assert "promote last succeeded 30 s ago" in ledger.health().reasons[0]
    ledger.expect({"promote": 2.0, "stalled_check": 30.0})
    assert ledger.health().ready


def test_a_node_that_goes_down_takes_readiness_but_not_life(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """Ten minutes of outage: alive all along, ready again with the first round after it."""
    working()
    ledger.node_down(NODE, "cannot connect (Connection refused)")
    for _ in range(600):
        clock.now += 1
        ledger.beat()
        health = ledger.health()
        assert health.alive
        assert not health.ready
    assert health.reasons == (
        f"node {NODE} is down for 600 s: cannot connect (Connection refused)",
    )
    working("promote")
    assert ledger.health().ready, "the stall check has its interval to come"


def test_a_verb_whose_rounds_stay_away_takes_readiness(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """Each verb is measured by its own interval."""
    working()
    for _ in range(95):
        clock.now += 1
        working("promote")
    (reason,) = ledger.health().reasons
    assert reason == "stalled_check last succeeded 95 s ago, and is due every 30 s"


def test_a_round_in_which_nothing_succeeds_is_no_work(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """The reason names the first queue's failure."""
    working()
    for _ in range(12):
        clock.now += 1
        ledger.beat()
        ledger.record("promote", [SweepResult("orders", "promote", failure=FAILURE)], 0.1)
    (reason,) = ledger.health().reasons
    assert reason == ("promote last succeeded 12 s ago, and is due every 1 s (orders: NOPERM no)")


def test_one_lost_reply_does_not_take_readiness(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """However short the interval is, there is patience for two timeouts of the node."""
    working()
    clock.now += 9
    ledger.beat()
    assert ledger.health().ready


def test_a_node_is_down_since_it_went_down(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """Each round that fails says so again, and with its own reason."""
    working()
    for reason in ("timeout", "refused", "refused"):
        ledger.node_down(NODE, reason)
        clock.now += 20
        ledger.beat()
    assert ledger.health().reasons == (f"node {NODE} is down for 60 s: refused",)


def test_rounds_that_find_nothing_are_work(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """An idle daemon is a ready one, for as long as it sweeps."""
    working()
    for _ in range(60):
        clock.now += 1
        ledger.beat()
        ledger.record_quiet("promote", ["orders", "emails"], clock.now)
        ledger.record("promote", [], 0.1)
    assert ledger.health().ready
    for _ in range(12):
        clock.now += 1
        ledger.beat()
        ledger.record_quiet("promote", [], clock.now)
        ledger.record("promote", [], 0.1)
    assert "promote last succeeded 12 s ago" in ledger.health().reasons[0]


def test_a_blocked_queue_leaves_the_daemon_ready(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """A poison row is the queue's trouble; the sweep did its work and said so."""
    working()
    blocked = SweepResult("orders", "promote", blocked=Blocked(b"JOB1", "EMQSTATE"))
    for _ in range(60):
        clock.now += 1
        ledger.beat()
        ledger.record("promote", [blocked], 0.1)
    assert ledger.health().ready


def test_without_a_queue_the_daemon_is_ready_and_patience_begins_with_the_first(
    clock: Clock,
) -> None:
    """Discovery may find nothing for hours."""
    ledger = Ledger(monotonic=clock)
    ledger.set_nodes([NODE])
    ledger.node_seen(NODE, identity())
    ledger.expect({"promote": 1.0, "stalled_check": 30.0})
    clock.now += 10_000
    ledger.beat()
    assert ledger.health().ready
    ledger.set_queues(["orders"])
    ledger.record("promote", [SweepResult("orders", "promote", passes=1)], 0.1)
    assert ledger.health().ready


def test_a_scheduler_that_stops_is_not_alive(
    ledger: Ledger, clock: Clock, working: Callable[..., None]
) -> None:
    """Life is the process's own loops and nothing else."""
    working()
    clock.now += 16
    health = ledger.health()
    assert (health.alive, health.ready) == (False, False)
    assert health.reasons == ("the scheduler has not run for 16 s",)
    ledger.beat()
    assert ledger.health().alive


def test_a_daemon_that_ends_is_alive_and_not_ready(
    ledger: Ledger, working: Callable[..., None]
) -> None:
    """It is taken out of service before it goes."""
    working()
    ledger.stopping()
    health = ledger.health()
    assert (health.alive, health.ready, health.reasons) == (True, False, ("shutting down",))


# --- threads and speed --------------------------------------------------------------------------


def test_readers_see_each_queue_consistent_while_rounds_go_on(ledger: Ledger) -> None:
    """Recovered and dead together are the expiries, in every copy; no round is lost."""
    ledger.set_queues(f"q{number}" for number in range(500))
    results = [
        SweepResult(
            f"q{number}",
            "stalled_check",
            passes=1,
            recovered=[b"JOB1"],
            dead=[b"JOB2"],
            expiries=[Expiry(b"JOB1", "restart"), Expiry(b"JOB2", "stall")],
        )
        for number in range(500)
    ]
    rounds = 40
    readers = [attrgetter("recovered"), attrgetter("restart")]

    def write() -> None:
        for _ in range(rounds):
            ledger.record("stalled_check", results, 0.1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        writers = [threading.Thread(target=write) for _ in range(2)]
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            for queue in ledger.queues():
                assert queue.recovered + queue.dead_lettered == queue.restart + queue.stall
            for recovered, restart in zip(*ledger.columns(readers), strict=True):
                assert recovered == restart
        for writer in writers:
            writer.join()
    finally:
        sys.setswitchinterval(interval)
    assert {queue.stalled_check.ok for queue in ledger.queues()} == {2 * rounds}


def test_quiet_results_cost_next_to_nothing(ledger: Ledger) -> None:
    """10,000 a second must stay under 2 % of a core: 2 µs each (0.6 µs where this was written).

    The bound is in plain loop steps of this machine, so that a slow one does not fail it.
    """
    queues = [f"q{number}" for number in range(2_000)]
    ledger.set_queues(queues)
    results = [SweepResult(name, "promote", passes=1, finished_at=1.0) for name in queues]

    def cost(run: Callable[[], object]) -> float:
        def once() -> float:
            start = time.thread_time()
            run()
            return time.thread_time() - start

        return min(once() for _ in range(7))

    def loop() -> None:
        total = 0
        for number in range(100_000):
            total += number

    step = cost(loop) / 100_000
    each = cost(lambda: ledger.record("promote", results, 0.1)) / len(results)
    # A step took 25 ns where a result took 600.
    assert each < 80 * step


def test_an_overview_is_of_one_instant(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node goes down whenever the reading lets others in: never is it up and the daemon not ready
    for it, in one and the same answer."""
    ledger.node_seen(NODE, identity())
    ledger.set_queues([])

    class Door:
        """A lock at which somebody waits with bad news."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()
            monkeypatch.undo()
            ledger.node_down(NODE, "gone")

    monkeypatch.setattr(ledger, "_lock", Door())
    read = ledger.overview()
    assert [node.up for node in read.nodes] == [read.health.ready] == [True]
    assert not ledger.overview().health.ready
