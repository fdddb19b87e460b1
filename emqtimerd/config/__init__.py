"""One immutable, checked tree of settings, from file, environment and flags. Knows nobody.

settings   the tree: names, types, defaults, bounds        url, values   values written as text
sources    file, environment, flags                        shape         finding settings by path
load       check each source, merge, check the whole       relations     what must hold between
show       as TOML with origins, as JSON Schema            problems      errors, secrets masked
files      reading files that nobody else may write        changes       what a reload changes
"""

from emqtimerd.config.changes import Changes, changes
from emqtimerd.config.files import read_secret
from emqtimerd.config.load import Config, load
from emqtimerd.config.problems import ConfigError, Problem
from emqtimerd.config.settings import (
    DiscoverySettings,
    HttpSettings,
    LogSettings,
    MassExpirySettings,
    NodeSettings,
    PromoteSettings,
    QueueSettings,
    SentinelSettings,
    Settings,
    ShardSettings,
    StalledCheckSettings,
    TlsSettings,
)
from emqtimerd.config.show import schema, show
from emqtimerd.config.url import NodeUrl
from emqtimerd.config.values import Listen

__all__ = [
    "Changes",
    "Config",
    "ConfigError",
    "DiscoverySettings",
    "HttpSettings",
    "Listen",
    "LogSettings",
    "MassExpirySettings",
    "NodeSettings",
    "NodeUrl",
    "Problem",
    "PromoteSettings",
    "QueueSettings",
    "SentinelSettings",
    "Settings",
    "ShardSettings",
    "StalledCheckSettings",
    "TlsSettings",
    "changes",
    "load",
    "read_secret",
    "schema",
    "show",
]
