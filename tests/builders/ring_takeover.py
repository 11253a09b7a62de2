"""An ingress that asks a ring of three, which is taken over."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from meshllm.errors import LinkLost
from meshllm.names import NodeId
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.request import Prefilled, Resumable, Sampling
from tests.builders.offers import A, B, C
from tests.builders.ring_world import Place, World, at_work, plan_of, until

PROMPT = tuple((7 * i + 3) % 61 for i in range(40))
SAMPLING = Sampling(temperature=0.9, seed=7)
TOKENS, BEFORE = 26, 8
IN_FLIGHT = 8  # rows of drafts and of steps that were under way
THREE = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"))

Rows = Counter[int]
"""Rows computed, by layer."""


def nothing() -> None:
    """Do nothing."""


@dataclass
class Ingress:
    """Asks one entry after the other, and holds what it has of the answer."""

    prompt: tuple[int, ...] = PROMPT
    answer: list[int] = field(default_factory=list)
    resume: Resumable | None = None
    read: int = 0
    """Call ``then`` after so many tokens of the prompt; 0 waits for the answer."""
    reused: int | None = None
    """Tokens of the prompt that were cached, once the answer has ended."""
    tokens: int = TOKENS
    """Length of the answer."""
    hands_over: bool = True
    """See `GenerationRequest`."""

    async def ask(self, place: Place, then: Callable[[], None] = nothing) -> None:
        """Add tokens up to the loss of the ring; call ``then`` in between."""
        entry = place.runtime.entry
        assert entry is not None
        given = tuple(self.answer)
        order = GenerationRequest(
            *(self.prompt, SAMPLING, self.tokens, lambda _: False),
            given=given,
            resume=self.resume,
            hands_over=self.hands_over,
        )
        with suppress(LinkLost):
            async for output in entry.generate(order):
                match output:
                    case Resumable():
                        self.resume = output
                    case Prefilled(done) if 0 < self.read <= done:
                        self.read = 0
                        then()
                    case Ended():
                        self.reused = output.measured.reused
                    case Token(token):
                        self.answer.append(token)
                        if len(self.answer) == len(given) + BEFORE and not self.read:
                            then()


@asynccontextmanager
async def ring_of_three(
    world: World, *standbys: NodeId
) -> AsyncIterator[tuple[list[Place], list[int]]]:
    """Serve; yield the places, the entry first, and an answer that nothing disturbed."""
    async with world.serving(A, B, C, *standbys) as places:
        world.follow(THREE)
        await until(lambda: at_work(*places[:3]))
        ingress = Ingress()
        await ingress.ask(places[0])
        yield places, ingress.answer


def kept_layers(lost: set[int]) -> list[int]:
    return [layer for layer in range(6) if layer not in lost]
