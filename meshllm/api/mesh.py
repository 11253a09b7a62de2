"""`/mesh/*`: what the owner's own tools ask of a node; knows nothing about OpenAI."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from meshllm.api.door import Door
from meshllm.api.metrics import exposition
from meshllm.api.respond import Stream, read, read_body
from meshllm.errors import MeshError
from meshllm.node.asking import error_to_json, event_to_json, request_from_json
from meshllm.request import Request as Asked

SCHEMA = 1  # of the status; a field may be added without changing it
NDJSON = "application/x-ndjson"
METRICS = "text/plain; version=0.0.4"  # Prometheus, exposition formats


@dataclass(frozen=True, slots=True)
class _Invitation:
    role: Literal["node", "client"] = "node"
    expires_s: int = 3600
    uses: int = 1


@dataclass(frozen=True, slots=True)
class _Removal:
    node: str


def routes(door: Door) -> list[Route]:
    """List the routes over a node."""
    mesh = _Mesh(door)
    return [
        Route("/mesh/status", mesh.status),
        Route("/mesh/plan", mesh.plan),
        Route("/mesh/members", mesh.members),
        Route("/mesh/events", mesh.events),
        Route("/mesh/ticket", mesh.ticket, methods=["POST"]),
        Route("/mesh/remove", mesh.remove, methods=["POST"]),
        Route("/mesh/ask", mesh.ask, methods=["POST"]),
        Route("/metrics", mesh.metrics),
    ]


@dataclass(frozen=True, slots=True)
class _Mesh:
    door: Door

    async def status(self, _: Request) -> Response:
        return JSONResponse({"schema": SCHEMA, **self.door.status()})

    async def plan(self, _: Request) -> Response:
        return JSONResponse(self.door.plan())

    async def members(self, _: Request) -> Response:
        return JSONResponse({"members": self.door.members()})

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(exposition(self.door.status()), media_type=METRICS)

    async def ticket(self, request: Request) -> Response:
        asked = await read(request, _Invitation)
        return JSONResponse({"ticket": self.door.invite(asked.role, asked.expires_s, asked.uses)})

    async def remove(self, request: Request) -> Response:
        asked = await read(request, _Removal)
        return JSONResponse(self.door.remove(asked.node))

    async def events(self, _: Request) -> Response:
        return Stream(_happenings(self.door), NDJSON)

    async def ask(self, request: Request) -> Response:
        asked = request_from_json(await read_body(request))
        return Stream(_answer(self.door, asked), NDJSON)


async def _happenings(door: Door) -> AsyncGenerator[bytes, None]:
    yield b""  # the headers, at once: it may be long until something happens
    async with aclosing(door.events()) as events:
        async for event in events:
            yield json.dumps(event).encode() + b"\n"


async def _answer(door: Door, asked: Asked) -> AsyncGenerator[bytes, None]:
    is_begun = False
    try:
        async with aclosing(door.generate(asked)) as events:
            async for event in events:
                yield event_to_json(event) + b"\n"
                is_begun = True
    except MeshError as error:
        if not is_begun:
            raise
        yield error_to_json(error) + b"\n"
