"""Two daemons and a crew at work, a hand that breaks things by a plan, and whether it adds up.

The seed decides the plan; what the crew and the daemons are doing at its moments is theirs.
"""

import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from chaos import history as histories
from chaos import network
from chaos.audit import Evidence, Finding, audit, total_of
from chaos.cluster import Cluster
from chaos.hand import LARGEST_LIMIT, MACHINE_SECONDS, Hand
from chaos.plan import QUEUES, plan
from chaos.servers import LOOPBACK, Servers, WatchedPair
from chaos.soak import kept_if_wrong, report, tell
from chaos.stage import Clock, settled, snapshot
from emqtimerd.node import BACKOFF_CAP_SECONDS

KINDS = {kind.name: kind for kind in (Servers, WatchedPair, Cluster)}

BACKLOG_EVERY_SECONDS = 60.0
"""How much time of the run there is for each backlog: the workers have to get through it."""


def storm(seconds: float, seed: int, servers: str, only: Sequence[str] = ()) -> None:
    """Run it; if a number does not add up, raise Wrong. In any case print how to see it again."""
    tell(f"storm: {seconds:g} s of faults, servers {servers}, seed {seed}")
    with kept_if_wrong("storm") as place, ExitStack() as stack:
        lacking = _lacking(place)
        host = LOOPBACK if "wire" in lacking else network.HOST
        hand = Hand(KINDS[servers](place, host), place, stack, seed, lacking)
        try:
            hand.await_ready()
            backlogs = max(int(seconds / BACKLOG_EVERY_SECONDS), 1)
            for number, step in enumerate(plan(seed, backlogs, servers, only, lacking)):
                # What was asked for by name comes once at least.
                if number >= len(only) and time.monotonic() - hand.began > seconds:
                    break
                hand.play(step)
            hand.say("nothing more is broken; what is left comes to its end")
            hand.settle()
            report(_findings(hand))
        except Exception as error:
            tell(f"\nthe first discrepancy: {type(error).__name__}: {error}")
            tell("the schedule was:\n" + "\n".join(hand.done))
            raise
        finally:
            kinds = f" ONLY='{' '.join(only)}'" if only else ""
            tell(f"again: make chaos SEED={seed} SECONDS={seconds:g} SERVERS={servers}{kinds}")


def _lacking(place: Path) -> list[str]:
    """Leave the machine's network and try the clocks; return which groups of faults cannot be."""
    lacking = []
    if why := network.missing():
        tell(f"no networks of our own, so none is cut but by proxies: {why}")
        lacking.append("wire")
    else:
        network.leave_the_machine()
    try:
        (place / "try").mkdir()
        Clock(place / "try")
    except (OSError, subprocess.CalledProcessError) as error:
        tell(f"no clock is set, since the C compiler did not do its part: {error}")
        lacking.append("clock")
    return lacking


def _findings(hand: Hand) -> Sequence[Finding]:
    seen = snapshot(hand.servers.client_of, QUEUES)
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
    hand.servers.stop()
    marks = [mark for window in hand.windows for mark in window]
    facts = histories.read(hand.servers.history(), marks)
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
