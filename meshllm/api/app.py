"""The ASGI application of a node."""

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
    """Build the application of a node.

    ``hosts`` are the allowed Host headers, against DNS rebinding by web pages on TCP; a unix
    socket needs none.
    """
    guards = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)]
    return Starlette(
        routes=[*mesh.routes(node), *openai.routes(node)],
        middleware=guards if hosts else [],
        exception_handlers=dict.fromkeys(
            (MeshError, HTTPException, ClientDisconnect, Exception), on_error
        ),
    )
