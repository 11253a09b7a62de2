"""The page of `meshllm serve`, in a real browser, with the embedded model."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api.page.conftest import Visit

if TYPE_CHECKING:
    from playwright.async_api import Browser

pytestmark = [pytest.mark.socket, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the command, as its user does; yield the address of its page."""
    state: Path = tmp_path_factory.mktemp("served") / "state"
    program = (sys.executable, "-m", "meshllm", "serve", "--port", "0", "--no-discovery")
    process = subprocess.Popen(
        (*program, "--state", str(state)), stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout
    try:
        yield process.stdout.readline().strip().removesuffix("v1")
    finally:
        process.terminate()
        process.communicate(timeout=60)


async def test_the_embedded_model_answers_on_the_page(browser: "Browser", url: str) -> None:
    visit = Visit(browser, url)
    page = await visit.open()
    await page.get_by_text("serving: builtin").wait_for(timeout=120_000)
    await page.click("#to-chat")

    await page.fill("#question", "What is a ring?")
    await page.press("#question", "Enter")
    await page.locator(".assistant .actions").wait_for(timeout=120_000)

    told = await page.inner_text(".assistant")
    assert "ring" in told
    assert re.search(r"\d+ tokens, first after \d+\.\d\d s, [\d.]+ tokens/s, seed \d+", told)
    await page.click("#to-mesh")
    measured = page.locator("#figures div").filter(has_text="tokens/s measured").locator("b")
    await measured.filter(has_text=re.compile(r"\d")).wait_for()
    assert float(await measured.inner_text()) > 0
    await page.context.close()
    assert visit.faults == []


async def test_the_owners_views_are_closed_without_a_key(browser: "Browser", url: str) -> None:
    visit = Visit(browser, url)
    page = await visit.open("keys")
    await page.locator("#keys-locked").wait_for()

    statuses = [
        (await page.request.fetch(f"{url}owner/{path}", method=method)).status
        for method, path in (("GET", "keys"), ("GET", "usage"), ("POST", "plan"), ("POST", "keys"))
    ]

    await page.context.close()
    assert statuses == [401, 401, 401, 401]
    assert visit.faults == []
