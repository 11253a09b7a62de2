"""Nodes that answer requests for one another."""

import pytest

from tests.builders.request_world import World


@pytest.fixture
def world() -> World:
    return World()
