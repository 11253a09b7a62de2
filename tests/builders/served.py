"""A node that is served on the socket of its state folder."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from meshllm.api.serve import serve
from meshllm.api.unix import is_answered
from tests.builders.fake_node import FakeNode
from tests.builders.waiting import until


@asynccontextmanager
async def running(node: FakeNode, path: Path) -> AsyncIterator[None]:
    """Serve a node on the socket of a state folder."""
    task = asyncio.ensure_future(serve(node, path))
    await until(lambda: is_answered(path))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
