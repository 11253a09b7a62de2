"""A headless Chromium, API servers for it to visit, and what no visit may cause."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from meshllm.api.access.accounts import Accounts, KeyLimits
from meshllm.api.page import routes
from meshllm.api.tcp import ApiServerOptions, open_api_server
from tests.builders.chromium import find_chromium
from tests.builders.fake_node import FakeNode

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

WAIT_MS = 60_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator["Browser"]:
    """Start a browser; skip where there is none."""
    api = pytest.importorskip("playwright.async_api", reason="no playwright: install `.[dev]`")
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine: `apt-get install chromium`")
    async with api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            await browser.close()


class Visit:
    """A browser at an API server, and what its pages did wrong."""

    def __init__(self, browser: "Browser", url: str) -> None:
        self.url = url
        self.faults: list[str] = []
        self._browser = browser

    async def open(self, view: str = "", *, theme: str = "light", width: int = 1280) -> "Page":
        """Open a view in a browser without memory, and wait for the state of the mesh."""
        size = {"width": width, "height": 800}
        context = await self._browser.new_context(
            color_scheme="dark" if theme == "dark" else "light",
            viewport={"width": size["width"], "height": size["height"]},
        )
        context.set_default_timeout(WAIT_MS)
        page = await context.new_page()
        self.watch(page)
        await page.goto(f"{self.url}#{view}" if view else self.url)
        await ready(page)
        return page

    def watch(self, page: "Page") -> None:
        """Note errors, dialogs, and requests to another origin."""
        page.on("console", lambda said: self._note(said.type in ("error", "warning"), said.text))
        page.on("pageerror", lambda error: self._note(True, str(error)))
        page.on("request", lambda sent: self._note(not self._is_own(sent.url), sent.url))

    def _is_own(self, url: str) -> bool:
        return url.startswith((self.url, "data:"))

    def _note(self, is_fault: bool, text: str) -> None:
        if is_fault:
            self.faults.append(text)


async def ready(page: "Page") -> None:
    """Wait until the scripts run, which are loaded after the first paint."""
    await page.wait_for_function("() => document.body.dataset.view")


async def begin(page: "Page", text: str) -> None:
    """Ask in the chat."""
    await page.locator("#model option").first.wait_for(state="attached")
    await page.fill("#question", text)
    await page.press("#question", "Enter")


async def ask(page: "Page", text: str, answers: int = 1) -> None:
    """Ask in the chat, and wait until there are so many complete answers."""
    await begin(page, text)
    await page.locator(".assistant .actions").nth(answers - 1).wait_for()


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    with Accounts.open(tmp_path / "accounts") as accounts:
        yield accounts


@pytest.fixture
def owner(accounts: Accounts) -> str:
    """A key of the owner."""
    return accounts.create("me", KeyLimits(), 1_764_000_000, is_owner=True)


@asynccontextmanager
async def visiting(
    browser: "Browser", api_server: FakeNode, accounts: Accounts, *, needs_key: bool = False
) -> AsyncIterator[Visit]:
    """Serve a node on TCP for a browser."""
    options = ApiServerOptions("127.0.0.1", 0, require_key=needs_key)
    with open_api_server(options, accounts) as opened:
        serving = asyncio.ensure_future(opened.serve(api_server))
        try:
            yield Visit(browser, opened.url.removesuffix("v1"))
        finally:
            for context in browser.contexts:
                await context.close()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@pytest_asyncio.fixture(loop_scope="module")
async def visit(
    browser: "Browser", api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Visit]:
    """A browser at an API server without a key; the test fails if a page did anything wrong."""
    monkeypatch.setattr(routes, "REFRESH_S", 0.02)
    async with visiting(browser, api_server, accounts) as visit:
        yield visit
    assert visit.faults == []
