from argparse import Namespace

from tests.bench.trace_replay import POINTS, measure


def test_a_replayed_trace_of_chats_has_the_hit_rate_of_the_recorded_one() -> None:
    found = measure(Namespace(requests=16, nodes=2, rtt=20.0, speed=1.0))

    assert (found.requests, found.compared, found.errors) == (16, 16, {})
    assert found.trace.hit_rate > 0.4
    assert abs(found.trace.hit_rate - found.replay.hit_rate) < POINTS
    assert (found.trace.prompt_tokens, found.trace.new_tokens) == (
        found.replay.prompt_tokens,
        found.replay.new_tokens,
    )
