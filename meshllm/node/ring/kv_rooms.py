"""KV budget of the ranks of a ring."""

from collections.abc import Sequence

from meshllm.model.shape import ModelShape, cache_cost
from meshllm.names import Span
from meshllm.protocol.kv_cache.budget import KvBudget, Room


def budget_for(model: ModelShape, spans: Sequence[Span], rooms: Sequence[int]) -> KvBudget:
    """Return the KV budget of ranks with these spans and so many bytes for caches each.

    Where weights take more than there is, no bytes are left for caches.
    """
    pairs = zip(spans, rooms, strict=True)
    return KvBudget([Room(max(0, total), cache_cost(model, span)) for span, total in pairs])
