"""What `check` found: findings in the order of the checks, and what each server said of itself."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from emqtimerd import wire
from emqtimerd.verdict import EXIT_DONE, EXIT_FAILED

Result: TypeAlias = Literal["pass", "warn", "fail", "skip"]

CHECKS = (
    # The configuration, and the way to the node.
    *("config", "topology", "reach", "tls", "auth"),
    # What answers there.
    *("server", "tokens", "brand", "run_id", "role", "clock"),
    # What it lets us do, and what the queues hold.
    *("acl", "sweeps", "queue", "rows"),
    # What it does with jobs in the long run.
    *("persistence", "memory"),
)
"""All checks, in the order of their findings: the first failure explains the later ones."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; a warning or a failure has the fix beside it."""

    check: str
    result: Result
    found: str
    fix: str = ""
    queue: str | None = None
    exit_code: int = EXIT_FAILED
    """What the command exits with if this is the first failure."""
    node: str | None = None
    """Which of several servers it is about."""


def passed(check: str, found: str, queue: str | None = None) -> Finding:
    """All is well."""
    return Finding(check, "pass", found, queue=queue)


def warned(check: str, found: str, fix: str) -> Finding:
    """It works, and perhaps not as it was meant."""
    return Finding(check, "warn", found, fix)


def failed(
    check: str, found: str, fix: str, exit_code: int = EXIT_FAILED, queue: str | None = None
) -> Finding:
    """It does not work."""
    return Finding(check, "fail", found, fix, queue, exit_code)


def skipped(check: str, why: str, queue: str | None = None) -> Finding:
    """It could not be looked at."""
    return Finding(check, "skip", why, queue=queue)


def denied(check: str, what: str) -> Finding:
    """The ACL kept us from looking; its own check names the permission, and the fix."""
    return skipped(check, f"the ACL denies {what} (see acl)")


def is_denied(reply: wire.Reply) -> bool:
    """Whether the ACL refused the command."""
    return isinstance(reply, wire.ReplyError) and reply.code == "NOPERM"


def has_failed(findings: Iterable[Finding], *checks: str) -> bool:
    """Whether one of these checks failed."""
    return any(finding.result == "fail" and finding.check in checks for finding in findings)


def in_order(findings: list[Finding]) -> list[Finding]:
    """The findings in the order of the checks, and for each check that was not made, why."""
    # A configuration with nothing to sweep keeps no other check from being made.
    failures = (f.check for f in findings if f.result == "fail" and f.check != "config")
    why = f"not tried after the failure of {next(failures, '')}"
    made = {finding.check for finding in findings}
    untried = [skipped(check, why) for check in CHECKS if check not in made]
    return sorted([*findings, *untried], key=lambda finding: CHECKS.index(finding.check))


@dataclass(slots=True)
class NodeReport:
    """What one server said of itself."""

    node: str
    run_id: str | None = None
    version: str | None = None
    brand: str | None = None
    tokens: tuple[str, ...] = ()


@dataclass(slots=True)
class Report:
    """All findings about one configuration and its nodes."""

    findings: list[Finding] = field(default_factory=list)
    nodes: list[NodeReport] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The first failure's, which explains the rest."""
        return next((f.exit_code for f in self.findings if f.result == "fail"), EXIT_DONE)
