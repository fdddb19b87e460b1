"""Cases that take minutes: `make test ARGS='-m long'`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import wait_until
from daemon_process import DaemonProcess
from server_sets import schedule

from emqtimerd import wire
from emqtimerd.devnode import DevNode

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parent.parent
QUEUES, SECONDS = 5_000, 300


def test_five_thousand_idle_queues_for_five_minutes(
    node: DevNode, client: redis.Redis, tmp_path: Path
) -> None:
    """Idle cost: sweeps are queues times verbs over the interval, and no more; the reads beside
    them are the documented ones; only what is listed is touched; a late queue is picked up."""
    queues = [f"q{number}" for number in range(QUEUES)]
    schedule(client, "unlisted", "JOB1")
    config = f"""
        queues = {json.dumps(queues)}
        http.listen = "127.0.0.1:0"
        node.url = "{node.url}"
        promote.interval = "1s"
        stalled_check.interval = "5s"
    """
    with DaemonProcess(tmp_path, config) as daemon:
        daemon.wait_ready(60)
        # The first sweeps are spread over five seconds and the grace ends after ten.
        begun = time.monotonic() + 15
        wait_until(lambda: time.monotonic() > begun, "it runs at its pace", 20)
        client.config_resetstat()
        begun = time.monotonic()
        wait_until(
            lambda: time.monotonic() > begun + SECONDS or not daemon.running(),
            "five minutes",
            SECONDS + 10,
        )
        stats: Any = client.info("commandstats")
        seconds = time.monotonic() - begun
        count = {
            name.removeprefix("cmdstat_").lower(): each["calls"] for name, each in stats.items()
        }
        turns = {"emq.promote": seconds / 1, "emq.stalled.check": seconds / 5}
        for verb, each in turns.items():
            # A point more at the ends; a point that a busy machine missed is not made up for.
            assert 0.9 * each * QUEUES < count[verb] <= (each + 2) * QUEUES, verb
        promotions, checks = (count[verb] for verb in turns)
        # One read beside each promotion; a transaction, a script and four sizes beside each check.
        assert count["zrange"] <= promotions + 2 * checks + QUEUES
        assert count["zcard"] <= 4 * checks + QUEUES
        for name in ("multi", "exec", "eval_ro"):
            assert count[name] <= checks + QUEUES, name
        assert count["time"] <= 0.1 * promotions
        beside = {"zrange", "zcard", "multi", "exec", "eval_ro", "time", "info", "config|resetstat"}
        fence = {"client|setname", "emq.version", "get"}
        assert set(count) - fence <= {*turns, *beside}
        schedule(client, "q7", "JOB1")
        daemon.wait_value('emqtimerd_jobs_promoted_total{queue="q7"}', 1)
        assert client.zcard(wire.queue_key("unlisted", "schedule")) == 1
        assert daemon.stop() == 0


def test_a_million_due_jobs_in_one_queue() -> None:
    """Huge backlog in one command: all of it moves in calls of a thousand; another client is kept
    waiting for no second, the other queues' jobs are no second late."""
    run = subprocess.run(
        [sys.executable, "bench/daemon.py", "drain", "--jobs", "1000000"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(re.findall(r"^(.+?) {2,}([\d,.]+) ", run.stdout, re.MULTILINE))
    # In one command the server would be gone for five seconds and more.
    assert 0 < float(found["longest PING"]) < 1_000, run.stdout
    assert 0 < float(found["others' lateness"]) < 2_000, run.stdout
    rate, bare = (float(found[who].replace(",", "")) for who in ("emqtimerd", "bare loop"))
    # The rest of the time is the others'.
    assert rate > bare / 4, run.stdout
