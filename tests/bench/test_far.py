import pytest

from tests.bench.far import LINE, Row, changing, echo_ms, missed, reason, table
from tests.processes.namespaces import Space, new_spaces, open_spaces
from tests.simulation.wires import Line

LINE_MS = 2e3 * LINE.delay_s


def test_overhead_excludes_the_round_trip_of_the_line() -> None:
    row = Row.of("quic", [LINE_MS + added for added in (1.0, 2.0, 2.0, 9.0)])

    assert row.round_trip_ms == 41.0
    assert (row.p50_ms, row.most_ms) == pytest.approx((2.0, 9.0))
    assert 2.0 < row.p90_ms < 10.0


def test_transports_above_the_target_are_listed() -> None:
    rows = [Row.of(name, [LINE_MS + added] * 2) for name, added in (("tcp", 1.5), ("quic", 5.5))]

    assert missed(rows) == ["quic over 41 ms: 5.50 ms more, 5 at most"]


def test_every_transport_has_a_line() -> None:
    lines = table([Row.of("tcp", [LINE_MS + 1] * 2)]).splitlines()

    assert lines[0] == "4 KiB there and back over 41 ms: added latency"
    assert lines[-1].split() == ["tcp", "1.00", "1.00", "1.00"]


def test_a_line_has_its_latest_shape() -> None:
    if why := reason():
        pytest.skip(why)
    spaces = new_spaces(2)

    with open_spaces(*spaces), changing(spaces) as change:
        for delay_s in (0.03, 0.01):
            change(Line(delay_s=delay_s))

            assert echo_ms(*spaces, size=1000) >= 2e3 * delay_s


def test_a_line_that_cannot_start_is_an_error() -> None:
    with pytest.raises(EOFError), changing([Space("mesh-test-nowhere", "10.9.0.1")]):
        pytest.fail("it began")
