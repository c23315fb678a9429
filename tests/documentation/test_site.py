"""The built site: its links lead somewhere, it loads nothing from elsewhere, its search answers, and it fits a phone.

``make docs`` builds it and runs this.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import pytest
from playwright.sync_api import Page, sync_playwright

SITE = Path(os.environ.get("RING_SITE", ""))
ARTIFACTS = Path(__file__).with_name("artifacts")
pytestmark = pytest.mark.skipif("RING_SITE" not in os.environ, reason="make docs builds the site and tests it")

# What users ask, and the page that has to be among the first three that the search finds.
QUESTIONS = {
    "my rank died": "docs/errors",
    "resume": "docs/tasks/resume",
    "which GPU": "docs/gpu",
    "slurm": "docs/tasks/allocation",
    "what is moving?": "docs/magics",
    "it hangs": "docs/errors",
    "out of memory": "docs/errors",
    "debug": "docs/tasks/debug",
    "install without a compiler": "docs/install",
    "accelerate": "docs/from-accelerate",
    "CollectiveMismatch": "docs/errors",
    "allreduce": "docs/reference/cells",
}
LOOKED_AT = ("docs/index", "docs/magics", "docs/errors", "docs/reference/cells", "notebooks/01_quickstart")


class Links(HTMLParser):
    """The addresses that a page names, those it loads by itself, and its anchors."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.named: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.named.add(values["href"])
        elif "src" in values or (tag == "link" and "href" in values):
            self.loaded.add(values.get("src") or values["href"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Links]:
    found = {path.resolve(): Links(path) for path in SITE.rglob("*.html") if "_static" not in path.parts}
    assert len(found) > 20
    return found


def test_links_lead_to_a_page_and_its_heading(pages: dict[Path, Links]) -> None:
    dead = []
    for page, links in pages.items():
        for link in links.named | links.loaded:
            address = urlsplit(unquote(link))
            path, anchor = address.path, address.fragment
            target = (page.parent / path).resolve() if path else page
            if address.scheme or address.netloc or not link:  # of another site, or data
                continue
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.append(f"{page.relative_to(SITE.resolve())}: {link}")
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Links]) -> None:
    foreign = {
        link for links in pages.values() for link in links.loaded if "//" in link and not link.startswith("data:")
    }
    assert foreign == set()


def test_for_language_models(pages: dict[Path, Links]) -> None:
    assert "docs/errors.md" in (SITE / "llms.txt").read_text()
    whole = (SITE / "llms-full.txt").read_text()
    assert all(words in whole for words in ("%%ringtrain", "Every magic, option, function", "CollectiveMismatch"))


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site without a line for each file."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def page(chromium: str) -> Iterator[Page]:
    """A tab of Chromium, whose ``/`` is the site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(base_url=f"http://127.0.0.1:{server.server_port}")
        tab.set_default_timeout(120_000)
        yield tab
        browser.close()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_search_answers_in_its_first_three_hits(page: Page, question: str) -> None:
    page.goto(f"/search.html?q={quote(question)}")
    page.wait_for_selector("#search-results .search-summary:has-text('found')")
    hits = page.eval_on_selector_all("#search-results ul.search > li > a", "all => all.map(one => one.pathname)")
    assert any(hit.startswith(f"/{QUESTIONS[question]}.html") for hit in hits[:3]), hits[:6]


def test_the_changelog_is_the_last_hit(page: Page) -> None:
    page.goto("/search.html?q=snapshots")
    page.wait_for_selector("#search-results .search-summary:has-text('found')")
    hits = page.eval_on_selector_all("#search-results ul.search > li > a", "all => all.map(one => one.pathname)")
    own = [hit.startswith("/CHANGELOG") for hit in hits]
    assert any(own)
    assert own == sorted(own), hits


@pytest.mark.parametrize("width", [1400, 400])
def test_pages_fit_the_screen(page: Page, width: int) -> None:
    ARTIFACTS.mkdir(exist_ok=True)
    page.set_viewport_size({"width": width, "height": 1000})
    wide = {}
    for name in LOOKED_AT:
        page.goto(f"/{name}.html")
        page.screenshot(path=ARTIFACTS / f"{name.replace('/', '-')}-{width}.png")
        found = page.evaluate("document.scrollingElement.scrollWidth")
        wide |= {name: found} if found > width else {}
    assert wide == {}


def test_a_timeline_is_drawn(page: Page) -> None:
    page.set_viewport_size({"width": 1400, "height": 1000})
    page.goto("/notebooks/05_timeline.html")
    chart = page.locator(".vega-chart canvas, .vega-chart svg").first
    chart.wait_for()
    chart.screenshot(path=ARTIFACTS / "timeline.png")


def test_reports_can_be_read_in_the_dark(page: Page) -> None:
    """Their text is far from the ground behind it, and nothing is put around their charts."""
    page.goto("/notebooks/01_quickstart.html")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    contrasts, paddings = page.evaluate(
        """() => {
            const parts = color => color.match(/[\\d.]+/g).map(Number);
            const light = color => parts(color).slice(0, 3).reduce((sum, part) => sum + part, 0) / 765;
            const ground = one => {
                const color = getComputedStyle(one).backgroundColor;
                return parts(color)[3] === 0 && one.parentElement ? ground(one.parentElement) : color;
            };
            const reports = [...document.querySelectorAll(".ring-report")];
            const images = reports.flatMap(one => [...one.querySelectorAll("img")]);
            return [
                reports.map(one => Math.abs(light(getComputedStyle(one).color) - light(ground(one)))),
                images.map(one => getComputedStyle(one).padding),
            ];
        }"""
    )
    assert min(contrasts) > 0.5
    assert set(paddings) == {"0px"}
