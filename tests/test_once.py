"""`emqtimerd once` as people and scripts meet it: output, JSON, exit codes, signals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import plant, wait_until
from stub import NIL, SILENCE, Answer, Stub, array, bulk, error, ids, integer, late

from emqtimerd import wire
from emqtimerd.check import examine
from emqtimerd.cli import app
from emqtimerd.config import Settings
from emqtimerd.devnode import DevNode

EARLIER = b"e" * 40
"""A server process that is no more; run ids have 40 digits."""

FAR = 4_102_444_800_000
"""2100-01-01: not due in any test."""


@dataclass
class Run:
    """A run of the command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("EMQTIMERD")}
    for name in ("NO_COLOR", "FORCE_COLOR"):
        kept.pop(name, None)
    return kept | changes


def command(*arguments: str | bytes) -> list[str | bytes]:
    return [sys.executable, "-m", "emqtimerd", "once", *arguments]


def once(*arguments: str | bytes, **env: str) -> Run:
    """Run the command to its end."""
    done = subprocess.run(
        command(*arguments), env=environment(**env), capture_output=True, timeout=30, check=False
    )
    run = Run(done.returncode, done.stdout.decode(), done.stderr.decode())
    assert "Traceback" not in run.err
    return run


def plant_all_kinds(client: redis.Redis) -> str:
    """A queue with work of every kind; returns the server's run_id."""
    run_id = str(client.info("server")["run_id"])
    plant(client, "schedule", {b"JOB1": 1, b"JOB2": 2, b"JOB3": FAR})
    plant(client, "active", {b"JOBSTALL": 1}, lease_epoch=run_id)
    plant(client, "active", {b"JOBCROSSED": 2}, lease_epoch=EARLIER)
    plant(client, "active", {b"JOB\xff\xfe\n\x1b[31m": 3}, lease_epoch=EARLIER)
    plant(client, "active", {b"JOBPLAIN": 4})
    return run_id


# --- done ---------------------------------------------------------------------------------------


def test_the_json_document_has_this_shape(node: DevNode, client: redis.Redis) -> None:
    """What scripts read: every field of the document, for a queue with work of every kind."""
    run_id = plant_all_kinds(client)
    run = once("--url", node.url, "--queue", "orders", "--json")
    assert (run.code, run.err) == (0, "")
    document = run.document
    (queue,) = document["queues"]
    assert queue.pop("passes") >= 3
    for crossing in queue["restart_crossing"]:
        assert crossing.pop("past_deadline_ms") == pytest.approx(time.time() * 1000, abs=60_000)
    address = f"127.0.0.1:{node.port}"
    assert document == {
        "ok": True,
        "nodes": [
            {
                "node": address,
                "run_id": run_id,
                "version": node.version.split()[1],
                "brand": "echomq:6.0.0",
                "tokens": list(wire.TOKENS),
            }
        ],
        "queues": [
            {
                "queue": "orders",
                "node": address,
                "promoted": 2,
                "recovered": 2,
                "dead_lettered": 2,
                "expiries": {"stall": 1, "restart": 2, "unstamped": 1, "unattributed": 0},
                "restart_crossing": [
                    {"id": "JOBCROSSED", "lease_epoch": "e" * 40},
                    {"id": r"JOB\xff\xfe\n\x1b[31m", "lease_epoch": "e" * 40},
                ],
                "dead_letter_ids": ["JOBSTALL", "JOBPLAIN"],
                "blocked": None,
                "error": None,
                "unswept": False,
            }
        ],
    }


def test_the_table_has_a_line_a_queue_and_what_needs_a_second_look(
    node: DevNode, client: redis.Redis
) -> None:
    """Case "Binary job ids": counts in columns, crossings and dead letters by id, escaped."""
    plant_all_kinds(client)
    run = once("--url", node.url, "--queue", "orders", "--queue", "quiet")
    assert (run.code, run.err) == (0, "")
    words = [line.split() for line in run.out.splitlines()]
    assert words[:3] == [
        ["queue", "promoted", "recovered", "dead", "stall", "restart", "unstamped", "unattributed"],
        ["orders", "2", "2", "2", "1", "2", "1", "0"],
        ["quiet", "0", "0", "0", "0", "0", "0", "0"],
    ]
    lines = run.out.splitlines()
    assert lines[3].startswith(
        f"orders: JOBCROSSED crossed a server restart: leased under {'e' * 40}, "
    )
    assert lines[4].startswith(r"orders: JOB\xff\xfe\n\x1b[31m crossed a server restart")
    assert lines[5:] == [
        "orders: JOBSTALL is dead: its stalls reached max_stalled",
        "orders: JOBPLAIN is dead: its stalls reached max_stalled",
        "",
        "2 queues: 2 promoted, 2 recovered, 2 dead-lettered",
    ]


