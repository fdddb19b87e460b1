"""One round: sweep these queues now with this verb, drain them, and return what happened.

A round never sleeps, schedules or logs. One queue's error is that queue's result and nobody
else's; a fault of the node is the result of every queue that still waited for it.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeGuard

from emqtimerd import wire
from emqtimerd.node import Link, Lost, Node, NodeFault, NotTried, leads_astray
from emqtimerd.wire import BaseForm

Verb: TypeAlias = Literal["promote", "stalled_check"]

VERBS: tuple[Verb, ...] = ("promote", "stalled_check")

MOVES_PER_EXCHANGE = 2_000
"""How many jobs the sweeps of one pipeline may be expected to move. The server runs a pipeline
without serving anybody else in between: at some 200,000 moves a second this keeps the others'
wait near 10 ms."""

QUEUES_PER_EXCHANGE = 1_000
"""How many queues share a pipeline when nothing moves: some 200 kB of commands and 2 ms of the
server's time, beyond which fewer round trips save nothing worth having."""


@dataclass(frozen=True, slots=True)
class MassExpiry:
    """When so many leases expire together that it is a cut network and not the jobs."""

    share: float
    at_least: int


@dataclass(slots=True)
class Sweep:
    """A standing order: this verb for this queue, and what the last round learned about it."""

    queue: str
    verb: Verb
    limit: int
    max_stalled: int = 1
    base_form: BaseForm = "key"
    mass_expiry: MassExpiry | None = None
    """From which share of expired leases on a stall check is lenient; None is never."""
    blocked: bool = False
    """Whether the head was refused last time; then the next round first tries the head alone."""
    lenient: bool = False
    """Whether a mass expiry was seen: the check is then sent with `max_stalled` + 1."""
    expected: int = -1
    """How many jobs the next sweep may move, for sharing pipelines; unknown (-1) counts as
    `limit`."""
    _packed: dict[tuple[object, ...], bytes] = field(default_factory=dict, repr=False)
    _glance: bytes | None = field(default=None, repr=False)

    def glance(self) -> bytes | None:
        """The cheap way to sweep a queue in which nothing is expected to move; None for others."""
        if self.expected or self.blocked or self.verb != "promote":
            return None
        if self._glance is None:
            self._glance = self.promotion(self.limit, look_after=False)
        return self._glance

    def promotion(self, limit: int, look_after: bool) -> bytes:
        """The head, the promotion, and the head again if it is wanted; packed once."""
        packed = self._packed.get((limit, look_after))
        if packed is None:
            head = wire.head(self.queue, "schedule")
            packed = head + wire.promote(self.queue, limit, self.base_form)
            packed += head if look_after else b""
            self._packed[limit, look_after] = packed
        return packed

    def check(self, limit: int, peeks: bool, counts: bool) -> bytes:
        """The stall check. With `peeks` it is what follows MULTI and PEEK_HEAD in its transaction;
        with `counts` the sizes of the sets are read after it. Packed once."""
        form = (limit, peeks, counts, self.lenient)
        packed = self._packed.get(form)
        if packed is None:
            max_stalled = self.max_stalled + self.lenient
            packed = wire.stalled_check(self.queue, max_stalled, limit, self.base_form)
            if peeks:
                counted = wire.LEASES_COUNTED if counts else 0
                packed = wire.peek_tail(self.queue, limit, counted) + packed + wire.EXEC
            packed += wire.cards(self.queue) if counts else b""
            self._packed[form] = packed
        return packed


