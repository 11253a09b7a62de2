"""The benchmark of pauses: which times between tokens it counts."""

from typing import Any, cast

import pytest

from tests.bench.further import Client


def test_the_longest_times_are_of_tokens_that_came_within_a_period() -> None:
    client = Client(cast("Any", None), [1.0, 1.5, 3.5, 3.6, 9.0])

    assert client.longest_ms(1.0, 4.0) == [2000.0]
    assert client.longest_ms(1.5, 9.0, 2) == [pytest.approx(5400.0), 2000.0]
    assert client.longest_ms(3.5, 4.0, 3) == [pytest.approx(100.0)]
