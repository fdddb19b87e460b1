"""From sources to settings: check each by itself, lay them over one another, check the whole.

Nothing is contacted. A source is checked alone, so that a mistake in the file is reported even
while the environment hides it, and so that each problem can name who made it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from emqtimerd.config.problems import ConfigError, Path, Problem, dotted, shown
from emqtimerd.config.relations import Relation, broken_relations
from emqtimerd.config.settings import QueueOverrides, Settings
from emqtimerd.config.shape import allowed, find, suggestion, written
from emqtimerd.config.sources import (
    CONFIG_VARIABLE,
    Layer,
    from_environment,
    from_file,
    from_flags,
    leaves,
)


@dataclass(frozen=True)
class Config:
    """The settings in force, and who set each of them (dotted path to source)."""

    settings: Settings
    origins: Mapping[str, str]
    file: FilePath | None = None


def load(
    file: FilePath | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    *,
    needs_queues: bool = False,
) -> Config:
    """Settings from flags, then environment, then file, then defaults, or every problem at once.

    Flags are named by dotted path ("node.url"); without a file, the one that EMQTIMERD_CONFIG names
    is read, and no other is looked for. With `needs_queues` it is a problem that nothing would be
    swept.
    """
    named_by = "flag --config"
    if file is None and environ.get(CONFIG_VARIABLE):
        file, named_by = FilePath(environ[CONFIG_VARIABLE]), f"environment {CONFIG_VARIABLE}"
    layers: list[Layer] = []
    problems: list[Problem] = []
    sources = [from_file(file, named_by)] if file else []
    for found, unreadable in (*sources, from_environment(environ), from_flags(flags)):
        layers += found
        problems += unreadable
    # With a source missing, what holds between settings would be judged on half of them.
    readable = all(found or not unreadable for found, unreadable in sources)
    merged = _Merged()
    for layer in layers:
        problems += _check(layer, merged.bad)
        merged.lay(layer)
    if readable:
        listed = {name for layer in layers for name in layer.tree.get("queues", ())}
        problems += _check_whole(merged, listed, needs_queues=needs_queues)
    if problems:
        raise ConfigError(problems)
    settings = _without_idle_overrides(merged, Settings.model_validate(merged.tree))
    origins = {dotted(path): merged.origin(path) for path, _ in written(settings)}
    return Config(settings, MappingProxyType(origins), file)


# --- one source by itself -----------------------------------------------------------------------


def _check(layer: Layer, bad: set[Path]) -> list[Problem]:
    """The problems of a source; what is wrong is cut out of it, so that the rest can be used."""
    problems: dict[Path, Problem] = {}
    while errors := _errors(layer.tree):
        for error in errors:
            path = _path(error)
            problems.setdefault(path, _problem(path, error["type"], error.get("ctx", {}), layer))
            bad.add(path)
        # An item that lacks something it must have goes as a whole. From the end, so that a
        # position in an array still means what it meant.
        lost = {_path(e)[:-1] if e["type"] == "missing" else _path(e) for e in errors}
        for path in sorted(lost, reverse=True):
            _cut(layer.tree, path)
    return list(problems.values())


def _errors(tree: dict[str, Any]) -> list[ErrorDetails]:
    try:
        Settings.model_validate(tree)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _path(error: ErrorDetails) -> Path:
    return tuple(part for part in error["loc"] if part != "[key]")


def _problem(path: Path, fault: str, context: Mapping[str, Any], layer: Layer) -> Problem:
    if fault == "extra_forbidden":
        # Nobody knows what an unknown setting was meant for, so its value is not repeated.
        return Problem(dotted(path), f"no such setting{suggestion(path)}", layer.origin)
    if fault == "missing":
        return Problem(dotted(path), "must be given", layer.origin)
    value, kind = _at(layer.tree, path), find(path)
    if fault == "value_error":
        message = str(context["error"])
        known = "" if isinstance(value, dict | list) else shown(path, value)
        return Problem(dotted(path), message, layer.origin, known)
    message = f"must be {allowed(kind)}" if kind else "is not allowed here"
    if path == ("queue",) and not isinstance(value, dict):
        message += "; did you mean queues?"
    if isinstance(value, str) and kind and kind.annotation in (int, float, bool):
        message += ", without quotes" if layer.quotes else ""
    # A text where a table belongs may be anything, a password too.
    known = "" if isinstance(value, str) and kind and kind.table else shown(path, value)
    return Problem(dotted(path), message, layer.origin, known)


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _cut(tree: Any, path: Path) -> None:
    *above, last = path
    del _at(tree, tuple(above))[last]


# --- laying sources over one another ------------------------------------------------------------


class _Merged:
    """The tree of all sources so far, who set each value of it, and which paths had faults."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.origins: dict[Path, str] = {}
        self.bad: set[Path] = set()

    def lay(self, layer: Layer) -> None:
        """Put a source on top."""
        for path, value in leaves(layer.tree):
            *sections, key = map(str, path)
            table = self.tree
            for depth, section in enumerate(sections, start=1):
                # `mass_expiry = false` gives way to a table, and below a table to `false`.
                if not isinstance(table.get(section), dict):
                    table[section] = {}
                    self.origins.pop(path[:depth], None)
                table = table[section]
            if isinstance(table.get(key), dict):
                if value == {}:
                    continue
                for below in [known for known in self.origins if known[: len(path)] == path]:
                    del self.origins[below]
            table[key] = value
            self.origins[path] = layer.origin

    def origin(self, path: Path) -> str:
        """Who set a value or, for a section, anything in it."""
        for length in range(len(path), 0, -1):
            if found := self.origins.get(path[:length]):
                return found
        inside = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        return next(inside, "default")

    def is_bad(self, path: Path) -> bool:
        """Whether a fault was found at, in or around a path."""
        return any(_overlap(path, bad) for bad in self.bad)


def _overlap(one: Path, other: Path) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


# --- the whole ----------------------------------------------------------------------------------


def _check_whole(merged: _Merged, listed: set[str], *, needs_queues: bool) -> list[Problem]:
    settings = Settings.model_validate(merged.tree)
    values = dict(written(settings))
    # Queues that a flag names are chosen by hand: the file's overrides need not fit them.
    chosen = merged.origin(("queues",)).startswith("flag")
    relations = [*broken_relations(settings, None if chosen else listed)]
    if needs_queues and not settings.queues and not settings.discovery.enabled:
        advice = (
            'list some, such as queues = ["orders"], name one with run --queue, or set '
            "discovery.enabled"
        )
        # Whoever wrote `queue = ["orders"]` is told that already.
        listed_elsewhere: tuple[Path, ...] = (("discovery",), ("queue",))
        relations.append(Relation(("queues",), f"nothing to sweep: {advice}", listed_elsewhere))
    return [
        Problem(
            dotted(relation.path),
            relation.message,
            merged.origin(relation.path),
            shown(relation.path, values[relation.path]) if relation.path in values else "",
        )
        for relation in relations
        # What a bad value would have been in relation to others, nobody can tell.
        if not any(merged.is_bad(path) for path in (relation.path, *relation.others))
    ]


def _without_idle_overrides(merged: _Merged, settings: Settings) -> Settings:
    """The settings without sections that set nothing: empty ones, those of queues not swept."""
    swept = frozenset(settings.queues)
    idle = [
        name
        for name, own in settings.queue.items()
        if own == QueueOverrides() or (name not in swept and not settings.discovers(name))
    ]
    if not idle:
        return settings
    for name in idle:
        del merged.tree["queue"][name]
    return Settings.model_validate(merged.tree)
