"""Holds the crew's books, the daemons' counters and the server's data against its history."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from chaos.crew import Books
from chaos.history import PLACES, History, Position
from chaos.stage import Counted, Snapshot
from emqtimerd import wire

# What a daemon counts, and the moves that it should have counted.
COUNTERS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (("jobs_promoted_total",), "promote", ("promoted",)),
    (("jobs_recovered_total",), "stalled_check", ("restart", "stall_recovered")),
    (("jobs_dead_lettered_total",), "stalled_check", ("stall_dead",)),
    (("lease_expiries_total", "stall"), "stalled_check", ("stall_recovered", "stall_dead")),
    (("lease_expiries_total", "restart"), "stalled_check", ("restart",)),
    (("lease_expiries_total", "unstamped"), "stalled_check", ()),
    (("lease_expiries_total", "unattributed"), "stalled_check", ()),
)

EXAMPLES = 3
"""How many ids a discrepancy names."""


@dataclass(frozen=True)
class Finding:
    """A sentence in which the numbers add up, or do not."""

    holds: bool
    sentence: str
    detail: str = ""


@dataclass
class Evidence:
    """All that is known when a run is over."""

    queues: Sequence[str]
    history: History
    books: Sequence[Books]
    snapshot: Snapshot
    counted: Counted
    """The sum over all daemons and all their processes."""
    crossings_logged: Counter[bytes] = field(default_factory=Counter)
    """The jobs that the log says crossed a restart."""
    largest_limit: int = 100
    windows: Sequence[tuple[Position, Position]] = ()
    """The last moments of the daemons that were killed, as offsets of the history: what was moved
    in them may have been counted by nobody."""


def audit(evidence: Evidence) -> Iterator[Finding]:
    """Look whether everything adds up."""
    yield from _jobs(evidence)
    yield from _leases(evidence)
    yield from _server(evidence)
    yield from _counters(evidence)


def _jobs(evidence: Evidence) -> Iterator[Finding]:
    history, server = evidence.history, evidence.snapshot
    accepted: Counter[bytes] = Counter()
    for books in evidence.books:
        accepted.update(books.accepted)
    refused = [text for books in evidence.books for text in books.refused]
    yield Finding(not refused, "nobody was given an answer that no verb gives", _some(refused))
    yield Finding(not history.odd, "no job made a move that no verb makes", _some(history.odd))
    maybe = {job_id for books in evidence.books for job_id in books.maybe}
    arrived = [job_id for job_id in maybe if job_id in history.born]
    accepted.update(arrived)
    yield _same(
        f"jobs accepted, {len(arrived)} of them of {len(maybe)} that were not answered",
        accepted,
        "added on the server, each once",
        history.born,
    )
    completed = server.completed.total()
    dead, left = server.size("dead"), server.size("pending", "active", "schedule")
    yield Finding(
        len(accepted) == completed + dead + left,
        f"{len(accepted)} jobs in = {completed} completed + {dead} dead + {left} left",
    )
    far = {job_id for books in evidence.books for job_id in books.far} & accepted.keys()
    yield Finding(left == len(far), f"{left} left = {len(far)} that are due after the end")
    places = Counter(chain(history.completed.elements(), *server.sets.values()))
    yield _same("jobs", accepted, "completed, dead or left, each once", places)


def _leases(evidence: Evidence) -> Iterator[Finding]:
    """Each lease ended once, and as its worker says."""
    history, books = evidence.history, evidence.books
    claimed = Counter(lease for each in books for lease in each.claimed)
    unheard = history.leases.keys() - claimed.keys()
    lost = sum(each.lost_claims for each in books)
    unknown_leases = [lease for lease in claimed if lease not in history.leases]
    twice = [lease for lease, count in claimed.items() if count > 1]
    yield Finding(
        not unknown_leases and not twice and len(unheard) <= lost,
        f"{len(history.leases)} leases given = {len(claimed)} that workers hold, each once, + "
        f"{len(unheard)} of {lost} claims whose reply was lost",
        _some([*unknown_leases, *twice]),
    )

    ended = {lease: way for each in books for lease, way in each.ended.items()}
    wrong = [lease for lease, way in ended.items() if history.leases.get(lease) != way]
    doubtful = {lease: way for each in books for lease, way in each.doubtful.items()}
    by_worker = {
        lease: way
        for lease, way in history.leases.items()
        if way and way not in ("restart", "stall_recovered", "stall_dead")
    }
    unasked = [
        lease
        for lease, way in by_worker.items()
        if lease not in ended and not _may_be(doubtful.get(lease), way)
    ]
    ways = Counter(by_worker.values())
    told = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
    yield Finding(
        not wrong and not unasked,
        f"{len(by_worker)} leases ended by workers ({told}), as their answers say; in doubt were "
        f"{len(doubtful)}",
        _some([*wrong, *unasked]),
    )

    expired = Counter(
        lease
        for lease, way in history.leases.items()
        if way in ("restart", "stall_recovered", "stall_dead")
    )
    abandoned = {lease for each in books for lease in each.abandoned}
    late = {lease for each in books for lease in each.late}
    # What its worker still could have ended must not have been taken from it.
    taken = [
        lease
        for lease in expired
        if lease not in abandoned | late and lease not in doubtful and lease not in unheard
    ]
    kept = [
        lease for lease in abandoned | late if history.leases.get(lease) and lease not in expired
    ]
    open_leases = sum(not way for way in history.leases.values())
    yield Finding(
        not taken and not kept,
        f"{len(expired)} leases ran out = those of {len(abandoned)} workers that vanished, of "
        f"{len(late)} that came late, and of answers that were lost; {open_leases} are open",
        _some([*taken, *kept]),
    )
    again = [job_id for job_id, count in history.completed.items() if count > 1]
    completions = Counter(
        lease.rpartition(b"/")[0] for lease, way in ended.items() if way == "completed"
    )
    again += [job_id for job_id, count in completions.items() if count > 1]
    yield Finding(not again, "no job was completed twice", _some(again))


def _may_be(doubt: str | None, way: str) -> bool:
    return doubt == way or (doubt == "failed" and way == "buried")


def _server(evidence: Evidence) -> Iterator[Finding]:
    """The data is what the history leads to."""
    history, server = evidence.history, evidence.snapshot
    wrong: list[str] = []
    for (queue, place), members in server.sets.items():
        key = wire.queue_key(queue, place)
        if history.sets.get(key, {}) != members:
            wrong.append(key.decode())
    for row, state in server.states.items():
        known = history.rows.get(row)
        if known is None or known.state != state:
            wrong.append(wire.printable(row))
    stray = [row for row in history.rows if row not in server.states]
    for queue in evidence.queues:
        moves = history.moves[queue]
        if server.completed[queue] != moves["completed"]:
            wrong.append(f"metrics:completed of {queue}")
        if server.failed[queue] != moves["buried"] + moves["stall_dead"]:
            wrong.append(f"metrics:failed of {queue}")
    rows = len(server.states)
    yield Finding(
        not wrong and not stray,
        f"the server's {len(evidence.queues) * len(PLACES)} sets, {rows} rows and its own counts "
        "are what its history leads to",
        _some([*wrong, *stray]),
    )


def _counters(evidence: Evidence) -> Iterator[Finding]:
    """What the daemons counted is what happened, as far as they could know."""
    counted, history = evidence.counted, evidence.history
    for names, verb, kinds in COUNTERS:
        wrong: list[str] = []
        facts = sums = doubt = 0
        for queue in evidence.queues:
            fact = sum(history.moves[queue][kind] for kind in kinds)
            count = counted[names[0], queue, *names[1:]]
            unknown = counted["sweeps_total", queue, verb, "unknown"]
            moments = sum(
                history.between(start, end, queue, *kinds) for start, end in evidence.windows
            )
            bound = min(unknown * evidence.largest_limit + moments, fact)
            if not 0 <= fact - count <= bound:
                wrong.append(f"{queue}: {count} counted, {fact} happened, bound {bound}")
            facts, sums, doubt = facts + fact, sums + count, doubt + bound
        name = "{".join(names) + "}" * (len(names) - 1)
        lost = f" + {facts - sums} of unknown outcome (at most {doubt})" if doubt else ""
        yield Finding(not wrong, f"{name}: {sums} counted{lost} = {facts} happened", _some(wrong))

    def total(name: str) -> int:
        return sum(n for key, n in counted.items() if key[0] == name)

    recovered, dead = total("jobs_recovered_total"), total("jobs_dead_lettered_total")
    expiries = total("lease_expiries_total")
    yield Finding(
        recovered + dead == expiries,
        f"{recovered} recovered + {dead} dead-lettered = {expiries} expiries",
    )
    # A record is written after its expiry was counted, so a killed daemon may lack some.
    logged, crossed = evidence.crossings_logged, history.crossed
    restarts = total_of(counted, "lease_expiries_total", "restart")
    more = logged - crossed
    windows = sum(
        history.between(start, end, queue, "restart")
        for start, end in evidence.windows
        for queue in evidence.queues
    )
    yield Finding(
        not more and abs(restarts - logged.total()) <= windows,
        f"{logged.total()} records in the log, each of a lease that crossed a restart = "
        f"{restarts} counted",
        _some(list(more)),
    )


def total_of(counted: Mapping[tuple[str, ...], int], name: str, label: str) -> int:
    """The sum over the queues of a counter with this further label."""
    return sum(n for key, n in counted.items() if key[0] == name and key[-1] == label)


def _same(one_name: str, one: Counter[bytes], other_name: str, other: Counter[bytes]) -> Finding:
    differ = [*(one - other), *(other - one)]
    return Finding(
        not differ, f"{one.total()} {one_name} = {other.total()} {other_name}", _some(differ)
    )


def _some(items: Sequence[bytes | str]) -> str:
    if not items:
        return ""
    shown = [wire.printable(item) if isinstance(item, bytes) else item for item in items[:EXAMPLES]]
    return f"{len(items)}: " + "; ".join(shown) + (" ..." if len(items) > EXAMPLES else "")
