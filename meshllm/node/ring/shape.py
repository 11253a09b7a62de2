"""The shape of a model, as the planner needs it."""

from meshllm.model.shape import ModelShape, mean_kv_bytes, workspace_bytes
from meshllm.protocol.planning.plan import ModelSizes
from meshllm.protocol.session.waiting import RowQueueLimits

CONTEXT = 4096
"""Tokens of one session for which a plan leaves room, if the model takes as many."""


def plan_shape(model: ModelShape, context: int = CONTEXT) -> ModelSizes:
    """Describe a model to the planner, with sessions of up to ``context`` tokens."""
    context = min(context, model.context or context)
    return ModelSizes(
        name=model.name,
        layer_bytes=model.layer_bytes,
        kv_bytes_per_token=mean_kv_bytes(model, context),
        embed_bytes=model.embed_bytes,
        head_bytes=model.head_bytes,
        tied=model.tied,
        hidden_size=model.hidden_size,
        itemsize=model.itemsize,
        context=context,
        workspace_bytes=reserved_bytes(model),
    )


def waiting_room(model: ModelShape) -> RowQueueLimits:
    """Return the room for hidden states that wait on a rank."""
    return RowQueueLimits(model.hidden_size * model.itemsize)


def reserved_bytes(model: ModelShape) -> int:
    """Return what a rank needs besides weights and caches: for a forward, and rows that wait."""
    return workspace_bytes(model) + waiting_room(model).total
