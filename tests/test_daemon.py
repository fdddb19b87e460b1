"""The daemon as a whole: start and stop, signals, reloads, outages, and what it tells the world.

What only a process can show runs in one; the rest runs in a thread of the test's own process.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis
from conftest import connect, wait_until
from daemon_process import DaemonProcess, DaemonThread, Manager
from stub import (
    HANG_UP,
    SILENCE,
    Stub,
    array,
    bulk,
    cut,
    error,
    ids,
    integer,
    late,
    simple,
)

from chaos.stage import Clock
from emqtimerd import wire
from emqtimerd.daemon import Daemon, Signals
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.jobs import Jobs

Launch = Callable[..., DaemonProcess]
Open = Callable[..., DaemonThread]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts daemons as processes; all end with the test."""
    with ExitStack() as stack:

        def launch(config: str | None, *arguments: str, **options: Any) -> DaemonProcess:
            return stack.enter_context(DaemonProcess(tmp_path, config, *arguments, **options))

        yield launch


@pytest.fixture
def open_daemon() -> Iterator[Open]:
    """Starts daemons in threads; all end with the test."""
    with ExitStack() as stack:

        def open_(url: str, queues: Sequence[str], **settings: Any) -> DaemonThread:
            node = {"url": url, **settings.pop("node", {})}
            return stack.enter_context(DaemonThread(node=node, queues=list(queues), **settings))

        yield open_


def config(
    url: str, queues: Sequence[str], rest: str = "", *, node: str = "", top: str = ""
) -> str:
    """A configuration file; `rest` comes last, `node` and `top` within their sections."""
    return f"""
        queues = {json.dumps(list(queues))}
        {top}
        [http]
        listen = "127.0.0.1:0"
        [node]
        url = "{url}"
        {node}
        {rest}
    """


def nobody() -> str:
    """The URL of a port that nobody listens on."""
    return f"redis://127.0.0.1:{free_port()}/0"


def sweeps(queue: str, verb: str = "promote", outcome: str = "ok") -> str:
    return f'emqtimerd_sweeps_total{{outcome="{outcome}",queue="{queue}",verb="{verb}"}}'


def promoted(queue: str) -> str:
    return f'emqtimerd_jobs_promoted_total{{queue="{queue}"}}'


FAST = {"promote": {"interval": "100ms"}, "stalled_check": {"interval": "100ms"}}
NO_GRACE = {"interval": "100ms", "restart_grace": "0s"}


# --- start --------------------------------------------------------------------------------------


def test_ready_does_not_wait_for_the_server(
    launch: Launch, start_node: Any, socket_path: Path
) -> None:
    """When to send READY: with config, web server and scheduler up, and the server down. Liveness
    stays, readiness says why, and the first good round comes with the server."""
    node = start_node()
    node.stop()
    with Manager(str(socket_path)) as manager:
        environ = {"NOTIFY_SOCKET": str(socket_path)}
        daemon = launch(config(node.url, ["orders"]), environ=environ)
        manager.wait_told("READY=1", timeout=40)
        assert "is not reached yet" in manager.messages[0][1]
        assert daemon.get("/healthz")[0] == 200
        status, reasons = daemon.get("/readyz")
        assert status == 503
        assert f"127.0.0.1:{node.port}" in reasons
        node.start()
        daemon.wait_ready()
        assert daemon.stop() == 0
        manager.wait_told("STOPPING=1")


def test_all_counters_are_there_from_the_start(open_daemon: Open, stub: Stub) -> None:
    """Counters that appear with their first event: every queue, verb and outcome is 0 before any
    sweep."""
    stub.on("EMQ.VERSION", SILENCE)
    samples = open_daemon(stub.url, ["orders", "emails"]).scrape()
    for queue in ("orders", "emails"):
        for verb in ("promote", "stalled_check"):
            for outcome in ("ok", "error", "unknown"):
                assert samples[sweeps(queue, verb, outcome)] == 0
        assert samples[promoted(queue)] == 0
        for cause in ("stall", "restart", "unstamped", "unattributed"):
            assert (
                samples[f'emqtimerd_lease_expiries_total{{cause="{cause}",queue="{queue}"}}'] == 0
            )


def test_first_sweeps_come_soon_after_the_start(open_daemon: Open, stub: Stub) -> None:
    """First sweep soon: with an interval of an hour each queue has had both verbs in seconds."""
    slow = {"interval": "1h"}
    queues = [f"queue-{n}" for n in range(50)]
    daemon = open_daemon(stub.url, queues, promote=slow, stalled_check=slow)
    for verb in ("EMQ.PROMOTE", "EMQ.STALLED.CHECK"):
        wait_until(lambda verb=verb: stub.count(verb) >= 50, verb)  # type: ignore[misc]
    daemon.wait_ready()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('queues = ["orders"]\n[promote]\nintervall = "1s"\n', "promote.intervall"),
        ("", "nothing to sweep"),
    ],
    ids=["unknown key", "no queue"],
)
def test_a_bad_configuration_is_exit_2(launch: Launch, text: str, words: str) -> None:
    """SIGHUP kills, or a bad config kills: at the start it does, with the reason."""
    daemon = launch(text)
    assert daemon.ends() == 2
    assert words in daemon.errors
    assert "Traceback" not in daemon.errors


def test_a_port_in_use_is_exit_2(launch: Launch, stub: Stub) -> None:
    """A daemon that cannot be scraped says which address it wanted, and contacts nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        daemon = launch(config(stub.url, ["orders"]).replace("127.0.0.1:0", address))
        assert daemon.ends() == 2
    (line,) = daemon.told("cannot listen")
    assert address in line["reason"]
    assert daemon.errors == ""
    assert stub.connections == 0


def test_it_runs_on_a_node_of_its_own(launch: Launch) -> None:
    """`run --embedded` needs nothing else, and nothing is left of its node."""
    environ = {"EMQTIMERD_HTTP__LISTEN": "127.0.0.1:0"}
    daemon = launch(None, "--embedded", "--queue", "orders", environ=environ)
    daemon.wait_ready(20)
    port = int(daemon.told("started")[0]["node"].rpartition(":")[2])
    assert daemon.stop() == 0
    with pytest.raises(OSError) as refused:  # noqa: PT011 - which one is looked at below
        socket.create_connection(("127.0.0.1", port))
    assert refused.value.errno == errno.ECONNREFUSED


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_sweep_that_runs_at_the_stop_is_finished(launch: Launch, stub: Stub, number: int) -> None:
    """SIGTERM in mid-sweep: the sweep ends and counts once, no other starts, exit 0."""
    stub.on("EMQ.PROMOTE", late(integer(7), 1.0))
    stub.on("ZRANGE", ids(b"JOB1", b"1"), array())
    daemon = launch(
        config(stub.url, ["orders"], '[log]\nlevel = "debug"\n[promote]\ninterval = "50ms"\n')
    )
    daemon.wait_told("started", timeout=40)
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep under way")
    daemon.send(number)
    asked = time.monotonic()
    daemon.wait_told("stopping")
    assert daemon.get("/readyz")[0] == 503
    assert daemon.ends() == 0
    assert time.monotonic() - asked < 4
    assert [line["promoted"] for line in daemon.told("swept")] == [7]
    assert stub.count("EMQ.PROMOTE") == 1
    assert daemon.errors == ""


def test_a_sweep_that_never_ends_is_abandoned_at_the_grace(launch: Launch, stub: Stub) -> None:
    """SIGTERM in mid-sweep: when the grace is over the queue is named, and the exit code is 1."""
    # The sweep begins 2 s after the round and has 3 s more: two seconds after the grace.
    stub.on("EMQ.VERSION", late(bulk(b"promote stalled.check"), 2))
    stub.on("EMQ.PROMOTE", SILENCE)
    daemon = launch(
        config(stub.url, ["orders"], node='timeout = "3s"', top='shutdown_grace = "3s"')
    )
    daemon.wait_told("started", timeout=40)
    wait_until(lambda: stub.count("EMQ.VERSION") == 1, "a round under way")
    asked = time.monotonic()
    daemon.send(signal.SIGTERM)
    assert daemon.ends() == 1
    assert time.monotonic() - asked > 2.9
    (line,) = daemon.told("grace exceeded, sweeps abandoned")
    assert line["promote"] == ["orders"]
    assert daemon.errors == ""


def test_no_grace_is_no_wait(launch: Launch, stub: Stub) -> None:
    """With a grace of 0 s what runs is abandoned at once; nor does Python wait for its thread."""
    stub.on("EMQ.PROMOTE", SILENCE)
    daemon = launch(
        config(stub.url, ["orders"], node='timeout = "60s"', top='shutdown_grace = "0s"')
    )
    daemon.wait_told("started", timeout=40)
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep under way")
    daemon.send(signal.SIGTERM)
    asked = time.monotonic()
    assert daemon.ends() == 1
    assert time.monotonic() - asked < 10


def test_a_second_signal_ends_the_wait(launch: Launch, stub: Stub) -> None:
    """SIGTERM in mid-sweep, twice: a quick exit, no traceback."""
    stub.on("EMQ.PROMOTE", SILENCE)
    daemon = launch(
        config(stub.url, ["orders"], node='timeout = "60s"', top='shutdown_grace = "60s"')
    )
    daemon.wait_told("started", timeout=40)
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep under way")
    daemon.send(signal.SIGTERM)
    daemon.wait_told("stopping")
    daemon.send(signal.SIGTERM)
    asked = time.monotonic()
    assert daemon.ends() == 1
    assert time.monotonic() - asked < 10
    assert daemon.told("grace exceeded, sweeps abandoned", promote=["orders"])
    assert daemon.errors == ""


def test_a_stop_just_after_exec_is_prompt(launch: Launch, stub: Stub) -> None:
    """SIGTERM within 0 to 500 ms of exec: never swallowed, never a traceback."""
    delays = [0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5]
    daemons = [launch(config(stub.url, ["orders"])) for _ in delays]

    def stop(daemon: DaemonProcess, delay: float) -> tuple[int, float]:
        # The moment itself is what is tested: there is no event to wait for.
        time.sleep(delay)
        daemon.send(signal.SIGTERM)
        asked = time.monotonic()
        return daemon.ends(), time.monotonic() - asked

    with concurrent.futures.ThreadPoolExecutor(len(delays)) as pool:
        ends = list(pool.map(stop, daemons, delays))
    for daemon, (code, seconds) in zip(daemons, ends, strict=True):
        # Before the interpreter has come to the program's first line, the kernel answers.
        assert code in (0, -signal.SIGTERM)
        assert seconds < 5
        assert daemon.errors == ""


def test_a_hangup_during_the_start_is_no_end(launch: Launch, stub: Stub) -> None:
    """SIGHUP 20 ms after exec: from the program's first line on it never ends the process."""
    daemon = launch(config(stub.url, ["orders"]))
    wait_until(lambda: daemon.has_handler(signal.SIGHUP), "the first line", timeout=40)
    while not daemon.told("started"):
        assert daemon.running()
        daemon.send(signal.SIGHUP)
        time.sleep(0.001)
    daemon.reload()
    daemon.wait_ready()
    assert daemon.errors == ""


