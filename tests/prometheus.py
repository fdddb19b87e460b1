"""A real Prometheus for the tests, and a daemon in trouble for it to watch."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from conftest import TEST_ARGS, connect, wait_until
from daemon_process import DaemonProcess

from emqtimerd import wire
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.jobs import Job, Jobs

ROOT = Path(__file__).resolve().parent.parent
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"

SCRAPE_SECONDS = 0.25
"""Often enough for rates over the few seconds that the trouble takes."""

# Ours, and the process's. Histograms are named by their samples.
METRIC = re.compile(r"\b(?:emqtimerd|process)_[a-z_]+\b")


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`; else the test is skipped, but fails in CI."""
    if path := shutil.which(name):
        return path
    reason = f"no {name} here: apt-get install prometheus"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class Sample:
    """One element of an answer."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """One that scrapes one daemon and evaluates the shipped rules; a context manager."""

    def __init__(self, directory: Path, target_port: int) -> None:
        self._port = free_port()
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"}
            | {"evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [
                {
                    "job_name": "emqtimerd",
                    "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
                }
            ],
        }
        file = directory / "prometheus.yml"
        # JSON is YAML.
        file.write_text(json.dumps(config))
        self._log = directory / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    tool("prometheus"),
                    f"--config.file={file}",
                    f"--storage.tsdb.path={directory / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        wait_until(self._scrapes, f"the first scrape: {self._log.read_text()}", 20)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)

    def _scrapes(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail(f"prometheus has ended: {self._log.read_text()}")
        try:
            return bool(self.query("up == 1"))
        except (OSError, AssertionError):
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """What the API answers; an error is a failure that says which."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def query(self, expression: str) -> list[Sample]:
        """The instant value of an expression, now."""
        data = self.get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(item["metric"], float(item["value"][1])) for item in data["result"]]

    def range(self, expression: str, seconds: float, step: float = 0.5) -> list[dict[str, str]]:
        """The labels of all series that an expression had in the last so many seconds."""
        now = time.time()
        data = self.get(
            "query_range",
            query=expression,
            start=str(now - seconds),
            end=str(now),
            step=str(step),
        )
        return [item["metric"] for item in data["result"]]

    def value(self, expression: str) -> float:
        """The one value of an expression."""
        (sample,) = self.query(expression)
        return sample.value


@dataclass(frozen=True)
class Scene:
    """What stands when the trouble is over."""

    prometheus: Prometheus
    daemon: DaemonProcess
    seconds: float
    """How long ago it began."""


CONFIG = """\
queues = [{queues}]
[node]
url = "{url}"
timeout = "1s"
[promote]
interval = "200ms"
[stalled_check]
interval = "300ms"
max_stalled = 2
restart_grace = "1s"
[http]
listen = "127.0.0.1:0"
[log]
format = "json"
"""

# What happens in it, by queue.
PROMOTED = 57
STALLED = 3
UNSTAMPED = 2
HELD = 12


@contextmanager
def trouble() -> Iterator[Scene]:
    """A node, a daemon and a Prometheus, after everything that can be seen has happened.

    orders: jobs promoted, leases lost by stalls, two without a stamp, the rest by a restart.
    emails: a row blocks the promotion until the end, with due jobs behind it.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emqtimerd-")))
        node = stack.enter_context(DevNode(directory / "node", extra_args=TEST_ARGS))
        text = CONFIG.format(url=node.url, queues='"orders", "emails"')
        daemon = stack.enter_context(DaemonProcess(directory, text))
        prometheus = stack.enter_context(Prometheus(directory, daemon.port()))
        wait_until(lambda: prometheus.query("emqtimerd_node_up == 1"), "the node is up")
        began = time.monotonic()
        _make_trouble(node, daemon, prometheus)
        yield Scene(prometheus, daemon, time.monotonic() - began)


def _make_trouble(node: DevNode, daemon: DaemonProcess, prometheus: Prometheus) -> None:
    def seen(expression: str, value: float) -> None:
        wait_until(
            lambda: [s.value for s in prometheus.query(expression)] == [value],
            f"{expression} is {value}: {prometheus.query(expression)}; {daemon.lines()}",
            20,
        )

    with connect(node) as client, Jobs(client, "orders") as orders, Jobs(client, "emails") as mails:
        for number in range(PROMOTED):
            orders.schedule(b"", in_ms=20 * number)
        seen('emqtimerd_jobs_promoted_total{queue="orders"}', PROMOTED)

        # Crashed workers. A job's second stall buries it.
        for total in (STALLED, 2 * STALLED):
            _expire(client, [_claimed(orders) for _ in range(STALLED)])
            seen('emqtimerd_lease_expiries_total{queue="orders",cause="stall"}', total)
        seen('emqtimerd_jobs_dead_lettered_total{queue="orders"}', STALLED)
        unstamped = [_claimed(orders) for _ in range(UNSTAMPED)]
        for job in unstamped:
            client.hdel(wire.row_key("orders", job.id), "lease_epoch")
        _expire(client, unstamped)
        seen('emqtimerd_lease_expiries_total{queue="orders",cause="unstamped"}', UNSTAMPED)

        # A row of another kind.
        lane = b"JOB-LANE"
        client.hset(wire.row_key("emails", lane), mapping={"state": "scheduled", "group": "g"})
        client.zadd(wire.queue_key("emails", "schedule"), {lane: 1})
        mails.schedule(b"", in_ms=0)
        seen('emqtimerd_queue_blocked{queue="emails",verb="promote"}', 1)

        # A mistake in the file.
        daemon.reload("queues = 7")
        seen("emqtimerd_config_last_reload_successful", 0)

        # A server that hangs: the commands that were under way stay without an answer.
        assert node.pid
        os.kill(node.pid, signal.SIGSTOP)
        seen("emqtimerd_node_up", 0)
        os.kill(node.pid, signal.SIGCONT)
        seen("emqtimerd_node_up", 1)

        # A server that is killed while workers hold leases that they never come back to.
        _expire(client, [_claimed(orders) for _ in range(HELD)], in_ms=1_500)
        node.kill()
    node.start()
    seen('emqtimerd_lease_expiries_total{queue="orders",cause="restart"}', HELD)
    seen("emqtimerd_node_restarts_total", 1)
    # All that a last scrape can show is then there for rates, too.
    last = time.time() + 2 * SCRAPE_SECONDS
    wait_until(
        lambda: prometheus.query(f"timestamp(emqtimerd_node_up) > {last}"), "one more scrape"
    )


def _claimed(jobs: Jobs) -> Job:
    # Ids sort by their time: those that come back are claimed again first.
    job = jobs.claim(60_000)
    assert job is not None
    return job


def _expire(client: redis.Redis, jobs: Sequence[Job], in_ms: int = 0) -> None:
    """Let leases run out, all of them at once, however slow the machine is."""
    seconds, microseconds = client.time()
    deadline = seconds * 1000 + microseconds // 1000 + in_ms
    client.zadd(wire.queue_key("orders", "active"), {job.id: deadline for job in jobs})
