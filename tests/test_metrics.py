"""The metrics: both formats parse, agree, and say what the ledger says."""

import gzip
import math
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from emqtimerd import __version__
from emqtimerd.ledger import Ledger
from emqtimerd.metrics import (
    LABEL_BYTES,
    PIECE_BYTES,
    Exposition,
    compressed,
    label_value,
    wants_gzip,
    wants_openmetrics,
)
from emqtimerd.node import Identity
from emqtimerd.sweeper import Blocked, Expiry, Failure, SweepResult

NODE = "127.0.0.1:6379"

# Label sets of one queue, as the interface page lists them: name, type, further labels.
VERBS = ("promote", "stalled_check")
PER_QUEUE: dict[str, tuple[str, list[dict[str, str]]]] = {
    "emqtimerd_jobs_promoted_total": ("counter", [{}]),
    "emqtimerd_jobs_recovered_total": ("counter", [{}]),
    "emqtimerd_jobs_dead_lettered_total": ("counter", [{}]),
    "emqtimerd_lease_expiries_total": (
        "counter",
        [{"cause": cause} for cause in ("stall", "restart", "unstamped", "unattributed")],
    ),
    "emqtimerd_sweeps_total": (
        "counter",
        [{"verb": verb, "outcome": out} for verb in VERBS for out in ("ok", "error", "unknown")],
    ),
    "emqtimerd_queue_jobs": (
        "gauge",
        [{"state": state} for state in ("pending", "active", "scheduled", "dead")],
    ),
    "emqtimerd_queue_overdue_seconds": ("gauge", [{}]),
    "emqtimerd_queue_blocked": ("gauge", [{"verb": verb} for verb in VERBS]),
    "emqtimerd_active_leases": (
        "gauge",
        [{"epoch": epoch} for epoch in ("current", "previous", "unstamped")],
    ),
    "emqtimerd_last_sweep_timestamp_seconds": ("gauge", [{"verb": verb} for verb in VERBS]),
}
OTHERS = {
    "emqtimerd_sweep_errors_total": "counter",
    "emqtimerd_node_restarts_total": "counter",
    "emqtimerd_round_duration_seconds": "histogram",
    "emqtimerd_round_start_lateness_seconds": "histogram",
    "emqtimerd_rounds_skipped_total": "counter",
    "emqtimerd_promotion_lateness_seconds": "histogram",
    "emqtimerd_recovery_lateness_seconds": "histogram",
    "emqtimerd_node_up": "gauge",
    "emqtimerd_node_info": "info",
    "emqtimerd_queues": "gauge",
    "emqtimerd_config_last_reload_successful": "gauge",
    "emqtimerd_shard_info": "info",
    "emqtimerd_shard_count": "gauge",
    "emqtimerd_build_info": "info",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def text(ledger: Ledger, *, openmetrics: bool) -> str:
    return b"".join(Exposition(ledger).text(openmetrics=openmetrics)).decode()


def families(exposition: str, *, openmetrics: bool) -> list[Metric]:
    parse = parse_openmetrics if openmetrics else parse_classic
    return list(parse(exposition))


def samples(exposition: str, *, openmetrics: bool) -> Samples:
    """Every sample by name and labels; each of them may be there once only."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), float(sample.value))
        for family in families(exposition, openmetrics=openmetrics)
        for sample in family.samples
    ]
    twice = [key for key, count in Counter(key for key, _ in found).items() if count > 1]
    assert twice == []
    return dict(found)


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture
def ledger() -> Ledger:
    """A ledger as it is right after the start: two queues, nothing swept, no node reached."""
    ledger = Ledger(monotonic=lambda: 1_000.0, wall=lambda: 1_700_000_000.0)
    ledger.set_nodes([NODE])
    ledger.set_queues(["orders", "emails"])
    return ledger


@pytest.fixture
def busy(ledger: Ledger) -> Ledger:
    """A ledger to which everything has happened."""
    ledger.node_seen(NODE, Identity("a" * 40, "9.1.2", "echomq:6.0.0", (), 0.0))
    ledger.node_seen(NODE, Identity("b" * 40, "9.1.3", "echomq:6.0.0", (), 0.0))
    promotion = SweepResult(
        "orders", "promote", passes=3, promoted=250, lateness_ms=[3.0, 700.0], finished_at=12.5
    )
    check = SweepResult(
        "orders",
        "stalled_check",
        passes=1,
        recovered=[b"1", b"2"],
        dead=[b"3"],
        expiries=[Expiry(b"1", "restart"), Expiry(b"2", "unstamped"), Expiry(b"3", "stall")],
        lateness_ms=[40.0],
        finished_at=13.5,
        jobs=(4, 3, 2, 1),
        leases=(1, 2, 0),
    )
    lost = SweepResult("emails", "promote", unknown=1, failure=Failure("timeout", "no reply"))
    blocked = SweepResult("emails", "stalled_check", blocked=Blocked(b"JOB1", "EMQSTATE no"))
    ledger.record("promote", [promotion, lost], 0.25)
    ledger.record("stalled_check", [check, blocked], 0.5)
    ledger.round_late("promote", 0.5)
    ledger.round_skipped("promote")
    ledger.round_skipped("promote")
    ledger.guard("orders", True)
    ledger.reloaded("no such file")
    ledger.set_shard(2, 3)
    return ledger


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_series_of_a_queue_is_there_at_zero_from_the_start(
    ledger: Ledger, openmetrics: bool
) -> None:
    """Before any sweep a query over each counter finds it: the first error is an increase."""
    found = samples(text(ledger, openmetrics=openmetrics), openmetrics=openmetrics)
    for queue in ("orders", "emails"):
        for name, (_, others) in PER_QUEUE.items():
            for labels in others:
                assert value(found, name, queue=queue, **labels) == 0, name
    of_orders = [labels for _, labels in found if ("queue", "orders") in labels]
    assert len(of_orders) == sum(len(others) for _, others in PER_QUEUE.values()) == 25


@pytest.mark.parametrize("openmetrics", [False, True])
def test_names_and_types_are_those_of_the_interface(busy: Ledger, openmetrics: bool) -> None:
    """No more, no less; `process_*` and the optional guard aside. Each has its help."""
    found = families(text(busy, openmetrics=openmetrics), openmetrics=openmetrics)
    types = {}
    for family in found:
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        types[family.name.removesuffix(suffix) + suffix] = family.type
        assert family.documentation, family.name
        if "_seconds" in family.name and "process" not in family.name:
            assert "seconds" in family.documentation, "the unit is said"
    ours = {name: kind for name, kind in types.items() if name.startswith("emqtimerd_")}
    expected = {name: kind for name, (kind, _) in PER_QUEUE.items()} | OTHERS
    expected["emqtimerd_mass_expiry_guard"] = "gauge"
    if not openmetrics:  # which has no type for constant labels
        expected |= {name: "gauge" for name, kind in expected.items() if kind == "info"}
    assert ours == expected
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= set(types)


def test_both_formats_say_the_same(busy: Ledger) -> None:
    """Sample for sample; the process's own numbers move between two scrapes."""
    classic = samples(text(busy, openmetrics=False), openmetrics=False)
    open_metrics = samples(text(busy, openmetrics=True), openmetrics=True)

    def ours(found: Samples) -> Samples:
        return {key: number for key, number in found.items() if not key[0].startswith("process_")}

    assert ours(classic) == ours(open_metrics)


def test_openmetrics_ends_with_its_mark_and_names_no_creation_times(busy: Ledger) -> None:
    """One end, at the end; `_created` series would double the counters for nothing."""
    exposition = text(busy, openmetrics=True)
    assert exposition.endswith("# EOF\n")
    assert exposition.count("# EOF") == 1
    assert "_created" not in exposition
    assert "# EOF" not in text(busy, openmetrics=False)
    assert "# TYPE emqtimerd_jobs_promoted counter\n" in exposition
    assert "# UNIT emqtimerd_queue_overdue_seconds seconds\n" in exposition


def test_what_happened_is_what_is_shown(busy: Ledger) -> None:
    """A value of each kind, by its labels."""
    found = samples(text(busy, openmetrics=True), openmetrics=True)
    orders, emails = {"queue": "orders"}, {"queue": "emails"}
    for expected, name, labels in (
        (250, "emqtimerd_jobs_promoted_total", orders),
        (2, "emqtimerd_jobs_recovered_total", orders),
        (1, "emqtimerd_jobs_dead_lettered_total", orders),
        (1, "emqtimerd_lease_expiries_total", orders | {"cause": "restart"}),
        (1, "emqtimerd_lease_expiries_total", orders | {"cause": "unstamped"}),
        (0, "emqtimerd_lease_expiries_total", orders | {"cause": "unattributed"}),
        (3, "emqtimerd_sweeps_total", orders | {"verb": "promote", "outcome": "ok"}),
        (1, "emqtimerd_sweeps_total", emails | {"verb": "promote", "outcome": "unknown"}),
        (0, "emqtimerd_sweeps_total", emails | {"verb": "promote", "outcome": "error"}),
        (1, "emqtimerd_sweeps_total", emails | {"verb": "stalled_check", "outcome": "error"}),
        (1, "emqtimerd_sweep_errors_total", emails | {"verb": "promote", "code": "timeout"}),
        (
            1,
            "emqtimerd_sweep_errors_total",
            emails | {"verb": "stalled_check", "code": "EMQSTATE"},
        ),
        (2, "emqtimerd_queue_jobs", orders | {"state": "scheduled"}),
        (1, "emqtimerd_queue_jobs", orders | {"state": "dead"}),
        (2, "emqtimerd_active_leases", orders | {"epoch": "previous"}),
        (1, "emqtimerd_queue_blocked", emails | {"verb": "stalled_check"}),
        (0, "emqtimerd_queue_blocked", emails | {"verb": "promote"}),
        (12.5, "emqtimerd_last_sweep_timestamp_seconds", orders | {"verb": "promote"}),
        (1, "emqtimerd_mass_expiry_guard", orders),
        (1, "emqtimerd_node_up", {"node": NODE}),
        (1, "emqtimerd_node_restarts_total", {"node": NODE}),
        (
            1,
            "emqtimerd_node_info",
            {"node": NODE, "run_id": "b" * 40, "version": "9.1.3", "brand": "echomq:6.0.0"},
        ),
        (2, "emqtimerd_queues", {}),
        (0, "emqtimerd_config_last_reload_successful", {}),
        (1, "emqtimerd_shard_info", {"index": "2", "count": "3"}),
        (3, "emqtimerd_shard_count", {}),
        (1, "emqtimerd_build_info", {"version": __version__}),
        (0, "emqtimerd_promotion_lateness_seconds_bucket", {"le": "0.0025"}),
        (1, "emqtimerd_promotion_lateness_seconds_bucket", {"le": "0.005"}),
        (2, "emqtimerd_promotion_lateness_seconds_bucket", {"le": "+Inf"}),
        (2, "emqtimerd_promotion_lateness_seconds_count", {}),
        (1, "emqtimerd_recovery_lateness_seconds_count", {}),
        (1, "emqtimerd_round_duration_seconds_count", {"verb": "stalled_check"}),
        (0.5, "emqtimerd_round_duration_seconds_sum", {"verb": "stalled_check"}),
        (1, "emqtimerd_round_start_lateness_seconds_count", {"verb": "promote"}),
        (0.5, "emqtimerd_round_start_lateness_seconds_sum", {"verb": "promote"}),
        (2, "emqtimerd_rounds_skipped_total", {"verb": "promote"}),
        (0, "emqtimerd_rounds_skipped_total", {"verb": "stalled_check"}),
    ):
        assert value(found, name, **labels) == expected, (name, labels)
    assert value(found, "emqtimerd_promotion_lateness_seconds_sum") == pytest.approx(0.703)
    assert not any(("queue", "emails") in labels for name, labels in found if "guard" in name)


def test_a_node_that_was_never_reached_is_down_and_has_no_info(ledger: Ledger) -> None:
    """The alert on `node_up == 0` works from the first scrape."""
    found = samples(text(ledger, openmetrics=False), openmetrics=False)
    assert value(found, "emqtimerd_node_up", node=NODE) == 0
    assert value(found, "emqtimerd_node_restarts_total", node=NODE) == 0
    assert not any(name == "emqtimerd_node_info" for name, _ in found)


def test_a_removed_queue_takes_its_series_with_it(busy: Ledger) -> None:
    """And a sweep that ends late does not bring one back."""
    busy.set_queues(["orders"])
    late = SweepResult("emails", "promote", failure=Failure("timeout", "no reply"))
    busy.record("promote", [late], 0.1)
    assert "emails" not in text(busy, openmetrics=False)


def test_two_daemons_in_one_process_do_not_know_of_each_other(busy: Ledger) -> None:
    """Nothing is registered twice, or in a registry that others use."""
    other = Ledger()
    other.set_queues(["mine"])
    first, second = text(busy, openmetrics=False), text(other, openmetrics=False)
    assert "mine" not in first
    assert "orders" not in second
    assert text(busy, openmetrics=False).count("\nemqtimerd_queues ") == 1


def test_counters_go_on_across_reloads(busy: Ledger) -> None:
    """Fifty times the same configuration, and one of another exposition."""
    for _ in range(50):
        busy.set_queues(["orders", "emails"])
        busy.reloaded()
    found = samples(text(busy, openmetrics=False), openmetrics=False)
    assert value(found, "emqtimerd_jobs_promoted_total", queue="orders") == 250
    assert value(found, "emqtimerd_config_last_reload_successful") == 1


# --- names that are trouble ---------------------------------------------------------------------

ODD_NAMES = [
    'a"b',
    "a\\b",
    "a\\nb",
    "a\nb",
    "a\rb",
    "a\tb",
    "a\0b",
    "a\u2028b",
    "a\u2029b",
    "a\x85b",
    "\u202egnp.exe",
    "日本語",
    "🦊",
    "caf\udce9",
    "caf\udcea",
    "x" * 255,
    "x" * 256,
    "x" * 10_000,
    "x" * 10_001,
    "é" * 200,
    "{}",
    "le",
    '",le="1"} 1\nemqtimerd_queues 7\n# ',
    " ",
    "# EOF",
]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_any_name_parses_and_stays_one_series(openmetrics: bool) -> None:
    """The scrape of a thousand queues does not fail for one of them."""
    ledger = Ledger()
    ledger.set_queues(ODD_NAMES)
    for name in ODD_NAMES:
        lost = SweepResult(name, "promote", unknown=1, failure=Failure("timeout", "no reply"))
        ledger.record("promote", [lost], 0.1)
    found = samples(text(ledger, openmetrics=openmetrics), openmetrics=openmetrics)
    seen = [
        dict(labels)["queue"] for name, labels in found if name == "emqtimerd_queue_overdue_seconds"
    ]
    assert sorted(seen) == sorted(label_value(name) for name in ODD_NAMES)
    assert len(set(seen)) == len(ODD_NAMES)
    for name in ODD_NAMES:
        labels = {"queue": label_value(name), "verb": "promote"}
        assert value(found, "emqtimerd_sweep_errors_total", code="timeout", **labels) == 1
    assert value(found, "emqtimerd_queues") == len(ODD_NAMES)


def test_any_node_and_any_answer_of_a_server_parse() -> None:
    """What a server says about itself is shown, and nothing else."""
    ledger = Ledger()
    node = "caf\udce9\n" + "h" * 1_000
    ledger.set_nodes([node])
    ledger.node_seen(node, Identity('"}\n', "9" * 10_000, "\udc80", (), 0.0))
    for openmetrics in (False, True):
        found = samples(text(ledger, openmetrics=openmetrics), openmetrics=openmetrics)
        assert value(found, "emqtimerd_node_up", node=label_value(node)) == 1


def test_ordinary_names_are_their_own_labels_and_long_ones_are_cut() -> None:
    """Up to the longest name that a queue may have, nothing is changed."""
    for name in ("orders", "日本語", "a\u2028b", "x" * LABEL_BYTES):
        assert label_value(name) == name
    for name in ("x" * 256, "é" * 128, "caf\udce9", "\ud800" * 300):
        label = label_value(name)
        assert len(label.encode()) <= LABEL_BYTES
        assert label != name
    assert label_value("x" * 256) == label_value("x" * 256) != label_value("x" * 257)


# --- what a client asks for ---------------------------------------------------------------------

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text; version=1.0.0", True),
        ("Application/OpenMetrics-Text", True),
        ('application/openmetrics-text; version="1.0.0"', True),
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain", False),
        ("text/plain;version=0.0.4;q=0.9,application/openmetrics-text;q=0.3", False),
        ("application/openmetrics-text;version=0.0.1", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nan", False),
        ("application/openmetrics-text;q=", False),
        (";;,,=;q", False),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily", False),
    ],
)
def test_the_format_is_negotiated(accept: str, openmetrics: bool) -> None:
    """OpenMetrics for those who ask for its version 1.0, text for everybody else."""
    assert wants_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("accepted", "gzipped"),
    [
        ("gzip", True),
        ("deflate, gzip;q=1.0, *;q=0.5", True),
        ("*", True),
        ("GZIP", True),
        ("", False),
        ("identity", False),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("br", False),
        ("x-gzipped", False),
    ],
)
def test_gzip_is_negotiated(accepted: str, gzipped: bool) -> None:
    """Only for those who say that they read it."""
    assert wants_gzip(accepted) is gzipped


