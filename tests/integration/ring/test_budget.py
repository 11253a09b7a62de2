"""A token costs N messages in a ring of N; a hop costs the tensor and at most 256 bytes."""

from collections import Counter
from pathlib import Path

import pytest

from meshllm.model.files.source import resolve
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.protocol.planning.plan import Ends
from meshllm.request import Sampling
from meshllm.testing.counting import CountingTransport
from meshllm.transport.contract import Channel
from meshllm_loopback import LoopbackTransport

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
HEADER = 256  # bytes; most overhead of a hop


async def sent_for(
    folder: Path, nodes: int, tokens: int, ends: Ends = Ends.ENTRY
) -> list[tuple[Channel, int]]:
    transport = CountingTransport(LoopbackTransport())
    async with open_local_ring(
        resolve(str(folder)),
        RingOptions(
            nodes=nodes, ends=ends, inference=InferenceConfig(threads=1, speculation=False)
        ),
        transport,
    ) as ring:
        assert len([t async for t in ring.tokens(PROMPT, Sampling(), tokens)]) == tokens
    return transport.sent


@pytest.mark.parametrize("nodes", [2, 3, 4])
async def test_a_token_costs_n_messages(llama: Path, nodes: int) -> None:
    few = await sent_for(llama, nodes, tokens=5)
    many = await sent_for(llama, nodes, tokens=25)

    def data(sent: list[tuple[Channel, int]]) -> int:
        return Counter(channel for channel, _ in sent)[Channel.DATA]

    assert data(many) - data(few) == 20 * nodes
    assert data(few) == 5 * nodes  # prefill in one pass, then one step per token


async def test_a_separate_head_costs_one_more_hop(llama: Path) -> None:
    sent = await sent_for(llama, 2, tokens=5, ends=Ends.CLIENT)

    assert sum(channel is Channel.DATA for channel, _ in sent) == 5 * 3


async def test_a_hop_costs_the_tensor_and_a_small_header(llama: Path) -> None:
    row = resolve(str(llama)).config.hidden_size * 4

    sent = await sent_for(llama, 3, tokens=10)

    data = [size for channel, size in sent if channel is Channel.DATA]
    assert sorted(set(data)) == [min(data), max(data)]
    assert row < min(data) <= row + HEADER
    assert len(PROMPT) * row < max(data) <= len(PROMPT) * row + HEADER


async def test_one_node_sends_nothing(llama: Path) -> None:
    assert await sent_for(llama, 1, tokens=5) == []
