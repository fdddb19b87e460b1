"""The client for jobs: its results, its errors, its ids, and that it sends each command once."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import socket
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from conftest import wait_until
from echomq import BASE, TOKENS, Queue, client_of, read_keyspace, run_id, send
from redis.backoff import NoBackoff
from redis.retry import Retry

import emqtimerd.jobs
from emqtimerd.devnode import DevNode
from emqtimerd.devnode.node import free_port
from emqtimerd.jobs import (
    DuplicateJob,
    FenceRefused,
    Job,
    JobGone,
    Jobs,
    JobsError,
    NodeError,
    OutcomeUnknown,
    Refused,
    StaleToken,
    Unreachable,
    WrongKind,
    WrongState,
    mint_id,
)

HOUR = 3_600_000


@pytest.fixture(name="raw")
def _raw(any_node: DevNode) -> redis.Redis:
    return client_of(any_node.url)


@pytest.fixture(name="jobs")
def _jobs(any_node: DevNode) -> Iterator[Jobs]:
    with Jobs(any_node.url, "orders") as jobs:
        yield jobs


def sweep(raw: redis.Redis) -> None:
    """What the daemon does."""
    names = (b"schedule", b"pending", b"active", b"dead")
    schedule, pending, active, dead = (BASE + name for name in names)
    send(raw, "EMQ.PROMOTE", 3, schedule, pending, BASE, 100)
    send(raw, "EMQ.STALLED.CHECK", 4, active, pending, dead, BASE, 1, 100)


def claimed(jobs: Jobs, lease_ms: int = HOUR) -> Job:
    """The next job, which must be there."""
    job = jobs.claim(lease_ms)
    assert job is not None
    return job


# --- a job's life -------------------------------------------------------------------------------


def test_whole_life(jobs: Jobs, raw: redis.Redis) -> None:
    """Each verb does to the server what the model says that it does."""
    model = Queue("orders", run_id(raw))

    def agree() -> None:
        keyspace = read_keyspace(raw, BASE.decode() + "*")
        for name, members in model.sets.items():
            assert set(keyspace.get(BASE + name.encode(), {})) == set(members)
        model.adopt_scores(keyspace)
        assert keyspace == model.keyspace()

    ever: Any = 0
    one = jobs.enqueue(b"\x00\xff")
    model.enqueue(one, b"\x00\xff")
    two = jobs.schedule(b"later", in_ms=HOUR)
    model.schedule(two, b"later", ever)
    assert jobs.schedule(b"much later", at_ms=4_000_000_000_000, job_id=b"JOB\x00") == b"JOB\x00"
    model.schedule(b"JOB\x00", b"much later", 4_000_000_000_000.0)
    agree()

    job = claimed(jobs)
    assert job == Job(one, b"\x00\xff", b"1")
    assert job.attempts == 1
    assert jobs.claim(HOUR) is None
    jobs.extend(job, HOUR)
    assert jobs.extends([job, Job(b"JOB?", b"", b"1"), Job(one, b"", b"2")], HOUR) == [b"JOB?", one]
    assert jobs.extends([], HOUR) == []
    jobs.requeue(job)
    job = claimed(jobs)
    assert (job.token, job.attempts) == (b"2", 2)
    assert jobs.fail(job, "näh \udcff", delay_ms=HOUR, max_attempts=2) == "scheduled"
    jobs.reschedule(one, in_ms=0)
    sweep(raw)
    job = claimed(jobs)
    jobs.delay(job, 0)
    jobs.reschedule(one, at_ms=1)
    sweep(raw)
    job = claimed(jobs)
    assert jobs.fail(job, b"\xff", delay_ms=0, max_attempts=2) == "dead"
    assert send(raw, "HMGET", BASE + b"job:" + one, "failures", "last_error") == [b"2", b"\xff"]
    jobs.reprocess(one)
    job = claimed(jobs)
    assert job == Job(one, b"\x00\xff", b"5")
    jobs.complete(job)
    assert send(raw, "EXISTS", BASE + b"job:" + one) == 0
    assert send(raw, "HGET", BASE + b"metrics:completed", "count") == b"1"


def test_error_text_of_any_kind(jobs: Jobs, raw: redis.Redis) -> None:
    """An error text that is no UTF-8 does not keep a job from being settled."""
    jobs.enqueue(b"", b"JOB1")
    jobs.fail(claimed(jobs), "näh \udcff", delay_ms=0, max_attempts=2)
    assert send(raw, "HGET", BASE + b"job:JOB1", "last_error") == "näh \\udcff".encode()


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda jobs, job: jobs.extend(job, HOUR), None),
        (lambda jobs, job: jobs.complete(job), None),
        (lambda jobs, job: jobs.fail(job, "boom", delay_ms=0, max_attempts=1), "dead"),
        (lambda jobs, job: jobs.delay(job, HOUR), None),
        (lambda jobs, job: jobs.requeue(job), None),
    ],
    ids=["extend", "complete", "fail", "delay", "requeue"],
)
def test_lost_jobs(
    jobs: Jobs, raw: redis.Redis, act: Callable[[Jobs, Job], Any], expected: str | None
) -> None:
    """A job that a worker holds no longer is refused, and the worker's one `except Refused` catches
    it all.
    """
    jobs.enqueue(b"p", b"JOB1")
    first = claimed(jobs)
    jobs.requeue(first)
    with pytest.raises(WrongState, match="JOB1"):
        act(jobs, first)
    second = claimed(jobs)
    with pytest.raises(StaleToken, match="JOB1"):
        act(jobs, first)
    with pytest.raises(WrongKind, match="TASK"):
        act(jobs, Job(b"TASK", b"", b"1"))
    assert act(jobs, second) == expected
    send(raw, "DEL", BASE + b"job:JOB1")
    # A failure has no word for a job that is gone.
    with pytest.raises(WrongState if expected == "dead" else JobGone, match="JOB1"):
        act(jobs, second)
    assert issubclass(StaleToken, Refused)
    assert issubclass(WrongState, Refused)
    assert issubclass(JobGone, Refused)
    assert issubclass(Refused, JobsError)


def test_refused_producers(jobs: Jobs) -> None:
    """Duplicates, foreign ids, and ids that are not where the verb looks."""
    jobs.enqueue(b"p", b"JOB\xff\n")
    again: Callable[[], bytes]
    for again in (
        lambda: jobs.enqueue(b"other", b"JOB\xff\n"),
        lambda: jobs.schedule(b"other", in_ms=1, job_id=b"JOB\xff\n"),
    ):
        with pytest.raises(DuplicateJob, match=re.escape(r"JOB\xff\n")):
            again()
    with pytest.raises(WrongKind):
        jobs.enqueue(b"p", b"TASK")
    with pytest.raises(JobGone):
        jobs.reschedule(b"JOB?", in_ms=1)
    with pytest.raises(JobGone):
        jobs.reprocess(b"JOB?")
    with pytest.raises(WrongState):
        jobs.reprocess(b"JOB\xff\n")
    with pytest.raises(NodeError, match="lease_ms") as caught:
        jobs.claim(-1)
    assert caught.value.code == "ERR"


def test_times_are_one_of_two(jobs: Jobs) -> None:
    """A time is either an instant or a span."""
    with pytest.raises(TypeError, match="exactly one"):
        jobs.schedule(b"p")
    with pytest.raises(TypeError, match="exactly one"):
        jobs.reschedule(b"JOB1", at_ms=1, in_ms=1)


JOB = Job(b"JOB1", b"p", b"1")

MISTAKES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a payload of text": (
        lambda j: j.enqueue("p"),
        "payload must be bytes, not str; text.encode()",
    ),
    "a payload of JSON": (lambda j: j.schedule({}, in_ms=1), "payload must be bytes, not dict"),
    "an id of text": (lambda j: j.enqueue(b"p", "JOB1"), "job_id must be bytes, not str"),
    "no id": (lambda j: j.reprocess(None), "job_id must be bytes, not NoneType"),
    "a due time as a float": (
        lambda j: j.schedule(b"p", at_ms=1.5),
        "at_ms must be a whole number, not float",
    ),
    "a span as text": (lambda j: j.reschedule(b"JOB1", in_ms="5"), "in_ms must be a whole number"),
    "a lease of half a second": (lambda j: j.claim(0.5), "lease_ms must be a whole number"),
    "a lease that is true": (lambda j: j.claim(True), "lease_ms must be a whole number, not bool"),
    "an id for a job": (lambda j: j.complete(b"JOB1"), "job must be a Job, not bytes"),
    "no job": (lambda j: j.extend(None, 1), "job must be a Job, not NoneType"),
    "ids for jobs": (lambda j: j.extends([b"JOB1"], 1), "jobs must be a Job, not bytes"),
    "an exception for its text": (
        lambda j: j.fail(JOB, ValueError(), delay_ms=1, max_attempts=1),
        "error must be str or bytes, not ValueError",
    ),
    "no number of attempts": (
        lambda j: j.fail(JOB, "x", delay_ms=1, max_attempts=None),
        "max_attempts must be a whole number, not NoneType",
    ),
    "a delay of text": (lambda j: j.delay(JOB, "1"), "delay_ms must be a whole number, not str"),
    "a queue of bytes": (lambda _: Jobs("redis://h", b"q"), "queue must be text, not bytes"),  # type: ignore[arg-type]
    "no node": (lambda _: Jobs(None, "q"), "node must be a URL or a redis.Redis of one server"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("call", "words"), MISTAKES.values(), ids=MISTAKES)
def test_an_argument_of_a_wrong_type_is_named(call: Callable[[Any], object], words: str) -> None:
    """Which argument, what it must be and what it was; nothing is contacted."""
    jobs = Jobs("redis://127.0.0.1:1/0", "orders")
    with pytest.raises(TypeError, match=re.escape(words)):
        call(jobs)


@pytest.mark.parametrize("url", ["localhost:6379", "redis+cluster://:hunter2@h", "http://h"])
def test_a_url_of_another_kind(url: str) -> None:
    """What it may begin with is said, and no part of it repeated."""
    with pytest.raises(ValueError, match=r"redis://, rediss://, .*one server") as caught:
        Jobs(url, "orders")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@h",
        "redis://user:hunter2/x@h:6379/0",
        "redis://h?db=hunter2",
        "redis://:hunter2@h:99999/0",
        "redis://:hunter2@[::1",
    ],
)
def test_a_url_that_cannot_be_read(url: str) -> None:
    """No part of it is repeated, nor in what the error came from: it may hold a password."""
    with pytest.raises(ValueError, match="percent-encoded") as caught:
        Jobs(url, "orders")
    assert "hunter2" not in str(caught.value)
    assert caught.value.__context__ is None


def test_a_host_that_cannot_be_one() -> None:
    """The codec of host names refuses it with an error of its own kind."""
    with Jobs("redis://a..b:1", "orders") as jobs, pytest.raises(Unreachable, match="looked up"):
        jobs.claim(1)


@pytest.mark.parametrize("queue", ["", "a{b", "a b", "\udcff", "q" * 256])
def test_impossible_queue_names(queue: str) -> None:
    """A queue name that cannot be is refused before anything is contacted."""
    with pytest.raises(ValueError, match="queue name"):
        Jobs("redis://127.0.0.1:1/0", queue)


def test_many_threads(node: DevNode) -> None:
    """Threads that share a client each get jobs of their own, every job exactly once."""
    with Jobs(node.url, "orders") as jobs, ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(lambda number: jobs.enqueue(b"%d" % number), range(200)))

        def work(_: int) -> list[bytes]:
            done = []
            while (job := jobs.claim(HOUR)) is not None:
                jobs.complete(job)
                done.append(job.id)
            return done

        done = Counter(job_id for each in pool.map(work, range(8)) for job_id in each)
    assert done == Counter(sent)


def _examples() -> list[str]:
    """The pieces of code in the module's documentation."""
    text = inspect.getdoc(emqtimerd.jobs) or ""
    return [textwrap.dedent(block) for block in re.findall(r"::\n\n((?:(?:    .*)?\n)+)", text)]