def test_the_compressed_stream_is_the_text() -> None:
    """Piece by piece in, one gzip file out."""
    pieces = [b"a" * 100_000, b"", b"b\n" * 50_000, b"end"]
    assert gzip.decompress(b"".join(compressed(pieces))) == b"".join(pieces)


def test_a_scrape_is_made_in_small_pieces() -> None:
    """Neither memory nor the other threads' turn depends on how many queues there are."""
    ledger = Ledger()
    ledger.set_queues(f"queue-{number:05d}" for number in range(3_000))
    pieces = [len(piece) for piece in Exposition(ledger).text(openmetrics=False)]
    assert sum(pieces) > 4_000_000
    # A piece is sent once it is large enough: its last part may double it, and a bit.
    assert max(pieces) < 3 * PIECE_BYTES


def test_scrapes_while_rounds_and_reloads_go_on_always_parse() -> None:
    """Queues come and go between the families of one scrape; it shows those of its start."""
    ledger = Ledger()
    done = threading.Event()

    def churn() -> None:
        number = 0
        while not done.is_set():
            names = [f"q{i}" for i in range(number % 50, number % 50 + 300)]
            ledger.set_queues(names)
            ledger.record("promote", [SweepResult(name, "promote", passes=1) for name in names], 1)
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        exposition = Exposition(ledger)
        texts = [b"".join(exposition.text(openmetrics=True)).decode() for _ in range(5)]
    finally:
        done.set()
        thread.join()
    for each in texts:
        found = samples(each, openmetrics=True)
        sizes = Counter(name for name, labels in found if "queue" in dict(labels))
        assert sizes["emqtimerd_queue_blocked"] == 2 * sizes["emqtimerd_jobs_promoted_total"]
        assert all(math.isfinite(number) for number in found.values())


def parsed(pieces: Iterator[bytes]) -> Samples:
    return samples(b"".join(pieces).decode(), openmetrics=True)


def test_reading_the_metrics_asks_no_server(busy: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a socket is opened by a scrape."""

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a scrape opened a socket")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    assert parsed(Exposition(busy).text(openmetrics=True))
