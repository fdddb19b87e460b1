"""Hostile calls: any verb with any number of keys, any words, on any data. The server stays up and
keeps its promises.

The calls are the same in every run. `EMQ_EXAMPLES=50000 pytest tests/test_jobcore_fuzz.py` tries
that many others.
"""

from __future__ import annotations

import os
from typing import Any

from echomq import (
    ACTIVE,
    BASE,
    BRAND,
    BRAND_KEY,
    DEAD,
    FAR,
    PENDING,
    SCHEDULE,
    SET_OF_STATE,
    SETS,
    Keyspace,
    Refusal,
    base,
    client_of,
    read_keyspace,
    rk,
    row,
    run_id,
    send,
    send_all,
    write_keyspace,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from emqtimerd.devnode import DevNode

ASKED = os.environ.get("EMQ_EXAMPLES")
# Batches of up to 8 calls: some 3 s here.
EXAMPLES = 250

given_calls = settings(
    max_examples=int(ASKED or EXAMPLES),
    derandomize=ASKED is None,
    database=None,
    deadline=None,
    # One server for all examples is the point.
    suppress_health_check=list(HealthCheck),
)

NAMES = tuple(name.encode() for name in SETS)
LONG = b"JOB" + b"\xff" * 70_000
IDS = (
    b"JOB1",
    b"JOB2",
    b"JOB3",
    b"JOB4",
    b"JOBlane",
    b"JOBflow",
    b"JOBghost",
    b"JOBstring",
    b"TASK1",
    b"",
    b"JOB",
    LONG,
)
LONG_AGO = 1_000.0


def a_queue(epoch: bytes) -> Keyspace:
    """A queue with something of everything, the broken things of other people included."""
    held: dict[str, bytes | int] = {"attempts": 1, "lease_epoch": epoch}
    return {
        PENDING: {b"JOB1": 0.0, b"JOBghost": 0.0},
        ACTIVE: {b"JOB2": LONG_AGO, b"JOB3": FAR, b"JOBflow": LONG_AGO},
        SCHEDULE: {b"JOB4": LONG_AGO},
        DEAD: {b"JOB5": 0.0},
        rk(b"JOB1"): row(b"pending"),
        rk(b"JOB2"): row(b"active", **held),
        rk(b"JOB3"): row(b"active", **held),
        rk(b"JOB4"): row(b"scheduled"),
        rk(b"JOB5"): row(b"dead", failures=3, last_error=b"boom"),
        rk(b"JOBlane"): row(b"active", group=b"g"),
        rk(b"JOBflow"): row(b"active", parent=b"JOB1", **held),
        rk(b"JOBstring"): b"text",
        base("strings") + b"pending": b"text",
        base("strings") + b"active": {b"x": b"y"},
        base("other") + b"pending": {b"JOB1": 0.0},
        base("other") + b"job:JOB1": row(b"pending"),
        b"plain": {b"JOB1": 1.0},
    }


numbers: st.SearchStrategy[Any] = st.one_of(
    st.integers(-3, 9),
    st.sampled_from(
        [
            sign * (1 << bits) + off
            for bits in (31, 32, 53, 61, 63, 64)
            for sign in (1, -1)
            for off in (-1, 0, 1)
        ]
    ),
    st.sampled_from((b"", b"x", b"1.5", b" 1", b"1\x00", b"0x1", b"+1", b"nan", b"9" * 99)),
)
ids = st.one_of(
    st.sampled_from(IDS),
    st.binary(max_size=9),
    st.binary(max_size=9).map(lambda tail: b"JOB" + tail),
)
queues = st.sampled_from(("orders", "orders", "orders", "other", "strings", "none"))
keys = st.one_of(
    st.builds(
        lambda queue, name: base(queue) + name,
        queues,
        st.sampled_from((*NAMES, b"", b"meta", b"metrics:failed")),
    ),
    st.builds(lambda queue, job_id: base(queue) + b"job:" + job_id, queues, ids),
    st.sampled_from(
        (
            b"",
            b"plain",
            b"emq:{",
            b"emq:{}:",
            b"emq:{orders}",
            b"{orders}",
            BRAND_KEY,
            b"emq:{a}b}:pending",
            LONG,
        )
    ),
)
words: st.SearchStrategy[Any] = st.one_of(
    keys, ids, numbers, st.sampled_from((b"at", b"in", b"AT")), st.binary(max_size=20)
)
VERBS = (
    *("EMQ.ENQUEUE", "EMQ.CLAIM", "EMQ.EXTEND", "EMQ.EXTENDS", "EMQ.COMPLETE", "EMQ.SCHEDULE"),
    *("EMQ.PROMOTE", "EMQ.RESCHEDULE", "EMQ.DELAY", "EMQ.FAIL", "EMQ.REPROCESS", "EMQ.REQUEUE"),
    *("EMQ.STALLED.CHECK", "EMQ.VERSION"),
)
verbs = st.sampled_from(VERBS)

# Whatever comes: any verb, any words.
noise = st.tuples(verbs, st.lists(words, max_size=14)).map(lambda call: (call[0], *call[1]))


@st.composite
def near_misses(draw: st.DrawFn) -> tuple[Any, ...]:
    """A call that is right, but for a word or two."""
    queue, job_id = draw(queues), draw(ids)
    prefix = base(queue)
    row_key = prefix + b"job:" + job_id
    pending, active, schedule, dead = (prefix + name for name in NAMES)
    token, ms, limit = (
        draw(st.sampled_from((b"0", b"1", b"2", b"01"))),
        draw(numbers),
        draw(numbers),
    )
    call: list[Any] = list(
        draw(
            st.sampled_from(
                (
                    ("EMQ.ENQUEUE", 2, row_key, pending, job_id, b"p"),
                    ("EMQ.CLAIM", 3, pending, active, prefix, ms),
                    ("EMQ.EXTEND", 2, active, row_key, job_id, token, ms),
                    (
                        "EMQ.EXTENDS",
                        2,
                        active,
                        prefix,
                        ms,
                        job_id,
                        token,
                        b"JOB2",
                        b"1",
                        b"JOBstring",
                        b"1",
                    ),
                    ("EMQ.EXTENDS", 1, active, prefix, ms, job_id, token, job_id, token),
                    ("EMQ.COMPLETE", 2, active, row_key, job_id, token, prefix),
                    ("EMQ.SCHEDULE", 2, row_key, schedule, job_id, b"p", b"in", ms),
                    ("EMQ.PROMOTE", 3, schedule, pending, prefix, limit),
                    ("EMQ.PROMOTE", 2, schedule, pending, prefix, limit),
                    ("EMQ.RESCHEDULE", 2, row_key, schedule, job_id, b"at", ms),
                    ("EMQ.DELAY", 3, active, schedule, row_key, job_id, token, ms),
                    (
                        "EMQ.FAIL",
                        4,
                        active,
                        schedule,
                        dead,
                        row_key,
                        job_id,
                        token,
                        ms,
                        limit,
                        b"boom",
                        prefix,
                    ),
                    ("EMQ.REPROCESS", 3, row_key, dead, pending, job_id),
                    ("EMQ.REQUEUE", 3, active, pending, row_key, job_id, token),
                    ("EMQ.STALLED.CHECK", 4, active, pending, dead, prefix, limit, limit),
                )
            )
        )
    )
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(1, len(call) - 1))
        match draw(st.integers(0, 3)):
            case 0:
                call[place] = draw(words)
            case 1:
                del call[place]
            case 2:
                call.insert(place, draw(words))
            case 3:
                call[1] = draw(numbers)
    return tuple(call)


