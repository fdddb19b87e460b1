"""What has happened, as plain numbers: fed by rounds, read by the metrics and the pages.

The ledger knows nothing of Prometheus, HTTP or the server. One lock guards it, held for one
round's results or for a small part of a reading, so that neither keeps the other waiting.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from emqtimerd import wire
from emqtimerd.node import Identity
from emqtimerd.sweeper import VERBS, Blocked, Failure, Round, SweepResult, Verb

READ_AT_ONCE = 200
"""How many queues are read in one hold of the lock: some 0.5 ms, a tenth of the interpreter's own
switching interval."""

ROUNDS_MISSED = 3
"""How many intervals may pass without a good round before the daemon is not ready: one round may
be late and one may fail without waking anybody."""

ROUND_PATIENCE_SECONDS = 10.0
"""The least patience with a verb, however short its interval: two node timeouts of 5 s, so that
one lost reply alone does not flip readiness."""

HEARTBEAT_PATIENCE_SECONDS = 15.0
"""How old the scheduler's last beat may be. It beats about once a second: fifteen missing ones
are a stop and not a hiccup."""

# From 0.5 ms (a wake that hit its instant) to an hour (the daemon was down meanwhile).
LATENESS_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0, 3600.0,
)  # fmt: skip

# From one empty exchange to a drain that used its whole budget.
DURATION_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

_NO_ERRORS: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class VerbFacts:
    """What became of one verb's sweeps of one queue. Every value is immutable, for cheap copies."""

    ok: int = 0
    error: int = 0
    unknown: int = 0
    errors: Mapping[str, int] = field(default_factory=lambda: _NO_ERRORS)
    """How often each error code was met, unknown outcomes included."""
    last_sweep: float = 0.0
    """When a sweep last succeeded, as a Unix time in seconds; 0 until the first."""
    due: float | None = None
    """When the head comes, or came, due, by the monotonic clock; None if the set was empty."""
    lateness_seconds: float | None = None
    """How late the oldest job was in the last round that moved something."""
    blocked: Blocked | None = None
    failure: Failure | None = None
    """Why the last sweep failed; None once one succeeds."""

    def forget_state(self) -> None:
        """Forget how the set stands; what was counted, and when, stays."""
        self.due = self.blocked = self.failure = None


@dataclass(slots=True)
class QueueFacts:
    """What became of one queue since it was configured."""

    name: str
    promote: VerbFacts = field(default_factory=VerbFacts)
    stalled_check: VerbFacts = field(default_factory=VerbFacts)
    promoted: int = 0
    recovered: int = 0
    dead_lettered: int = 0
    stall: int = 0
    restart: int = 0
    unstamped: int = 0
    unattributed: int = 0
    jobs: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Sizes of pending, active, schedule and dead at the last stall check."""
    leases: tuple[int, int, int] = (0, 0, 0)
    """How many leases carried the current epoch, an earlier one, none, at the last stall check."""
    guarded: bool | None = None
    """Whether the last stall check spared the queue as a mass expiry; None: not asked to look."""
    node: str = ""

    def overdue_seconds(self, now: float) -> float:
        """How long the head of the schedule has been due, as far as the last sweep could see."""
        due = self.promote.due
        return now - due if due is not None and due < now else 0.0

    @property
    def moved(self) -> int:
        """How many jobs this daemon moved in the queue."""
        return self.promoted + self.recovered + self.dead_lettered

    def forget_state(self) -> None:
        """Forget how the queue stands: the node that said so has gone. What was counted stays."""
        self.promote.forget_state()
        self.stalled_check.forget_state()
        self.jobs, self.leases, self.guarded, self.node = (0, 0, 0, 0), (0, 0, 0), None, ""

    def of(self, verb: Verb) -> VerbFacts:
        """What became of this verb's sweeps."""
        return self.promote if verb == "promote" else self.stalled_check

    def copy(self) -> "QueueFacts":
        """A copy that later rounds do not touch."""
        twin = QueueFacts(*_QUEUE_FIELDS(self))
        twin.promote = VerbFacts(*_VERB_FIELDS(self.promote))
        twin.stalled_check = VerbFacts(*_VERB_FIELDS(self.stalled_check))
        return twin


