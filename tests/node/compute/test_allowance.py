"""Warm-ups of a node take a second of one core per minute, after the first minute of all."""

import pytest

from meshllm.node.compute.allowance import CORE_S_PER_S, FREE_S, Allowance


def test_steps_of_the_first_minute_follow_one_another() -> None:
    allowance = Allowance()

    for now in (100.0, 100.0 + FREE_S / 2, 99.9 + FREE_S):
        assert allowance.wait_s(now) == 0
        allowance.spend(5.0, now)


def test_later_steps_take_a_core_second_per_minute() -> None:
    allowance, now, spent = Allowance(), 100.0, 0.0
    allowance.wait_s(now)
    now = begin = now + FREE_S

    for core_s in (0.5, 2.0, 0.1, 1.0) * 5:
        now += allowance.wait_s(now)
        allowance.spend(core_s, now)
        spent += core_s

    assert spent - core_s == pytest.approx((now - begin) * CORE_S_PER_S)
    assert CORE_S_PER_S == 1 / 60


def test_steps_of_two_rings_at_once_are_added_up() -> None:
    allowance = Allowance()
    allowance.wait_s(0.0)

    for _ in range(2):  # both waited for the same moment
        allowance.spend(1.0, 70.0)

    assert allowance.wait_s(70.0) == pytest.approx(120.0)


def test_time_without_steps_is_not_saved_up() -> None:
    allowance = Allowance()
    allowance.wait_s(0.0)

    allowance.spend(1.0, 5000.0)

    assert allowance.wait_s(5000.0) == pytest.approx(60.0)