def test_a_storm_of_hangups(launch: Launch, stub: Stub) -> None:
    """Deadlock when a metric is touched in a signal handler: 10,000 SIGHUPs while sweeps and
    scrapes run flat out, and a SIGTERM at the end that is not lost among them."""
    daemon = launch(config(stub.url, ["orders"], '[promote]\ninterval = "10ms"\n'))
    daemon.wait_ready()
    storm = threading.Event()

    def scrape() -> int:
        scrapes = 0
        while not storm.is_set():
            daemon.scrape()
            scrapes += 1
        return scrapes

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        scraping = [pool.submit(scrape) for _ in range(2)]
        for _ in range(10_000):
            daemon.send(signal.SIGHUP)
        swept = stub.count("EMQ.PROMOTE")
        wait_until(lambda: stub.count("EMQ.PROMOTE") > swept + 10, "sweeps after the storm")
        storm.set()
        assert all(done.result() > 0 for done in scraping)
    assert daemon.value("emqtimerd_config_last_reload_successful") == 1
    for _ in range(100):
        daemon.send(signal.SIGHUP)
    assert daemon.stop() == 0
    assert daemon.errors == ""


def test_a_full_pipe_hides_no_signal() -> None:
    """Signals come through however many came before them."""
    with Signals() as signals:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(signals._writer, b"\0" * 4_096)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        assert signals.wait(0) == {signal.SIGTERM, signal.SIGHUP}
        assert signals.wait(0) == set()
        signal.raise_signal(signal.SIGTERM)
        assert signals.wait(10) == {signal.SIGTERM}


def test_another_thread_may_wake_the_waiting() -> None:
    """Work that was done apart is taken up at once, and looks like no signal."""
    with Signals() as signals:
        threading.Timer(0.05, signals.wake).start()
        asked = time.monotonic()
        assert signals.wait(10) == set()
        assert time.monotonic() - asked < 5
    signals.wake()


# --- reloads ------------------------------------------------------------------------------------

BAD_FILES: dict[str, tuple[str | bytes, str]] = {
    "truncated": ('queues = ["ord', "emqtimerd.toml"),
    "unknown key": ('queues = ["orders"]\n[promote]\nlimits = 1\n', "promote.limits"),
    "interval 0": ('queues = ["orders"]\n[promote]\ninterval = "0s"\n', "promote.interval"),
    "interval 1e9": ('queues = ["orders"]\n[promote]\ninterval = "1e9"\n', "promote.interval"),
    "blank": ('queues = ["orders"]\n[promote]\ninterval = "5 s"\n', "promote.interval"),
    "duplicate": ('queues = ["orders", "orders"]\n', "more than once"),
    "no queue left": ("queues = []\n", "nothing to sweep"),
    "not UTF-8": (b'queues = ["\xff"]\n', "UTF-8"),
    "nested for ever": ("queues = " + "[" * 100_000, ""),
}


def test_a_bad_file_changes_nothing(launch: Launch, stub: Stub) -> None:
    """SIGHUP kills, or a bad config kills: each kind of bad file is refused as a whole, with the
    reason; the sweeps go on as before, and the next good file is taken."""
    good = config(stub.url, ["orders"], '[promote]\ninterval = "50ms"\n')
    daemon = launch(good)
    daemon.wait_ready()
    for name, (text, words) in BAD_FILES.items():
        daemon.file.write_bytes(text if isinstance(text, bytes) else text.encode())
        line = daemon.reload()
        assert line["event"] != "reloaded", name
        assert line["level"] == "error", name
        assert words in json.dumps(line), name
        assert daemon.value("emqtimerd_config_last_reload_successful") == 0
        swept = stub.count("EMQ.PROMOTE", b"{orders}")
        wait_until(lambda s=swept: stub.count("EMQ.PROMOTE", b"{orders}") > s, "sweeps go on")  # type: ignore[misc]
    daemon.file.unlink()
    assert "emqtimerd.toml" in json.dumps(daemon.reload())
    assert daemon.reload(good)["event"] == "reloaded"
    assert daemon.value("emqtimerd_config_last_reload_successful") == 1
    assert daemon.errors == ""


def test_secrets_of_a_bad_file_are_not_told(launch: Launch, stub: Stub) -> None:
    """The error names file, key and value, but no password."""
    daemon = launch(config(stub.url, ["orders"]))
    daemon.wait_ready()
    line = daemon.reload(config("redis://u:hunter2@host:port/0", ["orders"]))
    assert "node.url" in json.dumps(line)
    assert "hunter2" not in json.dumps(daemon.lines())
    assert "hunter2" not in daemon.get("/")[1]


def test_a_reload_through_a_swapped_link(launch: Launch, stub: Stub, tmp_path: Path) -> None:
    """ConfigMap updates: the path is opened anew, so a swapped `..data` link is seen."""
    for name, queue in (("v1", "orders"), ("v2", "emails")):
        (tmp_path / name).mkdir()
        text = config(stub.url, [queue], '[promote]\ninterval = "50ms"\n')
        (tmp_path / name / "emqtimerd.toml").write_text(text)
    data, new = tmp_path / "..data", tmp_path / "..new"
    data.symlink_to("v1")
    (tmp_path / "mounted.toml").symlink_to("..data/emqtimerd.toml")
    daemon = launch(None, "--config", str(tmp_path / "mounted.toml"))
    daemon.wait_ready()
    new.symlink_to("v2")
    new.rename(data)
    assert daemon.reload()["event"] == "reloaded"
    wait_until(lambda: stub.count("EMQ.PROMOTE", b"{emails}") > 1, "the new queue swept")
    assert daemon.value("emqtimerd_queues") == 1


