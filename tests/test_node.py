"""Connections to a node: the fence, deadlines, faults, back-off, and the server's clock."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import redis
from conftest import NameServers, wait_until
from hypothesis import given
from hypothesis import strategies as st
from stub import (
    HANG_UP,
    NIL,
    RUN_ID,
    SILENCE,
    Answer,
    Stub,
    array,
    bulk,
    cut,
    dripped,
    error,
    integer,
    late,
    simple,
)

from emqtimerd import dialling, wire
from emqtimerd import node as nodes
from emqtimerd.config import NodeSettings
from emqtimerd.devnode import DevNode
from emqtimerd.node import (
    BackingOff,
    FenceRefused,
    Identity,
    Link,
    Lost,
    Node,
    NodeFault,
    NotReady,
    ServerClock,
    Unreachable,
    first_fault,
)
from emqtimerd.verdict import fix

PING = wire.pack("PING")


def ask(link: Link, command: bytes, seconds: float = 5) -> wire.Reply:
    return link.exchange(command, 1, time.monotonic() + seconds)[0]


def handshake(node: Node) -> None:
    with node.link():
        pass


@contextlib.contextmanager
def at_each_line(function: str, meanwhile: Callable[[], object]) -> Iterator[None]:
    """Do something before each line of a function of the node's module."""

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        code = frame.f_code
        if code.co_filename != nodes.__file__ or code.co_name != function:
            return None
        if event == "line":
            meanwhile()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def frozen(
    function: str, line: int, meanwhile: Callable[[], object]
) -> Iterator[Callable[[], bool]]:
    """Let this thread stand still before the n-th line of a function until another thread has done
    something, or waits for this one; return whether the function has so many lines."""
    lines = itertools.count(1)
    others: list[threading.Thread] = []

    def stand_still() -> None:
        if next(lines) == line:
            others.append(threading.Thread(target=meanwhile))
            others[0].start()
            # It is there at once, unless it waits for a lock that this thread holds.
            others[0].join(0.1)

    with at_each_line(function, stand_still):
        yield lambda: bool(others)
    for other in others:
        other.join()


def all_lines(reaches: Callable[[int], bool]) -> int:
    """Try each line of a function, until there is none; return how many there were."""
    return next(line - 1 for line in itertools.count(1) if not reaches(line))


# --- the fence ----------------------------------------------------------------------------------


def test_the_fence_reads_who_the_server_is(
    node: DevNode, client: redis.Redis, open_to: Callable[..., Node]
) -> None:
    """After the first link the node is known by run_id, version, brand and tokens."""
    opened = open_to(node.url)
    with opened.link() as link:
        assert ask(link, PING) == b"PONG"
    info = client.info("server")
    assert opened.identity is not None
    assert opened.identity.run_id == info["run_id"] == link.run_id
    assert opened.identity.version == info["valkey_version"]
    assert opened.identity.brand == "echomq:6.0.0"
    assert opened.identity.tokens == wire.TOKENS
    assert opened.identity.started == pytest.approx(
        time.monotonic() - info["uptime_in_seconds"], abs=2
    )


