"""The status page: what the daemon knows, for people; plain HTML without any script."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from operator import attrgetter
from urllib.parse import urlencode

from emqtimerd import __version__, wire
from emqtimerd.ledger import Ledger, NodeFacts, Overview, QueueFacts, VerbFacts
from emqtimerd.sweeper import Failure, Verb

QUEUES_A_PAGE = 100
"""How many queues one page shows: as many as people look through, and some 100 kB."""

TROUBLES_SHOWN = 20
"""How many troubles are spelled out on top; the table has them all, first."""

REFRESH_SECONDS = 5
"""How often the page loads itself anew, unless it is paused."""

OVERDUE_WORTH_NAMING_SECONDS = 1.0
"""Below a second a due job merely waits for its sweep: naming it would make the order flicker."""

FILTER_CHARACTERS = wire.MAX_QUEUE_NAME_BYTES

NOTHING = "\N{EN DASH}"

VERB_NAMES: Mapping[Verb, str] = {"promote": "promotion", "stalled_check": "the stall check"}


@dataclass(frozen=True, slots=True)
class View:
    """What the reader asked to see."""

    filter: str = ""
    page: int = 1
    paused: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "View":
        """Read a query; what makes no sense in it is left out."""
        number = query.get("page", "")
        # Nine digits are more pages than there can be, and still a cheap number.
        page = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 1
        return cls(query.get("q", "")[:FILTER_CHARACTERS], max(page, 1), "paused" in query)

    def link(self, page: int | None = None, paused: bool | None = None) -> str:
        """The address of this view with another page, or another pause."""
        view = replace(
            self,
            page=self.page if page is None else page,
            paused=self.paused if paused is None else paused,
        )
        query: dict[str, str | int] = {}
        if view.filter:
            query["q"] = view.filter
        if view.page > 1:
            query["page"] = view.page
        if view.paused:
            query["paused"] = 1
        return f"/?{urlencode(query, errors='replace')}" if query else "/"


def render(ledger: Ledger, view: View) -> str:
    """The whole page."""
    overview = ledger.overview()
    summary = _Summary.of(ledger, view, overview.now)
    refresh = "" if view.paused else f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
    verdict = "Ready" if overview.health.ready else "Not ready"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{refresh}
<title>{verdict} · emqtimerd</title>
<style>{STYLE}</style>
</head>
<body>
{_header(overview, summary.troubled)}
<main>
{_totals(overview, summary)}
{_troubles(overview, summary.troubled, ledger.queues(summary.troubled[:TROUBLES_SHOWN]))}
{_nodes(overview)}
{_queues(ledger, overview, summary, view)}
</main>
{_footer(overview, view)}
</body>
</html>
"""


@dataclass(frozen=True, slots=True)
class _Summary:
    """What the page says of all queues together, and the order in which it lists them."""

    total: int
    promoted: int
    recovered: int
    dead_lettered: int
    restart: int
    troubled: Sequence[str]
    """The names of the queues that are blocked or failing, in the order of the page."""
    found: Sequence[str]
    """The names that the filter leaves, in the order of the page."""

    @classmethod
    def of(cls, ledger: Ledger, view: View, now: float) -> "_Summary":
        columns = ledger.columns(
            [
                attrgetter("promoted"),
                attrgetter("recovered"),
                attrgetter("dead_lettered"),
                attrgetter("restart"),
                lambda queue: _rank(queue, now),
            ]
        )
        ranks = sorted(columns.pop())
        promoted, recovered, dead_lettered, restart = (sum(column) for column in columns)
        return cls(
            len(ranks),
            promoted,
            recovered,
            dead_lettered,
            restart,
            troubled=[name for *marks, _, _, name in ranks if not all(marks)],
            found=[rank[-1] for rank in ranks if view.filter in rank[-1]],
        )


# --- words --------------------------------------------------------------------------------------


def _text(text: str) -> str:
    """Any text made safe: markup escaped, and whatever would act instead of show made visible."""
    return escape(wire.escaped(text))


def span(seconds: float) -> str:
    """A length of time as people say it: one unit, and no more digits than matter."""
    # Twice a unit before it is used: half of one is then a fair thing to round away.
    for limit, size, unit in (
        (1, 0.001, "ms"),
        (120, 1, "s"),
        (7200, 60, "min"),
        (172800, 3600, "h"),
    ):
        if seconds < limit:
            value = seconds / size
            return f"{value:.1f} {unit}" if value < 9.95 and size <= 1 else f"{value:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _ago(at: float, now: float) -> str:
    if not at:
        return "never"
    return f"{span(now - at)} ago" if now - at >= 1 else "just now"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


