"""The fault matrix: each fault of a server, in each topology, injected, held and cleared.

One daemon a topology lives through all of them. While a fault lasts the daemon is alive and not
ready, counts it under its documented code, tells it in one line and believes nothing that was not
answered; once it is cleared, work goes on within an interval and the longest pause. Scripted
servers give what a real one does not give on demand; real ones are killed, stopped, filled, locked
and taken apart.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import connect, wait_until
from daemon_process import DaemonProcess, DaemonThread, Line
from server_sets import MASTER, Cluster, Sentinels, Servers, ask, lease, pending, schedule
from stub import (
    HANG_UP,
    NIL,
    SILENCE,
    Answer,
    Spoiler,
    Stub,
    array,
    bulk,
    cut,
    dripped,
    error,
    ids,
    integer,
    late,
    simple,
)

from emqtimerd import ledger as ledger_module
from emqtimerd import node as node_module
from emqtimerd import rounds as rounds_module
from emqtimerd import wire
from emqtimerd.sweeper import VERBS, Verb
from emqtimerd.topology import TEND_SECONDS

COMMAND: dict[Verb, str] = {"promote": "EMQ.PROMOTE", "stalled_check": "EMQ.STALLED.CHECK"}
SOURCE: dict[Verb, str] = {"promote": "schedule", "stalled_check": "active"}
COUNTER: dict[Verb, str] = {"promote": "jobs_promoted", "stalled_check": "jobs_recovered"}

INTERVAL_SECONDS = 0.05
PAUSE_SECONDS = 0.2
"""The longest pause of a node or a queue, in place of 5 s."""
TIMEOUT_SECONDS = 1.0
"""Of a node: twenty intervals, so that a machine that stands still for a moment is not taken for a
fault."""
SLACK_SECONDS = 2.0
"""What a busy machine may add to a recovery; without the short pause it would take 5 s."""

QUEUE = "labels"
"""Its slot is beside the brand's: in the same half of all, and in the same third."""

WORK = 3
"""How many jobs wait for each verb while a fault lasts."""

TOPOLOGIES = ("standalone", "sentinel", "cluster")

OF_TESTS = ("stub", "emqtimerd-devnode")
"""How the names begin of the threads that serve a daemon, and are none of its own."""


def await_(predicate: Callable[[], object], description: str, seconds: float = 10.0) -> None:
    """Wait as `wait_until` does, and look less often: a look is an answer of the web server."""
    deadline = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.2f} s: {description}")
        time.sleep(0.05)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Fails if a thread or a descriptor is there afterwards that was not there before."""

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def threads() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if not t.name.startswith(OF_TESTS)}

    before, files = threads(), descriptors()
    yield
    await_(lambda: threads() <= before, f"no more threads than {before}")
    await_(lambda: descriptors() <= files, f"no more descriptors than {files}")


# --- a daemon in a topology ---------------------------------------------------------------------


class Scene:
    """Servers, and a daemon that works there with short pauses; a context manager."""

    def __init__(self, topology: str, url: str, node: str) -> None:
        self.topology, self.url, self.node = topology, url, node
        self.daemon: DaemonThread

    @contextmanager
    def open(self) -> Iterator[None]:
        """Start the daemon, and see that all of it is gone in the end."""
        patience = f"{TIMEOUT_SECONDS * 1000:.0f}ms"
        interval = f"{INTERVAL_SECONDS * 1000:.0f}ms"
        with nothing_left(), pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            patch.setattr(node_module, "BACKOFF_CAP_SECONDS", PAUSE_SECONDS)
            patch.setattr(rounds_module, "QUEUE_BACKOFF_CAP_SECONDS", PAUSE_SECONDS)
            patch.setattr(rounds_module, "RETRY_SECONDS", PAUSE_SECONDS)
            patch.setattr(ledger_module, "ROUND_PATIENCE_SECONDS", PAUSE_SECONDS)
            self.daemon = stack.enter_context(
                DaemonThread(
                    node={"url": self.url, "timeout": patience, "connect_timeout": patience},
                    promote={"interval": interval},
                    stalled_check={
                        "interval": interval,
                        "restart_grace": "0s",
                        "max_stalled": 1_000,
                    },
                    queues=[QUEUE],
                )
            )
            yield

    def moved(self, verb: Verb) -> int:
        """How many jobs the server has moved."""
        raise NotImplementedError

    def waiting(self) -> int:
        """How many jobs it has to move."""
        raise NotImplementedError

    def begin(self, fault: Fault, verbs: Sequence[Verb]) -> None:
        """Inject a fault, and have work waiting behind it."""
        raise NotImplementedError

    def heal(self) -> None:
        """Clear the fault."""
        raise NotImplementedError

    def check_lines(self, lines: list[Line], fault: Fault, verbs: Sequence[Verb]) -> None:
        """Fail if the log lines of a fault are not one for each change of state."""
        told = [(line["event"], wire.error_code(line.get("code", ""))) for line in lines]
        if fault.of_node and told[:2] == [("node down", "connection"), ("node down", fault.code)]:
            del told[0]
        assert Counter(event for event, _ in told) == Counter(
            {event: 1 if fault.of_node else len(verbs) for event in fault.told or ()}
        ), lines

    def samples(self) -> Counter[str]:
        """Every sample of the daemon's metrics."""
        status, text = self.daemon.get("/metrics")
        assert status == 200
        found: Counter[str] = Counter()
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)  # type: ignore[assignment]  # counters of floats work
        return found

    def growth(self, since: Counter[str], counter: str, **labels: str) -> float:
        """By how much the queue's counter grew, over all that has these labels."""
        return sum(
            value - since[key]
            for key, value in self.samples().items()
            if key.startswith(f"emqtimerd_{counter}_total{{")
            and all(f'{label}="{text}"' in key for label, text in labels.items())
        )


