"""What the job core leaves behind: for replicas and files, for transactions, scripts and ACLs, and
for a cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import pytest
import redis
from conftest import SERVERS, wait_until
from echomq import (
    ACTIVE,
    BASE,
    COMPLETED,
    DEAD,
    FAILED,
    FAR,
    PENDING,
    SCHEDULE,
    Refusal,
    client_of,
    read_keyspace,
    rk,
    send,
    send_all,
    write_keyspace,
)

from emqtimerd.devnode import DevNode

each_server = pytest.mark.parametrize("kind", SERVERS)

# A primary waits for more replicas before it sends its data; ours has one.
AT_ONCE = ("--repl-diskless-sync-delay", "0")

HOUR = 3_600_000


class StartNode(Protocol):
    """Starts a node of the test's own."""

    def __call__(self, kind: str = ..., **options: Any) -> DevNode: ...


def enqueue(job_id: bytes, payload: bytes = b"p") -> tuple[Any, ...]:
    return ("EMQ.ENQUEUE", 2, rk(job_id), PENDING, job_id, payload)


def schedule(job_id: bytes, how: str = "at", ms: int = 1_000) -> tuple[Any, ...]:
    return ("EMQ.SCHEDULE", 2, rk(job_id), SCHEDULE, job_id, b"p", how, ms)


def reschedule(job_id: bytes, how: str = "at", ms: int = 1_000) -> tuple[Any, ...]:
    return ("EMQ.RESCHEDULE", 2, rk(job_id), SCHEDULE, job_id, how, ms)


def claim(lease_ms: int = HOUR) -> tuple[Any, ...]:
    return ("EMQ.CLAIM", 3, PENDING, ACTIVE, BASE, lease_ms)


def extend(job_id: bytes, token: int = 1) -> tuple[Any, ...]:
    return ("EMQ.EXTEND", 2, ACTIVE, rk(job_id), job_id, token, HOUR)


def extends(*pairs: Any) -> tuple[Any, ...]:
    return ("EMQ.EXTENDS", 2, ACTIVE, BASE, HOUR, *pairs)


def complete(job_id: bytes, token: int = 1) -> tuple[Any, ...]:
    return ("EMQ.COMPLETE", 2, ACTIVE, rk(job_id), job_id, token, BASE)


def delay(job_id: bytes, token: int = 1) -> tuple[Any, ...]:
    return ("EMQ.DELAY", 3, ACTIVE, SCHEDULE, rk(job_id), job_id, token, 0)


def fail(job_id: bytes, token: int = 1, max_attempts: int = 2) -> tuple[Any, ...]:
    keys = (ACTIVE, SCHEDULE, DEAD, rk(job_id))
    return ("EMQ.FAIL", 4, *keys, job_id, token, 0, max_attempts, b"boom", BASE)


def requeue(job_id: bytes, token: int = 1) -> tuple[Any, ...]:
    return ("EMQ.REQUEUE", 3, ACTIVE, PENDING, rk(job_id), job_id, token)


def reprocess(job_id: bytes) -> tuple[Any, ...]:
    return ("EMQ.REPROCESS", 3, rk(job_id), DEAD, PENDING, job_id)


def promote(limit: int = 100) -> tuple[Any, ...]:
    return ("EMQ.PROMOTE", 3, SCHEDULE, PENDING, BASE, limit)


def stalled_check(max_stalled: int = 1, limit: int = 100) -> tuple[Any, ...]:
    return ("EMQ.STALLED.CHECK", 4, ACTIVE, PENDING, DEAD, BASE, max_stalled, limit)


