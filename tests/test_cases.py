"""Cases between two rounds: what one learned of a queue, and what the next makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis
from conftest import NameServers, plant, wait_until
from stub import HANG_UP, Answer, Stub, array, error, ids, integer

from emqtimerd import sweeper as sweepers
from emqtimerd import wire
from emqtimerd.devnode import DevNode
from emqtimerd.node import Node
from emqtimerd.sweeper import VERBS, Round, Sweep, Verb, run_round

FAR = b"4102444800000"
"""2100-01-01 in milliseconds: not due in any test."""


def sweep(node: Node, orders: list[Sweep], seconds: float = 60) -> Round:
    """One round that has so long from now."""
    return run_round(node, orders, until=time.monotonic() + seconds)


def orders(*queues: str, limit: int = 100) -> list[Sweep]:
    return [Sweep(queue, "promote", limit) for queue in queues]


# --- a queue that was idle ----------------------------------------------------------------------


def test_what_is_scheduled_into_an_idle_queue_is_awaited(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Idle cost": the cheap look at a queue that had nothing to do still sees its new head,
    so a job that is scheduled ahead is promoted when it is due and not at the next tick."""
    node, (order,) = open_to(stub.url), orders("orders")
    assert sweep(node, [order]).results[0].next_due is None
    assert sweep(node, [order]).quiet == ["orders"]
    stub.on("ZRANGE", ids(b"JOB1", FAR))
    done = sweep(node, [order])
    assert done.quiet == []
    (result,) = done.results
    assert (result.outcome, result.passes, result.promoted) == ("ok", 1, 0)
    assert result.next_due is not None
    assert result.next_due - time.monotonic() == pytest.approx(int(FAR) / 1000 - time.time(), abs=5)


