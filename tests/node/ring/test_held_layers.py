"""Layers that a rank holds: loaded in advance, lent, used, and released."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from meshllm.model.steps.runner import Runner
from meshllm.names import SessionId, Span
from meshllm.node.ring.span_loader import SpanLoader
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.session.stage import Keep
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A, B, C
from tests.builders.ring_world import BOTH, Place, World, at_work, plan_of, tokens, until

AFTER = plan_of((A, "0:2"), (C, "2:6"), epoch=2)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """Note the layers of each part that is loaded."""
    noted, build = list[Span](), SpanLoader._build

    def note(loader: SpanLoader, span: Span, **more: Any) -> Runner:
        noted.append(span)
        return build(loader, span, **more)

    monkeypatch.setattr(SpanLoader, "_build", note)
    return noted


async def served_without_c(world: World) -> Place:
    """Form a ring of A and B; return C, which has no layers."""
    world.follow(BOTH)
    ring = [world.places[node] for node in (A, B)]
    await until(lambda: at_work(*ring))
    return world.places[C]


async def prepared_c(world: World) -> Place:
    """Form a ring of A and B; return C, which has loaded layers in advance."""
    standby = await served_without_c(world)
    standby.runtime.prepare(AFTER)
    await until(lambda: standby.runtime.preloaded == AFTER)
    return standby


def test_a_takeover_of_layers_that_were_loaded_in_advance_loads_nothing(
    world: World, built: list[Span]
) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            built.clear()
            standby.runtime.prepare(AFTER)
            await until(lambda: standby.runtime.preloaded == AFTER)
            assert built == [Span(2, 6)]
            built.clear()

            world.places[B].runtime.follow(None)
            for node in (A, C):
                world.places[node].runtime.follow(AFTER)
            await until(lambda: at_work(world.places[A], standby))

            assert built == []
            assert standby.runtime.preloaded is None

    run_virtual(main())


def test_layers_of_the_plan_in_force_are_not_released_before_they_are_used(
    world: World, built: list[Span]
) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await prepared_c(world)
            built.clear()

            world.follow(AFTER)
            standby.runtime.prepare(None)  # it takes over nothing any more; the compute thread lags
            await until(lambda: at_work(world.places[A], standby))

            assert built == []

    run_virtual(main())


def test_layers_for_a_plan_that_was_replaced_at_once_are_released(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await prepared_c(world)

            standby.runtime.follow(AFTER)
            world.follow(replace(BOTH, epoch=3))
            standby.runtime.prepare(None)
            await until(lambda: standby.runtime.preloaded is None)

            assert not standby.runtime._model.runners

    run_virtual(main())


class SlowThread(Executor):
    """Takes 5 s of virtual time for each function, and cannot be stopped in one."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def submit(self, function: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        loop, future = asyncio.get_running_loop(), Future[Any]()
        future.set_running_or_notify_cancel()
        self._free_at = max(self._free_at, loop.time()) + 5
        loop.call_at(self._free_at, lambda: future.set_result(function(*args, **more)))
        return future


@pytest.mark.parametrize("apart_s", [0, 1, 12])
def test_layers_that_are_loaded_too_late_are_released(world: World, apart_s: int) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            standby.runtime._model.worker._executor = SlowThread()
            standby.runtime.prepare(AFTER, is_urgent=True)
            await asyncio.sleep(7)  # it loads
            standby.runtime.follow(AFTER)
            await asyncio.sleep(apart_s)
            world.follow(replace(BOTH, epoch=3))
            for _ in range(3):
                standby.runtime.prepare(None)
                await asyncio.sleep(60)

            assert (standby.runtime.preloaded, standby.runtime._model.runners) == (None, set())

    run_virtual(main())


def test_layers_that_are_loading_are_not_loaded_again_for_another_plan(
    world: World, built: list[Span]
) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            standby.runtime._model.worker._executor = SlowThread()
            built.clear()
            standby.runtime.prepare(AFTER, is_urgent=True)
            await asyncio.sleep(12)  # it loads
            later = replace(AFTER, epoch=3)
            standby.runtime.prepare(later, is_urgent=True)
            await until(lambda: standby.runtime.preloaded == later)

            assert built == [Span(2, 6)]

    run_virtual(main())


def test_what_is_foreseen_no_more_is_released(world: World, built: list[Span]) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            for plan in (AFTER, plan_of((A, "0:4"), (C, "4:6"), epoch=2), None, AFTER):
                standby.runtime.prepare(plan)
                await until(lambda plan=plan: standby.runtime.preloaded == plan)  # type: ignore[misc]  # a closure
            assert built[-3:] == [Span(2, 6), Span(4, 6), Span(2, 6)]

    run_virtual(main())


def test_the_same_layers_are_loaded_once_for_several_plans(world: World, built: list[Span]) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            built.clear()
            for epoch in (2, 3, 4):
                standby.runtime.prepare(replace(AFTER, epoch=epoch))
                world.follow(replace(BOTH, epoch=epoch))
                await until(lambda epoch=epoch: _epoch(standby) == epoch)  # type: ignore[misc]  # a closure
            assert built.count(Span(2, 6)) <= 2  # that of C, and perhaps of B

    run_virtual(main())


def _epoch(place: Place) -> int:
    return place.runtime.preloaded.epoch if place.runtime.preloaded else 0


THREE = plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2)
TURNED = plan_of((B, "0:4"), (A, "4:6"), epoch=2)


