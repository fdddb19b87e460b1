"""The doctor: what stands between this configuration and working sweeps, one finding a check.

Nothing on the node is changed. The findings come in an order in which the first failure explains
the later ones, and what cannot be checked after it is skipped with the reason.
"""

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from emqtimerd import wire
from emqtimerd.acl import (
    BRAND_PATTERN,
    MOST_PATTERNS,
    PERMISSIONS,
    Permission,
    escaped_name,
    permissions,
    quoted,
)
from emqtimerd.config import NodeSettings, Settings
from emqtimerd.node import FenceRefused, Link, Node, NodeFault, Unreachable, first_fault
from emqtimerd.topology import Nodes, open_nodes

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_UNREACHABLE = 3
EXIT_FENCE = 4

CLOCK_WARN_SECONDS = 2.0
"""Clocks that somebody keeps agree within milliseconds; two seconds are twice the usual interval
of promotion, and visible to people who compare log lines."""

CLOCK_SAMPLES = 3
"""Of a few round trips the shortest says most; more of them add little."""

LONG_STALL_INTERVAL_SECONDS = 300.0
"""Ten times EchoMQ's own 30 s: from here on it is worth a line how late a lost job comes back."""

QUEUES_PER_PROBE = 500
"""How many queues share one transaction of probes: the server keeps it, some 0.5 MB, until the
connection closes."""

NAMES_TRIED = 1_000
"""How many names are made up to find one that a primary of a cluster would have: it misses one that
has a hundredth of the slots once in 20,000 times."""

LINES_OF_QUEUES = 20
"""How many healthy queues have a line of their own; `--json` has them all."""

Result: TypeAlias = Literal["pass", "warn", "fail", "skip"]

CHECKS = (
    *(
        "config",
        "topology",
        "reach",
        "tls",
        "auth",
        "server",
        "tokens",
        "brand",
        "run_id",
        "role",
        "clock",
    ),
    *("acl", "sweeps", "queue", "persistence", "memory"),
)
"""All checks, in the order of their findings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; a warning or a failure has the fix beside it."""

    check: str
    result: Result
    found: str
    fix: str = ""
    queue: str | None = None
    exit_code: int = EXIT_FAILED
    """What the command exits with if this is the first failure."""
    node: str | None = None
    """Which of several servers it is about."""


@dataclass(slots=True)
class NodeReport:
    """What one server said of itself."""

    node: str
    run_id: str | None = None
    version: str | None = None
    brand: str | None = None
    tokens: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """All findings about one configuration and its nodes."""

    findings: list[Finding] = field(default_factory=list)
    nodes: list[NodeReport] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The first failure's, which explains the rest."""
        return next((f.exit_code for f in self.findings if f.result == "fail"), EXIT_DONE)


@dataclass(slots=True)
class _Examination:
    """The checks of one server, as far as they have got."""

    settings: Settings
    """With the queues that this server has."""
    node: Node
    has_brand: bool
    """Whether the brand's key is here; else another primary of the cluster has it."""
    takes: Callable[[str], bool]
    """Whether a queue of this name would be here."""
    told: NodeReport
    findings: list[Finding] = field(default_factory=list)

    def has(self, result: Result, *checks: str) -> bool:
        """Whether one of these checks ended so."""
        return any(f.result == result and f.check in checks for f in self.findings)


# --- the checks ---------------------------------------------------------------------------------


def examine(settings: Settings, source: str | None = None) -> Report:
    """Check the configuration, which came from `source`, and its nodes."""
    nodes = open_nodes(settings.node)
    report = Report(list(_configuration(settings, source)))
    try:
        report.findings += _topology(settings, nodes)
        if not any(f.result == "fail" for f in report.findings):
            _examine_nodes(report, settings, nodes)
    finally:
        nodes.close()
    if not report.nodes:
        report.nodes = [NodeReport(nodes.name)]
    report.findings = _with_skipped(report.findings)
    return report


def _with_skipped(findings: list[Finding]) -> list[Finding]:
    """The findings in order, and for each check that was not made, why."""
    failure = next((f.check for f in findings if f.result == "fail"), "")
    made = {finding.check for finding in findings}
    skipped = [
        Finding(check, "skip", f"cannot be checked after the failure of {failure}")
        for check in CHECKS
        if check not in made
    ]
    return sorted([*findings, *skipped], key=lambda finding: CHECKS.index(finding.check))


def _topology(settings: Settings, nodes: Nodes) -> Iterator[Finding]:
    """Who the servers are, where others have to be asked for that."""
    try:
        account = nodes.account()
    except NodeFault as fault:
        code = EXIT_UNREACHABLE if isinstance(fault, Unreachable) else EXIT_FAILED
        fix = f"does node.url name {settings.node.url.topology} servers that run?"
        yield Finding("topology", "fail", fault.message, fix, None, code)
        return
    yield Finding("topology", "pass", account.found)
    for trouble in account.troubles:
        yield Finding("topology", "warn", trouble, "bring them back, or correct node.url")


