"""Log lines: text for people, JSON for machines, with the journal's priorities under systemd."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from emqtimerd.config import LogSettings

Log = FilteringBoundLogger

# sd-daemon(3): the journal takes a line's priority from its start.
_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def open_log(
    settings: LogSettings, output: TextIO = sys.stderr, environ: Mapping[str, str] = os.environ
) -> Log:
    """Return a log of the settings' level and format that writes to `output`.

    The format `auto` is text on a terminal and under systemd, JSON elsewhere.
    """
    journal = _is_journal(output, environ)
    people = settings.format == "text" or (
        settings.format == "auto" and (journal or output.isatty())
    )
    processors: list[Processor] = [structlog.processors.add_log_level]
    if not journal:
        # The journal has a time of its own.
        processors.append(structlog.processors.TimeStamper(fmt="iso", utc=True))
    if people:
        colors = output.isatty() and not environ.get("NO_COLOR")
        processors.append(structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0))
    else:
        processors.append(structlog.processors.dict_tracebacks)
        processors.append(structlog.processors.JSONRenderer())
    if journal:
        processors.append(_with_priority)
    # APScheduler tells of errors and of skipped runs by events too; those are what we listen to.
    logging.getLogger("apscheduler").addHandler(logging.NullHandler())
    logging.getLogger("apscheduler").propagate = False
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(output),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(settings.level),
    )
    return log


def _is_journal(output: TextIO, environ: Mapping[str, str]) -> bool:
    """Tell whether the output is the stream that systemd says leads to its journal."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(output.fileno())
    except (OSError, ValueError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def _with_priority(_: WrappedLogger, level: str, line: str | bytes | EventDict) -> str:
    priority = _PRIORITY.get(level, 6)
    # One record may be several lines (a traceback), and each of them is one for the journal.
    return "\n".join(f"<{priority}>{part}" for part in str(line).splitlines())
