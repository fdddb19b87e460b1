"""`emqtimerd check`: what it finds, the fix beside it, and the smallest ACL rule."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import connect, server_path, wait_until
from stub import HANG_UP, SILENCE, Stub, array, bulk, error, ids, refused
from typer.testing import CliRunner

from emqtimerd import wire
from emqtimerd.acl import PERMISSIONS, acl_document, acl_rule, acl_words
from emqtimerd.check import CHECKS, Finding, Report, document, examination, examine, lines
from emqtimerd.check.server import clock
from emqtimerd.cli import app
from emqtimerd.config import Settings
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.discovery import Discovery
from emqtimerd.node import Node, open_node
from emqtimerd.once import Report as OnceReport
from emqtimerd.once import sweep_once
from emqtimerd.sweeper import VERBS, MassExpiry, Sweep, judge_mass_expiry, run_round
from emqtimerd.topology import Nodes

PROJECT = Path(__file__).parent.parent
QUEUE = "orders"
USER, PASSWORD = "emqtimerd", "open sesame"

EVERYTHING: dict[str, Any] = {
    "queues": [QUEUE],
    "stalled_check": {"mass_expiry": {"share": 0.5, "at_least": 1}},
    "discovery": {"enabled": True, "include": [QUEUE]},
}
"""A configuration in which every command of the daemon is used."""


@contextlib.contextmanager
def healthy_stub() -> Iterator[Stub]:
    with Stub() as stub:
        stub.on("EXEC", array())
        yield stub


def settings_for(url: str, **settings: Any) -> Settings:
    return Settings.model_validate({"queues": [QUEUE], **settings, "node": {"url": url}})


def as_user(node: DevNode, **settings: Any) -> Settings:
    """Settings that log in as the daemon's own user."""
    url = f"redis://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{node.port}/0"
    return settings_for(url, **settings)


