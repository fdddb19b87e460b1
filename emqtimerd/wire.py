"""The bytes and shapes of the EMQ contract: keys, commands, the peek, replies, errors.

Nothing here does I/O or knows redis. What the contract fixes (verbs, keys, tokens, the brand)
and what it lets us decide (the rule for queue names, the peek) has its one place in this module.
"""

import binascii
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

BRAND_KEY = b"{emq}:version"
"""Where a node keeps its brand. A client reads it and never writes it."""

BRAND = b"echomq:6.0.0"
"""The brand of a native node. The scripted executor's nodes hold another one."""

TOKENS = (
    "enqueue",
    "claim",
    "claim.pause",
    "extend",
    "extends",
    "complete.flat",
    "schedule",
    "promote",
    "reschedule",
    "delay",
    "fail.flat",
    "reprocess",
    "requeue",
    "stalled.check",
)
"""The job core's capability tokens, in the order in which EMQ.VERSION answers them."""

REQUIRED_TOKENS = ("promote", "stalled.check")
"""The tokens of the two verbs that this daemon sends."""

ERROR_CODES = frozenset(
    {
        "ASK",
        "BUSY",
        "CLUSTERDOWN",
        "CROSSSLOT",
        "EMQSTATE",
        "ERR",
        "EXECABORT",
        "LOADING",
        "MASTERDOWN",
        "MISCONF",
        "MOVED",
        "NOAUTH",
        "NOPERM",
        "NOREPLICAS",
        "OOM",
        "READONLY",
        "TRYAGAIN",
        "UNBLOCKED",
        "WRONGPASS",
        "WRONGTYPE",
        # Not replies but what happened instead of one:
        "connection",
        "timeout",
        "shape",
    }
)
"""The codes that an error is counted under; every other one is counted as `other`."""

PASSING = frozenset({"ASK", "CLUSTERDOWN", "MOVED", "TRYAGAIN"})
"""Replies of a cluster that is being changed: they end by themselves, and no pause helps."""

MAX_QUEUE_NAME_BYTES = 255
"""The longest name of a queue (contract, section 2)."""

LEASES_COUNTED = 1_000
"""How many leases of a queue the epoch counts look at: a thousand row reads take the server
about half a millisecond, which is as long as one sweep of the default limit may."""

BaseForm: TypeAlias = Literal["key", "arg"]


def queue_name_problem(name: str) -> str | None:
    """Say what is wrong with a queue name, or None (contract, section 2).

    Braces would move the keys out of their slot; white space and control characters are never
    meant. The length is in bytes of UTF-8.
    """
    if not name:
        return "is empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if len(encoded) > MAX_QUEUE_NAME_BYTES:
        return f"is {len(encoded)} bytes long, at most {MAX_QUEUE_NAME_BYTES} are allowed"
    for character in name:
        if character in "{}" or character.isspace() or unicodedata.category(character) == "Cc":
            kind = "brace" if character in "{}" else "white space or control character"
            return f"holds a {kind} ({character!a})"
    return None


def base(queue: str) -> bytes:
    """Return the braced base that every key of the queue starts with."""
    return b"emq:{%b}:" % queue.encode()


def queue_key(queue: str, name: str) -> bytes:
    """Return a key of the queue: `pending`, `active`, `schedule`, `dead`, `meta`, ..."""
    return base(queue) + name.encode()


def row_key(queue: str, job_id: bytes) -> bytes:
    """Return the key of a job's row."""
    return base(queue) + b"job:" + job_id


def slot(queue: str) -> int:
    """Return the cluster slot of the queue's keys: CRC16 (XMODEM) of the braced part."""
    return slot_of_tag(queue.encode())


def slot_of_tag(tag: bytes) -> int:
    """Return the cluster slot of a hash tag."""
    return binascii.crc_hqx(tag, 0) % 16384


