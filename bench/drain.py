"""Drains a deep backlog with the native sweeps and with Lua scripts that do the same, and compares.

    python bench/drain.py                                  # 200,000 jobs, limit 1,000, 3 rounds
    python bench/drain.py --jobs 50000 --rounds 5 --verb promote --aof off
    python bench/drain.py --server /usr/bin/redis-server   # another server than the embedded one

Each round fills the queue, drains it with the script, fills it again and drains it with the verb,
on one node, so that both meet the same machine; the order swaps from round to round. A drain is
`EMQ.PROMOTE` (or `EMQ.STALLED.CHECK`) with the same limit until nothing is left, one call at a
time over one connection. With AOF on, appendfsync is everysec.

The scripts are the baseline: the same checks on each row, the same moves, and the effects that a
good script would send (ids in one ZREM and one ZADD for each few thousand). They are for this
benchmark's own node: no writing script belongs on a native one.

The table shows the median of the rounds, by the clock and by the server's own processor time
(which other programs on the machine disturb less), and the worst single call of all rounds.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field

import redis

from emqtimerd.devnode import DevNode
from emqtimerd.wire import base, queue_key, row_key

QUEUE = "drain"
PAYLOAD = b'{"order":17,"customer":"c-81","action":"remind"}'

# Lua's unpack and the server's Lua stack end at about 8,000 values.
CHUNK = 3000

LUA_MOVE = f"""
local function move(from, to, ids, first, last)
  for i = first, last, {CHUNK} do
    local j = math.min(i + {CHUNK} - 1, last)
    local pairs = {{}}
    for k = i, j do pairs[#pairs + 1] = 0; pairs[#pairs + 1] = ids[k] end
    redis.call('ZREM', from, unpack(ids, i, j))
    redis.call('ZADD', to, unpack(pairs))
  end
end
"""

LUA_DUE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function due(set, limit)
  return redis.call('ZRANGEBYSCORE', set, '-inf', now, 'LIMIT', 0, limit)
end
"""

LUA_PROMOTE = (
    LUA_DUE
    + LUA_MOVE
    + """
local ids, live, ghosts = due(KEYS[1], ARGV[2]), {}, {}
for _, id in ipairs(ids) do
  local row = redis.call('HMGET', ARGV[1] .. 'job:' .. id, 'state', 'group')
  if not row[1] then ghosts[#ghosts + 1] = id
  elseif row[2] then return redis.error_reply('EMQSTATE ' .. id .. ' not native')
  elseif row[1] ~= 'scheduled' then return redis.error_reply('EMQSTATE ' .. id .. ' is ' .. row[1])
  else live[#live + 1] = id end
end
for _, id in ipairs(ghosts) do redis.call('ZREM', KEYS[1], id) end
move(KEYS[1], KEYS[2], live, 1, #live)
for _, id in ipairs(live) do redis.call('HSET', ARGV[1] .. 'job:' .. id, 'state', 'pending') end
return #live
"""
)

LUA_STALLED = (
    LUA_DUE
    + LUA_MOVE
    + """
local ids, ghosts, recovered, dead, stalls = due(KEYS[1], ARGV[4]), {}, {}, {}, {}
for _, id in ipairs(ids) do
  local key = ARGV[1] .. 'job:' .. id
  local row = redis.call('HMGET', key, 'state', 'group', 'lease_epoch', 'stalled')
  if not row[1] then ghosts[#ghosts + 1] = id
  elseif row[2] then return redis.error_reply('EMQSTATE ' .. id .. ' not native')
  elseif row[1] ~= 'active' then return redis.error_reply('EMQSTATE ' .. id .. ' is ' .. row[1])
  elseif row[3] and row[3] ~= ARGV[2] then recovered[#recovered + 1] = id
  else
    stalls[id] = (tonumber(row[4]) or 0) + 1
    local list = stalls[id] < tonumber(ARGV[3]) and recovered or dead
    list[#list + 1] = id
  end
end
for _, id in ipairs(ghosts) do redis.call('ZREM', KEYS[1], id) end
move(KEYS[1], KEYS[2], recovered, 1, #recovered)
move(KEYS[1], KEYS[3], dead, 1, #dead)
for _, id in ipairs(recovered) do
  local row = ARGV[1] .. 'job:' .. id
  if stalls[id] then redis.call('HSET', row, 'state', 'pending', 'stalled', stalls[id])
  else redis.call('HSET', row, 'state', 'pending') end
end
for _, id in ipairs(dead) do
  local row = ARGV[1] .. 'job:' .. id
  redis.call('HSET', row, 'state', 'dead', 'stalled', stalls[id], 'last_error', 'stalled')
end
if #dead > 0 then redis.call('HINCRBY', ARGV[1] .. 'metrics:failed', 'count', #dead) end
return {recovered, dead}
"""
)


@dataclass
class Side:
    """One of the two things compared: the command that it sends, and what it measured."""

    command: tuple[object, ...]
    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    worst_ms: float = 0.0


def send(client: redis.Redis, command: tuple[object, ...]) -> object:
    """Send one command and return its reply."""
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


def cpu_seconds(client: redis.Redis) -> float:
    """The processor time that the server's main thread has used."""
    cpu = client.info("cpu")
    return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])


