"""The chronicle: one line for each change of state, and a restart report that adds up."""

from __future__ import annotations

from typing import Any, cast

import pytest
from daemon_process import Book
from hypothesis import given
from hypothesis import strategies as st

from emqtimerd import wire
from emqtimerd.chronicle import IDS_SHOWN, Chronicle
from emqtimerd.log import Log
from emqtimerd.node import Identity
from emqtimerd.sweeper import Blocked, Expiry, Failure, SweepResult, Verb

NODE = "127.0.0.1:6379"
BEFORE = Identity("a" * 40, "9.1.2", "echomq:6.0.0", wire.TOKENS, 0.0)
AFTER = Identity("b" * 40, "9.1.2", "echomq:6.0.0", wire.TOKENS, 0.0)
LOST = Failure("connection", "cannot connect", of_node=True)
FIRST = "restart report: leases of an earlier server process"
LAST = "restart report: the last lease of an earlier server process is gone"
BROKEN = "restart report: broken off"
THIRD = Identity("c" * 40, "9.1.2", "echomq:6.0.0", wire.TOKENS, 0.0)
REFUSED = Failure("NOPERM", "NOPERM no permission")


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def chronicle(book: Book) -> Chronicle:
    return Chronicle(cast("Log", book))


def result(queue: str = "orders", verb: Verb = "promote", **facts: Any) -> SweepResult:
    return SweepResult(queue, verb, NODE, **facts)


def good(queue: str = "orders", **facts: Any) -> SweepResult:
    return result(queue, passes=1, **facts)


def checked(queue: str, previous: int, crossed: int = 0, **facts: Any) -> SweepResult:
    """A stall check that saw leases of an earlier process, and took some of them."""
    ids = [b"JOB%d" % number for number in range(crossed)]
    return result(
        queue,
        "stalled_check",
        passes=1,
        recovered=ids,
        expiries=[Expiry(job_id, "restart", b"a" * 40, b"b" * 40, 5) for job_id in ids],
        leases=(0, previous, 0),
        **facts,
    )


# --- nodes --------------------------------------------------------------------------------------


def test_a_node_is_told_of_when_it_changes(book: Book, chronicle: Chronicle) -> None:
    """Down once for each reason, up once, whatever the number of rounds."""
    for _ in range(3):
        chronicle.node_up(NODE, BEFORE)
    assert book.take() == ["node up"]
    for _ in range(3):
        chronicle.node_down(NODE, LOST)
    assert book.take() == ["node down"]
    for _ in range(3):
        chronicle.node_down(NODE, Failure("LOADING", "the server is loading its data", True))
    assert book.last("node down")["code"] == "LOADING"
    assert book.take() == ["node down"]
    for _ in range(3):
        chronicle.node_up(NODE, BEFORE)
    assert book.last("node up")["after"] == "LOADING"
    assert book.take() == ["node up"]


def test_nodes_that_were_left_are_told_of_anew(book: Book, chronicle: Chronicle) -> None:
    """A reload may lead to another node and back: how that one stands is news again."""
    chronicle.node_up(NODE, BEFORE)
    chronicle.restarted(NODE, None, BEFORE, ["orders"])
    chronicle.tell([checked("orders", 5)])
    assert book.take() == ["node up", FIRST]
    chronicle.begin_anew()
    assert book.take() == [BROKEN]
    chronicle.tell([checked("orders", 0)])
    assert book.take() == []
    chronicle.node_down(NODE, LOST)
    chronicle.begin_anew()
    chronicle.node_down(NODE, LOST)
    chronicle.begin_anew()
    chronicle.node_up(NODE, BEFORE)
    assert "after" not in book.last("node up")
    assert book.take() == ["node down", "node down", "node up"]


def test_tokens_that_are_missing_are_named(book: Book, chronicle: Chronicle) -> None:
    """A node that serves the two verbs will do; what else it lacks is said."""
    identity = Identity("a" * 40, "9.1.2", "echomq:6.0.0", ("promote", "stalled.check"), 0.0)
    chronicle.node_up(NODE, identity)
    assert "enqueue" in book.last("node up")["missing_tokens"]