def printable(data: bytes) -> str:
    """Show an id or payload without ambiguity and without control characters.

    Ids are bytes. What is not UTF-8 becomes `\\xff`, a backslash is doubled, and whatever a
    terminal would act upon is escaped, so that two ids never look the same.
    """
    return escaped(data.replace(b"\\", b"\\\\").decode(errors="backslashreplace"))


def escaped(text: str) -> str:
    """Escape whatever a terminal would act upon, and nothing else."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in text
    )


# --- commands -----------------------------------------------------------------------------------


def pack(*arguments: bytes | str | int) -> bytes:
    """Encode one command as a RESP array of bulk strings."""
    parts = [b"*%d\r\n" % len(arguments)]
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


TIME = pack("TIME")
MULTI = pack("MULTI")
EXEC = pack("EXEC")
VERSION = pack("EMQ.VERSION")
READ_BRAND = pack("GET", BRAND_KEY)
INFO_SERVER = pack("INFO", "server")


def _with_base(verb: str, keys: Sequence[bytes], queue: str, form: BaseForm) -> list[bytes | str]:
    """Place the base where the setting says: only numkeys tells the two forms apart."""
    numkeys = len(keys) + (form == "key")
    return [verb, str(numkeys), *keys, base(queue)]


def promote(queue: str, limit: int, form: BaseForm = "key") -> bytes:
    """EMQ.PROMOTE: schedule -> pending for the first `limit` due ids; replies how many moved."""
    keys = [queue_key(queue, "schedule"), queue_key(queue, "pending")]
    return pack(*_with_base("EMQ.PROMOTE", keys, queue, form), limit)


def stalled_check(queue: str, max_stalled: int, limit: int, form: BaseForm = "key") -> bytes:
    """EMQ.STALLED.CHECK: recovers the first `limit` expired leases (contract, section 4)."""
    keys = [queue_key(queue, name) for name in ("active", "pending", "dead")]
    return pack(*_with_base("EMQ.STALLED.CHECK", keys, queue, form), max_stalled, limit)


def head(queue: str, name: str) -> bytes:
    """Read the first id and score of a set: the oldest due time, or the next one."""
    return pack("ZRANGE", queue_key(queue, name), 0, 0, "WITHSCORES")


def leases_expired(queue: str, now_ms: int) -> tuple[bytes, bytes]:
    """Count a queue's expired leases, and all of them: two commands, two replies."""
    key = queue_key(queue, "active")
    return pack("ZCOUNT", key, "-inf", now_ms), pack("ZCARD", key)


def scan(cursor: bytes, count: int) -> bytes:
    """Look among the next `count` keys for the schedules and the active sets of queues."""
    # No job row matches: its key goes on with `job:`. Without the type, any key that looks like one
    # would name a queue.
    return pack("SCAN", cursor, "MATCH", "emq:{*}:[as]c*", "COUNT", count, "TYPE", "zset")


def queue_of(key: bytes) -> str | None:
    """Return the queue whose schedule or active set has this key; None where it is no such key."""
    match = re.fullmatch(rb"emq:\{([^{}]+)\}:(?:schedule|active)", key)
    try:
        queue = match[1].decode() if match else ""
    except UnicodeDecodeError:
        return None
    return None if queue_name_problem(queue) else queue


def due(queue: str, name: str, now_ms: int, offset: int, count: int) -> bytes:
    """Read one page of the ids whose due time or deadline has passed, with their scores."""
    key = queue_key(queue, name)
    return pack("ZRANGE", key, "-inf", now_ms, "BYSCORE", "LIMIT", offset, count, "WITHSCORES")


def row(queue: str, job_id: bytes) -> bytes:
    """Read the fields of a row that decide what a sweep does with it, in the order of ROW."""
    return pack("HMGET", row_key(queue, job_id), *ROW)


ROW = ("state", "group", "lease_epoch", "stalled")
"""What a preview reads of a row."""


