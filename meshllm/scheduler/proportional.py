"""The placement by memory alone, against which others are compared.

Each model gets machines in proportion to its weights, as many rings as these hold, and layers in
proportion to memory. It is given the best chance: models that barely fit are placed first.
"""

from collections.abc import Sequence

from meshllm.scheduler.placement import ReplicaOption, Spread, Workload, make_option


def memory_proportional(mesh: Workload) -> list[ReplicaOption]:
    """Place all models by memory; a model that fits nowhere has no replica."""
    by_memory = sorted(range(len(mesh.kinds)), key=lambda kind: -mesh.kinds[kind].memory_bytes)
    free = [kind for kind in by_memory for _ in range(mesh.kinds[kind].count)]
    weights = [sum(served.sizes.layer_bytes) + served.sizes.ends_bytes for served in mesh.models]
    placed: dict[int, list[int]] = {}
    for model in sorted(range(len(mesh.models)), key=lambda model: -weights[model]):
        placed[model] = _fewest(mesh, model, free) or []
        for kind in placed[model]:
            free.remove(kind)
    for kind in free:
        neediest = min(placed, key=lambda model: _memory(mesh, placed[model]) / weights[model])
        placed[neediest].append(kind)
    return [
        option for model, machines in placed.items() for option in _rings(mesh, model, machines)
    ]


def _fewest(mesh: Workload, model: int, free: Sequence[int]) -> list[int] | None:
    """Return the fewest of the largest free machines that hold a model; None if they do not."""
    for count in range(1, len(free) + 1):
        if make_option(mesh, model, free[:count], Spread.PROPORTIONAL) is not None:
            return list(free[:count])
    return None


def _rings(mesh: Workload, model: int, machines: Sequence[int]) -> list[ReplicaOption]:
    """Split machines into as many rings as hold the model; the rest joins the last one."""
    first = _fewest(mesh, model, machines)
    if first is None:
        return []
    rest = list(machines[len(first) :])
    if _fewest(mesh, model, rest) is None:
        whole = make_option(mesh, model, machines, Spread.PROPORTIONAL)
        ring = whole or make_option(mesh, model, first, Spread.PROPORTIONAL)
        return [ring] if ring is not None else []
    ring = make_option(mesh, model, first, Spread.PROPORTIONAL)
    return [*([ring] if ring is not None else []), *_rings(mesh, model, rest)]


def _memory(mesh: Workload, machines: Sequence[int]) -> int:
    return sum(mesh.kinds[kind].memory_bytes for kind in machines)
