"""Half a minute of real work: a node, producers and workers, the daemon, and a server killed.

Everything is real: the server is an embedded Valkey with the job core, the daemon is a process of
its own, and what the table and the summary say is read from its metrics and from the server.
"""

import http.client
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import redis
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from emqtimerd import wire
from emqtimerd.devnode import DevNode
from emqtimerd.jobs import Job, Jobs, JobsError, OutcomeUnknown, Refused, mint_id

ORDERS, EMAILS = "orders", "emails"
QUEUES = (ORDERS, EMAILS)

# The story, in seconds from the first job: each act can be seen before the next one begins.
POISON_AT = 4.0
KILL_AT = 9.0
DOWN_SECONDS = 1.5
CURE_AT = 17.0
PRODUCE_UNTIL = 20.0
SETTLE_SECONDS = 20.0
"""How long after the last job all of them may take to come to an end; it takes about five."""

JOBS_PER_SECOND = 60
"""Enough for sums that tell something, and far less than the workers can do."""
EMAILS_SHARE, AT_ONCE_SHARE = 0.2, 0.3
"""The share of jobs that are emails, and of those that are ready at once and not scheduled."""
LONGEST_DELAY_MS = 3_000
"""How far ahead jobs are scheduled at most: beyond an interval, so that wakes are at work, too."""
WORKERS = 3
REST_SECONDS = 0.01
"""How long a worker rests before it looks again, on average: a job is claimed while it is news."""
RETRY_SECONDS = 0.05
"""How soon a call is tried again while the server is down: it is down for thirty such moments."""
CRASHES, FAILURES = 0.02, 0.05
"""The share of jobs whose worker vanishes, and of those whose handler fails."""
MAX_ATTEMPTS, FAILED_DELAY_MS = 3, 300
"""How many tries a job has, and how long a failed one waits for the next: a moment on the table."""
LEASE_MS = 2_000
"""Far longer than any work here, so that only what was lost runs out; and soon enough to see."""
POISON = b"JOBLANE"
SWEEP_LIMIT = 100
"""The default of `promote.limit`: what a sweep of unknown outcome may have moved at most."""
HELD, HELD_LEASE_MS = 12, 4_000
"""Leases that a worker holds when the server dies, and never comes back to; they outlast the
outage, so that it is the restart that they cross."""

TABLES_PER_SECOND, LINE_SECONDS = 4, 2.0
"""How often the table is drawn anew on a terminal, and how often there is a line elsewhere: as fast
as people read, and no flood in a file."""

CONFIG = """\
queues = ["orders", "emails"]
[node]
url = "{url}"
[promote]
interval = "1s"
[stalled_check]
interval = "1s"
max_stalled = 2      # a job survives one stall; with EchoMQ's default, 1, it survives none
restart_grace = "2s"
[http]
listen = "127.0.0.1:0"
[log]
format = "json"
"""


# --- the people around the daemon ---------------------------------------------------------------


@dataclass
class Facts:
    """What producers and workers know to have happened; the daemon is held against it.

    A lease is named by its job's id and its token.
    """

    accepted: set[bytes] = field(default_factory=set)
    doubtful: dict[bytes, bool] = field(default_factory=dict)
    """Jobs of which nobody knows yet whether they were added, and whether to a schedule."""
    scheduled: int = 0
    """How many times a job was put into a schedule, at first or for another try."""
    claimed: set[tuple[bytes, bytes]] = field(default_factory=set)
    settled: set[tuple[bytes, bytes]] = field(default_factory=set)
    held_over: set[tuple[bytes, bytes]] = field(default_factory=set)
    """Leases of the server process that was killed."""

    def end_doubts(self, has_row: Callable[[bytes], bool]) -> None:
        """Count the doubtful jobs that were added: a worker has seen them, or they are there."""
        seen = {job_id for job_id, _ in self.claimed}
        for job_id, scheduled in self.doubtful.items():
            if job_id in seen or has_row(job_id):
                self.accepted.add(job_id)
                self.scheduled += scheduled
        self.doubtful.clear()

    @property
    def crossed(self) -> int:
        """How many leases must have run out across the restart."""
        return len(self.held_over - self.settled)

    @property
    def stalled(self) -> int:
        """How many must have run out because their worker stalled."""
        return len(self.claimed - self.settled - self.held_over)


