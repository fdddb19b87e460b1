"""Where the crew and the daemons find their servers: one, or a pair that sentinels watch."""

import random
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from chaos.history import Part, Position, file_of
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

LOOPBACK = "127.0.0.1"
SENTINELS = 3
MASTER = "main"
DOWN_AFTER_MS = 2_000
"""When the others give a silent server up. Less, and a busy machine makes servers look dead, which
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


def exposed(host: str) -> tuple[str, ...]:
    """The arguments of a server that others find under this address, and not by a proxy."""
    if host == LOOPBACK:
        return ()
    # Unprotected, in a network where nobody else is.
    return "--bind", LOOPBACK, host, "--protected-mode", "no"


class Primary:
    """A primary, what it was replaced by, and the history that they have written one after another.

    Replication is asynchronous: what was answered in the last moment before a primary dies may be
    lost, and then nothing adds up. So writes are paused until the replica has them all, and only
    then is the primary killed, or dismissed. Sweeps are caught in the pause like anybody.
    """

    def __init__(self, place: Path, log: int, node: DevNode) -> None:
        self._place = place
        self._log = log
        self.node = node
        self.replica = node
        """Itself where there is none."""
        self.client: Any = None
        # Of the file that is written now: where it is, from where on it is the history, and how
        # long the history was before that.
        self._tail = (Path(), 0, 0)
        self._files = 0

    def start(self) -> None:
        """Start it, and its history."""
        self.node.start()
        self._lead(self.node, 0, 0)

    def position(self) -> int:
        """How long its history is now."""
        file, start, before = self._tail
        return before + file.stat().st_size - start

    def cut(self) -> Part:
        """Return its history since it was last cut."""
        file, start, before = self._tail
        end = file.stat().st_size
        self._tail = file, end, before + end - start
        return Part(file, start, end, self._log)

    def hand_over(self, end: Callable[[DevNode, DevNode], None]) -> tuple[Part, DevNode]:
        """Have the replica take over once it has everything, by whatever `end` does to the two;
        return the history that ends, and the old primary."""
        old, new = self.node, self.replica
        with client_of(new) as other:
            # Until somebody ends it; longer than all that is waited for here.
            self.client.client_pause(int(3 * TAKEOVER_SECONDS * 1000), all=False)
            wait_until(lambda: self._caught_up(other), "the replica has everything")
            part, start = self.cut(), file_of(new.directory).stat().st_size
        end(old, new)
        position = self._tail[2]
        self.replica = old
        self._lead(new, start, position)
        return part, old

    def in_step(self) -> bool:
        """Whether the replica says so itself."""
        with suppress(redis.RedisError), client_of(self.replica) as client:
            state = client.info("replication")
            role, port = state["role"], state.get("master_port")
            return (role, port, state.get("master_link_status")) == ("slave", self.node.port, "up")
        return False

    def _lead(self, node: DevNode, start: int, before: int) -> None:
        """The history, which is so long before that, goes on in this server's file."""
        self.node = node
        self.client = client_of(node)
        file = file_of(node.directory)
        # A replica that is fed anew forgets its file; under this name it stays.
        self._files += 1
        kept = self._place / f"history-{self._log}-{self._files}.aof"
        kept.hardlink_to(file)
        self._tail = kept, start, before

    def _caught_up(self, replica: Any) -> bool:
        offset = self.client.info("replication")["master_repl_offset"]
        return bool(replica.info("replication")["slave_repl_offset"] == offset)


