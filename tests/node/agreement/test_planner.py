import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from threading import current_thread
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from meshllm.node.agreement import planner as module
from meshllm.node.agreement.planner import Planner
from meshllm.protocol.agreement import grouping
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.grouping import group_nodes, ring_of, shortage
from meshllm.protocol.agreement.takeover import takeover
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.trust.identity import NodeKey
from meshllm.testing.clock import run_virtual
from tests.builders.sharing import served_model, shared_mesh
from tests.builders.snapshots import World, profile
from tests.builders.waiting import until

A, B = (NodeKey(bytes([n]) * 32).node for n in range(2))

T = TypeVar("T")

PLAN_S = 1.0
GROUPING_S = 2.5


class Case:
    """A planner whose work takes time, and its inputs."""

    def __init__(self) -> None:
        self.worlds = [World({A: profile(4)}), World({A: profile(4), B: profile(4)})]
        self.view: MeshView | None = self.worlds[0].view(A)
        self.told: list[tuple[float, Agreement | None]] = []
        self.grouped_at: list[float] = []
        self.planner = Planner(lambda: self.view, self.agreed, self.think, grouped=self.grouped)
        self.jobs: list[Callable[..., Any]] = []

    def agreed(self) -> None:
        self.told.append((asyncio.get_running_loop().time(), self.planner.agreement))

    def grouped(self) -> None:
        self.grouped_at.append(asyncio.get_running_loop().time())

    async def think(self, function: Callable[..., T], /, *args: Any) -> T:
        self.jobs.append(function)
        await asyncio.sleep({group_nodes: GROUPING_S, shortage: 0.0}.get(function, PLAN_S))
        return function(*args)

    def learn(self, world: int) -> None:
        self.view = self.worlds[world].view(A)
        self.planner.invalidate()

    def share(self, memory: int) -> MeshView:
        """Learn records of two models and one node, which can serve both with enough memory."""
        mesh = shared_mesh({0: memory}, served_model(0, 3), served_model(1, 3))
        self.view = mesh.view()
        self.planner.invalidate()
        return self.view

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.planner.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_without_a_charter_nothing_is_planned() -> None:
    async def scenario() -> None:
        case = Case()
        case.view = None
        async with case.running():
            case.planner.invalidate()
            await asyncio.sleep(5)
        assert not case.told
        assert not case.jobs

    run_virtual(scenario())


def test_the_result_of_an_old_view_is_dropped() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            case.learn(0)
            await asyncio.sleep(0.5)
            case.learn(1)
            await asyncio.sleep(5)

        assert [at for at, _ in case.told] == [2 * PLAN_S]
        assert case.planner.agreement == agree(case.worlds[1].view(A))

    run_virtual(scenario())


def test_an_invalidation_without_a_change_drops_nothing() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            case.learn(0)
            await asyncio.sleep(0.5)
            case.learn(0)
            await asyncio.sleep(5)

        assert [at for at, _ in case.told] == [PLAN_S, 2 * PLAN_S]

    run_virtual(scenario())


def test_constant_changes_do_not_starve_planning() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            for turn in range(40):
                case.learn(turn % 2)
                await asyncio.sleep(0.3 * PLAN_S)

        assert len(case.told) >= 4

    run_virtual(scenario())


def test_groups_are_computed_beside_the_agreement() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            view = case.share(700)
            await asyncio.sleep(5)

        assert [at for at, _ in case.told] == [PLAN_S]
        assert case.grouped_at == [GROUPING_S]
        assert case.planner.parts == group_nodes(view)
        assert case.planner.parts

    run_virtual(scenario())


def test_what_groups_lack_is_computed_with_them_off_the_event_loop() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            view = case.share(100)
            await asyncio.sleep(5)
            assert case.planner.lacks == shortage(view) != {}
            assert case.jobs.count(shortage) == 1
            case.learn(0)  # of one model
            await asyncio.sleep(5)

        assert case.planner.lacks == {}
        assert case.jobs.count(shortage) == 1

    run_virtual(scenario())