def _examine_nodes(report: Report, settings: Settings, nodes: Nodes) -> None:
    shares = dict(nodes.by_node(settings.queues, str))
    for node in nodes.primaries():
        own = settings.model_copy(update={"queues": tuple(shares.get(node, ()))})
        examination = _Examination(
            own,
            node,
            has_brand=node is nodes.brand_node(),
            takes=partial(_takes, nodes, node),
            told=NodeReport(node.name),
        )
        try:
            _examine_node(examination)
        except NodeFault as fault:
            # It was there a moment ago.
            fix = "run the check again"
            examination.findings.append(
                Finding("reach", "fail", fault.message, fix, None, EXIT_UNREACHABLE)
            )
        report.nodes.append(examination.told)
        found = examination.findings
        if len(nodes.primaries()) > 1:
            told = [f for f in _with_skipped(found) if f.check not in ("config", "topology")]
            found = [replace(finding, node=node.name) for finding in told]
        report.findings += found


def _takes(nodes: Nodes, node: Node, queue: str) -> bool:
    return nodes.by_node([queue], str)[0][0] is node


def _configuration(settings: Settings, source: str | None) -> Iterator[Finding]:
    queues, discovery = settings.queues, settings.discovery.enabled
    listed = f"{len(queues)} {'queue' if len(queues) == 1 else 'queues'} listed"
    search = f"discovery {'on' if discovery else 'off'}"
    yield Finding("config", "pass", f"{source or 'no configuration file'}: {listed}, {search}")
    if not queues and not discovery:
        yield Finding(
            "config",
            "warn",
            "there is nothing to sweep: no queue is listed, and discovery is off",
            'list some, such as queues = ["orders"], name one with --queue, or set '
            "discovery.enabled",
        )
    swept = {queue: settings.for_queue(queue).stalled_check for queue in queues}
    if discovery or not queues:
        swept["queues found later"] = settings.stalled_check
    if burying := [queue for queue, own in swept.items() if own.max_stalled == 1]:
        yield Finding(
            "config",
            "warn",
            f"max_stalled is 1 for {_names(burying, len(swept))}: the first counted stall "
            "dead-letters the job (an expiry that crossed a server restart is not counted)",
            "if a job should survive the loss of a worker, set stalled_check.max_stalled to 2 or "
            "more; 1 is EchoMQ's own default",
        )
    late = [
        queue
        for queue, own in swept.items()
        if own.interval_seconds > LONG_STALL_INTERVAL_SECONDS and not own.at_expiry
    ]
    if late:
        longest = max(swept[queue].interval_seconds for queue in late)
        yield Finding(
            "config",
            "warn",
            f"the lost jobs of {_names(late, len(swept))} wait up to {longest / 60:g} minutes for "
            "the next stall check",
            "shorten stalled_check.interval (EchoMQ's own is 30s), or set stalled_check.at_expiry",
        )


def _names(queues: Sequence[str], of: int) -> str:
    if len(queues) == of and of > 1:
        return "all queues"
    more = f" and {len(queues) - 3} more" if len(queues) > 3 else ""
    return ", ".join(queues[:3]) + more


def _examine_node(examination: _Examination) -> None:
    settings, node, findings = examination.settings, examination.node, examination.findings
    if problem := _tls_file_problem(settings.node):
        findings.append(problem)
        return
    try:
        # As the daemon connects, fence included: its faults tell how far that goes.
        with node.link():
            pass
    except NodeFault as latest:
        fault = first_fault(latest)
        if isinstance(fault, Unreachable):
            findings += _unreachable(settings.node, fault)
            return
        if isinstance(fault.__cause__, NodeFault):
            findings += _reached(settings.node, node)
            findings.append(_brand_elsewhere(fault))
            return
        # An answer of the fence's own questions is told below, where they are asked one by one.
        if not isinstance(fault.__cause__, wire.ReplyError | wire.ShapeError | None):
            findings += _handshake_refused(settings, fault)
            return
    link = node.dial()
    with contextlib.closing(link):
        findings += _reached(settings.node, node, _ask(node, link, wire.TIME)[1])
        info = _read_info(node, link)
        findings += _server(examination.told, settings.node, info)
        findings += _fence(examination, link)
        findings += _process(examination.told, info)
        findings += _clock(node, link)
        if not examination.has("fail", "tokens", "brand"):
            findings += _allowed(examination)
            findings += _key_types(settings, node, link)
        findings += _durability(info)