def live(client: redis.Redis, seed: int, steps: int) -> set[str]:
    """Live through a random history; returns the verbs that changed something in it."""
    chance = random.Random(seed)
    tokens: dict[bytes, int] = {}
    changed = set()
    for step in range(steps):
        job_id = chance.choice([*tokens, b"JOB%d" % step])
        token = tokens.get(job_id, 1)
        command = chance.choices(
            (
                enqueue(b"JOB%d" % step, chance.randbytes(9)),
                schedule(b"JOB%d" % step, *chance.choice((("in", 0), ("in", HOUR), ("at", FAR)))),
                claim(chance.choice((0, HOUR))),
                reschedule(b"JOB%d" % chance.randrange(step + 1), "in", chance.choice((0, HOUR))),
                extend(job_id, token),
                extends(job_id, token, b"JOB0", 1),
                complete(job_id, token),
                delay(job_id, token),
                fail(job_id, token),
                requeue(job_id, token),
                reprocess(job_id),
                promote(chance.randint(1, 9)),
                stalled_check(chance.randint(1, 2), chance.randint(1, 9)),
                ("ZADD", chance.choice((PENDING, ACTIVE, SCHEDULE)), 0, b"JOBghost%d" % step),
            ),
            (8, 4, 12, 1, 1, 1, 2, 1, 3, 1, 2, 2, 2, 1),
        )[0]
        reply = send(client, *command)
        if reply not in (0, -1, [], [[], []]) and not isinstance(reply, Refusal):
            changed.add(command[0])
        if command[0] == "EMQ.CLAIM" and reply:
            assert isinstance(reply, list)
            tokens[reply[0]] = reply[2]
    return changed


ALL_VERBS = {
    *("EMQ.ENQUEUE", "EMQ.CLAIM", "EMQ.EXTEND", "EMQ.EXTENDS", "EMQ.COMPLETE", "EMQ.SCHEDULE"),
    *("EMQ.PROMOTE", "EMQ.RESCHEDULE", "EMQ.DELAY", "EMQ.FAIL", "EMQ.REPROCESS", "EMQ.REQUEUE"),
    "EMQ.STALLED.CHECK",
}


def digest(client: redis.Redis) -> Any:
    """The server's own fingerprint of its data."""
    return send(client, "DEBUG", "DIGEST")


def info(client: redis.Redis, section: str) -> dict[bytes, bytes]:
    """A section of INFO as its fields."""
    lines = (line.partition(b":") for line in send(client, "INFO", section).splitlines())
    return {name: value for name, colon, value in lines if colon}


# --- replicas and files -------------------------------------------------------------------------


@each_server
@pytest.mark.parametrize("seed", [1, 2])
def test_replica_and_files_hold_the_same_data(
    start_node: Callable[..., DevNode], kind: str, seed: int
) -> None:
    """After any history the primary, its replica and the server that comes back after a kill hold
    the same data.
    """
    primary_node = start_node(kind, extra_args=AT_ONCE)
    follow = ("--replicaof", "127.0.0.1", str(primary_node.port))
    replica_node = start_node(kind, extra_args=follow, brand=False)
    primary, replica = client_of(primary_node.url), client_of(replica_node.url)
    wait_until(
        lambda: info(replica, "replication").get(b"master_link_status") == b"up",
        "the replica follows its primary",
    )
    assert live(primary, seed, 1_500) >= ALL_VERBS | {"ZADD"}
    data = read_keyspace(primary)
    assert {key for key in data if b"job:" not in key} >= {
        PENDING,
        SCHEDULE,
        DEAD,
        COMPLETED,
        FAILED,
    }
    fingerprint = digest(primary)

    assert send(primary, "WAIT", 1, 5_000) == 1
    assert read_keyspace(replica) == data
    assert digest(replica) == fingerprint
    # What a replica was sent is what it ran: effects, and no verb that would read a clock.
    ran = info(replica, "commandstats")
    assert b"cmdstat_zadd" in ran
    assert not [name for name in ran if b"emq." in name.lower()]
    replica_node.stop()

    increments = sorted(primary_node.directory.glob("appendonlydir/*.incr.aof"))
    assert increments
    assert not [
        path for path in increments if b"emq." in path.read_bytes().lower().replace(BASE, b"")
    ]

    # From RDB, through the server's own save and load; then from AOF, after a crash.
    assert send(primary, "DEBUG", "RELOAD") == b"OK"
    assert digest(primary) == fingerprint
    primary_node.kill()
    primary_node.start()
    assert read_keyspace(primary) == data
    assert digest(primary) == fingerprint


def test_snapshot_alone_holds_the_same_data(start_node: Callable[..., DevNode]) -> None:
    """A server that keeps only snapshots comes back with the data of the last one."""
    node = start_node(appendonly=False)
    client = client_of(node.url)
    live(client, 3, 500)
    data, fingerprint = read_keyspace(client), digest(client)
    assert send(client, "SAVE") == b"OK"
    node.kill()
    node.start()
    assert read_keyspace(client) == data
    assert digest(client) == fingerprint


