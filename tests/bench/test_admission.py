"""Answers that get memory as they grow, against those that reserve all of it."""

import pytest

from tests.bench.admission import PLACES, main, measure


def test_more_answers_run_at_once_where_they_grow() -> None:
    whole = measure("whole", 60, 32_768, 5.0, grows=False)
    grown = measure("grown", 60, 32_768, 5.0, grows=True)

    assert whole.together <= 3.0 < grown.together <= PLACES
    assert grown.steps < whole.steps
    assert (whole.paused, grown.late <= whole.late) == (0, True)


def test_the_command_prints_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "40", "--every", "20"]) == 0

    _, whole, grown = capsys.readouterr().out.splitlines()
    assert whole.startswith("all at first")
    assert grown.startswith("as they grow")