def test_a_restart_is_told_with_both_run_ids(book: Book, chronicle: Chronicle) -> None:
    """The first server process is no restart, another one is."""
    chronicle.restarted(NODE, None, BEFORE, ["orders"])
    assert book.take() == []
    chronicle.restarted(NODE, BEFORE.run_id, AFTER, ["orders"])
    line = book.last("node restarted")
    assert (line["was"], line["run_id"]) == (BEFORE.run_id, AFTER.run_id)


# --- queues -------------------------------------------------------------------------------------


def test_on_other_nodes_everything_is_news_again(book: Book, chronicle: Chronicle) -> None:
    """A reload leads to other nodes: a queue that is blocked there too, or has a mass expiry there
    too, is told of again; what was wrong on the old ones is not said to be over."""
    blocked = result(blocked=Blocked(b"JOB1", "EMQSTATE not native"))
    spared = result("emails", "stalled_check", passes=1, lenient=True)
    chronicle.tell([blocked, spared])
    known = book.take()
    assert len(known) == 2
    chronicle.begin_anew()
    chronicle.tell([blocked, spared])
    assert book.take() == known
    chronicle.begin_anew()
    chronicle.tell([good(), result("emails", "stalled_check", passes=1)])
    assert book.take() == []


def test_of_an_overtaken_round_only_what_moved_is_told(book: Book, chronicle: Chronicle) -> None:
    """Rounds on nodes that were replaced, or on queues that left: their records and dead letters
    are facts, how they stood is no news."""
    crossed = Expiry(b"JOB1", "restart", b"a" * 40, b"b" * 40, 5)
    stalled = Expiry(b"JOB2", "stall", b"b" * 40, b"b" * 40, 5)
    moved = result(
        verb="stalled_check",
        recovered=[b"JOB1"],
        dead=[b"JOB2"],
        expiries=[crossed, stalled],
        failure=REFUSED,
    )
    chronicle.tell_former([moved, result("emails", failure=REFUSED), good("bulk")])
    assert book.take() == [
        "lease crossed a server restart",
        "jobs dead-lettered, their stalls reached max_stalled",
    ]
    chronicle.tell([result(verb="stalled_check", passes=1), good("emails")])
    assert book.take() == [], "nothing was remembered of them"


def test_a_failing_queue_is_told_of_once(book: Book, chronicle: Chronicle) -> None:
    """One line a change: the first failure, another one, and the first good sweep."""
    refused = Failure("NOPERM", "NOPERM no permission")
    for _ in range(3):
        chronicle.tell([result(failure=refused), good("emails")])
    line = book.last("sweep failed")
    assert (line["queue"], line["verb"]) == ("orders", "promote")
    assert book.take() == ["sweep failed"]
    chronicle.tell([result(failure=Failure("OOM", "OOM no memory"))])
    chronicle.tell([result(blocked=Blocked(b"JOB\xff\n", "EMQSTATE not native"))])
    assert book.last("sweep blocked")["job_id"] == r"JOB\xff\n"
    assert book.take() == ["sweep failed", "sweep blocked"]
    chronicle.tell([result(blocked=Blocked(b"JOB\xff\n", "EMQSTATE not native"))])
    assert book.take() == []
    chronicle.tell([result(blocked=Blocked(b"JOB2", "EMQSTATE not native"))])
    assert book.take() == ["sweep blocked"]
    for _ in range(3):
        chronicle.tell([good()])
    assert book.take() == ["sweep works again"]