_QUEUE_FIELDS = attrgetter(*(item.name for item in fields(QueueFacts)))
_VERB_FIELDS = attrgetter(*(item.name for item in fields(VerbFacts)))


@dataclass(slots=True)
class NodeFacts:
    """What is known of one node."""

    name: str
    up: bool = False
    since: float | None = None
    """When it came up or went down, by the monotonic clock; None until it was first reached."""
    reason: str = ""
    """Why it is down, as far as known."""
    identity: Identity | None = None
    """What the latest fence read."""
    run_id: str = ""
    """The server process that was known last; an ACL may hide that of the latest fence."""
    restarts: int = 0

    def copy(self) -> "NodeFacts":
        """A copy that later events do not touch."""
        return NodeFacts(*(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram as it was read: upper bounds in seconds, counts up to each, and the rest."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    """One for each bound, and the total at the end."""
    sum_seconds: float


class _Histogram:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def read(self) -> Distribution:
        total = 0
        cumulative = [total := total + count for count in self._counts]
        return Distribution(self._bounds, tuple(cumulative), self._sum)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the process turns, and whether it does its work; with the reasons when not."""

    alive: bool
    ready: bool
    reasons: tuple[str, ...]
    """Why it is not ready, or not alive."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything but the queues themselves."""

    now: float
    """When this was read, by the monotonic clock."""
    wall: float
    """The same instant as a Unix time in seconds."""
    started: float
    """When the daemon started, as a Unix time in seconds."""
    health: Health
    nodes: tuple[NodeFacts, ...]
    queues: int
    rounds: Mapping[Verb, Distribution]
    starts: Mapping[Verb, Distribution]
    """How long after their turn rounds began."""
    skipped: Mapping[Verb, int]
    """How many rounds were left out, since the one before was still going."""
    lateness: Mapping[Verb, Distribution]
    reload_problem: str | None
    """Why the last reload changed nothing; None if it went well, or there was none."""
    shard: tuple[int, int]
    """This replica's index and how many share the queues."""


class Ledger:
    """The daemon's memory. Every method may be called from any thread."""

    def __init__(
        self,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._lock = threading.Lock()
        self._queues: dict[str, QueueFacts] = {}
        self._nodes: dict[str, NodeFacts] = {}
        self._rounds = {verb: _Histogram(DURATION_BOUNDS) for verb in VERBS}
        self._lateness = {verb: _Histogram(LATENESS_BOUNDS) for verb in VERBS}
        self._starts = {verb: _Histogram(DURATION_BOUNDS) for verb in VERBS}
        self._skipped = dict.fromkeys(VERBS, 0)
        self._moved = 0
        self._started = wall()
        self._last_beat = monotonic()
        self._intervals: dict[Verb, float] = {}
        self._good_rounds: dict[Verb, float] = {}
        self._expected_since = monotonic()
        self._reload_problem: str | None = None
        self._last_fault: tuple[float, str] | None = None
        self._shard = (0, 1)
        self._stopping = False

    # --- what is told ---------------------------------------------------------------------------

    def set_queues(self, names: Iterable[str]) -> None:
        """Keep these queues and no other: new ones start at zero, the others are forgotten."""
        with self._lock:
            old = self._queues
            self._queues = {name: old.get(name) or QueueFacts(name) for name in names}
            if not old:
                # Without a queue there was nothing to do: patience with the rounds begins now.
                self._expected_since = self._monotonic()

    def set_nodes(self, names: Iterable[str], heirs: Mapping[str, str] | None = None) -> None:
        """Keep these nodes and no other: new ones are down until they are seen.

        `heirs` says which of them took over from which that are gone, and go on counting. What a
        node without an heir said of its queues goes with it.
        """
        with self._lock:
            old = self._nodes
            self._nodes = {name: old.get(name) or NodeFacts(name) for name in names}
            for name, before in (heirs or {}).items():
                if (facts := old.get(before)) is not None:
                    self._nodes[name] = replace(facts, name=name)
            gone = old.keys() - self._nodes.keys() - set((heirs or {}).values())
            for queue in self._queues.values() if gone else ():
                if queue.node in gone:
                    queue.forget_state()
            if gone == old.keys():
                # Nobody is left of those that the work was done on.
                self._good_rounds = {}
                self._expected_since = self._monotonic()

    def record_quiet(self, verb: Verb, names: Sequence[str], finished_at: float) -> None:
        """Take in the queues that a round swept and found empty: most of them, most of the time."""
        with self._lock:
            queues = self._queues
            for name in names:
                queue = queues.get(name)
                if queue is not None:
                    facts = queue.of(verb)
                    facts.ok += 1
                    facts.last_sweep = finished_at
                    facts.due = None
            if names:
                self._good_rounds[verb] = self._monotonic()

    def record(self, verb: Verb, results: Sequence[SweepResult], duration_seconds: float) -> None:
        """Take in what one round did. Results of queues that were forgotten meanwhile are too."""
        now = self._monotonic()
        worked = False
        with self._lock:
            queues = self._queues
            for result in results:
                queue = queues.get(result.queue)
                if queue is None:
                    continue
                facts = queue.of(verb)
                if result.passes == 1 and not (
                    result.failure
                    or result.blocked
                    or result.lateness_ms
                    or result.promoted
                    or result.expiries
                    or result.unknown
                    or result.backlog
                ):
                    # The common case, and most of the daemon's results: swept, nothing to do.
                    facts.ok += 1
                    facts.last_sweep = result.finished_at
                    facts.due = result.next_due
                    facts.blocked = facts.failure = None
                    worked = True
                else:
                    worked |= self._take(queue, facts, result, now)
                if result.jobs is not None:
                    queue.jobs = result.jobs
                if result.leases is not None:
                    queue.leases = result.leases
                queue.node = result.node
            self._rounds[verb].observe(duration_seconds)
            if worked:
                self._good_rounds[verb] = now

    def record_former(self, verb: Verb, done: Round, duration_seconds: float) -> None:
        """Take in what a round did on nodes whose place others have taken meanwhile.

        It counts like any other, and says nothing of how things stand now.
        """
        with self._lock:
            for name in done.quiet:
                if (queue := self._queues.get(name)) is not None:
                    queue.of(verb).ok += 1
            for result in done.results:
                if (queue := self._queues.get(result.queue)) is not None:
                    self._count(queue, queue.of(verb), result)
            self._rounds[verb].observe(duration_seconds)

    def _count(self, queue: QueueFacts, facts: VerbFacts, result: SweepResult) -> None:
        """Count what moved and what went wrong."""
        self._moved += result.moved
        queue.promoted += result.promoted
        queue.recovered += len(result.recovered)
        queue.dead_lettered += len(result.dead)
        for expiry in result.expiries:
            setattr(queue, expiry.cause, getattr(queue, expiry.cause) + 1)
        for lateness_ms in result.lateness_ms:
            self._lateness[result.verb].observe(lateness_ms / 1000)
        facts.ok += result.passes
        facts.unknown += result.unknown
        if fault := _fault(result):
            # Once a round, however many commands it took.
            code, _ = fault
            facts.error += not result.unknown
            facts.errors = {**facts.errors, code: facts.errors.get(code, 0) + 1}

    def _take(self, queue: QueueFacts, facts: VerbFacts, result: SweepResult, now: float) -> bool:
        """Take in a result that says something; return whether the server did as it should."""
        self._count(queue, facts, result)
        if result.lateness_ms:
            facts.lateness_seconds = max(result.lateness_ms) / 1000
        if result.passes:
            facts.last_sweep = result.finished_at
            facts.blocked = facts.failure = None
        facts.due = _due(facts.due, result, now)
        if result.blocked:
            facts.blocked = result.blocked
        elif result.failure and not result.skipped:
            facts.failure = result.failure
        if fault := _fault(result):
            self._last_fault = self._wall(), f"{result.verb} of {result.queue}: {fault[1]}"
        return bool(result.passes or result.blocked)

    def set_guarded(self, names: Collection[str]) -> None:
        """Keep the guard's gauge for these queues, where somebody looks for mass expiries."""
        with self._lock:
            for queue in self._queues.values():
                if queue.guarded is not None and queue.name not in names:
                    queue.guarded = None

    def guard(self, queue: str, raised: bool) -> None:
        """Note whether a mass expiry of the queue is spared."""
        with self._lock:
            facts = self._queues.get(queue)
            if facts is not None:
                facts.guarded = raised

    def node_seen(self, name: str, identity: Identity) -> None:
        """Note that the fence of a node passed; another `run_id` than before is a restart."""
        with self._lock:
            node = self._nodes.get(name)
            if node is None:
                return
            if not node.up:
                node.up, node.since, node.reason = True, self._monotonic(), ""
            node.identity = identity
            # An ACL may hide the run_id; what is not known is no restart.
            if identity.run_id:
                node.restarts += bool(node.run_id) and identity.run_id != node.run_id
                node.run_id = identity.run_id

    def node_down(self, name: str, reason: str = "") -> None:
        """Note that a node cannot be worked on, and why."""
        with self._lock:
            node = self._nodes.get(name)
            if node is None:
                return
            if node.up:
                node.up, node.since = False, self._monotonic()
            node.reason = reason

    def round_late(self, verb: Verb, seconds: float) -> None:
        """Note how long after its turn a round began."""
        with self._lock:
            self._starts[verb].observe(seconds)

    def round_skipped(self, verb: Verb) -> None:
        """Note that a round was left out, since the one before it was still going."""
        with self._lock:
            self._skipped[verb] += 1

    def expect(self, intervals: Mapping[Verb, float]) -> None:
        """Say how often, in seconds, each verb's most frequent round comes; readiness follows."""
        with self._lock:
            if self._intervals != dict(intervals):
                # What stays as it was is not given more time by a reload.
                self._intervals = dict(intervals)
                self._expected_since = self._monotonic()

    def reloaded(self, problem: str | None = None) -> None:
        """Note how a reload went: None is well."""
        self._reload_problem = problem

    def set_shard(self, index: int, count: int) -> None:
        """Note which part of the queues this replica has."""
        self._shard = (index, count)

    def beat(self) -> None:
        """Note that the scheduler turns."""
        self._last_beat = self._monotonic()

    def stopping(self) -> None:
        """Note that the daemon ends: it is alive, and no longer ready."""
        self._stopping = True

    # --- what is asked --------------------------------------------------------------------------

    def columns(self, readers: Sequence[Callable[[QueueFacts], Any]]) -> list[list[Any]]:
        """What each reader makes of each queue: a column a reader, all in one order of queues.

        The values of one queue are of one instant; a round may end between two queues. Columns,
        because ten thousand copies would be garbage enough for a full collection, which stops
        every thread for some 80 ms.
        """
        with self._lock:
            present = list(self._queues.values())
        columns: list[list[Any]] = [[] for _ in readers]
        for start in range(0, len(present), READ_AT_ONCE):
            part = present[start : start + READ_AT_ONCE]
            with self._lock:
                for column, read in zip(columns, readers, strict=True):
                    column.extend(map(read, part))
        return columns

    def queues(self, names: Iterable[str] | None = None) -> list[QueueFacts]:
        """Copies of these queues, or of all, each of one instant; those that left are left out."""
        with self._lock:
            wanted = list(self._queues if names is None else names)
        copies: list[QueueFacts] = []
        for start in range(0, len(wanted), READ_AT_ONCE):
            with self._lock:
                found = map(self._queues.get, wanted[start : start + READ_AT_ONCE])
                copies += [queue.copy() for queue in found if queue is not None]
        return copies

    def overview(self) -> Overview:
        """Everything but the queues themselves."""
        with self._lock:
            return Overview(
                now=self._monotonic(),
                wall=self._wall(),
                started=self._started,
                health=self._health(),
                nodes=tuple(node.copy() for node in self._nodes.values()),
                queues=len(self._queues),
                rounds={verb: histogram.read() for verb, histogram in self._rounds.items()},
                starts={verb: histogram.read() for verb, histogram in self._starts.items()},
                skipped=dict(self._skipped),
                lateness={verb: histogram.read() for verb, histogram in self._lateness.items()},
                reload_problem=self._reload_problem,
                shard=self._shard,
            )

    def beat_age(self) -> float:
        """How long ago the scheduler last turned, in seconds."""
        return self._monotonic() - self._last_beat

    def status(self) -> str:
        """How things stand, in one line: for a service manager."""
        health = self.health()
        parts = ["ready" if health.ready else "; ".join(health.reasons)]
        if self._reload_problem is not None:
            parts.append(f"reload refused: {self._reload_problem.partition(chr(10))[0]}")
        parts.append(f"{len(self._queues)} queues, {self._moved} jobs moved")
        if self._last_fault is not None:
            when, what = self._last_fault
            # Its time of day and not its age, so that the line stays while nothing happens.
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(when))
            parts.append(f"last fault {stamp}: {what}")
        return "; ".join(parts)

    def health(self) -> Health:
        """Whether the process turns, and whether it does its work."""
        with self._lock:
            return self._health()

    def _health(self) -> Health:
        now = self._monotonic()
        stale = now - self._last_beat
        alive = stale <= HEARTBEAT_PATIENCE_SECONDS
        reasons = [] if alive else [f"the scheduler has not run for {stale:.0f} s"]
        if self._stopping:
            reasons.append("shutting down")
        if not self._nodes:
            reasons.append("no node is known yet")
        reasons += [_down(node, now) for node in self._nodes.values() if not node.up]
        if not reasons and self._queues:
            for verb, interval in self._intervals.items():
                reasons += self._late(verb, interval, now)
        return Health(alive, not reasons, tuple(reasons))

    def _late(self, verb: Verb, interval: float, now: float) -> list[str]:
        """Why this verb's rounds are not as they should be; nothing if they are."""
        if not self._good_rounds:
            why = self._why(verb)
            return [f"no queue has been swept yet ({verb} is due every {interval:g} s){why}"]
        last = self._good_rounds.get(verb)
        patience = max(ROUNDS_MISSED * interval, ROUND_PATIENCE_SECONDS)
        # A verb is not late for what it could not do before its node came (back) up.
        up = [node.since for node in self._nodes.values() if node.since is not None]
        if now - max([last or 0.0, self._expected_since, *up]) <= patience:
            return []
        ago = "never succeeded" if last is None else f"last succeeded {now - last:.0f} s ago"
        return [f"{verb} {ago}, and is due every {interval:g} s{self._why(verb)}"]

    def _why(self, verb: Verb) -> str:
        """The first known failure of a verb, in words."""
        for queue in self._queues.values():
            failure = queue.of(verb).failure
            if failure is not None:
                return f" ({queue.name}: {failure.message})"
        return ""


def _down(node: NodeFacts, now: float) -> str:
    state = "not reached yet" if node.since is None else f"down for {now - node.since:.0f} s"
    return f"node {node.name} is {state}" + (f": {node.reason}" if node.reason else "")


def _due(known: float | None, result: SweepResult, now: float) -> float | None:
    """When the head comes, or came, due after this result; what is not told stays as known."""
    if result.next_due is not None:
        return result.next_due
    if result.blocked or (result.passes and result.backlog):
        # The head is due and was left. Mostly its age is known; else the last pass tells it up to
        # the few ids between that pass's head and this one, or it is as old as we first saw it.
        if result.overdue_ms:
            return now - result.overdue_ms / 1000
        if result.lateness_ms:
            return now - result.lateness_ms[-1] / 1000
        return known if known is not None and known < now else now
    return None if result.passes else known


def _fault(result: SweepResult) -> tuple[str, str] | None:
    """What a round met: the code that it is counted under, and the words; what was not tried
    counts nowhere."""
    if result.blocked:
        job_id = wire.printable(result.blocked.job_id or b"?")
        # It is a row that is refused, or one that is none: the reply's first word says which.
        code = wire.error_code(result.blocked.reason.partition(" ")[0])
        return code, f"blocked by {job_id}: {result.blocked.reason}"
    if result.failure and not result.skipped:
        return wire.error_code(result.failure.code), result.failure.message
    return None
