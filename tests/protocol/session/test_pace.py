"""Pacing: the limits of chunks, and of how many are in flight at once."""

import pytest

from meshllm.errors import UserError
from meshllm.protocol.session.codec import MAX_ROWS
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import MAX_PENDING


@pytest.mark.parametrize(("chunk", "window"), [(1, 1), (MAX_ROWS, MAX_PENDING)])
def test_a_pace_at_the_limits_is_accepted(chunk: int, window: int) -> None:
    assert PrefillPacing(chunk=chunk, window=window).chunk == chunk


@pytest.mark.parametrize(
    ("chunk", "window", "words"),
    [(0, 1, "chunk of 0 rows"), (5000, 1, "1 to 4096"), (1, 0, "window of 0"), (1, 17, "1 to 16")],
)
def test_a_pace_beyond_the_limits_is_refused(chunk: int, window: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        PrefillPacing(chunk=chunk, window=window)
