"""A fake client of a running node."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.errors import MeshError
from meshllm.node.options import ModelOptions
from meshllm.request import Event, Request
from meshllm.status import Change, Members, MeshStatus, ModelStatus, Removed, RingState
from tests.builders.status import member, node_id, status_of


class FakeClient:
    """Replaces `meshllm.cli.shared.client.NodeClient`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.statuses: list[MeshStatus | MeshError] = [status_of(3)]
        """Reports to return, in order; the last one repeats."""
        self.there = [member(0), member(1)]
        self.removed = Removed(node_id(1), "desk", ())
        self.posted: list[tuple[object, ...]] = []
        self.answers: list[Event] = []
        self.requests: list[Request] = []
        self.path = Path()
        monkeypatch.setattr("meshllm.cli.shared.client.NodeClient", self)

    def __call__(self, path: Path) -> "FakeClient":
        self.path = path
        return self

    async def status(self) -> MeshStatus:
        reply = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(reply, MeshError):
            raise reply
        return reply

    async def models(self) -> Sequence[ModelStatus]:
        return (await self.status()).models

    async def members(self) -> Members:
        return Members(tuple(self.there))

    async def invite(self, role: str, expires_s: int, uses: int, **limits: int) -> str:
        self.posted.append((role, expires_s, uses, *limits.items()))
        return "meshllm1abc"

    async def remove(self, node: str, spare: Sequence[str] = ()) -> Removed:
        self.posted.append((node, *spare))
        return self.removed

    async def revoke(self, tags: Sequence[bytes]) -> None:
        self.posted.append(tuple(tags))

    async def serve(self, asked: ModelOptions) -> ModelStatus:
        self.posted.append(("serve", asked.model))
        model = (await self.status()).model
        assert model
        return replace(model, name=asked.model)

    async def stop(self, model: str) -> str:
        self.posted.append(("stop", model))
        return model

    async def events(self) -> AsyncGenerator[Change, None]:
        yield Change("changed", RingState.SERVING, 3, "4f2a91c0d3e1", {})
        await asyncio.Event().wait()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        for each in self.answers:
            yield each
