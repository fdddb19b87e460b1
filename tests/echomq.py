"""An EMQ queue as the contract describes it: a plain-Python model of it, and eyes on a real one.

The keys are spelled here a second time on purpose: a test that took them from `emqtimerd.wire`
would agree with its mistakes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import redis
from redis.connection import DefaultParser

BRAND_KEY = b"{emq}:version"
BRAND = b"echomq:6.0.0"
TOKENS = (
    b"enqueue claim claim.pause extend extends complete.flat schedule promote reschedule delay"
    b" fail.flat reprocess requeue stalled.check"
)

SETS = ("pending", "active", "schedule", "dead")
SET_OF_STATE = {
    b"pending": "pending",
    b"active": "active",
    b"scheduled": "schedule",
    b"dead": "dead",
}
STATE_OF_SET = {name: state for state, name in SET_OF_STATE.items()}

# Far enough that no test lives to see it, near enough to be a time: 2100-01-01.
FAR = 4_102_444_800_000

Value = bytes | dict[bytes, Any]
Keyspace = dict[bytes, Value]


@dataclass(frozen=True)
class Refusal:
    """An error reply: its first word, and the whole text."""

    code: str
    text: str = field(default="", compare=False)


@dataclass(frozen=True)
class Within:
    """A time that only the server's clock knows exactly: equal to any number in the window."""

    low: float
    high: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and self.low <= other <= self.high

    def __hash__(self) -> int:
        raise TypeError("a window is no dictionary key")

    def __add__(self, ms: int) -> Within:
        return Within(self.low + ms, self.high + ms)


def base(queue: str) -> bytes:
    """The prefix of every key of a queue."""
    return b"emq:{" + queue.encode() + b"}:"


# The keys of the queue that the tables are about.
BASE = base("orders")
PENDING, ACTIVE, SCHEDULE, DEAD = (BASE + name.encode() for name in SETS)
META, COMPLETED, FAILED = BASE + b"meta", BASE + b"metrics:completed", BASE + b"metrics:failed"


def rk(job_id: bytes) -> bytes:
    """The key of a row of that queue."""
    return BASE + b"job:" + job_id


class Verbatim(DefaultParser):  # type: ignore[misc,valid-type]
    """Leaves errors as the server wrote them; redis-py takes the first word off those it knows."""

    EXCEPTION_CLASSES: ClassVar[dict[str, Any]] = {}


@functools.cache
def client_of(url: str) -> redis.Redis:
    """A client that sends each command once and changes no reply; the same for all tests of a
    server.
    """
    client = redis.Redis.from_url(
        url, protocol=2, socket_timeout=30, socket_connect_timeout=5, parser_class=Verbatim
    )
    client.response_callbacks.clear()
    return client


def refusal(error: Exception) -> Refusal:
    """What the server wrote, from redis-py's exception."""
    return Refusal(str(error).split(" ", 1)[0], str(error))


def send(client: redis.Redis, *command: Any) -> Any:
    """Send one command; an error comes back as a value."""
    return send_all(client, [command])[0]


def send_all(client: redis.Redis, commands: Iterable[Sequence[Any]]) -> list[Any]:
    """Send commands in one pipeline; errors come back as values."""
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
    return [
        refusal(r) if isinstance(r, Exception) else r
        for r in pipeline.execute(raise_on_error=False)
    ]


def send_timed(client: redis.Redis, *command: Any) -> tuple[Any, Within]:
    """Send one command; also the window of the server's clock in which it ran."""
    before, reply, after = send_all(client, [("TIME",), command, ("TIME",)])
    return reply, Within(_ms(before), _ms(after) + 1)


def _ms(time: list[bytes]) -> int:
    return int(time[0]) * 1000 + int(time[1]) // 1000


# One round trip, whatever the number of keys.
_READ_ALL = b"""
local all = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  local kind = redis.call('TYPE', key).ok
  local content
  if kind == 'zset' then content = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'hash' then content = redis.call('HGETALL', key)
  elseif kind == 'string' then content = redis.call('GET', key)
  elseif kind == 'list' then content = redis.call('LRANGE', key, 0, -1)
  else content = kind end
  all[#all + 1] = {key, kind, content}
end
return all
"""


def read_keyspace(client: redis.Redis, pattern: str = "*") -> Keyspace:
    """Everything that the server holds."""
    keyspace: Keyspace = {}
    for key, kind, content in send(client, "EVAL", _READ_ALL, 0, pattern):
        if kind == b"zset":
            pairs = zip(content[::2], content[1::2], strict=True)
            keyspace[key] = {member: float(score) for member, score in pairs}
        elif kind == b"hash":
            keyspace[key] = dict(zip(content[::2], content[1::2], strict=True))
        elif kind == b"list":
            keyspace[key] = {b"%d" % index: item for index, item in enumerate(content)}
        else:
            keyspace[key] = content
    return keyspace


