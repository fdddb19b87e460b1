"""What a sweep would do, said by reads alone: for `once --dry-run` and for the doctor."""

import time
from collections.abc import Callable, Sequence

from emqtimerd import wire
from emqtimerd.node import Node
from emqtimerd.sweeper import Blocked, Failure, Sweep, SweepResult, expiry_of

PAGE = 1_000
"""How many ids one read of a preview takes: small enough that the server serves others between."""


def foresee(
    node: Node, sweep: Sweep, *, drain: bool = True, stop: Callable[[], bool] = lambda: False
) -> SweepResult:
    """Say what a sweep would do to the queue now, drained or once, by reads alone.

    It follows the contract's rules over each due row, up to the first one that would refuse.
    Raises NodeFault.
    """
    result = SweepResult(sweep.queue, sweep.verb, node.name)
    source = "schedule" if sweep.verb == "promote" else "active"
    with node.link() as link:
        run_id = link.run_id.encode()
        if sweep.verb == "stalled_check" and not run_id:
            message = "a preview needs INFO, to tell which leases are of an earlier server process"
            result.failure = Failure("NOPERM", message)
            return result

        def ask(*commands: bytes) -> list[wire.Reply]:
            deadline = time.monotonic() + node.timeout_seconds
            return link.exchange(list(commands), len(commands), deadline)

        try:
            now_ms = int(wire.read_time_ms(ask(wire.TIME)[0]))
            offset = 0
            while not result.blocked:
                if stop():
                    result.skipped = True
                    break
                size = PAGE if drain else min(PAGE, sweep.limit - offset)
                (reply,) = ask(wire.due(sweep.queue, source, now_ms, offset, size))
                page = wire.read_due(reply)
                for head, row in _rows(ask, sweep.queue, page):
                    _foresee_row(sweep, result, head, row, run_id, now_ms)
                    if result.blocked:
                        break
                offset += len(page)
                if len(page) < PAGE or (not drain and offset == sweep.limit):
                    break
        except (wire.ReplyError, wire.ShapeError) as error:
            result.failure = Failure(error.code, str(error))
    return result


def _rows(
    ask: Callable[..., list[wire.Reply]], queue: str, page: Sequence[wire.Head]
) -> list[tuple[wire.Head, wire.Reply]]:
    """The due ids of a page with their rows. Ghosts are left out: a sweep takes them out of their
    set and counts them nowhere."""
    rows = ask(*(wire.row(queue, head.job_id) for head in page))
    blank = [head.job_id for head, row in zip(page, rows, strict=True) if row == _BLANK]
    there = ask(*(wire.is_row(queue, job_id) for job_id in blank))
    ghosts = {
        job_id for job_id, reply in zip(blank, there, strict=True) if not wire.read_is_row(reply)
    }
    found = zip(page, rows, strict=True)
    return [(head, row) for head, row in found if head.job_id not in ghosts]


_BLANK: list[wire.Reply] = [None] * len(wire.ROW)
"""What is read of an id without a row, and of a row without any field that decides."""


def _foresee_row(
    sweep: Sweep,
    result: SweepResult,
    head: wire.Head,
    reply: wire.Reply,
    run_id: bytes,
    now_ms: int,
) -> None:
    if isinstance(reply, wire.ReplyError) and reply.code == "WRONGTYPE":
        result.blocked = Blocked(head.job_id, "its key holds another type")
        return
    row = wire.read_row(reply)
    seen = wire.Peek(run_id, {head.job_id: wire.Lease(head.at_ms, row.lease_epoch)})
    counted = sweep.verb == "stalled_check" and wire.cause_of(head.job_id, seen) != "restart"
    expected = b"scheduled" if sweep.verb == "promote" else b"active"
    if row.group is not None:
        result.blocked = Blocked(head.job_id, "a lane row, which the native sweeps refuse")
    elif row.state != expected:
        state = wire.printable(row.state or b"missing")
        result.blocked = Blocked(head.job_id, f"its state is {state}, not {expected.decode()}")
    elif counted and row.stalled is None:
        result.blocked = Blocked(head.job_id, "its stalled holds what does not count")
    elif sweep.verb == "promote":
        result.promoted += 1
    else:
        result.expiries.append(expiry_of(head.job_id, seen, now_ms))
        buried = counted and (row.stalled or 0) + 1 >= sweep.max_stalled
        (result.dead if buried else result.recovered).append(head.job_id)
