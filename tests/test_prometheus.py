"""The alerts: judged by promtool, and by a real Prometheus that watches a real daemon."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import wait_until
from prometheus import (
    ALERTS,
    HELD,
    METRIC,
    PROMOTED,
    ROOT,
    STALLED,
    UNSTAMPED,
    Scene,
    tool,
    trouble,
)
from prometheus_client.parser import text_string_to_metric_families

DIRECTORY = ROOT / "deploy" / "prometheus"
TESTS = DIRECTORY / "alerts_test.yaml"
RUNBOOKS = ROOT / "docs" / "alerts.md"
METRICS = ROOT / "docs" / "metrics.md"

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]
NAMES = [rule["alert"] for rule in RULES if "alert" in rule]


def promtool(*words: str) -> None:
    done = subprocess.run(
        [tool("promtool"), *words], cwd=DIRECTORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with trouble() as scene:
        yield scene


# --- the text -----------------------------------------------------------------------------------


def test_promtool_finds_no_fault_in_the_rules() -> None:
    promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS.name)


def test_promtool_sees_each_alert_fire_and_be_silent() -> None:
    promtool("test", "rules", TESTS.name)
    tested: dict[str, set[bool]] = {}
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        for check in case["alert_rule_test"]:
            tested.setdefault(check["alertname"], set()).add(bool(check["exp_alerts"]))
    assert tested == {name: {True, False} for name in NAMES}


@pytest.mark.parametrize("rule", [r for r in RULES if "alert" in r], ids=NAMES)
def test_each_alert_has_a_severity_and_a_runbook_that_says_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule["labels"]) == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / path == RUNBOOKS
    assert anchor == rule["alert"].lower(), "how sites make anchors of headings"
    section = re.search(
        rf"^## {rule['alert']}\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL
    )
    assert section, "no section"
    assert rule["labels"]["severity"] in section[1]
    assert "**What to do.**" in section[1]


def test_there_is_no_runbook_without_an_alert() -> None:
    headings = re.findall(r"^## (Emqtimerd\w+)$", RUNBOOKS.read_text(), re.MULTILINE)
    assert headings == NAMES


def test_the_chart_ships_the_same_alerts() -> None:
    chart = ROOT / "helm" / "emqtimerd" / "files" / "alerts.yaml"
    assert chart.read_bytes() == ALERTS.read_bytes()


# --- with a real daemon -------------------------------------------------------------------------


def test_prometheus_sees_what_happened(scene: Scene) -> None:
    """By the same functions that people use; a rate needs no first event to begin with."""

    def increased(series: str) -> float:
        rose = f"max_over_time({series}[5m]) - min_over_time({series}[5m])"
        return scene.prometheus.value(f"sum({rose})")

    orders = 'queue="orders"'
    # What was promoted once may have been promoted again: nobody but us scheduled anything.
    assert increased(f"emqtimerd_jobs_promoted_total{{{orders}}}") == PROMOTED
    assert increased('emqtimerd_jobs_promoted_total{queue="emails"}') == 0
    expiries = f"emqtimerd_lease_expiries_total{{{orders},cause="
    assert increased(expiries + '"stall"}') == 2 * STALLED
    assert increased(expiries + '"unstamped"}') == UNSTAMPED
    assert increased(expiries + '"restart"}') == HELD
    assert increased(expiries + '"unattributed"}') == 0
    assert increased(f"emqtimerd_jobs_dead_lettered_total{{{orders}}}") == STALLED
    recovered = STALLED + UNSTAMPED + HELD
    assert increased(f"emqtimerd_jobs_recovered_total{{{orders}}}") == recovered
    assert increased("emqtimerd_node_restarts_total") == 1
    assert increased('emqtimerd_sweeps_total{outcome="unknown"}') > 0
    late = "histogram_quantile(0.5, sum by (le) (rate(emqtimerd_promotion_lateness_seconds_bucket"
    assert 0 < scene.prometheus.value(f"{late}[5m])))") < 1
    # increase() extrapolates a little beyond the samples.
    rose = f"sum(increase(emqtimerd_jobs_promoted_total{{{orders}}}[5m]))"
    assert scene.prometheus.value(rose) == pytest.approx(PROMOTED, rel=0.2)


def test_prometheus_evaluates_all_rules_and_finds_the_trouble(scene: Scene) -> None:
    (group,) = scene.prometheus.get("rules")["groups"]
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(RULES)
    # The daemon is young: what it counted before its first scrape counts too.
    queues = {
        s.labels["queue"]: s.value
        for s in scene.prometheus.query("queue:emqtimerd_jobs_dead_lettered:increase15m")
    }
    assert queues == {"orders": STALLED, "emails": 0}
    states = {
        "EmqtimerdQueueBlocked": "pending",
        "EmqtimerdReloadFailed": "pending",
        "EmqtimerdDeadLetters": "firing",
        "EmqtimerdRestartBurst": "firing",
        "EmqtimerdUnknownOutcomes": "firing",
    }

    def alerts() -> dict[str, str]:
        found = scene.prometheus.get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in found}

    wait_until(lambda: alerts() == states, f"the next evaluation finds these: {alerts()}")


def exported(scene: Scene) -> dict[str, set[str]]:
    """The names of all samples, with their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scene.daemon.get("/metrics")[1]):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("file", [ALERTS, TESTS, RUNBOOKS], ids=lambda file: file.name)
def test_every_metric_that_is_named_is_exported(file: Path, scene: Scene) -> None:
    names = (rule.get("record", "") for rule in RULES)
    recorded = {metric for name in names for metric in METRIC.findall(name)}
    named = set(METRIC.findall(file.read_text())) - recorded
    assert named
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported(scene)}
    assert named - set(exported(scene)) - families == set()


def test_the_metrics_page_lists_what_the_daemon_exports(scene: Scene) -> None:
    """Every family by name, type and labels: no more, no less."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| ", METRICS.read_text(), re.MULTILINE)
    page = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(page) == len(rows), "one is listed twice"
    daemon = {}
    for family in text_string_to_metric_families(scene.daemon.get("/metrics")[1]):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        daemon[name] = (family.type, labels)
    # Only where it is asked for in the configuration.
    assert page.pop("emqtimerd_mass_expiry_guard") == ("gauge", {"queue"})
    assert page == daemon
