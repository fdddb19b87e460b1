"""What the node lets us do: the ACL for each command that will be sent, and the two verbs."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from emqtimerd import wire
from emqtimerd.acl import (
    BRAND_PATTERN,
    MOST_PATTERNS,
    PERMISSIONS,
    Permission,
    escaped_name,
    permissions,
    quoted,
)
from emqtimerd.check.configuration import names
from emqtimerd.check.findings import Finding, denied, failed, is_denied, passed, skipped, warned
from emqtimerd.config import Settings
from emqtimerd.node import Node
from emqtimerd.verdict import FIXES

QUEUES_PER_PROBE = 500
"""How many queues share one transaction of probes: the server keeps it, some 0.5 MB, until the
connection closes."""

NAMES_TRIED = 1_000
"""How many names are made up to find one that a primary of a cluster would have: it misses one that
has a hundredth of the slots once in 20,000 times."""

NEEDED_TO_SWEEP = {p.word for p in PERMISSIONS if p.required} - {"+scan"}


@dataclass(slots=True)
class Allowance:
    """What the probes brought to light."""

    commands: int
    """How many commands were tried."""
    queues: int
    """On the keys of how many queues, if it is known which ones will be swept."""
    denied: dict[str, Permission] = field(default_factory=dict)
    denied_keys: dict[str, list[str]] = field(default_factory=dict)
    """Queues whose keys are denied, each with the commands that are."""
    brand_key_denied: bool = False
    absent: dict[str, Permission] = field(default_factory=dict)
    """Commands that are not needed for a sweep and that the server does not have."""
    refused: dict[str, list[str]] = field(default_factory=dict)
    """Other errors that a sweep would get: the text, and on which queues."""

    @property
    def is_whole(self) -> bool:
        """Whether everything is allowed."""
        return not (self.denied or self.denied_keys or self.brand_key_denied or self.absent)

    @property
    def stops_sweeps(self) -> bool:
        """Whether a sweep does not even reach the question of whether the node takes it."""
        return bool(
            self.denied_keys or self.brand_key_denied or NEEDED_TO_SWEEP & self.denied.keys()
        )

    def take(self, permission: Permission, queue: str, reply: wire.Reply) -> None:
        """Take in the answer to one probe."""
        if not isinstance(reply, wire.ReplyError):
            return
        if reply.code != "NOPERM":
            if str(reply).startswith("ERR unknown command") and not permission.required:
                self.absent[permission.word] = permission
            if permission.touches_queue and permission.required:
                self.refused.setdefault(str(reply), []).append(queue)
        elif "to access" not in str(reply):
            self.denied[permission.word] = permission
        elif permission.word == "+get":
            self.brand_key_denied = True
        else:
            commands = self.denied_keys.setdefault(queue, [])
            if permission.command not in commands:
                commands.append(permission.command)


# --- asking -------------------------------------------------------------------------------------


def probe(settings: Settings, node: Node, takes: Callable[[str], bool]) -> Allowance:
    """Try everything that will be sent, without running it; `takes` says whether a queue of a name
    would be on this node. Raises NodeFault."""
    needed = permissions(settings)
    queues, known = _queues_to_try(settings, takes)
    allowance = Allowance(len(needed), len(queues) if known else 0)
    executed = _executed(node)
    # The server wraps a denial: "EXECABORT Transaction discarded because of: NOPERM …".
    if isinstance(executed, wire.ReplyError) and "NOPERM" in str(executed):
        allowance.denied["+exec"] = _by_word("+exec")
    elif isinstance(executed, wire.ReplyError):
        allowance.refused[str(executed)] = list(queues)
    for start in range(0, len(queues), QUEUES_PER_PROBE):
        tries = [
            (permission, queue, permission.probe(settings, queue))
            for number, queue in enumerate(queues[start : start + QUEUES_PER_PROBE], start)
            for permission in needed
            if permission.probe and (number == 0 or permission.touches_queue)
        ]
        replies = _queued(node, [command for _, _, command in tries])
        if isinstance(replies, wire.ReplyError):
            if is_denied(replies):
                allowance.denied["+multi"] = _by_word("+multi")
            else:
                allowance.refused[str(replies)] = list(queues)
            break
        for (permission, queue, _), reply in zip(tries, replies, strict=True):
            allowance.take(permission, queue, reply)
    if not known:
        allowance.denied_keys.clear()
    return allowance


def _queued(node: Node, commands: Sequence[bytes]) -> list[wire.Reply] | wire.ReplyError:
    """What the server says to commands without running any of them; or what MULTI failed with.

    They are queued in a transaction that nobody ever executes: the connection closes instead. A
    server judges a command when it is queued (ACL, slot, read-only, memory), so the answer is the
    one that the daemon would get, and whatever a verb would do, it does not do it. Better than a
    verb with a limit of 0, which the contract leaves open, and than ACL DRYRUN, which needs a
    permission of its own that a small rule should not have.
    """
    with contextlib.closing(node.dial()) as link:
        deadline = time.monotonic() + node.timeout_seconds
        (opened,) = link.exchange(wire.MULTI, 1, deadline)
        if opened != b"OK":
            # Outside a transaction the verbs would run.
            return opened if isinstance(opened, wire.ReplyError) else wire.ReplyError("ERR MULTI")
        deadline = time.monotonic() + node.timeout_seconds
        return link.exchange(list(commands), len(commands), deadline)


def _executed(node: Node) -> wire.Reply:
    """What the server says to EXEC after nothing; None if it does not take MULTI."""
    with contextlib.closing(node.dial()) as link:
        deadline = time.monotonic() + node.timeout_seconds
        opened, executed = link.exchange([wire.MULTI, wire.EXEC], 2, deadline)
        return executed if opened == b"OK" else None


def _by_word(word: str) -> Permission:
    return next(permission for permission in PERMISSIONS if permission.word == word)


def _queues_to_try(settings: Settings, takes: Callable[[str], bool]) -> tuple[Sequence[str], bool]:
    """The queues to try the permissions on, and whether these are the ones that will be swept."""
    if settings.queues:
        return settings.queues, True
    # With discovery, one that it would take if it were there.
    plain = (re.sub(r"\[(.)[^\]]*\]", r"\1", glob) for glob in settings.discovery.include)
    examples = [re.sub(r"[*?]", "x", name) for name in plain]
    found = [made for name in examples for made in _made_up(name, takes)]
    found = [name for name in found if settings.discovers(name)]
    return found or list(_made_up("emqtimerd-check", takes)), bool(found)


def _made_up(name: str, takes: Callable[[str], bool]) -> Iterator[str]:
    """The name, or the first that begins so and would be here; none if there is no such."""
    tries = (name, *(f"{name}-{number}" for number in range(NAMES_TRIED)))
    yield from islice(filter(takes, tries), 1)


# --- judging ------------------------------------------------------------------------------------

_RENAMED = "look for rename-command in the server's configuration"


def acl(settings: Settings, allowance: Allowance) -> Iterator[Finding]:
    """What the ACL denies, each with the words that grant it."""
    user = quoted(settings.node.username or settings.node.url.username or "default")
    grant = f"as the node's operator: ACL SETUSER {user}"
    for permission in allowance.denied.values():
        found = f"{permission.command} is denied: {permission.without}"
        judge = failed if permission.required else warned
        yield judge("acl", found, f"{grant} {permission.word}")
    if allowance.brand_key_denied:
        found = "the key {emq}:version is denied: the fence is not passed, nothing is swept"
        yield failed("acl", found, f"{grant} {BRAND_PATTERN}")
    if allowance.denied_keys:
        queues = list(allowance.denied_keys)
        patterns = [quoted(f"~emq:{{{escaped_name(queue)}}}:*") for queue in queues]
        if len(patterns) > MOST_PATTERNS:
            patterns = ["~emq:{*}:*"]
        verbs = dict.fromkeys(c for commands in allowance.denied_keys.values() for c in commands)
        found = f"keys of {names(queues)} are denied (to {', '.join(verbs)})"
        yield failed("acl", found, f"{grant} {' '.join(patterns)}")
    for permission in allowance.absent.values():
        found = f"the server has no {permission.command}: {permission.without}"
        yield warned("acl", found, _RENAMED)
    if "+multi" in allowance.denied:
        yield skipped("acl", "without MULTI no other command can be tried without running it")
    elif allowance.is_whole:
        count = allowance.queues
        where = f" on the keys of {count} {'queue' if count == 1 else 'queues'}" if count else ""
        yield passed("acl", f"all {allowance.commands} commands are allowed{where}")


def sweeps(allowance: Allowance, *, replica: bool) -> Iterator[Finding]:
    """Whether the node would take the two verbs now, its ACL aside."""
    if replica:
        yield skipped("sweeps", "a replica takes none (see role)")
    elif "+multi" in allowance.denied:
        yield denied("sweeps", "MULTI")
    elif allowance.refused:
        for text, queues in allowance.refused.items():
            where = f" for {names([*dict.fromkeys(queues)])}" if allowance.queues else ""
            renamed = _RENAMED if "unknown command" in text else ""
            fix = FIXES.get(text.partition(" ")[0], renamed)
            yield failed("sweeps", f"refused now{where}: {text}", fix)
    elif allowance.stops_sweeps:
        yield denied("sweeps", "them, or the fence before them")
    else:
        yield passed("sweeps", "the node would take both verbs (queued, never executed)")
