"""Discovery: queues found at a bounded pace, wanted ones only, and forgotten after a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
from stub import HANG_UP, Stub, array, bulk, error, ids

from emqtimerd import wire
from emqtimerd.config import Settings
from emqtimerd.devnode import DevNode
from emqtimerd.discovery import FORGET_SECONDS, KEYS_PER_STEP, Discovery
from emqtimerd.node import BackingOff, Node, Unreachable, open_node
from emqtimerd.topology import Nodes, open_nodes

MANY = 50
"""More steps than any search of these tests takes."""


class Search:
    """A discovery with a clock that the test moves on."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.now = 1_000.0
        self.url = url
        self.settings = self._settings(settings)
        self.nodes = open_nodes(self.settings.node)
        self.discovery = Discovery(self.nodes, self.settings, lambda: self.now)

    def _settings(self, discovery: dict[str, Any]) -> Settings:
        return Settings.model_validate(
            {
                "node": {"url": self.url, "timeout": "1s"},
                "discovery": {"enabled": True, "interval": "30s", **discovery},
            }
        )

    def configure(self, **settings: Any) -> None:
        self.discovery.configure(self._settings(settings))

    def found(self, steps: int = MANY) -> set[str] | None:
        """Step until a search ends, at most so often; None if none did."""
        for _ in range(steps):
            if (found := self.discovery.step()) is not None:
                return set(found)
        return None

    def again(self, seconds: float = 31.0) -> set[str] | None:
        """Let time pass and search once more."""
        self.now += seconds
        return self.found()


@pytest.fixture
def search() -> Iterator[Callable[..., Search]]:
    with ExitStack() as stack:

        def open_(url: str, **settings: Any) -> Search:
            search = Search(url, **settings)
            stack.callback(search.nodes.close)
            return search

        yield open_


def add(client: redis.Redis, queue: str, name: str = "schedule") -> None:
    client.zadd(wire.queue_key(queue, name), {"JOB1": 1})


def page(cursor: int, *keys: bytes) -> Any:
    return array(bulk(b"%d" % cursor), ids(*keys))


