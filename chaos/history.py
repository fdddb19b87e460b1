"""What the server did to each job, read from its append-only file: the facts.

The job core writes the effects of its verbs (HSET, ZADD, ZREM, DEL), so the file tells every move
of every job, whoever asked for it and whether or not an answer arrived. It has all that was
answered as long as nothing rewrites it and the server writes before it replies: `appendfsync no`
does that, and `everysec` does not (it puts a write off while the disk is busy).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hiredis

from emqtimerd import wire

HANDED_BACK = b"chaos:handed-back"
"""Set by a worker in one transaction with its EMQ.REQUEUE: the effects of a requeue and of a
recovery after a restart are the same otherwise."""

READ_BYTES = 1 << 20

PLACES = ("pending", "active", "schedule", "dead")

SWEPT = ("promoted", "restart", "stall_recovered", "stall_dead")
"""The moves that a daemon asks for."""

_MOVES = {
    (b"", b"pending"): "born",
    (b"", b"scheduled"): "born",
    (b"pending", b"active"): "claimed",
    (b"scheduled", b"pending"): "promoted",
}

Command = list[bytes]


@dataclass(slots=True)
class _Row:
    state: bytes
    token: bytes
    failures: bytes = b""
    epoch: bytes = b""


def lease_of(job_id: bytes, token: bytes) -> bytes:
    """Name a lease: its job, and the token that the claim gave out."""
    return job_id + b"/" + token


@dataclass
class History:
    """All moves of all jobs, in the server's order."""

    moves: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """How often each kind of move happened, by queue."""
    born: Counter[bytes] = field(default_factory=Counter)
    """How often each job was added; once is right."""
    completed: Counter[bytes] = field(default_factory=Counter)
    leases: dict[bytes, str] = field(default_factory=dict)
    """How each lease ended; "" where it has not."""
    crossed: Counter[bytes] = field(default_factory=Counter)
    """Jobs whose lease ran out across a restart, and how often."""
    rows: dict[bytes, _Row] = field(default_factory=dict)
    """The rows that are there in the end, by their keys."""
    sets: dict[bytes, dict[bytes, bytes]] = field(default_factory=lambda: defaultdict(dict))
    """The sets that are there in the end, with their scores."""
    odd: list[str] = field(default_factory=list)
    """Moves that no verb makes."""
    at_mark: dict[int, dict[str, Counter[str]]] = field(default_factory=dict)
    """The moves so far, at offsets of the file that were asked for."""

    def total(self, *kinds: str) -> int:
        """How many moves of these kinds there were in all queues."""
        return sum(moves[kind] for moves in self.moves.values() for kind in kinds)

    def between(self, start: int, end: int, queue: str, *kinds: str) -> int:
        """How many moves of these kinds a queue saw between two marks."""
        before, after = self.at_mark[start], self.at_mark[end]
        return sum(after[queue][kind] - before[queue][kind] for kind in kinds)

    def take(self, group: Sequence[Command]) -> None:
        """Take in what happened as one: a transaction's commands, or one alone."""
        handed_back = any(command[1] == HANDED_BACK for command in group if len(command) > 1)
        for command in group:
            match command[0].upper():
                case b"HSET":
                    self._hset(command, handed_back)
                case b"ZADD":
                    self.sets[command[1]].update(zip(command[3::2], command[2::2], strict=True))
                case b"ZREM":
                    for member in command[2:]:
                        self.sets[command[1]].pop(member, None)
                case b"DEL":
                    for key in command[1:]:
                        self._delete(key)

    def _hset(self, command: Command, handed_back: bool) -> None:
        base, is_row, job_id = command[1].partition(b"}:job:")
        if not is_row:
            return
        fields = dict(zip(command[2::2], command[3::2], strict=True))
        row = self.rows.get(command[1])
        if row is None:
            row = self.rows[command[1]] = _Row(b"", b"")
        before, row.state = row.state, fields.get(b"state", row.state)
        row.token = fields.get(b"attempts", row.token)
        row.failures = fields.get(b"failures", row.failures)
        row.epoch = fields.get(b"lease_epoch", row.epoch)
        if b"group" in fields:
            # Planted by hand, and removed by hand.
            row.state = b"lane"
        elif row.state != before:
            kind = _MOVES.get((before, row.state)) or _end_of_lease(
                before, row.state, fields, handed_back
            )
            self._note(base.removeprefix(b"emq:{").decode(), kind, before, job_id, row)

    def _note(self, queue: str, kind: str, before: bytes, job_id: bytes, row: _Row) -> None:
        self.moves[queue][kind] += 1
        if not kind:
            self.odd.append(f"{wire.printable(job_id)}: {before!r} to {row.state!r}")
        elif kind == "born":
            self.born[job_id] += 1
        elif kind == "claimed":
            self.leases[lease_of(job_id, row.token)] = ""
        elif before == b"active":
            self.leases[lease_of(job_id, row.token)] = kind
            if kind == "restart":
                self.crossed[job_id] += 1

    def _delete(self, key: bytes) -> None:
        base, is_row, job_id = key.partition(b"}:job:")
        row = self.rows.pop(key, None)
        if not is_row or row is None or row.state == b"lane":
            return
        if row.state != b"active":
            self.odd.append(f"{wire.printable(job_id)}: deleted while {row.state!r}")
        self.moves[base.removeprefix(b"emq:{").decode()]["completed"] += 1
        self.completed[job_id] += 1
        self.leases[lease_of(job_id, row.token)] = "completed"

    def mark(self, offset: int) -> None:
        """Keep the moves so far under this offset."""
        self.at_mark[offset] = defaultdict(
            Counter, {queue: Counter(moves) for queue, moves in self.moves.items()}
        )


