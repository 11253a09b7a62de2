"""Builders of `MeshStatus` for rings of any size, and of variants of it."""

from dataclasses import replace
from typing import Any

from meshllm.names import LossCause, Span
from meshllm.status import (
    LinkStatus,
    LossCounts,
    Measured,
    MeasuredTimes,
    MemberStatus,
    MeshStatus,
    ModelStatus,
    Named,
    NodeState,
    NodeStatus,
    Planned,
    PlannedTimes,
    RingState,
    RingStatus,
    ServedRing,
    SessionCounts,
    StageStatus,
)

NAMES = ("attic", "desk", "laptop", "cellar", "kitchen", "barn", "loft", "studio")
_LAYERS = 10  # of each node


def node_id(index: int) -> str:
    return "-".join([f"{NAMES[index][:4]:a<4}{index}bc", *["defghij"] * 7])


def status_of(count: int, *, measured: bool = True) -> MeshStatus:
    """A ring of ``count`` nodes, as the first of them reports it."""
    ranks = range(count)
    planned = tuple(PlannedTimes(rank, 12.5 + rank, 0.42 + rank) for rank in ranks)
    hops = tuple(
        MeasuredTimes(
            each.rank, node_id(each.rank), _layers(each.rank),
            each.compute_ms, 0.09, 0.03, each.wire_ms, 2148.0,
        )
        for each in planned
    )  # fmt: skip
    token_ms = sum(hop.compute_ms + hop.wire_ms for hop in planned) + 2
    return MeshStatus(
        mesh="4fa1c09b2d7e88a1523301fe90aa6b12",
        node=node_id(0),
        name=NAMES[0],
        version="0.2.0",
        model=ModelStatus("Qwen/Qwen3-0.6B", count * _LAYERS, 1024, "bfloat16", "none"),
        ring=RingStatus(
            state=RingState.SERVING,
            reason="",
            epoch=3,
            digest="4f2a91c0d3e1",
            policy="auto",
            entry=node_id(0),
            stages=tuple(
                StageStatus(rank, node_id(rank), NAMES[rank], _layers(rank)) for rank in ranks
            ),
            predicted=Planned(token_ms - 1.5, 240.0, 1.8, planned),
            measured=Measured(token_ms, 240.0, 96, hops) if measured else None,
            advice="`studio` is the slowest: 3 of its layers on `attic` would save 4 ms",
        ),
        nodes=tuple(map(_node, ranks)),
        sessions=SessionCounts(
            active=1,
            waiting=0,
            served=12,
            failed=0,
            tokens=4711,
            losses=(LossCounts(LossCause.NODE_LOST, 2, 1.75, 96, 480),),
            recomputed=480,
        ),
        listening=("ws://192.168.1.10:7700",),
        networks=(),
        since_s=754.0,
    )


def waiting(reason: str) -> MeshStatus:
    """A node that is alone and cannot serve."""
    status = with_ring(
        status_of(1), state=RingState.WAITING, reason=reason, stages=(), predicted=None,
        measured=None, advice="", digest="",
    )  # fmt: skip
    return with_node(status, 0, state=NodeState.JOINING, layers=None, rank=None)


RINGS = (
    ServedRing(
        "Qwen/Qwen3-0.6B", 0, RingState.SERVING, "", is_own=True, epoch=3, entry=node_id(0),
        stages=(StageStatus(0, node_id(0), NAMES[0], Span(0, 10)),
                StageStatus(1, node_id(1), NAMES[1], Span(10, 20))),
    ),
    ServedRing(
        "big", 1, RingState.FORMING, "needs one more node with the model, with 2.1 GiB of memory",
        is_own=False, epoch=0, entry=None, stages=(), standbys=(Named(node_id(2), NAMES[2]),),
        lacks_bytes=2254857830,
    ),
)  # fmt: skip
"""A replica that serves, and one of another model that lacks memory."""


def with_ring(status: MeshStatus, **changes: Any) -> MeshStatus:
    """Change the ring of a status."""
    return replace(status, ring=replace(status.ring, **changes))


def with_node(status: MeshStatus, index: int, **changes: Any) -> MeshStatus:
    """Change one node of a status."""
    nodes = list(status.nodes)
    nodes[index] = replace(nodes[index], **changes)
    return replace(status, nodes=tuple(nodes))


def with_link(status: MeshStatus, index: int, **changes: Any) -> MeshStatus:
    """Change the link to one node of a status."""
    link = status.nodes[index].link
    assert link is not None
    return with_node(status, index, link=replace(link, **changes))


def member(index: int, **changes: Any) -> MemberStatus:
    """A member that was invited by the previous one."""
    hosts = tuple(map(node_id, range(index)))
    found = MemberStatus(
        node_id(index), node_id(index)[:7], NAMES[index], "node", "serving", index == 0, hosts
    )
    return replace(found, **changes)


def _layers(rank: int) -> Span:
    return Span(rank * _LAYERS, (rank + 1) * _LAYERS)


def _node(rank: int) -> NodeStatus:
    address = f"ws://192.168.1.{10 + rank}:7700"
    link = LinkStatus(
        round_trip_ms=0.84 + rank,
        path="direct",
        path_reason="",
        address=address,
        bytes_sent=12_690_000,
        bytes_received=11_340_000 + rank,
        heard_s=0.3,
        clock_s=0.02 * rank,
    )
    return NodeStatus(
        node=node_id(rank),
        short=node_id(rank)[:7],
        name=NAMES[rank],
        role="node",
        state=NodeState.SERVING,
        reason="",
        addresses=(address,),
        memory_bytes=8 << 30,
        layers=_layers(rank),
        rank=rank,
        is_self=rank == 0,
        incarnation=2,
        version="0.2.0",
        link=link if rank else None,
    )
