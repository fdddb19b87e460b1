"""The hand that breaks what it can reach: servers, networks, daemons, their clocks, and data."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import redis

from chaos.cluster import BRAND
from chaos.crew import Books, Crew, Habits, add_all, schedule
from chaos.history import Position
from chaos.network import HOST, Network
from chaos.plan import ALL, DAEMONS, GROUPS, JUMPS, QUEUES, Step, lines_of
from chaos.proxy import Proxy
from chaos.servers import LOOPBACK, Primary, Servers, client_of, run_together
from chaos.soak import tell
from chaos.stage import Clock, Daemon, Watch, open_jobs
from emqtimerd import wire
from emqtimerd.devnode import jobcore_path
from emqtimerd.jobs import mint_id
from emqtimerd.node import BACKOFF_CAP_SECONDS
from emqtimerd.rounds import SLICE_SECONDS

HABITS = Habits(QUEUES, lease_ms=2_500, crashes=0.03, far=0.005, jobs_per_second=150)
WORKERS = 3

TIMEOUT_SECONDS = 2.0
"""`node.timeout`: shorter than the longest stop, so that outcomes do become unknown."""
INTERVALS = (0.2, 0.5, 1.0, 2.0)
LIMITS = (20, 100, 300)
LARGEST_LIMIT = max(LIMITS)
MACHINE_SECONDS = 2.0
"""What readiness may take longer on a machine of two cores that are busy."""

BACKLOG = 20_000
GHOSTS = 50
SETTLE_SECONDS = 90.0

CONFIG = """\
queues = {queues}
[node]
url = "{url}"
connect_timeout = "1s"
timeout = "{timeout:g}s"
[promote]
interval = "{promote:g}s"
limit = {limit}
[stalled_check]
interval = "{check:g}s"
limit = {limit}
max_stalled = 3
restart_grace = "1s"
[http]
listen = "127.0.0.1:0"
[log]
format = "json"
"""

End = Callable[[], object] | None
"""What mends a fault; None where it is over at once."""


class Mendable(Protocol):
    """A network that can be made good again."""

    def mend(self) -> None:
        """Be a good network again."""


N = TypeVar("N", bound=Mendable)


class Hand:
    """Does what the plan says, and notes when."""

    def __init__(
        self, servers: Servers, place: Path, stack: ExitStack, seed: int, lacking: Sequence[str]
    ) -> None:
        self.servers = stack.enter_context(servers)
        self._aside = stack.enter_context(ThreadPoolExecutor(1, "hand-aside"))
        self.networks: dict[str, Network] = {}
        self.clocks: dict[str, Clock] = {}
        for number, name in enumerate(DAEMONS, start=1):
            (place / name).mkdir()
            if "wire" not in lacking:
                self.networks[name] = stack.enter_context(contextlib.closing(Network(number)))
            if "clock" not in lacking:
                self.clocks[name] = Clock(place / name)
        self.proxies = {
            # A daemon's is where its wire leads to.
            name: stack.enter_context(Proxy(self._target(name), self._host(name)))
            for name in lines_of(servers.name)
        }
        servers.on_change = self._lead
        self.intervals: dict[str, float] = {}
        self.daemons: dict[str, Daemon] = {}
        for name in DAEMONS:
            network, clock = self.networks.get(name), self.clocks.get(name)
            daemon = Daemon(name, self._config(name), place / name, network, clock)
            self.daemons[name] = daemon
            stack.callback(self._end, daemon)
        self.watch = stack.enter_context(Watch(servers.position, self.daemons.values()))
        ports = {queue: self.proxies[self._line(queue)].port for queue in QUEUES}
        self.crew = stack.enter_context(Crew(ports, HABITS, seed, producers=1, workers=WORKERS))
        self.began = time.monotonic()
        self.books: list[Books] = []
        self.windows: list[tuple[Position, Position]] = []
        self.done: list[str] = []
        self.kinds: Counter[str] = Counter()
        self.problems: list[str] = []
        self.longest_unready = 0.0

    @staticmethod
    def _end(daemon: Daemon) -> None:
        daemon.process.kill()
        daemon.process.wait()

    def say(self, text: str) -> None:
        """Note what was done, and tell."""
        line = f"{time.monotonic() - self.began:6.1f} s  {text}"
        self.done.append(line)
        tell(line)

    def play(self, step: Step) -> None:
        """Break it, hold it, mend it, and wait until both daemons are ready again."""
        time.sleep(step.pause_seconds)
        self.say(str(step))
        self.watch.calm(None)
        with self._fault(step):
            if step.kind in GROUPS["pair"] and not step.beside:
                # Another primary works from now on; the rest is about its replica.
                self.await_ready()
            if step.beside:
                time.sleep(step.hold_seconds / 2)
                with self._fault(step.beside):
                    time.sleep(step.beside.hold_seconds)
                time.sleep(step.hold_seconds / 2)
            else:
                time.sleep(step.hold_seconds)
        self.servers.await_whole()
        self.await_ready()

    def await_ready(self) -> None:
        """Wait until both daemons are ready; the watch goes on looking after that."""
        cleared = time.monotonic()
        bounds = {
            name: self.intervals[name] + BACKOFF_CAP_SECONDS + MACHINE_SECONDS for name in DAEMONS
        }
        self.watch.calm(bounds)
        for name, bound in bounds.items():
            while not self.daemons[name].ready() and time.monotonic() < cleared + bound:
                time.sleep(0.02)
        self.longest_unready = max(self.longest_unready, time.monotonic() - cleared)

    @contextlib.contextmanager
    def _fault(self, step: Step) -> Iterator[None]:
        self.kinds[step.kind] += 1
        name = step.kind.replace("-", "_")
        begin: Callable[[Step], End] = getattr(self, f"_{name}")
        end = begin(step)
        try:
            yield
        finally:
            if end is not None:
                end()

    # --- one method for each kind: begins it, and returns what ends it --------------------------

    def _server_kill(self, step: Step) -> End:
        nodes = [primary.node for primary in self._primaries(step)]
        run_together([node.kill for node in nodes])
        return partial(run_together, [node.start for node in nodes])

    def _server_stop(self, step: Step) -> End:
        processes = [primary.node.pid for primary in self._primaries(step)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)

        def go_on() -> None:
            for process in processes:
                # It may have ended.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

        return go_on

    def _failover(self, step: Step) -> End:
        return self.servers.fail_over(self._number(step), kill=True)

    def _switch(self, step: Step) -> End:
        return self.servers.fail_over(self._number(step), kill=False)

    def _slot_by_key(self, step: Step) -> End:
        # Beside whatever else happens meanwhile.
        moved = self._aside.submit(self.servers.move_by_key, *self._move(step), step.hold_seconds)
        return moved.result

    def _slot_at_once(self, step: Step) -> None:
        self.servers.move_at_once(*self._move(step))

    def _daemon_stop(self, step: Step) -> End:
        daemon = self.daemons[step.who]
        daemon.signal(signal.SIGSTOP)
        return partial(daemon.signal, signal.SIGCONT)

    def _daemon_suspend(self, step: Step) -> End:
        """A machine that sleeps: nothing runs, and then it is later than the monotonic clock
        says."""
        daemon, clock = self.daemons[step.who], self.clocks.get(step.who)
        daemon.signal(signal.SIGSTOP)
        if clock:
            clock.set(clock.ahead + random.Random(step.luck).choice(JUMPS))
        return partial(daemon.signal, signal.SIGCONT)

    def _daemon_kill(self, step: Step) -> End:
        daemon, proxy = self.daemons[step.who], self.proxies.get(step.who)
        # A round tells its numbers when it ends, so they may lack what it did since it began.
        start = self.watch.position_before(TIMEOUT_SECONDS + SLICE_SECONDS + Watch.INTERVAL_SECONDS)
        daemon.kill()
        deadline = time.monotonic() + 5
        while proxy and proxy.connections and time.monotonic() < deadline:
            time.sleep(0.001)
        for _ in range(2):
            # What was still on its way has reached the servers, and the files, by then.
            for primary in self.servers.primaries:
                primary.client.ping()
        self.windows.append((start, self.servers.position()))
        return lambda: daemon.restart(self._config(step.who))

    def _reload(self, step: Step) -> None:
        daemon = self.daemons[step.who]
        if not daemon.reload(self._config(step.who, random.Random(step.luck))):
            self.problems.append(f"{daemon.name} did not reload: {self.done[-1]}")

    def _clock_ahead(self, step: Step) -> End:
        return self._set_clocks(step, 1)

    def _clock_back(self, step: Step) -> End:
        return self._set_clocks(step, -1)

    def _set_clocks(self, step: Step, sign: int) -> End:
        jump = sign * random.Random(step.luck).choice(JUMPS)
        clocks = [clock for name, clock in self.clocks.items() if step.who in (name, ALL)]
        before = [clock.ahead for clock in clocks]
        for clock in clocks:
            clock.set(clock.ahead + jump)

        def set_back() -> None:
            for clock, ahead in zip(clocks, before, strict=True):
                clock.set(ahead)

        return set_back

    def _wire_cut(self, step: Step) -> End:
        return self._spoil(step, self.networks, Network.cut)

    def _wire_out(self, step: Step) -> End:
        return self._spoil(step, self.networks, Network.unplug)

    def _net_stall(self, step: Step) -> End:
        return self._spoil(step, self.proxies, Proxy.stall)

    def _net_cut(self, step: Step) -> End:
        return self._spoil(step, self.proxies, Proxy.cut)

    def _net_refuse(self, step: Step) -> End:
        return self._spoil(step, self.proxies, Proxy.refuse)

    def _net_swallow(self, step: Step) -> End:
        return self._spoil(step, self.proxies, Proxy.swallow)

    def _net_break(self, step: Step) -> End:
        # Few bytes: in the middle of a small reply. Many: somewhere in a drain.
        replies = random.Random(step.luck).choice((1, 7, 40, 333, 2_000))
        return self._spoil(step, self.proxies, lambda proxy: proxy.break_off(replies))

    @staticmethod
    def _spoil(step: Step, networks: Mapping[str, N], fault: Callable[[N], None]) -> End:
        spoiled = [network for name, network in networks.items() if step.who in (name, ALL)]
        for network in spoiled:
            fault(network)

        def mend() -> None:
            for network in spoiled:
                network.mend()

        return mend

    def _lane(self, step: Step) -> End:
        chance = random.Random(step.luck)
        queue = chance.choice(QUEUES)
        place, state = chance.choice((("schedule", "scheduled"), ("active", "active")))
        job_id = b"JOBLANE%d" % step.luck
        client = self.servers.client_of(queue)
        due_ms = client.time()[0] * 1_000 + chance.randrange(-5_000, 1_000)
        pipeline = client.pipeline(transaction=True)
        pipeline.hset(wire.row_key(queue, job_id), mapping={"state": state, "group": "g"})
        pipeline.zadd(wire.queue_key(queue, place), {job_id: due_ms})
        pipeline.execute()

        def remove() -> None:
            # By now it may be somewhere else.
            pipeline = self.servers.client_of(queue).pipeline(transaction=True)
            pipeline.zrem(wire.queue_key(queue, place), job_id)
            pipeline.delete(wire.row_key(queue, job_id))
            pipeline.execute()

        return remove

    def _ghosts(self, step: Step) -> None:
        chance = random.Random(step.luck)
        for place in ("pending", "active", "schedule"):
            ids = {b"JOBGHOST%d-%d" % (step.luck, n): 0 for n in range(GHOSTS)}
            queue = chance.choice(QUEUES)
            self.servers.client_of(queue).zadd(wire.queue_key(queue, place), ids)

    def _backlog(self, step: Step) -> None:
        queue = random.Random(step.luck).choice(QUEUES)
        due_ms = self.servers.client_of(queue).time()[0] * 1_000 + 2_000
        jobs = [schedule(queue, mint_id(), b"backlog", "at", due_ms) for _ in range(BACKLOG)]
        ports = {queue: self.servers.port_of(queue)}
        self.books.append(add_all(ports, jobs, time.monotonic() + 30))

    def _module(self, _: Step) -> End:
        for primary in self.servers.primaries:
            primary.client.execute_command("MODULE", "UNLOAD", "emq")

        def load() -> None:
            for node in self.servers.nodes:
                # One that was restarted meanwhile has it.
                with contextlib.suppress(redis.ResponseError), client_of(node) as client:
                    client.execute_command("MODULE", "LOAD", str(jobcore_path()))

        return load

    # --- whom a step means ----------------------------------------------------------------------

    def _primaries(self, step: Step) -> list[Primary]:
        if step.who in ("", ALL):
            return self.servers.primaries
        return [self.servers.primaries[self._number(step)]]

    @staticmethod
    def _number(step: Step) -> int:
        return int(step.who or 1) - 1

    def _move(self, step: Step) -> tuple[str, int]:
        """The queue whose slot is to move, and to which primary."""
        queue = step.who if step.who in QUEUES else BRAND
        owner = self.servers.primary_of(queue)
        others = [n for n, each in enumerate(self.servers.primaries) if each is not owner]
        return queue, random.Random(step.luck).choice(others)

    # --- where everybody finds the servers ------------------------------------------------------

    def _line(self, queue: str) -> str:
        return queue if queue in self.proxies else "crew"

    def _target(self, line: str) -> int:
        return self.servers.port_of(line if line in QUEUES else QUEUES[0])

    def _host(self, line: str) -> str:
        return HOST if line in self.networks else LOOPBACK

    def _lead(self) -> None:
        for name, proxy in self.proxies.items():
            proxy.lead_to(self._target(name))

    def _url(self, daemon: str) -> str:
        proxy = self.proxies.get(daemon)
        return f"redis://{self._host(daemon)}:{proxy.port}/0" if proxy else self.servers.url()

    def _config(self, name: str, chance: random.Random | None = None) -> str:
        """The file of a daemon: as at first, or with other intervals and limits."""
        promote, check, limit = INTERVALS[1], INTERVALS[2], 100
        if chance:
            promote, check = chance.choice(INTERVALS), chance.choice(INTERVALS)
            limit = chance.choice(LIMITS)
        self.intervals[name] = max(promote, check)
        return CONFIG.format(
            queues=str(list(QUEUES)).replace("'", '"'),
            url=self._url(name),
            timeout=TIMEOUT_SECONDS,
            promote=promote,
            check=check,
            limit=limit,
        )

    # --- the end --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let all jobs come to their end."""
        self.crew.stop_producing.set()
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            if not self.crew.producing() and open_jobs(self.servers.client_of, QUEUES) == 0:
                break
            time.sleep(0.1)
        self.books += self.crew.end(30)
