"""Quality loss of the builtin model with 8-bit hidden states on the wire."""

from functools import cache

import torch

from meshllm.model.files.source import resolve
from meshllm.names import Quant, WireMode
from meshllm.node.options import InferenceConfig
from meshllm.node.ring.local_ring import RingOptions, open_local_ring
from meshllm.request import Sampling
from tests.bench.quality import NODES, WIRE, Speaker
from tests.builtin.score import Case, load

TOKENS = 16


@cache
def cases() -> list[Case]:
    """A few of the held-out questions."""
    return [case for case in load() if len(case.turns) == 1][::8]


def test_the_loss_of_the_ideal_answers_stays_within_a_hundredth() -> None:
    def losses(kind: str) -> torch.Tensor:
        speaker = Speaker(kind)
        return torch.cat([speaker.authorize(case.turns[0], case.ideal)[0] for case in cases()])

    exact, rounded = losses(Quant.NONE), losses(WIRE)

    assert not torch.equal(exact, rounded)
    assert abs(float(rounded.mean() / exact.mean()) - 1) < 0.01


async def test_a_ring_of_three_gives_mostly_the_same_answers() -> None:
    speaker = Speaker(Quant.NONE)
    prompts = [speaker.prompt([{"role": "user", "content": case.turns[0]}]) for case in cases()[:4]]

    async def answers(mode: WireMode) -> list[list[int]]:
        options = RingOptions(nodes=NODES, inference=InferenceConfig(threads=1, wire=mode))
        async with open_local_ring(resolve("builtin"), options) as ring:
            return [
                [token async for token in ring.tokens(prompt, Sampling(), TOKENS)]
                for prompt in prompts
            ]

    exact, rounded = await answers(WireMode.EXACT), await answers(WireMode.INT8)

    pairs = [pair for each in zip(exact, rounded, strict=True) for pair in zip(*each, strict=True)]
    assert sum(one == other for one, other in pairs) >= 0.9 * len(pairs)
