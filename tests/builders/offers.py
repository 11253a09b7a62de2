"""Small offers and models with round numbers: a layer has 80 bytes, and 100 of memory hold one."""

from collections.abc import Mapping

from meshllm.names import NodeId
from meshllm.protocol.planning.plan import Links, LinkSpeed, ModelSizes, Offer, Plan

A, B, C, D = (NodeId(name * 32) for name in (b"a", b"b", b"c", b"d"))


def node(number: int) -> NodeId:
    """Return a node id; ids are ordered like the numbers."""
    return NodeId(number.to_bytes(32))


def offer(at: NodeId, layers: float, *, ms: float = 1.0, head_ms: float = 0.0) -> Offer:
    """Make an offer with memory for ``layers``, each of which takes ``ms``."""
    return Offer(at, round(layers * 100), ((1, ms / 1e3), (256, ms / 1e2)), head_ms / 1e3)


def model(
    layers: int = 4, *, sizes: tuple[int, ...] = (), ends: int = 0, kv: int = 0
) -> ModelSizes:
    """Make the shape of a model with rows of 8 bytes and a context of 10 tokens."""
    sizes = sizes or (80,) * layers
    return ModelSizes("tiny", sizes, (kv,) * len(sizes), ends, 0, True, 4, 2, 10)


def apart(milliseconds: Mapping[tuple[NodeId, NodeId], float], others: float = 1.0) -> Links:
    """Make links with these one-way latencies."""
    speeds = {pair: LinkSpeed(latency / 1e3) for pair, latency in milliseconds.items()}
    return Links(speeds, LinkSpeed(others / 1e3))


def spans(plan: Plan) -> dict[NodeId, str]:
    """Return the span of each node, in rank order."""
    return {stage.node: str(stage.span) for stage in plan.stages}
