"""Log lines: who reads them, what they must not show, and an output that breaks."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from emqtimerd.config import LogSettings
from emqtimerd.log import Log, open_log


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leaves the standard library's loggers as they were."""
    loggers = [logging.getLogger(name) for name in ("emqtimerd", "apscheduler")]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate


class Terminal(io.StringIO):
    """Text that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def lines(output: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


def test_machines_get_a_json_object_a_line() -> None:
    """Without a terminal `auto` is JSON: the event, its level, a time with its zone, the fields."""
    output = io.StringIO()
    open_log(LogSettings(), output, {}).info("node up", node="a", queues=["é\u2028"])
    (line,) = lines(output)
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "node up", "level": "info", "node": "a", "queues": ["é\u2028"]}


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_people_get_text(environ: dict[str, str], coloured: bool) -> None:
    """On a terminal `auto` is text, in colour unless NO_COLOR is set."""
    output = Terminal()
    open_log(LogSettings(), output, environ).warning("node restarted", node="a")
    assert "node restarted" in output.getvalue()
    assert ("\x1b[" in output.getvalue()) is coloured


@pytest.mark.parametrize("chosen", ["text", "json"])
def test_the_format_can_be_chosen(chosen: Any) -> None:
    """What is set holds, terminal or not."""
    for output in (io.StringIO(), Terminal()):
        open_log(LogSettings(format=chosen), output, {"NO_COLOR": "1"}).info("started")
        assert output.getvalue().startswith("{") is (chosen == "json")


def test_less_than_the_level_is_not_told() -> None:
    """A line for each sweep would be debug."""
    output = io.StringIO()
    log = open_log(LogSettings(level="warning"), output, {})
    log.debug("swept")
    log.info("node up")
    log.warning("node restarted")
    assert [line["event"] for line in lines(output)] == ["node restarted"]


def test_the_journal_gets_its_priorities() -> None:
    """Under systemd each line, of a traceback too, begins with its priority; the time is the
    journal's own."""
    reader, writer = os.pipe()
    status = os.fstat(writer)
    stream = f"{status.st_dev}:{status.st_ino}"
    with os.fdopen(reader) as source, os.fdopen(writer, "w") as output:
        log = open_log(LogSettings(), output, {"JOURNAL_STREAM": stream})
        log.info("started")
        log.error("a round failed", exc_info=ValueError("why"))
        output.close()
        told = source.read().splitlines()
    assert told[0].startswith("<6>[info")
    assert all(line.startswith("<3>") for line in told[1:])
    assert told[-1].endswith("ValueError: why")


@pytest.mark.parametrize("stream", ["", "1:2", "text", "8"])
def test_another_stream_is_not_the_journal(stream: str) -> None:
    """A variable that was inherited from elsewhere changes nothing."""
    with open(os.devnull, "w") as output:  # noqa: PTH123 - a real file descriptor is the point
        open_log(LogSettings(), output, {"JOURNAL_STREAM": stream}).info("started")
    told = io.StringIO()
    open_log(LogSettings(), told, {"JOURNAL_STREAM": stream}).info("started")
    assert told.getvalue().startswith("{")


def fail(log: Log) -> None:
    password = "hunter2"  # noqa: F841 - what must not be shown
    try:
        raise ValueError("why")
    except ValueError as error:
        log.error("a round failed", exc_info=error)
        log.exception("the main loop failed")


@pytest.mark.parametrize("chosen", ["text", "json"])
def test_a_traceback_tells_where_and_not_with_which_values(chosen: Any) -> None:
    """Variables hold passwords; the file, the line and the error are what is needed."""
    output = io.StringIO()
    fail(open_log(LogSettings(format=chosen), output, {}))
    text = output.getvalue()
    assert "hunter2" not in text.replace('password = "hunter2"', "")
    assert "locals" not in text
    assert text.count("test_log.py") >= 2
    assert "why" in text


def test_no_control_code_reaches_a_terminal() -> None:
    """Binary job ids, server errors: an escape sequence is shown and not acted upon."""
    output = io.StringIO()
    log = open_log(LogSettings(format="text"), output, {})
    log.error("sweep failed", reason="\x1b[31m", node="a b\x1b]0;x\x07\nc", ids=["\x1b[0m"])
    (line,) = output.getvalue().splitlines()
    assert line.isprintable()
    assert r"\x1b[31m" in line


def test_the_web_server_speaks_in_the_same_format() -> None:
    """What is told to a standard logger is a line like the others, with its reason."""
    output = io.StringIO()
    open_log(LogSettings(), io.StringIO(), {})
    open_log(LogSettings(), output, {})
    logger = logging.getLogger("emqtimerd.http")
    logger.warning("web server", extra={"reason": "a client was odd"})
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("web server")
    first, second = lines(output)
    assert (first["event"], first["reason"]) == ("web server", "a client was odd")
    assert first["level"] == "warning"
    assert second["exception"][0]["exc_type"] == "KeyError"


class Broken(io.StringIO):
    """An output that is gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space"), ValueError("closed")]
)
def test_a_broken_output_does_not_break_the_work(error: Exception) -> None:
    """Loop dies on a log call: a reader that left and a full disk are nobody else's failure."""
    log = open_log(LogSettings(), Broken(error), {})
    log.error("a round failed", exc_info=ValueError("why"))


def test_lines_of_many_threads_stay_whole() -> None:
    """A line is written in one piece."""
    output = io.StringIO()
    log = open_log(LogSettings(), output, {})
    threads = [
        threading.Thread(target=lambda: [log.info("swept", text="x" * 200) for _ in range(100)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(output)) == 400