# --- parts --------------------------------------------------------------------------------------


def _header(overview: Overview, troubled: Sequence[str]) -> str:
    health = overview.health
    if not health.alive:
        state, title = "bad", "Stuck"
    elif not health.ready:
        state, title = "bad", "Not ready"
    else:
        state, title = "good", "Ready"
    if health.reasons:
        items = "".join(f"<li>{_text(reason)}</li>" for reason in health.reasons)
        details = f"<ul>{items}</ul>"
    elif attention := _attention(overview, troubled):
        who = [_count(len(troubled), "queue")] if troubled else []
        who += ["the last reload"] if overview.reload_problem is not None else []
        words = " and ".join(who)
        need = "needs" if attention == 1 else "need"
        details = f"<p>Every node is reached. {words[0].upper()}{words[1:]} {need} attention.</p>"
    elif overview.queues:
        details = "<p>Every node is reached, and its queues are swept on time.</p>"
    else:
        details = "<p>Every node is reached. No queue is configured or was discovered yet.</p>"
    index, count = overview.shard
    shard = f" · part {index + 1} of {count}" if count > 1 else ""
    return f"""<header>
<p class="name">emqtimerd <span class="muted">{_text(__version__)}{shard}</span></p>
<section class="verdict {state}" aria-label="Verdict">
<h1>{title}</h1>
{details}
</section>
</header>"""


def _attention(overview: Overview, troubled: Sequence[str]) -> int:
    """How many things somebody should look at; the nodes have the verdict for themselves."""
    return len(troubled) + (overview.reload_problem is not None)


def _totals(overview: Overview, summary: _Summary) -> str:
    attention = _attention(overview, summary.troubled)
    tiles = (
        ("Queues", summary.total, ""),
        ("Promoted", summary.promoted, ""),
        ("Recovered", summary.recovered, ""),
        ("Dead-lettered", summary.dead_lettered, ""),
        ("Crossed a restart", summary.restart, ""),
        ("Need attention", attention, ' class="warn"' if attention else ""),
    )
    items = "".join(
        f"<div{attributes}><dt>{label}</dt><dd>{value:,}</dd></div>"
        for label, value, attributes in tiles
    )
    return f'<dl class="tiles">{items}</dl>'


def _troubles(overview: Overview, names: Sequence[str], shown: Sequence[QueueFacts]) -> str:
    items = []
    if overview.reload_problem is not None:
        items.append(
            "The last reload changed nothing, the configuration before it is in force: "
            f"{_text(overview.reload_problem)}"
        )
    for queue in shown:
        for verb, facts in _verbs(queue):
            items += _verb_troubles(queue, verb, facts)
    if len(names) > TROUBLES_SHOWN:
        items.append(f"{_count(len(names) - TROUBLES_SHOWN, 'more queue')}: see the table.")
    if not items:
        return ""
    body = "".join(f"<li>{item}</li>" for item in items)
    return f'<section class="card troubles"><h2>Needs attention</h2><ul>{body}</ul></section>'


def _verb_troubles(queue: QueueFacts, verb: Verb, facts: VerbFacts) -> list[str]:
    name = f"<strong>{_text(queue.name)}</strong>"
    items = []
    if facts.blocked is not None:
        job_id = facts.blocked.job_id
        row = "a row" if job_id is None else f"<code>{_text(wire.printable(job_id))}</code>"
        items.append(
            f"{name}: {VERB_NAMES[verb]} is blocked by {row}: {_text(facts.blocked.reason)}. "
            "Jobs behind it wait until that row is removed."
        )
    if (failure := _failure(facts)) is not None:
        items.append(f"{name}: {VERB_NAMES[verb]} failed: {_text(failure.message)}")
    return items


def _nodes(overview: Overview) -> str:
    cards = "".join(_node(node, overview.now) for node in overview.nodes)
    heading = "Node" if len(overview.nodes) == 1 else "Nodes"
    return f'<section><h2>{heading}</h2><div class="nodes">{cards}</div></section>' if cards else ""


def _node(node: NodeFacts, now: float) -> str:
    if node.since is None:
        state = "not reached yet"
    else:
        state = f"{'up' if node.up else 'down'} for {span(now - node.since)}"
    facts = []
    if node.identity is not None:
        facts = [
            ("run_id", f"<code>{_text(node.identity.run_id or 'not known')}</code>"),
            ("version", _text(node.identity.version or "not known")),
            ("brand", _text(node.identity.brand)),
        ]
    facts.append(("restarts seen", f"{node.restarts:,}"))
    if node.reason:
        facts.append(("reason", _text(node.reason)))
    items = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts)
    badge = "good" if node.up else "bad"
    return (
        f'<article class="card"><h3>{_text(node.name)} '
        f'<span class="badge {badge}">{state}</span></h3><dl class="facts">{items}</dl></article>'
    )


