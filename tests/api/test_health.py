"""`/health` tells anybody whether a model is served, and asks the node once a second at most."""

import asyncio

import httpx2
import pytest

from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service
from meshllm.api.health import KEPT_S
from meshllm.errors import LinkLost
from meshllm.status import ModelStatus
from tests.builders.fake_node import FakeNode


async def asked(node: FakeNode, *, count: int = 1) -> list[httpx2.Response]:
    """Ask a server that needs a key, without one."""
    application = public_application(Service(node), AccessPolicy(needs_key=True))
    transport = httpx2.ASGITransport(app=application)
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        return await asyncio.gather(*(client.get("/health") for _ in range(count)))


async def test_a_server_with_a_model_is_healthy() -> None:
    (said,) = await asked(FakeNode())

    assert (said.status_code, said.json()) == (200, {"status": "ok"})


async def test_a_server_without_a_model_is_not() -> None:
    (said,) = await asked(FakeNode(served=None))

    assert (said.status_code, said.json()) == (503, {"status": "no model is served"})
    assert said.headers["retry-after"] == "2"


async def test_nor_is_one_whose_rings_have_yet_to_form() -> None:
    (said,) = await asked(FakeNode(waits_for="one more node"))

    assert said.status_code == 503


async def test_nor_is_one_that_does_not_reach_its_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        raise LinkLost("gone")

    monkeypatch.setattr(FakeNode, "models", models)

    (said,) = await asked(FakeNode())

    assert said.status_code == 503


async def test_the_node_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    count, find = 0, FakeNode.models

    async def models(node: FakeNode) -> list[ModelStatus]:
        nonlocal count
        count += 1
        await asyncio.sleep(0)
        return await find(node)

    monkeypatch.setattr(FakeNode, "models", models)
    monkeypatch.setattr("meshllm.api.health.KEPT_S", 60 * KEPT_S)  # however slow this machine is

    said = await asked(FakeNode(), count=20)

    assert [each.status_code for each in said] == [200] * 20
    assert count == 1

    monkeypatch.setattr("meshllm.api.health.KEPT_S", 0.0)
    assert len(await asked(FakeNode(), count=3)) == count - 1


async def test_a_node_that_takes_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(FakeNode, "models", models)
    monkeypatch.setattr("meshllm.api.health.PATIENCE_S", 0.0)

    said = await asked(FakeNode(), count=5)

    assert [each.status_code for each in said] == [503] * 5
