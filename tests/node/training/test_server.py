"""A server of batches: what it computes, refuses, keeps and releases."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from meshllm.errors import Busy, LinkLost, MeshError, ModelError, OutOfMemory, PeerFault
from meshllm.model.files.source import open_folder
from meshllm.model.training.batch import pack
from meshllm.model.training.frozen_span import FrozenSpan
from meshllm.names import Digest, Span
from meshllm.node.compute.worker import compute_thread
from meshllm.node.net.secure import SecureLink
from meshllm.node.training import FrozenModel, LayerPass, server
from meshllm.protocol.training.codec import (
    STILL_S,
    TENSOR_CHUNK_BYTES,
    Direction,
    PassDone,
    PassRefused,
    StartPass,
    StillComputing,
    TensorBytes,
    TrainingMessage,
    decode,
    encode,
)
from meshllm.testing.clock import run_virtual
from tests.builders.mesh_members import MeshMember
from tests.builders.training import FORWARD, MODEL, SPAN, TrainingNode
from tests.node.training.conftest import Scenario

START = StartPass(MODEL, SPAN, Direction.FORWARD, 3)
BATCH: list[TrainingMessage] = [START, TensorBytes(b"abc")]


async def exchange(link: SecureLink, *sent: TrainingMessage) -> TrainingMessage | None:
    for each in sent:
        await link.send(encode(each))
    _, data = await link.receive()
    return decode(data)


@pytest.mark.parametrize(
    ("direction", "result"),
    [
        (Direction.FORWARD, b"cba"),
        (Direction.FORWARD_KEEPING, b"kept cba"),
        (Direction.BACKWARD, b"back cba"),
    ],
)
def test_a_batch_is_computed_through_the_layers(direction: Direction, result: bytes) -> None:
    async def scenario() -> None:
        node = TrainingNode()

        assert await node.server.compute(LayerPass(MODEL, SPAN, direction), b"abc") == result
        assert [each.span for each in node.loaded] == [SPAN]

    run_virtual(scenario())


def test_a_peer_gets_what_comes_out(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        node.worker.takes_s = 2.4 * STILL_S
        link = await attic.links.dial_training(barn.me)

        assert await exchange(link, *BATCH) == StillComputing()
        assert [await exchange(link) for _ in range(3)] == [
            *(StillComputing(), StillComputing()),  # it loads the layers, then computes
            StillComputing(),
        ]
        assert [await exchange(link) for _ in range(2)] == [PassDone(3), TensorBytes(b"cba")]
        await link.close()

    run(scenario)


@pytest.mark.parametrize(
    "messages",
    [
        [PassDone(1)],
        [TensorBytes(b"x")],
        [START, START],
        [START, TensorBytes(b"ab")],
        [START, TensorBytes(b"abcd")],
        [StartPass(MODEL, SPAN, Direction.FORWARD, 1 << 20), TensorBytes(b"x" * 1000)],
    ],
)
def test_anything_else_than_a_batch_closes_the_link(
    run: Callable[[Scenario], None], messages: Sequence[TrainingMessage]
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        link = await attic.links.dial_training(barn.me)
        with pytest.raises(LinkLost):
            await exchange(link, *messages)
        assert not node.loaded

    run(scenario)


def test_messages_of_a_later_version_are_ignored(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        link = await attic.links.dial_training(barn.me)
        await link.send([b"\x09 of a later version"])

        assert await exchange(link, *BATCH) == PassDone(3)
        await link.close()

    run(scenario)


def test_an_idle_link_is_closed(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        link = await attic.links.dial_training(barn.me)
        await asyncio.sleep(server.IDLE_S + 1)
        with pytest.raises(LinkLost):
            await link.receive()

    run(scenario)


def test_a_node_has_a_limit_of_links(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        most = server.MAX_LINKS_OF_NODE
        links = [await attic.links.dial_training(barn.me) for _ in range(most)]
        await asyncio.sleep(1)
        extra = await attic.links.dial_training(barn.me)
        with pytest.raises(LinkLost):
            await extra.receive()
        await links[0].close()
        await asyncio.sleep(1)
        assert await exchange(await attic.links.dial_training(barn.me), *BATCH) == PassDone(3)
        monkeypatch.setattr(server, "MAX_LINKS", 1)
        with pytest.raises(LinkLost):
            await (await attic.links.dial_training(barn.me)).receive()

    run(scenario)


def test_a_batch_for_which_there_is_no_memory_is_not_received(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.model.shape.free_memory", lambda: 3 * server.MEMORY_PART - 1)

    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        with pytest.raises(LinkLost):
            await exchange(await attic.links.dial_training(barn.me), START)
        assert not node.loaded

    run(scenario)


@pytest.mark.parametrize(
    ("error", "refusal"),
    [
        (PeerFault("Batch of 9"), PassRefused("Batch of 9", is_final=True)),
        (Busy("Not kept"), PassRefused("Not kept", is_final=False)),
        (
            OutOfMemory("/secret is full"),
            PassRefused("not enough memory: try fewer tokens", is_final=False),
        ),
        (MemoryError(), PassRefused("not enough memory: try fewer tokens", is_final=False)),
        (
            torch.OutOfMemoryError("no"),
            PassRefused("not enough memory: try fewer tokens", is_final=False),
        ),
        (
            ModelError("/secret is missing"),
            PassRefused("the node does not have the weights of the layers", is_final=False),
        ),
    ],
)
def test_a_peer_hears_why_a_batch_is_refused_and_no_path(
    run: Callable[[Scenario], None], error: Exception, refusal: PassRefused
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        link = await attic.links.dial_training(barn.me)
        await exchange(link, *BATCH)
        await exchange(link)
        node.loaded[0].error = error

        assert await exchange(link, *BATCH) == refusal
        node.loaded[0].error = None
        assert await exchange(link, *BATCH) == PassDone(3)
        await link.close()

    run(scenario)


def test_a_bug_is_not_swallowed(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        link = await attic.links.dial_training(barn.me)
        await exchange(link, *BATCH)
        await exchange(link)
        node.loaded[0].error = RuntimeError("index out of range")
        with caplog.at_level(logging.ERROR), pytest.raises(LinkLost):
            await exchange(link, *BATCH)

    run(scenario)
    assert "bug in a link" in caplog.text


def test_an_unknown_model_is_refused() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        asked = LayerPass(Digest(bytes(32)), SPAN, Direction.FORWARD)
        with pytest.raises(ModelError, match="does not have the model"):
            await node.server.compute(asked, b"abc")

    run_virtual(scenario())


def test_layers_are_released_after_a_while_without_a_batch() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        await node.server.compute(FORWARD, b"abc")
        await asyncio.sleep(0.9 * server.KEEP_S)
        await node.server.compute(FORWARD, b"abc")
        await asyncio.sleep(0.9 * server.KEEP_S)
        await node.server.compute(FORWARD, b"abc")
        assert (len(node.loaded), node.worker.reclaimed) == (1, 0)

        await asyncio.sleep(2 * server.KEEP_S)

        assert node.worker.reclaimed == 1
        await node.server.compute(FORWARD, b"abc")
        assert len(node.loaded) == 2

    run_virtual(scenario())


def test_layers_stay_while_they_compute() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        await node.server.compute(FORWARD, b"abc")
        node.worker.takes_s = 1.5 * server.KEEP_S
        await node.server.compute(FORWARD, b"abc")

        assert node.worker.reclaimed == 0

    run_virtual(scenario())


def test_a_few_spans_are_loaded_at_once() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        spans = [Span(at, at + 4) for at in range(server.MAX_SPANS + 1)]
        for span in (*spans[:-1], spans[0], spans[-1], spans[0], spans[1]):
            await node.server.compute(LayerPass(MODEL, span, Direction.FORWARD), b"abc")

        assert [each.span for each in node.loaded] == [*spans, spans[1]]

    run_virtual(scenario())


def test_a_model_that_is_withdrawn_is_released() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        await node.server.compute(FORWARD, b"abc")

        node.server.withdraw(MODEL)

        assert not node.server._spans
        with pytest.raises(MeshError):
            await node.server.compute(FORWARD, b"abc")

    run_virtual(scenario())


def test_batches_are_computed_one_at_a_time() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        await node.server.compute(FORWARD, b"abc")
        node.worker.takes_s = 10.0
        begin = asyncio.get_running_loop().time()

        await asyncio.gather(*(node.server.compute(FORWARD, b"abc") for _ in range(3)))

        assert asyncio.get_running_loop().time() - begin == pytest.approx(30.0)

    run_virtual(scenario())


def test_a_long_batch_comes_in_chunks(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, _: TrainingNode) -> None:
        link = await attic.links.dial_training(barn.me)
        size = TENSOR_CHUNK_BYTES + 1
        start = StartPass(MODEL, SPAN, Direction.FORWARD, size)
        chunks = TensorBytes(b"x" * TENSOR_CHUNK_BYTES), TensorBytes(b"y")

        assert await exchange(link, start, *chunks) == PassDone(size)
        first, second = await exchange(link), await exchange(link)
        assert first == TensorBytes(b"y" + b"x" * (TENSOR_CHUNK_BYTES - 1))
        assert second == TensorBytes(b"x")
        await link.close()

    run(scenario)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("no"), RuntimeError("std::bad_alloc")]
)
def test_layers_for_which_there_is_no_memory_are_loaded_again_later(error: Exception) -> None:
    async def scenario() -> None:
        node = TrainingNode()
        load, errors = node.load, [error]

        def failing(span: Span) -> object:
            if errors:
                raise errors.pop()
            return load(span)

        worker: Any = node.worker
        unsure: Any = failing
        node.server.offer(MODEL, FrozenModel(worker, unsure))
        with pytest.raises(OutOfMemory, match="does not fit into the memory"):
            await node.server.compute(FORWARD, b"abc")

        assert await node.server.compute(FORWARD, b"abc") == b"cba"

    run_virtual(scenario())


def test_a_peer_that_is_lost_does_not_hold_up_others(run: Callable[[Scenario], None]) -> None:
    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        await node.server.compute(FORWARD, b"abc")
        node.worker.takes_s = 10 * STILL_S
        lost = await attic.links.dial_training(barn.me)
        assert await exchange(lost, *BATCH) == StillComputing()
        await lost.close()
        await asyncio.sleep(2 * STILL_S)

        node.worker.takes_s = 0.0
        assert await exchange(await attic.links.dial_training(barn.me), *BATCH) == PassDone(3)

    run(scenario)


def test_real_layers_are_computed_on_the_compute_thread(
    run: Callable[[Scenario], None], llama: Path
) -> None:
    source = open_folder("llama", llama)
    batch = pack({"hidden": torch.randn(1, 3, source.config.hidden_size)})
    expected = FrozenSpan(source, SPAN).forward(batch)

    async def scenario(attic: MeshMember, barn: MeshMember, node: TrainingNode) -> None:
        async with compute_thread() as worker:
            node.server.offer(MODEL, FrozenModel(worker, partial(FrozenSpan, source)))
            link = await attic.links.dial_training(barn.me)
            start = StartPass(MODEL, SPAN, Direction.FORWARD, len(batch))

            assert await exchange(link, start, TensorBytes(batch)) == PassDone(len(expected))
            assert await exchange(link) == TensorBytes(expected)
            beyond = StartPass(MODEL, Span(5, 9), Direction.FORWARD, len(batch))
            refusal = await exchange(link, beyond, TensorBytes(batch))
            assert isinstance(refusal, PassRefused)
            assert (refusal.is_final, str(llama) in refusal.reason) == (False, False)
            await link.close()

    run(scenario)


def test_layers_of_a_withdrawn_model_are_not_kept() -> None:
    async def scenario() -> None:
        node = TrainingNode()
        node.worker.takes_s = 10.0
        computing = asyncio.ensure_future(node.server.compute(FORWARD, b"abc"))
        await asyncio.sleep(5)  # the layers are loading
        node.server.withdraw(MODEL)
        await asyncio.gather(computing, return_exceptions=True)

        assert not node.server._spans

    run_virtual(scenario())


def test_a_model_that_is_offered_again_while_layers_load_is_the_one_that_computes() -> None:
    async def scenario() -> None:
        node, other = TrainingNode(), TrainingNode()
        node.worker.takes_s = 10.0
        computing = asyncio.ensure_future(node.server.compute(FORWARD, b"abc"))
        await asyncio.sleep(5)
        worker: Any = other.worker
        load: Any = other.load
        node.server.offer(MODEL, FrozenModel(worker, load))
        await asyncio.gather(computing, return_exceptions=True)
        await node.server.compute(FORWARD, b"abc")

        assert len(other.loaded) == 1

    run_virtual(scenario())
