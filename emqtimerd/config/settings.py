"""The tree of settings: every name, its type, its default, its bounds and what it is for.

Outside (TOML, environment, JSON Schema) a setting has its alias and a duration is text with a unit;
inside, the unit is in the name and the value a number. Everything is frozen, compares by value and
is checked strictly. Other rooms read these classes; `load` is the only one that builds them.
"""

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import translate
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    Strict,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, core_schema

from emqtimerd.config.problems import masked
from emqtimerd.config.url import URL_FORM, NodeUrl, parse_url
from emqtimerd.config.values import LISTEN_FORM, Listen, duration
from emqtimerd.wire import queue_name_problem

# --- kinds of values ----------------------------------------------------------------------------


def _queue_name(name: str) -> str:
    if problem := queue_name_problem(name):
        raise ValueError(
            f"{problem}; a queue name is 1 to 255 bytes without braces, white space and control "
            "characters"
        )
    return name


def _glob(glob: str) -> str:
    # What no queue name may hold, no glob can match: {a,b} is the one that people try.
    if problem := queue_name_problem(glob):
        raise ValueError(f"{problem}, so it matches no queue; a glob knows *, ? and [abc]")
    return glob


def _text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds a character that cannot be printed")
    return text


def _absolute_path(path: str) -> str:
    # The daemon's working directory is seldom the one that a relative path was meant for.
    if path and not path.startswith("/"):
        raise ValueError('must be an absolute path, such as "/etc/emqtimerd/file", or "" for none')
    return _text(path)


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        twice = [masked(name) for name, times in Counter(names).items() if times > 1]
        more = f" and {len(twice) - 3} others" if len(twice) > 3 else ""
        raise ValueError(f"lists {', '.join(twice[:3])}{more} more than once")
    return names


def _unchangeable(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(table))


class OrdinalText:
    """Marks a number that the environment and flags may also give as the name of a pod."""


Text = Annotated[str, AfterValidator(_text)]
FilePath = Annotated[str, AfterValidator(_absolute_path)]
QueueName = Annotated[str, AfterValidator(_queue_name)]
Glob = Annotated[str, AfterValidator(_glob)]


class Section(BaseModel):
    """A table of settings: unknown keys are refused, and no value is bent into another type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False
    )


# --- the node -----------------------------------------------------------------------------------


class TlsSettings(Section):
    """How an encrypted connection is made; whether it is, the URL's scheme says."""

    ca_file: FilePath = Field(default="", description="CA certificates, PEM; empty: the system's")
    cert_file: FilePath = Field(
        default="", description="client certificate, PEM; empty: none is shown"
    )
    key_file: FilePath = Field(
        default="", description="its key, PEM; empty: in the certificate's file"
    )
    server_name: Text = Field(
        default="",
        description="name to send and to check in the certificate; empty: the URL's host",
    )


class SentinelTlsSettings(TlsSettings):
    """How connections to the sentinels are encrypted, which the URL does not say."""

    enabled: bool = Field(default=False, description="whether connections to the sentinels use TLS")


class SentinelSettings(Section):
    """The sentinels' own credentials and TLS; those of the node are not sent to them."""

    username: Text = Field(
        default="", description="ACL user on the sentinels; empty: the default user"
    )
    password_file: FilePath = Field(
        default="",
        description="file with the sentinels' password, read at each connection; empty: none",
    )
    tls: SentinelTlsSettings = Field(
        default=SentinelTlsSettings(), description="TLS to the sentinels"
    )


class NodeSettings(Section):
    """The EMQ node: where it is, who we are there, and how long we wait for it."""

    url: Annotated[NodeUrl, URL_FORM] = Field(
        default=parse_url("redis://127.0.0.1:6379/0"),
        description="address of the node: redis, rediss (TLS), valkey, valkeys (TLS) or unix, and "
        "redis+sentinel or redis+cluster (with s for TLS) for those topologies",
    )
    username: Text = Field(
        default="", description="ACL user; empty: the URL's, or the default user"
    )
    password_file: FilePath = Field(
        default="",
        description="file with the password, read at each connection; empty: the URL's, if any",
    )
    # Up to ten minutes: longer waits outlast every timeout that a network has of its own.
    connect_timeout_seconds: Annotated[float, duration("10ms", "10m")] = Field(
        default=3.0,
        alias="connect_timeout",
        description="how long one attempt to connect may take, the look-up of a name included",
    )
    timeout_seconds: Annotated[float, duration("10ms", "10m")] = Field(
        default=5.0,
        alias="timeout",
        description="how long a reply may take; later than this, its outcome is unknown",
    )
    tls: TlsSettings = Field(default=TlsSettings(), description="TLS to the node")
    sentinel: SentinelSettings = Field(
        default=SentinelSettings(), description="the sentinels, if any"
    )
    wire: Literal["auto", "native"] = Field(
        default="auto", description="what the node speaks; auto is native until there is another"
    )
    base: Literal["key", "arg"] = Field(
        default="key",
        description="how a command carries the queue's base: as its last key, or after it",
    )


# --- the two sweeps -----------------------------------------------------------------------------

