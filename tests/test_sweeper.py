"""One round: what moved and why, what was refused, what is unknown, and whose turn it is."""

from __future__ import annotations

import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from conftest import connect, plant, wait_until
from hypothesis import given
from hypothesis import strategies as st
from stub import (
    HANG_UP,
    NIL,
    RUN_ID,
    SILENCE,
    Answer,
    Stub,
    array,
    bulk,
    cut,
    error,
    ids,
    integer,
    late,
    refused,
    simple,
)

from emqtimerd import sweeper as sweepers
from emqtimerd import wire
from emqtimerd.devnode import DevNode
from emqtimerd.node import Identity, Link, Node
from emqtimerd.preview import foresee
from emqtimerd.sweeper import VERBS, Sweep, SweepResult, Verb, run_round, survey

COMMAND = {"promote": "EMQ.PROMOTE", "stalled_check": "EMQ.STALLED.CHECK"}
SOURCE = {"promote": "schedule", "stalled_check": "active"}

FAR = 4_102_444_800_000
"""2100-01-01: not due in any test."""


def sweep_all(
    node: Node, sweeps: Sequence[Sweep], *, seconds: float = 60, **options: Any
) -> dict[str, SweepResult]:
    """Run one round, and return the result of each queue."""
    done = run_round(node, sweeps, until=time.monotonic() + seconds, **options)
    return {result.queue: result for result in done.results}


def sweep(node: Node, verb: Verb, limit: int = 100, **options: Any) -> SweepResult:
    """Sweep the queue `orders` in a round of its own."""
    return sweep_all(node, [Sweep("orders", verb, limit)], **options)["orders"]


def numbered(count: int, start: float = 1.0) -> dict[bytes, float]:
    """Jobs in an order, all due or expired since 1970."""
    return {b"JOB%06d" % number: start + number for number in range(count)}


def sizes(client: redis.Redis, queue: str = "orders") -> dict[str, int]:
    """How many ids each set of the queue holds."""
    return {name: client.zcard(wire.queue_key(queue, name)) for name in wire.SETS}


def run_id(client: redis.Redis) -> bytes:
    return str(client.info("server")["run_id"]).encode()


def causes(result: SweepResult) -> dict[bytes, str]:
    return {expiry.job_id: expiry.cause for expiry in result.expiries}


# --- what moved, and why ------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["key", "arg"])
def test_a_round_promotes_what_is_due_and_nothing_else(
    any_node: DevNode, any_client: redis.Redis, open_to: Callable[..., Node], form: wire.BaseForm
) -> None:
    """Due jobs become pending, with either form of the base, on every server."""
    plant(any_client, "schedule", numbered(250))
    plant(any_client, "schedule", {b"JOBLATER": FAR})
    order = Sweep("orders", "promote", 100, base_form=form)
    result = sweep_all(open_to(any_node.url), [order])["orders"]
    assert (result.promoted, result.outcome, result.backlog) == (250, "ok", False)
    assert sizes(any_client) == {"pending": 250, "active": 0, "schedule": 1, "dead": 0}
    assert result.overdue_ms == 0
    assert result.next_due is not None
    assert result.next_due - time.monotonic() == pytest.approx(FAR / 1000 - time.time(), abs=5)


@pytest.mark.parametrize("form", ["key", "arg"])
def test_each_expiry_is_told_by_its_cause(
    any_node: DevNode, any_client: redis.Redis, open_to: Callable[..., Node], form: wire.BaseForm
) -> None:
    """The row's epoch against the server's: stall, restart or unstamped; the counts follow it."""
    epoch = run_id(any_client)
    plant(any_client, "active", {b"JOBSTALL": 3, b"JOBLIVE": FAR}, lease_epoch=epoch)
    plant(any_client, "active", {b"JOBCROSSED": 2}, lease_epoch=b"e" * 40)
    plant(any_client, "active", {b"JOBPLAIN": 1, b"JOB\xff\xfe\n\x1b[31m": 4})
    order = Sweep("orders", "stalled_check", 100, 2, base_form=form)
    result = sweep_all(open_to(any_node.url), [order])["orders"]
    assert causes(result) == {
        b"JOBPLAIN": "unstamped",
        b"JOBCROSSED": "restart",
        b"JOBSTALL": "stall",
        b"JOB\xff\xfe\n\x1b[31m": "unstamped",
    }
    assert (len(result.recovered), result.dead) == (4, [])
    crossing = next(expiry for expiry in result.expiries if expiry.cause == "restart")
    assert (crossing.epoch, crossing.run_id) == (b"e" * 40, epoch)
    assert crossing.past_deadline_ms == pytest.approx(time.time() * 1000 - 2, abs=5_000)
    stalled = {
        job_id: any_client.hget(wire.row_key("orders", job_id), "stalled")
        for job_id in (b"JOBCROSSED", b"JOBSTALL", b"JOBPLAIN")
    }
    assert stalled == {b"JOBCROSSED": None, b"JOBSTALL": b"1", b"JOBPLAIN": b"1"}


