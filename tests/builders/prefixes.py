"""Asks a ring, and tells how much of a prompt it reused."""

from collections.abc import Sequence

from meshllm.node.ring.local_ring import LocalRing
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.protocol.kv_cache.prefix_scope import OWN, PrefixScope
from meshllm.request import Resumable, Sampling

PROMPT = tuple((7 * i + 3) % 61 for i in range(40))
TOKENS = 6


async def ask(
    ring: LocalRing,
    prompt: Sequence[int],
    tokens: int = TOKENS,
    *,
    resume: Resumable | None = None,
    told: list[Resumable] | None = None,
    scope: PrefixScope = OWN,
) -> tuple[list[int], int]:
    """Return the answer, and the number of cached tokens of the prompt."""
    text: list[int] = []
    order = GenerationRequest(
        tuple(prompt),
        Sampling(),
        tokens,
        take_token=lambda _: False,
        resume=resume,
        requester=scope[0],
        scope=scope[1],
    )
    async for output in ring.entry.generate(order):
        if isinstance(output, Resumable) and told is not None:
            told.append(output)
        if isinstance(output, Token):
            text.append(output.id)
        elif isinstance(output, Ended):
            return text, output.measured.reused
    raise AssertionError
