from dataclasses import replace

from meshllm.outline.eligibility import MAX_OUTLINE_TOKENS, MAX_POINT_TOKENS
from tests.builders.outlined import events_of
from tests.builders.writer import ASKED, OUTLINE, QUESTION, Writer


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


async def test_each_part_of_an_answer_without_a_limit_has_one(writer: Writer) -> None:
    await events_of(writer, replace(ASKED, max_tokens=None))

    limits = [each.max_tokens for each in writer.requests]
    assert limits == [MAX_OUTLINE_TOKENS] + 3 * [MAX_POINT_TOKENS]
