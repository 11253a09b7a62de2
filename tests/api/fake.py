"""A node that answers by rule, so that the door can be tested without a mesh."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from meshllm.errors import MeshError
from meshllm.request import Event, Piece, Prefilled, Request
from tests.cli.fake import answer_of

NODE: dict[str, Any] = {
    "node": "abcdefgh-full", "short": "abcdefgh", "name": "desk", "role": "node",
    "state": "serving", "reason": "", "addresses": ["ws://10.0.0.1:7700"],
    "memory_bytes": 8 << 30, "layers": "0:4", "rank": 0, "self": True, "incarnation": 1,
    "version": "0.1", "link": None,
}  # fmt: skip
LINK: dict[str, Any] = {
    "round_trip_ms": 2.5, "path": "direct", "address": "ws://10.0.0.2:7700", "bytes_sent": 1000,
    "bytes_received": 2000, "heard_s": 0.25,
}  # fmt: skip
OTHER = NODE | {"short": "ijklmnop", "name": 'a "b"\\\nc', "self": False, "rank": 1, "link": LINK}


def status_of(**ring: Any) -> dict[str, Any]:
    """A node in a ring of two."""
    hop = {"rank": 0, "node": "abcdefgh-full", "layers": "0:4", "compute_ms": 3.0,
           "serialise_ms": 0.25, "queue_ms": 0.125, "wire_ms": 0.5,
           "bytes_per_token": 512.0}  # fmt: skip
    return {
        "mesh": "00" * 16, "node": "abcdefgh-full", "name": "desk", "version": "0.1",
        "model": {"name": "builtin", "layers": 8, "hidden_size": 64, "dtype": "bfloat16"},
        "ring": {
            "state": "serving", "reason": "", "epoch": 7, "digest": "0123456789ab",
            "policy": "auto", "entry": "abcdefgh-full", "stages": [{}, {}],
            "predicted": {"ms_per_token": 8.0, "ttft_ms": 30.0, "head_ms": 1.0, "hops": []},
            "measured": {"ms_per_token": 10.0, "ttft_ms": 40.0, "tokens": 9, "hops": [hop]},
            "advice": "",
        } | ring,
        "nodes": [NODE, OTHER],
        "sessions": {"active": 1, "waiting": 2, "served": 3, "failed": 4, "tokens": 99},
        "listening": ["ws://0.0.0.0:7700"], "since_s": 60,
    }  # fmt: skip


@dataclass
class FakeDoor:
    """Says `hello world`, after all it is told to wait or fail."""

    fails_at: int | None = None
    """Fail instead of this event: 0 is the progress, 1 and 2 are pieces, 3 is the answer."""
    error: MeshError = field(default_factory=lambda: MeshError("It broke", hint="mend it"))
    waits_at: int | None = None
    """Wait before this event for ever, or until `go`."""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    served: str | None = "builtin"

    def status(self) -> dict[str, Any]:
        status = status_of()
        model = status["model"] | {"name": self.served} if self.served else None
        return status | {"model": model}

    def plan(self) -> dict[str, Any]:
        return {"epoch": 7, "stages": []}

    def members(self) -> list[dict[str, Any]]:
        return [{"node": "abcdefgh-full", "role": "node"}]

    def models(self) -> list[str]:
        return ["builtin"]

    def invite(self, role: str, expires_s: int, uses: int) -> str:
        self.calls.append((role, expires_s, uses))
        return "meshllm1abc"

    def remove(self, node: str) -> dict[str, Any]:
        self.calls.append((node,))
        return {"removed": node}

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        self.begun.set()
        try:
            yield {"event": "joined", "name": "desk"}
            await self.go.wait()
            yield {"event": "left", "name": "desk"}
        finally:
            self.closed.set()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        said: tuple[Event, ...] = (
            Prefilled(2, 2),
            Piece("hello"),
            Piece(" w\u2028rld"),
            answer_of("hello", 5),
        )
        try:
            for place, event in enumerate(said):
                if place == self.fails_at:
                    raise self.error
                if place == (self.waits_at or 0):
                    self.begun.set()
                if place == self.waits_at:
                    await self.go.wait()
                yield event
        finally:
            await asyncio.sleep(0)  # a generation is cancelled on every node, which takes a while
            self.closed.set()
