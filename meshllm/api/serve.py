"""The application on a private unix socket, in the event loop of its node."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket

from uvicorn import Config, Server

from meshllm.api.app import application
from meshllm.api.port import NodePort
from meshllm.api.unix import listening

HEADER_BYTES = 16 << 10
CONNECTIONS = 256  # of one owner; the rest is told 503
ACCEPT_TURNS = 3  # of the event loop, from a connection that is accepted to one that is known
GOODBYE_S = 5  # until answers that were cancelled are gone from every node


async def serve(node: NodePort, path: Path) -> None:
    """Serve a node until cancelled; the socket is gone afterwards.

    Raises:
        UserError: a node is already running there, or the place is too long or not private.
    """
    config = Config(
        application(node),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=GOODBYE_S,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    server = _Server(config)
    with listening(path) as bound:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            await asyncio.shield(serving)  # whoever knocked while it starts is hung up on, too
        finally:
            await server.stop(serving, bound)


class _Server(Server):
    """Leaves the signals to the node."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def stop(self, serving: asyncio.Task[None], bound: socket) -> None:
        """Hang up, so that every answer that still runs is cancelled as if its reader had gone."""
        while not self.started and not serving.done():  # noqa: ASYNC110  # uvicorn has no event
            await asyncio.sleep(0)
        serving.cancel()
        # A server that closes forgets whom it has accepted and not met: first nobody new.
        asyncio.get_running_loop().remove_reader(bound)
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        for connection in list(self.server_state.connections):
            connection.transport.close()
        if self.started:
            await self.shutdown()