# --- reaching the node --------------------------------------------------------------------------


def _ask(node: Node, link: Link, *commands: bytes) -> tuple[list[wire.Reply], float]:
    """The replies, and how long they took (seconds)."""
    started = time.monotonic()
    replies = link.exchange(list(commands), len(commands), started + node.timeout_seconds)
    return replies, time.monotonic() - started


def _tls_file_problem(settings: NodeSettings) -> Finding | None:
    """A file that cannot be read would otherwise show as a connection that failed."""
    for name in ("ca_file", "cert_file", "key_file"):
        path = getattr(settings.tls, name)
        try:
            if settings.url.tls and path:
                Path(path).open("rb").close()
        except OSError as error:
            found = f"node.tls.{name}: {path} cannot be read: {error.strerror}"
            fix = "correct the path, or let this user read the file"
            return Finding("tls", "fail", found, fix, None, EXIT_UNREACHABLE)
    return None


def _unreachable(settings: NodeSettings, fault: Unreachable) -> Iterator[Finding]:
    code = EXIT_UNREACHABLE
    if tls := _cause(fault, ssl.SSLError):
        yield Finding("reach", "pass", f"{fault.node} answers")
        yield Finding("tls", "fail", fault.message, _tls_fix(settings, tls), None, code)
    elif fault.code in ("NOAUTH", "WRONGPASS"):
        yield Finding("reach", "pass", f"{fault.node} answers")
        yield _tls(settings)
        fix = (
            "set node.username and node.password_file (or name them in node.url) to a user that "
            "ACL LIST shows as on; check --acl prints a rule that makes one"
        )
        yield Finding("auth", "fail", fault.message, fix, None, code)
    elif settings.url.tls and settings.url.topology == "standalone" and _listens(settings):
        yield Finding("reach", "pass", f"{fault.node} answers")
        found = f"{fault.message}: the port is open, but there is no TLS session"
        yield Finding("tls", "fail", found, _not_tls(settings), None, code)
    else:
        yield Finding("reach", "fail", f"{fault}", _reach_fix(settings, fault), None, code)


def _listens(settings: NodeSettings) -> bool:
    """Whether the port can be connected to at all: a server without TLS waits for more bytes."""
    try:
        socket.create_connection(settings.url.hosts[0], settings.connect_timeout_seconds).close()
    except OSError:
        return False
    return True


def _not_tls(settings: NodeSettings) -> str:
    scheme = settings.url.scheme.replace("rediss", "redis").replace("valkeys", "valkey")
    return f'this port does not speak TLS: use its TLS port, or "{scheme}://" without TLS'


def _cause(fault: BaseException, kind: type[ssl.SSLError]) -> ssl.SSLError | None:
    error: BaseException | None = fault
    while error is not None:
        if isinstance(error, kind):
            return error
        error = error.__cause__ or error.__context__
    return None


def _tls_fix(settings: NodeSettings, error: ssl.SSLError) -> str:
    if "WRONG_VERSION_NUMBER" in str(error) or "RECORD_LAYER_FAILURE" in str(error):
        return _not_tls(settings)
    if not isinstance(error, ssl.SSLCertVerificationError):
        return (
            "if the server wants a client certificate, set node.tls.cert_file and key_file to one "
            "that its CA has signed"
        )
    # OpenSSL: 62 and 64 are the names and addresses that do not match, 10 is an expired one.
    if error.verify_code in (62, 64):
        return "set node.tls.server_name to a name in the certificate, or node.url to that name"
    if error.verify_code == 10:
        return "the server's certificate has expired: renew it there"
    return "set node.tls.ca_file to the certificate of the CA that signed the server's"


def _reach_fix(settings: NodeSettings, fault: Unreachable) -> str:
    url = settings.url
    if fault.code == "timeout":
        return (
            "nothing came back: is this the address (node.url), does a firewall drop the packets, "
            "does the server hang?"
        )
    if fault.message.startswith("during the handshake") and not url.tls and not url.socket:
        secure = url.scheme.replace("redis", "rediss").replace("valkey", "valkeys")
        return f'if this port speaks TLS, write "{secure}://"; else look into the server\'s log'
    if url.socket:
        return "does the server run with this unixsocket, and may this user open it?"
    return "is this the address (node.url), and does the server run and listen there (bind, port)?"


def _handshake_refused(settings: Settings, fault: NodeFault) -> Iterator[Finding]:
    """The server refused what comes before the fence: it is loading, or an ACL denies SELECT."""
    yield Finding("reach", "pass", f"{fault.node} answers")
    yield _tls(settings.node)
    if "permission" in fault.message:
        db = settings.node.url.db
        fix = f"as its operator: ACL SETUSER {_user(settings)} +select"
        yield Finding("acl", "fail", f"database {db}: {fault.message}", fix)
    else:
        yield Finding("server", "fail", fault.message, _FIXES.get(fault.code, ""))


