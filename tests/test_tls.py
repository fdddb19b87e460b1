"""TLS and logins on real servers: authorities, certificates of clients, names, and rotation.

The embedded servers are built without TLS; the packaged Redis 7.0 has it and loads the job core.
"""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import connect, wait_until
from daemon_process import DaemonThread
from server_sets import MASTER, Cluster, Sentinels, ask, pending, resolve_test_names, schedule
from stub import Stub

from emqtimerd.config import Settings, load
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.node import BackingOff, Node, Unreachable, open_node
from emqtimerd.once import sweep_once
from emqtimerd.topology import open_nodes
from emqtimerd.verdict import fix

slow = pytest.mark.slow

Start = Callable[..., DevNode]


# --- certificates -------------------------------------------------------------------------------


class Authority:
    """A CA in a directory, and what it signs."""

    def __init__(self, directory: Path, openssl: str) -> None:
        self._directory = directory
        self._openssl = openssl
        # Python 3.13 wants to see what a certificate may be used for.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._run("req", "-x509", *_KEY, "ca.key", "-out", "ca.crt", "-subj", "/CN=ca", *usage)
        self.file = str(directory / "ca.crt")

    def sign(self, name: str, names: str = "DNS:node.test,IP:127.0.0.1", days: int = 2) -> str:
        """Make a certificate and its key; return their path without the suffix."""
        self._run("req", *_KEY, f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self._directory / f"{name}.ext").write_text(
            f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        authority = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial")
        made = ("-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext")
        self._run("x509", "-req", *authority, *made, "-days", str(days))
        return str(self._directory / name)

    def _run(self, *arguments: str) -> None:
        command = [self._openssl, *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd=self._directory)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The one that servers and clients here trust; it has signed one of each kind."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make certificates with")
    authority = Authority(tmp_path_factory.mktemp("tls"), openssl)
    authority.sign("server")
    authority.sign("client", "DNS:client.test")
    authority.sign("named", "DNS:node.test")
    authority.sign("expired", days=-1)
    return authority


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, which nobody here trusts."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make certificates with")
    authority = Authority(tmp_path_factory.mktemp("stranger"), openssl)
    authority.sign("client", "DNS:client.test")
    return authority


def files(authority: Authority, name: str) -> tuple[str, str]:
    stem = str(Path(authority.file).parent / name)
    return f"{stem}.crt", f"{stem}.key"


def tls_arguments(
    authority: Authority, port: int, name: str = "server", clients: str = "no"
) -> tuple[str, ...]:
    """What a server needs to speak TLS at a port, beside the plain one that it is started by."""
    certificate, key = files(authority, name)
    return (
        *("--tls-port", str(port)),
        *("--tls-cert-file", certificate),
        *("--tls-key-file", key),
        *("--tls-ca-cert-file", authority.file),
        *("--tls-auth-clients", clients),
    )


@pytest.fixture
def start_tls(start_node: Start, authority: Authority) -> Callable[..., int]:
    """Starts a server that speaks TLS, and returns the port."""

    def start(*arguments: str, **options: Any) -> int:
        port = free_port()
        secure = tls_arguments(authority, port, **options)
        start_node("redis-7.0", extra_args=(*secure, *arguments))
        return port

    return start


def node_of(url: str, **node: Any) -> Node:
    node = {"timeout": "2s", "connect_timeout": "2s", **node, "url": url}
    return open_node(Settings.model_validate({"node": node}).node)


def handshake(node: Node) -> None:
    try:
        with node.link():
            pass
    finally:
        node.close()


def refusal(node: Node) -> str:
    """How the node is unreachable, in words."""
    with pytest.raises(Unreachable) as caught:
        handshake(node)
    return str(caught.value)


# --- standalone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_a_server_is_trusted_by_its_authority(
    start_tls: Callable[..., int], authority: Authority, scheme: str
) -> None:
    """Its certificate is checked against `ca_file` and the host; TLS is 1.2 at the least."""
    node = node_of(f"{scheme}://127.0.0.1:{start_tls()}", tls={"ca_file": authority.file})
    with node.link() as link:
        session = link._socket
        assert isinstance(session, ssl.SSLSocket)
        assert session.version() in ("TLSv1.2", "TLSv1.3")
        assert session.context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert session.context.verify_mode == ssl.CERT_REQUIRED
    node.close()