# --- the queues ---------------------------------------------------------------------------------


def _verbs(queue: QueueFacts) -> tuple[tuple[Verb, VerbFacts], ...]:
    return ("promote", queue.promote), ("stalled_check", queue.stalled_check)


def _failure(facts: VerbFacts) -> Failure | None:
    """Why the verb fails, if that is the queue's own trouble: a node's is told of once, for it."""
    return None if facts.failure is None or facts.failure.of_node else facts.failure


def _rank(queue: QueueFacts, now: float) -> tuple[bool, bool, float, int, str]:
    """Blocked first, then failing, then the longest overdue, then those that moved the most."""
    blocked = queue.promote.blocked or queue.stalled_check.blocked
    failing = _failure(queue.promote) or _failure(queue.stalled_check)
    overdue = queue.overdue_seconds(now)
    overdue = overdue if overdue >= OVERDUE_WORTH_NAMING_SECONDS else 0.0
    return not blocked, not failing, -overdue, -queue.moved, queue.name


COLUMN_GROUPS = (
    ("In the queue", ("Pending", "Active", "Scheduled", "Dead")),
    ("Moved by this daemon", ("Promoted", "Recovered", "Dead-lettered", "Restart-crossing")),
    ("Promotion", ("Lateness", "Last", "Next due")),
    ("Stall check", ("Last",)),
)

# A card on a narrow screen has no groups: there the two columns of one name need their own.
CARD_LABELS = tuple(
    f"Last {group.lower()}" if column == "Last" else column
    for group, columns in COLUMN_GROUPS
    for column in columns
)


def _queues(ledger: Ledger, overview: Overview, summary: _Summary, view: View) -> str:
    found, total = summary.found, summary.total
    if not total:
        return ""
    pages = max(1, -(-len(found) // QUEUES_A_PAGE))
    number = min(view.page, pages)
    first = (number - 1) * QUEUES_A_PAGE
    part = ledger.queues(found[first : first + QUEUES_A_PAGE])
    return f"""<section>
<div class="bar"><h2>Queues</h2>{_filter_form(view)}</div>
<p class="muted">{_extent(view, first, len(part), len(found), total)}</p>
{_table(overview, part) if part else ""}
{_pages(view, number, pages)}
</section>"""


def _filter_form(view: View) -> str:
    paused = '<input type="hidden" name="paused" value="1">' if view.paused else ""
    clear = f'<a href="{escape(replace(view, filter="", page=1).link())}">clear</a>'
    return (
        f'<form action="/" method="get" role="search">{paused}'
        f'<input type="search" name="q" value="{_text(view.filter)}" '
        f'aria-label="Show queues whose name contains" placeholder="part of a name" '
        f'maxlength="{FILTER_CHARACTERS}"><button>Show</button>'
        f"{clear if view.filter else ''}</form>"
    )


def _extent(view: View, first: int, shown: int, found: int, total: int) -> str:
    """Which queues the table shows, of how many, and by which rule."""
    if not shown:
        return f"None of {_count(total, 'queue')} has “{_text(view.filter)}” in its name."
    matching = f" whose name contains “{_text(view.filter)}”" if view.filter else ""
    if shown == found:
        which = f"{_count(found, 'queue')}{matching}"
    else:
        which = f"{first + 1:,} to {first + shown:,} of {_count(found, 'queue')}{matching}"
    return (
        f"{which}: blocked first, then failing, then the longest overdue, then the busiest. "
        "What is in a queue is as of its last stall check."
    )


def _pages(view: View, number: int, pages: int) -> str:
    if pages == 1:
        return ""
    back = f'<a rel="prev" href="{escape(view.link(page=number - 1))}">Previous</a>'
    on = f'<a rel="next" href="{escape(view.link(page=number + 1))}">Next</a>'
    return (
        f'<nav aria-label="Pages">{back if number > 1 else ""}'
        f"<span>Page {number:,} of {pages:,}</span>{on if number < pages else ''}</nav>"
    )


def _table(overview: Overview, queues: Sequence[QueueFacts]) -> str:
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(names)}">{group}</th>'
        for group, names in COLUMN_GROUPS
    )
    names = "".join(
        f'<th scope="col" role="columnheader">{column}</th>'
        for _, columns in COLUMN_GROUPS
        for column in columns
    )
    rows = "\n".join(_row(overview, queue) for queue in queues)
    # The roles say again what the elements are: narrow screens show rows as cards, and browsers
    # forget a table's meaning with its layout.
    return f"""<div class="scroll" role="region" aria-label="Queues" tabindex="0">
<table role="table">
<thead role="rowgroup">
<tr class="groups" role="row"><td></td>{groups}</tr>
<tr role="row"><th scope="col" role="columnheader">Queue</th>{names}</tr>
</thead>
<tbody role="rowgroup">
{rows}
</tbody>
</table>
</div>"""