def _reached(settings: NodeSettings, node: Node, seconds: float | None = None) -> Iterator[Finding]:
    where = settings.url if settings.url.topology == "standalone" else node.name
    answer = f"{where} answers"
    if seconds is not None:
        answer += f" in {seconds * 1000:.1f} ms"
    yield Finding("reach", "pass", answer)
    yield _tls(settings)
    user = settings.username or settings.url.username
    if settings.password_file or settings.url.password:
        yield Finding("auth", "pass", f"logged in as {user or 'the default user'}")
    else:
        yield Finding("auth", "pass", "no password is set and none is wanted (the default user)")


def _tls(settings: NodeSettings) -> Finding:
    if not settings.url.tls:
        return Finding("tls", "pass", f"not encrypted, as {settings.url.scheme}:// says")
    ca = settings.tls.ca_file or "the system's CA certificates"
    return Finding("tls", "pass", f"encrypted, certificate checked against {ca}")


# --- who the node is ----------------------------------------------------------------------------

_FIXES = {
    "LOADING": "wait until the server has read its data; run does so by itself",
    "MASTERDOWN": "this replica has lost its primary: put the primary's address into node.url",
    "READONLY": "this is a replica: put the primary's address into node.url",
    "MOVED": 'the keys are on another primary of a cluster: write "redis+cluster://…" in node.url',
    "CLUSTERDOWN": "the cluster lacks a primary for some slots: CLUSTER INFO says which state",
    "BUSY": "a script holds the server: SCRIPT KILL or FUNCTION KILL ends one that has not written",
    "MISCONF": "the server cannot save its data: its log says why (mostly a full disk)",
    "NOREPLICAS": "fewer replicas are in step than min-replicas-to-write wants: bring them back",
    "OOM": "the server is at its maxmemory: raise it, or free memory",
    "WRONGTYPE": "another program uses this key: see what it holds with TYPE, and move it away",
}
"""What to do about a reply, by its code."""


def _is_denied(reply: wire.Reply) -> bool:
    return isinstance(reply, wire.ReplyError) and reply.code == "NOPERM"


def _denied(check: str, what: str) -> Finding:
    # The ACL's own check names the permission and its fix: one failure, one place.
    return Finding(check, "skip", f"the ACL denies {what} (see acl)")


_SECTIONS = ("server", "replication", "persistence", "memory")


def _read_info(node: Node, link: Link) -> dict[str, str] | None:
    """The fields of INFO, None where they cannot be had."""
    commands = [wire.pack("INFO", section) for section in _SECTIONS]
    try:
        replies, _ = _ask(node, link, *commands)
        return {k: v for reply in replies for k, v in wire.read_info(reply).items()}
    except (wire.ReplyError, wire.ShapeError):
        return None


def _server(
    told: NodeReport, settings: NodeSettings, info: dict[str, str] | None
) -> Iterator[Finding]:
    if info is None:
        yield _denied("server", "INFO")
        return
    kind = "valkey" if "valkey_version" in info else "redis"
    told.version = info.get(f"{kind}_version", "")
    # Valkey has both names, as Redis did before it.
    mode = info.get("server_mode") or info.get("redis_mode", "")
    found = f"{kind} {told.version}, {mode}"
    if mode == "cluster" and settings.url.topology == "standalone":
        hosts = settings.url.hosts or (("host", 6379),)
        scheme = "rediss+cluster" if settings.url.tls else "redis+cluster"
        yield Finding(
            "server",
            "warn",
            f"{found}, but node.url names a single server: queues on other primaries fail",
            f'write "{scheme}://{hosts[0][0]}:{hosts[0][1]}" in node.url',
        )
    else:
        yield Finding("server", "pass", found)


def _fence(examination: _Examination, link: Link) -> Iterator[Finding]:
    node, told = examination.node, examination.told
    (version,), _ = _ask(node, link, wire.VERSION)
    yield from _tokens(told, version)
    if examination.has_brand:
        (brand,), _ = _ask(node, link, wire.READ_BRAND)
        yield _brand(told, brand)
    else:
        yield Finding("brand", "pass", "read on the primary that has its slot")


def _brand_elsewhere(fault: NodeFault) -> Finding:
    """The brand of the cluster is wrong, or could not be read: told where it is, and here."""
    code = EXIT_FENCE if isinstance(fault, FenceRefused) else EXIT_FAILED
    fix = "see the primary that has the brand's slot"
    return Finding("brand", "fail", fault.message, fix, None, code)