def test_a_slot_on_its_way_is_one_trouble(book: Book, chronicle: Chronicle) -> None:
    """A slot that moves is answered for now with ASK, now with TRYAGAIN; another error is news."""
    for code in ("TRYAGAIN", "ASK", "TRYAGAIN", "CLUSTERDOWN"):
        chronicle.tell([result(failure=Failure(code, code))])
    assert book.take() == ["sweep failed"]
    chronicle.tell([result(failure=Failure("OOM", "OOM no memory"))])
    assert book.last("sweep failed")["reason"] == "OOM no memory"
    chronicle.tell([result(failure=Failure("ASK", "ASK"))])
    chronicle.tell([good()])
    assert book.take() == ["sweep failed", "sweep failed", "sweep works again"]


def test_the_verbs_of_a_queue_are_told_apart(book: Book, chronicle: Chronicle) -> None:
    """What blocks the one does not block the other."""
    refused = Failure("NOPERM", "NOPERM no permission")
    chronicle.tell([result(failure=refused), result(verb="stalled_check", failure=refused)])
    assert book.take() == ["sweep failed", "sweep failed"]
    chronicle.tell([result(verb="stalled_check", passes=1)])
    assert book.last("sweep works again")["verb"] == "stalled_check"


def test_the_nodes_fault_is_nobody_elses(book: Book, chronicle: Chronicle) -> None:
    """Ten thousand queues of a node that is gone are one line; a skipped sweep mends nothing."""
    chronicle.tell([result(f"queue-{n}", failure=LOST) for n in range(10)])
    assert book.take() == []
    chronicle.tell([result(failure=Failure("NOPERM", "no"))])
    chronicle.tell([result(failure=LOST), result(skipped=True)])
    assert book.take() == ["sweep failed"]


def test_a_queue_that_left_is_forgotten(book: Book, chronicle: Chronicle) -> None:
    """When it comes back, its trouble is news again."""
    trouble = result(failure=Failure("NOPERM", "no"))
    chronicle.tell([trouble, result("emails", failure=Failure("NOPERM", "no"))])
    book.take()
    chronicle.forget({"orders"})
    chronicle.tell([good(), good("emails")])
    assert book.last("sweep works again")["queue"] == "emails"
    assert book.take() == ["sweep works again"]
    chronicle.tell([trouble])
    assert book.take() == ["sweep failed"]


def test_each_lease_that_crossed_a_restart_is_a_record(book: Book, chronicle: Chronicle) -> None:
    """Queue, id, old epoch, run_id and how late, with ids that are bytes escaped."""
    crossed = Expiry(b"JOB\xff\x1b", "restart", b"a" * 40, b"b" * 40, 1840)
    other = Expiry(b"JOB2", "stall", b"b" * 40, b"b" * 40, 10)
    chronicle.tell([result(verb="stalled_check", passes=1, expiries=[crossed, other])])
    assert book.last("lease crossed a server restart") == {
        "queue": "orders",
        "node": NODE,
        "job_id": r"JOB\xff\x1b",
        "lease_epoch": "a" * 40,
        "run_id": "b" * 40,
        "past_deadline_ms": 1840,
    }
    assert book.take() == ["lease crossed a server restart"]


def test_dead_letters_are_one_bounded_line(book: Book, chronicle: Chronicle) -> None:
    """However many jobs a sweep buries, the line names the first few and the number."""
    dead = [b"JOB%d" % number for number in range(500)]
    expiries = [Expiry(job_id, "stall", b"b" * 40, b"b" * 40) for job_id in dead]
    chronicle.tell([result(verb="stalled_check", passes=5, dead=dead, expiries=expiries)])
    line = book.last("jobs dead-lettered, their stalls reached max_stalled")
    assert line["count"] == 500
    assert line["job_ids"] == [f"JOB{number}" for number in range(IDS_SHOWN)]


def test_causes_that_cannot_be_known_are_told_once_a_node(book: Book, chronicle: Chronicle) -> None:
    """A denied peek is said once, not for each expiry."""
    for queue in ("orders", "emails"):
        chronicle.tell(
            [result(queue, "stalled_check", passes=1, expiries=[Expiry(b"JOB", "unattributed")])]
        )
    assert len(book.take()) == 1