def test_queues_show_themselves_by_schedule_and_active(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """What waits and what is leased; what is pending, dead, or no queue's key at all does not."""
    add(client, "scheduled")
    add(client, "leased", "active")
    add(client, "waiting", "pending")
    add(client, "buried", "dead")
    client.set("emq:{text}:schedule", "no sorted set")
    client.zadd("emq:{a}:schedule:more", {"JOB1": 1})
    client.zadd("other:{a}:schedule", {"JOB1": 1})
    client.hset(wire.row_key("rows", b"JOB:active"), "state", "pending")
    assert search(node.url).found() == {"scheduled", "leased"}


def test_names_that_no_queue_may_have_are_left_out(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """Hash tags: a key with a name that is refused in the configuration is not swept either."""
    for key in (
        b"emq:{a b}:schedule",
        b"emq:{\xff}:schedule",
        b"emq:{}:active",
        b"emq:{a\n}:active",
    ):
        client.zadd(key, {"JOB1": 1})
    add(client, "a:b")
    add(client, "é")
    add(client, "n" * 255)
    add(client, "n" * 256)
    assert search(node.url).found() == {"a:b", "é", "n" * 255}


def test_include_and_exclude(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """Globs say which; the one that excludes is stronger."""
    for queue in ("bulk-1", "bulk-2", "orders", "tmp-bulk-3"):
        add(client, queue)
    assert search(node.url, include=["bulk-*", "orders"], exclude=["*-2"]).found() == {
        "bulk-1",
        "orders",
    }


def test_the_upper_bound_keeps_the_same_queues(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """Beyond it queues are left out, counted, and not others each time."""
    for number in range(20):
        add(client, f"queue-{number:02}")
    looking = search(node.url, max_queues=5)
    first = looking.found()
    assert first == {f"queue-{number:02}" for number in range(5)}
    assert looking.discovery.dropped == 15
    assert looking.again() == first
    looking.configure(max_queues=50)
    assert len(looking.again() or ()) == 20
    assert looking.discovery.dropped == 0


def test_a_new_queue_pushes_out_none_that_is_swept(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """Whatever its name, it waits until there is room, and then it comes in. A lower bound keeps
    some of those that were swept, too."""
    for queue in ("m", "n"):
        add(client, queue)
    looking = search(node.url, max_queues=2)
    assert looking.found() == {"m", "n"}
    add(client, "a")
    add(client, "z")
    assert looking.again() == {"m", "n"}
    assert looking.discovery.dropped == 2
    client.delete(wire.queue_key("m", "schedule"))
    assert looking.again(FORGET_SECONDS) == {"a", "n"}
    looking.configure(max_queues=1)
    assert looking.again() == {"a"}
    assert looking.discovery.dropped == 2


def test_a_step_is_one_bounded_call(search: Callable[..., Search], stub: Stub) -> None:
    """A budget of SCAN calls: one a step, of a bounded size, going on where the last one ended."""
    stub.on("SCAN", page(7, b"emq:{a}:active"), page(9), page(0, b"emq:{b}:schedule"))
    looking = search(stub.url)
    for calls, found in enumerate((None, None, {"a", "b"}), start=1):
        assert looking.found(1) == found
        assert stub.count("SCAN") == calls
    calls_made = stub.received("SCAN")
    assert [call.words[1] for call in calls_made] == [b"0", b"7", b"9"]
    assert all(b"%d" % KEYS_PER_STEP in call.words for call in calls_made)


def test_between_two_searches_nothing_is_asked(search: Callable[..., Search], stub: Stub) -> None:
    """The interval counts from the beginning of a search; a longer one is followed at once."""
    stub.on("SCAN", page(0, b"emq:{a}:active"))
    looking = search(stub.url)
    assert looking.found() == {"a"}
    looking.now += 29
    assert looking.found() is None
    assert stub.count("SCAN") == 1
    assert looking.again(2) == {"a"}
    stub.on("SCAN", page(7), page(0, b"emq:{a}:active"))
    looking.now += 31
    looking.discovery.step()
    looking.now += 100
    assert looking.found(1) == {"a"}
    assert looking.found(1) == {"a"}
    assert looking.found(1) is None


@pytest.mark.parametrize(
    "answer", [HANG_UP, error("LOADING"), error("NOPERM scan"), bulk(b"odd"), array(bulk(b"7"))]
)
def test_what_goes_wrong_ends_the_step_only(
    search: Callable[..., Search], stub: Stub, answer: Any
) -> None:
    """A lost connection, an error, an odd reply: the search goes on, and nothing is forgotten."""
    stub.on("SCAN", page(7, b"emq:{a}:active"), answer, page(0, b"emq:{b}:active"))
    looking = search(stub.url)
    assert looking.found() == {"a", "b"}
    assert [call.words[1] for call in stub.received("SCAN")] == [b"0", b"7", b"7"]


def test_a_queue_that_is_gone_is_forgotten_after_a_while(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """Idle is not gone: both keys vanish whenever nothing waits, so it takes ten minutes."""
    add(client, "orders")
    add(client, "brief")
    looking = search(node.url)
    assert looking.found() == {"orders", "brief"}
    client.delete(wire.queue_key("brief", "schedule"))
    assert looking.again(FORGET_SECONDS - 10) == {"orders", "brief"}
    assert looking.again(31) == {"orders"}
    add(client, "brief", "active")
    assert looking.again() == {"orders", "brief"}


def test_settings_change_under_a_search(
    search: Callable[..., Search], node: DevNode, client: redis.Redis
) -> None:
    """What is no longer wanted is left out of the next answer; the rest stays known."""
    add(client, "orders")
    add(client, "bulk-1")
    looking = search(node.url)
    assert looking.found() == {"orders", "bulk-1"}
    client.flushall()
    looking.configure(exclude=["bulk-*"])
    assert looking.again() == {"orders"}


class Part(Node):
    """A primary of a cluster as a search sees it: keys, or a fault."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda: None, 1.0)  # type: ignore[arg-type, return-value]
        self.up = True
        self.keys: list[bytes] = []

    def fault(self) -> BackingOff | None:
        return None if self.up else BackingOff(Unreachable(self.name, "connection", "gone"))


class Parts(Nodes):
    """Primaries, and which of them has a queue: by its first letter."""

    tended = True

    def __init__(self, **parts: Node) -> None:
        super().__init__(next(iter(parts.values())))
        self.parts = parts
        self.nobody = Part("nobody")

    def primaries(self) -> list[Node]:
        return list(self.parts.values())

    def by_node(self, items: Any, queue: Any) -> list[tuple[Node, list[Any]]]:
        shares: dict[Node, list[Any]] = {}
        for item in items:
            shares.setdefault(self.parts.get(queue(item)[0], self.nobody), []).append(item)
        return list(shares.items())


def test_a_primary_that_is_down_keeps_its_own_queues_only(
    search: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell whether the queues of a primary that is down are gone, nor those of a slot
    that nobody serves; those of the others are forgotten as ever."""
    each = {name: Part(name) for name in "abc"}
    parts = Parts(**each)
    looking = search("redis://127.0.0.1:1")
    looking.discovery._nodes = parts
    monkeypatch.setattr(looking.discovery, "_scan", _scan)
    for name, part in each.items():
        part.keys = [b"emq:{%b}:active" % f"{name}-{n}".encode() for n in range(2)]
    assert looking.found() == {f"{name}-{n}" for name in "abc" for n in range(2)}
    for part in each.values():
        del part.keys[1]
    each["b"].up = False
    assert looking.again(FORGET_SECONDS + 1) == {"a-0", "b-0", "b-1", "c-0"}
    # The slots of c are served by nobody for a while, and there is one primary less.
    del parts.parts["c"]
    each["b"].up = True
    assert looking.again(FORGET_SECONDS + 1) == {"a-0", "b-0", "c-0"}
    parts.parts["c"] = each["c"]
    each["c"].keys.clear()
    assert looking.again() == {"a-0", "b-0"}


def test_a_primary_that_fails_in_the_midst_of_a_search(
    search: Callable[..., Search], stub: Stub
) -> None:
    """The next one is searched from its own beginning, not from where the other one's keys ended;
    the next search begins anew with both. What was found stays found."""
    with Stub() as other, ExitStack() as stack:
        stub.on("SCAN", page(7, b"emq:{a-0}:active"), HANG_UP, page(0, b"emq:{a-1}:active"))
        other.on("SCAN", page(9), page(0, b"emq:{b-0}:active"))
        looking = search(stub.url)
        urls = {"a": stub.url, "b": other.url}
        nodes = {
            name: open_node(Settings.model_validate({"node": {"url": url}}).node)
            for name, url in urls.items()
        }
        for node in nodes.values():
            stack.callback(node.close)
        looking.discovery._nodes = Parts(**nodes)
        assert looking.found() == {"a-0", "b-0"}
        assert [call.words[1] for call in stub.received("SCAN")] == [b"0", b"7"]
        assert [call.words[1] for call in other.received("SCAN")] == [b"0", b"9"]
        nodes["a"].look()
        assert looking.again() == {"a-0", "a-1", "b-0"}
        assert [call.words[1] for call in stub.received("SCAN")] == [b"0", b"7", b"0"]


def _scan(node: Part) -> tuple[bytes, list[bytes]]:
    if fault := node.fault():
        raise fault
    return b"0", node.keys


def test_a_search_goes_on_from_what_another_one_knew(
    search: Callable[..., Search], stub: Stub
) -> None:
    """The same keyspace through other connections: nothing is found anew, nor pushed out."""
    stub.on("SCAN", page(0, b"emq:{m}:active"))
    before = search(stub.url, max_queues=1)
    assert before.found() == {"m"}
    after = search(stub.url, max_queues=1)
    after.discovery.go_on_from(before.discovery)
    stub.on("SCAN", page(0, b"emq:{a}:active"))
    assert after.found() == {"m"}
    assert after.again(FORGET_SECONDS) == {"a"}