def test_a_node_that_serves_more_than_jobs_is_welcome(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """The tokens of the bus come after those of the job core; what one does not know is no harm."""
    bus = (*wire.TOKENS, "append", "failures.incr", "publish", "of.another.day")
    stub.on("EMQ.VERSION", bulk(" ".join(bus).encode()))
    node = open_to(stub.url)
    handshake(node)
    assert node.identity is not None
    assert node.identity.tokens == bus


FENCES: dict[str, tuple[str, Answer, str]] = {
    "no job core": (
        "EMQ.VERSION",
        error("ERR unknown command 'EMQ.VERSION', with args beginning with: "),
        "does not know EMQ.VERSION: the native job core is not loaded",
    ),
    "no promote": ("EMQ.VERSION", bulk(b"enqueue stalled.check"), "lacks the capability promote"),
    "no stalled.check": (
        "EMQ.VERSION",
        bulk(b"promote stalled.checks"),
        "lacks the capability stalled.check",
    ),
    "neither": ("EMQ.VERSION", bulk(b""), "lacks the capability promote and stalled.check"),
    "no brand": ("GET", NIL, "has no brand at {emq}:version"),
    "another brand": ("GET", bulk(b"echomq:4.0.0"), "brand is echomq:4.0.0, not echomq:6.0.0"),
    "a hostile brand": ("GET", bulk(b"\x1b[31m"), r"brand is \x1b[31m, not"),
}


@pytest.mark.parametrize(("verb", "answer", "words"), FENCES.values(), ids=FENCES)
def test_a_server_of_another_wire_is_refused(
    stub: Stub, open_to: Callable[..., Node], verb: str, answer: Answer, words: str
) -> None:
    """Tokens and brand are checked, the reason is told, and nothing is ever written."""
    stub.on(verb, answer)
    with pytest.raises(FenceRefused) as caught:
        handshake(open_to(stub.url))
    assert words in caught.value.message
    assert {arrival.verb for arrival in stub.arrivals} == {"CLIENT", "EMQ.VERSION", "GET", "INFO"}


@pytest.mark.parametrize("changed", ["brand", "tokens"])
def test_the_fence_is_passed_by_every_connection(
    stub: Stub, open_to: Callable[..., Node], changed: str
) -> None:
    """A server that was replaced between two connections is looked at anew."""
    if changed == "brand":
        stub.on("GET", bulk(wire.BRAND), bulk(b"echomq:4.0.0"))
    else:
        stub.on("EMQ.VERSION", bulk(b"promote stalled.check"), bulk(b"claim"))
    node = open_to(stub.url)
    with node.link() as link:
        link.drop()
    with pytest.raises(FenceRefused):
        handshake(node)
    assert stub.connections == 2


LATER = {
    "LOADING Valkey is loading the dataset in memory": "LOADING",
    "MASTERDOWN Link with MASTER is down": "MASTERDOWN",
    "CLUSTERDOWN The cluster is down": "CLUSTERDOWN",
    "BUSY Valkey is busy running a script.": "BUSY",
    "UNBLOCKED force unblock from blocking operation": "UNBLOCKED",
    "NOPERM User x has no permissions to run the 'emq.version' command": "NOPERM",
    "NOVEL thing": "NOVEL",
}


@pytest.mark.parametrize("verb", ["EMQ.VERSION", "GET"])
@pytest.mark.parametrize(("text", "code"), LATER.items(), ids=LATER.values())
def test_an_error_in_the_handshake_is_no_verdict_on_the_node(
    stub: Stub, open_to: Callable[..., Node], verb: str, text: str, code: str
) -> None:
    """Case "LOADING, BUSY, OOM, ...": it means "later", is told by its first word, and passes."""
    stub.on(verb, error(text), _GOOD[verb])
    node = open_to(stub.url)
    with pytest.raises(NotReady) as caught:
        handshake(node)
    assert caught.value.code == code
    assert verb in caught.value.message
    assert text in caught.value.message


@pytest.mark.parametrize("verb", ["EMQ.VERSION", "GET", "INFO"])
def test_an_odd_answer_in_the_handshake_is_a_fault(
    stub: Stub, open_to: Callable[..., Node], verb: str
) -> None:
    """Case "RESP3 push frames and reply shapes": an odd shape is an error, here too."""
    stub.on(verb, array(integer(1)))
    with pytest.raises(NotReady) as caught:
        handshake(open_to(stub.url))
    assert caught.value.code == "shape"


_GOOD = {"EMQ.VERSION": bulk(b"promote stalled.check"), "GET": bulk(wire.BRAND)}


def test_a_denied_info_leaves_only_the_run_id_unknown(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "ACL user with only the two verbs": what the fence can do without is optional."""
    stub.on("INFO", error("NOPERM no"))
    node = open_to(stub.url)
    handshake(node)
    assert node.identity is not None
    assert (node.identity.run_id, node.identity.version) == ("", "")


def test_a_server_that_knows_no_client_commands_is_worked_with(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "ACL user with only the two verbs": no HELLO, and CLIENT may be unknown."""
    stub.on("CLIENT", error("ERR unknown command 'CLIENT'"))
    stub.on("HELLO", error("ERR unknown command 'HELLO'"))
    handshake(open_to(stub.url))
    assert (stub.count("CLIENT"), stub.count("CLIENT", b"SETNAME")) == (1, 1)
    assert stub.count("HELLO") == 0


# --- authentication and reach -------------------------------------------------------------------


def test_a_password_file_is_read_at_each_connection(
    stub: Stub, open_to: Callable[..., Node], tmp_path: Path
) -> None:
    """A rotated password needs no restart."""
    file = tmp_path / "password"
    node = open_to(stub.url, username="sweeper", password_file=str(file))
    for password in ("old", "new"):
        file.write_text(password + "\n")
        with node.link() as link:
            link.drop()
    assert [arrival.words for arrival in stub.received("AUTH")] == [
        (b"AUTH", b"sweeper", b"old"),
        (b"AUTH", b"sweeper", b"new"),
    ]


def test_what_stands_beside_the_url_is_stronger_than_it(
    stub: Stub, open_to: Callable[..., Node], tmp_path: Path
) -> None:
    """One user logs in, and not the one of an older address; where none is beside it, the URL's."""
    (file := tmp_path / "password").write_text("new")
    url = stub.url.replace("redis://", "redis://{}@")
    for login, beside in (
        ("old:secret", {"username": "sweeper"}),
        ("old", {"username": "sweeper", "password_file": str(file)}),
        ("old", {"password_file": str(file)}),
    ):
        handshake(open_to(url.format(login), **beside))
    assert [arrival.words[1:] for arrival in stub.received("AUTH")] == [
        (b"sweeper", b"secret"),
        (b"sweeper", b"new"),
        (b"old", b"new"),
    ]


def test_a_missing_password_file_makes_the_node_unreachable(
    stub: Stub, open_to: Callable[..., Node], tmp_path: Path
) -> None:
    """It may be mounted later, so it is a fault like any other, and nothing is sent without it."""
    file = tmp_path / "password"
    node = open_to(stub.url, password_file=str(file))
    with pytest.raises(Unreachable) as caught:
        handshake(node)
    assert str(file) in caught.value.message
    assert "No such file" in caught.value.message
    assert stub.count("EMQ.VERSION") == 0
    with pytest.raises(BackingOff):
        handshake(node)


AUTHENTICATION = {
    "AUTH": "WRONGPASS invalid username-password pair or user is disabled.",
    "EMQ.VERSION": "NOAUTH Authentication required.",
}


@pytest.mark.parametrize(("verb", "text"), AUTHENTICATION.items())
def test_refused_authentication_says_what_to_check_and_not_the_password(
    stub: Stub, open_to: Callable[..., Node], verb: str, text: str
) -> None:
    """WRONGPASS and NOAUTH are unreachable nodes, with the settings that matter in the words."""
    stub.on(verb, error(text))
    with pytest.raises(Unreachable) as caught:
        handshake(open_to(stub.url.replace("redis://", "redis://me:hunter2@")))
    assert caught.value.code == text.partition(" ")[0]
    assert "node.password_file" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_login_that_is_missing_comes_before_a_verb_that_is(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A server without the job core does not know the verb, and only then asks who we are."""
    stub.on("EMQ.VERSION", error("ERR unknown command 'EMQ.VERSION'"))
    stub.on("GET", error("NOAUTH Authentication required."))
    with pytest.raises(Unreachable) as caught:
        handshake(open_to(stub.url))
    assert caught.value.code == "NOAUTH"


def test_a_refused_connection_names_the_address(stub: Stub, open_to: Callable[..., Node]) -> None:
    """The address and the operating system's reason, and never what else the URL holds."""
    stub.stop_listening()
    with pytest.raises(Unreachable) as caught:
        handshake(open_to(stub.url.replace("redis://", "redis://me:hunter2@")))
    assert str(caught.value) == f"127.0.0.1:{stub.port}: cannot connect (Connection refused)"


def test_a_missing_socket_file_is_named(open_to: Callable[..., Node], socket_path: Path) -> None:
    """A Unix socket that is not there is an unreachable node."""
    with pytest.raises(Unreachable) as caught:
        handshake(open_to(f"unix://{socket_path}"))
    assert str(caught.value) == f"{socket_path}: cannot connect (No such file or directory)"


def test_a_host_that_is_no_name_is_unreachable(open_to: Callable[..., Node]) -> None:
    """A name that does not resolve is a fault of the node, not a crash."""
    with pytest.raises(Unreachable, match="cannot connect"):
        handshake(open_to("redis://no-such-host.invalid:6379/0"))


def test_a_name_that_is_not_looked_up_in_time_is_a_timeout(
    stub: Stub, open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """The resolver's own limit may be half a minute. One look-up is under way at a time, and its
    answer is used once it comes."""
    name_servers.names["node.test"] = ["127.0.0.1"]
    node = open_to(f"redis://node.test:{stub.port}", connect_timeout="100ms")
    for _ in range(3):
        with pytest.raises(Unreachable) as caught:
            node.dial()
    assert caught.value.code == "timeout"
    what = "no answer to the look-up of node.test within node.connect_timeout"
    assert caught.value.message == what
    assert "name servers" in fix(NodeSettings(), caught.value)
    assert name_servers.asked == ["node.test"]
    name_servers.answering.set()
    # The one that is under way may not have ended yet.
    wait_until(lambda: not _looking_up(), "the look-up has ended")
    node.dial().close()
    assert name_servers.asked == ["node.test"] * 2


def _looking_up() -> bool:
    return any(thread.name == "emqtimerd-name" for thread in threading.enumerate())


def test_a_look_up_that_fails_is_told_to_all_who_wait_for_it(
    open_to: Callable[..., Node], name_servers: NameServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They asked once, and who asks after that asks again: the name may be there by then."""
    name_servers.names["node.test"] = socket.gaierror(socket.EAI_NONAME, "not known")
    waiting: list[object] = []

    class Awaited(Future[list[str]]):
        def result(self, timeout: float | None = None) -> list[str]:
            waiting.append(self)
            return super().result(timeout)

    monkeypatch.setattr(dialling, "Future", Awaited)
    faults: list[str] = []

    def dial(port: int) -> None:
        try:
            open_to(f"redis://node.test:{port}").dial()
        except Unreachable as fault:
            faults.append(str(fault))

    threads = [threading.Thread(target=dial, args=(port,)) for port in (1, 2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(waiting) == 2, "both wait for the answer")
    name_servers.answering.set()
    for thread in threads:
        thread.join(10)
    assert sorted(faults) == [f"node.test:{port}: cannot connect (not known)" for port in (1, 2)]
    assert name_servers.asked == ["node.test"]
    wait_until(lambda: not _looking_up(), "the look-up has ended")
    dial(3)
    assert name_servers.asked == ["node.test"] * 2


def test_every_address_of_a_name_is_tried_once(
    stub: Stub, open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """In the order of the answer, of both families, until one answers."""
    name_servers.answering.set()
    name_servers.names["node.test"] = ["::1", "127.0.0.2", "127.0.0.2", "127.0.0.1", "127.0.0.3"]
    handshake(open_to(f"redis://node.test:{stub.port}"))
    assert name_servers.dialled == ["::1", "127.0.0.2", "127.0.0.1"]


NOWHERE: dict[str, tuple[list[str] | OSError, str]] = {
    "no address": ([], "cannot connect (the name has no address)"),
    "nobody there": (["127.0.0.2", "127.0.0.3"], "cannot connect (Connection refused)"),
    "a resolver that gave up": (
        TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
        "no answer to the look-up of node.test within node.connect_timeout",
    ),
}


@pytest.mark.parametrize(("addresses", "words"), NOWHERE.values(), ids=NOWHERE)
def test_a_name_that_leads_nowhere_is_told_by_its_name(
    stub: Stub, name_servers: NameServers, addresses: list[str] | OSError, words: str
) -> None:
    """The address that was tried last is not what anybody wrote or was told."""
    name_servers.answering.set()
    name_servers.names["node.test"] = addresses
    name = f"node.test:{stub.port}"
    dial = dialling.connector(NodeSettings())
    node = Node(name, lambda: dial("node.test", stub.port), 1, found=True)
    with pytest.raises(Unreachable) as caught:
        node.dial()
    assert str(caught.value) == f"{name}: {words}"


def test_a_name_of_a_link_local_address_says_by_which_link(
    open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """Without its zone such an address leads nowhere."""
    name_servers.answering.set()
    link_local = f"fe80::1%{socket.if_nameindex()[0][1]}"
    name_servers.names["node.test"] = [link_local]
    with pytest.raises(Unreachable):
        open_to("redis://node.test:1", connect_timeout="100ms").dial()
    assert name_servers.dialled == [link_local]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_is_not_looked_up(
    open_to: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Name servers that do not answer are no hindrance, nor a thread for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    monkeypatch.setattr(dialling._LOOK_UPS, "addresses", lambda *_: pytest.fail("looked up"))
    with pytest.raises(Unreachable) as caught:
        open_to(f"redis://{host}:{port}").dial()
    assert str(caught.value).startswith(f"{host}:{port}: cannot connect (")


def test_a_look_up_that_cannot_begin_is_begun_by_the_next_dial(
    stub: Stub, open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """A machine is out of threads for a moment: nobody waits for an answer that never comes."""
    name_servers.answering.set()
    name_servers.names["node.test"] = ["127.0.0.1"]
    node = open_to(f"redis://node.test:{stub.port}", connect_timeout="100ms")
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "emqtimerd-name":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Unreachable) as caught:
            node.dial()
    assert caught.value.message == "cannot connect (can't start new thread)"
    node.dial().close()


def test_all_addresses_of_a_name_share_the_time(
    stub: Stub, open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """Behind two addresses that are silent and one that refuses, the fourth is reached in time."""
    name_servers.answering.set()
    name_servers.names["node.test"] = [f"127.0.0.{n}" for n in (2, 3, 4, 1)]
    with contextlib.ExitStack() as silent:
        for number in (2, 3):
            there = (f"127.0.0.{number}", stub.port)
            server = silent.enter_context(socket.create_server(there, backlog=0))
            # Whoever comes after the first is left without an answer: the queue is full.
            for _ in range(2):
                waits = silent.enter_context(socket.socket())
                waits.setblocking(False)
                waits.connect_ex(there)
            assert server.fileno() >= 0
        node = open_to(f"redis://node.test:{stub.port}", connect_timeout="2s")
        started = time.monotonic()
        handshake(node)
        # Half a second for each; with all the time for each it would be four seconds.
        assert 0.9 < time.monotonic() - started < 3


def test_what_an_address_does_not_use_is_left_to_the_next_ones(
    open_to: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is silent takes its share of what is left, one that refuses takes nothing."""
    clock = FakeTime()
    takes = {"::1": 3.0, "::2": 0.0, "::3": 4.5, "::4": 4.5}
    given: list[float | int | None] = []

    def connect(connection: redis.Connection) -> None:
        given.append(connection.socket_connect_timeout)
        clock.now += takes[connection.host]
        raise ConnectionRefusedError

    monkeypatch.setattr(dialling, "time", clock)
    monkeypatch.setattr(dialling._LOOK_UPS, "addresses", lambda *_: list(takes))
    monkeypatch.setattr(redis.Connection, "_connect", connect)
    with pytest.raises(Unreachable):
        open_to("redis://node.test", connect_timeout="12s").dial()
    assert given == [3.0, 3.0, 4.5, 4.5]


@pytest.mark.parametrize("verb", ["EMQ.VERSION", "AUTH"])
def test_a_silent_handshake_ends_at_the_timeout(
    stub: Stub, open_to: Callable[..., Node], verb: str
) -> None:
    """Case "Half-open sockets and black holes": a server that accepts and says no more."""
    stub.on(verb, SILENCE)
    started = time.monotonic()
    with pytest.raises(Unreachable) as caught:
        handshake(open_to(stub.url.replace("redis://", "redis://:x@"), timeout="200ms"))
    assert caught.value.code == "timeout"
    assert time.monotonic() - started < 4


def test_a_connection_that_closes_in_the_handshake_is_unreachable(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A server that goes away while it is asked who it is was not reached."""
    stub.on("GET", cut(bulk(wire.BRAND), 3))
    with pytest.raises(Unreachable) as caught:
        handshake(open_to(stub.url))
    assert caught.value.code == "connection"
    assert "during the handshake" in caught.value.message


# --- TLS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that signs itself, for the host name `node.test` and no address; key inside."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "node.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = ("-subj", "/CN=node.test", "-addext", "subjectAltName=DNS:node.test")
    files = ("-keyout", f"{path}.key", "-out", f"{path}.crt")
    subprocess.run([openssl, *words.split(), *names, *files], check=True, capture_output=True)
    path.write_bytes(Path(f"{path}.crt").read_bytes() + Path(f"{path}.key").read_bytes())
    return path


@pytest.fixture
def secure(certificate: Path) -> Iterator[Stub]:
    """A stub that speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with Stub(tls=context) as stub:
        yield stub


def test_a_tls_link_is_verified_and_used_again(
    secure: Stub, certificate: Path, open_to: Callable[..., Node]
) -> None:
    """The name checked is `server_name`, and a session ticket is not taken for a stray reply."""
    secure.on("PING", bulk(b"x" * 100_000))
    tls = {"ca_file": str(certificate), "server_name": "node.test"}
    node = open_to(secure.url, tls=tls)
    for _ in range(3):
        with node.link() as link:
            assert ask(link, PING) == b"x" * 100_000
    assert secure.connections == 1


UNTRUSTED = {
    "an unknown authority": ({"server_name": "node.test"}, "certificate verify failed"),
    "another name": ({"server_name": "other.test"}, "mismatch"),
    "no name at all": ({}, "mismatch"),
}


@pytest.mark.parametrize(("tls", "words"), UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_server_that_is_not_trusted_is_unreachable(
    secure: Stub,
    certificate: Path,
    open_to: Callable[..., Node],
    tls: dict[str, str],
    words: str,
) -> None:
    """No TLS session, no command: the reason is OpenSSL's own."""
    known = {} if words.startswith("certificate") else {"ca_file": str(certificate)}
    with pytest.raises(Unreachable, match=words):
        handshake(open_to(secure.url, tls=tls | known))
    assert secure.arrivals == []


def test_a_server_without_tls_is_unreachable_by_tls(open_to: Callable[..., Node]) -> None:
    """A TLS hello that is not answered ends the try within the connect timeout."""
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        node = open_to(f"rediss://127.0.0.1:{port}", connect_timeout="300ms")
        with pytest.raises(Unreachable) as caught:
            handshake(node)
    assert caught.value.code == "timeout"
    assert time.monotonic() - started < 3


def test_the_name_in_the_url_is_checked_and_sent_and_not_its_address(
    certificate: Path, open_to: Callable[..., Node], name_servers: NameServers
) -> None:
    """Whichever of its addresses answers; the certificate is for the name alone."""
    name_servers.answering.set()
    name_servers.names["node.test"] = ["127.0.0.2", "127.0.0.1"]
    sent: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    context.sni_callback = lambda _socket, name, _context: sent.append(name)
    with Stub(tls=context) as secure:
        node = open_to(f"rediss://node.test:{secure.port}", tls={"ca_file": str(certificate)})
        handshake(node)
        node.close()
    assert sent == ["node.test"]
    assert name_servers.dialled == ["127.0.0.2", "127.0.0.1"]


def test_the_tls_session_gets_what_is_left_of_the_time(
    open_to: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit for all of connecting: what the look-up took is not given again."""
    ahead = 0.0

    def addresses(_: str, seconds: float) -> list[str]:
        nonlocal ahead
        ahead = seconds - 0.1
        return ["127.0.0.1"]

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead)
    monkeypatch.setattr(dialling, "time", clock)
    monkeypatch.setattr(dialling._LOOK_UPS, "addresses", addresses)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = open_to(f"rediss://node.test:{silent.getsockname()[1]}", connect_timeout="10s")
        started = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            node.dial()
    assert caught.value.code == "timeout"
    assert time.monotonic() - started < 5


# --- one exchange -------------------------------------------------------------------------------


def ways(tmp_path: Path, socket_path: Path) -> dict[str, tuple[Path | None, str, dict[str, str]]]:
    secret = tmp_path / "secret"
    secret.write_text("from-file")
    return {
        "tcp": (None, "redis://", {}),
        "valkey": (None, "valkey://", {}),
        "password": (None, "redis://me:secret@", {}),
        "password file": (None, "redis://", {"password_file": str(secret)}),
        "unix": (socket_path, "unix://", {}),
        "unix with password file": (socket_path, "unix://", {"password_file": str(secret)}),
    }


WAYS = ("tcp", "valkey", "password", "password file", "unix", "unix with password file")


@pytest.mark.parametrize("way", WAYS)
def test_a_command_that_is_not_answered_in_time_arrives_once(
    way: str, open_to: Callable[..., Node], tmp_path: Path, socket_path: Path
) -> None:
    """Case "Library retries re-send a slow sweep": one arrival, however the node is reached."""
    socket, scheme, settings = ways(tmp_path, socket_path)[way]
    with Stub(socket) as stub:
        # Far later: whoever stands still for a moment finds both, the reply and the time over.
        stub.on("PING", late(simple("PONG"), 2), simple("PONG"))
        node = open_to(stub.url.replace("redis://", scheme), **settings)
        with pytest.raises(Lost), node.link() as link:
            ask(link, PING, 0.1)
        with node.link() as link:
            ask(link, wire.pack("PING", "again"))
        assert [arrival.words for arrival in stub.received("PING")] == [
            (b"PING",),
            (b"PING", b"again"),
        ]


def test_a_late_reply_is_not_taken_for_the_next_command(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Case "Cancelled call and the reply of another": the reply of `a` is never that of `b`."""
    stub.on("GET", late(bulk(b"111"), 1), word=b"{a}")
    stub.on("GET", bulk(b"7"), word=b"{b}")
    node = open_to(stub.url)
    for _ in range(3):
        with pytest.raises(Lost) as caught, node.link() as link:
            ask(link, wire.pack("GET", "{a}"), 0.05)
        assert caught.value.code == "timeout"
        with node.link() as link:
            assert ask(link, wire.pack("GET", "{b}")) == b"7"


@pytest.mark.parametrize("pause", [0.02, 0.0])
def test_a_server_that_drips_does_not_stretch_the_deadline(
    stub: Stub, open_to: Callable[..., Node], pause: float
) -> None:
    """The deadline is for the whole exchange, not for each byte of it."""
    stub.on("PING", dripped(bulk(b"x" * 1_000_000), pause))
    started = time.monotonic()
    with pytest.raises(Lost) as caught, open_to(stub.url).link() as link:
        ask(link, PING, 0.2)
    assert caught.value.code == "timeout"
    # The whole reply takes longer than any test: hours, or what a million sends take.
    assert time.monotonic() - started < 3


def test_the_replies_before_a_break_are_kept(stub: Stub, open_to: Callable[..., Node]) -> None:
    """What was answered before the connection closed in mid-reply is known; the rest is not."""
    stub.on("PING", simple("one"), simple("two"), cut(bulk(b"three"), 6))
    with pytest.raises(Lost) as caught, open_to(stub.url).link() as link:
        link.exchange(PING * 4, 4, time.monotonic() + 5)
    assert caught.value.replies == [b"one", b"two"]
    assert caught.value.code == "connection"


GARBAGE: dict[str, bytes] = {
    "a web page": b"<html>\r\n",
    "a number that is none": b":seven\r\n",
    "a number of more than 64 bits": b":99999999999999999999\r\n",
    "less than nothing": b"*-5\r\n",
    # Of the other protocol, and nothing that Python could keep.
    "a map whose key is an array": b"%1\r\n*0\r\n:1\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_bytes_that_are_no_protocol_break_the_connection(
    stub: Stub, open_to: Callable[..., Node], data: bytes
) -> None:
    """Garbage is a broken connection, not a crash."""
    stub.on("PING", Answer(data))
    with pytest.raises(Lost) as caught, open_to(stub.url).link() as link:
        ask(link, PING)
    assert caught.value.code == "connection"


@pytest.mark.parametrize("header", [b"*1000000000", b"%99999999", b"*2\r\n:1\r\n~12345678"])
def test_a_reply_without_bounds_is_refused_before_there_is_room_for_it(
    stub: Stub, open_to: Callable[..., Node], header: bytes
) -> None:
    """The parser would take seconds to give that room back, and no thread would run meanwhile."""
    stub.on("PING", simple("one"), Answer(header + b"\r\n"))
    started = time.process_time()
    link = open_to(stub.url).dial()
    with pytest.raises(Lost, match="more elements than there can be") as caught:
        link.exchange(PING * 2, 2, time.monotonic() + 60)
    assert (caught.value.code, caught.value.replies) == ("connection", [b"one"])
    assert time.process_time() - started < 1


@pytest.mark.parametrize("cut", range(1, 12))
def test_it_is_refused_in_pieces_too(cut: int) -> None:
    """Wherever the bytes are cut, and also as a reply too many."""
    said = b":1\r\n*1000000000\r\n:7\r\n"
    pieces = [said[: cut + 3], said[cut + 3 :]]
    assert heard(pieces, 2, ends=False) == ("connection", "[1]")
    assert heard([said], 1, ends=False) == ("shape", "[]")


TOO_MANY: dict[str, Answer] = {
    "one reply too many": Answer(b":111\r\n:7\r\n"),
    "half a reply too many": Answer(b":111\r\n$5"),
    "bytes of no protocol": Answer(b":111\r\n?"),
}


@pytest.mark.parametrize("answer", TOO_MANY.values(), ids=TOO_MANY)
def test_among_more_replies_than_commands_none_is_taken(
    stub: Stub, open_to: Callable[..., Node], answer: Answer
) -> None:
    """Case "Cancelled call and the reply of another": nobody can say which of them is whose."""
    stub.on("PING", answer, simple("right"))
    node = open_to(stub.url)
    with pytest.raises(Lost) as caught, node.link() as link:
        ask(link, PING)
    assert (caught.value.code, caught.value.replies) == ("shape", [])
    with node.link() as link:
        assert ask(link, PING) == b"right"


LATE_COMERS: dict[str, Answer] = {
    "a reply": Answer(b"+stray\r\n"),
    "half a reply": Answer(b"$5"),
    "the end": Answer(b"+stray\r\n", closes=True),
}


@pytest.mark.parametrize("answer", LATE_COMERS.values(), ids=LATE_COMERS)
def test_what_comes_without_being_asked_for_is_taken_for_no_reply(
    stub: Stub, open_to: Callable[..., Node], answer: Answer
) -> None:
    """A reply that comes after the last one must not answer the next command."""
    node = open_to(stub.url)
    with node.link() as link:
        assert ask(link, PING) == b"OK"
        stub.say(answer)
        wait_until(lambda: not link.is_usable(), "what was not asked for has arrived")
    stub.on("PING", simple("right"))
    with node.link() as link:
        assert ask(link, PING) == b"right"


def test_a_connection_that_the_server_closed_while_idle_is_replaced(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A restart between two rounds costs a new connection and no lost command."""
    node = open_to(stub.url)
    handshake(node)
    with node.link() as idle:
        pass
    stub.hang_up()
    wait_until(lambda: not idle.is_usable(), "the connection is seen to be closed")
    with node.link() as link:
        assert ask(link, PING) == b"OK"
    assert stub.connections == 2


def test_an_interrupt_closes_the_link_it_hit(stub: Stub, open_to: Callable[..., Node]) -> None:
    """Replies that nobody read must not meet the next command."""
    node = open_to(stub.url)
    with pytest.raises(KeyboardInterrupt), node.link():
        raise KeyboardInterrupt
    handshake(node)
    assert stub.connections == 2


@pytest.mark.parametrize("leave", [Node.close, Node.drop_idle])
def test_a_link_that_comes_back_while_its_node_is_left_is_closed(
    stub: Stub, open_to: Callable[..., Node], leave: Callable[[Node], None]
) -> None:
    """Another thread closes the node at the last moment: nobody would come to close this one."""

    class Late(list[Link]):
        def append(self, link: Link) -> None:
            leaving.start()
            super().append(link)

    node = open_to(stub.url)
    leaving = threading.Thread(target=leave, args=(node,))
    node._idle = Late()
    with node.link() as link:
        pass
    leaving.join()
    assert node._idle == []
    assert not link.is_usable()


def test_a_link_is_used_again(stub: Stub, open_to: Callable[..., Node]) -> None:
    """Links in a row are one connection."""
    node = open_to(stub.url)
    for _ in range(5):
        with node.link() as link:
            ask(link, PING)
    assert stub.connections == 1


def test_a_server_that_answers_is_well_though_another_connection_failed(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """In a short outage, one round's connection holds while another round cannot make a second
    one. Who looks for a fault before working must not find that one for ever."""
    node = open_to(stub.url)
    with node.link() as link:
        stub.stop_listening()
        with pytest.raises(Unreachable), node.link():
            pass
        assert node.fault()
        ask(link, PING)
    assert node.fault() is None
    with node.link():
        # This one is lent now, and none can be made; still it was the latest to know.
        assert node.fault() is None


def test_a_link_that_is_idle_is_to_be_tried_whatever_is_known(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Nobody dials while there is one: a dial that failed would be the last word for ever."""
    node = open_to(stub.url)
    with node.link():
        stub.stop_listening()
        with pytest.raises(Unreachable), node.link():
            pass
    assert node.fault() is None
    with node.link():
        assert node.fault(), "it has not been answered since"
    assert not node.is_well()
    node.look()
    assert node.is_well()
    assert stub.connections == 1


def test_a_look_that_tries_a_link_tells_what_it_found(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """The one that is idle is from before a fault, and breaks."""
    node = open_to(stub.url)
    with node.link():
        stub.on("EMQ.VERSION", error("LOADING"))
        with pytest.raises(NotReady), node.link():
            pass
    stub.on("TIME", HANG_UP)
    node.look()
    assert node.fault()
    assert isinstance(node.untold(), Lost)


def test_error_replies_are_values_in_their_place(stub: Stub, open_to: Callable[..., Node]) -> None:
    """An error in a pipeline is the reply of its command alone, inside an array too."""
    stub.on("PING", error("OOM no"), array(error("ERR x"), integer(1)), simple("fine"))
    with open_to(stub.url).link() as link:
        replies = link.exchange(PING * 3, 3, time.monotonic() + 5)
    assert repr(replies) == "[ReplyError('OOM no'), [ReplyError('ERR x'), 1], b'fine']"


def test_an_error_text_of_any_bytes_is_read(stub: Stub, open_to: Callable[..., Node]) -> None:
    """Case "Binary job ids": an error that quotes an id which is not UTF-8 is still an error."""
    stub.on("PING", error(b"EMQSTATE JOB\xff\xfe is not native"))
    with open_to(stub.url).link() as link:
        reply = ask(link, PING)
    assert isinstance(reply, wire.ReplyError)
    assert reply.code == "EMQSTATE"
    assert str(reply).isprintable()


class Tape:
    """In place of a socket: what the server says, in these pieces, and then silence or the end."""

    def __init__(self, pieces: list[bytes], ends: bool) -> None:
        self._pieces = list(pieces)
        self._ends = ends
        self._sock = self  # it is the connection too

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 5

    def sendall(self, data: bytes) -> None:
        pass

    def recv(self, _: int) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        if self._ends:
            return b""
        raise TimeoutError

    def disconnect(self) -> None:
        pass


def heard(pieces: list[bytes], count: int, ends: bool) -> tuple[str, str]:
    """What an exchange makes of what the server says: how it went, and the replies."""
    link = Link("here", Tape(pieces, ends))  # type: ignore[arg-type]
    try:
        replies, code = link.exchange(PING, count, time.monotonic() + 5), "ok"
        assert len(replies) == count
    except Lost as lost:
        replies, code = lost.replies, lost.code
    return code, repr(replies)


# Bytes that are nearly a protocol: all its types, both protocols', with lengths that may be wrong.
NEARLY = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.sampled_from([b"\r\n", b"*-1\r\n", b"$-1\r\n", b"_\r\n", b"#t\r\n", b",nan\r\n"]),
        st.builds(
            lambda kind, number: b"%b%d\r\n" % (kind, number),
            st.sampled_from([b":", b"*", b"$", b"%", b"~", b">", b"(", b"=", b"!", b"|", b","]),
            st.integers(-2, 4) | st.integers(),
        ),
        st.builds(lambda text: b"$%d\r\n%b\r\n" % (len(text), text), st.binary(max_size=6)),
        st.builds(
            lambda kind, text: kind + text + b"\r\n",
            st.sampled_from([b"+", b"-"]),
            st.binary(max_size=6),
        ),
    ),
    max_size=12,
).map(b"".join)


@given(NEARLY, st.lists(st.integers(1, 100), max_size=8), st.integers(1, 5), st.booleans())
def test_any_bytes_in_any_pieces_are_replies_or_a_loss(
    data: bytes, cuts: list[int], count: int, ends: bool
) -> None:
    """Case "Errors that are not RedisError": no other exception, and the pieces do not matter, but
    that a reply too many is seen only if it comes with the last one."""
    at = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(at) if b > a]
    whole, split = heard([data] if data else [], count, ends), heard(pieces, count, ends)
    assert whole in (split, ("shape", "[]"))


ASTRAY = ("READONLY", "MASTERDOWN", "LOADING", "NOAUTH")
AT_HOME = ("BUSY", "OOM", "MISCONF", "CLUSTERDOWN", "TRYAGAIN", "NOPERM", "EMQSTATE", "ERR")


def test_some_errors_mean_that_the_connection_leads_to_the_wrong_server() -> None:
    """Case "READONLY from a demoted primary": these drop the connection, the others keep it."""
    dropped = [
        code for code in ASTRAY + AT_HOME if nodes.leads_astray(wire.ReplyError(f"{code} x"))
    ]
    assert dropped == list(ASTRAY)
    assert nodes.leads_astray(wire.ReplyError("ERR unknown command 'EMQ.PROMOTE'"))
    assert nodes.leads_astray(wire.ReplyError("ERR Error running script: -READONLY You can't"))
    assert nodes.leads_astray(wire.ShapeError("EMQ.PROMOTE", None))


# --- a dead node --------------------------------------------------------------------------------


class FakeTime:
    """Stands in for `time` in the node's module."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime()
    monkeypatch.setattr(nodes, "time", clock)
    return clock


class DeadServer:
    """Counts the tries to reach it."""

    def __init__(self) -> None:
        self.dials = 0

    def dial(self) -> Any:
        self.dials += 1
        raise ConnectionRefusedError("nobody there")


def pauses(node: Node, server: DeadServer, clock: FakeTime, count: int) -> list[float]:
    """How long the node waits after each of its failures, to 10 ms."""
    found = []
    for _ in range(count):
        with pytest.raises(Unreachable):
            handshake(node)
        dials, since = server.dials, clock.now
        while server.dials == dials:
            clock.now += 0.01
            with pytest.raises(Unreachable):
                handshake(node)
        found.append(round(clock.now - since, 2))
        # The try that ended the wait was a failure of its own: let it pass.
        clock.now += 60
    return found


def test_the_pause_before_a_dead_node_is_tried_again_doubles_to_its_cap(
    clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back-off: each failure doubles the pause, up to the cap; a success starts afresh."""
    monkeypatch.setattr(random, "uniform", max)
    server = DeadServer()
    found = pauses(Node("here", server.dial, 1), server, clock, 5)
    # Each measurement takes two failures.
    assert found == pytest.approx([0.1, 0.4, 1.6, 5.0, 5.0], abs=0.02)


@pytest.mark.parametrize("part", [0.5, 0.75])
def test_the_pause_is_jittered_in_its_upper_half(
    clock: FakeTime, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    """Replicas that lost one node do not come back in step, and none comes back at once."""

    def uniform(least: float, most: float) -> float:
        assert (least, most) == (0.5, 1)
        return part

    monkeypatch.setattr(random, "uniform", uniform)
    server = DeadServer()
    found = pauses(Node("here", server.dial, 1), server, clock, 4)
    assert found == pytest.approx([part * p for p in (0.1, 0.4, 1.6, 5.0)], abs=0.02)


def test_a_node_may_be_dead_for_days(clock: FakeTime) -> None:
    """The ten-thousandth failure is answered like the tenth."""
    server = DeadServer()
    node = Node("here", server.dial, 1)
    for _ in range(10_000):
        with pytest.raises(Unreachable, match="nobody there"):
            handshake(node)
        clock.now += nodes.BACKOFF_CAP_SECONDS
    assert server.dials == 10_000


def test_a_node_that_backs_off_says_why_and_is_not_dialled(clock: FakeTime) -> None:
    """Within the pause the last fault is the answer."""
    server = DeadServer()
    node = Node("here", server.dial, 1)
    first: NodeFault | None = None
    for expected in (Unreachable, BackingOff, BackingOff):
        with pytest.raises(expected, match="nobody there") as caught:
            handshake(node)
        first = first or caught.value
        assert first_fault(caught.value) is first
    assert (fault := node.fault()) is not None
    assert first_fault(fault) is first
    assert server.dials == 1


def test_a_connection_that_broke_is_the_fault_until_the_next_one_stands(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Also before anybody has dialled again: what is told is what was lost, by its own code."""
    stub.on("PING", SILENCE)
    node = open_to(stub.url)
    with pytest.raises(Lost) as caught, node.link() as link:
        ask(link, PING, 0.05)
    assert (fault := node.fault()) is not None
    assert first_fault(fault) is caught.value
    assert (fault.code, fault.message) == ("timeout", "no reply within the timeout")
    with node.link():
        assert node.fault() is None


def test_what_a_look_finds_wrong_is_told_to_the_next_who_wants_to_work(clock: FakeTime) -> None:
    """A fault that nobody was told of would be counted nowhere: the pause says it was tried."""
    server = DeadServer()
    node = Node("here", server.dial, 1)
    node.look()
    assert node.fault() is not None
    for expected in (Unreachable, BackingOff):
        with pytest.raises(Unreachable, match="nobody there") as caught:
            handshake(node)
        assert type(caught.value) is expected
    node.look()
    assert node.untold() is None
    clock.now += nodes.BACKOFF_CAP_SECONDS
    node.look()
    assert (type(node.untold()), node.untold()) == (Unreachable, None)
    assert server.dials == 2


def test_a_connection_that_breaks_while_the_node_is_dialled_anew_is_no_news(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """Wherever the thread that gives it back stands still meanwhile."""
    stub.on("PING", HANG_UP)

    def breaks(line: int) -> bool:
        node = open_to(stub.url)

        def dial_anew() -> None:
            node.drop_idle()
            handshake(node)

        give_back = frozen("_give_back", line, dial_anew)
        with give_back as reached, pytest.raises(Lost), node.link() as link:
            ask(link, PING)
        if reached():
            assert (node.fault(), node.failing_since, len(node._idle)) == (None, None, 1), line
        return reached()

    assert all_lines(breaks) > 3


def test_a_pause_that_ends_while_another_thread_looks_at_it_is_no_error(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A connection could not be made, and the one that held comes back."""

    def dials(line: int) -> bool:
        stub.heal()
        node = open_to(stub.url)
        loan = node.link()
        link = loan.__enter__()
        stub.stop_listening()
        with pytest.raises(Unreachable):
            handshake(node)
        ask(link, PING)
        with (
            contextlib.suppress(Unreachable),
            frozen("_connect", line, lambda: loan.__exit__(None, None, None)) as reached,
        ):
            handshake(node)
        if reached():
            assert node.fault() is None, line
        return reached()

    assert all_lines(dials) > 3


def test_links_that_are_dropped_while_another_thread_takes_one_are_no_error(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """The last one may be gone by the time that it is to be closed."""

    def drops(function: str, line: int) -> bool:
        node = open_to(stub.url)
        handshake(node)
        loan = node.link()
        with frozen(function, line, loan.__enter__) as reached:
            node.drop_idle()
        if reached():
            loan.__exit__(None, None, None)
        return reached()

    assert all_lines(partial(drops, "drop_idle")) > 1
    assert all_lines(partial(drops, "_drop_idle")) > 1


def test_what_a_look_found_is_no_news_of_a_node_that_is_reached_meanwhile(
    stub: Stub, open_to: Callable[..., Node], clock: FakeTime
) -> None:
    """Wherever the thread that looks stands still: else it would be told with the next fault."""

    def looks(line: int) -> bool:
        stub.on("EMQ.VERSION", error("LOADING"), _GOOD["EMQ.VERSION"])
        node = open_to(stub.url)

        def work() -> None:
            clock.now += nodes.BACKOFF_CAP_SECONDS
            with contextlib.suppress(NotReady):
                handshake(node)

        with frozen("look", line, work) as reached:
            node.look()
        clock.now += nodes.BACKOFF_CAP_SECONDS
        handshake(node)
        assert node._untold is None, line
        return reached()

    assert all_lines(looks) > 3


def test_what_a_look_found_is_no_news_of_a_node_that_works(
    stub: Stub, open_to: Callable[..., Node], clock: FakeTime
) -> None:
    """It was reached since."""
    stub.on("EMQ.VERSION", error("LOADING"), _GOOD["EMQ.VERSION"])
    node = open_to(stub.url)
    node.look()
    clock.now += nodes.BACKOFF_CAP_SECONDS
    handshake(node)
    assert node.untold() is None


def test_threads_that_need_a_connection_dial_one_at_a_time(clock: FakeTime) -> None:
    """A black hole costs one connect timeout, not one for each thread."""
    dialled, release = threading.Event(), threading.Event()
    dials = []

    def dial() -> Any:
        dials.append(threading.get_ident())
        dialled.set()
        assert release.wait(10)
        raise ConnectionRefusedError("nobody there")

    node = Node("here", dial, 1)
    faults: list[Exception] = []

    def use() -> None:
        try:
            handshake(node)
        except Unreachable as fault:
            faults.append(fault)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert dialled.wait(10)
    release.set()
    for thread in threads:
        thread.join(10)
    assert len(dials) == 1
    assert [type(fault) for fault in faults].count(BackingOff) == 7


class FlakyServer:
    """Answers the fence at every other try."""

    def __init__(self, node: Node, clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node, self.clock = node, clock
        self.run_id = "a"
        self.up = False
        monkeypatch.setattr(node, "open", self._open)

    def _open(self, *, brand: bool) -> tuple[Any, Identity]:
        del brand
        if not self.up:
            raise Unreachable("here", "connection", "nobody there")
        link = SimpleNamespace(run_id=self.run_id, lost=None, is_usable=lambda: False)
        link.close = lambda: None
        return link, Identity(self.run_id, "9", "", (), 0)

    def outage(self, seconds: float) -> None:
        """Fail, and come back so much later."""
        self.up = False
        with pytest.raises(Unreachable):
            handshake(self.node)
        self.clock.now += seconds
        self.up = True
        handshake(self.node)


# Longer than any pause between two tries, so that the next one is made.
OUTAGES = st.integers(5, 100)


@given(st.lists(st.tuples(OUTAGES, OUTAGES, st.booleans()), max_size=30), st.integers(0, 120))
def test_the_grace_follows_from_all_returns(
    outages: list[tuple[int, int, bool]], grace: int
) -> None:
    """What is forgotten of earlier outages would not have made any grace longer."""
    with pytest.MonkeyPatch.context() as patch:
        clock = FakeTime()
        patch.setattr(nodes, "time", clock)
        server = FlakyServer(Node("here", DeadServer().dial, 1), clock, patch)
        server.up = True
        handshake(server.node)
        ends: list[float] = [grace]
        for number, (length, quiet, restarted) in enumerate(outages):
            clock.now += quiet
            if restarted:
                server.run_id = f"{number}"
            server.outage(length)
            if restarted or length > grace:
                ends.append(clock.now + grace)
            assert server.node.grace_ends(grace) == max(ends)


def test_a_further_connection_interrupts_no_grace(stub: Stub, open_to: Callable[..., Node]) -> None:
    """Wherever the thread that makes it stands still: a stall check of another one that asks for
    the grace in that moment would recover leases whose workers are just coming back."""
    stub.on("INFO", bulk(b"run_id:%b\r\nuptime_in_seconds:0\r\n" % RUN_ID))
    node = open_to(stub.url)
    seen: set[float] = set()
    with node.link():
        begun = node.grace_ends(10)
        with at_each_line("_note_return", lambda: seen.add(node.grace_ends(10))):
            handshake(node)
    assert stub.connections == 2
    assert seen == {begun}


def test_an_outage_begins_with_the_first_question_that_is_not_answered(
    stub: Stub, open_to: Callable[..., Node]
) -> None:
    """A server that stands still is noticed by timeouts, first of a sweep and then of a handshake:
    workers could not extend their leases meanwhile either, so this time counts."""
    node = open_to(stub.url, timeout="800ms")
    handshake(node)
    begun = time.monotonic()
    stub.on("*", SILENCE)
    with pytest.raises(Lost), node.link() as link:
        link.exchange(PING, 1, time.monotonic() + 0.8)
    with pytest.raises(Unreachable):
        handshake(node)
    stub.heal()
    wait_until(lambda: works(node), "the node is back")
    # Beside our own start, which counts as one without end.
    outage = min(each.outage_seconds for each in node._returns)
    assert 1.6 <= outage <= time.monotonic() - begun


def works(node: Node) -> bool:
    try:
        handshake(node)
    except NodeFault:
        return False
    return True


def test_a_node_that_comes_and_goes_is_remembered_in_a_few_words(
    clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand outages in a day leave behind those that a grace may still wait for."""
    chance = random.Random(7)
    server = FlakyServer(Node("here", DeadServer().dial, 1), clock, monkeypatch)
    for _ in range(10_000):
        server.outage(nodes.BACKOFF_CAP_SECONDS + chance.random() * 3)
    # Of n lengths in a random order, ln n are longer than all that come after them.
    assert len(server.node._returns) < 30


# --- the server's clock -------------------------------------------------------------------------

SECONDS = st.floats(0, 5)
# Server clocks are Unix times; monotonic ones start anywhere.
OFFSETS = st.floats(-2e9, 2e9)
READINGS = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=20)
# A double of 2e9 seconds holds a quarter of a microsecond.
TOLERANCE = 1e-5


@given(OFFSETS, READINGS)
def test_an_instant_is_never_converted_too_early_nor_later_than_a_round_trip(
    offset: float, readings: list[tuple[float, float, float]]
) -> None:
    """A sweep sent before its due time would move nothing; late by the last round trip at most."""
    clock, now = ServerClock(), 1_000.0
    for idle, there, back in readings:
        sent = now + idle
        now = sent + there + back
        clock.observe(sent, now, (sent + there - offset) * 1000)
        late_by = clock.to_monotonic((now - offset) * 1000) - now
        assert -TOLERANCE <= late_by <= there + back + TOLERANCE


@given(OFFSETS, st.floats(-1e6, 1e6).filter(lambda step: abs(step) > 0.3))
def test_a_step_of_the_servers_clock_is_followed_at_once(offset: float, step: float) -> None:
    """Bounds that contradict the known ones replace them, in both directions."""
    clock = ServerClock()
    for now, shift in ((1_000.0, 0.0), (1_001.0, step)):
        clock.observe(now, now + 0.1, (now + 0.05 - offset - shift) * 1000)
    late_by = clock.to_monotonic((1_002 - offset - step) * 1000) - 1_002
    assert -TOLERANCE <= late_by <= 0.1 + TOLERANCE


def test_a_better_reading_is_kept_until_it_is_old() -> None:
    """The tightest recent bounds count; after the window a looser reading replaces them."""
    clock = ServerClock()
    clock.observe(0.0, 0.002, 1.0)
    clock.observe(1.0, 1.5, 1_001.0)
    assert clock.to_monotonic(2_000) == pytest.approx(2.001)
    clock.observe(11.0, 11.5, 11_001.0)
    assert clock.to_monotonic(12_000) == pytest.approx(12.499)


def test_a_real_server_is_reached_over_a_unix_socket_with_a_password_file(
    start_node: Callable[..., DevNode],
    open_to: Callable[..., Node],
    tmp_path: Path,
    socket_path: Path,
) -> None:
    """The way through a real server: socket file, AUTH from the file, SELECT, fence."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    server = start_node(extra_args=("--unixsocket", str(socket_path), "--requirepass", "hunter2"))
    node = open_to(f"unix://{socket_path}", password_file=str(secret))
    handshake(node)
    assert node.identity is not None
    assert node.identity.version == server.version.split()[1]
