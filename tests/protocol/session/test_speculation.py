"""Speculative decoding of one text: which drafter is queried, and how many tokens it drafts."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

import pytest

from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.protocol.drafting.drafter import Drafter, Drafting
from meshllm.protocol.drafting.window import DRAFTS
from meshllm.protocol.session.actions import SampleTokens
from meshllm.protocol.session.speculation import SURE, Speculation, Speculator, Steps
from tests.builders.oracle import Oracle

TEXT = list(range(400))
SILENT = Oracle((), 1.0)
STEP_S, ROW_S, DRAFT_S = 0.1, 0.001, 0.02


class Clock:
    """Seconds, which advance with work."""

    def __init__(self) -> None:
        self.now = 0.0


class Slow:
    """A draft model that knows the text like an oracle, but takes time."""

    def __init__(self, acceptance: float, clock: Clock) -> None:
        self.looks = 0
        self.kept: list[list[int]] = []
        self.unread = 0  # queries during which it still reads
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

    def draft(self, most: int) -> tuple[int, ...]:
        self._drafting.work(most - 1)
        return self._inner.draft(most)


def after(
    speculator: Speculator, clock: Clock, tokens: Sequence[int], job: SampleTokens, **more: Any
) -> Steps:
    """Take tokens and draft, as a driver does."""
    steps = speculator.after(tokens, job, clock.now, **more)
    speculator.drafted(clock.now)
    return steps


def pick(pos: int, drafts: Sequence[int] = (), room: int = 99, **more: Any) -> SampleTokens:
    """Return a job for rows after ``pos`` tokens that leaves room for this number of drafts."""
    return SampleTokens(0, pos, None, tuple(drafts), pos + len(drafts) + 2 + room, **more)


def write(
    speculation: Speculation, clock: Clock, tokens: int = 300, room: int = 99
) -> tuple[list[int], float]:
    """Write a text; return how much was drafted at each step, and the seconds per token."""
    speculator, length, drafted = Speculator(speculation, TEXT[:10]), 10, []
    drafts, begin = of(after(speculator, clock, (), pick(10), ends=True)), clock.now
    while length < 10 + tokens:
        pairs = zip(drafts, TEXT[length:], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        clock.now += STEP_S + ROW_S * len(drafts)
        come = TEXT[length : length + right + 1]
        limit = length + len(come) + 1 + room
        drafts = of(after(speculator, clock, come, SampleTokens(0, length, None, drafts, limit)))
        length += len(come)
        drafted.append(len(drafts))
    return drafted, (clock.now - begin) / (length - 10)


def write_together(speculation: Speculation, clock: Clock, sessions: int) -> list[int]:
    """Write texts in lockstep; return how much was drafted at each step by all of them.

    A pass takes the same time for up to four rows, and for more in proportion.
    """
    speculators = [Speculator(speculation, TEXT[:10]) for _ in range(sessions)]
    lengths, drafted = [10] * sessions, list[int]()
    drafts: list[tuple[int, ...]] = [()] * sessions
    for each in speculators:
        after(each, clock, (), pick(10), ends=True)
    for _ in range(30):
        rows = [1 + len(each) for each in drafts]
        clock.now += STEP_S * max(4, sum(rows)) / 4
        for place, speculator in enumerate(speculators):
            at = lengths[place]
            pairs = zip(drafts[place], TEXT[at:], strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            job = SampleTokens(0, at, None, drafts[place], at + 99)
            come = TEXT[at : at + right + 1]
            beside = {"sessions": sessions, "beside": sum(rows) - rows[place]}
            drafts[place] = of(after(speculator, clock, come, job, **beside))
            lengths[place] = at + right + 1
        drafted.append(sum(map(len, drafts)))
    return drafted


def of(steps: Steps) -> tuple[int, ...]:
    """Return the drafts of a single step."""
    (drafts,) = steps or ((),)
    return drafts


def drafts_per_step(drafting: Drafting, *, tokens: int = 300, room: int = 99) -> list[int]:
    """Return how many tokens were drafted at each step of a text."""
    return write(Speculation(drafting), Clock(), tokens, room)[0]


@pytest.mark.parametrize(("room", "most"), [(10, 0), (11, 0), (12, 1), (14, 2)])
def test_no_draft_is_made_where_the_caches_have_no_room(room: int, most: int) -> None:
    clock, speculator = Clock(), Speculator(Speculation(Oracle(TEXT, 1.0)), TEXT[:10])
    job = replace(pick(10), room=room)

    assert len(of(after(speculator, clock, TEXT[10:11], job))) == most


def test_good_drafts_are_used_and_more_of_them_in_time() -> None:
    assert sum(drafts_per_step(Oracle(TEXT, 1.0), tokens=60)) > 40


def test_what_drafts_cost_other_sessions_is_known_at_once_and_forgotten_alone() -> None:
    speculation, clock = Speculation(Oracle(TEXT, 0.6)), Clock()

    alone = write_together(speculation, clock, 1)
    together = write_together(speculation, clock, 6)
    again = write_together(speculation, clock, 1)

    assert min(alone) > 0
    assert together[1:] == [0] * 29
    assert min(again) > 0


def test_a_step_is_timed_by_the_rows_of_all_sessions() -> None:
    speculation, clock = Speculation(Oracle(TEXT, 0.6)), Clock()
    speculator = Speculator(speculation, TEXT[:10])
    after(speculator, clock, (), pick(10), ends=True)

    for beside, seconds in ((16, 0.5), (4, 0.2), (16, 0.5)):
        clock.now += seconds
        job = pick(10, TEXT[10:12])
        after(speculator, clock, (), job, ends=True, sessions=5, beside=beside)

    times = speculation.times
    assert [times.of(rows) for rows in (7, 19)] == pytest.approx([0.2, 0.5])


def test_bad_drafts_are_soon_left_alone() -> None:
    drafted = drafts_per_step(Oracle(TEXT, 0.0), tokens=60)

    assert 0 < sum(drafted) <= 60
    assert sum(drafted[40:]) == 0


def test_steps_use_only_prepared_row_counts() -> None:
    assert set(drafts_per_step(Oracle(TEXT, 0.9))) <= set(DRAFTS)
    assert max(drafts_per_step(Oracle(TEXT, 1.0), room=3)) <= 3
    assert set(drafts_per_step(Oracle(TEXT, 1.0), room=0)) == {0}


def test_finished_texts_improve_later_drafts() -> None:
    drafting = SuffixDrafting()
    Speculator(Speculation(drafting), [1]).keep([4, 5, 6, 7, 8])

    assert Speculator(Speculation(drafting), [3, 4]).after([5], pick(2), 0.0)


def test_a_draft_model_receives_finished_texts_too() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)

    Speculator(Speculation(SILENT, draft=slow), [1]).keep([4, 5])

    assert slow.kept == [[4, 5]]


def test_a_text_starts_with_the_statistics_of_earlier_ones() -> None:
    bad, good = Speculation(Oracle(TEXT, 0.0)), Speculation(Oracle(TEXT, 1.0))

    first, second = (write(bad, Clock(), 50)[0] for _ in range(2))
    assert sum(first) > 10
    assert sum(second) <= 5
    assert [write(good, Clock(), 50)[0][0] for _ in range(2)] == [4, 16]


def test_useless_drafts_cost_few_steps_over_all_texts() -> None:
    speculation, clock = Speculation(Oracle(TEXT, 0.0)), Clock()

    seconds = [write(speculation, clock, 100)[1] for _ in range(10)]

    assert sum(seconds) / 10 < STEP_S * 1.005
    assert max(seconds[1:]) < STEP_S * 1.001


def test_a_good_draft_model_is_worth_its_time() -> None:
    clock = Clock()

    drafted, seconds = write(Speculation(SILENT, draft=Slow(1.0, clock)), clock)

    assert set(drafted[5:-1]) == {16}
    assert seconds < STEP_S / 3  # 16 of 0.02 s and a step of 0.116 s for 17 tokens


def test_a_bad_draft_model_is_seldom_queried() -> None:
    clock = Clock()
    slow = Slow(0.0, clock)
    speculation = Speculation(SILENT, draft=slow)

    first, second = (write(speculation, clock)[1] for _ in range(2))

    assert slow.looks < 60
    assert first < STEP_S * 1.05
    assert second < STEP_S * 1.02


def test_drafting_time_is_not_part_of_a_step() -> None:
    clock = Clock()
    speculation = Speculation(SILENT, draft=Slow(1.0, clock))

    write(speculation, clock)

    assert speculation.times.of(17) == pytest.approx(STEP_S + 16 * ROW_S)
    assert speculation.draft_stats.token_s == pytest.approx(DRAFT_S, rel=0.1)


def test_reading_a_long_prompt_is_not_charged_to_drafts() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    slow.unread = 20
    speculation = Speculation(SILENT, draft=slow)

    drafted, _ = write(speculation, clock, 100)

    assert drafted[:20] == [0] * 20
    assert drafted[20] > 0
    assert speculation.draft_stats.token_s == pytest.approx(DRAFT_S, rel=0.3)


class Echo:
    """Knows the text, with the same confidence everywhere."""

    def __init__(self, confidence: int) -> None:
        self.confidence = confidence
        self._inner = Oracle(TEXT, 1.0).begin()
        self.extend, self.draft = self._inner.extend, self._inner.draft

    def begin(self) -> "Echo":
        return Echo(self.confidence)

    def keep(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def look(self) -> int:
        return self.confidence


def test_a_sure_free_drafter_is_preferred_to_a_model() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)

    write(Speculation(Echo(SURE), draft=slow), clock)

    assert slow.looks == 0


def test_a_model_is_queried_after_the_sure_drafter_was_wrong() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    wrong = Oracle(TEXT, 0.0)  # its drafts are as sure as all of an oracle

    drafted, seconds = write(Speculation(wrong, draft=slow), clock)

    assert slow.looks > len(drafted) / 3
    assert seconds < STEP_S / 2


def test_a_model_is_preferred_to_an_unsure_free_drafter() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    speculation = Speculation(Echo(SURE - 1), draft=slow)

    drafted, _ = write(speculation, clock)

    assert slow.looks == len(drafted)
    assert not speculation.stats.is_known


def test_an_unsure_free_drafter_is_used_if_the_model_has_no_draft() -> None:
    clock = Clock()
    slow = Slow(0.0, clock)
    speculation = Speculation(Echo(SURE - 1), draft=slow)

    drafted, seconds = write(speculation, clock)

    assert slow.looks < len(drafted)
    assert speculation.stats.is_known
    assert seconds < STEP_S / 2


def far(drafting: Drafting, clock: Clock, **more: Any) -> Speculator:
    """Start a text on a ring with long trips and a short interval between steps."""
    speculation = Speculation(drafting, **more)
    for rows in (1, 17):
        speculation.times.note(rows, 0.3)
    for _ in range(20):
        speculation.times.note_interval(17, 0.01)
    speculation.stats.is_known = True
    speculator = Speculator(speculation, TEXT[:10])
    after(speculator, clock, (), pick(10), ends=True)
    for _ in range(20):
        for voice in speculator._sources:
            voice.window_choice.note(2, 16, 16)
    return speculator


def sizes(steps: Steps) -> list[int]:
    return [len(step) for step in steps]


def test_the_time_of_a_warm_up_step_is_ignored() -> None:
    speculation, clock, prepared = Speculation(Oracle(TEXT, 1.0)), Clock(), 0
    speculator = Speculator(speculation, TEXT[:10])
    after(speculator, clock, (), pick(10), ends=True)

    for length, seconds, more in ((10, 0.1, 0), (11, 9.0, 1), (12, 0.1, 0), (13, 9.0, 2)):
        clock.now += seconds
        prepared += more
        after(speculator, clock, TEXT[length : length + 1], pick(length), prepared=prepared)

    assert abs(speculation.times.of(1) - 0.1) < 1e-9


def test_steps_are_pipelined_and_each_accepted_one_is_replaced() -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT, 1.0), clock)

    steps = after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=8)
    drafts, ahead = steps[0], tuple(chain(*steps[1:]))
    more = after(speculator, clock, TEXT[11:28], pick(11, drafts, 999, ahead=ahead), depth=8)

    assert sizes(steps) == [16] + [17] * 7
    assert sizes(more) == [17]
    assert (*drafts, *ahead, *more[0]) == tuple(TEXT[11 : 11 + 16 + 8 * 17])


def test_all_steps_are_sent_again_after_a_rejection() -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT, 1.0), clock)

    steps = after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=4)
    ahead = tuple(chain(*steps[1:]))
    again = after(speculator, clock, (11, 12, 0), pick(11, steps[0], 999, ahead=ahead), depth=4)

    assert sizes(steps) == sizes(again) == [16, 17, 17, 17]


@pytest.mark.parametrize(
    ("depth", "sizes_left"), [(8, [17]), (4, []), (1, [])], ids=["as many", "fewer", "one"]
)
def test_no_steps_are_added_beyond_a_lower_depth(depth: int, sizes_left: list[int]) -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT, 1.0), clock)

    steps = after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=8)
    ahead = tuple(chain(*steps[1:]))
    more = after(speculator, clock, TEXT[11:28], pick(11, steps[0], 999, ahead=ahead), depth=depth)

    assert sizes(more) == sizes_left


def test_steps_are_shorter_at_the_end_of_an_answer() -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT, 1.0), clock)

    assert sizes(after(speculator, clock, TEXT[10:11], pick(10, room=30), depth=8)) == [16, 12, 2]


def test_croppable_positions_limit_the_drafts_in_flight() -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT, 1.0), clock)

    steps = after(speculator, clock, TEXT[10:11], pick(10, room=999, max_drafts=31), depth=8)

    assert 16 < sum(sizes(steps)) <= 31


class Fickle(Echo):
    """Drafts something else from the second token on."""

    def begin(self) -> "Fickle":
        draft, self.extend = self._inner.draft, self._inner.extend
        said: list[int] = []

        def change(most: int) -> tuple[int, ...]:
            said.append(most)
            return tuple(token + len(said) - 1 for token in draft(most))

        self.draft = change
        return self


def test_a_drafter_that_disagrees_with_the_flight_adds_nothing() -> None:
    clock = Clock()
    speculator = far(Fickle(2), clock)

    steps = after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=4)
    ahead = tuple(chain(*steps[1:]))
    more = after(speculator, clock, TEXT[11:28], pick(11, steps[0], 999, ahead=ahead), depth=4)

    assert sizes(steps) == [16, 17, 17, 17]
    assert more == ()


def test_a_model_drafts_one_step_at_a_time() -> None:
    clock = Clock()
    speculator = far(SILENT, clock, draft=Slow(1.0, clock))

    assert sizes(after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=8)) == [16]


def test_a_model_is_not_queried_while_drafts_are_in_flight() -> None:
    clock = Clock()
    slow = Slow(1.0, clock)
    speculator = far(Oracle(TEXT[:150], 1.0), clock, draft=slow)
    after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=8)
    looks = slow.looks

    steps = after(
        speculator, clock, TEXT[11:28], pick(11, TEXT[11:27], 999, ahead=(27, 28, 29)), depth=8
    )

    assert slow.looks == looks
    assert steps


def test_only_a_step_that_has_the_ring_to_itself_measures_a_trip() -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT, 1.0), clock)
    times = speculator._speculation.times
    steps = after(speculator, clock, TEXT[10:11], pick(10, room=999), depth=4)
    run, at, before = tuple(chain(*steps)), 16, times.interval(17)

    for seconds in (0.6, 0.1, 0.1, 0.1, 9.9, 9.9):
        clock.now += seconds
        pos = 27 - 16 + at - 16
        job = pick(pos, run[at - 16 : at], 999, ahead=run[at:])
        run += tuple(chain(*after(speculator, clock, TEXT[pos : pos + 17], job, depth=4)))
        at += 17

    assert times.of(17) == 0.3
    assert times.first(17) > 0.3
    assert before < times.interval(17) < 0.1


def test_a_step_after_a_cancelled_flight_does_not_measure_a_trip() -> None:
    clock = Clock()
    speculator = far(Oracle(TEXT[:13], 1.0), clock)
    times = speculator._speculation.times
    clock.now += 0.3
    after(speculator, clock, (10,), pick(10), depth=8)
    clock.now += 0.4

    after(speculator, clock, (11, 0), pick(11, (11, 12), ahead=(13, 14)), depth=8)
    clock.now += 9.9
    after(speculator, clock, (14,), pick(13), depth=8)
    clock.now += 0.2
    before = times.of(1)
    after(speculator, clock, (15,), pick(14), depth=8)

    assert before == pytest.approx(0.3)
    assert 0.2 < times.of(1) < 0.3