def test_an_agreement_does_not_wait_for_groups_of_older_records() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            case.share(700)
            await asyncio.sleep(PLAN_S + 0.1)
            view = case.share(900)
            await asyncio.sleep(2 * GROUPING_S)

        assert [at for at, _ in case.told] == [PLAN_S, 2 * PLAN_S + 0.1]
        assert case.grouped_at == [2 * GROUPING_S]  # the first result was dropped
        assert case.planner.parts == group_nodes(view)

    run_virtual(scenario())


def test_without_several_models_there_are_no_groups() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            case.share(700)
            await asyncio.sleep(5)
            case.learn(0)
            await asyncio.sleep(5)

        assert case.grouped_at == [GROUPING_S, 5.0]
        assert case.planner.parts == {}
        assert case.jobs.count(group_nodes) == 1

    run_virtual(scenario())


def test_the_planner_of_a_further_ring_computes_no_groups() -> None:
    async def scenario() -> None:
        case = Case()
        case.planner = Planner(lambda: case.view, case.agreed, case.think)
        async with case.running():
            case.share(700)
            await asyncio.sleep(5)

        assert len(case.told) == 1
        assert group_nodes not in case.jobs

    run_virtual(scenario())


def test_advice_is_computed_once_per_stable_agreement() -> None:
    async def scenario() -> None:
        case = Case()
        async with case.running():
            for _ in range(3):
                case.learn(0)
                await asyncio.sleep(5)

        assert len(case.told) == 3
        assert case.jobs.count(advise) == 1
        assert "computes" in case.planner.advice

    run_virtual(scenario())


def test_what_a_standby_prepares_for_is_computed_with_the_advice() -> None:
    async def scenario() -> None:
        case, told = Case(), list[Plan | None]()
        planner = Planner(lambda: case.view, lambda: None, case.think, told.append)
        case.planner = planner
        async with case.running():
            case.learn(1)
            await asyncio.sleep(5)
            agreement = planner.agreement
            assert agreement is not None
            assert told == [takeover(agreement)]
        assert case.jobs.count(takeover) == 1

    run_virtual(scenario())


def test_what_is_computed_for_the_ring_before_a_move_is_dropped() -> None:
    async def scenario() -> None:
        case, told = Case(), list[Plan | None]()
        case.planner = Planner(lambda: case.view, lambda: None, case.think, told.append)
        async with case.running():
            case.learn(1)
            await asyncio.sleep(PLAN_S + module.QUIET_S + PLAN_S / 2)
            assert advise in case.jobs  # it is not done yet
            case.view = None
            case.planner.move()
            await asyncio.sleep(5)
            assert (case.planner.advice, told) == ("", [])
            case.learn(1)
            await asyncio.sleep(5)
            assert (bool(case.planner.advice), len(told)) == (True, 1)

    run_virtual(scenario())


async def test_planning_and_advice_run_off_the_event_loop() -> None:
    threads = list[str]()

    def noting(function: Callable[..., T]) -> Callable[..., T]:
        def note(*args: Any) -> T:
            threads.append(current_thread().name)
            return function(*args)

        return note

    with (
        patch.object(grouping, "ring_of", noting(ring_of)),
        patch.object(grouping, "agree", noting(agree)),
        patch.object(module, "advise", noting(advise)),
        patch.object(module, "QUIET_S", 0.0),
    ):
        case = Case()
        planner = Planner(lambda: case.view, case.agreed, asyncio.to_thread)
        task = asyncio.ensure_future(planner.run())
        planner.invalidate()
        await until(lambda: planner.advice)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert len(threads) == 3
    assert current_thread().name not in threads


def test_a_bug_ends_the_planner() -> None:
    def fail(*_: Any) -> Agreement:
        raise ValueError("a bug")

    async def scenario() -> None:
        case = Case()
        case.planner.invalidate()
        await case.planner.run()

    with patch.object(grouping, "agree", fail), pytest.raises(ExceptionGroup) as raised:
        run_virtual(scenario())

    assert raised.group_contains(ValueError, match="a bug")
