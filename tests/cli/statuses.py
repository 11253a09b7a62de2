"""What a node says on `/mesh/status`, for rings of any size, and a node that says it."""

import asyncio
from collections.abc import AsyncGenerator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import MeshError
from meshllm.request import Event, Request

NAMES = ("attic", "desk", "laptop", "cellar", "kitchen", "barn", "loft", "studio")
_LAYERS = 10  # of each node


def node_id(index: int) -> str:
    return "-".join([f"{NAMES[index][:4]:a<4}{index}bc", *["defghij"] * 7])


def status_of(count: int, *, measured: bool = True) -> dict[str, Any]:
    """A ring of so many nodes, as the first of them tells it."""
    hops: list[dict[str, Any]] = [
        {
            "rank": rank,
            "node": node_id(rank),
            "layers": _layers(rank),
            "compute_ms": 12.5 + rank,
            "serialise_ms": 0.09,
            "queue_ms": 0.03,
            "wire_ms": 0.42 + rank,
            "bytes_per_token": 2148.0,
        }
        for rank in range(count)
    ]
    token_ms = sum(hop["compute_ms"] + hop["wire_ms"] for hop in hops) + 2
    figures = {"ms_per_token": token_ms, "ttft_ms": 240.0, "hops": hops}
    return {
        "mesh": "4fa1c09b2d7e88a1523301fe90aa6b12",
        "node": node_id(0),
        "name": NAMES[0],
        "version": "0.2.0",
        "model": {
            "name": "Qwen/Qwen3-0.6B",
            "layers": count * _LAYERS,
            "hidden_size": 1024,
            "dtype": "bfloat16",
            "quant": "none",
        },
        "ring": {
            "state": "serving",
            "reason": "",
            "epoch": 3,
            "digest": "4f2a91c0d3e1",
            "policy": "auto",
            "entry": node_id(0),
            "stages": [
                {
                    "rank": rank,
                    "node": node_id(rank),
                    "name": NAMES[rank],
                    "layers": _layers(rank),
                }
                for rank in range(count)
            ],
            "predicted": {**figures, "ms_per_token": token_ms - 1.5, "head_ms": 1.8},
            "measured": {**figures, "tokens": 96} if measured else None,
            "advice": "`studio` is the slowest: 3 of its layers on `attic` would save 4 ms",
        },
        "nodes": [_node(rank) for rank in range(count)],
        "sessions": {"active": 1, "waiting": 0, "served": 12, "failed": 0},
        "listening": ["ws://192.168.1.10:7700"],
        "networks": [],
        "since_s": 754.0,
    }


def waiting(reason: str) -> dict[str, Any]:
    """A node that is alone and cannot serve."""
    status = status_of(1)
    status["ring"] |= {
        "state": "waiting",
        "reason": reason,
        "stages": [],
        "predicted": None,
        "measured": None,
        "advice": "",
        "digest": "",
    }
    status["nodes"][0] |= {"state": "joining", "layers": None, "rank": None}
    return status


def _layers(rank: int) -> str:
    return f"{rank * _LAYERS}:{(rank + 1) * _LAYERS}"


def _node(rank: int) -> dict[str, Any]:
    link = {
        "round_trip_ms": 0.84 + rank,
        "path": "direct",
        "path_reason": "",
        "address": f"ws://192.168.1.{10 + rank}:7700",
        "bytes_sent": 12_690_000,
        "bytes_received": 11_340_000 + rank,
        "heard_s": 0.3,
        "clock_s": 0.02 * rank,
    }
    return {
        "node": node_id(rank),
        "short": node_id(rank)[:7],
        "name": NAMES[rank],
        "role": "node",
        "state": "serving",
        "reason": "",
        "addresses": [f"ws://192.168.1.{10 + rank}:7700"],
        "memory_bytes": 8 << 30,
        "layers": _layers(rank),
        "rank": rank,
        "self": rank == 0,
        "incarnation": 2,
        "version": "0.2.0",
        "link": link if rank else None,
    }


class FakeDoor:
    """Takes the place of `meshllm.cli.door.Client`, and of the node behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status: list[dict[str, Any] | MeshError] = [status_of(3)]
        """What `/mesh/status` answers, one after another; the last stays."""
        self.replies: dict[str, dict[str, Any]] = {}
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Event] = []
        self.requests: list[Request] = []
        self.path = Path()
        monkeypatch.setattr("meshllm.cli.door.Client", self)

    def __call__(self, path: Path) -> "FakeDoor":
        self.path = path
        return self

    async def get(self, path: str) -> dict[str, Any]:
        if path != "/mesh/status":
            return self.replies[path]
        reply = self.status.pop(0) if len(self.status) > 1 else self.status[0]
        if isinstance(reply, MeshError):
            raise reply
        return deepcopy(reply)

    async def post(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        self.posted.append((path, fields))
        return self.replies[path]

    async def stream_lines(self, _: str) -> AsyncGenerator[bytes, None]:
        yield b'{"event": "joined"}'
        await asyncio.Event().wait()

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        for each in self.answers:
            yield each
