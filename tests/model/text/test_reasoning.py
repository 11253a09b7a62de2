"""Reasoning apart from the answer, and its limit."""

from collections.abc import Sequence
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from meshllm.model.text.reasoning import (
    EFFORT_TOKENS,
    PAIRS,
    ReasoningFormat,
    ReasoningLimit,
    ReasoningParser,
    max_reasoning_tokens_of,
)

THINK = ReasoningFormat(*PAIRS[0])
BEGIN, END, STOP, PLAIN = 0, 1, 2, 3


def parsed(text: Sequence[str], *, is_open: bool = False) -> tuple[str, str]:
    """Return reasoning and answer."""
    parser = ReasoningParser(THINK, is_open=is_open)
    pieces = [*map(parser.push, text), parser.finish()]
    return "".join(each.reasoning for each in pieces), "".join(each.text for each in pieces)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "answer"),
    [
        ("<think>\nWell.\n</think>\n\nYes.", False, "Well.", "Yes."),
        ("Well.\n</think>\n\nYes. <think>", True, "Well.", "Yes. <think>"),
        ("Yes, <think> is a tag.", False, "", "Yes, <think> is a tag."),
        ("\n <think>a</think>", False, "a", ""),
        ("<think></think>b", False, "", "b"),
        ("so far", True, "so far", ""),
        ("a </thin", True, "a </thin", ""),
        ("<thi", False, "", "<thi"),
        ("  plain", False, "", "  plain"),
    ],
)
def test_reasoning_is_split_off(text: str, is_open: bool, reasoning: str, answer: str) -> None:
    assert parsed([text], is_open=is_open) == (reasoning, answer)
    assert parsed(list(text), is_open=is_open) == (reasoning, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "a", " ", "\n", "</", "think>"])))
def test_the_split_does_not_depend_on_the_pieces(parts: list[str]) -> None:
    assert parsed(parts) == parsed(["".join(parts)]) == parsed(list("".join(parts)))


@pytest.mark.parametrize("pair", PAIRS)
def test_the_format_is_that_of_the_template(pair: tuple[str, str]) -> None:
    found = ReasoningFormat.of(f"{{{{ '{pair[0]}' }}}}{pair[1]}")

    assert found == ReasoningFormat(*pair)
    assert found.is_open(f"user: hi {pair[0]}\n")
    assert not found.is_open(f"{pair[0]}\n\n{pair[1]}\n\n")
    assert ReasoningFormat.of("{{ messages }}") is None


class Fixed:
    """Allows one token; remembers what it took."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def masked(self, logits: Tensor) -> Tensor:
        masked = torch.full_like(logits, -inf)
        masked[PLAIN] = logits[PLAIN]
        return masked

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens


def allowed(limit: ReasoningLimit) -> set[int]:
    return set(torch.nonzero(limit.masked(torch.zeros(5)) > -inf).flatten().tolist())


def test_the_limit_closes_the_reasoning() -> None:
    limit = ReasoningLimit(BEGIN, END, is_open=False, most=2)

    assert allowed(limit) == {0, 1, 2, 3, 4}
    limit.take([BEGIN, PLAIN, PLAIN])
    assert allowed(limit) == {END}
    limit.take([END])
    assert allowed(limit) == {0, 1, 2, 3, 4}


def test_reasoning_may_begin_behind_white_space() -> None:
    limit = ReasoningLimit(BEGIN, END, is_open=False, most=1, is_blank=lambda token: token == 4)

    limit.take([4, 4, BEGIN, PLAIN])
    assert allowed(limit) == {END}

    limit = ReasoningLimit(BEGIN, END, is_open=False, most=1, is_blank=lambda token: token == 4)
    limit.take([4, PLAIN, 4, BEGIN, PLAIN])
    assert allowed(limit) == {0, 1, 2, 3, 4}


def test_another_constraint_begins_behind_the_reasoning() -> None:
    grammar = Fixed()
    limit = ReasoningLimit(BEGIN, END, is_open=True, then=grammar, end_tokens=[STOP])

    assert allowed(limit) == {0, 1, 3, 4}
    limit.take([PLAIN, 4, END])
    assert (allowed(limit), grammar.taken) == ({PLAIN}, [])
    limit.take([PLAIN])
    assert grammar.taken == [PLAIN]


def test_an_answer_under_a_constraint_may_begin_with_reasoning() -> None:
    grammar = Fixed()
    limit = ReasoningLimit(BEGIN, END, is_open=False, then=grammar)

    assert allowed(limit) == {BEGIN, PLAIN}
    limit.take([PLAIN])
    assert (allowed(limit), grammar.taken) == ({PLAIN}, [PLAIN])


def test_an_effort_limits_the_reasoning_to_a_share_of_the_answer() -> None:
    assert max_reasoning_tokens_of("medium", 1000) == 500
    assert max_reasoning_tokens_of("medium", None) == EFFORT_TOKENS // 2
    assert max_reasoning_tokens_of(None, None) is None
