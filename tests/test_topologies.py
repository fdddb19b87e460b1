"""Sentinel and Cluster for real: failovers, slots on the move, servers that fall silent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import NameServers, connect, wait_until
from daemon_process import DaemonThread
from server_sets import (
    MASTER,
    Cluster,
    Sentinels,
    ask,
    lease,
    need_ipv6,
    pending,
    resolve_test_names,
    schedule,
)
from stub import NIL, SILENCE, Answer, Stub, array, bulk, error, integer

from emqtimerd import dialling, wire
from emqtimerd.acl import acl_words
from emqtimerd.check import Finding, Report, examine
from emqtimerd.chronicle import Chronicle
from emqtimerd.config import Settings
from emqtimerd.config.settings import DiscoverySettings
from emqtimerd.devnode import DevNode
from emqtimerd.ledger import Ledger
from emqtimerd.log import open_log
from emqtimerd.node import FenceRefused, NodeFault, NotReady, Unreachable
from emqtimerd.once import document, sweep_once
from emqtimerd.rounds import Rounds
from emqtimerd.topology import ClusterNodes, Nodes, open_nodes, read_slots

# Real servers in dozens, and what they do takes seconds by design.
slow = pytest.mark.slow

Open = Callable[..., DaemonThread]

FAST = {
    "promote": {"interval": "100ms"},
    "stalled_check": {"interval": "100ms", "restart_grace": "0s"},
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three primaries of the test's own."""
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[Cluster]:
    """Three primaries with a replica each."""
    with Cluster(tmp_path, replicas=3) as cluster:
        yield cluster


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    """A primary and a replica that three sentinels watch."""
    with Sentinels(tmp_path) as sentinels:
        yield sentinels


@pytest.fixture
def open_daemon() -> Iterator[Open]:
    """Starts daemons in threads; all end with the test."""
    with ExitStack() as stack:

        def open_(url: str, queues: Sequence[str], **settings: Any) -> DaemonThread:
            node = {"url": url, "timeout": "1s", "connect_timeout": "1s"}
            node |= settings.pop("node", {})
            tree = {**FAST, **settings, "node": node, "queues": list(queues)}
            return stack.enter_context(DaemonThread(**tree))

        yield open_


def settings_of(url: str, queues: Sequence[str] = (), **node: Any) -> Settings:
    node = {"timeout": "2s", "connect_timeout": "1s", **node, "url": url}
    return Settings.model_validate({"node": node, "queues": list(queues), **FAST})


def once(settings: Settings, **options: Any) -> dict[str, Any]:
    """What `once --json` prints."""
    options = {"verbs": ("promote", "stalled_check"), **options}
    return document(sweep_once(settings, settings.queues, **options))


@pytest.fixture
def open_rounds() -> Iterator[Callable[[Settings], tuple[Nodes, Rounds, Ledger]]]:
    """The rounds of a daemon without its timer; their nodes are closed at the end."""
    with ExitStack() as stack:

        def open_(settings: Settings) -> tuple[Nodes, Rounds, Ledger]:
            nodes, ledger = open_nodes(settings.node), Ledger()
            stack.callback(nodes.close)
            chronicle = Chronicle(open_log(settings.log))
            rounds = Rounds(nodes, ledger, chronicle, lambda: False)
            ledger.set_queues(settings.queues)
            rounds.configure(settings, settings.queues)
            return nodes, rounds, ledger

        yield open_


def promoted(queue: str) -> str:
    return f'emqtimerd_jobs_promoted_total{{queue="{queue}"}}'


def expiries(queue: str, cause: str) -> str:
    return f'emqtimerd_lease_expiries_total{{cause="{cause}",queue="{queue}"}}'


def restarts(node: str) -> str:
    return f'emqtimerd_node_restarts_total{{node="{node}"}}'


def is_up(node: str) -> str:
    return f'emqtimerd_node_up{{node="{node}"}}'


def errors(daemon: DaemonThread, code: str) -> float:
    """How many errors of a code were counted, over all queues."""
    samples = daemon.scrape().items()
    return sum(v for k, v in samples if "sweep_errors" in k and f'code="{code}"' in k)


class Producer:
    """Adds a job to each queue now and then, due soon, and knows which; a context manager."""

    def __init__(self, client_of: Callable[[str], redis.Redis], queues: Sequence[str]) -> None:
        self._client_of, self._queues = client_of, queues
        self.made: dict[str, set[bytes]] = {queue: set() for queue in queues}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="producer")

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.05):
            for queue in self._queues:
                number += 1
                job_id = f"JOB{number:06}"
                try:
                    with self._client_of(queue) as client:
                        schedule(client, queue, job_id, 50)
                except (redis.RedisError, AssertionError):
                    continue  # refused or lost; whether it was written shows in the end
                self.made[queue].add(job_id.encode())

    def __enter__(self) -> Producer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# --- Cluster: the ordinary day ------------------------------------------------------------------


@slow
def test_once_sweeps_queues_on_all_primaries(cluster: Cluster) -> None:
    """Each queue on the primary that has its slot, and every primary is told with who it is."""
    queues = [queue for node in cluster.primaries for queue in cluster.queues_of(node, 3)]
    owners = {q: node for node in cluster.primaries for q in cluster.queues_of(node, 3)}
    for queue, node in owners.items():
        with connect(node) as client:
            schedule(client, queue, "JOB1")
            lease(client, queue, ["JOB2"], 1)
    report = once(settings_of(cluster.url, queues), max_stalled=2)
    assert report["ok"], report
    assert [
        (q["queue"], q["node"], q["promoted"], q["recovered"], q["expiries"]["stall"], q["error"])
        for q in report["queues"]
    ] == [(q, f"127.0.0.1:{owners[q].port}", 1, 1, 1, None) for q in queues]
    nodes = {node["node"]: node for node in report["nodes"]}
    assert set(nodes) == {f"127.0.0.1:{node.port}" for node in cluster.primaries}
    for node in cluster.primaries:
        with connect(node) as client:
            found = nodes[f"127.0.0.1:{node.port}"]
            assert found["run_id"] == client.info("server")["run_id"]
            assert found["brand"] == "echomq:6.0.0"
            assert tuple(found["tokens"]) == wire.TOKENS


