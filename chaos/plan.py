"""The schedule of a storm: what is broken, how long after the step before, and how long.

A seed decides all of it. What cannot be done on a machine is left out when its turn comes, so the
rest stays the same.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

QUEUES = ("orders", "images", "invoices")
"""In a cluster of three primaries, each of them begins with one."""
DAEMONS = ("one", "two")
ALL = "all"

GROUPS = {
    "server": ("server-kill", "server-stop"),
    "pair": ("failover", "switch"),
    "slots": ("slot-by-key", "slot-at-once"),
    "daemon": ("daemon-stop", "daemon-suspend"),
    "clock": ("clock-ahead", "clock-back"),
    "wire": ("wire-cut", "wire-out"),
    "net": ("net-stall", "net-cut", "net-refuse", "net-swallow", "net-break"),
    "data": ("lane", "ghosts", "backlog", "module"),
    "reload": ("reload",),
    # Alone: its last moments are told from the history, which wants a server that answers.
    "kill": ("daemon-kill",),
}
BESIDE = {
    "data": ("server", "pair", "slots", "daemon", "clock", "wire", "net", "reload"),
    "server": ("daemon", "clock", "wire", "net", "reload"),
    "pair": ("daemon", "clock", "wire", "net", "reload"),
    "slots": ("daemon", "clock", "wire", "net", "reload"),
    "net": ("server", "pair", "slots", "daemon", "clock", "reload"),
    "wire": ("server", "pair", "slots", "clock", "reload"),
    "clock": ("server", "pair", "wire", "net", "reload"),
    "daemon": ("server", "pair", "slots", "net", "wire"),
}
"""What may happen while something of this group is going on; it ends first."""
BESIDE_SHARE = 0.35
AT_ONCE = frozenset({"net-cut", "ghosts", "reload", "backlog", "slot-at-once"})
"""These have no end of their own."""

IMPOSSIBLE = {"alone": ("pair", "slots"), "sentinel": ("server", "slots"), "cluster": ()}
"""What cannot happen to these servers. One that is silent for long is replaced by sentinels, and
what it answered last is then lost; in a cluster, replicas can be told not to."""

PRIMARIES = ("1", "2", "3")
JUMPS = (2, 90, 3_600, 30 * 86_400, 400 * 86_400)
"""By how many seconds a clock is set: by hand, by daylight saving, by a battery that was dead."""


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


def kinds_of(servers: str) -> list[str]:
    """What can happen to these servers and whoever works with them."""
    return [
        kind
        for group, kinds in GROUPS.items()
        if group not in IMPOSSIBLE[servers]
        for kind in kinds
    ]


def plan(
    seed: int,
    backlogs: int,
    servers: str = "alone",
    only: Sequence[str] = (),
    lacking: Sequence[str] = (),
) -> Iterator[Step]:
    """What is to be done: all kinds in a random order, then all again, and so on; or `only` some
    kinds, and nothing beside them. What the groups of `lacking` would do is left out."""
    chance = random.Random(seed)
    groups = {name: kinds for name, kinds in GROUPS.items() if name not in IMPOSSIBLE[servers]}
    left_out = {kind for group in lacking for kind in GROUPS[group]}
    deck = list(only) or kinds_of(servers)
    while set(deck) - left_out:
        chance.shuffle(deck)
        for kind in deck:
            step = _step(chance, kind, servers)
            group = next(name for name, kinds in groups.items() if kind in kinds)
            if group in BESIDE and not only and chance.random() < BESIDE_SHARE:
                beside = [name for name in BESIDE[group] if name in groups]
                other = _step(chance, chance.choice(groups[chance.choice(beside)]), servers)
                step = replace(step, beside=None if other.kind in left_out else other)
            if kind == "backlog":
                backlogs -= 1
                if backlogs < 0:
                    continue
            if kind not in left_out:
                yield step


def lines_of(servers: str) -> Sequence[str]:
    """Who has a proxy of its own. Where servers name each other, daemons go to them directly, and
    each queue of a cluster is at a place of its own."""
    return {"alone": (*DAEMONS, "crew"), "sentinel": ("crew",), "cluster": QUEUES}[servers]


def _step(chance: random.Random, kind: str, servers: str) -> Step:
    group = kind.partition("-")[0]
    whom: Sequence[str] = ("",)
    if group == "net":
        whom = (*lines_of(servers), ALL) if len(lines_of(servers)) > 1 else lines_of(servers)
    elif group in ("daemon", "reload"):
        whom = DAEMONS
    elif group in ("wire", "clock"):
        whom = (*DAEMONS, ALL)
    elif group == "slot":
        whom = (*QUEUES, "brand")
    elif servers == "cluster" and group == "server":
        whom = (*PRIMARIES, ALL)
    elif servers == "cluster" and kind in GROUPS["pair"]:
        whom = PRIMARIES
    hold = 0.2 if kind in AT_ONCE else chance.uniform(0.3, 5.0)
    who = chance.choice(whom)
    return Step(kind, who, chance.uniform(0.2, 2.0), hold, chance.getrandbits(32))
