"""The web server: each answer by its path, and a server that clients cannot hold up."""

import errno
import gzip
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
from conftest import wait_until
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from server_sets import need_ipv6

from emqtimerd import http as web
from emqtimerd.devnode.node import free_port
from emqtimerd.http import Application, CannotListen, HttpServer, PortInUse
from emqtimerd.ledger import Ledger
from emqtimerd.node import Identity
from emqtimerd.sweeper import SweepResult

NODE = "127.0.0.1:6379"


@pytest.fixture
def ledger() -> Ledger:
    """A ledger of a daemon that works: a node, a queue, a round of each verb."""
    ledger = Ledger()
    ledger.set_nodes([NODE])
    ledger.set_queues(["orders"])
    ledger.node_seen(NODE, Identity("a" * 40, "9.1.2", "echomq:6.0.0", (), 0.0))
    ledger.expect({"promote": 1.0, "stalled_check": 30.0})
    ledger.record("promote", [SweepResult("orders", "promote", passes=1)], 0.1)
    ledger.record("stalled_check", [SweepResult("orders", "stalled_check", passes=1)], 0.1)
    return ledger


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HttpServer]]:
    """Starts servers on free ports; all end with the test."""
    # Half a second for each stop is nothing for a daemon, and half a minute for this file.
    monkeypatch.setattr(web._Server, "expiration_interval", 0.02)
    with ExitStack() as stack:

        def start(ledger: Ledger, host: str = "127.0.0.1", port: int = 0) -> HttpServer:
            server = HttpServer(host, port, Application(ledger)).start()
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def server(ledger: Ledger, serve: Callable[..., HttpServer]) -> HttpServer:
    """A server over `ledger`."""
    return serve(ledger)


class Response:
    """A response that was read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()
        self.text = self.body.decode("utf-8", errors="replace")


def ask(
    server: HttpServer,
    path: str,
    method: str = "GET",
    *,
    host: str = "127.0.0.1",
    timeout: float = 10,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    connection = http.client.HTTPConnection(host, server.port, timeout=timeout)
    with closing(connection):
        connection.request(method, path, body=body, headers=headers or {})
        return Response(connection.getresponse())


def send(server: HttpServer, data: bytes, timeout: float = 10) -> bytes:
    """Send raw bytes and return all that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as client:
        client.sendall(data)
        received = b""
        try:
            while part := client.recv(65_536):
                received += part
        except ConnectionResetError:
            pass  # refused with something left unread: as good as closed
        return received


# --- the answers --------------------------------------------------------------------------------


def test_metrics_in_both_formats_with_and_without_gzip(server: HttpServer) -> None:
    """The same samples in four ways."""
    plain = ask(server, "/metrics")
    assert plain.status == 200
    assert plain.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert plain.headers["Vary"] == "Accept, Accept-Encoding"
    assert "\nemqtimerd_queues 1.0\n" in plain.text
    zipped = ask(server, "/metrics", headers={"Accept-Encoding": "gzip"})
    assert zipped.headers["Content-Encoding"] == "gzip"
    assert b"\nemqtimerd_queues 1.0\n" in gzip.decompress(zipped.body)
    openmetrics = ask(
        server,
        "/metrics",
        headers={
            "Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5",
            "Accept-Encoding": "gzip",
        },
    )
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text; version=1")
    exposition = gzip.decompress(openmetrics.body).decode()
    assert any(family.name == "emqtimerd_queues" for family in parse_openmetrics(exposition))  # type: ignore[no-untyped-call]


def test_probes_say_yes_in_text_and_in_json(server: HttpServer) -> None:
    """A word for people, a document for machines."""
    for path, word in (("/healthz", "alive"), ("/readyz", "ready")):
        assert ask(server, path).text == f"{word}\n"
        for answer in (
            ask(server, f"{path}?format=json"),
            ask(server, path, headers={"Accept": "application/json"}),
        ):
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
            assert json.loads(answer.body) == {word: True, "reasons": []}


def test_readyz_gives_the_reason_when_not(server: HttpServer, ledger: Ledger) -> None:
    """A node that is down takes readiness, never life."""
    ledger.node_down(NODE, "cannot connect (Connection refused)")
    answer = ask(server, "/readyz")
    assert answer.status == 503
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    head, reason, _ = answer.text.split("\n")
    assert head == "not ready"
    assert reason.startswith(f"- node {NODE} is down for ")
    document = json.loads(ask(server, "/readyz?format=json").body)
    assert document["ready"] is False
    assert "Connection refused" in document["reasons"][0]
    assert ask(server, "/healthz").status == 200


