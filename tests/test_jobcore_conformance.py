"""Every verb of the job core, as tables: what the server holds, what is said, what it answers, what
it holds then.

A case names the keys that change; all others, of the whole server, must stay as they were. A
refusal changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
from echomq import (
    ACTIVE,
    BASE,
    BRAND,
    BRAND_KEY,
    COMPLETED,
    DEAD,
    FAILED,
    FAR,
    META,
    PENDING,
    SCHEDULE,
    TOKENS,
    Keyspace,
    Refusal,
    Value,
    Within,
    client_of,
    read_keyspace,
    rk,
    row,
    run_id,
    send,
    send_all,
    send_timed,
    write_keyspace,
)

from emqtimerd.devnode import DevNode


@pytest.fixture(name="client")
def _client(any_node: DevNode) -> redis.Redis:
    return client_of(any_node.url)


# --- the words of the tables --------------------------------------------------------------------

J, J2, J3, J4 = b"JOB1", b"JOB2", b"JOB3", b"JOB4"
BINARY = b"JOB\x00\xff\r\n{}* \xf0\x28"

# A server process that is no more; run ids have 40 digits.
EARLIER = b"e" * 40
# Due or expired since 1970, in an order.
LONG_AGO = 1_000.0


@dataclass(frozen=True)
class In:
    """So many milliseconds after the moment at which the command ran."""

    ms: int


class _RunId:
    pass


# This server process.
THIS = _RunId()


@dataclass(frozen=True)
class Call:
    """One command; `base` is the base that follows the keys, as a key or as an argument."""

    verb: str
    keys: tuple[bytes, ...]
    arguments: tuple[Any, ...]
    base: bytes | None = None

    def form(self, form: str) -> tuple[Any, ...]:
        if self.base is None:
            return (self.verb, len(self.keys), *self.keys, *self.arguments)
        return (self.verb, len(self.keys) + (form == "key"), *self.keys, self.base, *self.arguments)


def enqueue(job_id: bytes = J, payload: bytes = b"p") -> Call:
    return Call("EMQ.ENQUEUE", (rk(job_id), PENDING), (job_id, payload))


def claim(lease_ms: Any = 30_000) -> Call:
    return Call("EMQ.CLAIM", (PENDING, ACTIVE), (lease_ms,), BASE)


def extend(job_id: bytes = J, token: bytes = b"1", lease_ms: Any = 30_000) -> Call:
    return Call("EMQ.EXTEND", (ACTIVE, rk(job_id)), (job_id, token, lease_ms))


def extends(*pairs: bytes, lease_ms: Any = 30_000) -> Call:
    return Call("EMQ.EXTENDS", (ACTIVE,), (lease_ms, *(pairs or (J, b"1"))), BASE)


def complete(job_id: bytes = J, token: bytes = b"1") -> Call:
    return Call("EMQ.COMPLETE", (ACTIVE, rk(job_id)), (job_id, token, BASE))


def schedule(job_id: bytes = J, payload: bytes = b"p", how: str = "at", ms: Any = FAR) -> Call:
    return Call("EMQ.SCHEDULE", (rk(job_id), SCHEDULE), (job_id, payload, how, ms))


def promote(limit: Any = 100) -> Call:
    return Call("EMQ.PROMOTE", (SCHEDULE, PENDING), (limit,), BASE)


def reschedule(job_id: bytes = J, how: str = "at", ms: Any = FAR) -> Call:
    return Call("EMQ.RESCHEDULE", (rk(job_id), SCHEDULE), (job_id, how, ms))


def delay(job_id: bytes = J, token: bytes = b"1", delay_ms: Any = 5_000) -> Call:
    return Call("EMQ.DELAY", (ACTIVE, SCHEDULE, rk(job_id)), (job_id, token, delay_ms))


def fail(
    job_id: bytes = J,
    token: bytes = b"1",
    delay_ms: Any = 5_000,
    max_attempts: Any = 3,
    error: bytes = b"boom",
) -> Call:
    arguments = (job_id, token, delay_ms, max_attempts, error, BASE)
    return Call("EMQ.FAIL", (ACTIVE, SCHEDULE, DEAD, rk(job_id)), arguments)


def reprocess(job_id: bytes = J) -> Call:
    return Call("EMQ.REPROCESS", (rk(job_id), DEAD, PENDING), (job_id,))


def requeue(job_id: bytes = J, token: bytes = b"1") -> Call:
    return Call("EMQ.REQUEUE", (ACTIVE, PENDING, rk(job_id)), (job_id, token))


def stalled_check(max_stalled: Any = 1, limit: Any = 100) -> Call:
    return Call("EMQ.STALLED.CHECK", (ACTIVE, PENDING, DEAD), (max_stalled, limit), BASE)


Before = dict[bytes, Any]

HELD = row(b"active", attempts=1, lease_epoch=EARLIER)
"""A row with a lease, taken in an earlier server process: what a verb stamps, and what it leaves,
both show.
"""


def held(job_id: bytes = J, score: float = FAR, **fields: bytes | int) -> Before:
    """One leased job."""
    content = {**HELD, **row(b"active", **{"attempts": 1, **fields})}
    return {ACTIVE: {job_id: score}, rk(job_id): content}


def waiting(job_id: bytes = J, **fields: bytes | int) -> Before:
    """One job that is ready."""
    return {PENDING: {job_id: 0.0}, rk(job_id): row(b"pending", **fields)}


def scheduled(job_id: bytes = J, score: float = FAR, **fields: bytes | int) -> Before:
    """One job that is not due yet."""
    return {SCHEDULE: {job_id: score}, rk(job_id): row(b"scheduled", **fields)}


def buried(job_id: bytes = J, **fields: bytes | int) -> Before:
    """One dead job with counters and a last error."""
    filled: dict[str, Any] = {
        "attempts": 3,
        "failures": 2,
        "stalled": 1,
        "last_error": b"boom",
        **fields,
    }
    return {DEAD: {job_id: 0.0}, rk(job_id): row(b"dead", **filled)}


def both(*parts: Before) -> Before:
    """Put queues together; members of the same set join."""
    whole: Before = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = {**whole[key], **value} if key in whole else value
    return whole


@dataclass(frozen=True)
class Case:
    """One line of a table; a key of `changes` with None is gone afterwards."""

    name: str
    before: Before
    call: Call
    reply: Any
    changes: Mapping[bytes, Any] = field(default_factory=dict)


def resolve(value: Any, now: Within | None, this: bytes) -> Any:
    """Put in what only the run can know: the clock and the run id."""
    if isinstance(value, In):
        assert now is not None
        return now + value.ms
    if value is THIS:
        return this
    if isinstance(value, dict):
        return {key: resolve(item, now, this) for key, item in value.items()}
    return value


def keyspace_of(before: Before, this: bytes) -> Keyspace:
    return {BRAND_KEY: BRAND, **resolve(before, None, this)}


def params(*tables: Sequence[Case]) -> list[Any]:
    """Each case; those whose base follows the keys in both forms."""
    return [
        pytest.param(case, form, id=f"{case.call.verb[4:]}-{case.name}-{form}".replace(" ", "_"))
        for table in tables
        for case in table
        for form in (("key", "arg") if case.call.base is not None else ("key",))
    ]


def check(client: redis.Redis, case: Case, form: str) -> None:
    this = run_id(client)
    before = keyspace_of(case.before, this)
    write_keyspace(client, before)
    reply, now = send_timed(client, *case.call.form(form))
    after = read_keyspace(client)
    assert reply == case.reply, reply
    if isinstance(reply, Refusal):
        assert case.reply.text in reply.text
        assert not case.changes, "a refusal writes nothing"
    expected = {**before, **resolve(case.changes, now, this)}
    assert after == {key: value for key, value in expected.items() if value is not None}


# --- one table a verb ---------------------------------------------------------------------------

KIND = Refusal("EMQKIND")
STATE = Refusal("EMQSTATE", "JOB1")
STALE = Refusal("EMQSTALE", "JOB1")
NOT_NATIVE = Refusal("EMQSTATE", "not native")
WRONGTYPE = Refusal("WRONGTYPE")
ERR = Refusal("ERR")

NEW = row(b"pending")

ENQUEUE = [
    Case("new", {}, enqueue(), 1, {rk(J): NEW, PENDING: {J: 0.0}}),
    Case("second", waiting(), enqueue(J2), 1, {rk(J2): NEW, PENDING: {J: 0.0, J2: 0.0}}),
    Case(
        "empty payload",
        {},
        enqueue(J, b""),
        1,
        {rk(J): row(b"pending", payload=b""), PENDING: {J: 0.0}},
    ),
    Case(
        "binary id and payload",
        {},
        enqueue(BINARY, b"\x00\xff\r\n"),
        1,
        {rk(BINARY): row(b"pending", payload=b"\x00\xff\r\n"), PENDING: {BINARY: 0.0}},
    ),
    Case("paused", {META: {b"paused": b"1"}}, enqueue(), 1, {rk(J): NEW, PENDING: {J: 0.0}}),
    Case("duplicate pending", waiting(), enqueue(J, b"other"), 0),
    Case("duplicate active", held(), enqueue(), 0),
    Case("duplicate scheduled", scheduled(), enqueue(), 0),
    Case("duplicate dead", buried(), enqueue(), 0),
    Case("duplicate lane", waiting(group=b"g"), enqueue(), 0),
    Case("kind", {}, enqueue(b"TASK1"), KIND),
    Case("kind lower case", {}, enqueue(b"job1"), KIND),
    Case("kind too short", {}, enqueue(b"JO"), KIND),
    Case("kind empty", {}, enqueue(b""), KIND),
    Case("kind not at the start", {}, enqueue(b" JOB1"), KIND),
]

SCHEDULE_NEW = row(b"scheduled")

SCHEDULES = [
    Case("at", {}, schedule(ms=FAR), 1, {rk(J): SCHEDULE_NEW, SCHEDULE: {J: FAR}}),
    Case("at long ago", {}, schedule(ms=1_000), 1, {rk(J): SCHEDULE_NEW, SCHEDULE: {J: 1_000.0}}),
    Case(
        "in", {}, schedule(how="in", ms=60_000), 1, {rk(J): SCHEDULE_NEW, SCHEDULE: {J: In(60_000)}}
    ),
    Case(
        "in no time", {}, schedule(how="in", ms=0), 1, {rk(J): SCHEDULE_NEW, SCHEDULE: {J: In(0)}}
    ),
    Case(
        "second", scheduled(), schedule(J2), 1, {rk(J2): SCHEDULE_NEW, SCHEDULE: {J: FAR, J2: FAR}}
    ),
    Case(
        "binary id and payload",
        {},
        schedule(BINARY, b"\x00\xff"),
        1,
        {rk(BINARY): row(b"scheduled", payload=b"\x00\xff"), SCHEDULE: {BINARY: FAR}},
    ),
    Case(
        "paused",
        {META: {b"paused": b"1"}},
        schedule(),
        1,
        {rk(J): SCHEDULE_NEW, SCHEDULE: {J: FAR}},
    ),
    Case("duplicate scheduled", scheduled(), schedule(ms=5_000), 0),
    Case("duplicate pending", waiting(), schedule(), 0),
    Case("duplicate active", held(), schedule(), 0),
    Case("duplicate dead", buried(), schedule(), 0),
    Case("kind", {}, schedule(b"TASK1"), KIND),
    Case("neither at nor in", {}, schedule(how="on"), ERR),
]

CLAIMED = row(b"active", attempts=1, lease_epoch=b"")


def claimed(attempts: int = 1, **fields: bytes | int) -> dict[bytes, Any]:
    """A row just after a claim."""
    content: dict[bytes, Any] = row(b"active", attempts=attempts, **fields)
    return {**content, b"lease_epoch": THIS}


CLAIM = [
    Case(
        "first",
        waiting(),
        claim(),
        [J, b"p", 1],
        {PENDING: None, ACTIVE: {J: In(30_000)}, rk(J): claimed()},
    ),
    Case(
        "in byte order",
        both(waiting(J2), waiting(J), waiting(b"JOB10")),
        claim(),
        [J, b"p", 1],
        {PENDING: {b"JOB10": 0.0, J2: 0.0}, ACTIVE: {J: In(30_000)}, rk(J): claimed()},
    ),
    Case(
        "again, other fields stay",
        waiting(attempts=9, failures=2, stalled=1, last_error=b"boom", lease_epoch=EARLIER),
        claim(),
        [J, b"p", 10],
        {
            PENDING: None,
            ACTIVE: {J: In(30_000)},
            rk(J): claimed(10, failures=2, stalled=1, last_error=b"boom"),
        },
    ),
    Case(
        "binary",
        waiting(BINARY, payload=b"\x00\xff"),
        claim(),
        [BINARY, b"\x00\xff", 1],
        {PENDING: None, ACTIVE: {BINARY: In(30_000)}, rk(BINARY): claimed(payload=b"\x00\xff")},
    ),
    Case(
        "lane row",
        waiting(group=b"g"),
        claim(),
        [J, b"p", 1],
        {PENDING: None, ACTIVE: {J: In(30_000)}, rk(J): claimed(group=b"g")},
    ),
    Case(
        "flow row",
        waiting(parent=b"JOB0"),
        claim(),
        [J, b"p", 1],
        {PENDING: None, ACTIVE: {J: In(30_000)}, rk(J): claimed(parent=b"JOB0")},
    ),
    Case("empty", {}, claim(), []),
    Case("only others", both(scheduled(score=LONG_AGO), held(J2)), claim(), []),
    Case("paused", {**waiting(), META: {b"paused": b"1"}}, claim(), []),
    Case("paused by an empty field", {**waiting(), META: {b"paused": b""}}, claim(), []),
    Case("paused, ghost at the head", {PENDING: {J: 0.0}, META: {b"paused": b"1"}}, claim(), []),
    Case(
        "meta without paused",
        {**waiting(), META: {b"other": b"1"}},
        claim(),
        [J, b"p", 1],
        {PENDING: None, ACTIVE: {J: In(30_000)}, rk(J): claimed()},
    ),
    # A head that is elsewhere by its row: claiming it would make two of it.
    *(
        Case(
            f"head that is {state.decode()}",
            both({PENDING: {J: 0.0}, rk(J): row(state)}, waiting(J2)),
            claim(),
            STATE,
        )
        for state in (b"active", b"scheduled", b"dead", b"")
    ),
    Case("ghost alone", {PENDING: {J: 0.0}}, claim(), [], {PENDING: None}),
    Case(
        "ghost at the head",
        both({PENDING: {J: 0.0}}, waiting(J2)),
        claim(),
        [],
        {PENDING: {J2: 0.0}},
    ),
]

EXTEND = [
    Case(
        "held",
        held(),
        extend(),
        1,
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"lease_epoch": THIS}},
    ),
    Case(
        "expired",
        held(score=LONG_AGO),
        extend(),
        1,
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"lease_epoch": THIS}},
    ),
    Case(
        "unstamped",
        {ACTIVE: {J: FAR}, rk(J): row(b"active", attempts=1)},
        extend(),
        1,
        {ACTIVE: {J: In(30_000)}, rk(J): claimed()},
    ),
    Case(
        "lane row",
        held(group=b"g"),
        extend(),
        1,
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"group": b"g", b"lease_epoch": THIS}},
    ),
    Case(
        "flow row",
        held(parent=b"JOB0"),
        extend(),
        1,
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"parent": b"JOB0", b"lease_epoch": THIS}},
    ),
    Case(
        "paused",
        {**held(), META: {b"paused": b"1"}},
        extend(),
        1,
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"lease_epoch": THIS}},
    ),
    Case("gone", {}, extend(), -1),
    Case("ghost", {ACTIVE: {J: FAR}}, extend(), -1),
]

EXTENDS = [
    Case(
        "one",
        held(),
        extends(),
        [],
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"lease_epoch": THIS}},
    ),
    Case(
        "some of many",
        both(
            held(),
            held(J2, attempts=2),
            waiting(J3, attempts=1),
            held(b"JOB5"),
            {ACTIVE: {b"JOB6": FAR}},
        ),
        extends(J2, b"1", J, b"1", J3, b"1", J4, b"1", b"JOB5", b"1", b"JOB6", b"1"),
        [J2, J3, J4, b"JOB6"],
        {
            ACTIVE: {J: In(30_000), J2: FAR, b"JOB5": In(30_000), b"JOB6": FAR},
            rk(J): {**HELD, b"lease_epoch": THIS},
            rk(b"JOB5"): {**HELD, b"lease_epoch": THIS},
        },
    ),
    Case(
        "lane row",
        held(group=b"g"),
        extends(),
        [],
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"group": b"g", b"lease_epoch": THIS}},
    ),
    Case("none held", scheduled(attempts=1), extends(J, b"1", J2, b"7"), [J, J2]),
    Case("token of other bytes", held(), extends(J, b"01"), [J]),
    Case("odd pairs", held(), extends(J, b"1", J2), ERR),
    Case("kind", held(), extends(J, b"1", b"TASK1", b"1"), KIND),
    Case("nobody", held(), replace(extends(), arguments=(30_000,)), []),
    Case(
        "twice the same",
        held(),
        extends(J, b"1", J, b"2", J, b"1"),
        [J],
        {ACTIVE: {J: In(30_000)}, rk(J): {**HELD, b"lease_epoch": THIS}},
    ),
]

COMPLETE = [
    Case("held", held(), complete(), 1, {ACTIVE: None, rk(J): None, COMPLETED: {b"count": b"1"}}),
    Case(
        "counts on",
        {**both(held(), held(J2)), COMPLETED: {b"count": b"41", b"other": b"x"}},
        complete(J2),
        1,
        {ACTIVE: {J: FAR}, rk(J2): None, COMPLETED: {b"count": b"42", b"other": b"x"}},
    ),
    Case(
        "expired, not swept",
        held(score=LONG_AGO),
        complete(),
        1,
        {ACTIVE: None, rk(J): None, COMPLETED: {b"count": b"1"}},
    ),
    Case(
        "binary",
        held(BINARY),
        complete(BINARY),
        1,
        {ACTIVE: None, rk(BINARY): None, COMPLETED: {b"count": b"1"}},
    ),
    Case("gone", {}, complete(), 0),
    Case("ghost", {ACTIVE: {J: FAR}}, complete(), 0),
    Case("lane row", held(group=b"g"), complete(), NOT_NATIVE),
    Case("flow row", held(parent=b"JOB0"), complete(), NOT_NATIVE),
]

DELAY = [
    Case(
        "held",
        held(failures=1, stalled=1),
        delay(),
        1,
        {
            ACTIVE: None,
            SCHEDULE: {J: In(5_000)},
            rk(J): {**HELD, b"state": b"scheduled", b"failures": b"1", b"stalled": b"1"},
        },
    ),
    Case(
        "no time",
        held(),
        delay(delay_ms=0),
        1,
        {ACTIVE: None, SCHEDULE: {J: In(0)}, rk(J): {**HELD, b"state": b"scheduled"}},
    ),
    Case(
        "flow row",
        held(parent=b"JOB0"),
        delay(),
        1,
        {
            ACTIVE: None,
            SCHEDULE: {J: In(5_000)},
            rk(J): {**HELD, b"state": b"scheduled", b"parent": b"JOB0"},
        },
    ),
    Case("gone", {}, delay(), -1),
    Case("ghost", {ACTIVE: {J: FAR}}, delay(), -1),
    Case("lane row", held(group=b"g"), delay(), NOT_NATIVE),
]


def failed(
    failures: int, state: bytes, error: bytes = b"boom", **fields: bytes
) -> dict[bytes, bytes]:
    """A held row after a FAIL."""
    extra = {name.encode(): value for name, value in fields.items()}
    return {**HELD, b"state": state, b"failures": b"%d" % failures, b"last_error": error, **extra}


FAIL = [
    Case(
        "first of three",
        held(),
        fail(),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(5_000)}, rk(J): failed(1, b"scheduled")},
    ),
    Case(
        "second of three",
        held(failures=1, last_error=b"old"),
        fail(),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(5_000)}, rk(J): failed(2, b"scheduled")},
    ),
    Case(
        "third of three",
        held(failures=2, last_error=b"old"),
        fail(),
        b"dead",
        {ACTIVE: None, DEAD: {J: 0.0}, rk(J): failed(3, b"dead"), FAILED: {b"count": b"1"}},
    ),
    Case(
        "budget of one",
        held(),
        fail(max_attempts=1),
        b"dead",
        {ACTIVE: None, DEAD: {J: 0.0}, rk(J): failed(1, b"dead"), FAILED: {b"count": b"1"}},
    ),
    Case(
        "budget passed long ago",
        {**held(failures=7), FAILED: {b"count": b"6"}},
        fail(),
        b"dead",
        {ACTIVE: None, DEAD: {J: 0.0}, rk(J): failed(8, b"dead"), FAILED: {b"count": b"7"}},
    ),
    Case(
        "stalls are another budget",
        held(stalled=9),
        fail(),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(5_000)}, rk(J): failed(1, b"scheduled", stalled=b"9")},
    ),
    Case(
        "claims are another budget",
        held(attempts=9),
        fail(token=b"9"),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(5_000)}, rk(J): failed(1, b"scheduled", attempts=b"9")},
    ),
    Case(
        "binary error, no delay",
        held(),
        fail(error=b"\x00\xff", delay_ms=0),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(0)}, rk(J): failed(1, b"scheduled", b"\x00\xff")},
    ),
    Case(
        "empty error",
        held(),
        fail(error=b""),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(5_000)}, rk(J): failed(1, b"scheduled", b"")},
    ),
    # Counted first, then compared: no budget is spent by the first failure.
    Case(
        "budget of none",
        held(),
        fail(max_attempts=0),
        b"dead",
        {ACTIVE: None, DEAD: {J: 0.0}, rk(J): failed(1, b"dead"), FAILED: {b"count": b"1"}},
    ),
    Case("repeated terminal", buried(attempts=1), fail(), STATE),
    Case("gone", {}, fail(), STATE),
    Case("ghost", {ACTIVE: {J: FAR}}, fail(), STATE),
    Case("lane row", held(group=b"g"), fail(), NOT_NATIVE),
    Case("flow row", held(parent=b"JOB0"), fail(), NOT_NATIVE),
]

REQUEUE = [
    Case(
        "held",
        held(failures=1, stalled=1, last_error=b"boom"),
        requeue(),
        1,
        {
            ACTIVE: None,
            PENDING: {J: 0.0},
            rk(J): {
                **HELD,
                b"state": b"pending",
                b"failures": b"1",
                b"stalled": b"1",
                b"last_error": b"boom",
            },
        },
    ),
    Case(
        "flow row",
        held(parent=b"JOB0"),
        requeue(),
        1,
        {
            ACTIVE: None,
            PENDING: {J: 0.0},
            rk(J): {**HELD, b"state": b"pending", b"parent": b"JOB0"},
        },
    ),
    Case("gone", {}, requeue(), -1),
    Case("ghost", {ACTIVE: {J: FAR}}, requeue(), -1),
    Case("lane row", held(group=b"g"), requeue(), NOT_NATIVE),
]

REPROCESS = [
    Case(
        "dead",
        buried(lease_epoch=EARLIER),
        reprocess(),
        1,
        {
            DEAD: None,
            PENDING: {J: 0.0},
            rk(J): row(b"pending", attempts=3, failures=2, stalled=1, lease_epoch=EARLIER),
        },
    ),
    Case(
        "among others",
        both(buried(), buried(J2), waiting(J3)),
        reprocess(),
        1,
        {
            DEAD: {J2: 0.0},
            PENDING: {J: 0.0, J3: 0.0},
            rk(J): row(b"pending", attempts=3, failures=2, stalled=1),
        },
    ),
    Case(
        "flow row",
        buried(parent=b"JOB0"),
        reprocess(),
        1,
        {
            DEAD: None,
            PENDING: {J: 0.0},
            rk(J): row(b"pending", attempts=3, failures=2, stalled=1, parent=b"JOB0"),
        },
    ),
    Case("gone", {}, reprocess(), -1),
    Case("ghost", {DEAD: {J: 0.0}}, reprocess(), -1),
    Case("lane row", buried(group=b"g"), reprocess(), NOT_NATIVE),
    Case("lane row that is pending", waiting(group=b"g"), reprocess(), NOT_NATIVE),
    Case("pending", waiting(), reprocess(), STATE),
    Case("active", held(), reprocess(), STATE),
    Case("scheduled", scheduled(), reprocess(), STATE),
]

RESCHEDULE = [
    Case("at, later", scheduled(score=5_000.0), reschedule(), 1, {SCHEDULE: {J: FAR}}),
    Case("at, earlier", scheduled(), reschedule(ms=5_000), 1, {SCHEDULE: {J: 5_000.0}}),
    Case("in", scheduled(), reschedule(how="in", ms=60_000), 1, {SCHEDULE: {J: In(60_000)}}),
    Case("lane row", scheduled(group=b"g"), reschedule(ms=5_000), 1, {SCHEDULE: {J: 5_000.0}}),
    Case("flow row", scheduled(parent=b"JOB0"), reschedule(ms=5_000), 1, {SCHEDULE: {J: 5_000.0}}),
    Case("gone", {}, reschedule(), -1),
    Case("ghost", {SCHEDULE: {J: FAR}}, reschedule(), -1),
    Case("pending", waiting(), reschedule(), STATE),
    Case("active", held(), reschedule(), STATE),
    Case("dead", buried(), reschedule(), STATE),
    Case("neither at nor in", scheduled(), reschedule(how="AT "), ERR),
]


def due(*job_ids: bytes, score: float = LONG_AGO) -> Before:
    """Jobs whose time has come, one millisecond after the other."""
    return both(*(scheduled(job_id, score + index) for index, job_id in enumerate(job_ids)))


PROMOTE = [
    Case("empty", {}, promote(), 0),
    Case("nothing due", scheduled(), promote(), 0),
    Case(
        "one due",
        both(due(J), scheduled(J2)),
        promote(),
        1,
        {SCHEDULE: {J2: FAR}, PENDING: {J: 0.0}, rk(J): NEW},
    ),
    Case(
        "joins those that are ready",
        both(due(J2), waiting(J)),
        promote(),
        1,
        {SCHEDULE: None, PENDING: {J: 0.0, J2: 0.0}, rk(J2): NEW},
    ),
    Case(
        "limit, oldest first",
        due(J3, J2, J),
        promote(2),
        2,
        {SCHEDULE: {J: LONG_AGO + 2}, PENDING: {J3: 0.0, J2: 0.0}, rk(J3): NEW, rk(J2): NEW},
    ),
    Case(
        "equal scores by bytes",
        both(due(J3), due(J2), due(J)),
        promote(2),
        2,
        {SCHEDULE: {J3: LONG_AGO}, PENDING: {J: 0.0, J2: 0.0}, rk(J): NEW, rk(J2): NEW},
    ),
    Case(
        "a score before 1970",
        scheduled(score=-5.0),
        promote(),
        1,
        {SCHEDULE: None, PENDING: {J: 0.0}, rk(J): NEW},
    ),
    Case(
        "the least score",
        scheduled(score=float("-inf")),
        promote(),
        1,
        {SCHEDULE: None, PENDING: {J: 0.0}, rk(J): NEW},
    ),
    Case("the greatest score", scheduled(score=float("inf")), promote(), 0),
    Case(
        "other fields stay",
        scheduled(
            score=LONG_AGO,
            attempts=2,
            failures=1,
            stalled=1,
            last_error=b"boom",
            lease_epoch=EARLIER,
        ),
        promote(),
        1,
        {
            SCHEDULE: None,
            PENDING: {J: 0.0},
            rk(J): row(
                b"pending",
                attempts=2,
                failures=1,
                stalled=1,
                last_error=b"boom",
                lease_epoch=EARLIER,
            ),
        },
    ),
    Case(
        "flow row",
        scheduled(score=LONG_AGO, parent=b"JOB0"),
        promote(),
        1,
        {SCHEDULE: None, PENDING: {J: 0.0}, rk(J): row(b"pending", parent=b"JOB0")},
    ),
    Case(
        "paused",
        {**due(J), META: {b"paused": b"1"}},
        promote(),
        1,
        {SCHEDULE: None, PENDING: {J: 0.0}, rk(J): NEW},
    ),
    Case("ghost", {SCHEDULE: {J: LONG_AGO}}, promote(), 0, {SCHEDULE: None}),
    Case("ghost that is not due", {SCHEDULE: {J: FAR}}, promote(), 0),
    Case(
        "ghost among jobs",
        both(due(J, J3), {SCHEDULE: {J2: LONG_AGO}}),
        promote(),
        2,
        {SCHEDULE: None, PENDING: {J: 0.0, J3: 0.0}, rk(J): NEW, rk(J3): NEW},
    ),
    Case(
        "a page of ghosts",
        both({SCHEDULE: {J: LONG_AGO, J2: LONG_AGO}}, due(J3, score=LONG_AGO + 1)),
        promote(2),
        0,
        {SCHEDULE: {J3: LONG_AGO + 1}},
    ),
    Case("lane row", scheduled(score=LONG_AGO, group=b"g"), promote(), NOT_NATIVE),
    Case(
        "lane row that is pending",
        {SCHEDULE: {J: LONG_AGO}, rk(J): row(b"pending", group=b"g")},
        promote(),
        NOT_NATIVE,
    ),
    Case(
        "lane row in the page",
        both(due(J, J2), scheduled(J3, LONG_AGO + 5, group=b"g")),
        promote(),
        Refusal("EMQSTATE", "JOB3"),
    ),
    Case(
        "lane row and a ghost in the page",
        both({SCHEDULE: {J: LONG_AGO}}, scheduled(J3, LONG_AGO + 5, group=b"g")),
        promote(),
        Refusal("EMQSTATE", "JOB3"),
    ),
    Case(
        "lane row behind the page",
        both(due(J, J2), scheduled(J3, LONG_AGO + 5, group=b"g")),
        promote(2),
        2,
        {SCHEDULE: {J3: LONG_AGO + 5}, PENDING: {J: 0.0, J2: 0.0}, rk(J): NEW, rk(J2): NEW},
    ),
    Case(
        "lane row that is not due",
        both(due(J), scheduled(J3, group=b"g")),
        promote(),
        1,
        {SCHEDULE: {J3: FAR}, PENDING: {J: 0.0}, rk(J): NEW},
    ),
    *(
        Case(
            f"member that is {state.decode()}",
            both(due(J2), {SCHEDULE: {J: LONG_AGO + 5}, rk(J): row(state)}),
            promote(),
            STATE,
        )
        for state in (b"pending", b"active", b"dead", b"", b"scheduledd")
    ),
]


def expired(
    *job_ids: bytes, epoch: Any = THIS, stalled: bytes | int | None = None, **fields: bytes | int
) -> Before:
    """Leases that ran out, one millisecond after the other; `epoch` None is a script's lease."""
    extra: dict[str, Any] = dict(fields) if stalled is None else {"stalled": stalled, **fields}
    rows = {rk(job_id): row(b"active", attempts=1, **extra) for job_id in job_ids}
    if epoch is not None:
        rows = {key: {**content, b"lease_epoch": epoch} for key, content in rows.items()}
    return {ACTIVE: {job_id: LONG_AGO + index for index, job_id in enumerate(job_ids)}, **rows}


