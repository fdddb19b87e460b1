"""The status page: its facts, its order and bounds, and its looks in a real browser."""

import html
import re
import time
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser

from emqtimerd.http import Application, HttpServer
from emqtimerd.ledger import Ledger
from emqtimerd.node import Identity
from emqtimerd.page import QUEUES_A_PAGE, TROUBLES_SHOWN, View, render, span
from emqtimerd.sweeper import Blocked, Expiry, Failure, SweepResult

NODE = "valkey.internal:6379"
RUN_ID = "0f3d2c9ab1" * 4
POISON = b"JOB0192f7c5e1a07c3e\xff"
LONG_NAME = "a-queue-with-a-name-that-does-not-end-" + "x" * 120
HOSTILE = "<script>alert('orders')</script>&amp;"


class Texts(HTMLParser):
    """The words of a page, and its tags with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def page_of(ledger: Ledger, view: View | None = None) -> str:
    return render(ledger, view or View())


def text_of(ledger: Ledger, view: View | None = None) -> str:
    return Texts(page_of(ledger, view)).text


def rows_of(page: str) -> list[str]:
    """The names in the table, in their order."""
    found = re.findall(r'<th scope="row" role="rowheader">(.*?)(?: <span|</th>)', page)
    return [html.unescape(name) for name in found]


@pytest.fixture
def ledger() -> Ledger:
    """A ledger of a daemon at work, with all kinds of trouble."""
    now, wall = time.monotonic(), time.time()
    ledger = Ledger()
    ledger.set_nodes([NODE])
    ledger.node_seen(NODE, Identity("e" * 40, "9.1.1", "echomq:6.0.0", (), 0.0))
    ledger.node_seen(NODE, Identity(RUN_ID, "9.1.2", "echomq:6.0.0", (), 0.0))
    ledger.expect({"promote": 1.0, "stalled_check": 30.0})
    ledger.set_queues(["orders", "emails", "payments", "webhooks", HOSTILE, LONG_NAME])
    ledger.record(
        "promote",
        [
            SweepResult(
                "orders",
                "promote",
                NODE,
                passes=9,
                promoted=12_345,
                lateness_ms=[2.4],
                finished_at=wall - 3,
                next_due=now + 500,
            ),
            SweepResult("emails", "promote", NODE, passes=1, finished_at=wall, next_due=now - 90),
            SweepResult(
                "payments", "promote", NODE, blocked=Blocked(POISON, "EMQSTATE row is not native")
            ),
            SweepResult(HOSTILE, "promote", NODE, passes=1, promoted=1, finished_at=wall),
        ],
        0.1,
    )
    ledger.record(
        "stalled_check",
        [
            SweepResult(
                "orders",
                "stalled_check",
                NODE,
                passes=1,
                recovered=[b"1", b"2"],
                dead=[b"3"],
                expiries=[Expiry(b"1", "restart"), Expiry(b"2", "restart"), Expiry(b"3", "stall")],
                finished_at=wall - 20,
                jobs=(11, 22, 3_333, 44),
            ),
            SweepResult(
                "webhooks",
                "stalled_check",
                NODE,
                failure=Failure("WRONGTYPE", "WRONGTYPE <b>wrong</b> kind of value"),
            ),
        ],
        0.1,
    )
    return ledger


# --- facts --------------------------------------------------------------------------------------


def test_the_page_holds_every_fact(ledger: Ledger) -> None:
    """What a person asks when something is wrong is on one page."""
    text = text_of(ledger)
    for fact in (
        "Ready Every node is reached. 2 queues need attention.",
        NODE,
        RUN_ID,
        "9.1.2",
        "echomq:6.0.0",
        "restarts seen 1",
        "Promoted 12,346",
        "Crossed a restart 2",
        r"payments : promotion is blocked by JOB0192f7c5e1a07c3e\xff : EMQSTATE row is not native.",
        "webhooks : the stall check failed: WRONGTYPE <b>wrong</b> kind of value",
        "11 22 3,333 44 12,345 2 1 2 2.4 ms 3.0 s ago in 8 min 20 s ago",
        "overdue 90 s",
        "never",
    ):
        assert fact in text, fact


def test_the_verdict_says_why_not(ledger: Ledger) -> None:
    """The reasons stand first on the page."""
    ledger.node_down(NODE, "cannot connect (Connection refused)")
    text = text_of(ledger)
    assert "Not ready node valkey.internal:6379 is down for" in text
    assert "Connection refused" in text
    assert "<title>Not ready" in page_of(ledger)


def test_a_failed_reload_is_shown(ledger: Ledger) -> None:
    """Somebody thinks that the new configuration is in force."""
    assert "reload" not in text_of(ledger)
    assert "Need attention 2" in text_of(ledger)
    ledger.reloaded('promote.interval: must be positive, got "<0s>"')
    text = text_of(ledger)
    assert "The last reload changed nothing" in text
    assert 'got "<0s>"' in text
    assert "2 queues and the last reload need attention." in text
    assert "Need attention 3" in text
    ledger.set_queues(["orders"])
    text = text_of(ledger)
    assert "Every node is reached. The last reload needs attention." in text
    assert "Need attention 1" in text
    ledger.reloaded()
    assert "Need attention 0" in text_of(ledger)


def test_a_node_that_is_down_is_not_the_trouble_of_each_queue(ledger: Ledger) -> None:
    """Ten thousand queues of a node that is gone are one reason, and not as many alarms."""
    gone = Failure("timeout", "no reply within the timeout", of_node=True)
    ledger.record("promote", [SweepResult("orders", "promote", NODE, failure=gone, unknown=1)], 0.1)
    ledger.node_down(NODE, gone.message)
    text = text_of(ledger)
    assert text.count("no reply within the timeout") == 2, "the verdict, and the node's card"
    assert "Need attention 2" in text
    assert "orders promotion failing" not in text


def test_a_node_that_was_never_reached_says_so(ledger: Ledger) -> None:
    """Neither up nor down for any time."""
    ledger.set_nodes([NODE, "new:6379"])
    assert "new:6379 not reached yet" in text_of(ledger)


def test_a_spared_mass_expiry_is_marked(ledger: Ledger) -> None:
    """Beside the queue, as long as its last check was lenient."""
    ledger.guard("orders", raised=True)
    assert "orders mass expiry spared" in text_of(ledger)
    ledger.guard("orders", raised=False)
    assert "mass expiry" not in text_of(ledger)


def test_a_daemon_that_waits_for_queues_says_so(ledger: Ledger) -> None:
    """Discovery has found nothing yet, and that is no trouble."""
    ledger.set_queues([])
    assert "No queue is configured or was discovered yet." in text_of(ledger)


def test_a_part_of_the_queues_is_named(ledger: Ledger) -> None:
    """A replica that has a share of the work says which."""
    ledger.set_shard(1, 3)
    assert "part 2 of 3" in text_of(ledger)


def test_an_empty_daemon_has_a_page_too() -> None:
    """Right after the start, with nothing known."""
    text = text_of(Ledger())
    assert "Not ready no node is known yet" in text
    assert "Queues 0" in text


def test_names_cannot_become_markup(ledger: Ledger) -> None:
    """From whatever corner they come; direction marks and controls are shown, not obeyed."""
    evil = '"><img src=x onerror=alert(1)>\u202e\x1b\0'
    ledger.set_nodes([evil])
    ledger.node_seen(evil, Identity(evil, evil, evil, (), 0.0))
    ledger.node_down(evil, evil)
    ledger.set_queues([evil])
    blocked = SweepResult(evil, "promote", blocked=Blocked(evil.encode(), evil))
    ledger.record("promote", [blocked], 0.1)
    ledger.reloaded(evil)
    page = page_of(ledger, View(filter=evil))
    tags = {tag for tag, _ in Texts(page).tags}
    assert not tags & {"img", "script", "iframe", "link", "object"}
    assert not any(
        name.startswith("on") for _, attributes in Texts(page).tags for name in attributes
    )
    assert not set("\u202e\x1b\0") & set(page)
    assert r"\u202e" in page


def test_no_style_and_no_address_comes_from_elsewhere(ledger: Ledger) -> None:
    """One style, by its hash; nothing is loaded; no script."""
    tags = Texts(page_of(ledger)).tags
    assert [tag for tag, _ in tags].count("style") == 1
    assert not any("style" in attributes or "src" in attributes for _, attributes in tags)
    for _, attributes in tags:
        assert (attributes.get("href") or "/").startswith("/")


# --- order and bounds ---------------------------------------------------------------------------


def test_trouble_comes_first_then_the_overdue_then_the_busy(ledger: Ledger) -> None:
    """The rule that the page itself states."""
    assert rows_of(page_of(ledger)) == [
        "payments",
        "webhooks",
        "emails",
        "orders",
        HOSTILE,
        LONG_NAME,
    ]
    assert "blocked first, then failing, then the longest overdue, then the busiest" in text_of(
        ledger
    )


def test_ten_thousand_queues_are_a_bounded_page() -> None:
    """A hundred of them, how many there are, and the way to the others."""
    ledger = Ledger()
    ledger.set_queues(f"queue-{number:05d}" for number in range(10_000))
    page = page_of(ledger)
    assert len(page) < 200_000
    assert len(rows_of(page)) == QUEUES_A_PAGE
    assert "1 to 100 of 10,000 queues:" in Texts(page).text
    assert "Page 1 of 100 Next" in Texts(page).text
    last = page_of(ledger, View(page=100))
    assert rows_of(last)[-1] == "queue-09999"
    assert "Previous Page 100 of 100" in Texts(last).text
    assert rows_of(page_of(ledger, View(page=999_999_999))) == rows_of(last)


def test_many_troubles_are_a_bounded_list(ledger: Ledger) -> None:
    """During an outage every queue fails."""
    names = [f"queue-{number:05d}" for number in range(1_000)]
    ledger.set_queues(names)
    failure = Failure("connection", "it broke")
    ledger.record("promote", [SweepResult(name, "promote", failure=failure) for name in names], 1)
    text = text_of(ledger)
    assert text.count("it broke") == TROUBLES_SHOWN
    assert f"{1_000 - TROUBLES_SHOWN} more queues: see the table" in text


def test_a_filter_shows_what_matches_and_is_kept(ledger: Ledger) -> None:
    """Also on the links of the page, and over a refresh."""
    ledger.set_queues([f"a&b-{number}" for number in range(150)] + ["other"])
    page = page_of(ledger, View(filter="a&b"))
    assert "other" not in rows_of(page)
    assert "1 to 100 of 150 queues whose name contains “a&b”:" in Texts(page).text
    links = {attributes.get("href") for tag, attributes in Texts(page).tags if tag == "a"}
    assert "/?q=a%26b&page=2" in links
    assert ("input", "a&b") in {
        (tag, attributes.get("value")) for tag, attributes in Texts(page).tags
    }
    nothing = text_of(ledger, View(filter="zzz"))
    assert "None of 151 queues has “zzz” in its name." in nothing


def test_the_refresh_can_be_paused(ledger: Ledger) -> None:
    """For those who read slowly, or type."""
    assert '<meta http-equiv="refresh" content="5">' in page_of(ledger)
    paused = page_of(ledger, View(paused=True))
    assert "http-equiv" not in paused
    assert 'name="paused" value="1"' in paused


@pytest.mark.parametrize(
    ("query", "view"),
    [
        ({}, View()),
        ({"q": "orders", "page": "3", "paused": "1"}, View("orders", 3, True)),
        ({"page": "0"}, View()),
        ({"page": "-1"}, View()),
        ({"page": "²"}, View()),
        ({"page": "9" * 5_000}, View()),
        ({"q": "x" * 5_000}, View("x" * 255)),
        ({"unknown": "1"}, View()),
    ],
)
def test_a_query_is_read_with_care(query: dict[str, str], view: View) -> None:
    """What makes no sense is left out."""
    assert View.of(query) == view


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.0 ms"),
        (0.0024, "2.4 ms"),
        (0.00999, "10 ms"),
        (0.25, "250 ms"),
        (1, "1.0 s"),
        (9.99, "10 s"),
        (59, "59 s"),
        (61, "61 s"),
        (90, "90 s"),
        (600, "10 min"),
        (7_199, "120 min"),
        (7_200, "2 h"),
        (400_000, "5 d"),
    ],
)
def test_spans_read_well(seconds: float, words: str) -> None:
    """One unit, and no more digits than matter."""
    assert span(seconds) == words


# --- in a browser -------------------------------------------------------------------------------

WIDTHS = {"phone": 360, "tablet": 768, "desktop": 1280}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all of these tests."""
    with Browser() as browser:
        yield browser


