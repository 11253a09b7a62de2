from dataclasses import replace

import pytest

from meshllm.model.files.source import resolve
from meshllm.model.timing import Speed
from meshllm.names import Quant, Span
from tests.bench.predicted import Case, Predicted, engine_of, order
from tests.builders.status import status_of, with_ring

SPEED = Speed(((1, 0.001), (256, 0.010)), 0.002)


def predicted(share: float, measured: float, simulated: float) -> Predicted:
    return Predicted(
        1, Quant.NONE, share, 100.0, 110.0, measured, simulated, 9 * measured, 9 * simulated
    )


def test_pairs_of_one_load_are_compared_unless_they_are_as_fast() -> None:
    rows = [
        predicted(0.2, 10.0, 11.0),
        predicted(0.2, 20.0, 19.0),
        predicted(0.2, 20.5, 1.0),
        predicted(0.8, 30.0, 1.0),
    ]

    assert order(rows) == (1, 2)


def test_errors_are_relative_to_what_was_measured() -> None:
    assert predicted(0.2, 10.0, 8.0).errors == pytest.approx((0.1, 0.2))


def test_a_ring_is_simulated_with_its_spans_and_links() -> None:
    case = Case(resolve("builtin"), 64, 16, 4, (0.5,))
    status = status_of(2)
    halves = tuple(
        replace(stage, layers=Span(at, at + 4), room_tokens=500 + at)
        for stage, at in zip(status.ring.stages, (0, 4), strict=True)
    )

    engine = engine_of(with_ring(status, stages=halves), case, Quant.NONE, SPEED)

    wires = (0.42 + 1.42) / 1e3
    assert engine.decode(1, 0).base == pytest.approx(8 * 0.001 + 0.002 + wires, rel=0.01)
    assert engine.room_tokens == 500