def is_row(queue: str, job_id: bytes) -> bytes:
    """Ask whether an id has a row at all, which its missing fields do not tell.

    As if the row were a set: that is refused where there is one. EXISTS would say it plainly, and
    cost the ACL one more word.
    """
    return pack("ZRANGE", row_key(queue, job_id), 0, 0)


SETS = ("pending", "active", "schedule", "dead")
"""The four sets of a queue. A job in the schedule has the state `scheduled`; the other states are
named like their sets."""


def cards(queue: str) -> bytes:
    """Read the sizes of the four sets, in the order of SETS: four commands, four replies."""
    return b"".join(pack("ZCARD", queue_key(queue, name)) for name in SETS)


# The peek reads no clock (contract, section 5: inside EXEC the server's TIME stands still while
# the module's own does not). INFO is asked only where there are leases: it is most of the price,
# and an idle queue should not pay it. A row of another type has no epoch; the rest of its page has.
PEEK = b"""\
local limit, counted = tonumber(ARGV[1]), tonumber(ARGV[2])
local leases = redis.call('ZRANGE', KEYS[1], 0, math.max(limit, counted) - 1, 'WITHSCORES')
if #leases == 0 then return {} end
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local current, previous, unstamped = 0, 0, 0
local reply = {run_id, 0, 0, 0}
for i = 1, #leases, 2 do
  local n = (i + 1) / 2
  local epoch = redis.pcall('HGET', KEYS[2] .. 'job:' .. leases[i], 'lease_epoch')
  if type(epoch) == 'table' then
    if not string.find(epoch.err, 'WRONGTYPE', 1, true) then return epoch end
    epoch = false
  end
  if n <= counted then
    if not epoch then unstamped = unstamped + 1
    elseif epoch == run_id then current = current + 1
    else previous = previous + 1 end
  end
  if n <= limit then
    reply[#reply + 1] = leases[i]
    reply[#reply + 1] = leases[i + 1]
    reply[#reply + 1] = epoch
  end
end
reply[2], reply[3], reply[4] = current, previous, unstamped
return reply
"""


PEEK_HEAD = b"*7\r\n" + pack("EVAL_RO", PEEK).partition(b"\r\n")[2]
"""The first part of every peek, the same for all queues: kept once and not ten thousand times."""


def peek_tail(queue: str, limit: int, counted: int = 0) -> bytes:
    """Complete PEEK_HEAD to a peek: run_id, and id, deadline and lease_epoch of the first `limit`
    leases. It writes nothing. The first `counted` leases are also counted by epoch.
    """
    keys = queue_key(queue, "active"), base(queue)
    return pack(2, *keys, limit, counted).partition(b"\r\n")[2]


def peek(queue: str, limit: int, counted: int = 0) -> bytes:
    """The whole peek as one command."""
    return PEEK_HEAD + peek_tail(queue, limit, counted)


# --- replies ------------------------------------------------------------------------------------


class ReplyError(Exception):
    """The server answered a command with an error."""

    def __init__(self, text: str) -> None:
        # The server may quote an id, and ids are bytes.
        super().__init__(escaped(text))
        # A script-style error wraps its cause, and a demoted primary must be seen through it.
        wrapped = text.startswith("ERR") and "READONLY" in text
        self.code = "READONLY" if wrapped else text.partition(" ")[0] or "ERR"


class ShapeError(Exception):
    """The server answered with a shape that the contract does not know; nothing was counted."""

    def __init__(self, command: str, reply: object) -> None:
        super().__init__(f"{command} was answered with {outline(reply)}")
        self.code = "shape"


Reply: TypeAlias = object
"""What the parser makes of one reply: int, bytes, None, list, or a ReplyError as a value."""


def error_code(code: str) -> str:
    """Bound an error code to the fixed set that metrics are labelled with."""
    return code if code in ERROR_CODES else "other"


