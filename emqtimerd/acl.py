"""The ACL: the one list of the commands that the daemon sends, and the smallest rule for them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from emqtimerd import wire
from emqtimerd.config import Settings

MOST_PATTERNS = 100
"""The server tries a user's key patterns one after another, for each key of each command; with
more queues than this one pattern for all of them costs less and is easier to keep."""


@dataclass(frozen=True, slots=True)
class Permission:
    """One command that the daemon sends: its word in an ACL rule, and what it is good for."""

    word: str
    why: str
    without: str
    probe: Callable[[Settings, str], bytes] | None = None
    """The command, as it is sent for a queue."""
    required: bool = False
    """Whether a configured feature does not work at all without it; else it only tells less."""
    touches_queue: bool = False
    """Whether the probe names keys of the queue, all that matter among the permissions' probes."""
    needed: Callable[[Settings], bool] = lambda _: True

    @property
    def command(self) -> str:
        """The command's name as people write it."""
        return self.word.removeprefix("+").replace("|", " ").upper()


def _guards(settings: Settings) -> bool:
    own = (*settings.queue.values(), *settings.match)
    general = settings.stalled_check.mass_expiry
    return bool(general) or any(override.stalled_check.mass_expiry for override in own)


def _promote(settings: Settings, queue: str) -> bytes:
    limit = settings.for_queue(queue).promote.limit
    return wire.promote(queue, limit, settings.node.base)


def _stalled_check(settings: Settings, queue: str) -> bytes:
    own = settings.for_queue(queue).stalled_check
    return wire.stalled_check(queue, own.max_stalled, own.limit, settings.node.base)


# The one list behind `check --acl`, the ACL check and docs/acl.md. Some of these commands only
# run inside the peek, a script: the server asks the same permissions there.
PERMISSIONS = (
    Permission(
        "+client|setname",
        "names its connections",
        "its connections have no name in CLIENT LIST",
        lambda _settings, _queue: wire.pack("CLIENT", "SETNAME", "emqtimerd"),
    ),
    Permission(
        "+cluster|slots",
        "reads which primary serves which slots, in a cluster",
        "no primary is known: nothing is swept",
        lambda _settings, _queue: wire.pack("CLUSTER", "SLOTS"),
        required=True,
        needed=lambda settings: settings.node.url.topology == "cluster",
    ),
    Permission(
        "+emq.version",
        "reads the capability tokens, on every new connection",
        "the fence is not passed: nothing is swept",
        lambda _settings, _queue: wire.VERSION,
        required=True,
    ),
    Permission(
        "+get",
        "reads the brand, on every new connection",
        "the fence is not passed: nothing is swept",
        lambda _settings, _queue: wire.READ_BRAND,
        required=True,
    ),
    Permission(
        "+info",
        "reads run_id, which tells an expiry that crossed a restart from a stall; check reads "
        "version, role, persistence and memory",
        "expiries are unattributed, leases are not counted by epoch, a restart of the server goes "
        "unnoticed (no grace, no restart report), and once --dry-run cannot foresee a stall check",
        lambda _settings, _queue: wire.INFO_SERVER,
    ),
    Permission(
        "+time",
        "reads the server's clock, which all due times and deadlines go by",
        "no lateness is measured, no job is promoted between two rounds, and once --dry-run fails",
        lambda _settings, _queue: wire.TIME,
    ),
    Permission(
        "+emq.promote",
        "moves due jobs to pending",
        "due jobs stay in the schedule",
        _promote,
        required=True,
        touches_queue=True,
    ),
    Permission(
        "+emq.stalled.check",
        "recovers and buries jobs whose lease has expired",
        "lost jobs are never recovered",
        _stalled_check,
        required=True,
        touches_queue=True,
    ),
    Permission(
        "+zrange",
        "reads the first due times and deadlines",
        "expiries are unattributed, leases are not counted by epoch, no lateness is measured, no "
        "job is promoted between two rounds, and once --dry-run fails",
        lambda _settings, queue: wire.head(queue, "schedule"),
    ),
    Permission(
        "+zcard",
        "reads the sizes of a queue's sets",
        "the metric emqtimerd_queue_jobs and the status page lack the sizes",
        lambda _settings, queue: wire.pack("ZCARD", wire.queue_key(queue, "dead")),
    ),
    Permission(
        "+multi",
        "reads the leases and checks them in one transaction",
        "expiries are unattributed, and leases are not counted by epoch",
    ),
    Permission(
        "+exec",
        "ends that transaction",
        "expiries are unattributed, and leases are not counted by epoch",
    ),
    Permission(
        "+eval_ro",
        "reads leases and their epochs just before a stall check; the script only reads",
        "expiries are unattributed, and leases are not counted by epoch",
        lambda _settings, queue: wire.peek(queue, 1),
    ),
    Permission(
        "+hget",
        "reads the epoch of a lease, inside that script",
        "expiries are unattributed, and leases are not counted by epoch",
        lambda _settings, queue: wire.pack("HGET", wire.row_key(queue, b"JOB"), "lease_epoch"),
        touches_queue=True,
    ),
    Permission(
        "+hmget",
        "reads rows that are due, for once --dry-run and check",
        "once --dry-run fails, and check sees no row that blocks a queue",
        lambda _settings, queue: wire.row(queue, b"JOB"),
    ),
    Permission(
        "+zcount",
        "counts expired leases, for stalled_check.mass_expiry",
        "the guard against mass expiry is off",
        lambda _settings, queue: wire.leases_expired(queue, 0)[0],
        needed=_guards,
    ),
    Permission(
        "+scan",
        "looks for queues, for discovery",
        "discovery finds nothing",
        lambda _settings, _queue: wire.scan(b"0", 1),
        required=True,
        needed=lambda settings: settings.discovery.enabled,
    ),
)