@pytest.fixture
def address(ledger: Ledger) -> Iterator[str]:
    """The page of `ledger`, served; paused, so that it stands still for its picture."""
    server = HttpServer("127.0.0.1", 0, Application(ledger)).start()
    yield f"http://127.0.0.1:{server.port}/?paused=1"
    server.stop()


def colours(png: bytes) -> int:
    """How many different pixels an 8-bit PNG has in some of its lines: a blank one has one."""
    width = int.from_bytes(png[16:20], "big")
    channels = {2: 3, 6: 4}[png[25]]
    position, data = 8, b""
    while position < len(png):
        length = int.from_bytes(png[position : position + 4], "big")
        if png[position + 4 : position + 8] == b"IDAT":
            data += png[position + 8 : position + 8 + length]
        position += length + 12
    raw = zlib.decompress(data)
    stride = width * channels + 1
    return len({raw[start : start + 24] for start in range(0, len(raw), stride // 7)})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_the_page_looks_right(
    browser: Browser, address: str, tmp_path: Path, width: int, scheme: str
) -> None:
    """At each width and in both schemes: the facts are visible, nothing sticks out."""
    browser.open(address, width=width, scheme=scheme)
    visible = browser.evaluate("document.body.innerText")
    for fact in ("Ready", NODE, RUN_ID, r"JOB0192f7c5e1a07c3e\xff", "12,345", "3,333", HOSTILE):
        assert fact in visible, fact
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.innerWidth") == width
    dark = browser.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)"
        ".reduce((sum, part) => sum + Number(part), 0) < 380"
    )
    assert dark is (scheme == "dark"), "the style was applied, and in the reader's scheme"
    png = browser.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert png.startswith(b"\x89PNG")
    assert colours(png) > 50


