"""The baseline: what one would write in thirty lines. One job a queue and verb, one call each.

python bench/naive.py URL INTERVAL_SECONDS STALLED_INTERVAL_SECONDS QUEUE_PREFIX QUEUES
"""

import sys
from typing import Any

import redis
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.blocking import BlockingScheduler


def main() -> None:
    """Sweep until killed."""
    url, interval, stalled_interval, prefix, queues = sys.argv[1:]
    client: Any = redis.Redis.from_url(url)
    scheduler = BlockingScheduler(executors={"default": ThreadPoolExecutor(10)})

    def promote(base: str) -> None:
        client.execute_command("EMQ.PROMOTE", 3, f"{base}schedule", f"{base}pending", base, 100)

    def stalled_check(base: str) -> None:
        keys = (f"{base}active", f"{base}pending", f"{base}dead", base)
        client.execute_command("EMQ.STALLED.CHECK", 4, *keys, 1, 100)

    for number in range(int(queues)):
        base = f"emq:{{{prefix}{number}}}:"
        scheduler.add_job(promote, "interval", (base,), seconds=float(interval))
        scheduler.add_job(stalled_check, "interval", (base,), seconds=float(stalled_interval))
    scheduler.start()


if __name__ == "__main__":
    main()
