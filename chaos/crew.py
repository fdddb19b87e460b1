"""Producers and workers, each a process with books of its own.

They talk to each server through pipelines over one connection. What a lost reply leaves open
is asked again until it is known, and noted as doubtful where it cannot be.
"""

import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple, TypeAlias

from chaos.history import lease_of, mark_key
from chaos.line import Act, Lines, Ports
from emqtimerd import wire
from emqtimerd.jobs import mint_id

RETRY_SECONDS = 0.05
IDLE_SECONDS = 0.02
"""How long somebody who has nothing to do waits before the next look."""

CLAIMS = 16
"""How many jobs a worker asks for at once from each queue."""
BATCH = 50
"""How many jobs a producer adds at once."""
FAR_MS = 3_600_000
"""Jobs that are due after the end: they are what is left."""

# Refusals: the job is somebody else's by now, or gone.
_REFUSED = frozenset({"EMQSTATE", "EMQSTALE"})


@dataclass(frozen=True)
class Habits:
    """What the crew does, and how often."""

    queues: tuple[str, ...]
    lease_ms: int = 2_000
    crashes: float = 0.01
    failures: float = 0.05
    delays: float = 0.04
    requeues: float = 0.04
    extensions: float = 0.04
    oversleeps: float = 0.002
    """The share of leases that their worker wants to end after they have run out."""
    max_attempts: int = 3
    scheduled: float = 0.5
    """The share of jobs that are scheduled and not enqueued."""
    longest_delay_ms: int = 3_000
    far: float = 0.001
    """The share of jobs that are scheduled for after the end."""
    jobs_per_second: float = 0.0
    """How many jobs each producer adds; as fast as it can with 0."""


@dataclass
class Books:
    """What one of the crew knows to have happened. A lease is named by its job and its token."""

    accepted: set[bytes] = field(default_factory=set)
    maybe: set[bytes] = field(default_factory=set)
    """Jobs whose adding was not answered. Adding one again under its id would be refused while it
    is there, and would run it twice if it was done and gone by then: so nobody does."""
    far: set[bytes] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)
    """Answers that nobody should get."""
    claimed: list[bytes] = field(default_factory=list)
    ended: dict[bytes, str] = field(default_factory=dict)
    """How a lease ended, as the server answered."""
    doubtful: dict[bytes, str] = field(default_factory=dict)
    """How it may have ended: a reply was lost, and the second try was refused."""
    late: set[bytes] = field(default_factory=set)
    """Refused at the first try: the lease had run out in the worker's hands."""
    abandoned: set[bytes] = field(default_factory=set)
    lost_claims: int = 0
    """Claims that were sent and not answered: each may have leased a job that nobody knows of."""


# --- producers ----------------------------------------------------------------------------------


class New(NamedTuple):
    """A job, and the command that adds it."""

    queue: str
    job_id: bytes
    command: bytes


def add(books: Books, waiting: list[New], new: New) -> Act:
    """Add one job; it comes back to `waiting` if the server certainly does not have it."""

    def read(replies: list[Any] | None) -> None:
        if replies is None:
            books.maybe.add(new.job_id)
        elif replies[0] == 1:
            books.accepted.add(new.job_id)
        elif replies[0] == 0:
            books.refused.append(f"{new.job_id.decode()} is a duplicate, and nobody added it")
        else:
            waiting.append(new)

    return Act(new.queue, new.command, 1, read, lambda: waiting.append(new))


def enqueue(queue: str, job_id: bytes, payload: bytes) -> New:
    """A job that is ready."""
    row, pending = wire.row_key(queue, job_id), wire.queue_key(queue, "pending")
    return New(queue, job_id, wire.pack("EMQ.ENQUEUE", 2, row, pending, job_id, payload))


def schedule(queue: str, job_id: bytes, payload: bytes, how: str, ms: int) -> New:
    """A job that is due later."""
    row, schedule = wire.row_key(queue, job_id), wire.queue_key(queue, "schedule")
    command = wire.pack("EMQ.SCHEDULE", 2, row, schedule, job_id, payload, how, ms)
    return New(queue, job_id, command)


def add_all(ports: Ports, jobs: Sequence[New], until: float) -> Books:
    """Add these jobs, however often it takes, until an instant at most."""
    books = Books()
    waiting = list(jobs)
    lines = Lines(ports)
    while waiting and time.monotonic() < until:
        batch, waiting = waiting[: 10 * BATCH], waiting[10 * BATCH :]
        acts = [add(books, waiting, new) for new in batch]
        if not lines.perform(acts):
            time.sleep(RETRY_SECONDS)
    lines.close()
    if waiting:
        books.refused.append(f"{len(waiting)} jobs could not be added in time")
    return books


