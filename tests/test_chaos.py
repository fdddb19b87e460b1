"""The soak and the chaos run, in small, and whether they would notice what they look for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest

from chaos import network
from chaos.audit import Evidence, audit
from chaos.crew import Books
from chaos.history import History, Part, mark_key, read
from chaos.plan import GROUPS, Step, kinds_of, plan
from chaos.stage import Clock, Snapshot
from emqtimerd import wire

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> str:
    """Run one of them, and return what it printed; it must say that everything adds up."""
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_a_small_soak_adds_up() -> None:
    """Three server kills, and every job and every counter is accounted for."""
    told = run("soak", "--jobs", "2000", "--seed", "1")
    assert "the server was killed 3 times" in told
    assert "NOT" not in told


# The seeds are those whose faults are held shortest.
PIECES = {
    "alone": ("1035", ["wire-cut", "clock-ahead", "daemon-suspend"]),
    "cluster": ("2718", ["slot-by-key", "slot-at-once", "failover"]),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("servers", PIECES)
def test_a_few_seconds_of_chaos_add_up(servers: str) -> None:
    """A wire that is cut, a clock that is set, a daemon that sleeps; slots that move under load,
    and a replica that takes over."""
    seed, kinds = PIECES[servers]
    told = run("storm", "--servers", servers, "--seconds", "1", "--seed", seed, "--only", *kinds)
    assert "alive whenever asked" in told
    assert "NOT" not in told
    left_out = ["wire-cut"] if "no networks of our own" in told else []
    assert all(f"{kind} 1" in told for kind in kinds if kind not in left_out)
    again = f"make chaos SEED={seed} SECONDS=1 SERVERS={servers} ONLY='{' '.join(kinds)}'"
    assert told.endswith(f"again: {again}\n")


@pytest.mark.slow
@pytest.mark.long
def test_an_interrupted_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C ends servers, daemons and networks, and is no discrepancy."""
    storm = subprocess.Popen(
        [sys.executable, "-m", "chaos", "storm", "--seed", "1"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert storm.stdout is not None
    while " s  " not in storm.stdout.readline():
        pass  # not before something is broken
    storm.send_signal(signal.SIGINT)
    told, errors = storm.communicate(timeout=30)
    assert (storm.returncode, errors) == (130, "")
    assert "again: make chaos SEED=1 SECONDS=180 SERVERS=alone" in told
    assert list(tmp_path.iterdir()) == []


# --- the plan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", ["alone", "sentinel", "cluster"])
def test_a_seed_repeats_the_schedule(servers: str) -> None:
    """The same seed, the same faults at the same pace, each kind in its turn; another one,
    others."""
    one, same, other = (list(islice(plan(seed, 1, servers), 60)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    kinds = kinds_of(servers)
    assert {step.kind for step in one[: len(kinds)]} == set(kinds)
    assert sum(step.kind == "backlog" for step in one) == 1
    assert {beside.kind for step in one if (beside := step.beside)} <= set(kinds)


@pytest.mark.parametrize(
    ("servers", "impossible"),
    [
        ("alone", {"failover", "switch", "slot-by-key", "slot-at-once"}),
        ("sentinel", {"server-kill", "server-stop", "slot-by-key", "slot-at-once"}),
        ("cluster", set()),
    ],
)
def test_what_cannot_happen_is_not_planned(servers: str, impossible: set[str]) -> None:
    """Slots move in a cluster, servers are replaced where there are others."""
    every = {kind for kinds in GROUPS.values() for kind in kinds}
    assert set(kinds_of(servers)) == every - impossible


def test_some_kinds_alone() -> None:
    """To look closer at one fault, nothing else happens beside it."""
    steps: list[Step] = list(islice(plan(1, 1, "alone", ["wire-cut", "lane"]), 40))
    assert {step.kind for step in steps} == {"wire-cut", "lane"}
    assert not any(step.beside for step in steps)


def test_what_a_machine_cannot_do_is_left_out_of_the_same_schedule() -> None:
    """Without networks of its own, a run does all the rest that its seed says; if there is no
    rest, nothing."""
    whole = list(islice(plan(1, 1, "cluster"), 60))
    rest = [step for step in whole if not step.kind.startswith("wire")]
    without = list(islice(plan(1, 1, "cluster", (), ["wire"]), len(rest)))
    assert [(step.kind, step.luck) for step in without] == [(s.kind, s.luck) for s in rest]
    assert not any(step.beside and step.beside.kind.startswith("wire") for step in without)
    assert list(plan(1, 1, "alone", ["wire-cut"], ["wire"])) == []


# --- networks and clocks ------------------------------------------------------------------------


def test_networks_can_be_cut_and_mended() -> None:
    """It carries, carries nothing when it is cut or unplugged, and carries again; the machine's own
    interfaces are what they were."""
    before = sorted(Path("/sys/class/net").iterdir())
    if why := network.missing():
        pytest.skip(why)
    assert sorted(Path("/sys/class/net").iterdir()) == before


def test_what_is_missing_on_a_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without `ip` no networks, without a C compiler no clocks: the run goes on without them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "iproute2" in network.missing()
    with pytest.raises(OSError, match="cc"):
        Clock(tmp_path)


def test_a_clock_is_set_and_no_other(tmp_path: Path) -> None:
    """The wall clock of one process goes ahead and back; it sleeps as long as before."""
    clock = Clock(tmp_path)
    program = (
        "import datetime, json, sys, time\n"
        "for line in sys.stdin:\n"
        "    began = time.monotonic()\n"
        "    time.sleep(0.01)\n"
        "    now = datetime.datetime.now(datetime.UTC).timestamp()\n"
        "    print(json.dumps([time.time(), now, time.monotonic() - began]), flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **clock.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    with process:
        for ahead in (0, 3_600, -86_400, 0):
            clock.set(ahead)
            print(file=process.stdin, flush=True)
            wall, today, slept = json.loads(process.stdout.readline())
            assert wall == pytest.approx(time.time() + ahead, abs=5)
            assert today == pytest.approx(wall, abs=5)
            assert 0.01 <= slept < 5
        process.stdin.close()


# --- the history --------------------------------------------------------------------------------


def command(text: str) -> list[bytes]:
    return text.encode().split()


ROW = "emq:{q}:job:JOB1"


def lived() -> History:
    """A job that is scheduled, promoted, claimed, recovered after a restart, claimed, completed."""
    history = History()
    history.take(
        [
            command(f"HSET {ROW} state scheduled payload p attempts 0"),
            command("ZADD emq:{q}:schedule 5 JOB1"),
        ]
    )
    history.take(
        [
            command("ZREM emq:{q}:schedule JOB1"),
            command("ZADD emq:{q}:pending 0 JOB1"),
            command(f"HSET {ROW} state pending"),
        ]
    )
    claim(history, 1, "old")
    history.take(
        [
            command("ZREM emq:{q}:active JOB1"),
            command("ZADD emq:{q}:pending 0 JOB1"),
            command(f"HSET {ROW} state pending"),
        ]
    )
    claim(history, 2, "new")
    complete(history)
    return history


def claim(history: History, token: int, epoch: str) -> None:
    history.take(
        [
            command("ZREM emq:{q}:pending JOB1"),
            command("ZADD emq:{q}:active 9 JOB1"),
            command(f"HSET {ROW} state active attempts {token} lease_epoch {epoch}"),
        ]
    )


def complete(history: History) -> None:
    history.take(
        [
            command("ZREM emq:{q}:active JOB1"),
            command(f"DEL {ROW}"),
            command("HSET emq:{q}:metrics:completed count 1"),
        ]
    )


def evidence() -> Evidence:
    """What a run leaves in which that one job was all there was, and everything is right."""
    producer = Books(accepted={b"JOB1"})
    worker = Books(
        claimed=[b"JOB1/1", b"JOB1/2"], ended={b"JOB1/2": "completed"}, abandoned={b"JOB1/1"}
    )
    snapshot = Snapshot(sets={("q", "pending"): {}}, completed=Counter(q=1))
    counted = Counter(
        {
            ("jobs_promoted_total", "q"): 1,
            ("jobs_recovered_total", "q"): 1,
            ("lease_expiries_total", "q", "restart"): 1,
        }
    )
    return Evidence(
        ["q"], lived(), [producer, worker], snapshot, counted, Counter({b"JOB1": 1}), 100
    )


def complaints(given: Evidence) -> list[str]:
    """The sentences that do not hold."""
    return [finding.sentence for finding in audit(given) if not finding.holds]


def test_right_books_are_right() -> None:
    """Nothing is said against a run in which everything adds up."""
    assert complaints(evidence()) == []


def lose_a_job(given: Evidence) -> None:
    given.books[0].accepted.add(b"JOB2")


def leave_the_adding_open(given: Evidence) -> None:
    given.books[0].accepted.remove(b"JOB1")


def add_it_twice(given: Evidence) -> None:
    given.history.take([command("HSET emq:{q}:job:JOB1 state pending payload p attempts 0")])


def complete_it_twice(given: Evidence) -> None:
    given.history.completed[b"JOB1"] += 1


def take_it_from_its_worker(given: Evidence) -> None:
    given.books[1].abandoned.clear()


def answer_what_did_not_happen(given: Evidence) -> None:
    given.books[1].ended[b"JOB1/2"] = "failed"


def claim_it_twice(given: Evidence) -> None:
    given.books[1].claimed.append(b"JOB1/2")


def hold_other_data(given: Evidence) -> None:
    given.snapshot.sets["q", "dead"] = {b"JOB9": b"0"}


def count_one_promotion_too_few(given: Evidence) -> None:
    given.counted["jobs_promoted_total", "q"] -= 1


def count_one_promotion_too_many(given: Evidence) -> None:
    given.counted["jobs_promoted_total", "q"] += 1


def take_a_crossing_for_a_stall(given: Evidence) -> None:
    given.counted["lease_expiries_total", "q", "restart"] -= 1
    given.counted["lease_expiries_total", "q", "stall"] += 1


def attribute_nothing(given: Evidence) -> None:
    given.counted["lease_expiries_total", "q", "restart"] -= 1
    given.counted["lease_expiries_total", "q", "unattributed"] += 1


def log_another_job(given: Evidence) -> None:
    given.crossings_logged = Counter({b"JOB2": 1})


@pytest.mark.parametrize(
    "spoil",
    [
        lose_a_job,
        leave_the_adding_open,
        add_it_twice,
        complete_it_twice,
        take_it_from_its_worker,
        answer_what_did_not_happen,
        claim_it_twice,
        hold_other_data,
        count_one_promotion_too_few,
        count_one_promotion_too_many,
        take_a_crossing_for_a_stall,
        attribute_nothing,
        log_another_job,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_what_does_not_add_up_is_noticed(spoil: Callable[[Evidence], None]) -> None:
    """Each single lie of books, server or daemon is found."""
    given = evidence()
    spoil(given)
    assert complaints(given)


def test_an_unknown_outcome_allows_as_much_as_its_limit() -> None:
    """A sweep that was not answered may have moved something, and its log record is missing."""
    given = evidence()
    given.counted["jobs_promoted_total", "q"] = 0
    given.counted["sweeps_total", "q", "promote", "unknown"] = 1
    assert complaints(given) == []


def test_a_requeue_is_told_from_a_recovery() -> None:
    """Their effects are the same; the worker's mark in the transaction makes the difference."""
    history = History()
    history.take([command(f"HSET {ROW} state pending payload p attempts 0")])
    claim(history, 1, "old")
    history.take(
        [
            command("ZREM emq:{q}:active JOB1"),
            command("ZADD emq:{q}:pending 0 JOB1"),
            command(f"HSET {ROW} state pending"),
            [b"SET", mark_key("q"), b"JOB1"],
        ]
    )
    assert history.leases == {b"JOB1/1": "requeued"}
    assert history.total("restart") == 0


def written(*groups: Sequence[str]) -> bytes:
    """What a server appends to its file: transactions, or commands that stand alone."""

    def one(text: str) -> bytes:
        words = text.encode().split()
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)

    return b"".join(
        one(group[0]) if len(group) == 1 else b"".join(map(one, ("MULTI", *group, "EXEC")))
        for group in groups
    )


BORN = (f"HSET {ROW} state scheduled payload p attempts 0", "ZADD emq:{q}:schedule 5 JOB1")
PROMOTED = (
    "ZREM emq:{q}:schedule JOB1",
    "ZADD emq:{q}:pending 0 JOB1",
    f"HSET {ROW} state pending",
)
CLAIMED = (
    "ZREM emq:{q}:pending JOB1",
    "ZADD emq:{q}:active 9 JOB1",
    f"HSET {ROW} state active attempts 1 lease_epoch e",
)
COMPLETED = (
    "ZREM emq:{q}:active JOB1",
    f"DEL {ROW}",
    "HSET emq:{q}:metrics:completed count 1",
)
SLOT = wire.slot("q")


@pytest.mark.parametrize(
    ("leaving", "arriving"),
    [
        (
            ((f"DEL {ROW} emq:{{q}}:pending",),),
            (("RESTORE-ASKING emq:{q}:pending 0 x",), (f"RESTORE-ASKING {ROW} 0 x",)),
        ),
        (
            ((f"UNLINK {ROW}",), ("UNLINK emq:{q}:pending",)),
            (
                (f"CLUSTER SYNCSLOTS ESTABLISH SOURCE s NAME n SLOTSRANGE {SLOT} {SLOT}",),
                # As it was when the copy began, and what was done to it since.
                (f"HMSET {ROW} state scheduled payload p attempts 0",),
                ("ZADD emq:{q}:schedule 5 JOB1",),
                PROMOTED,
                ("CLUSTER SYNCSLOTS FINISH STATE SUCCESS NAME n MESSAGE m",),
            ),
        ),
    ],
    ids=["key by key", "at once"],
)
def test_a_slot_that_moves_is_no_move_of_its_jobs(
    tmp_path: Path, leaving: Sequence[Sequence[str]], arriving: Sequence[Sequence[str]]
) -> None:
    """What two servers wrote is one history: nothing ends where a slot leaves, nothing begins where
    it arrives; a file may be cut in the middle of a command, and marks count what both did."""
    source, target = tmp_path / "source", tmp_path / "target"
    before = written(BORN, PROMOTED)
    source.write_bytes(before + written(*leaving))
    target.write_bytes(written(*arriving, CLAIMED, COMPLETED))
    in_a_command = len(before) - 7
    history = read(
        [
            Part(source, 0, in_a_command, 0),
            Part(target, 0, 0, 1),
            Part(source, in_a_command, None, 0),
            Part(target, 0, None, 1),
        ],
        [(0, 0), (len(before), target.stat().st_size)],
    )
    assert history.odd == []
    assert history.moves["q"] == Counter(born=1, promoted=1, claimed=1, completed=1)
    assert history.leases == {b"JOB1/1": "completed"}
    marks = (0, 0), (len(before), target.stat().st_size)
    assert history.between(*marks, "q", "promoted", "completed") == 2
    assert history.rows == {}
