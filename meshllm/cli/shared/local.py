"""Opens a ring inside this process, and names its models."""

import gc
import linecache
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from meshllm.cli.shared.options import inference_config
from meshllm.config import Settings, cache_path, expanded
from meshllm.errors import UserError
from meshllm.local_files import keep_temporary_files, reason_of
from meshllm.request import Backend
from meshllm.units import listed

RING = "meshllm.node.ring.local_ring"

Opener: TypeAlias = Callable[[Settings], AbstractAsyncContextManager[Backend]]


@asynccontextmanager
async def open_local(settings: Settings) -> AsyncIterator[Backend]:
    """Form the ring of the settings.

    Raises:
        MeshError: the model or the transport is missing, or the model does not fit.
    """
    import asyncio

    forming = await asyncio.to_thread(_load, settings)
    async with forming as ring:
        yield ring


def _load(settings: Settings) -> AbstractAsyncContextManager[Backend]:
    """Import and prepare what takes seconds, off the event loop."""
    import_heavy()
    from meshllm.model.files.source import resolve
    from meshllm.node.ring.local_ring import RingOptions, open_local_ring
    from meshllm.protocol.planning.plan import Ends

    options = RingOptions(
        settings.nodes,
        (listed(settings.transport) or (settings.transport,))[0],  # a node may have several
        Ends(settings.ends),
        inference=inference_config(settings, cache=cache_path()),
    )
    return open_local_ring(resolve(settings.model), options)


def import_heavy(*modules: str, folder: Path | None = None) -> None:
    """Import modules that take seconds; only in the main thread can Ctrl-C interrupt it.

    Modules are permanent, so they are hidden from the garbage collector: scanning them takes half
    a second during the import, and later a quarter of a second in which no token is computed. Torch
    needs a folder for temporary files: ``folder``, or that of caches, if no usual one is writable.

    Raises:
        UserError: there is none.
    """
    try:
        keep_temporary_files(folder or cache_path())
    except OSError as error:
        text = f"There is no folder for temporary files: {reason_of(error)}"
        raise UserError(text, hint="set `TMPDIR` to one") from None
    gc.disable()
    try:
        from meshllm.model.without_compiler import without_compiler

        with without_compiler():
            for module in modules or (RING,):
                import_module(module)
        linecache.clearcache()  # of the sources that torch looked at: 2 MB
        gc.freeze()
    finally:
        gc.enable()


def absolute_model(model: str) -> str:
    """Return the name of a model for a node, which runs in another folder."""
    from meshllm.model.locate import is_folder

    name, at, precision = model.rpartition("@")
    if not is_folder(model) and at and is_folder(name):  # one of its quantisations
        return f"{expanded(name).absolute()}@{precision}"
    return str(expanded(model).absolute()) if is_folder(model) else model
