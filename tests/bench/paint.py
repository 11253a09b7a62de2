"""First paint of the page, beside an empty one: `python -m tests.bench.paint [--loads 20]`.

A headless Chromium loads, by turns and each time without its cache, an empty page, the page without
its scripts, and the page, from the API server of a fake node. Times are from the start of
navigation to the first contentful paint. What an empty page takes is the browser's own: on a
machine that is busy the ratio says more than the milliseconds.
"""

import asyncio
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service
from meshllm.api.page.routes import page_of
from meshllm.api.serve import run_server
from tests.bench.report import Report, parser_of
from tests.builders.chromium import find_chromium
from tests.builders.fake_node import FakeNode

if TYPE_CHECKING:
    from playwright.async_api import Browser

EMPTY = "<!doctype html><title>empty</title><p>empty"
PAINT = """() => new Promise((done) => new PerformanceObserver((list) => {
  const found = list.getEntriesByName("first-contentful-paint")[0];
  if (found) done(found.startTime);
}).observe({ type: "paint", buffered: true }))"""
PAGES = {"empty": "an empty page", "still": "the page without scripts", "": "the page"}
"""By path."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of page."""

    page: str
    paint_ms: float
    """The median."""
    least_ms: float
    most_ms: float
    ratio: float
    """To the median of the empty page."""


def main() -> None:
    """Print the table."""
    parser = parser_of("paint", __doc__)
    parser.add_argument("--loads", type=int, default=20, metavar="N")
    options = parser.parse_args()
    report = Report(options)
    rows = asyncio.run(_measure(options.loads))
    report.say(f"{'':26}{'median ms':>10}{'least':>8}{'most':>8}{'ratio':>8}")
    for row in rows:
        times = f"{row.paint_ms:10.0f}{row.least_ms:8.0f}{row.most_ms:8.0f}"
        report.say(f"{row.page:26}{times}{row.ratio:8.2f}")
    report.write(rows)


async def _measure(loads: int) -> list[Row]:
    times: dict[str, list[float]] = {path: [] for path in PAGES}
    async with _served() as url, _browser() as browser:
        for turn in range(loads + 1):
            for path, found in times.items():
                paint_ms = await _paint(browser, url + path)
                if turn:  # the first starts processes of the browser
                    found.append(paint_ms)
    middle = median(times["empty"])
    return [
        Row(PAGES[path], median(each), min(each), max(each), median(each) / middle)
        for path, each in times.items()
    ]


@asynccontextmanager
async def _served() -> AsyncIterator[str]:
    """Serve the pages; yield their address."""

    async def empty(_: Request) -> Response:
        return HTMLResponse(EMPTY)

    async def still(_: Request) -> Response:
        return HTMLResponse(re.sub("(?s)<script.*?</script>|<link rel=.preload.*?>", "", page))

    page = page_of()[0].decode()
    application = Starlette(routes=[Route("/empty", empty), Route("/still", still)])
    application.router.default = public_application(Service(FakeNode()), AccessPolicy())
    with socket.create_server(("127.0.0.1", 0)) as bound:
        serving = asyncio.ensure_future(run_server(application, bound))
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/"
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving


@asynccontextmanager
async def _browser() -> AsyncIterator["Browser"]:
    from playwright.async_api import async_playwright

    path = find_chromium()
    if path is None:
        sys.exit("no Chromium on this machine: `apt-get install chromium`")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path)
        yield browser
        await browser.close()


async def _paint(browser: "Browser", url: str) -> float:
    context = await browser.new_context(viewport={"width": 1280, "height": 800})
    page = await context.new_page()
    await page.goto(url)
    paint_ms = float(await page.evaluate(PAINT))
    await context.close()
    return paint_ms


if __name__ == "__main__":
    main()