@dataclass(frozen=True, slots=True)
class Blocked:
    """A row that makes every sweep of its queue refuse, until somebody removes it."""

    job_id: bytes | None
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sweep failed: the code that it is counted under, and the words."""

    code: str
    message: str
    of_node: bool = False
    """It was the node's fault, not this queue's."""


@dataclass(frozen=True, slots=True)
class Expiry:
    """A lease that ran out and was taken from its holder by this sweep."""

    job_id: bytes
    cause: wire.Cause
    epoch: bytes | None = None
    run_id: bytes | None = None
    past_deadline_ms: int = 0
    """How long ago its deadline was; 0 where that is not known."""


@dataclass(slots=True)
class SweepResult:
    """What one round did to one queue. Counts are what the server answered, never a guess."""

    queue: str
    verb: Verb
    node: str = ""
    run_id: str = ""
    """Which server process was asked; "" where it may have been any."""
    passes: int = 0
    """How many sweep commands were answered with success."""
    promoted: int = 0
    recovered: list[bytes] = field(default_factory=list)
    dead: list[bytes] = field(default_factory=list)
    expiries: list[Expiry] = field(default_factory=list)
    lateness_ms: list[float] = field(default_factory=list)
    """For each pass that moved something: how long past its time the oldest job was."""
    unknown: int = 0
    """How many sweep commands were sent and never answered: each may have moved up to `limit`."""
    failure: Failure | None = None
    skipped: bool = False
    """The node was not tried: it is backing off from an earlier failure, or the round ended."""
    blocked: Blocked | None = None
    backlog: bool = False
    """Work was left, or may have been, that the round had no time for."""
    overdue_ms: float = 0.0
    """How long past its time the head still was after the last pass; 0 when nothing is due."""
    lenient: bool = False
    """The check was sent with `max_stalled` + 1, because of a mass expiry."""
    next_due: float | None = None
    """When the head comes due, by the local monotonic clock (seconds)."""
    finished_at: float = 0.0
    """When the queue was last swept with success, as a Unix time in seconds; 0 if it was not."""
    jobs: tuple[int, int, int, int] | None = None
    """The sizes of pending, active, schedule and dead, read with the stall check."""
    leases: tuple[int, int, int] | None = None
    """Of the first leases: how many carry the current epoch, an earlier one, none."""

    @property
    def moved(self) -> int:
        """How many jobs left their set for a good one or for the dead letters."""
        return self.promoted + len(self.recovered) + len(self.dead)

    @property
    def outcome(self) -> Literal["ok", "error", "unknown", "skipped"]:
        """How the round ended for this queue."""
        if self.unknown:
            return "unknown"
        if self.failure or self.blocked:
            return "error"
        return "skipped" if self.skipped else "ok"


@dataclass(slots=True)
class Round:
    """What one round did: a result for each queue, but for those where there was nothing to do.

    Ten thousand queues that are idle every second make no ten thousand objects.
    """

    results: list[SweepResult] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)
    """Queues that were swept once, with success, and had nothing in the set to sweep."""
    finished_at: float = 0.0
    """When the quiet queues were last swept, as a Unix time in seconds."""

    def add(self, other: "Round") -> None:
        """Take in what was done on another node."""
        self.results += other.results
        self.quiet += other.quiet
        self.finished_at = max(self.finished_at, other.finished_at)

    def take_moved(self) -> dict[str, str]:
        """Take out the queues that another server has by now, each with the reply that says where.

        Nothing was done by what was answered so; what was done before it stays.
        """
        moved = {
            result.queue: result.failure.message
            for result in self.results
            if result.failure and result.failure.code == "MOVED"
        }
        if moved:
            for result in self.results:
                if result.queue in moved:
                    result.failure = None
            self.results = [
                result
                for result in self.results
                if result.queue not in moved or result.passes or result.unknown
            ]
        return moved


# --- a round ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Course:
    """One queue's way through the passes of a round."""

    sweep: Sweep
    result: SweepResult
    allowance: int
    """The limit of the next command: narrowed while a row makes the sweep refuse."""
    expected: int
    """How many jobs the next command may move; -1 is unknown."""
    probing: bool
    """The next command tries the head alone, which was refused in the last round."""
    again: bool = False
    peeks: bool = True
    """The peek was not refused in this round; a new connection asks again in the next one."""
    last_head: wire.Head | None = None

    @classmethod
    def of(cls, sweep: Sweep, node: Node) -> "_Course":
        result = SweepResult(sweep.queue, sweep.verb, node.name, lenient=sweep.lenient)
        allowance = 1 if sweep.blocked else sweep.limit
        return cls(sweep, result, allowance, sweep.expected, sweep.blocked)

    @property
    def weight(self) -> int:
        return self.allowance if self.expected < 0 else min(self.expected, self.allowance)