def _tokens(told: NodeReport, reply: wire.Reply) -> Iterator[Finding]:
    if _is_denied(reply):
        yield _denied("tokens", "EMQ.VERSION")
        return
    load = "load the native job core there (loadmodule); emqtimerd devnode starts a node with it"
    try:
        tokens = told.tokens = wire.read_tokens(reply)
    except wire.ReplyError as error:
        unknown = error.code == "ERR"
        found = "the server does not know EMQ.VERSION: no EMQ node" if unknown else f"{error}"
        fix = load if unknown else _FIXES.get(error.code, "")
        exit_code = EXIT_FENCE if unknown else EXIT_FAILED
        yield Finding("tokens", "fail", found, fix, None, exit_code)
        return
    except wire.ShapeError as error:
        yield Finding("tokens", "fail", str(error), load, None, EXIT_FENCE)
        return
    if missing := [token for token in wire.REQUIRED_TOKENS if token not in tokens]:
        found = f"the server lacks {' and '.join(missing)}, without which nothing can be swept"
        yield Finding("tokens", "fail", found, load, None, EXIT_FENCE)
    elif missing := [token for token in wire.TOKENS if token not in tokens]:
        found = (
            f"{' and '.join(wire.REQUIRED_TOKENS)} are there; EchoMQ's own clients also want "
            f"{' '.join(missing)}"
        )
        yield Finding("tokens", "warn", found, "update the node's job core")
    else:
        yield Finding("tokens", "pass", f"all {len(wire.TOKENS)} of the job core")


def _brand(told: NodeReport, reply: wire.Reply) -> Finding:
    wanted = wire.BRAND.decode()
    if _is_denied(reply):
        return _denied("brand", "GET {emq}:version")
    try:
        brand = wire.read_brand(reply)
    except wire.ReplyError as error:
        exit_code = EXIT_FENCE if error.code == "WRONGTYPE" else EXIT_FAILED
        fix = _FIXES.get(error.code, "")
        return Finding("brand", "fail", f"{{emq}}:version: {error}", fix, None, exit_code)
    except wire.ShapeError as error:
        return Finding("brand", "fail", str(error), "is this a Valkey server?", None, EXIT_FENCE)
    told.brand = None if brand is None else wire.printable(brand)
    if brand == wire.BRAND:
        return Finding("brand", "pass", wanted)
    if brand is None:
        fix = f"if this is to be an EMQ node, its operator sets it: SET {{emq}}:version {wanted}"
        return Finding("brand", "fail", "{emq}:version is not set", fix, None, EXIT_FENCE)
    found = f"{{emq}}:version is {wire.printable(brand)[:80]}, not {wanted}"
    fix = (
        "another executor owns this node: emqtimerd works on native nodes only, so name one in "
        "node.url"
    )
    return Finding("brand", "fail", found, fix, None, EXIT_FENCE)


def _process(told: NodeReport, info: dict[str, str] | None) -> Iterator[Finding]:
    """Which server process this is, and whether it is one that takes writes."""
    if info is None:
        yield _denied("run_id", "INFO")
        yield _denied("role", "INFO")
        return
    told.run_id = info.get("run_id", "")
    seconds = info.get("uptime_in_seconds", "")
    up = f", up for {_span(int(seconds))}" if seconds.isdigit() else ""
    yield Finding("run_id", "pass", f"{told.run_id}{up}")
    if info.get("role") == "master":
        yield Finding("role", "pass", "primary")
    else:
        host, port = info.get("master_host", "?"), info.get("master_port", "?")
        found = f"this is a replica (of {host}:{port}): it takes no sweeps"
        fix = f"put the primary's address into node.url, or use {_sentinel_form()}"
        yield Finding("role", "fail", found, fix)


def _sentinel_form() -> str:
    return "redis+sentinel://host1,host2/mymaster/0, which follows a failover"


def _span(seconds: int) -> str:
    for name, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {name}"
    return f"{seconds} s"


def _clock(node: Node, link: Link) -> Iterator[Finding]:
    """Compare the clocks: the server's reply lies somewhere between sending and receiving."""
    best = (float("inf"), 0.0)
    for _ in range(CLOCK_SAMPLES):
        before = time.time()
        (reply,), seconds = _ask(node, link, wire.TIME)
        if _is_denied(reply):
            yield _denied("clock", "TIME")
            return
        try:
            ahead = wire.read_time_ms(reply) / 1000 - (before + seconds / 2)
        except (wire.ReplyError, wire.ShapeError) as error:
            yield Finding("clock", "warn", f"TIME: {error}", "see the failures above")
            return
        best = min(best, (seconds / 2, ahead))
    doubt, ahead = best
    yield clock_finding(ahead, doubt)


