"""What the queues hold: keys of the right type, and no row that makes a sweep refuse."""

import re
import time
from collections.abc import Iterator, Sequence

from emqtimerd import wire
from emqtimerd.acl import quoted
from emqtimerd.check.findings import Finding, failed, passed, skipped
from emqtimerd.config import Settings
from emqtimerd.node import Link, Node
from emqtimerd.preview import foresee
from emqtimerd.sweeper import VERBS, Sweep, SweepResult, Verb
from emqtimerd.verdict import FIXES

QUEUES_PER_PAGE = 500
"""How many queues are looked at in one pipeline, some 300 kB of commands."""

_COUNTERS = ("metrics:completed", "metrics:failed")
_SOURCES: dict[Verb, str] = {"promote": "schedule", "stalled_check": "active"}
"""The set that a sweep takes from."""


def key_types(settings: Settings, node: Node, link: Link) -> Iterator[Finding]:
    """Whether each key of the listed queues has its type, found by reads that want that type."""
    if not settings.queues:
        yield skipped("queue", "no queue is listed")
    each = len(wire.SETS) + len(_COUNTERS)
    for page in _pages(settings.queues):
        commands = [
            wire.cards(queue)
            + b"".join(wire.pack("HGET", wire.queue_key(queue, n), "count") for n in _COUNTERS)
            for queue in page
        ]
        replies = _ask(node, link, commands, each * len(page))
        for number, queue in enumerate(page):
            own = replies[number * each : (number + 1) * each]
            held = {
                name: _type_of(node, link, wire.queue_key(queue, name))
                for name, reply in zip((*wire.SETS, *_COUNTERS), own, strict=True)
                if isinstance(reply, wire.ReplyError) and reply.code == "WRONGTYPE"
            }
            yield from _keys(queue, own, held)


def _type_of(node: Node, link: Link, key: bytes) -> str:
    """What a key holds. TYPE is no part of the small rule: where it is denied, that stays open."""
    (kind,) = _ask(node, link, [wire.pack("TYPE", key)], 1)
    return kind.decode() if isinstance(kind, bytes) else ""


def _keys(queue: str, replies: list[wire.Reply], held: dict[str, str]) -> Iterator[Finding]:
    for name, kind in held.items():
        key = wire.queue_key(queue, name).decode()
        wanted = "sorted set" if name in wire.SETS else "hash"
        yield failed(
            "queue",
            f"{queue}: {key} is {f'a {kind}, ' if kind else ''}not a {wanted}: sweeps of this "
            "queue fail",
            "find out who wrote it (not EchoMQ), then move it out of the way: "
            f"RENAME {quoted(key)} {quoted(key + '.moved')}",
            queue=queue,
        )
    for name, reply in zip((*wire.SETS, *_COUNTERS), replies, strict=True):
        if isinstance(reply, wire.ReplyError) and reply.code not in ("WRONGTYPE", "NOPERM"):
            key = wire.queue_key(queue, name).decode()
            fix = FIXES.get(reply.code, "")
            yield failed("queue", f"{queue}: {key}: {reply}", fix, queue=queue)
            return
    if held:
        return
    if any(isinstance(reply, wire.ReplyError) for reply in replies):
        yield skipped("queue", f"{queue}: the ACL denies to look (see acl)", queue)
    else:
        counts = ", ".join(f"{n} {c}" for n, c in zip(wire.SETS, replies, strict=False))
        yield passed("queue", f"{queue}: {counts}", queue)


def blocking_rows(settings: Settings, node: Node, link: Link) -> Iterator[Finding]:
    """The rows that make the next sweep of a queue refuse, found by reads alone.

    Only queues in which something is due are looked into, as far as one sweep would reach.
    """
    looked_at, told = 0, False
    for page in _pages(settings.queues):
        commands = [wire.head(queue, _SOURCES[verb]) for queue in page for verb in VERBS]
        now, *heads = _ask(node, link, [wire.TIME, *commands], 1 + len(commands))
        orders = [(queue, verb) for queue in page for verb in VERBS]
        for (queue, verb), head in zip(orders, heads, strict=True):
            # What cannot be read is told by the checks of the ACL and of the keys.
            looked_at += not isinstance(head, wire.ReplyError)
            if not _is_due(head, now):
                continue
            for finding in _judged(foresee(node, _sweep(settings, queue, verb), drain=False)):
                told = True
                yield finding
    if not told and looked_at:
        yield passed("rows", "no row that is due now makes a sweep refuse")
    elif not told:
        why = "the ACL denies to look (see acl)" if settings.queues else "no queue is listed"
        yield skipped("rows", why)


def _is_due(head: wire.Reply, now: wire.Reply) -> bool:
    try:
        first = wire.read_head(head)
        return first is not None and first.at_ms <= wire.read_time_ms(now)
    except (wire.ReplyError, wire.ShapeError):
        return False


def _sweep(settings: Settings, queue: str, verb: Verb) -> Sweep:
    own = settings.for_queue(queue)
    limit = own.promote.limit if verb == "promote" else own.stalled_check.limit
    return Sweep(queue, verb, limit, own.stalled_check.max_stalled, settings.node.base)


def _judged(foreseen: SweepResult) -> Iterator[Finding]:
    queue, verb, failure = foreseen.queue, foreseen.verb, foreseen.failure
    if failure and failure.code == "NOPERM":
        yield skipped("rows", f"{queue}: {verb}: the ACL denies to look (see acl)", queue)
    elif failure:
        yield failed(
            "rows", f"{queue}: {verb}: {failure.message}", FIXES.get(failure.code, ""), queue=queue
        )
    elif foreseen.blocked:
        job_id = foreseen.blocked.job_id or b""
        key = quoted(wire.queue_key(queue, _SOURCES[verb]).decode())
        row = _argument(wire.row_key(queue, job_id))
        yield failed(
            "rows",
            f"{queue}: {verb} is blocked by {wire.printable(job_id)}: {foreseen.blocked.reason}; "
            "jobs behind it wait until that row is removed",
            f"see what it is with HGETALL {row}, and who wrote it; then repair it, or take it out "
            f"with ZREM {key} {_argument(job_id)}",
            queue=queue,
        )


def _argument(data: bytes) -> str:
    """Bytes as the command line of valkey-cli takes them."""
    text = wire.printable(data)
    if re.fullmatch(r"[^\s\"'\\]+", text):
        return text
    return '"' + text.replace('"', '\\"') + '"'


def _pages(queues: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(queues), QUEUES_PER_PAGE):
        yield queues[start : start + QUEUES_PER_PAGE]


def _ask(node: Node, link: Link, commands: list[bytes], count: int) -> list[wire.Reply]:
    return link.exchange(commands, count, time.monotonic() + node.timeout_seconds)
