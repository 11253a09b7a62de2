"""Hostile last ranks: an answer is right or an error, and the entry keeps nothing of it."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from meshllm.errors import IntegrityFault, MeshError, ModelError, PeerFault, TimedOut
from meshllm.model.files.source import resolve
from meshllm.model.wire.payload import to_payload
from meshllm.names import Digest, SessionId
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import LocalRing, RingOptions, open_local_ring
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.session.wire import opened
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.messages import (
    Blob,
    Close,
    Data,
    DType,
    Fault,
    FaultCode,
    Forward,
    Gap,
    Logits,
    SessionMessage,
)
from meshllm.request import Sampling
from meshllm.testing.clock import run_virtual

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TOKENS = 6
DIM = 64  # width of the model
PATIENCE_S = 2.0  # s that an entry waits for rows, not 10 minutes: 72,000 beats take seconds
LONGEST_S = 31.0  # s; it waits twice as long after each of 3 retries
OTHER = SessionId(bytes(16))

Lie = Callable[[Data], Iterable[SessionMessage]]


def rows(change: Callable[[Tensor], Tensor]) -> Lie:
    """Send other rows, well sealed."""

    def lie(data: Data) -> list[SessionMessage]:
        if data.blob is None:
            return [data]
        key = session_key(data.session)
        code, shape, payload = to_payload(change(opened(key, data.blob)))
        return [replace(data, blob=seal(key, DType(code), shape, payload))]

    return lie


def blob(change: Callable[[Blob], Blob | None]) -> Lie:
    """Send another blob, not sealed again."""
    return lambda data: [replace(data, blob=change(data.blob) if data.blob else None)]


def one(change: Callable[[Data], SessionMessage]) -> Lie:
    """Send another message."""
    return lambda data: [change(data)]


def spike(value: float) -> Callable[[Tensor], Tensor]:
    def change(hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[..., 0] = value
        return hidden

    return change


def fault(data: Data, code: FaultCode) -> Fault:
    return Fault(data.session, data.epoch, code, 0, "x" * 999 + "\x1b[2J")


def gap(data: Data, kv_len: int) -> Gap:
    return Gap(data.session, data.epoch, data.gen, kv_len)


def logits(data: Data) -> list[SessionMessage]:
    """Send logits that nobody asked for, of the wrong size, before the rows."""
    bad = seal(session_key(data.session), DType.FLOAT32, (1, 1, 1), bytes(4))
    return [Logits(data.session, data.epoch, data.gen, data.pos, bad), data]


LIES: dict[str, tuple[Lie, type[MeshError] | None]] = {
    "too wide": (rows(lambda hidden: torch.nn.functional.pad(hidden, (0, 1))), PeerFault),
    "too narrow": (rows(lambda hidden: hidden[..., 1:]), PeerFault),
    "too many rows": (rows(lambda hidden: torch.cat((hidden, hidden), 1)), PeerFault),
    "two dimensions": (rows(lambda hidden: hidden[0]), PeerFault),
    "another dtype": (rows(Tensor.half), PeerFault),
    "NaN": (rows(spike(float("nan"))), PeerFault),
    "infinity": (rows(spike(float("inf"))), PeerFault),
    "no rows": (blob(lambda _: None), PeerFault),
    "changed bytes": (blob(lambda held: replace(held, payload=bytes(DIM * 4))), IntegrityFault),
    "no digest": (blob(lambda held: replace(held, digest=Digest(bytes(32)))), IntegrityFault),
    "another position": (one(lambda data: replace(data, pos=data.pos + 1)), PeerFault),
    "a fault of the rules": (one(lambda data: fault(data, FaultCode.RULES)), PeerFault),
    "a fault of the model": (one(lambda data: fault(data, FaultCode.MODEL)), ModelError),
    "another session": (one(lambda data: replace(data, session=OTHER)), TimedOut),
    "a newer generation": (one(lambda data: replace(data, gen=data.gen + 1)), TimedOut),
    "an older epoch": (one(lambda data: replace(data, epoch=0)), TimedOut),
    "a newer epoch": (one(lambda data: replace(data, epoch=data.epoch + 1)), TimedOut),
    "an endless gap": (one(lambda data: gap(data, 0)), TimedOut),
    "a gap beyond": (one(lambda data: gap(data, 1 << 20)), TimedOut),
    "an early end": (one(lambda data: Close(data.session, data.epoch, keep=9)), TimedOut),
    "nothing": (lambda _: [], TimedOut),
    "twice": (lambda data: [data, data], None),
    "logits that are not asked for": (logits, None),
}


async def ask(ring: LocalRing) -> list[int] | MeshError:
    try:
        return [token async for token in ring.tokens(PROMPT, Sampling(), TOKENS)]
    except MeshError as error:
        return error


@pytest.mark.parametrize(
    ("lie", "error"), LIES.values(), ids=[name.replace(" ", "-") for name in LIES]
)
def test_a_hostile_last_rank_ends_its_request_or_changes_nothing(
    llama: Path, monkeypatch: pytest.MonkeyPatch, lie: Lie, error: type[MeshError] | None
) -> None:
    pace = ModelRuntime.pace
    monkeypatch.setattr(
        ModelRuntime, "pace", lambda *asked: replace(pace(*asked), patience_s=PATIENCE_S)
    )

    async def scenario() -> None:
        options = RingOptions(2, inference=InferenceConfig(threads=1, prefix_bytes=0))
        async with open_local_ring(resolve(str(llama)), options) as ring:
            right, blamed = await ask(ring), list[None]()
            (stage,), entry = ring.stages, ring.entry
            assert entry._neighbours is not None
            send = stage._neighbours.forward

            def lying(action: Forward) -> None:
                data = action.message
                for message in lie(data) if isinstance(data, Data) else [data]:
                    send(Forward(message))

            monkeypatch.setattr(entry._neighbours, "blame", lambda: blamed.append(None))
            with monkeypatch.context() as patch:
                patch.setattr(stage._neighbours, "forward", lying)
                answer = await ask(ring)

            assert answer == right if error is None else type(answer) is error
            is_refusal = lie is LIES["a fault of the rules"][0]  # as an honest rank may send
            assert len(blamed) == (error in {PeerFault, IntegrityFault} and not is_refusal)
            assert (entry.sessions, entry.budget.live_bytes) == (0, 0)
            assert await ask(ring) == right

    run_virtual(asyncio.wait_for(scenario(), LONGEST_S))