def clock_finding(ahead: float, doubt: float) -> Finding:
    """Judge how far the server's clock is ahead, with half the shortest way there and back."""
    way = "ahead of" if ahead > 0 else "behind"
    found = f"the server's is {_offset(ahead)} {way} this machine's (± {doubt * 1000:.2f} ms)"
    if abs(ahead) - doubt <= CLOCK_WARN_SECONDS:
        return Finding("clock", "pass", found)
    return Finding(
        "clock",
        "warn",
        f"{found}: sweeps go by the server's clock and are right, but log lines and the "
        "timestamps in the metrics are this machine's, and a producer here that computes due "
        "times from its own clock is off by as much",
        "keep both clocks by NTP (chronyc tracking, timedatectl)",
    )


def _offset(seconds: float) -> str:
    size = abs(seconds)
    return f"{size * 1000:.2f} ms" if size < 1 else f"{size:,.1f} s"


# --- what the node lets us do -------------------------------------------------------------------


def _probe(node: Node, commands: Sequence[bytes]) -> list[wire.Reply] | wire.ReplyError:
    """What the server says to commands without running any of them; or what MULTI failed with.

    They are queued in a transaction that nobody ever executes: the connection closes instead. A
    server judges a command when it is queued (ACL, slot, read-only, memory), so the answer is the
    one that the daemon would get, and whatever a verb would do, it does not do it. Better than a
    verb with a limit of 0, which the contract leaves open, and than ACL DRYRUN, which needs a
    permission of its own that a small rule should not have.
    """
    with contextlib.closing(node.dial()) as link:
        (opened,), _ = _ask(node, link, wire.MULTI)
        if opened != b"OK":
            # Outside a transaction the verbs would run.
            return opened if isinstance(opened, wire.ReplyError) else wire.ReplyError("ERR MULTI")
        return _ask(node, link, *commands)[0]


def _denies_exec(node: Node) -> bool:
    """Whether EXEC is denied, tried on an empty transaction."""
    with contextlib.closing(node.dial()) as link:
        (_, executed), _ = _ask(node, link, wire.MULTI, wire.EXEC)
        # The server wraps the denial: "EXECABORT Transaction discarded because of: NOPERM …".
        return isinstance(executed, wire.ReplyError) and "NOPERM" in str(executed)


@dataclass(slots=True)
class _Answers:
    """What the probes brought to light."""

    denied: dict[str, Permission] = field(default_factory=dict)
    queues: dict[str, list[str]] = field(default_factory=dict)
    """Queues whose keys are denied, each with the commands that are."""
    brand_key: bool = False
    """Whether the brand's key is denied."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Other errors that a sweep would get: the text, and on which queues."""

    @property
    def stops_sweeps(self) -> bool:
        """Whether a sweep does not even reach the question of whether the node takes it."""
        needed = {p.word for p in PERMISSIONS if p.required} - {"+scan"}
        return bool(self.queues or self.brand_key or needed & self.denied.keys())

    def take(self, permission: Permission, queue: str, reply: wire.Reply) -> None:
        """Take in the answer to one probe."""
        if not isinstance(reply, wire.ReplyError):
            return
        if reply.code != "NOPERM":
            if permission.touches_queue and permission.required:
                self.refused.setdefault(str(reply), []).append(queue)
        elif "to access" not in str(reply):
            self.denied[permission.word] = permission
        elif permission.word == "+get":
            self.brand_key = True
        else:
            commands = self.queues.setdefault(queue, [])
            if permission.command not in commands:
                commands.append(permission.command)


def _allowed(examination: _Examination) -> Iterator[Finding]:
    settings, node = examination.settings, examination.node
    needed = permissions(settings)
    queues, known = _queues_to_try(settings, examination.takes)
    answers = _Answers()
    if _denies_exec(node):
        answers.denied["+exec"] = _by_word("+exec")
    for start in range(0, len(queues), QUEUES_PER_PROBE):
        tries = [
            (permission, queue, permission.probe(settings, queue))
            for number, queue in enumerate(queues[start : start + QUEUES_PER_PROBE], start)
            for permission in needed
            if permission.probe and (number == 0 or permission.touches_queue)
        ]
        replies = _probe(node, [command for _, _, command in tries])
        if isinstance(replies, wire.ReplyError):
            if _is_denied(replies):
                answers.denied["+multi"] = _by_word("+multi")
            else:
                answers.refused[str(replies)] = list(queues)
            break
        for (permission, queue, _), reply in zip(tries, replies, strict=True):
            answers.take(permission, queue, reply)
    if not known:
        answers.queues.clear()
    yield from _permissions(settings, answers, len(needed), len(queues) if known else 0)
    yield from _sweeps(examination, answers, len(queues) if known else 0)


def _by_word(word: str) -> Permission:
    return next(permission for permission in PERMISSIONS if permission.word == word)


