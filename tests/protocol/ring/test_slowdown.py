"""When steps count as slower than planned."""

import pytest

from meshllm.protocol.ring.slowdown import WINDOW_S, WINDOW_STEPS, WINDOWS, Slowdown


def run(slowdown: Slowdown, *ratios: float, step_s: float = WINDOW_S / WINDOW_STEPS) -> None:
    """Run a window of steps for each ratio of the time taken to the planned one."""
    for ratio in ratios:
        for _ in range(WINDOW_STEPS):
            slowdown.note(step_s / ratio, step_s)


@pytest.mark.parametrize(
    ("ratios", "taken"),
    [
        ((4.0, 2.0, 8.0), 2.0),
        ((0.25, 0.5, 0.125), 0.5),
        ((4.0, 4.0, 0.5), 1.0),
        ((8.0, 2.0, 2.0, 2.0), 2.0),  # the latest count
    ],
)
def test_what_windows_in_a_row_agree_on_counts(ratios: tuple[float, ...], taken: float) -> None:
    slowdown = Slowdown()

    run(slowdown, *ratios)

    assert slowdown.take() == pytest.approx(taken)
    assert slowdown.take() is None


def test_before_that_nothing_is_known() -> None:
    slowdown = Slowdown()

    run(slowdown, *[4.0] * (WINDOWS - 1))

    assert slowdown.take() is None


def test_a_window_is_as_long_as_many_short_steps() -> None:
    slowdown = Slowdown()

    run(slowdown, *[4.0] * WINDOWS, step_s=WINDOW_S / WINDOW_STEPS / 2)

    assert slowdown.take() is None
