import pytest

from meshllm.protocol.planning.plan import LinkSpeed
from meshllm.scheduler.simulator import Arrival, SimulatedReplica, simulate
from tests.builders.replicas import STEP_S, arrivals, engine

CHUNK_S = STEP_S * (1 + 63 / 100)


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    found = simulate([SimulatedReplica(0, engine())], arrivals([(5.0, 128, 11)]))

    assert found.first_s == pytest.approx([5 + 2 * CHUNK_S])
    assert found.done_s == pytest.approx([5 + 2 * CHUNK_S + 10 * STEP_S])


def test_an_answer_of_one_token_is_done_with_its_first() -> None:
    found = simulate([SimulatedReplica(0, engine())], arrivals([(0.0, 64, 1)]))

    assert found.first_s == found.done_s == pytest.approx([CHUNK_S])
    assert found.latencies(0).token_s == (0.0, 0.0, 0.0)


def test_the_first_token_of_a_ring_comes_after_the_whole_trip() -> None:
    ring = engine(4, LinkSpeed(0.020))

    found = simulate([SimulatedReplica(0, ring)], arrivals([(0.0, 256, 1)]))

    assert found.first_s == pytest.approx([4 * CHUNK_S / 4 + CHUNK_S * 3 / 4 + 4 * 0.020])


def test_a_second_request_slows_the_first_while_it_is_prefilled() -> None:
    found = simulate([SimulatedReplica(0, engine())], arrivals([(0.0, 64, 101), (0.1, 64, 101)]))

    alone_s = CHUNK_S + 100 * STEP_S
    assert found.done_s[0] == pytest.approx(alone_s + CHUNK_S + 0.01 * 0.9, rel=0.01)


def test_prompts_are_prefilled_in_order() -> None:
    found = simulate([SimulatedReplica(0, engine())], arrivals([(0.0, 640, 2), (0.0, 64, 2)]))

    assert found.first_s[0] < found.first_s[1]


def test_requests_wait_for_room_in_the_caches() -> None:
    roomy = simulate([SimulatedReplica(0, engine())], arrivals([(0.0, 64, 36)] * 2))
    tight = simulate([SimulatedReplica(0, engine(room=150))], arrivals([(0.0, 64, 36)] * 2))

    assert tight.first_s[1] > tight.done_s[0] > roomy.first_s[1]


def test_requests_wait_for_a_place_among_the_sessions() -> None:
    found = simulate([SimulatedReplica(0, engine(most=2))], arrivals([(0.0, 64, 50)] * 3))

    assert found.first_s[2] > min(found.done_s)


def test_a_request_that_fits_nowhere_is_refused_and_stops_no_other() -> None:
    asked = [Arrival(0.0, 0, 500, 501), Arrival(0.0, 7, 5, 5), Arrival(0.0, 0, 64, 2)]

    found = simulate([SimulatedReplica(0, engine(room=1000))], asked)

    assert found.replicas == [None, None, 0]
    assert found.latencies(0).refused == 1
    assert found.latencies(7).served == 0
    assert found.mean_s == float("inf")


def test_requests_go_to_the_replica_with_the_fewest_for_its_speed() -> None:
    pair = [SimulatedReplica(0, engine(), weight=2.0), SimulatedReplica(0, engine(), weight=1.0)]

    found = simulate(pair, arrivals([(0.0, 64, 100)] * 6))

    assert found.replicas == [0, 0, 1, 0, 0, 1]


def test_percentiles_are_those_of_requests() -> None:
    found = simulate(
        [SimulatedReplica(0, engine())], arrivals([(100.0, 64, 11)] * 99 + [(100.0, 640, 11)])
    )

    mean, median, late = found.latencies(0).ttft_s
    assert (median, late) == pytest.approx((CHUNK_S, CHUNK_S))
    assert mean == pytest.approx(CHUNK_S * 1.09)
    assert found.latencies(0).tokens == 1100
    assert found.tokens_per_s == pytest.approx(1100 / found.end_s)


def test_percentiles_are_times_of_single_requests() -> None:
    asked = arrivals([(100.0, 64 * chunks, 1) for chunks in range(21, 0, -1)])

    found = simulate([SimulatedReplica(0, engine())], asked).latencies(0)

    assert found.ttft_s == pytest.approx((11 * CHUNK_S, 11 * CHUNK_S, 20 * CHUNK_S))
    assert found.total_s == pytest.approx(found.ttft_s)
    assert (found.served, found.refused) == (21, 0)


def test_the_time_of_a_token_is_that_of_all_but_the_first() -> None:
    found = simulate([SimulatedReplica(0, engine())], arrivals([(0.0, 64, 11)])).latencies(0)

    assert found.token_s == pytest.approx((STEP_S,) * 3)
    assert found.total_s == pytest.approx((CHUNK_S + 10 * STEP_S,) * 3)


def test_the_requests_in_a_replica_are_those_that_it_serves_and_so_are_its_tokens() -> None:
    replicas = [
        SimulatedReplica(0, engine(3, LinkSpeed(0.020), cached_s=1e-6), weight=2.0),
        SimulatedReplica(0, engine(room=700, most=2)),
        SimulatedReplica(1, engine()),
    ]
    busy = arrivals([(0.05, 100 + at, 1 + at % 70) for at in range(100)])
    rare = arrivals([(0.9, 300, 40)] * 5, model=1)
    asked = sorted([*busy, *rare])

    found = simulate(replicas, asked)

    assert None not in found.replicas
    for number in range(3):
        own = [at for at, replica in enumerate(found.replicas) if replica == number]
        assert own
        stayed_s = sum(found.done_s[at] - asked[at].at_s for at in own)
        assert found.presence_s[number] == pytest.approx(stayed_s)
        assert found.tokens[number] == pytest.approx(sum(asked[at].answer for at in own))
    assert found.end_s == max(found.done_s)


def test_cached_tokens_of_a_prompt_need_no_prefill() -> None:
    def first_s(prompt: int, cached: int) -> float:
        replica = SimulatedReplica(0, engine())
        return simulate([replica], [Arrival(0.0, 0, prompt, 2, cached)]).first_s[0]

    assert first_s(1000, cached=900) == first_s(100, cached=0) < first_s(1000, cached=0)


def test_later_ranks_compute_the_last_chunk_of_a_prompt_beside_steps() -> None:
    def done_s(*more: tuple[float, int, int]) -> float:
        ring = SimulatedReplica(0, engine(4))
        return simulate([ring], arrivals([(0.0, 64, 101), *more])).done_s[0]

    slowed_s = done_s((0.5, 64, 1)) - done_s()

    assert slowed_s > 1.5 * CHUNK_S / 4  # which is the first rank's part
