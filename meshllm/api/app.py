"""The routes of a node as one ASGI application."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from meshllm.api import mesh, openai
from meshllm.api.port import NodePort
from meshllm.api.respond import on_error
from meshllm.errors import MeshError


def application(node: NodePort, *, hosts: Sequence[str] = ()) -> Starlette:
    """Make the application over a node.

    ``hosts`` are the names under which it may be called. A unix socket needs none; on TCP a web
    page could call it under a name of its own that leads here (DNS rebinding).
    """
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)]
    return Starlette(
        routes=[*mesh.routes(node), *openai.routes(node)],
        middleware=guards if hosts else [],
        exception_handlers=dict.fromkeys(
            (MeshError, HTTPException, ClientDisconnect, Exception), on_error
        ),
    )