@pytest.fixture
def allow(any_client: redis.Redis) -> Iterator[Callable[[Sequence[str]], None]]:
    """Makes the daemon's user with these words of a rule; he goes with the test."""

    def make(words: Sequence[str]) -> None:
        act(any_client, "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *words)
        act(any_client, "ACL", "LOG", "RESET")

    yield make
    any_client.acl_deluser(USER)
    act(any_client, "ACL", "LOG", "RESET")


@pytest.fixture
def allow_here(client: redis.Redis) -> Iterator[Callable[[Sequence[str]], None]]:
    """As `allow`, on one kind of server."""
    yield lambda words: act(client, "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *words)
    client.acl_deluser(USER)


def act(client: redis.Redis, *command: Any) -> Any:
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


def fill(client: redis.Redis, queue: str = QUEUE) -> None:
    """Three due jobs, and three expired leases, of which one is of an earlier server process."""
    schedule, pending, active = (
        wire.queue_key(queue, name) for name in ("schedule", "pending", "active")
    )
    for number in range(3):
        job = b"JOBs%d" % number
        row = wire.row_key(queue, job)
        act(client, "EMQ.SCHEDULE", 2, row, schedule, job, "payload", "in", 0)
    for number in range(3):
        job = b"JOBa%d" % number
        act(client, "EMQ.ENQUEUE", 2, wire.row_key(queue, job), pending, job, "payload")
        act(client, "EMQ.CLAIM", 3, pending, active, wire.base(queue), 60_000)
        client.zadd(active, {job: 1 + number})
    client.hset(wire.row_key(queue, b"JOBa1"), "lease_epoch", "of-another-process")


def denials(client: redis.Redis) -> list[Any]:
    return list(act(client, "ACL", "LOG"))


def told(report: Report, check: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.check == check]


def the(report: Report, check: str) -> Finding:
    """The one finding of a check."""
    (finding,) = told(report, check)
    return finding


def results(report: Report) -> dict[str, str]:
    """The worst result of each check but `config`."""
    worst: dict[str, str] = {}
    for finding in report.findings:
        order = ("pass", "skip", "warn", "fail")
        known = worst.get(finding.check, "pass")
        worst[finding.check] = max(known, finding.result, key=order.index)
    del worst["config"]
    return worst


def differing(report: Report) -> dict[str, str]:
    return {check: result for check, result in results(report).items() if result != "pass"}


# --- a healthy node, and no traces --------------------------------------------------------------


def test_a_healthy_node_passes_every_check(any_node: DevNode) -> None:
    """All checks pass, each once, in their order, and the command exits 0."""
    report = examine(settings_for(any_node.url))
    assert differing(report) == {}
    assert [*dict.fromkeys(finding.check for finding in report.findings)] == [*CHECKS]
    assert report.exit_code == 0
    assert the(report, "server").found.startswith(any_node.version)


def test_nothing_is_moved_and_no_verb_is_executed(
    any_node: DevNode, any_client: redis.Redis
) -> None:
    """With due jobs and expired leases there, the data is the same afterwards, to the byte."""
    fill(any_client)
    before = act(any_client, "DEBUG", "DIGEST")
    any_client.config_resetstat()
    report = examine(as_default(any_node, **EVERYTHING))
    assert differing(report) == {}
    assert act(any_client, "DEBUG", "DIGEST") == before
    calls = {name.lower(): stats for name, stats in any_client.info("commandstats").items()}
    assert not {"cmdstat_emq.promote", "cmdstat_emq.stalled.check"} & calls.keys()
    assert the(report, "queue").found == "orders: pending 0, active 3, schedule 3, dead 0"


def as_default(node: DevNode, **settings: Any) -> Settings:
    return settings_for(node.url, **settings)


# --- the smallest rule --------------------------------------------------------------------------


def find_queues(settings: Settings) -> frozenset[str] | None:
    node = open_node(settings.node)
    try:
        discovery = Discovery(Nodes(node), settings)
        # A keyspace of a few keys is searched in a few steps.
        for _ in range(10):
            if found := discovery.step():
                return found
        return None
    finally:
        node.close()


def sweep(settings: Settings, **options: Any) -> OnceReport:
    return sweep_once(settings, settings.queues, verbs=VERBS, **options)


def outcome(report: OnceReport) -> str:
    """What a sweep did, in a few words: moved jobs, causes, or what stood in its way."""
    if report.fault:
        return f"fault {report.fault.code}"
    (queue,) = report.queues
    moved = f"{queue.promoted} {queue.recovered} {len(queue.dead)}"
    causes = " ".join(f"{cause}={count}" for cause, count in queue.causes.items() if count)
    failed = " ".join(f"{verb}:{failure.code}" for verb, failure in queue.errors)
    return " ".join(part for part in (moved, causes, failed) if part)


def test_with_exactly_the_rule_everything_works_and_nothing_is_denied(
    any_node: DevNode, any_client: redis.Redis, allow: Callable[[Sequence[str]], None]
) -> None:
    """Sweeps, previews, discovery, the guard and the check: the server's ACL log stays empty."""
    settings = as_user(any_node, **EVERYTHING)
    allow(acl_words(settings))
    fill(any_client)
    assert differing(examine(settings)) == {}
    assert find_queues(settings) == frozenset({QUEUE})
    assert outcome(sweep(settings, dry_run=True)) == WHOLE
    assert guard_sees_mass_expiry(settings)
    assert outcome(sweep(settings, limit=2)) == WHOLE
    assert queue_sizes(settings) is not None
    assert denials(any_client) == []


def guard_sees_mass_expiry(settings: Settings) -> bool:
    node = open_node(settings.node)
    try:
        guarded = Sweep(QUEUE, "stalled_check", 100, mass_expiry=MassExpiry(0.5, 1))
        judge_mass_expiry(node, [guarded])
        return guarded.lenient
    finally:
        node.close()


def queue_sizes(settings: Settings) -> tuple[int, ...] | None:
    node = open_node(settings.node)
    try:
        (result,) = run_round(node, [Sweep(QUEUE, "stalled_check", 100)], until=2**40).results
        return result.jobs
    finally:
        node.close()


WHOLE = "3 1 2 stall=2 restart=1"
UNATTRIBUTED = "3 1 2 unattributed=3"
NO_DRY_RUN = "0 0 0 promote:NOPERM stalled_check:NOPERM"

# For each word of the rule: what `check` makes of its absence, what a sweep still does, and what
# the preview says.
WITHOUT = {
    "~emq:{orders}:*": ("fail", NO_DRY_RUN, NO_DRY_RUN),
    "%R~{emq}:version": ("fail", "fault NOPERM", "fault NOPERM"),
    "+client|setname": ("warn", WHOLE, WHOLE),
    "+emq.version": ("fail", "fault NOPERM", "fault NOPERM"),
    "+get": ("fail", "fault NOPERM", "fault NOPERM"),
    "+info": ("warn", UNATTRIBUTED, "3 0 0 stalled_check:NOPERM"),
    "+time": ("warn", WHOLE, NO_DRY_RUN),
    "+emq.promote": ("fail", "0 1 2 stall=2 restart=1 promote:NOPERM", WHOLE),
    "+emq.stalled.check": ("fail", "3 0 0 stalled_check:NOPERM", WHOLE),
    "+zrange": ("warn", UNATTRIBUTED, NO_DRY_RUN),
    "+zcard": ("warn", WHOLE, WHOLE),
    "+multi": ("warn", UNATTRIBUTED, WHOLE),
    "+exec": ("warn", UNATTRIBUTED, WHOLE),
    "+eval_ro": ("warn", UNATTRIBUTED, WHOLE),
    "+hget": ("warn", UNATTRIBUTED, WHOLE),
    "+hmget": ("warn", WHOLE, NO_DRY_RUN),
    "+zcount": ("warn", WHOLE, WHOLE),
    "+scan": ("fail", WHOLE, WHOLE),
}


@pytest.mark.parametrize("word", WITHOUT)
def test_without_one_word_the_check_names_it_and_the_rest_holds(
    any_node: DevNode,
    any_client: redis.Redis,
    allow: Callable[[Sequence[str]], None],
    word: str,
) -> None:
    """The finding's fix, typed in as it stands, heals it; meanwhile the documented rest works."""
    settings = as_user(any_node, **EVERYTHING)
    allow([other for other in acl_words(settings) if other != word])
    fill(any_client)
    expected, swept, foreseen = WITHOUT[word]
    report = examine(settings)
    named = [finding for finding in told(report, "acl") if finding.fix]
    assert [finding.result for finding in named] == [expected]
    assert report.exit_code == (1 if expected == "fail" else 0)
    assert outcome(sweep(settings, dry_run=True)) == foreseen
    assert outcome(sweep(settings, limit=2)) == swept
    _, _, command = named[0].fix.partition(": ")
    act(any_client, *shlex.split(command))
    assert differing(examine(settings)) == {}


def test_a_server_that_was_robbed_of_a_command(start_node: Callable[..., DevNode]) -> None:
    """`rename-command` takes away what no rule gives back: the check names it, and sweeps go on."""
    node = start_node(extra_args=("--rename-command", "EVAL_RO", ""))
    settings = as_default(node, **EVERYTHING)
    with connect(node) as client:
        client.set(wire.BRAND_KEY, wire.BRAND)
        fill(client)
    report = examine(settings)
    (found,) = (finding for finding in told(report, "acl") if finding.fix)
    assert (found.result, report.exit_code) == ("warn", 0)
    assert "the server has no EVAL_RO: " in found.found
    assert "rename-command" in found.fix
    assert outcome(sweep(settings, limit=2)) == UNATTRIBUTED


@pytest.mark.parametrize("command", ["MULTI", "EXEC"])
def test_a_server_that_was_robbed_of_its_transactions(
    start_node: Callable[..., DevNode], command: str
) -> None:
    """A stall check that begins one and cannot end it fails, so the check does not pass."""
    node = start_node(extra_args=("--rename-command", command, ""))
    settings = as_default(node, **EVERYTHING)
    with connect(node) as client:
        client.set(wire.BRAND_KEY, wire.BRAND)
    report = examine(settings)
    (found,) = told(report, "sweeps")
    assert (found.result, report.exit_code) == ("fail", 1)
    assert f"unknown command '{command}'" in found.found
    assert "rename-command" in found.fix


def test_the_table_of_losses_is_whole(node: DevNode) -> None:
    """Every word of the largest rule is taken away in some test."""
    assert [*WITHOUT] == acl_words(as_user(node, **EVERYTHING))


@pytest.mark.parametrize(
    ("word", "works"),
    [
        ("+scan", lambda settings: find_queues(settings) is None),
        ("+zcount", lambda settings: not guard_sees_mass_expiry(settings)),
        ("+zcard", lambda settings: queue_sizes(settings) is None),
    ],
)
def test_what_only_the_daemon_would_notice(
    any_node: DevNode,
    any_client: redis.Redis,
    allow: Callable[[Sequence[str]], None],
    word: str,
    works: Callable[[Settings], bool],
) -> None:
    """Without SCAN no queue is found, without ZCOUNT the guard is off, without ZCARD no sizes."""
    settings = as_user(any_node, **EVERYTHING)
    allow([other for other in acl_words(settings) if other != word])
    fill(any_client)
    assert works(settings)


@pytest.mark.parametrize("word", ["+time", "+zrange"])
def test_without_clock_or_heads_nothing_is_late_and_nothing_wakes(
    any_node: DevNode,
    any_client: redis.Redis,
    allow: Callable[[Sequence[str]], None],
    word: str,
) -> None:
    """Jobs move all the same; how late they were and what comes next stays unknown."""
    settings = as_user(any_node)
    allow([other for other in acl_words(settings) if other != word])
    fill(any_client)
    act(
        any_client,
        "EMQ.SCHEDULE",
        *(2, wire.row_key(QUEUE, b"JOBz"), wire.queue_key(QUEUE, "schedule"), "JOBz", "", "in"),
        60_000,
    )
    opened = open_node(settings.node)
    try:
        (result,) = run_round(opened, [Sweep(QUEUE, "promote", 100)], until=2**40).results
    finally:
        opened.close()
    assert (result.promoted, result.lateness_ms, result.next_due) == (3, [], None)


def test_without_info_run_id_is_unknown(node: DevNode, client: redis.Redis) -> None:
    """So a restart of the server would go unnoticed."""
    settings = as_user(node)
    words = [word for word in acl_words(settings) if word != "+info"]
    act(client, "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *words)
    try:
        opened = open_node(settings.node)
        with opened.link() as link:
            assert link.run_id == ""
        opened.close()
        report = examine(settings)
        skipped = ("server", "run_id", "role", "persistence", "memory")
        assert {the(report, check).result for check in skipped} == {"skip"}
    finally:
        client.acl_deluser(USER)


def test_the_rule_knows_the_database(node: DevNode, client: redis.Redis) -> None:
    """A database other than 0 must be selected; without the word nothing works."""
    url = f"redis://{USER}:{PASSWORD.replace(' ', '%20')}@127.0.0.1:{node.port}/2"
    settings = settings_for(url)
    act(client, "COPY", wire.BRAND_KEY, wire.BRAND_KEY, "DB", 2)
    words = acl_words(settings)
    assert "+select" in words
    try:
        act(client, "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *words)
        assert differing(examine(settings)) == {}
        act(client, "ACL", "SETUSER", USER, "-select")
        report = examine(settings)
        assert the(report, "acl").result == "fail"
        assert the(report, "acl").fix.endswith(f"ACL SETUSER {USER} +select")
    finally:
        client.acl_deluser(USER)


def test_the_rule_depends_on_the_features() -> None:
    """SCAN only with discovery, ZCOUNT only with the guard, which one queue may have alone."""

    def words(**settings: Any) -> set[str]:
        return set(acl_words(settings_for("redis://h", **settings)))

    guard = {"mass_expiry": {"share": 0.5}}
    assert not {"+scan", "+zcount"} & words()
    assert "+scan" in words(discovery={"enabled": True})
    assert "+zcount" in words(stalled_check=guard)
    assert "+zcount" in words(queue={QUEUE: {"stalled_check": guard}})
    assert "+zcount" in words(match=[{"glob": "o*", "stalled_check": guard}])
    assert "+zcount" not in words(stalled_check={"mass_expiry": False})


PATTERNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "each queue": ({"queues": ["a", "b:c"]}, ["~emq:{a}:*", "~emq:{b:c}:*"]),
    "no queue": ({"queues": []}, ["~emq:{*}:*"]),
    "too many": ({"queues": [f"q{n}" for n in range(101)]}, ["~emq:{*}:*"]),
    "discovery of all": ({"discovery": {"enabled": True}}, ["~emq:{*}:*"]),
    "discovery of some": (
        {"queues": ["bulk-1", "mail"], "discovery": {"enabled": True, "include": ["bulk-*"]}},
        ["~emq:{mail}:*", "~emq:{bulk-*}:*"],
    ),
    "characters are not bytes": (
        {"queues": [], "discovery": {"enabled": True, "include": ["a?", "b[!x]", "c[é]", "d[xy]"]}},
        ["~emq:{a*}:*", "~emq:{b*}:*", "~emq:{c*}:*", "~emq:{d[xy]}:*"],
    ),
    "no glob in a name": ({"queues": ["a*?[b]\\c"]}, [r"~emq:{a\*\?\[b\]\\c}:*"]),
}


@pytest.mark.parametrize(("settings", "patterns"), PATTERNS.values(), ids=PATTERNS)
def test_the_rule_names_the_queues(settings: dict[str, Any], patterns: list[str]) -> None:
    """One pattern a queue or glob; one for all where there are too many or nobody knows."""
    words = acl_words(settings_for("redis://h", **settings))
    assert [word for word in words if word.startswith("~")] == patterns


ODD_NAMES = ["plain", "a*b", "q[x]?", 'say"so"', "back\\slash", "it's", "größe", "a:b", "#$%&|;>"]


@pytest.mark.skipif(not shutil.which("redis-cli"), reason="needs redis-cli")
def test_the_rule_can_be_pasted(node: DevNode, client: redis.Redis) -> None:
    """redis-cli reads the line as it is printed, odd names and all; they match nothing else."""
    settings = as_user(node, queues=ODD_NAMES)
    rule = acl_rule(settings).replace(">PASSWORD", f'">{PASSWORD}"')
    command = ["redis-cli", "-p", str(node.port)]
    try:
        said = subprocess.run(command, input=rule, capture_output=True, text=True, check=True)
        assert said.stdout.strip() == "OK"
        assert differing(examine(settings)) == {}
        refused = examine(as_user(node, queues=["aXb", "plain"]))
        assert "aXb" in the(refused, "acl").found
        assert "plain" not in the(refused, "acl").found
    finally:
        client.acl_deluser(USER)


def test_an_existing_user_keeps_nothing(node: DevNode, client: redis.Redis) -> None:
    """The rule resets: old passwords, keys, channels and commands are gone."""
    act(client, "ACL", "SETUSER", USER, "on", ">old", "allkeys", "allchannels", "allcommands")
    try:
        _, *words = shlex.split(acl_rule(as_user(node)))
        act(client, "ACL", *words)
        with (
            connect(node, username=USER, password="old") as old,
            pytest.raises(redis.AuthenticationError),
        ):
            old.ping()
        with connect(node, username=USER, password="PASSWORD") as new:
            for denied in (("SET", wire.BRAND_KEY, "x"), ("PUBLISH", "c", "x"), ("FLUSHALL",)):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    act(new, *denied)
    finally:
        client.acl_deluser(USER)


def test_a_narrower_info_would_be_no_smaller(any_node: DevNode, any_client: redis.Redis) -> None:
    """As docs/acl.md says: the server compares INFO's first argument only."""
    act(any_client, "ACL", "SETUSER", USER, "reset", "on", ">p", "+info|server")
    try:
        with connect(any_node, username=USER, password="p") as user:
            with pytest.raises(redis.exceptions.NoPermissionError):
                act(user, "INFO", "memory")
            assert b"maxmemory_policy" in raw(user, "INFO", "server", "memory")
    finally:
        any_client.acl_deluser(USER)


def raw(client: redis.Redis, *command: str) -> bytes:
    client.response_callbacks.clear()
    return bytes(act(client, *command))


def test_the_list_knows_every_command_of_the_wire() -> None:
    """A command that is added to the wire, or to the peek, must be added to the permissions."""
    source = Path(wire.__file__).read_text()
    sent = set(re.findall(r"""(?:pack|_with_base)\(\s*"([A-Z._]+)"(?:, "([A-Z]+)")?""", source))
    words = {command for command, _ in sent} | set(re.findall(r"redis\.p?call\('(\w+)'", source))
    assert {"EVAL_RO", "HGET", "INFO", "EMQ.PROMOTE", "TIME"} <= words
    assert words <= {permission.command.partition(" ")[0] for permission in PERMISSIONS}


def test_the_page_about_the_acl_is_true() -> None:
    """docs/acl.md has the rule for one queue, and the words with their reasons, as the code has."""
    page = (PROJECT / "docs" / "acl.md").read_text()
    assert f"\n{acl_rule(settings_for('redis://h'))}\n" in page
    for permission in PERMISSIONS:
        word = f"`{permission.word}`".replace("|", "\\|")
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {word}")]
        _, _, why, without, _ = re.split(r"(?<!\\)\|", row)
        assert (why.strip(), without.strip()) == (permission.why, permission.without)
        assert ("required" in row.split(" | ")[0]) == permission.required


def test_the_document_has_the_rule_and_the_reasons() -> None:
    """`check --acl --json`: the same rule, and each command with what it is for."""
    settings = settings_for("redis+cluster://h", **EVERYTHING)
    told = json.loads(json.dumps(acl_document(settings)))
    assert told["rule"] == acl_rule(settings)
    assert [each["word"] for each in told["commands"]] == [p.word for p in PERMISSIONS]


def test_a_denied_queue_is_named(any_node: DevNode, any_client: redis.Redis) -> None:
    """One queue of several without a pattern: it is named, the others pass."""
    settings = as_user(any_node, queues=["a", "b", "c"])
    words = [word for word in acl_words(settings) if word != "~emq:{b}:*"]
    act(any_client, "ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", *words)
    try:
        report = examine(settings)
        assert the(report, "acl").found.startswith("keys of b are denied (to EMQ.PROMOTE,")
        assert the(report, "acl").fix.endswith(f"ACL SETUSER {USER} ~emq:{{b}}:*")
        assert {f.queue: f.result for f in told(report, "queue")} == {
            "a": "pass",
            "b": "skip",
            "c": "pass",
        }
    finally:
        any_client.acl_deluser(USER)


def test_many_queues_are_checked_in_pages(node: DevNode, client: redis.Redis) -> None:
    """Twelve hundred queues; text names a few of the healthy ones, JSON all, and each bad one."""
    names = [f"q{number}" for number in range(1200)]
    client.set("emq:{q1100}:active", "text")
    report = examine(settings_for(node.url, queues=names))
    assert len(told(report, "queue")) == 1200
    assert differing(report) == {"queue": "fail"}
    shown = [line for line in lines(report) if "  queue  " in line]
    assert len(shown) == 20 + 1 + 1
    assert any("and 1179 more" in line for line in shown)
    assert len(document(report)["checks"]) == len(report.findings)


# --- reaching it --------------------------------------------------------------------------------


def only_failure(report: Report, exit_code: int) -> Finding:
    """The only failure; everything after it is skipped, and the reason is told."""
    failures = [finding for finding in report.findings if finding.result == "fail"]
    assert len(failures) == 1
    assert report.exit_code == exit_code
    after = CHECKS[CHECKS.index(failures[0].check) + 1 :]
    for check in after:
        assert the(report, check).result == "skip"
        assert the(report, check).found.endswith(f"after the failure of {failures[0].check}")
    assert failures[0].fix
    return failures[0]


def test_nobody_listens(tmp_path: Path) -> None:
    """A refused connection and a missing socket fail `reach`, exit 3."""
    for url in ("redis://127.0.0.1:1/0", f"unix://{tmp_path}/none.sock"):
        assert only_failure(examine(settings_for(url)), 3).check == "reach"


def test_a_name_that_does_not_resolve() -> None:
    """The name is in the message."""
    failure = only_failure(examine(settings_for("redis://no-such-host.invalid:6379")), 3)
    assert failure.check == "reach"
    assert "no-such-host.invalid" in failure.found


def test_a_black_hole() -> None:
    """A server that never answers costs one timeout."""
    with healthy_stub() as stub:
        for verb in ("CLIENT", "EMQ.VERSION", "GET", "INFO"):
            stub.on(verb, SILENCE)
        settings = Settings.model_validate(
            {"queues": [QUEUE], "node": {"url": stub.url, "timeout": "50ms"}}
        )
        failure = only_failure(examine(settings), 3)
    assert failure.check == "reach"
    assert "firewall" in failure.fix


@pytest.fixture
def guarded_node(start_node: Callable[..., DevNode]) -> DevNode:
    return start_node(extra_args=("--requirepass", "sesame"))


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:wrong@"])
def test_a_login_that_is_refused(guarded_node: DevNode, login: str) -> None:
    """No password, a wrong one, an unknown user: `auth` fails, exit 3, no secret is shown."""
    report = examine(settings_for(f"redis://{login}127.0.0.1:{guarded_node.port}/0"))
    failure = only_failure(report, 3)
    assert failure.check == "auth"
    assert "node.password_file" in failure.fix
    assert "wrong" not in "\n".join(lines(report))


def test_a_password_file(guarded_node: DevNode, tmp_path: Path) -> None:
    """A readable one logs in; one that is missing is named."""
    file = tmp_path / "password"
    node = {"url": guarded_node.url, "password_file": str(file)}
    settings = Settings.model_validate({"queues": [QUEUE], "node": node})
    failure = only_failure(examine(settings), 3)
    assert failure.check == "auth"
    assert str(file) in failure.found
    assert failure.fix.startswith("write the password into that file")
    assert "ACL" not in failure.fix
    file.write_text("sesame\n")
    assert differing(examine(settings)) == {}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, and another one."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    directory = tmp_path_factory.mktemp("certificates")
    for name, alternative in (("own", "IP:127.0.0.1"), ("other", "DNS:elsewhere")):
        subprocess.run(
            [
                *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
                *("-nodes", "-keyout", f"{name}.key", "-out", f"{name}.crt", "-days", "2"),
                *("-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}"),
                *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
            ],
            check=True,
            capture_output=True,
            cwd=directory,
        )
    return directory


def test_tls(start_node: Callable[..., DevNode], certificates: Path) -> None:
    """An encrypted node passes; a foreign CA, a foreign name and a plain port are told apart."""

    def start(name: str, clients: str = "no") -> str:
        files = certificates / name
        tls_args = (
            "--tls-cert-file",
            f"{files}.crt",
            "--tls-key-file",
            f"{files}.key",
            "--tls-ca-cert-file",
            f"{files}.crt",
        )
        port = free_port()
        start_node(
            "redis-7.0",
            extra_args=("--tls-port", str(port), *tls_args, "--tls-auth-clients", clients),
        )
        return f"rediss://127.0.0.1:{port}/0"

    def check(url: str, ca_file: str) -> Report:
        node = {"url": url, "tls": {"ca_file": ca_file}, "connect_timeout": "3s"}
        return examine(Settings.model_validate({"queues": [QUEUE], "node": node}))

    own, other = (str(certificates / f"{name}.crt") for name in ("own", "other"))
    url, elsewhere = start("own"), start("other")
    assert differing(check(url, own)) == {}
    for report, word in (
        (check(url, other), "node.tls.ca_file"),
        (check(url, str(certificates / "missing.crt")), "correct the path"),
        (check(elsewhere, other), "node.tls.server_name"),
        (check(start("own", clients="yes"), own), "node.tls.cert_file"),
    ):
        failure = only_failure(report, 3)
        assert (failure.check, word in failure.fix) == ("tls", True), failure


@pytest.mark.parametrize("login", ["", ":sesame@"])
def test_plain_words_to_a_port_of_tls(
    start_node: Callable[..., DevNode], certificates: Path, login: str
) -> None:
    """The server hangs up, on the fence or already on the login: the fix names the scheme."""
    files, port = certificates / "own", free_port()
    start_node(
        "redis-7.0",
        extra_args=(
            *("--tls-port", str(port), "--tls-cert-file", f"{files}.crt"),
            *("--tls-key-file", f"{files}.key", "--tls-ca-cert-file", f"{files}.crt"),
        ),
    )
    failure = only_failure(examine(settings_for(f"redis://{login}127.0.0.1:{port}/0")), 3)
    assert failure.check == "reach"
    assert 'if this port speaks TLS, write "rediss://"' in failure.fix


def test_a_node_that_goes_away_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that breaks, or is not made again, ends the check with what was found so far."""
    with healthy_stub() as stub:
        stub.on("GET", bulk(wire.BRAND), HANG_UP)
        broken = examine(settings_for(stub.url))
        settings = settings_for(stub.url)
        real = open_node(settings.node)
        dials = [real._dial]

        def dial_once() -> Any:
            return dials.pop()() if dials else BrokenDial()

        stand_in = Nodes(Node("stub", dial_once, 5))
        monkeypatch.setattr(examination, "open_nodes", lambda _: stand_in)
        stub.on("GET", bulk(wire.BRAND))
        gone = examine(settings)
    for report, server in ((broken, "pass"), (gone, "skip")):
        assert report.exit_code == 3
        assert "again" in next(f for f in report.findings if f.result == "fail").fix
        assert the(report, "server").result == server


class BrokenDial:
    def connect(self) -> None:
        raise ConnectionRefusedError


def test_tls_and_plain_mixed_up(node: DevNode) -> None:
    """TLS to a port that has none, which a server answers with silence."""
    url = f"rediss://127.0.0.1:{node.port}/0"
    settings = Settings.model_validate(
        {
            "queues": [QUEUE],
            "node": {"url": url, "connect_timeout": "700ms", "timeout": "700ms"},
        }
    )
    failure = only_failure(examine(settings), 3)
    assert failure.check == "tls"
    assert "does not speak TLS" in failure.fix


@pytest.mark.parametrize("login", ["", ":sesame@"])
def test_a_server_that_hangs_up_on_a_tls_session(certificates: Path, login: str) -> None:
    """One that misses the client's certificate may be gone before it was heard to say so: the TLS
    session was there, and the port is the right one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "own.crt", certificates / "own.key")
    with Stub(tls=context) as stub:
        stub.on("*", HANG_UP)
        url = f"rediss://{login}127.0.0.1:{stub.port}/0"
        node = {"url": url, "tls": {"ca_file": str(certificates / "own.crt")}}
        settings = Settings.model_validate({"queues": [QUEUE], "node": node})
        failure = only_failure(examine(settings), 3)
    assert failure.check == "tls"
    assert "node.tls.cert_file" in failure.fix
    assert "server's log" in failure.fix


# --- what answers there -------------------------------------------------------------------------


def test_a_server_without_the_job_core(tmp_path: Path) -> None:
    """Tokens and brand fail, exit 4; what the server itself says is still told."""
    port = free_port()
    command = [str(server_path("valkey-9")), "--port", str(port), "--bind", "127.0.0.1"]
    with subprocess.Popen(
        [*command, "--save", "", "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    ) as server:
        settings = settings_for(f"redis://127.0.0.1:{port}/0")
        try:
            wait_until(lambda: the(examine(settings), "reach").result == "pass", "server is up")
            report = examine(settings)
        finally:
            server.terminate()
    assert report.exit_code == 4
    assert differing(report) == {
        **dict.fromkeys(("tokens", "brand"), "fail"),
        **dict.fromkeys(("acl", "sweeps", "queue", "rows"), "skip"),
        "persistence": "warn",
    }
    assert "no EMQ node" in the(report, "tokens").found


def test_a_login_is_wanted_before_anything_else_is_judged() -> None:
    """A server says that it does not know a verb before it asks who we are: without a login nobody
    can tell whether it is an EMQ node, so `auth` fails, exit 3, and not `tokens`."""
    with healthy_stub() as stub:
        stub.on("EMQ.VERSION", error("ERR unknown command 'EMQ.VERSION'"))
        for verb in ("CLIENT", "GET", "INFO", "TIME"):
            stub.on(verb, error("NOAUTH Authentication required."))
        failure = only_failure(examine(settings_for(stub.url)), 3)
    assert failure.check == "auth"
    assert "node.password_file" in failure.fix


def test_a_database_that_is_not_there(node: DevNode) -> None:
    """The number in node.url is wrong: a mistake of the configuration, exit 2."""
    report = examine(settings_for(node.url.removesuffix("/0") + "/99"))
    failure = only_failure(report, 2)
    assert failure.check == "server"
    assert "no database 99" in failure.fix


TOKENS = b"promote stalled.check"

FENCES: dict[str, tuple[str, Any, str, str, int]] = {
    "no promote": ("EMQ.VERSION", bulk(b"claim stalled.check"), "tokens", "lacks promote", 4),
    "a list": ("EMQ.VERSION", ids(b"promote"), "tokens", "answered with an array", 4),
    "loading": ("EMQ.VERSION", error("LOADING reading"), "tokens", "LOADING", 1),
    "no brand": ("GET", bulk(b"echomq:4.0.0"), "brand", "echomq:4.0.0, not echomq:6.0.0", 4),
    "a hostile brand": ("GET", bulk(b"\x1b[31m"), "brand", r"is \x1b[31m, not", 4),
    "a brand's type": ("GET", error("WRONGTYPE Operation"), "brand", "WRONGTYPE", 4),
    "another primary": ("GET", error("MOVED 9051 10.0.0.2:6379"), "brand", "MOVED 9051", 1),
}


@pytest.mark.parametrize(("verb", "answer", "check", "words", "code"), FENCES.values(), ids=FENCES)
def test_a_node_of_another_wire(verb: str, answer: Any, check: str, words: str, code: int) -> None:
    """Tokens and brand are judged as the fence does, and what is wrong is told with the fix."""
    with healthy_stub() as stub:
        stub.on(verb, answer)
        report = examine(settings_for(stub.url))
        assert stub.count("EMQ.PROMOTE") == stub.count("MULTI") == 0
    assert (the(report, check).result, report.exit_code) == ("fail", code)
    assert words in "\n".join(lines(report))
    assert the(report, check).fix


def test_tokens_that_only_others_use() -> None:
    """The two that the daemon calls are enough for it; the missing ones are a warning."""
    with healthy_stub() as stub:
        stub.on("EMQ.VERSION", bulk(TOKENS))
        finding = the(examine(settings_for(stub.url)), "tokens")
    assert finding.result == "warn"
    assert "enqueue claim claim.pause" in finding.found


def test_a_replica(start_node: Callable[..., DevNode]) -> None:
    """The role fails, and the fix names where the primary is."""
    primary = start_node()
    replica = start_node(extra_args=("--replicaof", f"127.0.0.1 {primary.port}"))
    with connect(replica) as client:
        wait_until(lambda: client.get(wire.BRAND_KEY) == wire.BRAND, "the replica has the brand")
    report = examine(settings_for(replica.url))
    assert differing(report) == {"role": "fail", "sweeps": "skip"}
    assert f"127.0.0.1:{primary.port}" in the(report, "role").found
    assert report.exit_code == 1


@pytest.mark.parametrize("uptime", ["\u00b2", "9" * 5_000])
def test_an_uptime_that_is_no_number(uptime: str) -> None:
    """It is left out, and the fence passed without it."""
    with Stub() as stub:
        stub.on("INFO", bulk(f"role:master\r\nrun_id:x\r\nuptime_in_seconds:{uptime}".encode()))
        report = examine(settings_for(stub.url))
    assert the(report, "run_id").found == "x"
    assert the(report, "role").result == "pass"


def test_a_replica_that_does_not_say_so() -> None:
    """Where INFO tells nothing, the refusal of the verbs does: READONLY."""
    with healthy_stub() as stub:
        for verb in ("EMQ.PROMOTE", "EMQ.STALLED.CHECK"):
            stub.on(verb, refused("READONLY You can't write against a read only replica."))
        stub.on("INFO", error("ERR no INFO here"))
        report = examine(settings_for(stub.url))
    assert the(report, "sweeps").result == "fail"
    assert "primary's address" in the(report, "sweeps").fix


def test_a_cluster_with_the_url_of_a_single_server(start_node: Callable[..., DevNode]) -> None:
    """A warning while this primary has all slots; a failure where it has not even the brand's."""
    node = start_node(extra_args=("--cluster-enabled", "yes"), brand=False)
    settings = settings_for(node.url)
    report = examine(settings)
    assert the(report, "brand").result == "fail"
    assert "CLUSTERDOWN" in the(report, "brand").found
    with connect(node) as client:
        act(client, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(
            lambda: b"cluster_state:ok" in raw(client, "CLUSTER", "INFO"), "the cluster is up"
        )
        client.set(wire.BRAND_KEY, wire.BRAND)
    report = examine(settings)
    assert differing(report) == {"server": "warn"}
    assert f"redis+cluster://127.0.0.1:{node.port}" in the(report, "server").fix


@pytest.mark.parametrize("hours", [-2, 2])
def test_clocks_that_disagree(hours: int) -> None:
    """Two hours between the clocks are told with their sign, and are a warning."""
    with healthy_stub() as stub:
        seconds = int(time.time()) + hours * 3600
        stub.on("TIME", ids(b"%d" % seconds, b"0"))
        finding = the(examine(settings_for(stub.url)), "clock")
    assert finding.result == "warn"
    assert ("ahead of" if hours > 0 else "behind") in finding.found
    assert re.search(r"7,(199|200|201)\.\d s", finding.found)


@pytest.mark.parametrize(
    ("ahead", "doubt", "result"),
    [(0.0, 0.001, "pass"), (1.9, 0.001, "pass"), (-2.1, 0.001, "warn"), (2.1, 0.2, "pass")],
)
def test_a_slow_network_is_no_clock(ahead: float, doubt: float, result: str) -> None:
    """Half the way there and back is in doubt: only what lies beyond it is an alarm."""
    assert clock(ahead, doubt).result == result


def test_keys_of_a_wrong_type(any_node: DevNode, any_client: redis.Redis) -> None:
    """Each is named with what it holds; the fix, typed in as it stands, frees the queue."""
    any_client.lpush("emq:{orders}:schedule", "x")
    any_client.set("emq:{orders}:metrics:failed", "x")
    report = examine(settings_for(any_node.url, queues=[QUEUE, "emails"]))
    assert differing(report) == {"queue": "fail"}
    assert [(f.queue, f.found.partition(": sweeps")[0]) for f in told(report, "queue")] == [
        (QUEUE, "orders: emq:{orders}:schedule is a list, not a sorted set"),
        (QUEUE, "orders: emq:{orders}:metrics:failed is a string, not a hash"),
        ("emails", "emails: pending 0, active 0, schedule 0, dead 0"),
    ]
    for finding in told(report, "queue"):
        if finding.fix:
            act(any_client, *shlex.split(finding.fix.partition("way: ")[2]))
    assert differing(examine(settings_for(any_node.url))) == {}


def test_a_wrong_type_under_the_small_rule(
    any_node: DevNode, any_client: redis.Redis, allow: Callable[[Sequence[str]], None]
) -> None:
    """TYPE is not part of the rule: the key is named, what it holds stays open."""
    settings = as_user(any_node)
    allow(acl_words(settings))
    any_client.lpush("emq:{orders}:schedule", "x")
    finding = the(examine(settings), "queue")
    assert "emq:{orders}:schedule is not a sorted set" in finding.found


BLOCKING: dict[str, tuple[str, str, Any, str]] = {
    "a lane row": ("schedule", "promote", {"state": "scheduled", "group": "g"}, "a lane row"),
    "a foreign state": ("active", "stalled_check", {"state": "dead"}, "its state is dead"),
}


@pytest.mark.parametrize(("key", "verb", "row", "reason"), BLOCKING.values(), ids=BLOCKING)
@pytest.mark.parametrize("job_id", [b"JOBLANE", b'JOB \xff"'], ids=["plain", "bytes"])
def test_a_row_that_blocks_a_queue(
    any_node: DevNode,
    any_client: redis.Redis,
    key: str,
    verb: str,
    row: Any,
    reason: str,
    job_id: bytes,
) -> None:
    """Queue, verb, id and reason are told; the fix, typed in as it stands, frees the queue."""
    fill(any_client)
    any_client.zadd(wire.queue_key(QUEUE, key), {job_id: 5})
    any_client.hset(wire.row_key(QUEUE, job_id), mapping=row)
    settings = settings_for(any_node.url, queues=["emails", QUEUE])
    report = examine(settings)
    finding = the(report, "rows")
    assert differing(report) == {"rows": "fail"}
    assert finding.found.startswith(f"orders: {verb} is blocked by {wire.printable(job_id)}: ")
    assert reason in finding.found
    assert (finding.queue, report.exit_code) == (QUEUE, 1)
    (swept,) = sweep(settings_for(any_node.url)).queues
    assert [(blocked_verb, row.job_id) for blocked_verb, row in swept.blocked] == [(verb, job_id)]
    _, _, command = finding.fix.partition("take it out with ")
    act(any_client, *typed(command))
    assert differing(examine(settings)) == {}


def typed(line: str) -> list[bytes]:
    """A line's arguments as redis-cli reads them: inside double quotes `\\xff` is a byte."""
    parts = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [
        quoted.encode().decode("unicode_escape").encode("latin-1") if quoted else plain.encode()
        for quoted, plain in parts
    ]


def test_rows_beyond_the_next_sweep_block_nothing_yet(node: DevNode, client: redis.Redis) -> None:
    """What is looked at is what one sweep would take: a deep backlog costs no more than that."""
    fill(client)
    # Due by now, and behind the others also where it is due in the same millisecond.
    client.zadd(wire.queue_key(QUEUE, "schedule"), {"JOBz": int(time.time() * 1000)})
    client.hset(wire.row_key(QUEUE, b"JOBz"), mapping={"state": "scheduled", "group": "g"})
    assert the(examine(settings_for(node.url, promote={"limit": 3})), "rows").result == "pass"
    assert the(examine(settings_for(node.url, promote={"limit": 4})), "rows").result == "fail"


def test_rows_that_may_not_be_read(
    node: DevNode, client: redis.Redis, allow_here: Callable[[Sequence[str]], None]
) -> None:
    """Without HMGET nobody can tell: the check is skipped, and acl says how to grant it."""
    fill(client)
    settings = as_user(node)
    allow_here([word for word in acl_words(settings) if word != "+hmget"])
    report = examine(settings)
    assert {finding.result for finding in told(report, "rows")} == {"skip"}
    assert report.exit_code == 0


def test_persistence_and_memory(start_node: Callable[..., DevNode]) -> None:
    """What loses jobs in the long run is a warning: no AOF, a policy that evicts."""
    node = start_node(appendonly=False)
    settings = settings_for(node.url)
    assert differing(examine(settings)) == {"persistence": "warn"}
    with connect(node) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "100mb")
        client.config_set("appendonly", "yes")
        # A server that writes its first append-only file does not let itself be stopped.
        wait_until(
            lambda: not client.info("persistence")["aof_rewrite_in_progress"], "the file is there"
        )
        report = examine(settings)
        assert differing(report) == {"memory": "warn"}
        assert "maxmemory 100.00M, maxmemory-policy allkeys-lru" in the(report, "memory").found
        client.config_set("maxmemory-policy", "volatile-ttl")
        assert "time to live" in the(examine(settings), "memory").found


CONFIGURATIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "defaults": ({}, ["max_stalled is 1 for orders"]),
    "all well": ({"stalled_check": {"max_stalled": 2}}, []),
    "one queue": (
        {
            "queues": ["a", "b"],
            "stalled_check": {"max_stalled": 2},
            "queue": {"b": {"stalled_check": {"max_stalled": 1}}},
        },
        ["max_stalled is 1 for b:"],
    ),
    "seldom": (
        {"stalled_check": {"max_stalled": 2, "interval": "1h"}},
        ["the lost jobs of orders wait up to 60 minutes"],
    ),
    "seldom, but at expiry": (
        {"stalled_check": {"max_stalled": 2, "interval": "1h", "at_expiry": True}},
        [],
    ),
}


def test_nothing_to_sweep_is_a_failure_as_for_run(node: DevNode) -> None:
    """Exit 2, as `run` and `config validate` say it; what the node is like is told all the same."""
    report = examine(settings_for(node.url, queues=[]))
    (config,) = told(report, "config")
    assert (config.result, report.exit_code) == ("fail", 2)
    assert "there is nothing to sweep" in config.found
    assert differing(report) == {"queue": "skip", "rows": "skip"}
    searching = settings_for(node.url, queues=[], discovery={"enabled": True})
    assert examine(searching).exit_code == 0


@pytest.mark.parametrize(("settings", "expected"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_the_configuration_is_judged_first(settings: dict[str, Any], expected: list[str]) -> None:
    """What a configuration means that people may not have meant, each with a fix."""
    report = examine(settings_for("redis://127.0.0.1:1", **settings), "/etc/e.toml")
    first, *warnings = told(report, "config")
    assert first.found.startswith("/etc/e.toml: ")
    assert len(warnings) == len(expected)
    for finding, words in zip(warnings, expected, strict=True):
        assert finding.result == "warn"
        assert finding.found.startswith(words)
        assert finding.fix


# --- the command --------------------------------------------------------------------------------

COMMAND = (sys.executable, "-m", "emqtimerd", "check")


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, **environ},
    )


def within(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of the command, run in this process: that is quicker."""
    done = CliRunner().invoke(app, ["check", *arguments])
    return done.exit_code, done.stdout


def test_the_command_prints_lines(node: DevNode) -> None:
    """Without a terminal: plain lines on standard output, nothing else anywhere, exit 0."""
    done = command("--url", node.url, "--queue", QUEUE, FORCE_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    passed = "pass  acl          all 14 commands are allowed on the keys of 1 queue"
    assert passed in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "17 passed, 1 to look at, 0 failed, 0 not tried"


def test_what_was_not_tried_takes_one_line() -> None:
    """One failure stands out: the checks that could not follow it share the last line."""
    report = examine(settings_for("redis://127.0.0.1:1"))
    shown = list(lines(report))
    untried = [line for line in shown if line.startswith("skip")]
    assert untried == [shown[-3]]
    assert untried[0].endswith("rows, persistence, memory: not tried after the failure of reach")
    assert shown[-1] == "2 passed, 1 to look at, 1 failed, 14 not tried"
    assert len(document(report)["checks"]) == len(CHECKS) + 1


def test_the_command_prints_one_document(node: DevNode) -> None:
    """`--json`: who the node is, and each check with result, finding and fix."""
    code, printed = within("--json", "--url", node.url, "--queue", QUEUE)
    told = json.loads(printed)
    assert (code, told["ok"]) == (0, True)
    assert told["nodes"][0]["brand"] == "echomq:6.0.0"
    assert told["nodes"][0]["tokens"] == [*wire.TOKENS]
    assert {check["check"] for check in told["checks"]} == {*CHECKS}
    assert all(check["fix"] for check in told["checks"] if check["result"] in ("warn", "fail"))


def test_the_command_exits_by_what_it_found(tmp_path: Path) -> None:
    """2: the configuration is wrong. 3: the node is not there; JSON is printed all the same."""
    file = tmp_path / "e.toml"
    file.write_text("queue = 1\n")
    assert within("--config", str(file)) == (2, "")
    code, printed = within("--json", "--url", "redis://127.0.0.1:1", "--queue", QUEUE)
    assert (code, json.loads(printed)["ok"]) == (3, False)


def test_the_rule_needs_no_node() -> None:
    """`--acl` prints one line and contacts nobody."""
    done = command("--acl", "--url", "redis://someone@127.0.0.1:1", "--queue", QUEUE)
    assert (done.returncode, done.stderr) == (0, "")
    rule = acl_rule(settings_for("redis://someone@127.0.0.1:1"))
    assert done.stdout == rule + "\n"
    assert rule.startswith("ACL SETUSER someone reset on >PASSWORD ~emq:{orders}:* ")


def test_color_is_for_terminals() -> None:
    """On a terminal the results are coloured, unless NO_COLOR says no."""
    colored = {}
    running = []
    for no_color in ("", "1"):
        primary, secondary = pty.openpty()
        running.append((no_color, primary, secondary, on_terminal(secondary, no_color)))
    for no_color, primary, secondary, process in running:
        assert process.wait(30) == 3
        os.close(secondary)
        colored[no_color] = b"\x1b[31mfail\x1b[0m" in os.read(primary, 65_536)
        os.close(primary)
    assert colored == {"": True, "1": False}


def on_terminal(terminal: int, no_color: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, "--url", "redis://127.0.0.1:1", "--queue", QUEUE],
        stdout=terminal,
        env={**os.environ, "NO_COLOR": no_color},
    )
