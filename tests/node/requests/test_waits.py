"""What a request waits for, before its answer."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from meshllm.errors import Busy
from meshllm.node.requests.waits import WAITING_S, with_wait_events
from meshllm.request import Event, Piece, Waiting
from meshllm.testing.clock import run_virtual

AT_LAST = Piece("at last")


class Answer:
    """An answer whose events come after so many seconds each."""

    def __init__(self, *after_s: float, error: Exception | None = None) -> None:
        self.after_s, self.error = after_s, error
        self.is_closed = False

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            for seconds in self.after_s:
                await asyncio.sleep(seconds)
                if self.error:
                    raise self.error
                yield AT_LAST
        finally:
            await asyncio.sleep(1)
            self.is_closed = True


def told(answer: Answer, reasons: Sequence[str]) -> list[Event]:
    left = list(reasons)

    async def scenario() -> list[Event]:
        return [each async for each in with_wait_events(answer.events(), lambda: left.pop(0))]

    found = run_virtual(scenario())
    assert (left, answer.is_closed) == ([], True)
    return found


def test_what_is_awaited_is_told_when_it_changes_until_the_first_event() -> None:
    answer = Answer(4.5 * WAITING_S, 9 * WAITING_S)

    assert told(answer, ["a loads", "a loads", "b loads", "b loads"]) == [
        Waiting("a loads"), Waiting("b loads"), AT_LAST, AT_LAST,
    ]  # fmt: skip


def test_who_waits_for_no_ring_is_told_nothing() -> None:
    assert told(Answer(2.5 * WAITING_S), ["", ""]) == [AT_LAST]


def test_an_answer_without_events_ends() -> None:
    assert told(Answer(), []) == []


def test_an_error_ends_the_wait() -> None:
    answer = Answer(1.25 * WAITING_S, error=Busy("full"))

    with pytest.raises(Busy, match="full"):
        told(answer, ["it loads"])

    assert answer.is_closed


def test_who_leaves_ends_the_answer() -> None:
    answer = Answer(9 * WAITING_S)

    async def scenario() -> None:
        async with aclosing(with_wait_events(answer.events(), lambda: "it loads")) as events:
            assert await anext(events) == Waiting("it loads")
        assert answer.is_closed

    run_virtual(scenario())


def test_the_end_of_a_wait_is_told_once() -> None:
    answer = Answer(4.5 * WAITING_S)

    assert told(answer, ["it loads", "", "", ""]) == [Waiting("it loads"), Waiting(""), AT_LAST]
