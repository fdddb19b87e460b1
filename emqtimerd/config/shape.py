"""Which settings exist: finding one by its path, saying what it allows, reading it from text."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from emqtimerd.config.problems import Path, dotted
from emqtimerd.config.settings import OffOrTable, OrdinalText, Section, Settings
from emqtimerd.config.values import TextForm


@dataclass(frozen=True)
class Kind:
    """The type of a setting, and what is noted beside it: bounds and forms."""

    annotation: Any
    notes: tuple[Any, ...] = ()

    def note(self, wanted: type) -> Any:
        """The first note of a class, or None."""
        return next((note for note in self.notes if isinstance(note, wanted)), None)

    def bound(self, name: str) -> Any:
        """A numeric bound (`ge`, `gt`, `le`), or None."""
        return next((getattr(n, name) for n in self.notes if hasattr(n, name)), None)

    @property
    def table(self) -> type[Section] | None:
        """The class of the table that may stand here, if any may."""
        choices = get_args(self.annotation) if self.note(OffOrTable) else (self.annotation,)
        return next((c for c in choices if isinstance(c, type) and issubclass(c, Section)), None)

    @property
    def item(self) -> "Kind | None":
        """What an array or a table of freely chosen names holds, if this is one."""
        if get_origin(self.annotation) is tuple:
            return _kind(get_args(self.annotation)[0])
        return (
            _kind(get_args(self.annotation)[1]) if get_origin(self.annotation) is Mapping else None
        )


def _kind(annotation: Any, notes: tuple[Any, ...] = ()) -> Kind:
    """Take `Annotated[…]` and `… | None` apart down to the type itself."""
    if get_origin(annotation) is Annotated:
        inner, *beside = get_args(annotation)
        for note in beside:
            notes += tuple(note.metadata) if isinstance(note, FieldInfo) else (note,)
        return _kind(inner, notes)
    members = [member for member in get_args(annotation) if member is not type(None)]
    if len(members) < len(get_args(annotation)):
        return _kind(members[0], notes)
    return Kind(annotation, notes)


@cache
def fields(table: type[Section]) -> Mapping[str, Kind]:
    """The settings of a table under the names that people write."""
    return {
        field.alias or name: _kind(field.annotation, tuple(field.metadata))
        for name, field in table.model_fields.items()
    }


def find(path: Path) -> Kind | None:
    """What may stand at a path; None when nothing may."""
    kind: Kind | None = Kind(Settings)
    for part in path:
        if kind is None:
            return None
        kind = fields(kind.table).get(str(part)) if kind.table else kind.item
    return kind


@cache
def paths_in(table: type[Section]) -> tuple[Path, ...]:
    """Every setting and section in a table whose name is not chosen by the user, in order."""
    return tuple(
        path
        for name, kind in fields(table).items()
        for path in ((name,), *((name, *p) for p in (paths_in(kind.table) if kind.table else ())))
    )


def written(section: Section, above: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value in a section with its path, as it is written in TOML; secrets are masked."""
    for (name, kind), attribute in zip(
        fields(type(section)).items(), type(section).model_fields, strict=True
    ):
        path, value = (*above, name), getattr(section, attribute)
        if isinstance(value, Section):
            yield from written(value, path)
        elif isinstance(value, Mapping):
            for key, table in value.items():
                yield from written(table, (*path, key))
        elif kind.item and kind.item.table:
            for index, table in enumerate(value):
                yield from written(table, (*path, index))
        elif value is not None:
            form = kind.note(TextForm)
            yield path, form.write(value) if form else value


def allowed(kind: Kind) -> str:
    """What may stand here, as the end of "must be …"."""
    if form := kind.note(TextForm) or kind.note(OffOrTable):
        return str(form.allowed)
    if kind.item:
        tables = "an array of tables, each begun with [[match]]"
        text = tables if kind.item.table else 'an array of texts, such as ["orders"]'
        return "a table of tables" if get_origin(kind.annotation) is Mapping else text
    if get_origin(kind.annotation) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind.annotation))
    if kind.annotation in (int, float):
        return _allowed_number(kind)
    return (
        "a table" if kind.table else {bool: "true or false"}.get(kind.annotation, "text in quotes")
    )


def _allowed_number(kind: Kind) -> str:
    number = "a whole number" if kind.annotation is int else "a number"
    low, above, high = kind.bound("ge"), kind.bound("gt"), kind.bound("le")
    if high is None:
        return f"{number}, {low} or more"
    return f"{number} {f'above {above} and up' if low is None else f'from {low}'} to {high}"


def suggestion(path: Path) -> str:
    """What an unknown key may have been meant to be, as an addition to "no such setting"."""
    *section, key = path
    key = str(key)
    if "password" in key.lower():
        return "; a password stands in the file that password_file names, or in the URL"
    table = find(tuple(section))
    near = fields(table.table) if table and table.table else {}
    # A long name in a short key, or the other way round, is a unit or a prefix too many.
    if close := difflib.get_close_matches(key.lower(), near, 1, 0.6):
        return f"; did you mean {dotted((*section, close[0]))}?"
    for depth in range(len(section), -1, -1):
        around = find(tuple(section[:depth]))
        inside = paths_in(around.table) if around and around.table else ()
        if elsewhere := [(*section[:depth], *other) for other in inside if other[-1] == key]:
            return _elsewhere(elsewhere)
    return f"; known here: {', '.join(near)}" if near else ""


def _elsewhere(paths: list[Path]) -> str:
    if len(paths) == 1 and len(paths[0]) == 1:
        kind, key = find(paths[0]), paths[0][0]
        if kind and (kind.table or kind.item) and key != "queues":
            return f"; {key} is a section of its own"
        return f"; {key} stands at the top of the file, before the first [section]"
    # More than a few are no advice.
    return f"; did you mean {' or '.join(dotted(path) for path in paths[:4])}?"


def from_text(kind: Kind, text: str) -> object:
    """The value that a text of the environment or of a flag stands for, by the kind of setting.

    What cannot be read is handed on as it is, for the checks to refuse with their own words.
    """
    if kind.table or get_origin(kind.annotation) is Mapping or (kind.item and kind.item.table):
        return _toml_value(text)
    if kind.item:
        return _toml_value(text) if text.startswith("[") else _listed(text)
    if kind.annotation is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text if kind.note(TextForm) else _number(kind, text)


def _number(kind: Kind, text: str) -> object:
    if kind.annotation is int:
        if kind.note(OrdinalText) and (ordinal := re.fullmatch(r".+-([0-9]{1,9})", text)):
            return int(ordinal[1])
        # Longer ones are out of every bound, and Python refuses to read very long ones.
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text
    if kind.annotation is float and re.fullmatch(r"[0-9]*\.?[0-9]+", text):
        return float(text)
    return text


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _toml_value(text: str) -> object:
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # More than one key means that the text went on after its value: it is not one value.
    return document["value"] if len(document) == 1 else text
