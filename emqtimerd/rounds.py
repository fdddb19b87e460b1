"""What happens when the timer says that it is some queues' turn.

A round leaves out the queues that are backing off or still in the grace after a restart, sweeps the
others, hands the results to the ledger and the chronicle, and tells the timer which queues want to
be swept before their next turn.
"""

import contextlib
import random
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from emqtimerd import wire
from emqtimerd.chronicle import Chronicle
from emqtimerd.config import NodeSettings, QueueSettings, Settings
from emqtimerd.ledger import Ledger
from emqtimerd.node import Node, NodeFault
from emqtimerd.sweeper import (
    VERBS,
    Failure,
    MassExpiry,
    Round,
    Sweep,
    SweepResult,
    Verb,
    failed,
    judge_mass_expiry,
    run_round,
    survey,
)
from emqtimerd.timer import Cadence, Wake
from emqtimerd.topology import Nodes
from emqtimerd.verdict import fix as fix_of

SLICE_SECONDS = 0.25
"""How long one round drains before it gives its thread back: a backlog goes on in a wake at once,
and what came due meanwhile joins it."""

QUEUE_BACKOFF_CAP_SECONDS = 5.0
"""A queue that refuses or errs is tried again after a growing pause, at most this or its interval:
one small command each five seconds costs nobody anything, and who repairs a queue sees it move."""

RETRY_SECONDS = 5.0
"""When a sweep that failed through no fault of its queue is tried again, if its turn does not come
sooner: as often as a dead node is dialled, since a turn may be a day away and a job due by then."""

SURVEY_SPREAD_SECONDS = 1.0
"""After a restart the leases of all queues are looked at within this time, not all at once."""


@dataclass(slots=True)
class _Duty:
    """One queue's sweep with one verb, and when it may be sent again after an error."""

    sweep: Sweep
    interval_seconds: float
    wakes: bool
    grace_seconds: float
    failures: int = 0
    not_before: float = field(default=float("-inf"))


