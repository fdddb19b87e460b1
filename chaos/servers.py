"""Where the crew and the daemons find their server: one, or a pair that sentinels watch."""

import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from chaos.history import Part, file_of
from emqtimerd.devnode import DevNode, find_server
from emqtimerd.devnode.process import Process, spawn

SERVER_ARGS = (
    # Written before each reply and never put off: what was answered survives SIGKILL.
    *("--appendfsync", "no"),
    # The file is the history: a rewrite would forget it.
    *("--auto-aof-rewrite-percentage", "0"),
    *("--enable-module-command", "local"),
    # A primary waits 5 s for more replicas before it feeds the first one.
    *("--repl-diskless-sync-delay", "0"),
)

SENTINELS = 3
MASTER = "main"
DOWN_AFTER_MS = 2_000
"""When sentinels give a silent primary up. Less, and a busy machine makes servers look dead, which
are then replaced without our having seen to it that nothing is lost."""
PORTS = range(10_000, 22_000)
"""Below the ports that systems give to outgoing connections."""
TAKEOVER_SECONDS = 30.0
"""How long a failover, or a replica's catching up, may take; some three seconds are usual."""


def open_node(directory: Path) -> DevNode:
    """A server whose history can be read."""
    return DevNode(directory / "node", extra_args=SERVER_ARGS)


def client_of(node: DevNode, timeout: float = 30.0) -> Any:
    """A client that sends each command once."""
    return redis.Redis(
        port=node.port, retry=Retry(NoBackoff(), 0), socket_timeout=timeout, protocol=2
    )


class Servers:
    """One server, and its history; a context manager."""

    name = "alone"

    def __init__(self, place: Path) -> None:
        self._place = place
        self.primary = open_node(place)
        self.client: Any = None
        self._parts: list[Part] = []
        # Of the file that is written now: where it is, where the history goes on in it, and how
        # long the history was before that.
        self._tail = (Path(), 0, 0)
        self.on_change: Callable[[int], None] = lambda _port: None
        """Called with the port of another server that is the primary now."""

    def __enter__(self) -> "Servers":
        self.primary.start()
        self._lead(self.primary, 0, 0)
        return self

    def __exit__(self, *_: object) -> None:
        self.primary.__exit__(None, None, None)

    @property
    def nodes(self) -> list[DevNode]:
        """All servers that hold the data."""
        return [self.primary]

    def url(self, port: int) -> str:
        """What a daemon is told, whose network begins at this port."""
        return f"redis://127.0.0.1:{port}/0"

    def fail_over(self, *, kill: bool) -> Callable[[], None]:
        """Kill or dismiss the primary, and wait for the other one; return what makes it a pair."""
        raise NotImplementedError

    def position(self) -> int:
        """How long the history is now."""
        file, start, before = self._tail
        return before + file.stat().st_size - start

    def parts(self) -> list[Part]:
        """The whole history, once the primary has ended."""
        file, start, _ = self._tail
        return [*self._parts, Part(file, start)]

    def _lead(self, node: DevNode, start: int, before: int) -> None:
        """The history, which is so long before that, goes on in this server's file."""
        self.primary = node
        self.client = client_of(node)
        self._tail = file_of(node.directory), start, before