class Servers:
    """One server, and its history; a context manager."""

    name = "alone"

    def __init__(self, place: Path, host: str = LOOPBACK) -> None:
        self.place = place
        self.host = host
        self.primaries = [Primary(place, 0, open_node(place))]
        self.on_change: Callable[[], None] = lambda: None
        """Called when queues are found at other ports."""
        self._parts: list[Part] = []

    def __enter__(self) -> "Servers":
        self.primaries[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            # In order, a primary would wait for its replica.
            node.kill()

    @property
    def nodes(self) -> list[DevNode]:
        """All servers that hold data."""
        primaries = [each.node for each in self.primaries]
        return list(dict.fromkeys([*primaries, *(each.replica for each in self.primaries)]))

    def primary_of(self, queue: str) -> Primary:
        """Who has a queue now."""
        del queue  # all are found at one place
        return self.primaries[0]

    def client_of(self, queue: str) -> Any:
        """A client of whoever has a queue now."""
        return self.primary_of(queue).client

    def port_of(self, queue: str) -> int:
        """Where a queue is found now."""
        return self.primary_of(queue).node.port

    def url(self) -> str:
        """What a daemon is told that asks the servers where they are."""
        raise NotImplementedError

    def await_whole(self) -> None:
        """Wait until all servers that are not down work."""

    def fail_over(self, number: int, *, kill: bool) -> Callable[[], None]:
        """Kill or dismiss a primary, and wait for the other one; return what makes it a pair."""
        raise NotImplementedError

    def move_at_once(self, queue: str, number: int) -> None:
        """Move the slot of a queue to another primary, as the server does it itself."""
        raise NotImplementedError

    def move_by_key(self, queue: str, number: int, seconds: float) -> None:
        """Move it key by key, which takes so long; meanwhile nobody gets on with it."""
        raise NotImplementedError

    def position(self) -> Position:
        """How long the history of each primary is now."""
        return tuple(each.position() for each in self.primaries)

    def history(self) -> list[Part]:
        """All of it, once all have ended."""
        return [*self._parts, *(each.cut() for each in self.primaries)]

    def add_to_history(self, *parts: Part) -> None:
        """These are over."""
        self._parts += parts

    def stop(self) -> None:
        """End them, so that the files hold all there is."""
        run_together([node.kill for node in self.nodes])


class WatchedPair(Servers):
    """A primary and a replica, watched by sentinels, which change places without a loss."""

    name = "sentinel"

    def __init__(self, place: Path, host: str = LOOPBACK) -> None:
        super().__init__(place, host)
        arguments = (*SERVER_ARGS, *exposed(host))
        self._arguments = arguments
        self.primaries = [Primary(place, 0, DevNode(place / "node", extra_args=arguments))]
        self._pair = self.primaries[0]
        self._sentinels: list[Process] = []
        self._ports: list[int] = []

    def __enter__(self) -> "WatchedPair":
        super().__enter__()
        self._pair.replica = self._open_replica(self.place / "other", 0)
        for number in range(SENTINELS):
            self._start_sentinel(number)
        wait_until(self._agreed, "the sentinels agree")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._sentinels:
            process.kill()
            process.wait()
        super().__exit__()

    def url(self) -> str:
        hosts = ",".join(f"{self.host}:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/{MASTER}/0"

    def fail_over(self, number: int, *, kill: bool) -> Callable[[], None]:
        del number  # there is one pair
        wait_until(self._agreed, "the replica is known to all sentinels")

        def end(old: DevNode, new: DevNode) -> None:
            if kill:
                old.kill()
                wait_until(lambda: self._named(new), "the sentinels name the other server")
                return
            wait_until(lambda: self._ask_failover() or self._named(new), "a sentinel takes over")
            wait_until(lambda: self._named(new), "the sentinels name the other server")
            # Sentinels would leave it a primary for eight seconds more, and who has not heard of
            # the other one would work on it in vain. Nor do they get through to one that pauses.
            self._pair.client.replicaof(self.host, new.port)
            self._pair.client.client_unpause()

        part, old = self._pair.hand_over(end)
        self.add_to_history(part)
        self.on_change()

        def mend() -> None:
            if kill:
                self._pair.replica = self._open_replica(old.directory, old.port)
            wait_until(self._pair.in_step, "the other server is a replica now")

        return mend

    # --- its parts ------------------------------------------------------------------------------

    def _open_replica(self, directory: Path, port: int) -> DevNode:
        replicates = ("--replicaof", f"{self.host} {self._pair.node.port}")
        return DevNode(
            directory, port=port, extra_args=(*self._arguments, *replicates), brand=False
        ).start()

    def _start_sentinel(self, number: int) -> None:
        directory = self.place / f"sentinel{number}"
        directory.mkdir()
        port = next(filter(_free, iter(lambda: random.choice(PORTS), 0)))
        hosts = dict.fromkeys((LOOPBACK, self.host))
        lines = (
            f"port {port}",
            f"bind {' '.join(hosts)}",
            "protected-mode no",
            f"dir {directory}",
            f"sentinel monitor {MASTER} {self.host} {self._pair.node.port} {SENTINELS // 2 + 1}",
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
        primary = self._pair.node.port
        with suppress(redis.RedisError):
            for port in self._ports:
                reply = self._ask(port, "SENTINEL", "MASTER", MASTER)
                state = dict(zip(reply[::2], reply[1::2], strict=True))
                known = (state[b"num-other-sentinels"], state[b"flags"], int(state[b"port"]))
                if known != (b"%d" % (SENTINELS - 1), b"master", primary):
                    return False
                (replica,) = self._ask(port, "SENTINEL", "REPLICAS", MASTER)
                state = dict(zip(replica[::2], replica[1::2], strict=True))
                at = int(state[b"master-port"])
                seen = (state[b"flags"], state[b"master-link-status"], at)
                if seen != (b"slave", b"ok", primary):
                    return False
            return True
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


def _free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind((LOOPBACK, port))
        return True
    return False


def wait_until(predicate: Callable[[], object], what: str) -> None:
    """Wait for it, or raise."""
    deadline = time.monotonic() + TAKEOVER_SECONDS
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {TAKEOVER_SECONDS:g} s: {what}")
        time.sleep(0.05)


def run_together(work: Sequence[Callable[[], object]]) -> None:
    """Do these at the same time."""
    with ThreadPoolExecutor(len(work)) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()