def test_healthz_says_no_when_the_scheduler_stands_still(serve: Callable[..., HttpServer]) -> None:
    """And only then."""
    now = [1_000.0]
    ledger = Ledger(monotonic=lambda: now[0])
    server = serve(ledger)
    assert ask(server, "/healthz").status == 200
    now[0] += 60
    answer = ask(server, "/healthz")
    assert answer.status == 503
    assert "the scheduler has not run for 60 s" in answer.text
    ledger.beat()
    assert ask(server, "/healthz").status == 200


def test_the_page_is_html_and_escapes_what_it_shows(server: HttpServer, ledger: Ledger) -> None:
    """The rest of the page has tests of its own."""
    ledger.set_queues(["<script>alert(1)</script>"])
    answer = ask(server, "/?q=%3Cscript")
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "<script" not in answer.text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.text


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/nothing"])
def test_every_answer_carries_the_same_careful_headers(server: HttpServer, path: str) -> None:
    """No cache, no guessing of types, no scripts, no frames, no version of the server."""
    headers = ask(server, path).headers
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "charset=utf-8" in headers["Content-Type"]
    assert headers["Server"] == "emqtimerd"


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/favicon.ico"])
def test_head_is_get_without_the_body(server: HttpServer, path: str) -> None:
    """And the connection is still good for a request after it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        answers = []
        for method in ("HEAD", "HEAD", "GET"):
            connection.request(method, path)
            response = connection.getresponse()
            assert not response.will_close
            answers.append(Response(response))
    head, again, get = answers
    assert head.status == again.status == get.status in (200, 204)
    assert head.body == again.body == b""
    for name in ("Content-Type", "Transfer-Encoding"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(server: HttpServer, method: str) -> None:
    """Nothing here can be changed."""
    for path in ("/", "/metrics", "/readyz"):
        answer = ask(server, path, method, body=b"hello" if method == "POST" else None)
        assert answer.status == 405
        assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/metrics/", "/metrics%00", "/;metrics", "/..%2fetc/passwd", "/%ff", "/page.py"],
)
def test_unknown_paths_are_not_found(server: HttpServer, path: str) -> None:
    """Only the paths that are documented answer."""
    assert ask(server, path).status == 404


def test_the_browsers_icon_is_no_error(server: HttpServer) -> None:
    """Every browser asks for it."""
    answer = ask(server, "/favicon.ico")
    assert (answer.status, answer.body) == (204, b"")


def test_a_connection_serves_several_requests(server: HttpServer) -> None:
    """Scrapers keep theirs."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        for path in ("/metrics", "/readyz", "/", "/nothing", "/metrics"):
            connection.request("GET", path)
            response = connection.getresponse()
            assert response.read()
            assert not response.will_close


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_the_application_keeps_the_rules_of_wsgi(ledger: Ledger, path: str, method: str) -> None:
    """So that it stands behind any server."""
    environ: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": path, "SCRIPT_NAME": ""}
    environ["QUERY_STRING"] = ""
    setup_testing_defaults(environ)
    seen: list[str] = []
    app = validator(Application(ledger))
    result = app(environ, lambda status, *_: seen.append(status))  # type: ignore[arg-type]
    body = b"".join(result)
    result.close()  # type: ignore[attr-defined]
    assert len(seen) == 1
    assert bool(body) is (method != "HEAD")


# --- scrapes ------------------------------------------------------------------------------------


