"""Chooses the backend of a chat: the running node, the mesh of a ticket, or a local ring."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from meshllm.cli.shared.client import NodeClient, is_running, open_client, socket_path
from meshllm.cli.shared.local import Opener, open_local
from meshllm.config import Scalar, Settings, change, state_path
from meshllm.errors import UserError
from meshllm.request import Backend

_RING_SETTINGS = (
    "transport", "ends", "dtype", "quant", "device", "threads", "speculation", "draft",
    "exact", "wire", "prefix_cache",
)  # fmt: skip
"""Settings used when a ring forms; they have no effect on an existing one."""


def choose(
    chosen: Settings, flags: Mapping[str, Scalar], *, shows_model: bool = True
) -> tuple[Opener, Settings]:
    """Return a function that opens the backend, and the settings with its model and nodes.

    They are fetched from a running node only if a model is requested or shown, to save time.

    Raises:
        UserError: a flag contradicts the backend.
    """
    if flags["nodes"] is not None:
        if flags["join"] is not None:
            raise UserError("`--nodes`, a ring in this process, cannot be combined with `--join`")
        return open_local, chosen
    if flags["join"] is None and is_running(chosen):
        import logging

        logging.getLogger(__name__).info("using the node at %s", socket_path(chosen))
        _refuse(flags, _RING_SETTINGS, "the running node already has a ring")
        if shows_model or flags["model"] is not None:
            return open_client, _as_served(chosen, flags)
        return open_client, change(chosen, {"model": "the running node"})
    if chosen.join is None:
        return open_local, chosen
    _refuse(flags, ("model", *_RING_SETTINGS), "the mesh of the ticket already has a ring")
    return open_ticket, change(chosen, {"model": "the mesh"})


@asynccontextmanager
async def open_ticket(settings: Settings) -> AsyncIterator[Backend]:
    """Join the mesh of the ticket as a client; no weights are loaded."""
    from meshllm.node.client import open_mesh_client

    async with open_mesh_client(settings.join or "", state_path(settings)) as mesh:
        yield mesh


def _as_served(chosen: Settings, flags: Mapping[str, Scalar]) -> Settings:
    """Fetch model and number of nodes from the running node."""
    import asyncio

    status = asyncio.run(NodeClient(socket_path(chosen)).status())
    if status.model is None:
        return chosen
    served = status.model.name
    if flags["model"] not in {None, served}:
        raise UserError(
            f"The running node serves `{served}`, not `{flags['model']}`",
            hint="omit `--model`, or add `--nodes 1` to run a ring in this process",
        )
    return change(chosen, {"model": served, "nodes": len(status.ring.stages) or 1})


def _refuse(flags: Mapping[str, Scalar], names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if flags[name] is not None:
            raise UserError(
                f"`--{name}` has no effect: {reason}",
                hint="omit it, or add `--nodes 1` to run a ring in this process",
            )
