"""Memory that this process holds for models, by purpose, in bytes."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from meshllm.model.shape import process_memory
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.status import MemoryStatus

if TYPE_CHECKING:
    from meshllm.model.steps.runner import Runner
    from meshllm.node.session.entry import EntryNode
    from meshllm.node.session.stage import StageNode


def measure(
    ranks: "Sequence[EntryNode | StageNode]", loaded: "Collection[Runner]" = ()
) -> MemoryStatus:
    """Return the memory of all ranks of this node, and of what is ``loaded`` before it has one."""
    runners = {runner for rank in ranks for runner in rank.runners}
    drafting = [each.drafting for each in ranks]
    texts = sum(each.bytes for each in drafting if isinstance(each, SuffixDrafting))
    return MemoryStatus(
        process_memory(),
        weights=_weights({*runners, *loaded}),
        kv_cache=sum(each.budget.live_bytes for each in ranks),
        prefix_cache=sum(each.budget.kept_bytes for each in ranks),
        kv_room=sum(max(0, each.budget.rooms[0].total) for each in ranks),
        drafter=texts + sum(each.draft_bytes for each in ranks),
        recorded_steps=sum(runner.recorded_bytes for runner in runners),
        sent_rows=sum(each.layers.sent_bytes for each in ranks),
    )


def _weights(runners: "Collection[Runner]") -> int:
    models = [runner.shard.model for runner in runners]
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return sum({each.data_ptr(): each.nbytes for each in tensors}.values())
