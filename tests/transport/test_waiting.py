"""Senders that wait for room, and the one reader of a link."""

import asyncio

import pytest

from meshllm.transport.waiting import ReadTurn, SendTurns


class Lane:
    """A channel with room for some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[str] = []
        self.turns = SendTurns[str](lambda size: size <= self.room, self.admit)

    def admit(self, message: str, size: int) -> None:
        self.room -= size
        self.sent.append(message)

    def begin(self, message: str) -> "asyncio.Task[bool]":
        return asyncio.create_task(self.turns.send(message, len(message)))


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_messages_are_sent_in_the_order_of_their_senders() -> None:
    lane = Lane(2)

    assert await lane.turns.send("a", 1)
    large, small = lane.begin("large"), lane.begin("b")
    await turn()
    assert not lane.turns.offer("c", 1)  # there is room, but others wait
    assert lane.sent == ["a"]

    lane.room = 5
    lane.turns.advance()
    assert await large
    assert lane.sent == ["a", "large"]
    lane.room = 1
    lane.turns.advance()
    assert await small
    assert not lane.turns.offer("c", 1)


async def test_a_sender_that_gives_up_lets_the_next_one_send() -> None:
    lane = Lane(1)
    large, small = lane.begin("large"), lane.begin("b")
    await turn()

    large.cancel()
    assert await small

    assert lane.sent == ["b"]
    assert large.cancelled()


async def test_a_sender_cancelled_before_its_turn_sends_nothing() -> None:
    lane = Lane(0)
    first, second = lane.begin("a"), lane.begin("b")
    await turn()

    first.cancel()
    lane.room = 1
    lane.turns.advance()  # before the cancelled task runs

    assert await second
    assert lane.sent == ["b"]


async def test_at_the_end_waiting_senders_have_sent_nothing() -> None:
    lane = Lane(0)
    waiting, given_up = lane.begin("a"), lane.begin("b")
    await turn()

    given_up.cancel()
    lane.turns.end()

    assert not await waiting
    assert lane.sent == []
    lane.turns.advance()


async def test_one_task_reads() -> None:
    turns = ReadTurn()
    turns.wake()
    reading = asyncio.create_task(turns.wait())
    await turn()
    with pytest.raises(RuntimeError, match="two tasks receive"):
        await turns.wait()

    turns.wake()
    turns.wake()
    await reading
    another = asyncio.create_task(turns.wait())
    await turn()
    another.cancel()
    last = asyncio.create_task(turns.wait())  # the cancelled one waits no more
    await turn()
    assert another.cancelled()
    turns.wake()
    await last