calls = st.one_of(near_misses(), near_misses(), noise)


def queue_of(key: bytes) -> bytes:
    """The base that a key belongs to, or the key itself."""
    head, mark, _ = key.partition(b"}:")
    return head + mark if key.startswith(b"emq:{") else key


def kinds(keyspace: Keyspace) -> dict[bytes, str]:
    """What type each key is of."""
    return {
        key: "string"
        if isinstance(value, bytes)
        else "hash"
        if any(isinstance(item, bytes) for item in value.values())
        else "zset"
        for key, value in keyspace.items()
    }


def test_any_call(node: DevNode) -> None:
    """A refused call changes nothing; an accepted one only what a verb may change, in the queue
    that it names.
    """
    client = client_of(node.url)
    epoch = run_id(client)

    @given_calls
    @given(st.lists(calls, min_size=1, max_size=8))
    def call_all(batch: list[tuple[Any, ...]]) -> None:
        write_keyspace(client, a_queue(epoch))
        before = read_keyspace(client)
        for call in batch:
            reply = send(client, *call)
            after = read_keyspace(client)
            if isinstance(reply, Refusal) or call[0] == "EMQ.VERSION":
                assert after == before, (call, reply)
            changed = {
                key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
            }
            assert {queue_of(key) for key in changed} <= {
                BASE,
                base("other"),
                base("none"),
                base("strings"),
            }
            assert {queue_of(key) for key in changed} <= {
                queue_of(word) for word in call if isinstance(word, bytes)
            }
            was, now = kinds(before), kinds(after)
            assert not [key for key in was.keys() & now.keys() if was[key] != now[key]], call
            check_rows(before, after, call)
            before = after
        assert before[BRAND_KEY] == BRAND
        assert send(client, "PING") == b"PONG"

    call_all()