class StubScene(Scene):
    """Scripted servers: one has the queue and the brand, the others lead to it."""

    def __init__(self, topology: str) -> None:
        self.stub, self.other = Stub(), Stub()
        here = f"127.0.0.1:{self.stub.port}"
        if topology == "sentinel":
            self.other.on("SENTINEL", named(self.stub.port), lasting=True)
            url = f"redis+sentinel://me:pw@127.0.0.1:{self.other.port}/main/0"
        elif topology == "cluster":
            # Nothing of ours is on the other primary, which goes on all the while.
            assert min(wire.slot(QUEUE), wire.slot_of_tag(b"emq")) >= 8192
            halves = (0, 8191, self.other.port, b"a"), (8192, 16383, self.stub.port, b"b")
            for stub in (self.stub, self.other):
                stub.on("CLUSTER", array(*(slots(*half) for half in halves)), lasting=True)
            url = f"redis+cluster://me:pw@{here}"
        else:
            url = f"redis://me:pw@{here}"
        super().__init__(topology, url, "main" if topology == "sentinel" else here)

    @contextmanager
    def open(self) -> Iterator[None]:
        with self.stub, self.other, super().open():
            yield

    def moved(self, verb: Verb) -> int:
        return self.stub.moved[wire.queue_key(QUEUE, SOURCE[verb])]

    def waiting(self) -> int:
        return self.stub.owed.total()

    def begin(self, fault: Fault, verbs: Sequence[Verb]) -> None:
        fault.inject(self, verbs)
        for verb in VERBS:
            self.stub.owed[wire.queue_key(QUEUE, SOURCE[verb])] += WORK

    def heal(self) -> None:
        self.stub.heal()
        self.other.heal()


def named(port: int) -> Answer:
    return ids(b"127.0.0.1", b"%d" % port)


def slots(first: int, last: int, port: int, node_id: bytes) -> Answer:
    server = array(bulk(b"127.0.0.1"), integer(port), bulk(node_id * 40))
    return array(integer(first), integer(last), server)


# --- the faults ---------------------------------------------------------------------------------

Injection = Callable[[Any, Sequence[Verb]], Any]


@dataclass(frozen=True)
class Fault:
    """What happens to a server, and what is to be seen of it."""

    title: str
    code: str
    """What its errors are counted under."""
    inject: Injection
    """Of a real server it returns what clears it."""
    told: tuple[str, str] | None
    """The two log lines, of its beginning and of its end; None: by the moment that it is met in."""
    also: Sequence[str] = ()
    """Under what else errors may be counted, by the moment that it is met in."""
    unheard: bool = False
    """The server did its work, and what it said of it cannot be believed or was not heard."""
    topologies: Sequence[str] = TOPOLOGIES

    @property
    def of_node(self) -> bool:
        """Whether the node is down, and not a sweep of the queue that fails."""
        return self.told == NODE


SWEEP = ("sweep failed", "sweep works again")
BLOCK = ("sweep blocked", "sweep works again")
NODE = ("node down", "node up")


def verbs_are_answered(answer: Answer | Spoiler) -> Injection:
    def inject(scene: StubScene, verbs: Sequence[Verb]) -> None:
        for verb in verbs:
            scene.stub.on(COMMAND[verb], answer)

    return inject


def handshakes_are_answered(command: str, answer: Answer) -> Injection:
    """Connections break, and new ones get this."""

    def inject(scene: StubScene, _: Sequence[Verb]) -> None:
        scene.stub.restart(command, answer)

    return inject


def has_become_a_replica(scene: StubScene, _: Sequence[Verb]) -> None:
    scene.stub.restart("INFO", bulk(b"# Replication\r\nrole:slave\r\n"), word=b"replication")


def connections_are_refused(scene: StubScene, _: Sequence[Verb]) -> None:
    scene.stub.stop_listening()
    scene.stub.hang_up()


