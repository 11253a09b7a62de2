"""Hands KV caches over before this node leaves a ring, and takes those of another one that does.

See `meshllm.node.ring.kv_transfer`.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from meshllm.errors import MeshError, PeerFault
from meshllm.names import Digest, GroupId, NodeId
from meshllm.node.ring.held_layers import HeldLayers
from meshllm.node.ring.idle_links import IdleLink
from meshllm.node.ring.kv_transfer import KvSender
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.stage import StageNode
from meshllm.protocol.planning.chunking import RankTimes, RingTimes
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.plan_change import PREPARE_S
from meshllm.protocol.session.messages import KvOffer
from meshllm.protocol.session.stage import MAX_RECOMPUTE_ROWS
from meshllm.transport.contract import Link

AGAIN_S = 1.0  # s until new rows are sent, while another node has not taken the first ones

logger = logging.getLogger(__name__)


class HandoverHost(Protocol):
    """What `KvHandover` needs from its node."""

    def times(self, plan: Plan) -> RingTimes | None:
        """Return the measured times of the ranks of a plan; None if not all are known."""

    def rooms(self, plan: Plan) -> list[int] | None:
        """Return the bytes that each rank has for caches; None if not all are known."""

    def faulty(self, node: NodeId) -> None:
        """Called when another node of the ring has sent something invalid."""

    async def dial(self, node: NodeId) -> Link:
        """Open a link for a ring; raise `MeshError` if the node cannot be reached."""


class KvHandover:
    """Hands over and takes KV caches for one ring."""

    def __init__(  # noqa: PLR0913 -- the parts of a runtime
        self,
        me: NodeId,
        group: GroupId,
        model: ModelRuntime,
        host: HandoverHost,
        held: HeldLayers,
        tasks: asyncio.TaskGroup,
        plan: Callable[[], Plan | None],
        discard: Callable[[IdleLink], None],
    ) -> None:
        """Take caches in ``tasks``.

        ``plan`` returns the plan in force, ``discard`` closes a link in the background.
        """
        self._me = me
        self._group = group
        self._model = model
        self._host = host
        self._held = held
        self._tasks = tasks
        self._plan = plan
        self._discard = discard
        self._taking: dict[NodeId, asyncio.Task[None]] = {}  # by the node that hands over

    async def hand_over(self, plan: Plan, rank: EntryNode | StageNode | None) -> None:
        """Send the caches of a rank to the nodes that take over its layers; see `KvSender`.

        Until all of them have taken what there was, each takes what is written meanwhile.
        """
        before = self._plan()
        if before is None or rank is None or not rank.committed or not self._model.resumes:
            return
        nodes = next_owners(before, plan, self._me)
        progress = _Progress(set(nodes))
        try:
            async with asyncio.timeout(PREPARE_S), asyncio.TaskGroup() as group:
                for node, layers in nodes.items():
                    sender = partial(self._sender, before, plan, rank, node, layers)
                    group.create_task(self._send(node, sender, progress))
        except TimeoutError:
            logger.info("KV caches are not handed over: a node has not taken them in time")

    async def _send(
        self, node: NodeId, sender_on: Callable[[Link], KvSender], progress: "_Progress"
    ) -> None:
        link = None
        try:
            link = await self._host.dial(node)
            sender = sender_on(link)
            await sender.catch_up()
            progress.done(node)
            is_last = False
            while not is_last:
                is_last = await progress.all_done(AGAIN_S)
                await sender.catch_up()
            logger.info("%d rows of each layer are handed over", sender.rows)
        except MeshError as error:
            logger.info("no more KV caches are handed over: %s", error)
        finally:
            progress.done(node)
            if link is not None:
                await link.close()

    def _sender(
        self,
        before: Plan,
        plan: Plan,
        rank: EntryNode | StageNode,
        node: NodeId,
        layers: range,
        link: Link,
    ) -> KvSender:
        place, stop = plan.rank(node) or 0, before.stages[before.rank(self._me) or 0].span.stop
        is_before = stop == plan.stages[place].span.stop < plan.layers
        times = self._host.times(plan)
        recompute_s = partial(_recompute_s, times.ranks[place] if times else None, len(layers))
        worker, next_layer = self._model.worker, stop if is_before else None
        return KvSender(link, self._offer(plan), worker, rank, layers, next_layer, recompute_s)

    def take(self, link: IdleLink, peer: NodeId, offer: KvOffer) -> None:
        """Take over a link by which a node of the ring hands over its caches.

        It replaces the last one of that node, which has another plan now.
        """
        if before := self._taking.get(peer):
            before.cancel()
        task = self._taking[peer] = self._tasks.create_task(self._take(link, peer, offer))
        task.add_done_callback(partial(self._taken, link, peer))

    def _taken(self, link: IdleLink, peer: NodeId, task: asyncio.Task[None]) -> None:
        self._discard(link)  # here: a task that is cancelled early never begins
        if self._taking.get(peer) is task:
            del self._taking[peer]

    async def _take(self, link: IdleLink, peer: NodeId, offer: KvOffer) -> None:
        try:
            async with asyncio.timeout(PREPARE_S):
                await self._receive(link, peer, offer.plan)
        except PeerFault as error:
            logger.warning("KV caches are not taken: %s", error)
            self._host.faulty(peer)
        except (MeshError, TimeoutError) as error:
            logger.info("no more KV caches are taken: %s", error)

    async def _receive(self, link: IdleLink, peer: NodeId, digest: Digest) -> None:
        before = self._plan()
        if before is None or before.rank(peer) is None:
            return  # it has no layers here
        found = await self._held.receiver(peer, digest, self._room)
        if found is None:
            return
        plan, receiver = found
        if layers := next_owners(before, plan, peer).get(self._me):
            last = plan.stages[plan.rank(self._me) or 0].span.stop
            await receiver.serve(link, self._offer(plan), layers, last)

    def _offer(self, plan: Plan) -> KvOffer:
        return KvOffer(self._me, plan.epoch, plan.digest, self._group)

    def _room(self, plan: Plan) -> int:
        """Return the bytes for caches of this node in a plan."""
        rooms: Sequence[int] = self._host.rooms(plan) or ()
        rank = plan.rank(self._me)
        return rooms[rank] if rooms and rank is not None else 0


class _Progress:
    """Which nodes have not taken what there was at first."""

    def __init__(self, waiting: set[NodeId]) -> None:
        self._waiting = waiting
        self._all_done = asyncio.Event()

    def done(self, node: NodeId) -> None:
        """Note that a node has, or never will."""
        self._waiting.discard(node)
        if not self._waiting:
            self._all_done.set()

    async def all_done(self, wait_s: float) -> bool:
        """Wait so long, or until all nodes have; return whether they have."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._all_done.wait()
        return self._all_done.is_set()


def next_owners(before: Plan, after: Plan, node: NodeId) -> dict[NodeId, range]:
    """Return which nodes take over which layers of one that leaves; none if it stays."""
    rank = before.rank(node)
    if rank is None or after.rank(node) is not None:
        return {}
    own, found = before.stages[rank].span, dict[NodeId, range]()
    for stage in after.stages:
        layers = range(max(own.start, stage.span.start), min(own.stop, stage.span.stop))
        if layers:
            found[stage.node] = layers
    return found


def _recompute_s(times: RankTimes | None, layers: int, rows: range) -> float | None:
    """Return how long a rank computes rows of decode steps again in some layers, if known."""
    if times is None or not times.layers:
        return None
    blocks = range(rows.start, rows.stop, MAX_RECOMPUTE_ROWS)
    taken = (times.compute_s(min(MAX_RECOMPUTE_ROWS, rows.stop - at), at) for at in blocks)
    return sum(taken) * layers / times.layers
