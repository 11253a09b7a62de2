"""Links of a rank that are not in use yet."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from meshllm.errors import LinkLost
from meshllm.node.net.secure import SecureLink
from meshllm.node.ring.idle_links import MAX_BUFFERED, IdleLink, IdleLinks
from meshllm.node.session.ring_link import RingLink
from meshllm.protocol.session.link import NeighbourLink
from meshllm.protocol.trust.handshake import ALL_FEATURES, Features
from meshllm.transport.contract import Channel, Link
from meshllm_loopback import LoopbackTransport


async def pair() -> tuple[Link, Link]:
    transport = LoopbackTransport()
    async with transport.listen() as listener:
        one = await transport.dial(listener.address)
        return one, await anext(aiter(listener.links()))


async def test_an_idle_link_forwards_offers() -> None:
    one, other = await pair()
    silent = SimpleNamespace(send=one.send, receive=one.receive, close=one.close, statistics=None)

    assert IdleLink(one).offer([b"now"], Channel.CONTROL)
    assert not IdleLink(silent).offer([b"never"])
    assert await other.receive() == (Channel.CONTROL, b"now")


async def test_an_idle_link_sends_together_what_its_link_does() -> None:
    one, _ = await pair()
    begun = list[int]()

    @contextmanager
    def together() -> Iterator[None]:
        begun.append(len(begun))
        yield

    gathering = SimpleNamespace(send=one.send, close=one.close, together=together)
    with IdleLink(gathering).together(), IdleLink(one).together():
        assert begun == [0]
    machine = create_autospec(NeighbourLink, instance=True)
    with RingLink(IdleLink(gathering), machine, begun.clear).together():
        assert begun == [0, 1]


async def test_an_idle_link_has_the_features_of_its_peer() -> None:
    one, _ = await pair()
    secure = create_autospec(SecureLink, instance=True, features=Features.HELP)

    assert IdleLink(secure).features == Features.HELP
    assert IdleLink(one).features == ALL_FEATURES


async def test_a_link_that_is_used_has_all_that_was_read_ahead() -> None:
    gone = list[int]()
    async with asyncio.TaskGroup() as tasks:
        links = IdleLinks(tasks, gone.append)
        one, other = await pair()
        number = links.add(IdleLink(one))
        for text in (b"first", b"second"):
            await other.send([text])
        await asyncio.sleep(0)
        links.stop_watching(number, None)
        (link,) = links.take(number, None)
        await link.watch_ended()
        await other.send([b"third"])

        assert [(await link.receive())[1] for _ in range(3)] == [b"first", b"second", b"third"]
        assert gone == []


@pytest.mark.parametrize(("sent", "size"), [(0, 0), (MAX_BUFFERED, 5), (1, 64 * 1024 + 1)])
async def test_a_link_that_is_lost_or_floods_is_reported_and_closed(sent: int, size: int) -> None:
    gone = asyncio.Queue[int]()
    async with asyncio.TaskGroup() as tasks:
        links = IdleLinks(tasks, gone.put_nowait)
        kept, lost = [await pair() for _ in range(2)]
        links.add(IdleLink(kept[0]))
        number = links.add(IdleLink(lost[0]))
        for _ in range(sent):
            await lost[1].send([bytes(size)])
        if not sent:
            await lost[1].close()

        assert await gone.get() == number
        links.close(number)
        links.close(number)
        await links.close_all()

    for link in (*kept, *lost):
        with pytest.raises(LinkLost):
            await link.send([b""])
