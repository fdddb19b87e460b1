"""What a service manager is told: READY, STATUS, RELOADING, STOPPING, and that the daemon lives.

sd_notify(3): one datagram of `NAME=value` lines to the socket that the environment names. It takes
so few lines that a library would be more to read than this.
"""

import os
import socket
import time
from collections.abc import Mapping

LINE_BYTES = 1_000
"""The longest line: a manager drops a message of more than 4,096 bytes, READY=1 and all."""

SEND_SECONDS = 1.0
"""How long a change of state waits for room in a manager's full queue: without READY=1 it would
end the service. A status or a sign of life is worth no waiting, the next one comes soon."""

PINGS_IN_TIME = 8
"""How many signs of life fit into the watchdog's time at most: two are asked for, and each wakes
the manager."""


class Notifier:
    """The service manager's socket, if there is one; a dead socket never stops the daemon."""

    def __init__(self, environ: Mapping[str, str] = os.environ, pid: int | None = None) -> None:
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self.watchdog_seconds = _watchdog_seconds(environ, os.getpid() if pid is None else pid)
        """How often a sign of life is wanted at least; None when nobody watches."""
        self._status = ""
        self._last_ping = float("-inf")

    def ready(self, status: str) -> None:
        """Say that the service is up, or that a reload is over, however it went."""
        self._status = status
        self._send("READY=1", f"STATUS={status}", wait_seconds=SEND_SECONDS)

    def reloading(self) -> None:
        """Say that a reload begins; the time in the same datagram is what the manager asks for."""
        self._send(
            "RELOADING=1",
            f"MONOTONIC_USEC={time.monotonic_ns() // 1000}",
            wait_seconds=SEND_SECONDS,
        )

    def stopping(self, status: str) -> None:
        """Say that the service goes down on purpose."""
        self._send("STOPPING=1", f"STATUS={status}", wait_seconds=SEND_SECONDS)

    def extend(self, seconds: float) -> None:
        """Ask for so much time, from now on, for what is under way; a manager that grants more
        anyway takes nothing back."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1_000_000)}", wait_seconds=SEND_SECONDS)

    def status(self, status: str) -> None:
        """Say in a line how things stand; the same line is not sent twice."""
        if status != self._status:
            self._status = status
            self._send(f"STATUS={status}")

    def alive(self) -> None:
        """Give the sign of life that the watchdog waits for, if there is one and it is time."""
        if self.watchdog_seconds is None:
            return
        now = time.monotonic()
        if now - self._last_ping >= self.watchdog_seconds / PINGS_IN_TIME:
            self._last_ping = now
            self._send("WATCHDOG=1")

    def _send(self, *lines: str, wait_seconds: float = 0.0) -> None:
        if self._address is None:
            return
        data = b"\n".join(map(_line, lines))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(wait_seconds)
                sender.sendto(data, self._address)
        except OSError:
            # Gone, or full: the manager then goes by what it last heard.
            return


def _line(text: str) -> bytes:
    """One line of a message: what a server said can neither add a line nor act on a terminal."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    # What is cut in the middle of a character is no UTF-8, and a manager drops the whole line then.
    return printable.encode()[:LINE_BYTES].decode(errors="ignore").encode()


def _address(name: str) -> str | None:
    """The socket's address: `@` stands for the NUL byte of an abstract one."""
    if name.startswith("@"):
        return "\0" + name[1:]
    return name if name.startswith("/") else None


def _watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """The watchdog's time limit, if it is meant for this process (sd_watchdog_enabled(3))."""
    limit, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not limit.isascii() or not limit.isdigit() or int(limit) == 0:
        return None
    if owner and owner != str(pid):
        return None
    return int(limit) / 1_000_000