@slow
def test_the_daemon_sweeps_queues_on_all_primaries(cluster: Cluster, open_daemon: Open) -> None:
    """Every primary has its gauge, discovery searches all of them, and nothing crosses slots."""
    queues = [cluster.queues_of(node, 2) for node in cluster.primaries]
    listed, found = [a for a, _ in queues], [b for _, b in queues]
    for node, names in zip(cluster.primaries, queues, strict=True):
        with connect(node) as client:
            for queue in names:
                schedule(client, queue, "JOB1")
    daemon = open_daemon(cluster.url, listed, discovery={"enabled": True, "interval": "1s"})
    for queue in (*listed, *found):
        daemon.wait_value(promoted(queue), 1)
    daemon.wait_ready()
    for node in cluster.primaries:
        assert daemon.value(is_up(f"127.0.0.1:{node.port}")) == 1
    assert sum("node_up" in name for name in daemon.scrape()) == 3
    assert errors(daemon, "") == 0


@slow
def test_who_the_brand_does_not_name_is_not_swept(cluster: Cluster) -> None:
    """The brand is read on the owner of its slot, for all primaries, and nowhere else."""
    queues = [cluster.queues_of(node)[0] for node in cluster.primaries]
    with cluster.client_of_slot(wire.slot_of_tag(b"emq")) as client:
        client.set(wire.BRAND_KEY, "echomq:4.0.0")
        for queue, node in zip(queues, cluster.primaries, strict=True):
            with connect(node) as other:
                schedule(other, queue, "JOB1")
        for queue in queues:
            report = sweep_once(settings_of(cluster.url, [queue]), [queue], verbs=("promote",))
            assert isinstance(report.fault, FenceRefused)
            assert "brand is echomq:4.0.0" in str(report.fault)
            assert report.exit_code == 4
        client.set(wire.BRAND_KEY, wire.BRAND)
    report = sweep_once(settings_of(cluster.url, queues), queues, verbs=("promote",))
    assert [queue.promoted for queue in report.queues] == [1, 1, 1]


@slow
def test_the_brand_is_read_again_when_the_slots_change(cluster: Cluster) -> None:
    """A cluster that changed hands while connections were open is left alone by all of them."""
    first, _, third = cluster.primaries
    nodes = open_nodes(settings_of(cluster.url).node)
    nodes.refresh()
    for node in nodes.primaries():
        with node.link():
            pass
    with cluster.client_of_slot(wire.slot_of_tag(b"emq")) as client:
        client.set(wire.BRAND_KEY, "echomq:4.0.0")
    nodes.refresh()
    for node in nodes.primaries():
        with node.link():
            pass  # the same slots, the same connections
    cluster.move(cluster.queues_of(first)[0], first, third)
    nodes.refresh()
    for node in nodes.primaries():
        with pytest.raises(NodeFault, match=r"brand is echomq:4\.0\.0"), node.link():
            pass
    nodes.close()


# --- Cluster: slots on the move -----------------------------------------------------------------


@slow
def test_a_moved_queue_is_swept_in_the_same_round(
    cluster: Cluster, open_rounds: Callable[..., tuple[Nodes, Rounds, Ledger]]
) -> None:
    """MOVED is no failure: nothing was done, the one who was named knows, and is asked at once."""
    first, _, third = cluster.primaries
    moving, staying = cluster.queues_of(first, 2)
    _, rounds, ledger = open_rounds(settings_of(cluster.url, [moving, staying]))
    rounds.run("promote", [moving, staying])
    with connect(first) as client:
        schedule(client, moving, "JOB1")
        schedule(client, staying, "JOB1")
        lease(client, moving, ["JOB2"], 1)
    cluster.move(moving, first, third)
    rounds.run("promote", [moving, staying])
    facts = {queue.name: queue for queue in ledger.queues()}
    assert (facts[moving].promoted, facts[staying].promoted) == (1, 1)
    assert facts[moving].node == f"127.0.0.1:{third.port}"
    assert not facts[moving].promote.errors
    rounds.run("stalled_check", [moving, staying])
    (moved, *_) = ledger.queues()
    # The row travelled with the epoch of the server that it was leased on.
    assert (moved.restart, moved.stall, moved.dead_lettered) == (1, 0, 0)


WAYS = ("key by key", "atomic")


@slow
@pytest.mark.parametrize("way", WAYS)
def test_no_job_is_lost_while_slots_move(cluster: Cluster, open_daemon: Open, way: str) -> None:
    """Case "Slot migration and hash tags": half-moved slots fail that queue's turn and no more,
    leases that were taken before count as restarts, and a neighbour notices nothing."""
    first, second, _ = cluster.primaries
    moving, staying = cluster.queues_of(first, 2)
    slot = wire.slot(moving)

    def client_of(queue: str) -> redis.Redis:
        return cluster.client_of_slot(wire.slot(queue))

    with connect(first) as client:
        lease(client, moving, ["JOBlease"], 3_000)
        for number in range(20):
            schedule(client, moving, f"JOBlater{number}", 2_000)
    daemon = open_daemon(cluster.url, [moving, staying])
    daemon.wait_ready()
    with Producer(client_of, [moving, staying]) as producer:
        wait_until(lambda: len(producer.made[moving]) > 5, "jobs are made")
        if way == "atomic":
            with connect(first) as client:
                target = cluster.id_of(second)
                ask(client, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target)
            wait_until(lambda: owner(cluster, slot) == second.port, "the slot has moved")
        else:
            with cluster.moving(moving, first, second):
                # ASK where all keys that a verb names have left, TRYAGAIN where some have.
                wait_until(
                    lambda: errors(daemon, "TRYAGAIN") + errors(daemon, "ASK") >= 3,
                    "sweeps meet a half-moved slot",
                )
        made = len(producer.made[moving])
        wait_until(lambda: len(producer.made[moving]) > made + 5, "jobs are made after the move")
    made_there = producer.made[moving] | {b"JOBlater%d" % n for n in range(20)}
    with connect(second) as client:
        wait_until(lambda: pending(client, moving) >= made_there | {b"JOBlease"}, "all are pending")
    with connect(first) as client:
        wait_until(lambda: pending(client, staying) == producer.made[staying], "all are pending")
    daemon.wait_value(expiries(moving, "restart"), 1)
    samples = daemon.scrape()
    assert samples[expiries(moving, "stall")] == 0
    assert samples[promoted(staying)] == len(producer.made[staying])
    assert {code_of(name) for name in samples if "sweep_errors" in name} <= {"TRYAGAIN", "ASK"}
    assert not [name for name in samples if "sweep_errors" in name and f'"{staying}"' in name]
    assert (
        samples[f'emqtimerd_sweeps_total{{outcome="unknown",queue="{moving}",verb="promote"}}'] == 0
    )