def appended(node: DevNode, act: Callable[[], Any]) -> list[list[bytes]]:
    """The commands that an act adds to the append-only file."""
    (path,) = node.directory.glob("appendonlydir/*.incr.aof")
    start = path.stat().st_size
    act()
    # The server writes the file before it sends the reply (`appendfsync no`).
    rest = path.read_bytes()[start:]
    commands = []
    while rest:
        count, rest = rest[1:].split(b"\r\n", 1)
        words = []
        for _ in range(int(count)):
            length, rest = rest[1:].split(b"\r\n", 1)
            words.append(rest[: int(length)])
            rest = rest[int(length) + 2 :]
        commands.append(words)
    return [words for words in commands if words[0].upper() != b"SELECT"]


@each_server
def test_effects_of_each_verb(start_node: Callable[..., DevNode], kind: str) -> None:
    """Each verb leaves one transaction of plain writes, as few as its ids allow; a refusal or an
    empty sweep none.
    """
    node = start_node(kind)
    client = client_of(node.url)

    def effects(*command: Any) -> list[bytes]:
        words = appended(node, lambda: send(client, *command))
        # A deletion is UNLINK on some servers.
        names = [word[0].upper().replace(b"UNLINK", b"DEL") for word in words]
        if len(names) > 1:
            assert names[0] == b"MULTI"
            assert names[-1] == b"EXEC"
            names = names[1:-1]
        return sorted(names)

    ids = [b"JOB%d" % number for number in range(5)]
    for job_id in ids:
        assert effects(*schedule(job_id)) == [b"HSET", b"ZADD"]
    assert effects(*reschedule(b"JOB0")) == [b"ZADD"]
    assert effects(*promote()) == [*[b"HSET"] * 5, b"ZADD", b"ZREM"]
    assert effects(*enqueue(b"JOB9")) == [b"HSET", b"ZADD"]
    for _ in range(6):
        assert effects(*claim()) == [b"HSET", b"ZADD", b"ZREM"]
    # The stamp is there already.
    assert effects(*extend(b"JOB0")) == [b"ZADD"]
    assert effects(*extends(b"JOB0", 1, b"JOB1", 1, b"JOB2", 7)) == [b"ZADD"]
    assert effects(*complete(b"JOB0")) == [b"DEL", b"HSET", b"ZREM"]
    assert effects(*delay(b"JOB1")) == [b"HSET", b"ZADD", b"ZREM"]
    assert effects(*fail(b"JOB2")) == [b"HSET", b"ZADD", b"ZREM"]
    assert effects(*fail(b"JOB3", 1, 1)) == [b"HSET", b"HSET", b"ZADD", b"ZREM"]
    assert effects(*reprocess(b"JOB3")) == [b"HDEL", b"HSET", b"ZADD", b"ZREM"]
    assert effects(*requeue(b"JOB4")) == [b"HSET", b"ZADD", b"ZREM"]
    send(client, "ZADD", PENDING, 0, "JOB!ghost")
    assert effects(*claim()) == [b"ZREM"]
    for _ in range(2):
        send(client, *claim(0))
    # Two to pending and one to dead, a ghost to nowhere.
    send(client, "ZADD", ACTIVE, 1, "JOB!ghost", 1, "JOB9")
    send(client, "HSET", rk(b"JOB9"), "stalled", 1)
    assert effects(*stalled_check(2)) == [*[b"HSET"] * 4, b"ZADD", b"ZADD", b"ZREM"]
    nothing = (
        enqueue(b"TASK"),
        enqueue(b"JOB9"),
        complete(b"JOB0"),
        complete(b"JOB1"),
        fail(b"JOB9"),
        promote(0),
        stalled_check(),
        extends(b"JOB7", 1),
        ("EMQ.VERSION",),
    )
    send(client, *promote())
    for command in (*nothing, promote()):
        assert effects(*command) == []


