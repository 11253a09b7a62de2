"""One node serving one plan after the other; knows not how a plan comes to be.

For each plan the node loads its span, links to the rank after it, takes the link of the rank before
it, and runs as entry or as stage until a neighbour is gone; then it links again, as long as the
plan is the one in force. A node that moves on to another plan lets go of everything of the last.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.names import NodeId
from meshllm.node.engine import Engine, Held
from meshllm.node.entry import EntryNode, Seat
from meshllm.node.peers import Neighbours, Peer
from meshllm.node.rehearsal import Rehearsal
from meshllm.node.stage import StageNode
from meshllm.protocol.chunking import RingTimes
from meshllm.protocol.codec import decode, encode
from meshllm.protocol.link import SILENCE, Link, Send
from meshllm.protocol.messages import Hello
from meshllm.protocol.pace import Pace
from meshllm.protocol.plan import Plan
from meshllm.protocol.shelf import shelf_for
from meshllm.protocol.stage import Stage
from meshllm.transport import contract

MAX_SESSIONS = 8  # generations at a time; others wait their turn
MAX_KEPT = 16  # messages of a link that is not at work
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0  # s; a neighbour that loads is asked again and again

logger = logging.getLogger(__name__)


class _Waiting:
    """A link that is not at work yet; what arrives is kept for when it is.

    A ring in which one node takes a link that the other end gave up breaks at once, and that leaves
    such a link to the next node: without a look at them it could be so for ever.
    """

    def __init__(self, link: contract.Link) -> None:
        self._link = link
        self._kept: deque[tuple[contract.Channel, contract.Buffer]] = deque()
        self.send = link.send
        self._prompt = link if isinstance(link, contract.Prompt) else None
        self.close = link.close

    def offer(
        self,
        message: Sequence[contract.Buffer],
        channel: contract.Channel = contract.Channel.DATA,
    ) -> bool:
        return self._prompt is not None and self._prompt.offer(message, channel)

    async def receive(self) -> tuple[contract.Channel, contract.Buffer]:
        return self._kept.popleft() if self._kept else await self._link.receive()

    async def first(self) -> contract.Buffer:
        """Wait for the first message, and keep it."""
        self._kept.append(await self._link.receive())
        return self._kept[0][1]

    async def stands(self) -> bool:
        """Tell whether the other end has not let go, as far as is known here."""
        try:
            async with asyncio.timeout(0):
                while len(self._kept) < MAX_KEPT:
                    self._kept.append(await self._link.receive())
        except TimeoutError:
            return True
        except MeshError:
            return False
        return False  # nobody says so much before it is answered

    @property
    def statistics(self) -> contract.LinkStatistics:
        return self._link.statistics


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A link from a rank that wants this node as the one after it."""

    epoch: int
    link: _Waiting


class Outside(Protocol):
    """What a service needs of the node around it."""

    def loaded(self, is_loaded: bool, trouble: str) -> None:
        """Hear whether the span of the plan is loaded, and what is wrong."""

    def at_work(self) -> None:
        """Hear that this node began or ceased to be at work in a ring."""

    async def together(self, plan: Plan) -> None:
        """Wait until every node of a plan has loaded its span."""

    def times(self, plan: Plan) -> RingTimes | None:
        """Tell what the ranks of a plan take; None where a node has not told."""

    async def dial(self, node: NodeId) -> contract.Link:
        """Open a link for a ring; raise `MeshError` when there is no way."""