def test_tls_1_2_is_enough_and_1_1_is_not(
    start_tls: Callable[..., int], authority: Authority
) -> None:
    """A server that can do no better than TLS 1.1 is not talked to."""
    tls = {"ca_file": authority.file}
    handshake(node_of(f"rediss://127.0.0.1:{start_tls('--tls-protocols', 'TLSv1.2')}", tls=tls))
    old = start_tls("--tls-protocols", "TLSv1.1")
    assert "protocol version" in refusal(node_of(f"rediss://127.0.0.1:{old}", tls=tls))


def test_a_certificate_that_is_not_to_be_trusted(
    start_tls: Callable[..., int], authority: Authority, stranger: Authority
) -> None:
    """Of another authority, for another name, or expired: the reason is told."""
    port, tls = start_tls(), {"ca_file": authority.file}
    assert "certificate verify failed" in refusal(
        node_of(f"rediss://127.0.0.1:{port}", tls={"ca_file": stranger.file})
    )
    assert "self-signed certificate in certificate chain" in refusal(
        node_of(f"rediss://127.0.0.1:{port}")
    )
    assert "certificate is not valid for 'localhost'" in refusal(
        node_of(f"rediss://localhost:{port}", tls=tls)
    )
    expired = start_tls(name="expired")
    assert "certificate has expired" in refusal(node_of(f"rediss://127.0.0.1:{expired}", tls=tls))


