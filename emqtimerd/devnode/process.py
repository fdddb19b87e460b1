"""Server processes that cannot outlive this one, and questions to a server."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

STOP_SECONDS = 15.0
"""How long SIGTERM may take: the server itself waits up to 10 s for replicas that lag behind."""

# Run by the Python that runs us, between fork and the server: it asks the kernel to kill this
# process when its parent ends, and becomes the server. Roads not taken: `preexec_fn` may deadlock
# where there are threads; a watching process is one more process that can be killed; SIGTERM can
# be sat out by a server that is stopped or inside a script, and SIGKILL loses nothing that was
# answered, for it is in the append-only file's pages by then. The parent may have ended before the
# kernel was asked: hence the look at who the parent is now.
_LAUNCHER = """
import ctypes, os, sys
PR_SET_PDEATHSIG, SIGKILL = 1, 9
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (SIGKILL, 0, 0, 0))):
    sys.exit("the kernel refused PR_SET_PDEATHSIG")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that wanted this server has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""

# A server built with the C library's allocator, as the packaged one is, keeps seven freed blocks
# of each size at hand. A sweep of a thousand jobs frees and needs thousands: with room for them it
# runs 8 % fewer instructions. Other allocators do not read this.
_ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=2048"}

Process = subprocess.Popen[bytes]


class _Spawner(threading.Thread):
    """The one thread that starts servers, for as long as this process lives.

    To the kernel, the parent that ends is the thread that forked: a server started by a thread of
    a pool, or of a test, would die with that thread.
    """

    def __init__(self) -> None:
        super().__init__(name="emqtimerd-devnode-spawner", daemon=True)
        self.requests: queue.SimpleQueue[
            tuple[Sequence[str], Path, Sequence[int], Future[Process]]
        ] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            command, log, pass_fds, future = self.requests.get()
            try:
                future.set_result(_popen(command, log, pass_fds))
            except OSError as error:
                future.set_exception(error)


_spawner: _Spawner | None = None
_spawner_lock = threading.Lock()


def spawn(command: Sequence[str], log: Path, pass_fds: Sequence[int] = ()) -> Process:
    """Start a server that writes to `log` and ends when this process does, however it ends.

    Only Linux keeps that promise for SIGKILL and crashes; elsewhere it holds for orderly ends.
    """
    global _spawner  # noqa: PLW0603  (one thread a process is the point)
    with _spawner_lock:
        # A forked child has the object but not the thread.
        if _spawner is None or not _spawner.is_alive():
            _spawner = _Spawner()
            _spawner.start()
    future: Future[Process] = Future()
    _spawner.requests.put((command, log, pass_fds, future))
    return future.result()


def _popen(command: Sequence[str], log: Path, pass_fds: Sequence[int]) -> Process:
    if sys.platform == "linux":
        # -I -S: nothing of the user's Python setup takes part, and it starts in milliseconds.
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
    with log.open("ab") as sink:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            env=_ALLOCATOR | os.environ,
            # Ctrl-C on the terminal is for us, who then stop the server in order.
            start_new_session=True,
        )


def end(process: Process, how: signal.Signals) -> None:
    """Send the signal and wait until the process is gone, by SIGKILL if it takes too long."""
    process.send_signal(how)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class ReplyError(Exception):
    """The server answered with an error; the text is its answer."""


Reply = bytes | int | None


def ask(port: int, *commands: Sequence[str | bytes], timeout: float) -> list[Reply]:
    """Send commands to the server at this port of 127.0.0.1 and return their replies.

    Three commands with scalar replies are all that is ever asked here, which is less than a client
    library's settings would take. Raises OSError, or ReplyError for the first error among them.
    """
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        connection.sendall(b"".join(_packed(command) for command in commands))
        with connection.makefile("rb") as stream:
            return [_reply(stream) for _ in commands]


def _packed(command: Sequence[str | bytes]) -> bytes:
    words = [word.encode() if isinstance(word, str) else word for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _reply(stream: BinaryIO) -> Reply:
    line = stream.readline()
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest
    if kind == b"-":
        raise ReplyError(rest.decode(errors="replace"))
    if kind == b":":
        return int(rest)
    if kind == b"$":
        length = int(rest)
        return None if length < 0 else stream.read(length + 2)[:-2]
    raise ConnectionResetError(f"the server ended its reply early: {line[:40]!r}")
