import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from meshllm.errors import LinkLost
from meshllm.names import LossCause
from meshllm.node.provider.engine_json import call_of
from meshllm.outline.backend import OutlineBackend
from meshllm.outline.eligibility import SEARCHED_CHARS, OutlineMode, may_be_long
from meshllm.request import (
    Answer,
    Event,
    FinishReason,
    Interruption,
    Piece,
    Prefilled,
    Request,
    Tools,
    Turn,
)
from meshllm.strict_json import WrongField
from tests.builders.writer import ASKED, OUTLINE, QUESTION, Writer

WHOLE = "1. Parks\n\ntext of 1\n\n2. Work\n\ntext of 2\n\n3. Friends\n\ntext of 3"


async def events_of(
    writer: Writer, request: Request = ASKED, mode: OutlineMode = OutlineMode.ON, together: int = 8
) -> list[Event]:
    backend = OutlineBackend(writer, mode, together)
    return [event async for event in backend.generate(request)]


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


async def test_the_points_continue_the_text_of_the_outline(writer: Writer) -> None:
    system = replace(ASKED, turns=({"role": "system", "content": "Be kind."}, QUESTION))

    await events_of(writer, system)

    outline, *points = writer.requests
    assert outline.turns[0] == system.turns[0]
    assert outline.turns[1]["content"].startswith(QUESTION["content"] + "\n\n")
    told = {"role": "assistant", "content": OUTLINE}
    assert all(each.turns[:-1] == (*outline.turns, told) for each in points)
    assert [each.shares_prefix for each in writer.requests] == [False, True, True, True]
    assert [each.max_reasoning for each in writer.requests] == [0] * 4


async def test_each_point_is_named_in_its_request(writer: Writer) -> None:
    await events_of(writer)

    asked = [each.turns[-1]["content"] for each in writer.requests[1:]]
    assert ['point 1, "Parks"' in asked[0], 'point 2, "Work"' in asked[1]] == [True, True]


async def test_each_point_has_a_seed_of_its_own_that_follows_from_that_of_the_request() -> None:
    seeds = []
    for _ in range(2):
        writer = Writer()
        await events_of(writer, replace(ASKED, sampling=replace(ASKED.sampling, seed=7)))
        seeds.append([each.sampling.seed for each in writer.requests])
    other = Writer()
    await events_of(other, replace(ASKED, sampling=replace(ASKED.sampling, seed=8)))

    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *(each.sampling.seed for each in other.requests)}) == 8
    assert seeds[0][0] == 7


async def test_the_points_share_the_tokens_that_the_outline_left(writer: Writer) -> None:
    await events_of(writer)

    limits = [each.max_tokens for each in writer.requests]
    assert limits == [100, 132, 132, 132]  # 400 less the four words of the outline


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


@pytest.mark.parametrize(
    "question",
    [
        "Write a Python function that sorts",
        "Explain this:\n```\nx += y\n```",
        "Write quicksort in C++",
        "Sort a list in Java",
        "Make me a page of HTML",
        "What is 12 * 7?",
        "What is 12 times 7?",
        "What are 15% of 80?",
        "Tell me the square root of 2",
        "Solve x for me",
        "Answer in one word",
        "Explain rings in two sentences",
        "Describe bees in at most 20 words",
        "Who wrote Hamlet?",
        "When did the war end?",
        "What is the capital of France?",
        "How many legs has a bee?",
        "Summarise this chapter",
    ],
)
async def test_auto_asks_for_no_outline_of_code_mathematics_and_short_answers(
    writer: Writer, question: str
) -> None:
    request = replace(ASKED, turns=({"role": "user", "content": question},))

    await events_of(writer, request, OutlineMode.AUTO)

    assert writer.requests == [request]


@pytest.mark.parametrize(
    "before",
    [
        (Turn(role="system", content="Answer briefly."),),
        (Turn(role="system", content="Reply with one sentence."),),
        (QUESTION, Turn(role="assistant", content="So:\n```\nprint(1)\n```")),
    ],
)
async def test_auto_asks_for_no_outline_where_the_conversation_has_short_answers_or_code(
    writer: Writer, before: tuple[Turn, ...]
) -> None:
    request = replace(ASKED, turns=(*before, QUESTION))

    await events_of(writer, request, OutlineMode.AUTO)

    assert writer.requests == [request]


@pytest.mark.parametrize(
    "question",
    [
        "How do bees live?",
        "Compare cats and dogs",
        "Can you describe how a bill becomes a law?",
        "Explain the causes of the war of 1914",
        "What is a ring, and how does it answer together?",
        "Give me a guide to growing tomatoes",
        "Where should I travel in Spain, and why?",
    ],
)
async def test_auto_asks_for_an_outline_of_long_answers(writer: Writer, question: str) -> None:
    turns = (
        Turn(role="system", content="You are a helpful assistant."),
        QUESTION,
        Turn(role="assistant", content="Parks, work and friends do."),
        Turn(role="user", content=question),
    )

    await events_of(writer, replace(ASKED, turns=turns), OutlineMode.AUTO)

    assert len(writer.requests) == 4
    assert "outline" in writer.requests[0].turns[-1]["content"]


@pytest.mark.parametrize("place", ["before", "behind"])
def test_the_ends_of_a_long_question_say_what_is_asked(place: str) -> None:
    asked, text = "Answer in one word: ", "bees live in hives. " * SEARCHED_CHARS
    content = asked + text if place == "before" else text + asked
    request = replace(ASKED, turns=(Turn(role="user", content=content),))

    assert not may_be_long(request)
    assert may_be_long(replace(ASKED, turns=(Turn(role="user", content=text + asked + text),)))


UNFIT = {
    "raw": {"raw": "Once", "turns": ()},
    "ids": {"ids": (1, 2), "turns": ()},
    "given": {"given": (1,)},
    "stop": {"stop": ("END",)},
    "schema": {"schema": "{}"},
    "tools": {"tools": Tools('[{"name": "f"}]')},
    "reasoning": {"thinks": True},
    "max_reasoning_tokens": {"max_reasoning": 9},
    "logprobs": {"logprobs": 2},
    "max_tokens": {"max_tokens": 127},
    "message of the user": {"turns": (QUESTION, {"role": "assistant", "content": "Well"})},
}


@pytest.mark.parametrize("name", UNFIT)
async def test_a_request_that_cannot_be_outlined_is_refused_or_answered_as_usual(
    writer: Writer, name: str
) -> None:
    request = replace(ASKED, **UNFIT[name])  # type: ignore[arg-type]  # fields by name

    with pytest.raises(WrongField, match=name):
        await events_of(writer, request)
    await events_of(writer, request, OutlineMode.AUTO)

    assert writer.requests == [request]
