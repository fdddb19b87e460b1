"""Which servers an address means, and which of them has a queue: one, Sentinel's, a cluster's.

The servers themselves are `Node`s like any other; here is only who they are. A cluster is worked
on by plain connections to each primary: redis-py's own cluster client refuses verbs of three parts.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NoReturn, TypeVar

from emqtimerd import wire
from emqtimerd.config import NodeSettings, host_port_text
from emqtimerd.dialling import Connection, connector, sentinel_connector
from emqtimerd.node import (
    FenceRefused,
    Node,
    NodeFault,
    NotReady,
    Unreachable,
    first_fault,
    open_node,
)

TEND_SECONDS = 0.5
"""How often `tend` is to be called: a primary that failed is tried again within its first few
pauses, and what there is to do is mostly nothing."""

SENTINEL_SECONDS = 1.0
"""How often the sentinels are asked while all is well. A primary that had to hand over by command
goes on as one for up to 8 s more, and what is done there is lost."""

REFRESH_SECONDS = 5.0
"""How old the slot map may get while all is well: a new primary is searched for queues within
seconds. Of what moved, replies tell sooner."""

REFRESH_IN_TROUBLE_SECONDS = 1.0
"""The same while a primary of a cluster cannot be worked on: its replica may have taken over."""

SERVERS_TOLD = 3
"""How many servers one message tells the troubles of."""

SLOTS = 16384
BRAND_SLOT = wire.slot_of_tag(b"emq")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Account:
    """Who the primaries are, in words, and what is wrong with those who say so."""

    found: str
    troubles: tuple[str, ...] = ()


class Nodes:
    """The servers behind one address. This one is for an address of a single server."""

    watched: ClassVar[bool] = False
    """Whether the primaries may change, so that `tend` has to look."""
    tended: ClassVar[bool] = False
    """Whether `tend` connects to all nodes, those that failed too: rounds need not wait for it."""

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self._node = node
        self.on_change: Callable[[Mapping[str, str]], None] = lambda _heirs: None
        """Called when the primaries have changed, with whom a new one took over from, by name."""

    def primaries(self) -> Sequence[Node]:
        """Return the servers that have queues, as far as they are known."""
        return (self._node,)

    def by_node(self, items: Sequence[T], queue: Callable[[T], str]) -> list[tuple[Node, list[T]]]:
        """Share things out to the nodes that have their queues, those that work first."""
        del queue  # all of them have the same node
        return [(self._node, list(items))] if items else []

    def locate(self) -> None:
        """Find the primaries if that was not done yet; whatever is wrong shows when they are
        used."""

    def refresh(self, told: str = "") -> None:
        """Look where the primaries are now; `told` is the text of a MOVED reply. Raises
        NodeFault."""

    def tend(self) -> None:
        """Look after the servers apart from any sweep: here, see that there is a connection."""
        self._node.look()

    def brand_node(self) -> Node:
        """Return the server that has the brand."""
        return self._node

    def account(self) -> Account:
        """Tell who the primaries are and who says so. Raises NodeFault."""
        return Account("one server")

    def go_on_from(self, former: "Nodes") -> None:
        """Take over since when one of those before these has been failing: what these find is the
        end of that outage. To be called before anything is dialled."""
        since = [n.failing_since for n in former.primaries() if n.failing_since is not None]
        for node in self.primaries():
            node.failing_since = min(since, default=None)

    def close(self) -> None:
        """Close the connections."""
        self._node.close()


def open_nodes(settings: NodeSettings) -> Nodes:
    """Return the nodes that the settings name; nothing is dialled before it is needed."""
    if settings.url.topology == "sentinel":
        return SentinelNodes(settings)
    if settings.url.topology == "cluster":
        return ClusterNodes(settings)
    return Nodes(open_node(settings))


# --- Sentinel -----------------------------------------------------------------------------------


class SentinelNodes(Nodes):
    """The primary that the sentinels name, under the name that they have for it.

    They are asked at each connection, so what follows a failover is no more than a reconnect.
    """

    watched = True

    def __init__(self, settings: NodeSettings) -> None:
        self._sentinels = _Sentinels(settings)
        self._connect = connector(settings)
        self._address: tuple[str, int] | None = None
        self._asked_at = float("-inf")
        url = settings.url
        super().__init__(Node(url.master, self._dial, settings.timeout_seconds, found=True))

    def refresh(self, told: str = "") -> None:
        """Ask the sentinels, and leave the server that they no longer name: it may have lost all
        the others and not know it."""
        del told  # by nobody: MOVED is of clusters
        self._asked_at = time.monotonic()
        address = self._sentinels.primary()
        if self._address not in (None, address):
            self._node.drop_idle()

    def tend(self) -> None:
        """Ask the sentinels from time to time."""
        if time.monotonic() >= self._asked_at + SENTINEL_SECONDS:
            with contextlib.suppress(NodeFault):
                self.refresh()
        super().tend()

    def account(self) -> Account:
        """Ask each sentinel. Raises Unreachable if none names a primary."""
        answers = self._sentinels.ask_all()
        named = [answer for answer in answers if not isinstance(answer, NodeFault)]
        first = host_port_text(*self._sentinels.primary())
        agree = sum(host_port_text(*answer) == first for answer in named)
        troubles = [str(answer) for answer in answers if isinstance(answer, NodeFault)]
        if agree < len(named):
            others = sorted({host_port_text(*answer) for answer in named} - {first})
            troubles.append(f"other sentinels name {', '.join(others)}")
        return Account(
            f"{self.name} is {first}, say {agree} of {len(answers)} sentinels", tuple(troubles)
        )

    def _dial(self) -> Connection:
        if self._node.fault() is not None:
            # Whoever was asked last named a server that does not work.
            self._sentinels.turn()
        self._address = address = self._sentinels.primary()
        return self._connect(*address)


class _Sentinels:
    """The sentinels, the one to ask first in front. Safe for several threads."""

    def __init__(self, settings: NodeSettings) -> None:
        self._master = settings.url.master
        self._user = settings.sentinel.username or "default"
        hosts = settings.url.hosts
        # All together get the time of one connection: a thread waits for no more than two then.
        self._patience_seconds = settings.connect_timeout_seconds / len(hosts)
        connect = sentinel_connector(settings, self._patience_seconds)
        self._order = [
            Node(host_port_text(*host), partial(connect, *host), self._patience_seconds)
            for host in hosts
        ]
        self._lock = threading.Lock()

    def turn(self) -> None:
        """Ask another one first from now on."""
        with self._lock:
            self._order.append(self._order.pop(0))

    def primary(self) -> tuple[str, int]:
        """Return the address of the first sentinel's answer. Raises Unreachable."""
        with self._lock:
            troubles: list[NodeFault] = []
            for sentinel in tuple(self._order):
                try:
                    return self._ask(sentinel)
                except NodeFault as fault:
                    troubles.append(fault)
                    self._order.append(self._order.pop(0))
        raise Unreachable(
            self._master, troubles[0].code, f"no sentinel names the primary: {_told(troubles)}"
        )

    def ask_all(self) -> list[tuple[str, int] | NodeFault]:
        """Return what each of them says."""
        answers: list[tuple[str, int] | NodeFault] = []
        for sentinel in self._order:
            try:
                answers.append(self._ask(sentinel))
            except NodeFault as fault:
                answers.append(fault)
        return answers

    def _ask(self, sentinel: Node) -> tuple[str, int]:
        command = wire.pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)
        try:
            reply = _ask(sentinel, command, self._patience_seconds)
        except Unreachable as fault:
            if fault.code == "WRONGPASS":
                raise Unreachable(sentinel.name, fault.code, _SENTINEL_LOGIN) from fault
            raise
        match reply:
            case [bytes() as host, bytes() as port] if port.isdigit() and len(port) <= 5:
                return host.decode(errors="replace"), int(port)
            case None | []:
                what = f"knows no primary called {self._master!r}"
                raise NotReady(sentinel.name, "ERR", what)
            case wire.ReplyError(code="NOPERM"):
                what = (
                    "the ACL denies SENTINEL GET-MASTER-ADDR-BY-NAME; as its operator: ACL SETUSER "
                    f"{self._user} +sentinel|get-master-addr-by-name"
                )
                raise NotReady(sentinel.name, "NOPERM", what)
            case wire.ReplyError(code="NOAUTH"):
                raise Unreachable(sentinel.name, "NOAUTH", _SENTINEL_LOGIN)
            case wire.ReplyError():
                raise NotReady(sentinel.name, reply.code, str(reply))
        raise NotReady(sentinel.name, "shape", f"was answered with {wire.outline(reply)}")