def test_a_mass_expiry_is_told_at_both_ends(book: Book, chronicle: Chronicle) -> None:
    """One line when the guard is raised and one when it is over; an outage between is neither."""
    for _ in range(3):
        chronicle.tell([result(verb="stalled_check", passes=1, lenient=True)])
    assert book.take() == ["mass expiry: the stall check is sent with max_stalled + 1"]
    chronicle.tell([result(verb="stalled_check", failure=LOST)])
    chronicle.tell([result(verb="stalled_check", skipped=True)])
    chronicle.tell([good()])
    assert book.take() == []
    for _ in range(3):
        chronicle.tell([result(verb="stalled_check", passes=1)])
    assert book.take() == ["mass expiry is over"]


def test_a_good_sweep_is_no_news(book: Book, chronicle: Chronicle) -> None:
    """A line for each sweep that moved something is for debugging; for one that did not, never."""
    chronicle.tell([good(), good(promoted=3)])
    assert book.take() == []
    chronicle.tell([good(promoted=3)])
    assert [level for level, _, _ in book.lines] == ["debug"]


def test_another_log_takes_over(book: Book, chronicle: Chronicle) -> None:
    """After a reload that changes the log, lines go to the new one."""
    other = Book()
    chronicle.tell_to(cast("Log", other))
    chronicle.node_down(NODE, LOST)
    assert book.take() == []
    assert other.take() == ["node down"]


# --- the restart report -------------------------------------------------------------------------


def test_the_report_counts_what_was_recovered_and_what_was_settled(
    book: Book, chronicle: Chronicle
) -> None:
    """Found over all queues; then, with the last of them gone, how each came to its end."""
    chronicle.restarted(NODE, None, AFTER, ["orders", "emails"])
    chronicle.tell([checked("orders", 5)])
    assert book.take() == []
    chronicle.tell([checked("emails", 2)])
    assert book.last(FIRST)["leases"] == 7
    assert book.take() == [FIRST]
    chronicle.tell([checked("orders", 3), checked("emails", 2, crossed=2)])
    assert LAST not in book.take()
    chronicle.tell([checked("orders", 2, crossed=1)])
    assert LAST not in book.take()
    chronicle.tell([checked("orders", 0)])
    line = book.last(LAST)
    assert (line["leases"], line["recovered"], line["settled_elsewhere"]) == (7, 3, 4)
    assert book.take() == [LAST]
    chronicle.tell([checked("orders", 0)])
    assert book.take() == []


def test_without_such_leases_there_is_no_report(book: Book, chronicle: Chronicle) -> None:
    """An idle node's restart is one line, not three."""
    chronicle.restarted(NODE, BEFORE.run_id, AFTER, ["orders", "emails"])
    chronicle.tell([checked("orders", 0), checked("emails", 0)])
    assert book.take() == ["node restarted"]


def test_a_restart_begins_the_report_anew(book: Book, chronicle: Chronicle) -> None:
    """What a second restart cut short is counted from the start."""
    chronicle.restarted(NODE, None, BEFORE, ["orders"])
    chronicle.tell([checked("orders", 5)])
    chronicle.restarted(NODE, BEFORE.run_id, AFTER, ["orders"])
    chronicle.tell([checked("orders", 4, crossed=4)])
    line = book.last(LAST)
    assert (line["leases"], line["recovered"], line["settled_elsewhere"]) == (4, 4, 0)