def _row(overview: Overview, queue: QueueFacts) -> str:
    now, wall = overview.now, overview.wall
    lateness = queue.promote.lateness_seconds
    values = (
        *(f"{size:,}" for size in queue.jobs),
        f"{queue.promoted:,}",
        f"{queue.recovered:,}",
        f"{queue.dead_lettered:,}",
        f"{queue.restart:,}",
        NOTHING if lateness is None else span(lateness),
        _ago(queue.promote.last_sweep, wall),
        _next_due(queue, now),
        _ago(queue.stalled_check.last_sweep, wall),
    )
    cells = "".join(
        f'<td role="cell" data-label="{label}">{_dimmed(value)}</td>'
        for label, value in zip(CARD_LABELS, values, strict=True)
    )
    name = f'<th scope="row" role="rowheader">{_text(queue.name)}{_badges(queue)}</th>'
    return f'<tr role="row">{name}{cells}</tr>'


def _dimmed(value: str) -> str:
    """Nothing to see should not draw the eye."""
    return f'<span class="muted">{value}</span>' if value in ("0", NOTHING, "never") else value


def _next_due(queue: QueueFacts, now: float) -> str:
    due = queue.promote.due
    if due is None:
        return NOTHING
    if now - due >= OVERDUE_WORTH_NAMING_SECONDS:
        return f"overdue {span(now - due)}"
    return f"in {span(due - now)}" if due > now else "now"


def _badges(queue: QueueFacts) -> str:
    marks = []
    for verb, facts in _verbs(queue):
        if facts.blocked:
            marks.append(("bad", f"{VERB_NAMES[verb].removeprefix('the ')} blocked"))
        if _failure(facts):
            marks.append(("bad", f"{VERB_NAMES[verb].removeprefix('the ')} failing"))
    if queue.guarded:
        marks.append(("warn", "mass expiry spared"))
    return "".join(f' <span class="badge {kind}">{words}</span>' for kind, words in marks)


def _footer(overview: Overview, view: View) -> str:
    at = datetime.fromtimestamp(overview.wall, UTC)
    if view.paused:
        turn = f'<a href="{escape(view.link(paused=False))}">Refresh every {REFRESH_SECONDS} s</a>'
    else:
        turn = f'<a href="{escape(view.link(paused=True))}">Pause the refresh</a>'
    return f"""<footer>
<p>As of <time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M:%S} UTC</time>,
running for {span(max(overview.wall - overview.started, 0.0))}. {turn}.</p>
<p><a href="/metrics">metrics</a> · <a href="/readyz">readyz</a> ·
<a href="/healthz">healthz</a></p>
</footer>"""


# --- the looks ----------------------------------------------------------------------------------

