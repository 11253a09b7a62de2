"""What an ingress is told to resume a session, and what it may say."""

from dataclasses import replace

import pytest

from meshllm.node.session.resume import new_key, read_resumable, resumable, session_of
from meshllm.protocol.kv_cache.prefix_index import Chunk, crop_chunks
from meshllm.request import Resumable
from meshllm.strict_json import WrongField

KEY = new_key()
PROMPT = (Chunk(4, is_step=False), Chunk(6, is_step=False))


def test_a_session_is_resumed_with_the_chunks_of_its_prompt_and_steps_behind_them() -> None:
    told = resumable(KEY, PROMPT)

    steps = Chunk(9, is_step=True)
    assert read_resumable(told, 10, 4) == (session_of(KEY), [*PROMPT, steps], 9)
    assert read_resumable(resumable(KEY, (*PROMPT, steps)), 10, 4)[1] == [*PROMPT, steps]
    later = Chunk(30, is_step=True)
    assert read_resumable(resumable(KEY, (*PROMPT, steps)), 31, 4)[1] == [*PROMPT, later]


@pytest.mark.parametrize(("held", "known", "length"), [(6, 40, 6), (6, 7, 6), (6, 6, 5), (0, 9, 0)])
def test_within_its_prompt_a_session_is_resumed_with_what_every_rank_holds(
    held: int, known: int, length: int
) -> None:
    _, chunks, positions = read_resumable(resumable(KEY, PROMPT, held), known, 4)

    assert positions == length
    assert chunks == crop_chunks(PROMPT, length)


def test_a_number_of_positions_below_zero_is_refused() -> None:
    with pytest.raises(WrongField, match="-1 positions are held"):
        read_resumable(resumable(KEY, PROMPT, -1), 9, 4)


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
        read_resumable(replace(resumable(KEY, ()), stops=stops), 10, 4)


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(WrongField, match="not hexadecimal"):
        read_resumable(Resumable("xy", ()), 10, 4)
