"""The parts of a ring inside one process, put together; knows nothing about requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from blake3 import blake3

from meshllm.errors import UserError
from meshllm.model.capacity import ModelShape, free_memory
from meshllm.model.device import CPU, free_bytes
from meshllm.model.head import Parts
from meshllm.model.runner import Runner
from meshllm.names import NodeId, Span
from meshllm.node.entry import EntryNode, Seat
from meshllm.node.peers import Neighbours, Peer
from meshllm.node.session import Ends as HeldEnds
from meshllm.node.stage import StageNode
from meshllm.node.worker import Worker
from meshllm.protocol.link import Link
from meshllm.protocol.messages import Hello
from meshllm.protocol.plan import Ends, Links, Offer, Plan, Policy, Shape, Terms
from meshllm.protocol.policies import make_plan
from meshllm.protocol.shelf import shelf_for
from meshllm.protocol.stage import Stage
from meshllm.transport.contract import Transport

MAX_SESSIONS = 8  # generations at a time; others wait their turn
CONTEXT = 4096  # tokens for which the plan leaves room, where the model takes as many
EPOCH = 1  # a ring inside one process never changes its plan


@dataclass(frozen=True, slots=True)
class Shards:
    """What the ranks hold, once loaded."""

    ends: HeldEnds
    behind: tuple[Runner, ...]
    help: Runner | None = None
    """The last rank's part of the head, where the entry may ask for it."""


def local_plan(model: ModelShape, nodes: int, ends: Ends, device: torch.device = CPU) -> Plan:
    """Divide a model over equal nodes that share the memory of this machine, or of its GPU."""
    if nodes > model.layers:
        raise UserError(
            f"{nodes} nodes for the {model.layers} layers of `{model.name}`",
            hint=f"use `--nodes {model.layers}` or fewer",
        )
    ranks = nodes + (ends is Ends.CLIENT)
    memory = (free_memory() if device == CPU else free_bytes(device)) // ranks
    ids = [NodeId(blake3(rank.to_bytes(4)).digest()) for rank in range(ranks)]
    return make_plan(
        [Offer(node, memory, ((1, 1e-3),), head_s=0.0) for node in ids],
        Links(),
        plan_shape(model),
        policy=Policy.PROPORTIONAL,
        epoch=EPOCH,
        terms=Terms(ends=ends, members=ranks, entry=ids[0] if ends is Ends.CLIENT else None),
    )


def plan_shape(model: ModelShape, context: int = CONTEXT) -> Shape:
    """Tell the planner what it needs to know of a model."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    return Shape(
        name=model.name,
        layer_bytes=model.layer_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        embed_bytes=model.embed_bytes,
        head_bytes=model.head_bytes,
        tied=model.tied,
        hidden_size=model.hidden_size,
        itemsize=dtype.itemsize,
        context=min(context, model.context or context),
    )


def load(
    plan: Plan, run: Callable[..., Runner], context: int, parts: Parts | None = None
) -> Shards:
    """Load what every rank of a plan holds; ``run`` loads a span, as `Shard.load` does.

    The last rank helps with a head that is in two ``parts``.
    """
    first, *others = plan.stages
    alone = not others
    front = run(first.span, embed=True, head=alone)
    end = Span(plan.layers, plan.layers)
    if alone:
        return Shards(HeldEnds(front, None, context), ())
    theirs, ours = parts or (None, None)
    tail = partial(run, end, embed=False, head=True, share=front.shard)
    behind = tuple(run(stage.span, embed=False, head=False) for stage in others)
    if theirs is None:
        return Shards(HeldEnds(front, tail(), context), behind)
    ends = HeldEnds(front, tail(outputs=ours), context, helped=tail(outputs=theirs))
    # Once more: two threads may not run the same one, and processes would have one each.
    return Shards(ends, behind, help=tail(outputs=theirs))


async def connect(plan: Plan, transport: Transport, stack: AsyncExitStack) -> list[Neighbours]:
    """Listen at every rank and dial the next one; the links close with the ring."""
    listeners = [await stack.enter_async_context(transport.listen()) for _ in plan.stages]
    before, after = [], []
    for listener in listeners:
        after.append(await transport.dial(listener.address))
        before.append(await anext(listener.links()))
    ring = len(plan.stages)
    ids = [stage.node for stage in plan.stages]
    hellos = [Hello(node, plan.epoch, plan.digest) for node in ids]
    # Rank r dials rank r + 1, so what was dialled at a listener is the way out of the rank before.
    return [
        Neighbours(
            before=Peer(before[rank], Link(hellos[rank], peer=ids[rank - 1])),
            after=Peer(after[after_rank], Link(hellos[rank], peer=ids[after_rank])),
        )
        for rank, after_rank in ((rank, (rank + 1) % ring) for rank in range(ring))
    ]


def seat(
    shards: Shards,
    plan: Plan,
    workers: Sequence[Worker],
    neighbours: Sequence[Neighbours],
    place: Seat,
    rooms: Sequence[int],
) -> tuple[EntryNode, list[StageNode]]:
    """Give every rank its node, with the worker and the room of its number."""
    ring = len(plan.stages)
    entry = EntryNode(shards.ends, place, workers[0], neighbours[0] if neighbours else None)
    stages = [
        StageNode(
            Stage(
                rank,
                ring,
                epoch=plan.epoch,
                max_sessions=MAX_SESSIONS,
                shelf=shelf_for(rooms[rank], place.slack),
            ),
            runner,
            workers[rank],
            neighbours[rank],
            place.wire,
            shards.help if rank == ring - 1 else None,
        )
        for rank, runner in enumerate(shards.behind, start=1)
    ]
    return entry, stages


@asynccontextmanager
async def running(*nodes: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run the nodes beside the body, and stop them with it.

    A task group would wrap the body's own errors; what a node raises is a bug and rises at the end.
    """
    tasks = [asyncio.create_task(node) for node in nodes]
    try:
        await asyncio.sleep(0)  # every node takes its first step, after which it takes work
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
