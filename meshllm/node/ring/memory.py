"""Memory that this process holds for models, by purpose, in bytes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, replace
from itertools import chain
from typing import TYPE_CHECKING

from meshllm.model.shape import process_memory
from meshllm.model.speculation.prompt_lookup import SuffixDrafting
from meshllm.status import MemoryStatus

if TYPE_CHECKING:
    from torch import Tensor

    from meshllm.model.steps.runner import Runner
    from meshllm.node.session.entry import EntryNode
    from meshllm.node.session.stage import StageNode


def measure(
    ranks: "Sequence[EntryNode | StageNode]",
    loaded: "Collection[Runner]" = (),
    *,
    unread: int = 0,
    received: int = 0,
    requests: int = 0,
) -> MemoryStatus:
    """Return the memory of all ranks of this node, and of what is ``loaded`` before it has one.

    ``unread`` bytes of the weights were not in memory, a moment ago. KV caches that other nodes
    hand over, and ``requests`` in progress, are counted elsewhere.
    """
    runners = {*(runner for rank in ranks for runner in rank.runners), *loaded}
    drafting = [each.drafting for each in ranks]
    texts = sum(each.bytes for each in drafting if isinstance(each, SuffixDrafting))
    weights, packed = _weights(runners), _packed(runners)
    unread = min(unread, weights + packed)  # some may have been unloaded since
    status = MemoryStatus(
        process_memory(),
        weights=weights,
        packed_weights=packed,
        unread_weights=unread,
        kv_cache=sum(each.budget.live_bytes for each in ranks),
        prefix_cache=sum(each.budget.kept_bytes for each in ranks),
        kv_room=sum(max(0, each.budget.rooms[0].total) for each in ranks),
        drafter=texts + sum(each.draft_bytes for each in ranks),
        recorded_steps=sum(runner.recorded_bytes for runner in runners),
        sent_rows=sum(each.layers.sent_bytes for each in ranks),
        waiting_rows=sum(each.waiting_bytes for each in ranks),
        waiting_room=sum(each.waiting_room for each in ranks),
        received_caches=received,
        requests=requests,
    )
    limits = status.kv_room + status.waiting_room
    parts = sum(astuple(status)) - status.process - unread - limits
    here = parts - unread - _on_gpu(ranks, runners)
    return replace(status, other=max(0, status.process - here))


def addresses(runners: "Collection[Runner]") -> Sequence[tuple[int, int]]:
    """Return where the weights are in the memory of the process: ranges that do not overlap."""
    here = [each for each in runners if each.shard.device.type == "cpu"]
    packed = (each for runner in here for each in runner.packed if not each.is_mkldnn)
    return _ranges(chain(packed, *(runner.plain for runner in here)))


def _weights(runners: "Collection[Runner]") -> int:
    """Count each byte once: ends may be tied, and a part of a head is a view of the whole."""
    ranges = _ranges(each for runner in runners for each in runner.plain)
    return sum(end - begin for begin, end in ranges)


def _packed(runners: "Collection[Runner]") -> int:
    return sum(each.nbytes for runner in runners for each in runner.packed)


def _ranges(tensors: "Iterable[Tensor]") -> list[tuple[int, int]]:
    ranges = list[tuple[int, int]]()
    end = 0
    for start, size in sorted((each.data_ptr(), each.nbytes) for each in tensors):
        begin, end = max(start, end), max(start + size, end)
        ranges.append((begin, end))
    return ranges


def _on_gpu(ranks: "Sequence[EntryNode | StageNode]", runners: "Collection[Runner]") -> int:
    """Return the bytes of weights and caches that are not in the memory of the process."""
    budgets = [each.budget for each in ranks if each.runners[0].shard.device.type != "cpu"]
    caches = sum(each.live_bytes + each.kept_bytes for each in budgets)
    return caches + _weights([each for each in runners if each.shard.device.type != "cpu"])
