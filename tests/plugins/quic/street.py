"""A node that listens, and a neighbouring machine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aioquic.quic.configuration import QuicConfiguration

from meshllm_quic.link.link import QuicLink
from meshllm_quic.link.listener import QuicListener
from meshllm_quic.transport import QuicTransport
from tests.plugins.quic.stranger import Stranger
from tests.simulation.internet import Internet

PORT = 7700


class Street:
    """A node that listens, and a neighbouring machine."""

    def __init__(self) -> None:
        self.internet = Internet(seed=1)
        self.near, self.far = self.internet.host("near"), self.internet.host("far")
        self.transport = QuicTransport(self.far)
        self.transport.identify(b"f" * 32)
        self.listener: QuicListener

    async def meet(self) -> tuple[QuicLink, QuicLink]:
        """Dial from the neighbouring machine."""
        one, other = await asyncio.gather(
            QuicTransport(self.near).dial(self.listener.address),
            anext(aiter(self.listener.links())),
        )
        assert isinstance(one, QuicLink)
        assert isinstance(other, QuicLink)
        return one, other

    async def knock(self, configuration: QuicConfiguration) -> Stranger:
        stranger = Stranger((self.far.hosts()[0], PORT), configuration)
        await stranger.open(self.near)
        return stranger


@asynccontextmanager
async def street() -> AsyncIterator[Street]:
    made = Street()
    async with made.transport.listen() as listener:
        assert isinstance(listener, QuicListener)
        made.listener = listener
        yield made
