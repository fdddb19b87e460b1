"""One immutable, checked tree of settings, from file, environment and flags. Knows nobody.

settings   the tree: names, types, defaults, bounds        url, values   values written as text
sources    file, environment, flags                        shape         finding settings by path
load       check each source, merge, check the whole       relations     what must hold between
show       as TOML with origins, as JSON Schema            problems      errors, secrets masked
files      reading files that nobody else may write
"""

from emqtimerd.config.files import read_secret
from emqtimerd.config.load import Config, load
from emqtimerd.config.problems import ConfigError
from emqtimerd.config.settings import (
    LogSettings,
    NodeSettings,
    QueueSettings,
    Settings,
    TlsSettings,
)
from emqtimerd.config.show import schema, show
from emqtimerd.config.values import duration, host_port_text

__all__ = [
    "Config",
    "ConfigError",
    "LogSettings",
    "NodeSettings",
    "QueueSettings",
    "Settings",
    "TlsSettings",
    "duration",
    "host_port_text",
    "load",
    "read_secret",
    "schema",
    "show",
]
