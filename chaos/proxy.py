"""The network between a daemon and the server: it can stall, be cut, refuse, swallow, break off."""

import random
import socket
import struct
import threading
from contextlib import closing, suppress

PORTS = range(22_000, 32_000)
"""Below the ports that systems give to outgoing connections: one of those could take ours while we
refuse."""

READ_BYTES = 65_536


class Proxy:
    """Passes bytes between a port of its own at `host` and the server's; a context manager."""

    def __init__(self, target: int, host: str = "127.0.0.1") -> None:
        self._target = target
        self._host = host
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._flowing = threading.Event()
        self._flowing.set()
        self._swallowing = False
        self._replies_left: int | None = None
        self._closed = False
        self.port = 0
        self._listen()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._flowing.set()
        self.refuse()

    def lead_to(self, target: int) -> None:
        """Lead to this server from now on; what leads to another one is cut."""
        before, self._target = self._target, target
        if before != target:
            self.cut()

    # --- what can go wrong ----------------------------------------------------------------------

    def stall(self) -> None:
        """Hold back all bytes, of both directions; connections are still made."""
        self._flowing.clear()

    def swallow(self) -> None:
        """Take all bytes and pass none on: the other end is gone, and nobody says so."""
        self._swallowing = True

    def cut(self) -> None:
        """Reset all connections; new ones are welcome."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for each in pair:
                _reset(each)

    def refuse(self) -> None:
        """Reset all connections, and refuse new ones."""
        # Waking the thread that waits in accept() takes a shutdown.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.cut()

    def break_off(self, replies: int) -> None:
        """Reset the connection on which the server's next so many bytes have been passed on."""
        self._replies_left = replies

    def mend(self) -> None:
        """Be a good network again."""
        if self._swallowing:
            # What was swallowed is missing on these connections.
            self._swallowing = False
            self.cut()
        self._replies_left = None
        self._flowing.set()
        if not self._acceptor.is_alive():
            self._listen()

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._pairs)

    # --- passing bytes --------------------------------------------------------------------------

    def _listen(self) -> None:
        for _ in range(100):
            port = self.port or random.choice(PORTS)
            with suppress(OSError):
                self._listener = socket.create_server((self._host, port))
                self.port = port
                break
        else:
            raise OSError("no port is free")
        self._acceptor = threading.Thread(target=self._accept, name="proxy-accept", daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            try:
                theirs = socket.create_connection(("127.0.0.1", self._target), 1)
            except OSError:
                _reset(ours)
                continue
            theirs.settimeout(None)
            pair = ours, theirs
            with self._lock:
                self._pairs.add(pair)
            for source, sink, replies in ((ours, theirs, False), (theirs, ours, True)):
                threading.Thread(
                    target=self._pass, args=(source, sink, pair, replies), daemon=True
                ).start()

    def _pass(
        self,
        source: socket.socket,
        sink: socket.socket,
        pair: tuple[socket.socket, socket.socket],
        replies: bool,
    ) -> None:
        with suppress(OSError):
            while data := source.recv(READ_BYTES):
                self._flowing.wait()
                if self._swallowing:
                    continue
                left = self._replies_left
                if replies and left is not None:
                    if len(data) >= left:
                        self._replies_left = None
                        sink.sendall(data[:left])
                        break
                    self._replies_left = left - len(data)
                sink.sendall(data)
        self._flowing.wait()
        with self._lock:
            self._pairs.discard(pair)
        for each in pair:
            _reset(each)


def _reset(connection: socket.socket) -> None:
    """Close it so that the other end learns of it at once, whatever is on its way."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    # A thread may wait in recv(): closing alone would not wake it.
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    with closing(connection):
        pass
