"""Models that the owner of a node let its mesh serve, and that it holds again after a restart."""

import json

from meshllm.errors import UserError
from meshllm.names import Quant
from meshllm.node.membership.state_store import FILE, StateStore
from meshllm.protocol.membership.charter import MAX_SERVED

_NAME = "models"

LocalModel = tuple[str, Quant | None]
"""A name, and the quantisation in which the node holds the model; None is any."""


def load_models(store: StateStore) -> list[LocalModel]:
    """Return the models of the state folder; raise `UserError` if they cannot be read."""
    data = store.load(_NAME)
    try:
        found = json.loads(data) if data else []
        return [(str(name), quant and Quant(quant)) for name, quant in found]
    except (ValueError, TypeError, RecursionError):
        raise UserError(
            f"Invalid models in `{store.folder / FILE}`", hint="move it away to begin a new mesh"
        ) from None


def save_models(store: StateStore, models: list[LocalModel]) -> None:
    """Save the models in the state folder; raise `UserError` if it cannot be written."""
    kept = models[-MAX_SERVED:]
    store.save(_NAME, json.dumps(kept).encode() if kept else b"")