_SENTINEL_LOGIN = (
    "authentication was refused; check node.sentinel.username and node.sentinel.password_file "
    "(those of the node are not sent to sentinels)"
)


# --- Cluster ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Server:
    """One server of a cluster, as the others know it."""

    id: bytes
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots in a row that one primary serves."""

    first: int
    last: int
    primary: Server
    replicas: tuple[Server, ...]


def read_slots(reply: wire.Reply, asked: str) -> list[SlotRange]:
    """Read CLUSTER SLOTS. Where an address is left open it is `asked`, the host that was asked.
    Raises ReplyError or ShapeError."""
    if isinstance(reply, wire.ReplyError):
        raise reply
    if not isinstance(reply, list):
        raise wire.ShapeError("CLUSTER SLOTS", reply)
    ranges = []
    for item in reply:
        match item:
            case [int() as first, int() as last, primary, *replicas] if 0 <= first <= last < SLOTS:
                servers = [_read_server(server, asked) for server in (primary, *replicas)]
            case _:
                raise wire.ShapeError("CLUSTER SLOTS", reply)
        if servers[0].host != _NO_HOST:
            ranges.append(SlotRange(first, last, servers[0], tuple(servers[1:])))
    return ranges


_NO_HOST = "?"
"""What stands for the host name of a server that is to be called by it and has none."""


def _read_server(reply: object, asked: str) -> Server:
    match reply:
        case [b"?", int() as port, bytes() as node_id, [b"ip", bytes() as host, *_], *_]:
            pass  # called by its address until it has a name
        case [bytes() | None as host, int() as port, bytes() as node_id, *_]:
            pass
        case _:
            raise wire.ShapeError("CLUSTER SLOTS", reply)
    return Server(node_id, (host or b"").decode(errors="replace") or asked, port)


@dataclass(slots=True)
class _Map:
    """Who serves what, as of one answer."""

    ranges: list[SlotRange]
    nodes: dict[bytes, Node]
    """The primaries, by the id that the cluster has for them."""
    owners: list[Node]
    """For each slot, who serves it."""
    heirs: dict[str, str]
    """Which primaries took over from which others of the map before, by name."""
    whole: bool
    """Whether every slot is served."""
    branded: bool = False
    """Whether the brand was read since the map changed."""

    def forebear(self, part: SlotRange, primaries: Collection[bytes]) -> Node | None:
        """Return whom a new primary takes over from: itself at another address, or who had its
        first slot and is none of the primaries any more."""
        if itself := self.nodes.get(part.primary.id):
            return itself
        owner = self.owners[part.first]
        gone = {id(node) for key, node in self.nodes.items() if key not in primaries}
        return owner if id(owner) in gone else None


class ClusterNodes(Nodes):
    """The primaries of a cluster, and which of them has the slot of a queue.

    A primary that failed is tried again by `tend` alone: nobody who has work for the living ones
    waits for it.
    """

    watched = tended = True

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._connect = connector(settings)
        name = ",".join(host_port_text(*seed) for seed in settings.url.hosts)
        # Stands for whoever ought to have a slot that nobody serves, and for all before anything
        # is known. To connect to it is to look who there is; it never answers.
        super().__init__(Node(name, self._dial_nobody, settings.timeout_seconds))
        self._map: _Map | None = None
        self._asked_at = float("-inf")
        self._read_at = float("-inf")
        self._branded = False
        self._closed = False
        self._lock = threading.Lock()

    def primaries(self) -> Sequence[Node]:
        """Return the primaries that serve slots, and a stand-in while none is known."""
        known = self._map
        return tuple(known.nodes.values()) if known else (self._node,)

    def by_node(self, items: Sequence[T], queue: Callable[[T], str]) -> list[tuple[Node, list[T]]]:
        """Share things out to the primaries that have their queues, those that work first."""
        known = self._map
        if known is None:
            return super().by_node(items, queue)
        shares: dict[Node, list[T]] = {}
        for item in items:
            shares.setdefault(known.owners[wire.slot(queue(item))], []).append(item)
        return sorted(shares.items(), key=lambda share: share[0].fault() is not None)

    def brand_node(self) -> Node:
        """Return the primary that has the slot of the brand's key."""
        known = self._map
        return known.owners[BRAND_SLOT] if known else self._node

    def locate(self) -> None:
        """Read the slot map if that was not done yet."""
        if self._map is None:
            with contextlib.suppress(NodeFault), self._node.link():
                pass

    def tend(self) -> None:
        """Read the slot map from time to time, and try the primaries that failed."""
        if self._map is None:
            self.locate()
            return
        ill = not self._map.whole or any(node.fault() for node in self.primaries())
        age = time.monotonic() - self._asked_at
        if age >= (REFRESH_IN_TROUBLE_SECONDS if ill else REFRESH_SECONDS):
            with contextlib.suppress(NodeFault):
                self.refresh()
        # Also those that work: one whose last connection the server has closed shows here.
        for node in self.primaries():
            node.look()
        if not self._map.branded:
            with contextlib.suppress(NodeFault):
                self._read_brand(self._map)

    def close(self) -> None:
        """Close the connections to all primaries."""
        self._closed = True
        for node in self.primaries():
            node.close()

    def account(self) -> Account:
        """Tell how many primaries there are, and how many slots nobody serves."""
        self.refresh()
        known = self._map
        served = sum(part.last + 1 - part.first for part in known.ranges) if known else 0
        count = len(self.primaries())
        found = f"{count} {'primary serves' if count == 1 else 'primaries serve'} {served} slots"
        lost = SLOTS - served
        return Account(found, (f"nobody serves the other {lost}",) if lost else ())

    # --- the slot map ---------------------------------------------------------------------------

    def refresh(self, told: str = "") -> None:
        """Read the slot map from whoever answers first; of several callers one does it.

        Who was told MOVED asks the server that it was sent to: it is the one that knows.
        """
        wanted_at = time.monotonic()
        with self._lock:
            if self._read_at >= wanted_at:
                return
            self._asked_at = time.monotonic()
            ranges = self._read(told)
            self._read_at = time.monotonic()
            before, self._map = self._map, self._drawn(ranges)
            if self._closed:
                # While the map was read: whoever did it has not seen who is new in it.
                self.close()
            if before is None or before.owners != self._map.owners:
                self._follow(before, self._map)
            else:
                self._map.branded = before.branded

    def _read(self, told: str) -> list[SlotRange]:
        settings = self._settings
        # Living servers answer at once; this is for how many dead ones are waited for.
        until = time.monotonic() + settings.connect_timeout_seconds + settings.timeout_seconds
        troubles: list[NodeFault] = []
        for host, port in self._addresses(told):
            if time.monotonic() >= until:
                break
            dial = partial(self._connect, host, port)
            server = Node(host_port_text(host, port), dial, settings.timeout_seconds)
            try:
                return self._ask(server, host)
            except NodeFault as fault:
                troubles.append(fault)
        # What a server said is worth more than that another one was silent.
        troubles.sort(key=lambda fault: not isinstance(fault, NotReady))
        kind = NotReady if isinstance(troubles[0], NotReady) else Unreachable
        raise kind(self.name, troubles[0].code, f"no slot map to be had: {_told(troubles)}")

    def _addresses(self, told: str) -> Iterable[tuple[str, int]]:
        """Return where to ask, in order and each once: whom MOVED names, primaries that work, the
        configured servers, replicas, and last the primaries that do not."""
        known = self._map
        ranges = known.ranges if known else []
        nodes = known.nodes if known else {}
        works = {r.primary: nodes[r.primary.id].fault() is None for r in ranges}
        primaries = [server for server, well in works.items() if well]
        others = [server for r in ranges for server in r.replicas]
        others += [server for server, well in works.items() if not well]
        found = [
            *_moved_to(told, [server.host for server in primaries]),
            *((server.host, server.port) for server in primaries),
            *self._settings.url.hosts,
            *((server.host, server.port) for server in others),
        ]
        return dict.fromkeys(found)

    def _ask(self, server: Node, host: str) -> list[SlotRange]:
        patience = self._settings.connect_timeout_seconds
        reply = _ask(server, wire.pack("CLUSTER", "SLOTS"), patience)
        try:
            ranges = read_slots(reply, host)
        except wire.ShapeError as error:
            raise NotReady(server.name, error.code, str(error)) from error
        except wire.ReplyError as error:
            what = str(error)
            user = self._settings.username or self._settings.url.username or "default"
            if error.code == "NOPERM":
                what = (
                    "the ACL denies CLUSTER SLOTS, without which no primary is known; as its "
                    f"operator: ACL SETUSER {user} +cluster|slots"
                )
            elif "cluster support disabled" in what:
                what = "this server is not in cluster mode; a single one is named without +cluster"
            raise NotReady(server.name, error.code, what) from error
        if not ranges:
            raise NotReady(server.name, "CLUSTERDOWN", "it knows of no slot that is served")
        return ranges

    def _drawn(self, ranges: list[SlotRange]) -> _Map:
        """Make a map of an answer; primaries that are known at their address stay who they are."""
        before = self._map
        known = before.nodes if before else {}
        ids = {part.primary.id for part in ranges}
        nodes: dict[bytes, Node] = {}
        owners = [self._node] * SLOTS
        heirs: dict[str, str] = {}
        for part in ranges:
            server = part.primary
            name = host_port_text(server.host, server.port)
            node = nodes.get(server.id) or known.get(server.id)
            if node is None or node.name != name:
                forebear = before.forebear(part, ids) if before else None
                if forebear:
                    heirs[name] = forebear.name
                node = self._new_node(server, name, forebear)
            nodes[server.id] = node
            owners[part.first : part.last + 1] = [node] * (part.last + 1 - part.first)
        return _Map(ranges, nodes, owners, heirs, self._node not in owners)

    def _new_node(self, server: Server, name: str, forebear: Node | None) -> Node:
        node = Node(
            name,
            partial(self._connect, server.host, server.port),
            self._settings.timeout_seconds,
            found=True,
            brand_is_here=self._brand_is_here,
            # One that was not there at our own start begins like one that was restarted just now.
            predecessor=((forebear and forebear.run_id) or "") if self._map else None,
        )
        if self._map is None:
            # The stand-in knows of an outage before anybody had the map.
            node.failing_since = self._node.failing_since
        return node

    def _follow(self, before: _Map | None, now: _Map) -> None:
        """Leave the primaries that are none any more, and read the brand again."""
        kept = set(now.nodes.values())
        for node in before.nodes.values() if before else ():
            if node not in kept:
                node.close()
        if now.owners[BRAND_SLOT].fault() is None:
            with contextlib.suppress(NodeFault):
                self._read_brand(now)
        self.on_change(now.heirs)

    def _dial_nobody(self) -> NoReturn:
        self.refresh()
        raise NotReady(self.name, "CLUSTERDOWN", "no primary serves the slot")

    # --- the brand ------------------------------------------------------------------------------

    def _brand_is_here(self, node: Node) -> bool:
        """Say whether the primary has the brand's key; if not, see to it that it was read where it
        is. Once it was, that one may fail and the others are worked on. Raises NodeFault."""
        known = self._map
        if known is None or known.owners[BRAND_SLOT] is node:
            return True
        if not known.branded:
            try:
                self._read_brand(known)
            except FenceRefused as fault:
                raise FenceRefused(node.name, fault.code, f"of the cluster, {fault}") from fault
            except NodeFault as fault:
                # What was found before the change of the map stands until it can be looked up.
                if not self._branded:
                    what = f"the brand of the cluster cannot be read: {fault}"
                    raise NotReady(node.name, fault.code, what) from fault
        return False

    def _read_brand(self, known: _Map) -> None:
        owner = known.owners[BRAND_SLOT]
        if owner is self._node:
            what = f"no primary serves slot {BRAND_SLOT}, where the brand is"
            raise NotReady(self.name, "CLUSTERDOWN", what)
        try:
            if pause := owner.pause():
                raise pause
            # On a connection apart: its links may be older than the map, and a thread that makes
            # one may be waiting for us, who have the brand by a newer map.
            link, _ = owner.open(brand=True)
            link.close()
            known.branded = self._branded = True
        except NodeFault as fault:
            first = first_fault(fault)
            if not isinstance(first, FenceRefused):
                raise
            self._branded = False
            for node in known.nodes.values():
                node.drop_idle()
            raise FenceRefused(first.node, first.code, first.message) from fault


# --- what both ask ------------------------------------------------------------------------------


def _ask(server: Node, command: bytes, patience_seconds: float) -> wire.Reply:
    """Ask a server one thing, on a connection without the fence. Raises NodeFault."""
    with contextlib.closing(server.dial()) as link:
        return link.exchange(command, 1, time.monotonic() + patience_seconds)[0]


def _told(troubles: Sequence[NodeFault]) -> str:
    more = len(troubles) - SERVERS_TOLD
    told = [str(fault) for fault in troubles[:SERVERS_TOLD]]
    return "; ".join([*told, f"and {more} more"] if more > 0 else told)


def _moved_to(text: str, hosts: Sequence[str]) -> list[tuple[str, int]]:
    """Return where MOVED sends its reader, if it does; where it names no host, that is one of the
    hosts that have the others."""
    match text.split():
        case ["MOVED", _, address]:
            host, _, port = address.rpartition(":")
            number = wire.whole_number(port)
            if number is not None:
                where = hosts if host in ("", _NO_HOST) else [host]
                return [(host, number) for host in where]
    return []
