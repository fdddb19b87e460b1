"""Two daemons, a crew at work, and a random hand that breaks what it can reach.

The seed decides what is broken, when after the step before, for how long, and what breaks beside
it; what the crew and the daemons are doing at that moment is theirs.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import redis

from chaos import history as histories
from chaos.audit import Evidence, Finding, audit, total_of
from chaos.crew import Books, Crew, Habits, add_all, schedule
from chaos.proxy import Proxy
from chaos.servers import Servers, WatchedPair, client_of, stop_all
from chaos.soak import kept_if_wrong, report, tell
from chaos.stage import Daemon, Watch, open_jobs, settled, snapshot
from emqtimerd import wire
from emqtimerd.devnode import jobcore_path
from emqtimerd.jobs import mint_id
from emqtimerd.node import BACKOFF_CAP_SECONDS
from emqtimerd.rounds import SLICE_SECONDS

QUEUES = ("orders", "emails", "images")
HABITS = Habits(QUEUES, lease_ms=2_500, crashes=0.03, far=0.005, jobs_per_second=150)
WORKERS = 3
DAEMONS = ("one", "two")
LINES = (*DAEMONS, "crew")
"""Who has a network of its own to the server."""

TIMEOUT_SECONDS = 2.0
"""`node.timeout`: shorter than the longest stop, so that outcomes do become unknown."""
INTERVALS = (0.2, 0.5, 1.0, 2.0)
LIMITS = (20, 100, 300)
LARGEST_LIMIT = max(LIMITS)
MACHINE_SECONDS = 2.0
"""What readiness may take longer on a machine of two cores that are busy."""

BACKLOG = 20_000
BACKLOG_EVERY_SECONDS = 60.0
"""How much time of the run there is for each backlog: the workers have to get through it."""
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


# --- the schedule -------------------------------------------------------------------------------

GROUPS = {
    "server": ("server-kill", "server-stop"),
    "pair": ("failover", "switch"),
    "daemon": ("daemon-stop",),
    "net": ("net-stall", "net-cut", "net-refuse", "net-swallow", "net-break"),
    "data": ("lane", "ghosts", "backlog", "module"),
    "reload": ("reload",),
    # Alone: its last moments are told from the history, which wants a server that answers.
    "kill": ("daemon-kill",),
}
BESIDE = {
    "data": ("server", "pair", "daemon", "net", "reload"),
    "server": ("daemon", "net", "reload"),
    "pair": ("daemon", "net", "reload"),
    "net": ("server", "pair", "daemon", "reload"),
    "daemon": ("server", "pair", "net"),
}
"""What may happen while something of this group is going on; it ends first."""
BESIDE_SHARE = 0.35
AT_ONCE = frozenset({"net-cut", "ghosts", "reload", "backlog"})
"""These have no end of their own."""


@dataclass(frozen=True)
class Step:
    """One fault: what, on whom, how long; and another one in the middle of it."""

    kind: str
    who: str
    pause_seconds: float
    hold_seconds: float
    luck: int
    beside: "Step | None" = None

    def __str__(self) -> str:
        on = f" {self.who}" if self.who else ""
        held = "" if self.kind in AT_ONCE else f" for {self.hold_seconds:.1f} s"
        return f"{self.kind}{on}{held}" + (f" and in it {self.beside}" if self.beside else "")


OTHER = {"alone": "pair", "sentinel": "server"}
"""What cannot happen to these servers: a server that is silent for long is replaced by sentinels,
and what it answered last is then lost."""


def plan(seed: int, backlogs: int, servers: str = "alone") -> Iterator[Step]:
    """What the hand will do: all kinds in a random order, then all again, and so on."""
    chance = random.Random(seed)
    groups = {name: kinds for name, kinds in GROUPS.items() if name != OTHER[servers]}
    lines = ("crew",) if servers == "sentinel" else (*LINES, "all")
    deck = [kind for kinds in groups.values() for kind in kinds]
    while True:
        chance.shuffle(deck)
        for kind in deck:
            step = _step(chance, kind, lines)
            group = next(name for name, kinds in groups.items() if kind in kinds)
            if group in BESIDE and chance.random() < BESIDE_SHARE:
                beside = [name for name in BESIDE[group] if name in groups]
                other = chance.choice(groups[chance.choice(beside)])
                step = replace(step, beside=_step(chance, other, lines))
            if kind == "backlog":
                backlogs -= 1
                if backlogs < 0:
                    continue
            yield step


def _step(chance: random.Random, kind: str, lines: Sequence[str]) -> Step:
    who = ""
    if kind.startswith("net"):
        who = chance.choice(lines)
    elif kind.startswith(("daemon", "reload")):
        who = chance.choice(DAEMONS)
    hold = 0.2 if kind in AT_ONCE else chance.uniform(0.3, 5.0)
    return Step(kind, who, chance.uniform(0.2, 2.0), hold, chance.getrandbits(32))


# --- the hand -----------------------------------------------------------------------------------


class Hand:
    """Does what the plan says, and notes when."""

    def __init__(self, servers: Servers, place: Path, stack: ExitStack, seed: int) -> None:
        self.servers = stack.enter_context(servers)
        # Sentinels name the server itself, so nothing stands between it and the daemons then.
        lines = ("crew",) if servers.name == "sentinel" else LINES
        port = servers.primary.port
        self.proxies = {name: stack.enter_context(Proxy(port)) for name in lines}
        servers.on_change = self.proxies["crew"].lead_to
        self.intervals: dict[str, float] = {}
        self.daemons: dict[str, Daemon] = {}
        for name in DAEMONS:
            self.daemons[name] = Daemon(name, self._config(name), place / name)
            stack.callback(self._end, self.daemons[name])
        self.watch = stack.enter_context(Watch(servers.position, self.daemons.values()))
        self.crew = stack.enter_context(
            Crew(self.proxies["crew"].port, HABITS, seed, producers=1, workers=WORKERS)
        )
        self.began = time.monotonic()
        self.books: list[Books] = []
        self.windows: list[tuple[int, int]] = []
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
        begin: Callable[[Step], Callable[[], None] | None] = getattr(self, f"_{name}")
        end = begin(step)
        try:
            yield
        finally:
            if end is not None:
                end()

    # --- one method for each kind: begins it, and returns what ends it --------------------------

    def _server_kill(self, _: Step) -> Callable[[], None]:
        node = self.servers.primary
        node.kill()

        def start() -> None:
            node.start()

        return start

    def _server_stop(self, _: Step) -> Callable[[], None]:
        process = self.servers.primary.pid
        signal_process(process, signal.SIGSTOP)
        return partial(signal_process, process, signal.SIGCONT)

    def _failover(self, _: Step) -> Callable[[], None]:
        return self.servers.fail_over(kill=True)

    def _switch(self, _: Step) -> Callable[[], None]:
        return self.servers.fail_over(kill=False)

    def _daemon_stop(self, step: Step) -> Callable[[], None]:
        daemon = self.daemons[step.who]
        daemon.signal(signal.SIGSTOP)
        return partial(daemon.signal, signal.SIGCONT)

    def _daemon_kill(self, step: Step) -> Callable[[], None]:
        daemon, proxy = self.daemons[step.who], self.proxies.get(step.who)
        # A round tells its numbers when it ends, so they may lack what it did since it began.
        start = self.watch.position_before(TIMEOUT_SECONDS + SLICE_SECONDS + Watch.INTERVAL_SECONDS)
        daemon.kill()
        deadline = time.monotonic() + 5
        while proxy and proxy.connections and time.monotonic() < deadline:
            time.sleep(0.001)
        for _ in range(2):
            # What was still on its way has reached the server, and the file, by then.
            self.servers.client.ping()
        self.windows.append((start, self.servers.position()))
        return lambda: daemon.restart(self._config(step.who))

    def _reload(self, step: Step) -> None:
        daemon = self.daemons[step.who]
        if not daemon.reload(self._config(step.who, random.Random(step.luck))):
            self.problems.append(f"{daemon.name} did not reload: {self.done[-1]}")

    def _net(self, step: Step, fault: Callable[[Proxy], None]) -> Callable[[], None]:
        proxies = [proxy for name, proxy in self.proxies.items() if step.who in (name, "all")]
        for proxy in proxies:
            fault(proxy)

        def clear() -> None:
            for proxy in proxies:
                proxy.clear()

        return clear

    def _net_stall(self, step: Step) -> Callable[[], None]:
        return self._net(step, Proxy.stall)

    def _net_cut(self, step: Step) -> Callable[[], None]:
        return self._net(step, Proxy.cut)

    def _net_refuse(self, step: Step) -> Callable[[], None]:
        return self._net(step, Proxy.refuse)

    def _net_swallow(self, step: Step) -> Callable[[], None]:
        return self._net(step, Proxy.swallow)

    def _net_break(self, step: Step) -> Callable[[], None]:
        # Few bytes: in the middle of a small reply. Many: somewhere in a drain.
        replies = random.Random(step.luck).choice((1, 7, 40, 333, 2_000))
        return self._net(step, lambda proxy: proxy.break_off(replies))

    def _lane(self, step: Step) -> Callable[[], None]:
        chance = random.Random(step.luck)
        queue = chance.choice(QUEUES)
        place, state = chance.choice((("schedule", "scheduled"), ("active", "active")))
        job_id = b"JOBLANE%d" % step.luck
        due_ms = self.servers.client.time()[0] * 1_000 + chance.randrange(-5_000, 1_000)
        pipeline = self.servers.client.pipeline(transaction=True)
        pipeline.hset(wire.row_key(queue, job_id), mapping={"state": state, "group": "g"})
        pipeline.zadd(wire.queue_key(queue, place), {job_id: due_ms})
        pipeline.execute()

        def remove() -> None:
            pipeline = self.servers.client.pipeline(transaction=True)
            pipeline.zrem(wire.queue_key(queue, place), job_id)
            pipeline.delete(wire.row_key(queue, job_id))
            pipeline.execute()

        return remove

    def _ghosts(self, step: Step) -> None:
        chance = random.Random(step.luck)
        for place in ("pending", "active", "schedule"):
            ids = {b"JOBGHOST%d-%d" % (step.luck, n): 0 for n in range(GHOSTS)}
            self.servers.client.zadd(wire.queue_key(chance.choice(QUEUES), place), ids)

    def _backlog(self, step: Step) -> None:
        queue = random.Random(step.luck).choice(QUEUES)
        due_ms = self.servers.client.time()[0] * 1_000 + 2_000
        jobs = [(job_id := mint_id(), _due(queue, job_id, due_ms)) for _ in range(BACKLOG)]
        self.books.append(add_all(self.servers.primary.port, jobs, time.monotonic() + 30))

    def _module(self, _: Step) -> Callable[[], None]:
        self.servers.client.execute_command("MODULE", "UNLOAD", "emq")

        def load() -> None:
            for node in self.servers.nodes:
                # One that was restarted meanwhile has it.
                with contextlib.suppress(redis.ResponseError), client_of(node) as client:
                    client.execute_command("MODULE", "LOAD", str(jobcore_path()))

        return load

    def _config(self, name: str, chance: random.Random | None = None) -> str:
        """The file of a daemon: as at first, or with other intervals and limits."""
        promote, check, limit = INTERVALS[1], INTERVALS[2], 100
        if chance:
            promote, check = chance.choice(INTERVALS), chance.choice(INTERVALS)
            limit = chance.choice(LIMITS)
        self.intervals[name] = max(promote, check)
        return CONFIG.format(
            queues=str(list(QUEUES)).replace("'", '"'),
            url=self.servers.url(proxy.port if (proxy := self.proxies.get(name)) else 0),
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
            if not self.crew.producing() and open_jobs(self.servers.client, QUEUES) == 0:
                break
            time.sleep(0.1)
        self.books += self.crew.end(30)


def _due(queue: str, job_id: bytes, due_ms: int) -> bytes:
    return schedule(queue, job_id, b"backlog", "at", due_ms)


def signal_process(process: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


# --- the run ------------------------------------------------------------------------------------


def storm(seconds: float, seed: int, servers: str) -> None:
    """Run it; if a number does not add up, raise Wrong and print how to see it again."""
    kind = {"alone": Servers, "sentinel": WatchedPair}[servers]
    tell(f"storm: {seconds:g} s of faults, servers {servers}, seed {seed}")
    with kept_if_wrong("storm") as place, ExitStack() as stack:
        hand = Hand(kind(place), place, stack, seed)
        try:
            hand.await_ready()
            for step in plan(seed, max(int(seconds / BACKLOG_EVERY_SECONDS), 1), servers):
                if time.monotonic() - hand.began > seconds:
                    break
                hand.play(step)
            hand.say("nothing more is broken; what is left comes to its end")
            hand.settle()
            report(_findings(hand))
        except Exception as error:
            tell(f"\nseed {seed}; the first discrepancy: {type(error).__name__}: {error}")
            tell("the schedule was:\n" + "\n".join(hand.done))
            tell(f"again: make chaos SEED={seed} SECONDS={seconds:g} SERVERS={servers}")
            raise


def _findings(hand: Hand) -> Sequence[Finding]:
    seen = snapshot(hand.servers.client, QUEUES)
    counted = settled(hand.daemons.values())
    watch = hand.watch
    blocked = [
        f"{daemon.name}: {key}"
        for daemon in hand.daemons.values()
        for key, value in daemon.metrics().items()
        if key[0] == "queue_blocked" and value
    ]
    watch.stop()
    codes = [daemon.end() for daemon in hand.daemons.values()]
    stop_all(hand.servers)
    marks = [mark for window in hand.windows for mark in window]
    facts = histories.read(hand.servers.parts(), marks)
    logged: Counter[bytes] = Counter()
    noise: list[str] = []
    for daemon in hand.daemons.values():
        noise += daemon.noise
        for line in daemon.records("lease crossed a server restart"):
            logged[str(line["job_id"]).encode()] += 1
    evidence = Evidence(
        QUEUES, facts, hand.books, seen, counted, logged, LARGEST_LIMIT, hand.windows
    )
    unknown = total_of(counted, "sweeps_total", "unknown")
    moved = sum(
        facts.between(*window, queue, *histories.SWEPT)
        for window in hand.windows
        for queue in QUEUES
    )
    crew = len(hand.crew) - len(hand.books) + hand.kinds["backlog"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(hand.kinds.items()))
    tell(f"\n{kinds}")
    tell(
        f"{len(facts.born)} jobs, {len(facts.leases)} leases; {unknown} sweeps of unknown outcome; "
        f"{moved} moves in the last moments of {len(hand.windows)} killed daemons"
    )
    return [
        Finding(not hand.problems, "each reload was taken over", "; ".join(hand.problems)),
        Finding(
            not watch.failures,
            f"alive whenever asked ({watch.asked} times)",
            "; ".join(watch.failures[:3]),
        ),
        Finding(
            not watch.unready,
            f"ready again after {hand.longest_unready:.1f} s at most, within its interval + "
            f"{BACKOFF_CAP_SECONDS:g} s + {MACHINE_SECONDS:g} s for a busy machine; "
            f"not ready {watch.not_ready} times of {watch.asked}",
            "; ".join(watch.unready[:3]),
        ),
        Finding(not crew, f"all of the crew came back ({crew} did not)"),
        *audit(evidence),
        Finding(not blocked, "no queue is blocked in the end", "; ".join(blocked)),
        Finding(not noise, "the daemons wrote log lines and nothing else", "; ".join(noise[:3])),
        Finding(not any(codes), f"the daemons ended with exit codes {codes}"),
    ]
