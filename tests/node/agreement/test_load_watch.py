"""Which nodes of a plan are late with loading or linking."""

import asyncio
from collections.abc import Callable, Coroutine
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.names import FIRST_GROUP, NodeId
from meshllm.node.agreement.load_watch import LOAD_S, MAX_UNLOADS, ModelLoadWatch, is_formed
from meshllm.protocol.membership.link_table import BEAT
from meshllm.protocol.membership.records import StateRecord
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.forming import LINK_S
from meshllm.testing.clock import run_virtual
from tests.builders.ring_places import ALONE, ENTRY, PLAN, STAGE, call_later, loaded
from tests.builders.snapshots import charter


class Watched:
    """A ring of two nodes, watched by its entry."""

    def __init__(self) -> None:
        self.states: dict[NodeId, StateRecord] = {ENTRY: loaded()}
        self.late: list[NodeId] = []
        self.ring = SimpleNamespace(plan=None, missing=None)
        self.machine = cast("Any", SimpleNamespace(
            me=ENTRY, states=self.states, alive={ENTRY, STAGE}, profiles={}, charter=charter(),
            woke=-inf,
        ))  # fmt: skip
        self.watch = ModelLoadWatch(self.machine, self.late.append, call_later)

    def follow(self, plan: Plan = PLAN) -> None:
        self.ring.plan = plan
        self.watch.begin(cast("Any", self.ring), FIRST_GROUP)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


@pytest.mark.parametrize("loads", [True, False])
def test_a_node_that_does_not_load_in_time_is_late(*, loads: bool) -> None:
    async def scenario() -> None:
        case = Watched()
        case.follow()
        await asyncio.sleep(LOAD_S - 1)
        assert case.late == []
        if loads:
            case.states[STAGE] = loaded()
        await asyncio.sleep(2)
        assert case.late == ([] if loads else [STAGE])

    run(scenario)


def test_a_plan_loads_until_its_living_nodes_have_loaded() -> None:
    async def scenario() -> None:
        case = Watched()
        assert case.watch.until == 0
        case.follow()
        assert not is_formed(case.machine, PLAN)
        assert case.watch.until >= LOAD_S
        case.states[STAGE] = loaded()
        assert case.watch.until == 0
        assert is_formed(case.machine, PLAN)
        case.states[STAGE] = StateRecord()
        case.machine.alive.discard(STAGE)
        assert case.watch.until == 0

    run(scenario)


def test_a_node_that_takes_back_that_it_has_loaded_may_load_again_in_time() -> None:
    async def scenario() -> None:
        case = Watched()
        case.follow()
        case.states[STAGE] = loaded()
        case.follow()
        await asyncio.sleep(LOAD_S + 1)
        case.states[STAGE] = StateRecord()  # it restarts
        case.follow()
        await asyncio.sleep(LOAD_S - 1)
        assert case.late == []
        await asyncio.sleep(2)
        assert case.late == [STAGE]

    run(scenario)


def test_a_node_that_takes_back_again_and_again_that_it_has_loaded_is_late() -> None:
    async def scenario() -> None:
        case = Watched()
        case.follow()
        for _ in range(MAX_UNLOADS + 1):
            assert case.late == []
            for state in (loaded(), StateRecord()):
                case.states[STAGE] = state
                await asyncio.sleep(1)
                case.follow()
        assert case.late == [STAGE]

    run(scenario)


def test_a_plan_is_watched_once() -> None:
    async def scenario() -> None:
        case = Watched()
        case.follow()
        until = case.watch.until
        await asyncio.sleep(LOAD_S / 2)
        case.follow()
        assert case.watch.until == until

    run(scenario)


def test_a_plan_is_watched_again_after_its_ring_has_begun_again() -> None:
    async def scenario() -> None:
        case = Watched()
        case.follow()
        case.watch.end()
        await asyncio.sleep(2 * LOAD_S)
        assert case.late == []
        case.follow()
        assert case.watch.until >= LOAD_S
        await asyncio.sleep(LOAD_S + 1)
        assert case.late == [STAGE]

    run(scenario)


def test_a_neighbour_that_does_not_link_is_late() -> None:
    async def scenario() -> None:
        case = Watched()
        case.states[STAGE] = loaded()
        case.follow()
        await asyncio.sleep(3 * LINK_S)
        assert case.late == []
        case.ring.missing = STAGE
        await asyncio.sleep(LINK_S)
        assert case.late == [STAGE]

    run(scenario)


class Suspended:
    """Calls back, but what is due while the process is suspended only when it wakes."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin, self._end = begin, end

    def __call__(self, delay_s: float, callback: Callable[..., None], /, *args: object) -> None:
        now = asyncio.get_running_loop().time()
        due = now + delay_s
        at = self._end if self._begin <= due < self._end else due
        call_later(at - now, callback, *args)


@pytest.mark.parametrize("comes_back", [True, False])
def test_nodes_get_time_after_this_one_was_suspended_before_they_are_late(
    *, comes_back: bool
) -> None:
    async def scenario() -> None:
        case = Watched()
        wakes_at = 3 * LOAD_S
        case.watch = ModelLoadWatch(case.machine, case.late.append, Suspended(LOAD_S / 2, wakes_at))
        case.ring.missing = STAGE
        case.follow()
        await asyncio.sleep(wakes_at)
        case.machine.woke = wakes_at
        await asyncio.sleep(1)
        assert case.late == []
        if comes_back:
            case.states[STAGE], case.ring.missing = loaded(), None
        await asyncio.sleep(3 * LINK_S)
        assert set(case.late) == (set() if comes_back else {STAGE})

    run(scenario)


@pytest.mark.parametrize("has_loaded", [False, True])
def test_an_overloaded_node_finds_late_ones_too(*, has_loaded: bool) -> None:
    def late(delay_s: float, callback: Callable[..., None], /, *args: object) -> None:
        call_later(delay_s + 2 * BEAT, callback, *args)

    async def scenario() -> None:
        case = Watched()
        case.watch = ModelLoadWatch(case.machine, case.late.append, late)
        case.machine.woke = inf  # at each check
        if has_loaded:
            case.states[STAGE], case.ring.missing = loaded(), STAGE
        case.follow()
        await asyncio.sleep(2 * LINK_S)
        assert case.late == []
        await asyncio.sleep(LOAD_S + 4 * LINK_S)
        assert set(case.late) == {STAGE}

    run(scenario)


def test_a_neighbour_is_not_late_because_this_node_was_suspended_between_two_checks() -> None:
    async def scenario() -> None:
        case = Watched()
        case.states[STAGE] = loaded()
        case.follow()
        case.ring.missing = STAGE
        case.machine.woke = LINK_S / 2
        await asyncio.sleep(LINK_S + 2)
        assert case.late == []
        await asyncio.sleep(LINK_S + 2)
        assert case.late == [STAGE]

    run(scenario)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_plan_that_was_replaced_or_left_in_time_has_no_late_node(*, is_left: bool) -> None:
    async def scenario() -> None:
        case = Watched()
        case.follow()
        case.ring.missing = STAGE
        if is_left:
            case.watch.end()
        else:
            case.ring.missing = None
            case.follow(ALONE)
        await asyncio.sleep(2 * LOAD_S)
        assert case.late == []

    run(scenario)
