"""Sets of real servers: a cluster, and a primary with replicas that sentinels watch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from conftest import TEST_ARGS, connect, server_path, wait_until
from echomq import base, send

from emqtimerd import wire
from emqtimerd.config import host_port_text
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.devnode.process import Process, end, spawn

START_SECONDS = 60.0
"""How long a set of servers may take to stand: three seconds here, and a minute on a tired machine
or under a sanitizer. No test measures it."""

NODE_TIMEOUT_MS = 1000
"""When the others give a silent server up. Less, and a busy machine makes servers look dead."""

CLUSTER_ARGS = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", str(NODE_TIMEOUT_MS)),
    # A replica takes over however long it has not heard of its primary.
    *("--cluster-replica-validity-factor", "0"),
    # The living primaries go on when another one has nobody to take over.
    *("--cluster-require-full-coverage", "no"),
    *("--enable-module-command", "local"),
    # A primary that lost all its slots stays one.
    *("--cluster-allow-replica-migration", "no"),
)

Command = Sequence[str | bytes | int]


def ask(client: redis.Redis, *command: str | bytes | int) -> Any:
    """Send one command; an error is raised, so that nothing in a set fails unseen."""
    reply = send(client, *command)
    if hasattr(reply, "code"):
        raise AssertionError(f"{command}: {reply.text}")
    return reply


def schedule(client: redis.Redis, queue: str, job_id: str, in_ms: int = 0) -> None:
    """Add a job that is due so soon."""
    prefix = base(queue).decode()
    keys = (f"{prefix}job:{job_id}", f"{prefix}schedule")
    assert ask(client, "EMQ.SCHEDULE", 2, *keys, job_id, "payload", "in", in_ms) == 1


def lease(client: redis.Redis, queue: str, job_ids: Sequence[str], lease_ms: int) -> None:
    """Add jobs and claim them: a worker that holds them and is never heard of again.

    In one transaction: the first is not to come back before the last is claimed.
    """
    prefix = base(queue).decode()
    pending = f"{prefix}pending"
    pipeline: Any
    with client.pipeline(transaction=True) as pipeline:
        for job_id in job_ids:
            job = (f"{prefix}job:{job_id}", pending, job_id)
            pipeline.execute_command("EMQ.ENQUEUE", 2, *job, "payload")
        for _ in job_ids:
            pipeline.execute_command("EMQ.CLAIM", 3, pending, f"{prefix}active", prefix, lease_ms)
        replies = pipeline.execute()
    claimed = [claim[0] for claim in replies[len(job_ids) :]]
    assert claimed == [job_id.encode() for job_id in job_ids]


def pending(client: redis.Redis, queue: str) -> set[bytes]:
    """The ids that are pending."""
    return set(ask(client, "ZRANGE", base(queue) + b"pending", 0, -1))


def resolve_test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every name that ends in .test be this machine, as far as this process asks."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        return real("127.0.0.1" if host.endswith(".test") else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def need_ipv6() -> None:
    """Skip a test on a machine without IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")


class Servers:
    """Some servers of a test. They listen at 127.0.0.1 for the test, and may know each other by
    another address."""

    def __init__(self, directory: Path, *, kind: str = "valkey-9", host: str = "127.0.0.1") -> None:
        if host == "::1":
            need_ipv6()
        self.host = host
        """Where the servers are for each other."""
        self.nodes: list[DevNode] = []
        self._directory = directory
        self._server = str(server_path(kind))

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        raise NotImplementedError

    @property
    def bound_to(self) -> Sequence[str]:
        """Where the servers listen."""
        return ("127.0.0.1", "::1") if self.host == "::1" else ("127.0.0.1",)

    def arguments(self, number: int) -> Sequence[str]:
        """What a server is started with, by its number."""
        del number  # these have all the same
        return (*TEST_ARGS, "--bind", *self.bound_to)

    def port_of(self, node: DevNode) -> int:
        """Where a server listens for the others, and for the daemon."""
        return node.port

    def name_of(self, node: DevNode) -> str:
        """What the daemon calls a server."""
        return host_port_text(self.host, self.port_of(node))

    def add(self, count: int, *arguments: str, **options: Any) -> list[DevNode]:
        """Start servers, all at the same time."""
        numbers = range(len(self.nodes), len(self.nodes) + count)
        added = [self.server(number, *arguments, **options) for number in numbers]
        self.nodes += added
        start_all(added)
        return added

    def server(self, number: int, *arguments: str, **options: Any) -> DevNode:
        """A server that is not started yet."""
        return DevNode(
            self._directory / f"server{number}",
            server=self._server,
            extra_args=(*self.arguments(number), *arguments),
            **{"appendonly": False, **options},
        )

    def stop(self) -> None:
        for node in self.nodes:
            if node.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(node.pid, signal.SIGCONT)
                # SIGTERM would wait for replicas that are gone already.
                node.kill()

    def suspend(self, node: DevNode) -> None:
        """Let a server fall silent: its port answers the handshake of TCP, and nothing else."""
        os.kill(node.pid, signal.SIGSTOP)

    def resume(self, node: DevNode) -> None:
        os.kill(node.pid, signal.SIGCONT)


