"""Shards: each queue has one owner, and another count moves no more queues than it must."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emqtimerd.shard import owner

QUEUES = [f"queue-{number}" for number in range(4_000)]


@pytest.mark.parametrize("count", range(1, 9))
def test_each_queue_has_exactly_one_owner_and_the_shares_are_even(count: int) -> None:
    """Every replica comes to the same answer by itself, and none has much more than its part."""
    owners = [owner(queue, count) for queue in QUEUES]
    assert owners == [owner(queue, count) for queue in QUEUES]
    shares = Counter(owners)
    assert set(shares) == set(range(count))
    even = len(QUEUES) / count
    assert max(shares.values()) < 1.2 * even
    assert min(shares.values()) > 0.8 * even


@pytest.mark.parametrize("count", range(1, 8))
def test_one_shard_more_moves_its_own_share_only(count: int) -> None:
    """From n to n + 1, one in n + 1 queues moves, and each of them to the new shard; the other way
    round the same."""
    moved = [queue for queue in QUEUES if owner(queue, count) != owner(queue, count + 1)]
    assert len(moved) == pytest.approx(len(QUEUES) / (count + 1), rel=0.2)
    assert {owner(queue, count + 1) for queue in moved} == {count}


@given(st.text(min_size=1, max_size=64), st.integers(1, 1_024))
def test_any_name_has_an_owner(queue: str, count: int) -> None:
    """Whatever the name, as far as it can be one."""
    try:
        queue.encode()
    except UnicodeEncodeError:
        return
    assert 0 <= owner(queue, count) < count


def test_owners_are_the_same_in_every_release() -> None:
    """Replicas of two versions run side by side during an upgrade: these answers never change."""
    known = {"orders": 4, "emails": 3, "bulk-1": 0, "é": 3}
    assert {queue: owner(queue, 5) for queue in known} == known