class Cast:
    """One producer and some workers, each a thread; a thread's work is its own until the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.facts = Facts()
        self.lock = threading.Lock()
        self.producing = threading.Event()
        self.working = threading.Event()
        self._threads = [
            threading.Thread(target=self._produce, name="demo-producer", daemon=True),
            *(
                threading.Thread(target=self._work, args=(n,), name=f"demo-worker-{n}", daemon=True)
                for n in range(WORKERS)
            ),
        ]

    def start(self) -> None:
        """Begin."""
        self.producing.set()
        self.working.set()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Have all of them end."""
        self.producing.clear()
        self.working.clear()
        for thread in self._threads:
            thread.join()

    def hold(self, count: int) -> None:
        """Lease some jobs as a worker would that is gone a moment later."""
        with Jobs(self.url, ORDERS) as jobs:
            for _ in range(count):
                self._accept(jobs.enqueue(b"held"))
                if job := jobs.claim(HELD_LEASE_MS):
                    self._note_claim(job)

    def _accept(self, job_id: bytes, *, scheduled: bool = False) -> None:
        with self.lock:
            self.facts.accepted.add(job_id)
            self.facts.scheduled += scheduled

    def _note_claim(self, job: Job) -> None:
        with self.lock:
            self.facts.claimed.add((job.id, job.token))

    def _note_settled(self, job: Job, *, scheduled: bool = False) -> None:
        with self.lock:
            self.facts.settled.add((job.id, job.token))
            self.facts.scheduled += scheduled

    def _produce(self) -> None:
        chance = random.Random(1)  # the same story each time
        with Jobs(self.url, ORDERS) as orders, Jobs(self.url, EMAILS) as emails:
            while self.producing.is_set():
                jobs = emails if chance.random() < EMAILS_SHARE else orders
                job_id, delay_ms = mint_id(), chance.randrange(LONGEST_DELAY_MS)
                if chance.random() < AT_ONCE_SHARE:
                    self._add(job_id, partial(jobs.enqueue, b"now", job_id))
                else:
                    later = partial(jobs.schedule, b"later", in_ms=delay_ms, job_id=job_id)
                    self._add(job_id, later, scheduled=True)
                time.sleep(chance.expovariate(JOBS_PER_SECOND))

    def _add(self, job_id: bytes, add: Callable[[], object], *, scheduled: bool = False) -> None:
        """Add a job, as soon as the server is there.

        A lost reply is no reason to add it again: it may have been completed meanwhile, and would
        then run, and count, twice.
        """
        while self.working.is_set():
            try:
                add()
            except OutcomeUnknown:
                with self.lock:
                    self.facts.doubtful[job_id] = scheduled
            except JobsError:
                time.sleep(RETRY_SECONDS)
                continue
            else:
                self._accept(job_id, scheduled=scheduled)
            return

    def _work(self, number: int) -> None:
        chance = random.Random(number)
        with Jobs(self.url, ORDERS) as orders, Jobs(self.url, EMAILS) as emails:
            while self.working.is_set():
                for jobs in (orders, emails):
                    with suppress(JobsError):
                        if job := jobs.claim(LEASE_MS):
                            self._note_claim(job)
                            self._handle(jobs, job, chance.random())
                time.sleep(chance.uniform(0, 2 * REST_SECONDS))

    def _handle(self, jobs: Jobs, job: Job, luck: float) -> None:
        if luck < CRASHES:
            return
        if luck > CRASHES + FAILURES:
            if self._insist(partial(jobs.complete, job)):
                self._note_settled(job)
            return
        limits = {"delay_ms": FAILED_DELAY_MS, "max_attempts": MAX_ATTEMPTS}
        fail = partial(jobs.fail, job, "no luck", **limits)
        if verdict := self._insist(fail):
            self._note_settled(job, scheduled=verdict != "dead")

    def _insist(self, call: Callable[[], object]) -> object:
        """Repeat a call until its outcome is known, and return its result; False if it is refused.

        After a lost reply a refusal says that the first try had worked: True.
        """
        unknown = False
        while self.working.is_set():
            try:
                return call() or True
            except OutcomeUnknown:
                unknown = True
            except Refused:
                return unknown
            except JobsError:
                time.sleep(RETRY_SECONDS)
        return False