def fill(client: redis.Redis, verb: str, jobs: int, run_id: str) -> None:
    """Empty the node and plant `jobs` due jobs (or expired leases), in a pipeline."""
    client.flushall()
    source = queue_key(QUEUE, "schedule" if verb == "promote" else "active")
    state = b"scheduled" if verb == "promote" else b"active"
    first = int(time.time() * 1000) - jobs - 1000
    pipe = client.pipeline(transaction=False)
    for n in range(jobs):
        job_id = b"JOB%023d" % n
        fields = {b"state": state, b"payload": PAYLOAD, b"attempts": b"1"}
        if verb == "stalled":
            fields[b"lease_epoch"] = run_id.encode()
        pipe.hset(row_key(QUEUE, job_id), mapping=fields)  # type: ignore[arg-type]
        pipe.zadd(source, {job_id: first + n})
        if n % 5000 == 4999 or n == jobs - 1:
            pipe.execute()


def moved_by(reply: object) -> int:
    """How many jobs a reply of either verb says it moved."""
    if isinstance(reply, int):
        return reply
    assert isinstance(reply, list)
    return sum(len(ids) for ids in reply)


def drain(client: redis.Redis, side: Side, jobs: int) -> None:
    """Sweep until nothing moves; note the rate and the worst call."""
    moved = 0
    cpu = cpu_seconds(client)
    began = time.perf_counter()
    while True:
        sent = time.perf_counter()
        n = moved_by(send(client, side.command))
        side.worst_ms = max(side.worst_ms, (time.perf_counter() - sent) * 1000)
        if n == 0:
            break
        moved += n
    side.rates.append(moved / (time.perf_counter() - began))
    side.cpu_us.append((cpu_seconds(client) - cpu) / jobs * 1e6)
    assert moved == jobs, f"moved {moved} of {jobs}"


def sides(client: redis.Redis, verb: str, limit: int, run_id: str) -> tuple[Side, Side]:
    """The script and the verb that do the same."""
    prefix = base(QUEUE)
    if verb == "promote":
        keys = [queue_key(QUEUE, "schedule"), queue_key(QUEUE, "pending")]
        script = ("EVALSHA", client.script_load(LUA_PROMOTE), 2, *keys, prefix, limit)
        return Side(script), Side(("EMQ.PROMOTE", 3, *keys, prefix, limit))
    keys = [queue_key(QUEUE, name) for name in ("active", "pending", "dead")]
    # A budget of 2: each first stall is counted and recovered, the usual work of a stall check.
    script = ("EVALSHA", client.script_load(LUA_STALLED), 3, *keys, prefix, run_id, 2, limit)
    return Side(script), Side(("EMQ.STALLED.CHECK", 4, *keys, prefix, 2, limit))


def measure(verb: str, aof: bool, options: argparse.Namespace) -> None:
    """Run the rounds of one verb on a fresh node and print its lines of the table."""
    settings = ("--appendfsync", "everysec", "--auto-aof-rewrite-percentage", "0")
    with DevNode(server=options.server, appendonly=aof, extra_args=settings) as node:
        client = redis.Redis(port=node.port, socket_timeout=120)
        run_id = client.info("server")["run_id"]
        script, native = sides(client, verb, options.limit, run_id)
        for round_number in range(options.rounds):
            for side in (script, native) if round_number % 2 == 0 else (native, script):
                fill(client, verb, options.jobs, run_id)
                drain(client, side, options.jobs)
        client.close()
    base_rate, base_cpu = statistics.median(script.rates), statistics.median(script.cpu_us)
    for name, side in (("script", script), ("native", native)):
        rate, cpu = statistics.median(side.rates), statistics.median(side.cpu_us)
        ratios = f"{rate / base_rate:7.2f}x{base_cpu / cpu:8.2f}x" if side is native else ""
        print(
            f"{verb:8} {'on' if aof else 'off':4} {name:7} "
            f"{rate:10,.0f} {cpu:11.2f} {side.worst_ms:9.1f} {ratios}".rstrip(),
            flush=True,
        )


def main() -> None:
    """Parse, measure each combination, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verb", choices=["promote", "stalled", "both"], default="both")
    parser.add_argument("--aof", choices=["off", "on", "both"], default="both")
    parser.add_argument("--server", default=None, help="path of a server binary")
    options = parser.parse_args()
    print("verb     aof  side        jobs/s  cpu us/job  worst ms  jobs/s  cpu/job")
    for verb in ("promote", "stalled") if options.verb == "both" else (options.verb,):
        for aof in {"off": (False,), "on": (True,), "both": (False, True)}[options.aof]:
            measure(verb, aof, options)


if __name__ == "__main__":
    main()
