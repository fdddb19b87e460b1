"""The daemon's small web server: metrics, the two probes, and the page for people.

It answers from the ledger alone. No request reaches the node, so a node that is gone leaves the
answers as quick as they were.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import parse_qs

from cheroot import makefile, server, wsgi
from cheroot.workers import threadpool

from emqtimerd import metrics, page
from emqtimerd.config import host_port_text
from emqtimerd.ledger import Health, Ledger

log = logging.getLogger(__name__)

THREADS = 8
"""How many requests are answered at one time. All answers but a scrape take a few ms."""

SCRAPES = 2
"""How many of them may be scrapes, each of which may wait for a slow reader: the probes always
find a thread. Prometheus in a pair of replicas fits."""

SCRAPE_WAIT_SECONDS = 1.0
"""How long a further scrape waits for its turn before it is told to come again."""

REQUEST_SECONDS = 3.0
"""How long a request may take to arrive, in all and not for each byte. It is a packet or two:
three seconds leave room for a lost one to be sent again, and a client that drips costs little."""

CROWDED_SECONDS = 0.1
"""The same while others wait for a thread: a packet of an honest client is there at once, and a
probe behind a full line of clients that drip then gets its turn within a second."""

RESPONSE_SECONDS = 30.0
"""How long a client may take to read its answer, in all: three times Prometheus' own patience."""

IDLE_SECONDS = 75
"""How long a connection is kept for its next request: longer than a usual scrape interval."""

IDLE_CONNECTIONS = 128
"""How many of those are kept; more than enough for probes, scrapers and a few browsers, and far
from the usual limit of 1,024 files."""

WAITING_REQUESTS = 64
"""How many requests may wait for a thread; beyond it they are turned away at once."""

HEADER_BYTES = 16_384
"""The size of a request's head; browsers send the cookies of every service on localhost."""

BODY_BYTES = 4_096
"""The size of a body that is read, only to be ignored: nothing here takes one."""

STOP_SECONDS = 1
"""How long running answers may take to finish at the end; then their connections are cut."""

MIN_WAIT_SECONDS = 0.001
"""A timeout of zero would switch the socket to non-blocking; a passed deadline waits this long."""

POLL_SECONDS = 0.5
"""How often expired connections are looked for, and how long a stop may wait to be noticed."""


class CannotListen(Exception):
    """The address cannot be listened on."""


class PortInUse(CannotListen):
    """Another process listens on this address already."""


# --- the answers --------------------------------------------------------------------------------

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[[str, list[tuple[str, str]]], object]

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
HTML = "text/html; charset=utf-8"

CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src '{page.STYLE_HASH}'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)