def test_a_queue_that_nobody_ever_used_is_no_error(node: DevNode, client: redis.Redis) -> None:
    """Case "Exit codes and Ctrl-C": nothing due and unknown queues are 0, and make no key."""
    run = once("--url", node.url, "--queue", "nobody", "--json")
    assert (run.code, run.document["ok"]) == (0, True)
    assert client.keys() == [wire.BRAND_KEY]


@pytest.mark.parametrize("form", ["key", "arg"])
def test_the_base_travels_as_the_configuration_says(
    node: DevNode, client: redis.Redis, tmp_path: Path, form: str
) -> None:
    """Both forms of `node.base` work, and the file names node and queues."""
    plant_all_kinds(client)
    file = tmp_path / "emqtimerd.toml"
    file.write_text(f'queues = ["orders", "emails"]\n[node]\nurl = "{node.url}"\nbase = "{form}"\n')
    run = once("--config", str(file), "--json")
    assert run.code == 0
    orders, emails = run.document["queues"]
    assert (orders["promoted"], orders["recovered"], orders["dead_lettered"]) == (2, 2, 2)
    assert emails["queue"] == "emails"


@pytest.mark.parametrize(("form", "numkeys"), [("key", b"3"), ("arg", b"2")])
def test_the_environment_may_name_everything(stub: Stub, form: str, numkeys: bytes) -> None:
    """Node, queues, base and limits come from EMQTIMERD_ variables too."""
    run = once(
        EMQTIMERD_NODE__URL=stub.url,
        EMQTIMERD_QUEUES='["orders"]',
        EMQTIMERD_NODE__BASE=form,
        EMQTIMERD_PROMOTE__LIMIT="7",
    )
    assert run.code == 0
    (promote,) = stub.received("EMQ.PROMOTE")
    assert (promote.words[1], promote.words[-1]) == (numkeys, b"7")


def test_the_command_line_is_stronger_than_environment_and_file(stub: Stub, tmp_path: Path) -> None:
    """`--url` and `--queue` replace what the others say, the whole list of queues with it; what no
    option names comes from the environment, and the rest from the file."""
    file = tmp_path / "emqtimerd.toml"
    file.write_text(
        'queues = ["filed"]\n[node]\nurl = "redis://127.0.0.1:1/0"\nbase = "arg"\n'
        "[promote]\nlimit = 5\n[stalled_check]\nlimit = 6\n"
    )
    run = once(
        *("--config", str(file), "--url", stub.url, "--queue", "a", "--queue", "b"),
        EMQTIMERD_NODE__URL="redis://127.0.0.1:2/0",
        EMQTIMERD_QUEUES='["environ"]',
        EMQTIMERD_PROMOTE__LIMIT="7",
    )
    assert run.code == 0
    keys = [b"emq:{a}:schedule", b"emq:{b}:schedule"]
    promotions = [(a.words[1], a.words[2], a.words[-1]) for a in stub.received("EMQ.PROMOTE")]
    assert promotions == [(b"2", key, b"7") for key in keys]
    assert {a.words[-1] for a in stub.received("EMQ.STALLED.CHECK")} == {b"6"}


@pytest.mark.parametrize(
    ("verb", "sent"), [("promote", (1, 0)), ("stalled-check", (0, 1)), ("", (1, 1))]
)
def test_one_verb_alone_can_be_sent(stub: Stub, verb: str, sent: tuple[int, int]) -> None:
    """Both verbs unless `--verb` names one."""
    options = ("--verb", verb) if verb else ()
    assert once("--url", stub.url, "--queue", "orders", *options).code == 0
    assert (stub.count("EMQ.PROMOTE"), stub.count("EMQ.STALLED.CHECK")) == sent