class WatchedPair(Servers):
    """A primary and a replica, watched by sentinels, which change places without a loss.

    Replication is asynchronous: what was answered in the last moment before a primary dies may be
    lost, and then nothing adds up. So writes are paused until the replica has them all, and only
    then is the primary killed, or dismissed. Sweeps are caught in the pause like anybody.
    """

    name = "sentinel"

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self._replica = self.primary
        self._sentinels: list[Process] = []
        self._ports: list[int] = []

    def __enter__(self) -> "WatchedPair":
        super().__enter__()
        self._replica = self._open_replica(self._place / "other", 0)
        for number in range(SENTINELS):
            self._start_sentinel(number)
        wait_until(self._agreed, "the sentinels agree")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        for node in self.nodes:
            # In order, a primary would wait for its replica.
            node.kill()

    @property
    def nodes(self) -> list[DevNode]:
        return [self.primary, self._replica]

    def url(self, port: int) -> str:
        del port  # a sentinel names the server itself
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/{MASTER}/0"

    def fail_over(self, *, kill: bool) -> Callable[[], None]:
        old, new = self.primary, self._replica
        wait_until(self._agreed, "the replica is known to all sentinels")
        with client_of(new) as other:
            # Until somebody ends it; longer than all that is waited for here.
            self.client.client_pause(int(3 * TAKEOVER_SECONDS * 1000), all=False)
            wait_until(lambda: self._caught_up(other), "the replica has everything")
            position, start = self.position(), file_of(new.directory).stat().st_size
        file, begun, before = self._tail
        # A replica that is fed anew forgets its file.
        kept = self._place / f"history-{len(self._parts)}.aof"
        kept.hardlink_to(file)
        if kill:
            old.kill()
        else:
            wait_until(lambda: self._ask_failover() or self._named(new), "a sentinel takes over")
        wait_until(lambda: self._named(new), "the sentinels name the other server")
        if not kill:
            # Sentinels would leave it a primary for eight seconds more, and who has not heard of
            # the other one would work on it in vain. Nor do they get through to one that pauses.
            self.client.replicaof("127.0.0.1", new.port)
            self.client.client_unpause()
        self._parts.append(Part(kept, begun, begun + position - before))
        self._lead(new, start, position)
        self._replica = old
        self.on_change(new.port)

        def mend() -> None:
            if kill:
                self._replica = self._open_replica(old.directory, old.port)
            wait_until(self._in_step, "the other server is a replica now")

        return mend

    # --- its parts ------------------------------------------------------------------------------

    def _open_replica(self, directory: Path, port: int) -> DevNode:
        replicates = ("--replicaof", f"127.0.0.1 {self.primary.port}")
        return DevNode(
            directory, port=port, extra_args=(*SERVER_ARGS, *replicates), brand=False
        ).start()

    def _start_sentinel(self, number: int) -> None:
        directory = self._place / f"sentinel{number}"
        directory.mkdir()
        port = next(filter(_free, iter(lambda: random.choice(PORTS), 0)))
        lines = (
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {directory}",
            f"sentinel monitor {MASTER} 127.0.0.1 {self.primary.port} {SENTINELS // 2 + 1}",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} 3000",
        )
        file = directory / "sentinel.conf"
        file.write_text("\n".join(lines))
        command = [str(find_server()), str(file), "--sentinel"]
        self._sentinels.append(spawn(command, directory / "sentinel.log"))
        self._ports.append(port)

    def _ask(self, port: int, *words: str) -> Any:
        with redis.Redis(port=port, protocol=2, socket_timeout=5) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def _agreed(self) -> bool:
        """Whether all sentinels know the primary, its replica in step, and each other."""
        with suppress(redis.RedisError):
            for port in self._ports:
                reply = self._ask(port, "SENTINEL", "MASTER", MASTER)
                state = dict(zip(reply[::2], reply[1::2], strict=True))
                known = (state[b"num-other-sentinels"], state[b"flags"], int(state[b"port"]))
                if known != (b"%d" % (SENTINELS - 1), b"master", self.primary.port):
                    return False
                (replica,) = self._ask(port, "SENTINEL", "REPLICAS", MASTER)
                state = dict(zip(replica[::2], replica[1::2], strict=True))
                well = (b"slave", b"ok", self.primary.port)
                at = int(state[b"master-port"])
                if (state[b"flags"], state[b"master-link-status"], at) != well:
                    return False
            return True
        return False

    def _in_step(self) -> bool:
        """Whether the replica says so itself: sentinels ask it every ten seconds only."""
        with suppress(redis.RedisError), client_of(self._replica) as client:
            state = client.info("replication")
            well = ("slave", self.primary.port, "up")
            return well == (
                state["role"],
                state.get("master_port"),
                state.get("master_link_status"),
            )
        return False

    def _named(self, node: DevNode) -> bool:
        with suppress(redis.RedisError):
            words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
            return all(int(self._ask(port, *words)[1]) == node.port for port in self._ports)
        return False

    def _ask_failover(self) -> bool:
        with suppress(redis.RedisError):
            self._ask(self._ports[0], "SENTINEL", "FAILOVER", MASTER)
            return True
        return False

    def _caught_up(self, replica: Any) -> bool:
        offset = self.client.info("replication")["master_repl_offset"]
        return bool(replica.info("replication")["slave_repl_offset"] == offset)


def _free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def wait_until(predicate: Callable[[], object], what: str) -> None:
    """Wait for it, or raise."""
    deadline = time.monotonic() + TAKEOVER_SECONDS
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {TAKEOVER_SECONDS:g} s: {what}")
        time.sleep(0.05)


def stop_all(servers: Servers) -> None:
    """End them, so that the files hold all there is."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(DevNode.kill, servers.nodes))
