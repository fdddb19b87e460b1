"""Draws docs/bad-hour.png: what the metrics look like when everything goes wrong.

    pip install matplotlib && python bench/bad_hour.py [--output docs/bad-hour.png]

Nothing in it is made up. The cast of `emqtimerd demo` works on a node for a hundred seconds;
workers crash in a row, a foreign row blocks a queue, and the server is killed. The daemon's own
metrics are read twice a second and drawn the way the dashboard does.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import redis
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from emqtimerd import demo, wire
from emqtimerd.devnode import DevNode

ROOT = Path(__file__).resolve().parent.parent

# The story, in seconds.
CRASHES_AT, CRASHES_UNTIL = 15.0, 25.0
POISON_AT, CURE_AT = 38.0, 56.0
KILL_AT, REVIVE_AT = 70.0, 76.0
END = 100.0

SAMPLE_SECONDS = 0.5
RATE_SAMPLES = 4
"""Rates are over two seconds: what a scrape each 15 s is to an hour."""

CRASH_SECONDS, CRASHES_AT_ONCE = 0.25, 3
HELD = 40
"""Leases that workers take just before the server dies, and never come back to."""

Metrics = dict[tuple[str, ...], float]


@dataclass
class Film:
    """What was seen, sample by sample."""

    times: list[float] = field(default_factory=list)
    frames: list[Metrics] = field(default_factory=list)

    def values(self, *names: tuple[str, ...]) -> list[float]:
        """The sum of these series over time."""
        return [sum(frame.get(name, 0.0) for name in names) for frame in self.frames]

    def rates(self, *names: tuple[str, ...]) -> list[float]:
        """How fast the sum of these counters rose, in events a second."""
        values = self.values(*names)
        rates = []
        for now, value in enumerate(values):
            before = max(now - RATE_SAMPLES, 0)
            seconds = self.times[now] - self.times[before]
            rates.append((value - values[before]) / seconds if seconds else 0.0)
        return rates

    def spans(self, name: tuple[str, ...], value: float) -> list[tuple[float, float]]:
        """When a series had this value."""
        found: list[tuple[float, float]] = []
        for when, frame in zip(self.times, self.frames, strict=True):
            if frame.get(name) == value:
                start = found.pop()[0] if found and when - found[-1][1] < 1 else when
                found.append((start, when))
        return found


def play() -> Film:
    """Have it happen, and watch."""
    film = Film()
    with tempfile.TemporaryDirectory(prefix="emqtimerd-bad-hour-") as directory:
        place = Path(directory)
        with DevNode(place / "node") as node:
            daemon = demo.DaemonProcess(demo.CONFIG.format(url=node.url), place)
            cast = demo.Cast(node.url)
            try:
                _play(film, node, daemon, cast)
            finally:
                cast.stop()
                daemon.stop()
    return film


def _play(film: Film, node: DevNode, daemon: demo.DaemonProcess, cast: demo.Cast) -> None:
    client = redis.Redis.from_url(node.url)
    poison = wire.row_key(demo.EMAILS, demo.POISON)
    schedule = wire.queue_key(demo.EMAILS, "schedule")

    def add_poison() -> None:
        client.hset(poison, mapping={"state": "scheduled", "group": "g"})
        client.zadd(schedule, {demo.POISON: 0})

    def cure() -> None:
        client.zrem(schedule, demo.POISON)
        client.delete(poison)

    def kill() -> None:
        cast.hold(HELD)
        node.kill()

    acts: list[tuple[float, Callable[[], object]]] = [
        (POISON_AT, add_poison),
        (CURE_AT, cure),
        (KILL_AT, kill),
        (REVIVE_AT, node.start),
    ]
    cast.start()
    begun = time.monotonic()
    next_crash = CRASHES_AT
    while (now := time.monotonic() - begun) < END:
        if acts and now >= acts[0][0]:
            acts.pop(0)[1]()
        if next_crash <= now < CRASHES_UNTIL:
            next_crash = now + CRASH_SECONDS
            cast.hold(CRASHES_AT_ONCE)
        if not film.times or now - film.times[-1] >= SAMPLE_SECONDS:
            film.times.append(now)
            film.frames.append(daemon.metrics())
        time.sleep(0.02)  # finer than anything that is drawn


# --- the picture --------------------------------------------------------------------------------

GREEN, ORANGE, RED, PURPLE, BLUE, GREY = (
    *("#2e7d32", "#ef6c00", "#c62828", "#6a1b9a"),
    *("#1565c0", "#9e9e9e"),
)


def draw(film: Film, output: Path) -> None:
    """Four panels over one time, as they stand on the dashboard."""
    mpl.use("Agg")
    plt.rcParams.update({"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        4, 1, figsize=(9, 9.2), sharex=True, height_ratios=(3, 2.2, 3, 2.2), layout="constrained"
    )
    moved, overdue, expired, leases = axes

    both = demo.QUEUES
    _lines(
        moved,
        film,
        "jobs moved, a second",
        [
            ("promoted", GREEN, film.rates(*(("jobs_promoted_total", q) for q in both))),
            ("recovered", ORANGE, film.rates(*(("jobs_recovered_total", q) for q in both))),
            ("dead-lettered", RED, film.rates(*(("jobs_dead_lettered_total", q) for q in both))),
        ],
    )
    _lines(
        overdue,
        film,
        "oldest due job, seconds overdue",
        [
            ("orders", BLUE, film.values(("queue_overdue_seconds", "orders"))),
            ("emails", ORANGE, film.values(("queue_overdue_seconds", "emails"))),
        ],
    )
    bottom = [0.0] * len(film.times)
    for cause, color in (("stall", RED), ("restart", PURPLE), ("unattributed", GREY)):
        values = film.rates(*(("lease_expiries_total", q, cause) for q in both))
        if any(values):
            top = [below + value for below, value in zip(bottom, values, strict=True)]
            expired.fill_between(
                film.times, bottom, top, color=color, step="post", label=cause, linewidth=0
            )
            bottom = top
    _finish(expired, "expired leases, a second, by cause")
    _lines(
        leases,
        film,
        "leases, by the server process they are of",
        [
            ("current", GREEN, film.values(*(("active_leases", q, "current") for q in both))),
            ("previous", PURPLE, film.values(*(("active_leases", q, "previous") for q in both))),
        ],
    )
    for axis in axes:
        for start, end in film.spans(("queue_blocked", "emails", "promote"), 1):
            axis.axvspan(start, end, color=ORANGE, alpha=0.10, linewidth=0)
        for start, end in film.spans(("node_up", _node(film)), 0):
            if start > 1:
                axis.axvspan(start, end, color=GREY, alpha=0.30, linewidth=0)
    for when, text in (
        (CRASHES_AT, "workers crash"),
        (POISON_AT, "a row blocks emails"),
        (CURE_AT, "removed"),
        (KILL_AT, "server\nkilled"),
        (REVIVE_AT, "back"),
    ):
        moved.annotate(
            text, (when, 1.0), xycoords=("data", "axes fraction"), va="bottom", fontsize=8
        )
        for axis in axes:
            axis.axvline(when, color=GREY, linewidth=0.6, linestyle=":")
    leases.set_xlabel("seconds")
    leases.set_xlim(0, END)
    figure.savefig(output, dpi=110)


def _node(film: Film) -> str:
    return next(name[1] for name in film.frames[-1] if name[0] == "node_up")


def _lines(
    axis: Axes, film: Film, title: str, series: Sequence[tuple[str, str, list[float]]]
) -> None:
    for label, color, values in series:
        axis.plot(film.times, values, color=color, label=label, linewidth=1.3)
    _finish(axis, title)


def _finish(axis: Axes, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=9, pad=16 if "moved" in title else 4)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.2)  # room for the legend
    axis.legend(loc="upper left", frameon=False, ncols=3)


def main() -> None:
    """Play and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "bad-hour.png")
    options = parser.parse_args()
    film = play()
    draw(film, options.output)
    last = film.frames[-1]
    for name in sorted(last):
        if name[0] in ("lease_expiries_total", "jobs_dead_lettered_total", "node_restarts_total"):
            print(*name, f"{last[name]:g}")


if __name__ == "__main__":
    main()
