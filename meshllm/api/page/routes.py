"""`GET /`, its files, and `GET /page/events`: server-sent events with the state of the mesh."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from hashlib import sha256
from importlib.resources import files

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.page.view import PageStatus, view_of
from meshllm.api.port import ModelPort
from meshllm.api.respond import Stream
from meshllm.api.v1.reply import PATIENCE, STREAM, event, failure
from meshllm.status import to_json

REFRESH_S = 1.0
SILENCE_S = 15.0  # a comment tells a client whose mesh does not change that it is connected
MAX_WATCHERS = 32  # of one door

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_STYLE = b'<link rel="stylesheet" href="/page/page.css">'
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def file_routes() -> list[Route]:
    """Return the routes of the page's own files, which are the same for everybody."""
    folder = files("meshllm.api.page") / "static"
    names = sorted(each.name for each in folder.iterdir() if each.name.rpartition(".")[2] in _KINDS)
    contents = {name: (folder / name).read_bytes() for name in names}
    page, style = contents.pop("index.html"), contents.pop("page.css")
    # The page brings its style along: a browser paints it without a second request.
    whole = page.replace(_STYLE, b"<style>" + style + b"</style>")
    allowed = f"'sha256-{b64encode(sha256(style).digest()).decode()}'"
    return [
        Route("/", _file(whole, "text/html", _headers(style=allowed))),
        *(
            Route(f"/page/{name}", _file(content, _KINDS[name.rpartition(".")[2]], _headers()))
            for name, content in contents.items()
        ),
    ]


def event_routes(node: ModelPort, *, is_public: bool) -> list[Route]:
    """Return the routes of the page's data; ``is_public`` hides who takes part from guests."""
    watchers = asyncio.Semaphore(MAX_WATCHERS)

    async def events(request: Request) -> Response:
        if watchers.locked():
            return Response(status_code=503, headers={"retry-after": "5"})
        key = key_of(request)
        is_guest = is_public and not (key and key.is_owner)
        return Stream(_changes(node, watchers, is_public=is_guest), STREAM, _event, failure)

    return [Route("/page/events", events)]


async def _changes(
    node: ModelPort, watchers: asyncio.Semaphore, *, is_public: bool
) -> AsyncGenerator[PageStatus | None, None]:
    """Yield the state at once and after each change; None after some time without one."""
    async with watchers:
        shown: PageStatus | None = None
        quiet_s = 0.0
        while True:
            found = view_of(await node.mesh_status(), is_public=is_public)
            if found != shown or quiet_s >= SILENCE_S:
                yield found if found != shown else None
                shown, quiet_s = found, 0.0
            await asyncio.sleep(REFRESH_S)
            quiet_s += REFRESH_S


def _event(found: PageStatus | None) -> bytes:
    if found is None:
        return PATIENCE
    return event(json.dumps(to_json(found), separators=(",", ":")).encode())


def _headers(style: str = "'none'") -> dict[str, str]:
    policy = (
        f"default-src 'none'; script-src 'self'; style-src {style}; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {**_HEADERS, "content-security-policy": policy}


def _file(
    content: bytes, kind: str, headers: dict[str, str]
) -> Callable[[Request], Awaitable[Response]]:
    headers = {**headers, "etag": f'"{blake3(content).hexdigest(8)}"'}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return respond