def code_of(sample: str) -> str:
    return sample.partition('code="')[2].partition('"')[0]


def owner(cluster: Cluster, slot: int) -> int:
    """The port of the server that has a slot."""
    with cluster.client_of_slot(slot) as client:
        return int(client.connection_pool.connection_kwargs["port"])


# --- Cluster: servers that fail -----------------------------------------------------------------


class Gaps:
    """How long the queues have been without a good sweep, asked ten times a second."""

    def __init__(self, daemon: DaemonThread, queues: Sequence[str]) -> None:
        self._names = [
            f'emqtimerd_last_sweep_timestamp_seconds{{queue="{queue}",verb="promote"}}'
            for queue in queues
        ]
        self._daemon = daemon
        self.found: list[float] = []
        """The longest of all queues, each time."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gaps")

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            now, samples = time.time(), self._daemon.scrape()
            oldest = min(samples[name] for name in self._names)
            self.found.append(now - oldest)

    def __enter__(self) -> Gaps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_replica_takes_over(replicated: Cluster, open_daemon: Open, how: signal.Signals) -> None:
    """The queues of a failed primary go on where its replica took over, as one restart; those of
    the others wait for it one timeout at the most."""
    cluster = replicated
    failing, heir = cluster.primaries[1], cluster.replicas[1]
    queues = [cluster.queues_of(node)[0] for node in cluster.primaries]
    with connect(failing) as client:
        lease(client, queues[1], ["JOB1"], 2_000)
        ask(client, "WAIT", 1, 5_000)
    daemon = open_daemon(cluster.url, queues)
    daemon.wait_ready()
    with Gaps(daemon, [queues[0], queues[2]]) as gaps:
        os.kill(failing.pid, how)
        wait_until(lambda: daemon.value(is_up(f"127.0.0.1:{heir.port}")) == 1, "the heir is up", 20)
        with connect(heir) as client:
            schedule(client, queues[1], "JOB2")
            wait_until(lambda: pending(client, queues[1]) == {b"JOB1", b"JOB2"}, "it is swept")
        if how == signal.SIGSTOP:
            cluster.resume(failing)
            wait_until(lambda: role(failing) == "slave", "the old primary gave in")
        daemon.wait_ready()
    # One timeout of 1 s, an interval of 0.1 s, and a machine that does other things as well.
    assert max(gaps.found) < 2.0
    samples = daemon.scrape()
    assert samples[expiries(queues[1], "restart")] == 1
    assert samples[expiries(queues[1], "stall")] == 0
    assert samples[restarts(f"127.0.0.1:{heir.port}")] == 1
    assert is_up(f"127.0.0.1:{failing.port}") not in samples
    assert len(daemon.told("node restarted")) == 1


def role(node: Any) -> str:
    with connect(node) as client:
        return str(client.info("replication")["role"])


@slow
def test_one_dead_primary_delays_no_other(cluster: Cluster, open_daemon: Open) -> None:
    """A primary that is silent for good, and nobody takes over: its queues fail, its neighbours
    are swept as ever, and readiness says which one it is."""
    queues = [cluster.queues_of(node)[0] for node in cluster.primaries]
    daemon = open_daemon(cluster.url, queues)
    daemon.wait_ready()
    silent = cluster.primaries[0]
    others = queues[1:]
    cluster.suspend(silent)
    wait_until(
        lambda: daemon.value(is_up(f"127.0.0.1:{silent.port}")) == 0, "the silent one is down", 20
    )
    with Gaps(daemon, others) as gaps:
        time.sleep(4)  # what happens all the while is the question
    # Who waits for the silent one waits for 1 s, again and again: most of the time. A machine that
    # stands still for a moment makes one long gap.
    assert sorted(gaps.found)[len(gaps.found) * 3 // 4] < 0.6
    assert f"127.0.0.1:{silent.port}" in daemon.get("/readyz")[1]
    assert daemon.get("/healthz")[0] == 200
    report = once(
        settings_of(cluster.url.replace(str(silent.port), str(cluster.nodes[1].port)), queues)
    )
    assert [bool(queue["error"]) for queue in report["queues"]] == [True, False, False]
    cluster.resume(silent)
    daemon.wait_ready(20)


@slow
def test_primaries_that_all_come_back_elsewhere_are_found(
    tmp_path: Path, open_daemon: Open
) -> None:
    """Every primary restarts on another port at the same time; the address names a server that
    stays, and one that is gone."""
    with Cluster(tmp_path, primaries=3, replicas=1) as cluster:
        stays = cluster.replicas[0]
        queues = [cluster.queues_of(node)[0] for node in cluster.primaries]
        url = f"{cluster.url},127.0.0.1:{stays.port}"
        daemon = open_daemon(url, queues)
        daemon.wait_ready()
        with connect(stays) as client:
            # It must not take over: its primary comes back.
            client.config_set("cluster-replica-no-failover", "yes")
        cluster.change_ports()
        wait_until(cluster.is_whole, "the cluster works again", 20)
        for queue in queues:
            with cluster.client_of_slot(wire.slot(queue)) as client:
                schedule(client, queue, "JOB1")
        for queue in queues:
            daemon.wait_value(promoted(queue), 1, 20)
        daemon.wait_ready()
        samples = daemon.scrape()
        for node in cluster.primaries:
            assert samples[is_up(f"127.0.0.1:{node.port}")] == 1
            assert samples[restarts(f"127.0.0.1:{node.port}")] == 1


@slow
def test_a_primary_without_the_job_core_fails_alone_until_it_has_it(
    cluster: Cluster, open_daemon: Open
) -> None:
    """Case "Three-part verb name": the missing module is one clear error of that primary's queues,
    and they heal when it is loaded."""
    queues = [cluster.queues_of(node)[0] for node in cluster.primaries]
    daemon = open_daemon(cluster.url, queues)
    daemon.wait_ready()
    bare = cluster.primaries[2]
    with connect(bare) as client:
        modules = client.execute_command("MODULE", "LIST")
        (module,) = [module[b"path"] for module in modules if module[b"name"] == b"emq"]
        ask(client, "MODULE", "UNLOAD", "emq")
        name = f"127.0.0.1:{bare.port}"
        wait_until(lambda: daemon.value(is_up(name)) == 0, "the bare primary is down")
        report = once(settings_of(cluster.url, queues))
        assert [bool(queue["error"]) for queue in report["queues"]] == [False, False, True]
        message = report["queues"][2]["error"][0]["message"]
        assert message == (
            f"{name}: the server does not know EMQ.VERSION: the native job core is not loaded there"
        )
        ask(client, "MODULE", "LOAD", module)
        schedule(client, queues[2], "JOB1")
    daemon.wait_value(promoted(queues[2]), 1)
    daemon.wait_ready()


@slow
def test_a_user_without_cluster_slots_is_told_so(cluster: Cluster) -> None:
    """Case "Errors that are not RedisError": it is a permission, and which command it is about."""
    for node in cluster.nodes:
        with connect(node) as client:
            ask(client, "ACL", "SETUSER", "small", "on", ">pw", "~*", "+@all", "-cluster")
    (queue,) = cluster.queues_of(cluster.primaries[0])
    url = cluster.url.replace("//", "//small:pw@")
    report = sweep_once(settings_of(url, [queue]), [queue], verbs=("promote",))
    assert report.fault is not None
    assert report.fault.code == "NOPERM"
    assert "CLUSTER SLOTS" in str(report.fault)
    assert "ACL SETUSER small +cluster|slots" in str(report.fault)
    for node in cluster.nodes:
        with connect(node) as client:
            ask(client, "ACL", "SETUSER", "small", "+cluster|slots")
    assert once(settings_of(url, [queue]))["ok"]


@slow
def test_slots_that_nobody_serves_are_told(cluster: Cluster) -> None:
    """Their queues fail, the others are swept."""
    first, second, _ = cluster.primaries
    (lost,), (kept,) = cluster.queues_of(first), cluster.queues_of(second)
    with connect(first) as client:
        ask(client, "CLUSTER", "DELSLOTS", wire.slot(lost))
    report = once(settings_of(cluster.url, [lost, kept]))
    one, other = report["queues"]
    assert (one["error"][0]["code"], other["error"]) == ("CLUSTERDOWN", None)


@slow
def test_check_examines_every_primary(cluster: Cluster) -> None:
    """Each primary with its own queues, the brand where it is; the smallest ACL is enough."""
    with_queue, *_ = cluster.primaries
    (queue,) = cluster.queues_of(with_queue)
    found = {"enabled": True}
    settings = settings_of(cluster.url.replace("//", "//small:pw@"), [queue])
    settings = settings.model_copy(update={"discovery": DiscoverySettings.model_validate(found)})
    words = [">pw", *acl_words(settings)]
    for node in cluster.primaries:
        with connect(node) as client:
            ask(client, "ACL", "SETUSER", "small", "reset", "on", *words)
            ask(client, "ACL", "LOG", "RESET")
    report = examine(settings)
    assert [f for f in report.findings if f.result == "fail"] == []
    names = [f"127.0.0.1:{node.port}" for node in cluster.primaries]
    assert [node.node for node in report.nodes] == names
    assert the(report, "topology").found == "3 primaries serve 16384 slots"
    assert {f.node for f in report.findings if f.check == "acl"} == set(names)
    assert all(f.result == "pass" for f in report.findings if f.check in ("acl", "sweeps"))
    (told,) = [f for f in report.findings if f.check == "queue" and f.queue]
    assert told.node == f"127.0.0.1:{with_queue.port}"
    with cluster.client_of_slot(wire.slot_of_tag(b"emq")) as client:
        client.set(wire.BRAND_KEY, "echomq:4.0.0")
    report = examine(settings)
    assert report.exit_code == 4
    assert [f.result for f in report.findings if f.check == "brand"] == ["fail"] * 3
    for node in cluster.primaries:
        with connect(node) as client:
            assert ask(client, "ACL", "LOG") == []


def the(report: Report, check: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.check == check]
    return finding


def test_a_single_server_is_no_cluster(node: Any) -> None:
    """An address that says Cluster of a server that is none is told so."""
    url = node.url.replace("redis://", "redis+cluster://").removesuffix("/0")
    report = sweep_once(settings_of(url, ["orders"]), ["orders"], verbs=("promote",))
    assert isinstance(report.fault, NotReady)
    assert "not in cluster mode" in str(report.fault)
    assert report.exit_code == 2


def test_a_cluster_that_nobody_answers_for_is_unreachable(stub: Stub) -> None:
    """Every configured server is tried, and told."""
    stub.stop_listening()
    url = f"redis+cluster://127.0.0.1:{stub.port},localhost:{stub.port}"
    report = sweep_once(settings_of(url, ["orders"]), ["orders"], verbs=("promote",))
    assert report.exit_code == 3
    assert f"127.0.0.1:{stub.port}: cannot connect" in str(report.fault)
    assert f"localhost:{stub.port}: cannot connect" in str(report.fault)


# --- Cluster: how servers are called ------------------------------------------------------------


CALLED: dict[str, dict[str, Any]] = {
    "by IPv6": {"host": "::1"},
    "by host names": {"endpoints": "hostname"},
    "not at all": {"endpoints": "unknown-endpoint"},
}


@slow
@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
def test_servers_are_called_as_the_cluster_calls_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    open_daemon: Open,
    called: dict[str, Any],
) -> None:
    """In the slot map, after a slot has moved, and after a failover; those that are called nothing
    are where the map was asked for."""
    resolve_test_names(monkeypatch)
    with Cluster(tmp_path, replicas=1, **called) as cluster:
        first, second, third = cluster.primaries
        (heir,) = cluster.replicas
        (failing,), (moving,) = cluster.queues_of(first), cluster.queues_of(second)
        daemon = open_daemon(cluster.url, [failing, moving])
        for node in cluster.primaries:
            daemon.wait_value(is_up(cluster.name_of(node)), 1)
        cluster.move(moving, second, third)
        first.kill()
        for queue, node in {moving: third, failing: heir}.items():
            daemon.wait_value(is_up(cluster.name_of(node)), 1, 20)
            with cluster.client_of_slot(wire.slot(queue)) as client:
                assert client.connection_pool.connection_kwargs["port"] == node.port
                schedule(client, queue, "JOB1")
            daemon.wait_value(promoted(queue), 1)
        daemon.wait_ready()
        names = {cluster.name_of(node) for node in (second, third, heir)}
        assert {name for name in daemon.scrape() if "node_up" in name} == set(map(is_up, names))
        url = f"{cluster.url},{cluster.name_of(heir)}"
        report = once(settings_of(url, [failing, moving]))
        assert report["ok"], report
        told = [queue["node"] for queue in report["queues"]]
        assert told == [cluster.name_of(heir), cluster.name_of(third)]


@slow
def test_a_server_without_the_name_that_it_is_to_be_called_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called by its address until it has one."""
    resolve_test_names(monkeypatch)
    with Cluster(tmp_path, primaries=2, endpoints="hostname") as cluster:
        first, second = cluster.primaries
        queues = [cluster.queues_of(node)[0] for node in cluster.primaries]
        for node in cluster.primaries:
            with connect(node) as client:
                client.config_set("cluster-announce-hostname", "")
                schedule(client, cluster.queues_of(node)[0], "JOB1")
        with connect(first) as client:
            wait_until(
                lambda: str(ask(client, "CLUSTER", "SLOTS")).count("?") == 2, "the other has heard"
            )
        report = once(settings_of(cluster.url, queues))
        assert [(queue["promoted"], queue["node"]) for queue in report["queues"]] == [
            (1, f"127.0.0.1:{first.port}"),
            (1, f"127.0.0.1:{second.port}"),
        ]


