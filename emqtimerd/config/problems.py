"""What is wrong with a configuration, in sentences for the operator and without its secrets."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from emqtimerd.config.url import without_secrets

Path = tuple[str | int, ...]

# A password that stands in `password_file` by mistake is no path: it is seldom in small letters and
# has no slash and no ending.
_PATH = r"/.*|[a-z0-9_.~-]*(/[a-z0-9_.~-]+)+|[a-z0-9_-]+\.[a-z]{1,5}"

# A queue name of 255 bytes is the longest value that people compare character by character.
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: where it stands, what stands there, who put it there and what would be right."""

    path: str
    message: str
    origin: str = ""
    value: str = ""

    def __str__(self) -> str:
        where = f"{self.path} = {self.value}" if self.path and self.value else self.path
        if where and self.origin:
            where = f"{where} ({self.origin})"
        return ": ".join(part for part in (where or self.origin, self.message) if part)


class ConfigError(Exception):
    """The configuration cannot be used; every problem that was found is listed, one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(tuple(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def quoted(text: str) -> str:
    """A TOML basic string; whatever a terminal would act on is escaped."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return (
        '"' + "".join(escapes.get(c) or (c if c.isprintable() else _escaped(c)) for c in text) + '"'
    )


def _escaped(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04X}" if number < 0x10000 else f"\\U{number:08X}"


def dotted(path: Path) -> str:
    """`queue."a.b".limit`, `queues[2]`: a path as TOML spells it."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        key = key_text(_short(masked(part)))
        text += f".{key}" if text else key
    return text


def key_text(key: str) -> str:
    """A key as TOML spells it: bare where it can be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else quoted(key)


def masked(text: str) -> str:
    """The text without what may be the credentials of a URL that it was meant to be."""
    return text.partition("://")[0] + "://***" if "://" in text else text


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def shown(path: Path, value: object) -> str:
    """A value as an error may show it: containers by their kind, what may be a secret masked."""
    if isinstance(value, Mapping | list | tuple):
        return "[]" if value == () else "a table" if isinstance(value, Mapping) else "an array"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(_short(_without_secrets(path, value)))
    try:
        return "***" if path[-1] in ("url", "password_file") else _short(str(value))
    except ValueError:  # an integer of more digits than Python is willing to print
        return "a very long number"


def _without_secrets(path: Path, text: str) -> str:
    if path[-1] == "url":
        return without_secrets(text)
    if path[-1] == "password_file" and not re.fullmatch(_PATH, text):
        return "***"
    return masked(text)
