"""A local EMQ node for people without one, and for tests: an embedded Valkey with the job core."""

from emqtimerd.devnode.foreground import run_devnode
from emqtimerd.devnode.node import DevNode
from emqtimerd.devnode.parts import (
    COMPILER_ADVICE,
    DevNodeError,
    DirectoryInUse,
    ForeignData,
    JobCoreMissing,
    PortInUse,
    ServerFailed,
    ServerMissing,
    find_server,
    jobcore_path,
    packaged_server,
)

__all__ = [
    "COMPILER_ADVICE",
    "DevNode",
    "DevNodeError",
    "DirectoryInUse",
    "ForeignData",
    "JobCoreMissing",
    "PortInUse",
    "ServerFailed",
    "ServerMissing",
    "find_server",
    "jobcore_path",
    "packaged_server",
    "run_devnode",
]
