"""Verdicts on model types, as they were measured."""

from dataclasses import replace

import pytest

from meshllm.errors import ModelError
from meshllm.model.parity.verdict import Verdict, measured_verdicts

EQUAL = Verdict("llama", equal=True, reason="", whole=True)


def test_at_least_115_types_are_equal() -> None:
    equal = [name for name, known in measured_verdicts().items() if known.equal and ":" not in name]

    assert len(equal) >= 115


def test_every_refused_type_says_why() -> None:
    assert all(known.reason for known in measured_verdicts().values() if not known.equal)


@pytest.mark.parametrize("members", [1, 3])
def test_an_equal_type_runs_in_any_ring(members: int) -> None:
    EQUAL.require(members)


def test_a_type_that_only_runs_whole_says_so() -> None:
    verdict = replace(EQUAL, equal=False, reason="logits differ")

    verdict.require(1)
    with pytest.raises(ModelError, match=r"`llama` cannot be split: logits differ") as caught:
        verdict.require(2)
    assert caught.value.hint == "run it whole with `--nodes 1`"


def test_a_type_that_differs_whole_is_refused_everywhere() -> None:
    verdict = replace(EQUAL, equal=False, whole=False, reason="no list of layers")

    with pytest.raises(ModelError, match="no list of layers"):
        verdict.require(1)
