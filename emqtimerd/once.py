"""One ad-hoc sweep: both verbs over some queues, and a report for people or for scripts."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from emqtimerd import verdict, wire
from emqtimerd.config import Settings
from emqtimerd.node import Identity, Node, NodeFault, first_fault
from emqtimerd.preview import foresee
from emqtimerd.sweeper import (
    VERBS,
    Blocked,
    Expiry,
    Failure,
    Round,
    Sweep,
    SweepResult,
    Verb,
    failed,
    run_round,
)
from emqtimerd.topology import Nodes, open_nodes
from emqtimerd.verdict import EXIT_DONE, EXIT_FAILED

NO_LIMIT_SECONDS = 365 * 86_400.0
"""How long a sweep without `--timeout` may drain: as long as it moves something."""


@dataclass(slots=True)
class QueueReport:
    """What was done to one queue, by both verbs."""

    queue: str
    node: str = ""
    promoted: int = 0
    recovered: int = 0
    expiries: list[Expiry] = field(default_factory=list)
    dead: list[bytes] = field(default_factory=list)
    passes: int = 0
    blocked: list[tuple[Verb, Blocked]] = field(default_factory=list)
    errors: list[tuple[Verb, Failure]] = field(default_factory=list)
    unswept: bool = False
    """The round ended before this queue's turn."""

    def add(self, result: SweepResult) -> None:
        """Take in what one verb did."""
        self.node = result.node
        self.promoted += result.promoted
        self.recovered += len(result.recovered)
        self.dead += result.dead
        self.expiries += result.expiries
        self.passes += result.passes
        if result.blocked:
            self.blocked.append((result.verb, result.blocked))
        if result.failure:
            self.errors.append((result.verb, result.failure))
        if (result.skipped or result.backlog) and not result.failure:
            self.unswept = True

    @property
    def failed(self) -> bool:
        """Whether something went wrong, or was left."""
        return bool(self.errors or self.blocked or self.unswept)

    @property
    def crossings(self) -> list[Expiry]:
        """The expiries that crossed a server restart."""
        return [expiry for expiry in self.expiries if expiry.cause == "restart"]

    @property
    def causes(self) -> dict[str, int]:
        """How many leases ran out for which cause."""
        counted = Counter(expiry.cause for expiry in self.expiries)
        return {cause: counted[cause] for cause in wire.CAUSES}


@dataclass(slots=True)
class Report:
    """The outcome of one ad-hoc sweep."""

    nodes: dict[str, Identity | None] = field(default_factory=dict)
    """The servers that have the queues, and what each said of itself."""
    queues: list[QueueReport] = field(default_factory=list)
    fault: NodeFault | None = None
    """What kept us from working on the node at all."""
    fix: str = ""
    """What to do about that."""
    dry_run: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the command (an interrupt has its own)."""
        if self.fault:
            return verdict.exit_code(self.fault)
        return EXIT_FAILED if any(queue.failed for queue in self.queues) else EXIT_DONE


def sweep_once(
    settings: Settings,
    queues: Sequence[str],
    *,
    verbs: Sequence[Verb],
    limit: int | None = None,
    max_stalled: int | None = None,
    timeout_seconds: float | None = None,
    drain: bool = True,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Sweep the queues now with each verb; `limit` and `max_stalled` replace what is configured."""
    own = settings.node
    if timeout_seconds is not None:
        patience = min(own.timeout_seconds, timeout_seconds)
        own = own.model_copy(update={"timeout_seconds": patience})
    nodes = open_nodes(own)
    until = time.monotonic() + (timeout_seconds or NO_LIMIT_SECONDS)
    report = Report(queues=[QueueReport(q, nodes.name) for q in queues], dry_run=dry_run)
    known = {queue.queue: queue for queue in report.queues}

    def work(node: Node, sweeps: list[Sweep]) -> Round:
        report.nodes[node.name] = node.identity
        if not dry_run:
            # A new sweep is never quiet, so there is a result for each queue.
            return run_round(node, sweeps, until=until, drain=drain, stop=stop)
        try:
            return Round([foresee(node, sweep, drain=drain, stop=stop) for sweep in sweeps])
        except NodeFault as fault:
            return Round(failed(node, sweeps, fault))

    try:
        _pass_fences(nodes, queues, report)
        for verb in verbs:
            sweeps = [_sweep(settings, queue, verb, limit, max_stalled) for queue in queues]
            for result in _everywhere(nodes, sweeps, work):
                result.backlog &= drain
                known[result.queue].add(result)
    except NodeFault as fault:
        report.fault, report.fix = fault, verdict.fix(settings.node, fault)
        for queue in report.queues:
            queue.unswept |= not queue.passes
    finally:
        nodes.close()
    return report