STYLE = """
:root {
  --page: #f6f6f3; --card: #fff; --line: #e1e1db; --text: #1c1f23; --muted: #5a616b;
  --good: #17693f; --good-soft: #e2f2e9; --bad: #a3261d; --bad-soft: #fbe7e4;
  --warn: #7a4f00; --warn-soft: #fbf0d9; --link: #1f5fa8;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131517; --card: #1b1e21; --line: #2d3237; --text: #e6e8eb; --muted: #9ca4ae;
    --good: #6fd3a0; --good-soft: #16291f; --bad: #ff9d93; --bad-soft: #331a18;
    --warn: #f0c06b; --warn-soft: #2d2412; --link: #8ab8f0;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 84rem; padding: 1.5rem 1.25rem 2rem;
  background: var(--page); color: var(--text);
  font: 0.9375rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: anywhere;
}
h1, h2, h3, p, ul, dl, dd { margin: 0; padding: 0; }
h1 { font-size: 1.5rem; line-height: 1.25; font-weight: 650; }
h2 { font-size: 1rem; font-weight: 650; }
h3 { font-size: 0.9375rem; font-weight: 600; }
a { color: var(--link); text-underline-offset: 0.15em; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
code { font: 0.8125rem/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
.muted { color: var(--muted); font-weight: 400; }
main > *, .verdict { margin-top: 1.25rem; }
section > h2, .bar { margin-bottom: 0.5rem; }
.name { font-weight: 650; letter-spacing: 0.01em; }
.card, .verdict, .tiles > div, .scroll {
  background: var(--card); border: 1px solid var(--line); border-radius: 0.625rem;
}
.card, .verdict { padding: 0.875rem 1rem; }
.verdict { border-left: 0.375rem solid var(--bad); margin-top: 0.75rem; }
.verdict h1 { color: var(--bad); }
.verdict.good { border-left-color: var(--good); }
.verdict.good h1 { color: var(--good); }
.verdict ul, .troubles ul { padding-left: 1.125rem; }
.verdict ul, .verdict p { margin-top: 0.25rem; }
.tiles { display: grid; gap: 0.625rem; grid-template-columns: repeat(6, 1fr); }
.tiles > div { padding: 0.625rem 0.875rem; }
.tiles dt { color: var(--muted); font-size: 0.8125rem; }
.tiles dd { font-size: 1.375rem; line-height: 1.3; font-weight: 600; }
.tiles .warn, .troubles { border-color: var(--warn); background: var(--warn-soft); }
.tiles .warn dt, .tiles .warn dd, .troubles h2 { color: var(--warn); }
.troubles li + li { margin-top: 0.375rem; }
.nodes {
  display: grid; gap: 0.625rem;
  grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr));
}
.facts { margin-top: 0.5rem; display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; }
.facts dt { color: var(--muted); font-size: 0.8125rem; }
.badge {
  display: inline-block; padding: 0 0.5rem; border-radius: 1rem; font-size: 0.75rem;
  white-space: nowrap;
  font-weight: 600; line-height: 1.6; background: var(--bad-soft); color: var(--bad);
}
.badge.good { background: var(--good-soft); color: var(--good); }
.badge.warn { background: var(--warn-soft); color: var(--warn); }
.bar {
  display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem;
  align-items: center; justify-content: space-between;
}
form { display: flex; gap: 0.5rem; align-items: center; }
input, button {
  font: inherit; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: 0.375rem; padding: 0.25rem 0.625rem; min-width: 0;
}
input { border-color: var(--muted); }
button { cursor: pointer; border-color: var(--muted); }
::placeholder { color: var(--muted); opacity: 1; }
.scroll { overflow-x: auto; margin-top: 0.5rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.375rem 0.5rem; text-align: right; white-space: nowrap; }
thead th { color: var(--muted); font-size: 0.8125rem; font-weight: 500; }
.groups th { text-align: center; border-bottom: 1px solid var(--line); padding-bottom: 0.125rem; }
tbody tr { border-top: 1px solid var(--line); }
tbody tr:hover { background: var(--page); }
tr > :first-child { text-align: left; padding-left: 1rem; white-space: normal; min-width: 10rem; }
tr > :last-child { padding-right: 1rem; }
tbody th { font-weight: 600; }
nav { display: flex; gap: 1rem; justify-content: center; margin-top: 0.875rem; }
footer {
  margin-top: 1.5rem; color: var(--muted); font-size: 0.8125rem;
  display: flex; flex-wrap: wrap; gap: 0.25rem 1.5rem; justify-content: space-between;
}
@media (max-width: 60rem) {
  .tiles { grid-template-columns: repeat(3, 1fr); }
}
@media (max-width: 44rem) {
  body { padding: 1rem 0.875rem 1.5rem; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  form { width: 100%; }
  input { flex: 1; }
  input, button { padding: 0.5rem 0.75rem; }
  .scroll { border: 0; background: none; overflow: visible; }
  table, tbody { display: block; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  tbody tr {
    display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.5rem; padding: 0.75rem 1rem;
    background: var(--card); border: 1px solid var(--line); border-radius: 0.625rem;
  }
  tbody tr + tr { margin-top: 0.625rem; }
  tbody tr:hover { background: var(--card); }
  tbody th { grid-column: 1 / -1; }
  tr > :first-child, tbody td, tr > :last-child { padding: 0.125rem 0; }
  tbody td { display: flex; flex-wrap: wrap; gap: 0 0.5rem; justify-content: space-between; }
  tbody td::before { content: attr(data-label); color: var(--muted); }
  tbody td:nth-child(n + 8) { grid-column: 1 / -1; }
}
"""

STYLE_HASH = "sha256-" + base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
"""Names the style to the browser, which refuses every other: a name cannot smuggle one in."""
