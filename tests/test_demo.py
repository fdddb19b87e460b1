"""The demo: that its numbers add up, and that it leaves nothing behind however it ends."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import wait_until
from rich.console import Console

from emqtimerd.demo import SWEEP_LIMIT, Cast, Facts, Story
from emqtimerd.devnode import DevNode
from emqtimerd.jobs import Jobs, OutcomeUnknown

slow = pytest.mark.slow


@pytest.fixture
def demo(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The demo in a process group of its own, its temporary files in a place that we can see."""
    process = subprocess.Popen(
        [sys.executable, "-m", "emqtimerd", "demo"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    with process:
        yield process
        if process.poll() is None:
            process.kill()


def others(group: int) -> list[str]:
    """What still runs in the demo's process group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(entry.parent.name)
    return found


@slow
def test_every_number_adds_up(demo: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """Half a minute, a server killed in between, and nothing is left of it."""
    output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 0, output
    assert "NOT" not in output
    assert output.count("\nok ") == 8
    assert not others(demo.pid)
    assert not list(tmp_path.iterdir())


@slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_of_it(
    demo: "subprocess.Popen[str]", tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Workers, daemon and server end with it, also while the server is away."""
    assert demo.stdout
    for line in demo.stdout:
        if "the server is killed" in line:
            break
    demo.send_signal(number)
    demo.communicate(timeout=20)
    assert demo.returncode == code
    wait_until(lambda: not others(demo.pid), "the end of the demo's processes")
    assert not list(tmp_path.iterdir())


@slow
def test_a_reader_that_leaves_ends_it(demo: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """A closed pipe is no error to talk about, and leaves no process."""
    assert demo.stdout
    assert demo.stdout.readline().startswith("EMQ node")
    demo.stdout.close()
    demo.wait(timeout=30)
    wait_until(lambda: not others(demo.pid), "the end of the demo's processes")
    assert not list(tmp_path.iterdir())


def test_a_job_whose_reply_was_lost_counts_if_it_was_added(node: DevNode) -> None:
    """It is added once and never again, and in the end the facts tell whether it came to be: here
    one was completed before anybody could ask, one is still there, and one never arrived."""
    cast = Cast(node.url)
    cast.working.set()
    with Jobs(node.url, "orders") as jobs:

        def lose_the_reply(job_id: bytes, *, arrives: bool = True) -> None:
            if arrives:
                jobs.enqueue(b"p", job_id)
            raise OutcomeUnknown("lost")

        cast._add(b"JOBdone", lambda: lose_the_reply(b"JOBdone"))
        job = jobs.claim(60_000)
        assert job is not None
        cast._handle(jobs, job, luck=1)
        cast._note_claim(job)
        cast._add(b"JOBleft", lambda: lose_the_reply(b"JOBleft"), scheduled=True)
        cast._add(b"JOBlost", lambda: lose_the_reply(b"JOBlost", arrives=False), scheduled=True)
    facts = cast.facts
    assert facts.accepted == set()
    facts.end_doubts(lambda job_id: job_id == b"JOBleft")
    assert (facts.accepted, facts.scheduled) == ({b"JOBdone", b"JOBleft"}, 1)


# --- whether a sum that is wrong is noticed -----------------------------------------------------


class Books:
    """A story that has been told: what the people did, what the daemon counted, what is left."""

    def __init__(self) -> None:
        self.node, self.daemon = SimpleNamespace(url="redis://127.0.0.1:1/0"), SimpleNamespace()
        self.sizes = {"pending": 1, "active": 0, "schedule": 1, "dead": 2}
        self.completed = 6
        self.unknown = 0
        self.counted = Counter(promoted=4, stall=2, restart=2, recovered=3, dead_lettered=1)
        self.facts = Facts(accepted={b"JOB%d" % number for number in range(10)}, scheduled=5)
        leases = [(b"JOB%d" % number, b"1") for number in range(7)]
        self.facts.claimed = set(leases)
        self.facts.settled = set(leases[:3])
        self.facts.held_over = set(leases[2:5])

    def add_up(self) -> list[bool]:
        """Which of the summary's sentences hold."""
        story = Story(self.node, self.daemon, Console(quiet=True))  # type: ignore[arg-type]
        story._client = self
        story._cast.facts = self.facts
        metrics: Counter[tuple[str, ...]] = Counter()
        # All of it happened to one queue; the other one has its series, too.
        metrics["jobs_promoted_total", "orders"] = self.counted["promoted"]
        metrics["jobs_recovered_total", "orders"] = self.counted["recovered"]
        metrics["jobs_dead_lettered_total", "orders"] = self.counted["dead_lettered"]
        metrics["sweeps_total", "orders", "promote", "unknown"] = self.unknown
        for cause in ("stall", "restart"):
            metrics["lease_expiries_total", "orders", cause] = self.counted[cause]
        return [holds for _, holds in story._checks(metrics)]

    def zcard(self, key: bytes) -> int:
        queue, _, name = key.decode().partition(":{orders}:")
        return self.sizes[name] if queue == "emq" else 0

    def hget(self, key: bytes, _: str) -> bytes | None:
        return b"%d" % self.completed if b"{orders}" in key else None


LIES: dict[str, tuple[Callable[[Books], object], set[int]]] = {
    "a job that vanished": (lambda b: b.facts.accepted.add(b"JOBX"), {0}),
    "a job that was completed twice": (lambda b: setattr(b, "completed", 7), {0}),
    "a promotion that was not counted": (lambda b: b.counted.update(promoted=-1), {1}),
    "a promotion that was counted twice": (lambda b: b.counted.update(promoted=1), {1}),
    "a stall that was called a restart": (
        lambda b: b.counted.update(stall=-1, restart=1),
        {2, 3},
    ),
    "a lease that ran out and was not counted": (lambda b: b.counted.update(stall=-1), {3, 4}),
    "a lease that ran out and was settled": (
        lambda b: b.facts.settled.add((b"JOB6", b"1")),
        {3},
    ),
    "a recovery that was not counted": (lambda b: b.counted.update(recovered=-1), {4}),
    "a burial without an expiry": (lambda b: b.counted.update(dead_lettered=1), {4}),
}


def test_right_sums_are_right() -> None:
    """Nothing is said against a story in which everything adds up."""
    assert Books().add_up() == [True] * 5


@pytest.mark.parametrize(("lie", "noticed"), LIES.values(), ids=LIES)
def test_a_sum_that_is_wrong_is_noticed(lie: Callable[[Books], object], noticed: set[int]) -> None:
    """Each single lie of people, server or daemon is told by the sentence that is about it."""
    books = Books()
    lie(books)
    assert {at for at, holds in enumerate(books.add_up()) if not holds} == noticed


def test_a_sweep_of_unknown_outcome_excuses_what_it_may_have_moved() -> None:
    """Promotions may be missing then, as many as its limit; there are never too many."""
    books = Books()
    books.unknown = 1
    books.counted["promoted"] = 3
    assert books.add_up() == [True] * 5
    books.facts.scheduled += SWEEP_LIMIT
    assert books.add_up()[1] is False
    books.counted["promoted"] = books.facts.scheduled
    assert books.add_up()[1] is False