@each_server
def test_keyspace_events(start_node: Callable[..., DevNode], kind: str) -> None:
    """Whoever listens for keyspace events hears of each key what the effects say, and of a set that
    a verb emptied that it is gone; of a refusal or an empty sweep nothing.
    """
    client = client_of(start_node(kind).url)
    send(client, "CONFIG", "SET", "notify-keyspace-events", "KA")
    listener = client.pubsub()  # type: ignore[no-untyped-call]
    listener.psubscribe("__keyspace@0__:*")

    def heard(*command: Any) -> set[tuple[str, str]]:
        send(client, *command)
        send(client, "PUBLISH", "__keyspace@0__:", "the end")
        events = set()
        while (message := listener.get_message(timeout=10))["data"] != b"the end":
            if message["type"] == "pmessage":
                key = message["channel"].partition(b":")[2].removeprefix(BASE)
                events.add((key.decode(), message["data"].decode()))
        return events

    row, done = "job:JOB1", "metrics:completed"
    added, moved = ("pending", "zadd"), {("pending", "zrem"), ("pending", "del")}
    taken = {("active", "zrem"), ("active", "del")}
    assert heard(*enqueue(b"JOB1")) == {(row, "hset"), added}
    assert heard(*claim()) == {(row, "hset"), ("active", "zadd"), *moved}
    assert heard(*extend(b"JOB1")) == {("active", "zadd")}
    assert heard(*delay(b"JOB1")) == {(row, "hset"), ("schedule", "zadd"), *taken}
    assert heard(*promote()) == {
        *((row, "hset"), added, ("schedule", "zrem"), ("schedule", "del")),
    }
    assert heard(*claim(0)) == {(row, "hset"), ("active", "zadd"), *moved}
    assert heard(*stalled_check()) == {
        *((row, "hset"), ("dead", "zadd"), ("metrics:failed", "hset")),
        *taken,
    }
    assert heard(*reprocess(b"JOB1")) == {
        *((row, "hset"), (row, "hdel"), added, ("dead", "zrem"), ("dead", "del")),
    }
    assert heard(*complete(b"JOB1")) == heard(*promote()) == heard(*stalled_check()) == set()
    assert heard(*enqueue(b"JOB2")) == {("job:JOB2", "hset"), added}
    # A set that still holds somebody is not gone.
    assert heard(*claim()) == {(row, "hset"), ("active", "zadd"), ("pending", "zrem")}
    assert heard(*complete(b"JOB1", 3)) == {(row, "del"), (done, "hset"), *taken}
    listener.close()


# --- transactions and scripts -------------------------------------------------------------------


def send_in_turn(client: redis.Redis, *commands: tuple[Any, ...]) -> list[Any]:
    """Send commands one by one over one connection; a pipeline would take MULTI for its own."""
    return [client.execute_command(*command) for command in commands]  # type: ignore[no-untyped-call]


@each_server
def test_in_a_transaction(start_node: Callable[..., DevNode], kind: str) -> None:
    """In MULTI the verbs answer as elsewhere, a refused one spoils no other, and all effects are
    one transaction.
    """
    node = start_node(kind)
    client = client_of(node.url)
    transaction = (
        ("MULTI",),
        *(schedule(b"JOB1"), schedule(b"JOB2"), promote(), claim(), complete(b"JOB2"), claim(0)),
        *(complete(b"JOB1"), stalled_check(), ("EMQ.VERSION",), reprocess(b"JOB2")),
    )
    replies: list[Any] = []

    def act() -> None:
        replies.extend(send_in_turn(client, *transaction, ("EXEC",)))

    written = [words[0].upper() for words in appended(node, act)]
    *queued, result = replies
    assert queued == [b"OK", *[b"QUEUED"] * 10]
    assert result[:4] == [1, 1, 2, [b"JOB1", b"p", 1]]
    assert str(result[4]).startswith("EMQSTATE")
    assert result[5:8] == [[b"JOB2", b"p", 1], 1, [[], [b"JOB2"]]]
    assert result[9] == 1
    assert (written.count(b"MULTI"), written.count(b"EXEC")) == (1, 1)
    assert (written[0], written[-1]) == (b"MULTI", b"EXEC")
    data = digest(client)
    node.kill()
    node.start()
    assert digest(client) == data


