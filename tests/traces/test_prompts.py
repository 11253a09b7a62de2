from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.traces.buckets import BUCKET, Buckets
from meshllm.traces.prompts import FIRST, MadeUpPrompts
from meshllm.traces.trace import TraceLine

KEY = b"k" * 32
LINE = TraceLine(0.0, "m", 0, 0, 0, 8, 1.0, 2.0, "stop")


def line(prompt: Sequence[int], answer: Sequence[int] = (), cached: int = 0) -> TraceLine:
    found = Buckets(KEY)
    found.add([*prompt, *answer])
    return replace(
        LINE,
        prompt_tokens=len(prompt),
        new_tokens=len(answer),
        cached_tokens=cached,
        buckets=" ".join(found.ids),
    )


def common(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@pytest.mark.property
@given(st.lists(st.lists(st.integers(0, 1), max_size=4 * BUCKET), max_size=6))
def test_prompts_have_the_lengths_and_share_the_buckets_of_the_trace(
    real: list[list[int]],
) -> None:
    prompts = MadeUpPrompts()

    made = [prompts.prompt(line(each), number) for number, each in enumerate(real)]

    assert [*map(len, made)] == [*map(len, real)]
    for number, (one, real_one) in enumerate(zip(made, real, strict=True)):
        for other, real_other in zip(made[:number], real, strict=False):
            assert common(one, other) // BUCKET == common(real_one, real_other) // BUCKET
    assert all(FIRST <= token < FIRST + 256 for each in made for token in each)


@pytest.mark.parametrize("shared", [33, 40, 47])
def test_a_prompt_shares_tokens_inside_a_bucket_as_its_hit_says(shared: int) -> None:
    first = list(range(64))
    second = [*first[:shared], *range(200, 260)]
    prompts = MadeUpPrompts()

    one = prompts.prompt(line(first), 0)
    other = prompts.prompt(line(second, cached=shared), 1)

    assert common(one, other) == shared


def test_a_hit_in_the_tail_is_shared() -> None:
    prompts = MadeUpPrompts()

    one = prompts.prompt(line(range(30)), 0)
    other = prompts.prompt(line([*range(25), 9, 9], cached=25), 1)

    assert common(one, other) == 25


def test_the_next_prompt_of_a_chat_has_the_tokens_of_the_answer() -> None:
    asked, answered = list(range(20)), list(range(50, 75))
    said = tuple(range(100, 125))
    first, prompts = line(asked, answered), MadeUpPrompts()
    next_line = line([*asked, *answered, *range(30)], cached=45)

    prompt = prompts.prompt(first, 0)
    prompts.answered(first, prompt, said)
    made = prompts.prompt(next_line, 1)

    assert made[:45] == (*prompt, *said)
    assert len(made) == 75


def test_prompts_of_two_salts_share_nothing() -> None:
    made = [MadeUpPrompts(salt).prompt(line(range(40)), 0) for salt in (b"a", b"b", b"a")]

    assert made[0] == made[2]
    assert common(made[0], made[1]) == 0


def test_an_answer_that_comes_too_late_changes_no_prompt() -> None:
    asked, answered = list(range(20)), list(range(50, 75))
    first, prompts = line(asked, answered), MadeUpPrompts()
    next_line = line([*asked, *answered, *range(30)])

    prompt = prompts.prompt(first, 0)
    made = prompts.prompt(next_line, 1)
    prompts.answered(first, prompt, tuple(range(100, 125)))

    assert prompts.prompt(next_line, 1) == made


def test_prompts_of_unknown_tokens_share_nothing() -> None:
    prompts, unknown = MadeUpPrompts(), replace(LINE, prompt_tokens=40)

    one, other = (prompts.prompt(unknown, number) for number in (0, 1))

    assert (len(one), common(one, other)) == (40, 0)
    assert MadeUpPrompts().prompt(unknown, 0) == one
