"""The ASGI applications of a node: one for its owner, and the public one, which it includes."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from meshllm.api import failure, mesh
from meshllm.api.access.gate import AccessPolicy, guards_of
from meshllm.api.port import NodePort
from meshllm.api.respond import on_error
from meshllm.api.v1 import chat, completions, models
from meshllm.api.v1.service import Service
from meshllm.errors import MeshError

_ERRORS = (MeshError, HTTPException, ClientDisconnect, Exception)


def owner_application(node: NodePort) -> Starlette:
    """Build the application of a node's owner: `/mesh/*`, `/metrics` and the public routes."""
    application = Starlette(
        routes=mesh.routes(node), exception_handlers=dict.fromkeys(_ERRORS, on_error)
    )
    application.router.default = public_application(Service(node))
    return application


def public_application(service: Service, policy: AccessPolicy | None = None) -> Starlette:
    """Build the application for everybody who may use the model: `/v1/*`.

    Without a ``policy`` it is for the owner, who needs no key.
    """
    guards = guards_of(policy, service.accounts) if policy else []
    return Starlette(
        routes=[*models.routes(service), *chat.routes(service), *completions.routes(service)],
        middleware=guards,
        exception_handlers=dict.fromkeys(_ERRORS, failure.on_error),
    )
