"""Where settings come from: a file, the environment, flags. Each is read into layers of a tree."""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from emqtimerd.config import files
from emqtimerd.config.problems import Path, Problem, quoted
from emqtimerd.config.settings import Settings
from emqtimerd.config.shape import find, from_text, paths_in

PREFIX = "EMQTIMERD_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

# Kubernetes tells every pod about the Services beside it; one called emqtimerd, or emqtimerd-x,
# gives names that begin like ours.
_FROM_KUBERNETES = re.compile(
    rf"{PREFIX}(PORT|SERVICE_).*"
    rf"|{PREFIX}\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?)"
)

# The parser's words for faults that people make, in words for people.
_PLAINER = {
    "Cannot overwrite a value": "this setting stands in the file twice",
    "Illegal character '\\n'": "a text is not closed with a quote on its line",
}

# Flags whose name is not the last word of their setting.
_FLAGS = {
    "queues": "--queue",
    "shard.index": "--shard",
    "shard.count": "--shard",
    "log.level": "--log-level",
    "log.format": "--log-format",
}


@dataclass
class Layer:
    """What one source says: a tree of raw values under the names that people write."""

    origin: str
    tree: dict[str, Any] = field(default_factory=dict)
    quotes: bool = False
    """Whether quotes make a difference here: they do in a file."""


def from_file(path: FilePath, named_by: str) -> tuple[list[Layer], list[Problem]]:
    """The file as one layer."""
    origin = f"file {quoted(str(path))[1:-1]}"
    problem = ""
    try:
        text = files.read_config(path).decode("utf-8-sig")
        return [Layer(origin, tomllib.loads(text), quotes=True)], []
    except OSError as error:
        problem = f"{files.why(error)} (named by {named_by})"
    except UnicodeDecodeError as error:
        # The object is the file's content: only its length before the fault leaves this place.
        line = error.object[: error.start].count(b"\n") + 1
        problem = f"line {line} is not valid UTF-8"
    except tomllib.TOMLDecodeError as error:
        problem = _syntax_problem(str(error), text)
    except (ValueError, RecursionError) as error:
        nested = isinstance(error, RecursionError)
        problem = "is nested too deeply" if nested else str(error).split(";")[0]
    return [], [Problem("", problem, origin)]


def _syntax_problem(message: str, text: str) -> str:
    """A TOML syntax error with its line first, and the fault that people mostly made there."""
    place = re.search(r"\(at line ([0-9]+), column ([0-9]+)\)", message)
    reason = re.sub(r" \(at .*", "", message, flags=re.DOTALL)
    reason = _PLAINER.get(reason, reason)
    if table := re.fullmatch(r"Cannot declare \((.*)\) twice", reason):
        reason = f"section {table[1].rstrip(',')} is opened twice"
    if place is None:
        return f"is not TOML: {reason} at the end of the file"
    lines = text.split("\n")
    line = lines[min(int(place[1]), len(lines)) - 1]
    hint = ""
    if re.search(r"=\s*[0-9.]+\s*(ms|s|m|h)\b", line):
        hint = '; a duration stands in quotes, such as "5s"'
    elif re.search(r"=\s*[A-Za-z_./]", line) and not re.search(r"=\s*(true|false)\b", line):
        hint = "; text stands in quotes"
    return f"line {place[1]}, column {place[2]} is not TOML: {reason}{hint}"


def from_environment(environ: Mapping[str, str]) -> tuple[list[Layer], list[Problem]]:
    """A layer for each variable that names a setting, sections before what stands in them."""
    names = {variable(path): path for path in paths_in(Settings)}
    layers, problems = [], []
    for name in sorted(environ, key=lambda name: (name.count("__"), name)):
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE:
            continue
        if path := names.get(name):
            layers.append(Layer(f"environment {name}", _nested(path, _value(path, environ[name]))))
        elif not _FROM_KUBERNETES.fullmatch(name):
            problems.append(Problem("", _unknown_variable(name, names), f"environment {name}"))
    return layers, problems


def variable(path: Path) -> str:
    """The environment variable for a setting."""
    return PREFIX + "__".join(str(part).upper() for part in path)


def _unknown_variable(name: str, names: Mapping[str, Path]) -> str:
    for section in ("queue", "match"):
        if name.startswith(f"{variable((section,))}__"):
            return (
                "no such setting; overrides stand in the file, or as one TOML value in "
                f"{variable((section,))}"
            )
    same_end = [n for n in names if re.split("__|^EMQTIMERD_", n)[-1] == name.removeprefix(PREFIX)]
    close = same_end[:4] or difflib.get_close_matches(name, names, 1, 0.8)
    # One underscore where two divide a section from its setting is the mistake people make.
    close = [n for n in names if n.replace("__", "_") == name.replace("__", "_")] or close
    return "no such setting" + (f"; did you mean {' or '.join(close)}?" if close else "")


def from_flags(flags: Mapping[str, object]) -> tuple[list[Layer], list[Problem]]:
    """A layer for each flag that was given; None means that it was not."""
    layers, problems = [], []
    for name, value in flags.items():
        path: Path = tuple(name.split("."))
        origin = f"flag {_FLAGS.get(name, '--' + str(path[-1]).replace('_', '-'))}"
        if value is None:
            continue
        if find(path) is None:
            problems.append(Problem(name, "no such setting", origin))
        elif isinstance(value, str | os.PathLike):
            layers.append(Layer(origin, _nested(path, _value(path, os.fspath(value)))))
        else:
            given = list(value) if isinstance(value, tuple) else value
            layers.append(Layer(origin, _nested(path, given)))
    return layers, problems


def _value(path: Path, text: str) -> object:
    kind = find(path)
    return text if kind is None else from_text(kind, text)


def _nested(path: Path, value: object) -> dict[str, Any]:
    for part in reversed(path):
        value = {str(part): value}
    return value if isinstance(value, dict) else {}


def leaves(tree: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value of a tree with its path; an empty table and an array are values."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value
