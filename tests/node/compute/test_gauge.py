from meshllm.node.compute.gauge import GenerationTimer, GenerationTimes, Hop
from meshllm.protocol.session.messages import JobTimes, RankStats


def tally(compute_us: int, steps: int, sent: int, round_trip_us: int = 0) -> RankStats:
    return RankStats(JobTimes(compute_us, 0, 0), steps, sent, round_trip_us)


def decoded(
    gauge: GenerationTimer, steps: int, *, trip_s: float, compute_s: float, now: float
) -> None:
    for end in range(10, 10 + steps):
        gauge.computed(JobTimes(round(compute_s * 1e6), 200, 100))
        gauge.left(now, end, 300)
        now += trip_s
        gauge.returned(now, end)
        gauge.tokens(now, 1)


def test_nothing_happened() -> None:
    assert GenerationTimer(5.0).measured((), 0) == GenerationTimes(
        0.0, 0.0, 0.0, 0, (Hop(0.0, 0.0, 0.0, 0.0, 0.0),)
    )


def test_the_first_token_is_measured_from_the_request() -> None:
    gauge = GenerationTimer(10.0)
    gauge.tokens(10.5, 1)

    measured = gauge.measured((), 0)

    assert (measured.ttft_s, measured.token_s) == (0.5, 0.0)


def test_later_tokens_have_a_mean() -> None:
    gauge = GenerationTimer(0.0)
    for now in (1.0, 1.2, 1.8):
        gauge.tokens(now, 1)

    assert abs(gauge.measured((), 0).token_s - 0.4) < 1e-9


def test_a_step_may_give_several_tokens() -> None:
    gauge = GenerationTimer(0.0)
    for now, count in ((1.0, 1), (2.0, 3), (3.0, 2)):
        gauge.tokens(now, count)

    measured = gauge.measured((), 0)

    assert (measured.token_s, measured.tokens_per_step) == (0.4, 2.5)


def test_wire_time_is_the_round_trip_without_computing() -> None:
    gauge = GenerationTimer(0.0)
    gauge.tokens(1.0, 1)
    decoded(gauge, 4, trip_s=0.100, compute_s=0.010, now=1.0)

    measured = gauge.measured((tally(160_000, 4, 1200),), 0)

    assert [round(hop.compute_s, 6) for hop in measured.hops] == [0.010, 0.040]
    assert [round(hop.wire_s, 6) for hop in measured.hops] == [0.030, 0.030]
    assert [hop.bytes_sent for hop in measured.hops] == [300, 300]


def test_serialising_and_queueing_are_not_wire_time() -> None:
    gauge = GenerationTimer(0.0)
    gauge.tokens(1.0, 1)
    decoded(gauge, 4, trip_s=0.100, compute_s=0.010, now=1.0)

    measured = gauge.measured((RankStats(JobTimes(160_000, 40_000, 80_000), 4, 1200, 0),), 0)

    assert [round(hop.serialise_s, 6) for hop in measured.hops] == [0.0002, 0.010]
    assert [round(hop.queue_s, 6) for hop in measured.hops] == [0.0001, 0.020]
    assert [round(hop.wire_s, 6) for hop in measured.hops] == [0.015, 0.015]


def test_wire_time_is_divided_by_measured_round_trips() -> None:
    gauge = GenerationTimer(0.0)
    gauge.tokens(1.0, 1)
    decoded(gauge, 2, trip_s=0.090, compute_s=0.0, now=1.0)

    measured = gauge.measured((tally(0, 2, 600, round_trip_us=2000),), 1000)

    assert [round(hop.wire_s, 6) for hop in measured.hops] == [0.030, 0.060]


def test_prefill_rows_are_not_timed() -> None:
    gauge = GenerationTimer(0.0)
    gauge.returned(3.0, 9)
    gauge.tokens(3.0, 1)
    decoded(gauge, 1, trip_s=0.020, compute_s=0.0, now=3.0)

    measured = gauge.measured((tally(0, 1, 300),), 0)

    assert round(sum(hop.wire_s for hop in measured.hops), 6) == 0.020


def test_wire_time_is_never_negative() -> None:
    gauge = GenerationTimer(0.0)
    gauge.tokens(1.0, 1)
    decoded(gauge, 1, trip_s=0.001, compute_s=0.0, now=1.0)

    assert [hop.wire_s for hop in gauge.measured((tally(9000, 1, 300),), 0).hops] == [0.0, 0.0]


def test_only_a_step_into_an_empty_ring_is_timed() -> None:
    gauge = GenerationTimer(0.0)
    gauge.tokens(1.0, 1)
    for now, end in ((1.0, 20), (1.1, 37), (1.2, 54)):
        gauge.left(now, end, 300)
    for now, end in ((1.5, 20), (9.0, 37)):
        gauge.returned(now, end)
        gauge.tokens(now, 17)
    gauge.left(9.0, 40, 300)  # a draft before 37 was rejected: 54 never comes back
    gauge.returned(9.7, 40)
    gauge.tokens(9.7, 3)

    measured = gauge.measured((tally(0, 3, 300),), 0)

    assert round(sum(hop.wire_s for hop in measured.hops), 6) == 0.6  # of 0.5 and 0.7
    assert measured.tokens_per_step == 37 / 3
    assert measured.hops[0].bytes_sent == 400
