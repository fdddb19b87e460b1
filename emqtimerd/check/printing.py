"""The report for people, a line a finding, and for scripts, as a document."""

from collections.abc import Iterator
from typing import Any

from emqtimerd.check.findings import CHECKS, Finding, Report, Result
from emqtimerd.verdict import EXIT_DONE
from emqtimerd.wire import escaped

LINES_OF_QUEUES = 20
"""How many healthy queues have a line of their own; `--json` has them all."""

_COLORS: dict[Result, str] = {"pass": "32", "warn": "33", "fail": "31", "skip": "2"}
_WIDTH = max(len(check) for check in CHECKS)


def lines(report: Report, *, color: bool = False) -> Iterator[str]:
    """A line a finding, and below it the fix; what was not tried for one reason shares one."""
    results = [finding.result for finding in report.findings]
    healthy = [f for f in report.findings if f.check == "queue" and f.result == "pass"]
    left_out = set(map(id, healthy[LINES_OF_QUEUES:]))
    untried: dict[tuple[str | None, str], list[Finding]] = {}
    for finding in report.findings:
        if finding.result == "skip":
            untried.setdefault((finding.node, finding.found), []).append(finding)
        elif id(finding) not in left_out:
            yield _line(finding.result, finding.check, finding.found, finding.node, color)
        if finding.fix:
            # What others wrote (a brand, an error reply, a path) must not steer the terminal.
            yield f"      {'':{_WIDTH}}  fix: {escaped(finding.fix)}"
        if left_out and finding is healthy[LINES_OF_QUEUES - 1]:
            more = f"and {len(left_out)} more (--json lists all)"
            yield _line("pass", "queue", more, None, color)
    for (node, why), findings in untried.items():
        checks = list(dict.fromkeys(finding.check for finding in findings))
        if len(checks) == 1:
            yield _line("skip", checks[0], why, node, color)
        else:
            yield _line("skip", "", f"{', '.join(checks)}: {why}", node, color)
    yield ""
    yield (
        f"{results.count('pass')} passed, {results.count('warn')} to look at, "
        f"{results.count('fail')} failed, {results.count('skip')} not tried"
    )


def _line(result: Result, check: str, found: str, node: str | None, color: bool) -> str:
    word = f"\x1b[{_COLORS[result]}m{result}\x1b[0m" if color else result
    where = f"{node}: " if node else ""
    return f"{word}  {check:{_WIDTH}}  {escaped(where + found)}"


def document(report: Report) -> dict[str, Any]:
    """The report as the document that `--json` prints."""
    return {
        "ok": report.exit_code == EXIT_DONE,
        "nodes": [
            {
                "node": node.node,
                "run_id": node.run_id,
                "version": node.version,
                "brand": node.brand,
                "tokens": list(node.tokens),
            }
            for node in report.nodes
        ],
        "checks": [
            {
                "check": finding.check,
                "result": finding.result,
                "node": finding.node,
                "queue": finding.queue,
                "found": finding.found,
                "fix": finding.fix or None,
            }
            for finding in report.findings
        ],
    }
