"""How long models take to load that were asked for here."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from meshllm.names import ModelKey
from meshllm.node.agreement.load_times import ModelLoadTimes
from meshllm.testing.clock import run_virtual

BIG, SMALL = ModelKey(b"b" * 16), ModelKey(b"s" * 16)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


async def load(times: ModelLoadTimes, *, has_plan: bool = False, span_bytes: int = 1000) -> None:
    times.ask(BIG, has_plan=has_plan)
    if not has_plan:
        await asyncio.sleep(500)  # no node is free
        times.look(BIG, has_plan=True)
        await asyncio.sleep(5)
        times.look(BIG, has_plan=False)  # a node of the plan is lost
        await asyncio.sleep(500)
    times.look(BIG, has_plan=True)
    await asyncio.sleep(60)
    times.look(BIG, has_plan=True)  # another plan
    await asyncio.sleep(40)
    times.served(BIG, span_bytes)


def test_a_load_tells_how_long_the_next_one_takes() -> None:
    async def scenario() -> None:
        times = ModelLoadTimes()
        await load(times)
        assert not times.awaited
        times.ask(SMALL, has_plan=False)
        await asyncio.sleep(5)
        assert times.retry_s(SMALL, 500) == 50
        times.look(SMALL, has_plan=True)
        await asyncio.sleep(30)
        assert times.retry_s(SMALL, 500) == 20
        assert times.awaited == (SMALL,)

    run(scenario)


@pytest.mark.parametrize(
    "load_of", [{"has_plan": True}, {"span_bytes": 0}], ids=["had begun before", "no size"]
)
def test_what_is_not_known_of_a_load_is_not_measured(load_of: dict[str, Any]) -> None:
    async def scenario() -> None:
        times = ModelLoadTimes()
        await load(times, **load_of)
        times.ask(SMALL, has_plan=False)
        await asyncio.sleep(30)
        assert times.retry_s(SMALL, 500) == 30  # that of the wait

    run(scenario)


def test_later_requests_wait_for_the_same_load() -> None:
    async def scenario() -> None:
        times = ModelLoadTimes()
        for has_plan in (False, True):
            times.ask(BIG, has_plan=has_plan)
            times.look(BIG, has_plan=True)
            await asyncio.sleep(30)
        assert times.retry_s(BIG, 0) == 60
        times.served(BIG, 1000)
        times.ask(BIG, has_plan=False)
        assert times.retry_s(BIG, 1000) == 60

    run(scenario)


def test_a_model_that_nobody_wants_any_more_is_not_measured() -> None:
    async def scenario() -> None:
        times = ModelLoadTimes()
        times.ask(BIG, has_plan=False)
        await asyncio.sleep(500)
        times.forget(BIG)
        await load(times, has_plan=True)
        assert times.retry_s(BIG, 1000) == 1  # nobody waits

    run(scenario)


def test_a_load_that_had_begun_has_taken_as_long_as_the_wait_at_least() -> None:
    async def scenario() -> None:
        times = ModelLoadTimes()
        await load(times)
        times.ask(BIG, has_plan=True)
        await asyncio.sleep(30)
        assert times.retry_s(BIG, 1000) == 70
        await asyncio.sleep(90)
        assert times.retry_s(BIG, 1000) == 120  # longer than expected: the wait doubles

    run(scenario)


def test_a_ring_that_serves_already_was_not_loaded_now() -> None:
    async def scenario() -> None:
        times = ModelLoadTimes()
        await load(times)
        times.ask(BIG, has_plan=False)  # no node is linked yet
        times.look(BIG, has_plan=True)
        times.served(BIG, 1000)
        times.ask(BIG, has_plan=True)
        assert times.retry_s(BIG, 1000) == 100

    run(scenario)
