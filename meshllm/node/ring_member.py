"""This node's readiness in the current ring, and the state record that it publishes.

Theory of operation
-------------------
The runtime reports when this node has loaded its span and when it serves. The state records of the
other nodes report the same, each together with the plan that the node follows, since a span loaded
for one plan means nothing for the next. A ring is formed when all its nodes have loaded their
spans, and serves when its links are open. While an entry serves requests, and shortly after the
last one, it publishes that the plan must not change, but not for longer than `BUSY_S`: answers
continue on the next ring, and a ring that is never idle must be able to grow.

A neighbour that sends invalid data again and again is published as faulty, and so are a node of the
plan that does not load its span in time, and a neighbour that has and does not link: a plan with a
node that only claims to take part would wait for it without end. No plan makes the two neighbours
again until `FAULTS_S` have passed.

In a mesh of several rings a node takes part in that of its group, and in further ones with the
memory that this leaves: a `RingMember` for each, of which the first one publishes for all, and
finds the one for a request. It knows from the states which other rings serve, and who their entries
are. It publishes which models were asked for here within
`--keep`, so that a model that nobody uses makes room for one that somebody asks for, see `groups`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING

from meshllm.errors import LinkLost, MeshError, UserError
from meshllm.names import FIRST_GROUP, GroupId, LossCause, ModelKey, NodeId, short
from meshllm.node.founding import find_node
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.net.secure import SecureLink
from meshllm.node.provider import Provider
from meshllm.node.timer import loop_time
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.candidates import decoded
from meshllm.protocol.agreement.groups import find_group, groups_of, is_exact
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import (
    ENDS,
    Lifecycle,
    ModelOffer,
    RingMembership,
    StateRecord,
)
from meshllm.protocol.membership.strikes import FAULTS_S, MAX_FAULTS, Strikes
from meshllm.protocol.planning.chunking import RingTimes, ring_times
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.planning.problem import kv_rooms
from meshllm.protocol.ring.forming import LINK_S
from meshllm.protocol.ring.handover import Outlook
from meshllm.protocol.ring.interruption import RingPlan, explain
from meshllm.protocol.trust.identity import show
from meshllm.protocol.weights.holders import missing_parts, needed_parts
from meshllm.request import Backend

if TYPE_CHECKING:  # a provider holds no layers, and imports no torch
    from meshllm.model.steps.runner import Runner
    from meshllm.node.ring.model_runtime import ModelRuntime
    from meshllm.node.ring.runtime import RingRuntime
    from meshllm.node.session.entry import EntryNode
    from meshllm.node.session.stage import StageNode

PROVIDES = "it provides whole models"  # why it holds no layers
HANGS = "its compute thread hangs"
CALM_S = 1.0  # s without a request after which an entry allows the plan to change,
BUSY_S = 60.0  # or with requests: far more than the pause until answers continue on the next ring
FORM_S = 20.0  # s until the ring of an entry must serve
LOAD_S = 60.0  # s until a node of a plan must have loaded its span,
LOAD_BYTES_PER_S = 10e6  # and for its bytes, from a slow disk,
FETCH_BYTES_PER_S = 1e6  # or from other nodes over a slow network
_EARLY_S = 1.0  # more than the rounding error by which a timer may be early
_CHECK_S = LINK_S + _EARLY_S

logger = logging.getLogger(__name__)


class RingMember:
    """The state of one node in the ring of the mesh."""

    def __init__(
        self,
        machine: Mesh,
        links: MeshLinks,
        plan_reason: Callable[[], str],
        *,
        keep_s: float,
        first: "RingMember | None" = None,
    ) -> None:
        """Take part in the first ring; a model counts as used for ``keep_s`` after a request.

        With ``first``, which publishes for both, this is for a further ring.
        """
        self.further: dict[GroupId, RingMember] = {}
        """This node in further rings, by group; empty in each of them."""
        self.model: ModelRuntime | None = None
        self.runtime: RingRuntime | None = None
        self.group: GroupId = FIRST_GROUP
        """The ring in which this node takes part; see `groups`."""
        self.provider: Provider | None = None
        """Instead of layers, this node provides whole models."""
        self.agreement: Agreement | None = None
        """The latest, with the offers of its nodes."""
        self.is_hung = False
        """Whether the compute thread of this node does not respond."""
        self.obstacle = ""
        """Why this node tells the others not to plan with it yet; empty if they may."""
        self.is_leaving = False
        """Whether this node tells the others to make a plan without it."""
        self.has_left = False
        """Whether this node publishes no more."""
        self.trouble: MeshError | None = None
        """The error that keeps this node from serving its span."""
        self._first = first or self
        self._keep_s = keep_s
        self._awaited: Counter[ModelKey] = Counter()  # requests that wait for a ring
        self._asked: dict[ModelKey, float] = {}  # when each was asked for last, if lately
        self._machine = machine
        self._links = links
        self._plan_reason = plan_reason
        self._state = StateRecord()
        self._followed = b""
        self._watched: Plan | None = None  # the plan whose nodes must load in time,
        self._load_until: dict[NodeId, float] = {}  # each of them
        self._loaded: Plan | None = None  # the plan whose span this node holds
        self._faults: Strikes = first._faults if first else Strikes(MAX_FAULTS, FAULTS_S)
        self._busy = 0
        self._is_calm = True
        self._busy_since: float | None = None  # until no request was there for a while
        self._changed = asyncio.Event()
        self._context = copy_context()  # of the node, for timers set by a request

    @property
    def plan(self) -> Plan | None:
        """The plan that this node follows, with or without a span."""
        return self.runtime.plan if self.runtime else None

    @property
    def charter(self) -> Charter | None:
        """The charter of the model of its ring; None if that is unknown."""
        whole = self._machine.charter
        group = find_group(whole, self.group) if whole else None
        return group.charter if group else None

    @property
    def rank(self) -> "EntryNode | StageNode | None":
        """The running entry or stage; None while this node does not serve."""
        return (self.runtime.entry or self.runtime.stage) if self.runtime else None

    @property
    def execution(self) -> str:
        """The execution mode of the model, or which layers are loaded in advance; may be empty."""
        if self.rank:
            return str(self.rank.runners[0].execution)
        ahead = self.runtime.preloaded if self.runtime else None
        rank = ahead.rank(self._machine.me) if ahead else None
        if ahead is None or rank is None:
            return ""
        return f"layers {ahead.stages[rank].span} are loaded in advance"

    @property
    def history(self) -> Sequence[tuple[str, float]]:
        """See `RingRuntime.history`."""
        return self.runtime.history if self.runtime else ()

    @property
    def held(self) -> "Collection[Runner]":
        """Runners of all that this node has loaded, in advance too."""
        return [each for at in self.members if at.model for each in at.model.runners]

    @property
    def ranks(self) -> "list[EntryNode | StageNode]":
        """The running entries and stages of all rings of this node."""
        return [each.rank for each in self.members if each.rank]

    @property
    def members(self) -> "list[RingMember]":
        """This node in each of its rings."""
        return [self, *self.further.values()]

    @property
    def sessions(self) -> int:
        """The number of running sessions on the ranks of this node."""
        provided = self.provider.active if self.provider else 0
        return provided + sum(at.runtime.sessions for at in self.members if at.runtime)

    @property
    def recomputed(self) -> int:
        """Rows computed again on this node after losses, times the layers that computed them."""
        return sum(at.runtime.recomputed for at in self.members if at.runtime)

    def begin(self, model: "ModelRuntime") -> "RingRuntime":
        """Create the runtime for a model."""
        from meshllm.node.ring.runtime import RingRuntime

        self.model, self.runtime = model, RingRuntime(self._machine.me, model, self, self.group)
        return self.runtime

    def end(self, group: GroupId) -> None:
        """Release the model, after its runtime has ended, and take part in another group."""
        if self.model is not None:
            self.model.release()
        self.model = self.runtime = self.agreement = self.trouble = self._loaded = None
        self.group = group
        self.publish()

    def publish(self) -> None:
        """Publish the state record if it changed; wake the waiters for a change."""
        if self._first is not self:
            self._first.publish()
            return
        if self.has_left:
            return
        own, *others = [each.membership() for each in self.members]
        further = [each for each in others if each.group != own.group]
        state = StateRecord(
            lifecycle=self._lifecycle(),
            followed=own.followed,
            is_loaded=own.is_loaded,
            may_change=own.may_change,
            obstacle=own.obstacle,
            faulty=self._faults.out(loop_time()),
            offers=self.provider.offers if self.provider else (),
            group=own.group,
            used=self._used(),
            prepared=own.prepared,
            further=tuple(sorted(further, key=lambda each: each.group)),
        )
        if state != self._state:
            self._state = state
            self._links.act(self._machine.publish(state=state, now=loop_time()))
        for each in self.members:
            each.check_formed()
        news, self._changed = self._changed, asyncio.Event()
        news.set()

    def membership(self) -> RingMembership:
        """Return what this node publishes of the ring."""
        if self.plan:  # else keep publishing the last one, so that epochs never decrease
            self._followed = self.plan.encode()
            self._watch(self.plan)
        is_loaded = self.plan is not None and self._loaded == self.plan
        prepared = self.runtime.prepared if self.runtime else None
        return RingMembership(
            *(self.group, self._followed, is_loaded, self._is_calm, self._obstacle()),
            prepared.digest if prepared else b"",
        )

    def check_formed(self) -> None:
        """Tell the runtime whether all nodes of its plan have loaded."""
        if self.runtime and self.plan:
            self.runtime.formed(is_formed=self._is_formed(self.plan))

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yield once at first, then after each possible change."""
        while True:
            news = self._first._changed
            yield
            await news.wait()

    def outlook(self, plan: Plan | None, settle_s: float) -> Outlook:
        """Return what is known here about following a plan that was agreed on."""
        machine, followed = self._machine, self.plan
        is_whole = followed is not None and self._is_formed(followed)
        if followed and followed.rank(machine.me) is not None:
            is_whole &= self.rank is not None
        if plan is None:
            return Outlook(plan, followed, settle_s, is_whole)
        here = {
            node: machine.states[node].in_ring(self.group)
            for node in machine.alive
            if node in machine.states
        }
        encoded, digest = plan.encode(), plan.digest
        begun = {node for node, state in here.items() if state.followed == encoded}
        prepared = {node for node, state in here.items() if state.prepared == digest} | begun
        others = begun.intersection(stage.node for stage in plan.stages) - {machine.me}
        return Outlook(plan, followed, settle_s, is_whole, bool(others), prepared)

    def serving_entry(self) -> NodeId | None:
        """Return the entry of the ring if the ring serves, as far as known here; else None."""
        if self.runtime is None or self.plan is None:
            return None
        entry = self.plan.stages[0].node
        if entry == self._machine.me:
            return entry if self.runtime.entry else None
        return entry if self._is_formed(self.plan) and entry in self._links.by_peer else None

    # Callbacks of the request router.

    def is_provided(self, model: str) -> bool:
        """Return whether a request for a model is one for a provider, not for the ring."""
        charter = self._machine.charter
        return bool(model) and (charter is None or charter.find(model) is None)

    def offers(self, model: str) -> dict[NodeId, ModelOffer]:
        """Return the nodes that provide a model now, and what they say of it."""
        machine = self._machine
        return {
            node: offer
            for node, state in machine.states.items()
            if state.lifecycle is Lifecycle.SERVING
            and (node == machine.me or node in self._links.by_peer)
            for offer in reversed(state.offers)
            if offer.model == model
        }

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of nodes; raise `UserError` if a name is unknown or that of several."""
        return tuple(show(find_node(name, self._machine.profiles)) for name in names)

    async def entries(self, model: str = "") -> Sequence[NodeId]:
        """Wait until a ring serves a model; return the entries of all rings that do."""
        with self._using(model):
            while True:
                news = self._changed
                if entries := self.serving_entries(model):
                    return entries
                await news.wait()

    def serving_entries(self, model: str = "") -> Sequence[NodeId]:
        """Return the entries of the rings that serve a model now, as far as known here."""
        entries = (
            at.serving_entry() if (at := self._in_ring(group)) else self._entry_of(group)
            for group in self._groups(model)
        )
        return [entry for entry in entries if entry is not None]

    def _groups(self, model: str) -> list[GroupId]:
        """Return the rings of a model; that of this node if it is unknown."""
        charter = self._machine.charter
        wanted = charter.find(model) if charter else None
        if charter is None or wanted is None:
            return [self.group]
        return [group.id for group in groups_of(charter) if group.charter.key == wanted.key]

    def ring(self, group: GroupId) -> tuple[Plan | None, bool]:
        """Return the plan of a ring of the mesh, and whether it serves, as far as known here."""
        if at := self._in_ring(group):
            return at.plan, at.serving_entry() is not None
        plan = self.plan_of(group)
        return plan, plan is not None

    def plan_of(self, group: GroupId) -> Plan | None:
        """Return the plan that all nodes of another ring have loaded; None if there is none."""
        machine = self._machine
        loaded = {
            each.followed
            for node, state in machine.states.items()
            if node in machine.alive
            for each in state.memberships
            if each.group == group and each.is_loaded
        }
        plans = [plan for each in loaded if (plan := decoded(each)) and self._is_formed(plan)]
        return max(plans, key=lambda plan: plan.precedence, default=None)

    def reason(self, model: str = "") -> str:
        """Return why there is no ring of a model."""
        charter = self._machine.charter
        wanted = charter.find(model) if charter else None
        if wanted is not None:
            if (at := self._serving(wanted)) is None:
                return f"the ring of `{wanted.shape.name}` does not serve: {self._awaits(wanted)}"
            return at.own_reason()
        return self.own_reason()

    def own_reason(self) -> str:
        """Return why the ring of this member does not serve."""
        if self.trouble or self.plan is None:
            return str(self.trouble or self._plan_reason())
        nodes = [stage.node for stage in self.plan.stages]
        if gone := [self._name(node) for node in nodes if node not in self._machine.alive]:
            return f"{', '.join(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        return "its nodes are loading and connecting"

    @property
    def loads_until(self) -> float:
        """Until when nodes of its plans may still load layers, in loop time; 0 if none does."""
        return max(each.loads_own_until for each in self.members)

    @property
    def loads_own_until(self) -> float:
        """The same, in this ring only."""
        if (plan := self.plan) is None:
            return 0.0
        here = self._machine.alive.intersection(self._load_until)
        loading = (node for node in here if not self._has_loaded(plan, node))
        return max(map(self._load_until.__getitem__, loading), default=0.0)

    def ring_at(self, entry: NodeId, model: str = "") -> RingPlan | None:
        """Return the ring of a model with this entry, as far as it is known here."""
        rings = ((group, self.ring(group)[0]) for group in self._groups(model))
        return next(
            ((group, plan) for group, plan in rings if plan and plan.stages[0].node == entry), None
        )

    def is_exact(self, entry: NodeId, model: str = "") -> bool:
        """Return whether the ring of a model with this entry computes as transformers does."""
        charter, ring = self._machine.charter, self.ring_at(entry, model)
        wanted = charter.find(model) if charter else None
        if wanted is None or ring is None:
            return False
        return is_exact(wanted, ring[1], self._machine.profiles)

    def explain(self, before: RingPlan | None, after: RingPlan | None) -> tuple[LossCause, str]:
        """Return why a ring with its earlier plan was lost, and a phrase about it."""
        machine = self._machine
        ends = Lifecycle.LEAVING, Lifecycle.LEFT
        here = {node: state for node, state in machine.states.items() if node in machine.alive}
        out = {
            LossCause.NODE_SILENT: machine.silent - machine.alive,
            LossCause.NODE_HUNG: {node for node, state in here.items() if state.obstacle},
            LossCause.NODE_REFUSED: {node for state in here.values() for node in state.faulty},
            LossCause.NODE_LEFT: {
                node for node, state in machine.states.items() if state.lifecycle in ends
            },
        }
        return explain(before, after, alive=machine.alive, out=out, name=self._name)

    @asynccontextmanager
    async def backend(self, asker: NodeId | None = None, model: str = "") -> AsyncIterator[Backend]:
        """Serve an asker as a provider or as the entry, and keep the plan from changing meanwhile.

        None is the owner of this node.

        Raises:
            LinkLost: this node is not the entry, its ring did not form, or it provides nothing.
        """
        if self.is_provided(model):
            if self.provider is None:
                raise LinkLost(f"This node does not provide `{model[:100]}`")
            yield self.provider
            return
        at = self._find(model)
        at._count_requests(1)
        try:
            entry, plan, own = await at._own_ring()
            from meshllm.node.session.text import RingBackend

            yield RingBackend(entry, own.worker, await own.text(), plan, asker)
        finally:
            at._count_requests(-1)

    # Callbacks of the ring runtime.

    def loaded(self, is_loaded: bool, trouble: MeshError | None) -> None:
        """Publish whether the span is loaded; ``trouble`` is why it cannot be."""
        self._loaded, self.trouble = self.plan if is_loaded else None, trouble
        self.publish()

    def at_work(self) -> None:
        """Publish that this node started or stopped serving."""
        self.publish()

    def broke(self, plan: Plan) -> None:
        """Look which node of a ring has ended."""
        for stage in plan.stages:
            self._links.probe(stage.node)

    def times(self, plan: Plan) -> RingTimes | None:
        """Predict the times of the ranks of a plan from the latest offers."""
        agreement, charter = self.agreement, self.charter
        if agreement is None or charter is None:
            return None
        try:
            return ring_times(plan, agreement.offers, agreement.links, charter.shape)
        except UserError:  # a member has left, and a new plan will follow
            return None

    def rooms(self, plan: Plan) -> list[int] | None:
        """Return the bytes that each rank has for KV caches, from the latest offers."""
        agreement, charter = self.agreement, self.charter
        if agreement is None or charter is None:
            return None
        try:
            return kv_rooms(plan, agreement.offers, charter.shape)
        except UserError:  # a member has left, and a new plan will follow
            return None

    def faulty(self, node: NodeId) -> None:
        """Count a fault of a neighbour; after several it is left out for a while."""
        logger.warning("node %s sent invalid data to this one", self._name(node))
        self._faults.strike(node, loop_time())
        self._publish_faults()

    async def dial(self, node: NodeId) -> SecureLink:
        """Open a ring link."""
        return await self._links.dial_ring(node)

    # Inside.

    def _name(self, node: NodeId) -> str:
        profile = self._machine.profiles.get(node)
        return profile.name if profile and profile.name else short(node)

    def _entry_of(self, group: GroupId) -> NodeId | None:
        """Return the entry of another ring, if it serves and a link leads there."""
        plan = self.plan_of(group)
        entry = plan.stages[0].node if plan else None
        return entry if entry in self._links.by_peer else None

    def _in_ring(self, group: GroupId) -> "RingMember | None":
        """Return this node in a ring in which it takes part, and has opened the model."""
        return next((at for at in self.members if at.group == group and at.runtime), None)

    def _serving(self, wanted: Charter) -> "RingMember | None":
        """Return this node in its ring of a model; None if it takes part in none."""
        owned = ((at, at.charter) for at in self.members)
        return next((at for at, own in owned if own and own.key == wanted.key), None)

    def _find(self, model: str) -> "RingMember":
        """Return this node in its ring of a model; raise `LinkLost` without: it may have moved."""
        charter = self._machine.charter
        wanted = charter.find(model) if charter else None
        if wanted is None:
            return self
        if (at := self._serving(wanted)) is None:
            raise LinkLost(f"This node does not serve `{wanted.shape.name}` now")
        return at

    def _obstacle(self) -> str:
        if self.provider:
            return PROVIDES
        return HANGS if self._first.is_hung else self.obstacle

    def _lifecycle(self) -> Lifecycle:
        if self.is_leaving:
            return Lifecycle.LEAVING
        return Lifecycle.SERVING if self.runtime or self.provider else Lifecycle.JOIN

    def _is_formed(self, plan: Plan) -> bool:
        return all(self._has_loaded(plan, stage.node) for stage in plan.stages)

    def _watch(self, plan: Plan) -> None:
        """Start the time in which the other nodes of a new plan must load their spans."""
        charter = self.charter
        if plan == self._watched or charter is None:
            return
        self._watched, sizes, loop = plan, charter.shape.layer_bytes, asyncio.get_running_loop()
        self._load_until.clear()
        for stage in plan.stages:
            size = sum(sizes[stage.span.start : stage.span.stop]) + charter.shape.ends_bytes
            latest = LOAD_S + size / (
                FETCH_BYTES_PER_S if self._fetches(plan, stage.node) else LOAD_BYTES_PER_S
            )
            self._load_until[stage.node] = loop_time() + latest
            if stage.node != self._machine.me:
                loop.call_later(latest, self._check_loaded, plan, stage.node, context=self._context)
        loop.call_later(_CHECK_S, self._check_linked, plan, context=self._context)

    def _fetches(self, plan: Plan, node: NodeId) -> bool:
        """Return whether a node lacks weights of its span, and fetches them from others."""
        machine = self._machine
        profile, state = machine.profiles.get(node), machine.states.get(node)
        if profile is not None and state is not None:
            profile = profile.in_ring(self.group, is_further=state.is_further(self.group))
        if profile is None or len(profile.weights) != plan.layers + ENDS:
            return False
        return bool(missing_parts(profile.weights, needed_parts(plan, node)))

    def _check_loaded(self, plan: Plan, node: NodeId) -> None:
        if plan == self.plan and not self._has_loaded(plan, node):
            logger.warning("node %s did not load its layers in time", self._name(node))
            self._put_out(node)

    def _check_linked(self, plan: Plan) -> None:
        """Check that the neighbours link, as long as a plan is in force."""
        if plan != self.plan or self.runtime is None:
            return
        if node := self.runtime.missing:
            logger.warning("node %s does not link to its neighbour", self._name(node))
            self._put_out(node)
        loop = asyncio.get_running_loop()
        loop.call_later(_CHECK_S, self._check_linked, plan, context=self._context)

    def _put_out(self, node: NodeId) -> None:
        self._faults.put_out(node, loop_time())
        self._publish_faults()

    def _has_loaded(self, plan: Plan, node: NodeId) -> bool:
        state, encoded = self._machine.states.get(node), plan.encode()
        return state is not None and any(
            each.is_loaded and each.followed == encoded for each in state.memberships
        )

    def _publish_faults(self) -> None:
        """Publish them now, and again when they are forgiven."""
        self.publish()
        after = FAULTS_S + _EARLY_S
        asyncio.get_running_loop().call_later(after, self.publish, context=self._context)

    async def _own_ring(self) -> "tuple[EntryNode, Plan, ModelRuntime]":
        """Wait until the ring of which this node is the entry serves, at most `FORM_S`."""
        try:
            async with asyncio.timeout(FORM_S):
                while (plan := self.plan) and plan.stages[0].node == self._machine.me:
                    news = self._first._changed
                    if self.model and self.runtime and (entry := self.runtime.entry):
                        return entry, plan, self.model
                    await news.wait()
        except TimeoutError:
            raise LinkLost(f"The ring was not ready within {FORM_S:.0f} s") from None
        raise LinkLost("This node is not the entry of the ring")

    def _awaits(self, wanted: Charter) -> str:
        """Return what the rings of another model wait for."""
        charter, machine = self._machine.charter, self._machine
        groups = groups_of(charter) if charter else ()
        own = {group.id for group in groups if group.charter.key == wanted.key}
        is_loading = any(
            node in machine.alive and any(each.group in own for each in state.memberships)
            for node, state in machine.states.items()
        )
        return "its nodes load it" if is_loading else "no node is free for it"

    def _used(self) -> tuple[ModelKey, ...]:
        """Return the models that were asked for here lately, if the mesh serves several."""
        charter = self._machine.charter
        if charter is None or not charter.models:
            return ()
        return tuple(sorted(self._asked.keys() & {each.key for each in charter.served}))

    @contextmanager
    def _using(self, model: str) -> Iterator[None]:
        """Count a model as used inside the context, and for a while afterwards."""
        charter = self._machine.charter
        wanted = charter.find(model) if charter else None
        if wanted is None:
            yield
            return
        self._awaited[wanted.key] += 1
        self._note_use(wanted.key)
        try:
            yield
        finally:
            self._awaited[wanted.key] -= 1
            self._note_use(wanted.key)

    def _note_use(self, model: ModelKey) -> None:
        is_known = model in self._asked
        self._asked[model] = loop_time()
        if not is_known:
            self.publish()
            loop = asyncio.get_running_loop()
            loop.call_later(self._keep_s, self._forget_use, model, context=self._context)

    def _forget_use(self, model: ModelKey) -> None:
        """Publish that a model is not used any more, unless it was asked for again."""
        busy = [at.charter for at in self.members if at._busy]
        if self._awaited[model] or any(own and own.key == model for own in busy):
            self._asked[model] = loop_time()
        loop, until = asyncio.get_running_loop(), self._asked[model] + self._keep_s
        if until > loop_time():
            loop.call_at(until, self._forget_use, model, context=self._context)
            return
        del self._asked[model]
        self.publish()

    def _count_requests(self, count: int) -> None:
        self._busy += count
        if own := self.charter:
            self._first._note_use(own.key)
        loop = asyncio.get_running_loop()
        if self._busy and self._busy_since is None:
            self._busy_since = since = loop_time()
            self._set_calm(is_calm=False)
            loop.call_later(BUSY_S, self._yield, since, context=self._context)
        elif not self._busy:
            loop.call_later(CALM_S, self._calm, context=self._context)

    def _calm(self) -> None:
        if not self._busy:
            self._busy_since = None
            self._set_calm(is_calm=True)

    def _yield(self, since: float) -> None:
        """Let the plan change although requests never end: a ring must be able to grow."""
        if self._busy_since == since:
            self._set_calm(is_calm=True)

    def _set_calm(self, *, is_calm: bool) -> None:
        if is_calm is not self._is_calm:
            self._is_calm = is_calm
            self.publish()
