"""Log lines: text for people, JSON for machines, with the journal's priorities under systemd."""

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from emqtimerd import wire
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
    # Tracebacks tell where, never with which values: the default shows those of every variable,
    # and a password is one of them.
    if people:
        colors = output.isatty() and not environ.get("NO_COLOR")
        processors.append(_harmless)
        processors.append(
            structlog.dev.ConsoleRenderer(
                colors=colors,
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            )
        )
    else:
        frames = ExceptionDictTransformer(show_locals=False)
        processors.append(structlog.processors.ExceptionRenderer(frames))
        processors.append(structlog.processors.JSONRenderer())
    if journal:
        processors.append(_with_priority)
    # APScheduler tells of errors and of skipped runs by events too; those are what we listen to.
    logging.getLogger("apscheduler").addHandler(logging.NullHandler())
    logging.getLogger("apscheduler").propagate = False
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(_Steadfast(output)),  # type: ignore[arg-type]  # all that it calls
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[settings.level.upper()]
        ),
    )
    _take_in_standard_records(log)
    return log


class _Steadfast:
    """An output that may break (a pipe whose reader left, a full disk) without breaking the work
    that is told of."""

    def __init__(self, output: TextIO) -> None:
        self._output = output

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._output.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._output.flush()


class _Forwarder(logging.Handler):
    """Takes in what is told to the standard library's loggers: the web server has no other way."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        fields = {"reason": reason} if (reason := getattr(record, "reason", None)) else {}
        exc_info = {"exc_info": record.exc_info} if record.exc_info else {}
        self._log.log(record.levelno, record.getMessage(), **fields, **exc_info)


def _take_in_standard_records(log: Log) -> None:
    logger = logging.getLogger("emqtimerd")
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    logger.addHandler(_Forwarder(log))
    logger.propagate = False


def _harmless(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape what a terminal would act upon: what a server answers may hold anything."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = wire.escaped(value)
    return event


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
