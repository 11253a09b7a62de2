"""Screenshots of the page of a real ring: `python -m tests.bench.film`.

Three processes form a ring, and one of them serves the page to a headless Chromium. The film shows
the mesh, the chat in mid-answer, the loss of a node during an answer, plans and keys; then every
view in the themes of light and dark, in the widths of a phone, a tablet and a desktop; and the API
server of a client. `tests.bench.paint` measures the first paint.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.builders.chromium import find_chromium
from tests.processes.fleet import (
    ALONE,
    MESHLLM,
    WAIT_S,
    Fleet,
    environment,
    free_address,
    meshllm,
    open_fleet,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("attic", "bench", "cellar")
QUESTION = "What is a ring?"
LONG = "Tell me a long story."
THEMES = ("light", "dark")
WIDTHS = {"phone": 375, "tablet": 768, "desktop": 1280}
VIEWS = ("mesh", "chat", "models", "plan", "keys")


@dataclass(frozen=True, slots=True)
class Film:
    """Takes pictures, with a number each."""

    folder: Path

    def take(self, page: "Page", name: str) -> None:
        """Take a picture of what is in view."""
        number = len(list(self.folder.glob("*.png"))) + 1
        path = self.folder / f"{number:02}-{name}.png"
        page.screenshot(path=path)
        print(path, flush=True)


def main() -> None:
    """Make the film."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.film", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("film"), metavar="FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with open_fleet() as fleet, _browser() as browser:
        url, key = _serve(fleet)
        _shoot(Film(options.out), fleet, browser, url, key)


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
    ticket, address = fleet.create_mesh(NAMES[0]), free_address()
    for name in NAMES:
        api_server = ("--serve", address) if name == NAMES[0] else ()
        fleet.node(name).start("--join", ticket, "--members", str(len(NAMES)), *ALONE, *api_server)
    fleet.form()
    made = meshllm("key", "create", "me", "--owner", state=fleet.node(NAMES[0]).state)
    return f"http://{address}/", made.stdout.strip()


def _open(
    browser: "Browser",
    url: str,
    *,
    theme: str = "light",
    width: int = 1280,
    waits_for: str = "#nodes tr",
) -> "Page":
    context = browser.new_context(
        color_scheme="dark" if theme == "dark" else "light",
        viewport={"width": width, "height": 800},
    )
    context.set_default_timeout(WAIT_S * 1000)
    page = context.new_page()
    page.goto(url)
    page.locator(waits_for).first.wait_for()
    return page


def _shoot(film: Film, fleet: Fleet, browser: "Browser", url: str, key: str) -> None:
    page = _open(browser, url)
    film.take(page, "mesh")
    _chat(film, page)
    _lose(film, fleet, page)
    _own(film, page, key)
    for theme in THEMES:
        for name, width in WIDTHS.items():
            _tour(film, _open(browser, url, theme=theme, width=width), key, f"{name}-{theme}")
    _visit_client(film, fleet, browser)


def _tour(film: Film, page: "Page", key: str, name: str) -> None:
    """Take every view, as the owner sees it."""
    _unlock(page, key)
    for view in VIEWS:
        page.click(f"#to-{view}")
        if view == "chat":
            _ask(page)
            page.locator(".assistant .actions").wait_for()
        if view == "plan":
            page.click("#predict")
            page.locator("#plan-stages tr").first.wait_for()
        if view == "keys":
            page.locator("#key-rows tr").first.wait_for()
        film.take(page, f"{name}-{view}")
    page.context.close()


def _visit_client(film: Film, fleet: Fleet, browser: "Browser") -> None:
    """Take the page of a client's API server."""
    state, port = fleet.node(NAMES[0]).state, free_address().rpartition(":")[2]
    ticket = meshllm("ring", "ticket", "--role", "client", state=state).stdout.strip()
    words = ("serve", "--port", port, "--join", ticket, "--state", str(fleet.folder / "client"))
    command = [sys.executable, *MESHLLM, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            page = _open(browser, f"http://127.0.0.1:{port}/", waits_for="#client-note")
            film.take(page, "client-mesh")
            page.click("#to-models")
            film.take(page, "client-models")
        finally:
            process.terminate()


def _ask(page: "Page", question: str = QUESTION) -> None:
    """Ask, and return in mid-answer."""
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.locator(".assistant p").last.wait_for()


def _chat(film: Film, page: "Page") -> None:
    page.click("#to-chat")
    _ask(page, LONG)
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
    _unlock(page, key)
    page.click("#to-plan")
    page.click("#predict")
    page.locator("#plan-stages tr").first.wait_for()
    film.take(page, "plan")
    page.click("#to-keys")
    page.fill("#key-name", "laptop")
    page.click("#create-key")
    page.locator("#made").wait_for()
    film.take(page, "keys")


def _unlock(page: "Page", key: str) -> None:
    page.click("#open-key")
    page.fill("#key", key)
    page.click("#use-key")


if __name__ == "__main__":
    main()