def test_the_first_counted_stall_buries_with_the_default(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """With max_stalled 1 a stall is dead-lettered and a crossing is not."""
    plant(client, "active", {b"JOBSTALL": 1}, lease_epoch=run_id(client))
    plant(client, "active", {b"JOBCROSSED": 2}, lease_epoch=b"e" * 40, stalled=7)
    result = sweep(open_to(node.url), "stalled_check")
    assert (result.recovered, result.dead) == ([b"JOBCROSSED"], [b"JOBSTALL"])
    assert client.hget(wire.row_key("orders", b"JOBCROSSED"), "stalled") == b"7"


def test_binary_ids_are_counted_and_attributed(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Case "Binary job ids": the sweep counts, whatever bytes an id is made of."""
    odd = {b"JOB\xff\xfe": 1.0, b"JOB\n2": 2.0, b"JOB\r\n$5\r\n": 3.0, b"JOB\x00": 4.0}
    plant(client, "schedule", odd)
    plant(client, "active", {b"JOBA" + job_id: at for job_id, at in odd.items()})
    opened = open_to(node.url)
    assert sweep(opened, "promote").promoted == 4
    assert causes(sweep(opened, "stalled_check")) == dict.fromkeys(
        (b"JOBA" + job_id for job_id in odd), "unstamped"
    )


def test_the_sizes_and_the_epochs_of_leases_are_read_with_the_check(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """What the gauges show comes with the stall check, as the queue stood before and after it."""
    plant(client, "active", {b"JOB1": FAR, b"JOB2": FAR}, lease_epoch=run_id(client))
    plant(client, "active", {b"JOB3": FAR}, lease_epoch=b"e" * 40)
    plant(client, "active", {b"JOB4": 1})
    plant(client, "schedule", {b"JOB5": FAR})
    result = sweep(open_to(node.url), "stalled_check")
    assert result.leases == (2, 1, 1)
    assert result.jobs == (0, 3, 1, 1)


def test_the_epochs_of_a_thousand_leases_are_counted_and_no_more(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """More row reads than that would hold the server for longer than a sweep may; the sizes are of
    all, and a check and a look in the grace count alike."""
    leases = numbered(1_001, start=FAR)
    plant(client, "active", leases, lease_epoch=run_id(client))
    client.hset(wire.row_key("orders", list(leases)[1_000]), "lease_epoch", "e" * 40)
    opened = open_to(node.url)
    (looked,) = survey(opened, [Sweep("orders", "stalled_check", 100)])
    for result in (looked, *(sweep(opened, "stalled_check", limit) for limit in (100, 2_000))):
        assert result.leases == (1_000, 0, 0)
        assert result.jobs == (0, 1_001, 0, 0)
    client.hset(wire.row_key("orders", list(leases)[999]), "lease_epoch", "e" * 40)
    assert sweep(opened, "stalled_check").leases == (999, 1, 0)


TIMELESS = [float("-inf"), -1e300, -1.0, 0.0]


@pytest.mark.parametrize("score", TIMELESS)
@pytest.mark.parametrize("verb", VERBS)
def test_what_has_no_time_is_swept_and_its_lateness_not_told(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], verb: Verb, score: float
) -> None:
    """A score that no clock shows is due for ever: it moves, and nobody says by how much too late,
    in a histogram least of all."""
    plant(client, SOURCE[verb], {b"JOBODD": score}, lease_epoch=b"e" * 40)
    plant(client, SOURCE[verb], {b"JOBNEVER": float("inf")})
    told = foresee(open_to(node.url), Sweep("orders", verb, 100))
    result = sweep(open_to(node.url), verb)
    for each in (told, result):
        assert (each.moved, each.outcome, each.lateness_ms) == (1, "ok", [])
        assert [expiry.past_deadline_ms for expiry in each.expiries] == [0] * len(each.expiries)
        assert (each.overdue_ms, each.next_due) == (0, None)
    assert sizes(client)[SOURCE[verb]] == 1


@pytest.mark.parametrize("score", TIMELESS)
def test_a_row_without_a_time_that_blocks_its_queue_is_overdue_by_nothing_known(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], score: float
) -> None:
    """The blocker is named; since when it is due, nobody knows."""
    plant(client, "schedule", {b"JOBLANE": score}, group=b"g")
    result = sweep(open_to(node.url), "promote")
    assert result.blocked is not None
    assert (result.blocked.job_id, result.overdue_ms) == (b"JOBLANE", 0)


# --- the backlog --------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_thousand_ghosts_are_drained(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], verb: Verb
) -> None:
    """Case "Poison row": pages that move nothing but shrink the set do not end the drain."""
    client.zadd(wire.queue_key("orders", SOURCE[verb]), numbered(1_000))
    plant(client, SOURCE[verb], {b"JOBX": 5_000})
    result = sweep(open_to(node.url), verb)
    assert (result.moved, result.outcome, result.overdue_ms) == (1, "ok", 0)
    assert sizes(client)[SOURCE[verb]] == 0


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_moved_though_more_is_due_ends_the_drain(
    stub: Stub, open_to: Callable[..., Node], verb: Verb
) -> None:
    """Case "Poison row": "0 moved, more remain" for ever does not hold the round."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    lease = (bulk(b"JOB1"), bulk(b"1"), NIL)
    stub.on("EVAL_RO", array(bulk(RUN_ID), *[integer(0)] * 3, *lease))
    result = sweep(open_to(stub.url), verb)
    assert stub.count(COMMAND[verb]) <= 3
    assert result.outcome == "ok"
    assert result.next_due is None


def test_a_deep_queue_does_not_hold_up_shallow_ones(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Drain pace after an outage": saturated queues take turns, a page each."""
    for queue, pages in (("deep", 20), ("shallow", 2), ("other", 1)):
        word = b"{%b}" % queue.encode()
        stub.on("ZRANGE", *[ids(b"JOB1", b"1")] * (2 * pages - 1), array(), word=word)
        stub.on("EMQ.PROMOTE", *[integer(1_000)] * pages, integer(0), word=word)
    order = [Sweep(queue, "promote", 1_000) for queue in ("deep", "shallow", "other")]
    results = sweep_all(open_to(stub.url), order)
    turns = [arrival.words[2] for arrival in stub.received("EMQ.PROMOTE")]
    assert turns[:5] == [
        wire.queue_key(queue, "schedule")
        for queue in ("deep", "shallow", "other", "deep", "shallow")
    ]
    assert {q: r.promoted for q, r in results.items()} == {
        "deep": 20_000,
        "shallow": 2_000,
        "other": 1_000,
    }


@pytest.mark.parametrize(("limit", "each"), [(100, 20), (1_000, 2), (2_000, 1), (50_000, 1)])
def test_a_pipeline_may_move_no_more_than_its_share(
    stub: Stub, open_to: Callable[..., Node], limit: int, each: int
) -> None:
    """Case "Huge backlog in one command": the server serves others between two pipelines."""
    orders = [Sweep(f"q{number}", "promote", limit) for number in range(41)]
    sweep_all(open_to(stub.url), orders)
    pipelines = stub.pipelines("EMQ.PROMOTE")
    assert max(pipelines) == each
    assert sum(pipelines) == 41
    assert each * limit <= sweepers.MOVES_PER_EXCHANGE or each == 1


def test_queues_that_were_idle_share_pipelines(stub: Stub, open_to: Callable[..., Node]) -> None:
    """Case "Idle cost": what moved nothing last time costs one command in a large pipeline."""
    orders = [Sweep(f"q{number}", "promote", 100) for number in range(2_200)]
    node = open_to(stub.url)
    sweep_all(node, orders)
    stub.arrivals.clear()
    sweep_all(node, orders)
    assert stub.pipelines("EMQ.PROMOTE") == [1_000, 1_000, 200]
    assert len(stub.arrivals) == 3 + 2 * 2_200


@pytest.mark.parametrize("verb", VERBS)
def test_without_drain_a_queue_is_swept_once(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], verb: Verb
) -> None:
    """One command, at most `limit` jobs."""
    plant(client, SOURCE[verb], numbered(30))
    result = sweep(open_to(node.url), verb, 10, drain=False)
    assert (result.moved, result.passes) == (10, 1)
    assert sizes(client)[SOURCE[verb]] == 20


def test_a_round_stops_between_pipelines_when_its_time_is_over(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Drain pace after an outage": what is left is a backlog, begun or not."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", late(integer(2_000), 0.3))
    orders = [Sweep(queue, "promote", 2_000) for queue in "abcdefgh"]
    results = sweep_all(open_to(stub.url), orders, seconds=1)
    outcomes = [result.outcome for result in results.values()]
    begun = outcomes.count("ok")
    assert 1 <= begun <= 5
    assert outcomes == ["ok"] * begun + ["skipped"] * (8 - begun)
    assert all(result.backlog for result in results.values() if result.outcome == "ok")
    assert stub.count("EMQ.PROMOTE") == begun


def test_a_round_that_is_told_to_stop_sends_nothing_more(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "SIGTERM in the middle of a sweep": the running pipeline is the last one."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", integer(100))
    result = sweep(open_to(stub.url), "promote", stop=lambda: stub.count("EMQ.PROMOTE") >= 3)
    assert (result.promoted, result.backlog, stub.count("EMQ.PROMOTE")) == (300, True, 3)


# --- rows that make a sweep refuse --------------------------------------------------------------


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("before", [0, 1, 37, 63, 99])
@pytest.mark.parametrize("verb", VERBS)
def test_a_sweep_that_refuses_moves_all_before_the_row_and_names_it(
    node: DevNode,
    client: redis.Redis,
    open_to: Callable[..., Node],
    verb: Verb,
    before: int,
    drain: bool,
) -> None:
    """Case "Poison row": the longest prefix that works is moved, and the row behind it named."""
    behind = {b"JOBZ%d" % number: 6_000.0 for number in range(10)}
    plant(client, SOURCE[verb], numbered(before) | behind)
    plant(client, SOURCE[verb], {b"JOBLANE": 5_000}, group=b"g")
    opened = open_to(node.url)
    result = sweep(opened, verb, drain=drain)
    assert (result.moved, result.outcome) == (before, "error")
    assert result.blocked is not None
    assert result.blocked.job_id == b"JOBLANE"
    assert "EMQSTATE" in result.blocked.reason
    assert "JOBLANE" in result.blocked.reason
    assert result.overdue_ms == pytest.approx(time.time() * 1000, abs=1e4)
    assert sizes(client)[SOURCE[verb]] == 1 + len(behind)
    assert not result.failure


def test_a_blocked_queue_is_first_tried_at_its_head_and_recovers_by_itself(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Case "Poison row": one cheap command a round while blocked; all moves once it is not."""
    plant(client, "schedule", {b"JOBLANE": 0}, group=b"g")
    plant(client, "schedule", numbered(300))
    opened, order = open_to(node.url), Sweep("orders", "promote", 100)
    for expected in (7, 1, 1):
        before = client.info("commandstats").get("cmdstat_EMQ.PROMOTE", {"calls": 0})["calls"]
        assert sweep_all(opened, [order])["orders"].blocked
        after = client.info("commandstats")["cmdstat_EMQ.PROMOTE"]["calls"]
        assert after - before == expected
    client.hdel(wire.row_key("orders", b"JOBLANE"), "group")
    result = sweep_all(opened, [order])["orders"]
    assert (result.promoted, result.outcome, order.blocked) == (301, "ok", False)


def test_a_blocked_queue_does_not_touch_its_neighbours(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Case "Poison row": `good` is not delayed, and wrong types are the result of their queue."""
    for queue in ("good", "lane", "better"):
        plant(client, "schedule", numbered(150), queue=queue)
    plant(client, "schedule", {b"JOBLANE": 0}, queue="lane", group=b"g")
    client.set(wire.queue_key("wrong", "schedule"), "text")
    orders = [Sweep(queue, "promote", 100) for queue in ("good", "lane", "wrong", "better", "none")]
    results = sweep_all(open_to(node.url), orders)
    assert {q: (r.outcome, r.promoted) for q, r in results.items()} == {
        "good": ("ok", 150),
        "lane": ("error", 0),
        "wrong": ("error", 0),
        "better": ("ok", 150),
        "none": ("ok", 0),
    }
    assert results["wrong"].failure is not None
    assert results["wrong"].failure.code == "WRONGTYPE"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("queue", ["x" * 255, "é" * 127], ids=["ASCII", "accents"])
def test_a_row_of_another_type_blocks_a_queue_of_any_name(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], verb: Verb, queue: str
) -> None:
    """Case "Poison row": what stands before it moves, and it is named, however long its key is."""
    plant(client, SOURCE[verb], {b"JOB1": 1, b"JOB2": 2, b"JOB3": 3}, queue=queue)
    client.delete(wire.row_key(queue, b"JOB2"))
    client.set(wire.row_key(queue, b"JOB2"), "text")
    result = sweep_all(open_to(node.url), [Sweep(queue, verb, 100)])[queue]
    assert (result.moved, result.failure) == (1, None)
    assert result.blocked is not None
    assert result.blocked.job_id == b"JOB2"


# --- errors by their first word -----------------------------------------------------------------

REPLIES = {
    "LOADING Valkey is loading the dataset in memory": "LOADING",
    "MASTERDOWN Link with MASTER is down": "MASTERDOWN",
    "CLUSTERDOWN Hash slot not served": "CLUSTERDOWN",
    "BUSY Valkey is busy running a script": "BUSY",
    "OOM command not allowed when used memory > 'maxmemory'.": "OOM",
    "MISCONF Errors writing to the AOF file: No space left on device": "MISCONF",
    "TRYAGAIN Multiple keys request during rehashing of slot": "TRYAGAIN",
    "UNBLOCKED force unblock from blocking operation": "UNBLOCKED",
    "READONLY You can't write against a read only replica.": "READONLY",
    "ERR Error running script: @user_script:1: -READONLY You can't write": "READONLY",
    "NOPERM User u has no permissions to access one of the keys": "NOPERM",
    "MOVED 5 127.0.0.1:1": "MOVED",
    "NOVEL thing": "NOVEL",
}


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize(("text", "code"), REPLIES.items())
@pytest.mark.parametrize("verb", VERBS)
def test_an_error_reply_is_the_result_of_its_queue_alone(
    stub: Stub, open_to: Callable[..., Node], verb: Verb, text: str, code: str, queued: bool
) -> None:
    """Case "LOADING, BUSY, OOM, ...": typed, sent once, neighbours go on, the next round tries."""
    bad = refused(text) if queued else error(text)
    good = integer(3) if verb == "promote" else array(ids(b"JOB1", b"JOB2", b"JOB3"), array())
    none = integer(0) if verb == "promote" else array(array(), array())
    stub.on(COMMAND[verb], bad, none, word=b"{bad}")
    stub.on(COMMAND[verb], good, none, word=b"{good}")
    node = open_to(stub.url)
    results = sweep_all(node, [Sweep(queue, verb, 100) for queue in ("bad", "good")])
    assert results["bad"].failure is not None
    assert results["bad"].failure.code == code
    assert results["bad"].outcome == "error"
    assert (results["good"].moved, results["good"].outcome) == (3, "ok")
    assert stub.count(COMMAND[verb], b"{bad}") == 1
    assert sweep_all(node, [Sweep("bad", verb, 100)])["bad"].outcome == "ok"


@pytest.mark.parametrize(
    "text",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script: @user_script:1: -READONLY You can't write",
        "MASTERDOWN Link with MASTER is down",
        "LOADING Valkey is loading the dataset in memory",
        "ERR unknown command 'EMQ.PROMOTE'",
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_a_demoted_or_stripped_server_is_dialled_anew(
    stub: Stub, open_to: Callable[..., Node], verb: Verb, text: str
) -> None:
    """Case "READONLY from a demoted primary": dropping the connection resolves the name anew."""
    stub.on(COMMAND[verb], refused(text))
    node = open_to(stub.url)
    with node.link(), node.link():
        pass  # two idle connections: neither may be used again
    sweep(node, verb)
    assert stub.connections == 2
    stub.on(COMMAND[verb], integer(0) if verb == "promote" else array(array(), array()))
    assert sweep(node, verb).outcome == "ok"
    assert stub.connections == 3


SHAPES: dict[str, dict[Verb, Answer]] = {
    "number as text": {"promote": bulk(b"7"), "stalled_check": bulk(b"7")},
    "array": {"promote": array(integer(7)), "stalled_check": array(array())},
    "map": {
        "promote": Answer(b"%1\r\n+moved\r\n:7\r\n"),
        "stalled_check": Answer(b"%1\r\n+moved\r\n:7\r\n"),
    },
    "nil": {"promote": NIL, "stalled_check": NIL},
    "nil array": {"promote": Answer(b"*-1\r\n"), "stalled_check": Answer(b"*-1\r\n")},
    "negative": {"promote": integer(-7), "stalled_check": integer(-7)},
    "double": {"promote": Answer(b",7.0\r\n"), "stalled_check": Answer(b",7.0\r\n")},
    "boolean": {"promote": Answer(b"#t\r\n"), "stalled_check": Answer(b"#t\r\n")},
    "simple text": {"promote": simple("OK"), "stalled_check": simple("OK")},
    "flat ids": {"promote": ids(b"JOB1"), "stalled_check": ids(b"JOB1", b"JOB2")},
    "numbers for ids": {
        "promote": array(),
        "stalled_check": array(array(integer(1)), array()),
    },
}


@pytest.mark.parametrize("answers", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_reply_of_an_odd_shape_is_an_error_and_never_a_count(
    stub: Stub, open_to: Callable[..., Node], verb: Verb, answers: dict[Verb, Answer]
) -> None:
    """Case "RESP3 push frames and reply shapes": the outline is told, the neighbours are right."""
    good = integer(3) if verb == "promote" else array(ids(b"JOB1", b"JOB2", b"JOB3"), array())
    none = integer(0) if verb == "promote" else array(array(), array())
    stub.on(COMMAND[verb], good, none)
    stub.on(COMMAND[verb], answers[verb], word=b"{odd}")
    orders = [Sweep(queue, verb, 100) for queue in ("odd", "good")]
    results = sweep_all(open_to(stub.url), orders)
    assert results["odd"].failure is not None
    assert results["odd"].failure.code == "shape"
    assert " was answered with " in results["odd"].failure.message
    assert results["odd"].moved == 0
    assert results["good"].moved == 3


# --- replies that never came --------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_sweep_that_is_not_answered_in_time_is_unknown_and_not_sent_again(
    stub: Stub, open_to: Callable[..., Node], verb: Verb
) -> None:
    """Case "Library retries re-send a slow sweep": one arrival, and the outcome is unknown."""
    good = integer(3) if verb == "promote" else array(ids(b"JOB1"), array())
    stub.on(COMMAND[verb], late(good, 2))
    result = sweep(open_to(stub.url, timeout="700ms"), verb)
    assert (result.outcome, result.unknown, result.moved) == ("unknown", 1, 0)
    assert result.failure is not None
    assert result.failure.code == "timeout"
    assert stub.count(COMMAND[verb]) == 1


def test_a_late_reply_is_not_counted_for_another_queue(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Cancelled call and the reply of another": `b` is counted 7, never 111."""
    stub.on("EMQ.PROMOTE", late(integer(111), 2), word=b"{a}")
    stub.on("EMQ.PROMOTE", integer(7), integer(0), word=b"{b}")
    node = open_to(stub.url, timeout="700ms")
    assert sweep_all(node, [Sweep("a", "promote", 100)])["a"].outcome == "unknown"
    assert sweep_all(node, [Sweep("b", "promote", 100)])["b"].promoted == 7


LOSSES = {
    "silence": (SILENCE, "timeout"),
    "close": (HANG_UP, "connection"),
    "close in mid-reply": (cut(integer(123), 2), "connection"),
    "garbage": (Answer(b"HTTP/1.1 400\r\n"), "connection"),
}


@pytest.mark.parametrize(("answer", "code"), LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("verb", VERBS)
def test_what_was_answered_before_the_loss_counts_and_the_rest_is_unknown(
    stub: Stub, open_to: Callable[..., Node], verb: Verb, answer: Answer, code: str
) -> None:
    """Case "Errors that are not RedisError": sent and unanswered is counted, queue by queue."""
    good = integer(3) if verb == "promote" else array(ids(b"JOB1", b"JOB2", b"JOB3"), array())
    none = integer(0) if verb == "promote" else array(array(), array())
    stub.on(COMMAND[verb], good, none)
    stub.on(COMMAND[verb], answer, word=b"{lost}")
    node = open_to(stub.url, timeout="800ms")
    orders = [Sweep(queue, verb, 100) for queue in ("before", "lost", "after")]
    orders += [Sweep(f"unsent{number}", verb, 2_000) for number in range(2)]
    results = sweep_all(node, orders, drain=False)
    assert {q: (r.outcome, r.moved) for q, r in results.items()} == {
        "before": ("ok", 3),
        "lost": ("unknown", 0),
        "after": ("unknown", 0),
        "unsent0": ("error", 0),
        "unsent1": ("error", 0),
    }
    assert {r.failure.code for r in results.values() if r.failure} == {code}
    assert sweep_all(node, [Sweep("after", verb, 100)])["after"].outcome == "ok"


def test_a_queue_that_still_waited_when_the_node_was_lost_is_no_success(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A queue that was to be swept again shares the fault that ended its round."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"), word=b"{deep}")
    stub.on("EMQ.PROMOTE", integer(100), word=b"{deep}")
    stub.on("EMQ.PROMOTE", HANG_UP, word=b"{lost}")
    orders = [Sweep(queue, "promote", 100) for queue in ("deep", "lost")]
    results = sweep_all(open_to(stub.url), orders)
    assert (results["deep"].promoted, results["deep"].unknown) == (100, 0)
    assert results["deep"].failure is not None
    assert results["deep"].failure.code == "connection"


def test_a_connection_that_was_closed_while_idle_costs_no_unknown(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A server that restarted between two rounds is found out before anything is sent."""
    stub.on("EMQ.PROMOTE", integer(0))
    node = open_to(stub.url)
    for expected in (1, 2):
        result = sweep(node, "promote")
        assert (result.outcome, result.unknown, stub.connections) == ("ok", 0, expected)
        with node.link() as idle:
            pass
        stub.hang_up()
        wait_until(lambda idle=idle: not idle.is_usable(), "the connection is closed")  # type: ignore[misc]


def test_a_dead_node_is_not_tried_again_within_its_pause(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A round while the node backs off sends nothing and says why."""
    stub.stop_listening()
    node = open_to(stub.url)
    first, second = (sweep(node, "promote") for _ in range(2))
    assert first.failure is not None
    assert second.failure is not None
    assert "Connection refused" in second.failure.message
    assert (first.skipped, second.skipped) == (False, True)
    assert (first.unknown, second.unknown) == (0, 0)


def test_a_round_meant_for_one_server_process_leaves_another_alone(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """With a run_id, a server that was replaced meanwhile is not swept."""
    result = sweep(open_to(stub.url), "stalled_check", run_id="b" * 40)
    assert (result.skipped, stub.count("EMQ.STALLED.CHECK")) == (True, 0)
    result = sweep(open_to(stub.url), "stalled_check", run_id=RUN_ID.decode())
    assert (result.outcome, stub.count("EMQ.STALLED.CHECK")) == ("ok", 1)


WHOLE: dict[Verb, list[bytes]] = {
    "promote": [
        ids(b"1700000000", b"250000").data,
        ids(b"JOB1", b"5").data,
        integer(123).data,
        array().data,
    ],
    "stalled_check": [
        ids(b"1700000000", b"250000").data,
        simple("OK").data,
        simple("QUEUED").data * 2,
        array(
            array(bulk(RUN_ID), *[integer(0)] * 3, bulk(b"JOB1"), bulk(b"5"), NIL),
            array(ids(b"JOB1", b"JOB2"), ids(b"JOB3")),
        ).data,
        integer(0).data * 4,
    ],
}
"""All that a server answers to a round that moves 123 jobs, and to one that moves three."""

SPLICES = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.integers(0, 8),
        st.binary(max_size=4)
        | st.sampled_from([b":7\r\n", b"*0\r\n", b"-OOM\r\n", b"$-1\r\n", b"+OK\r\n", b"%1\r\n"]),
    ),
    max_size=3,
)


class Talk(Node):
    """A node that says this on a connection of its own, and then falls silent or hangs up."""

    def __init__(self, data: bytes, ends: bool) -> None:
        # Where the end comes by itself, a busy machine may take what time it wants.
        super().__init__("here", lambda: self.connection, 60 if ends else 0.1)
        self.ours, theirs = socket.socketpair()
        self.connection: Any = SimpleNamespace(_sock=theirs, disconnect=theirs.close)
        self.ours.sendall(data)
        if ends:
            self.ours.shutdown(socket.SHUT_WR)

    def open(self, *, brand: bool) -> tuple[Link, Identity]:
        del brand
        return Link("here", self.connection), Identity("run", "9", "", (), 0)


@pytest.mark.parametrize("verb", VERBS)
@given(splices=SPLICES, ends=st.integers(0, 9).map(bool))
def test_spoilt_replies_are_never_a_wrong_count_nor_a_hang(
    verb: Verb, splices: list[tuple[int, int, bytes]], ends: bool
) -> None:
    """Bytes are lost, added and exchanged anywhere among the replies of a round: what is counted
    stands there as such; all else is an error, or unknown, within the deadline."""
    data = whole = b"".join(WHOLE[verb])
    for at, length, put in splices:
        place = at % (len(data) + 1)
        data = data[:place] + put + data[place + length :]
    node = Talk(data, ends)
    started = time.monotonic()
    result = sweep(node, verb, drain=False)
    node.close()
    node.ours.close()
    assert ends or time.monotonic() - started < 3
    if verb == "promote":
        assert result.promoted == 0 or b":%d\r\n" % result.promoted in data
    else:
        # The parser does not look at the two bytes behind a string.
        found = [bulk(job_id).data[:-2] for job_id in result.recovered + result.dead]
        assert all(each in data for each in found)
        assert len(result.expiries) == result.moved
    if data == whole and ends:
        assert (result.moved, result.outcome) == (123 if verb == "promote" else 3, "ok")
    assert (result.outcome == "ok") is (not result.failure and not result.blocked)


# --- what an ACL may deny -----------------------------------------------------------------------

SMALLEST = "+emq.version +get +emq.promote +emq.stalled.check"
"""Without the rest, moves are counted and drained; lateness, wakes and causes are not known."""

FULL = f"{SMALLEST} +time +zrange +zcard +multi +exec +eval_ro +info +hget +client|setname"
"""All that a sweep sends; the commands inside the peek are checked too."""

ACLS: dict[str, tuple[str, str]] = {
    "full": (FULL, "stall"),
    "no peek": (f"{FULL} -eval_ro", "unattributed"),
    "no INFO": (f"{FULL} -info", "unattributed"),
    "no row reads": (f"{FULL} -hget", "unattributed"),
    "no MULTI": (f"{FULL} -multi", "unattributed"),
    "no EXEC": (f"{FULL} -exec", "unattributed"),
    "no TIME": (f"{FULL} -time", "stall"),
    "no heads": (f"{FULL} -zrange", "unattributed"),
    "no sizes": (f"{FULL} -zcard", "stall"),
    "smallest": (SMALLEST, "unattributed"),
}


@pytest.fixture
def login(node: DevNode, client: redis.Redis) -> Iterator[Callable[..., str]]:
    """Makes a user with these rules, and returns the URL to log in with."""

    def make(*rules: str) -> str:
        given = ("reset", "on", ">pw", "~{emq}:version", *rules)
        client.execute_command("ACL", "SETUSER", "sweeper", *given)  # type: ignore[no-untyped-call]
        return node.url.replace("redis://", "redis://sweeper:pw@")

    yield make
    client.execute_command("ACL", "DELUSER", "sweeper")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("rules", "cause"), ACLS.values(), ids=ACLS)
def test_an_acl_may_deny_all_but_fence_and_verbs(
    client: redis.Redis,
    login: Callable[..., str],
    open_to: Callable[..., Node],
    rules: str,
    cause: str,
) -> None:
    """Case "ACL user with only the two verbs": what is denied is unknown, what moved is exact."""
    plant(client, "schedule", numbered(250))
    leases = {b"A" + job_id: at for job_id, at in numbered(250).items()}
    plant(client, "active", leases, lease_epoch=run_id(client))
    opened = open_to(login("~emq:*", *rules.split()))
    promotion = sweep(opened, "promote")
    assert (promotion.promoted, promotion.outcome) == (250, "ok")
    check = sweep(opened, "stalled_check")
    assert (len(check.dead), check.outcome) == (250, "ok")
    assert Counter(expiry.cause for expiry in check.expiries) == {cause: 250}
    assert sweep(opened, "promote").outcome == "ok"


def test_a_queue_that_an_acl_denies_fails_alone(
    client: redis.Redis, login: Callable[..., str], open_to: Callable[..., Node]
) -> None:
    """Case "ACL user with only the two verbs": NOPERM of one queue is that queue's result."""
    opened = open_to(login("~emq:{mine}:*", "+@all"))
    for verb in VERBS:
        plant(client, SOURCE[verb], numbered(3), queue="mine")
        results = sweep_all(opened, [Sweep(queue, verb, 100) for queue in ("theirs", "mine")])
        assert results["theirs"].failure is not None
        assert results["theirs"].failure.code == "NOPERM"
        assert (results["mine"].moved, results["mine"].outcome) == (3, "ok")


@pytest.mark.parametrize(
    "words",
    [
        "NOPERM User u has no permissions to run the 'eval_ro' command",
        "ERR unknown command 'EVAL_RO', with args beginning with: 'local limit'",
    ],
)
def test_a_denied_peek_is_left_out_until_the_next_connection(
    stub: Stub, open_to: Callable[..., Node], words: str
) -> None:
    """EXECABORT swept nothing: the check goes alone, and a new connection peeks again."""
    stub.on("EVAL_RO", refused(words))
    stub.on(
        "EMQ.STALLED.CHECK",
        simple("discarded"),
        array(ids(b"JOB1"), array()),
        array(array(), array()),
    )
    node = open_to(stub.url)
    result = sweep(node, "stalled_check")
    assert causes(result) == {b"JOB1": "unattributed"}
    assert result.outcome == "ok"
    sweep(node, "stalled_check")
    assert stub.count("EVAL_RO") == 1
    with node.link() as idle:
        pass
    stub.hang_up()
    wait_until(lambda: not idle.is_usable(), "the connection is closed")
    sweep(node, "stalled_check")
    assert stub.count("EVAL_RO") == 2


def test_a_denied_peek_and_a_connection_that_never_lasts_still_sweep(
    stub: Stub, open_to: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection asks for the peek again, but not twice for one queue in one round."""
    stub.on("EVAL_RO", refused("NOPERM User u has no permissions to run the 'eval_ro' command"))
    monkeypatch.setattr(Link, "is_usable", lambda _: False)
    result = sweep(open_to(stub.url), "stalled_check", seconds=5)
    assert (result.outcome, result.passes) == ("ok", 1)
    assert stub.count("EVAL_RO") == 1


def test_a_transaction_that_is_refused_for_other_reasons_sweeps_nothing(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Only a denied peek is worked round; a busy server's refusal is its answer."""
    stub.on("EVAL_RO", refused("BUSY Valkey is busy running a script"))
    result = sweep(open_to(stub.url), "stalled_check")
    assert result.failure is not None
    assert result.failure.code == "BUSY"
    assert stub.count("EMQ.STALLED.CHECK") == 1


# --- what reaches the node ----------------------------------------------------------------------


def test_no_writing_script_and_nothing_unexpected_reaches_a_node(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Contract, section 5: the peek is EVAL_RO; MONITOR shows all that the server was sent."""
    plant(client, "schedule", numbered(250))
    plant(client, "active", {b"A" + j: at for j, at in numbered(250).items()})
    plant(client, "active", {b"JOBLANE": 500}, group=b"g")
    opened = open_to(node.url)
    with connect(node) as watcher, watcher.monitor() as monitor:
        for verb in VERBS:
            foresee(opened, Sweep("orders", verb, 100))
            sweep(opened, verb)
        client.echo("the end")
        seen: Counter[str] = Counter()
        while (command := monitor.next_command())["command"] != "ECHO the end":
            inside = command["client_type"] == "lua"
            seen[("script: " if inside else "") + command["command"].split()[0].upper()] += 1
    assert set(seen) == {
        "CLIENT", "EMQ.VERSION", "GET", "INFO", "TIME", "ZRANGE", "ZCARD", "HMGET",
        "MULTI", "EXEC", "EVAL_RO", "EMQ.PROMOTE", "EMQ.STALLED.CHECK",
        "script: ZRANGE", "script: HGET", "script: INFO",
    }  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_each_queue_of_a_round_is_sent_its_verb_once(
    stub: Stub, open_to: Callable[..., Node], verb: Verb
) -> None:
    """Case "Idle cost and unknown queues": only the queues that were given, each once."""
    sweep_all(open_to(stub.url), [Sweep(queue, verb, 100) for queue in ("a", "b", "c")])
    sent = [arrival.words[2] for arrival in stub.received(COMMAND[verb])]
    assert sent == [wire.queue_key(queue, SOURCE[verb]) for queue in ("a", "b", "c")]


# --- looking without touching -------------------------------------------------------------------


def plant_at_random(client: redis.Redis, chance: random.Random) -> None:
    """A queue of all that a sweep may meet."""
    epochs = [run_id(client), b"e" * 40, None]
    for name in ("schedule", "active"):
        for number in range(chance.randrange(60)):
            job_id = b"JOB%b%03d" % (name[:1].encode(), number)
            at = FAR if chance.random() < 0.1 else chance.randrange(1, 50)
            if chance.random() < 0.1:
                client.zadd(wire.queue_key("orders", name), {job_id: at})
                continue
            fields: dict[str, Any] = {}
            epoch = chance.choice(epochs)
            if epoch:
                fields["lease_epoch"] = epoch
            if chance.random() < 0.5:
                fields["stalled"] = chance.randrange(3)
            if chance.random() < 0.02:
                fields["stalled"] = chance.choice([b"two", b"-1", b"01"])
            if chance.random() < 0.02:
                fields["group"] = b"g"
            if chance.random() < 0.02:
                fields["parent"] = b"JOBP"
            if chance.random() < 0.02:
                fields["state"] = b"dead"
            plant(client, name, {job_id: at}, **fields)


@pytest.mark.parametrize("seed", range(12))
def test_a_preview_touches_nothing_and_tells_exactly_what_the_sweep_then_does(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node], seed: int
) -> None:
    """Ghosts, lanes, wrong states, stamps and counts: preview and sweep agree, id by id."""
    chance = random.Random(seed)
    plant_at_random(client, chance)
    drain = chance.random() < 0.5
    limit, max_stalled = chance.randrange(1, 40), chance.randrange(1, 4)
    opened = open_to(node.url)
    for verb in VERBS:
        digest = client.execute_command("DEBUG DIGEST")  # type: ignore[no-untyped-call]
        told = foresee(opened, Sweep("orders", verb, limit, max_stalled), drain=drain)
        assert client.execute_command("DEBUG DIGEST") == digest  # type: ignore[no-untyped-call]
        order = Sweep("orders", verb, limit, max_stalled)
        done = sweep_all(opened, [order], drain=drain)["orders"]
        assert (told.promoted, told.recovered, told.dead) == (
            done.promoted,
            done.recovered,
            done.dead,
        )
        assert causes(told) == causes(done)
        assert (told.blocked and told.blocked.job_id) == (done.blocked and done.blocked.job_id)
        assert told.outcome == done.outcome


ODD_ROWS: dict[str, Callable[[redis.Redis, bytes], object]] = {
    "a count in words": lambda client, row: client.hset(row, "stalled", "two"),
    "a count with a zero in front": lambda client, row: client.hset(row, "stalled", "01"),
    "a count below zero": lambda client, row: client.hset(row, "stalled", "-2"),
    "a count without room": lambda client, row: client.hset(row, "stalled", 2**62 - 1),
    "a count of an earlier server process": lambda client, row: client.hset(
        row, mapping={"stalled": "two", "lease_epoch": "e" * 40}
    ),
    "no state": lambda client, row: client.hdel(row, "state"),
    "a payload alone": lambda client, row: (client.delete(row), client.hset(row, "payload", "p")),
    "another type": lambda client, row: (client.delete(row), client.set(row, "text")),
    "a set": lambda client, row: (client.delete(row), client.zadd(row, {"x": 1})),
    "no row": lambda client, row: client.delete(row),
}


@pytest.mark.parametrize("spoil", ODD_ROWS.values(), ids=ODD_ROWS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_preview_of_an_odd_row_tells_what_the_sweep_does_with_it(
    node: DevNode,
    client: redis.Redis,
    open_to: Callable[..., Node],
    verb: Verb,
    spoil: Callable[[redis.Redis, bytes], object],
) -> None:
    """A row that refuses, one that counts in no number, a ghost: each as the server takes it."""
    plant(client, SOURCE[verb], {b"JOB1": 1, b"JOB2": 2, b"JOB3": 3})
    spoil(client, wire.row_key("orders", b"JOB2"))
    opened, order = open_to(node.url), Sweep("orders", verb, 100, 2)
    told = foresee(opened, order)
    done = sweep_all(opened, [order])["orders"]
    assert (told.promoted, told.recovered, told.dead) == (done.promoted, done.recovered, done.dead)
    assert causes(told) == causes(done)
    assert (told.blocked and told.blocked.job_id) == (done.blocked and done.blocked.job_id)
    assert (told.outcome, told.failure) == (done.outcome, done.failure)


def test_a_preview_that_cannot_know_the_server_process_does_not_guess(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Without INFO nobody can tell a stall from a crossing before the sweep."""
    stub.on("INFO", error("NOPERM no"))
    node = open_to(stub.url)
    told = foresee(node, Sweep("orders", "stalled_check", 100))
    assert told.failure is not None
    assert "INFO" in told.failure.message
    assert foresee(node, Sweep("orders", "promote", 100)).outcome == "ok"


def test_a_long_preview_can_be_stopped(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """Case "Exit codes and Ctrl-C": the reads of a preview end when they are told to."""
    plant(client, "schedule", numbered(5))
    told = foresee(open_to(node.url), Sweep("orders", "promote", 100), stop=lambda: True)
    assert (told.promoted, told.skipped) == (0, True)


def test_sets_that_hold_more_than_a_page_are_previewed_whole(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """The pages of a preview are for the server's sake and not the answer's."""
    plant(client, "schedule", numbered(2_500))
    opened = open_to(node.url)
    assert foresee(opened, Sweep("orders", "promote", 10)).promoted == 2_500
    assert foresee(opened, Sweep("orders", "promote", 1_700), drain=False).promoted == 1_700