@each_server
def test_watched_keys(start_node: Callable[..., DevNode], kind: str) -> None:
    """A transaction that watches a set is stopped by a sweep that changes it, and by no other."""
    client = client_of(start_node(kind).url)
    for command, key, stopped in (
        (promote(), PENDING, False),
        (promote(), SCHEDULE, False),
        (claim(), PENDING, False),
        (stalled_check(), ACTIVE, False),
        (stalled_check(), PENDING, False),
        (complete(b"JOB9"), ACTIVE, False),
        (enqueue(b"JOB1"), PENDING, True),
        (enqueue(b"JOB1"), rk(b"JOB1"), False),
        (claim(0), ACTIVE, True),
        (stalled_check(), FAILED, True),
        (reprocess(b"JOB1"), rk(b"JOB1"), True),
        (claim(0), PENDING, True),
        (complete(b"JOB1", 2), rk(b"JOB1"), True),
        (schedule(b"JOB2"), SCHEDULE, True),
        (promote(), PENDING, True),
    ):
        watcher = client.client()  # type: ignore[no-untyped-call]
        send_in_turn(watcher, ("WATCH", key), ("MULTI",), ("PING",))
        send(client, *command)
        (result,) = send_in_turn(watcher, ("EXEC",))
        watcher.close()
        assert (result is None) == stopped, (command, key)


CALL = "return redis.call(ARGV[1], unpack(ARGV, 2))"


@each_server
def test_in_a_script(start_node: Callable[..., DevNode], kind: str) -> None:
    """A writing script may call any verb: replies, refusals and effects are the same."""
    node = start_node(kind)
    client = client_of(node.url)

    def script(*command: Any) -> Any:
        return send(client, "EVAL", CALL, 4, PENDING, ACTIVE, SCHEDULE, DEAD, *command)

    assert script(*schedule(b"JOB1")) == 1
    assert script(*promote()) == 1
    assert script(*claim(0)) == [b"JOB1", b"p", 1]
    refused = script(*complete(b"JOB1", 7))
    assert refused.code == "EMQSTALE"
    assert script(*stalled_check(2)) == [[b"JOB1"], []]
    assert script(*enqueue(b"TASK")).code == "EMQKIND"
    assert script("EMQ.VERSION").startswith(b"enqueue claim ")
    # Several verbs in one script are one transaction in the file.
    both = """
        redis.call('EMQ.ENQUEUE', 2, KEYS[3], KEYS[1], 'JOB2', 'p')
        local one = redis.call('EMQ.CLAIM', 3, KEYS[1], KEYS[2], ARGV[1], 0)
        local bad = redis.pcall('EMQ.COMPLETE', 2, KEYS[2], KEYS[3], 'JOB2', '9', ARGV[1])
        return {one[1], bad.err, redis.call('EMQ.CLAIM', 3, KEYS[1], KEYS[2], ARGV[1], 0)}
    """
    replies: list[Any] = []
    written = appended(
        node,
        lambda: replies.append(send(client, "EVAL", both, 3, PENDING, ACTIVE, rk(b"JOB2"), BASE)),
    )
    ((first, bad, second),) = replies
    assert (first, second) == (b"JOB1", [b"JOB2", b"p", 1])
    assert bad.startswith((b"EMQSTATE JOB2", b"EMQSTALE JOB2"))
    assert [words[0].upper() for words in written].count(b"MULTI") == 1
    data = digest(client)
    node.kill()
    node.start()
    assert digest(client) == data


@each_server
def test_where_writing_is_not_allowed(start_node: Callable[..., DevNode], kind: str) -> None:
    """A read-only script and a replica refuse every verb but the version, and write nothing."""
    node = start_node(kind, extra_args=AT_ONCE)
    follow = ("--replicaof", "127.0.0.1", str(node.port))
    client = client_of(node.url)
    replica = client_of(start_node(kind, extra_args=follow, brand=False).url)
    send(client, *schedule(b"JOB1"))
    wait_until(lambda: send(replica, "ZCARD", SCHEDULE) == 1, "the replica has the job")
    data = digest(client)
    for command in EVERY_VERB:
        refused = send(client, "EVAL_RO", CALL, 0, *command)
        assert isinstance(refused, Refusal)
        assert "read-only script" in refused.text.lower()
        assert send(replica, *command).code == "READONLY"
    assert send(client, "EVAL_RO", CALL, 0, "EMQ.VERSION") == send(replica, "EMQ.VERSION")
    assert digest(client) == digest(replica) == data


