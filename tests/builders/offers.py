"""Small offers and models with round numbers: a layer has 80 bytes, and 100 of memory hold one."""

from collections.abc import Mapping

from meshllm.names import NodeId
from meshllm.protocol.planning.plan import Links, Offer, Plan, Shape, Wire

A, B, C, D = (NodeId(name * 32) for name in (b"a", b"b", b"c", b"d"))


def node(number: int) -> NodeId:
    """Name a node; the names are in the order of the numbers."""
    return NodeId(number.to_bytes(32))


def offer(at: NodeId, layers: float, *, ms: float = 1.0, head_ms: float = 0.0) -> Offer:
    """Offer memory for so many layers, each of which takes ``ms``."""
    return Offer(at, round(layers * 100), ((1, ms / 1e3), (256, ms / 1e2)), head_ms / 1e3)


def model(layers: int = 4, *, sizes: tuple[int, ...] = (), ends: int = 0, kv: int = 0) -> Shape:
    """Shape a model with rows of 8 bytes and a context of 10 tokens."""
    sizes = sizes or (80,) * layers
    return Shape("tiny", sizes, (kv,) * len(sizes), ends, 0, True, 4, 2, 10)


def apart(milliseconds: Mapping[tuple[NodeId, NodeId], float], others: float = 1.0) -> Links:
    """Place nodes so many milliseconds from each other."""
    wires = {pair: Wire(latency / 1e3) for pair, latency in milliseconds.items()}
    return Links(wires, Wire(others / 1e3))


def spans(plan: Plan) -> dict[NodeId, str]:
    """Show who holds what, in rank order."""
    return {stage.node: str(stage.span) for stage in plan.stages}