def write_keyspace(client: redis.Redis, keyspace: Mapping[bytes, Value]) -> None:
    """Make the server hold this and its brand, and nothing else."""
    commands: list[Sequence[Any]] = [("FLUSHALL",), ("SET", BRAND_KEY, BRAND)]
    for key, value in keyspace.items():
        if isinstance(value, bytes):
            commands.append(("SET", key, value))
        elif all(isinstance(item, bytes) for item in value.values()):
            commands.append(("HSET", key, *(part for pair in value.items() for part in pair)))
        else:
            scores = ((repr(float(score)), member) for member, score in value.items())
            commands.append(("ZADD", key, *(part for pair in scores for part in pair)))
    for command, reply in zip(commands, send_all(client, commands), strict=True):
        assert not isinstance(reply, Refusal), (command, reply)


def run_id(client: redis.Redis) -> bytes:
    """The name of this server process, as the server tells it."""
    info: bytes = send(client, "INFO", "server")
    return next(line[7:] for line in info.splitlines() if line.startswith(b"run_id:"))


def row(state: bytes, **fields: bytes | int) -> dict[bytes, bytes]:
    """A row as ENQUEUE or SCHEDULE writes it, but for these fields; numbers become decimal text."""
    content = {"state": state, "payload": b"p", "attempts": 0, **fields}
    return {
        name.encode(): value if isinstance(value, bytes) else b"%d" % value
        for name, value in content.items()
    }


