"""Queue limits, waiting senders and closing of one direction of a loopback link."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshllm.errors import LinkLost
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Channel
from meshllm_loopback.pipe import QUEUE_BYTES, QUEUE_MESSAGES, Pipe
from meshllm_loopback.shaper import Shaper, TrafficShape

CONTROL, DATA = Channel


async def settle() -> None:
    """Let every task run until it blocks."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_bytes_are_bounded() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, bytes(QUEUE_BYTES))

    waiting = asyncio.create_task(pipe.put(DATA, b"x"))
    await settle()
    assert not waiting.done()
    await pipe.get()
    await waiting

    assert await pipe.get() == (DATA, b"x")


async def test_messages_are_bounded() -> None:
    pipe = Pipe("loopback:b", None)
    for _ in range(QUEUE_MESSAGES):
        await pipe.put(DATA, b"")

    waiting = asyncio.create_task(pipe.put(DATA, b""))
    await settle()
    assert not waiting.done()
    await pipe.get()

    await waiting


async def test_a_message_larger_than_the_queue_passes_alone() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, b"small")

    waiting = asyncio.create_task(pipe.put(DATA, bytes(QUEUE_BYTES + 1)))
    await settle()
    assert not waiting.done()
    await pipe.get()
    await waiting

    assert len((await pipe.get())[1]) == QUEUE_BYTES + 1


async def test_channels_have_separate_queues() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, bytes(QUEUE_BYTES))

    await pipe.put(CONTROL, b"now")

    assert await pipe.get() == (CONTROL, b"now")


async def test_a_small_message_does_not_overtake_a_waiting_large_one() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, b"1")
    async with asyncio.TaskGroup() as group:
        group.create_task(pipe.put(DATA, bytes(QUEUE_BYTES)))
        group.create_task(pipe.put(DATA, b"3"))
        await settle()

        sizes = [len((await pipe.get())[1]) for _ in range(3)]

    assert sizes == [1, QUEUE_BYTES, 1]


async def test_a_cancelled_large_message_unblocks_the_next() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, b"1")
    large = asyncio.create_task(pipe.put(DATA, bytes(QUEUE_BYTES)))
    small = asyncio.create_task(pipe.put(DATA, b"3"))
    await settle()

    large.cancel()
    await settle()

    assert large.cancelled()
    assert small.done()
    assert [await pipe.get(), await pipe.get()] == [(DATA, b"1"), (DATA, b"3")]


async def test_room_freed_during_cancellation_goes_to_the_next_waiter() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, bytes(QUEUE_BYTES))
    first = asyncio.create_task(pipe.put(DATA, b"2"))
    second = asyncio.create_task(pipe.put(DATA, b"3"))
    await settle()

    first.cancel()
    await pipe.get()
    await settle()

    assert first.cancelled()
    assert second.done()
    assert await pipe.get() == (DATA, b"3")


async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, bytes(QUEUE_BYTES))
    first = asyncio.create_task(pipe.put(DATA, b"2"))
    second = asyncio.create_task(pipe.put(DATA, b"3"))
    await settle()

    second.cancel()
    await settle()

    assert list(pipe._senders[DATA]._waiters.values()) == [(b"2", 1)]
    pipe.seal()
    with pytest.raises(LinkLost):
        await first


async def test_two_concurrent_readers_raise() -> None:
    pipe = Pipe("loopback:b", None)
    reader = asyncio.create_task(pipe.get())
    await settle()

    with pytest.raises(RuntimeError, match="two tasks"):
        await pipe.get()

    await pipe.put(DATA, b"still there")
    assert await reader == (DATA, b"still there")


async def test_a_cancelled_reader_does_not_block_the_next() -> None:
    pipe = Pipe("loopback:b", None)
    reader = asyncio.create_task(pipe.get())
    await settle()

    reader.cancel()  # and its end is not awaited
    next_reader = asyncio.create_task(pipe.get())
    await settle()
    await pipe.put(DATA, b"still there")

    assert await next_reader == (DATA, b"still there")
    assert reader.cancelled()


async def test_a_sender_cancelled_while_the_link_closes_is_cancelled() -> None:
    pipe = Pipe("loopback:b", None)
    await pipe.put(DATA, bytes(QUEUE_BYTES))
    waiting = asyncio.create_task(pipe.put(DATA, b"2"))
    await settle()

    waiting.cancel()
    pipe.seal()
    await settle()

    assert waiting.cancelled()


class Traffic:
    """Senders and one reader on a pipe, any of which may be cancelled at any time."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.sent: list[tuple[Channel, bytes, asyncio.Task[None]]] = []
        self.got: list[tuple[Channel, bytes]] = []
        self.reader = asyncio.create_task(self.read())
        self.reader.cancel()

    async def read(self) -> None:
        while True:
            self.got.append(await self.pipe.get())

    async def move(self, move: str, channel: Channel, size: int) -> None:
        match move:
            case "send":
                message = bytes(size)
                task = asyncio.create_task(self.pipe.put(channel, message))
                self.sent.append((channel, message, task))
            case "cancel a send" if self.sent:
                self.sent[-size % len(self.sent)][2].cancel()
            case "read" if self.reader.done():
                self.reader = asyncio.create_task(self.read())
            case "cancel the read":
                self.reader.cancel()
            case _:
                await asyncio.sleep(0)

    async def finish(self) -> None:
        self.reader.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(1000):
                await self.read()


@pytest.mark.property
@settings(deadline=None)
@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "cancel a send", "read", "cancel the read", "pass"]),
            st.sampled_from(Channel),
            st.sampled_from([2, QUEUE_BYTES // 2, QUEUE_BYTES, QUEUE_BYTES + 1]),
        )
    ),
    shape=st.none() | st.just(TrafficShape(delay_s=0.1, jitter_s=0.5, bytes_per_s=1e8, loss=0.3)),
)
def test_cancellation_never_loses_duplicates_or_reorders_messages(
    moves: list[tuple[str, Channel, int]], shape: TrafficShape | None
) -> None:
    async def main() -> Traffic:
        traffic = Traffic(Pipe("loopback:b", Shaper(shape, "a>b") if shape else None))
        for move in moves:
            await traffic.move(*move)
        await traffic.finish()
        return traffic

    traffic = run_virtual(main())

    got = {id(message) for _, message in traffic.got}
    assert {id(message) for _, message, task in traffic.sent if not task.cancelled()} <= got
    for lane in Channel:
        order = [id(message) for channel, message, _ in traffic.sent if channel is lane]
        places = [order.index(id(message)) for channel, message in traffic.got if channel is lane]
        assert places == sorted(set(places))