def test_example_of_a_worker(node: DevNode) -> None:
    """The worker in the module's documentation runs as it stands there, in twenty lines."""
    worker, producer = _examples()
    assert len(worker.strip().splitlines()) <= 20
    names: dict[str, Any] = {}
    exec(worker, names)
    exec(producer.replace("redis://127.0.0.1:6379/0", node.url), names)

    raw, stop = client_of(node.url), threading.Event()
    handled: list[bytes] = []

    def handle(payload: bytes) -> None:
        handled.append(payload)
        if payload == b"bad":
            raise ValueError("this one is bad")
        if payload == b"slow":
            # The lease ends while the worker is busy, and the job dies of it.
            send(raw, "ZADD", BASE + b"active", 1, b"JOBslow")
            sweep(raw)

    with Jobs(node.url, "orders") as jobs:
        jobs.enqueue(b"bad", b"JOBbad")
        jobs.enqueue(b"slow", b"JOBslow")
        thread = threading.Thread(target=names["work"], args=(node.url, "orders", handle, stop))
        thread.start()
        wait_until(lambda: len(handled) == 3, "the worker has seen all three jobs")
        wait_until(lambda: send(raw, "ZCARD", BASE + b"active") == 0, "the worker holds no job")
        stop.set()
        thread.join(5)
    assert sorted(handled) == [b"bad", b"ship 17", b"slow"]
    assert send(raw, "HMGET", BASE + b"job:JOBbad", "state", "last_error") == [
        b"scheduled",
        b"this one is bad",
    ]
    assert send(raw, "HGET", BASE + b"job:JOBslow", "state") == b"dead"
    assert send(raw, "HGET", BASE + b"metrics:completed", "count") == b"1"
    # What the producer scheduled is still to come.
    assert send(raw, "ZCARD", BASE + b"schedule") == 2


