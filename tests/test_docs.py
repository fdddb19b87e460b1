"""What the documents promise, held against the product."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from emqtimerd.config import schema

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *sorted(path for top in ("docs", "deploy", "helm") for path in (ROOT / top).rglob("*.md")),
]


def settings(properties: dict[str, Any], definitions: dict[str, Any]) -> dict[str, str]:
    """Every setting by its path, with its default as JSON."""
    found: dict[str, str] = {}
    for key, value in properties.items():
        table = definitions.get(value.get("$ref", "").rpartition("/")[2], {})
        if "properties" in table:
            inner = settings(table["properties"], definitions)
            found |= {f"{key}.{path}": default for path, default in inner.items()}
        elif "default" in value:
            found[key] = json.dumps(value["default"])
    return found


def test_every_setting_is_documented_with_its_default() -> None:
    """The table of docs/configuration.md is that of the schema, no more and no less."""
    document = schema()
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `(.*?)` \|", text, re.MULTILINE))
    wanted = settings(document["properties"], document["$defs"])
    # `[[match]]` has a section of its own, by example.
    assert rows == {path: default for path, default in wanted.items() if path != "match"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    """A link inside the project names a file that is there, and a heading that it has."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        name, _, heading = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert heading in slugs, target
