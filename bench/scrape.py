"""What a scrape of many queues costs: this daemon's exposition, and prometheus-client's own way.

    python bench/scrape.py [--queues 10000]

Each line is a process of its own. It fills its counters, then scrapes five times the way the web
server does (pieces, sent on as they come; compressed in the last line of each format) and prints
the median of the processor time, the peak of the memory, and how late a thread that wants to run
every 5 ms, as sweeps do, got its turn while the scrapes ran (beside it: while nothing did). The
ratios are to the client's objects in the same format of the same run.
"""

import argparse
import gzip
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

SCRAPES = 5
IDLE_SECONDS = 2.0
TICK_SECONDS = 0.005

WAYS = (
    ("client objects", "text"),
    ("client objects", "openmetrics"),
    ("client objects", "openmetrics+gzip"),
    ("emqtimerd", "text"),
    ("emqtimerd", "openmetrics"),
    ("emqtimerd", "openmetrics+gzip"),
)


def ours(queues: int) -> Callable[[str], Iterable[bytes]]:
    """The ledger after a round of each verb, and its exposition."""
    from emqtimerd.ledger import Ledger
    from emqtimerd.metrics import Exposition, compressed
    from emqtimerd.sweeper import SweepResult

    ledger = Ledger()
    names = [f"queue-{number:05d}" for number in range(queues)]
    ledger.set_queues(names)
    # In phases, as the timer does: no list of ten thousand results is ever there.
    for start in range(0, queues, 500):
        part = list(enumerate(names))[start : start + 500]
        now = time.time()
        ledger.record(
            "promote",
            [
                SweepResult(name, "promote", passes=1, promoted=n, finished_at=now)
                for n, name in part
            ],
            0.01,
        )
        ledger.record(
            "stalled_check",
            [
                SweepResult(name, "stalled_check", passes=1, jobs=(n, 1, 2, 3), finished_at=now)
                for n, name in part
            ],
            0.01,
        )
    exposition = Exposition(ledger)

    def scrape(form: str) -> Iterable[bytes]:
        pieces = exposition.text(openmetrics=form.startswith("openmetrics"))
        return compressed(pieces) if form.endswith("gzip") else pieces

    return scrape


def client(queues: int) -> Callable[[str], Iterable[bytes]]:
    """The same families as the client library's own objects, a child for each series."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
    from prometheus_client.exposition import generate_latest as text
    from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

    from emqtimerd.metrics import QUEUE_FAMILIES

    # Else each counter has a second series, which we have not.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    for family in QUEUE_FAMILIES:
        sets = [
            dict(pair.replace('"', "").split("=") for pair in labels.split(",") if pair)
            for labels in family.series
        ]
        kind = Counter if family.kind == "counter" else Gauge
        metric = kind(family.name, family.help, ["queue", *sets[0]], registry=registry)
        for number in range(queues):
            for labels in sets:
                metric.labels(queue=f"queue-{number:05d}", **labels).inc(number)
    overdue = Gauge("emqtimerd_queue_overdue_seconds", "Overdue.", ["queue"], registry=registry)
    for number in range(queues):
        overdue.labels(queue=f"queue-{number:05d}").set(0)

    def scrape(form: str) -> Iterator[bytes]:
        render: Callable[[CollectorRegistry], bytes]
        render = openmetrics if form.startswith("openmetrics") else text
        data = render(registry)
        yield gzip.compress(data) if form.endswith("gzip") else data

    return scrape


class Ticker:
    """A thread that wants its turn every 5 ms, and notes how late it got it."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Ticker":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.is_set():
            wanted = time.monotonic() + TICK_SECONDS
            time.sleep(TICK_SECONDS)
            self.late.append(time.monotonic() - wanted)


def p99_ms(seconds: list[float]) -> float:
    """The 99th percentile in milliseconds."""
    return sorted(seconds)[int(len(seconds) * 0.99)] * 1000


def measure(way: str, form: str, queues: int) -> dict[str, float]:
    """Run in this process; the caller starts a fresh one for each way."""
    scrape = (ours if way == "emqtimerd" else client)(queues)
    costs, size = [], 0
    with Ticker() as idle:
        time.sleep(IDLE_SECONDS)
    with Path("/dev/null").open("wb", buffering=0) as away, Ticker() as ticker:
        for _ in range(SCRAPES):
            start = time.thread_time()
            # A write, as to a socket, lets other threads run.
            size = sum(away.write(piece) for piece in scrape(form))
            costs.append(time.thread_time() - start)
    return {
        "cpu_seconds": statistics.median(costs),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "late_ms": p99_ms(ticker.late),
        "idle_ms": p99_ms(idle.late),
        "size_mb": size / 1e6,
    }


def main() -> None:
    """Measure each way in a process of its own, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--queues", type=int, default=10_000)
    parser.add_argument("--way", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        way, form = arguments.way
        print(json.dumps(measure(way, form, arguments.queues)))
        return
    print(f"{arguments.queues:,} queues, median of {SCRAPES} scrapes")
    print(
        f"{'':34}{'CPU s':>8}{'ratio':>8}{'peak MB':>9}{'ratio':>8}{'late p99':>10}"
        f"{'idle p99':>10}{'size MB':>9}"
    )
    base: dict[str, dict[str, float]] = {}
    for way, form in WAYS:
        command = [sys.executable, __file__, "--queues", str(arguments.queues), "--way", way, form]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        figures: dict[str, float] = json.loads(output)
        against = base.setdefault(form, figures)
        print(
            f"{way:16}{form:18}"
            f"{figures['cpu_seconds']:8.2f}{figures['cpu_seconds'] / against['cpu_seconds']:8.2f}"
            f"{figures['peak_mb']:9.0f}{figures['peak_mb'] / against['peak_mb']:8.2f}"
            f"{figures['late_ms']:7.1f} ms{figures['idle_ms']:7.1f} ms{figures['size_mb']:9.1f}"
        )


if __name__ == "__main__":
    main()
