"""A status that is looked at again and again; knows nothing about how it is shown."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

from meshllm.cli.door import Client

EVERY_S = 1.0  # figures move without an event
PACE_S = 0.1  # events that come together are one look

Fields = dict[str, Any]


async def follow(client: Client, show: Callable[[Fields], None]) -> None:
    """Show the status at each event and each second, for ever.

    Raises:
        LinkLost: there is no node, or it went away; in a group, once it has answered.
    """
    news = asyncio.Event()
    show(await client.get("/mesh/status"))
    async with asyncio.TaskGroup() as group:
        group.create_task(_listen(client, news))
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await news.wait()
            await asyncio.sleep(PACE_S)
            news.clear()
            show(await client.get("/mesh/status"))


def changes(show: Callable[[Fields], None]) -> Callable[[Fields], None]:
    """Show a status only when more than counters and clocks differ from the one before."""
    before: Fields = {}

    def look(status: Fields) -> None:
        nonlocal before
        after = _lasting(status)
        if after != before:
            before = after
            show(status)

    return look


def _lasting(status: Fields) -> Fields:
    nodes = [
        {**each, "link": each["link"] and each["link"]["path"], "memory_bytes": None}
        for each in status["nodes"]
    ]
    return {**status, "nodes": nodes, "since_s": None}


async def _listen(client: Client, news: asyncio.Event) -> None:
    async with aclosing(client.stream_lines("/mesh/events")) as lines:
        async for _ in lines:
            news.set()
