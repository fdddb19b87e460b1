"""Finding queues by looking at the nodes' keys, a little at a time.

A queue shows itself by its schedule or its active set; both vanish while it is idle, so a queue is
forgotten only after it has not been seen for a while.
"""

import time
from collections.abc import Callable

from emqtimerd import wire
from emqtimerd.config import Settings
from emqtimerd.node import Node, NodeFault
from emqtimerd.topology import Nodes

STEP_SECONDS = 0.1
"""The pace: one SCAN call each 100 ms, ten a second, whatever the size of the keyspace."""

KEYS_PER_STEP = 1_000
"""What one call looks at: some 0.3 ms of the server's time. A million keys take 100 s."""

FORGET_SECONDS = 600.0
"""A queue that no search has seen for so long is no longer swept: ten minutes without a single job
due or leased. When it comes back, the next search finds it."""


class Discovery:
    """Searches the keyspace again and again; `step` is one call to the server at the most."""

    def __init__(
        self, nodes: Nodes, settings: Settings, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._nodes = nodes
        self._settings = settings
        self._monotonic = monotonic
        self._cursor = b"0"
        self._ahead: list[Node] = []
        self._searched: set[Node] = set()
        """The nodes whose keys this search has seen to the end."""
        self._begun: float | None = None
        self._seen: dict[str, float] = {}
        self._kept: frozenset[str] = frozenset()
        self.dropped = 0
        """How many queues the last search found beyond `discovery.max_queues`."""

    def configure(self, settings: Settings) -> None:
        """Take over settings; what was seen stays known as far as they want it."""
        self._settings = settings

    def go_on_from(self, former: "Discovery") -> None:
        """Know what another one knew of the same keyspace."""
        self._seen, self._kept = dict(former._seen), former._kept

    def step(self) -> frozenset[str] | None:
        """Do one step; return the queues that are known when a search has just ended.

        A node that cannot be reached ends the step; the search goes on from where it was. Where
        there are others it goes on with them, and then forgets none of its queues.
        """
        now = self._monotonic()
        limits = self._settings.discovery
        if not self._ahead:
            if self._begun is not None and now < self._begun + limits.interval_seconds:
                return None
            self._begun, self._searched = now, set()
            self._nodes.locate()
            self._ahead = list(self._nodes.primaries())
        node = self._ahead[0]
        try:
            self._cursor, keys = self._scan(node)
        except (NodeFault, wire.ReplyError, wire.ShapeError):
            if not self._nodes.tended:
                return None
            self._cursor = b"0"
            del self._ahead[0]
        else:
            found = filter(None, map(wire.queue_of, keys))
            self._seen |= dict.fromkeys(filter(self._settings.discovers, found), now)
            if self._cursor == b"0":
                self._searched.add(node)
                del self._ahead[0]
        return None if self._ahead else self._known(now)

    def _scan(self, node: Node) -> tuple[bytes, list[bytes]]:
        if self._nodes.tended and (fault := node.fault()):
            raise fault
        with node.link() as link:
            deadline = time.monotonic() + node.timeout_seconds
            (reply,) = link.exchange(wire.scan(self._cursor, KEYS_PER_STEP), 1, deadline)
        return wire.read_scan(reply)

    def _known(self, now: float) -> frozenset[str]:
        long_ago = [queue for queue, at in self._seen.items() if now - at >= FORGET_SECONDS]
        for node, queues in self._nodes.by_node(long_ago, lambda queue: queue):
            # Where nobody could look, a queue may be there still.
            if node in self._searched:
                for queue in queues:
                    del self._seen[queue]
        wanted = [queue for queue in self._seen if self._settings.discovers(queue)]
        # Those that are swept come first: a queue that is found later waits until there is room.
        wanted.sort(key=lambda queue: (queue not in self._kept, queue))
        most = self._settings.discovery.max_queues
        self.dropped = max(len(wanted) - most, 0)
        self._kept = frozenset(wanted[:most])
        return self._kept
