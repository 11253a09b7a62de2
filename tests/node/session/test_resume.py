"""What an ingress is told to resume a session, and what it may say."""

from dataclasses import replace

import pytest

from meshllm.node.session.resume import new_key, read_resumable, resumable, session_of
from meshllm.protocol.kv_cache.prefix_index import Chunk
from meshllm.request import Resumable
from meshllm.strict_json import WrongField

KEY = new_key()
PROMPT = (Chunk(4, is_step=False), Chunk(6, is_step=False))


def test_a_session_is_resumed_with_the_chunks_of_its_prompt_and_steps_behind_them() -> None:
    told = resumable(KEY, PROMPT)

    steps = Chunk(9, is_step=True)
    assert read_resumable(told, 9, 4) == (session_of(KEY), [*PROMPT, steps])
    assert read_resumable(resumable(KEY, (*PROMPT, steps)), 9, 4)[1] == [*PROMPT, steps]
    later = Chunk(30, is_step=True)
    assert read_resumable(resumable(KEY, (*PROMPT, steps)), 30, 4)[1] == [*PROMPT, later]


def test_the_session_does_not_tell_its_key() -> None:
    assert len(session_of(KEY)) == 16
    assert bytes(session_of(KEY)) != bytes(KEY)
    assert session_of(KEY) != session_of(new_key())


@pytest.mark.parametrize(
    "stops",
    [(0,), (-1, 3), (3, 3), (4, 2), (5,), (2, 7)],
    ids=str,
)
def test_impossible_chunks_are_refused(stops: tuple[int, ...]) -> None:
    with pytest.raises(WrongField, match="A chunk from"):
        read_resumable(replace(resumable(KEY, ()), stops=stops), 9, 4)


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(WrongField, match="not hexadecimal"):
        read_resumable(Resumable("xy", ()), 9, 4)
