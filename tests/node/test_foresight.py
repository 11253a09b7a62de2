"""Guesses of one text: fed with what came, as many as may be, of whom it pays to ask."""

from collections.abc import Sequence
from itertools import takewhile

import pytest

from meshllm.model.draft import Drafter, Drafting, SuffixDrafting
from meshllm.node.foresight import SURE, Foresight, Speculation
from meshllm.protocol.lookahead import GUESSES
from meshllm.testing.oracle import Oracle

TEXT = list(range(400))
SILENT = Oracle((), 1.0)
STEP_S, ROW_S, DRAFT_S = 0.1, 0.001, 0.02


class Clock:
    """Seconds that pass when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A model that knows the text as well as an oracle, and takes its time."""

    def __init__(self, acceptance: float, clock: Clock) -> None:
        self.looks = 0
        self.kept: list[list[int]] = []
        self.unread = 0  # looks at which it still reads
        self._oracle = Oracle(TEXT, acceptance)
        self._clock = clock

    def begin(self) -> "SlowDrafter":
        return SlowDrafter(self, self._oracle.begin())

    def keep(self, tokens: Sequence[int]) -> None:
        self.kept.append(list(tokens))

    def work(self, tokens: int = 1) -> None:
        self._clock.now += DRAFT_S * tokens


class SlowDrafter:
    def __init__(self, drafting: Slow, inner: Drafter) -> None:
        self.extend = inner.extend
        self._drafting = drafting
        self._inner = inner

    def look(self) -> int | None:
        self._drafting.looks += 1
        self._drafting.work()
        if self._drafting.unread:
            self._drafting.unread -= 1
            return None
        return self._inner.look()

    def guess(self, most: int) -> tuple[int, ...]:
        self._drafting.work(most - 1)
        return self._inner.guess(most)


def write(
    speculation: Speculation, clock: Clock, tokens: int = 300, room: int = 99
) -> tuple[list[int], float]:
    """Write a text; return how much was guessed at each step, and the seconds per token."""
    foresight, length, guessed = Foresight(speculation, TEXT[:10], clock), 10, []
    guesses, begin = foresight.after((), 0, 0), clock.now
    while length < 10 + tokens:
        pairs = zip(guesses, TEXT[length:], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        clock.now += STEP_S + ROW_S * len(guesses)
        come = TEXT[length : length + right + 1]
        guesses = foresight.after(come, len(guesses), room)
        length += len(come)
        guessed.append(len(guesses))
    return guessed, (clock.now - begin) / (length - 10)


def told(drafting: Drafting, *, tokens: int = 300, room: int = 99) -> list[int]:
    """Return how many tokens were guessed at each step of a text."""
    return write(Speculation(drafting), Clock(), tokens, room)[0]


def test_good_drafts_are_used_and_more_of_them_in_time() -> None:
    assert sum(told(Oracle(TEXT, 1.0), tokens=60)) > 40


def test_bad_drafts_are_soon_left_alone() -> None:
    guessed = told(Oracle(TEXT, 0.0), tokens=60)

    assert 0 < sum(guessed) <= 60
    assert sum(guessed[40:]) == 0


def test_there_are_as_many_guesses_as_numbers_of_rows_are_prepared() -> None:
    assert set(told(Oracle(TEXT, 0.9))) <= set(GUESSES)
    assert max(told(Oracle(TEXT, 1.0), room=3)) <= 3
    assert set(told(Oracle(TEXT, 1.0), room=0)) == {0}


def test_texts_are_kept_for_those_to_come() -> None:
    drafting = SuffixDrafting()
    Foresight(Speculation(drafting), [1], float).keep([4, 5, 6, 7, 8])

    assert Foresight(Speculation(drafting), [3, 4], float).after([5], 0, 9)


def test_a_model_hears_of_finished_texts_too() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)

    Foresight(Speculation(SILENT, draft=slow), [1], clock).keep([4, 5])

    assert slow.kept == [[4, 5]]


