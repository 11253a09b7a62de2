"""Pacing: how many chunks of prompts are in flight at once."""

import pytest

from meshllm.protocol.session.pace import Pace
from meshllm.protocol.session.stage import MAX_PENDING, MAX_WAITING_BYTES


@pytest.mark.parametrize(
    ("chunk", "row_bytes", "sessions", "window"),
    [
        (256, 2048, 8, MAX_PENDING),
        (1024, 32_768, 8, 2),
        (1024, 32_768, 1, MAX_PENDING),
        (2048, 32_768, 8, 1),
        (4096, 32_768, 8, 1),
    ],
)
def test_the_chunks_of_all_sessions_find_room_where_they_wait(
    chunk: int, row_bytes: int, sessions: int, window: int
) -> None:
    pace = Pace(chunk=chunk, window=MAX_PENDING).within(row_bytes, sessions)

    assert pace == Pace(chunk=chunk, window=window)
    assert window == 1 or sessions * window * chunk * row_bytes <= MAX_WAITING_BYTES // 2
