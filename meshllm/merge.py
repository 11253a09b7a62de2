"""Merges several event streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(
    streams: Sequence[AsyncGenerator[T, None]], together: int
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all streams as they come, each with the place of its stream.

    At most ``together`` streams run at a time. The error of one ends all; at the end, and when this
    is closed, all of them are closed.
    """
    if len(streams) == 1:  # without a task in between
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    # Unbounded, as the outputs of a generation are: its length is.
    queue: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue()
    pumping = asyncio.ensure_future(_pump(streams, asyncio.Semaphore(together), queue))
    pumping.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (found := await queue.get()) is not None:
            yield found
        pumping.result()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)


async def _pump(
    streams: Sequence[AsyncGenerator[T, None]],
    slots: asyncio.Semaphore,
    queue: asyncio.Queue[tuple[int, T] | None],
) -> None:
    """Move the items of all streams into the queue."""

    async def move(place: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream), slots:
            async for item in stream:
                queue.put_nowait((place, item))

    async with asyncio.TaskGroup() as group:
        for place, stream in enumerate(streams):
            group.create_task(move(place, stream))
