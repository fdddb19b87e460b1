"""A small client for the job verbs of an EMQ node: what a producer and a worker need.

A complete worker::

    from emqtimerd.jobs import Jobs, JobsError, Refused

    def work(url, queue, handle, stop):
        with Jobs(url, queue) as jobs:
            while not stop.is_set():
                try:
                    if (job := jobs.claim(lease_ms=30_000)) is None:
                        stop.wait(0.2)
                        continue
                    try:
                        handle(job.payload)
                    except Exception as error:
                        jobs.fail(job, str(error), delay_ms=5_000, max_attempts=3)
                    else:
                        jobs.complete(job)
                except Refused:
                    pass  # the lease ran out and the job has moved on: it is no longer ours
                except JobsError as error:
                    print(error)  # the node is away, or restarts: a job that was held is recovered
                    stop.wait(1)

and its producer::

    with Jobs("redis://127.0.0.1:6379/0", "orders") as jobs:
        jobs.enqueue(b"ship 17")
        jobs.schedule(b"remind 17", in_ms=60_000)

A handler that may outlast its lease calls `jobs.extend(job, lease_ms=30_000)` now and then, from
any thread.

Each call is one command, sent once. Nothing is sent again behind the caller's back: when the reply
is lost, the call raises `OutcomeUnknown` and the caller decides. A settling verb is safe to repeat:
if it had already worked, the repeat raises a `Refused`. A claim may have leased a job that nobody
works on until its lease ends. For `enqueue` and `schedule` pass an id from `mint_id`: a repeat that
finds its own first try raises `DuplicateJob`. But a first try that was completed meanwhile has left
nothing behind, and its repeat adds the job once more: whoever repeats these two has jobs that run
at least once, not exactly once.

The client speaks to one standalone node. `PROMOTE` and `STALLED.CHECK` are not here: they belong to
the daemon.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from emqtimerd.wire import (
    BRAND,
    BRAND_KEY,
    REQUIRED_TOKENS,
    TOKENS,
    base,
    outline,
    printable,
    queue_key,
    queue_name_problem,
    row_key,
)

Value = TypeVar("Value")

__all__ = [
    "DuplicateJob",
    "FenceRefused",
    "Job",
    "JobGone",
    "Jobs",
    "JobsError",
    "NodeError",
    "OutcomeUnknown",
    "Refused",
    "StaleToken",
    "Unreachable",
    "WrongKind",
    "WrongState",
    "mint_id",
]

# The daemon's own defaults (`node.connect_timeout`, `node.timeout`), so that both give up on a node
# at the same moment.
CONNECT_TIMEOUT_SECONDS = 3.0
TIMEOUT_SECONDS = 5.0

# A node that lacks only what the daemon sends is still good enough for producers and workers.
_NEEDED_TOKENS = tuple(token for token in TOKENS if token not in REQUIRED_TOKENS)


class JobsError(Exception):
    """Something kept this call from doing its work."""


class Unreachable(JobsError):
    """No connection to the node could be made, so nothing was sent."""


class FenceRefused(JobsError):
    """The server is not an EMQ node of this wire: a token is missing, or the brand is absent or
    foreign.
    """


class OutcomeUnknown(JobsError):
    """The command was sent and no reply came: the node may or may not have carried it out."""


class NodeError(JobsError):
    """The node answered with an error that is not about the job; `code` is its first word."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Refused(JobsError):
    """The node looked at the job and refused, and wrote nothing; for a worker: the job is not yours
    any more.
    """


class WrongKind(Refused):
    """The id does not begin with `JOB` (`EMQKIND`)."""


class StaleToken(Refused):
    """The job was claimed again since this token was given out (`EMQSTALE`)."""


class WrongState(Refused):
    """The job is in a state, or of a sort, that the verb does not work on (`EMQSTATE`)."""


class JobGone(Refused):
    """The job has no row: it was completed, or it never was."""


