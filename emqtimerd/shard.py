"""Which replica sweeps a queue, when several share the queues out: rendezvous hashing."""

import hashlib


def owner(queue: str, count: int) -> int:
    """Return which of `count` shards the queue belongs to.

    Each shard draws a number for each queue and the highest wins, so another count moves only the
    queues that the new shard wins or the lost one had.
    """
    name = queue.encode()
    return max(range(count), key=lambda index: _draw(name, index))


def _draw(name: bytes, index: int) -> bytes:
    # Keyed by the shard, so that every shard ranks the queues in an order of its own. Two shards do
    # not draw the same 64 bits; if they did, the first of them would win with every replica.
    return hashlib.blake2b(name, digest_size=8, salt=index.to_bytes(16, "big")).digest()
