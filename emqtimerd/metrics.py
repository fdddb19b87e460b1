"""The ledger as Prometheus metrics: classic text and OpenMetrics.

What exists once for each queue is written here, line by line, straight from the ledger: at ten
thousand queues that is a quarter of a million samples, for which the client library's objects
would need seconds of processor time and hundreds of megabytes. The few others go through it.
"""

import hashlib
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest as classic_text
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_text
from prometheus_client.registry import Collector

from emqtimerd import __version__, wire
from emqtimerd.ledger import Distribution, Ledger, Overview, QueueFacts
from emqtimerd.sweeper import VERBS, Verb

CLASSIC_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

LINES_AT_ONCE = 500
PIECE_BYTES = 32_768
"""The text is made and sent in pieces of about this size, some 0.2 ms of work each."""

PAUSE_SECONDS = 0.0001
"""After each piece the scrape steps back for a moment: else another thread, a sweep for one, waits
the interpreter's 5 ms for its turn. It makes a scrape of ten thousand queues 0.1 s longer."""

COMPRESSION = 1
"""The fastest level: these texts shrink to a twentieth with it, and to little less with more."""

LABEL_BYTES = wire.MAX_QUEUE_NAME_BYTES
LABEL_KEPT_BYTES = 200
"""A longer value keeps this much, and a hash of the whole tells it from its like."""


def label_value(text: str) -> str:
    """Make a label value of any text: valid UTF-8, bounded, and different texts stay different.

    What is longer than 255 bytes, or no valid Unicode (one such value would make every scrape
    fail), is cut to 200 bytes and marked with a hash of the whole.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError:
        data = text.encode(errors="surrogatepass")
    else:
        if len(data) <= LABEL_BYTES:
            return text
    kept = data[:LABEL_KEPT_BYTES].decode(errors="ignore")
    return f"{kept}~{hashlib.sha256(data).hexdigest()[:16]}"


def _escaped(text: str) -> str:
    """A label value as both formats write it between its quotes."""
    value = label_value(text)
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


# --- what exists once for each queue ------------------------------------------------------------

Value: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with the queue as its first label."""

    name: str
    """As the samples have it: a counter's ends in `_total`."""
    kind: Literal["counter", "gauge"]
    help: str
    series: Mapping[str, Callable[[QueueFacts], Value]]
    """For each set of further labels, as text, where its value is read."""

    def head(self, openmetrics: bool) -> bytes:
        """The lines before the samples; OpenMetrics names a counter without its suffix."""
        name = self.name.removesuffix("_total") if openmetrics else self.name
        head = f"# HELP {name} {self.help}\n# TYPE {name} {self.kind}\n"
        if openmetrics and name.endswith("_seconds"):
            head += f"# UNIT {name} seconds\n"
        return head.encode()


def _item(path: str, index: int) -> Callable[[QueueFacts], Value]:
    read = attrgetter(path)
    return lambda facts: read(facts)[index]


def _is_blocked(verb: Verb) -> Callable[[QueueFacts], Value]:
    read = attrgetter(f"{verb}.blocked")
    return lambda facts: 0 if read(facts) is None else 1


QUEUE_FAMILIES = (
    Family(
        "emqtimerd_jobs_promoted_total",
        "counter",
        "Jobs moved from schedule to pending by this daemon.",
        {"": attrgetter("promoted")},
    ),
    Family(
        "emqtimerd_jobs_recovered_total",
        "counter",
        "Jobs with an expired lease moved back to pending by this daemon.",
        {"": attrgetter("recovered")},
    ),
    Family(
        "emqtimerd_jobs_dead_lettered_total",
        "counter",
        "Jobs with an expired lease moved to dead by this daemon, since they stalled too often.",
        {"": attrgetter("dead_lettered")},
    ),
    Family(
        "emqtimerd_lease_expiries_total",
        "counter",
        "Expired leases taken from their holders, by cause: stall (the worker's), restart (it "
        "crossed a server restart), unstamped (leased by a script), unattributed (not known).",
        {f'cause="{cause}"': attrgetter(cause) for cause in wire.CAUSES},
    ),
    Family(
        "emqtimerd_sweeps_total",
        "counter",
        "Sweeps by outcome: ok counts commands answered, error rounds that failed or were "
        "refused, unknown commands without an answer. What was not sent counts nowhere.",
        {
            f'verb="{verb}",outcome="{outcome}"': attrgetter(f"{verb}.{outcome}")
            for verb in VERBS
            for outcome in ("ok", "error", "unknown")
        },
    ),
    Family(
        "emqtimerd_queue_jobs",
        "gauge",
        "Jobs in each set of the queue at its last stall check; 0 until the first.",
        {
            f'state="{state}"': _item("jobs", index)
            for index, state in enumerate(("pending", "active", "scheduled", "dead"))
        },
    ),
    Family(
        "emqtimerd_queue_blocked",
        "gauge",
        "1 while a row makes the sweep of the queue refuse; the status page and the log name it.",
        {f'verb="{verb}"': _is_blocked(verb) for verb in VERBS},
    ),
    Family(
        "emqtimerd_active_leases",
        "gauge",
        f"Leases by the server process that they were taken under, among the first "
        f"{wire.LEASES_COUNTED} of the queue at its last stall check; 0 until the first.",
        {
            f'epoch="{epoch}"': _item("leases", index)
            for index, epoch in enumerate(("current", "previous", "unstamped"))
        },
    ),
    Family(
        "emqtimerd_last_sweep_timestamp_seconds",
        "gauge",
        "When the queue was last swept with success, as a Unix time in seconds; 0 until the "
        "first, so that a queue that never was looks as old as it is.",
        {f'verb="{verb}"': attrgetter(f"{verb}.last_sweep") for verb in VERBS},
    ),
)