def outline(reply: object, depth: int = 0) -> str:  # noqa: PLR0911 - one for each shape
    """Describe the shape of a reply without its content, for an error message."""
    match reply:
        case bytes():
            return f"a string of {len(reply)} bytes"
        case bool() | None:
            return "nil" if reply is None else "a boolean"
        case int():
            return "an integer"
        case list() if depth < 2 and reply:
            inside = ", ".join(outline(item, depth + 1) for item in reply[:3])
            return f"an array of {len(reply)} ({inside}{', ...' if len(reply) > 3 else ''})"
        case list():
            return f"an array of {len(reply)}"
        case ReplyError():
            return f"the error {reply.code}"
        case _:
            return f"a {type(reply).__name__}"


def read_promoted(reply: Reply) -> int:
    """Read EMQ.PROMOTE's reply: how many ids moved."""
    if type(reply) is int and reply >= 0:
        return reply
    raise _unexpected("EMQ.PROMOTE", reply)


def read_recovered(reply: Reply) -> tuple[list[bytes], list[bytes]]:
    """Read EMQ.STALLED.CHECK's reply: recovered ids, dead-lettered ids."""
    match reply:
        case [list() as recovered, list() as dead]:
            if all(type(job_id) is bytes for job_id in recovered + dead):
                return recovered, dead
    raise _unexpected("EMQ.STALLED.CHECK", reply)


@dataclass(frozen=True, slots=True)
class Head:
    """The first member of a set: its id, and its due time or deadline in server milliseconds."""

    job_id: bytes
    at_ms: int


def read_head(reply: Reply) -> Head | None:
    """Read the head of a set, None when the set is empty."""
    match reply:
        case []:
            return None
        case [bytes() as job_id, bytes() as score]:
            return Head(job_id, read_ms(score))
    raise _unexpected("ZRANGE", reply)


def read_due(reply: Reply) -> list[Head]:
    """Read a page of ids and scores."""
    if not isinstance(reply, list) or len(reply) % 2:
        raise _unexpected("ZRANGE", reply)
    heads = (read_head(reply[i : i + 2]) for i in range(0, len(reply), 2))
    return [head for head in heads if head is not None]


@dataclass(frozen=True, slots=True)
class Row:
    """What of a row decides about a sweep; a row without any of it may be none."""

    state: bytes | None
    group: bytes | None
    lease_epoch: bytes | None
    stalled: int | None
    """None if the field holds what does not count."""


def read_row(reply: Reply) -> Row:
    """Read a row's deciding fields."""
    match reply:
        case [
            bytes() | None as state,
            bytes() | None as group,
            bytes() | None as lease_epoch,
            bytes() | None as stalled,
        ]:
            return Row(state, group, lease_epoch, _read_counter(stalled))
    raise _unexpected("HMGET", reply)


def _read_counter(text: bytes | None) -> int | None:
    """Read a counter as the job core does: in the one way that a server writes a number, and below
    half of what 64 bits hold, so that there is room for more. One that is not there is 0."""
    if text is None:
        return 0
    # 20: more bytes than a number of 64 bits has.
    number = int(text) if len(text) <= 20 and text.removeprefix(b"-").isdigit() else None
    if number is None or b"%d" % number != text:
        return None
    return number if -(1 << 63) <= number < (1 << 62) - 1 else None


def read_is_row(reply: Reply) -> bool:
    """Read what `is_row` asked."""
    match reply:
        case []:
            return False
        case ReplyError(code="WRONGTYPE"):
            return True
    raise _unexpected("ZRANGE", reply)


HORIZON_MS = 1 << 53
"""Beyond it a double no longer holds every integer, and no clock gets there."""


def read_ms(score: bytes) -> int:
    """Read a score in milliseconds. Scores are doubles; a foreign infinity becomes the horizon."""
    try:
        value = float(score)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ShapeError("a score", score)
    return int(max(-HORIZON_MS, min(HORIZON_MS, value)))


def is_time(ms: int) -> bool:
    """Tell whether a score is an instant. Infinities, and what is before 1970, sort an id first or
    last and were read off no clock: nobody can be late for them."""
    return 0 < ms < HORIZON_MS


