"""`/v1/models`: the models that are served."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from meshllm.api.port import NodePort
from meshllm.api.v1.failure import INVALID, Failure, Refused


def routes(node: NodePort) -> list[Route]:
    """Return the routes of a node."""

    async def list_models(_: Request) -> Response:
        listed = [_model(name) for name in node.models()]
        return JSONResponse({"object": "list", "data": listed})

    async def show_model(request: Request) -> Response:
        name = request.path_params["name"]
        require_model(node, name)
        return JSONResponse(_model(name))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", show_model)]


def require_model(node: NodePort, name: str) -> None:
    """Raise `Refused` if a model is not served."""
    if name not in (served := node.models()):
        listed = ", ".join(f"`{each}`" for each in served) or "nothing yet"
        raise Refused(
            f"The model `{name[:100]}` is not served here",
            Failure(404, INVALID, "model_not_found", "model"),
            hint=f"served: {listed}",
        )


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "meshllm"}
