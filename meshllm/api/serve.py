"""The application on a private unix socket, in the event loop of its node."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uvicorn import Config, Server

from meshllm.api.app import application
from meshllm.api.door import Door
from meshllm.api.unix import listening

HEADER_BYTES = 16 << 10
CONNECTIONS = 256  # of one owner; the rest is told 503
GOODBYE_S = 5  # until answers that were cancelled are gone from every node


async def serve(door: Door, path: Path) -> None:
    """Serve a node until cancelled; the socket is gone afterwards.

    Raises:
        UserError: a node is already running there, or the place is too long or not private.
    """
    config = Config(
        application(door),
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
        try:
            await server.serve(sockets=[bound])
        finally:
            await server.stop()


class _Server(Server):
    """Leaves the signals to the node."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def stop(self) -> None:
        """Hang up, so that every answer that still runs is cancelled as if its reader had gone."""
        for connection in list(self.server_state.connections):
            connection.transport.close()
        if self.started:
            await self.shutdown()
