"""The ASGI applications of a node: one for its owner, and the public one, which it includes."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from meshllm.api import failure, mesh
from meshllm.api.access.gate import AccessPolicy, key_guard, site_guards
from meshllm.api.generation.service import Service
from meshllm.api.health import Health
from meshllm.api.page import routes as page
from meshllm.api.port import NodePort
from meshllm.api.request_id import RequestIds
from meshllm.api.respond import on_error
from meshllm.api.v1 import chat, chat_socket, completions, embeddings, messages, models, responses
from meshllm.api.v1.counting import RequestLimitMiddleware


def owner_application(node: NodePort) -> ASGIApp:
    """Build the application of a node's owner: `/mesh/*`, `/metrics` and the public routes."""
    application = Starlette(
        routes=mesh.routes(node), exception_handlers=dict.fromkeys(failure.ERRORS, on_error)
    )
    application.router.default = public_application(Service(node))
    return RequestIds(application)


def public_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of `/v1/*`."""
    return [
        *models.routes(service),
        *chat.routes(service),
        *chat_socket.routes(service),
        *completions.routes(service),
        *embeddings.routes(service),
        *messages.routes(service),
        *responses.routes(service),
    ]


def public_application(
    service: Service, policy: AccessPolicy | None = None, owner: Starlette | None = None
) -> ASGIApp:
    """Build the application for everybody who may use the model: `/v1/*`, and the page at `/`.

    `/health` and the files of the page are the same for everybody and need no key, what the page
    shows does. Without a ``policy`` the application is for the owner, who needs no key. ``owner``
    is the application of the owner's views, which checks its keys by itself.
    """
    is_public = policy is not None and policy.needs_key
    handlers = dict.fromkeys(failure.ERRORS, failure.on_error)
    application = Starlette(
        routes=[
            *page.file_routes(),
            Health(service.node).route(),
            *([Mount("/owner", owner)] if owner else []),
        ],
        middleware=site_guards(policy) if policy else [],
        exception_handlers=handlers,
    )
    application.router.default = Starlette(
        routes=[
            *public_routes(service),
            *page.event_routes(service.node, is_public=is_public),
        ],
        middleware=[
            *([key_guard(policy, service.accounts)] if policy else []),
            Middleware(RequestLimitMiddleware, service=service),
        ],
        exception_handlers=handlers,
    )
    return RequestIds(application)
