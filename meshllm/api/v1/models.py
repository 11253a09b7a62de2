"""`/v1/models`: the models that are served, and by whom."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.access.gate import key_of
from meshllm.api.generation.service import Service
from meshllm.status import ModelStatus, to_json


def routes(service: Service) -> list[Route]:
    """Return the routes of a service."""

    async def list_models(request: Request) -> Response:
        served = await service.models(key_of(request))
        return JSONResponse({"object": "list", "data": [_model(each) for each in served]})

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        return JSONResponse(_model(await service.model(key_of(request), name)))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]


def _model(model: ModelStatus) -> dict[str, Any]:
    """Return OpenAI's object, vLLM's field for the context, and ours; without what is unknown."""
    said = {
        "precision": model.weight_precision,
        "aliases": list(model.aliases),
        "key": model.key,
        "rings": model.rings,
        "providers": list(model.providers),
        "offers": [_known(to_json(each)) for each in (*model.offers, *model.beside)],
    }
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "meshllm",
        **({"max_model_len": model.context} if model.context else {}),
        "meshllm": _known(said),
    }


def _known(said: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if value}
