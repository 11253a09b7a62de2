"""Where a node stands: in which ring, how far it is, and what it tells of it.

Theory of operation
-------------------
The runtime says when this node has loaded its span and when it is at work; the records of the
others say the same of them, each of the plan that it follows: what was loaded for the last one says
nothing of the next. A ring is formed when all its nodes have loaded, and stands when they are at
work. While an entry answers requests, it asks that the plan stay as it is, and for a short
time after the last one.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import copy_context

from meshllm.errors import LinkLost, MeshError, UserError
from meshllm.names import NodeId
from meshllm.node.net.mesh_link import Links
from meshllm.node.net.secure import SecureLink
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.node.ring.runtime import RingRuntime
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.stage import StageNode
from meshllm.node.session.text import RingBackend
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle, State
from meshllm.protocol.planning.chunking import RingTimes, ring_times
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.planning.problem import kv_rooms
from meshllm.protocol.trust.identity import short
from meshllm.request import Backend

CALM_S = 1.0  # s without a request, after which an entry lets the plan change
FORM_S = 20.0  # s that a ring is given to stand, once its entry has loaded


class Standing:
    """The state of one node in the ring of the mesh."""

    def __init__(self, machine: Mesh, links: Links, why: Callable[[], str]) -> None:
        self.model: ModelRuntime | None = None
        self.runtime: RingRuntime | None = None
        self.agreement: Agreement | None = None
        """The latest, with what its nodes offer."""
        self.has_left = False
        """Its last word is said."""
        self.trouble: MeshError | None = None
        """What keeps this node from serving its span."""
        self._machine = machine
        self._links = links
        self._why = why
        self._state = State()
        self._followed = b""
        self._loaded: Plan | None = None  # the plan whose span this node holds
        self._busy = 0
        self._is_calm = True
        self._news = asyncio.Event()
        self._context = copy_context()  # of the node, whoever asks

    @property
    def plan(self) -> Plan | None:
        """The plan that this node serves, or stands by for."""
        return self.runtime.plan if self.runtime else None

    @property
    def rank(self) -> EntryNode | StageNode | None:
        """This node at work; None while it is not."""
        return (self.runtime.entry or self.runtime.stage) if self.runtime else None

    @property
    def sessions(self) -> int:
        """Count the sessions under way on this rank."""
        return self.runtime.sessions if self.runtime else 0

    def begin(self, model: ModelRuntime) -> RingRuntime:
        """Be ready to serve a model."""
        self.model, self.runtime = model, RingRuntime(self._machine.me, model, self)
        return self.runtime

    def publish(self) -> None:
        """Tell the others what this node does, when that changed; wake who waits for a change."""
        if self.has_left:
            return
        if self.plan:  # the last one is told while there is none, so that epochs never go back
            self._followed = self.plan.encode()
        state = State(
            lifecycle=Lifecycle.SERVING if self.runtime else Lifecycle.JOIN,
            followed=self._followed,
            is_loaded=self.plan is not None and self._loaded == self.plan,
            may_change=self._is_calm,
        )
        if state != self._state:
            self._state = state
            self._links.act(self._machine.publish(state=state, now=self._now()))
        if self.runtime and self.plan:
            self.runtime.formed(is_formed=self._is_formed(self.plan))
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield once at first, then whenever something may have changed."""
        while True:
            news = self._news
            yield
            await news.wait()

    def standing_entry(self) -> NodeId | None:
        """Name the entry of the ring where it stands, as far as this node knows; else None."""
        if self.runtime is None or self.plan is None:
            return None
        entry = self.plan.stages[0].node
        if entry == self._machine.me:
            return entry if self.runtime.entry else None
        return entry if self._is_formed(self.plan) and entry in self._links.lines else None

    # What the desk asks.

    async def entry(self) -> NodeId:
        """Wait for a ring that stands, and name its entry."""
        while True:
            news = self._news
            if (entry := self.standing_entry()) is not None:
                return entry
            await news.wait()

    def reason(self) -> str:
        """Say why there is no ring."""
        if self.trouble or self.plan is None:
            return str(self.trouble or self._why())
        nodes = [stage.node for stage in self.plan.stages]
        if gone := [self._name(node) for node in nodes if node not in self._machine.alive]:
            return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        return "its nodes load and link up"

    @asynccontextmanager
    async def backend(self) -> AsyncIterator[Backend]:
        """Answer as the entry inside the context, and ask that the plan stay as it is.

        Raises:
            LinkLost: this node is not the entry, or its ring broke.
        """
        self._occupy(1)
        try:
            entry, plan, model = await self._own_ring()
            yield RingBackend(entry, model.worker, await model.text(), plan)
        finally:
            self._occupy(-1)

    # What the runtime asks.

    def loaded(self, is_loaded: bool, trouble: MeshError | None) -> None:
        """Tell the others how far this node is."""
        self._loaded, self.trouble = self.plan if is_loaded else None, trouble
        self.publish()

    def at_work(self) -> None:
        """Hear that this node began or ceased to be at work in a ring."""
        self.publish()

    def times(self, plan: Plan) -> RingTimes | None:
        """Tell what the ranks of a plan take, by the latest offers."""
        agreement, charter = self.agreement, self._machine.charter
        if agreement is None or charter is None:
            return None
        try:
            return ring_times(plan, agreement.offers, agreement.links, charter.shape)
        except UserError:  # a member has gone, and another plan is on its way
            return None

    def rooms(self, plan: Plan) -> list[int] | None:
        """Tell the bytes that each rank has for caches, by the latest offers."""
        agreement, charter = self.agreement, self._machine.charter
        if agreement is None or charter is None:
            return None
        try:
            return kv_rooms(plan, agreement.offers, charter.shape)
        except UserError:  # a member has gone, and another plan is on its way
            return None

    async def dial(self, node: NodeId) -> SecureLink:
        """Open a link for a ring."""
        return await self._links.dial_ring(node)

    # Inside.

    def _name(self, node: NodeId) -> str:
        profile = self._machine.profiles.get(node)
        return profile.name if profile and profile.name else short(node)

    def _is_formed(self, plan: Plan) -> bool:
        followed, states = plan.encode(), self._machine.states
        told = (states.get(stage.node) for stage in plan.stages)
        return all(state and state.is_loaded and state.followed == followed for state in told)

    async def _own_ring(self) -> tuple[EntryNode, Plan, ModelRuntime]:
        """Wait for the ring of which this node is the entry; it has loaded, others may not."""
        try:
            async with asyncio.timeout(FORM_S):
                while (plan := self.plan) and plan.stages[0].node == self._machine.me:
                    news = self._news
                    if self.model and self.runtime and (entry := self.runtime.entry):
                        return entry, plan, self.model
                    await news.wait()
        except TimeoutError:
            raise LinkLost("The ring does not stand") from None
        raise LinkLost("This node is not the entry of the ring")

    def _occupy(self, count: int) -> None:
        self._busy += count
        if self._busy and self._is_calm:
            self._is_calm = False
            self.publish()
        elif not self._busy:
            asyncio.get_running_loop().call_later(CALM_S, self._calm, context=self._context)

    def _calm(self) -> None:
        if not self._busy and not self._is_calm:
            self._is_calm = True
            self.publish()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
