from dataclasses import replace

import pytest

from meshllm.status import ModelStatus
from tests.builders.fake_node import FakeNode


@pytest.fixture
def exact(api_server: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        known = api_server.report().model
        assert known
        return [replace(known, epoch=7, is_exact=True)]

    monkeypatch.setattr(FakeNode, "models", models)
