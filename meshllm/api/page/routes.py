"""`GET /`, its files, and `GET /page/events`: server-sent events with the state of the mesh."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
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

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
        " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def file_routes() -> list[Route]:
    """Return the routes of the page's own files, which are the same for everybody."""
    folder = files("meshllm.api.page") / "static"
    names = sorted(each.name for each in folder.iterdir() if each.name.rpartition(".")[2] in _KINDS)
    routes = []
    for name in names:
        content = (folder / name).read_bytes()
        path = "/" if name == "index.html" else f"/page/{name}"
        routes.append(Route(path, _file(content, _KINDS[name.rpartition(".")[2]])))
    return routes


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


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "etag": f'"{blake3(content).hexdigest(8)}"'}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return respond
