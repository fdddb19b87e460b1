"""Several daemons on one node without a lock: each job is moved once, and the numbers add up."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import wait_until
from daemon_process import DaemonProcess, DaemonThread, Told
from echomq import FAR, SET_OF_STATE, Queue, client_of, row, run_id, send, write_keyspace
from server_sets import ask, schedule

from emqtimerd import wire
from emqtimerd.devnode import DevNode

QUEUES = [f"queue-{number}" for number in range(3)]

SETTINGS: dict[str, dict[str, Any]] = {
    # Replicas that wake for the same jobs, and pages smaller than what is due at once.
    "promote": {"interval": "500ms", "limit": 7},
    "stalled_check": {
        "interval": "500ms",
        "limit": 7,
        "max_stalled": 2,
        "restart_grace": "0s",
        "at_expiry": True,
    },
}

SCHEDULED = 40
LEASED = {"stall": 12, "second stall": 8, "restart": 8, "unstamped": 8}
"""How many jobs of each kind a queue has."""

INSTANTS_MS = range(200, 1_000, 100)
"""When jobs come due and leases expire: several at the same moment, for all replicas."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test has entered."""
    with ExitStack() as stack:
        yield stack


def put_away(client: redis.Redis) -> list[Queue]:
    """Fill the queues with jobs and leases whose time is far away."""
    here = run_id(client)
    leases: dict[str, dict[str, bytes | int]] = {
        "stall": {"lease_epoch": here},
        "second stall": {"lease_epoch": here, "stalled": 1},
        "restart": {"lease_epoch": b"e" * 40},
        "unstamped": {},
    }
    queues = [Queue(name, here) for name in QUEUES]
    for queue in queues:
        for number in range(SCHEDULED):
            queue.rows[b"JOB%02d" % number] = row(b"scheduled")
        for kind, count in LEASED.items():
            for number in range(count):
                job_id = f"JOB{kind}{number:02}".replace(" ", "-").encode()
                queue.rows[job_id] = row(b"active", attempts=1, **leases[kind])
        for job_id, fields in queue.rows.items():
            queue.sets[SET_OF_STATE[fields[b"state"]]][job_id] = FAR
    write_keyspace(client, {key: v for queue in queues for key, v in queue.keyspace().items()})
    return queues


def bring_near(client: redis.Redis, queues: Sequence[Queue]) -> None:
    """Let all of it come due within a second, from the same moment on for all."""
    seconds, micros = map(int, send(client, "TIME"))
    now_ms = seconds * 1_000 + micros // 1_000
    instants = cycle(now_ms + ms for ms in INSTANTS_MS)
    with client.pipeline(transaction=True) as pipeline:
        for queue in queues:
            for name in ("schedule", "active"):
                scores = {job_id: next(instants) for job_id in queue.sets[name]}
                pipeline.zadd(wire.queue_key(queue.name, name), scores)
        pipeline.execute()


def members(client: redis.Redis, queue: str, name: str) -> set[bytes]:
    """The ids in one of a queue's sets."""
    return set(ask(client, "ZRANGE", wire.queue_key(queue, name), 0, -1))


def idle(client: redis.Redis) -> bool:
    """Whether nothing is due or leased any more."""
    return not any(members(client, q, name) for q in QUEUES for name in ("schedule", "active"))


def total(daemons: Sequence[Told]) -> Counter[str]:
    """Every sample, added up over the daemons."""
    sums: Counter[str] = Counter()
    for daemon in daemons:
        sums.update(daemon.scrape())
    return sums


def all_promoted(daemons: Sequence[Told]) -> float:
    """How many jobs they have promoted, in all queues."""
    samples = total(daemons).items()
    return sum(value for name, value in samples if name.startswith("emqtimerd_jobs_promoted_total"))


def wait_swept(daemons: Sequence[Told]) -> None:
    """Wait for two more good sweeps by each: what a sweep before them moved is counted by then."""
    before = [daemon.scrape() for daemon in daemons]
    for daemon, samples in zip(daemons, before, strict=True):
        ends = {name: value + 2 for name, value in samples.items() if SWEPT in name}

        def swept(daemon: Told = daemon, ends: Mapping[str, float] = ends) -> bool:
            now = daemon.scrape()
            return all(now[name] >= value for name, value in ends.items())

        wait_until(swept, "all queues are swept again", 20)


SWEPT = 'emqtimerd_sweeps_total{outcome="ok"'


