"""Guesses of one text: fed with what came, as many as may be."""

from collections.abc import Sequence

from meshllm.model.draft import SuffixDrafting
from meshllm.node.foresight import Foresight, Speculation
from meshllm.protocol.lookahead import GUESSES
from meshllm.testing.oracle import Oracle


def told(acceptance: float, steps: int, room: int = 99) -> list[int]:
    """Return how many tokens were guessed at each step of a text whose drafts are so good."""
    text = list(range(400))
    oracle, now = Oracle(text, acceptance), 0.0
    foresight = Foresight(Speculation(oracle), text[:10], lambda: now)
    guessed, length, guesses = [], 10, foresight.after(text[10:10], 0, 0)
    for _ in range(steps):
        right = _right(guesses, text[length:])
        tokens = text[length : length + right + 1]
        now += 0.1 + 0.01 * len(guesses)
        guesses = foresight.after(tokens, len(guesses), room)
        length += len(tokens)
        guessed.append(len(guesses))
    return guessed


def _right(guesses: Sequence[int], text: Sequence[int]) -> int:
    return next(
        (at for at, guess in enumerate(guesses) if guess != text[at]),
        len(guesses),
    )


def test_good_drafts_are_used_and_more_of_them_in_time() -> None:
    assert sum(told(1.0, 12)) > 40


def test_bad_drafts_are_soon_left_alone() -> None:
    assert sum(told(0.0, 60)[10:]) <= 12
    assert sum(told(0.0, 60)[30:]) == 0


def test_there_are_as_many_guesses_as_numbers_of_rows_are_prepared() -> None:
    assert set(told(0.9, 30)) <= set(GUESSES)
    assert max(told(1.0, 12, room=3)) <= 3
    assert set(told(1.0, 12, room=0)) == {0}


def test_texts_are_kept_for_those_to_come() -> None:
    drafting = SuffixDrafting()
    Foresight(Speculation(drafting), [1], float).keep([4, 5, 6, 7, 8])

    assert Foresight(Speculation(drafting), [3, 4], float).after([5], 0, 9)