def _overdue(now: float) -> Family:
    return Family(
        "emqtimerd_queue_overdue_seconds",
        "gauge",
        "How long the oldest job of the schedule has been due, as far as the last sweep could "
        "see, in seconds; 0 if none is.",
        {"": lambda facts: round(facts.overdue_seconds(now), 3)},
    )


ERRORS = Family(
    "emqtimerd_sweep_errors_total",
    "counter",
    "Errors of sweeps by code: the first word of the reply, timeout, connection, shape, or "
    "other; a series appears with its first error.",
    {},
)

GUARD = Family(
    "emqtimerd_mass_expiry_guard",
    "gauge",
    "1 if the last stall check of the queue was softened as a mass expiry; only for queues with "
    "stalled_check.mass_expiry.",
    {},
)


def queue_lines(ledger: Ledger, openmetrics: bool) -> Iterator[bytes]:
    """The text of everything that exists once for each queue, in pieces."""
    families = (*QUEUE_FAMILIES, _overdue(ledger.overview().now))
    names, guarded, *columns = ledger.columns(
        [
            attrgetter("name"),
            attrgetter("guarded"),
            *(attrgetter(f"{verb}.errors") for verb in VERBS),
            *(read for family in families for read in family.series.values()),
        ]
    )
    labels = [_escaped(name) for name in names]
    errors, values = columns[: len(VERBS)], iter(columns[len(VERBS) :])
    for family in families:
        yield family.head(openmetrics)
        for others in family.series:
            yield from _lines(family.name, others, labels, next(values))
    yield ERRORS.head(openmetrics)
    for verb, column in zip(VERBS, errors, strict=True):
        yield from _error_lines(verb, labels, column)
    if looked_at := [
        (label, int(raised))
        for label, raised in zip(labels, guarded, strict=True)
        if raised is not None
    ]:
        yield GUARD.head(openmetrics)
        yield from _lines(GUARD.name, "", *zip(*looked_at, strict=True))


def _lines(
    name: str, others: str, labels: Sequence[str], values: Sequence[Value]
) -> Iterator[bytes]:
    before = f'{name}{{queue="'
    after = f'",{others}}} ' if others else '"} '
    for start in range(0, len(labels), LINES_AT_ONCE):
        end = start + LINES_AT_ONCE
        pairs = zip(labels[start:end], values[start:end], strict=True)
        yield "".join([f"{before}{label}{after}{value}\n" for label, value in pairs]).encode()


def _error_lines(
    verb: Verb, labels: Sequence[str], errors: Sequence[Mapping[str, int]]
) -> Iterator[bytes]:
    for start in range(0, len(labels), LINES_AT_ONCE):
        end = start + LINES_AT_ONCE
        lines = [
            f'{ERRORS.name}{{queue="{label}",verb="{verb}",code="{code}"}} {count}\n'
            for label, counts in zip(labels[start:end], errors[start:end], strict=True)
            for code, count in counts.items()
        ]
        if lines:
            yield "".join(lines).encode()


# --- the few others -----------------------------------------------------------------------------