class Rounds:
    """Runs the rounds that the timer asks for, in the timer's threads, on the same nodes always.

    `leave` ends that. What still runs then may wait for a server that will never answer; whenever
    it ends, it counts what it moved and says nothing of how things stand.
    """

    def __init__(
        self, nodes: Nodes, ledger: Ledger, chronicle: Chronicle, stop: Callable[[], bool]
    ) -> None:
        self.nodes = nodes
        self._ledger = ledger
        self._chronicle = chronicle
        self._stop = stop
        self._duties: dict[Verb, dict[str, _Duty]] = {verb: {} for verb in VERBS}
        self._node_settings = NodeSettings()
        # Held while ledger and chronicle are told something, so that `leave` and `configure` come
        # before it or after it. Never around what asks a server.
        self._telling = threading.Lock()
        self._left = False
        self._primaries = nodes.primaries()
        """Of whom is told how they stand: of none any more once these nodes were left."""
        self._run_ids: dict[str, str | None] = {}
        self._unheard: dict[str, frozenset[Verb]] = {}
        self._changes = 0
        """How often the primaries, or whose the queues are, have changed."""
        self._known: tuple[int, object] = (-1, {})
        self._at_rest: list[Node] = []
        nodes.on_change = self._nodes_changed
        ledger.set_nodes([node.name for node in nodes.primaries()])

    def configure(self, settings: Settings, queues: Sequence[str]) -> dict[Cadence, list[str]]:
        """Sweep and tell of these queues from now on; return at which cadences.

        A queue whose settings did not change keeps what its last rounds learned.
        """
        duties: dict[Verb, dict[str, _Duty]] = {verb: {} for verb in VERBS}
        cadences: dict[Cadence, list[str]] = {}
        for queue in queues:
            own = settings.for_queue(queue)
            for verb in VERBS:
                duty = _duty(queue, verb, own, settings)
                known = self._duties[verb].get(queue)
                duties[verb][queue] = known if known and _same(known, duty) else duty
                cadences.setdefault(Cadence(verb, duty.interval_seconds), []).append(queue)
        checks = duties["stalled_check"]
        with self._telling:
            gone = self._duties["stalled_check"].keys() - checks.keys()
            self._duties = duties
            self._node_settings = settings.node
            self._ledger.set_queues(queues)
            self._ledger.set_guarded({q for q, duty in checks.items() if duty.sweep.mass_expiry})
            self._chronicle.forget(gone)
        return cadences

    def leave(self) -> None:
        """Send nothing more: other nodes take the place of these."""
        with self._telling:
            self._left = True
            self._primaries = ()

    def run(self, verb: Verb, queues: Sequence[str]) -> list[Wake]:
        """Sweep these queues now, and say which of them want to be swept before their turn."""
        started = time.monotonic()
        duties = self._duties[verb]
        due = [
            duty
            for queue in queues
            if (duty := duties.get(queue)) is not None and duty.not_before <= started
        ]
        if not due:
            return []
        self.nodes.locate()
        wakes, done = self._everywhere(verb, due)
        if moved := done.take_moved():
            with contextlib.suppress(NodeFault):
                self.nodes.refresh(next(iter(moved.values())))
            more, again = self._everywhere(verb, [duties[queue] for queue in moved])
            wakes += more
            done.add(again)
        self._tell(verb, done, time.monotonic() - started)
        for result in done.results:
            wakes += self._follow(duties[result.queue], result)
        return wakes

    def _tell(self, verb: Verb, done: Round, seconds: float) -> None:
        with self._telling:
            if self._left:
                self._ledger.record_former(verb, done, seconds)
                self._chronicle.tell_former(done.results)
                return
            self._ledger.record_quiet(verb, done.quiet, done.finished_at)
            self._ledger.record(verb, done.results, seconds)
            ours = self._duties[verb]
            self._chronicle.tell([result for result in done.results if result.queue in ours])
            # Their settings went while they were swept.
            gone = [result for result in done.results if result.queue not in ours]
            self._chronicle.tell_former(gone)

    def _everywhere(self, verb: Verb, due: Sequence[_Duty]) -> tuple[list[Wake], Round]:
        """Sweep each queue on its node, one node after the other."""
        wakes: list[Wake] = []
        done = Round()
        shares = self.nodes.by_node(due, lambda duty: duty.sweep.queue)
        for node, share in shares:
            if self._over():
                break
            # A backlog on one node must not use up the time of the others.
            seconds = SLICE_SECONDS / len(shares)
            more: list[Wake] = []
            if self.nodes.tended and (fault := node.fault()):
                # What `tend` has found is counted as if this round had, once.
                news = node.untold() or fault
                part = Round(failed(node, [duty.sweep for duty in share], news))
            elif verb == "promote":
                part = self._sweep(node, share, seconds)
            else:
                more, part = self._check(node, share, seconds)
            wakes += more + self._note_node(node, verb, part)
            done.add(part)
        return wakes, done

    def _sweep(
        self, node: Node, due: Sequence[_Duty], seconds: float, run_id: str | None = None
    ) -> Round:
        until = time.monotonic() + seconds
        sweeps = [duty.sweep for duty in due]
        return run_round(node, sweeps, until=until, run_id=run_id, stop=self._over)

    def _over(self) -> bool:
        """Tell whether nothing more is to be sent."""
        return self._left or self._stop()

    def _check(self, node: Node, due: Sequence[_Duty], seconds: float) -> tuple[list[Wake], Round]:
        """Check for expired leases where the grace after a restart is over; elsewhere only look."""
        try:
            # Which server process answers is known first, and only that one is then checked: a
            # restart between these two lines must not get past its grace.
            with node.link() as link:
                run_id = link.run_id
            now = time.monotonic()
            ends = {grace: node.grace_ends(grace) for grace in {d.grace_seconds for d in due}}
            ready = [duty for duty in due if ends[duty.grace_seconds] <= now]
            waiting = [duty for duty in due if ends[duty.grace_seconds] > now]
            looked = survey(node, [duty.sweep for duty in waiting], run_id)
            judge_mass_expiry(node, [duty.sweep for duty in ready])
        except NodeFault as fault:
            return [], Round(failed(node, [duty.sweep for duty in due], fault))
        with self._telling:
            ours = {} if self._left else self._duties["stalled_check"]
            for duty in ready:
                # Not where its settings were changed while it was asked for.
                if duty.sweep.mass_expiry and ours.get(duty.sweep.queue) is duty:
                    self._ledger.guard(duty.sweep.queue, duty.sweep.lenient)
        wakes = [
            # Not all of them at once: the server has its workers back just now.
            Wake("stalled_check", queue, ends[duty.grace_seconds] + _spread(queue))
            for duty in waiting
            for queue in (duty.sweep.queue,)
        ]
        done = self._sweep(node, ready, seconds, run_id)
        done.results += looked
        for result in done.results:
            result.run_id = run_id
        return wakes, done

    def _follow(self, duty: _Duty, result: SweepResult) -> list[Wake]:
        """Set the pause after an error, and the wake for a backlog or for the next due time."""
        sweep, now = duty.sweep, time.monotonic()
        if result.failure and (result.failure.of_node or result.failure.code in wire.PASSING):
            return [Wake(sweep.verb, sweep.queue, now + RETRY_SECONDS)]
        if result.blocked or result.failure:
            duty.failures += 1
            first = min(duty.interval_seconds, RETRY_SECONDS)
            cap = max(QUEUE_BACKOFF_CAP_SECONDS, duty.interval_seconds)
            # The cap is reached long before the exponent is: a row may block its queue for days.
            pause = min(first * 2.0 ** min(duty.failures, 32), cap)
            # Jitter in the upper half: queues that failed together are not tried in step.
            duty.not_before = now + pause * random.uniform(0.5, 1)
            # A blocked queue waits for somebody; an error may end long before a turn that is far.
            return [] if result.blocked else [Wake(sweep.verb, sweep.queue, duty.not_before)]
        if result.passes:
            duty.failures = 0
            duty.not_before = float("-inf")
        if result.backlog:
            return [Wake(sweep.verb, sweep.queue, now)]
        if duty.wakes and result.next_due is not None:
            return [Wake(sweep.verb, sweep.queue, result.next_due)]
        return []

    def tend(self) -> None:
        """Look after the nodes from time to time; those that have none of our queues are told of
        here, the others where they are swept."""
        self.nodes.tend()
        if not self.nodes.tended and self._duties["promote"]:
            return
        known = (self._changes, self._duties)
        if known != self._known:
            busy = self._shares()
            self._known = known
            self._at_rest = [node for node in self.nodes.primaries() if node not in busy]
        for node in self._at_rest:
            if node.fault():
                self._note_down(node)
            elif node.identity:
                self._note_up(node)

    def _shares(self) -> dict[Node, list[str]]:
        """All queues, by their node."""
        return dict(self.nodes.by_node(list(self._duties["stalled_check"]), lambda queue: queue))

    def _nodes_changed(self, heirs: Mapping[str, str]) -> None:
        """Take over who the primaries are now; one that took over from another goes on as it."""
        self._changes += 1
        primaries = self.nodes.primaries()
        names = [node.name for node in primaries]
        with self._telling:
            if self._left:
                return
            self._primaries = primaries
            known = self._run_ids
            self._run_ids = {name: known.get(heirs.get(name, name)) for name in names}
            self._ledger.set_nodes(names, heirs)
            self._chronicle.nodes_changed(names, heirs)

    def _note_node(self, node: Node, verb: Verb, done: Round) -> list[Wake]:
        """Tell ledger and chronicle how a node stands; after a restart look at all its leases."""
        results = done.results
        if any(r.failure and r.failure.of_node for r in results):
            self._note_heard(node, verb, not any(r.unknown for r in results))
            self._note_down(node)
            return []
        # An error of a queue is an answer too: an ACL may deny everything on a node that is well.
        answered = done.quiet or any(r.passes or r.jobs or r.failure or r.blocked for r in results)
        if not answered or not self._note_heard(node, verb, heard=True):
            return []
        return self._note_up(node)

    def _note_heard(self, node: Node, verb: Verb, heard: bool) -> bool:
        """Keep in mind which verbs a node left without an answer; return whether there are none.

        One that answers the one verb and not the other would be up and down with each round.
        """
        with self._telling:
            verbs = self._unheard.get(node.name, frozenset())
            verbs = verbs - {verb} if heard else verbs | {verb}
            self._unheard[node.name] = verbs
            return not verbs

    def _note_down(self, node: Node) -> None:
        with self._telling:
            # Read here, as below: a connection that broke late, when the node had been reached or
            # dialled anew, is no news of it.
            if node in self._primaries and (fault := node.fault()):
                failure = Failure(fault.code, str(fault), of_node=True)
                fix = fix_of(self._node_settings, fault)
                self._ledger.node_down(node.name, failure.message)
                self._chronicle.node_down(node.name, failure, fix)

    def _note_up(self, node: Node) -> list[Wake]:
        with self._telling:
            # Read here: of two threads, the one that tells last also knows the latest.
            identity = node.identity
            # An answer from before a fault is no news of the node, either.
            if node not in self._primaries or identity is None or not node.is_well():
                return []
            self._ledger.node_seen(node.name, identity)
            self._chronicle.node_up(node.name, identity)
            seen = self._run_ids.get(node.name)
            # An ACL may hide the run_id; what is not known is no restart.
            if identity.run_id in ("", seen):
                return []
            self._run_ids[node.name] = identity.run_id
            queues = self._shares().get(node, [])
            self._chronicle.restarted(node.name, seen, identity, queues)
        now = time.monotonic()
        return [Wake("stalled_check", queue, now + _spread(queue)) for queue in queues]


def _spread(queue: str) -> float:
    return zlib.crc32(queue.encode()) / 2**32 * SURVEY_SPREAD_SECONDS


def _duty(queue: str, verb: Verb, own: QueueSettings, settings: Settings) -> _Duty:
    base = settings.node.base
    if verb == "promote":
        promote = own.promote
        sweep = Sweep(queue, verb, promote.limit, base_form=base)
        return _Duty(sweep, promote.interval_seconds, promote.due_wake, 0.0)
    check = own.stalled_check
    guard = check.mass_expiry
    limits = MassExpiry(guard.share, guard.at_least) if guard else None
    sweep = Sweep(queue, verb, check.limit, check.max_stalled, base, limits)
    return _Duty(sweep, check.interval_seconds, check.at_expiry, check.restart_grace_seconds)


def _same(one: _Duty, other: _Duty) -> bool:
    """Whether two duties have the same settings, whatever each has learned."""

    def settings(duty: _Duty) -> tuple[object, ...]:
        s = duty.sweep
        form = (s.limit, s.max_stalled, s.base_form, s.mass_expiry)
        return (*form, duty.interval_seconds, duty.wakes, duty.grace_seconds)

    return settings(one) == settings(other)
