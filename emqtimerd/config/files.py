"""Reading the configuration file and secret files, and refusing those that anybody may write."""

import os
import stat
from pathlib import Path

from emqtimerd.config.problems import ConfigError, Problem, quoted

# Ten thousand of the longest queue names are 3 MB; what is larger is not a configuration.
LARGEST_CONFIG = 16 * 1024 * 1024
# Longer than any password or token, and short enough to read at each connection.
LARGEST_SECRET = 64 * 1024


def read_secret(path: str | Path, setting: str = "password_file") -> str:
    """The secret in a file, without the newline that editors end a file with.

    Opened and judged anew at each call, so that a rotated secret needs no restart.
    """
    problem, text = "", ""
    try:
        content = _read(path, LARGEST_SECRET, regular=True)
        text = content.decode().removesuffix("\n").removesuffix("\r")
        problem = "" if text else "holds no secret: the file is empty"
    except UnicodeDecodeError:
        problem = "is not valid UTF-8"
    except OSError as error:
        problem = why(error)
    except ValueError as error:
        problem = str(error)
    # Outside the handler: a decoding error carries the file's content as context.
    if problem:
        raise ConfigError([Problem(setting, problem, value=quoted(str(path)))])
    return text


def read_config(path: str | Path) -> bytes:
    """The bytes of the configuration file; a pipe will do as well, for `--config <(…)`."""
    return _read(path, LARGEST_CONFIG, regular=False)


def why(error: OSError) -> str:
    """The operating system's reason, without its number."""
    return f"cannot be read: {error.strerror or type(error).__name__}"


def writable_by_anybody(path: str) -> str | None:
    """What is wrong with who may write a file; nothing when it cannot be looked at (yet)."""
    try:
        return _writable(path, Path(path).stat())
    except (OSError, ValueError):
        return None


def _writable(path: str | Path, status: os.stat_result) -> str | None:
    # Only the file itself is judged: the directories of mounted volumes look worse than they are.
    if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
        return f"may be written by anybody: run chmod o-w {os.path.realpath(path)}"
    return None


def _read(path: str | Path, largest: int, *, regular: bool) -> bytes:
    # Without O_NONBLOCK a named pipe that nobody writes to would hold the daemon up for ever.
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_NONBLOCK if regular else 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if regular and not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        if problem := _writable(path, status):
            raise ValueError(problem)
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"is larger than {largest // 1024} KiB")
    return content