# --- the daemon, from outside -------------------------------------------------------------------


class DaemonProcess:
    """`emqtimerd run` as a process; its log lines and its metrics."""

    def __init__(
        self, config: str, directory: Path, environ: Mapping[str, str] | None = None
    ) -> None:
        file = directory / "emqtimerd.toml"
        file.write_text(config)
        command = [sys.executable, "-m", "emqtimerd", "run", "--config", str(file)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)
        self.lines: list[dict[str, object]] = []
        self._address = ""
        self._started = threading.Event()
        threading.Thread(target=self._read, name="demo-log", daemon=True).start()
        if not self._started.wait(15):
            self.process.kill()
            raise RuntimeError("the daemon did not start")

    def _read(self) -> None:
        errors: IO[str] | None = self.process.stderr
        for line in errors or ():
            record = json.loads(line)
            self.lines.append(record)
            if record["event"] == "started":
                self._address = record["http"]
                self._started.set()

    @property
    def page(self) -> str:
        """Where its status page is."""
        return f"http://{self._address}/"

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Scrape it: (name, label values…) to value."""
        connection = http.client.HTTPConnection(self._address, timeout=10)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return {
            (sample.name.removeprefix("emqtimerd_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def stop(self) -> int:
        """Stop it as a service manager would."""
        self.process.terminate()
        return self.process.wait(20)


# --- the story ----------------------------------------------------------------------------------


def run_demo(output: IO[str], *, live: bool) -> int:
    """Play the story and print it; return 0 if every number adds up."""
    console = Console(file=output, highlight=False, soft_wrap=not live)
    with tempfile.TemporaryDirectory(prefix="emqtimerd-demo-") as directory:
        place = Path(directory)
        # What was answered is to outlive the kill: with `everysec` a write waits for up to two
        # seconds while the last second's fsync still runs.
        with DevNode(place / "node", extra_args=("--appendfsync", "no")) as node:
            daemon = DaemonProcess(CONFIG.format(url=node.url), place)
            try:
                console.print(
                    f"EMQ node  {node.url} (Valkey with the job core; its data has an AOF)\n"
                    f"daemon    {daemon.page} (a process of its own; this is its status page)"
                )
                return Story(node, daemon, console).play(live=live)
            finally:
                daemon.process.kill()
                daemon.process.wait()


class Story:
    """What happens when, and what is shown of it."""

    def __init__(self, node: DevNode, daemon: DaemonProcess, console: Console) -> None:
        self._node = node
        self._daemon = daemon
        self._console = console
        self._cast = Cast(node.url)
        self._client: Any = redis.Redis.from_url(node.url, protocol=2)
        self._sizes: dict[tuple[str, str], int] = {}
        self._begun = time.monotonic()

    def play(self, *, live: bool) -> int:
        """Play it from the first job to the summary."""
        acts = [
            (POISON_AT, self._poison),
            (KILL_AT, self._kill),
            (KILL_AT + DOWN_SECONDS, self._revive),
            (CURE_AT, self._cure),
            (PRODUCE_UNTIL, self._end_production),
        ]
        self._begun = time.monotonic()
        self._cast.start()
        try:
            with self._screen(live=live) as show:
                while acts or not self._is_settled():
                    if acts and self._now() >= acts[0][0]:
                        acts.pop(0)[1]()
                    elif not acts and self._now() > PRODUCE_UNTIL + SETTLE_SECONDS:
                        break
                    show()
                    time.sleep(0.25)  # the pace of the table
                show()
        finally:
            # Also after Ctrl-C: they insist on their calls, and the server may be gone.
            self._cast.stop()
        return self._sum_up()

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _say(self, text: str) -> None:
        self._console.print(f"{self._now():5.1f} s  {text}")

    def _poison(self) -> None:
        self._client.hset(
            wire.row_key(EMAILS, POISON), mapping={"state": "scheduled", "group": "g"}
        )
        self._client.zadd(wire.queue_key(EMAILS, "schedule"), {POISON: 0})
        self._say(f"a lane row, {POISON.decode()}, gets into {EMAILS}: every promotion refuses it")

    def _kill(self) -> None:
        self._cast.hold(HELD)
        self._run_id = self._client.info("server")["run_id"]
        self._node.kill()
        self._say(f"the server is killed (SIGKILL) while {HELD} leases and more are held")

    def _revive(self) -> None:
        self._node.start()
        for queue in QUEUES:
            for job_id in self._client.zrange(wire.queue_key(queue, "active"), 0, -1):
                token, epoch = self._client.hmget(
                    wire.row_key(queue, job_id), "attempts", "lease_epoch"
                )
                if epoch == self._run_id.encode():
                    self._cast.facts.held_over.add((job_id, token))
        self._say(
            f"the server is back with another run_id; {len(self._cast.facts.held_over)} leases "
            "carry the old one"
        )

    def _cure(self) -> None:
        self._client.zrem(wire.queue_key(EMAILS, "schedule"), POISON)
        self._client.delete(wire.row_key(EMAILS, POISON))
        self._say(f"somebody removes the lane row: {EMAILS} catches up")

    def _end_production(self) -> None:
        self._cast.producing.clear()
        self._say("no more jobs; what is left comes to its end")

    # --- what is shown --------------------------------------------------------------------------

    @contextmanager
    def _screen(self, *, live: bool) -> Iterator[Callable[[], None]]:
        """A table that renews itself on a terminal, a line now and then elsewhere."""
        if live:
            with Live(
                self._table(), console=self._console, refresh_per_second=TABLES_PER_SECOND
            ) as screen:
                yield lambda: screen.update(self._table())
            return
        next_line = 0.0

        def show() -> None:
            nonlocal next_line
            if self._now() >= next_line:
                next_line = self._now() + LINE_SECONDS
                self._say("   ".join(self._line(queue) for queue in QUEUES))

        yield show

    def _line(self, queue: str) -> str:
        row = self._row(queue)
        sizes = " ".join(f"{state} {row[state]}" for state in wire.SETS)
        return f"{queue}: {sizes}, promoted {row['promoted']}, recovered {row['recovered']}" + (
            ", BLOCKED" if row["blocked"] else ""
        )

    def _table(self) -> Table:
        table = Table(box=SIMPLE, padding=0)
        for index, column in enumerate(("queue", *self._row(ORDERS))):
            table.add_column(column, justify="right" if index else "left")
        for queue in QUEUES:
            table.add_row(queue, *(str(value) for value in self._row(queue).values()))
        return table

    def _row(self, queue: str) -> dict[str, object]:
        """Sizes from the server, and what the daemon counted."""
        with suppress(redis.RedisError):
            for state in wire.SETS:
                self._sizes[queue, state] = self._client.zcard(wire.queue_key(queue, state))
        counted = self._daemon.metrics()
        return {
            **{state: self._sizes.get((queue, state), 0) for state in wire.SETS},
            "promoted": round(counted["jobs_promoted_total", queue]),
            "recovered": round(counted["jobs_recovered_total", queue]),
            "stall": round(counted["lease_expiries_total", queue, "stall"]),
            "restart": round(counted["lease_expiries_total", queue, "restart"]),
            "blocked": "yes" if counted["queue_blocked", queue, "promote"] else "",
        }

    # --- whether it adds up ---------------------------------------------------------------------

    def _is_settled(self) -> bool:
        with suppress(redis.RedisError):
            open_sets = ("pending", "active", "schedule")
            return not any(
                self._client.zcard(wire.queue_key(queue, state))
                for queue in QUEUES
                for state in open_sets
            )
        return False

    def _sum_up(self) -> int:
        events = [record["event"] for record in self._daemon.lines]
        counted = self._daemon.metrics()
        checks = list(self._checks(counted))
        exit_code = self._daemon.stop()
        once = events.count("sweep blocked") == events.count("sweep works again") == 1
        checks += [
            (f"{EMAILS} was blocked, the log said so once, and it works again", once),
            ("the daemon saw the restart", "node restarted" in events),
            (f"and ended with exit code {exit_code}", exit_code == 0),
        ]
        self._console.print()
        for sentence, holds in checks:
            self._console.print(f"{'ok ' if holds else 'NOT'}  {sentence}", soft_wrap=True)
        self._console.print(NEXT.format(emqtimerd=_own_command()), soft_wrap=True)
        return 0 if all(holds for _, holds in checks) else 1

    def _checks(self, counted: Mapping[tuple[str, ...], float]) -> Iterator[tuple[str, bool]]:
        """Hold what the daemon counted against what the server and the workers say."""

        def total(name: str, *labels: str) -> int:
            """The sum over the queues of a counter whose labels begin with the queue."""
            return round(sum(counted[name, queue, *labels] for queue in QUEUES))

        def size(state: str) -> int:
            return sum(self._client.zcard(wire.queue_key(queue, state)) for queue in QUEUES)

        keys = [wire.queue_key(queue, "metrics:completed") for queue in QUEUES]
        completed = sum(int(self._client.hget(key, "count") or 0) for key in keys)
        left, dead = size("pending") + size("active") + size("schedule"), size("dead")
        facts = self._cast.facts
        facts.end_doubts(
            lambda job_id: any(self._client.exists(wire.row_key(q, job_id)) for q in QUEUES)
        )
        jobs = len(facts.accepted)
        yield (
            f"{jobs} jobs in = {completed} completed + {dead} dead + {left} left",
            jobs == completed + dead + left,
        )
        promoted, due = total("jobs_promoted_total"), facts.scheduled - size("schedule")
        unknown = total("sweeps_total", "promote", "unknown")
        doubt = f" ({unknown} sweeps of unknown outcome)" if unknown else ""
        yield (
            f"{promoted} promoted = {due} that were put into a schedule and left it{doubt}",
            0 <= due - promoted <= unknown * SWEEP_LIMIT,
        )
        stall, restart = (total("lease_expiries_total", cause) for cause in ("stall", "restart"))
        yield (
            f"{restart} expiries crossed the restart = {facts.crossed} leases left from before it",
            restart == facts.crossed,
        )
        yield (
            f"{stall} expiries were stalls = {facts.stalled} other leases that no worker ended",
            stall == facts.stalled,
        )
        recovered, buried = total("jobs_recovered_total"), total("jobs_dead_lettered_total")
        yield (
            f"{recovered} recovered + {buried} dead-lettered = all {stall + restart} expiries",
            recovered + buried == stall + restart,
        )


NEXT = """
Next: `{emqtimerd} devnode` in one terminal, `{emqtimerd} run --queue orders` in another;
      `{emqtimerd} once --queue orders --json` sweeps ad hoc and says what it did."""


def _own_command() -> str:
    """How to type this command: by its name where the shell finds it, else by its path."""
    return "emqtimerd" if shutil.which("emqtimerd") else shlex.quote(sys.argv[0])
