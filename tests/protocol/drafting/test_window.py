"""Draft length and pipeline depth follow measured step times and acceptance rates."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.protocol.drafting.window import (
    DEPTHS,
    DRAFTS,
    MAX_CONFIDENCE,
    MAX_DEPTH,
    Acceptance,
    DrafterStats,
    DraftWindow,
    StepTimes,
    WindowChoice,
)
from meshllm.protocol.session.stage import MAX_PENDING


def times(**seconds: float) -> StepTimes:
    """Note the seconds of steps, as ``r1=0.1, r9=0.2``."""
    table = StepTimes()
    for rows, second in seconds.items():
        table.note(int(rows[1:]), second)
    return table


def taught(
    table: StepTimes, right: int, drafts: int, ring: DrafterStats | None = None
) -> WindowChoice:
    windows = WindowChoice(table, ring)
    for _ in range(20):
        windows.note(2, drafts, right)
    return windows


def wrong(windows: WindowChoice, steps: int, confidence: int = 2) -> list[int]:
    """Return the draft length chosen at each step, with every draft rejected."""
    chosen = []
    for _ in range(steps):
        chosen.append(0 if windows.is_paused else windows.choose(confidence, 99).drafts)
        windows.note(confidence, chosen[-1], 0)
    return chosen


def test_unmeasured_step_times_are_interpolated_and_extrapolated() -> None:
    table = times(r1=0.1, r9=0.2)

    assert (table.of(1), table.of(9)) == (0.1, 0.2)
    assert abs(table.of(5) - 0.15) < 1e-9
    assert abs(table.of(17) - 0.3) < 1e-9
    assert 0.2 < times(r9=0.2).of(17) < 0.3
    assert 0.15 < times(r9=0.2).of(1) < 0.19


def test_the_nearest_measurements_count() -> None:
    table = times(r1=0.1, r9=0.2, r17=0.5)

    assert table.of(5) == pytest.approx(0.15)
    assert table.of(13) == pytest.approx(0.35)
    assert table.of(33) == pytest.approx(1.1)
    assert times(r9=0.2, r17=0.1).of(33) == pytest.approx(0.1)


def test_a_single_measurement_is_scaled_by_the_prior() -> None:
    one_by_one = StepTimes(together=False)
    one_by_one.note(4, 0.4)

    assert times(r9=0.2).of(17) == pytest.approx(0.2 * (1 + 8 * 0.02))
    assert times(r9=0.2).of(1) == pytest.approx(0.2 / (1 + 8 * 0.02))
    assert [one_by_one.of(rows) for rows in (1, 4, 6)] == pytest.approx([0.1, 0.4, 1.2])
    assert StepTimes().of(1) == 1.0


@pytest.mark.parametrize(("odd", "after"), [(100.0, 0.12), (0.001, 0.09), (0.15, 0.11)])
def test_one_odd_step_changes_little(odd: float, after: float) -> None:
    table = times(r1=0.1)

    table.note(1, odd)

    assert table.of(1) == pytest.approx(after)


def test_a_ring_that_becomes_slower_is_noticed() -> None:
    table = times(r1=0.1)

    for _ in range(40):
        table.note(1, 0.3)

    assert abs(table.of(1) - 0.3) < 0.01


def test_fewer_rows_take_no_longer() -> None:
    table = times(r1=0.30, r3=0.26)

    assert table.of(1) == table.of(2) == table.of(3) == 0.26


def test_rejected_drafts_stop_even_if_they_seem_free() -> None:
    chosen = wrong(WindowChoice(times(r1=0.30, r3=0.26, r17=0.26)), 60)

    assert any(chosen[:20])
    assert not any(chosen[40:])


def test_old_step_times_are_dropped() -> None:
    table = times(r1=0.25, r5=0.26, r9=0.9)

    for _ in range(127):
        table.note(5, 0.26)
        table.note(3, 0.255)
    assert table.of(9) == 0.9
    for _ in range(2):
        table.note(5, 0.26)

    assert table.of(9) < 0.28
    assert table.of(5) == 0.26
    assert table.of(1) == 0.25


def test_acceptance_starts_with_a_prior_and_old_drafts_fade() -> None:
    ring = Acceptance()
    assert [ring.rate(each) for each in range(MAX_CONFIDENCE + 1)] == [0.3, 0.5, 0.7, 0.8]

    ring.note(2, 3, 2)

    assert ring.rate(2) == pytest.approx((0.7 * 0.95**3 + 2) / (0.95**3 + 3))
    assert ring.rate(1) == 0.5


def test_a_session_starts_with_the_rates_of_its_ring_and_soon_follows_its_own() -> None:
    ring = Acceptance()
    for _ in range(9):
        ring.note(2, 4, 1)
    own = Acceptance(ring)
    few = Acceptance(Acceptance())
    before = own.rate(2)

    own.note(2, 4, 4)
    few.note(2, 4, 4)

    # As if two draft tokens had been tried, or one if the ring knows nothing yet.
    assert before == ring.rate(2)
    assert own.rate(2) == pytest.approx((2 * before * 0.9**4 + 4) / (2 * 0.9**4 + 4))
    assert few.rate(2) == pytest.approx((0.7 * 0.9**4 + 4) / (0.9**4 + 4))


def test_the_time_of_a_draft_token_is_a_mean_in_which_old_queries_fade() -> None:
    ring = DrafterStats()
    assert ring.token_s == 0.0

    ring.note_query(4, 0.049)
    ring.note_query(0, 0.010)

    assert ring.token_s == pytest.approx((0.049 * 0.9 + 0.010) / ((0.9 + 4) * 0.9))


def test_queries_that_gave_nothing_count_as_one_token_at_least() -> None:
    ring = DrafterStats()

    for _ in range(3):
        ring.note_query(0, 0.010)

    assert ring.token_s == pytest.approx(0.010 * (1 + 0.9 + 0.81))


def test_good_drafts_in_a_slow_ring_are_long() -> None:
    assert taught(times(r1=0.250, r17=0.280), right=15, drafts=16).choose(2, 99).drafts == 16


def test_a_new_ring_starts_with_short_drafts_and_doubles_them() -> None:
    windows, chosen = WindowChoice(times(r1=1.0, r17=1.0)), []
    for _ in range(4):
        chosen.append(windows.choose(3, 99).drafts)
        windows.note(3, chosen[-1], chosen[-1])

    assert chosen == [4, 8, 16, 16]


def test_a_few_drafts_are_tried_once_if_rows_are_computed_one_by_one() -> None:
    table, ring = StepTimes(together=False), DrafterStats()
    table.note(1, 0.1)
    windows = WindowChoice(table, ring)

    assert windows.choose(3, 99).drafts == 2
    table.note(3, 0.3)
    windows.note(3, 2, 2)
    assert windows.choose(3, 99).drafts == 0
    assert WindowChoice(table, ring).choose(3, 99).drafts == 0


def test_rows_one_by_one_are_worth_it_in_a_slow_ring() -> None:
    table = StepTimes(together=False)
    table.note(1, 0.31)
    windows = WindowChoice(table)

    windows.note(3, windows.choose(3, 99).drafts, 2)
    table.note(3, 0.33)
    assert windows.choose(3, 99).drafts > 2


def test_no_drafts_at_low_acceptance() -> None:
    assert taught(times(r1=0.100, r2=0.105), right=0, drafts=2).choose(2, 99).drafts == 0


def test_no_drafts_if_a_row_costs_as_much_as_a_step() -> None:
    table = times(r1=0.1, r2=0.2, r3=0.3, r5=0.5, r9=0.9, r17=1.7)

    assert taught(table, right=3, drafts=4).choose(2, 99).drafts == 0


def test_short_drafts_at_fair_acceptance() -> None:
    table = times(r1=0.100, r2=0.105, r3=0.110, r5=0.120, r9=0.140, r17=0.180)

    assert 2 <= taught(table, right=1, drafts=2).choose(2, 99).drafts <= 8


def test_drafting_is_tried_again_with_a_small_trial() -> None:
    windows = taught(times(r1=0.100, r2=0.105), right=0, drafts=2)

    chosen = []
    for _ in range(200):
        chosen.append(windows.choose(2, 99).drafts)
        windows.note(2, chosen[-1], 0)

    assert 2 <= sum(map(bool, chosen)) <= 4
    assert max(chosen) == 2


def test_a_second_session_knows_a_low_acceptance() -> None:
    table, ring = times(r1=0.100, r2=0.105), DrafterStats()

    first, second = (wrong(WindowChoice(table, ring), 60) for _ in range(2))

    assert sum(map(bool, first)) > 5
    assert sum(second) <= 2  # one trial


def test_a_second_session_knows_a_high_acceptance() -> None:
    table, ring = times(r1=0.250, r17=0.280), DrafterStats()
    taught(table, 16, 16, ring)

    assert WindowChoice(table, ring).choose(2, 99).drafts == 16


def test_the_statistics_of_a_session_soon_outweigh_those_of_the_ring() -> None:
    table, ring = times(r1=0.100, r2=0.105), DrafterStats()
    for _ in range(10):
        taught(table, 16, 16, ring)
    windows = WindowChoice(table, ring)

    assert sum(wrong(windows, 60)[20:]) == 0
    assert windows.choose(2, 99).drafts == 0


def test_many_short_sessions_try_bad_drafts_as_seldom_as_a_long_one() -> None:
    table, ring = times(r1=0.100, r2=0.105), DrafterStats()
    wrong(WindowChoice(table, ring), 60)

    chosen = [each for _ in range(20) for each in wrong(WindowChoice(table, ring), 20)]

    assert 3 <= sum(map(bool, chosen)) <= 9
    assert max(chosen) == 2


def test_drafting_time_shortens_drafts_or_stops_them() -> None:
    table, ring = times(r1=0.100, r17=0.110), DrafterStats()
    windows = taught(table, right=15, drafts=16, ring=ring)
    chosen = []
    for token_s in (0.0, 0.02, 0.3):
        for _ in range(40):
            ring.note_query(16, 16 * token_s)
        chosen.append(windows.choose(2, 99).drafts)

    assert chosen[0] == 16
    assert 0 < chosen[1] <= 16
    assert chosen[2] == 0


def test_fruitless_queries_raise_the_price() -> None:
    ring = DrafterStats()
    ring.note_query(4, 0.04)
    before = ring.token_s
    ring.note_query(0, 0.01)

    assert 0 < before < ring.token_s


def test_after_fruitless_queries_there_is_a_pause_and_then_a_trial() -> None:
    ring = DrafterStats()
    windows = taught(times(r1=0.100, r2=0.105), right=0, drafts=2, ring=ring)

    looked = []
    for _ in range(200):
        looked.append(not windows.is_paused)
        drafts = windows.choose(2, 99).drafts if looked[-1] else 0
        windows.note(2, drafts, 0)

    assert looked[:4] == [True] * 4
    assert sum(looked) <= 4 + 3
    assert any(looked[60:80])


def test_an_accepted_trial_ends_the_pause() -> None:
    windows = taught(times(r1=0.100, r2=0.105), right=0, drafts=2)
    wrong(windows, 20)
    assert windows.is_paused

    windows.note(2, 2, 2)

    assert not windows.is_paused


def test_a_new_session_inherits_the_pause() -> None:
    table, ring = times(r1=0.100, r2=0.105), DrafterStats()
    wrong(taught(table, 0, 2, ring), 20)

    assert WindowChoice(table, ring).is_paused
    assert not WindowChoice(table, DrafterStats()).is_paused


def test_a_step_is_cut_as_it_was_chosen() -> None:
    window = DraftWindow(drafts=2, depth=3)

    assert (window.rows, window.length) == (3, 8)
    assert window.cut(range(8), is_open=True) == ((0, 1), (2, 3, 4), (5, 6, 7))
    assert window.cut(range(6), is_open=False) == ((0, 1, 2), (3, 4, 5))


def test_a_remainder_is_split_into_shorter_steps() -> None:
    window = DraftWindow(drafts=16, depth=8)

    assert [len(step) for step in window.cut(range(30), is_open=True)] == [16, 12, 2]
    assert [len(step) for step in window.cut(range(16), is_open=False)] == [12, 3]
    assert window.cut([7], is_open=True) == ((7,),)
    assert window.cut([7], is_open=False) == ()
    assert window.cut([], is_open=True) == ()


def test_a_single_step_drops_the_remainder() -> None:
    assert DraftWindow(drafts=4).cut(range(4), is_open=True) == ((0, 1, 2, 3),)
    assert DraftWindow(drafts=4).cut(range(3), is_open=True) == ((0, 1),)


def certain(table: StepTimes, right: int = 16) -> WindowChoice:
    """Return a chooser after many steps of 16 drafts, of which the first ones were accepted."""
    windows = WindowChoice(table)
    windows.note(2, 1, 0)  # otherwise it would start with few
    for _ in range(20):
        windows.note(2, 16, right)
    return windows


LONG = {"r1": 0.300, "r17": 0.320}


def test_many_steps_are_in_flight_at_high_acceptance_and_long_trips() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.010)

    assert certain(table).choose(2, 999, depth=8) == DraftWindow(16, 8)
    assert certain(table).choose(2, 999, depth=2) == DraftWindow(16, 2)
    assert certain(table).choose(2, 999) == DraftWindow(16, 1)


@pytest.mark.parametrize("right", [0, 1, 3, 7])
def test_one_step_is_enough_with_occasional_rejections(right: int) -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.100)

    assert certain(table, right).choose(2, 999, depth=8).depth == 1


def test_one_step_is_enough_if_one_rank_takes_the_whole_trip() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.320)

    assert certain(table).choose(2, 999, depth=8).depth == 1


def test_the_slowest_rank_limits_the_steps_in_flight() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.080)

    assert certain(table).choose(2, 999, depth=8) == DraftWindow(16, 4)


def test_no_pipelining_if_it_slows_down_the_first_step() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_first(17, 3.0)

    assert certain(table).choose(2, 999, depth=8).depth == 1


def test_a_good_run_between_rejections_does_not_start_pipelining() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.080)
    windows = certain(table, right=12)

    windows.note(2, 16, 16)
    few = windows.choose(2, 999, depth=8)
    for _ in range(20):
        windows.note(2, 16, 16)

    assert few == DraftWindow(16, 1)
    assert windows.choose(2, 999, depth=8).depth > 1


def test_pipelined_times_decay_to_their_prior() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.320)
        table.note_first(17, 3.0)
    before = table.first(17), table.interval(17)

    for _ in range(300):
        table.note(17, 0.320)

    assert before[0] > 3 * table.first(17)
    assert before[1] > 1.5 * table.interval(17)
    assert certain(table).choose(2, 999, depth=8).depth > 1


@pytest.mark.parametrize("ring", [2, 4])
def test_the_prior_of_pipelined_times_is_a_trip_and_its_share_of_a_rank(ring: int) -> None:
    table = StepTimes(ring=ring)
    table.note(17, 0.320)
    unmeasured = table.first(17), table.interval(17)
    for _ in range(5):
        table.note_interval(17, 0.320)
        table.note_first(17, 3.0)

    for _ in range(2000):
        table.note(17, 0.320)

    assert unmeasured == pytest.approx((0.320, 0.320 / ring))
    assert (table.first(17), table.interval(17)) == pytest.approx(unmeasured, rel=1e-3)


def endless(table: StepTimes) -> WindowChoice:
    """Return a chooser that saw so many accepted drafts that its rate is at the limit, 0.99."""
    windows = WindowChoice(table)
    for _ in range(200):
        windows.note(2, 16, 16)
    return windows


def seconds_of_a_run(depth: int, first: float, interval: float, *, trip: float = 0.320) -> float:
    """Return the seconds until the first rejection, as the module explains, at a rate of 0.99."""
    further = 0.99**17 / (1 - 0.99**17)
    if depth == 1:
        return trip * (1 + further)
    interval += (first - trip) / (depth - 1)
    return first + max(interval, first / depth) * further + interval


@pytest.mark.parametrize("interval", [0.236, 0.245])
def test_several_steps_must_be_a_tenth_faster_than_one(interval: float) -> None:
    table = times(**LONG)
    table.note_interval(17, interval)

    chosen = endless(table).choose(2, 999, depth=8)

    several = seconds_of_a_run(2, 0.320, interval)
    assert (chosen.depth > 1) == (1.1 * several < seconds_of_a_run(1, 0, 0)) == (interval < 0.24)


@pytest.mark.parametrize("first", [0.900, 1.000])
def test_what_delays_the_first_step_is_work_on_the_others(first: float) -> None:
    table = times(**LONG)
    table.note_interval(17, 0.050)
    table.note_first(17, first)

    chosen = endless(table).choose(2, 999, depth=8)

    several = seconds_of_a_run(8, first, 0.050)
    assert (chosen.depth > 1) == (1.1 * several < seconds_of_a_run(1, 0, 0)) == (first < 0.95)


def test_croppable_positions_limit_all_drafts_in_flight() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_interval(17, 0.001)

    window = certain(table).choose(2, 31, depth=8, max_drafts=31)

    assert window.length <= 31
    assert window.depth > 1


def test_a_new_ring_starts_with_one_step_and_doubles_its_drafts() -> None:
    table, chosen = times(**LONG), list[int]()
    for _ in range(20):
        table.note_interval(17, 0.010)
    windows = WindowChoice(table)
    for _ in range(8):
        window = windows.choose(3, 999, depth=8)
        chosen.append(window.drafts * window.depth)
        windows.note(3, window.drafts, window.drafts)

    assert chosen[0] == 4
    assert chosen[-1] == 16 * 8
    assert all(after <= 2 * before for before, after in pairwise(chosen))


def test_zero_times_are_handled() -> None:
    table = times(r1=0.0)
    table.note_first(1, 1.0)
    table.note_interval(1, 1.0)

    assert (table.first(1), table.interval(1)) == (0.0, 0.0)
    assert certain(table).choose(2, 99, depth=8)


@given(
    st.lists(
        st.tuples(
            st.integers(0, MAX_CONFIDENCE),
            st.sampled_from(DRAFTS),
            st.integers(0, 16),
            st.floats(0, 1e6),
            st.floats(0, 1e6),
        ),
        max_size=30,
    ),
    st.integers(0, MAX_CONFIDENCE),
    st.integers(0, 40),
)
def test_every_choice_respects_its_limits(
    steps: list[tuple[int, int, int, float, float]], confidence: int, room: int
) -> None:
    table, ring = StepTimes(), DrafterStats()
    windows = WindowChoice(table, ring)
    for sure, drafts, right, seconds, token_s in steps:
        table.note(1 + drafts, seconds)
        table.note_first(1 + drafts, 2 * seconds)
        table.note_interval(1 + drafts, seconds / 3)
        ring.note_query(drafts, token_s)
        windows.note(sure, drafts, min(right, drafts))

    for each in (windows, WindowChoice(table, ring)):
        chosen = each.choose(confidence, room, depth=4, max_drafts=31)
        assert chosen.drafts in DRAFTS
        assert chosen.depth in DEPTHS[:3]
        assert chosen.drafts <= room
        assert chosen.depth == 1 or chosen.length <= 31


def test_a_stage_can_queue_all_steps_in_flight() -> None:
    assert 2 * MAX_DEPTH <= MAX_PENDING
