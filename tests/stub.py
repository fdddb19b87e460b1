"""A scripted RESP server: it answers each verb as told, late, in drips, in part or not at all.

Unscripted it is a healthy EMQ node, idle unless it is given work. It keeps every command that
arrived and counts the jobs that it moved, so that a test can tell what was really sent and done.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

TOKENS = (
    b"enqueue claim claim.pause extend extends complete.flat schedule promote reschedule delay "
    b"fail.flat reprocess requeue stalled.check"
)
BRAND = b"echomq:6.0.0"
RUN_ID = b"a" * 40
LONG_AGO = b"1000000000000"
"""When the jobs that the server was given were due: in 2001."""


@dataclass(frozen=True)
class Answer:
    """What the server does about one command: bytes, and how they travel."""

    data: bytes
    late: float = 0
    """Seconds before the first byte."""
    pause: float | None = None
    """Seconds after each byte; None sends all bytes at once."""
    closes: bool = False
    """Close the connection after the bytes."""
    queued: bool = False
    """Inside MULTI, answer so at once instead of QUEUED: the command is refused there."""


Spoiler: TypeAlias = Callable[[Answer], Answer]
"""Makes another answer of the one that a healthy server gives after it has done its work."""


def simple(text: str) -> Answer:
    return Answer(b"+%b\r\n" % text.encode())


def error(text: str | bytes) -> Answer:
    return Answer(b"-%b\r\n" % (text if isinstance(text, bytes) else text.encode()))


def integer(number: int) -> Answer:
    return Answer(b":%d\r\n" % number)


def bulk(data: bytes) -> Answer:
    return Answer(b"$%d\r\n%b\r\n" % (len(data), data))


def array(*items: Answer) -> Answer:
    return Answer(b"*%d\r\n" % len(items) + b"".join(item.data for item in items))


def ids(*job_ids: bytes) -> Answer:
    return array(*(bulk(job_id) for job_id in job_ids))


NIL = Answer(b"$-1\r\n")
SILENCE = Answer(b"")
"""Nothing, now and for all that this connection asks afterwards."""
HANG_UP = Answer(b"", closes=True)


def late(answer: Answer, seconds: float) -> Answer:
    return replace(answer, late=seconds)


def dripped(answer: Answer, pause: float) -> Answer:
    return replace(answer, pause=pause)


def cut(answer: Answer, length: int) -> Answer:
    """Send the first bytes of the answer and close the connection."""
    return replace(answer, data=answer.data[:length], closes=True)


def refused(text: str) -> Answer:
    """An error that comes when the command is queued in a transaction, as an ACL's does."""
    return replace(error(text), queued=True)


@dataclass(frozen=True)
class Arrival:
    """One command as it arrived."""

    connection: int
    """Which connection brought it, counted from 1."""
    words: tuple[bytes, ...]

    @property
    def verb(self) -> str:
        return self.words[0].decode().upper()


@dataclass
class _Rule:
    verb: str
    word: bytes
    answers: list[Answer | Spoiler]
    lasting: bool
    after: int
    """Which connection is the last that it does not hold for."""

    def take(self, arrival: Arrival) -> Answer | Spoiler | None:
        if self.verb not in ("*", arrival.verb) or arrival.connection <= self.after:
            return None
        if not any(self.word in word for word in arrival.words):
            return None
        # The last answer stands for all further arrivals.
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@dataclass
class _Client:
    number: int
    socket: socket.socket
    transaction: list[tuple[Arrival, Answer | Spoiler | None]] | None = None
    spoilt: bool = False
    mute: bool = False
    unread: bytearray = field(default_factory=bytearray)


