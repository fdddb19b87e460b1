"""Values that are written as text: durations and addresses, each with a parser and a printer."""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Generic, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

Value = TypeVar("Value")

DURATION_PATTERN = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)$"
DURATION_EXAMPLES = '"250ms", "1s", "1.5s", "5m" or "1h"'
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@dataclass(frozen=True)
class TextForm(Generic[Value]):
    """How a value is read from text and written back; stands beside a field's type as a note."""

    parse: Callable[[str], Value]
    write: Callable[[Value], str]
    allowed: str
    pattern: str

    def _validate(self, value: object) -> Value:
        if not isinstance(value, str):
            raise ValueError(f"must be {self.allowed}")
        return self.parse(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": self.pattern}


def seconds_of(text: str) -> float:
    """The seconds in a duration such as "250ms"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", text)
    if match is None:
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
            hint = f"has no unit; write {quoted_with_unit(text)}"
        else:
            hint = "is not a duration"
        raise ValueError(
            f"{hint}: a number and a unit without a blank, such as {DURATION_EXAMPLES}"
        )
    number, unit = match.groups()
    # Milliseconds are divided, not multiplied: 0.3 s and "300ms" must be the same number.
    return float(number) / 1000 if unit == "ms" else float(number) * _UNITS[unit]


def quoted_with_unit(number: str) -> str:
    """A number people forgot the unit of, as they probably meant it; long ones are not echoed."""
    return f'"{number}s" or "{number}ms"' if len(number) < 10 else "one"


def duration_text(seconds: float) -> str:
    """The shortest duration text that reads back as exactly these seconds."""
    for unit, size in _UNITS.items():
        count = seconds * 1000 if unit == "ms" else seconds / size
        text = f"{round(count)}{unit}"
        if count >= 1 and seconds_of(text) == seconds:
            return text
    # Decimal never falls into the notation with an exponent, which durations do not have.
    return f"{Decimal(repr(seconds)):f}s" if seconds else "0s"


def duration(at_least: str, at_most: str) -> TextForm[float]:
    """Seconds inside, text with a unit outside, within bounds."""
    low, high = seconds_of(at_least), seconds_of(at_most)
    allowed = f'a duration from "{at_least}" to "{at_most}"'

    def parse(text: str) -> float:
        seconds = seconds_of(text)
        if not low <= seconds <= high:
            raise ValueError(f"must be {allowed}")
        return seconds

    return TextForm(
        parse,
        duration_text,
        f'{allowed}, in quotes and with its unit, such as "1s"',
        DURATION_PATTERN,
    )


def parse_host_port(text: str, default_port: int | None = None) -> tuple[str, int] | None:
    """The two halves of `host:port` or `[IPv6]:port`; None when the text is not that."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?", text)
    if match is None:
        return None
    host, digits = match.groups()
    if host.startswith("["):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return None
    port = int(digits) if digits else default_port
    return (host, port) if port is not None and port <= 65535 else None


def host_port_text(host: str, port: int) -> str:
    """`host:port`, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class Listen:
    """An address to listen on; port 0 lets the kernel choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        return host_port_text(self.host, self.port)


LISTEN_ALLOWED = 'an address and a port, such as "127.0.0.1:9846", "0.0.0.0:9846" or "[::]:9846"'


def parse_listen(text: str) -> Listen:
    """The address in `host:port`."""
    found = parse_host_port(text)
    if found is None:
        raise ValueError(f"must be {LISTEN_ALLOWED}")
    return Listen(*found)


LISTEN_FORM = TextForm(
    parse_listen, str, LISTEN_ALLOWED, r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"
)
