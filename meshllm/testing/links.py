"""Conformance checks of a link, one for each promise of the contract."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshllm.errors import LinkLost
from meshllm.transport.contract import (
    MAX_MESSAGE_BYTES,
    Channel,
    ImmediateSender,
    Link,
    SupportsBatchedSend,
)

CONTROL, DATA = Channel
CHUNK_BYTES = 64 * 1024
MANY = 300
PARTS = 10  # of a time to wait


@dataclass(frozen=True, slots=True)
class Terms:
    """Limits of the checks; a slow network needs more time and smaller messages."""

    longest_bytes: int = MAX_MESSAGE_BYTES
    """The longest message that is sent."""
    unread_bytes: int = MAX_MESSAGE_BYTES
    """Backpressure must block a sender before this much is unread."""
    settle_s: float = 0.1
    """A send that takes longer counts as blocked, however long this process was not running."""
    deadline_s: float = 30.0
    """Timeout of a check: a message or a wake-up was lost."""


async def _messages_keep_their_order(a: Link, b: Link, _: Terms) -> None:
    async def send(link: Link) -> None:
        for number in range(MANY):
            await link.send([numbered(number)], Channel(number % 2))

    async def receive(link: Link) -> None:
        got = [await read(link) for _ in range(MANY)]
        for channel in Channel:
            sent = [numbered(number) for number in range(MANY) if number % 2 == channel]
            expect([m for c, m in got if c is channel] == sent, f"{channel.name} differs")

    async with asyncio.TaskGroup() as group:
        for link in (a, b):
            group.create_task(send(link))
            group.create_task(receive(link))


async def _a_long_stream_arrives_once(a: Link, b: Link, _: Terms) -> None:
    """Send more than a link can buffer, both ways, so flow control counters wrap around."""

    async def send(link: Link) -> None:
        for number in range(MANY):
            await link.send([_chunk(number)], Channel(number % 2))

    async def receive(link: Link) -> None:
        got = sorted([(await read(link))[1] for _ in range(MANY)])
        expect(got == [_chunk(number) for number in range(MANY)], "the stream differs")

    async with asyncio.TaskGroup() as group:
        for link in (a, b):
            group.create_task(send(link))
            group.create_task(receive(link))


async def _a_message_is_the_bytes_of_its_parts(a: Link, b: Link, _: Terms) -> None:
    reused = bytearray(b"1234")
    await a.send([b"0", reused, memoryview(b"xx5678xx")[2:6], memoryview(reused).cast("i")])
    reused[:] = b"oops"
    await a.send([], CONTROL)
    await a.send([b"", b"9"])
    kept = [await b.receive() for _ in range(3)]
    got = [(channel, bytes(message)) for channel, message in kept]
    expected = [(CONTROL, b""), (DATA, b"0123456781234"), (DATA, b"9")]
    expect(sorted(got) == sorted(expected), f"{expected} became {got}")


async def _senders_do_not_mix(a: Link, b: Link, _: Terms) -> None:
    async def send(sender: int) -> None:
        for number in range(8):
            await a.send([bytes([sender]) * CHUNK_BYTES, bytes([number])] * 2)

    async with asyncio.TaskGroup() as group:
        for sender in range(4):
            group.create_task(send(sender))
        got = [(await read(b))[1] for _ in range(4 * 8)]
    for sender in range(4):
        sent = [(bytes([sender]) * CHUNK_BYTES + bytes([number])) * 2 for number in range(8)]
        expect([m for m in got if m[0] == sender] == sent, "messages of one task differ")


async def _the_longest_message_passes(a: Link, b: Link, terms: Terms) -> None:
    block = bytes(range(256)) * 256
    whole, rest = divmod(terms.longest_bytes, len(block))
    async with asyncio.TaskGroup() as group:
        group.create_task(a.send([block] * whole + [block[:rest]]))
        _, message = await read(b)
    expect(message == block * whole + block[:rest], f"{len(message)} B arrived, or other bytes")


async def _a_message_too_long_is_refused(a: Link, b: Link, _: Terms) -> None:
    block = bytes(MAX_MESSAGE_BYTES // 64)
    try:
        await a.send([block] * 64 + [b"+"])
    except ValueError:
        await a.send([b"next"])
        expect((await read(b))[1] == b"next", "the link is unusable")
    else:
        expect(False, f"{MAX_MESSAGE_BYTES + 1} B were sent")


async def _offers_may_be_sent_together(a: Link, b: Link, terms: Terms) -> None:
    if not isinstance(a, ImmediateSender) or not isinstance(a, SupportsBatchedSend):
        return
    messages = [bytes([number]) * number for number in range(40)]
    with a.together():
        taken = [message for message in messages if a.offer([message])]
    expect(bool(taken), "a new link took no offer")
    await a.send([b"last"])
    for message in (*taken, b"last"):
        expect(await read(b) == (DATA, message), "messages that were sent together have changed")


async def _an_offer_is_sent_at_once_or_not_at_all(a: Link, b: Link, terms: Terms) -> None:
    if not isinstance(a, ImmediateSender):
        return
    part = bytearray(b"first")
    offered = [(DATA, b"first!")] if a.offer([part, b"!"]) else []
    part[:] = b"oops!"
    several = [(Channel(number % 2), numbered(number)) for number in range(MANY)]
    offered += [(channel, message) for channel, message in several if a.offer([message], channel)]
    async with asyncio.TaskGroup() as group:
        for channel in Channel:
            group.create_task(a.send([b"last"], channel))
        got = [await read(b) for _ in range(len(offered) + len(Channel))]
    for channel in Channel:
        sent = [message for c, message in offered if c is channel] + [b"last"]
        expect([m for c, m in got if c is channel] == sent, f"{channel.name} differs")
    async with _full(a, terms) as (count, _):
        expect(not a.offer([_chunk(count + 1)]), "an offer overtook a waiting message")
    await a.close()
    expect(not a.offer([b"late"]), "a closed link took an offer")


async def _a_slow_reader_blocks_the_sender(a: Link, b: Link, terms: Terms) -> None:
    async with _full(a, terms) as (count, waiting):
        for number in range(count + 1):
            expect((await read(b))[1] == _chunk(number), f"message {number} differs")
        await waiting


async def _control_overtakes_waiting_data(a: Link, b: Link, terms: Terms) -> None:
    async with _full(a, terms) as (count, _waiting):
        await a.send([b"now"], CONTROL)
        await _settled(terms)
        before = 0
        while (await read(b))[0] is DATA:
            before += 1
        expect(before < count, f"CONTROL came after all {count} waiting DATA messages")


async def _a_cancelled_send_is_whole_or_absent(a: Link, b: Link, terms: Terms) -> None:
    async with _full(a, terms) as (count, waiting), asyncio.TaskGroup() as group:
        group.create_task(a.send([_chunk(count + 1)]))
        await asyncio.sleep(0)
        waiting.cancel()
        await _settled(terms, waiting)  # it may have to finish the message
        got: list[bytes] = []
        while _chunk(count + 1) not in got[-1:]:
            got.append((await read(b))[1])
        await a.send([b"last"])
        got.append((await read(b))[1])
        whole = [*(_chunk(number) for number in range(count + 2)), b"last"]
        absent = [message for message in whole if message != _chunk(count)]
        expect(got in (absent, whole), f"{count} messages and a cancelled one became {len(got)}")


async def _a_cancelled_receive_loses_nothing(a: Link, b: Link, _: Terms) -> None:
    for turns in range(40):
        reader = asyncio.create_task(read(b))
        await asyncio.sleep(0)
        await a.send([numbered(turns)])
        for _turn in range(turns):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        got = await read(b) if reader.cancelled() else reader.result()
        expect(got[1] == numbered(turns), f"message {turns} is lost")


async def _the_other_side_drains_before_it_is_lost(a: Link, b: Link, terms: Terms) -> None:
    for number in range(20):
        await a.send([numbered(number)], Channel(number % 2))
    closing = asyncio.create_task(a.close())
    await _settled(terms, closing)  # it may wait for the peer
    got = [(await read(b))[1] for _ in range(20)]
    await closing
    await a.close()
    expect(sorted(got) == sorted(map(numbered, range(20))), "what was sent did not arrive")
    for _turn in range(2):
        await expect_lost(b.receive())
        await expect_lost(b.send([b"?"]), a.receive(), a.send([b"?"]))


async def _closing_wakes_the_readers(a: Link, b: Link, _: Terms) -> None:
    readers = [asyncio.create_task(link.receive()) for link in (a, b)]
    await asyncio.sleep(0)
    await a.close()
    await expect_lost(*readers)


async def _closing_wakes_a_blocked_sender(a: Link, _: Link, terms: Terms) -> None:
    async with _full(a, terms) as (_count, waiting):
        await a.close()
        await expect_lost(waiting)


async def _the_other_side_closing_wakes_a_blocked_sender(a: Link, b: Link, terms: Terms) -> None:
    async with _full(a, terms) as (_count, waiting):
        await b.close()
        await expect_lost(waiting)


async def _statistics_add_up(a: Link, b: Link, _: Terms) -> None:
    sizes = range(0, 5000, 500)
    for size in sizes:
        await a.send([bytes(size)], Channel(size // 500 % 2))
    for _size in sizes:
        await b.receive()
    carried = (len(sizes), sum(sizes))
    sent, received = a.statistics, b.statistics
    expect((sent.messages_sent, sent.bytes_sent) == carried, f"{sent} for {carried}")
    expect((received.messages_received, received.bytes_received) == carried, f"{received}")
    expect((sent.messages_received, received.messages_sent) == (0, 0), "nothing was sent back")


PROMISES: tuple[Callable[[Link, Link, Terms], Awaitable[None]], ...] = (
    _messages_keep_their_order,
    _a_long_stream_arrives_once,
    _a_message_is_the_bytes_of_its_parts,
    _senders_do_not_mix,
    _the_longest_message_passes,
    _a_message_too_long_is_refused,
    _an_offer_is_sent_at_once_or_not_at_all,
    _offers_may_be_sent_together,
    _a_slow_reader_blocks_the_sender,
    _control_overtakes_waiting_data,
    _a_cancelled_send_is_whole_or_absent,
    _a_cancelled_receive_loses_nothing,
    _the_other_side_drains_before_it_is_lost,
    _closing_wakes_the_readers,
    _closing_wakes_a_blocked_sender,
    _the_other_side_closing_wakes_a_blocked_sender,
    _statistics_add_up,
)


@asynccontextmanager
async def _full(link: Link, terms: Terms) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Send unread DATA until a send blocks; yield how many did not, and the blocked send."""
    for count in range(terms.unread_bytes // CHUNK_BYTES):
        waiting = asyncio.create_task(link.send([_chunk(count)]))
        await _settled(terms, waiting)
        if not waiting.done():
            break
        await waiting
    else:
        raise AssertionError(f"{terms.unread_bytes} B were sent without backpressure")
    try:
        yield count, waiting
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _settled(terms: Terms, task: asyncio.Task[None] | None = None) -> None:
    """Wait for `settle_s` or a task, in parts: while this process is stopped, only one ends."""
    for _ in range(PARTS):
        if task is None:
            await asyncio.sleep(terms.settle_s / PARTS)
        elif (await asyncio.wait([task], timeout=terms.settle_s / PARTS))[0]:
            return


async def read(link: Link) -> tuple[Channel, bytes]:
    """Receive a message as bytes."""
    channel, message = await link.receive()
    return channel, bytes(message)


async def expect_lost(*attempts: Awaitable[object]) -> None:
    """Expect `LinkLost` from each attempt."""
    for outcome in await asyncio.gather(*attempts, return_exceptions=True):
        expect(isinstance(outcome, LinkLost), f"{outcome!r} instead of LinkLost")


def expect(kept: bool, otherwise: str) -> None:
    """Raise `AssertionError` unless the promise is kept."""
    if not kept:
        raise AssertionError(otherwise)


def _chunk(number: int) -> bytes:
    return number.to_bytes(4, "big") * (CHUNK_BYTES // 4)


def numbered(number: int) -> bytes:
    """Return a message that differs from the others in content and length."""
    return number.to_bytes(4, "big") + bytes(number * 37 % 5000)
