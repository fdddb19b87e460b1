"""Rounds: grace after a restart, the guard against mass expiry, pauses after errors, and wakes.

Against a scripted server, with a clock that the test moves on.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from conftest import NameServers, wait_until
from daemon_process import Book
from stub import (
    HANG_UP,
    RUN_ID,
    SILENCE,
    TOKENS,
    Answer,
    Stub,
    array,
    bulk,
    cut,
    error,
    ids,
    integer,
    late,
)

from emqtimerd import node as nodes_module
from emqtimerd import rounds as rounds_module
from emqtimerd import sweeper as sweeper_module
from emqtimerd.chronicle import Chronicle
from emqtimerd.config import NodeSettings, Settings
from emqtimerd.ledger import Ledger
from emqtimerd.log import Log
from emqtimerd.node import BACKOFF_CAP_SECONDS, Node, NodeFault, open_node
from emqtimerd.rounds import QUEUE_BACKOFF_CAP_SECONDS, Rounds
from emqtimerd.sweeper import Verb
from emqtimerd.timer import Cadence, Wake
from emqtimerd.topology import Nodes, open_nodes

T = TypeVar("T")

OTHER_RUN_ID = b"b" * 40


class Clock:
    """The module `time`, moved on by the test."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (nodes_module, rounds_module, sweeper_module):
        monkeypatch.setattr(module, "time", clock)
    # Jitter at its longest, so that the test knows when a pause is over.
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    return clock


class Desk:
    """Rounds with all that is around them."""

    def __init__(self, stub: Stub, queues: list[str], **settings: Any) -> None:
        self.stub = stub
        self.queues = queues
        self.ledger = Ledger()
        self.book = Book()
        self.stopping = False
        self.nodes = open_nodes(self._settings(settings).node)
        chronicle = Chronicle(cast("Log", self.book))
        self.rounds = Rounds(self.nodes, self.ledger, chronicle, lambda: self.stopping)
        self.ledger.set_queues(queues)
        self.cadences = self.configure(**settings)

    def _settings(self, tree: dict[str, Any]) -> Settings:
        node = {"url": self.stub.url, "timeout": "1s", **tree.get("node", {})}
        return Settings.model_validate({**tree, "node": node, "queues": self.queues})

    def configure(self, **settings: Any) -> dict[Cadence, list[str]]:
        return self.rounds.configure(self._settings(settings), self.queues)

    def promote(self) -> list[Wake]:
        return self.rounds.run("promote", self.queues)

    def promote_late(self, queue: str, answer: Answer) -> threading.Thread:
        """Have a round of another thread wait for this answer; return when it was asked for."""
        self.stub.on("EMQ.PROMOTE", late(answer, 1.5), word=b"{%b}" % queue.encode())
        slow = threading.Thread(target=self.rounds.run, args=("promote", [queue]))
        slow.start()
        wait_until(lambda: self.stub.count("EMQ.PROMOTE") == 1, "a sweep that is answered late")
        return slow

    def check(self) -> list[Wake]:
        """One round of stall checks, without the wakes for a look at all queues at the start."""
        return self.rounds.run("stalled_check", self.queues)


@pytest.fixture
def open_desk(stub: Stub, clock: Clock) -> Iterator[Callable[..., Desk]]:
    with ExitStack() as stack:

        def open_(*queues: str, **settings: Any) -> Desk:
            desk = Desk(stub, list(queues) or ["orders"], **settings)
            stack.callback(desk.nodes.close)
            return desk

        yield open_


def info(run_id: bytes = RUN_ID, uptime: int = 60) -> Answer:
    text = b"valkey_version:9.1.2\r\nrun_id:%b\r\nuptime_in_seconds:%d\r\n" % (run_id, uptime)
    return bulk(text)


def restart(stub: Stub, run_id: bytes = OTHER_RUN_ID) -> None:
    """Let another server process answer from now on."""
    stub.on("INFO", info(run_id, 0))
    stub.hang_up()


# --- the grace ----------------------------------------------------------------------------------


