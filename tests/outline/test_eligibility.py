from dataclasses import replace

import pytest

from meshllm.outline.eligibility import SEARCHED_CHARS, OutlineMode, may_be_long
from meshllm.request import Tools, Turn
from meshllm.strict_json import WrongField
from tests.builders.outlined import events_of
from tests.builders.writer import ASKED, QUESTION, Writer


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