def all_is_silent(scene: StubScene, _: Sequence[Verb]) -> None:
    scene.stub.on("*", SILENCE)


def sentinels_are_answered(answer: Answer) -> Injection:
    """Connections to the primary break, and the sentinels say this."""

    def inject(scene: StubScene, _: Sequence[Verb]) -> None:
        scene.other.on("SENTINEL", answer)
        known = scene.other.count("SENTINEL")

        def asked() -> bool:
            # Who had asked before may be on the way to the primary.
            scene.stub.hang_up()
            return scene.other.count("SENTINEL") >= known + 2

        await_(asked, "the sentinels are asked again")
        scene.stub.hang_up()

    return inject


def sentinels_are_gone(scene: StubScene, _: Sequence[Verb]) -> None:
    scene.other.stop_listening()

    def missed() -> bool:
        # As above; of those who ask it is seen that they give up.
        scene.stub.hang_up()
        nodes = scene.daemon.daemon._ledger.overview().nodes
        return any("entinel" in node.reason for node in nodes)

    await_(missed, "no sentinel is reached")
    scene.stub.hang_up()


ERRORS = {
    "ASK": "ASK 9051 127.0.0.1:1",
    "BUSY": "BUSY Valkey is busy running a script. You can only call SCRIPT KILL",
    "CLUSTERDOWN": "CLUSTERDOWN Hash slot not served",
    "CROSSSLOT": "CROSSSLOT Keys in request don't hash to the same slot",
    "EXECABORT": "EXECABORT Transaction discarded because of previous errors.",
    "LOADING": "LOADING Valkey is loading the dataset in memory",
    "MASTERDOWN": "MASTERDOWN Link with MASTER is down",
    "MISCONF": "MISCONF Errors writing to the AOF file: No space left on device",
    "MOVED": "MOVED 9051 127.0.0.1:1",
    "NOAUTH": "NOAUTH Authentication required.",
    "NOPERM": "NOPERM User me has no permissions to run this command",
    "NOREPLICAS": "NOREPLICAS Not enough good replicas to write.",
    "OOM": "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY": "READONLY You can't write against a read only replica.",
    "TRYAGAIN": "TRYAGAIN Multiple keys request during rehashing of slot",
    "UNBLOCKED": "UNBLOCKED force unblock from blocking operation",
    "WRONGPASS": "WRONGPASS invalid username-password pair or user is disabled.",
    "WRONGTYPE": "WRONGTYPE Operation against a key holding the wrong kind of value",
    "READONLY in a script's error": "ERR Error running script: @user_script:1: -READONLY You can't",
    "ERR of an unloaded module": "ERR unknown command 'EMQ.PROMOTE', with args beginning with: ",
    "ERR of any kind": "ERR what nobody has heard of",
    "ERR without a word": "",
    "other": "NOVEL thing",
}
"""Error replies to a verb; each title begins with the code."""

SHAPES: dict[str, Spoiler] = {
    "a number as text": lambda _: bulk(b"3"),
    "nil": lambda _: NIL,
    "a status": lambda _: simple("OK"),
    "a number below zero": lambda _: integer(-3),
    "a flat array": lambda _: array(integer(3)),
    "three arrays": lambda _: array(array(), array(), array()),
    "a map": lambda _: Answer(b"%1\r\n+moved\r\n:3\r\n"),
    "a boolean": lambda _: Answer(b"#t\r\n"),
    "a double": lambda _: Answer(b",3\r\n"),
    "an error inside": lambda _: array(error("OOM no"), array()),
    "the reply of TIME": lambda _: ids(b"1700000000", b"250000"),
}
"""What comes where the contract promises something else, after the work was done."""