def test_more_scrapes_than_there_are_turns_are_told_to_come_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn ends with its scrape, whether that was read to the end or dropped."""
    monkeypatch.setattr(web, "SCRAPE_WAIT_SECONDS", 0.01)
    app = Application(ledger)

    def scrape() -> tuple[str, Any]:
        environ: dict[str, Any] = {"PATH_INFO": "/metrics"}
        setup_testing_defaults(environ)
        seen: list[str] = []
        body = app(environ, lambda status, _: seen.append(status))
        return seen[0], body

    running = [scrape() for _ in range(web.SCRAPES)]
    assert [status for status, _ in running] == ["200 OK"] * web.SCRAPES
    assert scrape()[0].startswith("503")
    next(iter(running[0][1]))
    running[0][1].close()
    running[0][1].close()
    status, body = scrape()
    assert status == "200 OK"
    assert scrape()[0].startswith("503")
    assert b"emqtimerd_queues" in b"".join(body)


def test_a_scraper_that_does_not_read_does_not_stop_the_others(
    serve: Callable[..., HttpServer],
) -> None:
    """Probes have threads of their own, so to say."""
    ledger = Ledger()
    ledger.set_queues(f"queue-{number:05d}" for number in range(5_000))
    server = serve(ledger)
    with ExitStack() as stack:
        for _ in range(web.THREADS * 2):
            client = stack.enter_context(socket.socket())
            # Small enough that the server cannot get rid of its megabytes.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(5):
            assert ask(server, "/healthz", timeout=8).status == 200


# --- clients that hold up -----------------------------------------------------------------------


def test_connections_that_say_nothing_take_no_thread(server: HttpServer) -> None:
    """Three times as many as there are threads, and a probe is answered at once."""
    with ExitStack() as stack:
        for _ in range(web.THREADS * 3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        started = time.monotonic()
        assert ask(server, "/healthz").status == 200
        assert time.monotonic() - started < web.REQUEST_SECONDS / 2


def test_clients_that_drip_are_cut_off_and_probes_get_through(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit is for the whole request, however busily its bytes trickle in."""
    monkeypatch.setattr(web, "REQUEST_SECONDS", 0.5)
    done = threading.Event()
    lasted: list[float] = []

    def drip() -> None:
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
            try:
                while not done.wait(0.05):
                    client.sendall(b"X-A: b\r\n")
            except OSError:
                lasted.append(time.monotonic() - started)

    threads = [threading.Thread(target=drip) for _ in range(web.THREADS * 2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert ask(server, "/healthz", timeout=8).status == 200
        wait_until(lambda: len(lasted) == len(threads), "every dripping client was cut off")
    finally:
        done.set()
        for thread in threads:
            thread.join()
    # Two rounds of all threads, and room for a busy machine.
    assert max(lasted) < 8


def test_a_line_of_clients_that_say_half_does_not_hold_up_a_probe(server: HttpServer) -> None:
    """A thread that others wait for leaves a silent client sooner than one that nobody needs."""
    with ExitStack() as stack:
        for _ in range(web.THREADS * 6):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        started = time.monotonic()
        assert ask(server, "/healthz", timeout=8).status == 200
        assert time.monotonic() - started < web.REQUEST_SECONDS


def test_a_request_that_stops_half_way_is_told_so(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its thread is free again."""
    monkeypatch.setattr(web, "REQUEST_SECONDS", 0.2)
    assert send(server, b"GET /metrics HT").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"a" * web.HEADER_BYTES + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * web.HEADER_BYTES + b"\r\n\r\n", b"413"),
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * (web.HEADER_BYTES // 5) + b"\r\n",
            b"413",
        ),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: a\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            b"400",
        ),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHOST: y\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        (b"*1\r\n$4\r\nPING\r\n", b"400"),
    ],
    ids=lambda given: repr(given[:24]),
)
def test_requests_that_are_none_or_too_large_are_refused(
    server: HttpServer, request_bytes: bytes, status: bytes
) -> None:
    """With a status, a closed connection, and no harm to the next one."""
    received = send(server, request_bytes)
    assert received.startswith(b"HTTP/1.1 " + status), received[:200]
    assert ask(server, "/healthz").status == 200


def test_old_clients_need_no_host(server: HttpServer) -> None:
    """HTTP/1.0 knew none; an empty one is one."""
    assert send(server, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    request = b"GET /healthz HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n"
    assert send(server, request).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("line", [b" X: a", b"\tX: a", b"Content-Length : 5", b"Host : y", b" : a"])
def test_a_header_that_others_may_read_otherwise(
    server: HttpServer, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """White space before a name, also where there is nothing that the line could go on from; it is
    the client's mistake and no line of our log."""
    request = b"GET /healthz HTTP/1.1\r\n%b\r\nHost: x\r\n\r\n" % line
    assert send(server, request).startswith(b"HTTP/1.1 400 ")
    assert caplog.records == []


def test_a_body_is_never_taken_for_a_request(server: HttpServer) -> None:
    """What follows a request in chunks is thrown away with its connection."""
    smuggled = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    received = send(server, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(smuggled), smuggled))
    assert received.startswith(b"HTTP/1.1 405 ")
    assert received.count(b"HTTP/1.1") == 1
    counted = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled)
    last = b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    received = send(server, counted + smuggled + last)
    assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"405", b"404"]