BRAND_PATTERN = "%R~" + wire.BRAND_KEY.decode()


def permissions(settings: Settings) -> list[Permission]:
    """What the configured features need."""
    return [permission for permission in PERMISSIONS if permission.needed(settings)]


def acl_rule(settings: Settings) -> str:
    """The smallest ACL rule that works, ready for the prompt of valkey-cli or redis-cli."""
    user = settings.node.username or settings.node.url.username
    # `reset` first: otherwise a user who is there already keeps what he has, passwords too.
    words = ["reset", "on", ">PASSWORD", *acl_words(settings)]
    return " ".join(["ACL SETUSER", *map(quoted, [user or "emqtimerd", *words])])


def acl_words(settings: Settings) -> list[str]:
    """The keys and commands of the rule."""
    # Not `+select|2`: servers still take a first argument there, and warn that they will not.
    select = ["+select"] if settings.node.url.db else []
    commands = [permission.word for permission in permissions(settings)]
    return [*queue_patterns(settings), BRAND_PATTERN, *select, *commands]


def queue_patterns(settings: Settings) -> list[str]:
    """The key patterns of the queues that are listed or may be discovered."""
    discovery = settings.discovery
    globs = [_server_glob(glob) for glob in discovery.include] if discovery.enabled else []
    names = [escaped_name(name) for name in settings.queues if not settings.discovers(name)]
    # Which queues there will be may be told later, by --queue.
    found = list(dict.fromkeys([*names, *globs])) or ["*"]
    if "*" in found or len(found) > MOST_PATTERNS:
        found = ["*"]
    return [f"~emq:{{{pattern}}}:*" for pattern in found]


def escaped_name(name: str) -> str:
    """A name as a pattern of the server that matches nothing else."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", name)


def _server_glob(glob: str) -> str:
    """A glob of ours as a pattern of the server, wider where the two differ.

    The server matches bytes, so its `?` and `[^a]` are not ours for a name that is not ASCII.
    """
    parts = re.findall(r"\[[!]?\]?[^\]]*\]|.", glob)
    return "".join(_server_glob_part(part) for part in parts)


def _server_glob_part(part: str) -> str:
    if part in ("*", "?") or part.startswith("[!"):
        return "*"
    if len(part) == 1:
        return escaped_name(part)
    inside = re.sub(r"([\]\\^])", r"\\\1", part[1:-1])
    return f"[{inside}]" if inside.isascii() else "*"


def quoted(word: str) -> str:
    """A word as the command line of valkey-cli takes it."""
    if not re.search(r"[\"'\\]", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def acl_document(settings: Settings) -> dict[str, Any]:
    """The rule as a document, with what each command is for."""
    return {
        "rule": acl_rule(settings),
        "commands": [
            {"word": p.word, "why": p.why, "without": p.without, "required": p.required}
            for p in permissions(settings)
        ],
    }