def _queues_to_try(settings: Settings, takes: Callable[[str], bool]) -> tuple[Sequence[str], bool]:
    """The queues to try the permissions on, and whether these are the ones that will be swept."""
    if settings.queues:
        return settings.queues, True
    # With discovery, one that it would take if it were there.
    plain = (re.sub(r"\[(.)[^\]]*\]", r"\1", glob) for glob in settings.discovery.include)
    names = [re.sub(r"[*?]", "x", name) for name in plain]
    found = [made for name in names for made in _made_up(name, takes) if settings.discovers(made)]
    return found or list(_made_up("emqtimerd-check", takes)), bool(found)


def _made_up(name: str, takes: Callable[[str], bool]) -> Iterator[str]:
    """The name, or the first that begins so and would be here; none if there is no such."""
    tries = (name, *(f"{name}-{number}" for number in range(NAMES_TRIED)))
    yield from islice(filter(takes, tries), 1)


def _user(settings: Settings) -> str:
    return quoted(settings.node.username or settings.node.url.username or "default")


def _permissions(
    settings: Settings, answers: _Answers, commands: int, queues: int
) -> Iterator[Finding]:
    grant = f"as the node's operator: ACL SETUSER {_user(settings)}"
    for permission in answers.denied.values():
        result: Result = "fail" if permission.required else "warn"
        found = f"{permission.command} is denied: {permission.without}"
        yield Finding("acl", result, found, f"{grant} {permission.word}")
    if answers.brand_key:
        found = "the key {emq}:version is denied: the fence is not passed, nothing is swept"
        yield Finding("acl", "fail", found, f"{grant} {BRAND_PATTERN}")
    if answers.queues:
        names = list(answers.queues)
        patterns = [quoted(f"~emq:{{{escaped_name(name)}}}:*") for name in names]
        if len(patterns) > MOST_PATTERNS:
            patterns = ["~emq:{*}:*"]
        verbs = dict.fromkeys(c for commands in answers.queues.values() for c in commands)
        found = f"keys of {_names(names, 0)} are denied (to {', '.join(verbs)})"
        yield Finding("acl", "fail", found, f"{grant} {' '.join(patterns)}")
    if "+multi" in answers.denied:
        found = "without MULTI no other command can be tried without running it"
        yield Finding("acl", "skip", found)
    elif not (answers.denied or answers.brand_key or answers.queues):
        where = f" on the keys of {queues} {'queue' if queues == 1 else 'queues'}" if queues else ""
        yield Finding("acl", "pass", f"all {commands} commands are allowed{where}")


def _sweeps(examination: _Examination, answers: _Answers, queues: int) -> Iterator[Finding]:
    """Whether the node would take the two verbs now, its ACL aside."""
    if examination.has("fail", "role"):
        yield Finding("sweeps", "skip", "a replica takes none (see role)")
    elif "+multi" in answers.denied:
        yield _denied("sweeps", "MULTI")
    elif answers.refused:
        for text, names in answers.refused.items():
            affected = list(dict.fromkeys(names))
            found = (
                f"refused now for {_names(affected, 0)}: {text}"
                if queues
                else f"refused now: {text}"
            )
            yield Finding("sweeps", "fail", found, _FIXES.get(text.partition(" ")[0], ""))
    elif answers.stops_sweeps:
        yield _denied("sweeps", "them, or the fence before them")
    else:
        yield Finding("sweeps", "pass", "the node would take both verbs (queued, never executed)")


# --- the queues' keys ---------------------------------------------------------------------------

_COUNTERS = ("metrics:completed", "metrics:failed")


def _key_types(settings: Settings, node: Node, link: Link) -> Iterator[Finding]:
    """Whether each key of the listed queues has its type, found by reads that want that type."""
    if not settings.queues:
        yield Finding("queue", "skip", "no queue is listed")
    each = len(wire.STATES) + len(_COUNTERS)
    for start in range(0, len(settings.queues), QUEUES_PER_PROBE):
        page = settings.queues[start : start + QUEUES_PER_PROBE]
        commands = [
            wire.cards(queue)
            + b"".join(wire.pack("HGET", wire.queue_key(queue, n), "count") for n in _COUNTERS)
            for queue in page
        ]
        deadline = time.monotonic() + node.timeout_seconds
        replies = link.exchange(commands, each * len(page), deadline)
        for number, queue in enumerate(page):
            part = replies[number * each : (number + 1) * each]
            yield from _queue(node, link, queue, part)


