"""Who may enter the public application: Host, Origin and key of a request.

Theory of operation
-------------------
A browser sends requests to loopback addresses for any page. Without a key a page could use the
model, so where no key is needed the Host must name this machine (against DNS rebinding), and where
an Origin is sent it must be the server's own or one that the owner named. Where a key is needed, a
page does not have it, and any Host will do. CORS headers go to named origins only.

The owner's views need a key of the owner everywhere: other users of this machine reach the loopback
address, too.

A known key is refused when it has expired or was revoked, here or by another member of the mesh,
needed or not. Unknown ones are refused
where one is needed; elsewhere clients send any text, as OpenAI's libraries insist on a key.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from meshllm.api.access.accounts import MAX_KEY_CHARS, Accounts, ApiKey
from meshllm.api.failure import INVALID, Failure, Refused, response_of
from meshllm.api.request_id import ANTHROPICS, REQUEST_ID

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

KEY_PROTOCOL = "meshllm.key."
"""Before a key among the subprotocols of a WebSocket: web pages can set no header."""
EXPOSED = "x-meshllm-model-digest", "x-meshllm-precision", "x-meshllm-ring-epoch"
"""Headers about what answers, which web pages of allowed origins may read."""

_SCOPE, _AGAIN = "meshllm.key", "meshllm.identify"
_WEB = {"ws": "http", "wss": "https"}
_UNKNOWN = Failure(401, INVALID, "invalid_api_key")
_NOT_OWNER = Failure(403, INVALID, "owner_key_required")
_OWNER_HINT = "create one with `meshllm key create NAME --owner`"


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """What a request must show."""

    needs_key: bool = False
    hosts: frozenset[str] = LOOPBACK
    """Allowed names in the Host header while no key is needed."""
    origins: tuple[str, ...] = ()
    """Origins of web pages that may use the API, such as `https://example.org`."""
    file_keys: tuple[str, ...] = field(default=(), repr=False)
    """Valid keys besides the stored ones."""


def site_guards(policy: AccessPolicy) -> Sequence[Middleware]:
    """Return the middleware that checks Host and Origin of every request, outermost first."""
    return [
        Middleware(_Site, policy=policy),
        Middleware(
            CORSMiddleware,
            allow_origins=policy.origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", REQUEST_ID, ANTHROPICS, *EXPOSED],
        ),
    ]


def key_guard(policy: AccessPolicy, accounts: Accounts | None) -> Middleware:
    """Return the middleware that checks the key of a request."""
    return Middleware(_Gate, policy=policy, accounts=accounts)


def owner_guard(policy: AccessPolicy, accounts: Accounts) -> Middleware:
    """Return the middleware that requires a key of the owner, even on a loopback address."""
    return Middleware(_Gate, policy=policy, accounts=accounts, is_owners=True)


def key_of(request: HTTPConnection) -> ApiKey | None:
    """Return the key of a request that has entered; None if it came without one."""
    key: ApiKey | None = request.scope.get(_SCOPE)
    return key


async def identify_again(request: HTTPConnection) -> ApiKey | None:
    """Return the key of a connection as it is now: a long one may outlive its key.

    Raises:
        Refused: it has expired or was revoked since.
    """
    identify: Callable[[], Awaitable[ApiKey | None]] | None = request.scope.get(_AGAIN)
    return await identify() if identify else None


class _Site:
    """Refuses requests of web pages that may not use the API."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy) -> None:
        self._app, self._policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        refused = self._refused(Headers(scope=scope), scope["scheme"])
        await (response_of(refused, scope["path"]) if refused else self._app)(scope, receive, send)

    def _refused(self, headers: Headers, scheme: str) -> Refused | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._policy.needs_key and _name(host) not in self._policy.hosts:
            text = f"The host `{host[:100]}` is not served here"
            return Refused(text, Failure(421, INVALID, "unknown_host"))
        own = f"{_WEB.get(scheme, scheme)}://{host}"
        if origin is None or origin == own or origin in self._policy.origins:
            return None
        hint = "its owner can allow it with `--origins`"
        text = f"The origin `{origin[:100]}` may not use this server"
        return Refused(text, Failure(403, INVALID, "origin_not_allowed"), hint=hint)


class _Gate:
    """Identifies the key of a request, or refuses it."""

    def __init__(
        self,
        app: ASGIApp,
        policy: AccessPolicy,
        accounts: Accounts | None,
        *,
        is_owners: bool = False,
    ) -> None:
        self._app, self._policy, self._accounts = app, policy, accounts
        self._is_owners = is_owners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its key, or refuse it."""
        try:
            offered = scope.get("subprotocols", ())
            scope[_AGAIN] = partial(self._identify, _sent(Headers(scope=scope), offered))
            scope[_SCOPE] = await scope[_AGAIN]()
        except Refused as refused:
            await response_of(refused, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _identify(self, sent: str) -> ApiKey | None:
        key = await self._find(sent) if 0 < len(sent) <= MAX_KEY_CHARS else None
        if key is not None and (state := key.state(time.time())) != "active":
            raise Refused(f"The API key `{key.name}` is {state}", _UNKNOWN)
        if key is None and (self._policy.needs_key or self._is_owners):
            text = "The API key is invalid" if sent else "An API key is required"
            raise Refused(text, _UNKNOWN, hint="send it as `Authorization: Bearer KEY`")
        if await self._is_revoked(sent):
            raise Refused("The API key is revoked", _UNKNOWN)
        if self._is_owners and not (key and key.is_owner):
            raise Refused("This needs a key of the owner", _NOT_OWNER, hint=_OWNER_HINT)
        return key

    async def _is_revoked(self, sent: str) -> bool:
        """Return whether the owner of this node or of another member revoked a key."""
        if self._accounts is None or not 0 < len(sent) <= MAX_KEY_CHARS:
            return False
        return await asyncio.to_thread(self._accounts.is_revoked, sent)

    async def _find(self, sent: str) -> ApiKey | None:
        secret = sent.encode()
        # All are compared, in the same time wherever the right one is.
        right = [compare_digest(secret, each.encode()) for each in self._policy.file_keys]
        if True in right:
            return ApiKey(f"key-file:{right.index(True) + 1}", "", 0)
        return await asyncio.to_thread(self._accounts.find, sent) if self._accounts else None


def _sent(headers: Headers, subprotocols: Sequence[str]) -> str:
    """Return the key that a request carries, as OpenAI's or Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    offered = (each for each in subprotocols if each.startswith(KEY_PROTOCOL))
    return next(offered, "").removeprefix(KEY_PROTOCOL) or headers.get("x-api-key", "")


def _name(host: str) -> str:
    """Return the name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