# --- the command table --------------------------------------------------------------------------

EVERY_VERB: tuple[tuple[Any, ...], ...] = (
    enqueue(b"JOB1"),
    claim(),
    extend(b"JOB1"),
    extends(b"JOB1", 1),
    complete(b"JOB1"),
    schedule(b"JOB1"),
    promote(),
    reschedule(b"JOB1"),
    delay(b"JOB1"),
    fail(b"JOB1"),
    reprocess(b"JOB1"),
    requeue(b"JOB1"),
    stalled_check(),
)


def base_as_argument(command: tuple[Any, ...]) -> tuple[Any, ...]:
    """The other form of a call whose base follows its keys."""
    return (command[0], command[1] - 1, *command[2:])


def test_getkeys(any_node: DevNode) -> None:
    """COMMAND GETKEYS answers what numkeys announces, in both forms of the base."""
    client = client_of(any_node.url)
    for command in EVERY_VERB:
        keys = list(command[2 : 2 + command[1]])
        assert send(client, "COMMAND", "GETKEYS", *command) == keys
        if keys[-1] == BASE:
            other = base_as_argument(command)
            assert send(client, "COMMAND", "GETKEYS", *other) == keys[:-1]
    # The contract's own example: the names need not be a queue's.
    assert send(client, "COMMAND", "GETKEYS", "EMQ.PROMOTE", 3, "a", "b", "c", 100) == [
        b"a",
        b"b",
        b"c",
    ]


def test_acl_categories(any_node: DevNode) -> None:
    """Where the server lets a module say so, the verbs are writes and the version is a read."""
    client = client_of(any_node.url)
    if b"valkey_version" not in info(client, "server"):
        pytest.skip("this server has no SetCommandACLCategories")
    verbs = {command[0].encode() for command in EVERY_VERB}
    for category, members in (("write", verbs), ("read", {b"EMQ.VERSION"})):
        listed = {name.upper() for name in send(client, "ACL", "CAT", category)}
        assert {name for name in listed if name.startswith(b"EMQ.")} == members


@each_server
def test_acl_key_patterns_bind(start_node: Callable[..., DevNode], kind: str) -> None:
    """A user of one queue touches no other, in either form; a verb not granted is refused."""
    node = start_node(kind)
    admin = client_of(node.url)
    send(admin, "ACL", "SETUSER", "a", "on", ">a", "~emq:{orders}:*", "+@all")
    send(
        admin,
        "ACL",
        "SETUSER",
        "sweeper",
        "on",
        ">s",
        "~*",
        "-@all",
        "+emq.promote",
        "+emq.version",
    )
    send(admin, "ACL", "SETUSER", "reader", "on", ">r", "%R~emq:{orders}:*", "+@all")
    where = f"127.0.0.1:{node.port}"

    user = client_of(f"redis://a:a@{where}")
    for command in EVERY_VERB:
        other = tuple(
            word.replace(b"{orders}", b"{other}") if isinstance(word, bytes) else word
            for word in command
        )
        mixed = (*command[:3], *other[3:])
        for strange in (other, mixed):
            assert send(user, *strange).code == "NOPERM", strange
        if command[1 + command[1]] == BASE:
            assert send(user, *base_as_argument(other)).code == "NOPERM"
        reply = send(user, *command)
        assert not isinstance(reply, Refusal) or reply.code != "NOPERM", reply
    assert send(admin, "KEYS", "emq:{other}:*") == []

    sweeper = client_of(f"redis://sweeper:s@{where}")
    assert send(sweeper, *promote()) == 0
    assert send(sweeper, "EMQ.VERSION") == send(admin, "EMQ.VERSION")
    assert send(sweeper, *stalled_check()).code == "NOPERM"

    reader = client_of(f"redis://reader:r@{where}")
    for command in EVERY_VERB:
        assert send(reader, *command).code == "NOPERM", command


