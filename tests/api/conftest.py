from collections.abc import AsyncIterator

import httpx2
import pytest

from meshllm.api.app import owner_application
from tests.builders.fake_node import FakeNode


@pytest.fixture
def door() -> FakeNode:
    return FakeNode()


@pytest.fixture
async def client(door: FakeNode) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the application, without a server in between."""
    transport = httpx2.ASGITransport(owner_application(door), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://door") as client:
        yield client
