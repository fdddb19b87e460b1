"""What the servers did to each job, read from their append-only files: the facts.

The job core writes the effects of its verbs (HSET, ZADD, ZREM, DEL), so the file tells every move
of every job, whoever asked for it and whether or not an answer arrived. It has all that was
answered as long as nothing rewrites it and the server writes before it replies: `appendfsync no`
does that, and `everysec` does not (it puts a write off while the disk is busy).

A slot that migrates is no move of its jobs. Where it comes from, its keys are deleted (in commands
of nothing else, while a verb takes an id out of a set first). Where it goes to, they are restored,
or written between two lines that name the slots.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hiredis

from emqtimerd import wire

_MARK = b":handed-back"

READ_BYTES = 1 << 20

PLACES = ("pending", "active", "schedule", "dead")

Position = tuple[int, ...]
"""How long each of the logs was at a moment."""

Moves = dict[str, Counter[str]]
"""How often each kind of move happened, by queue."""

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


def mark_key(queue: str) -> bytes:
    """What a worker sets in one transaction with its EMQ.REQUEUE: the effects of a requeue and of a
    recovery after a restart are the same otherwise."""
    return b"chaos:{%b}%b" % (queue.encode(), _MARK)


def lease_of(job_id: bytes, token: bytes) -> bytes:
    """Name a lease: its job, and the token that the claim gave out."""
    return job_id + b"/" + token


@dataclass
class History:
    """All moves of all jobs, in the order of the servers that had them."""

    moves: Moves = field(default_factory=lambda: defaultdict(Counter))
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
    log: int = 0
    """Which of the logs is read now."""
    of_log: dict[int, Moves] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Counter))
    )
    """The moves so far, by the log that tells them."""
    at_mark: dict[tuple[int, int], Moves] = field(default_factory=dict)
    """The moves so far in a log, at offsets of it that were asked for."""

    def total(self, *kinds: str) -> int:
        """How many moves of these kinds there were in all queues."""
        return sum(moves[kind] for moves in self.moves.values() for kind in kinds)

    def between(self, start: Position, end: Position, queue: str, *kinds: str) -> int:
        """How many moves of these kinds a queue saw between two marks."""
        return sum(
            self.at_mark[log, at_end][queue][kind] - self.at_mark[log, at_start][queue][kind]
            for log, (at_start, at_end) in enumerate(zip(start, end, strict=True))
            for kind in kinds
        )

    def take(self, group: Sequence[Command]) -> None:
        """Take in what happened as one: a transaction's commands, or one alone."""
        names = [command[0].upper() for command in group]
        handed_back = any(
            name == b"SET" and command[1].endswith(_MARK)
            for name, command in zip(names, group, strict=True)
        )
        for name, command in zip(names, group, strict=True):
            match name:
                case b"HSET":
                    self._hset(command, handed_back)
                case b"ZADD":
                    self.sets[command[1]].update(zip(command[3::2], command[2::2], strict=True))
                case b"ZREM":
                    for member in command[2:]:
                        self.sets[command[1]].pop(member, None)
                case b"DEL" if b"ZREM" in names:
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

    def _count(self, queue: str, kind: str) -> None:
        self.moves[queue][kind] += 1
        self.of_log[self.log][queue][kind] += 1

    def _note(self, queue: str, kind: str, before: bytes, job_id: bytes, row: _Row) -> None:
        self._count(queue, kind)
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
        self._count(base.removeprefix(b"emq:{").decode(), "completed")
        self.completed[job_id] += 1
        self.leases[lease_of(job_id, row.token)] = "completed"

    def mark(self, offset: int) -> None:
        """Keep the moves so far of the log that is read, under this offset."""
        moves = self.of_log[self.log].items()
        self.at_mark[self.log, offset] = defaultdict(
            Counter, {queue: Counter(counts) for queue, counts in moves}
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a log; parts are read in the order in which queues went from log to log."""

    file: Path
    start: int = 0
    end: int | None = None
    """Where it ends; None is the end of the file."""
    log: int = 0
    """Which of the logs: one for each primary, and for who took over from it."""


def file_of(directory: Path) -> Path:
    """The file that a server appends to; only one that is fed anew as a replica begins another."""
    found = (directory / "appendonlydir").glob("*.incr.aof")
    # appendonly.aof.<number>.incr.aof
    return max(found, key=lambda file: int(file.name.split(".")[2]))


def read(parts: Sequence[Part], marks: Sequence[Position] = ()) -> History:
    """Read the whole history, and keep the state of things at these positions of it."""
    history = History()
    logs: dict[int, _Log] = {}
    for part in parts:
        if part.log not in logs:
            logs[part.log] = _Log(history, sorted({mark[part.log] for mark in marks}))
        history.log = part.log
        logs[part.log].read(part)
    for history.log, log in logs.items():
        log.end()
    return history


class _Log:
    """One log, as far as it was read."""

    def __init__(self, history: History, marks: list[int]) -> None:
        self._history = history
        self._marks = marks
        self._position = 0
        self._file = Path()
        self._reader = hiredis.Reader()
        self._group: list[Command] | None = None
        self._arriving: dict[bytes, list[range]] = {}
        """The slots that are being written here, by the name of the migration."""

    def read(self, part: Part) -> None:
        """Take in one part, which may end in the middle of a command; the next one goes on."""
        if part.file != self._file:
            self._file, self._reader, self._group = part.file, hiredis.Reader(), None
        for data in self._chunks(part):
            self._reader.feed(data)
            while self._reader.has_data() and isinstance(command := self._reader.gets(), list):
                self._take(command)

    def end(self) -> None:
        """Keep the state at the last marks: the end, or what was torn off by the next start."""
        for mark in self._marks:
            self._history.mark(mark)

    def _take(self, command: Command) -> None:
        match command:
            case [b"MULTI"]:
                self._group = []
            case [b"EXEC"]:
                self._history.take(self._group or [])
                self._group = None
            case [b"CLUSTER", b"SYNCSLOTS", b"ESTABLISH", *words]:
                told = dict(zip(words[::2], words[1::2], strict=False))
                slots = [int(word) for word in words[words.index(b"SLOTSRANGE") + 1 :]]
                pairs = zip(slots[::2], slots[1::2], strict=True)
                self._arriving[told[b"NAME"]] = [range(first, last + 1) for first, last in pairs]
            case [b"CLUSTER", b"SYNCSLOTS", b"FINISH", *words]:
                self._arriving.pop(words[words.index(b"NAME") + 1], None)
            case _ if self._arrives(command):
                pass
            case _ if self._group is not None:
                self._group.append(command)
            case _:
                self._history.take([command])

    def _arrives(self, command: Command) -> bool:
        """Whether this writes what another server did: a key of a slot that migrates to here."""
        if not self._arriving or len(command) < 2:
            return False
        slot = wire.slot_of_tag(command[1].partition(b"{")[2].partition(b"}")[0])
        return any(slot in part for parts in self._arriving.values() for part in parts)

    def _chunks(self, part: Part) -> Iterator[bytes]:
        """The part in pieces, none of which reaches over a mark."""
        with part.file.open("rb") as stream:
            stream.seek(part.start)
            left = (part.file.stat().st_size if part.end is None else part.end) - part.start
            while True:
                while self._marks and self._marks[0] <= self._position:
                    self._history.mark(self._marks.pop(0))
                size = min(READ_BYTES, left, *(mark - self._position for mark in self._marks[:1]))
                if not (data := stream.read(size)):
                    break
                yield data
                self._position += len(data)
                left -= len(data)


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
