import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from meshllm.api import connection, respond
from meshllm.api.access.accounts import Accounts
from meshllm.api.app import owner_application
from meshllm.api.generation.service import Service
from meshllm.node import event_loop
from tests.builders.fake_node import FakeNode

LONGER = 100  # times as long as a deadline is: longer than a test takes on a busy machine


@pytest.fixture
def api_server() -> FakeNode:
    return FakeNode()


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    with Accounts.open(tmp_path / "state") as accounts:
        yield accounts


@pytest.fixture
def service(api_server: FakeNode, accounts: Accounts) -> Service:
    return Service(api_server, accounts)


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the clock of the event loop by seconds: the timers until then fire, in order.

    Deadlines of clients are so long that none passes by itself.
    """
    for module in (connection, event_loop):
        monkeypatch.setattr(module, "LATE_S", LONGER * 8.0)
    for module, name in ((connection, "HEADERS_S"), (connection, "STALL_S"), (respond, "BODY_S")):
        monkeypatch.setattr(module, name, getattr(module, name) * LONGER)
    loop = asyncio.get_running_loop()
    real, seconds = loop.time, list[float]()
    monkeypatch.setattr(loop, "time", lambda: real() + sum(seconds))
    return seconds.append


@pytest.fixture
async def client(api_server: FakeNode) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of the application, without a server in between."""
    transport = httpx2.ASGITransport(owner_application(api_server), raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client