def _pass_fences(nodes: Nodes, queues: Sequence[str], report: Report) -> None:
    """Look at each server first, so that one that is no EMQ node is told apart from a failed
    sweep. Raises NodeFault if none can be worked on."""
    report.nodes = {node.name: None for node in nodes.primaries()}
    nodes.refresh()
    shares = nodes.by_node(queues, str)
    report.nodes = dict.fromkeys(node.name for node, _ in shares)
    faults: list[NodeFault] = []
    for node, _ in shares:
        try:
            with node.link():
                report.nodes[node.name] = node.identity
        except NodeFault as fault:
            faults.append(first_fault(fault))
    if faults and len(faults) == len(shares):
        raise faults[0]


def _everywhere(
    nodes: Nodes, sweeps: Sequence[Sweep], work: Callable[[Node, list[Sweep]], Round]
) -> list[SweepResult]:
    """Sweep each queue where it is, and those that were moved meanwhile once more."""
    done = Round()
    for node, share in nodes.by_node(sweeps, lambda sweep: sweep.queue):
        done.add(work(node, share))
    if moved := done.take_moved():
        with contextlib.suppress(NodeFault):
            nodes.refresh(next(iter(moved.values())))
        again = [sweep for sweep in sweeps if sweep.queue in moved]
        for node, share in nodes.by_node(again, lambda sweep: sweep.queue):
            done.add(work(node, share))
    return done.results


def _sweep(
    settings: Settings, queue: str, verb: Verb, limit: int | None, max_stalled: int | None
) -> Sweep:
    own = settings.for_queue(queue)
    configured = own.promote.limit if verb == "promote" else own.stalled_check.limit
    return Sweep(
        queue,
        verb,
        limit or configured,
        max_stalled or own.stalled_check.max_stalled,
        settings.node.base,
    )


# --- as JSON ------------------------------------------------------------------------------------


def document(report: Report) -> dict[str, Any]:
    """The report as the document that `--json` prints (docs/once.md has its fields)."""
    failed = report.exit_code != EXIT_DONE
    result: dict[str, Any] = {"ok": not failed}
    if report.dry_run:
        result["dry_run"] = True
    if report.fault:
        result["error"] = {
            "code": report.fault.code,
            "message": report.fault.message,
            "fix": report.fix or None,
        }
    result["nodes"] = [_node_document(*node) for node in report.nodes.items()]
    result["queues"] = [_queue_document(queue) for queue in report.queues]
    return result


def _node_document(node: str, identity: Identity | None) -> dict[str, Any]:
    if identity is None:
        return {"node": node, "run_id": None, "version": None, "brand": None, "tokens": []}
    return {
        "node": node,
        "run_id": identity.run_id,
        "version": identity.version,
        "brand": identity.brand,
        "tokens": list(identity.tokens),
    }


def _queue_document(queue: QueueReport) -> dict[str, Any]:
    return {
        "queue": queue.queue,
        "node": queue.node,
        "promoted": queue.promoted,
        "recovered": queue.recovered,
        "dead_lettered": len(queue.dead),
        "expiries": queue.causes,
        "restart_crossing": [
            {
                "id": wire.printable(expiry.job_id),
                "lease_epoch": wire.printable(expiry.epoch or b""),
                "past_deadline_ms": expiry.past_deadline_ms,
            }
            for expiry in queue.crossings
        ],
        "dead_letter_ids": [wire.printable(job_id) for job_id in queue.dead],
        "passes": queue.passes,
        "blocked": [
            {"verb": verb, "id": _id(blocked), "reason": blocked.reason}
            for verb, blocked in queue.blocked
        ]
        or None,
        "error": [
            {"verb": verb, "code": failure.code, "message": failure.message}
            for verb, failure in queue.errors
        ]
        or None,
        "unswept": queue.unswept,
    }