@pytest.mark.parametrize("host", [b"", b"?"], ids=["called nothing", "a name that is not known"])
def test_moved_to_a_server_without_an_address(
    stub: Stub, open_rounds: Callable[..., tuple[Nodes, Rounds, Ledger]], host: bytes
) -> None:
    """It is at the port of the reply, where the others are, and is the one that knows the slots."""
    with Stub() as new:
        known = [b"127.0.0.1", b""][host == b""]
        for server in (stub, new):
            server.on("CLUSTER", slots_of(known, server.port))
        stub.on("EMQ.PROMOTE", error(b"MOVED 5 %b:%d" % (host, new.port)))
        new.on("EMQ.PROMOTE", integer(1))
        url = f"redis+cluster://127.0.0.1:{stub.port}"
        _, rounds, ledger = open_rounds(settings_of(url, ["orders"]))
        rounds.run("promote", ["orders"])
        (queue,) = ledger.queues()
        assert (queue.promoted, queue.node) == (1, f"127.0.0.1:{new.port}")


@pytest.mark.parametrize("port", ["", "\u00b2", "9" * 5_000, "x"])
def test_moved_to_nowhere(stub: Stub, port: str) -> None:
    """An address that is none is the failure of that queue, and of nobody else."""
    stub.on("CLUSTER", slots_of(b"127.0.0.1", stub.port))
    stub.on("EMQ.PROMOTE", error(f"MOVED 5 127.0.0.1:{port}".encode()), word=b"{a}")
    report = once(settings_of(f"redis+cluster://127.0.0.1:{stub.port}", ["a", "b"]))
    assert [queue["error"] and queue["error"][0]["code"] for queue in report["queues"]] == [
        "MOVED",
        None,
    ]


