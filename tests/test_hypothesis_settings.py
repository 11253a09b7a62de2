"""Properties have no deadline, whatever is imported first."""

from hypothesis import settings

AT_IMPORT = settings.default


def test_examples_may_take_any_time_on_a_busy_machine() -> None:
    assert AT_IMPORT is not None
    assert AT_IMPORT.deadline is None