def test_the_authority_that_is_named_is_the_only_one(
    start_tls: Callable[..., int],
    authority: Authority,
    stranger: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ca_file` stands in place of the authorities that the system trusts, not beside them."""
    monkeypatch.setenv("SSL_CERT_FILE", authority.file)
    url = f"rediss://127.0.0.1:{start_tls()}"
    handshake(node_of(url))
    assert "certificate verify failed" in refusal(node_of(url, tls={"ca_file": stranger.file}))


def test_the_name_to_check_may_be_another_than_the_host(
    start_tls: Callable[..., int], authority: Authority
) -> None:
    """`server_name` is for a certificate that does not name the address."""
    url = f"rediss://127.0.0.1:{start_tls(name='named')}"
    tls = {"ca_file": authority.file, "server_name": "node.test"}
    assert "certificate is not valid for '127.0.0.1'" in refusal(
        node_of(url, tls={"ca_file": authority.file})
    )
    handshake(node_of(url, tls=tls))
    assert "certificate is not valid for 'other.test'" in refusal(
        node_of(url, tls=tls | {"server_name": "other.test"})
    )


@pytest.mark.parametrize(
    ("host", "server_name", "sent"),
    [
        ("localhost", "", "localhost"),
        ("localhost", "node.test", "node.test"),
        ("127.0.0.1", "", None),
    ],
)
def test_the_name_is_sent_as_well(
    authority: Authority, host: str, server_name: str, sent: str | None
) -> None:
    """A server with several certificates picks one by it (SNI); an address is none."""
    names: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files(authority, "server"))
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    with Stub(tls=context) as stub:
        tls = {"ca_file": authority.file, "server_name": server_name}
        node = node_of(f"rediss://{host}:{stub.port}", tls=tls)
        # The certificate is for 127.0.0.1 and node.test.
        if host == "localhost" and not server_name:
            refusal(node)
        else:
            handshake(node)
    assert names == [sent]


def test_a_server_may_want_a_certificate_of_its_clients(
    start_tls: Callable[..., int], authority: Authority, stranger: Authority
) -> None:
    """One that its authority has signed, the key in a file of its own or in the same."""
    url = f"rediss://127.0.0.1:{start_tls(clients='yes')}"
    certificate, key = files(authority, "client")
    tls = {"ca_file": authority.file}
    handshake(node_of(url, tls={**tls, "cert_file": certificate, "key_file": key}))
    both = Path(certificate).with_name("both.pem")
    both.write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    handshake(node_of(url, tls={**tls, "cert_file": str(both)}))
    # With TLS 1.3 the server says why after the handshake, and may close before that is read.
    refusal(node_of(url, tls=tls))
    certificate, key = files(stranger, "client")
    wrong = {**tls, "cert_file": certificate, "key_file": key}
    refusal(node_of(url, tls=wrong))


def test_certificates_are_renewed_under_an_open_node(
    start_tls: Callable[..., int], authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    """Their files are read with each connection, as the password's is."""
    url = f"rediss://127.0.0.1:{start_tls(clients='yes')}"
    tls = {name: str(tmp_path / name) for name in ("ca_file", "cert_file", "key_file")}

    def put(issuer: Authority, own: Authority) -> None:
        for target, source in zip(tls.values(), (issuer.file, *files(own, "client")), strict=True):
            shutil.copy(source, target)

    def connects() -> bool | None:
        """Whether another connection comes about; None while none is tried."""
        try:
            with node.link():
                return True
        except BackingOff:
            return None
        except Unreachable:
            return False

    put(authority, authority)
    node = node_of(url, tls=tls)
    # A link that is open keeps its connection, so that the next one needs another.
    with closing(node), node.link():
        for issuer, own in ((authority, stranger), (stranger, authority)):
            put(issuer, own)
            wait_until(lambda: connects() is False, "the new file is refused")
        put(authority, authority)
        wait_until(connects, "the new files are taken")


# --- Sentinel and Cluster -----------------------------------------------------------------------


class TlsSentinels(Sentinels):
    """One sentinel, which speaks TLS as the servers do; they also speak it to each other."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        certificate, key = files(authority, "server")
        lines = (
            f"tls-cert-file {certificate}",
            f"tls-key-file {key}",
            f"tls-ca-cert-file {authority.file}",
            "tls-auth-clients no",
            "tls-replication yes",
        )
        super().__init__(directory, sentinel_lines=lines, count=1, kind="redis-7.0", tls=True)
        self._authority = authority
        self.secure_ports: list[int] = []

    def start_servers(self) -> int:
        for number in range(2):
            port = free_port()
            self.secure_ports.append(port)
            arguments = (*tls_arguments(self._authority, port), "--tls-replication", "yes")
            if number:
                arguments += ("--replicaof", f"127.0.0.1 {self.secure_ports[0]}")
            self.add(1, *arguments, brand=not number)
        return self.secure_ports[0]

    def sentinel(self, number: int = 0) -> redis.Redis:
        client = redis.Redis(
            host="127.0.0.1",
            port=self.ports[number],
            ssl=True,
            ssl_ca_certs=self._authority.file,
            protocol=2,
        )
        client.response_callbacks.clear()
        return client


@slow
def test_sentinels_and_their_servers_by_tls(tmp_path: Path, authority: Authority) -> None:
    """`rediss+sentinel` encrypts to the node, `node.sentinel.tls` to the sentinels, each with a CA
    of its own; a failover is followed."""
    trust = {"ca_file": authority.file}
    with TlsSentinels(tmp_path, authority) as sentinels:
        node = {
            "url": sentinels.url.replace("redis+", "rediss+"),
            "tls": trust,
            "timeout": "1s",
            "connect_timeout": "1s",
            "sentinel": {"tls": {"enabled": True, **trust}},
        }
        promote = {"interval": "100ms"}
        with DaemonThread(node=node, queues=["orders"], promote=promote) as daemon:
            daemon.wait_ready()
            old, new = sentinels.nodes
            with connect(new) as client:
                old.kill()
                wait_until(
                    lambda: sentinels.named() == sentinels.secure_ports[1], "it is named", 20
                )
                schedule(client, "orders", "JOB1")
                wait_until(lambda: pending(client, "orders") == {b"JOB1"}, "it is swept")
            daemon.wait_ready()
            assert daemon.value(f'emqtimerd_node_restarts_total{{node="{MASTER}"}}') == 1
        for tls in ({}, {"enabled": True}):
            bare = Settings.model_validate({"node": {**node, "sentinel": {"tls": tls}}})
            with pytest.raises(Unreachable):
                open_nodes(bare.node).refresh()


class TlsCluster(Cluster):
    """Three primaries and a replica of the first, which are called by host names and speak TLS
    alone to each other; each has a certificate for its own name and for no other."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        super().__init__(directory, replicas=1, endpoints="hostname", kind="redis-7.0")
        self._authority = authority
        self._secure_ports: list[int] = []

    @property
    def url(self) -> str:
        return super().url.replace("redis+", "rediss+")

    def arguments(self, number: int) -> Sequence[str]:
        self._secure_ports.append(port := free_port())
        self._authority.sign(f"server{number}", f"DNS:server{number}.test")
        return (
            *super().arguments(number),
            *tls_arguments(self._authority, port, f"server{number}"),
            *("--tls-cluster", "yes", "--tls-replication", "yes"),
        )

    def port_of(self, node: DevNode) -> int:
        return self._secure_ports[self.nodes.index(node)]


@slow
def test_a_cluster_by_tls(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server is asked for by its own name and has to show that it is it: those of the slot
    map, the one that a slot moved to, and the replica that took over."""
    resolve_test_names(monkeypatch)
    with TlsCluster(tmp_path, authority) as cluster:
        first, second, third = cluster.primaries
        (heir,) = cluster.replicas
        (failing,), (moving,) = cluster.queues_of(first), cluster.queues_of(second)
        queues = [failing, moving]
        trust = {"ca_file": authority.file}
        node: dict[str, Any] = {
            "url": f"{cluster.url},{cluster.name_of(second)}",
            "tls": trust,
            "timeout": "1s",
            "connect_timeout": "1s",
        }
        every = {"interval": "100ms"}
        with DaemonThread(node=node, queues=queues, promote=every) as daemon:
            daemon.wait_ready()
            cluster.move(moving, second, third)
            first.kill()
            for queue, server in {moving: third, failing: heir}.items():
                daemon.wait_value(f'emqtimerd_node_up{{node="{cluster.name_of(server)}"}}', 1, 20)
                with connect(server) as client:
                    schedule(client, queue, "JOB1")
                daemon.wait_value(f'emqtimerd_jobs_promoted_total{{queue="{queue}"}}', 1)
            daemon.wait_ready()
        # Their names are checked: with one that is not theirs they are not talked to.
        other = Settings.model_validate(
            {"node": node | {"tls": trust | {"server_name": "server9.test"}}}
        )
        fault = sweep_once(other, queues, verbs=("promote",)).fault
        assert "certificate is not valid for 'server9.test'" in str(fault)


# --- logins -------------------------------------------------------------------------------------

USER = ("ACL", "SETUSER", "sweeper", "reset", "on", "~*", "+@all")


@pytest.fixture
def guarded(start_node: Start) -> Iterator[tuple[DevNode, redis.Redis]]:
    """A node where `sweeper` logs in with `first`, and nobody without a password."""
    server = start_node(extra_args=("--requirepass", "operator"))
    with connect(server, password="operator") as client:
        ask(client, *USER, ">first")
        yield server, client


def url_of(server: DevNode, login: str = "") -> str:
    return server.url.replace("//", f"//{login}")


def login_ways(server: DevNode, file: Path) -> dict[str, Mapping[str, str]]:
    """The environment of each way to give user and password."""
    plain = {"EMQTIMERD_NODE__URL": url_of(server)}
    return {
        "in the URL": {"EMQTIMERD_NODE__URL": url_of(server, "sweeper:first@")},
        "user in the URL, password in a file": {
            "EMQTIMERD_NODE__URL": url_of(server, "sweeper@"),
            "EMQTIMERD_NODE__PASSWORD_FILE": str(file),
        },
        "both beside the URL": {
            **plain,
            "EMQTIMERD_NODE__USERNAME": "sweeper",
            "EMQTIMERD_NODE__PASSWORD_FILE": str(file),
        },
    }


def test_user_and_password_come_by_url_environment_or_file(
    guarded: tuple[DevNode, redis.Redis], tmp_path: Path
) -> None:
    """Each way logs in as the user that is meant."""
    server, client = guarded
    (file := tmp_path / "password").write_text("first\n")
    for way, environ in login_ways(server, file).items():
        node = open_node(load(None, environ, {}).settings.node)
        with node.link():
            users = [
                entry["user"] for entry in client.client_list() if entry["name"] == "emqtimerd"
            ]
            assert users == ["sweeper"], way
        node.close()


def test_a_password_is_rotated_under_a_running_daemon(
    guarded: tuple[DevNode, redis.Redis], tmp_path: Path
) -> None:
    """The file is read with each connection: the new password is used without a restart, and until
    it is there the fault tells of the login and of no password."""
    server, client = guarded
    (file := tmp_path / "password").write_text("first\n")
    node = {"url": url_of(server), "username": "sweeper", "password_file": str(file)}
    with DaemonThread(node=node, queues=["orders"], promote={"interval": "50ms"}) as daemon:
        daemon.wait_ready()
        ask(client, *USER, ">second")
        ask(client, "CLIENT", "KILL", "USER", "sweeper")
        # After a sweep that was under way, perhaps, and whose connection broke.
        daemon.wait_told("node down", code="WRONGPASS")
        replacement = tmp_path / "replacement"
        replacement.write_text("second\n")
        replacement.rename(file)
        schedule(client, "orders", "JOB1")
        wait_until(lambda: pending(client, "orders") == {b"JOB1"}, "it is swept")
        daemon.wait_ready()
        text = str(daemon.lines())
        assert "first" not in text
        assert "second" not in text


def test_a_socket_file_takes_logins_and_databases(start_node: Start, socket_path: Path) -> None:
    """`unix://user:password@/path?db=2`."""
    server = start_node(extra_args=("--unixsocket", str(socket_path), "--requirepass", "operator"))
    with connect(server, password="operator", db=2) as client:
        client.set("{emq}:version", "echomq:6.0.0")
        schedule(client, "orders", "JOB1")
        ask(client, *USER, ">first")
        settings = Settings.model_validate(
            {"node": {"url": f"unix://sweeper:first@{socket_path}?db=2"}}
        )
        report = sweep_once(settings, ["orders"], verbs=("promote",))
        assert list(report.nodes) == [str(socket_path)]
        assert pending(client, "orders") == {b"JOB1"}


def test_files_that_cannot_be_used_are_named(tmp_path: Path, authority: Authority) -> None:
    """Before anything is dialled; nobody is asked for a passphrase, least of all on a terminal."""
    certificate, key = files(authority, "client")
    encrypted, garbage = tmp_path / "encrypted.key", tmp_path / "garbage"
    locked = ("-aes256", "-passout", "pass:hunter2", "-out", str(encrypted))
    subprocess.run(["openssl", "ec", "-in", key, *locked], check=True, capture_output=True)
    garbage.write_text("garbage")
    good = {"ca_file": authority.file, "cert_file": certificate, "key_file": key}
    for change, words in (
        ({"key_file": str(encrypted)}, "is encrypted"),
        ({"key_file": str(tmp_path / "none")}, rf"{tmp_path}/none\): No such file"),
        ({"key_file": files(authority, "server")[1]}, "key values mismatch"),
        ({"cert_file": str(garbage)}, rf"tls.cert_file .*{garbage} and"),
        ({"ca_file": str(garbage)}, rf"tls.ca_file \({garbage}\)"),
        ({"ca_file": str(tmp_path)}, "Is a directory"),
        ({"server_name": "a..b"}, r"tls.server_name \(a..b\)"),
    ):
        tls = {**good, **change}
        node = node_of("rediss://127.0.0.1:1", tls=tls)
        with pytest.raises(Unreachable, match=words) as caught, node.link():
            pass
        settings = load(None, {}, {"node.url": "rediss://127.0.0.1:1", "node.tls": tls}).settings
        assert "node.tls" in fix(settings.node, caught.value)
