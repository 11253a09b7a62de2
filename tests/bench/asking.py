"""Generation of a fixed number of tokens, regardless of end-of-text tokens."""

from collections.abc import Sequence
from contextlib import aclosing

from meshllm.node.compute.gauge import GenerationTimes
from meshllm.node.ring.local_ring import LocalRing
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.request import Sampling


async def ask(
    ring: LocalRing, prompt: Sequence[int], tokens: int
) -> tuple[list[int], GenerationTimes]:
    """Generate ``tokens`` tokens; return them and the measured times."""
    order = GenerationRequest(tuple(prompt), Sampling(), tokens, take_token=lambda _: False)
    text: list[int] = []
    async with aclosing(ring.entry.generate(order)) as outputs:
        async for output in outputs:
            if isinstance(output, Token):
                text.append(output.id)
            elif isinstance(output, Ended):
                return text, output.measured
    raise AssertionError