def test_series_of_a_removed_queue_go_and_stay_gone(open_daemon: Open, stub: Stub) -> None:
    """Series of removed queues: also when a sweep of theirs ends after the reload."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"), word=b"{gone}")
    stub.on("EMQ.PROMOTE", late(integer(5), 1.5), word=b"{gone}")
    fast = {"interval": "50ms"}
    daemon = open_daemon(stub.url, ["orders", "gone", "other"], promote=fast)
    wait_until(lambda: stub.count("EMQ.PROMOTE", b"{gone}") == 1, "its sweep under way")
    daemon.reload(queues=["orders"])
    before = {name for name in daemon.scrape() if "queue=" in name}
    assert all('queue="orders"' in name for name in before)
    swept = stub.count("EMQ.PROMOTE", b"{orders}")
    wait_until(lambda: stub.count("EMQ.PROMOTE", b"{orders}") > swept + 3, "the late sweep's end")
    assert {name for name in daemon.scrape() if "queue=" in name} == before
    assert stub.count("EMQ.PROMOTE", b"{gone}") == 1


def test_counters_go_on_across_reloads(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """Same metric registered twice: fifty reloads and a second daemon in the process, no error,
    and every counter goes on from where it was."""
    Jobs(client, "orders").schedule(b"", at_ms=1, job_id=b"JOB1")
    other = open_daemon(node.url, ["emails"], **FAST)
    daemon = open_daemon(node.url, ["orders"], **FAST)
    daemon.wait_value(promoted("orders"), 1)
    before = daemon.value(sweeps("orders"))
    for number in range(50):
        daemon.reload(promote={"interval": "100ms", "limit": 100 + number})
    after = daemon.value(sweeps("orders"))
    assert before is not None
    assert after is not None
    assert after >= before
    assert daemon.value(promoted("orders")) == 1
    assert other.value(promoted("orders")) is None


def test_a_changed_url_leads_to_the_other_node(open_daemon: Open, stub: Stub) -> None:
    """A reload may change the node: the old one is left alone, the new one swept at once."""
    with Stub() as other:
        daemon = open_daemon(stub.url, ["orders"], **FAST)
        daemon.wait_ready()
        daemon.reload(node={"url": other.url})
        wait_until(lambda: other.count("EMQ.PROMOTE") > 1, "the new node swept")
        known = len(stub.arrivals)
        swept = other.count("EMQ.PROMOTE")
        wait_until(lambda: other.count("EMQ.PROMOTE") > swept + 5, "further sweeps")
        assert len(stub.arrivals) == known
        assert [name for name in daemon.scrape() if "node_up" in name] == [
            f'emqtimerd_node_up{{node="127.0.0.1:{other.port}"}}'
        ]
        daemon.wait_ready()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
def test_a_reload_in_the_midst_of_an_outage_does_not_shorten_its_grace(
    open_daemon: Open, stub: Stub, scheme: str
) -> None:
    """Who mends the settings while nothing can be reached has living workers all the same: their
    leases are left alone for the grace, counted from the return and not from the reload."""
    address = stub.url.removeprefix("redis://")
    server = array(bulk(b"127.0.0.1"), integer(stub.port), bulk(b"a" * 40))
    stub.on("CLUSTER", array(array(integer(0), integer(16383), server)), lasting=True)
    stub.on("SENTINEL", ids(b"127.0.0.1", b"%d" % stub.port), lasting=True)
    path = "/main/0" if scheme == "redis+sentinel" else ""
    url, grace_seconds = f"{scheme}://{address.split('/')[0]}{path}", 1.0
    check = {"interval": "100ms", "restart_grace": f"{grace_seconds}s"}
    daemon = open_daemon(url, ["orders"], promote={"interval": "100ms"}, stalled_check=check)
    wait_until(lambda: stub.count("EMQ.STALLED.CHECK"), "a first check")
    stub.stop_listening()
    stub.hang_up()
    begun = time.monotonic()
    daemon.wait_told("node down")
    wait_until(lambda: time.monotonic() > begun + 1.2 * grace_seconds, "an outage over the grace")
    daemon.reload(node={"url": url, "timeout": "3s"})
    daemon.wait_told("node down", times=2)
    known, back = stub.count("EMQ.STALLED.CHECK"), time.monotonic()
    stub.heal()
    wait_until(lambda: stub.count("EMQ.STALLED.CHECK") > known, "checks again")
    assert time.monotonic() - back > grace_seconds


def node_up(stub: Stub) -> str:
    return f'emqtimerd_node_up{{node="127.0.0.1:{stub.port}"}}'


HOLD = {"timeout": "60s"}
"""Longer than any test waits: what hangs, hangs until the test ends it."""


def test_a_hung_node_keeps_nobody_from_its_successor(open_daemon: Open, stub: Stub) -> None:
    """A reload leads away from a server that hangs, with every thread waiting for it: the other one
    is swept within an interval, and a second reload finds nothing in its way either."""
    stub.on("EMQ.PROMOTE", SILENCE)
    queues = [f"queue-{n}" for n in range(12)]
    own = {q: {"promote": {"interval": f"{300 + n}ms"}} for n, q in enumerate(queues)}
    daemon = open_daemon(stub.url, queues, queue=own, node=HOLD, shutdown_grace="0s")
    wait_until(lambda: stub.count("EMQ.PROMOTE") >= 8, "every thread waiting")
    with Stub() as other, Stub() as third:
        for successor in (other, third):
            daemon.reload(node={"url": successor.url, **HOLD})
            begun = time.monotonic()
            wait_until(
                lambda s=successor: all(  # type: ignore[misc]
                    s.count("EMQ.PROMOTE", b"{%b}" % q.encode()) for q in queues
                ),
                "every queue swept on the new node",
            )
            # An interval, and what a machine takes that has more to do than it has cores.
            assert time.monotonic() - begun < 5
            daemon.wait_ready()
        assert daemon.value(node_up(third)) == 1
        assert daemon.stop() == 1, "the hung sweeps are abandoned, and named"
        (line,) = daemon.told("grace exceeded, sweeps abandoned")
        assert set(line["promote"]) <= set(queues)


def test_each_job_is_counted_once_through_reloads(
    open_daemon: Open, node: DevNode, client: redis.Redis, start_node: Any
) -> None:
    """A reload leads from one node to another and back, again and again, in the middle of their
    backlogs: what both have promoted is what is counted."""
    other = start_node()
    # Five times what a quick machine moves one by one before the last reload.
    pending, number = wire.queue_key("orders", "pending"), 20_000
    with connect(other) as other_client:
        for each in (client, other_client):
            rows = each.pipeline(transaction=False)
            for n in range(number):
                job_id = b"JOB%05d" % n
                rows.zadd(wire.queue_key("orders", "schedule"), {job_id: 1})
                rows.hset(wire.row_key("orders", job_id), mapping={"state": "scheduled"})
            rows.execute()
        few = {"interval": "100ms", "limit": 1}
        daemon = open_daemon(node.url, ["orders"], promote=few, stalled_check=NO_GRACE)
        for turn in range(8):
            moved = daemon.value(promoted("orders"))
            wait_until(
                lambda m=moved: daemon.value(promoted("orders")) not in (m, 0),  # type: ignore[misc]
                "jobs to move",
            )
            daemon.reload(node={"url": node.url if turn % 2 else other.url})
        daemon.reload(promote={"interval": "100ms", "limit": 100})
        wait_until(lambda: client.zcard(pending) == number, "the one backlog's end")
        daemon.reload(node={"url": other.url})
        wait_until(lambda: other_client.zcard(pending) == number, "the other backlog's end")
        daemon.wait_value(promoted("orders"), 2 * number)
        for outcome in ("error", "unknown"):
            assert daemon.value(sweeps("orders", outcome=outcome)) == 0


@pytest.mark.parametrize("end", ["an answer", "a broken connection"])
def test_what_ends_on_a_node_that_was_left_counts_and_says_nothing(
    open_daemon: Open, stub: Stub, end: str
) -> None:
    """A round that began before a reload ends after it: what it moved, or may have moved, is
    counted once; no state, no readiness and no line of the new node is touched by it."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"))
    stub.on("EMQ.PROMOTE", late(integer(7) if end == "an answer" else cut(integer(7), 1), 1.5))
    check = {"interval": "1h"}
    daemon = open_daemon(stub.url, ["orders"], promote={"interval": "100ms"}, stalled_check=check)
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep under way")
    daemon.wait_told("node up")
    with Stub() as other:
        told = len(daemon.lines())
        daemon.reload(node={"url": other.url})
        daemon.wait_ready()
        if end == "an answer":
            daemon.wait_value(promoted("orders"), 7)
        else:
            daemon.wait_value(sweeps("orders", outcome="unknown"), 1)
        known = other.count("EMQ.PROMOTE")
        wait_until(lambda: other.count("EMQ.PROMOTE") > known + 5, "further sweeps")
        samples = daemon.scrape()
        assert samples[promoted("orders")] == (7 if end == "an answer" else 0)
        assert samples[sweeps("orders", outcome="unknown")] == (0 if end == "an answer" else 1)
        assert samples['emqtimerd_queue_overdue_seconds{queue="orders"}'] == 0
        assert {name for name in samples if "node_up" in name} == {node_up(other)}
        assert daemon.get("/readyz")[0] == 200
        nodes = [line for line in daemon.lines()[told:] if line["event"] != "reloaded"]
        assert [(line["event"], line.get("node")) for line in nodes] == [
            ("node up", f"127.0.0.1:{other.port}")
        ]
        assert stub.count("EMQ.PROMOTE") == 1
        assert daemon.stop() == 0


