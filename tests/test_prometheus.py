"""The alerts: judged by promtool, and by a real Prometheus that watches a real daemon."""

import os
import re
import subprocess
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
    Prometheus,
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


def test_the_readme_installs_rules_with_runbooks_at_an_address_and_a_scrape(tmp_path: Path) -> None:
    """Its lines run as they stand, in another place; Prometheus takes what they make."""
    text = (DIRECTORY / "README.md").read_text()
    (config,) = re.findall(r"^```yaml\n(rule_files:.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(config)
    lines = re.findall(r"^    ((?:sed|promtool) .*)$", text, re.MULTILINE)
    assert [line.split()[0] for line in lines] == ["sed", "promtool"]
    script = "\n".join(lines).replace("/etc/prometheus", str(tmp_path))
    environment = os.environ | {"PATH": f"{Path(tool('promtool')).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-ec", script],
        cwd=DIRECTORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rules = yaml.safe_load((tmp_path / "emqtimerd.yaml").read_text())["groups"][0]["rules"]
    links = [rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule]
    base = "https://wiki.example.net/emqtimerd/alerts"
    assert links == [f"{base}#{name.lower()}" for name in NAMES]


# --- with a real daemon -------------------------------------------------------------------------


def test_a_prometheus_that_watches_a_daemon_in_trouble_sees_what_happened() -> None:
    """Once for all that needs the trouble, which takes ten seconds."""
    with trouble() as scene:
        check_increases(scene.prometheus)
        check_alerts(scene.prometheus)
        exposition = scene.daemon.get("/metrics")[1]
    check_names(exposition)
    check_page(exposition)


def check_increases(prometheus: Prometheus) -> None:
    """PromQL finds the numbers that the trouble was made of."""

    def increased(series: str) -> float:
        # Unlike increase(), exact.
        rose = f"max_over_time({series}[5m]) - min_over_time({series}[5m])"
        return prometheus.value(f"sum({rose})")

    orders = 'queue="orders"'
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
    assert 0 < prometheus.value(f"{late}[5m])))") < 1
    # It extrapolates a little beyond the samples.
    rose = f"sum(increase(emqtimerd_jobs_promoted_total{{{orders}}}[5m]))"
    assert prometheus.value(rose) == pytest.approx(PROMOTED, rel=0.2)


def check_alerts(prometheus: Prometheus) -> None:
    """All rules evaluate, and these alerts are on."""
    (group,) = prometheus.get("rules")["groups"]
    assert [rule["health"] for rule in group["rules"]] == ["ok"] * len(RULES)
    expected = {
        # The row that blocks was due long before.
        "EmqtimerdJobsOverdue": "pending",
        "EmqtimerdQueueBlocked": "pending",
        "EmqtimerdReloadFailed": "pending",
        "EmqtimerdDeadLetters": "firing",
        "EmqtimerdRestartBurst": "firing",
        "EmqtimerdUnknownOutcomes": "firing",
    }

    def alerts() -> dict[str, str]:
        found = prometheus.get("alerts")["alerts"]
        states = {alert["labels"]["alertname"]: alert["state"] for alert in found}
        # A scrape that a busy machine answers too late makes this one pending for a moment.
        states.pop("EmqtimerdReplicaIdle", None)
        return states

    wait_until(lambda: alerts() == expected, f"the next evaluation finds these: {alerts()}")
    # The daemon is young: what it counted before its first scrape counts too.
    found = prometheus.query("queue:emqtimerd_jobs_dead_lettered:increase15m")
    dead = {sample.labels["queue"]: sample.value for sample in found}
    assert dead == {"orders": STALLED, "emails": 0}


def check_names(exposition: str) -> None:
    """Every metric that rules, their tests and runbooks name is exported."""
    families = [*text_string_to_metric_families(exposition)]
    exported = {sample.name for family in families for sample in family.samples}
    exported |= {family.name for family in families}
    recorded = {name for rule in RULES for name in METRIC.findall(rule.get("record", ""))}
    for file in (ALERTS, TESTS, RUNBOOKS):
        named = set(METRIC.findall(file.read_text()))
        assert named, file
        assert named - recorded - exported == set(), file


def check_page(exposition: str) -> None:
    """docs/metrics.md lists every family by name, type and labels: no more, no less."""
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| ", METRICS.read_text(), re.MULTILINE)
    page = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(page) == len(rows), "one is listed twice"
    daemon = {}
    for family in text_string_to_metric_families(exposition):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        daemon[name] = (family.type, labels)
    # Only where the configuration asks for it.
    assert page.pop("emqtimerd_mass_expiry_guard") == ("gauge", {"queue"})
    assert page == daemon
