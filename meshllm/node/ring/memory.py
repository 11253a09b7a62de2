"""Memory that this process holds for a model, by purpose, in bytes."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from meshllm.model.shape import process_memory
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.status import MemoryStatus

if TYPE_CHECKING:
    from meshllm.model.steps.runner import Runner
    from meshllm.node.session.entry import EntryNode
    from meshllm.node.session.stage import StageNode


def measure(
    node: "EntryNode | StageNode | None", loaded: "Collection[Runner]" = ()
) -> MemoryStatus:
    """Return the memory of a rank, and of what is ``loaded`` before there is a ring.

    ``node`` is None outside a ring.
    """
    process = process_memory()
    if node is None:
        return MemoryStatus(process, weights=_weights(loaded))
    drafting = node.drafting
    return MemoryStatus(
        process,
        weights=_weights({*node.runners, *loaded}),
        kv_cache=node.budget.live_bytes,
        prefix_cache=node.budget.kept_bytes,
        kv_room=max(0, node.budget.rooms[0].total),
        drafter=drafting.bytes if isinstance(drafting, SuffixDrafting) else 0,
        recorded_steps=sum(runner.recorded_bytes for runner in node.runners),
        sent_rows=node.layers.sent_bytes,
    )


def _weights(runners: "Collection[Runner]") -> int:
    models = [runner.shard.model for runner in runners]
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())