def test_the_example_outlives_a_restart(start_node: Callable[..., DevNode]) -> None:
    """The worker of the documentation goes on where it was when the server is back."""
    troubles: list[JobsError] = []
    names: dict[str, Any] = {"print": troubles.append}
    exec(_examples()[0], names)
    handled: list[bytes] = []
    node, stop = start_node(), threading.Event()
    waited = stop.wait
    stop.wait = lambda timeout=None: waited(min(timeout or 0, 0.05))  # type: ignore[method-assign]
    arguments = (node.url, "orders", handled.append, stop)
    thread = threading.Thread(target=names["work"], args=arguments)
    thread.start()
    try:
        with Jobs(node.url, "orders") as jobs:
            jobs.enqueue(b"before")
            wait_until(lambda: handled == [b"before"], "the worker is at work")
            node.kill()
            wait_until(lambda: any(isinstance(t, Unreachable) for t in troubles), "it has noticed")
            node.start()
            with contextlib.suppress(OutcomeUnknown):  # the connection of before
                jobs.enqueue(b"lost")
            jobs.enqueue(b"after")
            wait_until(lambda: handled[-1] == b"after", "it works again")
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive()


# --- the connection -----------------------------------------------------------------------------


def test_every_kind_of_node(node: DevNode) -> None:
    """A URL of either scheme will do, and so will a client, whatever that does to replies."""
    port = node.port
    for given in (
        node.url,
        f"valkey://127.0.0.1:{port}/0",
        redis.Redis(port=port),
        redis.Redis(port=port, decode_responses=True, protocol=3),
    ):
        with Jobs(given, "orders") as jobs:
            jobs.enqueue(b"\xff", b"JOB\xff")
            job = claimed(jobs)
            assert job == Job(b"JOB\xff", b"\xff", b"1")
            jobs.complete(job)


