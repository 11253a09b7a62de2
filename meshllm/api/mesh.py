"""`/mesh/*` and `/metrics`: the owner's API of a node."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from meshllm.api.metrics import METRICS, exposition
from meshllm.api.port import NodePort
from meshllm.api.respond import Stream, read, read_body
from meshllm.errors import MeshError, UserError
from meshllm.names import DIGEST_BYTES, Digest, Span
from meshllm.node.options import ModelOptions
from meshllm.node.requests.request_json import error_to_json, event_to_json, request_from_json
from meshllm.node.training import LayerPass
from meshllm.protocol.membership.records import KEY_TAG_BYTES
from meshllm.protocol.training.codec import MAX_BATCH_BYTES, Direction
from meshllm.protocol.trust.credential import ClientLimits
from meshllm.status import (
    SCHEMA,
    LayerSpans,
    Models,
    NewTicket,
    PlanTerms,
    RevokedKeys,
    Stopped,
    to_json,
)

NDJSON = "application/x-ndjson"
TENSORS = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class _TicketRequest:
    role: Literal["node", "client"] = "node"
    expires_s: int = 3600
    uses: int = 1
    concurrency: int = 0
    tokens_per_day: int = 0


@dataclass(frozen=True, slots=True)
class _RemoveRequest:
    node: str
    spare: tuple[str, ...] = ()


def routes(node: NodePort) -> list[Route]:
    """Return the routes of a node."""
    mesh = _Mesh(node)
    return [
        Route("/mesh/status", mesh.status),
        Route("/mesh/plan", mesh.try_plan, methods=["POST"]),
        Route("/mesh/members", mesh.members),
        Route("/mesh/models", mesh.models),
        Route("/mesh/models", mesh.serve, methods=["POST"]),
        Route("/mesh/models", mesh.stop, methods=["DELETE"]),
        Route("/mesh/events", mesh.events),
        Route("/mesh/ticket", mesh.ticket, methods=["POST"]),
        Route("/mesh/remove", mesh.remove, methods=["POST"]),
        Route("/mesh/revoked", mesh.revoked, methods=["POST"]),
        Route("/mesh/ask", mesh.ask, methods=["POST"]),
        Route("/mesh/layers", mesh.layer_spans),
        Route("/mesh/layers", mesh.layers, methods=["POST"]),
        Route("/metrics", mesh.metrics),
    ]


@dataclass(frozen=True, slots=True)
class _Mesh:
    node: NodePort

    async def status(self, _: Request) -> Response:
        return _object(await self.node.status())

    async def try_plan(self, request: Request) -> Response:
        return _object(await self.node.try_plan(await read(request, PlanTerms)))

    async def members(self, _: Request) -> Response:
        return _object(self.node.members())

    async def models(self, _: Request) -> Response:
        return _object(Models(tuple(await self.node.models())))

    async def serve(self, request: Request) -> Response:
        return _object(await self.node.serve(await read(request, ModelOptions)))

    async def stop(self, request: Request) -> Response:
        return _object(self.node.stop((await read(request, Stopped)).model))

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(exposition(await self.node.status()), media_type=METRICS)

    async def ticket(self, request: Request) -> Response:
        asked = await read(request, _TicketRequest)
        limits = ClientLimits(asked.concurrency, asked.tokens_per_day)
        made = await self.node.invite(asked.role, asked.expires_s, asked.uses, limits)
        return _object(NewTicket(made))

    async def remove(self, request: Request) -> Response:
        asked = await read(request, _RemoveRequest)
        return _object(await self.node.remove(asked.node, asked.spare))

    async def revoked(self, request: Request) -> Response:
        asked = await read(request, RevokedKeys)
        try:
            tags = [bytes.fromhex(each) for each in asked.tags]
        except ValueError:
            tags = [b""]
        if not all(len(each) == KEY_TAG_BYTES for each in tags):
            raise UserError(f"A tag is not {KEY_TAG_BYTES} bytes in hexadecimal")
        await self.node.revoke(tags)
        return _object(asked)

    async def events(self, _: Request) -> Response:
        return Stream(self.node.events(), NDJSON, _line, _failure)

    async def layers(self, request: Request) -> Response:
        """Send a batch through layers: the query says which, the body has its tensors."""
        query = request.query_params
        direction = query.get("direction", "").upper()
        if direction not in Direction.__members__:
            raise UserError(f"`direction` is none of {', '.join(Direction.__members__).lower()}")
        span = Span.parse(query.get("span", ""))
        asked = LayerPass(_digest(query), span, Direction[direction])
        data = await self.node.compute_layers(asked, await read_body(request, MAX_BATCH_BYTES))
        return Response(data, media_type=TENSORS)

    async def layer_spans(self, request: Request) -> Response:
        spans = await self.node.layer_spans(_digest(request.query_params))
        return _object(LayerSpans(tuple(map(str, spans))))

    async def ask(self, request: Request) -> Response:
        asked = request_from_json(await read_body(request))
        events = self.node.generate(asked)
        return Stream(events, NDJSON, lambda event: event_to_json(event) + b"\n", _failure)


def _digest(query: Mapping[str, str]) -> Digest:
    try:
        model = bytes.fromhex(query.get("model", ""))
    except ValueError:
        model = b""
    if len(model) != DIGEST_BYTES:
        raise UserError("`model` is not the digest of a configuration in hexadecimal")
    return Digest(model)


def _object(value: object) -> Response:
    return JSONResponse({"schema": SCHEMA, **to_json(value)})


def _line(value: object) -> bytes:
    return json.dumps({"schema": SCHEMA, **to_json(value)}).encode() + b"\n"


def _failure(error: MeshError) -> bytes:
    return error_to_json(error) + b"\n"