def swept(
    state: bytes, epoch: Any = THIS, stalled: bytes | int | None = None, **fields: bytes | int
) -> dict[bytes, Any]:
    """A row after the stall check took its lease."""
    extra: dict[str, Any] = dict(fields) if stalled is None else {"stalled": stalled, **fields}
    if state == b"dead":
        extra["last_error"] = b"stalled"
    content: dict[bytes, Any] = row(state, attempts=1, **extra)
    return content if epoch is None else {**content, b"lease_epoch": epoch}


STALLED = [
    Case("empty", {}, stalled_check(), [[], []]),
    Case("lease that runs", held(), stalled_check(), [[], []]),
    # An expiry that crossed a restart is recovered and not counted, whatever the budget.
    *(
        Case(
            f"crossed a restart, budget {budget}",
            expired(J, epoch=EARLIER),
            stalled_check(budget),
            [[J], []],
            {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", EARLIER)},
        )
        for budget in (1, 2, 3)
    ),
    Case(
        "crossed a restart, budget spent before",
        expired(J, epoch=EARLIER, stalled=5),
        stalled_check(1),
        [[J], []],
        {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", EARLIER, 5)},
    ),
    Case(
        "an empty stamp is a stamp",
        expired(J, epoch=b""),
        stalled_check(1),
        [[J], []],
        {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", b"")},
    ),
    # A stall of this process, and a lease without a stamp, are counted alike.
    *(
        Case(
            f"{'same epoch' if epoch is THIS else 'unstamped'}, stalled {before}, budget {budget}",
            expired(J, epoch=epoch, stalled=before),
            stalled_check(budget),
            [[J], []],
            {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", epoch, (before or 0) + 1)},
        )
        for epoch in (THIS, None)
        for before, budget in ((None, 2), (0, 2), (None, 3), (1, 3))
    ),
    *(
        Case(
            f"{'same epoch' if epoch is THIS else 'unstamped'}, stalled {before}, {budget} spent",
            expired(J, epoch=epoch, stalled=before),
            stalled_check(budget),
            [[], [J]],
            {
                ACTIVE: None,
                DEAD: {J: 0.0},
                rk(J): swept(b"dead", epoch, (before or 0) + 1),
                FAILED: {b"count": b"1"},
            },
        )
        for epoch in (THIS, None)
        for before, budget in ((None, 1), (0, 1), (1, 2), (2, 3), (7, 3))
    ),
    Case(
        "dead letter keeps the other fields",
        {
            **expired(J, failures=2, last_error=b"boom"),
            FAILED: {b"count": b"4", b"other": b"x"},
            COMPLETED: {b"count": b"9"},
        },
        stalled_check(),
        [[], [J]],
        {
            ACTIVE: None,
            DEAD: {J: 0.0},
            rk(J): swept(b"dead", stalled=1, failures=2),
            FAILED: {b"count": b"5", b"other": b"x"},
        },
    ),
    Case(
        "two die at once",
        {**expired(J, J2), FAILED: {b"count": b"4"}},
        stalled_check(),
        [[], [J, J2]],
        {
            ACTIVE: None,
            DEAD: {J: 0.0, J2: 0.0},
            rk(J): swept(b"dead", stalled=1),
            rk(J2): swept(b"dead", stalled=1),
            FAILED: {b"count": b"6"},
        },
    ),
    Case(
        "recovery keeps the last error",
        expired(J, failures=2, last_error=b"boom"),
        stalled_check(2),
        [[J], []],
        {
            ACTIVE: None,
            PENDING: {J: 0.0},
            rk(J): swept(b"pending", stalled=1, failures=2, last_error=b"boom"),
        },
    ),
    Case(
        "all kinds at once",
        both(
            expired(J, epoch=EARLIER),
            expired(J2),
            expired(J3, epoch=None, stalled=1),
            held(J4),
            {ACTIVE: {b"JOB5": LONG_AGO}},
        ),
        stalled_check(2),
        [[J, J2], [J3]],
        {
            ACTIVE: {J4: FAR},
            PENDING: {J: 0.0, J2: 0.0},
            DEAD: {J3: 0.0},
            rk(J): swept(b"pending", EARLIER),
            rk(J2): swept(b"pending", stalled=1),
            rk(J3): swept(b"dead", None, 2),
            FAILED: {b"count": b"1"},
        },
    ),
    Case(
        "limit, oldest deadline first",
        expired(J3, J2, J),
        stalled_check(2, 2),
        [[J3, J2], []],
        {
            ACTIVE: {J: LONG_AGO + 2},
            PENDING: {J3: 0.0, J2: 0.0},
            rk(J3): swept(b"pending", stalled=1),
            rk(J2): swept(b"pending", stalled=1),
        },
    ),
    Case(
        "equal deadlines by bytes",
        both(expired(J3), expired(J2), expired(J)),
        stalled_check(2, 1),
        [[J], []],
        {
            ACTIVE: {J2: LONG_AGO, J3: LONG_AGO},
            PENDING: {J: 0.0},
            rk(J): swept(b"pending", stalled=1),
        },
    ),
    Case(
        "paused",
        {**expired(J), META: {b"paused": b"1"}},
        stalled_check(2),
        [[J], []],
        {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", stalled=1)},
    ),
    Case(
        "flow row dies",
        expired(J, parent=b"JOB0"),
        stalled_check(),
        [[], [J]],
        {
            ACTIVE: None,
            DEAD: {J: 0.0},
            rk(J): swept(b"dead", stalled=1, parent=b"JOB0"),
            FAILED: {b"count": b"1"},
        },
    ),
    Case("ghost", {ACTIVE: {J: LONG_AGO}}, stalled_check(), [[], []], {ACTIVE: None}),
    Case("ghost that has not expired", {ACTIVE: {J: FAR}}, stalled_check(), [[], []]),
    Case(
        "a page of ghosts",
        both({ACTIVE: {J: LONG_AGO, J2: LONG_AGO}}, held(J3, LONG_AGO + 1)),
        stalled_check(1, 2),
        [[], []],
        {ACTIVE: {J3: LONG_AGO + 1}},
    ),
    Case("lane row", expired(J, group=b"g"), stalled_check(), NOT_NATIVE),
    Case(
        "lane row that is pending",
        {ACTIVE: {J: LONG_AGO}, rk(J): row(b"pending", group=b"g")},
        stalled_check(),
        NOT_NATIVE,
    ),
    Case(
        "lane row in the page",
        both(expired(J, J2), held(J3, LONG_AGO + 5, group=b"g")),
        stalled_check(),
        Refusal("EMQSTATE", "JOB3"),
    ),
    Case(
        "lane row and a ghost in the page",
        both({ACTIVE: {J: LONG_AGO}}, held(J3, LONG_AGO + 5, group=b"g")),
        stalled_check(),
        Refusal("EMQSTATE", "JOB3"),
    ),
    Case(
        "lane row behind the page",
        both(expired(J), held(J3, LONG_AGO + 5, group=b"g")),
        stalled_check(2, 1),
        [[J], []],
        {ACTIVE: {J3: LONG_AGO + 5}, PENDING: {J: 0.0}, rk(J): swept(b"pending", stalled=1)},
    ),
    Case(
        "lane row that has not expired",
        both(expired(J), held(J3, group=b"g")),
        stalled_check(2),
        [[J], []],
        {ACTIVE: {J3: FAR}, PENDING: {J: 0.0}, rk(J): swept(b"pending", stalled=1)},
    ),
    *(
        Case(
            f"member that is {state.decode()}",
            both(expired(J2), {ACTIVE: {J: LONG_AGO + 5}, rk(J): row(state)}),
            stalled_check(),
            STATE,
        )
        for state in (b"pending", b"scheduled", b"dead", b"", b"Active")
    ),
]

# --- what several verbs share -------------------------------------------------------------------

# The verbs that a holder says about its job.
HOLDERS: tuple[Callable[..., Call], ...] = (extend, complete, delay, fail, requeue)

STALE_TOKENS = [
    Case(f"stale token {token!r}", held(attempts=10), verb(J, token), STALE)
    for verb in HOLDERS
    for token in (
        b"1",
        b"9",
        b"11",
        b"010",
        b"+10",
        b" 10",
        b"10 ",
        b"10.0",
        b"10\x00",
        b"1e1",
        b"0xA",
        b"",
        b"\xff",
    )
]

WRONG_STATES = [
    Case(f"{name}", before, verb(J, b"1"), STATE)
    for verb in HOLDERS
    for name, before in (
        ("pending", waiting(attempts=1)),
        ("scheduled", scheduled(attempts=1)),
        ("dead", buried(attempts=1)),
        ("pending and stale", waiting(attempts=5)),
        ("state unknown", {rk(J): row(b"odd", attempts=1)}),
        ("lane row that is pending", waiting(attempts=1, group=b"g")),
    )
]

KINDS = [
    Case("kind", held(b"TASK1"), verb(b"TASK1"), KIND) for verb in (*HOLDERS, reprocess, reschedule)
]

# Lane before state before token: each verb that refuses lane rows says so whatever else is wrong.
LANES_FIRST = [
    Case(f"lane row that is {name}", before, verb(J, b"9"), NOT_NATIVE)
    for verb in (complete, delay, fail, requeue)
    for name, before in (
        ("stale", held(group=b"g")),
        ("scheduled", scheduled(group=b"g", attempts=1)),
        ("of an empty lane", held(group=b"")),
    )
]

# And the same for flow children, with the two verbs that would settle them.
CHILDREN_FIRST = [
    Case(f"flow row that is {name}", before, verb(J, b"9"), NOT_NATIVE)
    for verb in (complete, fail)
    for name, before in (
        ("stale", held(parent=b"JOB0")),
        ("scheduled", scheduled(parent=b"JOB0", attempts=1)),
        ("of an empty parent", held(parent=b"")),
    )
]

TABLES = (
    ENQUEUE,
    SCHEDULES,
    CLAIM,
    EXTEND,
    EXTENDS,
    COMPLETE,
    DELAY,
    FAIL,
    REQUEUE,
    REPROCESS,
    RESCHEDULE,
    PROMOTE,
    STALLED,
    STALE_TOKENS,
    WRONG_STATES,
    KINDS,
    LANES_FIRST,
    CHILDREN_FIRST,
)


@pytest.mark.parametrize(("case", "form"), params(*TABLES))
def test_verb(client: redis.Redis, case: Case, form: str) -> None:
    """The reply and the whole keyspace are as the table says."""
    check(client, case, form)


# --- types and numbers --------------------------------------------------------------------------

# For each verb a call that would work, and every key that it would touch.
WORKING: list[tuple[Before, Call, tuple[bytes, ...]]] = [
    ({}, enqueue(), (rk(J), PENDING)),
    ({}, schedule(), (rk(J), SCHEDULE)),
    (waiting(), claim(), (PENDING, ACTIVE, rk(J), META)),
    (held(), extend(), (ACTIVE, rk(J))),
    (held(), extends(), (ACTIVE, rk(J))),
    (held(), complete(), (ACTIVE, rk(J), COMPLETED)),
    (held(), delay(), (ACTIVE, SCHEDULE, rk(J))),
    (held(), fail(), (ACTIVE, SCHEDULE, DEAD, rk(J))),
    (held(), fail(max_attempts=1), (ACTIVE, SCHEDULE, DEAD, rk(J), FAILED)),
    (held(), requeue(), (ACTIVE, PENDING, rk(J))),
    (buried(), reprocess(), (rk(J), DEAD, PENDING)),
    (scheduled(), reschedule(), (rk(J), SCHEDULE)),
    (due(J), promote(), (SCHEDULE, PENDING, rk(J))),
    (expired(J), stalled_check(2), (ACTIVE, PENDING, DEAD, rk(J))),
    (expired(J), stalled_check(1), (ACTIVE, PENDING, DEAD, rk(J), FAILED)),
]


def _verbs() -> list[Any]:
    return [
        pytest.param(before, call, id=f"{call.verb[4:]}-{index}")
        for index, (before, call, _) in enumerate(WORKING)
    ]


@pytest.mark.parametrize(
    ("before", "call", "key"),
    [
        pytest.param(
            before, call, key, id=f"{call.verb[4:]}-{index}-{key.removeprefix(BASE).decode()}"
        )
        for index, (before, call, keys) in enumerate(WORKING)
        for key in keys
    ],
)
def test_key_of_another_type(client: redis.Redis, before: Before, call: Call, key: bytes) -> None:
    """A key of the wrong type, given or derived, is refused before anything is written."""
    other: Value = {b"x": b"y"} if key in (PENDING, ACTIVE, SCHEDULE, DEAD) else {b"x": 1.0}
    for wrong in (b"text", other):
        check(client, Case("", {**before, key: wrong}, call, WRONGTYPE), "key")


@pytest.mark.parametrize(("before", "call"), _verbs())
def test_number_of_keys(client: redis.Redis, before: Before, call: Call) -> None:
    """Only the numbers of keys that the verb knows are accepted, written as a plain integer."""
    keys = len(call.keys)
    known = {keys, keys + 1} if call.base is not None else {keys}
    rest = call.form("key")[2:]
    others = [number for number in range(-3, len(rest) + 3) if number not in known]
    texts: list[Any] = [
        b"",
        b"x",
        b" 2",
        b"2 ",
        b"+2",
        b"2.0",
        b"0x2",
        b"02",
        b"1e0",
        b"\x00",
        b"\xff",
    ]
    # Around the borders of 31, 32, 63 and 64 bits, where an unchecked conversion or product wraps.
    borders = [
        sign * (1 << bits) + offset
        for bits in (31, 32, 61, 63, 64)
        for sign in (1, -1)
        for offset in (-1, 0, 1, 2, 3)
    ]
    this = run_id(client)
    keyspace = keyspace_of(before, this)
    write_keyspace(client, keyspace)
    numbers = [*others, *texts, *borders]
    for number, reply in zip(
        numbers, send_all(client, [(call.verb, n, *rest) for n in numbers]), strict=True
    ):
        assert reply == ERR, (number, reply)
    assert read_keyspace(client) == keyspace


@pytest.mark.parametrize("form", ["key", "arg"])
@pytest.mark.parametrize(("before", "call"), _verbs())
def test_number_of_arguments(client: redis.Redis, before: Before, call: Call, form: str) -> None:
    """One argument too few or too many is refused."""
    command = call.form(form)
    keyspace = keyspace_of(before, run_id(client))
    write_keyspace(client, keyspace)
    # EXTENDS without a pair is a whole command.
    whole = {len(command), len(command) - 2 * (call.verb == "EMQ.EXTENDS")}
    lengths = [length for length in range(1, len(command)) if length not in whole]
    commands = [*(command[:length] for length in lengths), (*command, b"1")]
    for wrong, reply in zip(commands, send_all(client, commands), strict=True):
        assert reply == ERR, (wrong, reply)
    assert read_keyspace(client) == keyspace


@pytest.mark.parametrize(
    "other",
    [
        b"emq:{other}:",
        b"emq:{orders}",
        b"emq:{orders}:p",
        b"emq:{order}:",
        b"EMQ:{orders}:",
        b"emq:{orders}:\x00",
        b"",
        b"emq:{orders}:pending",
    ],
)
@pytest.mark.parametrize(
    ("before", "call"),
    [
        param
        for param in _verbs()
        if param.values[1].base is not None or BASE in param.values[1].arguments
    ],
)
def test_base_of_another_queue(
    client: redis.Redis, before: Before, call: Call, other: bytes
) -> None:
    """A base that is not the prefix of each key is refused, as key and as argument."""
    arguments = tuple(other if argument == BASE else argument for argument in call.arguments)
    moved = replace(call, base=None if call.base is None else other, arguments=arguments)
    for form in ("key", "arg") if call.base is not None else ("key",):
        check(client, Case("", before, moved, ERR), form)


@pytest.mark.parametrize(
    "impossible",
    [
        b"emq:{}:",
        b"emq:{a{b}:",
        b"emq:{a}b}:",
        b"emq:{}}:",
        b"emq:{{}:",
        b"emq:{a}:{b}:",
        b"emq:}:",
    ],
)
@pytest.mark.parametrize(("before", "call"), _verbs())
def test_base_of_a_queue_that_cannot_be(
    client: redis.Redis, before: Before, call: Call, impossible: bytes
) -> None:
    """A name that is empty or holds braces would tear the keys out of their slot: refused, also
    where all keys agree on it."""

    def moved(part: Any) -> Any:
        return part.replace(BASE, impossible) if isinstance(part, bytes) else part

    elsewhere = replace(
        call,
        keys=tuple(map(moved, call.keys)),
        arguments=tuple(map(moved, call.arguments)),
        base=moved(call.base),
    )
    for form in ("key", "arg") if call.base is not None else ("key",):
        check(client, Case("", before, elsewhere, ERR), form)


@pytest.mark.parametrize(
    ("before", "call", "position"),
    [
        pytest.param(*param.values, position, id=f"{param.id}-{position}")
        for param in _verbs()
        if param.values[1].base is not None or BASE in param.values[1].arguments
        for position in range(len(param.values[1].keys))
    ],
)
def test_key_of_another_queue(
    client: redis.Redis, before: Before, call: Call, position: int
) -> None:
    """One key of another queue among the right ones is refused."""
    keys = list(call.keys)
    keys[position] = keys[position].replace(b"{orders}", b"{other}")
    moved = replace(call, keys=tuple(keys))
    for form in ("key", "arg") if call.base is not None else ("key",):
        check(client, Case("", before, moved, ERR), form)


# Above this a score (a double) does not hold every integer.
LAST_MS = (1 << 53) - 1
# Not integers, or not ones that this many bits hold.
NO_NUMBERS: tuple[Any, ...] = (
    *(
        b"",
        b"x",
        b" 1",
        b"1 ",
        b"+1",
        b"01",
        b"1.0",
        b"1.5",
        b"1e3",
        b"0x10",
        b"nan",
        b"inf",
        b"1\x00",
        b"\xff",
        b"--1",
    ),
    *(1 << 63, 1 << 64, -(1 << 63) - 1, b"9" * 400),
)
NO_TIMES = (*NO_NUMBERS, -1, LAST_MS + 1, (1 << 63) - 1, -(1 << 63))
NO_LIMITS = (*NO_NUMBERS, 0, -1, -(1 << 63))
NO_BUDGETS = (*NO_NUMBERS, -1, -(1 << 63))


@pytest.mark.parametrize(
    ("before", "call_with", "numbers"),
    [
        pytest.param(waiting(), claim, NO_TIMES, id="CLAIM-lease_ms"),
        pytest.param(held(), lambda n: extend(lease_ms=n), NO_TIMES, id="EXTEND-lease_ms"),
        pytest.param(held(), lambda n: extends(lease_ms=n), NO_TIMES, id="EXTENDS-lease_ms"),
        pytest.param({}, lambda n: schedule(ms=n), NO_TIMES, id="SCHEDULE-at"),
        pytest.param(
            {}, lambda n: schedule(how="in", ms=n), (*NO_TIMES, LAST_MS), id="SCHEDULE-in"
        ),
        pytest.param(scheduled(), lambda n: reschedule(ms=n), NO_TIMES, id="RESCHEDULE-at"),
        pytest.param(
            scheduled(),
            lambda n: reschedule(how="in", ms=n),
            (*NO_TIMES, LAST_MS),
            id="RESCHEDULE-in",
        ),
        pytest.param(
            held(), lambda n: delay(delay_ms=n), (*NO_TIMES, LAST_MS), id="DELAY-delay_ms"
        ),
        pytest.param(held(), lambda n: fail(delay_ms=n), (*NO_TIMES, LAST_MS), id="FAIL-delay_ms"),
        pytest.param(held(), lambda n: fail(max_attempts=n), NO_BUDGETS, id="FAIL-max_attempts"),
        pytest.param(due(J), promote, NO_LIMITS, id="PROMOTE-limit"),
        pytest.param(
            expired(J), lambda n: stalled_check(2, n), NO_LIMITS, id="STALLED.CHECK-limit"
        ),
        pytest.param(expired(J), stalled_check, NO_BUDGETS, id="STALLED.CHECK-max_stalled"),
    ],
)
def test_number_out_of_bounds(
    client: redis.Redis, before: Before, call_with: Callable[[Any], Call], numbers: Sequence[Any]
) -> None:
    """A number that is none, or beyond its bounds, is refused."""
    keyspace = keyspace_of(before, run_id(client))
    write_keyspace(client, keyspace)
    for number, reply in zip(
        numbers, send_all(client, [call_with(n).form("key") for n in numbers]), strict=True
    ):
        assert reply == ERR, (number, reply)
    assert read_keyspace(client) == keyspace


# 2^52 ms are 142,000 years: a span whose end still is an exact score.
LONG_SPAN = 1 << 52
MOST = (1 << 63) - 1

BORDERS = [
    Case(
        "at the last ms",
        {},
        schedule(ms=LAST_MS),
        1,
        {rk(J): SCHEDULE_NEW, SCHEDULE: {J: float(LAST_MS)}},
    ),
    Case("at the first ms", {}, schedule(ms=0), 1, {rk(J): SCHEDULE_NEW, SCHEDULE: {J: 0.0}}),
    Case(
        "in long",
        {},
        schedule(how="in", ms=LONG_SPAN),
        1,
        {rk(J): SCHEDULE_NEW, SCHEDULE: {J: In(LONG_SPAN)}},
    ),
    Case("last ms", scheduled(), reschedule(ms=LAST_MS), 1, {SCHEDULE: {J: float(LAST_MS)}}),
    Case(
        "no lease",
        waiting(),
        claim(0),
        [J, b"p", 1],
        {PENDING: None, ACTIVE: {J: In(0)}, rk(J): claimed()},
    ),
    Case(
        "long lease",
        waiting(),
        claim(LONG_SPAN),
        [J, b"p", 1],
        {PENDING: None, ACTIVE: {J: In(LONG_SPAN)}, rk(J): claimed()},
    ),
    Case(
        "no more lease",
        held(),
        extend(lease_ms=0),
        1,
        {ACTIVE: {J: In(0)}, rk(J): {**HELD, b"lease_epoch": THIS}},
    ),
    Case(
        "endless budget",
        held(failures=7),
        fail(max_attempts=MOST),
        b"scheduled",
        {ACTIVE: None, SCHEDULE: {J: In(5_000)}, rk(J): failed(8, b"scheduled")},
    ),
    Case(
        "endless limit", due(J), promote(MOST), 1, {SCHEDULE: None, PENDING: {J: 0.0}, rk(J): NEW}
    ),
    Case(
        "endless limit and budget",
        expired(J, stalled=7),
        stalled_check(MOST, MOST),
        [[J], []],
        {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", stalled=8)},
    ),
    Case(
        "no stall allowed",
        expired(J),
        stalled_check(0),
        [[], [J]],
        {ACTIVE: None, DEAD: {J: 0.0}, rk(J): swept(b"dead", stalled=1), FAILED: {b"count": b"1"}},
    ),
    # Counters are integers beyond what a double holds, and end well before an addition would wrap.
    Case(
        "many attempts",
        waiting(attempts=LAST_MS + 1),
        claim(),
        [J, b"p", LAST_MS + 2],
        {PENDING: None, ACTIVE: {J: In(30_000)}, rk(J): claimed(LAST_MS + 2)},
    ),
    *(
        Case(f"attempts {text!r}", waiting(attempts=text), claim(), STATE)
        for text in (b"%d" % MOST, b"x", b"", b"1.0", b"-", b"9" * 30)
    ),
    *(
        Case(f"failures {text!r}", held(failures=text), fail(), STATE)
        for text in (b"%d" % MOST, b"x", b"", b"1.0", b"9" * 30)
    ),
    *(
        Case(
            f"stalled {text!r}",
            both(expired(J2), expired(J, stalled=text)),
            stalled_check(5),
            STATE,
        )
        for text in (b"%d" % MOST, b"x", b"", b"1.0", b"9" * 30)
    ),
    Case(
        "a counter that is no number, but the expiry is not counted",
        expired(J, epoch=EARLIER, stalled=b"x"),
        stalled_check(),
        [[J], []],
        {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", EARLIER, b"x")},
    ),
    *(
        Case(f"completed {text!r}", {**held(), COMPLETED: {b"count": text}}, complete(), ERR)
        for text in (b"%d" % MOST, b"x", b"")
    ),
    *(
        Case(f"failed {text!r}", {**held(), FAILED: {b"count": text}}, fail(max_attempts=1), ERR)
        for text in (b"%d" % MOST, b"x", b"")
    ),
    Case(
        "failed many times",
        {**expired(J, J2), FAILED: {b"count": b"%d" % (LAST_MS + 1)}},
        stalled_check(),
        [[], [J, J2]],
        {
            ACTIVE: None,
            DEAD: {J: 0.0, J2: 0.0},
            rk(J): swept(b"dead", stalled=1),
            rk(J2): swept(b"dead", stalled=1),
            FAILED: {b"count": b"%d" % (LAST_MS + 3)},
        },
    ),
    Case(
        "failed past the end by two",
        {**expired(J, J2), FAILED: {b"count": b"%d" % (MOST - 1)}},
        stalled_check(),
        ERR,
    ),
    Case(
        "failed is no number, nobody dies",
        {**expired(J), FAILED: {b"count": b"x"}},
        stalled_check(2),
        [[J], []],
        {ACTIVE: None, PENDING: {J: 0.0}, rk(J): swept(b"pending", stalled=1)},
    ),
    Case(
        "row without attempts", {ACTIVE: {J: FAR}, rk(J): {b"state": b"active"}}, requeue(), STALE
    ),
    Case("row without state", {ACTIVE: {J: FAR}, rk(J): {b"attempts": b"1"}}, requeue(), STATE),
]


@pytest.mark.parametrize(("case", "form"), params(BORDERS))
def test_border(client: redis.Redis, case: Case, form: str) -> None:
    """Numbers at their last valid value, and counters that hold no number."""
    check(client, case, form)


def test_due_this_very_millisecond(client: redis.Redis) -> None:
    """What is due or expires now is swept now: the score may equal the clock."""
    write_keyspace(client, {})
    moment = [
        schedule(how="in", ms=0).form("key"),
        promote().form("key"),
        claim(0).form("key"),
        stalled_check(1000).form("key"),
        claim().form("key"),
    ]
    # In one pipeline the sweep runs in the same millisecond as what it sweeps, nearly every time.
    for attempt in range(30):
        replies = send_all(client, [*moment, complete(J, b"2").form("key")])
        assert replies == [1, 1, [J, b"p", 1], [[J], []], [J, b"p", 2], 1], attempt


def test_not_a_millisecond_early(client: redis.Redis) -> None:
    """What moved was due by the clock of the server, which is asked right behind the sweep."""
    write_keyspace(client, {})
    watched: list[tuple[list[tuple[Any, ...]], tuple[Any, ...], bytes]] = [
        ([schedule(how="in", ms=3).form("key")], promote().form("key"), SCHEDULE),
        ([claim(3).form("key")], stalled_check(1000).form("key"), ACTIVE),
    ]
    for _ in range(30):
        for begin, sweep, source in watched:
            send_all(client, begin)
            _, due = send(client, "ZRANGE", source, 0, -1, "WITHSCORES")
            moved: Any = 0
            while moved in (0, [[], []]):
                moved, (seconds, microseconds) = send_all(client, [sweep, ("TIME",)])
            assert int(seconds) * 1000 + int(microseconds) // 1000 >= float(due)
        assert send_all(client, [claim().form("key")])[0][0] == J
        send(client, "DEL", ACTIVE, rk(J))


LONG_ID = b"JOB" + b"\xfe" * 1_000_000


def test_very_long_id(client: redis.Redis) -> None:
    """An id of a megabyte lives a whole life, and an error that names it stays short."""
    write_keyspace(client, {})
    long = LONG_ID
    assert send(client, *enqueue(long, long).form("key")) == 1
    assert send(client, *claim().form("key")) == [long, long, 1]
    refused = send(client, *complete(long, b"2").form("key"))
    assert refused == STALE
    assert len(refused.text) < 2_000
    assert send(client, *fail(long, delay_ms=0).form("key")) == b"scheduled"
    assert send(client, *promote().form("key")) == 1
    assert send(client, *claim(0).form("key")) == [long, long, 2]
    assert send(client, *stalled_check().form("key")) == [[], [long]]
    assert send(client, *reprocess(long).form("key")) == 1
    assert send(client, *claim().form("key")) == [long, long, 3]
    assert send(client, *complete(long, b"3").form("key")) == 1
    assert set(read_keyspace(client)) == {BRAND_KEY, COMPLETED, FAILED}


def test_many_ids_at_once(client: redis.Redis) -> None:
    """A sweep without an end in sight moves thousands of ids, each exactly once."""
    # More than one effect holds (16,384), and no multiple of it.
    ids = [b"JOB%06d" % number for number in range(17_000)]
    this = run_id(client)
    write_keyspace(client, {})
    put: list[tuple[Any, ...]] = []
    for job_id in ids:
        put.append(("HSET", rk(job_id), "state", "scheduled", "payload", "p", "attempts", 0))
        put.append(("ZADD", SCHEDULE, LONG_AGO, job_id))
    send_all(client, put)
    assert send(client, *promote(MOST).form("key")) == len(ids)
    assert send(client, "ZRANGE", PENDING, 0, -1) == ids
    leased = send_all(client, [claim(0).form("key")] * len(ids))
    assert leased == [[job_id, b"p", 1] for job_id in ids]
    pairs = [part for job_id in ids for part in (job_id, b"1")]
    assert send(client, *extends(*pairs, lease_ms=0).form("key")) == []
    assert send(client, *stalled_check(2, MOST).form("key")) == [ids, []]
    assert send(client, "ZRANGE", PENDING, 0, -1) == ids
    assert send(client, "EXISTS", ACTIVE, SCHEDULE, DEAD, FAILED) == 0
    last = send(client, "HGETALL", rk(ids[-1]))
    assert dict(zip(last[::2], last[1::2], strict=True)) == swept(b"pending", this, 1)
    send(client, "FLUSHALL")


# --- the version and the command table ----------------------------------------------------------


def test_version_tokens(client: redis.Redis) -> None:
    """EMQ.VERSION answers the fourteen tokens, in the order of the table, and takes no argument."""
    assert send(client, "EMQ.VERSION") == TOKENS
    assert send(client, "EMQ.VERSION", 0) == ERR


def test_version_and_commands_agree(client: redis.Redis) -> None:
    """A token is present exactly when its command is registered."""
    listed = {name.decode().lower() for name in send(client, "COMMAND", "LIST")}
    # `claim.pause`, `complete.flat` and `fail.flat` name an ability of the verb before the dot.
    verbs = {
        token.removesuffix(".pause").removesuffix(".flat") for token in TOKENS.decode().split()
    }
    assert {name for name in listed if name.startswith("emq.")} == {
        f"emq.{verb}" for verb in verbs
    } | {"emq.version"}


# What is done to a key: a user of an ACL who may only read it, or only write, is let in by this.
READ = b"RO access"
ADDED_TO = b"RW insert"
TAKEN_FROM = b"RW delete"
READ_AND_TAKEN = b"RW access delete"
CHANGED = b"RW access update"

# Each verb with its keys and arguments as COMMAND DOCS names them (`base` among the keys where it
# may be one), what is done to its keys, and its own flags: a sweep and EXTENDS take many jobs, and
# only who adds one needs memory.
DESCRIBED: list[tuple[Call, str, tuple[bytes, ...], str]] = [
    (enqueue(), "row pending id payload", (ADDED_TO, ADDED_TO), "fast denyoom"),
    (claim(), "pending active base lease_ms", (READ_AND_TAKEN, ADDED_TO, CHANGED), "fast"),
    (extend(), "active row id token lease_ms", (CHANGED, CHANGED), "fast"),
    (extends(), "active base lease_ms lease", (CHANGED, CHANGED), ""),
    (complete(), "active row id token base", (TAKEN_FROM, READ_AND_TAKEN), "fast"),
    (schedule(), "row schedule id payload when ms", (ADDED_TO, ADDED_TO), "fast denyoom"),
    (promote(), "schedule pending base limit", (READ_AND_TAKEN, ADDED_TO, CHANGED), ""),
    (reschedule(), "row schedule id when ms", (READ, CHANGED), "fast"),
    (delay(), "active schedule row id token delay_ms", (TAKEN_FROM, ADDED_TO, CHANGED), "fast"),
    (
        fail(),
        "active schedule dead row id token delay_ms max_attempts error base",
        (TAKEN_FROM, ADDED_TO, ADDED_TO, CHANGED),
        "fast",
    ),
    (reprocess(), "row dead pending id", (CHANGED, TAKEN_FROM, ADDED_TO), "fast"),
    (requeue(), "active pending row id token", (TAKEN_FROM, ADDED_TO, CHANGED), "fast"),
    (
        stalled_check(),
        "active pending dead base max_stalled limit",
        (READ_AND_TAKEN, ADDED_TO, ADDED_TO, CHANGED),
        "",
    ),
]


@pytest.mark.parametrize(
    ("call", "words", "uses", "own"),
    [pytest.param(*described, id=described[0].verb[4:]) for described in DESCRIBED],
)
def test_description(
    client: redis.Redis, call: Call, words: str, uses: tuple[bytes, ...], own: str
) -> None:
    """COMMAND tells clients, proxies and the ACL what the verb is, and what it does to each key."""
    for form in ("key", "arg"):
        command = call.form(form)
        keys = command[2 : 2 + command[1]]
        found = send(client, "COMMAND", "GETKEYSANDFLAGS", *command)
        assert [(key, b" ".join(flags)) for key, flags in found] == [
            *zip(keys, uses[: len(keys)], strict=True)
        ]
    # As long in both forms of the base; EXTENDS may have no pair.
    length = len(call.form("key"))
    arity = 2 - length if call.verb == "EMQ.EXTENDS" else length
    flags = {b"write", b"module", b"movablekeys", *own.encode().split()}
    speed = b"@fast" if "fast" in own else b"@slow"
    categories = told(client, b"@write", b"@sortedset", b"@hash", speed)
    assert info_of(client, call.verb) == (arity, flags, categories)
    ((*_, spec),) = key_specs_of(client, call.verb)
    assert pairs(spec)[b"type"] == b"keynum"
    arguments = [pairs(argument) for argument in docs_of(client, call.verb)[b"arguments"]]
    assert [each[b"name"].decode() for each in arguments] == ["numkeys", *words.split()]
    are_keys = [each[b"type"] == b"key" for each in arguments[1:]]
    assert are_keys == [number < len(uses) for number in range(len(are_keys))]


def test_description_of_the_version(client: redis.Redis) -> None:
    """It has neither keys nor arguments, and reads."""
    flags = {b"readonly", b"module", b"fast"}
    assert info_of(client, "EMQ.VERSION") == (1, flags, told(client, b"@read", b"@fast"))
    assert b"arguments" not in docs_of(client, "EMQ.VERSION")
    assert key_specs_of(client, "EMQ.VERSION") == []


def info_of(client: redis.Redis, verb: str) -> tuple[int, set[bytes], set[bytes]]:
    """Arity, flags and ACL categories."""
    (entry,) = send(client, "COMMAND", "INFO", verb)
    return entry[1], set(entry[2]), set(entry[6])


def key_specs_of(client: redis.Redis, verb: str) -> list[Any]:
    (entry,) = send(client, "COMMAND", "INFO", verb)
    return list(entry[8])


def docs_of(client: redis.Redis, verb: str) -> dict[bytes, Any]:
    _, docs = send(client, "COMMAND", "DOCS", verb)
    return pairs(docs)


def pairs(flat: list[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def told(client: redis.Redis, *categories: bytes) -> set[bytes]:
    """The categories, where the server lets a module say so."""
    return set(categories) if b"valkey_version" in send(client, "INFO", "server") else set()