def _end_of_lease(
    before: bytes, after: bytes, fields: dict[bytes, bytes], handed_back: bool
) -> str:
    if before != b"active":
        return ""
    stalled, failed = b"stalled" in fields, b"failures" in fields
    if after == b"scheduled":
        return "failed" if failed else "delayed"
    if after == b"dead":
        return "buried" if failed else "stall_dead" if stalled else ""
    if after == b"pending":
        return "requeued" if handed_back else "stall_recovered" if stalled else "restart"
    return ""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file; the history goes on in the next part."""

    file: Path
    start: int = 0
    end: int | None = None
    """Where it ends; None is the end of the file."""


def file_of(directory: Path) -> Path:
    """The file that a server appends to; only one that is fed anew as a replica begins another."""
    found = (directory / "appendonlydir").glob("*.incr.aof")
    # appendonly.aof.<number>.incr.aof
    return max(found, key=lambda file: int(file.name.split(".")[2]))


def read(parts: Sequence[Part], marks: Sequence[int] = ()) -> History:
    """Read the whole history, and keep the state of things at these positions of it."""
    history = History()
    waiting = sorted(set(marks))
    position = 0
    for part in parts:
        group: list[Command] | None = None
        reader = hiredis.Reader()
        for data in _chunks(part, position, waiting):
            while waiting and waiting[0] <= position:
                history.mark(waiting.pop(0))
            position += len(data)
            reader.feed(data)
            while reader.has_data() and isinstance(command := reader.gets(), list):
                name = command[0].upper()
                if name == b"MULTI":
                    group = []
                elif name == b"EXEC":
                    history.take(group or [])
                    group = None
                elif group is not None:
                    group.append(command)
                else:
                    history.take([command])
    for mark in waiting:
        # The last of them, or what was torn off by the next start: a write that was cut short.
        history.mark(mark)
    return history


def _chunks(part: Part, position: int, marks: Sequence[int]) -> Iterator[bytes]:
    """The part in pieces, none of which reaches over a mark."""
    with part.file.open("rb") as stream:
        stream.seek(part.start)
        left = (part.file.stat().st_size if part.end is None else part.end) - part.start
        while left > 0:
            size = min(READ_BYTES, left, *(mark - position for mark in marks if mark > position))
            data = stream.read(size)
            if not data:
                break
            position += len(data)
            left -= len(data)
            yield data