def test_what_one_text_taught_the_next_one_need_not_learn() -> None:
    bad, good = Speculation(Oracle(TEXT, 0.0)), Speculation(Oracle(TEXT, 1.0))

    first, second = (write(bad, Clock(), 50)[0] for _ in range(2))
    assert sum(first) > 10
    assert sum(second) <= 5
    assert [write(good, Clock(), 50)[0][0] for _ in range(2)] == [4, 16]


def test_useless_guesses_cost_a_few_steps_of_all_texts_together() -> None:
    speculation, clock = Speculation(Oracle(TEXT, 0.0)), Clock()

    seconds = [write(speculation, clock, 100)[1] for _ in range(10)]

    assert sum(seconds) / 10 < STEP_S * 1.005
    assert max(seconds[1:]) < STEP_S * 1.001


def test_a_model_that_guesses_well_is_worth_its_time() -> None:
    clock = Clock()

    guessed, seconds = write(Speculation(SILENT, draft=Slow(1.0, clock)), clock)

    assert set(guessed[5:-1]) == {16}
    assert seconds < STEP_S / 3  # 16 of 0.02 s and a step of 0.116 s for 17 tokens


def test_a_model_that_guesses_badly_is_seldom_asked() -> None:
    clock = Clock()
    slow = Slow(0.0, clock)
    speculation = Speculation(SILENT, draft=slow)

    first, second = (write(speculation, clock)[1] for _ in range(2))

    assert slow.looks < 60
    assert first < STEP_S * 1.05
    assert second < STEP_S * 1.02


def test_what_a_model_takes_is_no_part_of_a_step() -> None:
    clock = Clock()
    speculation = Speculation(SILENT, draft=Slow(1.0, clock))

    write(speculation, clock)

    assert speculation.times.of(17) == pytest.approx(STEP_S + 16 * ROW_S)
    assert speculation.draft_experience.price == pytest.approx(DRAFT_S, rel=0.1)


def test_reading_a_long_prompt_makes_no_guess_dearer() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    slow.unread = 20
    speculation = Speculation(SILENT, draft=slow)

    guessed, _ = write(speculation, clock, 100)

    assert guessed[:20] == [0] * 20
    assert guessed[20] > 0
    assert speculation.draft_experience.price == pytest.approx(DRAFT_S, rel=0.3)


class Echo:
    """Knows the text, and is equally sure everywhere."""

    def __init__(self, confidence: int) -> None:
        self.confidence = confidence
        self._inner = Oracle(TEXT, 1.0).begin()
        self.extend, self.guess = self._inner.extend, self._inner.guess

    def begin(self) -> "Echo":
        return Echo(self.confidence)

    def keep(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def look(self) -> int:
        return self.confidence


def test_who_is_sure_at_no_cost_goes_before_a_model() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)

    write(Speculation(Echo(SURE), draft=slow), clock)

    assert slow.looks == 0


def test_a_model_is_asked_where_who_is_sure_was_wrong() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    wrong = Oracle(TEXT, 0.0)  # its drafts are as sure as all of an oracle

    guessed, seconds = write(Speculation(wrong, draft=slow), clock)

    assert slow.looks > len(guessed) / 3
    assert seconds < STEP_S / 2


def test_a_model_goes_before_who_is_not_sure() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    speculation = Speculation(Echo(SURE - 1), draft=slow)

    guessed, _ = write(speculation, clock)

    assert slow.looks == len(guessed)
    assert not speculation.experience.is_known


def test_who_is_not_sure_speaks_while_a_model_keeps_quiet() -> None:
    clock = Clock()
    slow = Slow(0.0, clock)
    speculation = Speculation(Echo(SURE - 1), draft=slow)

    guessed, seconds = write(speculation, clock)

    assert slow.looks < len(guessed)
    assert speculation.experience.is_known
    assert seconds < STEP_S / 2