class LedgerCollector(Collector):
    """What the ledger knows beside the queues, for the client library's registry."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterable[Metric]:
        """Read the ledger; nothing asks the server."""
        overview = self._ledger.overview()
        yield from _node_metrics(overview)
        yield _by_round(
            "emqtimerd_round_duration_seconds",
            "How long a round took, all its queues and passes, in seconds.",
            overview.rounds,
        )
        yield _by_round(
            "emqtimerd_round_start_lateness_seconds",
            "How long after its turn a round began, in seconds.",
            overview.starts,
        )
        skipped = CounterMetricFamily(
            "emqtimerd_rounds_skipped",
            "Rounds that were left out, since the one before was still going.",
            labels=["verb"],
        )
        for verb, count in overview.skipped.items():
            skipped.add_metric([verb], count)
        yield skipped
        yield _lateness(
            "emqtimerd_promotion_lateness_seconds",
            "How long past its due time the oldest job of a sweep was when it moved, in seconds.",
            overview.lateness["promote"],
        )
        yield _lateness(
            "emqtimerd_recovery_lateness_seconds",
            "How long past its deadline the oldest lease of a sweep was when it was taken, in "
            "seconds.",
            overview.lateness["stalled_check"],
        )
        yield GaugeMetricFamily(
            "emqtimerd_queues", "Queues that this daemon sweeps.", overview.queues
        )
        index, count = overview.shard
        yield InfoMetricFamily(
            "emqtimerd_shard",
            "Which part of the queues this daemon has, from 0 on, and of how many.",
            value={"index": str(index), "count": str(count)},
        )
        yield GaugeMetricFamily(
            "emqtimerd_shard_count", "Parts that the queues are shared out to.", count
        )
        yield GaugeMetricFamily(
            "emqtimerd_config_last_reload_successful",
            "1 if the last reload of the configuration took effect, or there was none; else 0.",
            int(overview.reload_problem is None),
        )
        yield InfoMetricFamily(
            "emqtimerd_build", "The version of this daemon.", value={"version": __version__}
        )


def _node_metrics(overview: Overview) -> Iterable[Metric]:
    up = GaugeMetricFamily(
        "emqtimerd_node_up",
        "1 while the node is reached and its fence passed; else 0.",
        labels=["node"],
    )
    restarts = CounterMetricFamily(
        "emqtimerd_node_restarts",
        "How often another server process answered for the node: restarts and failovers.",
        labels=["node"],
    )
    info = InfoMetricFamily(
        "emqtimerd_node",
        "The server process that the latest fence found; absent until the first.",
        labels=["node"],
    )
    for node in overview.nodes:
        name = label_value(node.name)
        up.add_metric([name], int(node.up))
        restarts.add_metric([name], node.restarts)
        if node.identity is not None:
            known = {
                "run_id": label_value(node.identity.run_id),
                "version": label_value(node.identity.version),
                "brand": label_value(node.identity.brand),
            }
            info.add_metric([name], known)
    return up, restarts, info


def _by_round(name: str, documentation: str, distributions: Mapping[Verb, Distribution]) -> Metric:
    family = HistogramMetricFamily(name, documentation, labels=["verb"])
    for verb, distribution in distributions.items():
        family.add_metric([verb], *_histogram(distribution))
    return family


def _lateness(name: str, documentation: str, distribution: Distribution) -> Metric:
    buckets, total = _histogram(distribution)
    return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=total)


def _histogram(distribution: Distribution) -> tuple[list[tuple[str, float]], float]:
    bounds = [*(repr(bound) for bound in distribution.bounds), "+Inf"]
    counts = (float(count) for count in distribution.cumulative)
    return list(zip(bounds, counts, strict=True)), distribution.sum_seconds


# --- a scrape -----------------------------------------------------------------------------------


class Exposition:
    """All metrics of one daemon as text, over a registry of its own: two can share a process."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._registry = CollectorRegistry()
        self._registry.register(LedgerCollector(ledger))
        ProcessCollector(registry=self._registry)

    def text(self, *, openmetrics: bool) -> Iterator[bytes]:
        """The metrics in one of the two formats, piece by piece."""
        held: list[bytes] = []
        size = 0
        for piece in self._parts(openmetrics):
            held.append(piece)
            size += len(piece)
            if size >= PIECE_BYTES:
                yield b"".join(held)
                time.sleep(PAUSE_SECONDS)
                held.clear()
                size = 0
        yield b"".join(held)

    def _parts(self, openmetrics: bool) -> Iterator[bytes]:
        yield from queue_lines(self._ledger, openmetrics)
        # Last, because in OpenMetrics the client library ends the text with its end mark.
        encode: Callable[[CollectorRegistry], bytes]
        encode = openmetrics_text if openmetrics else classic_text
        yield encode(self._registry)


def compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces as one gzip stream, sent on as it grows."""
    # 16 more than the window's bits asks zlib for gzip's own header and checksum.
    compressor = zlib.compressobj(COMPRESSION, zlib.DEFLATED, zlib.MAX_WBITS + 16)
    for piece in pieces:
        if data := compressor.compress(piece):
            yield data
    yield compressor.flush()


def wants_openmetrics(accept: str) -> bool:
    """Tell from an Accept header whether the client likes OpenMetrics 1.0 at least as much as text.

    Versions that we do not speak, and other formats, leave the classic text.
    """
    likes = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for kind, parameters in _media_ranges(accept):
        if kind in likes and parameters.get("version") in (None, "1.0.0", "0.0.4"):
            likes[kind] = max(likes[kind], _quality(parameters))
    best = likes["application/openmetrics-text"]
    return 0 < best >= likes["text/plain"]


def wants_gzip(accept_encoding: str) -> bool:
    """Tell from an Accept-Encoding header whether the client reads gzip."""
    found = {kind: _quality(parameters) for kind, parameters in _media_ranges(accept_encoding)}
    return found.get("gzip", found.get("*", 0.0)) > 0


def _media_ranges(header: str) -> Iterator[tuple[str, dict[str, str]]]:
    for part in header.split(","):
        kind, *rest = (piece.strip().lower() for piece in part.split(";"))
        pairs = (piece.partition("=") for piece in rest)
        yield kind, {name.strip(): value.strip(' "') for name, _, value in pairs}


def _quality(parameters: Mapping[str, str]) -> float:
    """How much a client likes what it names; what is no number is not liked at all."""
    text = parameters.get("q", "1")
    return float(text) if re.fullmatch(r"[01](\.[0-9]{0,3})?", text) else 0.0