def produce(
    ports: Ports, habits: Habits, seed: int, count: int, stop: Event, finish: Event, out: Connection
) -> None:
    """Add `count` jobs, or jobs until told to stop."""
    del finish
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    chance = random.Random(seed)
    books, lines = Books(), Lines(ports)
    waiting: list[New] = []
    minted = 0
    began = time.monotonic()
    while (waiting or (len(books.accepted) < count and not stop.is_set())) and _wanted():
        # What was not answered is made up for by others.
        room = min(BATCH, count - len(books.accepted)) - len(waiting)
        if habits.jobs_per_second:
            room = min(room, int((time.monotonic() - began) * habits.jobs_per_second) - minted)
        if stop.is_set():
            room = 0
        for _ in range(room):
            minted += 1
            queue, job_id = chance.choice(habits.queues), mint_id()
            if chance.random() < habits.far:
                books.far.add(job_id)
                new = schedule(queue, job_id, b"far", "in", FAR_MS)
            elif chance.random() < habits.scheduled:
                delay = chance.randrange(habits.longest_delay_ms)
                new = schedule(queue, job_id, b"later", "in", delay)
            else:
                new = enqueue(queue, job_id, b"now")
            waiting.append(new)
        batch, waiting = waiting, []
        if not batch:
            time.sleep(IDLE_SECONDS)
        elif not lines.perform([add(books, waiting, new) for new in batch]) or waiting:
            time.sleep(RETRY_SECONDS)
    lines.close()
    out.send(books)
    out.close()


# --- workers ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Held:
    """A lease that its worker wants to end, and how."""

    queue: str
    job_id: bytes
    token: bytes
    way: str
    delay_ms: int
    not_before: float = 0.0
    unknown: bool = False

    @property
    def lease(self) -> bytes:
        return lease_of(self.job_id, self.token)

    def act(self, worker: "Worker") -> Act:
        """The commands that end it."""
        key = partial(wire.queue_key, self.queue)
        row, base = wire.row_key(self.queue, self.job_id), wire.base(self.queue)
        proof = (self.job_id, self.token)
        read, replies = partial(worker.read_end, self), 1
        match self.way:
            case "failed":
                keys = (key("active"), key("schedule"), key("dead"), row)
                most = worker.habits.max_attempts
                tail = (*proof, self.delay_ms, most, b"no luck", base)
                commands = wire.pack("EMQ.FAIL", 4, *keys, *tail)
            case "delayed":
                keys3 = (key("active"), key("schedule"), row)
                commands = wire.pack("EMQ.DELAY", 3, *keys3, *proof, self.delay_ms)
            case "requeued":
                requeue = wire.pack("EMQ.REQUEUE", 3, key("active"), key("pending"), row, *proof)
                mark = wire.pack("SET", mark_key(self.queue), self.job_id)
                commands = wire.MULTI + requeue + mark + wire.EXEC
                read, replies = partial(worker.read_requeue, self), 4
            case _:
                commands = wire.pack("EMQ.COMPLETE", 2, key("active"), row, *proof, base)
        if self.way == "extended":
            lease = worker.habits.lease_ms
            commands = wire.pack("EMQ.EXTEND", 2, key("active"), row, *proof, lease) + commands
            replies = 2
        return Act(self.queue, commands, replies, read, partial(worker.to_end.append, self))


