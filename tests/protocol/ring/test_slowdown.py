"""When the steps of a rank count as slower than planned."""

import pytest

from meshllm.names import NodeId
from meshllm.protocol.planning.chunking import RankTimes
from meshllm.protocol.planning.plan import LinkSpeed, Offer
from meshllm.protocol.ring.hang import FIRST_STEPS
from meshllm.protocol.ring.slowdown import (
    MAX_ATTENTION,
    MIN_S,
    RECENT_S,
    WINDOW_S,
    WINDOW_STEPS,
    WINDOWS,
    Slowdown,
)

LAYERS, LAYER_S, HEAD_S = 4.0, 0.125, 0.5
RANK = RankTimes(
    Offer(NodeId(b"a"), 0, ((1, LAYER_S), (128, 16 * LAYER_S), (256, 40 * LAYER_S)), 0.0),
    LAYERS,
    LinkSpeed(0.0),
)


def known(rank: RankTimes = RANK, head_s: float = 0.0) -> Slowdown:
    """Return the comparison of a rank whose first steps have run."""
    slowdown = Slowdown()
    slowdown.plan(rank, head_s)
    run(slowdown, 1.0, steps=FIRST_STEPS)
    return slowdown


def run(
    slowdown: Slowdown,
    *ratios: float,
    steps: int = WINDOW_STEPS,
    step_s: float = LAYERS * LAYER_S,
    before: int = 0,
    now: float = 0.0,
) -> None:
    """Run a window of steps for each ratio of the time taken to the planned one."""
    for ratio in ratios:
        for _ in range(steps):
            slowdown.note(1, before, ratio * step_s, now)


@pytest.mark.parametrize(
    ("ratios", "taken"),
    [
        ((4.0, 2.0, 8.0), 2.0),
        ((0.5, 0.75, 0.625), 0.75),
        ((1.5, 1.25, 1.75), 1.25),
        ((4.0, 4.0, 0.5), 1.0),
        ((8.0, 2.0, 2.0, 2.0), 2.0),  # the latest count
        ((0.3125,) * 3, 0.3125),  # which makes a window of `WINDOW_STEPS` as long as `WINDOW_S`
    ],
)
def test_what_windows_in_a_row_agree_on_counts(ratios: tuple[float, ...], taken: float) -> None:
    slowdown = known()

    run(slowdown, *ratios)

    assert slowdown.take_layer_s() == pytest.approx(taken * LAYER_S)
    assert slowdown.take_layer_s() is None


def test_the_head_is_planned_too_if_the_steps_have_it() -> None:
    slowdown = known(head_s=HEAD_S)

    run(slowdown, *[2.0] * WINDOWS, step_s=LAYERS * LAYER_S + HEAD_S)

    assert slowdown.take_layer_s() == pytest.approx(2 * LAYER_S)


def test_before_that_nothing_is_known() -> None:
    slowdown = known()
    run(slowdown, *[4.0] * (WINDOWS - 1))
    assert slowdown.take_layer_s() is None

    nowhere = Slowdown()
    run(nowhere, *[4.0] * (WINDOWS + 1))
    assert nowhere.take_layer_s() is None


def test_a_window_is_as_long_as_many_short_steps() -> None:
    fast = RankTimes(Offer(NodeId(b"a"), 0, ((1, MIN_S),), 0.0), 1.0, LinkSpeed(0.0))
    slowdown = known(fast)

    run(slowdown, *[2.0] * WINDOWS, step_s=MIN_S)
    assert slowdown.take_layer_s() is None

    run(slowdown, 2.0, steps=round(WINDOWS * WINDOW_S / MIN_S), step_s=MIN_S)
    assert slowdown.take_layer_s() == pytest.approx(2 * MIN_S)


@pytest.mark.parametrize(("share", "counts"), [(0.9, True), (1.1, False)])
def test_steps_count_if_little_of_them_is_attention(share: float, *, counts: bool) -> None:
    layers_s = RANK.compute_s(1)
    one_s = RANK.compute_s(1, 1000) - layers_s
    before = round(1000 * share * MAX_ATTENTION * layers_s / one_s)
    slowdown = known()

    run(slowdown, *[4.0] * WINDOWS, before=before)

    assert (slowdown.take_layer_s() is not None) is counts


def test_steps_that_cannot_tell_do_not_count() -> None:
    slowdown = known()
    run(slowdown, *[4.0] * WINDOWS, before=10**6)  # nearly all of it is attention
    for _ in range(FIRST_STEPS):  # as many rows were not seen before
        slowdown.note(7, 0, WINDOW_STEPS * WINDOW_S, 0.0)
    assert slowdown.take_layer_s() is None

    tiny = known(RankTimes(Offer(NodeId(b"a"), 0, ((1, MIN_S / 2),), 0.0), 1.0, LinkSpeed(0.0)))
    run(tiny, *[4.0] * WINDOWS, step_s=WINDOW_S)
    assert tiny.take_layer_s() is None


def test_old_windows_do_not_count() -> None:
    slowdown = known()
    run(slowdown, 4.0, 4.0)

    run(slowdown, 4.0, now=RECENT_S + 1)
    assert slowdown.take_layer_s() is None

    run(slowdown, 4.0, 4.0, now=RECENT_S + 2)
    assert slowdown.take_layer_s() is not None


def test_windows_count_for_a_while() -> None:
    slowdown = known()
    run(slowdown, 4.0, 4.0)

    run(slowdown, 4.0, now=RECENT_S)

    assert slowdown.take_layer_s() is not None


def test_a_new_plan_resets_the_count() -> None:
    slowdown = known()
    run(slowdown, 4.0, 4.0)

    slowdown.plan(RANK)
    run(slowdown, 1.0, steps=FIRST_STEPS)
    run(slowdown, 4.0)

    assert slowdown.take_layer_s() is None
