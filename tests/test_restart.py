"""Leases that cross a server restart, or a failover, are told apart from stalls, id by id."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import redis
from conftest import SERVERS, connect, wait_until
from server_sets import wait_in_step

from emqtimerd import wire
from emqtimerd.devnode import DevNode
from emqtimerd.jobs import Job, Jobs

LONG_MS = 600_000
"""A lease that outlives the test."""

SHORT_MS = 1
"""A lease that nobody keeps."""


def once(node: DevNode, *options: str) -> tuple[int, Any]:
    """Run `emqtimerd once --json` on the queue; return exit code and document."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EMQTIMERD")}
    base = ("--url", node.url, "--queue", "orders", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "emqtimerd", "once", *base, *options],
        env=environment,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == b""
    return done.returncode, json.loads(done.stdout)


def run_id(client: redis.Redis) -> str:
    return str(client.info("server")["run_id"])


def claim(jobs: Jobs, count: int, lease_ms: int) -> list[Job]:
    """Lease the first pending jobs."""
    claimed = [jobs.claim(lease_ms) for _ in range(count)]
    assert all(claimed)
    return [job for job in claimed if job]


def stalls(client: redis.Redis, jobs: list[Job]) -> list[Any]:
    """The stall counts of the jobs' rows."""
    return [client.hget(wire.row_key("orders", job.id), "stalled") for job in jobs]


def names(jobs: list[Job]) -> set[str]:
    return {job.id.decode() for job in jobs}


def all_expired(client: redis.Redis) -> bool:
    seconds, microseconds = client.time()
    alive = client.zcount("emq:{orders}:active", seconds * 1000 + microseconds // 1000, "+inf")
    return alive == 0


class Before:
    """The leases that are taken before the server process ends, and what is to become of them."""

    def __init__(self, node: DevNode) -> None:
        with Jobs(node.url, "orders") as jobs, connect(node) as client:
            for number in range(16):
                jobs.enqueue(b"payload", b"JOB%02d" % number)
            self.run_id = run_id(client)
            # One stall was counted already: with a budget of two, another would bury these.
            self.stalled = claim(jobs, 2, SHORT_MS)
            wait_until(lambda: all_expired(client), "the first leases are over")
            assert once(node, "--max-stalled", "2")[1]["queues"][0]["recovered"] == 2
            self.stalled = claim(jobs, 2, SHORT_MS)
            assert stalls(client, self.stalled) == [b"1", b"1"]
            self.expired = claim(jobs, 4, SHORT_MS)
            self.extended = claim(jobs, 3, LONG_MS)
            self.completed = claim(jobs, 2, LONG_MS)


def after(node: DevNode, before: Before) -> None:
    """Go on with another server process that holds the same data, and sweep it."""
    with Jobs(node.url, "orders") as jobs, connect(node) as client:
        now = run_id(client)
        assert now != before.run_id
        # A worker that lives comes back and extends: its lease is of this process from then on.
        for job in before.extended:
            jobs.extend(job, SHORT_MS)
        for job in before.completed:
            jobs.complete(job)
        fresh = claim(jobs, 5, SHORT_MS)
        wait_until(lambda: all_expired(client), "all leases are over")
        told = once(node, "--max-stalled", "2", "--dry-run")[1]["queues"][0]

        code, document = once(node, "--max-stalled", "2")
        (queue,) = document["queues"]
        crossed, counted = before.stalled + before.expired, before.extended + fresh
        assert code == 0
        assert document["nodes"][0]["run_id"] == now
        assert queue["expiries"] == {
            "stall": len(counted),
            "restart": len(crossed),
            "unstamped": 0,
            "unattributed": 0,
        }
        assert {each["id"] for each in queue["restart_crossing"]} == names(crossed)
        assert {each["lease_epoch"] for each in queue["restart_crossing"]} == {before.run_id}
        assert all(each["past_deadline_ms"] >= 0 for each in queue["restart_crossing"])
        assert queue["recovered"] == len(crossed + counted)
        assert queue["dead_lettered"] == 0
        assert stalls(client, before.stalled) == [b"1", b"1"]
        assert stalls(client, before.expired) == [None] * 4
        assert stalls(client, counted) == [b"1"] * len(counted)
        assert told["expiries"] == queue["expiries"]

        # The crossed ones have their budget still: the next stall is the one that counts.
        claim(jobs, 14, SHORT_MS)
        wait_until(lambda: all_expired(client), "all leases are over once more")
        (queue,) = once(node, "--max-stalled", "2")[1]["queues"]
        assert set(queue["dead_letter_ids"]) == names(before.stalled + counted)
        assert queue["recovered"] == len(before.expired)


@pytest.mark.parametrize("kind", SERVERS)
def test_leases_that_crossed_a_crash_are_told_from_stalls(
    start_node: Callable[..., DevNode], kind: str
) -> None:
    """AOF, claims, SIGKILL, restart, new claims: both kinds exactly, and crossings cost nothing."""
    node = start_node(kind)
    before = Before(node)
    node.kill()
    node.restart()
    after(node, before)


def test_leases_that_crossed_a_failover_are_told_from_stalls(
    start_node: Callable[..., DevNode],
) -> None:
    """A promoted replica is another process: what the old primary leased has crossed a restart."""
    primary = start_node()
    replica = start_node(brand=False, extra_args=("--replicaof", "127.0.0.1", str(primary.port)))
    before = Before(primary)
    # A replica that still loads the first snapshot counts for WAIT if nothing was written since.
    wait_in_step([replica])
    with connect(primary) as client:
        wait_until(lambda: client.wait(1, 100) == 1, "the replica has it all")
    # Until it is promoted, a replica refuses and says so.
    code, document = once(replica)
    assert code == 1
    assert {each["code"] for each in document["queues"][0]["error"]} == {"READONLY"}
    primary.kill()
    with connect(replica) as client:
        client.replicaof("NO", "ONE")
    after(replica, before)
