import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from meshllm.merge import merge


class Streams:
    """Streams that count how many of them run, and which are closed."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.closed: list[int] = []
        self.go = asyncio.Event()

    async def one(self, place: int, *, fails: bool = False) -> AsyncGenerator[str, None]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            yield f"{place}a"
            await self.go.wait()
            if fails:
                raise KeyError(place)
            yield f"{place}b"
        finally:
            self.running -= 1
            self.closed.append(place)


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_all_items_come_in_the_order_of_their_stream(count: int) -> None:
    streams = Streams()
    streams.go.set()

    items = [item async for item in merge([streams.one(each) for each in range(count)], 8)]

    for place in range(count):
        assert [item for at, item in items if at == place] == [f"{place}a", f"{place}b"]
    assert sorted(streams.closed) == [*range(count)]


async def test_only_some_run_at_a_time() -> None:
    streams, count = Streams(), 0

    async for _ in merge([streams.one(each) for each in range(9)], 3):
        count += 1
        if count == 3:
            streams.go.set()

    assert (count, streams.most) == (18, 3)


async def test_an_error_ends_all() -> None:
    streams = Streams()
    every = [streams.one(0), streams.one(1, fails=True), streams.one(2)]

    streams.go.set()

    with pytest.raises(KeyError):
        _ = [item async for item in merge(every, 8)]

    assert (streams.running, 1 in streams.closed) == (0, True)


@pytest.mark.parametrize("count", [1, 4])
async def test_closing_closes_all(count: int) -> None:
    streams = Streams()

    async with aclosing(merge([streams.one(each) for each in range(count)], 2)) as items:
        await anext(items)

    assert streams.running == 0
