"""A node that leaves hands over the KV caches of its layers, and the text does not change."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from meshllm.protocol.planning.plan import Plan
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A, B, C, D
from tests.node.ring.test_runtime import Place, World, at_work, plan_of, until
from tests.node.ring.test_takeover import (
    BEFORE,
    IN_FLIGHT,
    PROMPT,
    THREE,
    TOKENS,
    Ingress,
    Rows,
    kept_layers,
    rows,
    world,
)

__all__ = ("rows", "world")

LEAVES = {
    "middle, to both neighbours": (plan_of((A, "0:3"), (C, "3:6"), epoch=2), {2, 3}),
    "middle, to the one before": (plan_of((A, "0:4"), (C, "4:6"), epoch=2), {2, 3}),
    "middle, to the one behind": (plan_of((A, "0:2"), (C, "2:6"), epoch=2), {2, 3}),
    "middle, to a standby": (plan_of((A, "0:2"), (D, "2:4"), (C, "4:6"), epoch=2), {2, 3}),
    "last, to the one before": (plan_of((A, "0:2"), (B, "2:6"), epoch=2), {4, 5}),
    "last, to a standby": (plan_of((A, "0:2"), (B, "2:4"), (D, "4:6"), epoch=2), {4, 5}),
    "entry, to the one behind": (plan_of((B, "0:4"), (C, "4:6"), epoch=2), {0, 1}),
    "entry, to a standby": (plan_of((D, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2), {0, 1}),
    "two of three": (plan_of((A, "0:6"), epoch=2), {2, 3, 4, 5}),
}
LATE = 20
"""Rows of a session that were not handed over: its last steps, while the ring changed."""


@dataclass
class Leave:
    """Prepares for a plan within an answer, as all nodes of a mesh do, and follows it."""

    places: Sequence[Place]
    plan: Plan
    written: int = 0
    """Tokens of the answer when the plan was followed."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def answer(self) -> list[int]:
        """Return the answer of both rings."""
        ingress = Ingress()
        await ingress.ask(self.places[0], lambda: self._begin(ingress))
        (leaving,) = self.tasks
        await leaving
        after = [place for place in self.places if self.plan.rank(place.me) is not None]
        await until(lambda: at_work(*after))
        (entry,) = [place for place in after if self.plan.rank(place.me) == 0]
        await ingress.ask(entry)
        return ingress.answer

    def _begin(self, ingress: Ingress) -> None:
        self.tasks.append(asyncio.ensure_future(self._leave(ingress)))

    async def _leave(self, ingress: Ingress) -> None:
        for place in self.places:
            place.runtime.prepare(self.plan, is_urgent=True)
        while any(each.runtime.prepared != self.plan for each in self.places):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.written = len(ingress.answer)
        for place in self.places:
            place.runtime.follow(self.plan)


@pytest.mark.parametrize("name", LEAVES)
def test_what_was_handed_over_is_not_computed_again(world: World, rows: Rows, name: str) -> None:
    after, lost = LEAVES[name]

    async def main() -> None:
        async with world.serving(A, B, C, D) as places:
            world.follow(THREE)
            await until(lambda: at_work(*places[:3]))
            undisturbed = Ingress()
            await undisturbed.ask(places[0])
            rows.clear()  # the second time the prompt is cached

            leave = Leave(places, after)
            assert await leave.answer() == undisturbed.answer
            assert BEFORE < leave.written < TOKENS
            told = sum(place.runtime.recomputed for place in places)
            print(name, leave.written, told, dict(rows))
            assert told <= LATE * len(lost)
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in kept_layers(lost))
            assert all(rows[layer] <= TOKENS + IN_FLIGHT + LATE for layer in lost)
            assert len(PROMPT) + BEFORE > LATE

    run_virtual(main())
