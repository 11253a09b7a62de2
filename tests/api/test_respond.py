import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Message

from meshllm.api.respond import Stream, with_keep_alive
from meshllm.errors import MeshError


def _fail(_: MeshError) -> bytes:
    return b"failed"


async def _never(_: Message) -> None:
    """Send to a client that does not read."""
    await asyncio.Event().wait()


async def test_a_streamed_generator_is_closed_before_the_response_ends() -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def words() -> AsyncGenerator[str, None]:
        try:
            begun.set()
            yield "x"
        finally:
            await asyncio.sleep(0)
            closed.set()

    async def leave() -> Message:
        await begun.wait()
        return {"type": "http.disconnect"}

    kept = words()  # else the garbage collector would close it

    await Stream(kept, "text/plain", str.encode, _fail)({"type": "http"}, leave, _never)

    assert closed.is_set()


async def test_keep_alive_yields_the_items_and_none_while_silent() -> None:
    async def slowly() -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.sleep(0.05)
        yield 2

    seen = [item async for item in with_keep_alive(slowly(), 0.02)]

    assert [item for item in seen if item] == [1, 2]
    assert None in seen[1:-1]


async def test_closing_keep_alive_cancels_the_wait() -> None:
    cancelled = asyncio.Event()

    async def stuck() -> AsyncGenerator[int, None]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        yield 0

    kept = stuck()  # else the garbage collector would close it
    async with aclosing(with_keep_alive(kept, 0.01)) as news:
        await anext(news)
    assert cancelled.is_set()
