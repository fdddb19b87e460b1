"""What a server says of itself: who it is, whether it is an EMQ node, and how it keeps its data."""

from collections.abc import Iterator, Mapping, Sequence

from emqtimerd import wire
from emqtimerd.check.findings import Finding, denied, failed, is_denied, passed, warned
from emqtimerd.config import NodeSettings
from emqtimerd.node import FenceRefused, NodeFault
from emqtimerd.verdict import BRAND_FIX, EXIT_FAILED, EXIT_FENCE, FIXES, LOAD_FIX, OTHER_BRAND_FIX

CLOCK_WARN_SECONDS = 2.0
"""Clocks that somebody keeps agree within milliseconds; two seconds are twice the usual interval
of promotion, and visible to people who compare log lines."""

Info = Mapping[str, str]
"""The fields of INFO."""


def version(info: Info) -> str:
    """The server's version; Valkey also tells the one of Redis that it began from."""
    return info.get("valkey_version") or info.get("redis_version", "")


def server(settings: NodeSettings, info: Info | None) -> Finding:
    """Which program it is, and in which mode."""
    if info is None:
        return denied("server", "INFO")
    kind = "valkey" if "valkey_version" in info else "redis"
    mode = info.get("server_mode") or info.get("redis_mode", "")
    found = f"{kind} {version(info)}, {mode}"
    if mode != "cluster" or settings.url.topology != "standalone":
        return passed("server", found)
    host, port = settings.url.hosts[0] if settings.url.hosts else ("host", 6379)
    scheme = "rediss+cluster" if settings.url.tls else "redis+cluster"
    return warned(
        "server",
        f"{found}, but node.url names a single server: queues on other primaries fail",
        f'write "{scheme}://{host}:{port}" in node.url',
    )


def tokens(reply: wire.Reply) -> Finding:
    """Which verbs its job core has."""
    if is_denied(reply):
        return denied("tokens", "EMQ.VERSION")
    try:
        return _judged(wire.read_tokens(reply))
    except wire.ReplyError as error:
        if error.code == "ERR":
            found = "the server does not know EMQ.VERSION: no EMQ node"
            return failed("tokens", found, LOAD_FIX, EXIT_FENCE)
        return failed("tokens", str(error), FIXES.get(error.code, ""))
    except wire.ShapeError as error:
        return failed("tokens", str(error), LOAD_FIX, EXIT_FENCE)


def _judged(known: Sequence[str]) -> Finding:
    if missing := [token for token in wire.REQUIRED_TOKENS if token not in known]:
        found = f"the server lacks {' and '.join(missing)}, without which nothing can be swept"
        return failed("tokens", found, LOAD_FIX, EXIT_FENCE)
    if missing := [token for token in wire.TOKENS if token not in known]:
        found = (
            f"{' and '.join(wire.REQUIRED_TOKENS)} are there; EchoMQ's own clients also want "
            f"{' '.join(missing)}"
        )
        return warned("tokens", found, "update the node's job core")
    return passed("tokens", f"all {len(wire.TOKENS)} of the job core")


def brand(reply: wire.Reply) -> Finding:
    """Whose wire it speaks."""
    wanted = wire.BRAND.decode()
    if is_denied(reply):
        return denied("brand", "GET {emq}:version")
    try:
        known = wire.read_brand(reply)
    except wire.ReplyError as error:
        code = EXIT_FENCE if error.code == "WRONGTYPE" else EXIT_FAILED
        return failed("brand", f"{{emq}}:version: {error}", FIXES.get(error.code, ""), code)
    except wire.ShapeError as error:
        return failed("brand", str(error), "is this a Valkey server?", EXIT_FENCE)
    if known == wire.BRAND:
        return passed("brand", wanted)
    if known is None:
        return failed("brand", "{emq}:version is not set", BRAND_FIX, EXIT_FENCE)
    return failed(
        "brand",
        f"{{emq}}:version is {wire.printable(known)[:80]}, not {wanted}",
        OTHER_BRAND_FIX,
        EXIT_FENCE,
    )


def brand_elsewhere(fault: NodeFault) -> Finding:
    """The brand of the cluster is wrong, or could not be read: told where it is, and here."""
    code = EXIT_FENCE if isinstance(fault, FenceRefused) else EXIT_FAILED
    return failed("brand", fault.message, "see the primary that has the brand's slot", code)


def process(info: Info | None) -> Iterator[Finding]:
    """Which server process this is, and whether it is one that takes writes."""
    if info is None:
        yield denied("run_id", "INFO")
        yield denied("role", "INFO")
        return
    seconds = wire.whole_number(info.get("uptime_in_seconds", ""))
    up = "" if seconds is None else f", up for {_span(seconds)}"
    yield passed("run_id", f"{info.get('run_id', '')}{up}")
    if info.get("role") == "master":
        yield passed("role", "primary")
        return
    host, port = info.get("master_host", "?"), info.get("master_port", "?")
    yield failed(
        "role",
        f"this is a replica (of {host}:{port}): it takes no sweeps",
        "put the primary's address into node.url, or use redis+sentinel://host1,host2/mymaster/0, "
        "which follows a failover",
    )


def _span(seconds: int) -> str:
    for name, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size} {name}"
    return f"{seconds} s"


def clock(ahead_seconds: float, doubt_seconds: float) -> Finding:
    """How far its clock is ahead of ours, with half the shortest way there and back in doubt."""
    way = "ahead of" if ahead_seconds > 0 else "behind"
    found = (
        f"the server's is {_offset(ahead_seconds)} {way} this machine's "
        f"(± {doubt_seconds * 1000:.2f} ms)"
    )
    if abs(ahead_seconds) - doubt_seconds <= CLOCK_WARN_SECONDS:
        return passed("clock", found)
    return warned(
        "clock",
        f"{found}: sweeps go by the server's clock and are right, but log lines and the "
        "timestamps in the metrics are this machine's, and a producer here that computes due "
        "times from its own clock is off by as much",
        "keep both clocks by NTP (chronyc tracking, timedatectl)",
    )


def _offset(seconds: float) -> str:
    size = abs(seconds)
    return f"{size * 1000:.2f} ms" if size < 1 else f"{size:,.1f} s"


def durability(info: Info | None) -> Iterator[Finding]:
    """What it does with jobs in the long run: over a restart, and when memory is full."""
    if info is None:
        yield denied("persistence", "INFO")
        yield denied("memory", "INFO")
        return
    if info.get("aof_enabled") == "1":
        yield passed("persistence", "appendonly yes")
    else:
        yield warned(
            "persistence",
            "appendonly no: a restart of the server loses every job since its last snapshot",
            "on the node: CONFIG SET appendonly yes, and the same in its configuration file",
        )
    policy = info.get("maxmemory_policy", "noeviction")
    limit = info.get("maxmemory_human", "0B")
    limited = f"maxmemory {limit}" if info.get("maxmemory", "0") != "0" else "no maxmemory"
    if policy == "noeviction":
        yield passed("memory", f"{limited}, noeviction")
        return
    what = (
        "keys that have a time to live; those of EchoMQ have none, so memory still runs out"
        if policy.startswith("volatile")
        else "any key: a job's row, a whole queue, even the brand"
    )
    yield warned(
        "memory",
        f"{limited}, maxmemory-policy {policy}: when memory is full the server drops {what}",
        "on the node: CONFIG SET maxmemory-policy noeviction, and the same in its file",
    )
