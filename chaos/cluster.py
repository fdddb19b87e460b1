"""Three primaries and their replicas, whose slots move about while they are worked on."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from chaos.servers import (
    DOWN_AFTER_MS,
    LOOPBACK,
    SERVER_ARGS,
    Primary,
    Servers,
    client_of,
    exposed,
    run_together,
    wait_until,
)
from emqtimerd import wire
from emqtimerd.devnode import DevNode

PRIMARIES = 3
SLOTS = 16_384
SHARE = -(-SLOTS // PRIMARIES)
BRAND = ""
"""Stands for a queue's name where the slot of the brand is meant."""

KEYS_AT_ONCE = 500
"""How many keys go in one MIGRATE: the server does nothing else meanwhile."""
PAUSES = 8
"""In how many steps a slot is moved key by key at least."""

ARGS = (
    *SERVER_ARGS,
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", str(DOWN_AFTER_MS)),
    # A replica takes over however long it has not heard of its primary, but only when it is told
    # that it may: when we have seen to it that nothing is lost.
    *("--cluster-replica-validity-factor", "0"),
    *("--cluster-replica-no-failover", "yes"),
    # The living primaries go on when another one is down.
    *("--cluster-require-full-coverage", "no"),
    # A primary that lost all its slots stays one.
    *("--cluster-allow-replica-migration", "no"),
)


def slot_of(queue: str) -> int:
    """The slot of a queue, or of the brand."""
    return wire.slot(queue) if queue != BRAND else wire.slot_of_tag(b"emq")