def test_what_comes_due_between_the_look_and_the_promotion_is_counted(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Idle cost": the head was read, then somebody scheduled a job that is due, then came the
    promotion: it moved, so it counts, and the queue is idle no longer."""
    node, (order,) = open_to(stub.url), orders("orders")
    sweep(node, [order])
    stub.on("EMQ.PROMOTE", integer(3), integer(0))
    done = sweep(node, [order])
    assert done.quiet == []
    assert [(result.promoted, result.outcome) for result in done.results] == [(3, "ok")]


# --- what a queue is expected to hold ------------------------------------------------------------

FORTY = [f"q{number}" for number in range(41)]
"""Queues whose limit of 100 lets twenty of them share a pipeline that is to move 2,000 at most."""


def test_a_queue_that_was_busy_has_its_share_of_a_pipeline(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Huge backlog in one command": what the first sweep of the last round moved is expected
    again, although its last one found nothing more."""
    node, many, due = open_to(stub.url), orders(*FORTY), ids(b"JOB1", b"1")
    for _ in range(3):
        for queue in FORTY:
            word = b"{%b}" % queue.encode()
            stub.on("ZRANGE", due, due, array(), word=word)
            stub.on("EMQ.PROMOTE", integer(100), integer(0), word=word)
        stub.arrivals.clear()
        results = sweep(node, many).results
        assert {(result.promoted, result.passes) for result in results} == {(100, 2)}
        assert max(stub.pipelines("EMQ.PROMOTE")) == 20


@pytest.mark.parametrize("failure", [HANG_UP, error("ERR no")], ids=["lost", "refused"])
def test_after_a_failure_nobody_knows_what_an_idle_queue_holds(
    stub: Stub, open_to: Callable[..., Node], failure: Answer
) -> None:
    """Case "Huge backlog in one command": a queue that was idle before an outage may have any
    backlog after it, so it has its share of a pipeline again and not a corner of a large one."""
    node, many = open_to(stub.url), orders(*FORTY)
    sweep(node, many)
    stub.on("EMQ.PROMOTE", failure)
    sweep(node, many)
    stub.on("EMQ.PROMOTE", integer(0))
    stub.arrivals.clear()

    def swept() -> bool:
        done = sweep(node, many)
        return bool(done.quiet) or done.results[-1].outcome == "ok"

    wait_until(swept, "the node swept again")
    assert stub.pipelines("EMQ.PROMOTE") == [20, 20, 1]


# --- rounds that end early ----------------------------------------------------------------------


def test_a_round_that_begins_late_still_sends_its_first_pipeline(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Misfire grace": its time was over before its turn came; there is progress all the same,
    and only what is behind the first pipeline is left."""
    most = sweepers.MOVES_PER_EXCHANGE
    done = sweep(open_to(stub.url), orders("a", "b", limit=most), seconds=-1)
    told = {result.queue: (result.outcome, result.backlog) for result in done.results}
    assert told == {"a": ("ok", False), "b": ("skipped", True)}
    assert stub.count("EMQ.PROMOTE") == 1


MANY = sweepers.QUEUES_PER_EXCHANGE + 2


@pytest.fixture
def idle(stub: Stub, open_to: Callable[..., Node]) -> tuple[Node, list[Sweep]]:
    """A node with two queues more than one pipeline takes, all of them idle."""
    node, many = open_to(stub.url), orders(*(f"q{number}" for number in range(MANY)))
    sweep(node, many)
    stub.arrivals.clear()
    return node, many


def test_idle_queues_that_a_late_round_did_not_come_to_are_a_backlog(
    stub: Stub, idle: tuple[Node, list[Sweep]]
) -> None:
    """Case "Drain pace after an outage": each queue of a round is told of, also where nothing was
    expected: swept, or left for a wake at once."""
    node, many = idle
    done = sweep(node, many, seconds=-1)
    assert len(done.quiet) == sweepers.QUEUES_PER_EXCHANGE
    left = [(result.outcome, result.backlog) for result in done.results]
    assert left == [("skipped", True)] * 2
    assert {*done.quiet, *(result.queue for result in done.results)} == {o.queue for o in many}


def test_idle_queues_behind_a_lost_pipeline_were_not_tried(
    stub: Stub, idle: tuple[Node, list[Sweep]]
) -> None:
    """Case "Half-open sockets and black holes": what was sent and not answered is unknown; what was
    not sent shares the fault, and counts as no sweep."""
    node, many = idle
    stub.on("EMQ.PROMOTE", HANG_UP)
    done = sweep(node, many)
    results = {result.queue: result for result in done.results}
    assert set(results) == {order.queue for order in many}
    unsent = [queue for queue, result in results.items() if result.skipped]
    assert unsent == [order.queue for order in many[sweepers.QUEUES_PER_EXCHANGE :]]
    for queue, result in results.items():
        assert result.failure is not None
        assert result.failure.of_node
        assert result.unknown == (queue not in unsent)


# --- a name that leads elsewhere ----------------------------------------------------------------


def test_a_name_that_leads_to_another_server_is_followed(
    stub: Stub, open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """Case "READONLY from a demoted primary": the old one lives and keeps its connections, the name
    leads to the new one by now: after one refusal that one gets the sweeps."""
    name_servers.answering.set()
    name_servers.names["queues.test"] = ["127.0.0.1"]
    node, (order,) = open_to(f"redis://queues.test:{stub.port}/0"), orders("orders")
    sweep(node, [order])
    with Stub(address=("127.0.0.2", stub.port)) as successor:
        name_servers.names["queues.test"] = ["127.0.0.2"]
        assert sweep(node, [order]).quiet == ["orders"]
        assert successor.connections == 0, "as long as nobody refuses, the connection is as good"
        stub.on("EMQ.PROMOTE", error("READONLY You can't write against a read only replica."))
        (refused,) = sweep(node, [order]).results
        assert refused.failure is not None
        assert refused.failure.code == "READONLY"
        swept = stub.count("EMQ.PROMOTE")
        assert sweep(node, [order]).results[0].outcome == "ok"
        assert (successor.count("EMQ.PROMOTE"), stub.count("EMQ.PROMOTE")) == (1, swept)


# --- what the gauges say ------------------------------------------------------------------------


def test_the_sizes_of_a_queue_whose_leases_are_gone_are_read_too(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Case "Poison row": somebody took the row out, and with it the last lease. Its queue is not
    blocked any more, and the gauges do not stay where they were."""
    client.zadd(wire.queue_key("orders", "active"), {b"JOBLANE": 1})
    client.hset(wire.row_key("orders", b"JOBLANE"), mapping={"state": "active", "group": "g"})
    client.zadd(wire.queue_key("orders", "schedule"), {b"JOB1": int(FAR)})
    opened, order = open_to(node.url), Sweep("orders", "stalled_check", 100)
    (result,) = sweep(opened, [order]).results
    assert result.blocked
    client.delete(wire.queue_key("orders", "active"))
    (result,) = sweep(opened, [order]).results
    assert (result.outcome, result.passes, order.blocked) == ("ok", 1, False)
    assert (result.leases, result.jobs) == ((0, 0, 0), (0, 0, 1, 0))
    assert result.finished_at == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize("verb", VERBS)
def test_a_sweep_tells_when_it_was_done(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], verb: Verb
) -> None:
    """Case "Loop dies on one failure": the time of the last success is that of a sweep that moved
    something, too, and never that of one which failed."""
    source = {"promote": "schedule", "stalled_check": "active"}[verb]
    plant(client, source, {b"JOB1": 1})
    opened, order = open_to(node.url), Sweep("orders", verb, 100)
    (result,) = sweep(opened, [order]).results
    assert result.moved == 1
    assert result.finished_at == pytest.approx(time.time(), abs=5)
    client.set(wire.queue_key("orders", source), "text")
    (result,) = sweep(opened, [order]).results
    assert (result.outcome, result.finished_at) == ("error", 0)


@pytest.mark.parametrize("verb", VERBS)
def test_nobody_was_late_for_a_ghost(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], verb: Verb
) -> None:
    """Case "Poison row": pages of ids without rows are drained, and are in no histogram."""
    source = {"promote": "schedule", "stalled_check": "active"}[verb]
    client.zadd(wire.queue_key("orders", source), {b"JOB%d" % number: 1 for number in range(300)})
    (result,) = sweep(open_to(node.url), [Sweep("orders", verb, 100)]).results
    assert (result.moved, result.outcome, result.lateness_ms) == (0, "ok", [])
    assert client.exists(wire.queue_key("orders", source)) == 0


def test_a_queue_that_is_blocked_no_longer_is_drained_by_whole_pages(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Case "Poison row": the head alone was tried as long as it refused; once it moves, what waited
    behind it goes with the limit that is configured, and not one by one."""
    job_ids = [b"JOB%03d" % number for number in range(301)]
    plant(client, "schedule", dict.fromkeys(job_ids, 1))
    client.hset(wire.row_key("orders", b"JOB000"), "group", "g")
    opened, order = open_to(node.url), Sweep("orders", "promote", 100)
    (result,) = sweep(opened, [order]).results
    assert result.blocked
    client.hdel(wire.row_key("orders", b"JOB000"), "group")
    (result,) = sweep(opened, [order]).results
    assert result.promoted == 301
    assert result.passes <= 5
