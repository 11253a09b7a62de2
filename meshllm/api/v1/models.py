"""`/v1/models`: the models that are served."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.v1.service import Service


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def list_models(request: Request) -> Response:
        served = await service.models(key_of(request))
        return JSONResponse({"object": "list", "data": [_model(each.name) for each in served]})

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(_model((await service.model(key_of(request), name)).name))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "meshllm"}
