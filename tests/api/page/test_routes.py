import asyncio
import json
import re
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request

from meshllm.api.access.accounts import ApiKey
from meshllm.api.access.connection_limit import ConnectionLimit
from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.failure import LATER, Refused
from meshllm.api.generation.service import Service
from meshllm.api.page import routes
from meshllm.api.page.view import PageStatus
from tests.builders.fake_node import FakeNode

KEY = "k" * 20
STATIC = Path(str(files("meshllm.api.page") / "static"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(STATIC.iterdir())}
ALL = ["/", *(f"/page/{name}" for name in TEXTS if not name.endswith((".html", ".css")))]
MAX_BYTES = 80_000


@pytest.fixture
async def public(api_server: FakeNode) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an API server that needs a key."""
    policy = AccessPolicy(needs_key=True, file_keys=(KEY,))
    transport = httpx2.ASGITransport(public_application(Service(api_server), policy))
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


@pytest.mark.parametrize("path", ALL)
async def test_files_need_no_key_and_may_load_nothing_from_elsewhere(
    public: httpx2.AsyncClient, path: str
) -> None:
    reply = await public.get(path)

    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_a_browser_has_is_not_sent_again(public: httpx2.AsyncClient) -> None:
    first = await public.get("/page/page.js")
    again, other = [
        await public.get("/page/page.js", headers={"if-none-match": tag})
        for tag in (first.headers["etag"], '"other"')
    ]

    assert (again.status_code, again.content) == (304, b"")
    assert "default-src 'none'" in again.headers["content-security-policy"]
    assert (other.status_code, other.content) == (200, first.content)


async def test_the_page_brings_its_style_along(public: httpx2.AsyncClient) -> None:
    reply = await public.get("/")

    (style,) = re.findall(r"<style>(.*?)</style>", reply.text, re.DOTALL)
    assert style == TEXTS["page.css"]
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}';" in reply.headers["content-security-policy"]
    assert "stylesheet" not in reply.text


def test_every_script_is_loaded_at_once() -> None:
    (listed,) = re.findall(r"const files = (\[.*?\]);", TEXTS["index.html"])

    names = [f"{each}.js" for each in json.loads(listed)]
    assert sorted(names) == sorted(name for name in TEXTS if name.endswith(".js"))


async def test_the_script_that_loads_them_is_the_only_one_in_the_page(
    public: httpx2.AsyncClient,
) -> None:
    reply = await public.get("/")

    (script,) = re.findall(r"<script.*?>(.*?)</script>", reply.text, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = reply.headers["content-security-policy"]
    assert f"script-src 'self' 'sha256-{digest}';" in policy


def test_the_page_is_small_and_refers_to_its_own_files_only() -> None:
    assert sum(len(text.encode()) for text in TEXTS.values()) <= MAX_BYTES
    for name, text in TEXTS.items():
        links = set(re.findall(r'https?://[^"\s]+', text)) - {"http://www.w3.org/2000/svg"}
        assert links == set(), name
        assert "innerHTML" not in text, name
        assert "eval(" not in text, name
    found = re.findall(r'(?:href|src)="(/page/[^"]+)"', TEXTS["index.html"])
    assert {name.removeprefix("/page/") for name in found} <= TEXTS.keys()
    imported = re.findall(r'from "\./([^"]+)"', "\n".join(TEXTS.values()))
    assert set(imported) <= TEXTS.keys()


def test_scripts_find_the_elements_that_they_use() -> None:
    ids = set(re.findall(r' id="([^"]+)"', TEXTS["index.html"]))
    scripts = "\n".join(text for name, text in TEXTS.items() if name.endswith(".js"))

    used = set(re.findall(r'(?:\bat|getElementById)\("([^"]+)"\)', scripts))

    assert used
    assert used <= ids


def test_every_control_has_a_name() -> None:
    page = TEXTS["index.html"]
    labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', page))
    inside = "".join(re.findall(r"<label.*?</label>", page, re.DOTALL))
    for control in re.findall(r"<(?:input|select|textarea)[^>]*>", page):
        name = re.search(r' id="([^"]+)"', control)
        assert name
        assert control in inside or name[1] in labelled, control
    assert all(text.strip() for text in re.findall(r"<button[^>]*>(.*?)</button>", page))
    assert '<html lang="en">' in page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(theme: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", TEXTS["page.css"], re.DOTALL)
    colours = dict(
        re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", light if theme == "light" else dark)
    )

    for ink in ("ink", "quiet", "accent", "warn"):
        for ground in ("ground", "raised", "user"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["edge"], colours["raised"]) >= 3  # the border of a control


async def test_the_state_of_the_mesh_needs_a_key_and_hides_names(
    public: httpx2.AsyncClient, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await public.get("/page/events")).status_code == 401

    [first, *_] = await events_of(monkeypatch, api_server, is_public=True)

    assert first["is_public"]
    assert not {node["name"] for node in first["nodes"]} & {
        node.name for node in api_server.report().nodes
    }


async def test_only_changes_are_sent_and_silence_is_broken(
    api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await events_of(monkeypatch, api_server, is_public=False)

    assert found[0]["nodes"][0]["name"] == api_server.report().nodes[0].name
    assert found[1:] == ["comment"] * (len(found) - 1)


OWNERS = ApiKey("me", "", 0, is_owner=True)
GUESTS = [ApiKey(name, "", 0) for name in "abc"]


async def test_watchers_are_bounded(api_server: FakeNode) -> None:
    watchers = ConnectionLimit(3, 2)

    async with AsyncExitStack() as stack:
        for key in (GUESTS[0], GUESTS[0], GUESTS[1], OWNERS, None, OWNERS):
            await anext(await stack.enter_async_context(watching(api_server, watchers, key)))
        for key in (*GUESTS, OWNERS, None):
            async with watching(api_server, watchers, key) as more:
                with pytest.raises(Refused, match="Too many pages are open"):
                    await anext(more)

    for key in (GUESTS[0], GUESTS[0]):
        async with watching(api_server, watchers, key) as again:
            await anext(again)


async def test_watchers_that_come_at_once_are_bounded(
    api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_WATCHERS", 0)
    transport = httpx2.ASGITransport(public_application(Service(api_server)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        reply = await client.get("/page/events")

    assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")


async def test_events_end_with_the_key(
    api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "REFRESH_S", 0.001)
    monkeypatch.setattr(routes, "IDENTIFY_S", 0.002)
    found = [GUESTS[0]]

    async def identify() -> ApiKey:
        if not found:
            raise Refused("The API key is revoked", LATER)
        return found.pop()

    async with watching(api_server, ConnectionLimit(3, 2), OWNERS, identify) as changes:
        shown = [await anext(changes), await anext(changes)]
        with pytest.raises(Refused, match="revoked"):
            await anext(changes)

    assert [each and each.is_public for each in shown] == [False, True]


async def test_the_headers_of_the_events_come_alone(api_server: FakeNode) -> None:
    transport = httpx2.ASGITransport(public_application(Service(api_server)))
    async with (
        httpx2.AsyncClient(transport=transport, base_url="http://node") as client,
        asyncio.timeout(60),
    ):
        reply = await client.head("/page/events")

    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"].startswith("text/event-stream")


async def events_of(
    monkeypatch: pytest.MonkeyPatch, api_server: FakeNode, *, is_public: bool
) -> list[Any]:
    """Return the first three events, without waiting."""
    monkeypatch.setattr(routes, "REFRESH_S", 0.001)
    monkeypatch.setattr(routes, "SILENCE_S", 0.002)
    found: list[Any] = []
    key = GUESTS[0] if is_public else OWNERS
    async with watching(api_server, ConnectionLimit(3, 2), key) as changes:
        for _ in range(3):
            written = routes._event(await anext(changes)).decode()
            found.append(json.loads(written[6:]) if written.startswith("data: ") else "comment")
    return found


def watching(
    api_server: FakeNode,
    watchers: ConnectionLimit,
    key: ApiKey | None,
    identify: Callable[[], Awaitable[ApiKey]] | None = None,
) -> aclosing[AsyncGenerator[PageStatus | None, None]]:
    """Return what a key sees of a public API server."""
    scope = {"type": "http", "meshllm.key": key, "meshllm.identify": identify}
    return aclosing(routes._changes(api_server, Request(scope), watchers, is_public=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, WCAG 2.2."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
