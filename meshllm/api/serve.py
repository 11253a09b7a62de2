"""HTTP servers in the event loop of a node; the owner's is on a private unix socket."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server

from meshllm.api import connection
from meshllm.api.app import owner_application
from meshllm.api.connection import ApiProtocol, SocketProtocol
from meshllm.api.port import NodePort
from meshllm.api.unix import listening
from meshllm.node.requests.request_json import REQUEST_BYTES

HEADER_BYTES = 16 << 10
CONNECTIONS = 256  # of one owner; further ones get 503
ACCEPT_TURNS = 3  # of the event loop, from accepting a connection to registering it
PIECE_BYTES = 64 << 10  # as much as a connection buffers before it waits for its client
GOODBYE_S = 5  # s until cancelled generations have ended on every node


async def serve(node: NodePort, path: Path) -> None:
    """Serve a node to its owner until cancelled, then remove the socket.

    Raises:
        UserError: a node is already running there, or the path is too long or not private.
    """
    with listening(path) as bound:
        await run_server(owner_application(node), bound, limit_concurrency=CONNECTIONS)


async def run_server(application: ASGIApp, bound: socket, **settings: Any) -> None:
    """Serve an application on a bound socket until cancelled; ``settings`` are uvicorn's."""
    config = Config(
        _OriginForm(_InPieces(application)),
        ws=SocketProtocol,
        ws_max_size=REQUEST_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,  # what a stranger sends is not worth a line
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GOODBYE_S,
        h11_max_incomplete_event_size=HEADER_BYTES,
        **{"http": ApiProtocol, **settings},
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        await asyncio.shield(serving)  # `stop` closes connections made during startup, too
    finally:
        await server.stop(serving, bound)


class _OriginForm:
    """Rewrites a target that is a whole URL to its path, and the Host to its host.

    Servers must accept such a target, and ignore the Host header then (RFC 9112, section 3.2.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        scheme, _, rest = scope["raw_path"].partition(b"://")
        host, _, path = rest.partition(b"/")
        if scheme.lower() in {b"http", b"https"} and host and b"@" not in host:
            others = [each for each in scope["headers"] if each[0].lower() != b"host"]
            scope = {
                **scope,
                "path": unquote(f"/{path.decode('ascii')}"),
                "raw_path": b"/" + path,
                "headers": [(b"host", host), *others],
            }
        await self._app(scope, receive, send)


class _InPieces:
    """Sends long bodies in pieces, so that the deadline of a client is for one of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""

        async def send_pieces(message: Message) -> None:
            body = message.get("body", b"")
            *starts, last = range(0, len(body) or 1, PIECE_BYTES)
            for start in starts:
                piece = bytes(body[start : start + PIECE_BYTES])
                await send({**message, "body": piece, "more_body": True})
            await send({**message, "body": bytes(body[last:])} if last else message)

        await self._app(scope, receive, send_pieces)


class _Server(Server):
    """A server without signal handlers: the node has its own."""

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Begin to accept as uvicorn does, whose TLS handshakes could take a minute each."""
        handshake_s = None if self.config.ssl is None else connection.HEADERS_S
        kind: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        protocol = partial(
            kind,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                protocol,
                sock=each,
                ssl=self.config.ssl,
                backlog=self.config.backlog,
                ssl_handshake_timeout=handshake_s,
            )
            for each in sockets or ()
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def stop(self, serving: asyncio.Task[None], bound: socket) -> None:
        """Close all connections, so running generations are cancelled as on a disconnect."""
        while not self.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event
            await asyncio.sleep(0)
        serving.cancel()
        # Closing the server would leak connections accepted but not yet registered: first stop
        # accepting, then wait until all are registered.
        asyncio.get_running_loop().remove_reader(bound)
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        for each in list(self.server_state.connections):
            each.transport.close()
        if self.started:
            await self.shutdown()