def test_another_password_for_the_same_server(open_daemon: Open, stub: Stub) -> None:
    """The old connections hang until their timeout; the node that is spoken to anew has the same
    name, and is neither down for a moment nor not ready."""
    daemon = open_daemon(stub.url, ["orders"], promote={"interval": "100ms"}, node=HOLD)
    daemon.wait_ready()
    daemon.wait_value(node_up(stub), 1)
    stub.on("EMQ.PROMOTE", late(cut(integer(7), 1), 1.5), integer(0))
    known = stub.count("EMQ.PROMOTE")
    wait_until(lambda: stub.count("EMQ.PROMOTE") > known, "a sweep that hangs")
    address = stub.url.removeprefix("redis://")
    daemon.reload(node={"url": f"redis://:new@{address}", **HOLD})
    seen = set()

    def given_up() -> bool:
        samples = daemon.scrape()
        seen.add((samples[node_up(stub)], daemon.get("/readyz")[0]))
        return samples[sweeps("orders", outcome="unknown")] == 1

    wait_until(given_up, "the sweep that hung is given up")
    assert stub.count("EMQ.PROMOTE") > known + 5
    known = stub.count("EMQ.PROMOTE")
    wait_until(lambda: given_up() and stub.count("EMQ.PROMOTE") > known + 3, "further sweeps")
    assert seen == {(1.0, 200)}
    assert not daemon.told("node down")
    assert daemon.value(f'emqtimerd_node_restarts_total{{node="127.0.0.1:{stub.port}"}}') == 0


