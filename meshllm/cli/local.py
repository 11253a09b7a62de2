"""A ring inside this process, for the commands that answer; knows nothing about terminals."""

import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from typing import Protocol, TypeAlias

from meshllm.cli.options import prefix_bytes
from meshllm.config import Settings, state_path
from meshllm.names import Quant, WireMode
from meshllm.request import Event, Request


class Answers(Protocol):
    """What a chat needs of a ring."""

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield progress, pieces, and the answer last; closing it cancels on every node."""


Opener: TypeAlias = Callable[[Settings], AbstractAsyncContextManager[Answers]]


@asynccontextmanager
async def open_local(settings: Settings) -> AsyncIterator[Answers]:
    """Form the ring that the settings ask for.

    Raises:
        MeshError: the model or the transport is missing, or the ring does not fit.
    """
    import asyncio

    forming = await asyncio.to_thread(_load, settings)
    async with forming as ring:
        yield ring


def _load(settings: Settings) -> AbstractAsyncContextManager[Answers]:
    """Do what takes seconds, torch first, away from the event loop."""
    import torch

    from meshllm.model.draft import SuffixDrafting
    from meshllm.model.source import resolve
    from meshllm.node.ring import RingOptions, open_ring
    from meshllm.protocol.plan import Ends

    options = RingOptions(
        nodes=settings.nodes,
        transport=settings.transport,
        ends=Ends(settings.ends),
        dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype),
        threads=settings.threads,
        drafting=SuffixDrafting() if settings.speculation == "auto" else None,
        draft=None if settings.draft is None else resolve(settings.draft),
        quant=Quant(settings.quant),
        cache=state_path(settings) / "cache",
        exact=settings.exact,
        wire=WireMode(settings.wire),
        prefix_bytes=prefix_bytes(settings),
        device=settings.device,
    )
    return open_ring(resolve(settings.model), options)


def import_heavy(module: str = "meshllm.node.ring") -> None:
    """Import what takes seconds here and now: Ctrl-C stops it in the main thread only.

    Modules stay, so the collector of garbage need not look at them: with those of torch that takes
    a quarter of a second, in which no token is computed.
    """
    import_module(module)
    gc.freeze()
