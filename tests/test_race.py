"""Workers and sweeps at full speed, leases of a few milliseconds: nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from conftest import connect

from emqtimerd import wire
from emqtimerd.config import Settings
from emqtimerd.devnode import DevNode
from emqtimerd.jobs import Job, Jobs, Refused
from emqtimerd.node import open_node
from emqtimerd.sweeper import Expiry, Sweep, Verb, run_round

RACE_SECONDS = 6.0
"""Some ten thousand claims on two cores; the orderly end takes a second more."""

MAX_STALLED = 3

EARLIER = b"e" * 40

# The last letter of an id says whose stamp each lease of that job carries: this process's, an
# earlier one's, or none as a script would have left it. Claim and stamp are one script, so that no
# sweep sees a lease between the two. (A native node gets writing scripts from this test alone.)
CLAIM_AND_STAMP = b"""
local job = redis.call('EMQ.CLAIM', 3, KEYS[1], KEYS[2], KEYS[3], ARGV[1])
if #job == 0 then return job end
local row, kind = KEYS[3] .. 'job:' .. job[1], string.sub(job[1], -1)
if kind == 'R' then redis.call('HSET', row, 'lease_epoch', ARGV[2])
elseif kind == 'U' then redis.call('HDEL', row, 'lease_epoch') end
return job
"""

CAUSES: dict[str, wire.Cause] = {"S": "stall", "R": "restart", "U": "unstamped"}


class Race:
    """What workers and sweeps say they did, and when they are to end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.hurry = threading.Event()
        """Workers finish what they claim, and give it time."""
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.completed: Counter[bytes] = Counter()
        self.failed: Counter[bytes] = Counter()
        self.scheduled = 0
        self.promoted = 0
        self.expiries: list[Expiry] = []
        self.buried: Counter[bytes] = Counter()
        self.problems: list[BaseException] = []

    def thread(self, work: Callable[[int], None], number: int) -> threading.Thread:
        def run() -> None:
            try:
                work(number)
            except BaseException as problem:  # noqa: BLE001 - told by the test
                self.problems.append(problem)

        return threading.Thread(target=run, name=f"{work.__name__} {number}")

    def worker(self, number: int) -> None:
        chance = random.Random(number)
        keys = [wire.queue_key("orders", "pending"), wire.queue_key("orders", "active")]
        keys.append(wire.base("orders"))
        with redis.Redis.from_url(self.url) as client, Jobs(self.url, "orders") as jobs:
            while not self.over.is_set():
                hurry = self.hurry.is_set()
                lease_ms = 5_000 if hurry else chance.randrange(1, 6)
                reply: Any = client.eval(CLAIM_AND_STAMP, 3, *keys, lease_ms, EARLIER)
                if not reply:
                    continue
                job = Job(reply[0], reply[1], b"%d" % reply[2])
                # Refused when the lease ran out: a sweep has the job, or another worker by now.
                with contextlib.suppress(Refused):
                    self._work(jobs, job, chance, hurry)

    def _work(self, jobs: Jobs, job: Job, chance: random.Random, hurry: bool) -> None:
        way = 0.0 if hurry else chance.random()
        if way < 0.35:
            jobs.complete(job)
            with self.lock:
                self.completed[job.id] += 1
        elif way < 0.5 and job.id.endswith(b"S"):
            # Extending stamps a lease anew, so it is for jobs whose stamp is ours anyway.
            for _ in range(chance.randrange(1, 4)):
                jobs.extend(job, chance.randrange(1, 6))
            jobs.requeue(job)
        elif way < 0.6:
            delay_ms = chance.randrange(3)
            if way < 0.55:
                jobs.delay(job, delay_ms)
                fate = "scheduled"
            else:
                fate = jobs.fail(job, "no luck", delay_ms=delay_ms, max_attempts=4)
            with self.lock:
                self.scheduled += fate == "scheduled"
                self.failed.update([job.id] if fate == "dead" else [])
        elif way < 0.7:
            jobs.requeue(job)
        # Otherwise the worker dies with the job in its hands.

    def sweeps(self, number: int) -> None:
        settings = Settings.model_validate({"node": {"url": self.url}})
        node = open_node(settings.node)
        chance = random.Random(1_000 + number)
        verbs: tuple[Verb, ...] = ("promote", "stalled_check")
        try:
            while not self.over.is_set():
                for verb in verbs:
                    order = Sweep("orders", verb, chance.choice((1, 7, 100)), MAX_STALLED)
                    until = time.monotonic() + 30
                    for result in run_round(node, [order], until=until).results:
                        assert result.outcome == "ok", result
                        with self.lock:
                            self.promoted += result.promoted
                            self.expiries += result.expiries
                            self.buried.update(result.dead)
        finally:
            node.close()


@pytest.mark.slow
def test_every_job_ends_once_and_every_expiry_has_its_true_cause(
    node: DevNode, client: redis.Redis
) -> None:
    """Workers claim, extend, settle and die as fast as they can while two sweepers sweep."""
    all_ids = {b"JOB%04d%b" % (n, kind.encode()) for kind in CAUSES for n in range(1_500)}
    race = Race(node.url)
    with Jobs(node.url, "orders") as jobs:
        for job_id in sorted(all_ids):
            jobs.enqueue(b"payload", job_id)
    threads = [race.thread(race.worker, number) for number in range(3)]
    threads += [race.thread(race.sweeps, number) for number in range(2)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    with connect(node) as watcher:
        while time.monotonic() - started < 60 and not race.problems:
            left = [watcher.zcard(wire.queue_key("orders", name)) for name in wire.SETS[:3]]
            if not any(left):
                break
            if time.monotonic() - started > RACE_SECONDS:
                race.hurry.set()
            time.sleep(0.02)
    race.over.set()
    for thread in threads:
        thread.join(30)
    assert race.problems == []
    assert left == [0, 0, 0], "pending, active and schedule end empty"

    # Each id ended once, and nothing else is left on the server.
    dead: set[Any] = set(client.zrange(wire.queue_key("orders", "dead"), 0, -1))
    assert race.failed + race.buried + race.completed == Counter(dict.fromkeys(all_ids, 1))
    assert set(race.failed) | set(race.buried) == dead
    rows = {key.partition(b":job:")[2] for key in client.scan_iter(b"emq:{orders}:job:*", 1_000)}
    assert rows == dead
    counted = [
        int(client.hget(wire.queue_key("orders", f"metrics:{name}"), "count") or 0)
        for name in ("completed", "failed")
    ]
    assert counted == [race.completed.total(), len(dead)]

    # What was put off came back once.
    assert race.promoted == race.scheduled

    # Each expiry has its cause, and each row has counted those that count.
    wrong = [e for e in race.expiries if e.cause != CAUSES[chr(e.job_id[-1])]]
    assert wrong == []
    stalls = Counter(e.job_id for e in race.expiries if e.cause != "restart")
    for job_id in dead:
        fields = client.hmget(wire.row_key("orders", job_id), "stalled", "state")
        assert fields == [b"%d" % stalls[job_id] if stalls[job_id] else None, b"dead"]
    assert all(stalls[job_id] == MAX_STALLED for job_id in race.buried)
    assert all(count <= MAX_STALLED for count in stalls.values())
    # Too few of a kind would prove nothing.
    kinds = Counter(e.cause for e in race.expiries)
    assert min(kinds[cause] for cause in CAUSES.values()) >= 50, kinds
