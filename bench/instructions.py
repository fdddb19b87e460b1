"""Counts the instructions of a promoted job, and shows which functions of the server they go to.

    python bench/instructions.py              # needs valgrind; some two minutes

Instructions, unlike times, are the same on a busy machine: the counts of two runs differ by less
than 1 %. The server runs under callgrind, which counts only while the drain of `bench/drain.py`
goes on: first with the Lua script, then with `EMQ.PROMOTE`, with AOF off and on.

Below each count of the verb stands what the module calls of the server, callees included, and last
what is left: the module's own instructions.
"""

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path

import redis
from drain import drain, fill, send, sides

from emqtimerd.devnode import DevNode

# What the module asks of the server, and what the server does for replicas and AOF after the call.
PARTS = {
    "skiplist and table of pending (ZsetAdd)": ("VM_ZsetAdd",),
    "skiplist and table of schedule (ZsetRem, range)": (
        "VM_ZsetRem",
        "VM_ZsetRangeNext",
        "VM_ZsetRangeCurrentElement",
    ),
    "rows: found, read, written": ("VM_OpenKey", "VM_CloseKey", "VM_HashGet", "VM_HashSet"),
    "effects: taken (Replicate)": ("VM_Replicate",),
    "effects: written to AOF after the call": ("afterCommand",),
    "names and texts made and freed": ("VM_CreateString", "VM_FreeString"),
    "WATCH, client caches, keyspace events": ("VM_SignalModifiedKey", "VM_NotifyKeyspaceEvent"),
}


def counts(profile: Path) -> dict[str, int]:
    """Instructions by function, callees included; under "" those of the whole run."""
    text = subprocess.run(
        ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(profile)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {"": int(re.findall(r"([\d,]+) .*PROGRAM TOTALS", text)[0].replace(",", ""))}
    for number, name in re.findall(r"^ *([\d,]+) .*?:(\w+) \[", text, re.MULTILINE):
        found[name] = found.get(name, 0) + int(number.replace(",", ""))
    return found


def count(aof: bool, native: bool, jobs: int) -> dict[str, int]:
    """Drain once under callgrind."""
    with tempfile.TemporaryDirectory() as directory:
        profile = Path(directory, "profile")
        os.environ["EMQ_SERVER_WRAPPER"] = (
            f"valgrind --tool=callgrind --instr-atstart=no --callgrind-out-file={profile}"
        )
        with DevNode(appendonly=aof, extra_args=("--appendfsync", "everysec")) as node:
            client = redis.Redis(port=node.port, socket_timeout=120)
            server = client.info("server")
            side = sides(client, "promote", 1000, server["run_id"])[native]
            fill(client, "promote", 1000, server["run_id"])
            send(client, side.command)  # what is done once is not counted
            fill(client, "promote", jobs, server["run_id"])
            control = ["callgrind_control", "-i"]
            process = str(server["process_id"])
            subprocess.run([*control, "on", process], check=True, capture_output=True)
            drain(client, side, jobs)
            subprocess.run([*control, "off", process], check=True, capture_output=True)
            client.close()
        return counts(profile)


def main() -> None:
    """Parse, count, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=20_000)
    jobs = parser.parse_args().jobs
    for aof in (False, True):
        script, native = (count(aof, side, jobs) for side in (False, True))
        print(f"AOF {'on' if aof else 'off'}: instructions a job")
        print(f"  {script[''] / jobs:8,.0f}  Lua script")
        print(
            f"  {native[''] / jobs:8,.0f}  EMQ.PROMOTE: {script[''] / native['']:.2f} times fewer"
        )
        rest = native[""]
        for part, functions in PARTS.items():
            share = sum(native.get(function, 0) for function in functions)
            rest -= share
            print(f"    {100 * share / native['']:4.1f} %  {part}")
        print(f"    {100 * rest / native['']:4.1f} %  the module itself, and the call", flush=True)


if __name__ == "__main__":
    main()
