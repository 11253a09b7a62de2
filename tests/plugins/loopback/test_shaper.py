"""Arrival times of messages over a shaped link."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import UserError
from meshllm.transport.contract import Channel
from meshllm_loopback.shaper import Shaper, TrafficShape

CONTROL, DATA = Channel

slow = st.builds(
    TrafficShape,
    delay_s=st.floats(0, 1),
    jitter_s=st.floats(0, 1),
    bytes_per_s=st.floats(1e3, 1e9) | st.just(inf),
    loss=st.floats(0, 0.9),
    seed=st.integers(),
)
traffic = st.lists(
    st.tuples(st.sampled_from(Channel), st.integers(0, 10**6), st.floats(0, 1)), max_size=30
)


def arrivals(
    shape: TrafficShape, link: str, messages: list[tuple[Channel, int, float]]
) -> list[tuple[Channel, float]]:
    shaper, now, found = Shaper(shape, link), 0.0, []
    for channel, size, pause in messages:
        now += pause
        found.append((channel, shaper.arrival(channel, size, now)))
    return found


@pytest.mark.property
@given(slow, traffic)
def test_a_channel_is_in_order_and_never_early(
    shape: TrafficShape, messages: list[tuple[Channel, int, float]]
) -> None:
    found = arrivals(shape, "a>b", messages)

    now = 0.0
    for (_, size, pause), (_, arrival) in zip(messages, found, strict=True):
        now += pause
        assert arrival >= now + size / shape.bytes_per_s + shape.delay_s
    for channel in Channel:
        times = [arrival for other, arrival in found if other is channel]
        assert times == sorted(times)


@pytest.mark.property
@given(slow, traffic)
def test_the_same_seed_gives_the_same_times(
    shape: TrafficShape, messages: list[tuple[Channel, int, float]]
) -> None:
    assert arrivals(shape, "a>b", messages) == arrivals(shape, "a>b", messages)


def test_links_and_seeds_draw_independently() -> None:
    messages = [(DATA, 100, 1.0)] * 10
    shape = TrafficShape(jitter_s=0.5)

    found = [
        arrivals(shape, "a>b", messages),
        arrivals(shape, "b>c", messages),
        arrivals(TrafficShape(jitter_s=0.5, seed=1), "a>b", messages),
    ]

    assert found[0] != found[1]
    assert found[0] != found[2]


def test_messages_on_the_other_channel_change_no_draw() -> None:
    shape = TrafficShape(jitter_s=0.5, loss=0.3)
    data = [(DATA, 0, 1.0)] * 10
    mixed = [message for each in data for message in (each, (CONTROL, 0, 0.0))]

    alone, among = arrivals(shape, "a>b", data), arrivals(shape, "a>b", mixed)

    assert alone == [(channel, time) for channel, time in among if channel is DATA]


def test_messages_are_transmitted_one_after_the_other() -> None:
    shaper = Shaper(TrafficShape(delay_s=0.25, bytes_per_s=1000), "a>b")

    assert shaper.arrival(DATA, 500, now=0.0) == 0.75
    assert shaper.arrival(DATA, 500, now=0.0) == 1.25
    assert shaper.arrival(DATA, 500, now=4.0) == 4.75


def test_control_does_not_wait_for_data_and_data_waits_for_control() -> None:
    shaper = Shaper(TrafficShape(bytes_per_s=1000), "a>b")
    shaper.arrival(DATA, 1000, now=0.0)

    assert shaper.arrival(CONTROL, 500, now=0.0) == 0.5
    assert shaper.arrival(DATA, 1000, now=0.0) == 2.5


def test_a_loss_costs_a_round_trip_and_blocks_later_messages() -> None:
    shape = TrafficShape(delay_s=0.25, loss=0.5)

    times = [time for _, time in arrivals(shape, "a>b", [(DATA, 0, 0.0)] * 20)]

    first_lost = next(index for index, time in enumerate(times) if time > 0.25)
    assert {(time - 0.25) % 0.5 for time in times} == {0.0}
    assert min(times[first_lost:]) >= 0.75


def test_loss_has_the_configured_probability() -> None:
    shaper = Shaper(TrafficShape(delay_s=0.5, loss=0.2), "a>b")

    late = sum(shaper.arrival(DATA, 0, now) > now + 0.5 for now in range(0, 100_000, 100))

    assert 150 < late < 250  # of 1000, 0.2 each: four standard deviations


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ({"delay_s": -0.1}, "delay"),
        ({"jitter_s": inf}, "delay"),
        ({"bytes_per_s": 0}, "rate"),
        ({"loss": 1.0}, "loss"),
        ({"loss": float("nan")}, "loss"),
    ],
)
def test_invalid_shapes_are_rejected(shape: dict[str, float], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        TrafficShape(**shape)  # type: ignore[arg-type]  # seed is the one int, and not given here
