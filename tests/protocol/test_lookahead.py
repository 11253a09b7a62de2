"""How many tokens to guess: as many as the measured times and hits pay for, and none otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from meshllm.protocol.lookahead import GUESSES, MAX_CONFIDENCE, Lookahead, StepTimes


def times(**seconds: float) -> StepTimes:
    """Note the seconds of steps, as ``r1=0.1, r9=0.2``."""
    table = StepTimes()
    for rows, second in seconds.items():
        table.note(int(rows[1:]), second)
    return table


def taught(table: StepTimes, right: int, guesses: int) -> Lookahead:
    lookahead = Lookahead(table)
    for _ in range(20):
        lookahead.note(2, guesses, right, None)
    return lookahead


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


def test_a_new_session_begins_with_few_guesses_and_doubles_them() -> None:
    lookahead, chosen = Lookahead(times(r1=1.0, r17=1.0)), []
    for _ in range(4):
        chosen.append(lookahead.choose(3, 99))
        lookahead.note(3, chosen[-1], chosen[-1], None)

    assert chosen == [4, 8, 16, 16]


def test_where_rows_are_computed_one_by_one_a_few_guesses_are_tried_once() -> None:
    table = StepTimes(together=False)
    table.note(1, 0.1)
    lookahead = Lookahead(table)

    assert lookahead.choose(3, 99) == 2
    lookahead.note(3, 2, 2, 0.3)
    assert lookahead.choose(3, 99) == 0
    assert Lookahead(table).choose(3, 99) == 0


def test_in_a_slow_ring_rows_one_by_one_are_worth_it() -> None:
    table = StepTimes(together=False)
    table.note(1, 0.31)
    lookahead = Lookahead(table)

    lookahead.note(3, lookahead.choose(3, 99), 2, 0.33)
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
        lookahead.note(2, chosen[-1], 0, None)

    assert 2 <= sum(map(bool, chosen)) <= 4
    assert max(chosen) == 2


@given(
    st.lists(
        st.tuples(
            st.integers(0, MAX_CONFIDENCE),
            st.sampled_from(GUESSES),
            st.integers(0, 16),
            st.floats(0, 1e6),
        ),
        max_size=30,
    ),
    st.integers(0, MAX_CONFIDENCE),
    st.integers(0, 40),
)
def test_a_choice_is_allowed_whatever_was_measured(
    steps: list[tuple[int, int, int, float]], confidence: int, room: int
) -> None:
    lookahead = Lookahead(StepTimes())
    for sure, guesses, right, seconds in steps:
        lookahead.note(sure, guesses, min(right, guesses), seconds)

    chosen = lookahead.choose(confidence, room)

    assert chosen in GUESSES
    assert chosen <= room