@dataclass
class Queue:
    """The model: one queue, and what each verb makes of it. Every method returns the reply that the
    contract gives.

    `now` is the window in which the real command ran; due means that the whole window is past the
    score.
    """

    name: str
    run_id: bytes
    sets: dict[str, dict[bytes, Any]] = field(default_factory=lambda: {name: {} for name in SETS})
    rows: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    metrics: dict[str, int] = field(default_factory=lambda: {"completed": 0, "failed": 0})
    paused: bool = False

    # What the server must hold.

    def keyspace(self) -> Keyspace:
        """The keys of the queue, and no other."""
        prefix = base(self.name)
        keys: Keyspace = {
            prefix + name.encode(): dict(members) for name, members in self.sets.items() if members
        }
        keys |= {prefix + b"job:" + job_id: dict(fields) for job_id, fields in self.rows.items()}
        for name, count in self.metrics.items():
            if count:
                keys[prefix + b"metrics:" + name.encode()] = {b"count": b"%d" % count}
        if self.paused:
            keys[prefix + b"meta"] = {b"paused": b"1"}
        return keys

    def adopt_scores(self, keyspace: Keyspace) -> None:
        """Take the exact times from the server, after they were found to lie in their windows."""
        for name in SETS:
            content = keyspace.get(base(self.name) + name.encode(), {})
            assert isinstance(content, dict)
            self.sets[name] = dict(content)

    # Producers.

    def enqueue(self, job_id: bytes, payload: bytes) -> Any:
        return self._add("pending", job_id, payload, 0.0)

    def schedule(self, job_id: bytes, payload: bytes, due: Any) -> Any:
        return self._add("schedule", job_id, payload, due)

    def _add(self, name: str, job_id: bytes, payload: bytes, score: Any) -> Any:
        if not job_id.startswith(b"JOB"):
            return Refusal("EMQKIND")
        if job_id in self.rows:
            return 0
        self.rows[job_id] = row(STATE_OF_SET[name], payload=payload)
        self.sets[name][job_id] = score
        return 1

    def reschedule(self, job_id: bytes, due: Any) -> Any:
        refused = self._refuse(job_id, b"scheduled", gone=-1)
        if refused is not None:
            return refused
        self.sets["schedule"][job_id] = due
        return 1

    # Workers.

    def claim(self, lease_ms: int, now: Within) -> Any:
        if self.paused or not self.sets["pending"]:
            return []
        head = _page(self.sets["pending"], 1, None)[0]
        fields = self.rows.get(head)
        del self.sets["pending"][head]
        if fields is None:
            return []
        attempts = int(fields[b"attempts"]) + 1
        fields |= {b"state": b"active", b"attempts": b"%d" % attempts, b"lease_epoch": self.run_id}
        self.sets["active"][head] = now + lease_ms
        return [head, fields[b"payload"], attempts]

    def extend(self, job_id: bytes, token: bytes, lease_ms: int, now: Within) -> Any:
        refused = self._refuse(job_id, b"active", gone=-1, token=token)
        if refused is not None:
            return refused
        self.rows[job_id][b"lease_epoch"] = self.run_id
        self.sets["active"][job_id] = now + lease_ms
        return 1

    def extends(self, lease_ms: int, pairs: Sequence[tuple[bytes, bytes]], now: Within) -> Any:
        replies = [(job_id, self.extend(job_id, token, lease_ms, now)) for job_id, token in pairs]
        return [job_id for job_id, reply in replies if reply != 1]

    def complete(self, job_id: bytes, token: bytes) -> Any:
        refused = self._refuse(job_id, b"active", gone=0, token=token, native=(b"group", b"parent"))
        if refused is not None:
            return refused
        del self.sets["active"][job_id], self.rows[job_id]
        self.metrics["completed"] += 1
        return 1

    def delay(self, job_id: bytes, token: bytes, delay_ms: int, now: Within) -> Any:
        refused = self._refuse(job_id, b"active", gone=-1, token=token, native=(b"group",))
        if refused is not None:
            return refused
        self._move(job_id, "active", "schedule", now + delay_ms)
        return 1

    def fail(
        self,
        job_id: bytes,
        token: bytes,
        delay_ms: int,
        max_attempts: int,
        error: bytes,
        now: Within,
    ) -> Any:
        # FAIL has no number for a job that is gone: it answers with a word.
        gone = Refusal("EMQSTATE")
        refused = self._refuse(
            job_id, b"active", gone=gone, token=token, native=(b"group", b"parent")
        )
        if refused is not None:
            return refused
        fields = self.rows[job_id]
        failures = int(fields.get(b"failures", b"0")) + 1
        fields |= {b"failures": b"%d" % failures, b"last_error": error}
        if failures >= max_attempts:
            self._move(job_id, "active", "dead", 0.0)
            self.metrics["failed"] += 1
            return b"dead"
        self._move(job_id, "active", "schedule", now + delay_ms)
        return b"scheduled"

    def requeue(self, job_id: bytes, token: bytes) -> Any:
        refused = self._refuse(job_id, b"active", gone=-1, token=token, native=(b"group",))
        if refused is not None:
            return refused
        self._move(job_id, "active", "pending", 0.0)
        return 1

    def reprocess(self, job_id: bytes) -> Any:
        refused = self._refuse(job_id, b"dead", gone=-1, native=(b"group",))
        if refused is not None:
            return refused
        self._move(job_id, "dead", "pending", 0.0)
        self.rows[job_id].pop(b"last_error", None)
        return 1

    # Sweeps.

    def promote(self, limit: int, now: Within) -> Any:
        page = _page(self.sets["schedule"], limit, now)
        if any(self._strange(job_id, b"scheduled") for job_id in page):
            return Refusal("EMQSTATE")
        moved = 0
        for job_id in page:
            if job_id in self.rows:
                self._move(job_id, "schedule", "pending", 0.0)
                moved += 1
            else:
                del self.sets["schedule"][job_id]
        return moved

    def stalled_check(self, max_stalled: int, limit: int, now: Within) -> Any:
        page = _page(self.sets["active"], limit, now)
        if any(self._strange(job_id, b"active") for job_id in page):
            return Refusal("EMQSTATE")
        recovered: list[bytes] = []
        dead: list[bytes] = []
        for job_id in page:
            fields = self.rows.get(job_id)
            if fields is None:
                del self.sets["active"][job_id]
                continue
            if fields.get(b"lease_epoch", self.run_id) == self.run_id:
                stalled = int(fields.get(b"stalled", b"0")) + 1
                fields[b"stalled"] = b"%d" % stalled
                if stalled >= max_stalled:
                    fields[b"last_error"] = b"stalled"
                    self._move(job_id, "active", "dead", 0.0)
                    self.metrics["failed"] += 1
                    dead.append(job_id)
                    continue
            self._move(job_id, "active", "pending", 0.0)
            recovered.append(job_id)
        return [recovered, dead]

    # The checks that they share, in the contract's order.

    def _refuse(
        self,
        job_id: bytes,
        state: bytes,
        *,
        gone: int | Refusal,
        token: bytes | None = None,
        native: tuple[bytes, ...] = (),
    ) -> Any:
        if not job_id.startswith(b"JOB"):
            return Refusal("EMQKIND")
        fields = self.rows.get(job_id)
        if fields is None:
            return gone
        if any(mark in fields for mark in native) or fields[b"state"] != state:
            return Refusal("EMQSTATE")
        if token is not None and token != fields[b"attempts"]:
            return Refusal("EMQSTALE")
        return None

    def _strange(self, job_id: bytes, state: bytes) -> bool:
        fields = self.rows.get(job_id)
        return fields is not None and (b"group" in fields or fields[b"state"] != state)

    def _move(self, job_id: bytes, origin: str, target: str, score: Any) -> None:
        del self.sets[origin][job_id]
        self.sets[target][job_id] = score
        self.rows[job_id][b"state"] = STATE_OF_SET[target]


def _page(members: Mapping[bytes, Any], limit: int, now: Within | None) -> list[bytes]:
    """The first ids of a set in the server's order, of those whose time has come."""
    ordered = sorted((score, job_id) for job_id, score in members.items())
    if now is not None:
        undecided = [pair for pair in ordered if now.low < pair[0] <= now.high]
        assert not undecided, f"a test must not let the clock decide: {undecided}"
        ordered = [pair for pair in ordered if pair[0] <= now.low]
    return [job_id for _, job_id in ordered[:limit]]