# One command of 100,000 moves already holds a server for a good part of a second.
PageSize = Annotated[int, Field(ge=1, le=100_000)]

# Below 10 ms a round trip is longer than the interval; a day without a sweep is a mistake.
PromoteInterval = Annotated[
    float,
    duration("10ms", "24h"),
    Field(description="how often each queue's due jobs are promoted"),
]
PromoteLimit = Annotated[
    PageSize, Field(description="how many jobs one EMQ.PROMOTE moves at most; a drain sends more")
]
DueWake = Annotated[
    bool, Field(description="whether a job that falls due between two rounds is promoted at once")
]
StalledInterval = Annotated[
    float,
    duration("10ms", "24h"),
    Field(description="how often each queue's expired leases are looked for"),
]
StalledLimit = Annotated[
    PageSize,
    Field(description="how many leases one EMQ.STALLED.CHECK handles at most; a drain sends more"),
]
MaxStalled = Annotated[
    int,
    # The upper bound only keeps max_stalled + 1 well inside the server's integers.
    Field(
        ge=1,
        le=1_000_000,
        description="how many counted stalls bury a job; with 1, the first counted stall "
        "dead-letters it (an expiry that crossed a server restart is not counted)",
    ),
]
RestartGrace = Annotated[
    float,
    duration("0s", "24h"),
    Field(
        description="how long the first stall check waits after a server restart or a longer "
        "outage, so that living workers can extend their leases first"
    ),
]
AtExpiry = Annotated[
    bool, Field(description="whether a lease that expires between two rounds is checked at once")
]


class MassExpirySettings(Section):
    """When so many leases expire together that it is a cut network and not the jobs."""

    share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="share of a queue's leases that must be expired, 0 to 1",
    )
    at_least: int = Field(
        default=20,
        ge=1,
        le=1_000_000_000,
        description="and how many of them there must be at least",
    )


class OffOrTable:
    """Lets `false` stand for "off" where a table means "on", without a union's two errors."""

    allowed = "false, or a table such as { share = 0.5, at_least = 20 }"

    def _validate(self, value: object, table: ValidatorFunctionWrapHandler) -> object:
        if value is False:
            return False
        if not isinstance(value, dict):
            raise ValueError(f"must be {self.allowed}")
        return table(value)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        table = handler.generate_schema(MassExpirySettings)
        return core_schema.no_info_wrap_validator_function(
            self._validate,
            table,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [{"const": False}, handler(schema)]}


MassExpiry = Annotated[
    MassExpirySettings | Literal[False],
    OffOrTable(),
    Field(
        description="guard against burying jobs for a network's fault, such as { share = 0.5, "
        "at_least = 20 }: when that share of a queue's leases, and that many, are expired, its "
        "stall check is sent with max_stalled + 1; false: off"
    ),
]


class PromoteSettings(Section):
    """Sweeps that make due jobs pending."""

    interval_seconds: PromoteInterval = Field(default=1.0, alias="interval")
    limit: PromoteLimit = 100
    due_wake: DueWake = True


class StalledCheckSettings(Section):
    """Sweeps that recover or bury jobs whose lease has expired."""

    interval_seconds: StalledInterval = Field(default=30.0, alias="interval")
    limit: StalledLimit = 100
    max_stalled: MaxStalled = 1
    restart_grace_seconds: RestartGrace = Field(default=10.0, alias="restart_grace")
    at_expiry: AtExpiry = False
    mass_expiry: MassExpiry = False


class PromoteOverride(Section):
    """The promote settings that some queues have of their own; the rest is left as it is."""

    interval_seconds: PromoteInterval | None = Field(default=None, alias="interval")
    limit: PromoteLimit | None = None
    due_wake: DueWake | None = None


class StalledCheckOverride(Section):
    """The stall check settings that some queues have of their own; the rest is left as it is."""

    interval_seconds: StalledInterval | None = Field(default=None, alias="interval")
    limit: StalledLimit | None = None
    max_stalled: MaxStalled | None = None
    restart_grace_seconds: RestartGrace | None = Field(default=None, alias="restart_grace")
    at_expiry: AtExpiry | None = None
    mass_expiry: MassExpiry | None = None


class QueueOverrides(Section):
    """What one queue has of its own."""

    promote: PromoteOverride = Field(default=PromoteOverride(), description="instead of [promote]")
    stalled_check: StalledCheckOverride = Field(
        default=StalledCheckOverride(), description="instead of [stalled_check]"
    )


class MatchOverrides(QueueOverrides):
    """What the queues that match a glob have of their own."""

    glob: Glob = Field(description="which queues: * any text, ? one character, [abc] one of these")


# --- the rest -----------------------------------------------------------------------------------