def test_brand_is_required(node: DevNode) -> None:
    """A node of another wire is refused on every connection, and served as soon as it is right."""
    raw = client_of(node.url)
    with Jobs(node.url, "orders") as jobs:
        for brand in (None, b"echomq:4.0.0"):
            send(
                raw,
                *(("DEL", "{emq}:version") if brand is None else ("SET", "{emq}:version", brand)),
            )
            for _ in range(2):
                with pytest.raises(FenceRefused, match="version"):
                    jobs.enqueue(b"p")
        assert send(raw, "EXISTS", BASE + b"pending") == 0
        send(raw, "SET", "{emq}:version", "echomq:6.0.0")
        jobs.enqueue(b"p")


def test_server_restart(start_node: Callable[..., DevNode]) -> None:
    """After a restart the next call connects anew; what was enqueued is still there."""
    node = start_node()
    with Jobs(node.url, "orders") as jobs:
        job_id = jobs.enqueue(b"p")
        node.kill()
        with pytest.raises((Unreachable, OutcomeUnknown)):
            jobs.claim(HOUR)
        with pytest.raises(Unreachable):
            jobs.claim(HOUR)
        node.start()
        assert claimed(jobs).id == job_id


class Stub:
    """A server that passes the fence and answers verbs with one fixed reply, or with silence."""

    def __init__(self, reply: bytes | None, tokens: bytes = TOKENS) -> None:
        self.reply = reply
        self.seen: list[list[bytes]] = []
        self._fence = {
            b"EMQ.VERSION": b"$%d\r\n%b\r\n" % (len(tokens), tokens),
            b"GET": b"$12\r\nechomq:6.0.0\r\n",
        }
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    @property
    def verbs(self) -> list[bytes]:
        return [words[0] for words in self.seen if words[0].startswith(b"EMQ.")][1:]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream:
                self._serve(connection, stream)

    def _serve(self, connection: socket.socket, stream: Any) -> None:
        while header := stream.readline():
            words = []
            for _ in range(int(header[1:])):
                length = int(stream.readline()[1:])
                words.append(stream.read(length + 2)[:-2])
            self.seen.append(words)
            if words[0] == b"CLIENT":
                connection.sendall(b"+OK\r\n")
            elif words[0] in self._fence:
                connection.sendall(self._fence[words[0]])
            elif self.reply == b"hang up":
                return
            elif self.reply is not None:
                connection.sendall(self.reply)