class Service:
    """The place of a node in the ring."""

    def __init__(
        self,
        me: NodeId,
        engine: Engine,
        outside: Outside,
    ) -> None:
        self._me = me
        self._engine = engine
        self._outside = outside
        self._moved = asyncio.Event()
        self._arrivals: dict[NodeId, _Arrival] = {}
        self._arrived = asyncio.Event()
        self._latest = 0  # epoch that was followed
        self.plan: Plan | None = None
        self.entry: EntryNode | None = None
        """At work: this node is rank 0 of a ring that stands."""
        self.stage: StageNode | None = None
        """At work: this node is another rank of a ring that stands."""

    @property
    def sessions(self) -> int:
        """Count the sessions under way on this rank."""
        return sum(node.sessions for node in (self.entry, self.stage) if node)

    def follow(self, plan: Plan | None) -> None:
        """Serve this plan from now on."""
        if plan != self.plan:
            self.plan = plan
            self._latest = plan.epoch if plan else self._latest
            self.entry = self.stage = None  # theirs was the last plan, and they are about to end
            self._moved.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            while True:
                await self._until_moved()
        finally:
            await self._sweep(inf)

    async def arrive(self, link: contract.Link, peer: NodeId) -> None:
        """Take a link for a ring; it is closed when it is not for the plan in force or the next."""
        waiting = _Waiting(link)
        try:
            async with asyncio.timeout(SILENCE):
                hello = decode(await waiting.first())
        except (TimeoutError, MeshError, asyncio.CancelledError) as error:
            await link.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        epoch = self.plan.epoch if self.plan else 0
        if not isinstance(hello, Hello) or hello.node != peer or hello.epoch < epoch:
            await link.close()
            return
        if before := self._arrivals.pop(peer, None):
            await before.link.close()
        self._arrivals[peer] = _Arrival(hello.epoch, waiting)
        self._arrived.set()

    async def _until_moved(self) -> None:
        self._moved.clear()
        serving = asyncio.create_task(self._serve(self.plan))
        moving = asyncio.create_task(self._moved.wait())
        try:
            await asyncio.wait({serving, moving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()  # it ends by itself only with a bug
        finally:
            for task in (serving, moving):
                task.cancel()
            await asyncio.gather(serving, moving, return_exceptions=True)

    async def _serve(self, plan: Plan | None) -> None:
        await self._sweep(plan.epoch if plan else self._latest + 1)
        if plan is None or plan.rank(self._me) is None:
            self._engine.release()
            self._outside.loaded(False, "")
            return await _for_ever()
        self._outside.loaded(False, "")
        try:
            held = await self._engine.hold(plan, self._me)
        except MeshError as error:
            logger.warning("cannot load layers %s: %s", plan.stages, error)
            self._outside.loaded(False, str(error))
            return await _for_ever()
        if self.plan == plan:  # else this task is about to be cancelled
            self._outside.loaded(True, "")
        pause = FIRST_RETRY_S
        while True:
            begin = self._now()
            reason = await self._form(plan, held)
            logger.info("the ring of epoch %d broke: %s", plan.epoch, reason)
            pause = FIRST_RETRY_S if self._now() - begin > SILENCE else min(pause * 2, LAST_RETRY_S)
            await asyncio.sleep(pause)

    async def _form(self, plan: Plan, held: Held) -> MeshError:
        """Link to the neighbours and serve; return why it ended."""
        rank, ring = plan.rank(self._me) or 0, len(plan.stages)
        if ring == 1:
            return await self._run(plan, held, None)
        after, before = plan.stages[(rank + 1) % ring].node, plan.stages[rank - 1].node
        hello = Hello(self._me, plan.epoch, plan.digest)
        to_after = Link(hello, peer=after)
        await self._outside.together(plan)
        try:
            async with AsyncExitStack() as given_up:
                dialled = _Waiting(await self._outside.dial(after))
                given_up.push_async_callback(dialled.close)
                for action in to_after.open(self._now()):  # who is dialled waits for this
                    if isinstance(action, Send):
                        await dialled.send(encode(action.message), contract.Channel.CONTROL)
                taken = await self._take(before, plan.epoch, dialled)
                given_up.pop_all()
        except MeshError as error:
            return error
        neighbours = Neighbours(
            before=Peer(taken, Link(hello, peer=before)), after=Peer(dialled, to_after)
        )
        return await self._run(plan, held, neighbours)

    async def _run(self, plan: Plan, held: Held, neighbours: Neighbours | None) -> MeshError:
        rank, ring, engine = plan.rank(self._me) or 0, len(plan.stages), self._engine
        if held.ends is not None:
            seat = Seat(
                ring,
                plan.epoch,
                partial(self._pace, plan),
                MAX_SESSIONS,
                engine.slack,
                engine.room(held.span),
                engine.drafting,
                draft=held.draft,
                wire=engine.wire,
            )
            node: EntryNode | StageNode = EntryNode(held.ends, seat, engine.worker, neighbours)
        else:
            if held.runner is None or neighbours is None:
                raise PeerFault(f"Rank {rank} of a ring of {ring} holds nothing")
            shelf = shelf_for(engine.room(held.span), engine.slack)
            machine = Stage(rank, ring, epoch=plan.epoch, max_sessions=MAX_SESSIONS, shelf=shelf)
            node = StageNode(
                machine, held.runner, engine.worker, neighbours, engine.wire, held.help
            )
        runners = held.runners if engine.drafting else []
        rehearsal = Rehearsal([(engine.worker, runner) for runner in runners])
        try:
            running = asyncio.ensure_future(node.run())
            rehearsing = asyncio.ensure_future(rehearsal.run())
            await asyncio.sleep(0)  # after its first step it takes work
            if self.plan == plan:
                self._at_work(node)
            return await running
        finally:
            self._at_work(None)
            running.cancel()
            rehearsing.cancel()
            await asyncio.gather(running, rehearsing, return_exceptions=True)

    def _pace(self, plan: Plan, prompt: int, others: int) -> Pace:
        """Ask anew for each prompt: what the nodes offer may change."""
        times = self._outside.times(plan)
        return self._engine.pace(len(plan.stages), prompt, others, times)

    async def _take(self, peer: NodeId, epoch: int, dialled: _Waiting) -> contract.Link:
        """Wait for the link of the rank before this one."""
        try:
            async with asyncio.timeout(2 * SILENCE):
                arrival = await self._next(peer, epoch)
        except TimeoutError:
            raise LinkLost("The rank before did not link in time") from None
        if arrival.epoch > epoch:  # it waits for the next plan, which is on its way
            raise LinkLost("The rank before follows a later plan")
        if not await dialled.stands():  # what arrived is for the next attempt
            raise LinkLost("The rank after gave up")
        if self._arrivals.get(peer) is not arrival:
            raise LinkLost("The rank before began anew")
        del self._arrivals[peer]
        return arrival.link

    async def _next(self, peer: NodeId, epoch: int) -> _Arrival:
        """Wait for a link of which the rank before did not let go meanwhile."""
        while True:
            self._arrived.clear()
            arrival = self._arrivals.get(peer)
            if arrival and arrival.epoch >= epoch and await arrival.link.stands():
                return arrival
            await self._arrived.wait()

    async def _sweep(self, epoch: float) -> None:
        """Close the links for plans before this epoch, which nobody takes any more."""
        for peer, arrival in list(self._arrivals.items()):
            if arrival.epoch < epoch and self._arrivals.get(peer) is arrival:
                del self._arrivals[peer]
                await arrival.link.close()

    def _at_work(self, node: EntryNode | StageNode | None) -> None:
        self.entry = node if isinstance(node, EntryNode) else None
        self.stage = node if isinstance(node, StageNode) else None
        self._outside.at_work()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _for_ever() -> None:
    await asyncio.Event().wait()  # nobody sets it