def test_at_the_start_what_remains_of_the_grace_counts(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """Leases after an outage: a server that has been up for 3 s gets the other 7 s; until then its
    leases are only looked at. Promotion waits for nothing."""
    stub.on("INFO", info(uptime=3))
    desk = open_desk()
    desk.promote()
    assert stub.count("EMQ.PROMOTE") == 1
    wakes = [wake for wake in desk.check() if wake.at > clock.monotonic() + 2]
    assert stub.count("EMQ.STALLED.CHECK") == 0
    assert stub.count("EVAL_RO") == 1
    assert [(wake.verb, wake.queue) for wake in wakes] == [("stalled_check", "orders")]
    assert wakes[0].at - clock.monotonic() == pytest.approx(7, abs=1)
    clock.ahead = 5
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK") == 0
    clock.ahead = 8.5
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK") == 1


def test_while_the_grace_lasts_sizes_and_leases_are_shown(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """Leases after an outage: nothing is checked, and everything is looked at."""
    stub.on("INFO", info(uptime=0))
    stub.on("ZCARD", integer(1), integer(2), integer(3), integer(4))
    stub.on("EVAL_RO", array(bulk(RUN_ID), integer(5), integer(6), integer(7)))
    desk = open_desk()
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK") == 0
    queue = desk.ledger.queues()[0]
    assert (queue.jobs, queue.leases) == ((1, 2, 3, 4), (5, 6, 7))
    assert queue.stalled_check.ok == 0


def test_a_server_that_has_been_up_for_long_gets_none(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """The daemon's own restart is no reason to wait."""
    open_desk().check()
    assert stub.count("EMQ.STALLED.CHECK") == 1


def test_without_info_there_is_no_grace_at_the_start(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """An ACL that hides the server's age costs the grace, not the checks."""
    stub.on("INFO", error("NOPERM no permission"))
    open_desk().check()
    assert stub.count("EMQ.STALLED.CHECK") == 1


def test_another_server_process_gets_the_whole_grace(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """Leases after a restart: the first stall check of each queue waits, each as long as it is
    configured to; the restart is counted and told."""
    own = {"impatient": {"stalled_check": {"restart_grace": "0s"}}}
    desk = open_desk("orders", "impatient", queue=own)
    desk.check()
    restart(stub)
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK", b"{orders}") == 1
    assert stub.count("EMQ.STALLED.CHECK", b"{impatient}") == 2
    assert desk.ledger.overview().nodes[0].restarts == 1
    assert "node restarted" in desk.book.take()
    clock.ahead = 9
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK", b"{orders}") == 1
    clock.ahead = 10.2
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK", b"{orders}") == 2


def test_after_a_restart_all_leases_are_looked_at(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """Whoever notices the restart has every queue looked at within a second, not all at once."""
    queues = [f"queue-{number}" for number in range(50)]
    desk = open_desk(*queues)
    desk.promote()
    restart(stub)
    now = clock.monotonic()
    wakes = desk.promote()
    assert sorted(wake.queue for wake in wakes) == sorted(queues)
    assert {wake.verb for wake in wakes} == {"stalled_check"}
    moments = sorted(wake.at for wake in wakes)
    assert moments[0] >= now
    assert moments[-1] > now + 0.7
    assert moments[-1] < clock.monotonic() + 1
    assert desk.promote() == []


@pytest.mark.parametrize(("outage", "waits"), [(3.0, False), (9.0, False), (11.0, True)])
def test_an_outage_longer_than_the_grace_is_like_a_restart(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock, outage: float, waits: bool
) -> None:
    """The same server after a cut network: workers were cut off too. A blip is no outage."""
    desk = open_desk()
    desk.check()
    stub.on("EMQ.VERSION", HANG_UP)
    stub.hang_up()
    desk.check()
    clock.ahead += outage
    stub.on("EMQ.VERSION", bulk(b"promote stalled.check"))
    checks = stub.count("EMQ.STALLED.CHECK")
    desk.check()
    assert (stub.count("EMQ.STALLED.CHECK") == checks) is waits
    clock.ahead += 10.2
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK") > checks
    assert desk.ledger.overview().nodes[0].restarts == 0


def test_a_restart_in_the_middle_of_a_round_does_not_get_past_the_grace(
    open_desk: Callable[..., Desk], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that was asked who it is, is the one that is checked: another one is left for the
    next round."""
    desk = open_desk()
    desk.check()

    def survey(*_: object) -> list[Any]:
        restart(stub)
        return []

    monkeypatch.setattr(rounds_module, "survey", survey)
    desk.check()
    assert stub.count("EMQ.STALLED.CHECK") == 1
    assert desk.ledger.queues()[0].stalled_check.error == 0


def test_what_an_earlier_process_said_is_not_taken_for_what_a_restart_left(
    open_desk: Callable[..., Desk], stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stall check is answered, the server restarts, another round notices that, and only then is
    told what was answered: that all leases were of that process, which then is no more."""
    desk = open_desk()
    desk.promote()
    peeked = [array(bulk(RUN_ID), *map(integer, counts)) for counts in ((2, 0, 0), (0, 2, 0))]
    stub.on("EVAL_RO", *peeked)
    tell = desk.rounds._tell

    def tell_late(verb: Verb, *told: Any) -> None:
        if verb == "stalled_check" and stub.count("EVAL_RO") == 1:
            restart(stub)
            desk.promote()
            assert desk.book.take()[-1] == "node restarted"
        tell(verb, *told)

    monkeypatch.setattr(desk.rounds, "_tell", tell_late)
    desk.check()
    assert desk.book.take() == []
    desk.check()
    assert desk.book.last("restart report: leases of an earlier server process")["leases"] == 2


def test_a_hidden_run_id_is_no_restart(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """An ACL that denies INFO for a while, at the start or later: nobody restarted; and a restart
    that happens behind its back is noticed as soon as the run_id can be read again."""
    stub.on("INFO", error("NOPERM no permission"))
    desk = open_desk()
    desk.promote()
    for answer in (info(), error("NOPERM no permission"), info()):
        stub.on("INFO", answer)
        stub.hang_up()
        desk.promote()
    assert "node restarted" not in desk.book.take()
    assert desk.ledger.overview().nodes[0].restarts == 0
    stub.on("INFO", error("NOPERM no permission"))
    stub.hang_up()
    desk.promote()
    restart(stub)
    desk.promote()
    assert desk.book.last("node restarted")["was"] == RUN_ID.decode()
    assert desk.ledger.overview().nodes[0].restarts == 1


def test_each_of_many_restarts_is_told_once(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """A server that restarts again and again, and at last is the first process once more (an
    address that leads to two servers)."""
    desk = open_desk()
    desk.promote()
    run_ids = [b"%d" % number * 40 for number in range(5)] + [RUN_ID]
    for run_id in run_ids:
        restart(stub, run_id)
        for _ in range(3):
            desk.promote()
        desk.check()
    told = [(f["was"], f["run_id"]) for _, event, f in desk.book.lines if event == "node restarted"]
    expected = [RUN_ID.decode(), *(run_id.decode() for run_id in run_ids)]
    assert told == list(pairwise(expected))
    assert desk.ledger.overview().nodes[0].restarts == len(run_ids)


# --- mass expiry --------------------------------------------------------------------------------

GUARD = {"stalled_check": {"mass_expiry": {"share": 0.5, "at_least": 20}, "max_stalled": 3}}


@pytest.mark.parametrize(
    ("expired", "leases", "raised"),
    [(0, 0, False), (19, 19, False), (20, 40, True), (20, 41, False), (40, 40, True)],
)
def test_the_guard_has_two_thresholds(
    open_desk: Callable[..., Desk], stub: Stub, expired: int, leases: int, raised: bool
) -> None:
    """Both the share and the number must be reached; the check is then really sent with
    max_stalled + 1, and the gauge says so."""
    stub.on("ZCOUNT", integer(expired))
    stub.on("ZCARD", integer(leases))
    desk = open_desk(**GUARD)
    desk.check()
    (arrival,) = stub.received("EMQ.STALLED.CHECK")
    assert arrival.words[-2:] == (b"4" if raised else b"3", b"100")
    assert desk.ledger.queues()[0].guarded is raised


def test_the_guard_is_told_at_both_ends(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """One line each, and the next check is as strict as before."""
    stub.on("ZCOUNT", integer(20), integer(20), integer(0))
    stub.on("ZCARD", integer(30))
    desk = open_desk(**GUARD)
    for _ in range(4):
        desk.check()
    assert [arrival.words[-2] for arrival in stub.received("EMQ.STALLED.CHECK")] == [
        *[b"4"] * 2,
        *[b"3"] * 2,
    ]
    assert [event for event in desk.book.take() if "mass" in event] == [
        "mass expiry: the stall check is sent with max_stalled + 1",
        "mass expiry is over",
    ]
    assert desk.ledger.queues()[0].guarded is False


def test_queues_that_the_grace_leaves_alone_are_not_counted(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """A mass of expired leases is what a restart leaves behind: of whom no check is sent to, none
    is judged, and its gauge says nothing of a check that was not sent."""
    stub.on("INFO", info(uptime=0))
    stub.on("ZCOUNT", integer(20))
    stub.on("ZCARD", integer(20))
    impatient = {"stalled_check": {**GUARD["stalled_check"], "restart_grace": "0s"}}
    desk = open_desk("orders", "impatient", queue={"impatient": impatient}, **GUARD)
    desk.check()
    assert [arrival.words[1] for arrival in stub.received("ZCOUNT")] == [b"emq:{impatient}:active"]
    orders, other = desk.ledger.queues()
    assert (orders.guarded, other.guarded) == (None, True)
    clock.ahead = 10.2
    desk.check()
    assert stub.count("ZCOUNT", b"{orders}") == 1
    assert desk.ledger.queues(["orders"])[0].guarded is True


def test_without_the_guard_nobody_counts(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """Off by default: no further question, no gauge; and a reload may switch it off again."""
    desk = open_desk()
    desk.check()
    assert stub.count("ZCOUNT") == 0
    assert desk.ledger.queues()[0].guarded is None
    stub.on("ZCOUNT", integer(20))
    stub.on("ZCARD", integer(20))
    desk.configure(**GUARD)
    desk.check()
    assert desk.ledger.queues()[0].guarded is True
    desk.configure()
    desk.check()
    assert desk.ledger.queues()[0].guarded is None
    assert stub.received("EMQ.STALLED.CHECK")[-1].words[-2] == b"1"


# --- pauses after errors ------------------------------------------------------------------------


def test_a_queue_that_errs_is_tried_ever_less_often(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """Poison row: the pause doubles up to a cap, ends with the first good sweep, and is the
    queue's own; the queue next to it is swept each time."""
    stub.on("EMQ.PROMOTE", error("ERR no"), word=b"{bad}")
    desk = open_desk("bad", "good")
    tries: list[float] = []
    while clock.ahead < 40:
        count = stub.count("EMQ.PROMOTE", b"{bad}")
        desk.promote()
        if stub.count("EMQ.PROMOTE", b"{bad}") > count:
            tries.append(clock.ahead)
        clock.ahead += 0.5
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:2] == pytest.approx([2.0, 4.0], abs=1.1)
    assert max(pauses) <= QUEUE_BACKOFF_CAP_SECONDS + 0.6
    assert pauses[-1] == pytest.approx(QUEUE_BACKOFF_CAP_SECONDS, abs=1.1)
    assert stub.count("EMQ.PROMOTE", b"{good}") == 80
    stub.on("EMQ.PROMOTE", integer(0), word=b"{bad}")
    clock.ahead += QUEUE_BACKOFF_CAP_SECONDS
    desk.promote()
    count = stub.count("EMQ.PROMOTE", b"{bad}")
    desk.promote()
    assert stub.count("EMQ.PROMOTE", b"{bad}") == count + 1
    assert desk.book.take().count("sweep failed") == 1


@pytest.mark.parametrize("part", [0.5, 0.75])
def test_a_queues_pause_is_jittered_in_its_upper_half(
    open_desk: Callable[..., Desk],
    stub: Stub,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    part: float,
) -> None:
    """Queues that failed together are not tried in step, and none at once; the wake is for the
    moment when the pause is over."""

    def uniform(least: float, most: float) -> float:
        assert (least, most) == (0.5, 1)
        return part

    monkeypatch.setattr(random, "uniform", uniform)
    stub.on("EMQ.PROMOTE", error("ERR no"))
    desk = open_desk(promote={"interval": "1h"})
    for tries, pause in enumerate((10.0, 20.0, 40.0), start=1):
        before = clock.monotonic()
        (wake,) = [wake for wake in desk.promote() if wake.verb == "promote"]
        assert before + part * pause <= wake.at <= clock.monotonic() + part * pause
        clock.ahead += part * pause / 2
        assert desk.promote() == []
        assert stub.count("EMQ.PROMOTE") == tries
        clock.ahead += max(wake.at - clock.monotonic(), 0)


def test_a_blocked_queue_is_not_woken(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """It waits for somebody who takes the row away, and for its next turn; one that failed for
    another reason may be well long before that."""
    stub.on("EMQ.PROMOTE", error("EMQSTATE JOB1 not native"), word=b"{blocked}")
    stub.on("EMQ.PROMOTE", error("ERR no"), word=b"{failed}")
    desk = open_desk("blocked", "failed", promote={"interval": "1h", "limit": 1})
    wakes = [wake.queue for wake in desk.promote() if wake.verb == "promote"]
    assert wakes == ["failed"]
    assert desk.ledger.queues(["blocked"])[0].promote.blocked
    clock.ahead += 9
    assert desk.promote() == []
    assert stub.count("EMQ.PROMOTE", b"{blocked}") == 1


def test_a_pause_is_never_longer_than_a_long_interval(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """A queue that is swept once a minute is tried each minute, failing or not."""
    stub.on("EMQ.PROMOTE", error("ERR no"))
    desk = open_desk(promote={"interval": "1m"})
    for tries in range(1, 6):
        desk.promote()
        assert stub.count("EMQ.PROMOTE") == tries
        clock.ahead += 60.1


def test_a_queue_may_be_blocked_for_days(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """The doubling has an end before the numbers do."""
    stub.on("EMQ.PROMOTE", error("EMQSTATE JOB1 not native"))
    desk = open_desk(promote={"limit": 1})
    for _ in range(1_200):
        desk.promote()
        clock.ahead += QUEUE_BACKOFF_CAP_SECONDS + 0.1
    assert stub.count("EMQ.PROMOTE") == 1_200
    assert desk.book.take().count("sweep blocked") == 1


def test_the_nodes_fault_is_no_pause_of_the_queues(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """After an outage every queue is swept with the first round that the node answers."""
    stub.on("EMQ.VERSION", HANG_UP)
    desk = open_desk("orders", "emails")
    for _ in range(10):
        assert {wake.queue for wake in desk.promote()} == {"orders", "emails"}
        clock.ahead += BACKOFF_CAP_SECONDS
    stub.on("EMQ.VERSION", bulk(b"promote stalled.check"))
    desk.promote()
    assert stub.count("EMQ.PROMOTE") == 2
    # Each direct try has words of its own; none of them is told twice in a row.
    assert 'write "rediss://"' in desk.book.last("node down")["fix"]
    assert desk.book.take().count("node down") == 1


FIXES: dict[str, tuple[dict[str, Any], str]] = {
    "a TLS file": (
        {"url": "rediss://127.0.0.1:1", "tls": {"ca_file": "/dev/null/ca.pem"}},
        "let node.tls name PEM files",
    ),
    "a password file": (
        {"password_file": "/dev/null/password"},
        "write the password into that file",
    ),
    "a name": (
        {"url": "redis://node.test", "connect_timeout": "50ms"},
        "see to the name servers of this machine",
    ),
}


@pytest.mark.parametrize(("node", "words"), FIXES.values(), ids=FIXES)
def test_what_to_do_is_told_with_a_node_that_is_down(
    open_desk: Callable[..., Desk],
    clock: Clock,
    name_servers: NameServers,
    node: dict[str, Any],
    words: str,
) -> None:
    """It is that of what was found, also while the node backs off and the look-after found it."""
    name_servers.names["node.test"] = []
    desk = open_desk(node=node)
    for look in (desk.promote, desk.nodes.tend, desk.promote):
        look()
        assert desk.book.last("node down")["fix"].startswith(words)
        clock.ahead += BACKOFF_CAP_SECONDS
    assert desk.book.take() == ["node down"]


@pytest.mark.parametrize(
    ("trouble", "pause"),
    [(HANG_UP, 5), (SILENCE, 5), (error("TRYAGAIN later"), 5), (error("LOADING"), 10)],
)
def test_what_ends_by_itself_is_tried_again_before_a_turn_that_is_far(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock, trouble: Answer, pause: float
) -> None:
    """Due-time wakes: with an interval of an hour, a blip of the node costs a due job seconds."""
    stub.on("EMQ.PROMOTE", trouble, integer(0))
    desk = open_desk(promote={"interval": "1h"}, node={"timeout": "700ms"})
    (wake,) = [wake for wake in desk.promote() if wake.verb == "promote"]
    assert pause - 1 < wake.at - clock.monotonic() <= pause
    clock.ahead += pause + 0.1
    assert [wake for wake in desk.promote() if wake.verb == "promote"] == []
    assert stub.count("EMQ.PROMOTE") == 2


def test_a_connection_that_breaks_late_is_no_news_of_the_node(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """Several rounds wait for a server that went away silently; the first that gives up tells it,
    the next one reaches the node anew. Those that give up after that bring it down no more."""
    stub.on("EMQ.PROMOTE", HANG_UP, integer(0), word=b"{orders}")
    desk = open_desk("orders", "emails", node={"timeout": "5s"})
    slow = desk.promote_late("emails", cut(integer(7), 1))
    for _ in range(2):
        desk.rounds.run("promote", ["orders"])
    assert desk.book.take() == ["node down", "node up"]
    slow.join()
    assert desk.book.take() == []
    assert desk.ledger.overview().nodes[0].up
    assert desk.ledger.queues(["emails"])[0].promote.unknown == 1


def test_a_connection_that_breaks_late_does_not_change_why_a_node_is_down(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """A server restarts and loads its data, which new connections are told; of one that was in use
    meanwhile it is seen only now that it broke."""
    stub.on("EMQ.PROMOTE", HANG_UP, word=b"{orders}")
    desk = open_desk("orders", "emails", node={"timeout": "5s"})
    slow = desk.promote_late("emails", cut(integer(7), 1))
    stub.on("EMQ.VERSION", error("LOADING"), to_newcomers=True)
    desk.rounds.run("promote", ["orders"])
    assert desk.book.last("node down")["code"] == "LOADING"
    desk.book.take()
    slow.join()
    assert desk.book.take() == []
    assert "LOADING" in desk.ledger.overview().nodes[0].reason
    assert desk.ledger.queues(["emails"])[0].promote.unknown == 1


def test_an_answer_from_before_a_fault_is_no_news_of_the_node(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """A server begins to load its data while another round waits for its answer, and tells of it
    later: the node is not up for a moment."""
    stub.on("EMQ.PROMOTE", error("LOADING"), word=b"{orders}")
    desk = open_desk("orders", "emails", "labels", node={"timeout": "5s"})
    slow = desk.promote_late("emails", integer(0))
    desk.rounds.run("promote", ["orders"])
    stub.on("EMQ.VERSION", error("LOADING"))
    desk.rounds.run("promote", ["labels"])
    assert "node down" in desk.book.take()
    slow.join()
    assert desk.book.take() == []
    assert not desk.ledger.overview().nodes[0].up
    assert desk.ledger.queues(["emails"])[0].promote.ok == 1


def test_a_connection_from_before_a_fault_is_news_once_it_is_asked_again(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """No other could be made while it was waited for; then its answer may be older than that. If
    the server hangs by now, it would be up for a moment between two node down."""
    desk = open_desk("orders", "emails", node={"timeout": "5s"})
    slow = desk.promote_late("emails", integer(0))
    stub.on("EMQ.VERSION", error("LOADING"), to_newcomers=True)
    desk.rounds.run("promote", ["orders"])
    assert desk.book.take() == ["node down"]
    slow.join()
    assert desk.book.take() == []
    desk.rounds.run("promote", ["orders"])
    assert desk.book.take() == ["node up"]
    assert stub.count("EMQ.VERSION") == 2


def test_a_round_whose_reply_is_lost_is_unknown_and_goes_on(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """Half-open sockets: counted as unknown, once, and the next round sweeps again."""
    stub.on("EMQ.PROMOTE", SILENCE, integer(0))
    desk = open_desk(node={"timeout": "700ms"})
    desk.promote()
    desk.promote()
    facts = desk.ledger.queues()[0].promote
    assert (facts.unknown, facts.ok) == (1, 1)
    assert desk.ledger.overview().nodes[0].up


# --- settings -----------------------------------------------------------------------------------


def test_cadences_come_from_each_queues_own_settings(open_desk: Callable[..., Desk]) -> None:
    """A section of the queue's own wins, then the first glob that matches, then the general."""
    desk = open_desk(
        "orders",
        "bulk-1",
        "bulk-2",
        queue={"bulk-2": {"promote": {"interval": "2s"}}},
        match=[{"glob": "bulk-*", "promote": {"interval": "5s", "limit": 1_000}}],
    )
    assert desk.cadences == {
        Cadence("promote", 1.0): ["orders"],
        Cadence("promote", 5.0): ["bulk-1"],
        Cadence("promote", 2.0): ["bulk-2"],
        Cadence("stalled_check", 30.0): ["orders", "bulk-1", "bulk-2"],
    }


def test_a_reload_keeps_what_was_learned(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """A queue whose settings stay keeps its pause; one whose settings change is tried at once."""
    stub.on("EMQ.PROMOTE", error("ERR no"))
    desk = open_desk("orders", "emails")
    desk.promote()
    assert stub.count("EMQ.PROMOTE") == 2
    desk.configure(queue={"emails": {"promote": {"limit": 7}}})
    desk.promote()
    assert stub.count("EMQ.PROMOTE", b"{orders}") == 1
    assert stub.count("EMQ.PROMOTE", b"{emails}") == 2
    assert stub.received("EMQ.PROMOTE", b"{emails}")[-1].words[-1] == b"7"


ONE_SETTING: dict[str, dict[str, Any]] = {
    "promote.interval": {"promote": {"interval": "7s"}},
    "promote.limit": {"promote": {"limit": 7}},
    "promote.due_wake": {"promote": {"due_wake": False}},
    "stalled_check.interval": {"stalled_check": {"interval": "7s"}},
    "stalled_check.limit": {"stalled_check": {"limit": 7}},
    "stalled_check.max_stalled": {"stalled_check": {"max_stalled": 7}},
    "stalled_check.restart_grace": {"stalled_check": {"restart_grace": "7s"}},
    "stalled_check.at_expiry": {"stalled_check": {"at_expiry": True}},
    "stalled_check.mass_expiry": {"stalled_check": {"mass_expiry": {"share": 0.5, "at_least": 20}}},
    "node.base": {"node": {"base": "arg"}},
}


@pytest.mark.parametrize("changed", ONE_SETTING)
def test_a_reload_takes_over_each_setting_of_a_sweep(
    open_desk: Callable[..., Desk], changed: str
) -> None:
    """Whichever one is changed alone is in force afterwards; the other verb keeps what it knows."""
    desk = open_desk()
    before = {verb: duties["orders"] for verb, duties in desk.rounds._duties.items()}
    desk.configure()
    for verb, duties in desk.rounds._duties.items():
        assert duties["orders"] is before[verb]
    desk.configure(**ONE_SETTING[changed])
    for verb, duties in desk.rounds._duties.items():
        touched = changed == "node.base" or changed.startswith(verb)
        assert (duties["orders"] is not before[verb]) == touched


def test_a_pause_begins_anew_after_a_good_sweep(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock
) -> None:
    """Poison row: what failed for long and is well again is not punished for it when it fails."""
    desk = open_desk()
    desk.promote()
    stub.on("EMQ.PROMOTE", error("ERR no"))
    pauses = []
    for _ in range(2):
        for _ in range(5):
            (wake,) = desk.promote()
            pauses.append(wake.at - clock.monotonic())
            clock.ahead += pauses[-1] + 0.1
        stub.on("EMQ.PROMOTE", integer(0), error("ERR no"))
        desk.promote()
    assert pauses[5] == pytest.approx(pauses[0], abs=1)
    assert pauses[4] > 1.5 * pauses[0]


def test_a_queue_that_left_is_not_swept(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """A turn or a wake that waited at the reload finds nothing to do."""
    desk = open_desk("orders", "gone")
    desk.queues = ["orders"]
    desk.configure()
    assert desk.rounds.run("promote", ["orders", "gone", "never"]) is not None
    assert stub.count("EMQ.PROMOTE", b"{orders}") == 1
    assert stub.count("EMQ.PROMOTE") == 1


def test_a_queue_that_leaves_while_it_is_swept_leaves_nothing(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """How its last sweep went is not told, nor remembered: when the queue is added again, its
    trouble is news."""
    stub.on("EMQ.PROMOTE", late(error("ERR no"), 1), error("ERR no"), word=b"{gone}")
    desk = open_desk("orders", "gone", node={"timeout": "5s"})
    desk.rounds.run("promote", ["orders"])
    desk.book.take()
    slow = threading.Thread(target=desk.rounds.run, args=("promote", ["gone"]))
    slow.start()
    wait_until(lambda: stub.count("EMQ.PROMOTE", b"{gone}") == 1, "its sweep under way")
    desk.queues = ["orders"]
    desk.configure()
    slow.join()
    assert desk.book.take() == []
    assert [queue.name for queue in desk.ledger.queues()] == ["orders"]
    desk.queues = ["orders", "gone"]
    desk.configure()
    desk.promote()
    assert desk.book.take() == ["sweep failed"]
    facts = desk.ledger.queues(["gone"])[0].promote
    assert (facts.ok, facts.error) == (0, 1)


def test_what_a_queue_that_leaves_has_lost_is_told(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """A stall check that is under way at the reload buries jobs: that happened, whoever sweeps the
    queue from now on. That it was blocked or well is no news."""
    desk = open_desk("orders", "gone")
    desk.promote()
    desk.book.take()

    def leave(_: Answer) -> Answer:
        desk.queues = ["orders"]
        desk.configure()
        return array(ids(b"JOB1"), ids(b"JOB2", b"JOB3"))

    epochs = {b"JOB1": OTHER_RUN_ID, b"JOB2": RUN_ID, b"JOB3": RUN_ID}
    leases = [
        part for job, epoch in epochs.items() for part in (bulk(job), bulk(b"1"), bulk(epoch))
    ]
    counts = (integer(2), integer(1), integer(0))
    stub.on("EVAL_RO", array(bulk(RUN_ID), *counts, *leases), word=b"{gone}")
    stub.on("EMQ.STALLED.CHECK", leave, array(ids(), ids()), word=b"{gone}")
    desk.check()
    crossed = desk.book.last("lease crossed a server restart")
    assert (crossed["queue"], crossed["job_id"]) == ("gone", "JOB1")
    buried = desk.book.last("jobs dead-lettered, their stalls reached max_stalled")
    assert (buried["queue"], buried["job_ids"]) == ("gone", ["JOB2", "JOB3"])
    assert len(desk.book.take()) == 2
    assert [queue.name for queue in desk.ledger.queues()] == ["orders"]


# --- other nodes --------------------------------------------------------------------------------


class Pair(Nodes):
    """Two nodes, and the one that has all queues."""

    tended = True

    def __init__(self, *nodes: Node) -> None:
        super().__init__(nodes[0])
        self._nodes = nodes
        self.owner = nodes[0]

    def primaries(self) -> Sequence[Node]:
        return self._nodes

    def by_node(self, items: Sequence[T], queue: Callable[[T], str]) -> list[tuple[Node, list[T]]]:
        del queue  # one has them all
        return [(self.owner, list(items))]

    def tend(self) -> None:
        for node in self._nodes:
            with suppress(NodeFault), node.link():
                pass


def test_a_node_whose_last_queue_moved_away_while_it_was_down_is_up_again(
    stub: Stub, clock: Clock
) -> None:
    """Who has queues is told of by their sweeps, who has none by the look-after: also from the
    moment on when the last one has gone. Else it is down for ever, and the daemon not ready."""
    with Stub() as other, ExitStack() as stack:
        settings = Settings.model_validate({"node": {"url": stub.url}, "queues": ["orders"]})
        nodes = Pair(*(open_node(settings_of(each.url)) for each in (stub, other)))
        for node in nodes.primaries():
            stack.callback(node.close)
        ledger = Ledger()
        rounds = Rounds(nodes, ledger, Chronicle(cast("Log", Book())), lambda: False)
        ledger.set_queues(["orders"])
        rounds.configure(settings, ["orders"])

        def up() -> list[bool]:
            rounds.tend()
            rounds.run("promote", ["orders"])
            return [node.up for node in ledger.overview().nodes]

        assert up() == [True, True]
        stub.on("EMQ.VERSION", error("LOADING"))
        stub.hang_up()
        assert up() == [False, True]
        nodes.owner = nodes.primaries()[1]
        nodes.on_change({})
        assert up() == [False, True]
        stub.on("EMQ.VERSION", bulk(TOKENS))
        clock.ahead += 2 * BACKOFF_CAP_SECONDS
        assert up() == [True, True]


@pytest.mark.parametrize(
    "ending", [integer(0), cut(integer(7), 1)], ids=["it answers", "its connection breaks"]
)
def test_a_round_that_outlives_its_primary_says_nothing_of_it(
    stub: Stub, clock: Clock, ending: Answer
) -> None:
    """It was down for those who dial, and another one has taken over: what becomes of the
    connection that was in use all the time is no news."""
    stub.on("EMQ.PROMOTE", late(ending, 1.5), word=b"{emails}")
    with Stub() as other, ExitStack() as stack:
        nodes = Pair(*(open_node(settings_of(each.url)) for each in (stub, other)))
        for node in nodes.primaries():
            stack.callback(node.close)
        queues, book = ["orders", "emails"], Book()
        rounds = Rounds(nodes, Ledger(), Chronicle(cast("Log", book)), lambda: False)
        rounds.configure(Settings.model_validate({"node": {"url": stub.url}}), queues)
        slow = threading.Thread(target=rounds.run, args=("promote", ["emails"]))
        slow.start()
        wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep that ends late")
        stub.on("EMQ.VERSION", error("LOADING"), to_newcomers=True)
        rounds.run("promote", ["orders"])
        assert book.take() == ["node down"]
        nodes.owner = nodes.primaries()[1]
        former, nodes._nodes = nodes.primaries()[0], (nodes.owner,)
        nodes.on_change({nodes.owner.name: former.name})
        rounds.run("promote", ["orders"])
        assert book.take() == ["primaries changed", "node up"]
        slow.join()
        assert book.take() == []


class Each(Pair):
    """A node for each queue, in their order."""

    def by_node(self, items: Sequence[T], queue: Callable[[T], str]) -> list[tuple[Node, list[T]]]:
        del queue  # as many as there are nodes
        return [(node, [item]) for node, item in zip(self._nodes, items, strict=True)]


@pytest.mark.parametrize("verb", ["promote", "stalled_check"])
def test_the_nodes_of_a_cluster_share_the_time_of_a_round(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, verb: Verb
) -> None:
    """A backlog on the first one must not use up what the others need."""
    given: list[float] = []

    def run_round(*_: object, until: float, **__: object) -> sweeper_module.Round:
        given.append(until - time.monotonic())
        return sweeper_module.Round()

    monkeypatch.setattr(rounds_module, "run_round", run_round)
    # So long that a busy machine does not matter.
    monkeypatch.setattr(rounds_module, "SLICE_SECONDS", 900.0)
    queues = ["a", "b", "c"]
    with ExitStack() as stack:
        nodes = Each(*(open_node(settings_of(stub.url)) for _ in queues))
        for node in nodes.primaries():
            stack.callback(node.close)
        rounds = Rounds(nodes, Ledger(), Chronicle(cast("Log", Book())), lambda: False)
        settings = Settings.model_validate({"node": {"url": stub.url}, "queues": queues})
        rounds.configure(settings, queues)
        rounds.run(verb, queues)
    assert given == pytest.approx([300.0] * 3, abs=60)


def settings_of(url: str) -> NodeSettings:
    return Settings.model_validate({"node": {"url": url}}).node


def test_rounds_that_were_left_send_nothing_and_only_count(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """What was under way when other nodes took over: the sweep that was sent is counted, the next
    pipeline of the round is not sent, and neither the node nor a queue is said to be anyhow."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", late(integer(100), 1))
    desk = open_desk(promote={"limit": 100}, node={"timeout": "5s"})
    round_ = threading.Thread(target=desk.promote)
    round_.start()
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep under way")
    desk.rounds.leave()
    round_.join()
    assert stub.count("EMQ.PROMOTE") == 1
    assert desk.promote() == desk.check() == []
    desk.rounds.tend()
    desk.nodes.on_change({})
    assert stub.count("EMQ.PROMOTE") == 1
    assert stub.count("EMQ.STALLED.CHECK") == 0
    assert desk.book.take() == []
    facts = desk.ledger.queues()[0]
    assert (facts.promoted, facts.promote.ok) == (100, 1)
    assert (facts.promote.last_sweep, facts.promote.due, facts.node) == (0.0, None, "")
    overview = desk.ledger.overview()
    assert not overview.nodes[0].up
    assert overview.lateness["promote"].cumulative[-1] == 1


def test_a_guard_that_went_with_the_old_nodes_leaves_no_gauge(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """One reload changes the node's settings and switches the guard off: its gauge goes."""
    stub.on("ZCOUNT", integer(20))
    stub.on("ZCARD", integer(20))
    desk = open_desk(**GUARD)
    desk.check()
    assert desk.ledger.queues()[0].guarded is True
    desk.rounds.leave()
    desk.rounds = Rounds(desk.nodes, desk.ledger, Chronicle(cast("Log", desk.book)), lambda: False)
    desk.configure(**GUARD)
    assert desk.ledger.queues()[0].guarded is True
    desk.configure()
    assert desk.ledger.queues()[0].guarded is None


def test_a_guard_that_is_switched_off_while_it_looks_leaves_no_gauge(
    open_desk: Callable[..., Desk], stub: Stub
) -> None:
    """A reload comes between the question and the answer: nobody would come to take it away."""
    desk = open_desk(**GUARD)

    def switch_off(_: Answer) -> Answer:
        desk.configure()
        return integer(20)

    stub.on("ZCARD", integer(20))
    stub.on("ZCOUNT", switch_off)
    desk.check()
    assert stub.count("ZCOUNT") == 1
    assert desk.ledger.queues()[0].guarded is None


# --- wakes --------------------------------------------------------------------------------------


def due_in(seconds: float, ahead: float = 0.0) -> Answer:
    """The head of a schedule, by the clock of a server that is so far ahead of ours."""
    return ids(b"JOB1", b"%d" % ((time.time() + ahead + seconds) * 1000))


@pytest.mark.parametrize("ahead", [0.0, 3_600.0, -86_400.0])
def test_the_heads_due_time_becomes_a_wake(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock, ahead: float
) -> None:
    """By the server's clock, however far it is from ours, and never early."""
    now, seconds = clock.monotonic(), time.time() + ahead
    stub.on("TIME", ids(b"%d" % seconds, b"%d" % (seconds % 1 * 1e6)))
    stub.on("ZRANGE", due_in(2, ahead))
    desk = open_desk()
    wakes = [wake for wake in desk.promote() if wake.verb == "promote"]
    assert [wake.queue for wake in wakes] == ["orders"]
    assert 1.99 <= wakes[0].at - now < 3.5


def test_no_wake_where_none_is_wanted(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """`due_wake = false`: the queue is swept at its turns only."""
    stub.on("ZRANGE", due_in(2))
    desk = open_desk(promote={"due_wake": False})
    assert [wake for wake in desk.promote() if wake.verb == "promote"] == []


@pytest.mark.parametrize("wanted", [True, False])
def test_a_leases_end_becomes_a_wake_if_wanted(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock, wanted: bool
) -> None:
    """`at_expiry` is off by default."""
    now, deadline = clock.monotonic(), bulk(b"%d" % ((time.time() + 5) * 1000))
    counts = (integer(1), integer(0), integer(0))
    stub.on("EVAL_RO", array(bulk(RUN_ID), *counts, bulk(b"JOB1"), deadline, bulk(RUN_ID)))
    desk = open_desk(stalled_check={"at_expiry": wanted})
    desk.promote()
    wakes = desk.check()
    assert len(wakes) == wanted
    if wanted:
        assert 4.9 <= wakes[0].at - now < 6.5


def test_a_backlog_is_a_wake_at_once(
    open_desk: Callable[..., Desk], stub: Stub, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drain pace: what a round has no time for goes on now and not at the next turn, for the queue
    that was begun and for those behind it that were not."""
    monkeypatch.setattr(rounds_module, "SLICE_SECONDS", 0.7)
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", late(integer(2_000), 1))
    own = {"promote": {"limit": 2_000}, "node": {"timeout": "5s"}}
    desk = open_desk("first", "second", "third", **own)
    wakes = [wake for wake in desk.promote() if wake.verb == "promote"]
    assert {wake.queue for wake in wakes} == {"first", "second", "third"}
    assert all(wake.at <= clock.monotonic() for wake in wakes)
    assert stub.count("EMQ.PROMOTE") == 1


def test_a_stop_sends_nothing_more(open_desk: Callable[..., Desk], stub: Stub) -> None:
    """Once the daemon stops, a round that was about to begin leaves the server alone."""
    desk = open_desk()
    desk.stopping = True
    desk.promote()
    desk.check()
    assert stub.count("EMQ.PROMOTE") == stub.count("EMQ.STALLED.CHECK") == 0
    facts = desk.ledger.queues()[0]
    assert facts.promote.error == facts.stalled_check.error == 0


# --- ten thousand names -------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_ten_thousand_queues_that_come_and_go_leave_nothing(
    open_desk: Callable[..., Desk],
) -> None:
    """Case "Series of removed queues live on": discovered, swept and dropped one after another."""
    desk = open_desk()
    settings = Settings.model_validate({"node": {"url": desk.stub.url}, "queues": ["orders"]})
    warm = 0
    for number in range(10_000):
        queue = f"queue-{number}"
        desk.rounds.configure(settings, [queue])
        desk.rounds.run("promote", [queue])
        desk.rounds.run("stalled_check", [queue])
        desk.stub.arrivals.clear()
        if number == 1_000:
            warm = resident_bytes()
    assert [queue.name for queue in desk.ledger.queues()] == ["queue-9999"]
    # 9,000 names of which only a counter's 100 bytes were kept would be as much.
    assert resident_bytes() - warm < 1_000_000