class Stub:
    """The server, on a TCP address (with TLS if asked), by default with any free port, or on a Unix
    socket; a context manager."""

    def __init__(
        self,
        unix: Path | None = None,
        tls: ssl.SSLContext | None = None,
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.arrivals: list[Arrival] = []
        self.connections = 0
        self.owed: Counter[bytes] = Counter()
        """How many jobs of a set (by its key) are due or expired."""
        self.moved: Counter[bytes] = Counter()
        """How many jobs the verbs have moved out of it."""
        self._tls = tls
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self._clients: list[_Client] = []
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()
        self._acceptor: threading.Thread | None = None
        if unix is None:
            self._listener = socket.create_server(address)
            self.host, self.port = self._listener.getsockname()
            self.url = f"{'rediss' if tls else 'redis'}://{self.host}:{self.port}/0"
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(unix))
            self._listener.listen()
            self.url = f"unix://{unix}"

    def on(
        self,
        verb: str,
        *answers: Answer | Spoiler,
        word: bytes = b"",
        lasting: bool = False,
        to_newcomers: bool = False,
    ) -> None:
        """Answer a verb (`*` is any) so, one answer an arrival, the last one for ever.

        With `word`, only where one of the command's words holds it; `to_newcomers`, only on
        connections that are not there yet. The newest rule counts, and each until `heal` unless it
        is a lasting one.
        """
        with self._lock:
            known = self.connections if to_newcomers else 0
            self._rules.insert(0, _Rule(verb, word, list(answers), lasting, known))

    def heal(self) -> None:
        """Be healthy again."""
        with self._lock:
            self._rules = [rule for rule in self._rules if rule.lasting]
        if self._acceptor is None:
            self._listener = socket.create_server((self.host, self.port))
            self._acceptor = self._spawn(self._accept)

    def count(self, verb: str, word: bytes = b"") -> int:
        """How many commands of a verb arrived."""
        return len(self.received(verb, word))

    def received(self, verb: str, word: bytes = b"") -> list[Arrival]:
        """The commands of a verb that arrived, in order."""
        with self._lock:
            return [
                arrival
                for arrival in self.arrivals
                if arrival.verb == verb and any(word in part for part in arrival.words)
            ]

    def pipelines(self, verb: str) -> list[int]:
        """How many commands of the verb came in each pipeline; TIME opens one."""
        with self._lock:
            verbs = [arrival.verb for arrival in self.arrivals]
        counts: list[int] = []
        for each in verbs:
            if each == "TIME":
                counts.append(0)
            elif each == verb:
                counts[-1] += 1
        return [count for count in counts if count]

    def say(self, answer: Answer) -> None:
        """Send something to every connection that nobody asked for."""
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            if not self._send(client, answer):
                _shut(client.socket)

    def hang_up(self) -> None:
        """Close every connection, as a restarting server does."""
        self._leave()

    def restart(self, verb: str, *answers: Answer | Spoiler, word: bytes = b"") -> None:
        """Close every connection, and answer a verb so on all that come after them."""
        self._leave(_Rule(verb, word, list(answers), lasting=False, after=0))

    def _leave(self, *rules: _Rule) -> None:
        # All at one moment: the last would go on while the first is dialled anew, and what is
        # dialled anew is to meet the rules.
        with self._lock:
            self._rules[:0] = [replace(rule, after=self.connections) for rule in rules]
            clients, self._clients = self._clients, []
            for client in clients:
                client.mute = True
        for client in clients:
            _shut(client.socket)

    def stop_listening(self) -> None:
        """Refuse further connections."""
        _shut(self._listener)
        if self._acceptor:
            self._acceptor.join()
            self._acceptor = None

    def __enter__(self) -> Self:
        self._acceptor = self._spawn(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closing.set()
        self.stop_listening()
        self.hang_up()
        for thread in self._threads:
            thread.join(5)

    def _spawn(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="stub", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()]
        thread.start()
        self._threads.append(thread)
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                if connected.family == socket.AF_INET:
                    # Replies are written one by one: each must not wait for the last one's ACK.
                    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    if self._closing.is_set():
                        connected.close()
                        break
                    self.connections += 1
                    client = _Client(self.connections, connected)
                    self._clients.append(client)
                self._spawn(lambda client=client: self._serve(client))  # type: ignore[misc]
        self._listener.close()

    def _serve(self, client: _Client) -> None:
        # What is not this protocol (a TLS hello, say) is hung up on.
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as sockets:
            sockets.enter_context(client.socket)
            if self._tls:
                client.socket = self._tls.wrap_socket(client.socket, server_side=True)
                sockets.enter_context(client.socket)
            for words in _commands(client):
                arrival = Arrival(client.number, tuple(words))
                with self._lock:
                    self.arrivals.append(arrival)
                if not self._send(client, self._answer(client, arrival)):
                    _shut(client.socket)
                    break
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)

    def _answer(self, client: _Client, arrival: Arrival) -> Answer:
        scripted = self._rule(arrival)
        if client.transaction is None:
            answer = self._done(arrival, scripted)
            if arrival.verb == "MULTI" and answer.data == b"+OK\r\n":
                client.transaction, client.spoilt = [], False
            return answer
        if arrival.verb == "EXEC":
            queued, client.transaction = client.transaction, None
            if client.spoilt:
                return error("EXECABORT Transaction discarded because of previous errors.")
            if isinstance(scripted, Answer):
                return scripted
            together = _together([self._done(*each) for each in queued])
            return scripted(together) if scripted else together
        if isinstance(scripted, Answer) and scripted.queued:
            client.spoilt = True
            return scripted
        client.transaction.append((arrival, scripted))
        return simple("QUEUED")

    def _done(self, arrival: Arrival, scripted: Answer | Spoiler | None) -> Answer:
        """Do what is asked unless something else is scripted, and say what is to be said."""
        if isinstance(scripted, Answer):
            return scripted
        with self._lock:
            healthy = self._work(arrival) or _healthy(arrival)
        return scripted(healthy) if scripted else healthy

    def _work(self, arrival: Arrival) -> Answer | None:
        """What a queue with jobs answers; None where there are none."""
        match arrival.verb, arrival.words:
            case "ZRANGE", [_, key, *_] if self.owed[key]:
                return ids(self._jobs(key, 1)[0], LONG_AGO)
            case "EVAL_RO", [_, _, _, key, _, limit, _] if self.owed[key]:
                jobs = self._jobs(key, int(limit))
                listed = [part for job in jobs for part in (bulk(job), bulk(LONG_AGO), NIL)]
                counts = (integer(0), integer(0), integer(self.owed[key]))
                return array(bulk(RUN_ID), *counts, *listed)
            case "EMQ.PROMOTE" | "EMQ.STALLED.CHECK", [_, _, key, *_, limit] if self.owed[key]:
                jobs = self._jobs(key, int(limit))
                self.owed[key] -= len(jobs)
                self.moved[key] += len(jobs)
                promotes = arrival.verb == "EMQ.PROMOTE"
                return integer(len(jobs)) if promotes else array(ids(*jobs), array())
        return None

    def _jobs(self, key: bytes, limit: int) -> list[bytes]:
        first = self.moved[key]
        return [b"JOB%06d" % (first + n) for n in range(min(limit, self.owed[key]))]

    def _rule(self, arrival: Arrival) -> Answer | Spoiler | None:
        with self._lock:
            for rule in self._rules:
                answer = rule.take(arrival)
                if answer is not None:
                    return answer
        return None

    def _send(self, client: _Client, answer: Answer) -> bool:
        # Replies come in order: after one that never comes there are no others.
        client.mute |= answer.data == b""
        if client.mute:
            return not answer.closes
        if answer.late:
            self._closing.wait(answer.late)
        if answer.pause is None:
            client.socket.sendall(answer.data)
        else:
            for at in range(len(answer.data)):
                client.socket.sendall(answer.data[at : at + 1])
                self._closing.wait(answer.pause)
        return not answer.closes


