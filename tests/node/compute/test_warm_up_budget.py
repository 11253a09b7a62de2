"""Warm-ups of a node take a second of one core per minute, and what they have saved up."""

import pytest

from meshllm.node.compute.warm_up_budget import CORE_S_PER_S, SAVED_S, WarmUpBudget


def spent(cores: int, now: float) -> WarmUpBudget:
    """Return one of which all is used."""
    budget = WarmUpBudget(cores)
    budget.spend(SAVED_S * cores, now)
    return budget


def steps_at_once(budget: WarmUpBudget, now: float, core_s: float) -> int:
    """Count the steps that need not wait."""
    count = 0
    while budget.wait_s(now) == 0:
        budget.spend(core_s, now)
        count += 1
    return count


@pytest.mark.parametrize("cores", [1, 16])
def test_the_first_steps_follow_one_another_for_a_minute_of_all_cores(cores: int) -> None:
    budget = WarmUpBudget(cores)

    assert steps_at_once(budget, 100.0, 0.5 * cores) == 2 * SAVED_S + 1


def test_later_steps_take_a_core_second_per_minute() -> None:
    now = begin = 100.0
    budget, used = spent(2, now), 0.0

    for core_s in (0.5, 2.0, 0.1, 1.0) * 5:
        now += budget.wait_s(now)
        budget.spend(core_s, now)
        used += core_s

    assert used - core_s == pytest.approx((now - begin) * CORE_S_PER_S)
    assert CORE_S_PER_S == 1 / 60


def test_steps_of_two_rings_at_once_are_added_up() -> None:
    budget = spent(2, 70.0)

    for _ in range(2):  # both waited for the same moment
        budget.spend(1.0, 70.0)

    assert budget.wait_s(70.0) == pytest.approx(120.0)


def test_time_without_steps_is_saved_up() -> None:
    night = 8 * 3600.0
    for cores, hours in ((16, 8), (2, 2)):  # 2 cores have all of their minute after two
        budget = spent(cores, 0.0)

        assert steps_at_once(budget, night, cores) == hours * 3600 * CORE_S_PER_S / cores + 1
