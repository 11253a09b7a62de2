"""WebSocket connections over real sockets: what is sent, read and closed."""

import asyncio
import socket
from itertools import count

import pytest

from meshllm.errors import LinkLost
from meshllm.testing.links import read
from meshllm.transport import contract, linger
from meshllm.transport.laned_link import LanedLink
from meshllm.transport.lanes import CREDIT
from meshllm_websocket import connection
from tests.builders.waiting import timers_fired, until
from tests.builders.websocket import linked

pytestmark = pytest.mark.socket


async def test_a_slow_reader_bounds_the_memory_of_both_sides() -> None:
    async with linked() as (one, other):
        sender = asyncio.create_task(flood(one))
        await until(lambda: held(other) > CREDIT - 2 * CHUNK_BYTES)  # there is no room for more
        await timers_fired()

        assert not sender.done()
        assert one.statistics.bytes_sent <= CREDIT
        assert sum(map(held, (one, other))) <= CREDIT
        for _ in range(200):
            await other.receive()
        assert CREDIT < one.statistics.bytes_sent <= 200 * CHUNK_BYTES + CREDIT
        sender.cancel()


CHUNK_BYTES = 64 * 1024


async def flood(link: LanedLink) -> None:
    while True:
        await link.send([bytes(CHUNK_BYTES)])


def held(link: LanedLink) -> int:
    """Bytes of messages that one end buffers."""
    lanes = link._incoming._lanes.values()
    return link.unsent + sum(len(message) for lane in lanes for message in lane.queue)


async def test_control_overtakes_a_long_message() -> None:
    async with linked() as (one, other):
        sending = asyncio.create_task(one.send([bytes(64 * 1024 * 1024)]))
        await asyncio.sleep(0)
        await one.send([b"now"], contract.Channel.CONTROL)

        assert await read(other) == (contract.Channel.CONTROL, b"now")
        await sending
        assert len((await other.receive())[1]) == 64 * 1024 * 1024


async def test_nodelay_and_keep_alive_are_set() -> None:
    async with linked() as ends:
        for end in ends:
            assert isinstance(end._wire, connection.WebsocketConnection)
            sock = end._wire.socket.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_close_does_not_wait_for_a_silent_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr(linger, "STALL_S", 0.05)
    async with linked() as (one, other):
        assert isinstance(other._wire, connection.WebsocketConnection)
        other._wire.socket.pause_reading()
        sending = asyncio.create_task(flood(one))
        await until(lambda: one.unsent)

        await one.close()
        assert isinstance(one._wire, connection.WebsocketConnection)
        await one._wire._closed

        with pytest.raises(LinkLost):
            await sending
        other._wire.socket.resume_reading()


async def test_a_peer_that_reads_little_by_little_delays_the_end_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = count(1_000_000, -1)
    monkeypatch.setattr(connection, "CLOSE_WAIT_S", 0.05)
    monkeypatch.setattr(linger, "STALL_S", 0.02)
    monkeypatch.setattr(linger, "MAX_S", 0.1)
    async with linked() as (one, other):
        assert isinstance(other._wire, connection.WebsocketConnection)
        assert isinstance(one._wire, connection.WebsocketConnection)
        other._wire.socket.pause_reading()
        monkeypatch.setattr(type(one), "unsent", property(lambda _: next(left)))

        await one.close()
        try:
            async with asyncio.timeout(120.0):
                await asyncio.shield(one._wire._closed)
        finally:
            other._wire.socket.resume_reading()


async def test_two_concurrent_readers_of_a_websocket_link_raise() -> None:
    async with linked() as (one, _):
        reading = asyncio.create_task(one.receive())
        await asyncio.sleep(0)

        with pytest.raises(RuntimeError, match="two tasks"):
            await one.receive()
        reading.cancel()