def test_limits_and_budgets_of_the_command_line_are_sent(stub: Stub) -> None:
    """`--limit` and `--max-stalled` replace what is configured, for this sweep."""
    options = ("--limit", "7", "--max-stalled", "3")
    assert once("--url", stub.url, "--queue", "orders", *options).code == 0
    assert [a.words[-1:] for a in stub.received("EMQ.PROMOTE")] == [(b"7",)]
    assert [a.words[-2:] for a in stub.received("EMQ.STALLED.CHECK")] == [(b"3", b"7")]


def test_without_drain_at_most_one_page_is_moved(node: DevNode, client: redis.Redis) -> None:
    """Draining is the default; `--no-drain` sends each verb once, and leaves no error behind."""
    plant(client, "schedule", {b"JOB%02d" % number: 1 for number in range(25)})
    base = ("--url", node.url, "--queue", "orders", "--limit", "10", "--json")
    first = once(*base, "--no-drain")
    assert (first.code, first.document["queues"][0]["promoted"]) == (0, 10)
    rest = once(*base)
    assert (rest.code, rest.document["queues"][0]["promoted"]) == (0, 15)


@pytest.mark.parametrize("drain", ["--drain", "--no-drain"])
def test_a_dry_run_touches_nothing_and_tells_what_then_happens(
    node: DevNode, client: redis.Redis, drain: str
) -> None:
    """The preview's document is that of the run after it, but for its mark and its passes."""
    plant_all_kinds(client)
    plant(client, "schedule", {b"JOBLANE": 5, b"JOBZ": 6}, "lanes", group=b"g")
    base = ("--url", node.url, "--queue", "orders", "--queue", "lanes", "--limit", "3", drain)
    digest = client.execute_command("DEBUG DIGEST")  # type: ignore[no-untyped-call]
    told = once(*base, "--json", "--dry-run")
    assert client.execute_command("DEBUG DIGEST") == digest  # type: ignore[no-untyped-call]
    done = once(*base, "--json")
    assert told.code == done.code == 1
    assert told.document.pop("dry_run") is True
    assert [_outcome(queue) for queue in told.document["queues"]] == [
        _outcome(queue) for queue in done.document["queues"]
    ]


def _outcome(queue: Any) -> Any:
    """What of a queue's part must be the same in a preview and in the run."""
    same = ("queue", "promoted", "recovered", "dead_lettered", "expiries", "dead_letter_ids")
    crossings = [crossing["id"] for crossing in queue["restart_crossing"]]
    blocked = [(each["verb"], each["id"]) for each in queue["blocked"] or ()]
    return [queue[name] for name in same], crossings, blocked


def test_a_dry_run_speaks_in_the_conditional(node: DevNode, client: redis.Redis) -> None:
    """The table of a preview does not say that anything was done."""
    plant_all_kinds(client)
    run = once("--url", node.url, "--queue", "orders", "--dry-run")
    assert run.code == 0
    assert "orders: JOBSTALL would be dead" in run.out
    assert run.out.endswith(
        "1 queue: 2 would be promoted, 2 would be recovered, 2 would be dead-lettered\n"
    )


# --- failed -------------------------------------------------------------------------------------


def test_a_lane_row_is_named_and_the_rest_is_swept(node: DevNode, client: redis.Redis) -> None:
    """Case "Poison row": its own code, the row's id, what stands before it moved, nothing lost."""
    plant(client, "schedule", {b"JOB%02d" % number: 1 for number in range(23)})
    plant(client, "schedule", {b"JOBLANE": 2}, group=b"g")
    plant(client, "schedule", {b"JOBZ": 3})
    run = once("--url", node.url, "--queue", "orders")
    assert run.code == 1
    assert "orders: promote is blocked by JOBLANE: EMQSTATE" in run.out
    assert "jobs behind it wait until that row is removed" in run.out
    assert run.out.endswith("1 queue: 23 promoted, 0 recovered, 0 dead-lettered; promote blocked\n")
    assert client.zcard("emq:{orders}:schedule") == 2
    again = once("--url", node.url, "--queue", "orders", "--json").document
    (blocked,) = again["queues"][0]["blocked"]
    assert (again["ok"], blocked["verb"], blocked["id"]) == (False, "promote", "JOBLANE")


