"""When an entry lets the plan change although it answers requests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from meshllm.node.agreement.plan_hold import BUSY_S, CALM_S, PlanHold
from meshllm.node.timer import loop_time
from meshllm.testing.clock import run_virtual
from tests.builders.ring_places import call_later


class Held:
    """A hold, and each change that it tells."""

    def __init__(self) -> None:
        self.told: list[bool] = []
        self.hold = PlanHold(lambda: self.told.append(self.hold.may_change), call_later)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_the_plan_is_kept_while_the_entry_serves_and_a_little_longer() -> None:
    async def scenario() -> None:
        held = Held()
        for _ in range(2):
            with held.hold.holding():
                await asyncio.sleep(CALM_S * 3)
                assert not held.hold.may_change
            await asyncio.sleep(CALM_S / 2)
            assert not held.hold.may_change
        await asyncio.sleep(CALM_S)
        assert held.told == [False, True]

    run(scenario)


def test_the_plan_may_change_although_requests_never_end() -> None:
    async def scenario() -> None:
        held, seen = Held(), list[bool]()
        with held.hold.holding():
            await asyncio.sleep(BUSY_S - 1)
            seen.append(held.hold.may_change)
            with held.hold.holding():
                await asyncio.sleep(2)
                seen.append(held.hold.may_change)
            with held.hold.holding():
                seen.append(held.hold.may_change)
        await asyncio.sleep(2 * CALM_S)
        with held.hold.holding():
            seen.append(held.hold.may_change)
        await asyncio.sleep(2 * BUSY_S)
        assert seen == [False, True, True, False]
        assert held.told == [False, True, False, True]

    run(scenario)


def test_the_time_of_an_earlier_hold_does_not_end_a_later_one() -> None:
    async def scenario() -> None:
        held = Held()
        with held.hold.holding():
            await asyncio.sleep(BUSY_S / 2)
        await asyncio.sleep(2 * CALM_S)
        with held.hold.holding():
            await asyncio.sleep(BUSY_S / 2)
            assert not held.hold.may_change
            await asyncio.sleep(BUSY_S / 2 + 1)
            assert held.hold.may_change

    run(scenario)


def test_requests_with_short_pauses_hold_the_plan_as_one_that_does_not_end() -> None:
    async def scenario() -> None:
        held = Held()

        async def ask(seconds: float) -> None:
            until = loop_time() + seconds
            while loop_time() < until:
                with held.hold.holding():
                    await asyncio.sleep(CALM_S / 4)
                await asyncio.sleep(CALM_S / 5)

        await ask(BUSY_S - 1)
        assert held.told == [False]
        await ask(2)
        assert held.told == [False, True]

    run(scenario)
