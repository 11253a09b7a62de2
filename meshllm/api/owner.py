"""`/owner/*`, what the owner sees on TCP: keys, usage, metrics, and plans to try out."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from meshllm.api.access.accounts import Accounts, Grouping, KeyLimits
from meshllm.api.access.gate import AccessPolicy, owner_guard
from meshllm.api.failure import ERRORS, on_error
from meshllm.api.metrics import METRICS, exposition
from meshllm.api.port import ApiServerPort
from meshllm.api.respond import read
from meshllm.errors import LinkLost, MeshError, UserError
from meshllm.status import PlanTerms, to_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key to create; null means no limit."""

    name: str
    expires_s: int | None = None
    """Unix time."""
    models: tuple[str, ...] = ()
    concurrency: int | None = None
    tokens_per_day: int | None = None
    trust: tuple[str, ...] = ()
    deadline_s: int | None = None
    max_reasoning: int | None = None

    def limits(self) -> KeyLimits:
        """Return its limits, which are not checked."""
        return KeyLimits(**{each.name: getattr(self, each.name) for each in fields(KeyLimits)})


@dataclass(frozen=True, slots=True)
class _KeyName:
    name: str


def owner_views(node: ApiServerPort, accounts: Accounts, policy: AccessPolicy) -> Starlette:
    """Build the application of the owner's views; each request needs a key of the owner."""
    views = _OwnerViews(node, accounts)
    return Starlette(
        routes=[
            Route("/keys", views.list_keys),
            Route("/keys", views.create_key, methods=["POST"]),
            Route("/keys/revoke", views.revoke_key, methods=["POST"]),
            Route("/usage", views.usage),
            Route("/metrics", views.metrics),
            Route("/plan", views.plan, methods=["POST"]),
        ],
        middleware=[owner_guard(policy, accounts)],
        exception_handlers=dict.fromkeys(ERRORS, on_error),
    )


@dataclass(frozen=True, slots=True)
class _OwnerViews:
    node: ApiServerPort
    accounts: Accounts

    async def list_keys(self, _: Request) -> Response:
        keys = await _off_loop(self.accounts.list_keys)
        now = time.time()
        return _reply({"keys": [each.fields(now) for each in keys]})

    async def create_key(self, request: Request) -> Response:
        asked = await read(request, NewKey)
        limits = asked.limits()
        key = await _off_loop(self.accounts.create, asked.name, limits, time.time())
        return _reply({"name": asked.name, "key": key})

    async def revoke_key(self, request: Request) -> Response:
        asked = await read(request, _KeyName)
        await _off_loop(self.accounts.revoke, asked.name, time.time())
        tags = await _off_loop(self.accounts.revoked)
        try:
            await self.node.revoke(tags)
        except LinkLost:  # it tells them once it runs
            return _reply({"name": asked.name, "is_told": False})
        return _reply({"name": asked.name, "is_told": True})

    async def usage(self, request: Request) -> Response:
        by = _grouping(request.query_params.get("by", "day"))
        found = await _off_loop(self.accounts.usage, by)
        return _reply({"by": by, "usage": [{by: name, **asdict(used)} for name, used in found]})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(exposition(await self.node.status()), media_type=METRICS)

    async def plan(self, request: Request) -> Response:
        return _reply(to_json(await self.node.try_plan(await read(request, PlanTerms))))


def _reply(fields: dict[str, Any]) -> Response:
    return JSONResponse(fields, headers={"cache-control": "no-store"})


def _grouping(text: str) -> Grouping:
    known: dict[str, Literal["key", "model", "day"]] = {each: each for each in get_args(Grouping)}
    if text not in known:
        raise UserError(f"Invalid grouping `{text[:40]}`", hint="`key`, `model` or `day`")
    return known[text]


async def _off_loop(function: Callable[..., T], *args: Any) -> T:
    """Run what blocks on the disk in a thread."""
    try:
        return await asyncio.to_thread(function, *args)
    except sqlite3.Error as error:  # such as a full disk
        raise MeshError(f"The file of the keys cannot be used: {error}") from None
