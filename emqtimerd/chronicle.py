"""What happened, told in log lines: one for each change of state, none for each tick.

A node goes down and comes back; a queue fails, is blocked, and is well again; a lease crossed a
restart. What stays as it was is not told again.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from emqtimerd import wire
from emqtimerd.log import Log
from emqtimerd.node import Identity
from emqtimerd.sweeper import Failure, SweepResult, Verb

IDS_SHOWN = 10
"""How many dead-lettered ids one line names: enough to find the culprit, and a bounded line."""


@dataclass(slots=True)
class _RestartReport:
    """How the leases of an earlier server process come to their end."""

    run_id: str
    unseen: set[str]
    """Queues whose leases have not been looked at since the restart; the report waits for them."""
    unread: set[str] = field(default_factory=set)
    """Queues whose leases could not be read; it waits no longer for them."""
    left: dict[str, int] = field(default_factory=dict)
    """The leases that are still there, by queue."""
    found: int = 0
    recovered: int = 0
    abandoned: int = 0
    """How many were there when their queue was no longer ours to look at."""
    begun: bool = False

    def fields(self) -> dict[str, int]:
        """The numbers, which add up to the leases that were found."""
        left = sum(self.left.values())
        # More may have been recovered than was counted: counts stop at a thousand a queue.
        found = max(self.found, self.recovered + self.abandoned + left)
        numbers = {
            "leases": found,
            "recovered": self.recovered,
            "settled_elsewhere": found - self.recovered - self.abandoned - left,
        }
        more = {"not_followed": self.abandoned, "left": left}
        return numbers | {name: number for name, number in more.items() if number}


class Chronicle:
    """Turns results into log lines; remembers how each node and queue was. Safe for threads."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._down: dict[str, str] = {}
        self._up: set[str] = set()
        self._troubles: dict[tuple[Verb, str], str] = {}
        self._lenient: set[str] = set()
        self._peekless: set[str] = set()
        self._restarts: dict[str, _RestartReport] = {}

    def tell_to(self, log: Log) -> None:
        """Write to another log from now on."""
        self._log = log

    # --- nodes ----------------------------------------------------------------------------------

    def node_down(self, node: str, failure: Failure, fix: str = "") -> None:
        """Tell once that a node cannot be worked on, and again when the reason changes."""
        with self._lock:
            if self._down.get(node) == failure.code:
                return
            self._down[node] = failure.code
            self._up.discard(node)
            self._log.error(
                "node down",
                node=node,
                code=failure.code,
                reason=failure.message,
                **({"fix": fix} if fix else {}),
            )

    def node_up(self, node: str, identity: Identity) -> None:
        """Tell once that a node can be worked on."""
        with self._lock:
            if node in self._up:
                return
            more: dict[str, object] = {}
            if back := self._down.pop(node, None):
                more["after"] = back
            if missing := [token for token in wire.TOKENS if token not in identity.tokens]:
                more["missing_tokens"] = missing
            self._up.add(node)
            self._log.info(
                "node up",
                node=node,
                run_id=identity.run_id,
                version=identity.version,
                **more,
            )

    def restarted(
        self, node: str, before: str | None, identity: Identity, queues: Sequence[str]
    ) -> None:
        """Begin the restart report of a new server process."""
        with self._lock:
            if before is not None:
                self._log.warning("node restarted", node=node, run_id=identity.run_id, was=before)
            self._break_off(node, "the node was restarted again")
            self._restarts[node] = _RestartReport(identity.run_id, set(queues))

    def nodes_changed(self, names: Sequence[str], heirs: Mapping[str, str]) -> None:
        """Tell who the primaries of a cluster are now, and forget those that were."""
        with self._lock:
            self._log.info("primaries changed", primaries=list(names), took_over=dict(heirs))
            self._down = {name: code for name, code in self._down.items() if name in names}
            self._up &= set(names)
            self._peekless &= set(names)
            for name in self._restarts.keys() - set(names):
                self._break_off(name, "the node is no primary any more")

    def begin_anew(self) -> None:
        """Forget how everything was: other nodes have taken the place of these, or these same ones
        are spoken to in another way."""
        with self._lock:
            for name in list(self._restarts):
                self._break_off(name, "the settings of the node were changed")
            for memory in (self._down, self._up, self._troubles, self._lenient, self._peekless):
                memory.clear()

    # --- queues ---------------------------------------------------------------------------------

    def tell(self, results: Sequence[SweepResult]) -> None:
        """Tell what changed with these results."""
        with self._lock:
            for result in results:
                trouble = self._troubles.get((result.verb, result.queue))
                if result.failure or result.blocked or trouble is not None:
                    self._tell_trouble(result, trouble)
                if result.expiries:
                    self._tell_expiries(result)
                if result.lenient or result.queue in self._lenient:
                    self._tell_leniency(result)
                report = self._restarts.get(result.node)
                if report and result.verb == "stalled_check":
                    self._follow_restart(result, report)
                if result.moved:
                    self._tell_moved(result)

    def tell_former(self, results: Sequence[SweepResult]) -> None:
        """Tell what moved by rounds that were overtaken: their nodes were replaced meanwhile, or
        their queues are no longer ours. How those stand is no news."""
        with self._lock:
            for result in results:
                if result.expiries:
                    self._tell_expiries(result)
                if result.moved:
                    self._tell_moved(result)

    def forget(self, queues: Collection[str]) -> None:
        """Forget queues that are no longer swept."""
        with self._lock:
            self._troubles = {k: v for k, v in self._troubles.items() if k[1] not in queues}
            self._lenient.difference_update(queues)
            for node, report in list(self._restarts.items()):
                report.unseen.difference_update(queues)
                report.unread.difference_update(queues)
                for queue in queues:
                    # How these end, nobody here will see.
                    report.abandoned += report.left.pop(queue, 0)
                self._tell_report(node, report)

    def _tell_trouble(self, result: SweepResult, before: str | None) -> None:
        queue, verb = result.queue, result.verb
        if result.failure and result.failure.of_node:
            return  # told once, for the node
        where = {"queue": queue, "verb": verb, "node": result.node}
        if result.failure:
            code = result.failure.code
            # A slot that is on its way answers now ASK, now TRYAGAIN.
            if before != code and not {before, code} <= wire.PASSING:
                self._troubles[verb, queue] = code
                self._log.error("sweep failed", **where, reason=result.failure.message)
        elif result.blocked:
            job_id = wire.printable(result.blocked.job_id or b"?")
            if before != (trouble := f"blocked by {job_id}"):
                self._troubles[verb, queue] = trouble
                reason = result.blocked.reason
                self._log.error("sweep blocked", **where, job_id=job_id, reason=reason)
        elif result.passes and before is not None:
            del self._troubles[verb, queue]
            self._log.info("sweep works again", **where, after=before)

    def _tell_expiries(self, result: SweepResult) -> None:
        for expiry in result.expiries:
            if expiry.cause == "restart":
                self._log.warning(
                    "lease crossed a server restart",
                    queue=result.queue,
                    node=result.node,
                    job_id=wire.printable(expiry.job_id),
                    lease_epoch=wire.printable(expiry.epoch or b""),
                    run_id=wire.printable(expiry.run_id or b""),
                    past_deadline_ms=expiry.past_deadline_ms,
                )
        if any(expiry.cause == "unattributed" for expiry in result.expiries):
            self._tell_no_peek(result)
        if result.dead:
            self._log.warning(
                "jobs dead-lettered, their stalls reached max_stalled",
                queue=result.queue,
                node=result.node,
                count=len(result.dead),
                job_ids=[wire.printable(job_id) for job_id in result.dead[:IDS_SHOWN]],
            )

    def _tell_moved(self, result: SweepResult) -> None:
        self._log.debug(
            "swept",
            queue=result.queue,
            verb=result.verb,
            promoted=result.promoted,
            recovered=len(result.recovered),
            dead=len(result.dead),
            passes=result.passes,
        )

    def _tell_no_peek(self, result: SweepResult) -> None:
        if result.node not in self._peekless:
            self._peekless.add(result.node)
            self._log.warning(
                "expiries cannot be attributed: the leases could not be read before the check "
                "(does the ACL allow EVAL_RO, and INFO and HGET inside it?)",
                node=result.node,
                queue=result.queue,
            )

    def _tell_leniency(self, result: SweepResult) -> None:
        if result.lenient and result.queue not in self._lenient:
            self._lenient.add(result.queue)
            self._log.warning(
                "mass expiry: the stall check is sent with max_stalled + 1", queue=result.queue
            )
        elif not result.lenient and result.verb == "stalled_check" and result.passes:
            self._lenient.discard(result.queue)
            self._log.info("mass expiry is over", queue=result.queue)

    # --- the restart report ---------------------------------------------------------------------

    def _follow_restart(self, result: SweepResult, report: _RestartReport) -> None:
        """Keep count of one queue's leases of an earlier process; counts stop at a thousand."""
        queue = result.queue
        if result.run_id not in ("", report.run_id):
            return  # what another process said, before this one was noticed
        if result.leases is None:
            # One queue that cannot be read must not keep back what is known of all the others.
            failed = result.failure and not result.failure.of_node
            if queue in report.unseen and (result.passes or result.blocked or failed):
                report.unseen.discard(queue)
                report.unread.add(queue)
                self._tell_report(result.node, report)
            return
        previous = result.leases[1]
        here = sum(expiry.cause == "restart" for expiry in result.expiries)
        if queue in report.unseen or queue in report.unread:
            report.unseen.discard(queue)
            report.unread.discard(queue)
            report.found += previous
        elif queue not in report.left:
            return
        report.recovered += here
        report.left[queue] = max(previous - here, 0)
        if report.left[queue] == 0:
            del report.left[queue]
        self._tell_report(result.node, report)

    def _tell_report(self, node: str, report: _RestartReport) -> None:
        if report.unseen:
            return
        facts = report.fields()
        where = {"node": node, "run_id": report.run_id}
        if report.found and not report.begun:
            report.begun = True
            leases = facts["leases"]
            self._log.warning(
                "restart report: leases of an earlier server process", **where, leases=leases
            )
        if report.left or (report.unread and not report.begun):
            return
        if report.begun:
            self._log.warning(
                "restart report: the last lease of an earlier server process is gone",
                **where,
                **facts,
            )
        del self._restarts[node]

    def _break_off(self, node: str, reason: str) -> None:
        """End a report before its time."""
        report = self._restarts.pop(node, None)
        if report and report.begun:
            self._log.warning(
                "restart report: broken off",
                node=node,
                run_id=report.run_id,
                reason=reason,
                **report.fields(),
            )
