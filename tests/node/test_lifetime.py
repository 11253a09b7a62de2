"""What runs while a node does, and what ends it."""

import asyncio

import pytest

from meshllm.errors import LinkLost
from meshllm.node.lifetime import Lifetime


async def test_an_error_of_a_part_stops_the_node_with_it() -> None:
    life, error = Lifetime(), LinkLost("gone")

    async def part() -> None:
        raise error

    async with life.running():
        await life.spawn(part)

    assert life.stopped.exception() is error


async def test_a_bug_in_a_part_ends_all_parts() -> None:
    life = Lifetime()

    async def part() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        async with life.running():
            life.spawn(part)
            life.spawn(asyncio.Event().wait)  # type: ignore[arg-type]  # it returns nothing ever

    running = asyncio.ensure_future(run())
    running.add_done_callback(life.ended)
    await asyncio.wait([running])

    error = life.stopped.exception()
    assert isinstance(error, ExceptionGroup)
    assert isinstance(error.exceptions[0], ZeroDivisionError)


async def test_what_stops_a_node_first_counts() -> None:
    life = Lifetime()

    life.stop()
    life.stop(LinkLost("late"))

    assert life.stopped.exception() is None


@pytest.mark.parametrize("is_over", [False, True])
async def test_no_callback_runs_once_the_node_ends(is_over: bool) -> None:
    life, called = Lifetime(), list[int]()

    async with life.running():
        life.call_later(0, called.append, 1)
        if not is_over:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    life.call_later(0, called.append, 2)
    for _ in range(3):
        await asyncio.sleep(0)

    assert called == ([] if is_over else [1])