@pytest.mark.parametrize(
    "reply", [None, b"hang up", b"$5\r\nJO"], ids=["silence", "hang up", "half"]
)
@pytest.mark.parametrize("through", ["url", "client", "retrying client"])
def test_lost_reply_is_not_sent_again(reply: bytes | None, through: str) -> None:
    """A command whose reply is lost arrives once, whatever client was given, and its outcome is
    unknown.
    """
    with Stub(reply) as stub:
        given: Any = f"redis://127.0.0.1:{stub.port}/0"
        if through == "client":
            given = redis.Redis(port=stub.port)
        if through == "retrying client":
            given = redis.Redis(port=stub.port, retry=Retry(NoBackoff(), 5))
        with (
            Jobs(given, "orders", timeout_seconds=0.2) as jobs,
            pytest.raises(OutcomeUnknown, match="CLAIM was sent"),
        ):
            jobs.claim(HOUR)
        assert stub.verbs == [b"EMQ.CLAIM"]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"-LOADING the server is loading\r\n", "LOADING"),
        (b"-READONLY you cannot write\r\n", "READONLY"),
        (b"-NOPERM no permission\r\n", "NOPERM"),
        (b"-NOAUTH Authentication required.\r\n", "NOAUTH"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "MOVED"),
        (b"-CLUSTERDOWN Hash slot not served\r\n", "CLUSTERDOWN"),
        (b"-MASTERDOWN Link is down\r\n", "MASTERDOWN"),
        (b"-OOM no memory\r\n", "OOM"),
        (b"-BUSY a script runs\r\n", "BUSY"),
        (b"-ERR unknown command 'EMQ.CLAIM'\r\n", "ERR"),
        (b"-WRONGTYPE not a zset\r\n", "WRONGTYPE"),
        (b":1\r\n", "shape"),
        (b"$-1\r\n", "shape"),
        (b"*1\r\n$1\r\nx\r\n", "shape"),
        (b"*3\r\n:1\r\n$1\r\nx\r\n:1\r\n", "shape"),
    ],
)
def test_node_errors(reply: bytes, code: str) -> None:
    """An error that is not about the job, or a reply of no known shape, is named by its code."""
    with Stub(reply) as stub, Jobs(f"redis://127.0.0.1:{stub.port}/0", "orders") as jobs:
        with pytest.raises(NodeError) as caught:
            jobs.claim(HOUR)
        assert caught.value.code == code
        assert stub.verbs == [b"EMQ.CLAIM"]