def test_one_queue_that_fails_is_told_from_all_that_fail(
    node: DevNode, client: redis.Redis
) -> None:
    """Case "Exit codes and Ctrl-C": partial and total failure are 1, and the output says which."""
    client.set("emq:{wrong}:schedule", "text")
    client.set("emq:{wrong}:active", "text")
    plant(client, "schedule", {b"JOB1": 1})
    base = ("--url", node.url, "--queue", "wrong")
    partly = once(*base, "--queue", "orders", "--queue", "quiet")
    assert partly.code == 1
    assert partly.out.endswith(
        "3 queues: 1 promoted, 0 recovered, 0 dead-lettered; "
        "promote failed in 1 of 3, stalled_check failed in 1 of 3\n"
    )
    client.set("emq:{other}:schedule", "text")
    both = once(*base, "--queue", "other").out
    assert both.endswith("; promote failed in all 2, stalled_check failed in 1 of 2\n")
    wholly = once(*base)
    assert wholly.code == 1
    assert wholly.out.endswith("dead-lettered; promote failed, stalled_check failed\n")
    assert "wrong: promote failed: WRONGTYPE" in wholly.out
    assert "wrong: stalled_check failed: WRONGTYPE" in wholly.out
    errors = once(*base, "--json").document["queues"][0]["error"]
    assert [(each["verb"], each["code"]) for each in errors] == [
        ("promote", "WRONGTYPE"),
        ("stalled_check", "WRONGTYPE"),
    ]


def test_a_denied_command_is_named_with_its_queue(stub: Stub) -> None:
    """Case "ACL user with only the two verbs": NOPERM names verb and queue."""
    text = "NOPERM User sweeper has no permissions to run the 'emq.promote' command"
    stub.on("EMQ.PROMOTE", error(text))
    run = once("--url", stub.url, "--queue", "orders")
    assert run.code == 1
    assert f"orders: promote failed: {text}" in run.out


def test_an_unanswered_sweep_is_sent_once_and_says_so(stub: Stub) -> None:
    """Case "Library retries re-send a slow sweep": exit 1, timeout in words, one arrival."""
    stub.on("EMQ.PROMOTE", late(integer(5), 3))
    run = once("--url", stub.url, "--queue", "orders", "--json", EMQTIMERD_NODE__TIMEOUT="1s")
    assert run.code == 1
    (failure,) = run.document["queues"][0]["error"]
    assert (failure["verb"], failure["code"]) == ("promote", "timeout")
    assert stub.count("EMQ.PROMOTE") == 1


