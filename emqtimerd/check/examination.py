"""The order of the examination: what is asked, of whom, and which check judges the answer.

Nothing on a node is changed. The first failure explains the later ones, and what cannot be checked
after it is not tried.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from emqtimerd import wire
from emqtimerd.check import permissions, queues, reach, server
from emqtimerd.check.configuration import configuration
from emqtimerd.check.findings import (
    Finding,
    NodeReport,
    Report,
    denied,
    failed,
    has_failed,
    in_order,
    is_denied,
    warned,
)
from emqtimerd.config import NodeSettings, Settings
from emqtimerd.node import Link, Node, NodeFault, Unreachable, first_fault
from emqtimerd.topology import Nodes, open_nodes
from emqtimerd.verdict import EXIT_UNREACHABLE

CLOCK_SAMPLES = 3
"""Of a few round trips the shortest says most; more of them add little."""

INFO_SECTIONS = ("server", "replication", "persistence", "memory")


def examine(settings: Settings, source: str | None = None) -> Report:
    """Check the configuration, which came from the file `source`, and its nodes."""
    nodes = open_nodes(settings.node)
    report = Report([*configuration(settings, source)])
    try:
        report.findings += reach.topology(nodes.account())
        for node in nodes.primaries():
            _examine_one_of(nodes, node, settings, report)
    except NodeFault as fault:
        report.findings.append(reach.no_topology(settings.node, fault))
    finally:
        nodes.close()
    report.nodes = report.nodes or [NodeReport(nodes.name)]
    report.findings = in_order(report.findings)
    return report


def _examine_one_of(nodes: Nodes, node: Node, settings: Settings, report: Report) -> None:
    """Examine one server, with the queues that it has."""
    own = [queue for queue in settings.queues if _has(nodes, node, queue)]
    examination = _Examination(
        settings.model_copy(update={"queues": tuple(own)}),
        node,
        has_brand=node is nodes.brand_node(),
        takes=lambda queue: _has(nodes, node, queue),
    )
    found = [*examination.findings()]
    if len(nodes.primaries()) > 1:
        told = [f for f in in_order(found) if f.check not in ("config", "topology")]
        found = [replace(finding, node=node.name) for finding in told]
    report.findings += found
    report.nodes.append(examination.told)


def _has(nodes: Nodes, node: Node, queue: str) -> bool:
    return nodes.by_node([queue], str)[0][0] is node


@dataclass(slots=True)
class _Examination:
    """The questions to one server."""

    settings: Settings
    """With the queues that this server has."""
    node: Node
    has_brand: bool
    """Whether the brand's key is here; else another primary of the cluster has it."""
    takes: Callable[[str], bool]
    """Whether a queue of this name would be here."""
    told: NodeReport = field(init=False)
    """What the server has said of itself so far."""

    def __post_init__(self) -> None:
        self.told = NodeReport(self.node.name)

    def findings(self) -> Iterator[Finding]:
        """Ask one thing after the other, as far as that makes sense."""
        try:
            yield from self._connected()
        except NodeFault as fault:
            # It was there a moment ago.
            yield failed("reach", fault.message, "run the check again", EXIT_UNREACHABLE)

    def _connected(self) -> Iterator[Finding]:
        if unreadable := [*reach.unreadable_tls_files(self.settings.node)]:
            yield from unreadable
            return
        fault = None
        try:
            # As the daemon connects, fence included: its faults tell how far that goes.
            with self.node.link():
                pass
        except NodeFault as latest:
            fault = first_fault(latest)
            if told := [*self._kept_out(fault)]:
                yield from told
                return
        with contextlib.closing(self.node.dial()) as link:
            yield from self._asked(link, fenced=fault is None)

    def _kept_out(self, fault: NodeFault) -> Iterator[Finding]:
        """What there is to tell of a node that one cannot even ask; nothing if one can."""
        settings = self.settings.node
        if isinstance(fault, Unreachable):
            is_open = settings.url.tls and _port_is_open(settings)
            yield from reach.unreachable(settings, fault, port_is_open=is_open)
        elif isinstance(fault.__cause__, NodeFault):
            yield from reach.reached(settings, self.node.name)
            yield server.brand_elsewhere(fault)
        elif not isinstance(fault.__cause__, wire.ReplyError | wire.ShapeError | None):
            # An answer to the fence's own questions is judged where they are asked one by one.
            yield from reach.handshake_refused(settings, fault)

    def _asked(self, link: Link, *, fenced: bool) -> Iterator[Finding]:
        settings = self.settings
        sent = time.monotonic()
        reply = self._ask(link, wire.TIME)
        took = time.monotonic() - sent
        reached = [*reach.reached(settings.node, self.node.name, reply, took)]
        yield from reached
        if has_failed(reached, "auth"):
            return
        info = self._read_info(link)
        yield server.server(settings.node, info)
        fence = [*self._fence(link)]
        yield from fence
        process = [*server.process(info)]
        yield from process
        yield from self._clock(link)
        if not has_failed(fence, "tokens", "brand"):
            allowance = permissions.probe(settings, self.node, self.takes)
            yield from permissions.acl(settings, allowance)
            yield from permissions.sweeps(allowance, replica=has_failed(process, "role"))
            yield from queues.key_types(settings, self.node, link)
            if fenced:
                yield from queues.blocking_rows(settings, self.node, link)
            else:
                yield denied("rows", "what the fence reads")
        yield from server.durability(info)

    def _ask(self, link: Link, command: bytes) -> wire.Reply:
        return link.exchange(command, 1, time.monotonic() + self.node.timeout_seconds)[0]

    def _read_info(self, link: Link) -> server.Info | None:
        """The fields of INFO, None where they cannot be had."""
        info: dict[str, str] = {}
        try:
            for section in INFO_SECTIONS:
                info |= wire.read_info(self._ask(link, wire.pack("INFO", section)))
        except (wire.ReplyError, wire.ShapeError):
            return None
        self.told.version, self.told.run_id = server.version(info), info.get("run_id", "")
        return info

    def _fence(self, link: Link) -> Iterator[Finding]:
        version = self._ask(link, wire.VERSION)
        with contextlib.suppress(wire.ReplyError, wire.ShapeError):
            self.told.tokens = wire.read_tokens(version)
        yield server.tokens(version)
        if not self.has_brand:
            yield Finding("brand", "pass", "read on the primary that has its slot")
            return
        brand = self._ask(link, wire.READ_BRAND)
        self.told.brand = wire.printable(brand) if isinstance(brand, bytes) else None
        yield server.brand(brand)

    def _clock(self, link: Link) -> Iterator[Finding]:
        """Compare the clocks: the server's reply lies somewhere between sending and receiving."""
        best = (float("inf"), 0.0)
        for _ in range(CLOCK_SAMPLES):
            before, sent = time.time(), time.monotonic()
            reply = self._ask(link, wire.TIME)
            half_way = (time.monotonic() - sent) / 2
            if is_denied(reply):
                yield denied("clock", "TIME")
                return
            try:
                best = min(best, (half_way, wire.read_time_ms(reply) / 1000 - before - half_way))
            except (wire.ReplyError, wire.ShapeError) as error:
                yield warned("clock", f"TIME: {error}", "see the failures above")
                return
        doubt, ahead = best
        yield server.clock(ahead, doubt)


def _port_is_open(settings: NodeSettings) -> bool:
    """Whether the port can be connected to at all: a server without TLS waits for more bytes."""
    if settings.url.topology != "standalone":
        return False
    try:
        socket.create_connection(settings.url.hosts[0], settings.connect_timeout_seconds).close()
    except OSError:
        return False
    return True