@pytest.mark.parametrize("after", [THREE, AFTER, TURNED], ids=["join", "leave", "another order"])
def test_a_ring_serves_while_the_layers_of_the_next_one_are_loaded(
    world: World, built: list[Span], after: Plan
) -> None:
    async def main() -> None:
        async with world.serving(A, B, C) as (a, _, _):
            await served_without_c(world)
            before = await tokens(a)
            built.clear()
            nodes = [world.places[stage.node] for stage in after.stages]
            for place in nodes:
                place.runtime.prepare(after, is_urgent=True)
                assert await tokens(a) == before
            await until(lambda: all(place.runtime.prepared == after for place in nodes))
            assert at_work(a, world.places[B])
            assert await tokens(a) == before
            built.clear()

            world.follow(after)
            await until(lambda: at_work(*nodes))

            assert [span for span in built if span] == []  # but a part of the LM head
            assert await tokens(nodes[0]) == before
            assert not any(place.runtime.prepared for place in nodes)

    run_virtual(main())


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave room for the caches of few tokens."""
    monkeypatch.setattr(Place, "rooms", lambda _, plan: [1 << 21] * len(plan.stages))


@pytest.mark.usefixtures("narrow")
def test_layers_loaded_in_advance_make_room_for_a_session(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            await served_without_c(world)
            runtime = world.places[B].runtime
            runtime.prepare(TURNED, is_urgent=True)
            await until(lambda: runtime.prepared == TURNED)
            assert runtime.preloaded == TURNED
            held = len(runtime._model.runners)
            assert runtime.stage is not None
            budget = runtime.stage.budget

            assert budget.reserve(SessionId(bytes(16)), budget.tokens)
            await until(lambda: runtime.prepared == TURNED and runtime.preloaded is None)

            assert len(runtime._model.runners) < held
            assert at_work(world.places[A], world.places[B])

    run_virtual(main())


@pytest.mark.usefixtures("narrow")
def test_layers_loaded_in_advance_are_lent_as_the_plan_for_them_requests(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            await served_without_c(world)
            runtime = world.places[B].runtime
            assert runtime.stage is not None
            budget, later = runtime.stage.budget, replace(TURNED, epoch=TURNED.epoch + 1)
            is_preloaded = lambda plan: runtime.preloaded == plan  # noqa: E731
            for plan, is_urgent in [(TURNED, False), (later, True), (TURNED, False)]:
                runtime.prepare(plan, is_urgent=is_urgent)
                await until(partial(is_preloaded, plan))
                assert budget._lent > 0
                assert budget._is_urgent == is_urgent

    run_virtual(main())


@pytest.mark.usefixtures("narrow")
def test_layers_loaded_in_advance_stay_lent_when_the_ring_forms_again(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            await served_without_c(world)
            places, runtime = (world.places[A], world.places[B]), world.places[B].runtime
            runtime.prepare(TURNED, is_urgent=True)
            await until(lambda: runtime.preloaded == TURNED)
            before = runtime.stage
            assert before is not None
            assert (lent := before.budget._lent) > 0

            await world.links[-1].close()
            await until(lambda: runtime.stage not in {None, before} and at_work(*places))

            assert runtime.stage is not None
            assert runtime.stage.budget._lent == lent
            assert runtime.stage.budget._is_urgent

    run_virtual(main())


@pytest.mark.usefixtures("narrow")
def test_a_cache_that_is_about_to_be_kept_makes_room_too(world: World) -> None:
    session = SessionId(bytes(16))

    async def main() -> None:
        async with world.serving(A, B, C):
            await served_without_c(world)
            runtime = world.places[B].runtime
            stage, store = runtime.stage, runtime._held.store
            assert stage is not None
            assert store is not None
            stage._session(session)
            store.prefixes.index.put(session, 1, stage.budget.tokens, 0.0)
            stage._changes.append(Keep(session))  # waits for its turn on the compute thread

            runtime.prepare(TURNED, is_urgent=True)
            await until(lambda: runtime.preloaded == TURNED)
            stage._steps.submit_brief(session, stage._change_next)
            await until(lambda: not stage._changes)

            assert not store.prefixes.index.holds(session)
            assert session not in store.prefixes.caches
            assert stage.sessions == 0

    run_virtual(main())


@pytest.mark.usefixtures("narrow")
def test_a_node_without_room_has_prepared_what_it_can(world: World, built: list[Span]) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            await served_without_c(world)
            runtime = world.places[B].runtime
            assert runtime.stage is not None
            budget = runtime.stage.budget
            assert budget.reserve(SessionId(bytes(16)), budget.tokens)
            built.clear()

            runtime.prepare(TURNED, is_urgent=True)
            await until(lambda: runtime.prepared == TURNED)

            assert built == []
            assert runtime.preloaded is None

    run_virtual(main())


def test_a_plan_without_this_node_needs_no_preparation(world: World, built: list[Span]) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            await served_without_c(world)
            built.clear()
            runtime = world.places[B].runtime
            runtime.prepare(AFTER, is_urgent=True)
            await until(lambda: runtime.prepared == AFTER)
            assert built == []
            assert at_work(world.places[A], world.places[B])

    run_virtual(main())


def test_layers_that_do_not_fit_into_free_memory_are_not_loaded_in_advance(
    world: World, built: list[Span], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.node.ring.model_runtime.free_memory", lambda: 1000)

    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            built.clear()
            standby.runtime.prepare(AFTER)
            await asyncio.sleep(10)
            assert built == []
            assert standby.runtime.preloaded is None

    run_virtual(main())


def test_nothing_is_loaded_in_advance_while_the_compute_thread_is_busy(
    world: World, built: list[Span]
) -> None:
    async def main() -> None:
        async with world.serving(A, B, C):
            standby = await served_without_c(world)
            built.clear()
            worker = standby.runtime._model.worker
            standby.runtime.prepare(AFTER)
            for _ in range(20):
                worker.start(int)
                await asyncio.sleep(0.5)
            assert built == []
            await until(lambda: standby.runtime.preloaded == AFTER)

    run_virtual(main())