COMMON_HEADERS = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One response. A body of bytes has a length; one that is streamed has none."""

    status: str
    kind: str
    body: bytes | Iterable[bytes]
    headers: tuple[tuple[str, str], ...] = ()


class Application:
    """The WSGI application: it picks the answer by path, and never changes anything."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._exposition = metrics.Exposition(ledger)
        self._scrapes = threading.BoundedSemaphore(SCRAPES)
        self._routes: dict[str, Callable[[Environ], Answer]] = {
            "/": self._page,
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            # Browsers ask for it by themselves; a 404 would be noise in their console.
            "/favicon.ico": lambda _: Answer("204 No Content", "", b""),
        }

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        answer = self._answer(environ)
        headers = [*COMMON_HEADERS, *answer.headers]
        if answer.kind:
            headers.append(("Content-Type", answer.kind))
        if isinstance(answer.body, bytes):
            if not answer.status.startswith("204"):
                headers.append(("Content-Length", str(len(answer.body))))
            body: Iterable[bytes] = [answer.body]
        else:
            body = answer.body
        start_response(answer.status, headers)
        if environ["REQUEST_METHOD"] == "HEAD":
            _close(body)
            return []
        return body

    def _answer(self, environ: Environ) -> Answer:
        route = self._routes.get(environ["PATH_INFO"])
        if route is None:
            known = "/, /metrics, /healthz and /readyz"
            return Answer("404 Not Found", TEXT, f"nothing here; there are {known}\n".encode())
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            body = b"only GET and HEAD are answered here\n"
            return Answer("405 Method Not Allowed", TEXT, body, (("Allow", "GET, HEAD"),))
        return route(environ)

    def _metrics(self, environ: Environ) -> Answer:
        openmetrics = metrics.wants_openmetrics(environ.get("HTTP_ACCEPT", ""))
        kind = metrics.OPENMETRICS_TYPE if openmetrics else metrics.CLASSIC_TYPE
        headers = [("Vary", "Accept, Accept-Encoding")]
        if environ["REQUEST_METHOD"] == "HEAD":
            return Answer("200 OK", kind, iter(()), tuple(headers))
        if not self._scrapes.acquire(timeout=SCRAPE_WAIT_SECONDS):
            body = f"{SCRAPES} scrapes are being answered; come again\n".encode()
            return Answer("503 Service Unavailable", TEXT, body, (("Retry-After", "1"),))
        pieces = self._exposition.text(openmetrics=openmetrics)
        if metrics.wants_gzip(environ.get("HTTP_ACCEPT_ENCODING", "")):
            headers.append(("Content-Encoding", "gzip"))
            pieces = metrics.compressed(pieces)
        return Answer("200 OK", kind, _Scrape(pieces, self._scrapes.release), tuple(headers))

    def _healthz(self, environ: Environ) -> Answer:
        health = self._ledger.health()
        return _probe(environ, "alive", health.alive, health)

    def _readyz(self, environ: Environ) -> Answer:
        health = self._ledger.health()
        return _probe(environ, "ready", health.ready, health)

    def _page(self, environ: Environ) -> Answer:
        # WSGI hands over the bytes of the query as Latin-1; they are UTF-8 once unquoted.
        query = parse_qs(environ.get("QUERY_STRING", ""), errors="replace", max_num_fields=None)
        view = page.View.of({name: values[-1] for name, values in query.items()})
        text = page.render(self._ledger, view)
        return Answer("200 OK", HTML, text.encode(errors="replace"))


def _probe(environ: Environ, name: str, good: bool, health: Health) -> Answer:
    status = "200 OK" if good else "503 Service Unavailable"
    reasons = [] if good else list(health.reasons)
    query = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=None)
    wants_json = query.get("format") == ["json"] or "application/json" in environ.get(
        "HTTP_ACCEPT", ""
    )
    if wants_json:
        return Answer(status, JSON, json.dumps({name: good, "reasons": reasons}).encode() + b"\n")
    lines = [name] if good else [f"not {name}", *(f"- {reason}" for reason in reasons)]
    return Answer(status, TEXT, "\n".join([*lines, ""]).encode(errors="replace"))


class _Scrape:
    """The pieces of a scrape; its turn ends with it, read to the end or not."""

    def __init__(self, pieces: Iterator[bytes], done: Callable[[], None]) -> None:
        self._pieces = pieces
        self._done = done
        self._open = True

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        if self._open:
            self._open = False
            _close(self._pieces)
            self._done()


def _close(body: object) -> None:
    close = getattr(body, "close", None)
    if close is not None:
        close()


# --- the server ---------------------------------------------------------------------------------


class _DeadlineSocket(socket.socket):
    """A socket whose timeout is for all that is read or sent until its deadline, not for each byte.

    With a timeout a byte, a client that drips would keep a thread for hours.
    """

    deadline = float("inf")
    crowded_deadline = float("inf")
    """The deadline of what is read while `crowded`."""
    crowded: Callable[[], bool] = staticmethod(lambda: False)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        while True:
            deadline = self.crowded_deadline if self.crowded() else self.deadline
            left = max(deadline - time.monotonic(), MIN_WAIT_SECONDS)
            # A crowd may come while we wait.
            self.settimeout(min(left, CROWDED_SECONDS))
            try:
                return super().recv_into(*args, **kwargs)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def send(self, *args: Any, **kwargs: Any) -> int:
        left = max(self.deadline - time.monotonic(), MIN_WAIT_SECONDS)
        self.settimeout(min(left, RESPONSE_SECONDS))
        return super().send(*args, **kwargs)