def whole_number(text: str) -> int | None:
    """Read a number as servers write them; None where it is none, or more than any of theirs.

    isdigit() alone takes digits that int() does not, and more of them than int() does.
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def read_time_ms(reply: Reply) -> float:
    """Read TIME: the server's clock in milliseconds, with its microseconds as a fraction."""
    match reply:
        case [bytes() as seconds, bytes() as microseconds]:
            whole, part = (whole_number(b.decode("latin-1")) for b in (seconds, microseconds))
            if whole is not None and part is not None:
                return whole * 1000 + part / 1000
    raise _unexpected("TIME", reply)


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease as the peek saw it: deadline in server milliseconds, stamp or None."""

    deadline_ms: int
    epoch: bytes | None


@dataclass(frozen=True, slots=True)
class Peek:
    """What the peek saw just before the sweep, in the same transaction."""

    run_id: bytes | None
    leases: dict[bytes, Lease]
    current: int = 0
    previous: int = 0
    unstamped: int = 0

    def head(self) -> Head | None:
        """The lease that expires first."""
        for job_id, lease in self.leases.items():
            return Head(job_id, lease.deadline_ms)
        return None


NO_LEASES = Peek(None, {})


def read_peek(reply: Reply) -> Peek:
    """Read the peek's flat reply: run_id, three counts, then id, deadline, epoch per lease."""
    match reply:
        case []:
            return NO_LEASES
        case [bytes() as run_id, int() as current, int() as previous, int() as unstamped, *rest]:
            leases = {}
            for start in range(0, len(rest), 3):
                match rest[start : start + 3]:
                    case [bytes() as job_id, bytes() as deadline, bytes() | None as epoch]:
                        leases[job_id] = Lease(read_ms(deadline), epoch)
                    case _:
                        raise _unexpected("the peek", reply)
            return Peek(run_id, leases, current, previous, unstamped)
    raise _unexpected("the peek", reply)


def read_scan(reply: Reply) -> tuple[bytes, list[bytes]]:
    """Read one page of SCAN: the next cursor, and the keys."""
    match reply:
        case [bytes() as cursor, list() as keys]:
            if all(type(key) is bytes for key in keys):
                return cursor, keys
    raise _unexpected("SCAN", reply)


def read_tokens(reply: Reply) -> tuple[str, ...]:
    """Read EMQ.VERSION: the capability tokens in the order of the server's table."""
    if isinstance(reply, bytes):
        return tuple(reply.decode(errors="backslashreplace").split())
    raise _unexpected("EMQ.VERSION", reply)


def read_brand(reply: Reply) -> bytes | None:
    """Read the brand, None where the node has none."""
    if reply is None or isinstance(reply, bytes):
        return reply
    raise _unexpected("GET {emq}:version", reply)


def read_info(reply: Reply) -> dict[str, str]:
    """Read a section of INFO as its fields."""
    if not isinstance(reply, bytes):
        raise _unexpected("INFO", reply)
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}


Cause: TypeAlias = Literal["stall", "restart", "unstamped", "unattributed"]

CAUSES: tuple[Cause, ...] = ("stall", "restart", "unstamped", "unattributed")


def cause_of(job_id: bytes, seen: Peek | None) -> Cause:
    """Say why a lease ran out, from what was read just before the sweep (contract, section 5).

    Without a peek, or for an id that it did not list, the cause is not guessed.
    """
    lease = seen.leases.get(job_id) if seen else None
    if seen is None or lease is None:
        return "unattributed"
    if lease.epoch is None:
        return "unstamped"
    return "stall" if lease.epoch == seen.run_id else "restart"


def _unexpected(command: str, reply: Reply) -> Exception:
    """An error reply is itself the answer; anything else is a shape that nobody promised."""
    return reply if isinstance(reply, ReplyError) else ShapeError(command, reply)