class Cluster(Servers):
    """Primaries that share the slots out evenly at first, each with a replica."""

    name = "cluster"

    def __init__(self, place: Path, host: str = LOOPBACK) -> None:
        super().__init__(place, host)
        self.primaries = [
            Primary(place, number, self._server(f"primary{number}")) for number in range(PRIMARIES)
        ]
        for number, primary in enumerate(self.primaries):
            primary.replica = self._server(f"replica{number}")
        self._owners: dict[int, Primary] = {}
        """Who has the slots that have moved."""

    def _server(self, name: str, port: int = 0) -> DevNode:
        announced = ("--cluster-announce-ip", self.host)
        return DevNode(
            self.place / name, port=port, extra_args=(*ARGS, *exposed(self.host), *announced)
        )

    def __enter__(self) -> "Cluster":
        run_together([node.start for node in self.nodes])
        for number, primary in enumerate(self.primaries):
            primary.start()
            last = min((number + 1) * SHARE, SLOTS) - 1
            self._ask(primary.node, "CLUSTER", "ADDSLOTSRANGE", number * SHARE, last)
        for number, node in enumerate(self.nodes):
            self._ask(node, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for other in self.nodes[:number]:
                self._ask(node, "CLUSTER", "MEET", self.host, other.port)
        wait_until(lambda: all(map(self._has_met_all, self.nodes)), "all servers have met")
        for primary in self.primaries:
            self._ask(primary.replica, "CLUSTER", "REPLICATE", self._id(primary.node))
        self.await_whole()
        for primary in self.primaries:
            wait_until(primary.in_step, "the replicas are in step")
        self.primary_of(BRAND).client.set(wire.BRAND_KEY, wire.BRAND)
        return self

    def url(self) -> str:
        hosts = ",".join(f"{self.host}:{each.node.port}" for each in self.primaries)
        return f"redis+cluster://{hosts}"

    def primary_of(self, queue: str) -> Primary:
        slot = slot_of(queue)
        return self._owners.get(slot) or self.primaries[slot // SHARE]

    def await_whole(self) -> None:
        """Wait until every primary that runs works, and knows who has which slot."""
        wait_until(self._is_whole, "the cluster works")

    def fail_over(self, number: int, *, kill: bool) -> Callable[[], None]:
        pair = self.primaries[number]
        wait_until(pair.in_step, "the replica is in step")

        def end(old: DevNode, new: DevNode) -> None:
            if kill:
                old.kill()
                self._ask(new, "CONFIG", "SET", "cluster-replica-no-failover", "no")
            else:
                self._ask(new, "CLUSTER", "FAILOVER")
            wait_until(lambda: self._is_primary(new), "the replica takes over")
            self._ask(new, "CONFIG", "SET", "cluster-replica-no-failover", "yes")
            if not kill:
                pair.client.client_unpause()

        part, old = pair.hand_over(end)
        self.add_to_history(part)
        self.on_change()

        def mend() -> None:
            old.start()
            wait_until(pair.in_step, "the other server is a replica now")
            self.await_whole()

        return mend

    # --- slots on the move ----------------------------------------------------------------------

    def move_at_once(self, queue: str, number: int) -> None:
        slot, source, target = slot_of(queue), self.primary_of(queue), self.primaries[number]
        begun = self._begin_move(source)
        where = ("SLOTSRANGE", slot, slot, "NODE", self._id(target.node))
        self._ask(source.node, "CLUSTER", "MIGRATESLOTS", *where)
        wait_until(lambda: self._serves(target, slot), "the slot has moved")
        begun(slot, target)

    def move_by_key(self, queue: str, number: int, seconds: float) -> None:
        slot, source, target = slot_of(queue), self.primary_of(queue), self.primaries[number]
        begun = self._begin_move(source)
        here, there = self._id(source.node), self._id(target.node)
        self._ask(target.node, "CLUSTER", "SETSLOT", slot, "IMPORTING", here)
        self._ask(source.node, "CLUSTER", "SETSLOT", slot, "MIGRATING", there)
        for keys in self._pieces(queue):
            to = (self.host, target.node.port, "", 0, 30_000)
            self._ask(source.node, "MIGRATE", *to, "KEYS", *keys)
            time.sleep(seconds / PAUSES)
        for primary in (target, source):
            self._ask(primary.node, "CLUSTER", "SETSLOT", slot, "NODE", there)
        begun(slot, target)

    def _begin_move(self, source: Primary) -> Callable[[int, Primary], None]:
        """Return what ends a move in our books.

        What its source did to a queue must come before what its target will do. So the others'
        history is cut before any slot can have moved, and the source's after it has.
        """
        self.add_to_history(*(each.cut() for each in self.primaries if each is not source))

        def end(slot: int, target: Primary) -> None:
            self.add_to_history(source.cut())
            self._owners[slot] = target
            self.on_change()
            self.await_whole()

        return end

    def _pieces(self, queue: str) -> Iterator[Sequence[bytes]]:
        """The keys of the queue's slot in the order in which they are to leave."""
        node, slot = self.primary_of(queue).node, slot_of(queue)
        keys: list[bytes] = self._ask(node, "CLUSTER", "GETKEYSINSLOT", slot, 1_000_000)
        # The leases first: as soon as these are elsewhere, no verb that ends a lease is done here.
        # Two of them write a counter that they do not announce as a key: it would be left behind.
        first = [key for key in keys if queue and key == wire.queue_key(queue, "active")]
        if first:
            yield first
        rest = [key for key in keys if key not in first]
        size = min(KEYS_AT_ONCE, len(rest) // PAUSES + 1)
        for start in range(0, len(rest), size):
            yield rest[start : start + size]
        # Made meanwhile.
        while keys := self._ask(node, "CLUSTER", "GETKEYSINSLOT", slot, KEYS_AT_ONCE):
            yield keys

    # --- its parts ------------------------------------------------------------------------------

    def _ask(self, node: DevNode, *words: str | bytes | int) -> Any:
        with client_of(node) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def _id(self, node: DevNode) -> str:
        return str(self._ask(node, "CLUSTER", "MYID").decode())

    def _has_met_all(self, node: DevNode) -> bool:
        lines = self._ask(node, "CLUSTER", "NODES").decode().splitlines()
        known = [line for line in lines if "handshake" not in line and "noaddr" not in line]
        return len(known) == len(self.nodes)

    def _is_primary(self, node: DevNode) -> bool:
        with suppress(redis.RedisError):
            return bool(self._ask(node, "ROLE")[0] == b"master")
        return False

    def _serves(self, primary: Primary, slot: int) -> bool:
        ranges = self._ask(primary.node, "CLUSTER", "SLOTS")
        return any(
            first <= slot <= last and server[1] == primary.node.port
            for first, last, server, *_ in ranges
        )

    def _is_whole(self) -> bool:
        with suppress(redis.RedisError):
            for primary in self.primaries:
                if not primary.node.running:
                    continue
                if b"cluster_state:ok" not in self._ask(primary.node, "CLUSTER", "INFO"):
                    return False
            return True
        return False
