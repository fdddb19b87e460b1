"""The dashboard: every query runs on a real Prometheus that watched a daemon in trouble."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus import METRIC, ROOT, Scene, tool, trouble

FILE = ROOT / "deploy" / "grafana" / "dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
NOTES = DASHBOARD["annotations"]["list"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def filled_in(expression: str) -> str:
    """An expression as Grafana sends it, with everything chosen."""
    for name, value in {"$__rate_interval": "2s", "$node": ".*", "$queue": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_each_query_works_on_a_prometheus_that_watched_a_daemon_in_trouble() -> None:
    """One test, since the trouble takes ten seconds; what is wrong is listed whole."""
    with trouble() as scene:
        problems = [
            *(problem for panel, target in TARGETS for problem in faults(panel, target, scene)),
            *(problem for note in NOTES for problem in unmarked(note, scene)),
            *(problem for name in ("node", "queue") for problem in unchosen(name, scene)),
        ]
    assert problems == []


def faults(panel: dict[str, Any], target: dict[str, Any], scene: Scene) -> Iterator[str]:
    """A query finds data at some instant of the trouble, with the labels that its legend shows."""
    found = scene.prometheus.range(filled_in(target["expr"]), scene.seconds)
    if not found:
        yield f"{panel['title']}: no data for {target['expr']}"
    shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    if not all(shown <= set(labels) for labels in found):
        yield f"{panel['title']}: a label of {target['legendFormat']} is not there"


def unmarked(note: dict[str, Any], scene: Scene) -> Iterator[str]:
    """An annotation marks something, with the labels that its text shows."""
    found = scene.prometheus.range(filled_in(note["expr"]), scene.seconds)
    shown = set(re.findall(r"{{(\w+)}}", note["textFormat"]))
    if not found or not all(shown <= set(labels) for labels in found):
        yield f"{note['name']}: marks {found}"


def unchosen(name: str, scene: Scene) -> Iterator[str]:
    """A variable has its values, and a choice narrows each query that knows it."""
    query = re.fullmatch(r"label_values\((\w+), (\w+)\)", VARIABLES[name]["query"]["query"])
    assert query
    found = {sample.labels[query[2]] for sample in scene.prometheus.query(query[1])}
    if len(found) != {"node": 1, "queue": 2}[name]:
        yield f"{name} has the values {found}"
    for panel, target in TARGETS:
        if f"${name}" in target["expr"]:
            expression = filled_in(target["expr"].replace(f"${name}", "not-there"))
            # What counts says so by a zero.
            if [s for s in scene.prometheus.query(expression) if s.value != 0]:
                yield f"{panel['title']} shows something of no {name}"


def test_every_metric_of_a_queue_is_narrowed_by_queue_and_node() -> None:
    for panel, target in TARGETS:
        for metric in METRIC.findall(target["expr"]):
            if re.match(r"emqtimerd_(jobs|queue_|lease|active|sweep|last_sweep)", metric):
                assert 'queue=~"$queue"' in target["expr"], panel["title"]
            assert 'node=~"$node"' in target["expr"], panel["title"]


def test_queues_of_one_name_on_two_nodes_are_two_queues(tmp_path: Path) -> None:
    """What one node's daemon does well hides nothing that another one's does not."""
    series = {
        "emqtimerd_node_up": ('node="{job}:6379"', "1", "1"),
        "emqtimerd_queue_jobs": ('queue="orders",state="active"', "2", "3"),
        "emqtimerd_queue_blocked": ('queue="orders",verb="promote"', "1", "1"),
        "emqtimerd_last_sweep_timestamp_seconds": ('queue="orders",verb="promote"', "600", "0"),
    }
    expected = {"Queues": 2, "Blocked": 2, "Longest since a good sweep": 600}
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [
            {
                "series": f'{name}{{job="{job}",instance="{job}:9846",{labels}}}',
                "values": f"{value}x10",
            }
            for name, (labels, *values) in series.items()
            for job, value in zip(("near", "far"), values, strict=True)
        ],
        "promql_expr_test": [
            {
                "expr": filled_in(target["expr"]),
                "eval_time": "10m",
                "exp_samples": [{"labels": "{}", "value": expected[panel["title"]]}],
            }
            for panel, target in TARGETS
            if panel["type"] == "stat" and panel["title"] in expected
        ],
    }
    assert len(case["promql_expr_test"]) == len(expected)
    file = tmp_path / "dashboard.yaml"
    # JSON is YAML.
    file.write_text(json.dumps({"tests": [case]}))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_panels_fill_the_grid_without_gaps_or_overlaps() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    height = max(y for _, y in taken) + 1
    assert taken == {(x, y) for x in range(24) for y in range(height)}
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_each_panel_says_what_it_shows_and_takes_the_chosen_data_source() -> None:
    for panel in PANELS:
        assert panel["description"].endswith(".")
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(t["datasource"] == panel["datasource"] for t in panel["targets"])


def test_the_chart_ships_the_same_dashboard() -> None:
    chart = ROOT / "helm" / "emqtimerd" / "files" / "dashboard.json"
    assert chart.read_bytes() == FILE.read_bytes()
