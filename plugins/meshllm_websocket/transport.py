"""The transport over WebSocket."""

import errno
from asyncio import Server, get_running_loop
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from meshllm.errors import UserError, cannot_listen
from meshllm.transport import contract
from meshllm_websocket.address import parse, reachable
from meshllm_websocket.dialer import WebsocketDialer
from meshllm_websocket.listener import WebsocketListener

PORTS = range(7700, 7800)
"""Tried in turn when no address is given."""
BACKLOG = 128


class WebsocketTransport:
    """Links over WebSocket, which pass HTTP proxies and middleboxes."""

    name: ClassVar[str] = "websocket"
    schemes: ClassVar[tuple[str, ...]] = ("ws", "wss")

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[contract.Listener]:
        """Accept links at ``ws://HOST:PORT``, or on every interface at the first free port."""
        listener = WebsocketListener()
        path = ""
        if address is None:
            server = await _serve_anywhere(listener)
        else:
            uri = parse(address)
            if uri.secure:
                hint = "listen at `ws://` behind a reverse proxy that terminates TLS"
                raise UserError(f"Cannot listen on `{address}`: TLS is not supported", hint=hint)
            path = uri.path
            try:
                server = await _serve(listener, [uri.host], uri.port)
            except OSError as error:
                raise cannot_listen(address, error) from error
        listener.addresses = reachable((s.getsockname()[:2] for s in server.sockets), path)
        try:
            yield listener
        finally:
            server.close()
            await listener.close()

    async def dial(self, address: str) -> contract.Link:
        """Open a link to ``ws://HOST:PORT/PATH``, ``wss://HOST:PORT/PATH`` or ``HOST:PORT``."""
        return await WebsocketDialer(address).dial()

    async def dial_hosts(self, address: str, hosts: Sequence[str]) -> contract.Link:
        """Open a link as `dial`, to one of the hosts; TLS checks the name in the address."""
        return await WebsocketDialer(address, hosts).dial()


async def _serve_anywhere(
    listener: WebsocketListener,
    hosts: Sequence[str] = ("0.0.0.0", "::"),  # peers are authenticated above the transport
) -> Server:
    for port in PORTS:
        try:
            return await _serve(listener, hosts, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL and len(hosts) > 1:  # no IPv6 on this machine
                return await _serve_anywhere(listener, hosts[:1])
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # no other port would do
                reason = cannot_listen("a TCP port", error)
                raise UserError(str(reason)) from error
    raise UserError(
        f"No free port from {PORTS.start} to {PORTS.stop - 1}",
        hint="choose one with `--listen HOST:PORT`",
    )


async def _serve(listener: WebsocketListener, hosts: Sequence[str], port: int) -> Server:
    loop = get_running_loop()
    return await loop.create_server(listener.accept, hosts, port, backlog=BACKLOG)
