"""After a loss only the lost layers are computed again, and the text does not change."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from meshllm.errors import OutOfMemory
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.session_cache import SentRows
from meshllm.model.steps.runner import Runner
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.span_loader import LoadedSpan
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.session.messages import Resume, SessionMessage
from meshllm.protocol.session.pace import PrefillPacing
from meshllm.protocol.session.stage import Action, Stage
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A, B, C, D
from tests.builders.ring_takeover import (
    BEFORE,
    IN_FLIGHT,
    PROMPT,
    THREE,
    TOKENS,
    Ingress,
    Rows,
    kept_layers,
    ring_of_three,
)
from tests.builders.ring_world import ALONE, Place, World, at_work, plan_of, until
from tests.builders.slow_cases import each_of


@cache
def answer_of_one(llama: Path, prompt: tuple[int, ...]) -> list[int]:
    """Return the answer of a node that holds the whole model."""

    async def main() -> list[int]:
        world, ingress = World(llama, chunk=CHUNK), Ingress(prompt)
        async with world.serving(A) as places:
            world.follow(ALONE)
            await until(lambda: at_work(*places))
            await ingress.ask(places[0])
        return ingress.answer

    return run_virtual(main())


async def ask_over(
    places: Sequence[Place],
    *plans: Plan,
    prompt: tuple[int, ...] = PROMPT,
    read: Sequence[int] = (),
) -> list[int]:
    """Return the answer of the entries, while one plan after the other replaces the last.

    Each does so within the answer, or after it has ``read`` so many tokens of the prompt.
    """
    ingress, entry = Ingress(prompt), places[0]
    at = iter(read)
    for plan in plans:
        alive = [place for place in places if plan.rank(place.me) is not None]

        def follow(alive: list[Place] = alive, plan: Plan = plan) -> None:
            for place in alive:
                place.runtime.follow(plan)

        ingress.read = next(at, 0)
        await ingress.ask(entry, follow)
        await until(partial(at_work, *alive))
        (entry,) = [place for place in places if plan.rank(place.me) == 0]
    await ingress.ask(entry)
    return ingress.answer


TAKEOVERS = {
    "both neighbours": (plan_of((A, "0:3"), (C, "3:6"), epoch=2), {2, 3}),
    "the one before": (plan_of((A, "0:4"), (C, "4:6"), epoch=2), {2, 3}),
    "the one behind": (plan_of((A, "0:2"), (C, "2:6"), epoch=2), {2, 3}),
    "the entry, for the last": (plan_of((A, "0:2"), (B, "2:6"), epoch=2), {4, 5}),
    "a ring of one": (plan_of((A, "0:6"), epoch=2), {2, 3, 4, 5}),
    "the one behind, for the entry": (plan_of((B, "0:4"), (C, "4:6"), epoch=2), {0, 1}),
    "the last, for the entry": (plan_of((C, "0:2"), (B, "2:6"), epoch=2), {0, 1, 4, 5}),
    "a span that moves on": (plan_of((A, "0:3"), (B, "3:6"), epoch=2), {2, 4, 5}),
    "a span that moves back, and its kept layer": (
        plan_of((B, "0:3"), (C, "3:6"), epoch=2),
        {0, 1, 2, 3},
    ),
    "the last alone": (plan_of((C, "0:6"), epoch=2), {0, 1, 2, 3}),
}


ALIKE = "the one before", "the one behind"
"""What both neighbours show, too."""


@pytest.mark.parametrize("name", each_of(TAKEOVERS, ALIKE))
def test_only_the_lost_layers_are_computed_again(world: World, rows: Rows, name: str) -> None:
    after, lost = TAKEOVERS[name]

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            rows.clear()  # the second time the prompt is cached

            assert await ask_over(places, after) == undisturbed
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in kept_layers(lost))
            held = len(PROMPT) + BEFORE
            assert all(0 <= rows[layer] - TOKENS - held <= IN_FLIGHT for layer in lost)
            told = sum(place.runtime.recomputed for place in places)
            assert 0 <= told - held * len(lost) <= IN_FLIGHT * len(lost)

    run_virtual(main())


def test_a_node_that_becomes_the_entry_from_nothing_computes_its_layers_only(
    world: World, rows: Rows
) -> None:
    standby, after = D, plan_of((D, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2)

    async def main() -> None:
        async with ring_of_three(world, standby) as (places, undisturbed):
            rows.clear()

            assert await ask_over(places, after) == undisturbed
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in range(2, 6))
            held = len(PROMPT) + BEFORE
            told = sum(place.runtime.recomputed for place in places)
            assert 0 <= told - held * 2 <= IN_FLIGHT * 2

    run_virtual(main())


LONG, CHUNK = tuple((7 * i + 3) % 61 for i in range(90)), 4
UNDER_WAY = 4 * CHUNK  # rows of chunks that had not been all round the ring

PREFIXES = None, 0  # bytes: what remains free, or no prefix cache
GATED = {
    "both neighbours": None,
    "the entry, for the last": 0,
    "the one behind, for the entry": 0,
    "a span that moves back, and its kept layer": None,
    "the last alone": 0,
}
"""The kinds of takeover, each with one of these sizes; the rest is slow."""


@pytest.mark.parametrize(
    ("name", "prefix_bytes"),
    [
        pytest.param(name, size, marks=[] if GATED.get(name, ()) == size else [pytest.mark.slow])
        for name in TAKEOVERS
        for size in PREFIXES
    ],
)
def test_a_loss_within_the_prompt_costs_the_lost_layers_and_chunks_under_way(
    llama: Path, rows: Rows, name: str, prefix_bytes: int | None
) -> None:
    (after, lost), world = TAKEOVERS[name], World(llama, prefix_bytes, chunk=CHUNK)
    expected = answer_of_one(llama, LONG)

    async def main() -> None:
        async with world.serving(A, B, C) as places:
            world.follow(THREE)
            await until(lambda: at_work(*places))
            rows.clear()

            answer = await ask_over(places, after, prompt=LONG, read=[60])

            assert answer == expected
            whole = len(LONG) + TOKENS + IN_FLIGHT
            assert all(rows[layer] <= whole + UNDER_WAY for layer in kept_layers(lost))
            assert all(rows[layer] <= whole + 60 + UNDER_WAY for layer in lost)

    run_virtual(main())


def test_a_second_loss_within_the_prompt_costs_no_kept_layer_a_row(llama: Path, rows: Rows) -> None:
    world = World(llama, chunk=CHUNK)
    plans = plan_of((B, "0:4"), (C, "4:6"), epoch=2), plan_of((C, "0:6"), epoch=3)
    expected = answer_of_one(llama, LONG)

    async def main() -> None:
        async with world.serving(A, B, C) as places:
            world.follow(THREE)
            await until(lambda: at_work(*places))
            rows.clear()

            assert await ask_over(places, *plans, prompt=LONG, read=[30, 60]) == expected
            whole = len(LONG) + TOKENS + IN_FLIGHT
            assert all(rows[layer] <= whole + 2 * UNDER_WAY for layer in (4, 5))

    run_virtual(main())


def test_the_rest_of_a_prompt_is_read_in_the_chunks_of_the_first_ring(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, prefill = list[int](), Runner.prefill

    def noted(self: Runner, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        sizes.append(x.shape[1])
        return prefill(self, x, cache, rows)

    monkeypatch.setattr(Runner, "prefill", noted)
    monkeypatch.setattr(
        ModelRuntime, "pace", lambda _, ring, *__: PrefillPacing(chunk=12 // ring, window=2)
    )

    async def main() -> None:
        async with World(llama).serving(A, B, C) as places:
            for place in places:
                place.runtime.follow(THREE)
            await until(lambda: at_work(*places))
            after = TAKEOVERS["the one behind, for the entry"][0]

            await ask_over(places, after, prompt=LONG, read=[60])

        assert max(sizes) == 12 // 3

    run_virtual(main())


TWICE = {
    "the others": (A, (plan_of((A, "0:3"), (C, "3:6"), epoch=2), plan_of((A, "0:6"), epoch=3))),
    "each entry": (C, (plan_of((B, "0:4"), (C, "4:6"), epoch=2), plan_of((C, "0:6"), epoch=3))),
}


@pytest.mark.parametrize("name", TWICE)
def test_two_losses_recompute_what_each_of_them_took(world: World, rows: Rows, name: str) -> None:
    left, plans = TWICE[name]
    kept = set(range(THREE.stages[0].span.stop)) if left == A else {4, 5}

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            rows.clear()

            assert await ask_over(places, *plans) == undisturbed
            assert all(rows[layer] <= TOKENS + 2 * IN_FLIGHT for layer in kept)
            held = 2 * len(PROMPT) + 3 * BEFORE
            assert all(rows[layer] <= TOKENS + held + 2 * IN_FLIGHT for layer in {*range(6)} - kept)

    run_virtual(main())


@pytest.mark.parametrize("reached", [False, True])
def test_a_loss_before_all_ranks_have_resumed_recomputes_no_more(
    world: World, rows: Rows, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    between, after = (plan_of((A, "0:3"), (C, "3:6"), epoch=epoch) for epoch in (2, 3))
    receive = Stage.receive

    def received(stage: Stage, message: SessionMessage, now: float) -> list[Action]:
        """Lose all messages of the ring between, the Resume perhaps not."""
        if stage.epoch == between.epoch and not (reached and isinstance(message, Resume)):
            return []
        return receive(stage, message, now)

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            rows.clear()
            ingress, entry, left = Ingress(), places[0], (places[0], places[2])

            def follow(plan: Plan) -> None:
                for place in left:
                    place.runtime.follow(plan)

            await ingress.ask(entry, lambda: follow(between))
            await until(partial(at_work, *left))
            asking = asyncio.ensure_future(ingress.ask(entry))
            await asyncio.sleep(0.5)
            follow(after)
            await asking
            await until(partial(at_work, *left))
            await ingress.ask(entry)

            assert ingress.answer == undisturbed
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in (0, 1, 4, 5))

    monkeypatch.setattr(Stage, "receive", received)
    run_virtual(main())


def test_an_entry_from_nothing_knows_what_was_lost_before_the_ring_between_opened(
    world: World, rows: Rows
) -> None:
    between = plan_of((A, "0:3"), (C, "3:6"), epoch=2)
    after = plan_of((D, "0:3"), (C, "3:6"), epoch=3)

    async def main() -> None:
        async with ring_of_three(world, D) as (places, undisturbed):
            rows.clear()
            ingress, left = Ingress(), places[2:]

            def lose_two() -> None:
                for place in left:
                    place.runtime.follow(between)
                    place.runtime.follow(after)

            await ingress.ask(places[0], lose_two)
            await until(partial(at_work, *left))
            await ingress.ask(places[3])

            assert ingress.answer == undisturbed
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in (4, 5))

    run_virtual(main())


WITHOUT_ROOMS = {
    "takes layers over": (
        plan_of((A, "0:3"), (C, "3:6"), epoch=2),
        plan_of((A, "0:6"), epoch=3),
        (0, 1),
    ),
    "gives layers away, and takes them back": (
        plan_of((A, "0:1"), (B, "1:4"), (C, "4:6"), epoch=2),
        plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), epoch=3),
        (4, 5),
    ),
}


@pytest.mark.parametrize("name", WITHOUT_ROOMS)
def test_caches_outlive_a_plan_of_which_a_node_has_left(
    world: World, rows: Rows, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    between, after, kept = WITHOUT_ROOMS[name]

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            rows.clear()
            ingress, entry = Ingress(), places[0]
            alive = [place for place in places if after.rank(place.me) is not None]

            def follow(plan: Plan) -> None:
                for place in alive:
                    place.runtime.follow(plan)

            with monkeypatch.context() as patch:
                patch.setattr(entry, "rooms", lambda _: None)
                await ingress.ask(entry, lambda: follow(between))
                await until(lambda: entry.told[-1][0])
            follow(after)
            await until(partial(at_work, *alive))
            await ingress.ask(entry)

            assert ingress.answer == undisturbed
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in kept)

    run_virtual(main())


def test_caches_make_room_for_the_layers_of_a_plan_of_which_a_node_has_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, tries = ModelRuntime.hold, list[bool]()
    held_before: Callable[[], object] = lambda: None  # noqa: E731  # a weak reference

    async def held(self: ModelRuntime, *plan: Any, has_caches: bool) -> LoadedSpan:
        tries.append(has_caches)
        if held_before():
            raise OutOfMemory("no room")
        return await hold(self, *plan, has_caches=has_caches)

    async def main() -> None:
        nonlocal held_before
        async with ring_of_three(world) as ((entry, *_), _):
            store = entry.runtime._held.store
            assert store is not None
            held_before = ref(next(iter(store.prefixes.caches.values())))
            del store
            monkeypatch.setattr(entry, "rooms", lambda _: None)
            monkeypatch.setattr(ModelRuntime, "hold", held)
            entry.runtime.follow(plan_of((A, "0:3"), (C, "3:6"), epoch=2))
            await until(lambda: entry.told[-1][0])

            assert tries == [True, False]

    run_virtual(main())


SAME_ENTRY = [name for name, (plan, _) in TAKEOVERS.items() if plan.stages[0].node == A]


@pytest.mark.parametrize("name", each_of(SAME_ENTRY, ALIKE))
def test_a_prompt_that_shares_a_prefix_computes_again_the_lost_layers_only(
    llama: Path, rows: Rows, name: str
) -> None:
    (after, lost), world, shared = TAKEOVERS[name], World(llama, chunk=CHUNK), 24
    ingress = Ingress(PROMPT[:shared] + PROMPT[:16])
    expected = answer_of_one(llama, ingress.prompt)

    async def main() -> None:
        async with ring_of_three(world) as (places, _):
            world.follow(after)
            alive = [place for place in places if after.rank(place.me) is not None]
            await until(lambda: at_work(*alive))
            rows.clear()

            await ingress.ask(places[0])

            assert (ingress.answer, ingress.reused) == (expected, shared)
            new = len(ingress.prompt) - shared + TOKENS - 1  # the last one is only sampled
            assert all(rows[layer] <= new + IN_FLIGHT for layer in kept_layers(lost))
            assert all(0 <= rows[layer] - new - shared <= IN_FLIGHT for layer in lost)

    run_virtual(main())


def test_no_prompt_continues_from_an_answer_whose_tokens_were_only_claimed(world: World) -> None:
    plan = TAKEOVERS["the one behind, for the entry"][0]

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            await ask_over(places, plan)
            again = Ingress()
            await again.ask(places[1])

            assert again.answer == undisturbed
            assert again.reused == 0

    run_virtual(main())


@pytest.mark.parametrize("prefix_bytes", [0, 1])
def test_without_room_in_the_prefix_cache_an_answer_goes_on_where_it_was(
    llama: Path, rows: Rows, prefix_bytes: int
) -> None:
    world = World(llama, prefix_bytes)

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            rows.clear()

            assert await ask_over(places, TAKEOVERS["the one before"][0]) == undisturbed
            whole = len(PROMPT) + TOKENS
            assert all(rows[layer] <= whole + IN_FLIGHT for layer in kept_layers({2, 3}))

    run_virtual(main())


def test_rows_that_every_layer_computes_again_are_counted(
    world: World, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRuntime, "resumes", False)

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            rows.clear()

            assert await ask_over(places, TAKEOVERS["the one before"][0]) == undisturbed
            held = len(PROMPT) + BEFORE - 1
            told = sum(place.runtime.recomputed for place in places)
            assert 0 <= told - held * 6 <= IN_FLIGHT * 6
            assert sum(rows.values()) >= told

    run_virtual(main())


def test_rows_that_were_not_recorded_cost_time_and_no_text(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SentRows, "record", lambda *_: None)

    async def main() -> None:
        async with ring_of_three(world) as (places, undisturbed):
            for epoch, name in enumerate(("the one before", "the one behind"), start=2):
                plan = replace(TAKEOVERS[name][0], epoch=epoch)
                assert await ask_over(places, plan) == undisturbed
                places[1].runtime.follow(None)

    run_virtual(main())
