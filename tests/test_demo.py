"""The demo: that its numbers add up, and that it leaves nothing behind however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import wait_until

from emqtimerd.demo import Cast
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
