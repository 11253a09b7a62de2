"""How many tokens to guess: as many as the measured times and hits pay for, and none otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from meshllm.protocol.lookahead import (
    GUESSES,
    MAX_CONFIDENCE,
    Experience,
    Lookahead,
    StepTimes,
)


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
        chosen.append(0 if lookahead.is_resting else lookahead.choose(confidence, 99))
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


def test_good_guesses_in_a_slow_ring_are_many() -> None:
    assert taught(times(r1=0.250, r17=0.280), right=15, guesses=16).choose(2, 99) == 16


def test_a_new_ring_begins_with_few_guesses_and_doubles_them() -> None:
    lookahead, chosen = Lookahead(times(r1=1.0, r17=1.0)), []
    for _ in range(4):
        chosen.append(lookahead.choose(3, 99))
        lookahead.note(3, chosen[-1], chosen[-1])

    assert chosen == [4, 8, 16, 16]


def test_where_rows_are_computed_one_by_one_a_few_guesses_are_tried_once() -> None:
    table, ring = StepTimes(together=False), Experience()
    table.note(1, 0.1)
    lookahead = Lookahead(table, ring)

    assert lookahead.choose(3, 99) == 2
    table.note(3, 0.3)
    lookahead.note(3, 2, 2)
    assert lookahead.choose(3, 99) == 0
    assert Lookahead(table, ring).choose(3, 99) == 0


def test_in_a_slow_ring_rows_one_by_one_are_worth_it() -> None:
    table = StepTimes(together=False)
    table.note(1, 0.31)
    lookahead = Lookahead(table)

    lookahead.note(3, lookahead.choose(3, 99), 2)
    table.note(3, 0.33)
    assert lookahead.choose(3, 99) > 2


def test_bad_guesses_are_none() -> None:
    assert taught(times(r1=0.100, r2=0.105), right=0, guesses=2).choose(2, 99) == 0


def test_rows_that_cost_as_much_as_steps_are_not_worth_a_guess() -> None:
    table = times(r1=0.1, r2=0.2, r3=0.3, r5=0.5, r9=0.9, r17=1.7)

    assert taught(table, right=3, guesses=4).choose(2, 99) == 0


def test_fair_guesses_are_a_few() -> None:
    table = times(r1=0.100, r2=0.105, r3=0.110, r5=0.120, r9=0.140, r17=0.180)

    assert 2 <= taught(table, right=1, guesses=2).choose(2, 99) <= 8


def test_what_was_given_up_is_tried_again_and_small() -> None:
    lookahead = taught(times(r1=0.100, r2=0.105), right=0, guesses=2)

    chosen = []
    for _ in range(200):
        chosen.append(lookahead.choose(2, 99))
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

    assert Lookahead(table, ring).choose(2, 99) == 16


def test_a_session_is_soon_its_own_whatever_others_found() -> None:
    table, ring = times(r1=0.100, r2=0.105), Experience()
    for _ in range(10):
        taught(table, 16, 16, ring)
    lookahead = Lookahead(table, ring)

    assert sum(wrong(lookahead, 60)[20:]) == 0
    assert lookahead.choose(2, 99) == 0


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
        chosen.append(lookahead.choose(2, 99))

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
        guesses = lookahead.choose(2, 99) if looked[-1] else 0
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
        ring.pay(guesses, price)
        lookahead.note(sure, guesses, min(right, guesses))

    for each in (lookahead, Lookahead(table, ring)):
        chosen = each.choose(confidence, room)
        assert chosen in GUESSES
        assert chosen <= room