def run_round(
    node: Node,
    sweeps: Sequence[Sweep],
    *,
    until: float,
    drain: bool = True,
    run_id: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Round:
    """Sweep the queues once with their verb, and again while they have a backlog.

    All sweeps have one verb. `until` is the instant of the monotonic clock after which no further
    pipeline is sent; what is left then is reported as `backlog`. Queues take turns, so that a deep
    one does not starve the others. With `run_id`, only that server process is swept: if another
    one answers by now, the queues are skipped.
    """
    done = Round()
    idle: list[tuple[Sweep, bytes]] = []
    courses: list[_Course] = []
    for sweep in sweeps:
        if glance := sweep.glance():
            idle.append((sweep, glance))
        else:
            courses.append(_Course.of(sweep, node))
    waiting = deque(courses)
    begun = False
    fault: NodeFault | None = None
    while (idle or waiting) and fault is None:
        # However late a round begins, its first pipeline goes out: there is progress in each.
        if stop() or (begun and time.monotonic() >= until):
            break
        if idle:
            page, idle = idle[:QUEUES_PER_EXCHANGE], idle[QUEUES_PER_EXCHANGE:]
            batch, fault = _exchange_idle(node, page, done, drain, run_id)
            courses += batch
        else:
            batch = _take_batch(waiting)
            fault = _exchange(node, batch, drain, run_id)
        begun = True
        waiting.extend(course for course in batch if course.again)
    unsent = [_Course.of(sweep, node) for sweep, _ in idle]
    courses += unsent
    if fault is None:
        _leave([*waiting, *unsent])
    else:
        # Nothing of these was on its way: they count as no sweep.
        _fail([*waiting, *unsent], fault, sent=False)
    done.results = [course.result for course in courses]
    return done


def _take_batch(waiting: deque[_Course]) -> list[_Course]:
    batch: list[_Course] = []
    room = MOVES_PER_EXCHANGE
    while waiting and len(batch) < QUEUES_PER_EXCHANGE:
        room -= waiting[0].weight
        if batch and room < 0:
            break
        batch.append(waiting.popleft())
    return batch


def _leave(waiting: Iterable[_Course]) -> None:
    for course in waiting:
        course.result.backlog = True
        course.result.skipped = not course.result.passes


def failed(node: Node, sweeps: Sequence[Sweep], fault: NodeFault) -> list[SweepResult]:
    """Return the results of a round that the node's fault kept from being sent."""
    courses = [_Course.of(sweep, node) for sweep in sweeps]
    _fail(courses, fault)
    return [course.result for course in courses]


def _fail(courses: Iterable[_Course], fault: NodeFault, *, sent: bool = True) -> None:
    for course in courses:
        course.result.skipped = not sent or isinstance(fault, NotTried)
        course.result.failure = Failure(fault.code, str(fault), of_node=True)
        # Whatever was known before the fault, the backlog may now be of any size.
        course.sweep.expected = -1


# --- one exchange -------------------------------------------------------------------------------

_TRANSACTION_REPLIES = 4
"""What a stall check in its transaction is answered with: MULTI's OK, QUEUED for the peek and for
the check, and last what EXEC made of both."""


@dataclass(slots=True)
class _Unit:
    """One queue's commands in a pipeline, and how many replies they bring."""

    commands: list[bytes]
    replies: int
    peeks: bool = False
    counts: bool = False


def _unit(course: _Course, peek_allowed: bool) -> _Unit:
    sweep, limit = course.sweep, course.allowance
    if sweep.verb == "promote":
        # What comes next is asked in the same breath where something is expected to move; on an
        # idle queue the head before the sweep says it already.
        moves = course.expected != 0
        return _Unit([sweep.promotion(limit, moves)], 3 if moves else 2)
    # The sizes and the epoch counts are for the gauges: once a round will do.
    counts = course.result.passes == 0
    sizes = len(wire.SETS) if counts else 0
    peeks = peek_allowed and course.peeks
    check = sweep.check(limit, peeks, counts)
    if not peeks:
        return _Unit([check], 1 + sizes, counts=counts)
    commands = [wire.MULTI, wire.PEEK_HEAD, check]
    return _Unit(commands, _TRANSACTION_REPLIES + sizes, peeks=True, counts=counts)


def _exchange(
    node: Node, batch: list[_Course], drain: bool, run_id: str | None
) -> NodeFault | None:
    """Send one pipeline and read it into the results; return the fault that ends the round."""
    try:
        with node.link(run_id) as link:
            units = [_unit(course, node.peek_allowed) for course in batch]
            count = sum(unit.replies for unit in units)
            commands = [part for unit in units for part in unit.commands]
            received = _send(link, node, commands, count)
            position = 1
            for course, unit in zip(batch, units, strict=True):
                _digest(course, unit, position, received, node, drain)
                position += unit.replies
            _drop_if_astray(received, link, node)
            return received.lost
    except NodeFault as fault:
        _fail(batch, fault)
        return fault


def _exchange_idle(
    node: Node, page: list[tuple[Sweep, bytes]], done: Round, drain: bool, run_id: str | None
) -> tuple[list[_Course], NodeFault | None]:
    """Promote the queues that had nothing to do last time; return those where this changed."""
    stirred: list[_Course] = []
    try:
        with node.link(run_id) as link:
            received = _send(link, node, [commands for _, commands in page], 2 * len(page))
            heads, promoted = received.replies[1::2], received.replies[2::2]
            done.finished_at = received.finished_at
            for number, (sweep, _) in enumerate(page):
                # No head, and nothing promoted; where replies are missing there is neither.
                if number < len(promoted) and promoted[number] == 0 and heads[number] == []:
                    done.quiet.append(sweep.queue)
                    continue
                course = _Course.of(sweep, node)
                stirred.append(course)
                _digest(course, _Unit([], 2), 1 + 2 * number, received, node, drain)
            _drop_if_astray(received, link, node)
            return stirred, received.lost
    except NodeFault as fault:
        stirred = [_Course.of(sweep, node) for sweep, _ in page]
        _fail(stirred, fault)
        return stirred, fault


@dataclass(slots=True)
class _Received:
    """What came back for one pipeline."""

    replies: list[wire.Reply]
    lost: Lost | None
    """Why the rest of the replies is missing."""
    now_ms: float | None
    """The server's clock when the pipeline began; None where an ACL denies TIME."""
    finished_at: float
    astray: bool = False
    """A reply says that this connection should not be used again."""


def _send(link: Link, node: Node, commands: list[bytes], count: int) -> _Received:
    lost: Lost | None = None
    sent = time.monotonic()
    try:
        replies = link.exchange([wire.TIME, *commands], 1 + count, sent + node.timeout_seconds)
    except Lost as fault:
        lost, replies = fault, fault.replies
    return _Received(replies, lost, _observe_clock(node, sent, replies), time.time())


def _observe_clock(node: Node, sent: float, replies: list[wire.Reply]) -> float | None:
    """Read TIME; an ACL that denies it costs the lateness and the wakes, not the sweep."""
    try:
        now_ms = wire.read_time_ms(replies[0]) if replies else None
    except (wire.ReplyError, wire.ShapeError):
        return None
    if now_ms is not None:
        node.clock.observe(sent, time.monotonic(), now_ms)
    return now_ms


def _drop_if_astray(received: _Received, link: Link, node: Node) -> None:
    if received.astray:
        link.drop()
        node.drop_idle()


# --- reading replies ----------------------------------------------------------------------------


class _PeekRefused(Exception):
    """The transaction was refused for its peek alone: nothing was swept."""


@dataclass(slots=True)
class _Answer:
    """What one sweep command said."""

    moved: int = 0
    head: wire.Head | None = None
    """The first member of the set that the sweep takes from, read just before it."""
    next_head: wire.Head | None = None
    """The first member just after it; meaningful where `looked_after`."""
    looked_after: bool = False
    error: wire.ReplyError | wire.ShapeError | _PeekRefused | None = None


def _digest(
    course: _Course, unit: _Unit, position: int, received: _Received, node: Node, drain: bool
) -> None:
    """Read one queue's replies into its result, and decide whether it goes on."""
    course.again = False
    part = received.replies[position : position + unit.replies]
    if received.lost is not None and len(part) < unit.replies:
        course.result.unknown += 1
        _fail([course], received.lost)
        return
    if unit.counts and unit.peeks and part[_TRANSACTION_REPLIES - 1] == _NOTHING_LEASED:
        _settle_idle(course, part, received.finished_at)
        return
    answer = _read(course.result, unit, part, received.now_ms)
    if isinstance(answer.error, _PeekRefused):
        node.peek_allowed = course.peeks = False
        course.again = True
    elif answer.error is not None:
        received.astray |= leads_astray(answer.error)
        _refuse(course, answer.error, answer.head, received.now_ms)
    else:
        course.result.finished_at = received.finished_at
        _settle(course, answer, node, received.now_ms, drain)


_NOTHING_LEASED: list[wire.Reply] = [[], [[], []]]
"""What EXEC answers where nothing is leased: an empty peek, and nothing recovered or dead."""


def _settle_idle(course: _Course, replies: list[wire.Reply], finished_at: float) -> None:
    """Count a stall check of a queue without leases: most of them, most of the time."""
    course.sweep.expected = 0
    course.sweep.blocked = False
    result = course.result
    result.passes = 1
    result.finished_at = finished_at
    result.jobs = _read_cards(replies[-len(wire.SETS) :])
    result.leases = (0, 0, 0)


def _read(
    result: SweepResult, unit: _Unit, replies: list[wire.Reply], now_ms: float | None
) -> _Answer:
    answer = _Answer()
    try:
        if result.verb == "promote":
            _read_promotion(answer, result, replies)
        else:
            _read_check(answer, result, unit, replies, now_ms)
    except (wire.ReplyError, wire.ShapeError, _PeekRefused) as error:
        answer.error = error
    return answer


def _read_promotion(answer: _Answer, result: SweepResult, replies: list[wire.Reply]) -> None:
    head, promoted, *after = replies
    # A head that cannot be read (an ACL) costs the lateness and the wakes, not the count.
    if not isinstance(head, wire.ReplyError):
        answer.head = wire.read_head(head)
    if after and not isinstance(after[0], wire.ReplyError):
        answer.next_head, answer.looked_after = wire.read_head(after[0]), True
    answer.moved = wire.read_promoted(promoted)
    result.promoted += answer.moved


def _read_check(
    answer: _Answer,
    result: SweepResult,
    unit: _Unit,
    replies: list[wire.Reply],
    now_ms: float | None,
) -> None:
    """Read a stall check, with or without the transaction and the peek around it."""
    if unit.counts:
        result.jobs = _read_cards(replies[-len(wire.SETS) :])
    in_transaction = replies[:_TRANSACTION_REPLIES]
    seen, check = _read_transaction(in_transaction) if unit.peeks else (None, replies[0])
    if seen is not None:
        answer.head = seen.head()
        if unit.counts:
            result.leases = (seen.current, seen.previous, seen.unstamped)
    recovered, dead = wire.read_recovered(check)
    result.recovered += recovered
    result.dead += dead
    result.expiries += [expiry_of(job_id, seen, now_ms) for job_id in recovered + dead]
    answer.moved = len(recovered) + len(dead)


def _read_transaction(replies: list[wire.Reply]) -> tuple[wire.Peek | None, wire.Reply]:
    """Return what the peek saw, and the check's own reply. Raises _PeekRefused."""
    opened, peek_queued, check_queued, executed = replies
    match executed:
        case [peeked, check]:
            # A peek that failed on its own (a denied INFO, say) leaves the causes open.
            seen = None if isinstance(peeked, wire.ReplyError) else wire.read_peek(peeked)
            return seen, check
        case _ if isinstance(opened, wire.ReplyError):
            # No transaction, so each command ran by itself: what moved is known, why is not.
            return None, check_queued
        case wire.ReplyError(code="EXECABORT") if isinstance(check_queued, wire.ReplyError):
            raise check_queued
        case wire.ReplyError(code="EXECABORT"):
            refused = peek_queued if isinstance(peek_queued, wire.ReplyError) else executed
            # A server may also have no such command: `rename-command EVAL_RO ""` takes it away.
            if "NOPERM" in str(refused) or "unknown command" in str(refused):
                raise _PeekRefused
            raise refused
        case wire.ReplyError():
            raise executed
        case _:
            raise wire.ShapeError("EXEC", executed)


def _read_cards(replies: list[wire.Reply]) -> tuple[int, int, int, int] | None:
    """The sizes are for a gauge: one that cannot be read is left out, the sweep stands."""
    pending, active, schedule, dead = replies
    if type(pending) is int and type(active) is int and type(schedule) is int and type(dead) is int:
        return pending, active, schedule, dead
    return None


def expiry_of(job_id: bytes, seen: wire.Peek | None, now_ms: float | None) -> Expiry:
    """Say what is known of an expiry by what was seen of its lease."""
    cause = wire.cause_of(job_id, seen)
    lease = seen.leases.get(job_id) if seen else None
    if seen is None or lease is None:
        return Expiry(job_id, cause)
    # The peek's TIME is that of the pipeline's start; the check's own clock may be a little later.
    late = _late_ms(lease.deadline_ms, now_ms)
    return Expiry(job_id, cause, lease.epoch, seen.run_id, round(max(late or 0.0, 0.0)))


# --- what follows from an answer ----------------------------------------------------------------


def _settle(
    course: _Course, answer: _Answer, node: Node, now_ms: float | None, drain: bool
) -> None:
    """Count a sweep that was answered, and decide whether its queue is swept again."""
    sweep, result = course.sweep, course.result
    result.passes += 1
    if result.passes == 1:
        sweep.expected = answer.moved
    course.expected = answer.moved
    sweep.blocked = False
    if answer.moved and _is_due(answer.head, now_ms):
        late = _late_ms(answer.head.at_ms, now_ms)
        result.lateness_ms += [] if late is None else [late]
    # What is known of the set after the sweep: its head, unless something moved unseen.
    head = answer.next_head if answer.looked_after else answer.head
    # Without the server's time nobody can tell whether the head is due.
    seen = not answer.moved or (answer.looked_after and now_ms is not None)
    due = _is_due(head, now_ms)
    result.overdue_ms = _overdue_ms(head, now_ms) if seen else 0.0
    if not seen:
        course.again = True
    elif due:
        # The same head as before, and nothing moved: no further sweep would help. Otherwise ghosts
        # were taken out, or somebody else was faster, or there simply is more.
        before = answer.head if answer.looked_after else course.last_head
        course.again = bool(answer.moved) or head != before
    elif head is not None and now_ms is not None and wire.is_time(head.at_ms):
        result.next_due = node.clock.to_monotonic(head.at_ms)
    # A sweep that was narrowed goes on until it has met the row that refuses.
    course.again &= drain or course.probing or course.allowance < sweep.limit
    course.last_head = answer.head
    if course.probing:
        course.probing = False
        course.allowance = sweep.limit


def _refuse(
    course: _Course,
    error: wire.ReplyError | wire.ShapeError,
    head: wire.Head | None,
    now_ms: float | None,
) -> None:
    """Narrow a sweep that a row refuses, down to the row itself; any other error is final."""
    result = course.result
    # A row's key that holds another type stands in the way like a row that is refused.
    by_row = error.code == "EMQSTATE" or (error.code == "WRONGTYPE" and "}:job:" in str(error))
    if not by_row:
        result.failure = Failure(error.code, str(error))
        course.sweep.expected = -1
    elif course.allowance > 1:
        course.allowance //= 2
        course.again = True
    else:
        course.sweep.blocked = True
        result.overdue_ms = _overdue_ms(head, now_ms)
        result.blocked = Blocked(head.job_id if head else None, str(error))


def _is_due(head: wire.Head | None, now_ms: float | None) -> TypeGuard[wire.Head]:
    return head is not None and now_ms is not None and head.at_ms <= now_ms


def _late_ms(at_ms: int, now_ms: float | None) -> float | None:
    """How long ago a score was the time, None where it never was or the time is not known."""
    return now_ms - at_ms if now_ms is not None and wire.is_time(at_ms) else None


def _overdue_ms(head: wire.Head | None, now_ms: float | None) -> float:
    """How long a head has been due, 0 where none is."""
    return (_late_ms(head.at_ms, now_ms) or 0.0) if _is_due(head, now_ms) else 0.0


# --- before a stall check -----------------------------------------------------------------------


def survey(node: Node, sweeps: Sequence[Sweep], run_id: str | None = None) -> list[SweepResult]:
    """Read the sizes and the epochs of the leases without sweeping: what a grace waits for.

    A denied peek leaves the epochs unknown. With `run_id`, only that server process is asked.
    Raises NodeFault.
    """
    results = [SweepResult(s.queue, s.verb, node.name, skipped=True) for s in sweeps]
    each = 1 + len(wire.SETS)
    for start in range(0, len(sweeps), QUEUES_PER_EXCHANGE):
        page = results[start : start + QUEUES_PER_EXCHANGE]
        commands = [
            wire.peek(result.queue, 0, wire.LEASES_COUNTED) + wire.cards(result.queue)
            for result in page
        ]
        with node.link(run_id) as link:
            deadline = time.monotonic() + node.timeout_seconds
            replies = link.exchange(commands, each * len(page), deadline)
        for number, result in enumerate(page):
            peeked, *cards = replies[number * each : (number + 1) * each]
            result.jobs = _read_cards(cards)
            with contextlib.suppress(wire.ReplyError, wire.ShapeError):
                seen = wire.read_peek(peeked)
                result.leases = (seen.current, seen.previous, seen.unstamped)
    return results


def judge_mass_expiry(node: Node, sweeps: Sequence[Sweep]) -> None:
    """Find the queues whose leases expire together, and make their next check lenient.

    Costs two round trips, and only where the guard is on. Raises NodeFault.
    """
    guarded = [(sweep, sweep.mass_expiry) for sweep in sweeps if sweep.mass_expiry]
    if not guarded:
        return
    with node.link() as link:

        def ask(commands: list[bytes]) -> list[wire.Reply]:
            deadline = time.monotonic() + node.timeout_seconds
            return link.exchange(commands, len(commands), deadline)

        try:
            now_ms = int(wire.read_time_ms(ask([wire.TIME])[0]))
        except (wire.ReplyError, wire.ShapeError):
            return
        counts = ask([c for sweep, _ in guarded for c in wire.leases_expired(sweep.queue, now_ms)])
        for (sweep, limits), expired, leases in zip(
            guarded, counts[::2], counts[1::2], strict=True
        ):
            sweep.lenient = (
                type(expired) is int
                and type(leases) is int
                and expired >= limits.at_least
                and expired >= limits.share * leases
            )
