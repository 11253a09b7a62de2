"""Who answers a chat: the running node's mesh, a ticket's, or a ring in this process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from meshllm.cli.shared.client import NodeClient, door_path, open_door, running
from meshllm.cli.shared.local import Opener, open_local
from meshllm.config import Scalar, Settings, change, state_path
from meshllm.errors import UserError
from meshllm.request import Backend

_OF_A_RING = (
    "transport", "ends", "dtype", "quant", "device", "threads", "speculation", "draft",
    "exact", "wire", "prefix_cache",
)  # fmt: skip
"""What settles how a ring is formed, and so cannot be chosen for one that is there."""


def choose(
    chosen: Settings, flags: Mapping[str, Scalar], *, shows_model: bool = True
) -> tuple[Opener, Settings]:
    """Return what opens the ring, and the settings with the model and nodes that it has.

    A running node is asked for these where a model is asked for or shown, as that takes time.

    Raises:
        UserError: a flag asks for what the ring that would answer is not.
    """
    if flags["nodes"] is not None:
        if flags["join"] is not None:
            raise UserError("`--nodes` is a ring in this process, `--join` a mesh elsewhere")
        return open_local, chosen
    if flags["join"] is None and running(chosen):
        import logging

        logging.getLogger(__name__).info("asking the node at %s", door_path(chosen))
        _refuse(flags, _OF_A_RING, "the running node has a ring of its own")
        if shows_model or flags["model"] is not None:
            return open_door, _as_served(chosen, flags)
        return open_door, change(chosen, {"model": "the running node"})
    if chosen.join is None:
        return open_local, chosen
    _refuse(flags, ("model", *_OF_A_RING), "the mesh of the ticket has a ring of its own")
    return open_ticket, change(chosen, {"model": "the mesh"})


@asynccontextmanager
async def open_ticket(settings: Settings) -> AsyncIterator[Backend]:
    """Be a client of the mesh that the ticket is for; no weights are loaded."""
    from meshllm.node.client import open_thin

    async with open_thin(settings.join or "", state_path(settings)) as mesh:
        yield mesh


def _as_served(chosen: Settings, flags: Mapping[str, Scalar]) -> Settings:
    """Take model and nodes from the running node."""
    import asyncio

    status = asyncio.run(NodeClient(door_path(chosen)).status())
    if status.model is None:
        return chosen
    served = status.model.name
    if flags["model"] not in {None, served}:
        raise UserError(
            f"The running node serves `{served}`, not `{flags['model']}`",
            hint="leave out `--model`, or add `--nodes 1` for a ring in this process",
        )
    return change(chosen, {"model": served, "nodes": len(status.ring.stages) or 1})


def _refuse(flags: Mapping[str, Scalar], names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if flags[name] is not None:
            raise UserError(
                f"`--{name}` cannot hold: {reason}",
                hint="leave it out, or add `--nodes 1` for a ring in this process",
            )
