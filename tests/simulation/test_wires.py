"""Simulated wires: rate, queue, loss, jitter and duplicates."""

from collections.abc import Sequence
from random import Random

import pytest

from tests.simulation.wires import Dropped, Line, Wire


def arrivals(line: Line, sizes: Sequence[int], pause_s: float = 0.0) -> list[float | str]:
    """Send packets through a wire; return when the first copy of each comes, or why it does not."""
    wire, found = Wire(Random(1)), list[float | str]()
    for number, size in enumerate(sizes):
        try:
            found.append(wire.arrivals(line, size, now=number * pause_s)[0])
        except Dropped as drop:
            found.append(str(drop))
    return found


def test_packets_leave_one_after_the_other_and_the_queue_ends() -> None:
    line = Line(delay_s=1, bytes_per_s=1000, queue_bytes=1500)

    assert arrivals(line, [500] * 4) == [1.5, 2.0, 2.5, "queue full"]
    assert arrivals(line, [500] * 4, pause_s=0.5) == [1.5, 2.0, 2.5, 3.0]


def test_a_queue_of_size_zero_passes_a_packet_that_need_not_wait() -> None:
    assert arrivals(Line(bytes_per_s=1000, queue_bytes=0), [500, 500]) == [0.5, "queue full"]


def test_packets_are_lost_as_often_as_asked() -> None:
    lost = arrivals(Line(loss=0.2), [100] * 1000).count("lost")

    assert 150 < lost < 250  # of 1000, 0.2 each: four standard deviations


def test_lost_packets_still_use_bandwidth() -> None:
    times = arrivals(Line(bytes_per_s=1000, loss=0.5), [10] * 100)

    assert [time for time in times if time != "lost"] == [
        pytest.approx(0.01 * (at + 1)) for at, time in enumerate(times) if time != "lost"
    ]


def test_jitter_reorders_packets_and_none_is_early() -> None:
    times = arrivals(Line(delay_s=1, jitter_s=0.5), [100] * 100, pause_s=0.01)

    assert times != sorted(times, key=float)
    assert all(0 <= float(time) - 0.01 * at - 1 < 0.5 for at, time in enumerate(times))


def test_duplicates_come_as_often_as_asked() -> None:
    wire = Wire(Random(1))

    copies = [len(wire.arrivals(Line(duplicate=0.2), 100, now=0)) for _ in range(1000)]

    assert set(copies) == {1, 2}
    assert 150 < copies.count(2) < 250
