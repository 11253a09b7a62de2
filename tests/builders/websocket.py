"""Links over WebSocket connections of this machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from meshllm.transport.laned_link import LanedLink
from meshllm_websocket import WebsocketTransport

ANY = "ws://127.0.0.1:0"


@asynccontextmanager
async def linked(through: str = "{}") -> AsyncIterator[tuple[LanedLink, LanedLink]]:
    """Link two ends, and close them."""
    transport = WebsocketTransport()
    async with transport.listen(ANY) as listener:
        dialling = asyncio.create_task(transport.dial(through.format(listener.address)))
        ends = await anext(aiter(listener.links())), await dialling
    one, other = (end for end in reversed(ends) if isinstance(end, LanedLink))
    try:
        yield one, other
    finally:
        await asyncio.gather(one.close(), other.close())