def _together(queued: list[Answer]) -> Answer:
    """The reply of EXEC: as late as the latest; one silent command silences it."""
    if any(answer.data == b"" for answer in queued):
        return Answer(b"", closes=any(answer.closes for answer in queued))
    whole = array(*queued)
    pauses = [answer.pause for answer in queued if answer.pause is not None]
    return replace(
        whole,
        late=max(answer.late for answer in queued),
        pause=max(pauses, default=None),
        closes=any(answer.closes for answer in queued),
    )


def _healthy(arrival: Arrival) -> Answer:
    """What an idle EMQ node answers."""
    if arrival.verb == "TIME":
        microseconds = time.time_ns() // 1000
        return ids(b"%d" % (microseconds // 1_000_000), b"%d" % (microseconds % 1_000_000))
    return _HEALTHY.get(arrival.verb, simple("OK"))


_HEALTHY = {
    "EMQ.VERSION": bulk(TOKENS),
    "GET": bulk(BRAND),
    "INFO": bulk(b"valkey_version:9.1.2\r\nrun_id:%b\r\nuptime_in_seconds:60\r\n" % RUN_ID),
    "ZRANGE": array(),
    "EVAL_RO": array(),
    "ZCARD": integer(0),
    "EMQ.PROMOTE": integer(0),
    "EMQ.STALLED.CHECK": array(array(), array()),
    "EXEC": error("ERR EXEC without MULTI"),
}


def _commands(client: _Client) -> Iterator[list[bytes]]:
    while True:
        header = _line(client)
        if header is None:
            return
        words = []
        for _ in range(int(header[1:])):
            length = _line(client)
            assert length is not None
            words.append(_exactly(client, int(length[1:]) + 2)[:-2])
        yield words


def _line(client: _Client) -> bytes | None:
    while b"\r\n" not in client.unread:
        if not _more(client):
            return None
    at = client.unread.index(b"\r\n")
    line = bytes(client.unread[:at])
    del client.unread[: at + 2]
    return line


def _exactly(client: _Client, length: int) -> bytes:
    while len(client.unread) < length:
        if not _more(client):
            raise ConnectionResetError
    data = bytes(client.unread[:length])
    del client.unread[:length]
    return data


def _more(client: _Client) -> bool:
    data = client.socket.recv(65_536)
    client.unread += data
    return bool(data)


def _shut(each: socket.socket) -> None:
    # Closing alone would not wake the thread that waits on it.
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
