"""What the daemon costs and how late it is, beside the script that one would write instead.

    python bench/daemon.py idle                      # 10,000 idle queues, each second
    python bench/daemon.py idle --queues 10          # ten of them
    python bench/daemon.py lateness                  # 1,000 jobs a second, due 5 to 20 s ahead
    python bench/daemon.py drain                     # a million due jobs in one queue

`idle` and `lateness` run bench/naive.py in the same way on the same node, one after the other, and
print both and their ratio. `drain` compares with a bare loop that only sends EMQ.PROMOTE over one
connection. Processor time is the kernel's (user and system) of the process alone, as a share of one
core. Take ratios from here and no absolute times: they are of this machine at this moment.
"""

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis
from prometheus_client.parser import text_string_to_metric_families

from emqtimerd import wire
from emqtimerd.devnode import DevNode

NAIVE = Path(__file__).with_name("naive.py")
WARM_UP_SECONDS = 15.0
"""First sweeps are spread over five seconds, and the grace after the server's start ends after ten:
from then on everything runs at its pace."""


class Process:
    """The daemon, or the script, and what the kernel says of it."""

    def __init__(self, command: list[str], *, is_daemon: bool) -> None:
        self._popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._address = ""
        if is_daemon:
            for line in self._popen.stderr or ():
                record = json.loads(line)
                if record["event"] == "started":
                    self._address = record["http"]
                    break
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for _ in self._popen.stderr or ():
            pass

    def cpu_seconds(self) -> float:
        """User and system time."""
        fields = Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Memory that is resident."""
        status = Path(f"/proc/{self._popen.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024

    def scrape(self) -> str:
        """The daemon's metrics; nothing for the script."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def stop(self) -> None:
        """End it: the daemon on request, the script by force, since it has a queue of late runs."""
        if self._address:
            self._popen.terminate()
        else:
            self._popen.kill()
        self._popen.wait(60)


@contextmanager
def daemon(url: str, queues: list[str], promote: str) -> Iterator[Process]:
    """`emqtimerd run` over these queues; `promote` is the content of its section."""
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "emqtimerd.toml"
        config.write_text(
            f"queues = {json.dumps(queues)}\n"
            f'[node]\nurl = "{url}"\n[promote]\n{promote}\n'
            '[http]\nlisten = "127.0.0.1:0"\n[log]\nformat = "json"\n'
        )
        command = [sys.executable, "-m", "emqtimerd", "run", "--config", str(config)]
        process = Process(command, is_daemon=True)
        try:
            yield process
        finally:
            process.stop()


@contextmanager
def naive(url: str, queues: int, interval: float) -> Iterator[Process]:
    """The script over q0, q1, ..."""
    command = [sys.executable, str(NAIVE), url, str(interval), "30", "q", str(queues)]
    process = Process(command, is_daemon=False)
    try:
        yield process
    finally:
        process.stop()


def names(count: int) -> list[str]:
    """The queues of a run."""
    return [f"q{number}" for number in range(count)]


# --- idle ---------------------------------------------------------------------------------------


def idle(options: argparse.Namespace) -> None:
    """Queues in which nothing ever happens."""
    with DevNode(appendonly=False) as node:
        rows = []
        with daemon(node.url, names(options.queues), 'interval = "1s"') as process:
            cost = watch(process, options.seconds)
            late = quantile(process.scrape(), "emqtimerd_round_start_lateness_seconds", 0.99)
            rows.append(("emqtimerd", *cost, f"{late * 1000:.0f} ms"))
        with naive(node.url, options.queues, 1.0) as process:
            rows.append(("the script", *watch(process, options.seconds), "-"))
    print(f"{options.queues} idle queues, promotion every 1 s, stall check every 30 s")
    show(("", "of a core", "resident", "start lateness p99 (at most)"), rows)
    ours, theirs = (float(row[1].rstrip(" %")) for row in rows)
    print(f"the script costs {theirs / ours:.1f} times as much")


def watch(process: Process, seconds: float) -> tuple[str, str]:
    """Processor time and memory over a stretch after the start."""
    time.sleep(WARM_UP_SECONDS)
    before, begun = process.cpu_seconds(), time.monotonic()
    time.sleep(seconds)
    share = (process.cpu_seconds() - before) / (time.monotonic() - begun)
    return f"{100 * share:.2f} %", f"{process.rss_mb():.0f} MB"


