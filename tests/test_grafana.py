"""The dashboard: every query runs on a real Prometheus that watched a daemon in trouble."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus import METRIC, ROOT, Scene, trouble

FILE = ROOT / "deploy" / "grafana" / "dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with trouble() as scene:
        yield scene


def filled_in(expression: str) -> str:
    """An expression as Grafana sends it, with everything chosen."""
    for name, value in {"$__rate_interval": "2s", "$node": ".*", "$queue": ".*"}.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize(
    ("panel", "target"), TARGETS, ids=[f"{p['title']}-{t['refId']}" for p, t in TARGETS]
)
def test_each_query_finds_data(panel: dict[str, Any], target: dict[str, Any], scene: Scene) -> None:
    """At some instant of the trouble, with the labels that its legend shows."""
    found = scene.prometheus.range(filled_in(target["expr"]), scene.seconds)
    assert found, "no data"
    assert "NaN" not in str(found)
    for labels in found:
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(labels)


@pytest.mark.parametrize("note", DASHBOARD["annotations"]["list"], ids=lambda note: note["name"])
def test_each_annotation_marks_something(note: dict[str, Any], scene: Scene) -> None:
    found = scene.prometheus.range(filled_in(note["expr"]), scene.seconds)
    assert found
    for labels in found:
        assert set(re.findall(r"{{(\w+)}}", note["textFormat"])) <= set(labels)


@pytest.mark.parametrize("name", ["node", "queue"])
def test_each_variable_has_its_values(name: str, scene: Scene) -> None:
    query = re.fullmatch(r"label_values\((\w+), (\w+)\)", VARIABLES[name]["query"]["query"])
    assert query
    found = {sample.labels[query[2]] for sample in scene.prometheus.query(query[1])}
    if name == "queue":
        assert found == {"orders", "emails"}
    assert len(found) == (2 if name == "queue" else 1)


@pytest.mark.parametrize("name", ["node", "queue"])
def test_a_choice_narrows_each_query_that_knows_it(name: str, scene: Scene) -> None:
    """Nothing is left of a node or a queue that is not there, but for what says so by a number."""
    for panel, target in TARGETS:
        expression = target["expr"]
        if f"${name}" in expression:
            expression = filled_in(expression.replace(f"${name}", "not-there"))
            left = [s for s in scene.prometheus.query(expression) if s.value != 0]
            assert left == [], panel["title"]


def test_every_metric_of_a_queue_is_narrowed_by_queue_and_node() -> None:
    for panel, target in TARGETS:
        for metric in METRIC.findall(target["expr"]):
            if re.match(r"emqtimerd_(jobs|queue_|lease|active|sweep|last_sweep)", metric):
                assert 'queue=~"$queue"' in target["expr"], panel["title"]
        assert 'node=~"$node"' in target["expr"], panel["title"]


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
