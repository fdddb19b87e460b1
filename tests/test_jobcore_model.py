"""Random histories of every verb on a real server, compared step by step with a model in plain
Python.

The histories are the same in every run. `EMQ_EXAMPLES=5000 pytest tests/test_jobcore_model.py`
looks at that many others.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import redis
from echomq import (
    BRAND,
    BRAND_KEY,
    FAR,
    SET_OF_STATE,
    SETS,
    STATE_OF_SET,
    Keyspace,
    Queue,
    Within,
    base,
    client_of,
    read_keyspace,
    run_id,
    send,
    send_timed,
    write_keyspace,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from emqtimerd.devnode import DevNode

ASKED = os.environ.get("EMQ_EXAMPLES")
# 120 histories of up to 60 steps take about 15 s here, and reach each pair of verbs on one job many
# times over.
EXAMPLES, STEPS = 400, 20

QUEUE = "model"
BASE = base(QUEUE)
PENDING, ACTIVE, SCHEDULE, DEAD = (BASE + name.encode() for name in SETS)

# Few, so that histories meet: some a prefix of another, one with every awkward byte.
JOB_IDS = (b"JOB", b"JOB1", b"JOB10", b"JOB2", b"JOB\x00\xff\r\n {}")
# One not of the namespace, and seldom.
IDS = (*JOB_IDS, *JOB_IDS, b"JOXX")
# What is not the token: more, less, none, another writing of the same number.
WRONG: tuple[Callable[[bytes], bytes], ...] = (
    lambda held: held + b"0",
    lambda held: held[:-1],
    lambda _: b"",
    lambda held: b"0" + held,
)
GHOSTS = (b"JOB1ghost", b"JOB0ghost", b"JOBzghost")

EARLIER = b"e" * 40
LONG_AGO = 1_000
HOUR = 3_600_000

ids = st.sampled_from(IDS)
# The histories should get somewhere, and still see each refusal.
often = st.sampled_from((True, True, True, False))
payloads = st.sampled_from((b"", b"p", b"\x00\xff\r\n"))
# A job is due at once or not while the test runs: the model never has to guess what the clock said.
spans = st.sampled_from((0, HOUR))
moments = st.one_of(
    st.tuples(st.just("in"), spans),
    st.tuples(st.just("at"), st.sampled_from((0, LONG_AGO, LONG_AGO + 1, FAR))),
)
limits = st.integers(1, 5)
counters = st.integers(0, 3).map(lambda number: b"%d" % number)
rows = st.fixed_dictionaries(
    {b"payload": payloads, b"attempts": counters},
    optional={
        b"failures": counters,
        b"stalled": counters,
        b"last_error": payloads,
        b"lease_epoch": st.sampled_from((b"this", EARLIER)),
    },
)
# A time, and the place of the set in SETS.
scores = st.tuples(
    st.sampled_from((LONG_AGO, LONG_AGO, LONG_AGO + 1, FAR)), st.integers(0, len(SETS) - 1)
)
budgets = st.integers(1, 3)


class JobCore(RuleBasedStateMachine):
    """One queue on a real server, and its model."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.model = Queue(QUEUE, run_id(self.client))
        self.ever: set[bytes] = set()
        self.completed: set[bytes] = set()

    @initialize(
        jobs=st.lists(st.tuples(st.sampled_from(JOB_IDS), rows, scores), min_size=3, max_size=8),
        running=often,
    )
    def begin_in_the_middle(
        self, jobs: list[tuple[bytes, dict[bytes, bytes], tuple[int, int]]], running: bool
    ) -> None:
        """Jobs that have a past, so that short histories meet every case."""
        for job_id, fields, (lease, place) in jobs:
            if job_id in self.model.rows:
                continue
            name = SETS[place]
            self.model.rows[job_id] = {**fields, b"state": STATE_OF_SET[name]}
            self.model.sets[name][job_id] = float(lease if name in ("active", "schedule") else 0)
            if self.model.rows[job_id].get(b"lease_epoch") == b"this":
                self.model.rows[job_id][b"lease_epoch"] = self.model.run_id
        self.ever = set(self.model.rows)
        self.model.paused = not running
        write_keyspace(self.client, self.model.keyspace())

    # What the machine says, and what must come of it.

    def say(self, *command: Any) -> tuple[Any, Within]:
        return send_timed(self.client, *command)

    def token(self, job_id: bytes, right: bool) -> bytes:
        held = self.model.rows.get(job_id, {}).get(b"attempts", b"1")
        return held if right else WRONG[len(self.model.rows) % len(WRONG)](held)

    def row_key(self, job_id: bytes) -> bytes:
        return BASE + b"job:" + job_id

    def pick(self, data: st.DataObject, name: str) -> bytes:
        """An id, most often one that is in this set."""
        members = sorted(self.model.sets[name])
        chosen: bytes = data.draw(
            st.sampled_from(members) if members and data.draw(often) is True else ids
        )
        return chosen

    def due(self, moment: tuple[str, int], now: Within) -> Any:
        how, ms = moment
        return float(ms) if how == "at" else now + ms

    # Producers.

    @rule(many=st.lists(ids, min_size=1, max_size=4), payload=payloads)
    def enqueue(self, many: list[bytes], payload: bytes) -> None:
        for job_id in many:
            keys = (self.row_key(job_id), PENDING)
            reply, _ = self.say("EMQ.ENQUEUE", 2, *keys, job_id, payload)
            assert reply == self.model.enqueue(job_id, payload)
            self.ever |= {job_id} if reply == 1 else set()

    @rule(many=st.lists(ids, min_size=1, max_size=4), payload=payloads, moment=moments)
    def schedule(self, many: list[bytes], payload: bytes, moment: tuple[str, int]) -> None:
        for job_id in many:
            keys = (self.row_key(job_id), SCHEDULE)
            reply, now = self.say("EMQ.SCHEDULE", 2, *keys, job_id, payload, *moment)
            assert reply == self.model.schedule(job_id, payload, self.due(moment, now))
            self.ever |= {job_id} if reply == 1 else set()

    @rule(data=st.data(), moment=moments)
    def reschedule(self, data: st.DataObject, moment: tuple[str, int]) -> None:
        job_id = self.pick(data, "schedule")
        keys = (self.row_key(job_id), SCHEDULE)
        reply, now = self.say("EMQ.RESCHEDULE", 2, *keys, job_id, *moment)
        assert reply == self.model.reschedule(job_id, self.due(moment, now))

    @rule(data=st.data())
    def reprocess(self, data: st.DataObject) -> None:
        job_id = self.pick(data, "dead")
        reply, _ = self.say("EMQ.REPROCESS", 3, self.row_key(job_id), DEAD, PENDING, job_id)
        assert reply == self.model.reprocess(job_id)

    # Workers.

    @rule(times=st.integers(1, 4), lease_ms=spans, as_key=st.booleans())
    def claim(self, times: int, lease_ms: int, as_key: bool) -> None:
        for _ in range(times):
            reply, now = self.say("EMQ.CLAIM", 2 + as_key, PENDING, ACTIVE, BASE, lease_ms)
            assert reply == self.model.claim(lease_ms, now)

    @rule(data=st.data(), right=often, lease_ms=spans)
    def extend(self, data: st.DataObject, right: bool, lease_ms: int) -> None:
        job_id = self.pick(data, "active")
        token = self.token(job_id, right)
        keys = (ACTIVE, self.row_key(job_id))
        reply, now = self.say("EMQ.EXTEND", 2, *keys, job_id, token, lease_ms)
        assert reply == self.model.extend(job_id, token, lease_ms, now)

    @rule(
        who=st.lists(st.tuples(st.sampled_from(JOB_IDS), often), min_size=1, max_size=4),
        lease_ms=spans,
        as_key=st.booleans(),
    )
    def extends(self, who: list[tuple[bytes, bool]], lease_ms: int, as_key: bool) -> None:
        pairs = [(job_id, self.token(job_id, right)) for job_id, right in who]
        flat = [part for pair in pairs for part in pair]
        reply, now = self.say("EMQ.EXTENDS", 1 + as_key, ACTIVE, BASE, lease_ms, *flat)
        assert reply == self.model.extends(lease_ms, pairs, now)

    @rule(data=st.data(), right=often)
    def complete(self, data: st.DataObject, right: bool) -> None:
        job_id = self.pick(data, "active")
        token = self.token(job_id, right)
        reply, _ = self.say("EMQ.COMPLETE", 2, ACTIVE, self.row_key(job_id), job_id, token, BASE)
        assert reply == self.model.complete(job_id, token)
        self.completed |= {job_id} if reply == 1 else set()

    @rule(data=st.data(), right=often, delay_ms=spans)
    def delay(self, data: st.DataObject, right: bool, delay_ms: int) -> None:
        job_id = self.pick(data, "active")
        token = self.token(job_id, right)
        keys = (ACTIVE, SCHEDULE, self.row_key(job_id))
        reply, now = self.say("EMQ.DELAY", 3, *keys, job_id, token, delay_ms)
        assert reply == self.model.delay(job_id, token, delay_ms, now)

    @rule(data=st.data(), right=often, delay_ms=spans, budget=budgets, error=payloads)
    def fail(
        self, data: st.DataObject, right: bool, delay_ms: int, budget: int, error: bytes
    ) -> None:
        job_id = self.pick(data, "active")
        token = self.token(job_id, right)
        keys = (ACTIVE, SCHEDULE, DEAD, self.row_key(job_id))
        reply, now = self.say("EMQ.FAIL", 4, *keys, job_id, token, delay_ms, budget, error, BASE)
        assert reply == self.model.fail(job_id, token, delay_ms, budget, error, now)

    @rule(data=st.data(), right=often)
    def requeue(self, data: st.DataObject, right: bool) -> None:
        job_id = self.pick(data, "active")
        token = self.token(job_id, right)
        reply, _ = self.say("EMQ.REQUEUE", 3, ACTIVE, PENDING, self.row_key(job_id), job_id, token)
        assert reply == self.model.requeue(job_id, token)

    # Sweeps.

    @rule(limit=limits, as_key=st.booleans())
    def promote(self, limit: int, as_key: bool) -> None:
        reply, now = self.say("EMQ.PROMOTE", 2 + as_key, SCHEDULE, PENDING, BASE, limit)
        assert reply == self.model.promote(limit, now)

    @rule(budget=budgets, limit=limits, as_key=st.booleans())
    def stalled_check(self, budget: int, limit: int, as_key: bool) -> None:
        reply, now = self.say(
            "EMQ.STALLED.CHECK", 3 + as_key, ACTIVE, PENDING, DEAD, BASE, budget, limit
        )
        assert reply == self.model.stalled_check(budget, limit, now)

    # What others do to a queue: people, older servers, scripts, lanes and flows, time.

    @rule(resumed=often)
    def pause_or_resume(self, resumed: bool) -> None:
        paused = not resumed
        if paused:
            send(self.client, "HSET", BASE + b"meta", b"paused", b"1")
        else:
            send(self.client, "DEL", BASE + b"meta")
        self.model.paused = paused

    @rule(
        ghost=st.sampled_from(GHOSTS),
        name=st.sampled_from(SETS),
        score=st.sampled_from((0, LONG_AGO, FAR)),
    )
    def plant_ghost(self, ghost: bytes, name: str, score: int) -> None:
        if any(ghost in members for members in self.model.sets.values()):
            return
        score = score if name in ("active", "schedule") else 0
        send(self.client, "ZADD", BASE + name.encode(), score, ghost)
        self.model.sets[name][ghost] = float(score)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), mark=st.sampled_from((b"group", b"parent")))
    def join_or_leave_lane_or_flow(self, data: st.DataObject, mark: bytes) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.model.rows)))
        fields = self.model.rows[job_id]
        if fields.pop(mark, None) is None:
            fields[mark] = b"g"
            send(self.client, "HSET", self.row_key(job_id), mark, b"g")
        else:
            send(self.client, "HDEL", self.row_key(job_id), mark)

    @precondition(lambda self: any(b"lease_epoch" in fields for fields in self.model.rows.values()))
    @rule(stamp=st.sampled_from((EARLIER, None)))
    def leases_of_another_server_or_of_a_script(self, stamp: bytes | None) -> None:
        for job_id, fields in self.model.rows.items():
            if fields.pop(b"lease_epoch", None) is None:
                continue
            if stamp is None:
                send(self.client, "HDEL", self.row_key(job_id), b"lease_epoch")
            else:
                send(self.client, "HSET", self.row_key(job_id), b"lease_epoch", stamp)
                fields[b"lease_epoch"] = stamp

    @precondition(lambda self: self.model.sets["active"] or self.model.sets["schedule"])
    @rule(data=st.data(), score=st.sampled_from((LONG_AGO, LONG_AGO + 1)))
    def time_passes(self, data: st.DataObject, score: int) -> None:
        name = data.draw(
            st.sampled_from([name for name in ("active", "schedule") if self.model.sets[name]])
        )
        job_id = data.draw(st.sampled_from(sorted(self.model.sets[name])))
        send(self.client, "ZADD", BASE + name.encode(), score, job_id)
        self.model.sets[name][job_id] = float(score)

    # What holds after every step.

    @invariant()
    def everything_is_in_its_place(self) -> None:
        keyspace = read_keyspace(self.client)
        assert keyspace.pop(BRAND_KEY) == BRAND
        assert keyspace == self.model.keyspace()
        self.model.adopt_scores(keyspace)

        # Once more on the server's own data, so that a mistake of the model cannot hide one of the
        # job core.
        rows, places = job_rows(keyspace), job_places(keyspace)
        for job_id, fields in rows.items():
            assert places.pop(job_id) == [SET_OF_STATE[fields[b"state"]]]
        assert set(places) <= set(GHOSTS)
        assert all(len(names) == 1 for names in places.values())
        assert self.completed | set(rows) >= self.ever >= set(rows), (
            "no job is lost, none is made up"
        )


def job_rows(keyspace: Keyspace) -> dict[bytes, dict[bytes, bytes]]:
    """The rows by id."""
    prefix = BASE + b"job:"
    return {
        key.removeprefix(prefix): value
        for key, value in keyspace.items()
        if key.startswith(prefix) and isinstance(value, dict)
    }


def job_places(keyspace: Keyspace) -> dict[bytes, list[str]]:
    """The sets that hold each id."""
    places: dict[bytes, list[str]] = {}
    for name in SETS:
        for member in keyspace.get(BASE + name.encode(), {}):
            assert isinstance(member, bytes)
            places.setdefault(member, []).append(name)
    return places


def test_random_histories(node: DevNode) -> None:
    """After every step of every history the server holds what the model holds."""
    with client_of(node.url) as client:
        machine = type("JobCore", (JobCore,), {"client": client})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=int(ASKED or EXAMPLES),
                stateful_step_count=STEPS,
                derandomize=ASKED is None,
                database=None,
                deadline=None,
                # One finding at a time: each is made small, which may take minutes.
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
