"""Connections of the crew to the servers: what is sent in one go, and what is made of no answer."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from emqtimerd import wire

PATIENCE_SECONDS = 8.0
"""How long a reply may take; a server that is stopped for longer leaves doubts behind."""

Ports = Mapping[str, int]
"""Where each queue is found. Several may be found at one place."""


class Broken(Exception):
    """The connection broke, or could not be made; `replies` came before."""

    def __init__(self, replies: list[Any], *, sent: bool) -> None:
        super().__init__()
        self.replies = replies
        self.sent = sent


_NOTHING_YET = object()


class Line:
    """A connection to one place that is made anew whenever it broke."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def exchange(self, commands: Sequence[bytes], count: int) -> list[Any]:
        """Send commands and return their replies, errors as values. Raises Broken."""
        replies: list[Any] = []
        sent = False
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), 3)
                self._reader = hiredis.Reader(
                    replyError=wire.ReplyError, notEnoughData=_NOTHING_YET
                )
            deadline = time.monotonic() + PATIENCE_SECONDS
            self._socket.settimeout(PATIENCE_SECONDS)
            sent = True
            self._socket.sendall(b"".join(commands))
            while len(replies) < count:
                reply = self._reader.gets()
                if reply is not _NOTHING_YET:
                    replies.append(reply)
                    continue
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                data = self._socket.recv(65_536)
                if not data:
                    raise ConnectionResetError
                self._reader.feed(data)
        except (OSError, hiredis.HiredisError) as error:
            self.close()
            raise Broken(replies, sent=sent) from error
        return replies

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass
class Act:
    """Commands that belong together, and who reads their replies (None: outcome unknown)."""

    queue: str
    commands: bytes
    replies: int
    read: Callable[[list[Any] | None], None]
    again: Callable[[], None] = lambda: None
    """Called when nothing was sent."""


class Lines:
    """A line to each place where queues are found."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._lines = {port: Line(port) for port in ports.values()}

    def perform(self, acts: Sequence[Act]) -> bool:
        """Send all acts in one go to each place and have their replies read; tell whether all lines
        held."""
        held = True
        for port, line in self._lines.items():
            there = [act for act in acts if self._ports[act.queue] == port]
            held &= not there or _perform(line, there)
        return held

    def close(self) -> None:
        """Close the connections."""
        for line in self._lines.values():
            line.close()


def _perform(line: Line, acts: Sequence[Act]) -> bool:
    broken: Broken | None = None
    try:
        replies = line.exchange([act.commands for act in acts], sum(act.replies for act in acts))
    except Broken as error:
        replies, broken = error.replies, error
    position = 0
    for act in acts:
        part = replies[position : position + act.replies]
        position += act.replies
        if len(part) == act.replies:
            act.read(part)
        elif broken and not broken.sent:
            act.again()
        else:
            act.read(None)
    return broken is None
