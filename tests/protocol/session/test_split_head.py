"""Split LM head: requested only if it saves time, and never after a mismatch."""

import pytest

from meshllm.protocol.session.split_head import (
    CREDIT,
    LONGEST_S,
    MAX_REST,
    MISS,
    PATIENCE,
    PROOFS,
    REST,
    UNASKED,
    SplitHead,
)

WHOLE_S = 0.020


def asking() -> SplitHead:
    """Return one that has measured the head and verified its answers."""
    control = SplitHead()
    for _ in range(UNASKED):
        assert not control.asks()
        control.unaided(WHOLE_S)
    for _ in range(PROOFS):
        assert control.is_proving
        control.proved()
    return control


def rest_of(control: SplitHead) -> int:
    """Count the steps until the next request, with answers that never come."""
    while control.asks():
        control.missed()
    steps = 1
    while not control.asks():
        steps += 1
    return steps + 1


def test_it_requests_once_the_head_is_measured() -> None:
    control = asking()

    assert control.asks()
    assert not control.is_proving


def test_a_mismatch_disables_it() -> None:
    control = asking()
    control.disable()

    assert not any(control.asks() for _ in range(2 * REST))


def test_it_waits_half_the_time_of_its_own_part_up_to_a_limit() -> None:
    control = SplitHead()

    assert control.patience(0.01) == 0.01 * PATIENCE
    assert control.patience(3600.0) == LONGEST_S


def test_late_answers_use_the_credit_up() -> None:
    control = asking()
    for _ in range(-(-CREDIT // MISS)):
        assert control.asks()
        control.missed()

    assert [control.asks() for _ in range(REST)] == [False] * (REST - 1) + [True]


def test_backoff_doubles_up_to_a_limit() -> None:
    control = asking()
    rests = [rest_of(control) for _ in range(12)]

    assert rests[:3] == [REST, 2 * REST, 4 * REST]
    assert max(rests) == MAX_REST


def test_useful_answers_restore_credit_and_reset_the_backoff() -> None:
    control = asking()
    rest_of(control)
    for number in range(4 * REST):
        assert control.asks()
        if number % (MISS + 1) == MISS:
            control.missed()
        else:
            control.answered(WHOLE_S / 2)

    assert rest_of(control) == REST


def test_an_answer_that_gains_nothing_costs_credit() -> None:
    control = asking()
    for _ in range(-(-CREDIT // MISS)):
        assert control.asks()
        control.answered(2 * WHOLE_S)

    assert not control.asks()


def test_a_slow_verification_costs_no_credit() -> None:
    control = SplitHead()
    for _ in range(UNASKED):
        control.unaided(WHOLE_S)
    for _ in range(CREDIT):
        control.answered(2 * WHOLE_S)

    assert control.asks()


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_few_slow_steps_do_not_change_the_head_time(slow: int) -> None:
    control = asking()
    for _ in range(slow):
        control.unaided(100 * WHOLE_S)
    for _ in range(CREDIT // MISS):
        control.answered(2 * WHOLE_S)

    assert not control.asks()