def assert_all_is_moved_once(daemons: Sequence[Told], node: DevNode) -> None:
    """What the daemons count together is what the server shows."""
    client = client_of(node.url)
    queues = put_away(client)
    for daemon in daemons:
        daemon.wait_ready()
    bring_near(client, queues)
    wait_until(lambda: idle(client), "all is moved", 30)
    wait_swept(daemons)
    sums = total(daemons)
    dead = LEASED["second stall"]
    recovered = sum(LEASED.values()) - dead
    for model in queues:
        queue = model.name
        buried = {job_id for job_id in model.rows if b"second-stall" in job_id}
        assert members(client, queue, "pending") == set(model.rows) - buried
        assert members(client, queue, "dead") == buried
        failed = client.hget(wire.queue_key(queue, "metrics:failed"), "count")
        assert failed == b"%d" % dead
        assert {
            what: sums[f'emqtimerd_jobs_{what}_total{{queue="{queue}"}}']
            for what in ("promoted", "recovered", "dead_lettered")
        } == {"promoted": SCHEDULED, "recovered": recovered, "dead_lettered": dead}
        assert {
            cause: sums[f'emqtimerd_lease_expiries_total{{cause="{cause}",queue="{queue}"}}']
            for cause in ("stall", "restart", "unstamped", "unattributed")
        } == {
            "stall": LEASED["stall"] + LEASED["second stall"],
            "restart": LEASED["restart"],
            "unstamped": LEASED["unstamped"],
            "unattributed": 0,
        }
    swept = {name: value for name, value in sums.items() if "emqtimerd_sweeps_total" in name}
    assert sum(swept.values()) == sum(v for name, v in swept.items() if SWEPT in name)
    # One that does all the work would prove nothing.
    shares = [all_promoted([daemon]) for daemon in daemons]
    assert sum(map(bool, shares)) > 1, shares


@pytest.mark.slow
def test_two_daemons_move_each_job_once(
    node: DevNode, client: redis.Redis, tmp_path: Path, stack: ExitStack
) -> None:
    """Two processes; their counters are exact together."""
    lines = [
        f"queues = {QUEUES}",
        f'node.url = "{node.url}"',
        'http.listen = "127.0.0.1:0"',
        'log.format = "json"',
        # What a value looks like in JSON, it looks like in TOML.
        *(
            f"{table}.{name} = {json.dumps(v)}"
            for table in SETTINGS
            for name, v in SETTINGS[table].items()
        ),
    ]
    daemons = []
    for name in ("one", "other"):
        (directory := tmp_path / name).mkdir()
        daemons.append(stack.enter_context(DaemonProcess(directory, "\n".join(lines))))
    assert_all_is_moved_once(daemons, node)
    assert [daemon.stop() for daemon in daemons] == [0, 0]


@pytest.mark.slow
def test_twenty_daemons_move_each_job_once(
    node: DevNode, client: redis.Redis, stack: ExitStack
) -> None:
    """As two do."""
    daemons = [
        stack.enter_context(DaemonThread(node={"url": node.url}, queues=QUEUES, **SETTINGS))
        for _ in range(20)
    ]
    assert_all_is_moved_once(daemons, node)
    end_together(daemons)


def end_together(daemons: Sequence[DaemonThread]) -> None:
    """Ask all of them to stop before the first is waited for."""
    for daemon in daemons:
        daemon.signals.send(signal.SIGTERM)


@pytest.mark.slow
def test_five_shards_own_each_queue_once(
    node: DevNode, client: redis.Redis, stack: ExitStack
) -> None:
    """Listed or found, each queue is one daemon's and has its series there alone; a daemon that
    counts another number of shards shows it."""
    listed, found = ([f"{kind}-{number}" for number in range(20)] for kind in ("listed", "found"))
    for queue in (*listed, *found):
        schedule(client, queue, "JOB1")

    def shard(index: int, count: int = 5) -> DaemonThread:
        return stack.enter_context(
            DaemonThread(
                node={"url": node.url},
                queues=listed,
                promote={"interval": "500ms"},
                discovery={"enabled": True, "interval": "1s"},
                shard={"index": index, "count": count},
            )
        )

    daemons = [shard(index) for index in range(5)]
    wait_until(lambda: all_promoted(daemons) == 40, "all are swept")
    parts = [daemon.scrape() for daemon in daemons]
    for queue in (*listed, *found):
        name = f'emqtimerd_jobs_promoted_total{{queue="{queue}"}}'
        assert [part[name] for part in parts if name in part] == [1], queue
    assert sum(part["emqtimerd_queues"] for part in parts) == 40
    for index, part in enumerate(parts):
        assert part[f'emqtimerd_shard_info{{count="5",index="{index}"}}'] == 1
    astray = shard(4, 6)
    assert astray.value('emqtimerd_shard_info{count="6",index="4"}') == 1
    end_together([*daemons, astray])
