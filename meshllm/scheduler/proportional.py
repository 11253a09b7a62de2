"""The placement by memory alone, against which others are compared.

Each model gets machines in proportion to its weights, as many rings as these hold, and layers in
proportion to memory. It is given the best chance: models that barely fit are placed first.
"""

from collections.abc import Sequence

from meshllm.scheduler.placement import LayerAllocation, ReplicaOption, Workload, make_option


def memory_proportional(workload: Workload) -> list[ReplicaOption]:
    """Place all models by memory; a model that fits nowhere has no replica."""
    by_memory = sorted(
        range(len(workload.kinds)), key=lambda kind: -workload.kinds[kind].memory_bytes
    )
    free = [kind for kind in by_memory for _ in range(workload.kinds[kind].count)]
    weights = [
        sum(served.sizes.layer_bytes) + served.sizes.ends_bytes for served in workload.models
    ]
    placed: dict[int, list[int]] = {}
    for model in sorted(range(len(workload.models)), key=lambda model: -weights[model]):
        placed[model] = _fewest(workload, model, free) or []
        for kind in placed[model]:
            free.remove(kind)
    for kind in free:
        able = [model for model in placed if workload.may_hold(kind, model)]
        if able:
            neediest = min(
                able, key=lambda model: _memory(workload, placed[model]) / weights[model]
            )
            placed[neediest].append(kind)
    return [
        option for model, machines in placed.items() for option in _rings(workload, model, machines)
    ]


def _fewest(workload: Workload, model: int, free: Sequence[int]) -> list[int] | None:
    """Return the fewest of the largest free machines that hold a model; None if they do not."""
    able = [kind for kind in free if workload.may_hold(kind, model)]
    for count in range(1, len(able) + 1):
        if make_option(workload, model, able[:count], LayerAllocation.PROPORTIONAL) is not None:
            return able[:count]
    return None


def _rings(workload: Workload, model: int, machines: Sequence[int]) -> list[ReplicaOption]:
    """Split machines into as many rings as hold the model; the rest joins the last one."""
    first = _fewest(workload, model, machines)
    if first is None:
        return []
    rest = list(machines[len(first) :])
    if _fewest(workload, model, rest) is None:
        whole = make_option(workload, model, machines, LayerAllocation.PROPORTIONAL)
        ring = whole or make_option(workload, model, first, LayerAllocation.PROPORTIONAL)
        return [ring] if ring is not None else []
    ring = make_option(workload, model, first, LayerAllocation.PROPORTIONAL)
    return [*([ring] if ring is not None else []), *_rings(workload, model, rest)]


def _memory(workload: Workload, machines: Sequence[int]) -> int:
    return sum(workload.kinds[kind].memory_bytes for kind in machines)
