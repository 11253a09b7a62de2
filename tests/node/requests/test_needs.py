"""What a request needs of what answers it."""

from dataclasses import replace
from typing import Any

import pytest

from meshllm.node.requests.needs import PROMPT, lacking, waits_for_ring
from meshllm.request import Request, Turn

ASKED = Request(turns=(Turn(role="user", content="hi"),))


@pytest.mark.parametrize(
    ("needs", "of_ring", "of_provider"),
    [
        ({}, "", ""),
        ({"min_bits": 8, "min_context": 2048}, "", ""),
        ({"min_bits": 16}, "meshllm.min_precision", "meshllm.min_precision"),
        ({"min_context": 2049}, "meshllm.min_context", "meshllm.min_context"),
        ({"needs_exact": True}, "", "meshllm.exact"),
        ({"ids": (1,) * 2048}, "", ""),
        ({"ids": (1,) * 2049}, "", PROMPT),
    ],
    ids=["nothing", "met", "precision", "context", "exact", "ids", "more ids"],
)
def test_a_need_that_is_not_met_is_named(
    needs: dict[str, Any], of_ring: str, of_provider: str
) -> None:
    asked = replace(ASKED, **needs)

    assert lacking("int8", 2048, asked, is_ring=True) == of_ring
    assert lacking("int8", 2048, asked) == of_provider


def test_an_unknown_context_takes_every_prompt_but_meets_no_need() -> None:
    assert lacking("", 0, replace(ASKED, ids=(1,) * 9)) == ""
    assert lacking("", 0, replace(ASKED, min_context=1)) == "meshllm.min_context"


@pytest.mark.parametrize(
    ("needs", "waits"),
    [
        ({}, False),
        ({"min_bits": 16, "logprobs": 2, "schema": "{}"}, False),
        ({"needs_exact": True}, True),
        ({"given": (1,)}, True),
        ({"scores_prompt": True}, True),
        ({"embeds": True}, True),
        ({"max_tokens": 0}, True),
        ({"max_reasoning": 0}, True),
        ({"turns": (), "raw": "hi", "logprobs": 0}, True),
    ],
)
def test_what_only_a_ring_can_answer_waits_for_one(needs: dict[str, Any], waits: bool) -> None:
    assert waits_for_ring(replace(ASKED, **needs)) is waits
