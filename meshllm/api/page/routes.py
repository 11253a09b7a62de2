"""`GET /`, its files, and `GET /page/events`: server-sent events with the state of the mesh."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from hashlib import sha256
from importlib.resources import files

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshllm.api.access.connection_limit import ConnectionLimit
from meshllm.api.access.gate import identify_again, key_of
from meshllm.api.failure import LATER, Refused, compact
from meshllm.api.generation.reply import PATIENCE, STREAM, event, failure
from meshllm.api.page.view import PageStatus, view_of
from meshllm.api.port import ModelPort
from meshllm.api.respond import Stream
from meshllm.status import to_json

REFRESH_S = 1.0
SILENCE_S = 15.0  # a comment tells a client whose mesh does not change that it is connected
IDENTIFY_S = 5.0  # s after which a watcher whose key was revoked is noticed
MAX_WATCHERS = 32  # of one API server; the owner has as many of its own
MAX_OF_KEY = 8

_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FOLDER = files("meshllm.api.page") / "static"
_STYLE = b'<link rel="stylesheet" href="/page/page.css">'
# No opener policy: a browser would start another process for the page, which delays its first paint
# by a third. The page has no frames and hears no messages that an opener could use.
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def file_routes() -> list[Route]:
    """Return the routes of the page's own files, which are the same for everybody."""
    page, policy = page_of()
    kinds = {each: each.name.rpartition(".")[2] for each in _FOLDER.iterdir()}
    return [
        Route("/", _file(page, "text/html", policy)),
        *(
            Route(f"/page/{file.name}", _file(file.read_bytes(), _KINDS[kind], _headers()))
            for file, kind in sorted(kinds.items(), key=lambda each: each[0].name)
            if kind in _KINDS and file.name not in ("index.html", "page.css")
        ),
    ]


def page_of() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers; it brings its style along, so one request paints it."""
    page, style = ((_FOLDER / name).read_bytes() for name in ("index.html", "page.css"))
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    headers = _headers(style=_hash_of(style), script=f"'self' {_hash_of(script)}")
    return page.replace(_STYLE, b"<style>" + style + b"</style>"), headers


def _hash_of(content: bytes) -> str:
    """Return what allows inline content in a policy."""
    return f"'sha256-{b64encode(sha256(content).digest()).decode()}'"


def event_routes(node: ModelPort, *, is_public: bool) -> list[Route]:
    """Return the routes of the page's data; ``is_public`` hides from guests who takes part."""
    watchers = ConnectionLimit(MAX_WATCHERS, MAX_OF_KEY)

    async def events(request: Request) -> Response:
        changes = _changes(node, request, watchers, is_public=is_public)
        return Stream(changes, STREAM, _event, failure)

    return [Route("/page/events", events)]


async def _changes(
    node: ModelPort, request: Request, watchers: ConnectionLimit, *, is_public: bool
) -> AsyncGenerator[PageStatus | None, None]:
    """Yield the state at once and after each change; None after some time without one.

    Raises:
        Refused: too many watch, or the key has expired or was revoked since.
    """
    key, shown = key_of(request), None
    quiet_s = known_s = 0.0
    full = Refused("Too many pages are open", LATER, hint="close some of them")
    with watchers.counted(key, full):
        while True:
            if known_s >= IDENTIFY_S:
                key, known_s = await identify_again(request), 0.0
            is_guest = is_public and not (key and key.is_owner)
            found = view_of(await node.status(), is_public=is_guest)
            if found != shown or quiet_s >= SILENCE_S:
                yield found if found != shown else None
                shown, quiet_s = found, 0.0
            await asyncio.sleep(REFRESH_S)
            quiet_s, known_s = quiet_s + REFRESH_S, known_s + REFRESH_S


def _event(found: PageStatus | None) -> bytes:
    if found is None:
        return PATIENCE
    return event(compact(to_json(found)))


def _headers(style: str = "'none'", script: str = "'self'") -> dict[str, str]:
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
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