def test_a_sweep_that_runs_out_of_time_says_what_it_left(stub: Stub) -> None:
    """`--timeout` sends nothing more; what was done is printed, and the exit code is 1."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", late(integer(100), 0.05))
    run = once("--url", stub.url, "--queue", "orders", "--timeout", "1.5")
    assert run.code == 1
    assert "orders: there was no time to finish it" in run.out
    assert run.out.endswith("; not finished\n")
    assert int(run.out.splitlines()[1].split()[1]) == 100 * stub.count("EMQ.PROMOTE")


# --- usage --------------------------------------------------------------------------------------

LIMIT = "must be a whole number from 1 to 100000"
STALLED = "must be a whole number from 1 to 1000000"

USAGE: dict[str, tuple[list[str], str]] = {
    "no queue": ([], "no queue to sweep: name one with --queue NAME"),
    "braces": (["--queue", "a{b}c"], "holds a brace ('{')"),
    "a space": (["--queue", "a b"], "holds a white space or control character (' ')"),
    "empty": (["--queue", ""], "is empty"),
    "too long": (["--queue", "x" * 256], "is 256 bytes long"),
    "named twice": (["--queue", "a", "--queue", "a"], "more than once"),
    "limit 0": (["--queue", "a", "--limit", "0"], f"'--limit': {LIMIT}"),
    "limit in words": (["--queue", "a", "--limit", "many"], f"'--limit': {LIMIT}"),
    "limit in Arabic": (["--queue", "a", "--limit", "\u0665"], f"'--limit': {LIMIT}"),
    "limit NaN": (["--queue", "a", "--limit", "nan"], f"'--limit': {LIMIT}"),
    "limit negative": (["--queue", "a", "--limit", "-5"], f"'--limit': {LIMIT}"),
    "limit huge": (["--queue", "a", "--limit", "9" * 5000], f"'--limit': {LIMIT}"),
    "max_stalled 0": (["--queue", "a", "--max-stalled", "0"], f"'--max-stalled': {STALLED}"),
    "max_stalled huge": (["--queue", "a", "--max-stalled", "9" * 20], STALLED),
    "timeout 0": (["--queue", "a", "--timeout", "0"], 'must be a duration from "1ms" to "24h"'),
    "timeout NaN": (["--queue", "a", "--timeout", "nan"], 'such as "250ms", "1s"'),
    "timeout infinite": (["--queue", "a", "--timeout", "inf"], "is not a duration"),
    "timeout negative": (["--queue", "a", "--timeout", "-1s"], "is not a duration"),
    "another verb": (["--queue", "a", "--verb", "complete"], "must be promote or stalled-check"),
    "no such option": (["--queue", "a", "--quick"], "--quick"),
    "a file that is not there": (["--config", "nowhere.toml"], "nowhere.toml"),
    "a URL of another world": (["--queue", "a", "--url", "http://me:hunter2@h/"], "node.url"),
}


@pytest.mark.parametrize(("options", "words"), USAGE.values(), ids=USAGE)
def test_wrong_usage_is_told_before_anything_is_contacted(
    stub: Stub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: str,
) -> None:
    """Case "Exit codes and Ctrl-C": exit 2, the reason on standard error, no connection."""
    monkeypatch.setattr(os, "environ", environment())
    url = [] if "--url" in options else ["--url", stub.url]
    with pytest.raises(SystemExit) as ended:
        app(["once", *url, "--json", *options])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, stub.connections) == (2, "", 0)
    assert words in err
    assert "hunter2" not in err


def test_discovery_does_not_stand_in_for_names(stub: Stub) -> None:
    """`once` does not search: it says so, and what to do instead."""
    run = once("--url", stub.url, EMQTIMERD_DISCOVERY__ENABLED="true")
    assert (run.code, run.out, stub.connections) == (2, "", 0)
    assert "name one with --queue NAME" in run.err
    assert "once does not search for queues" in run.err


@pytest.mark.parametrize("timeout", ["1500ms", "2"])
def test_a_timeout_is_a_duration_or_seconds(stub: Stub, timeout: str) -> None:
    """Written as everywhere in the configuration, or as a number of seconds."""
    assert once("--url", stub.url, "--queue", "a", "--timeout", timeout).code == 0


@pytest.mark.parametrize("verb", ["stalled-check", "stalled_check"])
def test_a_verb_goes_by_both_spellings(stub: Stub, verb: str) -> None:
    """The command line writes it with a hyphen, the configuration with an underscore."""
    assert once("--url", stub.url, "--queue", "a", "--verb", verb).code == 0
    assert (stub.count("EMQ.STALLED.CHECK"), stub.count("EMQ.PROMOTE")) == (1, 0)


def test_a_database_that_is_not_there_is_a_wrong_configuration(node: DevNode) -> None:
    """The server was reached and says that node.url is wrong: exit 2, and what to correct."""
    run = once("--url", node.url.removesuffix("/0") + "/99", "--queue", "orders")
    assert (run.code, run.out) == (2, "")
    assert "DB index is out of range" in run.err
    assert "emqtimerd: fix: this server has no database 99" in run.err


def test_a_single_server_that_is_no_cluster_is_a_wrong_configuration(node: DevNode) -> None:
    """Here too node.url is what is wrong, and no sweep was tried: exit 2, and what to correct."""
    url = node.url.replace("redis://", "redis+cluster://").removesuffix("/0")
    run = once("--url", url, "--queue", "orders")
    assert (run.code, run.out) == (2, "")
    assert "not in cluster mode" in run.err
    assert '\nemqtimerd: fix: write "redis://…" in node.url' in run.err


def test_a_file_that_the_environment_names_is_told_so(stub: Stub) -> None:
    """Who cannot find the mistake on the command line learns where else it may be."""
    run = once("--url", stub.url, "--queue", "a", EMQTIMERD_CONFIG="nowhere.toml")
    assert run.code == 2
    assert run.err == (
        "emqtimerd: file nowhere.toml: cannot be read: No such file or directory "
        "(named by environment EMQTIMERD_CONFIG)\n"
    )


WRONG_COMMANDS: dict[str, tuple[list[str], str]] = {
    "a port in words": (["devnode", "--port", "many"], "must be a port from 1 to 65535, or 0"),
    "a port in Arabic": (["devnode", "--port", "\u0666\u0663\u0667\u0669"], "must be a port"),
    "a port too high": (["devnode", "--port", "65536"], "must be a port"),
    "a file for a directory": (["devnode", "--port", "0", "--dir", __file__], "cannot be used: "),
    "two nodes": (["run", "--embedded", "--url", "redis://h"], "leave out --url"),
    "nothing to sweep": (["run"], "queues = [] (default): nothing to sweep: list some"),
    "a host for a URL": (["run", "--url", "h:1", "--queue", "a"], 'write "redis://h:1"'),
    "a directory": (["config", "show", "--config", "/"], "file /: cannot be read: Is a directory"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG_COMMANDS.values(), ids=WRONG_COMMANDS)
def test_every_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    """Exit 2, a sentence on standard error, nothing on standard output."""
    monkeypatch.setattr(os, "environ", environment())
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert words in err


def test_a_valid_configuration_is_told_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which file was looked at, and how much it is about."""
    monkeypatch.setattr(os, "environ", environment())
    file = tmp_path / "e.toml"
    file.write_bytes(b'\xef\xbb\xbfqueues = ["a", "b"]\r\n[promote]\r\nlimit = 5\r\n')
    with pytest.raises(SystemExit) as ended:
        app(["config", "validate", "--config", str(file)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{file}: valid, 2 queues listed, discovery off\n"


def test_a_name_that_is_no_utf_8_is_wrong_usage(stub: Stub) -> None:
    """Case "One odd label value": an argument of any bytes is refused, and shown escaped."""
    run = once("--url", stub.url, "--queue", b"caf\xe9")
    assert (run.code, run.out, stub.connections) == (2, "", 0)
    assert "is not valid UTF-8" in run.err


# --- unreachable, and not an EMQ node -----------------------------------------------------------


def _silent(stub: Stub) -> None:
    stub.on("EMQ.VERSION", SILENCE)


UNREACHABLE: dict[str, tuple[Callable[[Stub], None], str]] = {
    "down": (Stub.stop_listening, "cannot connect (Connection refused)"),
    "password refused": (
        lambda stub: stub.on("AUTH", error("WRONGPASS invalid username-password pair")),
        "authentication was refused",
    ),
    "password wanted": (
        lambda stub: stub.on("EMQ.VERSION", error("NOAUTH Authentication required.")),
        "the server wants authentication",
    ),
    "silent": (_silent, "no reply within the timeout"),
}


@pytest.mark.parametrize(("prepare", "words"), UNREACHABLE.values(), ids=UNREACHABLE)
def test_an_unreachable_node_is_exit_3_with_its_address_and_no_secret(
    stub: Stub, prepare: Callable[[Stub], None], words: str
) -> None:
    """Case "Exit codes and Ctrl-C": server down, auth refused; the document is printed even so."""
    prepare(stub)
    url = stub.url.replace("redis://", "redis://me:hunter2@")
    run = once("--url", url, "--queue", "orders", "--json", EMQTIMERD_NODE__TIMEOUT="300ms")
    assert run.code == 3
    assert run.document["ok"] is False
    assert words in run.document["error"]["message"]
    assert run.document["nodes"][0]["run_id"] is None
    assert run.document["queues"][0]["promoted"] == 0
    assert run.err.startswith(f"emqtimerd: 127.0.0.1:{stub.port}: ")
    assert words in run.err
    assert "hunter2" not in run.err + run.out
    assert "\nemqtimerd: fix: " in run.err
    assert run.document["error"]["fix"]


def test_tls_to_a_port_that_has_none_says_what_to_try(node: DevNode) -> None:
    """A server without TLS leaves the greeting unanswered, and that looks like a dead one."""
    url = node.url.replace("redis://", "rediss://")
    run = once("--url", url, "--queue", "a", EMQTIMERD_NODE__CONNECT_TIMEOUT="200ms")
    assert run.code == 3
    assert 'if this port does not speak TLS, write "redis://"' in run.err


NOBODY_NAMED = {
    "no sentinel": (error("ERR unknown command 'SENTINEL', with args beginning with: "), "is none"),
    "another name": (NIL, "correct the name of the primary in node.url: SENTINEL MASTERS"),
}


@pytest.mark.parametrize(("answer", "words"), NOBODY_NAMED.values(), ids=NOBODY_NAMED)
def test_a_sentinel_that_names_no_primary_says_what_to_write_instead(
    stub: Stub, answer: Answer, words: str
) -> None:
    """It was reached, so whether it runs and listens is no question; `check` says the same."""
    stub.on("SENTINEL", answer)
    url = f"redis+sentinel://127.0.0.1:{stub.port}/main/0"
    run = once("--url", url, "--queue", "a")
    assert run.code == 3
    fix = run.err.partition("fix: ")[2].strip()
    assert words in fix
    assert "listen" not in fix
    settings = Settings.model_validate({"queues": ["a"], "node": {"url": url}})
    assert fix in {finding.fix for finding in examine(settings).findings}


NO_CORE = error("ERR unknown command 'EMQ.VERSION'")
FENCES: dict[str, tuple[str, Answer, str, str]] = {
    "no job core": ("EMQ.VERSION", NO_CORE, "not loaded", "load the native job core"),
    "a token missing": ("EMQ.VERSION", bulk(b"promote"), "stalled.check", "load the native"),
    "no brand": ("GET", Answer(b"$-1\r\n"), "has no brand at {emq}", "if this is to be"),
    "the other executor": ("GET", bulk(b"echomq:4.0.0"), "is echomq:4.0.0", "another executor"),
}


@pytest.mark.parametrize(("verb", "answer", "words", "fix"), FENCES.values(), ids=FENCES)
def test_a_server_that_is_no_emq_node_is_exit_4(
    stub: Stub, verb: str, answer: Answer, words: str, fix: str
) -> None:
    """Which token or brand is missing is said, with what to do, and nothing was sent but the
    handshake."""
    stub.on(verb, answer)
    run = once("--url", stub.url, "--queue", "orders")
    assert (run.code, run.out) == (4, "")
    assert words in run.err
    assert f"\nemqtimerd: fix: {fix}" in run.err
    assert {a.verb for a in stub.arrivals} == {"CLIENT", "EMQ.VERSION", "GET", "INFO"}


def test_a_node_that_says_later_is_exit_1(stub: Stub) -> None:
    """The node was reached: LOADING is a failed sweep and no verdict on what it is."""
    stub.on("EMQ.VERSION", error("LOADING Valkey is loading the dataset in memory"))
    run = once("--url", stub.url, "--queue", "orders", "--json")
    assert (run.code, run.document["error"]["code"]) == (1, "LOADING")


# --- signals, pipes and terminals ---------------------------------------------------------------


@contextlib.contextmanager
def start(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command at work; it ends with the test, also with one that fails."""
    with subprocess.Popen(
        command(*arguments), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_between_pipelines_and_prints_what_was_done(
    stub: Stub, number: signal.Signals, code: int
) -> None:
    """Case "Exit codes and Ctrl-C": the sweep under way is awaited and counted, nothing follows."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", late(integer(100), 0.3))
    with start("--url", stub.url, "--queue", "orders", "--json") as process:
        wait_until(lambda: stub.count("EMQ.PROMOTE") >= 2, "the second page is under way")
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (code, b"")
    (queue,) = json.loads(out)["queues"]
    assert (queue["promoted"], queue["unswept"]) == (100 * stub.count("EMQ.PROMOTE"), True)
    assert stub.count("EMQ.STALLED.CHECK") == 0


def test_a_second_interrupt_ends_at_once(stub: Stub) -> None:
    """Case "Exit codes and Ctrl-C": who cannot wait need not, and sees no traceback."""
    stub.on("EMQ.PROMOTE", SILENCE)
    with start("--url", stub.url, "--queue", "orders") as process:
        wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "the sweep is under way")
        began = time.monotonic()
        while process.poll() is None and time.monotonic() - began < 4:
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        out, err = process.communicate(timeout=10)
    assert time.monotonic() - began < 4
    assert (process.returncode, out, err) == (-signal.SIGINT, b"", b"")


def test_a_reader_that_left_is_no_error(stub: Stub) -> None:
    """A closed pipe ends quietly, with the exit code of the work."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command("--url", stub.url, "--queue", "orders", "--json"),
        env=environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_standard_output_is_no_error(stub: Stub) -> None:
    """Started with it closed, as some supervisors do, the work is done all the same."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"]
    done = subprocess.run(
        [*shell, *command("--url", stub.url, "--queue", "orders")],
        env=environment(),
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert stub.count("EMQ.PROMOTE") == 1


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_daemon_needs_none_of_the_standard_streams(stub: Stub, streams: str) -> None:
    """Started with them closed it works all the same, and no connection gets one of their
    numbers: what a crash writes to standard error must not go to the server."""
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh"]
    arguments = ("--url", stub.url, "--queue", "orders")
    with subprocess.Popen(
        [*shell, sys.executable, "-m", "emqtimerd", "run", *arguments],
        env=environment(EMQTIMERD_HTTP__LISTEN="127.0.0.1:0"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as daemon:
        wait_until(
            lambda: stub.count("EMQ.PROMOTE") or daemon.poll() is not None, "a sweep or the end"
        )
        if Path("/proc").exists():
            where = [str(Path(f"/proc/{daemon.pid}/fd/{n}").readlink()) for n in (0, 1, 2)]
            assert not [each for each in where if each.startswith("socket:")]
        daemon.terminate()
        assert daemon.wait(30) == 0


@pytest.mark.parametrize("streams", [">&-", "2>&-"])
def test_a_check_needs_no_standard_streams(stub: Stub, streams: str) -> None:
    """It is told by the exit code alone then."""
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh"]
    done = subprocess.run(
        [
            *shell,
            sys.executable,
            "-m",
            "emqtimerd",
            "check",
            "--queue",
            "a",
            "--url",
            "redis://h:1",
        ],
        env=environment(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_disk_that_takes_a_part_is_told(tmp_path: Path, unbuffered: str) -> None:
    """A result of which the half was written is said in a line, also with PYTHONUNBUFFERED, as in
    the container: Python itself then forgets what a write that was cut short left over."""
    shell = ["sh", "-c", 'ulimit -f 1 && exec "$@"', "sh"]
    with (tmp_path / "schema").open("wb") as small:
        done = subprocess.run(
            [*shell, sys.executable, "-m", "emqtimerd", "config", "schema"],
            env=environment(PYTHONUNBUFFERED=unbuffered),
            stdout=small,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    # A shell's own idea of a block.
    assert (tmp_path / "schema").stat().st_size in (512, 1_024)
    assert done.returncode == 1
    assert done.stderr == b"emqtimerd: cannot write the result: File too large\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    ("arguments", "sweeps"),
    [
        (("once", "--url", "{url}", "--queue", "orders", "--json"), 1),
        (("once", "--help"), 0),
        (("--version",), 0),
    ],
)
def test_a_full_disk_is_told_of_whatever_is_printed(
    stub: Stub, arguments: tuple[str, ...], sweeps: int
) -> None:
    """A line and exit 1, no traceback; a sweep whose result cannot be written was done."""
    words = [word.format(url=stub.url) for word in arguments]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "emqtimerd", *words],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert done.returncode == 1
    assert stub.count("EMQ.PROMOTE") == sweeps
    assert done.stderr == b"emqtimerd: cannot write the result: No space left on device\n"


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_gets_no_control_codes(
    node: DevNode, client: redis.Redis, env: dict[str, str]
) -> None:
    """Case "Binary job ids": the table is plain, NO_COLOR or not, whatever an id is made of."""
    plant_all_kinds(client)
    master, slave = pty.openpty()
    done = subprocess.run(
        command("--url", node.url, "--queue", "orders"),
        env=environment(**env),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        timeout=30,
        check=False,
    )
    os.close(slave)
    shown = b""
    try:
        while data := os.read(master, 65_536):
            shown += data
    except OSError:
        pass  # Linux tells the end of a terminal so
    os.close(master)
    assert done.returncode == 0
    assert b"orders" in shown
    assert b"\x1b" not in shown


def test_names_beyond_ascii_are_printed_as_they_are(stub: Stub) -> None:
    """Also where the locale knows only ASCII: a queue's name is no reason to fail."""
    run = once("--url", stub.url, "--queue", "grüße", LC_ALL="C")
    assert run.code == 0
    assert "grüße" in run.out
    ascii_only = once("--url", stub.url, "--queue", "grüße", PYTHONIOENCODING="ascii")
    assert (ascii_only.code, ascii_only.err) == (0, "")


def test_an_error_text_of_the_server_cannot_steer_the_terminal(stub: Stub) -> None:
    """Case "Binary job ids": what the server says is escaped like an id."""
    stub.on("EMQ.PROMOTE", error(b"EMQSTATE JOB\x1b[31m\xff is not native"))
    stub.on("EMQ.STALLED.CHECK", array(array(), array()))
    run = once("--url", stub.url, "--queue", "orders")
    assert run.code == 1
    assert r"EMQSTATE JOB\x1b[31m" in run.out
    assert "\x1b" not in run.out