def _queue(node: Node, link: Link, queue: str, replies: list[wire.Reply]) -> Iterator[Finding]:
    names = (*wire.STATES, *_COUNTERS)
    errors = {
        name: reply
        for name, reply in zip(names, replies, strict=True)
        if isinstance(reply, wire.ReplyError)
    }
    for name, error in errors.items():
        key = wire.queue_key(queue, name).decode()
        if error.code == "WRONGTYPE":
            wanted = "sorted set" if name in wire.STATES else "hash"
            (kind,), _ = _ask(node, link, wire.pack("TYPE", key))
            # TYPE is no part of the small rule: where it is denied, what the key is stays open.
            held = f"a {kind.decode()}, " if isinstance(kind, bytes) else ""
            yield Finding(
                "queue",
                "fail",
                f"{queue}: {key} is {held}not a {wanted}: sweeps of this queue fail",
                "find out who wrote it (not EchoMQ), then move it out of the way: "
                f"RENAME {quoted(key)} {quoted(key + '.moved')}",
                queue,
            )
        elif error.code != "NOPERM":
            fix = _FIXES.get(error.code, "")
            yield Finding("queue", "fail", f"{queue}: {key}: {error}", fix, queue)
            return
    if not errors:
        counts = ", ".join(f"{n} {c}" for n, c in zip(wire.STATES, replies, strict=False))
        yield Finding("queue", "pass", f"{queue}: {counts}", queue=queue)
    elif all(error.code == "NOPERM" for error in errors.values()):
        yield Finding("queue", "skip", f"{queue}: the ACL denies to look (see acl)", queue=queue)


# --- what the node does with jobs in the long run -----------------------------------------------


def _durability(info: dict[str, str] | None) -> Iterator[Finding]:
    if info is None:
        yield _denied("persistence", "INFO")
        yield _denied("memory", "INFO")
        return
    if info.get("aof_enabled") == "1":
        yield Finding("persistence", "pass", "appendonly yes")
    else:
        yield Finding(
            "persistence",
            "warn",
            "appendonly no: a restart of the server loses every job since its last snapshot",
            "on the node: CONFIG SET appendonly yes, and the same in its configuration file",
        )
    policy = info.get("maxmemory_policy", "noeviction")
    limit = info.get("maxmemory_human", "0B")
    limited = f"maxmemory {limit}" if info.get("maxmemory", "0") != "0" else "no maxmemory"
    if policy == "noeviction":
        yield Finding("memory", "pass", f"{limited}, noeviction")
        return
    what = (
        "keys that have a time to live; those of EchoMQ have none, so memory still runs out"
        if policy.startswith("volatile")
        else "any key: a job's row, a whole queue, even the brand"
    )
    yield Finding(
        "memory",
        "warn",
        f"{limited}, maxmemory-policy {policy}: when memory is full the server drops {what}",
        "on the node: CONFIG SET maxmemory-policy noeviction, and the same in its file",
    )


# --- for people, and as JSON --------------------------------------------------------------------

_COLORS: dict[Result, str] = {"pass": "32", "warn": "33", "fail": "31", "skip": "2"}


def lines(report: Report, *, color: bool = False) -> Iterable[str]:
    """The report for people: a line a finding, and below it the fix."""
    width = max(len(check) for check in CHECKS)
    healthy = [f for f in report.findings if f.check == "queue" and f.result == "pass"]
    untold = set(map(id, healthy[LINES_OF_QUEUES:]))
    for finding in report.findings:
        if id(finding) in untold:
            continue
        word: str = finding.result
        if color:
            word = f"\x1b[{_COLORS[finding.result]}m{word}\x1b[0m"
        # What others wrote (a brand, an error reply, a path) must not reach the terminal's ear.
        where = f"{finding.node}: " if finding.node else ""
        yield f"{word}  {finding.check:{width}}  {wire.escaped(where + finding.found)}"
        if finding.fix:
            yield f"      {'':{width}}  fix: {wire.escaped(finding.fix)}"
        if untold and finding is healthy[LINES_OF_QUEUES - 1]:
            yield f"pass  {'queue':{width}}  and {len(untold)} more (--json lists all)"
    results = [finding.result for finding in report.findings]
    counts = (
        f"{results.count('pass')} passed",
        f"{results.count('warn')} to look at",
        f"{results.count('fail')} failed",
        f"{results.count('skip')} skipped",
    )
    yield ""
    yield ", ".join(counts)


def document(report: Report) -> dict[str, Any]:
    """The report as the document that `--json` prints."""
    return {
        "ok": report.exit_code == EXIT_DONE,
        "nodes": [
            {
                "node": node.node,
                "run_id": node.run_id,
                "version": node.version,
                "brand": node.brand,
                "tokens": list(node.tokens),
            }
            for node in report.nodes
        ],
        "checks": [
            {
                "check": finding.check,
                "result": finding.result,
                "node": finding.node,
                "queue": finding.queue,
                "found": finding.found,
                "fix": finding.fix or None,
            }
            for finding in report.findings
        ],
    }
