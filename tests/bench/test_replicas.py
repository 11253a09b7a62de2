from tests.bench.replicas import measure


def test_a_replica_nearly_doubles_the_rate_and_keeps_the_prefix_hits() -> None:
    one, two = (measure(replicas, 36) for replicas in (1, 2))

    assert two.rate >= 1.8 * one.rate
    assert two.hits >= 0.9 * one.hits > 0.5