class DiscoverySettings(Section):
    """Finding queues by looking at the node's keys."""

    enabled: bool = Field(default=False, description="whether queues are looked for")
    # Each search walks the whole keyspace, so it is never as frequent as a sweep.
    interval_seconds: Annotated[float, duration("1s", "24h")] = Field(
        default=30.0, alias="interval", description="how often queues are looked for"
    )
    include: Annotated[tuple[Glob, ...], Strict(False)] = Field(
        default=("*",), description="globs of the queues to sweep"
    )
    exclude: Annotated[tuple[Glob, ...], Strict(False)] = Field(
        default=(), description="globs of the queues to leave alone, stronger than include"
    )
    # Each queue costs about 25 series in the metrics: a million queues is 25 million of them.
    max_queues: int = Field(
        default=10_000, ge=1, le=1_000_000, description="how many queues are swept at most"
    )


class ShardSettings(Section):
    """Which part of the queues this daemon sweeps, when several share them out."""

    index: Annotated[int, OrdinalText()] = Field(
        default=0,
        ge=0,
        description="which part is ours, from 0 to count - 1; the environment may also give the "
        "name of a StatefulSet's pod, whose number at the end counts",
    )
    # Rendezvous hashing costs one hash a shard for each queue.
    count: int = Field(
        default=1, ge=1, le=1024, description="in how many parts the queues are shared out"
    )


class HttpSettings(Section):
    """Metrics, health and the status page."""

    listen: Annotated[Listen, LISTEN_FORM] = Field(
        default=Listen("127.0.0.1", 9846), description="address and port; port 0: any free one"
    )


class LogSettings(Section):
    """What is logged, and how it looks."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="the least that is logged; debug has a line for each sweep"
    )
    format: Literal["auto", "text", "json"] = Field(
        default="auto", description="auto: text on a terminal and under systemd, JSON elsewhere"
    )


class QueueSettings(Section):
    """What holds for one queue once its overrides are laid over the general settings."""

    promote: PromoteSettings
    stalled_check: StalledCheckSettings


class Settings(Section):
    """Settings of emqtimerd, the daemon that promotes due jobs and recovers expired leases."""

    queues: Annotated[tuple[QueueName, ...], Strict(False), AfterValidator(_each_once)] = Field(
        default=(), description="names of the queues to sweep"
    )
    shutdown_grace_seconds: Annotated[float, duration("0s", "1h")] = Field(
        default=10.0,
        alias="shutdown_grace",
        description="how long a stop waits for sweeps that have begun; 0s: not at all",
    )
    node: NodeSettings = Field(default=NodeSettings(), description="the EMQ node")
    promote: PromoteSettings = Field(default=PromoteSettings(), description="promotion of due jobs")
    stalled_check: StalledCheckSettings = Field(
        default=StalledCheckSettings(), description="recovery of expired leases"
    )
    queue: Annotated[
        Mapping[QueueName, QueueOverrides], AfterValidator(_unchangeable), PlainSerializer(dict)
    ] = Field(
        default_factory=lambda: MappingProxyType({}), description="overrides by a queue's name"
    )
    match: Annotated[tuple[MatchOverrides, ...], Strict(False)] = Field(
        default=(),
        description="overrides by glob: the first match counts; what [queue.…] sets is stronger",
    )
    discovery: DiscoverySettings = Field(default=DiscoverySettings(), description="finding queues")
    shard: ShardSettings = Field(default=ShardSettings(), description="sharing queues out")
    http: HttpSettings = Field(
        default=HttpSettings(), description="metrics, health, the status page"
    )
    log: LogSettings = Field(default=LogSettings(), description="logging")

    def for_queue(self, name: str) -> QueueSettings:
        """What holds for this queue: its own section, then the first matching glob, then the rest.

        Queues without a section share one value per glob, so asking for 10,000 costs little.
        """
        position = next((i for i, glob in enumerate(self._globs) if glob.match(name)), -1)
        general = self._by_match[position]
        own = self.queue.get(name)
        return _overlaid(general, own) if own else general

    def extent(self) -> str:
        """What is swept, in a few words for people."""
        count = len(self.queues)
        listed = f"{count} {'queue' if count == 1 else 'queues'} listed"
        return f"{listed}, discovery {'on' if self.discovery.enabled else 'off'}"

    @cached_property
    def _globs(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(translate(match.glob)) for match in self.match)

    @cached_property
    def _by_match(self) -> tuple[QueueSettings, ...]:
        """For each glob what holds where it is the first to match; last, what holds elsewhere."""
        general = QueueSettings(promote=self.promote, stalled_check=self.stalled_check)
        return (*(_overlaid(general, match) for match in self.match), general)

    def discovers(self, name: str) -> bool:
        """Whether discovery, if it found a queue of this name, would have it swept."""
        globs = self.discovery
        return (
            globs.enabled
            and any(re.match(translate(glob), name) for glob in globs.include)
            and not any(re.match(translate(glob), name) for glob in globs.exclude)
        )


Table = TypeVar("Table", bound=Section)


def _overlaid(general: QueueSettings, own: QueueOverrides) -> QueueSettings:
    return QueueSettings(
        promote=_with(general.promote, own.promote),
        stalled_check=_with(general.stalled_check, own.stalled_check),
    )


def _with(table: Table, override: Section) -> Table:
    # A mass_expiry table replaces the general one as a whole, like every other value.
    return table.model_copy(update={k: v for k, v in override if v is not None})
