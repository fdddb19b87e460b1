"""The soak and the chaos run, in small, and whether they would notice what they look for."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # chaos is a package beside the product, and not a part of it

from chaos.audit import Evidence, audit  # noqa: E402 - found by the line above
from chaos.crew import Books  # noqa: E402
from chaos.history import HANDED_BACK, History  # noqa: E402
from chaos.stage import Snapshot  # noqa: E402
from chaos.storm import plan  # noqa: E402


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
def test_a_small_soak_adds_up() -> None:
    """Three server kills, and every job and every counter is accounted for."""
    told = run("soak", "--jobs", "2000", "--seed", "1")
    assert "the server was killed 3 times" in told
    assert "NOT" not in told


@pytest.mark.slow
def test_a_few_seconds_of_chaos_add_up() -> None:
    """Two daemons and a random hand."""
    told = run("storm", "--seconds", "2", "--seed", "7")
    assert "alive whenever asked" in told
    assert "NOT" not in told


def test_a_seed_repeats_the_schedule() -> None:
    """The same seed, the same faults at the same pace; another one, others."""
    one, same, other = (list(islice(plan(seed, 1), 50)) for seed in (1, 1, 2))
    assert one == same
    assert one != other
    assert sum(step.kind == "backlog" for step in one) == 1
    assert not any("failover" in str(step) for step in one)
    assert any("failover" in str(step) for step in islice(plan(1, 1, "sentinel"), 50))


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
            [b"SET", HANDED_BACK, b"JOB1"],
        ]
    )
    assert history.leases == {b"JOB1/1": "requeued"}
    assert history.total("restart") == 0