def check_rows(before: Keyspace, after: Keyspace, call: tuple[Any, ...]) -> None:
    """Rows that a call touched have one place, the one that their state names; ghosts and other
    people's rows stay as they are.
    """
    for key, fields in after.items():
        prefix, is_row, job_id = key.partition(b"job:")
        if not is_row or not isinstance(fields, dict) or before.get(key) == fields:
            continue
        places = [
            name
            for name in SET_OF_STATE.values()
            if job_id in after.get(prefix + name.encode(), {})
        ]
        ghostly = [
            name
            for name in SET_OF_STATE.values()
            if job_id in before.get(prefix + name.encode(), {}) and key not in before
        ]
        assert SET_OF_STATE[fields[b"state"]] in places, call
        assert set(places) <= {SET_OF_STATE[fields[b"state"]], *ghostly}, call
        if key not in before:
            assert call[0] in ("EMQ.ENQUEUE", "EMQ.SCHEDULE"), "nothing else makes a row"


def test_getkeys_of_any_call(node: DevNode) -> None:
    """COMMAND GETKEYS answers with words of the call, or an error; whatever numkeys says."""
    client = client_of(node.url)

    @given_calls
    @given(st.lists(calls, min_size=1, max_size=20))
    @example([("EMQ.PROMOTE", 1 << 62), ("EMQ.PROMOTE", -(1 << 63), b"x"), ("EMQ.CLAIM",)])
    def ask_all(batch: list[tuple[Any, ...]]) -> None:
        for call, reply in zip(
            batch, send_all(client, [("COMMAND", "GETKEYS", *call) for call in batch]), strict=True
        ):
            if isinstance(reply, Refusal):
                continue
            said = [word if isinstance(word, bytes) else str(word).encode() for word in call]
            assert reply == said[2 : 2 + len(reply)]
            assert len(reply) == int(call[1])
        assert send(client, "PING") == b"PONG"

    ask_all()


def test_any_call_in_a_script(any_node: DevNode) -> None:
    """Hostile calls inside a script or a transaction end as they do outside."""
    client = client_of(any_node.url)
    epoch = run_id(client)

    @settings(given_calls, max_examples=int(ASKED or 40))
    @given(st.lists(calls, min_size=1, max_size=20))
    def run_all(batch: list[tuple[Any, ...]]) -> None:
        write_keyspace(client, a_queue(epoch))
        script = "return redis.call(ARGV[1], unpack(ARGV, 2))"
        send_all(client, [("EVAL", script, 0, *call) for call in batch])
        assert send_all(client, [("MULTI",), *batch, ("EXEC",)])[0] == b"OK"
        assert send(client, "PING") == b"PONG"

    run_all()