def test_a_row_of_restarts_is_a_row_of_reports(book: Book, chronicle: Chronicle) -> None:
    """Each restart that comes while leases of an earlier process are left breaks its report off,
    and that one adds up too; one that had not begun yet, or was over, is not told of."""
    chronicle.restarted(NODE, None, BEFORE, ["orders", "emails"])
    chronicle.tell([checked("orders", 5)])
    chronicle.restarted(NODE, BEFORE.run_id, AFTER, ["orders", "emails"])
    assert book.take() == ["node restarted"]
    chronicle.tell([checked("orders", 5), checked("emails", 2, crossed=2)])
    chronicle.tell([checked("orders", 4, crossed=1)])
    chronicle.restarted(NODE, AFTER.run_id, THIRD, ["orders", "emails"])
    line = book.last(BROKEN)
    assert line == {
        "node": NODE,
        "run_id": AFTER.run_id,
        "reason": "the node was restarted again",
        "leases": 7,
        "recovered": 3,
        "settled_elsewhere": 1,
        "left": 3,
    }
    assert [event for event in book.take() if "restart" in event][-2:] == ["node restarted", BROKEN]
    chronicle.tell([checked("orders", 3, crossed=3), checked("emails", 0)])
    line = book.last(LAST)
    assert (line["run_id"], line["leases"], line["recovered"]) == (THIRD.run_id, 3, 3)
    book.take()
    chronicle.restarted(NODE, THIRD.run_id, BEFORE, ["orders"])
    chronicle.tell([checked("orders", 0)])
    assert book.take() == ["node restarted"]


def test_a_node_that_alternates_between_two_servers(book: Book, chronicle: Chronicle) -> None:
    """An address that leads now here, now there: each change is a restart with both run_ids, and
    each report is of the process that answers."""
    chronicle.restarted(NODE, None, BEFORE, ["orders"])
    for before, now in ((BEFORE, AFTER), (AFTER, BEFORE), (BEFORE, AFTER)):
        chronicle.restarted(NODE, before.run_id, now, ["orders"])
        chronicle.tell([checked("orders", 1)])
        line = book.last("node restarted")
        assert (line["was"], line["run_id"]) == (before.run_id, now.run_id)
        assert book.last(FIRST)["run_id"] == now.run_id
    assert [event for event in book.take() if event == BROKEN] == [BROKEN] * 2


def test_a_primary_that_left_leaves_no_report_open(book: Book, chronicle: Chronicle) -> None:
    """A failover in a cluster while leases are followed: the report of the old one is broken off,
    its heir begins one of its own."""
    chronicle.restarted(NODE, None, BEFORE, ["orders"])
    chronicle.tell([checked("orders", 2)])
    chronicle.nodes_changed(["other:6379"], {"other:6379": NODE})
    assert book.last(BROKEN)["left"] == 2
    book.take()
    chronicle.tell([checked("orders", 0)])
    assert book.take() == []


def test_a_queue_that_cannot_be_read_does_not_hold_the_report(
    book: Book, chronicle: Chronicle
) -> None:
    """One key of the wrong type among ten thousand queues: the others' leases are reported without
    it, and its own as soon as they can be read."""
    chronicle.restarted(NODE, None, AFTER, ["orders", "broken"])
    chronicle.tell([checked("orders", 3)])
    chronicle.tell([result("broken", "stalled_check", failure=LOST)])
    chronicle.tell([result("broken", "stalled_check", skipped=True)])
    chronicle.tell([result("broken", failure=REFUSED)])
    assert FIRST not in book.take(), "its leases were not looked at yet"
    chronicle.tell([result("broken", "stalled_check", failure=REFUSED)])
    assert book.last(FIRST)["leases"] == 3
    chronicle.tell([checked("broken", 2, crossed=2), checked("orders", 3, crossed=3)])
    line = book.last(LAST)
    assert (line["leases"], line["recovered"], line["settled_elsewhere"]) == (5, 5, 0)


def test_the_only_queue_may_be_read_at_the_second_try(book: Book, chronicle: Chronicle) -> None:
    """As long as nobody knows whether it had such leases, its report waits."""
    chronicle.restarted(NODE, None, AFTER, ["orders"])
    chronicle.tell([result("orders", "stalled_check", failure=Failure("TRYAGAIN", "TRYAGAIN"))])
    chronicle.tell([checked("orders", 2)])
    assert book.last(FIRST)["leases"] == 2
    chronicle.tell([checked("orders", 0)])
    assert book.last(LAST)["settled_elsewhere"] == 2