@each_server
def test_out_of_memory(start_node: Callable[..., DevNode], kind: str) -> None:
    """When memory is used up no job can be added, and every job can still be settled."""
    client = client_of(start_node(kind).url)
    send_all(client, [schedule(b"JOB%d" % number) for number in range(9)])
    send(client, "CONFIG", "SET", "maxmemory", 1)
    assert send(client, *enqueue(b"JOBx")).code == "OOM"
    assert send(client, *schedule(b"JOBx")).code == "OOM"
    assert send(client, *promote()) == 9
    assert send_all(client, [claim(0)] * 9) == [[b"JOB%d" % n, b"p", 1] for n in range(9)]
    assert send_all(
        client,
        [
            *(complete(b"JOB0"), fail(b"JOB1"), fail(b"JOB2", 1, 1), delay(b"JOB3")),
            *(requeue(b"JOB4"), extend(b"JOB5"), extends(b"JOB6", 1), reschedule(b"JOB3")),
            *(reprocess(b"JOB2"), stalled_check()),
        ],
    ) == [1, b"scheduled", b"dead", 1, 1, 1, [], 1, 1, [[], [b"JOB7", b"JOB8"]]]


# --- cluster ------------------------------------------------------------------------------------

CLUSTER = ("--cluster-enabled", "yes")


@each_server
def test_cluster_of_one(start_node: Callable[..., DevNode], kind: str) -> None:
    """A node that owns every slot runs the verbs of any queue, and refuses keys of two queues
    itself.
    """
    client = client_of(start_node(kind, extra_args=CLUSTER).url)
    send(client, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    wait_until(
        lambda: b"cluster_state:ok" in send(client, "CLUSTER", "INFO"), "the cluster is complete"
    )
    assert send(client, *schedule(b"JOB1")) == 1
    assert send(client, *promote()) == 1
    assert send(client, *claim(0)) == [b"JOB1", b"p", 1]
    assert send(client, *stalled_check(2)) == [[b"JOB1"], []]
    data = digest(client)
    for command in EVERY_VERB:
        strange = (*command[:3], command[3].replace(b"{orders}", b"{other}"), *command[4:])
        assert send(client, *strange).code == "CROSSSLOT", command
    assert digest(client) == data


def test_cluster_of_two(start_node: Callable[..., DevNode]) -> None:
    """A node answers MOVED for a queue that another node owns, in both forms of the base, and
    writes nothing.
    """
    nodes = [start_node(extra_args=CLUSTER) for _ in range(2)]
    here, there = (client_of(node.url) for node in nodes)
    slot = send(here, "CLUSTER", "KEYSLOT", BASE)
    for client, first, last in ((here, 0, slot - 1), (there, slot, 16383)):
        send(client, "CLUSTER", "ADDSLOTSRANGE", first, last)
    send(here, "CLUSTER", "MEET", "127.0.0.1", nodes[1].port)
    wait_until(
        lambda: all(
            b"cluster_state:ok" in send(client, "CLUSTER", "INFO") for client in (here, there)
        ),
        "both nodes know each other",
    )
    for command in EVERY_VERB:
        moved = send(here, *command)
        assert isinstance(moved, Refusal)
        assert moved.code == "MOVED", moved
        if command[1 + command[1]] == BASE:
            assert send(here, *base_as_argument(command)).code == "MOVED"
    assert send(here, "DBSIZE") == 0
    assert send(there, *enqueue(b"JOB1")) == 1


def test_cluster_without_the_slot(start_node: Callable[..., DevNode]) -> None:
    """A node of an incomplete cluster refuses by itself, too."""
    client = client_of(start_node(extra_args=CLUSTER).url)
    for command in EVERY_VERB:
        assert send(client, *command).code == "CLUSTERDOWN"


def test_other_databases(node: DevNode) -> None:
    """A verb works on the database that its connection has selected."""
    client = client_of(node.url)
    write_keyspace(client, {})
    other = client_of(node.url.removesuffix("/0") + "/5")
    assert send(other, *enqueue(b"JOB1")) == 1
    assert send(client, *claim()) == []
    assert send(other, *claim()) == [b"JOB1", b"p", 1]
    assert send(client, "EXISTS", ACTIVE, rk(b"JOB1")) == 0
    send(other, "FLUSHDB")