def quantile(text: str, name: str, share: float, verb: str = "promote") -> float:
    """The upper bound of the bucket that holds a quantile."""
    buckets = [
        (float(sample.labels["le"]), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"{name}_bucket" and sample.labels["verb"] == verb
    ]
    return next(bound for bound, count in buckets if count >= share * buckets[-1][1])


def show(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table."""
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


# --- lateness -----------------------------------------------------------------------------------


def lateness(options: argparse.Namespace) -> None:
    """Jobs scheduled ahead: how long after its due time each one is pending."""
    rows = []
    with DevNode(appendonly=False) as node:
        runs: dict[str, Callable[[], AbstractContextManager[Process]]] = {
            "emqtimerd": partial(daemon, node.url, names(options.queues), 'interval = "5s"'),
            "the script": partial(naive, node.url, options.queues, 5.0),
        }
        for name, start in runs.items():
            with start():
                time.sleep(WARM_UP_SECONDS)
                late = produce_and_watch(node.url, options)
            rows.append((name, *(f"{at(late, q):.1f} ms" for q in (0.5, 0.99, 1)), str(len(late))))
    print(f"{options.rate} jobs/s, due 5 to 20 s ahead, over {options.queues} queues, interval 5 s")
    show(("", "p50", "p99", "worst", "jobs"), rows)


def at(values: list[float], share: float) -> float:
    """A quantile of what was measured."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def produce_and_watch(url: str, options: argparse.Namespace) -> list[float]:
    """Schedule jobs and take them as soon as they are pending; their ids tell when they were due.

    The server announces each move (a keyspace event), so that watching costs no polling.
    """
    client: Any = redis.Redis.from_url(url, protocol=2)
    client.flushdb()
    client.set(wire.BRAND_KEY, wire.BRAND)
    client.config_set("notify-keyspace-events", "Ez")
    pubsub = client.pubsub()
    pubsub.subscribe("__keyevent@0__:zadd")
    jobs = int(options.rate * options.seconds)
    producer = subprocess.Popen(
        [
            sys.executable,
            __file__,
            "produce",
            url,
            str(options.queues),
            str(options.rate),
            str(jobs),
        ]
    )
    late: list[float] = []
    deadline = time.monotonic() + options.seconds + 60
    while len(late) < jobs and time.monotonic() < deadline:
        message = pubsub.get_message(timeout=1)
        if message and message["type"] == "message" and message["data"].endswith(b":pending"):
            now = time.time() * 1000
            late += [now - int(job[3:16]) for job, _ in client.zpopmin(message["data"], 1_000)]
    producer.wait()
    return late


def produce(url: str, queues: int, rate: float, jobs: int) -> None:
    """Schedule jobs at a pace, due 5 to 20 s ahead."""
    client: Any = redis.Redis.from_url(url, protocol=2)
    chance = random.Random(1)
    begun = time.monotonic()
    for number in range(jobs):
        if (wait := begun + number / rate - time.monotonic()) > 0:
            time.sleep(wait)
        queue = f"q{chance.randrange(queues)}"
        due = int(time.time() * 1000) + chance.randrange(5_000, 20_000)
        job = b"JOB%d-%d" % (due, number)
        keys = (wire.row_key(queue, job), wire.queue_key(queue, "schedule"))
        client.execute_command("EMQ.SCHEDULE", 2, *keys, job, b"p", "at", due)


# --- drain --------------------------------------------------------------------------------------


def drain(options: argparse.Namespace) -> None:
    """A deep backlog, other queues with fresh work beside it, and another client's PINGs."""
    with DevNode(appendonly=False) as node:
        client: Any = redis.Redis.from_url(node.url, protocol=2)
        bare, ours = [], []
        for _ in range(options.rounds):
            fill(client, options.jobs)
            begun = time.monotonic()
            command = wire.promote("deep", 1_000)
            while client.execute_command("EMQ.PROMOTE", *arguments(command)):
                pass
            bare.append(options.jobs / (time.monotonic() - begun))
            ours.append(drain_with_daemon(node.url, client, options))
    rate = statistics.median(run[0] for run in ours)
    base = statistics.median(bare)
    print(f"{options.jobs} due jobs in one queue, fresh work in 10 others, limit 1,000, AOF off")
    print(f"bare loop          {base:12,.0f} jobs/s")
    print(f"emqtimerd          {rate:12,.0f} jobs/s   {rate / base:.0%} of it")
    print(f"others' lateness   {statistics.median(run[1] for run in ours):9.1f} ms p99")
    print(f"longest PING       {max(run[2] for run in ours):9.1f} ms")


def arguments(command: bytes) -> list[bytes]:
    """The arguments of a packed command."""
    return command.split(b"\r\n")[4:-1:2]


def fill(client: Any, jobs: int, schedule: bytes = wire.queue_key("deep", "schedule")) -> None:
    """A deep queue of due jobs, their ids in its schedule or in a set aside."""
    client.flushdb()
    client.set(wire.BRAND_KEY, wire.BRAND)
    base = wire.base("deep")
    for start in range(0, jobs, 10_000):
        with client.pipeline(transaction=False) as pipeline:
            ids = [b"JOB%09d" % number for number in range(start, min(start + 10_000, jobs))]
            for job in ids:
                pipeline.hset(base + b"job:" + job, mapping={"state": "scheduled", "payload": "p"})
            pipeline.zadd(schedule, dict.fromkeys(ids, 1))
            pipeline.execute()


def drain_with_daemon(
    url: str, client: Any, options: argparse.Namespace
) -> tuple[float, float, float]:
    """The daemon's rate, the other queues' p99 lateness (ms), and the longest PING (ms)."""
    fill(client, 0)
    others = [f"q{number}" for number in range(10)]
    stop = threading.Event()
    pings: list[float] = []
    late: list[float] = []
    with daemon(url, ["deep", *others], 'interval = "1s"\nlimit = 1000'):
        time.sleep(WARM_UP_SECONDS)
        # Filled under another name and then renamed: it is there in one moment.
        fill(client, options.jobs, b"aside")
        threads = [
            threading.Thread(target=ping, args=(url, stop, pings)),
            threading.Thread(target=fresh_work, args=(url, others, stop, late)),
        ]
        for thread in threads:
            thread.start()
        key = wire.queue_key("deep", "schedule")
        client.rename("aside", key)
        while client.zcard(key) == options.jobs:
            time.sleep(0.001)
        begun = time.monotonic()
        while client.exists(key):
            time.sleep(0.005)
        seconds = time.monotonic() - begun
        stop.set()
        for thread in threads:
            thread.join()
    return options.jobs / seconds, at(late, 0.99), max(pings)


def ping(url: str, stop: threading.Event, waits: list[float]) -> None:
    """How long the server keeps somebody else waiting, every 10 ms."""
    client: Any = redis.Redis.from_url(url, protocol=2)
    while not stop.wait(0.01):
        begun = time.perf_counter()
        client.ping()
        waits.append((time.perf_counter() - begun) * 1000)


def fresh_work(url: str, queues: list[str], stop: threading.Event, late: list[float]) -> None:
    """One job after another, due at once; how long each takes to be pending."""
    client: Any = redis.Redis.from_url(url, protocol=2)
    number = 0
    while not stop.is_set():
        queue = queues[number % len(queues)]
        job = b"JOB%d" % number
        number += 1
        keys = (wire.row_key(queue, job), wire.queue_key(queue, "schedule"))
        client.execute_command("EMQ.SCHEDULE", 2, *keys, job, b"p", "in", 0)
        begun = time.monotonic()
        while not client.zrem(wire.queue_key(queue, "pending"), job) and not stop.is_set():
            time.sleep(0.002)
        late.append((time.monotonic() - begun) * 1000)


def main() -> None:
    """Run one of the measurements."""
    if sys.argv[1:2] == ["produce"]:
        _, _, url, queues, rate, jobs = sys.argv
        produce(url, int(queues), float(rate), int(jobs))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("idle")
    one.set_defaults(run=idle)
    one.add_argument("--queues", type=int, default=10_000)
    one.add_argument("--seconds", type=float, default=60)
    two = kinds.add_parser("lateness")
    two.set_defaults(run=lateness)
    two.add_argument("--queues", type=int, default=100)
    two.add_argument("--rate", type=float, default=1_000)
    two.add_argument("--seconds", type=float, default=30)
    three = kinds.add_parser("drain")
    three.set_defaults(run=drain)
    three.add_argument("--jobs", type=int, default=1_000_000)
    three.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