# --- life ---------------------------------------------------------------------------------------


def test_a_port_in_use_is_a_clear_error(server: HttpServer, ledger: Ledger) -> None:
    """With the address and what to do; nothing is left running."""
    before = threading.active_count()
    with pytest.raises(PortInUse) as caught:
        HttpServer("127.0.0.1", server.port, Application(ledger)).start()
    message = str(caught.value)
    assert f"127.0.0.1:{server.port}" in message
    assert "http.listen" in message
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, "[::1]:80: another process does already"),
        (errno.EACCES, "[::1]:80: permission denied; ports below 1024 need a privilege"),
        (errno.ENODEV, "[::1]:80: No such device"),
    ],
)
def test_why_nobody_can_listen_there(number: int, words: str) -> None:
    """Address, reason, and what to do where that is known."""
    error = web._cannot_listen(("::1", 80), OSError(number, os.strerror(number)))
    assert words in str(error)
    assert isinstance(error, PortInUse) is (number == errno.EADDRINUSE)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "2001:db8::1"])
def test_an_address_of_somebody_else_is_a_clear_error(ledger: Ledger, host: str) -> None:
    """Not a traceback from deep inside."""
    with pytest.raises(CannotListen, match="cannot listen on") as caught:
        HttpServer(host, 0, Application(ledger)).start()
    assert not isinstance(caught.value, PortInUse)
    assert host in str(caught.value)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_ipv6_works(ledger: Ledger, serve: Callable[..., HttpServer], host: str) -> None:
    """Also the address that stands for both families."""
    need_ipv6()
    server = serve(ledger, host)
    assert ask(server, "/healthz", host="::1").status == 200
    if host == "::":
        assert ask(server, "/healthz", host="127.0.0.1").status == 200


def running(server: HttpServer) -> bool:
    return server.running


def test_nothing_is_left_after_a_stop(ledger: Ledger) -> None:
    """Threads have names, and end; the port is free; a second stop does nothing."""
    port = free_port()
    before = set(threading.enumerate())
    server = HttpServer("127.0.0.1", port, Application(ledger)).start()
    mine = set(threading.enumerate()) - before
    assert len(mine) >= web.THREADS + 1
    wait_until(lambda: all(thread.name.startswith("http-") for thread in mine), "all are named")
    assert all(thread.daemon for thread in mine if thread.name != "http-busy")
    assert running(server)
    # A connection that is kept does not keep the server.
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        server.stop()
    server.stop()
    assert not running(server)
    assert server.failure is None
    wait_until(lambda: set(threading.enumerate()) <= before, "all threads ended")
    HttpServer("127.0.0.1", port, Application(ledger)).start().stop()


def test_a_client_that_does_not_read_does_not_delay_the_end(ledger: Ledger) -> None:
    """Its connection is cut after a moment."""
    ledger.set_queues(f"queue-{number:05d}" for number in range(5_000))
    server = HttpServer("127.0.0.1", 0, Application(ledger)).start()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < web.STOP_SECONDS + 4


def test_a_socket_that_systemd_passed_to_another_process_is_not_taken(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LISTEN_PID may be left over from a parent."""
    monkeypatch.setenv("LISTEN_PID", "1")
    server = HttpServer("127.0.0.1", 0, Application(ledger)).start()
    try:
        assert ask(server, "/healthz").status == 200
    finally:
        server.stop()
    assert "LISTEN_PID" not in os.environ


def test_an_application_that_fails_is_a_500_and_the_server_goes_on(
    server: HttpServer, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A fault of ours is logged with its place, and not shown to the client."""

    def fail(*_: object) -> str:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr("emqtimerd.page.render", fail)
    answer = ask(server, "/")
    assert answer.status == 500
    assert "secret" not in answer.text
    assert ask(server, "/healthz").status == 200
    assert "a secret detail" in caplog.text