def _id(blocked: Blocked) -> str | None:
    return None if blocked.job_id is None else wire.printable(blocked.job_id)


# --- for people ---------------------------------------------------------------------------------

SHOWN = 10
"""How many ids of a kind a queue's lines show; `--json` has them all."""


COLUMNS = ("queue", "promoted", "recovered", "dead", *wire.CAUSES)


def table(report: Report) -> str:
    """The report as a table: a line for each queue, and below it what needs a second look."""
    rows = [COLUMNS, *(_row(queue) for queue in report.queues)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(_cells(row, widths)).rstrip() for row in rows]
    for queue in report.queues:
        lines += _details(queue, "would be" if report.dry_run else "is")
    return "\n".join([*lines, "", _summary(report)])


def _row(queue: QueueReport) -> tuple[str, ...]:
    counts = (queue.promoted, queue.recovered, len(queue.dead), *queue.causes.values())
    return (queue.queue, *(str(count) for count in counts))


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterable[str]:
    name, *counts = row
    yield name.ljust(widths[0])
    yield from (count.rjust(width) for count, width in zip(counts, widths[1:], strict=True))


def _details(queue: QueueReport, does: str) -> Iterable[str]:
    name = queue.queue
    for expiry in queue.crossings[:SHOWN]:
        yield (
            f"{name}: {wire.printable(expiry.job_id)} crossed a server restart: leased under "
            f"{wire.printable(expiry.epoch or b'')}, {expiry.past_deadline_ms} ms past its deadline"
        )
    yield from _rest(name, len(queue.crossings), "crossed a restart")
    for job_id in queue.dead[:SHOWN]:
        yield f"{name}: {wire.printable(job_id)} {does} dead: its stalls reached max_stalled"
    yield from _rest(name, len(queue.dead), "are dead")
    for verb, blocked in queue.blocked:
        row = _id(blocked) or "a row"
        yield (
            f"{name}: {verb} is blocked by {row}: {blocked.reason}; jobs behind it wait until "
            "that row is removed"
        )
    for verb, failure in queue.errors:
        yield f"{name}: {verb} failed: {failure.message}"
    if queue.unswept:
        yield f"{name}: there was no time to finish it"


def _rest(name: str, count: int, what: str) -> Iterable[str]:
    if count > SHOWN:
        yield f"{name}: {count - SHOWN} more {what} (--json lists all)"


def _summary(report: Report) -> str:
    queues = report.queues
    count = len(queues)
    would = "would be " if report.dry_run else ""
    done = (
        f"{count} {'queue' if count == 1 else 'queues'}: "
        f"{sum(q.promoted for q in queues)} {would}promoted, "
        f"{sum(q.recovered for q in queues)} {would}recovered, "
        f"{sum(len(q.dead) for q in queues)} {would}dead-lettered"
    )
    troubles = ", ".join(_troubles(queues))
    return f"{done}; {troubles}" if troubles else done


def _troubles(queues: Sequence[QueueReport]) -> Iterable[str]:
    """What went wrong or was left, and in how many of the queues."""
    found: Counter[str] = Counter()
    for queue in queues:
        found.update(f"{verb} failed" for verb, _ in queue.errors)
        found.update(f"{verb} blocked" for verb, _ in queue.blocked)
        found.update(["not finished"] if queue.unswept else [])
    ends = (*(f"{verb} {end}" for verb in VERBS for end in ("failed", "blocked")), "not finished")
    for end in ends:
        if found[end]:
            every = found[end] == len(queues)
            where = f"all {len(queues)}" if every else f"{found[end]} of {len(queues)}"
            yield end if len(queues) == 1 else f"{end} in {where}"