LOSSES: dict[str, tuple[str, Spoiler]] = {
    "a reply cut in the middle": ("connection", lambda good: cut(good, len(good.data) // 2)),
    "a connection closed before the reply": ("connection", lambda _: HANG_UP),
    "bytes of no protocol": ("connection", lambda _: Answer(b"HTTP/1.1 400\r\n")),
    "silence after the work": ("timeout", lambda _: SILENCE),
    "a reply that is late": ("timeout", lambda good: late(good, 2 * TIMEOUT_SECONDS)),
    "a reply in drips": ("timeout", lambda good: dripped(good, TIMEOUT_SECONDS / 3)),
}
"""What comes between the work and our ears."""

HANDSHAKES: dict[str, tuple[str, str, Answer]] = {
    "no job core": ("ERR", "EMQ.VERSION", error("ERR unknown command 'EMQ.VERSION'")),
    "a token missing": ("ERR", "EMQ.VERSION", bulk(b"claim promote")),
    "no brand": ("ERR", "GET", NIL),
    "another brand": ("ERR", "GET", bulk(b"echomq:4.0.0")),
    "a wrong password": ("WRONGPASS", "AUTH", error(ERRORS["WRONGPASS"])),
    "no password": ("NOAUTH", "EMQ.VERSION", error(ERRORS["NOAUTH"])),
    "LOADING": ("LOADING", "EMQ.VERSION", error(ERRORS["LOADING"])),
    "LOADING from the first word": ("LOADING", "*", error(ERRORS["LOADING"])),
    "MASTERDOWN": ("MASTERDOWN", "GET", error(ERRORS["MASTERDOWN"])),
    "CLUSTERDOWN": ("CLUSTERDOWN", "GET", error(ERRORS["CLUSTERDOWN"])),
    "BUSY": ("BUSY", "EMQ.VERSION", error(ERRORS["BUSY"])),
    "NOPERM": ("NOPERM", "EMQ.VERSION", error(ERRORS["NOPERM"])),
    "NOVEL": ("other", "GET", error(ERRORS["other"])),
    "too many clients": (
        "connection",
        "*",
        replace(error("ERR max number of clients reached"), closes=True),
    ),
    "tokens in an array": ("shape", "EMQ.VERSION", array(integer(1))),
    "INFO as a number": ("shape", "INFO", integer(1)),
    "one reply too many": ("shape", "GET", Answer(b":1\r\n" + bulk(wire.BRAND).data)),
    "bytes of no protocol": ("connection", "EMQ.VERSION", Answer(b"<html>\r\n")),
    "connections closed at once": ("connection", "*", HANG_UP),
    "a reply cut in the middle": ("connection", "GET", cut(bulk(wire.BRAND), 3)),
    "silence": ("timeout", "EMQ.VERSION", SILENCE),
    "a reply in drips": ("timeout", "EMQ.VERSION", dripped(bulk(b"promote"), 0.2)),
}
"""What new connections meet."""

SENTINELS: dict[str, tuple[str, Injection]] = {
    "that know no primary": ("ERR", sentinels_are_answered(NIL)),
    "that deny it": ("NOPERM", sentinels_are_answered(error("NOPERM no permissions"))),
    "that say something else": ("shape", sentinels_are_answered(bulk(b"127.0.0.1"))),
    "that name a dead server": ("connection", sentinels_are_answered(named(1))),
    "that are silent": ("timeout", sentinels_are_answered(SILENCE)),
    "that are gone": ("connection", sentinels_are_gone),
}

FAULTS = [
    *(
        Fault(title, title.partition(" ")[0], verbs_are_answered(error(text)), SWEEP)
        for title, text in ERRORS.items()
    ),
    Fault("EMQSTATE", "EMQSTATE", verbs_are_answered(error("EMQSTATE JOB1 is not native")), BLOCK),
    *(
        Fault(f"{title} for a reply", "shape", verbs_are_answered(spoil), SWEEP, unheard=True)
        for title, spoil in SHAPES.items()
    ),
    *(
        Fault(title, code, verbs_are_answered(spoil), NODE, unheard=True)
        for title, (code, spoil) in LOSSES.items()
    ),
    *(
        Fault(f"handshake: {title}", code, handshakes_are_answered(command, answer), NODE)
        for title, (code, command, answer) in HANDSHAKES.items()
    ),
    Fault("refused connections", "connection", connections_are_refused, NODE),
    Fault("a black hole", "timeout", all_is_silent, NODE),
    Fault(
        "a primary that is a replica by now",
        "READONLY",
        has_become_a_replica,
        NODE,
        topologies=("sentinel", "cluster"),
    ),
    *(
        Fault(f"sentinels {title}", code, inject, NODE, topologies=("sentinel",))
        for title, (code, inject) in SENTINELS.items()
    ),
]


# --- the walk -----------------------------------------------------------------------------------


def walk(scene: Scene, fault: Fault, verbs: Sequence[Verb]) -> None:
    """Inject a fault into these verbs, hold it, clear it; check what is to be seen all the way."""
    daemon = scene.daemon
    daemon.wait_ready()
    await_(lambda: not scene.waiting(), "all is swept before")
    before, lines = scene.samples(), len(daemon.lines())
    moved = {verb: scene.moved(verb) for verb in VERBS}

    scene.begin(fault, verbs)
    # Twice, so that it is seen to be tried again. A node is tried by whoever comes first, and a
    # primary of a cluster beside the rounds.
    tries = 1 if fault.of_node and scene.topology == "cluster" else 2
    for labels in [{"verb": verb} for verb in verbs] if fault.told in (SWEEP, BLOCK) else [{}]:
        await_(
            lambda labels=labels: (  # type: ignore[misc]
                sum(
                    scene.growth(before, "sweep_errors", code=code, **labels)
                    for code in (fault.code, *fault.also)
                )
                >= tries
            ),
            f"counted {tries} times as {fault.code} {labels}: {daemon.lines()[lines:]}",
        )
    if fault.told == BLOCK:
        # The server does as it should, and so does the daemon: it is a row that does not.
        assert scene.samples()[f'emqtimerd_queue_blocked{{queue="{QUEUE}",verb="{verbs[0]}"}}']
    else:
        await_(lambda: daemon.get("/readyz")[0] == 503, "it is not ready")
        status, reason = daemon.get("/readyz")
        assert status == 503, "it stays so"
        words = [scene.node] if fault.of_node else verbs if fault.told else [scene.node, *verbs]
        assert any(word in reason for word in words), reason
    assert daemon.get("/healthz")[0] == 200
    errors = scene.samples() - before
    codes = {re.findall('code="(.*?)"', key)[0] for key in errors if "sweep_errors" in key}
    # What breaks connections may break one that is in use.
    assert codes - {*fault.also, "connection" if fault.of_node else ""} <= {fault.code}

    known = scene.samples()
    scene.heal()
    bound = INTERVAL_SECONDS + PAUSE_SECONDS + SLACK_SECONDS
    if fault.of_node and scene.topology == "cluster":
        bound += TEND_SECONDS
    deadline = time.monotonic() + bound
    for verb in VERBS:
        await_(
            lambda verb=verb: scene.growth(known, "sweeps", verb=verb, outcome="ok"),  # type: ignore[misc]
            f"{verb} works again",
            deadline - time.monotonic(),
        )
    await_(lambda: not scene.waiting(), "all is swept", deadline - time.monotonic())
    daemon.wait_ready()

    # What takes a node down may cut off a reply that is on its way.
    unheard = fault.unheard or fault.of_node
    for verb in VERBS:
        await_(
            lambda verb=verb: is_counted(scene, verb, before, moved[verb], unheard),  # type: ignore[misc]
            f"counters of {verb} equal facts",
            1,
        )
    scene.check_lines(daemon.lines()[lines:], fault, verbs)


def is_counted(scene: Scene, verb: Verb, before: Counter[str], moved: int, unheard: bool) -> bool:
    """Whether what moved is what was counted, but for at most a limit for each reply that was not
    heard or not believed."""
    facts = scene.moved(verb) - moved
    counted = scene.growth(before, COUNTER[verb])
    assert counted <= facts
    if not unheard:
        return counted == facts
    missed = scene.growth(before, "sweeps", verb=verb, outcome="unknown")
    missed += scene.growth(before, "sweep_errors", verb=verb, code="shape")
    return facts <= counted + WORK * missed


# --- real servers -------------------------------------------------------------------------------

# An address of the daemon's own, whose rights and password can be changed under it.
USER = ("--user", "sweeper", "on", ">pw", "~*", "&*", "+@all")
ARGUMENTS = (*USER, "--enable-module-command", "local", "--busy-reply-threshold", "1")


class RealScene(Scene):
    """Real servers: `server` has the queue and the brand."""

    def __init__(self, topology: str, directory: Path) -> None:
        self._stack = ExitStack()
        servers: Servers
        if topology == "cluster":
            servers = self.cluster = OpenCluster(directory)
        elif topology == "sentinel":
            # Whatever happens to the primary, it stays the primary.
            patient = [f"sentinel down-after-milliseconds {MASTER} 600000"]
            own = (*ARGUMENTS, "--appendonly", "yes")
            servers = Sentinels(directory, sentinel_lines=patient, node_arguments=own, count=1)
        else:
            servers = Single(directory)
        self._stack.enter_context(servers)
        number = 1 if topology == "cluster" else 0
        self.server = servers.nodes[number]
        here = f"127.0.0.1:{self.server.port}"
        super().__init__(
            topology,
            servers.url.replace("//", "//sweeper:pw@"),
            MASTER if topology == "sentinel" else here,
        )
        self.client = self._stack.enter_context(connect(self.server))
        self.client.ping()
        self._counted: Counter[Verb] = Counter()
        self._number = 0
        self._undo: Callable[[], object] | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        with self._stack, super().open():
            yield

    def ask(self, *command: str | bytes | int) -> Any:
        """Ask the server that has the queue, as its operator."""
        return ask(self.client, *command)

    def moved(self, verb: Verb) -> int:
        return self._counted[verb] + len(self._pending(verb))

    def _pending(self, verb: Verb) -> list[bytes]:
        return [each for each in pending(self.client, QUEUE) if each.startswith(PREFIX[verb])]

    def waiting(self) -> int:
        keys = (wire.queue_key(QUEUE, name) for name in SOURCE.values())
        return sum(int(self.ask("ZCARD", key)) for key in keys)

    def begin(self, fault: Fault, verbs: Sequence[Verb]) -> None:
        # A claim takes the first of what is pending, which is to be the new one.
        for verb in VERBS:
            self._counted[verb] += len(self._pending(verb))
        self.client.delete(wire.queue_key(QUEUE, "pending"))
        numbers = range(self._number, self._number + WORK)
        self._number += WORK
        lease(self.client, QUEUE, [f"JOBL{number:06}" for number in numbers], SOON_MS)
        for number in numbers:
            schedule(self.client, QUEUE, f"JOBP{number:06}", SOON_MS)
        self._undo = fault.inject(self, verbs)

    def heal(self) -> None:
        undo, self._undo = self._undo, None
        if undo:
            undo()

    def check_lines(self, lines: list[Line], fault: Fault, verbs: Sequence[Verb]) -> None:
        """Real faults come and go in steps; of each, and of each lease, there is one line."""
        del verbs  # each has lines of its own
        told = Counter(
            (line["event"], *map(line.get, ("verb", "code", "job_id"))) for line in lines
        )
        assert max(told.values()) == 1, lines
        told_of = {event for event, *_ in told}
        assert any(
            set(wanted) <= told_of for wanted in ([fault.told] if fault.told else (NODE, SWEEP))
        ), lines


class OpenCluster(Cluster):
    """Three primaries that one may take apart."""

    def arguments(self, number: int) -> Sequence[str]:
        return (*super().arguments(number), *ARGUMENTS)


class Single(Servers):
    """One server that one may take apart."""

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        self.add(1, *ARGUMENTS, appendonly=True)


PREFIX: dict[Verb, bytes] = {"promote": b"JOBP", "stalled_check": b"JOBL"}

SOON_MS = 100
"""When the work behind a fault comes due: after it is injected, mostly. Some is done before."""


def in_background(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with suppress(redis.RedisError):
            work()

    thread = threading.Thread(target=run, name="fault")
    thread.start()
    return thread


def setting(*pairs: str | int, back: Sequence[str | int]) -> Injection:
    """A setting of the server is changed, and later changed back."""

    def inject(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
        scene.ask("CONFIG", "SET", *pairs)
        return lambda: scene.ask("CONFIG", "SET", *back)

    return inject


def reconnects(scene: RealScene) -> None:
    scene.ask("CLIENT", "KILL", "USER", "sweeper")


def is_killed(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    scene.server.kill()

    def undo() -> None:
        scene.server.start()
        # A primary of a cluster looks around for two seconds before it takes a write.
        wait_until(lambda: writes(scene), "the server takes writes again")

    return undo


def writes(scene: RealScene) -> bool:
    with suppress(redis.RedisError):
        return bool(scene.client.set(wire.queue_key(QUEUE, "probe"), "1"))
    return False


def is_stopped(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    os.kill(scene.server.pid, signal.SIGSTOP)
    return lambda: os.kill(scene.server.pid, signal.SIGCONT)


def writes_are_paused(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    scene.ask("CLIENT", "PAUSE", 60_000, "WRITE")
    return lambda: scene.ask("CLIENT", "UNPAUSE")


def verbs_are_denied(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    verbs = [command.lower() for command in COMMAND.values()]
    scene.ask("ACL", "SETUSER", "sweeper", *(f"-{verb}" for verb in verbs))
    # A rule that names a module's commands would keep it from being unloaded.
    return lambda: scene.ask("ACL", "SETUSER", "sweeper", "+@all")


def password_is_changed(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    scene.ask("ACL", "SETUSER", "sweeper", "resetpass", ">other")
    reconnects(scene)
    return lambda: scene.ask("ACL", "SETUSER", "sweeper", "resetpass", ">pw")


def brand_is(brand: bytes | None) -> Injection:
    def inject(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
        if brand is None:
            scene.client.delete(wire.BRAND_KEY)
        else:
            scene.client.set(wire.BRAND_KEY, brand)
        reconnects(scene)
        return lambda: scene.client.set(wire.BRAND_KEY, wire.BRAND)

    return inject


def module_is_unloaded(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    modules = scene.client.execute_command("MODULE", "LIST")
    (path,) = [module[b"path"] for module in modules if module[b"name"] == b"emq"]
    scene.ask("MODULE", "UNLOAD", "emq")
    return lambda: scene.ask("MODULE", "LOAD", path)


def a_script_runs(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    other = connect(scene.server)
    thread = in_background(lambda: other.eval("while true do end", 0))

    def undo() -> None:
        scene.ask("SCRIPT", "KILL")
        thread.join()
        other.close()

    return undo


def data_is_loaded(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    """For two seconds: two hundred keys, and a hundredth of a second for each."""
    with scene.client.pipeline(transaction=False) as pipeline:
        for number in range(200):
            pipeline.set(wire.queue_key(QUEUE, f"filler{number}"), "x" * 100)
        pipeline.execute()
    scene.ask(
        "CONFIG", "SET", "key-load-delay", 10_000, "loading-process-events-interval-bytes", 1024
    )
    other = connect(scene.server)
    thread = in_background(lambda: other.execute_command("DEBUG", "RELOAD"))  # type: ignore[no-untyped-call]

    def undo() -> None:
        thread.join()
        other.close()
        scene.ask("CONFIG", "SET", "key-load-delay", 0)

    return undo


def snapshots_fail(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    scene.client.set(wire.queue_key(QUEUE, "probe"), "1")
    scene.ask("CONFIG", "SET", "save", "100000 1", "rdb-key-save-delay", 1_000_000)
    scene.ask("BGSAVE")
    children = Path(f"/proc/{scene.server.pid}/task/{scene.server.pid}/children")
    wait_until(children.read_text, "the child that saves is there")
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGKILL)
    return lambda: scene.ask("CONFIG", "SET", "save", "", "rdb-key-save-delay", 0)


def is_replica(stale: str) -> Injection:
    """Of a primary that nobody can reach; `stale` says whether it serves reads."""

    def inject(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
        scene.ask("CONFIG", "SET", "replica-serve-stale-data", stale)
        scene.ask("REPLICAOF", "127.0.0.1", 1)

        def undo() -> None:
            scene.ask("REPLICAOF", "NO", "ONE")
            scene.ask("CONFIG", "SET", "replica-serve-stale-data", "yes")

        return undo

    return inject


def slot_is_lost(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    scene.ask("CLUSTER", "DELSLOTS", wire.slot(QUEUE))
    return lambda: scene.ask("CLUSTER", "ADDSLOTS", wire.slot(QUEUE))


def slot_is_half_moved(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    """The sets have left, their rows have not; in the end the sets come back."""
    here, there = scene.server, scene.cluster.nodes[0]
    slot, other = wire.slot(QUEUE), connect(there)
    keys = [wire.queue_key(QUEUE, name) for name in SOURCE.values()]
    way: Sequence[str | bytes | int] = ("", 0, 5_000, "KEYS", *keys)
    ask(other, "CLUSTER", "SETSLOT", slot, "IMPORTING", scene.cluster.id_of(here))
    scene.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", scene.cluster.id_of(there))
    scene.ask("MIGRATE", "127.0.0.1", there.port, *way)

    def undo() -> None:
        scene.ask("CLUSTER", "SETSLOT", slot, "STABLE")
        ask(other, "MIGRATE", "127.0.0.1", here.port, *way)
        ask(other, "CLUSTER", "SETSLOT", slot, "STABLE")
        other.close()

    return undo


def schedule_is_a_text(scene: RealScene, _: Sequence[Verb]) -> Callable[[], object]:
    schedule, aside = wire.queue_key(QUEUE, "schedule"), wire.queue_key(QUEUE, "aside")
    scene.client.rename(schedule, aside)
    scene.client.set(schedule, "text")

    def undo() -> None:
        scene.client.rename(aside, schedule)

    return undo


ALONE = ("standalone",)

REAL_FAULTS = [
    Fault("killed", "connection", is_killed, NODE, unheard=True),
    Fault("stopped", "timeout", is_stopped, NODE, unheard=True),
    Fault("writes paused", "timeout", writes_are_paused, NODE, unheard=True),
    Fault("verbs denied", "NOPERM", verbs_are_denied, SWEEP),
    Fault("password changed", "WRONGPASS", password_is_changed, NODE),
    Fault("brand gone", "ERR", brand_is(None), NODE),
    Fault("brand of the other executor", "ERR", brand_is(b"echomq:4.0.0"), NODE),
    Fault("module unloaded", "ERR", module_is_unloaded, NODE),
    Fault("script that runs", "BUSY", a_script_runs, SWEEP),
    Fault("data being loaded", "LOADING", data_is_loaded, None),
    Fault("snapshots that fail", "MISCONF", snapshots_fail, SWEEP),
    Fault(
        "too few replicas",
        "NOREPLICAS",
        setting("min-replicas-to-write", 5, back=("min-replicas-to-write", 0)),
        SWEEP,
    ),
    Fault("demoted", "READONLY", is_replica("yes"), SWEEP, topologies=ALONE),
    Fault(
        "demoted, and not to be read",
        "MASTERDOWN",
        is_replica("no"),
        NODE,
        also=("READONLY",),
        topologies=ALONE,
    ),
    Fault("slot lost", "CLUSTERDOWN", slot_is_lost, SWEEP, topologies=("cluster",)),
    Fault(
        "slot half moved",
        "TRYAGAIN",
        slot_is_half_moved,
        SWEEP,
        also=("ASK",),
        topologies=("cluster",),
    ),
]

# --- the matrix ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str, str], Scene]]:
    """Opens one daemon for all faults of a topology, and one at a time."""
    scenes: dict[tuple[str, str], Scene] = {}
    with ExitStack() as opened:

        def scene_of(kind: str, topology: str) -> Scene:
            if (kind, topology) not in scenes:
                scenes.clear()
                opened.close()
                scene: Scene
                if kind == "real":
                    scene = RealScene(topology, tmp_path_factory.mktemp(topology))
                else:
                    scene = StubScene(topology)
                opened.enter_context(scene.open())
                scenes[kind, topology] = scene
            return scenes[kind, topology]

        yield scene_of


def cells(kind: str, faults: Sequence[Fault]) -> Iterator[Any]:
    """Each fault in each topology: of each verb by itself where one server stands for all, which
    shows that the other goes on; elsewhere of both."""
    for topology in TOPOLOGIES:
        for fault in faults:
            alone = kind == "scripted" and topology == "standalone" and not fault.of_node
            for verbs in [(verb,) for verb in VERBS] if alone else [VERBS]:
                quick = kind == "scripted" and topology == "standalone" and fault.code != "timeout"
                marks = [] if quick else [pytest.mark.slow]
                if topology in fault.topologies:
                    yield pytest.param(
                        kind,
                        topology,
                        fault,
                        verbs,
                        marks=marks,
                        id=f"{kind} {topology}: {fault.title}: {' and '.join(verbs)}",
                    )


@pytest.mark.parametrize(
    ("kind", "topology", "fault", "verbs"),
    [*cells("scripted", FAULTS), *cells("real", REAL_FAULTS)],
)
def test_every_fault_is_held_and_survived(
    scene_of: Callable[[str, str], Scene],
    kind: str,
    topology: str,
    fault: Fault,
    verbs: Sequence[Verb],
) -> None:
    """Each fault, in each topology, of each verb."""
    scene = scene_of(kind, topology)
    try:
        walk(scene, fault, verbs)
    finally:
        scene.heal()


# --- a thousand times ---------------------------------------------------------------------------

CHEAP: list[Spoiler] = [
    lambda _: error(ERRORS["OOM"]),
    lambda good: cut(good, len(good.data) // 2),
    lambda _: error(ERRORS["READONLY"]),
    lambda _: HANG_UP,
    lambda _: bulk(b"3"),
    lambda _: error("EMQSTATE JOB1 is not native"),
    lambda _: Answer(b"HTTP/1.1 400\r\n"),
    lambda good: replace(good, data=b":1\r\n" + good.data),
]

WARM_UP, REPEATS = 300, 1_000

GROWTH_KB = 3_000
"""How much more memory a thousand faults may leave: three kilobytes each, where a connection with
its buffers has some thirty and more. The allocator's own unrest is about one in a thousand faults,
five in ten thousand, and then no more."""


@pytest.mark.slow
def test_a_thousand_faults_leave_nothing_behind(tmp_path: Path) -> None:
    """Memory, threads and descriptors of the daemon are flat over many faults, once it is warm."""
    dealt = Counter[str]()
    sick = threading.Event()

    def fault_each_other_time(verb: str) -> Spoiler:
        cycle = itertools.cycle(CHEAP)

        def spoil(good: Answer) -> Answer:
            dealt[verb] += 1
            return next(cycle)(good) if sick.is_set() and dealt[verb] % 2 else good

        return spoil

    config = """
        queues = ["a", "b", "c"]
        http.listen = "127.0.0.1:0"
        node.url = "{url}"
        promote.interval = "10ms"
        stalled_check = { interval = "10ms", restart_grace = "0s" }
    """
    with Stub() as stub, DaemonProcess(tmp_path, config.replace("{url}", stub.url)) as daemon:
        for verb in COMMAND.values():
            stub.on(verb, fault_each_other_time(verb))
        daemon.wait_ready()

        def usage(count: int) -> tuple[int, int, int]:
            """Kilobytes, threads and descriptors after so many more faults, when all is well."""
            goal = dealt.total() + 2 * count
            sick.set()
            wait_until(lambda: dealt.total() >= goal or not daemon.running(), "faults", 60)
            sick.clear()
            daemon.wait_ready()
            status = Path(f"/proc/{daemon.process.pid}/status").read_text()
            found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
            files = len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))
            return int(found["VmRSS"]), int(found["Threads"]), files

        kilobytes, threads, files = usage(WARM_UP)
        after_kilobytes, after_threads, after_files = usage(REPEATS)
        assert after_kilobytes - kilobytes < GROWTH_KB
        # A thread of the pool, and its connection, may come with the first moment of bustle.
        assert after_threads - threads <= 2
        assert after_files - files <= 4


# --- what the page says -------------------------------------------------------------------------


def test_the_page_about_faults_has_them_all() -> None:
    """Each code has one row, with what it means and what to do; what fails is what fails here."""
    page = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    codes = [code for code, *_ in rows]
    assert sorted(codes) == sorted({*wire.ERROR_CODES, "other"})
    said = {code: set(fails.split(", ")) for code, _, fails, _, _ in rows}
    found: dict[str, set[str]] = {code: set() for code in codes}
    for fault in (*FAULTS, *REAL_FAULTS):
        if fault.told is not None:
            found[fault.code].add("node" if fault.of_node else "sweep")
    assert found == said
