"""Screenshots of the page of a real ring, and its first paint: `python -m tests.bench.film`.

Three processes form a ring, and one of them serves the page to a headless Chromium. The film shows
the mesh, the chat in mid-answer, the loss of a node during an answer, plans, keys, and the width of
a phone, in the themes of light and dark. The first paint is measured from the start of navigation,
without the cache of the browser.
"""

import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.report import Report, parser_of
from tests.builders.chromium import find_chromium
from tests.processes.fleet import ALONE, WAIT_S, Fleet, free_address, meshllm, open_fleet

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("attic", "bench", "cellar")
QUESTION = "What is a ring?"
LONG = "Tell me a long story."
LOADS = 7  # of the page, for the first paint
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


@dataclass(frozen=True, slots=True)
class Paint:
    """First contentful paint of one load, in milliseconds."""

    paint_ms: float


@dataclass(frozen=True, slots=True)
class Film:
    """Takes pictures, with a number each."""

    folder: Path
    report: Report

    def take(self, page: "Page", name: str) -> None:
        """Take a picture of what is in view."""
        number = len(list(self.folder.glob("*.png"))) + 1
        path = self.folder / f"{number:02}-{name}.png"
        page.screenshot(path=path)
        self.report.say(str(path))


def main() -> None:
    """Make the film."""
    parser = parser_of("film", __doc__)
    parser.add_argument("--out", type=Path, default=Path("film"), metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options)
    with open_fleet() as fleet, _browser() as browser:
        url, key = _serve(fleet)
        paints = [_paint(browser, url) for _ in range(LOADS)]
        middle = statistics.median(each.paint_ms for each in paints)
        report.say(f"first paint: {middle:.0f} ms, median of {LOADS}")
        _shoot(Film(options.out, report), fleet, browser, url, key)
    report.write(paints)


@contextmanager
def _browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        sys.exit("no Chromium on this machine: `apt-get install chromium`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


def _serve(fleet: Fleet) -> tuple[str, str]:
    """Start the ring; return the address of its page, and a key of the owner."""
    ticket, address = fleet.found(NAMES[0]), free_address()
    for name in NAMES:
        door = ("--serve", address) if name == NAMES[0] else ()
        fleet.node(name).start("--join", ticket, "--members", str(len(NAMES)), *ALONE, *door)
    fleet.form()
    made = meshllm("key", "create", "me", "--owner", state=fleet.node(NAMES[0]).state)
    return f"http://{address}/", made.stdout.strip()


def _open(browser: "Browser", url: str, *, theme: str = "light", width: int = 1280) -> "Page":
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": 800},
    )
    context.set_default_timeout(WAIT_S * 1000)
    page = context.new_page()
    page.goto(url)
    page.locator("#nodes tr").first.wait_for()
    return page


def _paint(browser: "Browser", url: str) -> Paint:
    page = _open(browser, url)
    found = Paint(float(page.evaluate(PAINT)))
    page.context.close()
    return found


def _shoot(film: Film, fleet: Fleet, browser: "Browser", url: str, key: str) -> None:
    page = _open(browser, url)
    film.take(page, "mesh")
    _chat(film, page)
    _lose(film, fleet, page)
    _own(film, page, key)
    for theme in ("light", "dark"):
        phone = _open(browser, url, theme=theme, width=375)
        film.take(phone, f"phone-mesh-{theme}")
        phone.click("#to-chat")
        _ask(phone)
        phone.locator(".assistant .actions").wait_for()
        film.take(phone, f"phone-chat-{theme}")


def _ask(page: "Page", question: str = QUESTION) -> None:
    """Ask, and return in mid-answer."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.locator(".assistant p").last.wait_for()


def _chat(film: Film, page: "Page") -> None:
    page.click("#to-chat")
    _ask(page)
    film.take(page, "chat-mid-answer")
    page.locator(".assistant .actions").wait_for()
    film.take(page, "chat-answered")


def _lose(film: Film, fleet: Fleet, page: "Page") -> None:
    """Kill a node during an answer, and wait until the answer is complete without it."""
    page.click("#new")
    _ask(page, LONG)
    fleet.node(NAMES[-1]).kill()
    film.take(page, "chat-node-killed")
    page.click("#to-mesh")
    page.locator("#log").get_by_text("now down").first.wait_for()
    film.take(page, "node-killed")
    page.locator("#log").get_by_text("answers survived a loss").first.wait_for()
    film.take(page, "taken-over")
    page.locator("#log").scroll_into_view_if_needed()
    film.take(page, "taken-over-events")
    page.click("#to-chat")
    page.locator(".assistant .actions").wait_for()
    film.take(page, "chat-survived")


def _own(film: Film, page: "Page", key: str) -> None:
    page.click("#open-key")
    page.fill("#key", key)
    page.click("#use-key")
    page.click("#to-plan")
    page.click("#predict")
    page.locator("#plan-stages tr").first.wait_for()
    film.take(page, "plan")
    page.click("#to-keys")
    page.fill("#key-name", "laptop")
    page.click("#create-key")
    page.locator("#made").wait_for()
    film.take(page, "keys")


if __name__ == "__main__":
    main()