def test_primaries_that_are_found_while_all_are_closed_are_closed_too(stub: Stub) -> None:
    """A reload leaves a cluster while its slot map is being read: nobody would come to close the
    connections to whom the new map names."""
    with Stub() as new:

        def close_before_the_answer(_healthy: Answer) -> Answer:
            nodes.close()
            return slots_of(b"127.0.0.1", new.port)

        stub.on("CLUSTER", slots_of(b"127.0.0.1", stub.port), close_before_the_answer)
        nodes = open_nodes(settings_of(f"redis+cluster://127.0.0.1:{stub.port}").node)
        nodes.refresh()
        nodes.refresh()
        (node,) = nodes.primaries()
        assert node.name == f"127.0.0.1:{new.port}"
        with node.link() as link:
            pass
        assert not link.is_usable()


def test_a_brand_that_moves_while_it_is_read_holds_nobody(stub: Stub) -> None:
    """A primary that is dialled asks the one that has the brand, which by a newer map has it no
    more and would ask the first one: each would wait for the other for ever."""
    with Stub() as other:
        servers = [
            array(bulk(b"127.0.0.1"), integer(each.port), bulk(b"%d" % each.port))
            for each in (stub, other)
        ]
        last = wire.slot_of_tag(b"emq")

        def split(first: Answer, second: Answer) -> Answer:
            lower = array(integer(0), integer(last), first)
            return array(lower, array(integer(last + 1), integer(16383), second))

        stub.on("CLUSTER", split(*servers))
        other.on("CLUSTER", split(*reversed(servers)))
        nodes = ClusterNodes(settings_of(f"redis+cluster://{name_of(stub)}").node)
        nodes.refresh()
        before = nodes._map
        nodes.refresh(f"MOVED 5 {name_of(other)}")
        after, nodes._map = nodes._map, before
        assert before
        assert after
        assert before.owners[last] is not after.owners[last]
        before.branded = after.branded = False
        read = nodes._read_brand

        def read_late(known: Any) -> None:
            nodes._map = after
            read(known)

        nodes._read_brand = read_late  # type: ignore[method-assign]
        asking = after.owners[last]
        asking.drop_idle()
        thread = threading.Thread(target=can_link, args=(asking,), daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive()
        nodes.close()


def name_of(server: Stub) -> str:
    return f"127.0.0.1:{server.port}"


def slots_of(host: bytes, port: int) -> Answer:
    """A slot map with one primary."""
    server = array(bulk(host) if host else NIL, integer(port), bulk(b"%d" % port))
    return array(array(integer(0), integer(16383), server))


# --- one server ---------------------------------------------------------------------------------


def test_a_server_at_an_ipv6_address(start_node: Callable[..., DevNode]) -> None:
    """Its address has brackets wherever it is written."""
    need_ipv6()
    server = start_node(extra_args=("--bind", "127.0.0.1", "::1"))
    url = f"redis://[::1]:{server.port}/0"
    with connect(server) as client:
        schedule(client, "orders", "JOB1")
    report = once(settings_of(url, ["orders"]))
    assert (report["ok"], report["queues"][0]["promoted"]) == (True, 1)
    assert [node["node"] for node in report["nodes"]] == [f"[::1]:{server.port}"]
    assert examine(settings_of(url, ["orders"])).exit_code == 0
    server.stop()
    fault = sweep_once(settings_of(url), ["orders"], verbs=("promote",)).fault
    assert str(fault).startswith(f"[::1]:{server.port}: cannot connect")


# --- what CLUSTER SLOTS may say -----------------------------------------------------------------

SLOTS: dict[str, tuple[object, list[tuple[int, int, str, int]]]] = {
    "plain": ([[0, 5, [b"10.0.0.1", 6379, b"a"]]], [(0, 5, "10.0.0.1", 6379)]),
    "with metadata": (
        [[0, 5, [b"10.0.0.1", 6379, b"a", [b"hostname", b"x"]]]],
        [(0, 5, "10.0.0.1", 6379)],
    ),
    "its own address is unknown": ([[0, 5, [None, 6379, b"a"]]], [(0, 5, "asked", 6379)]),
    "its own address is empty": ([[0, 5, [b"", 6379, b"a"]]], [(0, 5, "asked", 6379)]),
    "a name is wanted and there is none": (
        [[0, 5, [b"?", 6379, b"a", [b"ip", b"10.0.0.1"]]]],
        [(0, 5, "10.0.0.1", 6379)],
    ),
    "nor is the address known": (
        [[0, 5, [b"?", 6379, b"a", [b"ip", b""]]]],
        [(0, 5, "asked", 6379)],
    ),
    "a name is wanted and there is nothing": ([[0, 5, [b"?", 6379, b"a", []]]], []),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("reply", "expected"), SLOTS.values(), ids=SLOTS)
def test_slots_are_read(reply: object, expected: list[tuple[int, int, str, int]]) -> None:
    """Every form that servers write their address in."""
    found = [(r.first, r.last, r.primary.host, r.primary.port) for r in read_slots(reply, "asked")]
    assert found == expected


@pytest.mark.parametrize(
    "reply", [None, 5, [[0, 5]], [[0, 5, b"x"]], [[0, 16384, [b"h", 1, b"a"]]], [[b"0", 5, []]]]
)
def test_other_shapes_are_refused(reply: object) -> None:
    """An answer of another shape is no slot map."""
    with pytest.raises(wire.ShapeError):
        read_slots(reply, "asked")


# --- Sentinel -----------------------------------------------------------------------------------


def heir_of(sentinels: Sentinels) -> Any:
    """The server that is not the primary that the sentinels name."""
    return next(node for node in sentinels.nodes if node.port != sentinels.named())


def primary_of(sentinels: Sentinels) -> Any:
    return next(node for node in sentinels.nodes if node.port == sentinels.named())


@slow
def test_once_sweeps_the_primary_that_the_sentinels_name(sentinels: Sentinels) -> None:
    """By the name that they have for it, also when the first of them is dead."""
    with connect(primary_of(sentinels)) as client:
        schedule(client, "orders", "JOB1")
        sentinels.kill_sentinel(0)
        report = once(settings_of(sentinels.url, ["orders"]))
        assert report["ok"], report
        assert report["queues"][0]["promoted"] == 1
        (node,) = report["nodes"]
        assert node["node"] == MASTER
        assert node["run_id"] == client.info("server")["run_id"]


@slow
def test_check_asks_every_sentinel(sentinels: Sentinels) -> None:
    """Who does not answer is told, and the primary that the others name is examined."""
    sentinels.kill_sentinel(1)
    report = examine(settings_of(sentinels.url, ["orders"]))
    told = [f for f in report.findings if f.check == "topology"]
    primary = primary_of(sentinels)
    assert [f.result for f in told] == ["pass", "warn"]
    assert told[0].found == f"main is 127.0.0.1:{primary.port}, say 2 of 3 sentinels"
    assert f"127.0.0.1:{sentinels.ports[1]}: cannot connect" in told[1].found
    assert report.exit_code == 0
    assert the(report, "role").found == "primary"
    for number in (0, 2):
        sentinels.kill_sentinel(number)
    assert examine(settings_of(sentinels.url, ["orders"])).exit_code == 3


@slow
@pytest.mark.parametrize("how", ["killed", "silent", "asked to"])
def test_a_failover_is_followed(sentinels: Sentinels, open_daemon: Open, how: str) -> None:
    """Case "Sentinel: retries go to the dead master": the daemon goes on with the new primary, as
    after one restart, and leases that were taken before it are counted so. One that is silent
    costs one timeout after the sentinels name another. `once` follows as well."""
    old, new = primary_of(sentinels), heir_of(sentinels)
    with connect(old) as client:
        # Longer than a busy machine takes from here to the failover.
        lease(client, "orders", ["JOB1"], 7_000)
        ask(client, "WAIT", 1, 5_000)
    daemon = open_daemon(sentinels.url, ["orders"])
    daemon.wait_ready()
    if how == "killed":
        old.kill()
    elif how == "silent":
        sentinels.suspend(old)
    else:
        with sentinels.sentinel() as client:
            ask(client, "SENTINEL", "FAILOVER", MASTER)
    sentinels.wait_named(new)
    named_at = time.monotonic()
    with connect(new) as client:
        schedule(client, "orders", "JOB2")
        wait_until(lambda: b"JOB2" in pending(client, "orders"), "the new primary is swept")
        if how != "killed":
            # A timeout of 1 s, and what is left of a pause of up to 5 s (Sentinel named the silent
            # one all the while).
            assert time.monotonic() < named_at + 8
        wait_until(lambda: b"JOB1" in pending(client, "orders"), "the lease is recovered")
        if how == "silent":
            # It goes on as a primary until the sentinels tell it otherwise, some 8 s later.
            sentinels.resume(old)
        schedule(client, "orders", "JOB3")
        report = once(settings_of(sentinels.url, ["orders"]))
        assert report["nodes"][0]["run_id"] == client.info("server")["run_id"]
        wait_until(lambda: b"JOB3" in pending(client, "orders"), "swept by one of the two")
    daemon.wait_ready()
    samples = daemon.scrape()
    assert samples[restarts(MASTER)] == 1
    assert samples[expiries("orders", "restart")] == 1
    assert samples[expiries("orders", "stall")] == 0
    assert len(daemon.told("node restarted")) == 1


SENTINELS_CALL: dict[str, dict[str, Any]] = {
    "by IPv6": {"host": "::1"},
    "by host names": {
        "host": "localhost",
        "sentinel_lines": ("sentinel resolve-hostnames yes", "sentinel announce-hostnames yes"),
        "node_arguments": ("--replica-announce-ip", "localhost"),
    },
}


@slow
@pytest.mark.parametrize("called", SENTINELS_CALL.values(), ids=SENTINELS_CALL)
def test_sentinels_name_the_primary_in_any_way(
    tmp_path: Path, open_daemon: Open, called: dict[str, Any]
) -> None:
    """Before a failover and after it; the sentinels themselves are reached so as well."""
    with Sentinels(tmp_path, count=1, **called) as sentinels:
        old, new = sentinels.nodes
        settings = settings_of(sentinels.url, ["orders"])
        daemon = open_daemon(sentinels.url, ["orders"])
        daemon.wait_ready()
        for primary in (old, new):
            if primary is new:
                old.kill()
                sentinels.wait_named(new)
            with connect(primary) as client:
                schedule(client, "orders", f"JOB{primary.port}")
            daemon.wait_value(promoted("orders"), 1 + (primary is new))
            nodes = open_nodes(settings.node)
            assert nodes.account().found == (
                f"{MASTER} is {sentinels.name_of(primary)}, say 1 of 1 sentinels"
            )
            nodes.close()


@slow
def test_sentinels_have_credentials_of_their_own(tmp_path: Path) -> None:
    """They are sent those of `node.sentinel` and the node those of `node`, and none the other's;
    where they are refused, it is told which, and no password."""
    password, secret = tmp_path / "sentinel-password", tmp_path / "node-password"
    password.write_text("sentinel-pw\n")
    secret.write_text("node-pw\n")
    lines = (
        "user default on >others-pw ~* &* +@all",
        "user finder on >sentinel-pw -@all +sentinel|get-master-addr-by-name",
        "sentinel sentinel-pass others-pw",
        f"sentinel auth-pass {MASTER} node-pw",
    )
    with Sentinels(
        tmp_path,
        sentinel_lines=lines,
        node_password="node-pw",
        count=1,
        password="others-pw",
    ) as sentinels:
        node = {"password_file": str(secret)}
        finder = {"username": "finder", "password_file": str(password)}
        report = once(settings_of(sentinels.url, ["orders"], sentinel=finder, **node))
        assert report["ok"], report
        for wrong in (
            settings_of(sentinels.url, ["orders"], **node),
            settings_of(sentinels.url, ["orders"], sentinel={**finder, "username": ""}, **node),
        ):
            refused = sweep_once(wrong, ["orders"], verbs=("promote",))
            assert refused.exit_code == 3
            assert "node.sentinel.password_file" in str(refused.fault)
            assert "pw" not in str(refused.fault)
        refused = sweep_once(
            settings_of(sentinels.url, ["orders"], sentinel=finder), ["orders"], verbs=("promote",)
        )
        assert refused.exit_code == 3
        assert "give node.username and node.password_file" in str(refused.fault)
        with sentinels.sentinel() as client:
            ask(client, "ACL", "SETUSER", "finder", "-sentinel|get-master-addr-by-name")
        refused = sweep_once(
            settings_of(sentinels.url, ["orders"], sentinel=finder, **node),
            ["orders"],
            verbs=("promote",),
        )
        assert "ACL SETUSER finder +sentinel|get-master-addr-by-name" in str(refused.fault)


def sentinel_url(*ports: int) -> str:
    return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/{MASTER}/0"


def address(port: int) -> Any:
    return array(bulk(b"127.0.0.1"), bulk(b"%d" % port))


@pytest.fixture
def named() -> Iterator[Stub]:
    """Whom a scripted sentinel names."""
    with Stub() as stub:
        yield stub


SENTINEL_TROUBLES = {
    "knows no such name": (NIL, "knows no primary called 'main'"),
    "has no right": (error("NOPERM no"), "+sentinel|get-master-addr-by-name"),
    "is no sentinel": (error("ERR unknown command 'SENTINEL'"), "unknown command 'SENTINEL'"),
    "answers something else": (bulk(b"10.0.0.1"), "a string of 8 bytes"),
}


@pytest.mark.parametrize(
    ("answer", "words"), SENTINEL_TROUBLES.values(), ids=SENTINEL_TROUBLES.keys()
)
def test_a_sentinel_that_names_nobody_is_told_and_asked_again(
    stub: Stub, named: Stub, answer: Any, words: str
) -> None:
    """`MasterNotFoundError` and its like: unreachable now, and the next try may find it."""
    stub.on("SENTINEL", answer, address(named.port))
    nodes = open_nodes(settings_of(sentinel_url(stub.port)).node)
    ((node, _),) = nodes.by_node(["orders"], str)
    with pytest.raises(Unreachable) as caught, node.link():
        pass
    assert words in str(caught.value)
    assert f"127.0.0.1:{stub.port}" in str(caught.value)
    wait_until(lambda: can_link(node), "the next try finds it")
    assert named.count("SENTINEL") == 0
    nodes.close()


def can_link(node: Any) -> bool:
    try:
        with node.link():
            return True
    except NodeFault:
        return False


def test_a_sentinel_that_lags_behind_is_asked_last(stub: Stub, named: Stub) -> None:
    """It names a server that is a replica by now: which is not swept, nor taken for a restart, and
    another sentinel is asked next."""
    replica = b"# Replication\r\nrole:slave\r\n"
    with Stub() as demoted, Stub() as other:
        demoted.on("INFO", bulk(replica), word=b"replication")
        stub.on("SENTINEL", address(demoted.port))
        other.on("SENTINEL", address(named.port))
        nodes = open_nodes(settings_of(sentinel_url(stub.port, other.port)).node)
        ((node, _),) = nodes.by_node(["orders"], str)
        with pytest.raises(NotReady) as caught, node.link():
            pass
        assert caught.value.code == "READONLY"
        assert node.identity is None
        wait_until(lambda: can_link(node), "the other sentinel names the right one")
        assert (stub.count("SENTINEL"), other.count("SENTINEL")) == (1, 1)
        nodes.close()


@pytest.mark.parametrize("verb", ["AUTH", "SENTINEL"])
def test_silent_sentinels_cost_no_more_than_one_connection(
    stub: Stub, tmp_path: Path, verb: str
) -> None:
    """All of them together have node.connect_timeout, the login included."""
    (secret := tmp_path / "secret").write_text("x")
    stub.on(verb, SILENCE)
    node: dict[str, Any] = {"connect_timeout": "500ms", "sentinel": {"password_file": str(secret)}}
    nodes = open_nodes(settings_of(sentinel_url(*[stub.port] * 5), **node).node)
    started = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        nodes.refresh()
    assert 0.4 < time.monotonic() - started < 2
    assert caught.value.code == "timeout"
    assert "and 2 more" in str(caught.value)


def test_the_address_that_was_named_is_told(stub: Stub, named: Stub) -> None:
    """Who reads that the primary cannot be reached wants to know where it is."""
    named.stop_listening()
    stub.on("SENTINEL", address(named.port))
    nodes = open_nodes(settings_of(sentinel_url(stub.port)).node)
    ((node, _),) = nodes.by_node(["orders"], str)
    with pytest.raises(Unreachable) as caught, node.link():
        pass
    assert str(caught.value) == (
        f"main: cannot connect to 127.0.0.1:{named.port} (Connection refused)"
    )


def test_a_server_that_is_no_longer_named_is_left(stub: Stub, named: Stub) -> None:
    """A primary that lives on where the others do not see it keeps its connections open."""
    with Stub() as cut_off:
        stub.on("SENTINEL", address(cut_off.port))
        nodes = open_nodes(settings_of(sentinel_url(stub.port)).node)
        ((node, _),) = nodes.by_node(["orders"], str)
        with node.link():
            pass
        stub.on("SENTINEL", address(named.port))
        nodes.refresh()
        with node.link():
            pass
        assert (cut_off.count("EMQ.VERSION"), named.count("EMQ.VERSION")) == (1, 1)
        nodes.close()


def test_the_name_that_was_named_is_told(
    stub: Stub, named: Stub, name_servers: NameServers
) -> None:
    """And not the address that it leads to; with another sentinel's name before it that leads
    nowhere."""
    name_servers.answering.set()
    name_servers.names = {
        "gone.test": [],
        "sentinel.test": ["127.0.0.1"],
        "primary.test": ["127.0.0.2", "127.0.0.1"],
    }
    named.stop_listening()
    stub.on("SENTINEL", array(bulk(b"primary.test"), bulk(b"%d" % named.port)))
    url = f"redis+sentinel://gone.test:1,sentinel.test:{stub.port}/{MASTER}"
    with closing(open_nodes(settings_of(url).node)) as nodes:
        (node,) = nodes.primaries()
        with pytest.raises(Unreachable) as caught, node.link():
            pass
        assert str(caught.value) == (
            f"main: cannot connect to primary.test:{named.port} (Connection refused)"
        )
        named.heal()
        wait_until(lambda: can_link(node), "it listens")


@pytest.mark.parametrize(
    ("url", "words", "each"),
    [
        ("redis+sentinel://a.test,b.test/m", "no sentinel names the primary: a.test:26379: ", 0.5),
        ("redis+cluster://a.test,b.test", "no slot map to be had: a.test:6379: ", 1.0),
    ],
)
def test_names_that_nobody_looks_up_are_told(
    monkeypatch: pytest.MonkeyPatch, url: str, words: str, each: float
) -> None:
    """Each server is asked for, in the time that it has: sentinels share that of one connection."""
    asked: list[tuple[str, float]] = []

    def addresses(host: str, seconds: float) -> list[str]:
        asked.append((host, seconds))
        raise dialling.NoAnswer("silence")

    monkeypatch.setattr(dialling._LOOK_UPS, "addresses", addresses)
    settings = settings_of(url, connect_timeout="1s").node
    with closing(open_nodes(settings)) as nodes, pytest.raises(Unreachable) as caught:
        nodes.refresh()
    assert caught.value.code == "timeout"
    assert f"{words}silence within node.connect_timeout" in str(caught.value)
    assert asked == [("a.test", each), ("b.test", each)]


@pytest.mark.parametrize("name", ["a..b", "." * 3, "a" * 64])
@pytest.mark.parametrize("url", ["redis://{}:1", "redis+sentinel://{}:1/m", "redis+cluster://{}:1"])
def test_a_name_that_no_host_can_have_is_an_address_that_is_not_reached(
    name: str, url: str
) -> None:
    """The codec of host names refuses it with an error of its own kind."""
    with closing(open_nodes(settings_of(url.format(name)).node)) as nodes:
        (node,) = nodes.primaries()
        with pytest.raises(Unreachable, match="label"), node.link():
            pass