def test_token_as_text() -> None:
    """A node may answer attempts as a text; the token is its bytes."""
    with (
        Stub(b"*3\r\n$4\r\nJOB1\r\n$1\r\np\r\n$2\r\n07\r\n") as stub,
        Jobs(f"redis://127.0.0.1:{stub.port}/0", "orders") as jobs,
    ):
        assert jobs.claim(HOUR) == Job(b"JOB1", b"p", b"07")


@pytest.mark.parametrize(
    ("tokens", "missing"), [(b"", "enqueue"), (TOKENS.replace(b"reprocess ", b""), "reprocess")]
)
def test_missing_token(tokens: bytes, missing: str) -> None:
    """A node that lacks a verb is refused before any verb is sent."""
    with (
        Stub(b":1\r\n", tokens) as stub,
        Jobs(f"redis://127.0.0.1:{stub.port}/0", "orders") as jobs,
    ):
        with pytest.raises(FenceRefused, match=missing):
            jobs.claim(HOUR)
        assert stub.verbs == []


def test_daemon_verbs_are_not_required() -> None:
    """Producers and workers need none of the verbs that only the daemon sends."""
    tokens = TOKENS.replace(b"promote ", b"").replace(b" stalled.check", b"")
    with (
        Stub(b"*0\r\n", tokens) as stub,
        Jobs(f"redis://127.0.0.1:{stub.port}/0", "orders") as jobs,
    ):
        assert jobs.claim(HOUR) is None


def test_unreachable() -> None:
    """A node that is not there, or that does not know us, is reported without the password."""
    port = free_port()
    with Jobs(f"redis://:hunter2@127.0.0.1:{port}/0", "orders") as jobs:
        with pytest.raises(Unreachable, match=str(port)) as caught:
            jobs.enqueue(b"p")
        assert "hunter2" not in str(caught.value)


# --- ids ----------------------------------------------------------------------------------------


def test_ids_sort_in_the_order_of_their_making() -> None:
    """Each id is greater than all before it, from however many threads."""
    ids = [mint_id() for _ in range(5_000)]
    assert ids == sorted(set(ids))
    assert all(re.fullmatch(rb"JOB[0-9A-HJKMNP-TV-Z]{26}", job_id) for job_id in ids)
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(lambda _: [mint_id() for _ in range(1_000)], range(4)))
    assert all(part == sorted(part) and part[0] > ids[-1] for part in parts)
    assert len({job_id for part in parts for job_id in part}) == 4_000


def test_ids_tell_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ten digits are milliseconds; a clock that goes back does not put new ids before old
    ones.
    """
    monkeypatch.setattr(emqtimerd.jobs, "_mint", emqtimerd.jobs._Mint())
    now = 1_700_000_000_123
    monkeypatch.setattr("time.time_ns", lambda: now * 1_000_000)
    first = mint_id()
    digits = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
    number = 0
    for digit in first[3:13].decode():
        number = number * 32 + digits.index(digit)
    assert number == now
    now -= 3_600_000
    second = mint_id()
    assert first < second
    assert second[:13] == first[:13]
    now += 3_600_001
    third = mint_id()
    assert third > second
    assert third[:13] > second[:13]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_mints_ids_of_its_own() -> None:
    """A child does not go on counting where its parent does."""
    mint_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b" ".join(mint_id() for _ in range(50)))
        os._exit(0)
    os.close(writer)
    ours = {mint_id() for _ in range(50)}
    with os.fdopen(reader, "rb") as stream:
        theirs = set(stream.read().split())
    assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == 50
    assert not ours & theirs
