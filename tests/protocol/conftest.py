"""The gate runs these tests without the conftest of all tests, which imports torch."""

import gc

import pytest

import tests.hypothesis_settings  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def _freeze() -> None:
    """Leave what was imported out of garbage collections, which would take a tenth of the time."""
    gc.freeze()


@pytest.hookimpl(trylast=True)  # hypothesis marks its tests in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure coverage by short examples alone.

    Hypothesis and the long histories marked `no_cover` run the same lines hundreds of times, most
    of which is tracing; and what only a random example reaches is not tested.
    """
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker("no_cover")