@pytest.mark.parametrize("seen", [True, False])
def test_a_queue_that_leaves_does_not_hold_the_report(
    book: Book, chronicle: Chronicle, seen: bool
) -> None:
    """The report waits for no queue that is no longer swept, looked at before or not; how its
    leases end nobody sees, and what was said at the beginning still adds up."""
    chronicle.restarted(NODE, None, AFTER, ["orders", "gone"])
    chronicle.tell([checked("orders", 3, crossed=1)])
    if seen:
        chronicle.tell([checked("gone", 2)])
    chronicle.tell([checked("orders", 0)])
    first = book.last(FIRST) if seen else {"leases": 3}
    chronicle.forget({"gone"})
    line = book.last(LAST)
    assert line["leases"] == first["leases"] == (5 if seen else 3)
    assert (line["recovered"], line["settled_elsewhere"]) == (1, 2)
    assert line.get("not_followed") == (2 if seen else None)


def test_the_only_queue_of_a_report_leaves(book: Book, chronicle: Chronicle) -> None:
    """A report that was begun is ended, also when there is nothing left to follow."""
    chronicle.restarted(NODE, None, AFTER, ["gone"])
    chronicle.tell([checked("gone", 2)])
    chronicle.forget({"gone"})
    line = book.last(LAST)
    assert (line["leases"], line["not_followed"]) == (2, 2)


def test_a_queue_that_is_added_again_is_not_followed_twice(
    book: Book, chronicle: Chronicle
) -> None:
    """Removed and added again while a report goes on: its leases were written off, and are not
    found a second time."""
    chronicle.restarted(NODE, None, AFTER, ["orders", "again"])
    chronicle.tell([checked("orders", 3), checked("again", 2)])
    chronicle.forget({"again"})
    chronicle.tell([checked("again", 2, crossed=2), checked("orders", 3, crossed=3)])
    line = book.last(LAST)
    assert (line["leases"], line["recovered"], line["not_followed"]) == (5, 3, 2)
    assert line["settled_elsewhere"] == 0


def test_more_leases_than_are_counted_still_add_up(book: Book, chronicle: Chronicle) -> None:
    """Counts stop at a thousand leases a queue; a report never says that more was recovered than
    there was."""
    chronicle.restarted(NODE, None, AFTER, ["orders"])
    chronicle.tell([checked("orders", 1_000, crossed=500)])
    chronicle.tell([checked("orders", 1_000, crossed=1_500)])
    line = book.last(LAST)
    assert (line["leases"], line["recovered"], line["settled_elsewhere"]) == (2_000, 2_000, 0)


moves = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 9), moves), min_size=1, max_size=4))
def test_whatever_happens_the_report_adds_up(queues: list[tuple[int, Any]]) -> None:
    """Leases end by our recovery or elsewhere, in any order: recovered is exactly what was taken
    here, and both together are what was found."""
    book = Book()
    chronicle = Chronicle(cast("Log", book))
    names = [f"queue-{number}" for number in range(len(queues))]
    chronicle.restarted(NODE, None, AFTER, names)
    left = dict(zip(names, (count for count, _ in queues), strict=True))
    found, taken = sum(left.values()), 0
    for name in names:
        chronicle.tell([checked(name, left[name])])
    for name, (_, steps) in zip(names, queues, strict=True):
        for elsewhere, here in steps:
            left[name] -= min(elsewhere, left[name])
            crossed = min(here, left[name])
            chronicle.tell([checked(name, left[name], crossed)])
            left[name] -= crossed
            taken += crossed
    for name in names:
        chronicle.tell([checked(name, 0)])
    assert sum(event == LAST for _, event, _ in book.lines) == (found > 0)
    if found:
        line = book.last(LAST)
        assert (line["leases"], line["recovered"]) == (found, taken)
        assert line["settled_elsewhere"] == found - taken
