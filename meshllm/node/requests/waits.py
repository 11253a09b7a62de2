"""Events of an answer, and before them what its request waits for."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from meshllm.request import Event, Waiting

WAITING_S = 2.0  # s between two events of a request that waits, at least: a person reads them


async def with_wait_events(
    answer: AsyncGenerator[Event, None], awaited: Callable[[], str]
) -> AsyncGenerator[Event, None]:
    """Yield the events of an answer; until the first one, a `Waiting` whenever its reason changes.

    ``awaited`` returns the reason, for people; it is called every `WAITING_S`. An empty text ends a
    wait.
    """
    async with aclosing(answer) as events:
        first, told = asyncio.ensure_future(anext(events, None)), ""
        try:
            while not (await asyncio.wait({first}, timeout=WAITING_S))[0]:
                if (reason := awaited()) != told:
                    told = reason
                    yield Waiting(reason)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        if event := first.result():
            yield event
        async for event in events:
            yield event
