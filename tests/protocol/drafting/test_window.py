"""How many tokens to guess: as many as the measured times and hits pay for, and none otherwise."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.protocol.drafting.window import (
    DEPTHS,
    GUESSES,
    MAX_CONFIDENCE,
    MAX_DEPTH,
    Experience,
    Lookahead,
    StepTimes,
    Window,
)
from meshllm.protocol.session.stage import MAX_PENDING


def times(**seconds: float) -> StepTimes:
    """Note the seconds of steps, as ``r1=0.1, r9=0.2``."""
    table = StepTimes()
    for rows, second in seconds.items():
        table.note(int(rows[1:]), second)
    return table


def taught(table: StepTimes, right: int, guesses: int, ring: Experience | None = None) -> Lookahead:
    lookahead = Lookahead(table, ring)
    for _ in range(20):
        lookahead.note(2, guesses, right)
    return lookahead


def wrong(lookahead: Lookahead, steps: int, confidence: int = 2) -> list[int]:
    """Return how many guesses were chosen at each step, none of which was right."""
    chosen = []
    for _ in range(steps):
        chosen.append(0 if lookahead.is_resting else lookahead.choose(confidence, 99).guesses)
        lookahead.note(confidence, chosen[-1], 0)
    return chosen


def test_steps_between_and_beyond_what_was_measured_are_estimated() -> None:
    table = times(r1=0.1, r9=0.2)

    assert (table.of(1), table.of(9)) == (0.1, 0.2)
    assert abs(table.of(5) - 0.15) < 1e-9
    assert abs(table.of(17) - 0.3) < 1e-9
    assert 0.2 < times(r9=0.2).of(17) < 0.3
    assert 0.15 < times(r9=0.2).of(1) < 0.19


def test_one_slow_step_says_little() -> None:
    table = times(r1=0.1)

    table.note(1, 100.0)

    assert table.of(1) < 0.13


def test_a_ring_that_becomes_slower_is_noticed() -> None:
    table = times(r1=0.1)

    for _ in range(40):
        table.note(1, 0.3)

    assert abs(table.of(1) - 0.3) < 0.01


def test_fewer_rows_take_no_longer() -> None:
    table = times(r1=0.30, r3=0.26)

    assert table.of(1) == table.of(2) == table.of(3) == 0.26


def test_wrong_guesses_end_though_they_seem_to_cost_nothing() -> None:
    chosen = wrong(Lookahead(times(r1=0.30, r3=0.26, r17=0.26)), 60)

    assert any(chosen[:20])
    assert not any(chosen[40:])


def test_what_was_noted_long_ago_is_forgotten() -> None:
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


def test_good_guesses_in_a_slow_ring_are_many() -> None:
    assert taught(times(r1=0.250, r17=0.280), right=15, guesses=16).choose(2, 99).guesses == 16


def test_a_new_ring_begins_with_few_guesses_and_doubles_them() -> None:
    lookahead, chosen = Lookahead(times(r1=1.0, r17=1.0)), []
    for _ in range(4):
        chosen.append(lookahead.choose(3, 99).guesses)
        lookahead.note(3, chosen[-1], chosen[-1])

    assert chosen == [4, 8, 16, 16]


def test_where_rows_are_computed_one_by_one_a_few_guesses_are_tried_once() -> None:
    table, ring = StepTimes(together=False), Experience()
    table.note(1, 0.1)
    lookahead = Lookahead(table, ring)

    assert lookahead.choose(3, 99).guesses == 2
    table.note(3, 0.3)
    lookahead.note(3, 2, 2)
    assert lookahead.choose(3, 99).guesses == 0
    assert Lookahead(table, ring).choose(3, 99).guesses == 0


def test_in_a_slow_ring_rows_one_by_one_are_worth_it() -> None:
    table = StepTimes(together=False)
    table.note(1, 0.31)
    lookahead = Lookahead(table)

    lookahead.note(3, lookahead.choose(3, 99).guesses, 2)
    table.note(3, 0.33)
    assert lookahead.choose(3, 99).guesses > 2


def test_bad_guesses_are_none() -> None:
    assert taught(times(r1=0.100, r2=0.105), right=0, guesses=2).choose(2, 99).guesses == 0


def test_rows_that_cost_as_much_as_steps_are_not_worth_a_guess() -> None:
    table = times(r1=0.1, r2=0.2, r3=0.3, r5=0.5, r9=0.9, r17=1.7)

    assert taught(table, right=3, guesses=4).choose(2, 99).guesses == 0


def test_fair_guesses_are_a_few() -> None:
    table = times(r1=0.100, r2=0.105, r3=0.110, r5=0.120, r9=0.140, r17=0.180)

    assert 2 <= taught(table, right=1, guesses=2).choose(2, 99).guesses <= 8


def test_what_was_given_up_is_tried_again_and_small() -> None:
    lookahead = taught(times(r1=0.100, r2=0.105), right=0, guesses=2)

    chosen = []
    for _ in range(200):
        chosen.append(lookahead.choose(2, 99).guesses)
        lookahead.note(2, chosen[-1], 0)

    assert 2 <= sum(map(bool, chosen)) <= 4
    assert max(chosen) == 2


def test_a_second_session_does_not_learn_again_that_guesses_are_bad() -> None:
    table, ring = times(r1=0.100, r2=0.105), Experience()

    first, second = (wrong(Lookahead(table, ring), 60) for _ in range(2))

    assert sum(map(bool, first)) > 5
    assert sum(second) <= 2  # one trial


def test_a_second_session_does_not_learn_again_that_guesses_are_good() -> None:
    table, ring = times(r1=0.250, r17=0.280), Experience()
    taught(table, 16, 16, ring)

    assert Lookahead(table, ring).choose(2, 99).guesses == 16


def test_a_session_is_soon_its_own_whatever_others_found() -> None:
    table, ring = times(r1=0.100, r2=0.105), Experience()
    for _ in range(10):
        taught(table, 16, 16, ring)
    lookahead = Lookahead(table, ring)

    assert sum(wrong(lookahead, 60)[20:]) == 0
    assert lookahead.choose(2, 99).guesses == 0


def test_many_short_sessions_of_bad_guesses_try_as_seldom_as_a_long_one() -> None:
    table, ring = times(r1=0.100, r2=0.105), Experience()
    wrong(Lookahead(table, ring), 60)

    chosen = [each for _ in range(20) for each in wrong(Lookahead(table, ring), 20)]

    assert 3 <= sum(map(bool, chosen)) <= 9
    assert max(chosen) == 2


def test_guesses_that_take_long_are_few_and_those_that_take_too_long_none() -> None:
    table, ring = times(r1=0.100, r17=0.110), Experience()
    lookahead = taught(table, right=15, guesses=16, ring=ring)
    chosen = []
    for price in (0.0, 0.02, 0.3):
        for _ in range(40):
            ring.pay(16, 16 * price)
        chosen.append(lookahead.choose(2, 99).guesses)

    assert chosen[0] == 16
    assert 0 < chosen[1] <= 16
    assert chosen[2] == 0


def test_looks_in_vain_raise_the_price() -> None:
    ring = Experience()
    ring.pay(4, 0.04)
    before = ring.price
    ring.pay(0, 0.01)

    assert 0 < before < ring.price


def test_after_looks_in_vain_there_is_a_rest_and_then_a_trial() -> None:
    ring = Experience()
    lookahead = taught(times(r1=0.100, r2=0.105), right=0, guesses=2, ring=ring)

    looked = []
    for _ in range(200):
        looked.append(not lookahead.is_resting)
        guesses = lookahead.choose(2, 99).guesses if looked[-1] else 0
        lookahead.note(2, guesses, 0)

    assert looked[:4] == [True] * 4
    assert sum(looked) <= 4 + 3
    assert any(looked[60:80])


def test_a_trial_that_was_right_ends_the_rest() -> None:
    lookahead = taught(times(r1=0.100, r2=0.105), right=0, guesses=2)
    wrong(lookahead, 20)
    assert lookahead.is_resting

    lookahead.note(2, 2, 2)

    assert not lookahead.is_resting


def test_a_new_session_rests_when_the_others_do() -> None:
    table, ring = times(r1=0.100, r2=0.105), Experience()
    wrong(taught(table, 0, 2, ring), 20)

    assert Lookahead(table, ring).is_resting
    assert not Lookahead(table, Experience()).is_resting


def test_a_step_is_cut_as_it_was_chosen() -> None:
    window = Window(guesses=2, depth=3)

    assert (window.rows, window.length) == (3, 8)
    assert window.cut(range(8), is_open=True) == ((0, 1), (2, 3, 4), (5, 6, 7))
    assert window.cut(range(6), is_open=False) == ((0, 1, 2), (3, 4, 5))


def test_what_fills_no_step_is_cut_into_shorter_ones() -> None:
    window = Window(guesses=16, depth=8)

    assert [len(step) for step in window.cut(range(30), is_open=True)] == [16, 12, 2]
    assert [len(step) for step in window.cut(range(16), is_open=False)] == [12, 3]
    assert window.cut([7], is_open=True) == ((7,),)
    assert window.cut([7], is_open=False) == ()
    assert window.cut([], is_open=True) == ()


def test_one_step_at_a_time_drops_what_does_not_fill_it() -> None:
    assert Window(guesses=4).cut(range(4), is_open=True) == ((0, 1, 2, 3),)
    assert Window(guesses=4).cut(range(3), is_open=True) == ((0, 1),)


def certain(table: StepTimes, right: int = 16) -> Lookahead:
    """Return who saw many steps of 16 guesses, of which the first ones were right."""
    lookahead = Lookahead(table)
    lookahead.note(2, 1, 0)  # else it would begin with few
    for _ in range(20):
        lookahead.note(2, 16, right)
    return lookahead


LONG = {"r1": 0.300, "r17": 0.320}


def test_where_nearly_all_is_right_and_trips_are_long_many_steps_are_in_flight() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.010)

    assert certain(table).choose(2, 999, depth=8) == Window(16, 8)
    assert certain(table).choose(2, 999, depth=2) == Window(16, 2)
    assert certain(table).choose(2, 999) == Window(16, 1)


@pytest.mark.parametrize("right", [0, 1, 3, 7])
def test_where_guesses_are_wrong_now_and_then_one_step_is_enough(right: int) -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.100)

    assert certain(table, right).choose(2, 999, depth=8).depth == 1


def test_where_one_rank_is_all_of_a_trip_one_step_is_enough() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.320)

    assert certain(table).choose(2, 999, depth=8).depth == 1


def test_as_many_steps_are_in_flight_as_the_slowest_rank_takes() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.080)

    assert certain(table).choose(2, 999, depth=8) == Window(16, 4)


def test_where_a_flight_slows_down_its_first_step_there_is_none() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_first(17, 3.0)

    assert certain(table).choose(2, 999, depth=8).depth == 1


def test_a_good_run_between_wrong_guesses_is_no_reason_for_many_steps() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.080)
    lookahead = certain(table, right=12)

    lookahead.note(2, 16, 16)
    few = lookahead.choose(2, 999, depth=8)
    for _ in range(20):
        lookahead.note(2, 16, 16)

    assert few == Window(16, 1)
    assert lookahead.choose(2, 999, depth=8).depth > 1


def test_what_is_known_of_flights_fades_while_there_are_none() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.320)
        table.note_first(17, 3.0)
    before = table.first(17), table.pulse(17)

    for _ in range(300):
        table.note(17, 0.320)

    assert before > (3 * table.first(17), 1.5 * table.pulse(17))
    assert certain(table).choose(2, 999, depth=8).depth > 1


def test_windows_of_caches_bound_all_guesses_in_flight() -> None:
    table = times(**LONG)
    for _ in range(20):
        table.note_next(17, 0.001)

    window = certain(table).choose(2, 31, depth=8, reach=31)

    assert window.length <= 31
    assert window.depth > 1


def test_a_new_ring_begins_with_one_step_and_doubles_its_guesses() -> None:
    table, chosen = times(**LONG), list[int]()
    for _ in range(20):
        table.note_next(17, 0.010)
    lookahead = Lookahead(table)
    for _ in range(8):
        window = lookahead.choose(3, 999, depth=8)
        chosen.append(window.guesses * window.depth)
        lookahead.note(3, window.guesses, window.guesses)

    assert chosen[0] == 4
    assert chosen[-1] == 16 * 8
    assert all(after <= 2 * before for before, after in pairwise(chosen))


def test_times_that_are_nothing_are_no_trouble() -> None:
    table = times(r1=0.0)
    table.note_first(1, 1.0)
    table.note_next(1, 1.0)

    assert (table.first(1), table.pulse(1)) == (0.0, 0.0)
    assert certain(table).choose(2, 99, depth=8)


@given(
    st.lists(
        st.tuples(
            st.integers(0, MAX_CONFIDENCE),
            st.sampled_from(GUESSES),
            st.integers(0, 16),
            st.floats(0, 1e6),
            st.floats(0, 1e6),
        ),
        max_size=30,
    ),
    st.integers(0, MAX_CONFIDENCE),
    st.integers(0, 40),
)
def test_a_choice_is_allowed_whatever_was_measured(
    steps: list[tuple[int, int, int, float, float]], confidence: int, room: int
) -> None:
    table, ring = StepTimes(), Experience()
    lookahead = Lookahead(table, ring)
    for sure, guesses, right, seconds, price in steps:
        table.note(1 + guesses, seconds)
        table.note_first(1 + guesses, 2 * seconds)
        table.note_next(1 + guesses, seconds / 3)
        ring.pay(guesses, price)
        lookahead.note(sure, guesses, min(right, guesses))

    for each in (lookahead, Lookahead(table, ring)):
        chosen = each.choose(confidence, room, depth=4, reach=31)
        assert chosen.guesses in GUESSES
        assert chosen.depth in DEPTHS[:3]
        assert chosen.guesses <= room
        assert chosen.depth == 1 or chosen.length <= 31


def test_a_stage_lets_all_that_is_in_flight_wait() -> None:
    assert 2 * MAX_DEPTH <= MAX_PENDING