def test_a_blocked_queue_is_not_blocked_on_the_next_node(open_daemon: Open, stub: Stub) -> None:
    """What the old node said of its queues goes with it, before the new one has said a word."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"), word=b"orders")
    stub.on("ZCARD", integer(5))
    stub.on("EMQ.PROMOTE", error("EMQSTATE JOB1 not native"))
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    blocked = 'emqtimerd_queue_blocked{queue="orders",verb="promote"}'
    jobs = 'emqtimerd_queue_jobs{queue="orders",state="dead"}'
    daemon.wait_value(blocked, 1)
    daemon.wait_value(jobs, 5)
    daemon.reload(node={"url": nobody()})
    samples = daemon.scrape()
    assert (samples[blocked], samples[jobs]) == (0, 0)
    assert samples['emqtimerd_queue_overdue_seconds{queue="orders"}'] == 0
    assert samples[sweeps("orders", outcome="error")] >= 1
    assert daemon.get("/readyz")[0] == 503


def test_a_reload_keeps_what_was_discovered_on_the_same_server(
    open_daemon: Open, stub: Stub
) -> None:
    """Another timeout is no other keyspace: what was found is swept on and keeps its counts, though
    the next search has to begin anew; on another server it is forgotten."""
    key = b"emq:{orders}:schedule"
    page = array(bulk(b"0"), ids(key))
    stub.on("SCAN", page, error("LOADING"))
    discovery = {"enabled": True, "interval": "1s"}
    daemon = open_daemon(stub.url, [], discovery=discovery, **FAST)
    daemon.wait_value("emqtimerd_queues", 1)
    before = daemon.value(sweeps("orders"))
    daemon.reload(node={"url": stub.url, "timeout": "3s"})
    samples = daemon.scrape()
    assert samples["emqtimerd_queues"] == 1
    assert samples[sweeps("orders")] >= (before or 0)
    known = stub.count("EMQ.PROMOTE")
    wait_until(lambda: stub.count("EMQ.PROMOTE") > known + 2, "further sweeps")
    with Stub() as other:
        other.on("SCAN", array(bulk(b"0"), ids()))
        daemon.reload(node={"url": other.url})
        assert daemon.value("emqtimerd_queues") == 0


def test_an_excess_of_discovered_queues_is_told_at_both_ends(open_daemon: Open, stub: Stub) -> None:
    """Beyond `discovery.max_queues`: a warning with the number, and a line when that is over."""
    page = array(bulk(b"0"), ids(b"emq:{a}:active", b"emq:{b}:active", b"emq:{c}:active"))
    stub.on("SCAN", page)
    discovery = {"enabled": True, "interval": "1s", "max_queues": 1}
    daemon = open_daemon(stub.url, [], discovery=discovery, **FAST)
    line = daemon.wait_told("queues beyond discovery.max_queues")
    assert (line["not_swept"], line["level"]) == (2, "warning")
    daemon.wait_value("emqtimerd_queues", 1)
    daemon.reload(discovery={**discovery, "max_queues": 10})
    line = daemon.wait_told("no queue is beyond discovery.max_queues any more")
    assert line["level"] == "info"
    daemon.wait_value("emqtimerd_queues", 3)
    assert len(daemon.told("queues beyond discovery.max_queues")) == 1


def test_what_a_search_found_meets_a_reload_that_excludes_it(open_daemon: Open, stub: Stub) -> None:
    """A search ends just before a reload: the newer settings decide."""
    stub.on("SCAN", array(bulk(b"0"), ids(b"emq:{orders}:active")))
    discovery = {"enabled": True, "interval": "1h"}
    daemon = open_daemon(stub.url, ["listed"], discovery=discovery, **FAST)
    daemon.wait_value("emqtimerd_queues", 2)
    inside = daemon.daemon
    daemon.reload(discovery={**discovery, "exclude": ["ord*"]})
    inside._work.found.put(frozenset({"orders", "emails"}))
    daemon.wait_value("emqtimerd_queues", 2)
    assert daemon.value(sweeps("orders")) is None
    assert daemon.value(sweeps("emails")) is not None


def test_what_a_search_finds_while_the_last_find_is_taken_over_is_kept(stub: Stub) -> None:
    """At whichever instruction it ends: the next search may be a day away."""
    inside = DaemonThread(node={"url": stub.url}, discovery={"enabled": True}).daemon
    work, take = inside._work, Daemon._take_found.__code__
    work.discovery.step = lambda: frozenset({"orders"})  # type: ignore[method-assign]

    def ends_at(instruction: int) -> bool:
        reached = itertools.count(1)

        def trace(frame: FrameType, event: str, _arg: object) -> Any:
            if frame.f_code is not take:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and next(reached) == instruction:
                work.search()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            inside._take_found()
        finally:
            sys.settrace(before)
        return next(reached) > instruction

    # Python 3.12 shows instructions from the second time on.
    assert ends_at(0)
    for instruction in itertools.count(1):
        inside._found = frozenset()
        if not ends_at(instruction):
            break
        inside._take_found()
        assert inside._found == {"orders"}, instruction
    assert instruction > 5
    work.nodes.close()


def test_a_file_that_hangs_keeps_nobody_waiting(
    open_daemon: Open, stub: Stub, manager: Manager
) -> None:
    """A reload whose file does not come (a network disk): signs of life go on; a hangup that comes
    meanwhile has it read once more; a stop needs no file."""
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    daemon.wait_ready()
    release, load, loads = threading.Event(), daemon.daemon._load, []

    def hang() -> Any:
        loads.append(time.monotonic())
        release.wait(20)
        return load()

    daemon.daemon._load = hang
    daemon.signals.send(signal.SIGHUP)
    manager.wait_told("RELOADING=1")
    pings = len(manager.told("WATCHDOG=1"))
    manager.wait_told("WATCHDOG=1", pings + 10)
    daemon.signals.send(signal.SIGHUP)
    pings = len(manager.told("WATCHDOG=1"))
    manager.wait_told("WATCHDOG=1", pings + 2)
    assert len(loads) == 1
    assert not daemon.told("reloaded")
    release.set()
    daemon.wait_told("reloaded", 2)
    assert len(loads) == 2
    # Told before it is read; the manager may take it from its socket a moment later.
    manager.wait_told("RELOADING=1", 2)
    assert len(manager.told("RELOADING=1")) == 2
    release.clear()
    daemon.signals.send(signal.SIGHUP)
    wait_until(lambda: len(loads) == 3, "the third reading")
    assert daemon.stop() == 0
    release.set()


def test_a_reload_changes_the_log(launch: Launch, stub: Stub) -> None:
    """Level and format are taken over at once, for every room that tells something."""
    stub.on("ZRANGE", ids(b"JOB1", b"1"), array())
    stub.on("EMQ.PROMOTE", integer(1), integer(0))
    fast = '[promote]\ninterval = "50ms"\n'
    daemon = launch(config(stub.url, ["orders"], fast))
    daemon.wait_ready()
    daemon.reload(config(stub.url, ["orders"], fast + '[log]\nlevel = "debug"\n'))
    assert not daemon.told("swept")
    stub.on("ZRANGE", ids(b"JOB1", b"1"), array())
    stub.on("EMQ.PROMOTE", integer(7), integer(0))
    assert daemon.wait_told("swept")["promoted"] == 7
    text = config(stub.url, ["orders"], fast + '[log]\nformat = "text"\n')
    daemon.configure(text)
    daemon.send(signal.SIGHUP)
    wait_until(lambda: "reloaded" in daemon.errors, "a line for people")


def test_what_a_restart_takes_over_only_is_told(open_daemon: Open, stub: Stub) -> None:
    """SIGHUP: a setting that needs a restart is named, and the daemon stays reachable."""
    daemon = open_daemon(stub.url, ["orders"])
    daemon.reload(http={"listen": "127.0.0.1:1"})
    (line,) = daemon.told("http.listen is taken over by a restart only")
    assert (line["listen"], line["until_then"]) == ("127.0.0.1:1", "127.0.0.1:0")
    daemon.wait_ready()


def test_every_reload_is_answered_to_the_manager(
    launch: Launch, stub: Stub, tmp_path: Path
) -> None:
    """Reload under Type=notify-reload: RELOADING=1 and the time in one datagram, READY=1 after it:
    good file, bad file, file gone, three in a row, and during a slow sweep."""
    with Manager(f"\0emqtimerd-{os.getpid()}") as manager:
        good = config(stub.url, ["orders"], node='timeout = "1s"')
        daemon = launch(good, environ={"NOTIFY_SOCKET": f"@emqtimerd-{os.getpid()}"})
        manager.wait_told("READY=1", timeout=40)
        daemon.reload(good)
        daemon.reload("queues = [")
        daemon.file.unlink()
        daemon.reload()
        stub.on("EMQ.PROMOTE", SILENCE)
        promotions = stub.count("EMQ.PROMOTE")
        wait_until(lambda: stub.count("EMQ.PROMOTE") > promotions, "a sweep that hangs")
        daemon.reload(good)
        for _ in range(3):
            daemon.send(signal.SIGHUP)
        wait_until(lambda: len(daemon.told("reloaded")) > 2, "the last reload")
        wait_until(
            lambda: len(manager.told("READY=1")) == len(manager.told("RELOADING=1")) + 1,
            "each reload answered",
        )
        assert daemon.stop() in (0, 1)
    beginnings = [text for _, text in manager.messages if text.startswith("RELOADING=1")]
    for text in beginnings:
        _, monotonic = text.split("\n")
        name, microseconds = monotonic.split("=")
        assert name == "MONOTONIC_USEC"
        assert abs(int(microseconds) / 1e6 - time.monotonic()) < 60
    states = [text.split("\n")[0] for _, text in manager.messages if not text.startswith("STATUS")]
    pairs = [state for state in states if state in ("RELOADING=1", "READY=1")]
    assert pairs == ["READY=1", *["RELOADING=1", "READY=1"] * len(beginnings)]


# --- failures of the node -----------------------------------------------------------------------


def test_a_hung_sweep_does_not_stop_its_queue(open_daemon: Open, stub: Stub) -> None:
    """One hung sweep stops that queue for ever: each has a deadline, the next one comes, and a
    reloaded interval is in force."""
    stub.on("EMQ.PROMOTE", SILENCE, SILENCE, integer(0))
    slow = {"interval": "1h"}
    daemon = open_daemon(
        stub.url, ["orders"], node={"timeout": "1s"}, promote=slow, stalled_check=slow
    )
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep that hangs")
    daemon.reload(promote={"interval": "100ms"})
    daemon.wait_ready()
    wait_until(lambda: stub.count("EMQ.PROMOTE") > 5, "sweeps at the new interval")
    assert daemon.value(sweeps("orders", outcome="unknown")) == 2


ERRORS = {
    "LOADING": "LOADING Valkey is loading the dataset in memory",
    "BUSY": "BUSY Valkey is busy running a script",
    "OOM": "OOM command not allowed when used memory > 'maxmemory'",
    "MISCONF": "MISCONF Errors writing to the AOF file",
    "NOPERM": "NOPERM this user has no permissions to run the 'emq.promote' command",
    "WRONGTYPE": "WRONGTYPE Operation against a key holding the wrong kind of value",
    "READONLY": "READONLY You can't write against a read only replica.",
    "MASTERDOWN": "MASTERDOWN Link with MASTER is down",
    "CLUSTERDOWN": "CLUSTERDOWN The cluster is down",
    "TRYAGAIN": "TRYAGAIN Multiple keys request during rehashing of slot",
    "UNBLOCKED": "UNBLOCKED force unblock from blocking operation",
    "ERR": "ERR unheard of",
    "other": "NEVERSEEN words",
}


def test_no_failure_ends_the_loop(open_daemon: Open, stub: Stub) -> None:
    """Loop dies on one failure: each error once, on a queue of its own; all are counted under a
    fixed code, told once, and followed by good sweeps; a queue without errors is not delayed."""
    for code, text in ERRORS.items():
        stub.on("EMQ.PROMOTE", error(text), integer(0), word=b"{%b}" % code.encode())
    stub.on("EMQ.PROMOTE", simple("OK"), integer(0), word=b"{shape}")
    stub.on("EMQ.PROMOTE", cut(integer(7), 2), integer(0), word=b"{cut}")
    stub.on("EMQ.PROMOTE", HANG_UP, integer(0), word=b"{hangup}")
    queues = [*ERRORS, "shape", "cut", "hangup", "good"]
    daemon = open_daemon(
        stub.url, queues, promote={"interval": "100ms"}, stalled_check={"interval": "1h"}
    )
    for queue in queues:
        wait_until(
            lambda q=queue: daemon.value(sweeps(q)) not in (0, None),  # type: ignore[misc]
            f"good sweeps of {queue}",
        )
    samples = daemon.scrape()
    for code in ERRORS:
        name = f'emqtimerd_sweep_errors_total{{code="{code}",queue="{code}",verb="promote"}}'
        # An error that came behind a lost reply is not known; the sweep was then unknown.
        unknown = samples[sweeps(code, outcome="unknown")]
        assert samples.get(name, 0) + unknown >= 1, code
    for queue in queues:
        assert len(daemon.told("sweep failed", queue=queue)) <= 2
    daemon.wait_ready()


def test_a_node_that_denies_everything_is_not_unreached(open_daemon: Open, stub: Stub) -> None:
    """ACL: the node is up, readiness names the permission, and each queue and verb is told once."""
    for verb in ("EMQ.PROMOTE", "EMQ.STALLED.CHECK", "EVAL_RO", "ZRANGE", "ZCARD", "TIME"):
        stub.on(verb, error(f"NOPERM no permission to run '{verb.lower()}'"))
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    wait_until(lambda: "NOPERM" in daemon.get("/readyz")[1], "the permission named")
    status, reasons = daemon.get("/readyz")
    assert status == 503
    assert "not reached" not in reasons
    assert daemon.value(f'emqtimerd_node_up{{node="127.0.0.1:{stub.port}"}}') == 1
    for verb in ("promote", "stalled_check"):
        daemon.wait_told("sweep failed", queue="orders", verb=verb)


@pytest.mark.parametrize(
    ("room", "method"), [("_ledger", "record"), ("_chronicle", "tell"), ("_ledger", "node_seen")]
)
def test_a_failure_of_our_own_does_not_end_the_loop(
    open_daemon: Open, stub: Stub, monkeypatch: pytest.MonkeyPatch, room: str, method: str
) -> None:
    """Loop dies on one failure: an exception inside a metrics or log call is told, and the next
    sweeps come."""
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    daemon.wait_ready()
    target = getattr(daemon.daemon, room)
    failures = iter(range(2))
    real = getattr(target, method)

    def fail(*arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise RuntimeError("a mistake of our own")
        return real(*arguments)

    monkeypatch.setattr(target, method, fail)
    stub.hang_up()
    daemon.wait_told("a round failed, the next one goes on", 2)
    swept = stub.count("EMQ.PROMOTE")
    wait_until(lambda: stub.count("EMQ.PROMOTE") > swept + 3, "further sweeps")
    daemon.wait_ready()


def test_a_poison_row_next_to_a_good_queue(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """Poison row: the good queue is on time, the bad one is named with the row's id, once, and
    works again as soon as somebody removes the row."""
    good, bad = Jobs(client, "good"), Jobs(client, "bad")
    bad.schedule(b"", at_ms=1, job_id=b"JOB1")
    client.hset(wire.row_key("bad", b"JOB1"), "group", "lane")
    daemon = open_daemon(node.url, ["bad", "good"], **FAST)
    line = daemon.wait_told("sweep blocked")
    assert (line["queue"], line["job_id"]) == ("bad", "JOB1")
    daemon.wait_value('emqtimerd_queue_blocked{queue="bad",verb="promote"}', 1)
    for number in range(5):
        good.schedule(b"", at_ms=1, job_id=b"JOB%d" % number)
        daemon.wait_value(promoted("good"), number + 1, timeout=3)
    assert len(daemon.told("sweep blocked")) == 1
    assert client.exists(wire.row_key("bad", b"JOB1"))
    client.hdel(wire.row_key("bad", b"JOB1"), "group")
    daemon.wait_told("sweep works again", queue="bad")
    daemon.wait_value(promoted("bad"), 1)
    daemon.wait_value('emqtimerd_queue_blocked{queue="bad",verb="promote"}', 0)


def test_a_black_hole(launch: Launch, start_node: Any, socket_path: Path) -> None:
    """Black holes, watchdog, probes: with 20 queues and a server that is stopped, the daemon stays
    alive, answers at once, says why it is not ready, goes on with its signs of life, and sweeps
    soon after the server's return."""
    node = start_node()
    queues = [f"queue-{n}" for n in range(20)]
    rest = '[promote]\ninterval = "200ms"\n[stalled_check]\ninterval = "300ms"\n'
    with Manager(str(socket_path)) as manager:
        environ = {"NOTIFY_SOCKET": str(socket_path), "WATCHDOG_USEC": "1000000"}
        daemon = launch(config(node.url, queues, rest, node='timeout = "500ms"'), environ=environ)
        daemon.wait_ready()
        os.kill(node.pid, signal.SIGSTOP)
        hole, answers = time.monotonic(), []
        try:
            wait_until(lambda: daemon.get("/readyz")[0] == 503, "not ready")
            assert "timeout" in daemon.get("/readyz")[1]
            while time.monotonic() < hole + 4:
                asked = time.monotonic()
                assert daemon.get("/healthz")[0] == 200
                daemon.scrape()
                answers.append(time.monotonic() - asked)
        finally:
            os.kill(node.pid, signal.SIGCONT)
        back = time.monotonic()
        daemon.wait_ready(8)
        assert time.monotonic() - back < 8
        # A machine that stands still delays one or two; the server would delay all of them.
        assert sorted(answers)[len(answers) * 3 // 4] < 0.5
        pings = [when for when in manager.told("WATCHDOG=1") if when > hole - 1]
        gaps = [b - a for a, b in itertools.pairwise(pings)]
        assert sorted(gaps)[len(gaps) * 3 // 4] < 0.7
        assert max(gaps) < 1.5
        assert len(daemon.told("node down")) <= 3
        assert daemon.stop() == 0


def test_a_late_run_after_the_process_was_stopped(launch: Launch, stub: Stub) -> None:
    """Misfire: stopped over several fire times, the daemon sweeps once at once, and then goes on at
    its pace."""
    daemon = launch(config(stub.url, ["orders"], '[promote]\ninterval = "1s"\n'))
    daemon.wait_ready()
    known = stub.count("EMQ.PROMOTE")
    wait_until(lambda: stub.count("EMQ.PROMOTE") > known, "a sweep on the grid")
    on_grid = time.monotonic()
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: time.monotonic() > on_grid + 3.1, "three points to pass")
    known, freed = stub.count("EMQ.PROMOTE"), time.monotonic()
    daemon.send(signal.SIGCONT)
    wait_until(lambda: stub.count("EMQ.PROMOTE") > known, "the late sweep")
    # The next point is 0.9 s away.
    assert time.monotonic() - freed < 0.8
    wait_until(lambda: stub.count("EMQ.PROMOTE") >= known + 5, "the four sweeps after it")
    # One late sweep, then the points of the grid, a second apart: more than 3 s, and longer where
    # the machine stands still. If those that were missed were made up for, it would be 2 s at most.
    assert time.monotonic() - freed > 2.5
    assert not daemon.told("the wall clock was set")


def test_a_node_that_comes_back_is_told_in_two_lines(open_daemon: Open, start_node: Any) -> None:
    """LOADING, BUSY and the like: one log line a change of state, whatever the number of rounds."""
    node = start_node()
    daemon = open_daemon(node.url, ["orders", "emails"], **FAST)
    daemon.wait_ready()
    node.kill()
    wait_until(lambda: daemon.get("/readyz")[0] == 503, "not ready")
    rounds = daemon.value('emqtimerd_round_duration_seconds_count{verb="promote"}') or 0
    wait_until(
        lambda: (
            (daemon.value('emqtimerd_round_duration_seconds_count{verb="promote"}') or 0)
            > rounds + 5
        ),
        "rounds without a node",
    )
    assert daemon.get("/healthz")[0] == 200
    node.start()
    daemon.wait_ready()
    daemon.wait_told("node restarted")
    assert len(daemon.told("node up")) == 2
    assert 1 <= len(daemon.told("node down")) <= 2
    assert daemon.value(f'emqtimerd_node_restarts_total{{node="127.0.0.1:{node.port}"}}') == 1


# --- sweeping -----------------------------------------------------------------------------------


def test_only_configured_queues_are_touched(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """Unknown queues: on a server with twenty queues only the configured one is named in any
    command; one that is made later is picked up without a restart."""
    for number in range(20):
        Jobs(client, f"queue-{number}").schedule(b"", at_ms=1, job_id=b"JOB1")
    seen: list[str] = []
    with connect(node) as other, other.monitor() as monitor:
        daemon = open_daemon(node.url, ["queue-7", "later"], **FAST)
        daemon.wait_value(promoted("queue-7"), 1)
        Jobs(client, "later").schedule(b"", at_ms=1, job_id=b"JOB1")
        daemon.wait_value(promoted("later"), 1)
        daemon.stop()
        client.echo("the end")
        while (command := monitor.next_command()["command"]) != "ECHO the end":
            seen.append(command)
    named = {word for command in seen for word in command.split() if "emq:{" in word}
    swept = [word for word in named if "{queue-" in word]
    assert swept
    assert all("{queue-7}" in word for word in swept)


def test_a_job_is_promoted_when_it_is_due(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """Due-time wakes: with an interval of an hour, jobs that are scheduled ahead move within
    milliseconds of their time."""
    jobs = Jobs(client, "orders")
    for number in range(40):
        jobs.schedule(b"", in_ms=2_500 + 20 * number)
    daemon = open_daemon(node.url, ["orders"], promote={"interval": "1h"})
    daemon.wait_value(promoted("orders"), 40)
    samples = daemon.scrape()
    name = "emqtimerd_promotion_lateness_seconds"
    assert samples[f"{name}_count"] > 10
    # A quarter of them: while a machine stands still, as many as half come due. One with more to
    # do than it has cores makes any thread wait for its turn.
    bound = "0.01" if os.getloadavg()[0] < (os.cpu_count() or 1) else "1.0"
    assert samples[f'{name}_bucket{{le="{bound}"}}'] >= samples[f"{name}_count"] / 4


def test_a_lease_is_checked_when_it_expires(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """Wakes at expiry, when asked for: a lease that runs out between two rounds is recovered then,
    and one that is extended is left."""
    jobs = Jobs(client, "orders")
    for number in range(2):
        jobs.enqueue(b"", b"JOB%d" % number)
    lost, kept = jobs.claim(lease_ms=2_000), jobs.claim(lease_ms=2_000)
    assert lost
    assert kept
    check = {"interval": "1h", "restart_grace": "0s", "at_expiry": True, "max_stalled": 2}
    daemon = open_daemon(node.url, ["orders"], stalled_check=check)
    wait_until(lambda: daemon.value(sweeps("orders", "stalled_check")), "the first check")
    assert daemon.value('emqtimerd_jobs_recovered_total{queue="orders"}') == 0
    jobs.extend(kept, lease_ms=60_000)
    daemon.wait_value('emqtimerd_jobs_recovered_total{queue="orders"}', 1)
    assert client.zrange(wire.queue_key("orders", "active"), 0, -1) == [kept.id]


def test_a_worker_keeps_its_jobs_over_a_restart(open_daemon: Open, start_node: Any) -> None:
    """All leases look expired after the server was down: who extends within the grace keeps its
    job; the other is recovered after it, not counted as a stall; the restart report adds up."""
    node = start_node()
    with connect(node) as client:
        jobs = Jobs(client, "orders")
        for number in range(3):
            jobs.enqueue(b"", b"JOB%d" % number)
        kept, lost, done = (jobs.claim(lease_ms=300) for _ in range(3))
    assert kept
    assert lost
    assert done
    # The grace at the daemon's own start is over: none is asked for until the server has gone.
    check = {"interval": "1h", "restart_grace": "1h"}
    daemon = open_daemon(node.url, ["orders"], stalled_check=check, promote={"interval": "100ms"})
    daemon.wait_ready()
    node.kill()
    daemon.wait_told("node down")
    restarted = time.monotonic()
    node.start()
    daemon.reload(stalled_check={"interval": "100ms", "restart_grace": "2s"})
    with connect(node) as client:
        jobs = Jobs(client, "orders")
        jobs.extend(kept, lease_ms=60_000)
        daemon.wait_value('emqtimerd_active_leases{epoch="previous",queue="orders"}', 2)
        jobs.complete(done)
        daemon.wait_value('emqtimerd_active_leases{epoch="previous",queue="orders"}', 1)
        assert daemon.value('emqtimerd_jobs_recovered_total{queue="orders"}') == 0
        daemon.wait_value('emqtimerd_jobs_recovered_total{queue="orders"}', 1)
        assert time.monotonic() - restarted > 1
        assert client.zrange(wire.queue_key("orders", "active"), 0, -1) == [kept.id]
        assert client.hget(wire.row_key("orders", lost.id), "stalled") in (None, b"0")
    (crossing,) = daemon.told("lease crossed a server restart")
    assert crossing["job_id"] == lost.id.decode()
    assert crossing["run_id"] != crossing["lease_epoch"]
    assert daemon.value('emqtimerd_lease_expiries_total{cause="restart",queue="orders"}') == 1
    begun = daemon.told("restart report: leases of an earlier server process")[-1]
    end = daemon.wait_told("restart report: the last lease of an earlier server process is gone")
    assert end["leases"] == begun["leases"] in (2, 3)
    assert end["recovered"] == 1
    assert end["recovered"] + end["settled_elsewhere"] == end["leases"]


def test_an_idle_queue_costs_its_sweeps_and_no_more(open_daemon: Open, stub: Stub) -> None:
    """Idle cost: sweeps are queues times verbs over the interval; beside each promotion one read,
    beside each stall check the peek and four sizes, and TIME once a pipeline."""
    queues = [f"queue-{n}" for n in range(40)]
    slow = {"interval": "250ms"}
    daemon = open_daemon(stub.url, queues, promote=slow, stalled_check=slow)
    daemon.wait_ready()
    known, begun = len(stub.arrivals), time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 2, "two seconds to pass")
    arrivals, seconds = stub.arrivals[known:], time.monotonic() - begun
    count = Counter(arrival.verb for arrival in arrivals)
    turns = 40 * (seconds / 0.25 + 2)
    assert 0 < count["EMQ.PROMOTE"] <= turns
    assert 0 < count["EMQ.STALLED.CHECK"] <= turns
    assert count["ZRANGE"] <= count["EMQ.PROMOTE"] + 40
    assert count["EVAL_RO"] <= count["EMQ.STALLED.CHECK"] + 40
    assert count["ZCARD"] <= 4 * (count["EMQ.STALLED.CHECK"] + 40)
    # In the first second each queue's leases are looked at apart from its turns.
    assert count["TIME"] <= 2 * (seconds / 0.25 + 2) + 40
    # Two rounds at one moment may have opened a further connection.
    fence = {"CLIENT", "EMQ.VERSION", "GET", "INFO"}
    reads = {"MULTI", "EXEC", "TIME", "ZRANGE", "EVAL_RO", "ZCARD"}
    assert set(count) - fence == {"EMQ.PROMOTE", "EMQ.STALLED.CHECK", *reads}


def test_a_stop_in_the_middle_of_a_drain_counts_what_was_moved(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """Drain pace after an outage: a backlog is drained at once and not a page an interval; a stop
    comes between two pages, and what was counted is what was moved."""
    rows = client.pipeline(transaction=False)
    for number in range(20_000):
        job_id = b"JOB%05d" % number
        rows.zadd(wire.queue_key("orders", "schedule"), {job_id: 1})
        rows.hset(wire.row_key("orders", job_id), mapping={"state": "scheduled", "attempts": 0})
    rows.execute()
    daemon = open_daemon(
        node.url, ["orders"], promote={"interval": "1h", "limit": 20}, stalled_check=NO_GRACE
    )
    pending = wire.queue_key("orders", "pending")
    wait_until(lambda: client.zcard(pending) > 500, "the drain under way")
    assert daemon.stop() == 0
    (facts,) = daemon.daemon._ledger.queues()
    assert facts.promoted == client.zcard(pending)
    other = open_daemon(node.url, ["orders"], promote={"interval": "1h"})
    other.wait_value(promoted("orders"), 20_000 - facts.promoted)
    assert client.zcard(pending) == 20_000


def test_names_that_come_and_go_leave_nothing(open_daemon: Open, stub: Stub) -> None:
    """Series of removed queues: hundreds of names one after another, and no series, no turn and no
    memory of them is left."""
    stub.on("EMQ.PROMOTE", error("ERR no"))
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    daemon.wait_ready()
    before = {name for name in daemon.scrape() if "queue=" in name}
    for number in range(10):
        daemon.reload(queues=["orders", *(f"queue-{number}-{n}" for n in range(50))])
        daemon.wait_told("sweep failed", queue=f"queue-{number}-0")
    daemon.reload(queues=["orders"])
    after = {name for name in daemon.scrape() if "queue=" in name}
    # A series of an error comes with the first error.
    assert {name for name in after ^ before if "errors" not in name} == set()
    assert not [name for name in after if "queue-" in name]
    inside = daemon.daemon
    assert len(inside._work.timer._phase_of) == 2
    assert sum(map(len, inside._work.rounds._duties.values())) == 2
    wait_until(lambda: len(inside._work.timer._scheduler.get_jobs()) <= 6, "their turns to be gone")


def test_queues_are_discovered(open_daemon: Open, node: DevNode, client: redis.Redis) -> None:
    """Discovery: a queue that appears is swept, one that is excluded is not, and a reload that
    excludes a found one leaves the others alone."""
    for queue in ("orders", "emails", "secret"):
        Jobs(client, queue).schedule(b"", in_ms=60_000)
    discovery = {"enabled": True, "interval": "1s", "exclude": ["sec*"]}
    daemon = open_daemon(node.url, [], discovery=discovery, **FAST)
    daemon.wait_value("emqtimerd_queues", 2)
    wait_until(lambda: (daemon.value(sweeps("orders")) or 0) > 3, "sweeps")
    before = daemon.value(sweeps("orders")) or 0
    daemon.reload(discovery={**discovery, "exclude": ["sec*", "emails"]})
    samples = daemon.scrape()
    assert samples["emqtimerd_queues"] == 1
    assert samples[sweeps("orders")] >= before
    daemon.reload(discovery={"enabled": False}, queues=["listed"])
    assert daemon.value("emqtimerd_queues") == 1


ODD_NAMES = ["a:b", 'quote"back\\slash', "é-ß-漢", "-", "'", "#{}".replace("{}", ""), "n" * 255]


def test_odd_queue_names_are_swept_and_scraped(
    open_daemon: Open, node: DevNode, client: redis.Redis
) -> None:
    """One odd label value makes every scrape fail: each legal name has one series a metric."""
    for name in ODD_NAMES:
        Jobs(client, name).schedule(b"", at_ms=1, job_id=b"JOB1")
    daemon = open_daemon(node.url, ODD_NAMES, **FAST)
    for name in ODD_NAMES:
        wait_until(
            lambda n=name: daemon.value(promoted(n)) == 1,  # type: ignore[misc]
            f"{name} promoted",
        )
    assert daemon.get("/")[0] == 200


# --- signs of life ------------------------------------------------------------------------------


@pytest.fixture
def manager(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """A service manager that watches this process with a limit of half a second."""
    path = str(socket_path)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "500000")
    with Manager(path) as manager:
        yield manager


def test_signs_of_life_come_in_half_the_time(
    open_daemon: Open, stub: Stub, manager: Manager
) -> None:
    """Watchdog: with a limit of 0.5 s there is a ping at least every 0.25 s, server or not."""
    daemon = open_daemon(stub.url, ["orders"], node={"timeout": "300ms"}, **FAST)
    daemon.wait_ready()
    stub.on("EMQ.PROMOTE", SILENCE)
    stub.on("EMQ.VERSION", SILENCE)
    manager.wait_told("WATCHDOG=1", 20)
    pings = manager.told("WATCHDOG=1")
    gaps = sorted(b - a for a, b in itertools.pairwise(pings))
    assert gaps[len(gaps) // 2] < 0.25
    # Less than the limit: all but two, for which the machine may have stood still.
    assert gaps[-3] < 0.5
    assert gaps[-1] < 1.5


def test_signs_of_life_go_on_through_a_long_stop(
    open_daemon: Open, stub: Stub, manager: Manager
) -> None:
    """Watchdog: a stop that waits for a sweep for longer than the watchdog's limit is a good one,
    and the manager is asked for the time."""
    stub.on("EMQ.PROMOTE", late(integer(0), 3))
    daemon = open_daemon(stub.url, ["orders"], **FAST, shutdown_grace="7s")
    wait_until(lambda: stub.count("EMQ.PROMOTE") == 1, "a sweep under way")
    assert daemon.stop() == 0
    (stopping,) = manager.told("STOPPING=1")
    stopped = time.monotonic()
    manager.wait_told("EXTEND_TIMEOUT_USEC=12000000")
    # And for each part anew: one that hangs must not take the time of the next.
    manager.wait_told("EXTEND_TIMEOUT_USEC=10000000", 3)
    pings = [when for when in manager.told("WATCHDOG=1") if stopping < when < stopped]
    assert stopped - stopping > 2
    # Four a second, and a second for which the machine may have stood still.
    assert len(pings) >= 5
    assert max(b - a for a, b in itertools.pairwise([stopping, *pings, stopped])) < 1.5


@pytest.mark.parametrize("part", ["timer", "_http", "nodes"])
def test_a_part_that_cannot_be_ended_does_not_keep_the_others(
    open_daemon: Open, stub: Stub, part: str
) -> None:
    """Stop order: each part is ended, whatever went wrong with the one before; the exit code and a
    line say so."""
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    daemon.wait_ready()
    inside = daemon.daemon
    target = inside._http if part == "_http" else getattr(inside._work, part)
    method = "stop" if part == "_http" else "close"
    end = getattr(target, method)

    def fail() -> None:
        end()
        raise RuntimeError("a mistake of our own")

    setattr(target, method, fail)
    assert daemon.stop() == 1
    assert len(daemon.told("could not be ended")) == 1
    assert daemon.lines()[-1]["event"] == "stopped"
    assert not inside._http.running
    assert not inside._work.timer.is_alive()
    assert inside._work.nodes._node._closed


def test_no_sign_of_life_when_the_scheduler_stands(
    open_daemon: Open, stub: Stub, manager: Manager
) -> None:
    """Watchdog: when the scheduler has not ticked, pings stop although the main loop turns; and
    they come again when it goes on."""
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    manager.wait_told("WATCHDOG=1", 3)
    scheduler = daemon.daemon._work.timer._scheduler
    process_jobs, release = scheduler._process_jobs, threading.Event()

    def stand() -> Any:
        release.wait(10)
        return process_jobs()

    scheduler._process_jobs = stand
    wait_until(lambda: daemon.daemon._ledger.beat_age() > 1.5, "the scheduler to stand")
    stood = time.monotonic() - 0.5
    assert not [when for when in manager.told("WATCHDOG=1") if when > stood]
    assert daemon.running()
    known = len(manager.told("WATCHDOG=1"))
    release.set()
    manager.wait_told("WATCHDOG=1", known + 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thread", ["scheduler", "web server", "main loop"])
def test_a_dead_thread_ends_the_process_with_a_reason(
    open_daemon: Open, stub: Stub, thread: str
) -> None:
    """A daemon without its scheduler, or that nobody can scrape, ends: exit 1, and it says why."""
    daemon = open_daemon(stub.url, ["orders"], **FAST)
    daemon.wait_ready()

    def die(*_: object) -> Any:
        raise SystemExit if thread == "scheduler" else RuntimeError("a mistake of our own")

    inside = daemon.daemon
    if thread == "scheduler":
        inside._work.timer._scheduler._process_jobs = die
    elif thread == "web server":
        inside._http.failure = SystemExit("a mistake of our own")
        inside._http._server.stop()
    else:
        inside._take_found = die  # type: ignore[method-assign]
    wait_until(lambda: not daemon.running(), "the end")
    assert daemon.code == 1
    (line,) = daemon.told("stopping")
    words = {"scheduler": "scheduler's thread has died", "web server": "has died: SystemExit("}
    assert words.get(thread, "the main loop failed") in line["reason"]


def test_nothing_is_left_after_a_stop(open_daemon: Open, stub: Stub) -> None:
    """No thread and no file or socket outlives the daemon."""
    warm = open_daemon(stub.url, ["orders"], **FAST)
    warm.wait_ready()
    warm.stop()
    wait_until(lambda: stub.connections > 0, "a connection")
    before = set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        daemon = open_daemon(stub.url, ["orders", "emails"], **FAST)
        daemon.wait_ready()
        daemon.scrape()
        assert daemon.stop() == 0

    def left() -> list[str]:
        mine = set(threading.enumerate()) - before[0]
        return [t.name for t in mine if t.name.startswith(("emqtimerd", "http", "APS", "daemon"))]

    wait_until(lambda: not left(), f"threads to end: {left()}")
    wait_until(
        lambda: len(list(Path("/proc/self/fd").iterdir())) <= before[1], "files to be closed"
    )


def test_a_log_that_nobody_reads_any_more_is_no_end(stub: Stub, tmp_path: Path) -> None:
    """Loop dies on a log call: the reader of the standard error leaves, and the sweeps go on."""
    reader, writer = os.pipe()
    text = config(stub.url, ["orders"], '[promote]\ninterval = "50ms"\n[log]\nlevel = "debug"\n')
    with DaemonProcess(tmp_path, text, output=writer) as daemon:
        os.close(writer)
        wait_until(lambda: stub.count("EMQ.PROMOTE") > 0, "a sweep", timeout=40)
        os.close(reader)
        stub.on("EMQ.PROMOTE", error("ERR words"), integer(0))
        daemon.send(signal.SIGHUP)
        swept = stub.count("EMQ.PROMOTE")
        wait_until(lambda: stub.count("EMQ.PROMOTE") > swept + 5, "further sweeps")
        assert daemon.stop() == 0


# --- the wall clock -----------------------------------------------------------------------------


def test_sweeps_go_on_when_the_clock_is_set(launch: Launch, stub: Stub, tmp_path: Path) -> None:
    """Clock jumps: back to 1970 and to today again, an hour back, thirty days ahead: the rhythm
    stays, memory too, and one line names each jump."""
    clock = Clock(tmp_path)
    to_1970 = -int(time.time()) + 86_400
    daemon = launch(
        config(stub.url, ["orders"], '[promote]\ninterval = "200ms"\n'), environ=clock.environ
    )
    daemon.wait_ready()

    def resident_kb() -> int:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    before = resident_kb()
    for number, shift in enumerate((to_1970, 0, -3_600, 30 * 86_400), start=1):
        clock.set(shift)
        set_at, known = time.monotonic(), stub.count("EMQ.PROMOTE")
        daemon.wait_told("the wall clock was set", number)
        wait_until(lambda k=known: stub.count("EMQ.PROMOTE") >= k + 7, "sweeps go on", 5)  # type: ignore[misc]
        assert time.monotonic() - set_at > 0.8
    jumps = [line["seconds"] for line in daemon.told("the wall clock was set")]
    assert jumps == pytest.approx([to_1970, -to_1970, -3_600, 30 * 86_400 + 3_600], abs=1)
    assert resident_kb() - before < 20_000
    assert daemon.stop() == 0
