"""How long models take to load that were asked for here."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from meshllm.names import ModelKey
from meshllm.node.agreement.load_times import LoadTimes
from meshllm.testing.clock import run_virtual

BIG, SMALL = ModelKey(b"b" * 16), ModelKey(b"s" * 16)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(story())


async def load(times: LoadTimes, *, is_unloaded: bool = True, span_bytes: int = 1000) -> None:
    times.ask(BIG, is_unloaded=is_unloaded)
    await asyncio.sleep(100)
    times.served(BIG, span_bytes)


def test_a_load_tells_how_long_the_next_one_takes() -> None:
    async def story() -> None:
        times = LoadTimes()
        await load(times)
        assert not times.awaited
        times.ask(SMALL, is_unloaded=True)
        await asyncio.sleep(30)
        assert times.retry_s(SMALL, 500) == 20
        assert times.awaited == (SMALL,)

    run(story)


@pytest.mark.parametrize(
    "load_of", [{"is_unloaded": False}, {"span_bytes": 0}], ids=["had begun before", "no size"]
)
def test_what_is_not_known_of_a_load_is_not_measured(load_of: dict[str, Any]) -> None:
    async def story() -> None:
        times = LoadTimes()
        await load(times, **load_of)
        times.ask(SMALL, is_unloaded=True)
        await asyncio.sleep(30)
        assert times.retry_s(SMALL, 500) == 30  # that of the wait

    run(story)


def test_later_requests_wait_for_the_same_load() -> None:
    async def story() -> None:
        times = LoadTimes()
        for is_unloaded in (True, False):
            times.ask(BIG, is_unloaded=is_unloaded)
            await asyncio.sleep(30)
        assert times.retry_s(BIG, 0) == 60
        times.served(BIG, 1000)
        times.ask(BIG, is_unloaded=True)
        assert times.retry_s(BIG, 1000) == 60

    run(story)


def test_a_model_that_nobody_wants_any_more_is_not_measured() -> None:
    async def story() -> None:
        times = LoadTimes()
        times.ask(BIG, is_unloaded=True)
        await asyncio.sleep(500)
        times.forget(BIG)
        await load(times, is_unloaded=False)
        assert times.retry_s(BIG, 1000) == 1  # nobody waits

    run(story)