class DuplicateJob(Refused):
    """A job with this id is on the queue already."""


_REFUSALS: dict[str, type[Refused]] = {
    "EMQKIND": WrongKind,
    "EMQSTALE": StaleToken,
    "EMQSTATE": WrongState,
}


_CODES: dict[type[RedisError], str] = {
    exceptions.AskError: "ASK",
    exceptions.MovedError: "MOVED",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.AuthenticationError: "NOAUTH",
}


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed job: its id, its payload, and the token that proves the claim."""

    id: bytes
    payload: bytes
    # The server compares tokens as bytes, so the bytes are what is kept; the number is for people.
    token: bytes

    @property
    def attempts(self) -> int:
        """How often the job has been claimed, this time included."""
        return int(self.token)


# Crockford's base 32: in ASCII order, so that texts sort as the numbers they stand for.
_ALPHABET = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"
# 80 bits beside 48 bits of milliseconds: two processes that mint a million ids in one millisecond
# still meet only once in 10^12 such milliseconds.
_RANDOM_BITS = 80


class _Mint:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> bytes:
        fresh = time.time_ns() // 1_000_000 << _RANDOM_BITS | int.from_bytes(
            os.urandom(_RANDOM_BITS // 8)
        )
        with self._lock:
            # In one millisecond, or after the clock was set back, order comes from counting on.
            self._last = number = (
                fresh if fresh >> _RANDOM_BITS > self._last >> _RANDOM_BITS else self._last + 1
            )
        # 26 digits of 5 bits hold the 128 bits.
        return b"JOB" + bytes(_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))


_mint = _Mint()


def _reseed() -> None:
    # A forked child that counted on from its parent's last id would mint the parent's next ids. A
    # new lock as well: the parent's may have been held by another thread at the moment of the fork.
    global _mint  # noqa: PLW0603  (the child's own is the point)
    _mint = _Mint()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reseed)


def mint_id() -> bytes:
    """Make a job id that no other call has made and that sorts after all ids made before it in this
    process.

    The id is `JOB` and 26 characters of Crockford's base 32 (the shape of a ULID): 48 bits of
    milliseconds since 1970, then 80 random bits. Ids of different processes sort by the clocks of
    their machines, to the millisecond; within a process the order is strict, since a second id in
    the same millisecond (or after the clock went back) is the one before plus one. `pending` serves
    equal scores in byte order, so that order is the order in which jobs are claimed.
    """
    return _mint.next()


class Jobs:
    """The job verbs of one queue, over connections of its own; safe to share between threads.

    `node` is a URL (`redis://`, `rediss://`, `valkey://`, `valkeys://`, `unix://`) or a
    `redis.Redis`, whose connection settings are copied (but not its retries) and which is not used
    otherwise. Every new connection passes the fence of the wire before its first verb: tokens, then
    brand.
    """

    def __init__(
        self,
        node: str | redis.Redis,
        queue: str,
        *,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        _expect("queue", queue, str)
        problem = queue_name_problem(queue)
        if problem is not None:
            raise ValueError(f"the queue name {queue!r} {problem}")
        self.queue = queue
        self._base = base(queue)
        self._pending = queue_key(queue, "pending")
        self._active = queue_key(queue, "active")
        self._schedule = queue_key(queue, "schedule")
        self._dead = queue_key(queue, "dead")
        if isinstance(node, str):
            given = _settings_in(node)
        else:
            _expect("node", node, redis.Redis, or_else="a URL or a redis.Redis of one server")
            pool = node.connection_pool
            given = {**pool.connection_kwargs, "connection_class": pool.connection_class}
        settings: dict[str, Any] = {
            # Push messages of one vendor's servers, bound to the pool that they were made for.
            **{name: value for name, value in given.items() if "maint" not in name},
            "socket_connect_timeout": connect_timeout_seconds,
            "socket_timeout": timeout_seconds,
            # redis-py's default would send one unanswered verb eleven times.
            "retry": Retry(NoBackoff(), 0),
            "redis_connect_func": _pass_fence,
            # RESP3 would add a handshake and push messages that no verb needs.
            "protocol": 2,
        }
        self._pool = redis.ConnectionPool(**settings)

    # What a producer says.

    def enqueue(self, payload: bytes, job_id: bytes | None = None) -> bytes:
        """Add a job that is ready now, and return its id."""
        _expect("payload", payload, bytes)
        job_id = mint_id() if job_id is None else job_id
        row = self._row(job_id)
        if self._integer("EMQ.ENQUEUE", 2, row, self._pending, job_id, payload) == 0:
            raise DuplicateJob(
                f"queue {self.queue!r} already has a job {printable(job_id)}; nothing was written"
            )
        return job_id

    def schedule(
        self,
        payload: bytes,
        *,
        at_ms: int | None = None,
        in_ms: int | None = None,
        job_id: bytes | None = None,
    ) -> bytes:
        """Add a job that is due `at_ms` (server clock, milliseconds since 1970) or `in_ms` from
        now, and return its id.
        """
        _expect("payload", payload, bytes)
        job_id = mint_id() if job_id is None else job_id
        row = self._row(job_id)
        when = _when(at_ms, in_ms)
        if self._integer("EMQ.SCHEDULE", 2, row, self._schedule, job_id, payload, *when) == 0:
            raise DuplicateJob(
                f"queue {self.queue!r} already has a job {printable(job_id)}; nothing was written"
            )
        return job_id

    def reschedule(
        self, job_id: bytes, *, at_ms: int | None = None, in_ms: int | None = None
    ) -> None:
        """Give a scheduled job another due time."""
        row = self._row(job_id)
        reply = self._integer(
            "EMQ.RESCHEDULE", 2, row, self._schedule, job_id, *_when(at_ms, in_ms)
        )
        self._not_gone(reply, -1, job_id)

    def reprocess(self, job_id: bytes) -> None:
        """Put a dead job back to pending; its counters stay, its last error goes."""
        row = self._row(job_id)
        self._not_gone(
            self._integer("EMQ.REPROCESS", 3, row, self._dead, self._pending, job_id), -1, job_id
        )

    # What a worker says.

    def claim(self, lease_ms: int) -> Job | None:
        """Lease the first pending job for `lease_ms`; None when there is none to be had or the
        queue is paused.
        """
        _expect("lease_ms", lease_ms, int)
        reply = self._send("EMQ.CLAIM", 3, self._pending, self._active, self._base, lease_ms)
        match reply:
            case []:
                return None
            case [bytes(job_id), bytes(payload), int(attempts)]:
                return Job(job_id, payload, b"%d" % attempts)
            case [bytes(job_id), bytes(payload), bytes(token)]:
                return Job(job_id, payload, token)
            case _:
                raise _odd_reply("EMQ.CLAIM", reply)

    def extend(self, job: Job, lease_ms: int) -> None:
        """Make the lease of a claimed job end `lease_ms` from now."""
        row = self._row_of(job)
        _expect("lease_ms", lease_ms, int)
        self._not_gone(
            self._integer("EMQ.EXTEND", 2, self._active, row, job.id, job.token, lease_ms),
            -1,
            job.id,
        )

    def extends(self, jobs: Iterable[Job], lease_ms: int) -> list[bytes]:
        """Extend many leases in one command, and return the ids of the jobs that could not be
        extended.
        """
        _expect("lease_ms", lease_ms, int)
        pairs = [part for job in jobs for part in (_expect("jobs", job, Job).id, job.token)]
        if not pairs:
            return []
        reply = self._send("EMQ.EXTENDS", 2, self._active, self._base, lease_ms, *pairs)
        if not isinstance(reply, list) or not all(isinstance(job_id, bytes) for job_id in reply):
            raise _odd_reply("EMQ.EXTENDS", reply)
        return reply

    def complete(self, job: Job) -> None:
        """Settle a job as done: its row is deleted."""
        row = self._row_of(job)
        self._not_gone(
            self._integer("EMQ.COMPLETE", 2, self._active, row, job.id, job.token, self._base),
            0,
            job.id,
        )

    def fail(
        self, job: Job, error: str | bytes, *, delay_ms: int, max_attempts: int
    ) -> Literal["scheduled", "dead"]:
        """Settle a try as failed: the job runs again after `delay_ms`, or is dead once it failed
        `max_attempts` times.
        """
        # An error text that cannot be encoded must not keep the job from being settled.
        text = error.encode("utf-8", "backslashreplace") if isinstance(error, str) else error
        _expect("error", text, bytes, or_else="str or bytes")
        _expect("delay_ms", delay_ms, int)
        _expect("max_attempts", max_attempts, int)
        row = self._row_of(job)
        keys = (self._active, self._schedule, self._dead, row)
        reply = self._send(
            "EMQ.FAIL",
            len(keys),
            *keys,
            job.id,
            job.token,
            delay_ms,
            max_attempts,
            text,
            self._base,
        )
        match reply:
            case b"scheduled":
                return "scheduled"
            case b"dead":
                return "dead"
            case _:
                raise _odd_reply("EMQ.FAIL", reply)

    def delay(self, job: Job, delay_ms: int) -> None:
        """Hand a claimed job back to be run after `delay_ms`; no counter changes."""
        _expect("delay_ms", delay_ms, int)
        row = self._row_of(job)
        reply = self._integer(
            "EMQ.DELAY", 3, self._active, self._schedule, row, job.id, job.token, delay_ms
        )
        self._not_gone(reply, -1, job.id)

    def requeue(self, job: Job) -> None:
        """Hand a claimed job back to pending; no counter changes."""
        row = self._row_of(job)
        self._not_gone(
            self._integer("EMQ.REQUEUE", 3, self._active, self._pending, row, job.id, job.token),
            -1,
            job.id,
        )

    # The connection.

    def close(self) -> None:
        """Close every connection of this client."""
        self._pool.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _row(self, job_id: bytes) -> bytes:
        return row_key(self.queue, _expect("job_id", job_id, bytes))

    def _row_of(self, job: Job) -> bytes:
        return row_key(self.queue, _expect("job", job, Job).id)

    def _not_gone(self, reply: int, gone: int, job_id: bytes) -> None:
        if reply == gone:
            raise self._gone(job_id)

    def _gone(self, job_id: bytes) -> JobGone:
        return JobGone(f"queue {self.queue!r} has no job {printable(job_id)}; nothing was written")

    def _integer(self, *command: str | bytes | int) -> int:
        reply = self._send(*command)
        if not isinstance(reply, int):
            raise _odd_reply(str(command[0]), reply)
        return reply

    def _send(self, *command: str | bytes | int) -> Any:
        # Not through `Redis.execute_command`: only here can a failed connect (nothing sent) be told
        # from a lost reply.
        try:
            connection: Any = self._pool.get_connection()
        except RedisError as error:
            if _is_reply(error):
                raise _reply_error(error) from error
            raise Unreachable(str(error)) from error
        except UnicodeError as error:
            # The codec of host names has errors of its own kind for what cannot be one.
            raise Unreachable(f"the node's host cannot be looked up: {error}") from error
        try:
            connection.send_command(*command)
            # The caller's client may decode replies; ids and payloads are bytes.
            return connection.read_response(disable_decoding=True)
        except RedisError as error:
            if _is_reply(error):
                raise _reply_error(error) from error
            raise OutcomeUnknown(f"{command[0]!s} was sent and not answered: {error}") from error
        finally:
            self._pool.release(connection)


def _expect(name: str, value: Value, kind: type[Value], *, or_else: str = "") -> Value:
    """The value, if it is of the kind that the argument has; what redis-py would make of another
    one (a text of a number, a refusal that names no argument) helps nobody."""
    if not isinstance(value, kind) or isinstance(value, bool):
        wanted = or_else or {bytes: "bytes", int: "a whole number", str: "text"}.get(kind, "a Job")
        hint = "; text.encode() makes bytes" if kind is bytes and isinstance(value, str) else ""
        raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}{hint}")
    return value


_SCHEMES = {
    "redis": "redis",
    "rediss": "rediss",
    "valkey": "redis",
    "valkeys": "rediss",
    "unix": "unix",
}


def _settings_in(url: str) -> dict[str, Any]:
    url = _redis_scheme(url)
    try:
        settings: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        return settings
    except ValueError:
        pass
    # Outside the handler, and in our own words: the error repeats what it takes for the port, which
    # is the beginning of a password that holds a slash.
    raise ValueError(
        "node is a URL that cannot be read; a password that holds / @ : ? # or % must have them "
        "percent-encoded"
    )


def _redis_scheme(url: str) -> str:
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in _SCHEMES:
        # No part of the URL is repeated: it may hold a password.
        raise ValueError(
            f"node must be a URL that begins with {', '.join(f'{each}://' for each in _SCHEMES)}: "
            "this client speaks to one server"
        )
    return _SCHEMES[scheme] + mark + rest


def _when(at_ms: int | None, in_ms: int | None) -> tuple[str, int]:
    if at_ms is not None and in_ms is None:
        return "at", _expect("at_ms", at_ms, int)
    if in_ms is not None and at_ms is None:
        return "in", _expect("in_ms", in_ms, int)
    raise TypeError("give exactly one of at_ms and in_ms")


def _pass_fence(connection: Any) -> None:
    # On every new connection: a restarted or replaced server has dropped the old ones.
    connection.on_connect()
    try:
        connection.send_command("EMQ.VERSION")
        tokens = connection.read_response(disable_decoding=True)
        connection.send_command("GET", BRAND_KEY)
        brand = connection.read_response(disable_decoding=True)
        problem = _fence_problem(tokens, brand)
    except ResponseError as error:
        problem = (
            None
            if "unknown command" not in str(error)
            else "it has no EMQ.VERSION: the job core is not loaded"
        )
        if problem is None:
            raise
    if problem is not None:
        # redis-py closes the socket after its own errors only, and would hand this one out as
        # connected.
        connection.disconnect()
        raise FenceRefused(f"not an EMQ node of this wire: {problem}")


def _fence_problem(tokens: Any, brand: Any) -> str | None:
    present = tokens.decode("utf-8", "replace").split() if isinstance(tokens, bytes) else []
    missing = [token for token in _NEEDED_TOKENS if token not in present]
    if missing:
        return f"EMQ.VERSION lacks {' '.join(missing)}"
    if brand != BRAND:
        return f"the brand at {BRAND_KEY.decode()} is {brand!r}, wanted {BRAND!r}"
    return None


def _is_reply(error: RedisError) -> bool:
    # LOADING and NOAUTH are connection errors to redis-py, but they are replies: the command was
    # not carried out.
    if type(error) in _CODES:
        return True
    return not isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError))


def _reply_error(error: RedisError) -> JobsError:
    message = str(error)
    # redis-py takes the first word off the errors that it has a class for.
    code = _CODES.get(type(error))
    if code is None:
        first = message.partition(" ")[0]
        code = first if first.isalpha() and first.isupper() else "ERR"
    refusal = _REFUSALS.get(code)
    if refusal is not None:
        return refusal(message)
    return NodeError(code, message if message.startswith(code) else f"{code} {message}")


def _odd_reply(verb: str, reply: Any) -> NodeError:
    return NodeError("shape", f"{verb} was answered with {outline(reply)}")
