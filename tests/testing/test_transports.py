"""The conformance suite finds broken listeners: each here breaks one promise."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from meshllm.errors import LinkLost, UserError
from meshllm.testing.clock import run_virtual
from meshllm.testing.transports import check_transport
from meshllm.transport.contract import Link, Listener
from meshllm_loopback import LoopbackTransport
from tests.builders.wrapped_links import Sound, Wrapped, WrappedListener, verdict


class WaitsForAListener(LoopbackTransport):
    async def dial(self, address: str) -> Link:
        try:
            return await super().dial(address)
        except LinkLost:
            return await asyncio.Future()


class SharesAddresses(LoopbackTransport):
    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        async with super().listen() as listener:
            yield listener


class DialsAnything(LoopbackTransport):
    async def dial(self, address: str) -> Link:
        try:
            return await super().dial(address)
        except UserError:
            async with self.listen() as listener:
                return await super().dial(listener.address)


class ClosesWhatWasTaken(LoopbackTransport):
    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        taken: list[Link] = []

        def take(link: Link) -> Link:
            taken.append(link)
            return link

        async with super().listen(address) as listener:
            yield WrappedListener(listener, take)
        for link in taken:
            await link.close()


class NeverEnds(LoopbackTransport):
    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        async with super().listen(address) as listener:
            yield EndlessListener(listener, Sound)


class EndlessListener(WrappedListener):
    async def links(self) -> AsyncIterator[Link]:
        async for link in self.inner.links():
            yield link
        await asyncio.Future()


def test_a_sound_transport_passes() -> None:
    run_virtual(check_transport(lambda: Wrapped(Sound)))


@pytest.mark.parametrize(
    ("make", "promise"),
    [
        (WaitsForAListener, "dialling without a listener is a lost link: not done"),
        (SharesAddresses, "an address is checked and used once: two listeners at `loopback:1`"),
        (DialsAnything, "an address is checked and used once: `no address at all` was dialled"),
        (ClosesWhatWasTaken, "a closed listener leaves its links: "),
        (NeverEnds, "a closed listener ends its iterator: not done"),
    ],
)
def test_a_broken_listener_is_found(make: Callable[[], LoopbackTransport], promise: str) -> None:
    assert verdict(make).startswith(promise)