# The contrast of a text is that of its colour to the nearest background that is painted.
CONTRAST = """
(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll('body *')) {
    if (![...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim())) continue;
    const [one, other] = [light(rgb(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push([node.textContent, ratio]);
  }
  return poor;
})()
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(browser: Browser, address: str, scheme: str) -> None:
    """4.5 to 1 at least, which WCAG asks for ordinary text."""
    browser.open(address, width=1280, scheme=scheme)
    assert browser.evaluate(CONTRAST) == []


def test_the_table_keeps_its_meaning_on_a_phone(browser: Browser, address: str) -> None:
    """Rows become cards for the eye; for a screen reader they are rows of a table still."""
    browser.open(address, width=WIDTHS["phone"])
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node.get("role", {}).get("value") for node in tree]
    assert roles.count("table") == 1
    assert roles.count("rowheader") == 6
    assert roles.count("columnheader") >= 13
    assert roles.count("cell") >= 6 * 12
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('tbody td'), '::before').content")
        == '"Pending"'
    )


def test_the_policy_allows_the_page_its_own_style_and_nothing_else(
    browser: Browser, address: str
) -> None:
    """A script that got in somehow would not run."""
    browser.open(address, width=1280)
    assert browser.evaluate("getComputedStyle(document.querySelector('h1')).fontSize") == "24px"
    assert (
        browser.evaluate(
            "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
            " document.body.append(s); return window.ran === undefined; })()"
        )
        is True
    )


def test_the_form_filters(browser: Browser, address: str) -> None:
    """Typing a part of a name and pressing the button leaves the queues that match."""
    browser.open(address, width=1280)
    browser.submit(
        "document.querySelector('input[name=q]').value = 'mail'; "
        "document.querySelector('form button').click()"
    )
    assert browser.evaluate("location.search") == "?paused=1&q=mail"
    names = "[...document.querySelectorAll('tbody th')].map(each => each.innerText)"
    assert browser.evaluate(names) == ["emails"]
