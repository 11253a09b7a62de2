"""Conformance test of the transport contract.

In the tests of a plugin::

    async def test_contract() -> None:
        await check_transport(MyTransport)

The name of each check, here and in `meshllm.testing.links`, states the promise that it verifies.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from meshllm.errors import MeshError, UserError
from meshllm.testing import links
from meshllm.testing.links import Terms, expect, expect_lost, numbered, read
from meshllm.transport.contract import Link, Listener, Transport

__all__ = ["Terms", "check_transport"]


async def check_transport(make: Callable[[], Transport], terms: Terms | None = None) -> None:
    """Check transports made by ``make`` against every promise of the contract.

    Raises:
        AssertionError: a promise is broken; the message says which and how.
    """
    terms = terms or Terms()
    for promise in _PROMISES:
        async with _judged(promise.__name__, terms):
            await promise(make())
    for promise_of_link in links.PROMISES:
        for dialer_first in (True, False):
            async with _judged(promise_of_link.__name__, terms), _linked(make()) as (one, other):
                ends = (one, other) if dialer_first else (other, one)
                await promise_of_link(*ends, terms)


async def _dialling_without_a_listener_is_a_lost_link(transport: Transport) -> None:
    async with transport.listen() as listener:
        address = listener.address
    await expect_lost(transport.dial(address))


async def _an_address_is_checked_and_used_once(transport: Transport) -> None:
    async with transport.listen() as listener:
        for address in (listener.address, "no address at all"):
            try:
                async with transport.listen(address):
                    expect(False, f"two listeners at `{address}`")
            except UserError:
                pass
    try:
        await transport.dial("no address at all")
    except UserError:
        return
    expect(False, "`no address at all` was dialled")


async def _links_of_one_listener_are_independent(transport: Transport) -> None:
    async with transport.listen() as listener:
        arrivals = aiter(listener.links())
        pairs = [await _meet(transport, listener, arrivals) for _ in range(3)]
        await pairs[1][0].close()
        for number in (2, 0):
            await pairs[number][0].send([numbered(number)])
            expect((await read(pairs[number][1]))[1] == numbered(number), "links are mixed")
        for link in (link for pair in pairs for link in pair):
            await link.close()


async def _a_closed_listener_leaves_its_links(transport: Transport) -> None:
    async with transport.listen() as listener:
        taken = await _meet(transport, listener, aiter(listener.links()))
        untaken = await transport.dial(listener.address)
    await expect_lost(untaken.receive())
    await taken[0].send([b"alive"])
    expect((await read(taken[1]))[1] == b"alive", "the link is unusable")
    for link in (*taken, untaken):
        await link.close()


async def _a_closed_listener_ends_its_iterator(transport: Transport) -> None:
    async def collect(listener: Listener) -> list[Link]:
        return [link async for link in listener.links()]

    async with transport.listen() as listener:
        waiting = asyncio.create_task(collect(listener))
        await asyncio.sleep(0)
    expect(await waiting == await collect(listener) == [], "unexpected links")


_PROMISES: tuple[Callable[[Transport], Awaitable[None]], ...] = (
    _dialling_without_a_listener_is_a_lost_link,
    _an_address_is_checked_and_used_once,
    _links_of_one_listener_are_independent,
    _a_closed_listener_leaves_its_links,
    _a_closed_listener_ends_its_iterator,
)


@asynccontextmanager
async def _judged(promise: str, terms: Terms) -> AsyncIterator[None]:
    promise = promise.strip("_").replace("_", " ")
    try:
        async with asyncio.timeout(terms.deadline_s):
            yield
    except TimeoutError:
        raise AssertionError(f"{promise}: not done in {terms.deadline_s} s") from None
    except (AssertionError, MeshError, ExceptionGroup) as error:
        reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        raise AssertionError(f"{promise}: {reason or type(reason).__name__}") from error


@asynccontextmanager
async def _linked(transport: Transport) -> AsyncIterator[tuple[Link, Link]]:
    async with transport.listen() as listener:
        ends = await _meet(transport, listener, aiter(listener.links()))
        try:
            yield ends
        finally:
            for link in ends:
                await link.close()


async def _meet(
    transport: Transport, listener: Listener, arrivals: AsyncIterator[Link]
) -> tuple[Link, Link]:
    """Dial and accept; return the dialled and the accepted end."""
    dialled, accepted = await asyncio.gather(transport.dial(listener.address), anext(arrivals))
    return dialled, accepted
