import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from meshllm.errors import LinkLost
from meshllm.names import LossCause
from meshllm.node.provider.engine_json import call_of
from meshllm.outline.backend import OutlineBackend
from meshllm.outline.eligibility import OutlineMode
from meshllm.request import (
    Answer,
    Event,
    FinishReason,
    Interruption,
    Piece,
    Prefilled,
    Request,
    Waiting,
)
from meshllm.strict_json import WrongField
from tests.builders.outlined import events_of
from tests.builders.writer import ASKED, Writer

WHOLE = "1. Parks\n\ntext of 1\n\n2. Work\n\ntext of 2\n\n3. Friends\n\ntext of 3"


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece))


def answer_of(events: list[Event]) -> Answer:
    assert isinstance(events[-1], Answer)
    assert not any(isinstance(event, Answer) for event in events[:-1])
    return events[-1]


async def test_the_points_are_joined_in_order(writer: Writer) -> None:
    events = await events_of(writer)

    assert text_of(events) == answer_of(events).text == WHOLE
    assert answer_of(events).finish_reason is FinishReason.STOP


async def test_all_points_are_expanded_at_once(writer: Writer) -> None:
    writer.held = {3: asyncio.Event(), 2: asyncio.Event()}
    backend = OutlineBackend(writer, OutlineMode.ON)

    async with aclosing(backend.generate(ASKED)) as events:
        async for event in events:
            if isinstance(event, Piece) and "2. Work" in event.text:
                break
        assert writer.open == 2  # the first point is complete, the others wait

    assert (writer.most_open, writer.open, writer.cancelled) == (3, 0, 2)


async def test_no_more_points_than_allowed_are_expanded_at_once(writer: Writer) -> None:
    events = await events_of(writer, together=2)

    assert (writer.most_open, text_of(events)) == (2, WHOLE)


async def test_the_first_point_is_shown_as_it_comes_and_later_ones_wait(writer: Writer) -> None:
    writer.held = {1: asyncio.Event()}
    backend = OutlineBackend(writer, OutlineMode.ON)
    shown = ""

    async with aclosing(backend.generate(ASKED)) as events:
        async for event in events:
            if isinstance(event, Piece):
                shown += event.text
                if event.tokens == (302,):  # the last one, of the last point
                    assert shown == "1. Parks\n\ntext of"
                    writer.held[1].set()

    assert shown == WHOLE


@pytest.mark.parametrize("late", [1, 2, 3])
async def test_the_answer_does_not_depend_on_which_point_is_late(writer: Writer, late: int) -> None:
    writer.held = {late: asyncio.Event()}
    asyncio.get_running_loop().call_later(0, writer.held[late].set)

    answer = answer_of(await events_of(writer))

    assert answer.text == WHOLE
    assert answer.tokens == (0, 1, 2, 3, 100, 101, 102, 200, 201, 202, 300, 301, 302)


async def test_all_sessions_are_counted(writer: Writer) -> None:
    events = await events_of(writer)

    answer = answer_of(events)
    told = [token for event in events if isinstance(event, Piece) for token in event.tokens]
    assert (answer.prompt_tokens, answer.cached_tokens) == (40, 24)
    assert sorted(told) == sorted(answer.tokens)
    assert [event for event in events if isinstance(event, Prefilled)][-1] == Prefilled(40, 40)
    assert answer.tokens_per_step == 2.0


async def test_a_point_that_ends_at_its_length_is_told(writer: Writer) -> None:
    writer.lengths = {2}

    answer = answer_of(await events_of(writer))

    assert (answer.finish_reason, answer.text) == (FinishReason.LENGTH, WHOLE)


async def test_white_space_around_a_point_is_not_text(writer: Writer) -> None:
    writer.bodies = {1: "\n\n a \n\n b \n\n", 2: "   "}

    events = await events_of(writer)

    assert text_of(events) == "1. Parks\n\na \n\n b\n\n2. Work\n\n3. Friends\n\ntext of 3"


async def test_a_point_that_fails_ends_the_answer_with_its_error(writer: Writer) -> None:
    writer.errors = {2: LinkLost("The ring is gone")}
    writer.held = {1: asyncio.Event(), 3: asyncio.Event()}

    with pytest.raises(LinkLost, match="The ring is gone"):
        await events_of(writer)

    assert (writer.open, writer.cancelled) == (0, 2)


