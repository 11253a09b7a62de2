"""What the lengths of encrypted messages tell those who see them: how much is said, not what."""

from collections import Counter
from pathlib import Path

from meshllm.model.files.source import resolve
from meshllm.names import WireMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.testing.counting import CountingTransport
from meshllm.transport.contract import Channel
from meshllm_loopback import LoopbackTransport
from tests.builders.prefixes import PROMPT, ask

TOKENS = 12


async def lengths(folder: Path, prompt: tuple[int, ...]) -> tuple[Counter[int], list[int]]:
    counting = CountingTransport(LoopbackTransport())
    config = InferenceConfig(threads=1, speculation=False, prefix_bytes=0, wire=WireMode.PLAIN)
    async with open_local_ring(
        resolve(str(folder)), RingOptions(3, inference=config), counting
    ) as (ring):
        text, _ = await ask(ring, prompt, TOKENS)
    return Counter(size for channel, size in counting.sent if channel is Channel.DATA), text


async def test_two_texts_of_one_length_give_messages_of_the_same_lengths(llama: Path) -> None:
    one, told = await lengths(llama, PROMPT)
    other, told_other = await lengths(llama, PROMPT[::-1])

    assert one == other
    assert told != told_other
    assert sum(one.values()) >= 3 * TOKENS