class _Headers(dict[bytes, bytes]):
    """The headers of a request. Of these two another reader on the way may take the one and we the
    other, so that they come once or not at all (RFC 9112)."""

    def __setitem__(self, name: bytes, value: bytes) -> None:
        if name in (b"Host", b"Content-Length") and name in self:
            raise ValueError(f"more than one {name.decode()} header")
        super().__setitem__(name, value)


class _HeaderReader(server.HeaderReader):
    """Reads the lines of a head; what another reader on the way may read otherwise is refused."""

    def __call__(self, *args: Any) -> Any:
        try:
            return super().__call__(*args)
        except UnboundLocalError as error:
            # A first line that goes on from the one before it: there is none.
            raise ValueError("Illegal header line.") from error

    def _transform_key(self, name: bytes) -> Any:
        if name != name.strip():
            raise ValueError("white space around the name of a header")
        return super()._transform_key(name)  # type: ignore[misc]  # its stubs leave it out


class _Request(server.HTTPRequest):
    """A request whose answer has its own deadline, and whose body is never taken for a request."""

    header_reader = _HeaderReader()

    def read_request_headers(self) -> bool:
        """Read the head; a length must be plain digits, while int() also takes `-1` and `5_0`."""
        self.inheaders = _Headers()
        if not super().read_request_headers():  # type: ignore[no-untyped-call]
            return False
        if not self.inheaders.get(b"Content-Length", b"0").isdigit():
            self.simple_response("400 Bad Request", "Malformed Content-Length header")
            return False
        if self.response_protocol == "HTTP/1.1" and b"Host" not in self.inheaders:
            self.simple_response("400 Bad Request", "HTTP/1.1 wants a Host header")
            return False
        return True

    def send_headers(self) -> None:
        """Send the head of the answer. To HEAD it says how the body would come, and none comes;
        cheroot would close the connection to mark its end."""
        asked, self.method = self.method, b"GET"
        super().send_headers()
        self.method = asked
        self.chunked_write &= asked != b"HEAD"

    def respond(self) -> None:
        self.conn.socket.deadline = time.monotonic() + RESPONSE_SECONDS
        if self.chunked_read:
            # Nobody reads a body here, and what is left of this one has no known end.
            self.close_connection = True
        super().respond()