async def test_an_outline_that_fails_ends_the_answer(writer: Writer) -> None:
    writer.errors = {0: LinkLost("The ring is gone")}

    with pytest.raises(LinkLost):
        await events_of(writer)

    assert len(writer.requests) == 1


async def test_a_loss_is_told_while_the_outline_is_written_too(writer: Writer) -> None:
    writer.losses = {0: Interruption(LossCause.NODE_LOST, "attic is gone", 0.5)}

    events = await events_of(writer)

    assert [each for each in events if isinstance(each, Interruption)] == [writer.losses[0]]
    assert text_of(events) == WHOLE


async def test_cancelling_ends_all_sessions(writer: Writer) -> None:
    writer.held = {1: asyncio.Event(), 2: asyncio.Event(), 3: asyncio.Event()}
    asking = asyncio.ensure_future(events_of(writer))
    await writer.all_wait.wait()

    asking.cancel()
    await asyncio.wait({asking})

    assert (asking.cancelled(), writer.open, writer.cancelled) == (True, 0, 3)


@pytest.mark.parametrize("outline", ["I cannot", "1. Only one"])
@pytest.mark.parametrize("mode", OutlineMode)
async def test_without_an_outline_the_answer_is_the_usual_one(
    outline: str, mode: OutlineMode
) -> None:
    writer = Writer(outline)

    events = await events_of(writer, mode=mode)

    answer = answer_of(events)
    assert writer.requests[1] == ASKED
    assert (text_of(events), answer.text) == ("the usual answer",) * 2
    assert answer.prompt_tokens == 20
    assert [event for event in events if isinstance(event, Prefilled)][-1] == Prefilled(20, 20)
    assert len(answer.tokens) == len(outline.split(" ")) + 3


class Engine(Writer):
    """Refuses what the engine of a provider cannot do."""

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        call_of(request)
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event


async def test_auto_answers_as_usual_what_a_provider_answers() -> None:
    events = await events_of(Engine(), mode=OutlineMode.AUTO)

    assert text_of(events) == answer_of(events).text == "the usual answer"


class Unformed(Writer):
    """Awaits a ring for an outline; a provider answers other requests."""

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        if request.max_reasoning is not None:
            yield Waiting("there is no ring yet")
            await asyncio.Event().wait()
        async for event in Writer.generate(self, request):
            yield event


async def test_auto_answers_as_usual_while_no_ring_serves() -> None:
    backend = Unformed()

    events = await events_of(backend, mode=OutlineMode.AUTO)

    assert events[0] == Waiting("there is no ring yet")
    assert answer_of(events).text == text_of(events)
    assert backend.requests == [ASKED]


async def test_an_outline_of_a_provider_is_refused() -> None:
    with pytest.raises(WrongField, match="cannot be used with a provider") as refusal:
        await events_of(Engine())

    assert refusal.value.name == "meshllm.outline"


async def test_auto_stops_an_outline_that_is_an_answer(writer: Writer) -> None:
    writer.outline = "A city needs\n 1. Parks 2. Work"

    events = await events_of(writer, mode=OutlineMode.AUTO)

    assert (text_of(events), writer.cancelled) == ("the usual answer", 1)


async def test_auto_does_not_use_the_points_of_an_answer_that_comes_in_one_piece() -> None:
    whole = "Parks:\n1.Parks\n2.Work\n"

    assert text_of(await events_of(Writer(whole), mode=OutlineMode.AUTO)) == "the usual answer"
    assert text_of(await events_of(Writer(whole))).startswith("1. Parks\n\n")


async def test_auto_does_not_split_points_that_build_on_each_other(writer: Writer) -> None:
    writer.outline = "1. Parks\n2. Then work\n"

    assert text_of(await events_of(writer, mode=OutlineMode.AUTO)) == "the usual answer"
    assert text_of(await events_of(Writer(writer.outline))).startswith("1. Parks\n\n")


async def test_auto_lets_the_model_decline(writer: Writer) -> None:
    await events_of(writer, mode=OutlineMode.AUTO)
    await events_of(forced := Writer())

    asked = [each.requests[0].turns[-1]["content"] for each in (writer, forced)]
    assert ["NONE" in each for each in asked] == [True, False]
