"""Tasks of an entry that are impossible, and drafts that stay in flight."""

from dataclasses import replace

import pytest

from meshllm.errors import UserError
from meshllm.protocol.session.actions import GenerationTask, SampleTokens
from meshllm.protocol.session.entry import Entry
from tests.builders.entry import PACE, TASK


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (replace(TASK, prompt=()), "the prompt has 0, not 1 to 63"),
        (replace(TASK, context=5), "length is 5 tokens; the prompt has 5, not 1 to 4"),
        (replace(TASK, max_tokens=0), "at most 0 tokens"),
    ],
)
def test_an_impossible_task_is_refused(task: GenerationTask, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Entry(task, PACE)


@pytest.mark.parametrize(
    ("tokens", "right", "flying"),
    [
        ((91, 92, 93), 3, (94,)),
        ((91, 92, 93, 94), 4, ()),
        ((91, 92, 77), 2, None),
        ((77,), 0, None),
        ((91,), 1, None),
        ((91, 92, 93, 94, 95), 4, None),
    ],
)
def test_confirmed_drafts_stay_in_flight(
    tokens: tuple[int, ...], right: int, flying: tuple[int, ...] | None
) -> None:
    pick = SampleTokens(0, 3, None, (91, 92), 42, (93, 94))

    assert (pick.accepted(tokens), pick.flying(tokens)) == (right, flying)
