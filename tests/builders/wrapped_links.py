"""Transports whose links are wrapped, and what the conformance test says of them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from meshllm.testing.clock import run_virtual
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport.contract import Buffer, Channel, Link, LinkStatistics, Listener
from meshllm_loopback import LoopbackTransport


class Sound:
    """A link that passes everything on; the broken ones change one thing."""

    def __init__(self, inner: Link) -> None:
        self.inner = inner
        self.count = 0
        self.held = b"", Channel.DATA
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        self.count += 1
        await self.inner.send(message, channel)

    async def receive(self) -> tuple[Channel, Buffer]:
        return await self.inner.receive()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.inner.close()

    @property
    def statistics(self) -> LinkStatistics:
        return self.inner.statistics


class Wrapped(LoopbackTransport):
    """Loopback whose links are wrapped."""

    def __init__(self, wrap: Callable[[Link], Link]) -> None:
        super().__init__()
        self.wrap = wrap

    async def dial(self, address: str) -> Link:
        return self.wrap(await super().dial(address))

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        async with super().listen(address) as listener:
            yield WrappedListener(listener, self.wrap)


class WrappedListener:
    def __init__(self, inner: Listener, wrap: Callable[[Link], Link]) -> None:
        self.inner, self.wrap = inner, wrap

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.inner.addresses

    async def links(self) -> AsyncIterator[Link]:
        async for link in self.inner.links():
            yield self.wrap(link)


TERMS = Terms(longest_bytes=2**24, settle_s=1.0, deadline_s=1000.0)


def verdict(make: Callable[[], LoopbackTransport]) -> str:
    with pytest.raises(AssertionError) as caught:
        run_virtual(check_transport(make, TERMS))
    return str(caught.value)