def start_all(nodes: Sequence[DevNode]) -> None:
    """Start servers, all at the same time."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(DevNode.start, nodes))


def wait_in_step(replicas: Sequence[DevNode], password: str | None = None) -> None:
    """Wait until replicas have what their primaries have."""
    for node in replicas:
        with connect(node, password=password) as client:
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up",
                "the replica is in step",
                START_SECONDS,
            )


# --- Cluster ------------------------------------------------------------------------------------


class Cluster(Servers):
    """Primaries that share the slots out evenly, and replicas of them in the same order.

    `endpoints` is what they are called by: `ip`, `hostname` or `unknown-endpoint`.
    """

    def __init__(
        self,
        directory: Path,
        primaries: int = 3,
        replicas: int = 0,
        endpoints: str = "ip",
        **options: Any,
    ) -> None:
        super().__init__(directory, **options)
        self._primaries, self._replicas = primaries, replicas
        self._endpoints = endpoints

    def arguments(self, number: int) -> Sequence[str]:
        return (
            *super().arguments(number),
            *CLUSTER_ARGS,
            *("--cluster-announce-hostname", f"server{number}.test"),
            *("--cluster-preferred-endpoint-type", self._endpoints),
        )

    def name_of(self, node: DevNode) -> str:
        if self._endpoints == "hostname":
            return f"server{self.nodes.index(node)}.test:{self.port_of(node)}"
        return super().name_of(node)

    @property
    def url(self) -> str:
        """An address that names one server and finds all."""
        return f"redis+cluster://{self.name_of(self.nodes[0])}"

    @property
    def primaries(self) -> list[DevNode]:
        """Those that were primaries at the start."""
        return self.nodes[: self._primaries]

    @property
    def replicas(self) -> list[DevNode]:
        """Their replicas, in the same order."""
        return self.nodes[self._primaries :]

    def start(self) -> None:
        self.add(self._primaries + self._replicas, appendonly=True)
        share = -(-16384 // self._primaries)
        for number, node in enumerate(self.nodes):
            with connect(node) as client:
                if node in self.primaries:
                    last = min((number + 1) * share, 16384) - 1
                    ask(client, "CLUSTER", "ADDSLOTSRANGE", number * share, last)
                ask(client, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes:
            with connect(node) as client:
                # Two suffice for all to hear of each other; so it takes fewer rounds of gossip.
                for other in self.nodes:
                    if other is not node:
                        ask(client, "CLUSTER", "MEET", self.host, self.port_of(other))
        wait_until(
            lambda: all(self._known(node) for node in self.nodes), "all have met", START_SECONDS
        )
        for primary, replica in zip(self.primaries, self.replicas, strict=False):
            with connect(replica) as client:
                ask(client, "CLUSTER", "REPLICATE", self.id_of(primary))
        wait_until(self.is_whole, "the cluster works", START_SECONDS)
        with self.client_of_slot(wire.slot_of_tag(b"emq")) as client:
            client.set(wire.BRAND_KEY, wire.BRAND)
        wait_in_step(self.replicas)

    def _known(self, node: DevNode) -> bool:
        with connect(node) as client:
            lines = ask(client, "CLUSTER", "NODES").decode().splitlines()
        well = [line for line in lines if "handshake" not in line and "noaddr" not in line]
        return len(well) == len(self.nodes)

    def is_whole(self) -> bool:
        """Whether every server thinks so."""
        for node in self.nodes:
            with connect(node) as client:
                if b"cluster_state:ok" not in ask(client, "CLUSTER", "INFO"):
                    return False
        return True

    def id_of(self, node: DevNode) -> str:
        with connect(node) as client:
            return str(ask(client, "CLUSTER", "MYID").decode())

    def queues_of(self, node: DevNode, count: int = 1) -> list[str]:
        """Names whose slots a primary had at the start."""
        index = self.primaries.index(node)
        share = -(-16384 // self._primaries)
        names = (f"orders-{number}" for number in range(10_000))
        found = (name for name in names if wire.slot(name) // share == index)
        return [next(found) for _ in range(count)]

    def client_of_slot(self, slot: int) -> redis.Redis:
        """A client of whoever has a slot now, as a server that lives sees it."""
        for node in self.nodes:
            if not node.running:
                continue
            with connect(node) as client:
                for first, last, (_, port, *_), *_ in ask(client, "CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        return redis.Redis(port=port, socket_timeout=10)
        raise AssertionError(f"nobody has slot {slot}")

    @contextlib.contextmanager
    def moving(self, queue: str, source: DevNode, target: DevNode) -> Iterator[None]:
        """Move a queue's slot in the classic way; inside, its keys are on their way."""
        slot = wire.slot(queue)
        with connect(source) as old, connect(target) as new:
            ask(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
            ask(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
            keys = ask(old, "CLUSTER", "GETKEYSINSLOT", slot, 100_000)
            self._migrate(old, target, keys[: len(keys) // 2])
            yield
            self._migrate(old, target, ask(old, "CLUSTER", "GETKEYSINSLOT", slot, 100_000))
            for client in (new, old):
                ask(client, "CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def move(self, queue: str, source: DevNode, target: DevNode) -> None:
        with self.moving(queue, source, target):
            pass

    def change_ports(self) -> None:
        """Restart all primaries together, each on another port than before."""
        primaries = self.primaries
        for node in primaries:
            with connect(node) as client:
                ask(client, "CLUSTER", "SAVECONFIG")
            node.kill()
        for number in range(len(primaries)):
            self.nodes[number] = self.server(number, appendonly=True)
        start_all(self.primaries)

    def _migrate(self, source: redis.Redis, target: DevNode, keys: Sequence[bytes]) -> None:
        if keys:
            to = (self.host, self.port_of(target))
            ask(source, "MIGRATE", *to, "", 0, 5000, "KEYS", *keys)


# --- Sentinel -----------------------------------------------------------------------------------

MASTER = "main"


class Sentinels(Servers):
    """A primary, a replica, and three sentinels that watch them."""

    def __init__(
        self,
        directory: Path,
        *,
        sentinel_lines: Sequence[str] = (),
        node_arguments: Sequence[str] = (),
        node_password: str | None = None,
        count: int = 3,
        password: str = "",
        tls: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(directory, **options)
        self._tls = tls
        self._lines = sentinel_lines
        self._node_arguments = node_arguments
        self._node_password = node_password
        if node_password:
            login = ("--requirepass", node_password, "--masterauth", node_password)
            self._node_arguments = (*node_arguments, *login)
        self._count = count
        self.ports: list[int] = []
        self._processes: list[Process] = []
        self._password = password

    @property
    def url(self) -> str:
        hosts = ",".join(host_port_text(self.host, port) for port in self.ports)
        return f"redis+sentinel://{hosts}/{MASTER}/0"

    def start(self) -> None:
        primary = self.start_servers()
        for number in range(self._count):
            self._start_sentinel(number, primary)
        wait_until(self._agree, "the sentinels have found each other", START_SECONDS)
        wait_in_step(self.nodes[1:], self._node_password)

    def start_servers(self) -> int:
        """Start a primary and a replica; return the port that sentinels know the first by."""
        (primary,) = self.add(1, *self._node_arguments)
        replicates = ("--replicaof", f"{self.host} {primary.port}")
        self.add(1, *self._node_arguments, *replicates, brand=False)
        return primary.port

    def _start_sentinel(self, number: int, primary: int) -> None:
        directory = self._directory / f"sentinel{number}"
        directory.mkdir(parents=True)
        port = free_port()
        (directory / "sentinel.conf").write_text(
            "\n".join(
                [
                    *(["port 0", f"tls-port {port}"] if self._tls else [f"port {port}"]),
                    f"bind {' '.join(self.bound_to)}",
                    f"dir {directory}",
                    f"sentinel monitor {MASTER} {self.host} {primary} {self._count // 2 + 1}",
                    f"sentinel down-after-milliseconds {MASTER} 500",
                    f"sentinel failover-timeout {MASTER} 2000",
                    *self._lines,
                ]
            )
        )
        command = [self._server, str(directory / "sentinel.conf"), "--sentinel"]
        self._processes.append(spawn(command, directory / "sentinel.log"))
        self.ports.append(port)

    def sentinel(self, number: int = 0) -> redis.Redis:
        client = redis.Redis(port=self.ports[number], password=self._password or None, protocol=2)
        # What redis-py makes of these replies differs from version to version.
        client.response_callbacks.clear()
        return client

    def _agree(self) -> bool:
        for number in range(self._count):
            try:
                with self.sentinel(number) as client:
                    reply = ask(client, "SENTINEL", "MASTER", MASTER)
            except redis.ConnectionError:
                return False
            state = dict(zip(reply[::2], reply[1::2], strict=True))
            wanted = (b"%d" % (self._count - 1), b"1", b"master")
            if (state[b"num-other-sentinels"], state[b"num-slaves"], state[b"flags"]) != wanted:
                return False
        return True

    def named(self, number: int = 0) -> int:
        """The port of the primary that a sentinel names."""
        with self.sentinel(number) as client:
            return int(ask(client, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)[1])

    def wait_named(self, node: DevNode, timeout: float = 30) -> None:
        """Wait until every living sentinel names a server as the primary."""
        living = [n for n, process in enumerate(self._processes) if process.poll() is None]
        wait_until(
            lambda: {self.named(number) for number in living} == {node.port},
            "the sentinels name the other server",
            timeout,
        )

    def kill_sentinel(self, number: int) -> None:
        end(self._processes[number], signal.SIGKILL)

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                end(process, signal.SIGKILL)
        super().stop()
