"""Replicas for simulations: rings of equal ranks with round times."""

from collections.abc import Sequence
from itertools import accumulate

from meshllm.names import NodeId
from meshllm.protocol.planning.chunking import RankTimes, RingTimes
from meshllm.protocol.planning.plan import LinkSpeed, Offer
from meshllm.scheduler.engine import ReplicaEngine
from meshllm.scheduler.simulator import Arrival

STEP_S = 0.010
"""Of one row on all ranks together; each further row adds a hundredth."""


def times(ranks: int = 1, wire: LinkSpeed | None = None, head_s: float = 0.0) -> RingTimes:
    """Make a ring of 10 layers, whose 512 rows take 6.12 times as long as one."""
    offer = Offer(NodeId(bytes(32)), 1 << 40, ((1, STEP_S / 10), (512, STEP_S / 10 * 6.11)), 0.0)
    wire = wire if wire and ranks > 1 else LinkSpeed(0.0)
    return RingTimes(tuple(RankTimes(offer, 10 / ranks, wire) for _ in range(ranks)), head_s, 8)


def engine(
    ranks: int = 1,
    wire: LinkSpeed | None = None,
    *,
    cached_s: float = 0.0,
    room: int = 10**6,
    chunk: int = 64,
    most: int = 8,
    merging: bool = False,
    contention: float = 1.0,
) -> ReplicaEngine:
    """Make the engine of such a ring; ``cached_s`` is of all ranks together."""
    return ReplicaEngine(
        times(ranks, wire),
        [cached_s / ranks] * ranks,
        room_tokens=room,
        chunk=chunk,
        max_sessions=most,
        mixes_prefill_and_decode=merging,
        contention=contention,
    )


def arrivals(requests: Sequence[tuple[float, int, int]], model: int = 0) -> list[Arrival]:
    """Make requests from the pause before each, its prompt and its answer."""
    at_s = accumulate(pause for pause, _, _ in requests)
    return [
        Arrival(at, model, prompt, answer)
        for at, (_, prompt, answer) in zip(at_s, requests, strict=True)
    ]