class _Connection(server.HTTPConnection):
    RequestHandlerClass = _Request

    def __init__(self, server: Any, sock: socket.socket, makefile: Any = makefile.MakeFile) -> None:
        timed = _DeadlineSocket(sock.family, sock.type, sock.proto, fileno=sock.detach())
        timed.crowded = lambda: server.requests.qsize > 0
        super().__init__(server, timed, makefile)

    def communicate(self) -> Any:
        now = time.monotonic()
        self.socket.deadline = now + REQUEST_SECONDS
        self.socket.crowded_deadline = now + CROWDED_SECONDS
        return super().communicate()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Close the connection and forget what was not sent.

        Else that is tried when the object is collected, and its failure printed.
        """
        super().close()
        with contextlib.suppress(OSError):
            self.wfile.close()


class _Pool(threadpool.ThreadPool):
    def _spawn_worker(self) -> threadpool.WorkerThread:
        """Start a thread with a name, which does not keep a process alive that ends otherwise."""
        worker = threadpool.WorkerThread(self.server)  # type: ignore[no-untyped-call]
        worker.name = worker.name.replace("Thread", "http")
        worker.daemon = True
        worker.start()
        return worker

    @staticmethod
    def _force_close(conn: Any) -> None:
        """Cut a connection whose answer did not end in time; its thread then ends too."""
        if conn is not None:
            with contextlib.suppress(OSError):
                conn.socket.shutdown(socket.SHUT_RDWR)


class _Server(wsgi.Server):
    ConnectionClass = _Connection
    keep_alive_conn_limit = IDLE_CONNECTIONS
    max_request_header_size = HEADER_BYTES
    max_request_body_size = BODY_BYTES
    expiration_interval = POLL_SECONDS
    bind_error: OSError | None = None

    def __init__(self, address: tuple[str, int], app: Application) -> None:
        super().__init__(
            address,
            app,
            server_name="emqtimerd",
            request_queue_size=WAITING_REQUESTS,
            timeout=IDLE_SECONDS,
            shutdown_timeout=STOP_SECONDS,
        )
        self.requests = _Pool(
            self,
            min=THREADS,
            max=THREADS,
            accepted_queue_size=WAITING_REQUESTS,
            accepted_queue_timeout=0,
        )

    def bind(self, family: Any, type: Any, proto: int = 0) -> Any:  # noqa: A002 - cheroot's name
        try:
            return super().bind(family, type, proto)
        except OSError as error:
            # cheroot raises a new error, with words and without the number.
            self.bind_error = error
            raise

    @staticmethod
    def bind_socket(socket_: Any, bind_addr: Any) -> Any:
        try:
            socket_.bind(bind_addr)
        except OSError:
            socket_.close()
            raise
        return socket_

    def process_conn(self, conn: Any) -> None:
        """Give a connection to a thread once it has something to say, and there is room."""
        if conn.last_used is None and self._may_wait():
            # New: it waits beside the kept ones, so that one that says nothing takes no thread.
            self.put_conn(conn)
        elif self.requests.qsize < WAITING_REQUESTS:
            super().process_conn(conn)
        else:
            conn.close()

    def _may_wait(self) -> bool:
        return bool(self.can_add_keepalive_connection)

    def _serve_unservicable(self) -> None:
        """Name the thread of cheroot's own that answers 503; `process_conn` leaves it idle."""
        threading.current_thread().name = "http-busy"
        super()._serve_unservicable()  # type: ignore[misc]

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Log what cheroot has to say: a client that went away is nobody's business but its own."""
        if level >= logging.WARNING:
            log.log(level, "web server", extra={"reason": msg}, exc_info=traceback)


class HttpServer:
    """Serves the application on an address from `start` to `stop`, in threads of its own."""

    def __init__(self, host: str, port: int, app: Application) -> None:
        self._address = (host, port)
        self._server = _Server(self._address, app)
        self._thread = threading.Thread(target=self._serve, name="http-accept", daemon=True)
        self.failure: BaseException | None = None
        """What ended the server, if it was not `stop`."""

    @property
    def port(self) -> int:
        """The port, once started; the one that the kernel chose where it was left to it."""
        return int(self._server.bind_addr[1])

    @property
    def running(self) -> bool:
        """Whether connections are taken."""
        return self._thread.is_alive()

    def start(self) -> "HttpServer":
        """Bind and serve. Raises PortInUse or CannotListen; then nothing was started."""
        # cheroot takes any LISTEN_PID, its own process's or not, for a socket passed by systemd.
        os.environ.pop("LISTEN_PID", None)
        try:
            self._server.prepare()
        except OSError as error:
            raise _cannot_listen(self._address, self._server.bind_error or error) from error
        self._thread.start()
        return self

    def _serve(self) -> None:
        try:
            self._server.serve()
        except BaseException as error:  # noqa: BLE001 - the owner ends the process with it
            self.failure = error

    def stop(self) -> None:
        """Take no more connections, let running answers finish for a moment, end all threads."""
        self._server.stop()
        if self._thread.ident is not None:
            self._thread.join()


def _cannot_listen(address: tuple[str, int], error: OSError) -> CannotListen:
    where = host_port_text(*address)
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"cannot listen on {where}: another process does already; stop it, or choose another "
            "http.listen (port 0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return CannotListen(
            f"cannot listen on {where}: permission denied; ports below 1024 need a privilege"
        )
    return CannotListen(f"cannot listen on {where}: {error.strerror or error}")
