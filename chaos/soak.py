"""An hour's work in a minute: many jobs, all that can happen to them, and a server killed."""

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from chaos import history as histories
from chaos.audit import Evidence, Finding, audit, total_of
from chaos.crew import Crew, Habits
from chaos.plan import QUEUES
from chaos.servers import client_of, open_node
from chaos.stage import Daemon, open_jobs, settled, snapshot
from emqtimerd import wire

PRODUCERS, WORKERS = 1, 3
LIMIT = 100
KILLS_AT = (0.15, 0.35, 0.6)
"""At which shares of completed jobs the server is killed; later ones would only load more file."""
DOWN_SECONDS = 1.5
"""How long it stays down at most."""
SETTLE_SECONDS = 60.0
"""How long all jobs may take to end after the last one was added, in which nothing moves."""
FAIR_RATE = 300
"""Jobs a second at least, on a machine that is busy with other things: the run is bounded by it."""

CONFIG = """\
queues = {queues}
[node]
url = "{url}"
[promote]
interval = "500ms"
limit = {limit}
[stalled_check]
interval = "1s"
limit = {limit}
max_stalled = 2
restart_grace = "1s"
[http]
listen = "127.0.0.1:0"
[log]
format = "json"
"""


class Wrong(Exception):
    """Something does not hold, and was told."""


@contextmanager
def kept_if_wrong(name: str) -> Iterator[Path]:
    """A directory that goes afterwards, unless there is something to be found out from it."""
    place = Path(tempfile.mkdtemp(prefix=f"emqtimerd-{name}-"))
    wrong = False
    try:
        yield place
    except Exception:
        wrong = True
        tell(f"logs and data are kept in {place}")
        raise
    finally:
        if not wrong:
            shutil.rmtree(place)


def tell(text: str) -> None:
    """Say how it goes."""
    print(text, flush=True)


def report(findings: Sequence[Finding]) -> None:
    """Print what was found; raise Wrong if not everything holds."""
    for finding in findings:
        tell(f"{'ok ' if finding.holds else 'NOT'}  {finding.sentence}")
        if not finding.holds and finding.detail:
            tell(f"     {finding.detail}")
    wrong = [finding for finding in findings if not finding.holds]
    if wrong:
        raise Wrong(f"{wrong[0].sentence}\n  {wrong[0].detail}")


def soak(jobs: int, seed: int) -> None:
    """Run it; raise Wrong if a number does not add up."""
    chance = random.Random(seed)
    began = time.monotonic()
    deadline = began + 30 + jobs / FAIR_RATE
    with kept_if_wrong("soak") as place, ExitStack() as stack:
        node = stack.enter_context(open_node(place))
        url, queues = node.url, str(list(QUEUES)).replace("'", '"')
        config = CONFIG.format(url=url, queues=queues, limit=LIMIT)
        daemon = Daemon("daemon", config, place / "daemon")
        stack.callback(daemon.process.kill)
        client = client_of(node)
        ports = dict.fromkeys(QUEUES, node.port)
        crew = stack.enter_context(
            Crew(ports, Habits(QUEUES), seed, producers=PRODUCERS, workers=WORKERS, jobs=jobs)
        )
        tell(f"soak: {jobs} jobs, seed {seed}; node {url}, daemon {daemon.page}")
        kills = [share * jobs for share in KILLS_AT]
        moved_at, moved = began, -1
        while time.monotonic() < deadline:
            done = _completed(client)
            if kills and done >= kills[0] and _restarts(daemon) == len(KILLS_AT) - len(kills):
                kills.pop(0)
                node.kill()
                time.sleep(chance.uniform(0.1, DOWN_SECONDS))
                node.start()
                tell(f"{time.monotonic() - began:6.1f} s  server killed at {done} completed")
            still = open_jobs(lambda _: client, QUEUES)
            if done != moved:
                moved_at, moved = time.monotonic(), done
            idle = time.monotonic() - moved_at
            if not crew.producing() and (still == 0 or idle > SETTLE_SECONDS):
                break
            time.sleep(0.2)
        books = crew.end(30)
        seconds = time.monotonic() - began
        missing = len(crew) - len(books)
        seen = snapshot(lambda _: client, QUEUES)
        counted = settled([daemon])
        restarts = _restarts(daemon)
        code = daemon.end()
        node.stop()
        facts = histories.read([histories.Part(histories.file_of(node.directory))])
        logged = Counter(
            str(line["job_id"]).encode()
            for line in daemon.records("lease crossed a server restart")
        )
        evidence = Evidence(QUEUES, facts, books, seen, counted, logged, LIMIT)
        unknown = total_of(counted, "sweeps_total", "unknown")
        tell(
            f"{seconds:6.1f} s  {len(facts.born)} jobs ended, {len(facts.leases)} leases; "
            f"{unknown} sweeps of unknown outcome"
        )
        report(
            [
                Finding(not missing, f"all of the crew came back ({missing} did not)"),
                Finding(not kills, f"the server was killed {len(KILLS_AT) - len(kills)} times"),
                Finding(restarts == len(KILLS_AT), f"the daemon saw {restarts} restarts"),
                *audit(evidence),
                Finding(code == 0, f"the daemon ended with exit code {code}"),
            ]
        )


def _completed(client: redis.Redis) -> int:
    try:
        keys = [wire.queue_key(queue, "metrics:completed") for queue in QUEUES]
        return sum(int(client.hget(key, "count") or 0) for key in keys)
    except redis.RedisError:
        return 0


def _restarts(daemon: Daemon) -> int:
    """How many restarts of the server it has seen; two that it has not been told of are one."""
    return sum(n for key, n in daemon.counters().items() if key[0] == "node_restarts_total")
