"""Finding queues by looking at the node's keys, a little at a time.

A queue shows itself by its schedule or its active set; both vanish while it is idle, so a queue is
forgotten only after it has not been seen for a while.
"""

import re
import time
from collections.abc import Callable

from emqtimerd import wire
from emqtimerd.config import Settings
from emqtimerd.node import Node, NodeFault

STEP_SECONDS = 0.1
"""The pace: one SCAN call each 100 ms, ten a second, whatever the size of the keyspace."""

KEYS_PER_STEP = 1_000
"""What one call looks at: some 0.3 ms of the server's time. A million keys take 100 s."""

FORGET_SECONDS = 600.0
"""A queue that no search has seen for so long is no longer swept: ten minutes without a single job
due or leased. When it comes back, the next search finds it."""

# No job row matches: its key goes on with `job:`.
PATTERN = "emq:{*}:[as]c*"
_QUEUE_KEY = re.compile(rb"emq:\{([^{}]+)\}:(?:schedule|active)")


class Discovery:
    """Searches the keyspace again and again; `step` is one call to the server at the most."""

    def __init__(
        self, node: Node, settings: Settings, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._settings = settings
        self._monotonic = monotonic
        self._cursor = b"0"
        self._begun: float | None = None
        self._seen: dict[str, float] = {}
        self.dropped = 0
        """How many queues the last search found beyond `discovery.max_queues`."""

    def step(self) -> frozenset[str] | None:
        """Do one step; return the queues that are known when a search has just ended.

        A node that cannot be reached ends the step; the search goes on from where it was.
        """
        now = self._monotonic()
        limits = self._settings.discovery
        if self._cursor == b"0":
            if self._begun is not None and now < self._begun + limits.interval_seconds:
                return None
            self._begun = now
        try:
            with self._node.link() as link:
                (reply,) = link.exchange(
                    wire.scan(self._cursor, PATTERN, KEYS_PER_STEP),
                    1,
                    now + self._node.timeout_seconds,
                )
            self._cursor, keys = wire.read_scan(reply)
        except (NodeFault, wire.ReplyError, wire.ShapeError):
            return None
        for key in keys:
            self._note(key, now)
        return self._known(now) if self._cursor == b"0" else None

    def _note(self, key: bytes, now: float) -> None:
        match = _QUEUE_KEY.fullmatch(key)
        if match is None:
            return
        try:
            queue = match[1].decode()
        except UnicodeDecodeError:
            return
        if wire.queue_name_problem(queue) is None and self._settings.discovers(queue):
            self._seen[queue] = now

    def _known(self, now: float) -> frozenset[str]:
        self._seen = {q: at for q, at in self._seen.items() if now - at < FORGET_SECONDS}
        most = self._settings.discovery.max_queues
        self.dropped = max(len(self._seen) - most, 0)
        # By name, so that the same ones are kept from search to search.
        return frozenset(sorted(self._seen)[:most])
