import pytest

from tests.builders.writer import Writer


@pytest.fixture
def writer() -> Writer:
    return Writer()
