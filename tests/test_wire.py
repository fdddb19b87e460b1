"""The wire: keys, commands, the rule for queue names, replies of the right and of odd shapes."""

from __future__ import annotations

from collections.abc import Callable

import hiredis
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from emqtimerd import wire

# --- names and keys -----------------------------------------------------------------------------

NAMES = ["orders", "a:b", "grüße", "日本", "x" * 255, "é" * 127, "[a]*?", "..", "0", "\\", "\xad"]

REFUSED = {
    "": "is empty",
    "{": "holds a brace ('{')",
    "a{b}c": "holds a brace ('{')",
    "{}": "holds a brace ('{')",
    "}{": "holds a brace ('}')",
    "a b": "holds a white space or control character (' ')",
    "a\tb": "holds a white space or control character ('\\t')",
    "a\u2028b": "holds a white space or control character ('\\u2028')",
    "a\u00a0b": "holds a white space or control character ('\\xa0')",
    "a\x1b[31m": "holds a white space or control character ('\\x1b')",
    "a\x00": "holds a white space or control character ('\\x00')",
    "a\x85": "holds a white space or control character ('\\x85')",
    "x" * 256: "is 256 bytes long, at most 255 are allowed",
    "é" * 128: "is 256 bytes long, at most 255 are allowed",
    # What Python makes of an argument that is not UTF-8.
    "caf\udce9": "is not valid UTF-8",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_printable_characters_is_a_queue_name(name: str) -> None:
    """Case "Slot migration and hash tags": names up to 255 bytes are taken as they are."""
    assert wire.queue_name_problem(name) is None


@pytest.mark.parametrize(("name", "problem"), REFUSED.items(), ids=ascii)
def test_an_impossible_queue_name_is_refused_with_its_reason(name: str, problem: str) -> None:
    """Case "Slot migration and hash tags": names that would leave the slot are refused."""
    assert wire.queue_name_problem(name) == problem


@pytest.mark.parametrize("name", NAMES)
def test_all_keys_of_a_queue_are_in_the_slot_that_the_server_computes(
    name: str, client: redis.Redis
) -> None:
    """Case "Slot migration and hash tags": the slot equals CLUSTER KEYSLOT for each name."""
    keys = [wire.queue_key(name, each) for each in (*wire.SETS, "meta", "metrics:failed")]
    keys += [wire.row_key(name, b"JOB\xff{}"), wire.base(name)]
    slots = {client.execute_command("CLUSTER KEYSLOT", key) for key in keys}  # type: ignore[no-untyped-call]
    assert slots == {wire.slot(name)}


def test_the_brand_is_in_its_published_slot() -> None:
    """`{emq}:version` hashes to slot 9051."""
    assert wire.slot_of_tag(b"emq") == 9051
    assert (wire.BRAND_KEY, wire.BRAND) == (b"{emq}:version", b"echomq:6.0.0")


def test_keys_are_those_of_the_contract() -> None:
    """A queue's keys start with the braced base; a row's key ends with the bytes of the id."""
    assert wire.base("orders") == b"emq:{orders}:"
    assert wire.queue_key("orders", "pending") == b"emq:{orders}:pending"
    assert wire.row_key("orders", b"JOB\xff\x00") == b"emq:{orders}:job:JOB\xff\x00"


# --- commands -----------------------------------------------------------------------------------


def words(packed: bytes) -> list[list[bytes]]:
    reader = hiredis.Reader()
    reader.feed(packed)
    commands: list[list[bytes]] = []
    while (command := reader.gets()) is not False:
        assert isinstance(command, list)
        commands.append(command)
    return commands


COMMANDS: dict[str, tuple[bytes, bytes]] = {
    "promote": (
        wire.promote("q", 100),
        b"EMQ.PROMOTE 3 emq:{q}:schedule emq:{q}:pending emq:{q}: 100",
    ),
    "promote, base as argument": (
        wire.promote("q", 7, "arg"),
        b"EMQ.PROMOTE 2 emq:{q}:schedule emq:{q}:pending emq:{q}: 7",
    ),
    "stalled check": (
        wire.stalled_check("q", 1, 100),
        b"EMQ.STALLED.CHECK 4 emq:{q}:active emq:{q}:pending emq:{q}:dead emq:{q}: 1 100",
    ),
    "stalled check, base as argument": (
        wire.stalled_check("q", 3, 9, "arg"),
        b"EMQ.STALLED.CHECK 3 emq:{q}:active emq:{q}:pending emq:{q}:dead emq:{q}: 3 9",
    ),
    "head": (wire.head("q", "schedule"), b"ZRANGE emq:{q}:schedule 0 0 WITHSCORES"),
    "due": (
        wire.due("q", "active", 5, 10, 20),
        b"ZRANGE emq:{q}:active -inf 5 BYSCORE LIMIT 10 20 WITHSCORES",
    ),
    "row": (wire.row("q", b"JOB1"), b"HMGET emq:{q}:job:JOB1 state group lease_epoch stalled"),
    "whether there is a row": (wire.is_row("q", b"JOB1"), b"ZRANGE emq:{q}:job:JOB1 0 0"),
    # Without the type each queue's name would be taken of any key that looks like one.
    "scan": (
        wire.scan(b"7", 1_000),
        b"SCAN 7 MATCH emq:{*}:[as]c* COUNT 1000 TYPE zset",
    ),
}


@pytest.mark.parametrize(("packed", "text"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_is_sent_in_the_form_of_the_contract(packed: bytes, text: bytes) -> None:
    """Verb, numkeys, keys, arguments: only numkeys tells the two forms of the base apart."""
    assert words(packed) == [text.split()]


def test_the_peek_is_a_read_only_script_over_the_active_set() -> None:
    """No writing script ever reaches a native node: the peek is EVAL_RO."""
    ((verb, script, *rest),) = words(wire.peek("q", 100, 1_000))
    assert verb == b"EVAL_RO"
    assert rest == [b"2", b"emq:{q}:active", b"emq:{q}:", b"100", b"1000"]
    for writing in (b"ZADD", b"ZREM", b"HSET", b"HINCRBY", b"DEL", b"EMQ."):
        assert writing not in script


@given(st.lists(st.one_of(st.binary(), st.integers(), st.text()), min_size=1))
def test_any_words_survive_the_encoding(parts: list[bytes | int | str]) -> None:
    """A command holds any bytes: lengths are of bytes, nothing is escaped."""
    expected = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    assert words(wire.pack(*parts)) == [expected]


# --- showing bytes ------------------------------------------------------------------------------

SHOWN = {
    b"JOB01": "JOB01",
    b"\xff\xfe": r"\xff\xfe",
    b"JOB\n2": r"JOB\n2",
    b"JOB\x1b[31mred": r"JOB\x1b[31mred",
    "JOBé".encode(): "JOBé",
    b"JOB\\xff": r"JOB\\xff",
    "JOB\u202e".encode(): r"JOB\u202e",
    b"": "",
}


@pytest.mark.parametrize(("data", "text"), SHOWN.items(), ids=repr)
def test_bytes_are_shown_without_control_characters(data: bytes, text: str) -> None:
    """Case "Binary job ids": an id is shown escaped."""
    assert wire.printable(data) == text


@given(st.lists(st.binary(max_size=8), min_size=2, max_size=2, unique=True))
def test_two_ids_never_look_the_same(pair: list[bytes]) -> None:
    """Case "Binary job ids": what is shown is printable and tells any two ids apart."""
    one, other = (wire.printable(data) for data in pair)
    assert one != other
    assert one.isprintable()


# --- replies ------------------------------------------------------------------------------------

PEEKED: list[object] = [b"run", 1, 2, 3]

GOOD: dict[str, tuple[Callable[[object], object], object, object]] = {
    "promoted": (wire.read_promoted, 7, 7),
    "recovered": (wire.read_recovered, [[b"\xff\xfe"], [b"J\n"]], ([b"\xff\xfe"], [b"J\n"])),
    "recovered nothing": (wire.read_recovered, [[], []], ([], [])),
    "no head": (wire.read_head, [], None),
    "a head": (wire.read_head, [b"J", b"12.9"], wire.Head(b"J", 12)),
    "an infinite score": (wire.read_head, [b"J", b"inf"], wire.Head(b"J", 1 << 53)),
    "a score below all": (wire.read_head, [b"J", b"-inf"], wire.Head(b"J", -(1 << 53))),
    "a huge score below zero": (wire.read_head, [b"J", b"-1.7e+300"], wire.Head(b"J", -(1 << 53))),
    "a huge score": (wire.read_head, [b"J", b"1.7e+300"], wire.Head(b"J", 1 << 53)),
    "time": (wire.read_time_ms, [b"1700000000", b"250000"], 1_700_000_000_250.0),
    "an empty peek": (wire.read_peek, [], wire.NO_LEASES),
    "a peek": (
        wire.read_peek,
        [*PEEKED, b"J", b"5", b"e", b"K", b"6", None],
        wire.Peek(b"run", {b"J": wire.Lease(5, b"e"), b"K": wire.Lease(6, None)}, 1, 2, 3),
    ),
    "a row": (wire.read_row, [b"active", None, b"e", b"2"], wire.Row(b"active", None, b"e", 2)),
    "a row without stalls": (
        wire.read_row,
        [b"x", None, None, None],
        wire.Row(b"x", None, None, 0),
    ),
    "tokens": (wire.read_tokens, b"enqueue promote", ("enqueue", "promote")),
    "no brand": (wire.read_brand, None, None),
}


# As the server reads them: a number in the one way that it writes it, and room for one more.
COUNTS: dict[bytes, int | None] = {
    b"0": 0,
    b"17": 17,
    b"-3": -3,
    b"%d" % (2**62 - 2): 2**62 - 2,
    b"%d" % (2**62 - 1): None,
    b"9" * 5_000: None,
    b"-%d" % 2**63: -(2**63),
    b"-%d" % (2**63 + 1): None,
    b"two": None,
    b"": None,
    b" 1": None,
    b"1\n": None,
    b"+1": None,
    b"01": None,
    b"-0": None,
    b"1_0": None,
    b"1.0": None,
    "\u0661".encode(): None,
}


@pytest.mark.parametrize(("text", "value"), COUNTS.items(), ids=lambda item: repr(item)[:30])
def test_a_counter_is_read_as_the_server_does(text: bytes, value: int | None) -> None:
    """What the stall check would refuse as no count is none here, and never 0."""
    assert wire.read_row([b"active", None, None, text]).stalled == value


@pytest.mark.parametrize(("ms", "told"), {1: True, 2**53 - 1: True, 0: False, -1: False}.items())
def test_only_a_score_that_a_clock_can_show_is_a_time(ms: int, told: bool) -> None:
    """Infinities and what nobody's clock shows sort a set; a lateness cannot be told from them."""
    assert wire.is_time(ms) is told
    assert not wire.is_time(wire.read_ms(b"inf"))
    assert not wire.is_time(wire.read_ms(b"-inf"))


@pytest.mark.parametrize(("read", "reply", "value"), GOOD.values(), ids=GOOD)
def test_a_reply_of_the_promised_shape_is_read(
    read: Callable[[object], object], reply: object, value: object
) -> None:
    """What the contract promises is taken at its word, bytes as bytes."""
    assert read(reply) == value


ODD: dict[str, tuple[Callable[[object], object], object]] = {
    "promoted as text": (wire.read_promoted, b"7"),
    "promoted as array": (wire.read_promoted, [7]),
    "promoted as map": (wire.read_promoted, {b"a": 1}),
    "promoted as nil": (wire.read_promoted, None),
    "promoted as boolean": (wire.read_promoted, True),
    "promoted as double": (wire.read_promoted, 1.0),
    "fewer than none promoted": (wire.read_promoted, -1),
    "recovered as integer": (wire.read_recovered, 3),
    "recovered as nil": (wire.read_recovered, None),
    "recovered as map": (wire.read_recovered, {}),
    "recovered in one list": (wire.read_recovered, [b"J", b"K"]),
    "recovered in three lists": (wire.read_recovered, [[], [], []]),
    "recovered numbers": (wire.read_recovered, [[1], []]),
    "an error among the recovered": (wire.read_recovered, [[wire.ReplyError("OOM")], []]),
    "head without score": (wire.read_head, [b"J"]),
    "head as nil": (wire.read_head, None),
    "a score in words": (wire.read_head, [b"J", b"soon"]),
    "a page of odd length": (wire.read_due, [b"J", b"1", b"K"]),
    "time in words": (wire.read_time_ms, [b"now", b"0"]),
    "time without end": (wire.read_time_ms, [b"9" * 5_000, b"0"]),
    "time as number": (wire.read_time_ms, 5),
    "peek without counts": (wire.read_peek, [b"run"]),
    "peek cut short": (wire.read_peek, [*PEEKED, b"J", b"5"]),
    "peek without a deadline": (wire.read_peek, [*PEEKED, b"J", None, None]),
    "peek with a number for an epoch": (wire.read_peek, [*PEEKED, b"J", b"5", 7]),
    "peek with an error for an epoch": (wire.read_peek, [*PEEKED, b"J", b"5", wire.ReplyError("")]),
    "peek with a number for an id": (wire.read_peek, [*PEEKED, 1, b"5", b"e"]),
    "a row as nil": (wire.read_row, None),
    "a row of numbers": (wire.read_row, [b"active", None, None, 2]),
    "a score that is no number": (wire.read_head, [b"J", b"nan"]),
    "whether a row is there, as number": (wire.read_is_row, 1),
    "tokens as array": (wire.read_tokens, [b"promote"]),
    "brand as integer": (wire.read_brand, 1),
    "info as nil": (wire.read_info, None),
}


@pytest.mark.parametrize(("read", "reply"), ODD.values(), ids=ODD)
def test_an_odd_shape_is_an_error_and_never_a_count(
    read: Callable[[object], object], reply: object
) -> None:
    """Case "RESP3 push frames and reply shapes": an odd shape is an error of that sweep."""
    with pytest.raises(wire.ShapeError, match=" was answered with ") as caught:
        read(reply)
    assert caught.value.code == "shape"


OUTLINES: dict[str, object] = {
    "a string of 6 bytes": b"secret",
    "nil": None,
    "a boolean": True,
    "an integer": 5,
    "an array of 0": [],
    "an array of 2 (an integer, the error OOM)": [1, wire.ReplyError("OOM no memory")],
    "an array of 4 (an integer, an integer, nil, ...)": [1, 2, None, 4],
    "an array of 1 (an array of 1 (an array of 1))": [[[1]]],
    "a dict": {},
    "a float": 0.5,
}


@pytest.mark.parametrize(("text", "reply"), OUTLINES.items())
def test_an_outline_tells_the_shape_and_not_the_content(text: str, reply: object) -> None:
    """What an error message says of an odd reply holds nothing of its data."""
    assert wire.outline(reply) == text


READERS = list(dict.fromkeys(case[0] for case in GOOD.values()))


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__)
def test_an_error_reply_is_raised_as_itself(read: Callable[[object], object]) -> None:
    """An error that the server sent is the answer, whatever was asked."""
    error = wire.ReplyError("NOPERM no")
    with pytest.raises(wire.ReplyError) as caught:
        read(error)
    assert caught.value is error


ERRORS = {
    "LOADING Valkey is loading the dataset in memory": ("LOADING", "LOADING"),
    "MASTERDOWN Link with MASTER is down": ("MASTERDOWN", "MASTERDOWN"),
    "CLUSTERDOWN Hash slot not served": ("CLUSTERDOWN", "CLUSTERDOWN"),
    "BUSY Valkey is busy running a script": ("BUSY", "BUSY"),
    "OOM command not allowed when used memory > 'maxmemory'.": ("OOM", "OOM"),
    "MISCONF Errors writing to the AOF file": ("MISCONF", "MISCONF"),
    "TRYAGAIN Multiple keys request during rehashing of slot": ("TRYAGAIN", "TRYAGAIN"),
    "UNBLOCKED force unblock": ("UNBLOCKED", "UNBLOCKED"),
    "READONLY You can't write against a read only replica.": ("READONLY", "READONLY"),
    "ERR Error running script: @user_script:1: -READONLY You can't write": ("READONLY", "READONLY"),
    "MOVED 5 127.0.0.1:1": ("MOVED", "MOVED"),
    "ASK 5 127.0.0.1:1": ("ASK", "ASK"),
    "CROSSSLOT Keys in request don't hash to the same slot": ("CROSSSLOT", "CROSSSLOT"),
    "NOREPLICAS Not enough good replicas to write.": ("NOREPLICAS", "NOREPLICAS"),
    "EXECABORT Transaction discarded because of previous errors.": ("EXECABORT", "EXECABORT"),
    "NOAUTH Authentication required.": ("NOAUTH", "NOAUTH"),
    "WRONGPASS invalid username-password pair or user is disabled.": ("WRONGPASS", "WRONGPASS"),
    "NOPERM User x has no permissions to run the 'time' command": ("NOPERM", "NOPERM"),
    "WRONGTYPE Operation against a key holding the wrong kind of value": ("WRONGTYPE", "WRONGTYPE"),
    "EMQSTATE JOB1 is not native": ("EMQSTATE", "EMQSTATE"),
    "NOVEL thing": ("NOVEL", "other"),
    "NOVEL": ("NOVEL", "other"),
    "": ("ERR", "ERR"),
}


@pytest.mark.parametrize(("text", "codes"), ERRORS.items())
def test_an_error_is_typed_by_its_first_word(text: str, codes: tuple[str, str]) -> None:
    """Case "LOADING, BUSY, OOM, ...": a label from a small fixed set; unknown words are `other`."""
    error = wire.ReplyError(text)
    assert (error.code, wire.error_code(error.code)) == codes


def test_every_code_that_is_counted_under_its_name_is_met_here() -> None:
    """A label more or less is a decision: dashboards and alerts name them."""
    instead = {"connection", "timeout", "shape"}
    assert {wire.error_code(code) for code in instead} == instead
    assert {label for _, label in ERRORS.values()} | instead == {*wire.ERROR_CODES, "other"}


def test_an_error_text_holds_no_control_characters() -> None:
    """Case "Binary job ids": no terminal control code of an error reply passes through."""
    error = wire.ReplyError("EMQSTATE JOB\x1b[31m\ufffd is not native")
    assert str(error) == r"EMQSTATE JOB\x1b[31m" + "\ufffd is not native"


# --- causes -------------------------------------------------------------------------------------


def test_a_cause_is_read_from_the_peek_and_never_guessed() -> None:
    """Another epoch: restart. The same: stall. No stamp, or not listed: each its own name."""
    leases = {
        b"A": wire.Lease(0, b"run"),
        b"B": wire.Lease(0, b"earlier"),
        b"C": wire.Lease(0, None),
    }
    seen = wire.Peek(b"run", leases)
    causes = [wire.cause_of(job_id, seen) for job_id in (b"A", b"B", b"C", b"D")]
    assert causes == ["stall", "restart", "unstamped", "unattributed"]
    assert wire.cause_of(b"A", None) == "unattributed"
    assert wire.cause_of(b"A", wire.NO_LEASES) == "unattributed"


@pytest.mark.parametrize("text", ["", "-1", "1.5", " 1", "1_0", "\u00b2", "\u0663", "9" * 5_000])
def test_what_is_no_number_of_a_server(text: str) -> None:
    """isdigit() takes two of them and int() does not, or two that int() takes."""
    assert wire.whole_number(text) is None
    assert (wire.whole_number("0"), wire.whole_number("9" * 18)) == (0, 10**18 - 1)
