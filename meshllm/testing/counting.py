"""A transport that records the messages sent over another one."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

from meshllm.transport.contract import (
    Buffer,
    Channel,
    Link,
    LinkStatistics,
    Listener,
    Transport,
    checked_size,
)


class CountingTransport:
    """Wraps a transport and records the channel and size of every message sent."""

    name: ClassVar[str] = "counting"
    schemes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: Transport) -> None:
        self.sent: list[tuple[Channel, int]] = []
        """Channel and bytes of each message, in the order sent, over all links."""
        self._inner = inner

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        """Listen with the inner transport."""
        async with self._inner.listen(address) as listener:
            yield _CountedListener(listener, self.sent)

    async def dial(self, address: str) -> Link:
        """Dial with the inner transport."""
        return _CountedLink(await self._inner.dial(address), self.sent)


class _CountedListener:
    def __init__(self, inner: Listener, sent: list[tuple[Channel, int]]) -> None:
        self._inner = inner
        self._sent = sent

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    async def links(self) -> AsyncIterator[Link]:
        async for link in self._inner.links():
            yield _CountedLink(link, self._sent)


class _CountedLink:
    def __init__(self, inner: Link, sent: list[tuple[Channel, int]]) -> None:
        self._inner = inner
        self._sent = sent

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        self._sent.append((channel, checked_size(message)))
        await self._inner.send(message, channel)

    async def receive(self) -> tuple[Channel, Buffer]:
        return await self._inner.receive()

    async def close(self) -> None:
        await self._inner.close()

    @property
    def statistics(self) -> LinkStatistics:
        return self._inner.statistics