class Worker:
    """Claims jobs, and ends them in all the ways there are."""

    def __init__(self, habits: Habits, seed: int) -> None:
        self.habits = habits
        self.books = Books()
        self.to_end: list[_Held] = []
        self.claimed = 0
        self._chance = random.Random(seed)

    def claim(self, queue: str) -> Act:
        """Ask for one job."""
        key = partial(wire.queue_key, queue)
        keys = (key("pending"), key("active"), wire.base(queue))
        command = wire.pack("EMQ.CLAIM", 3, *keys, self.habits.lease_ms)
        return Act(queue, command, 1, partial(self._read_claim, queue))

    def _read_claim(self, queue: str, replies: list[Any] | None) -> None:
        if replies is None:
            self.books.lost_claims += 1
            return
        match replies[0]:
            case [bytes() as job_id, bytes(), (bytes() | int()) as attempts]:
                token = attempts if isinstance(attempts, bytes) else b"%d" % attempts
                self.claimed += 1
                self.books.claimed.append(lease_of(job_id, token))
                self._decide(queue, job_id, token)
            case [] | wire.ReplyError():
                pass
            case odd:
                self.books.refused.append(f"EMQ.CLAIM was answered with {wire.outline(odd)}")

    def _decide(self, queue: str, job_id: bytes, token: bytes) -> None:
        habits = self.habits
        ways = {
            "abandoned": habits.crashes,
            "failed": habits.failures,
            "delayed": habits.delays,
            "requeued": habits.requeues,
            "extended": habits.extensions,
            "overslept": habits.oversleeps,
        }
        ways["completed"] = 1 - sum(ways.values())
        (way,) = self._chance.choices(list(ways), list(ways.values()))
        if way == "abandoned":
            self.books.abandoned.add(lease_of(job_id, token))
            return
        held = _Held(queue, job_id, token, way, self._chance.randrange(500))
        if way == "overslept":
            held.way = "completed"
            held.not_before = (
                time.monotonic() + self._chance.uniform(0.5, 2) * habits.lease_ms / 1000
            )
        self.to_end.append(held)

    def read_end(self, held: _Held, replies: list[Any] | None) -> None:
        """Note how a lease ended, or that it is to be tried again."""
        reply = replies[-1] if replies else None
        code = reply.code if isinstance(reply, wire.ReplyError) else ""
        gone = -1 if held.way == "delayed" else 0
        # An extended lease is completed like any other.
        way = "completed" if held.way == "extended" else held.way
        if replies is None or (code and code not in _REFUSED):
            held.unknown |= replies is None
            self.to_end.append(held)
        elif code or reply == gone:
            if held.unknown:
                self.books.doubtful[held.lease] = way
            else:
                self.books.late.add(held.lease)
        elif reply == b"dead":
            self.books.ended[held.lease] = "buried"
        elif reply in (1, b"scheduled"):
            self.books.ended[held.lease] = way
        else:
            self.books.refused.append(f"{held.way} was answered with {wire.outline(reply)}")

    def read_requeue(self, held: _Held, replies: list[Any] | None) -> None:
        """Read a requeue out of its transaction."""
        if replies is None:
            self.read_end(held, None)
            return
        _, queued, _, executed = replies
        # Refused as a whole (the verb is unknown for a while): nothing happened.
        reply = executed[0] if isinstance(executed, list) else executed or queued
        if isinstance(reply, wire.ReplyError) and reply.code in _REFUSED:
            self.read_end(held, [reply])
        elif reply == -1:
            self.read_end(held, [0])
        else:
            self.read_end(held, [reply])


def work(
    ports: Ports, habits: Habits, seed: int, count: int, stop: Event, finish: Event, out: Connection
) -> None:
    """Work until told to finish; then end what is still held, and no more."""
    del count, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker, lines = Worker(habits, seed), Lines(ports)
    while (worker.to_end or not finish.is_set()) and _wanted():
        now = time.monotonic()
        batch = [held for held in worker.to_end if held.not_before <= now]
        worker.to_end = [held for held in worker.to_end if held.not_before > now]
        acts = [held.act(worker) for held in batch]
        before = worker.claimed
        if not finish.is_set():
            acts += [worker.claim(queue) for queue in habits.queues for _ in range(CLAIMS)]
        if not lines.perform(acts):
            time.sleep(RETRY_SECONDS)
        elif worker.claimed == before:
            time.sleep(IDLE_SECONDS)
    lines.close()
    out.send(worker.books)
    out.close()


def _wanted() -> bool:
    """Whether the process that hired us is there; it may have been killed."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


# --- all of them --------------------------------------------------------------------------------

Job: TypeAlias = Callable[[Ports, Habits, int, int, Event, Event, Connection], None]


class Crew:
    """Producers and workers in processes of their own; a context manager."""

    def __init__(
        self,
        ports: Ports,
        habits: Habits,
        seed: int,
        *,
        producers: int,
        workers: int,
        jobs: int = 0,
    ) -> None:
        # Threads are about (proxies, monitors), and a forked child would inherit their locks.
        self._context = multiprocessing.get_context("spawn")
        self.stop_producing = self._context.Event()
        self.finish = self._context.Event()
        self._processes: list[tuple[BaseProcess, Connection]] = []
        self._producers = producers
        chance = random.Random(seed)
        for number in range(producers):
            # The first ones take the odd jobs; without a number of jobs, as many as come.
            share = jobs // producers + (number < jobs % producers) if jobs else 1 << 62
            self._hire(produce, ports, habits, chance.getrandbits(32), share)
        for _ in range(workers):
            self._hire(work, ports, habits, chance.getrandbits(32), 0)

    def _hire(self, job: Job, ports: Ports, habits: Habits, seed: int, count: int) -> None:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=job,
            args=(ports, habits, seed, count, self.stop_producing, self.finish, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        self._processes.append((process, ours))

    def producing(self) -> bool:
        """Whether a producer is still at work."""
        return any(not out.poll(0) for _, out in self._processes[: self._producers])

    def end(self, seconds: float) -> list[Books]:
        """Have all of them end, and return their books."""
        self.stop_producing.set()
        self.finish.set()
        deadline = time.monotonic() + seconds
        books = []
        for process, out in self._processes:
            with suppress(EOFError):
                if out.poll(max(deadline - time.monotonic(), 0)):
                    books.append(out.recv())
            process.join(1)
        return books

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for process, out in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
            out.close()
