"""The datagram size follows the path MTU."""

from meshllm_quic.path.path_mtu import CONFIRMATIONS, GROWTH_ROUNDS, PAUSE, ROUND, TRIES, PathMtu
from meshllm_quic.wire.packets import MAX_INNER_BYTES


def run(sizing: PathMtu, until: float, carries: int) -> list[tuple[float, int]]:
    """Reply to probes up to ``carries`` bytes; return the time and size of each probe."""
    probed = []
    while sizing.deadline < until:
        now = sizing.deadline
        for length in sizing.expire(now, 0.01):
            probed.append((now, length))
            if length <= carries:
                sizing.proved(length)
    return probed


def test_the_size_grows_to_the_path_mtu() -> None:
    for carries, size in ((1200, 1200), (1452, 1452), (65507, 16000)):
        sizing = PathMtu((1452, 16000), 5.0)

        run(sizing, 8.0, carries)

        assert sizing.size == size


def test_a_size_is_probed_twice_and_again_in_a_minute() -> None:
    probed = run(PathMtu((1452,), 0.0), 2 * ROUND * GROWTH_ROUNDS, 1200)

    minute = ROUND * GROWTH_ROUNDS
    assert [at for at, _ in probed] == [0.0, PAUSE, minute, minute + PAUSE]
    assert len(probed) == 2 * TRIES


def test_the_current_size_is_confirmed_in_each_round() -> None:
    probed = run(PathMtu((1452,), 0.0), 60.0, 1452)

    assert [at for at, _ in probed] == [ROUND * number for number in range(12)]


def test_a_black_hole_is_detected_within_a_round() -> None:
    sizing = PathMtu((1452,), 0.0)
    run(sizing, 12.0, 1452)

    probed = run(sizing, 12.0 + ROUND, 1200)

    assert [length for _, length in probed] == [1452] * CONFIRMATIONS
    assert sizing.size == MAX_INNER_BYTES


def test_a_lost_confirmation_is_tried_again() -> None:
    sizing = PathMtu((1452,), 0.0)
    run(sizing, 4.0, 1452)

    assert sizing.expire(5.0, 0.01) == [1452]
    run(sizing, 9.0, 1452)

    assert sizing.size == 1452


def test_the_probe_interval_covers_two_round_trips() -> None:
    sizing = PathMtu((1452,), 0.0)

    sizing.expire(0.0, 0.6)

    assert sizing.deadline == 1.2
    assert sizing.expire(1.1, 0.6) == []


def test_without_a_round_trip_probes_are_repeated_soon() -> None:
    sizing = PathMtu((1452,), 0.0)

    sizing.expire(0.0, None)

    assert sizing.deadline == PAUSE


def test_a_process_that_was_suspended_before_the_first_probes_sends_them() -> None:
    sizing = PathMtu((1452, 16000), 0.0)

    assert sizing.expire(2 * ROUND, 0.01) == [1452, 16000]


def test_a_suspended_process_does_not_report_a_black_hole() -> None:
    sizing = PathMtu((1452,), 0.0)
    run(sizing, 4.0, 1452)
    sizing.expire(5.0, 0.01)

    assert sizing.expire(5000.0, 0.01) == [1452]
    assert sizing.size == 1452
