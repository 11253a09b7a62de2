"""The ASGI applications of a node: one for its owner, which includes the public one."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from meshllm.api import mesh
from meshllm.api.port import NodePort
from meshllm.api.respond import on_error
from meshllm.api.v1 import chat, failure, models
from meshllm.errors import MeshError

_ERRORS = (MeshError, HTTPException, ClientDisconnect, Exception)


def owner_application(node: NodePort) -> Starlette:
    """Build the application of a node's owner: `/mesh/*`, `/metrics` and the public routes."""
    application = Starlette(
        routes=mesh.routes(node), exception_handlers=dict.fromkeys(_ERRORS, on_error)
    )
    application.router.default = public_application(node)
    return application


def public_application(node: NodePort) -> Starlette:
    """Build the application for everybody who may use the model: `/v1/*`."""
    return Starlette(
        routes=[*models.routes(node), *chat.routes(node)],
        exception_handlers=dict.fromkeys(_ERRORS, failure.on_error),
    )
