"""The rings of the mesh, as a request needs them: who serves a model, and why nobody does.

This node is in some of the rings; of the others it knows what their nodes publish.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from functools import partial

from meshllm.errors import LinkLost, ModelMissing
from meshllm.names import Digest, GroupId, LossCause, ModelKey, NodeId, RingEntry, short, show
from meshllm.node.agreement.explanation import explain_loss
from meshllm.node.agreement.load_times import ModelLoadTimes
from meshllm.node.agreement.load_watch import has_loaded, is_formed
from meshllm.node.agreement.own_state import OwnState
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.net.mesh_link import MeshLinks
from meshllm.node.node_names import find_node, name_of, names_of
from meshllm.protocol.agreement.candidates import decoded, highest_epoch, ring_precedence
from meshllm.protocol.agreement.groups import find_group, groups_in, groups_of, is_exact
from meshllm.protocol.agreement.load_estimate import retry_s
from meshllm.protocol.membership.charter import Charter, unique_name
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import MAX_CONTEXT, Lifecycle, ModelOffer
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.ring.interruption import RingPlan
from meshllm.request import Backend


class RingDirectory:
    """Finds the rings and providers of a model; see `router.Ring`."""

    def __init__(self, machine: Mesh, links: MeshLinks, own: OwnState) -> None:
        self._machine = machine
        self._links = links
        self._own = own
        self._loads = ModelLoadTimes()

    @property
    def loads_until(self) -> float:
        """Until when nodes of own plans may still load layers, in loop time; 0 if none does."""
        return max(each.loads_until for each in self._own.members)

    def is_provided(self, model: str) -> bool:
        """Return whether a request for a model is one for a provider, not for the ring."""
        charter = self._machine.charter
        return bool(model) and (charter is None or charter.find(model) is None)

    def of_rings(self, model: str) -> ModelOffer | None:
        """Return what the rings of a model have, by its name; None if there are to be none."""
        if (wanted := self._wanted(model)) is None:
            return None
        name = model if model == wanted.precise_name else self._name(wanted)
        return ModelOffer(name, wanted.precision, wanted.shape.context)

    def pinned(self, model: str) -> str:
        """Return a name of a model of rings that always means what this one means now."""
        wanted = self._wanted(model) if model else None
        return wanted.key.hex() if wanted else model

    def shown(self, model: str) -> str:
        """Return the name of a model for people."""
        wanted = self._wanted(model)
        return self._name(wanted) if wanted else model

    def using(self, model: str) -> AbstractContextManager[None]:
        """Count a model as used inside the context, so that its rings are loaded."""
        return self._own.use.using(model)

    def offers(self, model: str) -> dict[NodeId, ModelOffer]:
        """Return the nodes that provide a model now, and what they say of it.

        For a model of rings, these are those that may read its prompts; none if the name has a
        precision, or means a quantisation that the name without one does not mean.
        """
        machine, wanted = self._machine, self._wanted(model)
        name = self._name(wanted) if wanted else model
        if wanted is not None and wanted.precise_name in {model, name}:
            return {}
        return {
            node: offer
            for node, state in machine.states.items()
            if state.lifecycle is Lifecycle.SERVING
            and (node == machine.me or node in self._links.by_peer)
            and (wanted is None or wanted.may_read(node))
            for offer in reversed(state.offers)
            if offer.model == name
        }

    @property
    def longest_context(self) -> int:
        """The most tokens of a request that any ring or provider takes."""
        charter, states = self._machine.charter, self._machine.states.values()
        served = (each.shape.context for each in charter.served) if charter else ()
        offered = (offer.context or MAX_CONTEXT for state in states for offer in state.offers)
        return max((*served, *offered), default=0)

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the ids of nodes; raise `UserError` if a name is unknown or that of several."""
        return tuple(show(find_node(name, self._machine.profiles)) for name in names)

    def name_of(self, node: NodeId) -> str:
        """Return the name of a node, if it is known, and its short id."""
        name, id_ = name_of(node, self._machine.profiles), short(node)
        return id_ if name == id_ else f"{name} ({id_})"

    async def entries(
        self, model: str = "", trusted: Sequence[str] | None = None
    ) -> Sequence[RingEntry]:
        """Wait until a ring serves a model; return the entries of all rings that do.

        Raises:
            ModelMissing: the mesh does not serve it any more.
        """
        _ = trusted  # the router knows all nodes of a ring
        with self._own.use.using(model):
            while True:
                news = self._own.news
                if self.is_provided(model) and self._machine.charter is not None:
                    raise ModelMissing("The mesh no longer serves the model of this request")
                if entries := self.serving_entries(model):
                    return entries
                if wanted := self._wanted(model):
                    self._loads.ask(wanted.key, has_plan=self._followed(wanted) is not None)
                await news.wait()

    async def plan_with(self, config: Digest) -> Plan:
        """Wait until a ring serves a model with this configuration; return its plan.

        Raises:
            ModelMissing: the mesh does not serve it.
        """
        while True:
            news, charter = self._own.news, self._machine.charter
            served = charter.served if charter else ()
            models = [each.key.hex() for each in served if each.config_digest == config]
            if charter is not None and not models:
                raise ModelMissing("The mesh does not serve this model")
            entries = [(each, entry) for each in models for entry in self.serving_entries(each)]
            for model, entry in entries:
                if ring := self.ring_at(entry, model):
                    return ring[1]
            await (self.entries(models[0]) if models and not entries else news.wait())

    async def watch_loads(self) -> None:
        """Measure how long models take to load that are asked for here, until cancelled."""
        async with aclosing(self._own.changes()) as changes:
            async for _ in changes:
                for model in self._loads.awaited:
                    self._watch_load(model)

    def _watch_load(self, model: ModelKey) -> None:
        wanted = self._wanted(model.hex())
        if wanted is None or not self._own.use.is_used(model):
            self._loads.forget(model)
            return
        plan = self._followed(wanted)
        self._loads.look(model, has_plan=plan is not None)
        if self.serving_entries(model.hex()):
            self._loads.served(model, _span_bytes(wanted, plan.stages if plan else ()))

    def retry_s(self, model: str, waited_s: float) -> int:
        """Return after how many seconds a request may be repeated which waited for a ring."""
        wanted = self._wanted(model)
        if wanted is None:
            return retry_s(waited_s)
        plan = self._followed(wanted)
        stages = plan.stages if plan else ()
        loading = [at for at in stages if plan and not has_loaded(self._machine, plan, at.node)]
        return self._loads.retry_s(wanted.key, _span_bytes(wanted, loading))

    def serving_entries(self, model: str = "") -> Sequence[RingEntry]:
        """Return the entries of the rings that serve a model now, as far as known here."""
        entries = (
            (at.serving_entry() if (at := self._in_ring(group)) else self._entry_of(group), group)
            for group in self._groups(model)
        )
        return [RingEntry(entry, group) for entry, group in entries if entry is not None]

    def ring(self, group: GroupId) -> tuple[Plan | None, bool]:
        """Return the plan of a ring of the mesh, and whether it serves, as far as known here."""
        if at := self._in_ring(group):
            return at.plan, at.serving_entry() is not None
        plan = self.plan_of(group)
        return plan, plan is not None

    def plan_of(self, group: GroupId) -> Plan | None:
        """Return the plan that all nodes of another ring have loaded; None if there is none."""
        machine = self._machine
        members = [
            each
            for node, state in machine.states.items()
            if node in machine.alive
            for each in state.memberships
            if each.group == group
        ]
        most = highest_epoch(decoded(each.followed) for each in members)
        plans = [
            plan
            for each in {each.followed for each in members if each.is_loaded}
            if (plan := decoded(each))
            and plan.epoch <= most
            and is_formed(machine, plan)
            and self._is_by_charter(plan, group)
        ]
        return max(plans, key=partial(ring_precedence, machine.author), default=None)

    def reason(self, model: str = "") -> str:
        """Return why there is no ring of a model."""
        wanted = self._wanted(model)
        if wanted is None:
            return self._own.first.reason
        if (at := self._serving(wanted)) is None:
            return self._awaits(wanted)
        return at.reason

    def awaited(self, model: str = "") -> str:
        """Return why requests for a model wait for its rings; empty if one serves."""
        if self.serving_entries(model):
            return ""
        wanted = self._wanted(model)
        of_model = f" of `{self._name(wanted)}`" if wanted else ""
        return f"there is no ring{of_model} yet: {self.reason(model)}"

    def ring_at(self, entry: RingEntry, model: str = "") -> RingPlan | None:
        """Return the ring of a model with this entry, as far as it is known here."""
        groups = (each for each in self._groups(model) if entry.group in {None, each})
        rings = ((group, self.ring(group)[0]) for group in groups)
        return next(
            ((group, plan) for group, plan in rings if plan and plan.stages[0].node == entry.node),
            None,
        )

    def is_exact(self, entry: RingEntry, model: str = "") -> bool:
        """Return whether the ring of a model with this entry computes as transformers does."""
        wanted, ring = self._wanted(model), self.ring_at(entry, model)
        if wanted is None or ring is None:
            return False
        return is_exact(wanted, ring[1], self._machine.profiles)

    def explain(self, before: RingPlan | None, after: RingPlan | None) -> tuple[LossCause, str]:
        """Return why a ring with its earlier plan was lost, and a phrase about it."""
        return explain_loss(self._machine, before, after)

    @asynccontextmanager
    async def backend(
        self, requester: NodeId | None = None, model: str = "", group: GroupId | None = None
    ) -> AsyncIterator[Backend]:
        """Serve an asker as a provider or as the entry, and keep the plan from changing meanwhile.

        An asker that is None is the owner of this node. A ``group`` that is None is any ring of the
        model, of several the one whose entry this node is.

        Raises:
            LinkLost: this node is not the entry, has left the ring, its ring did not form, or it
                provides nothing.
        """
        provider, is_provided = self._own.provider, self.is_provided(model)
        if provider is not None and (is_provided or provider.has(model)):  # it is in no ring
            yield provider
            return
        if is_provided:
            raise LinkLost(f"This node does not provide `{model[:100]}`")
        at = self._find(model, group)
        with self._own.use.using(model), at.hold.holding():
            entry, plan, own = await at.serving()
            from meshllm.node.session.text import RingBackend

            yield RingBackend(entry, own.worker, await own.text(), plan, requester, self.name_of)

    def _wanted(self, model: str) -> Charter | None:
        """Return the charter of a model of the mesh, of the first if it is not named."""
        charter = self._machine.charter
        return charter.find(model) if charter else None

    def _name(self, wanted: Charter) -> str:
        charter = self._machine.charter
        return unique_name(wanted, charter.served if charter else ())

    def _groups(self, model: str) -> list[GroupId]:
        """Return the rings of a model; that of this node if it is unknown."""
        wanted = self._wanted(model)
        return self._groups_of(wanted) if wanted else [self._own.first.group]

    def _entry_of(self, group: GroupId) -> NodeId | None:
        """Return the entry of another ring, if it serves and a link leads there."""
        plan = self.plan_of(group)
        entry = plan.stages[0].node if plan else None
        return entry if entry in self._links.by_peer else None

    def _is_by_charter(self, plan: Plan, group: GroupId) -> bool:
        """Return whether a ring is one of its group, whose nodes alone decided on it."""
        machine = self._machine
        states, charter = machine.states, machine.charter
        found = find_group(charter, group) if charter else None
        if found is None:
            return charter is None  # then this node follows no plan, and asks any
        wanted, entry = found.charter, plan.stages[0].node
        asked = wanted.shape.name, wanted.shape.layers, wanted.ends
        entries = (machine.author,) if wanted.ends is Ends.CLIENT else wanted.entries
        return (
            (plan.model, plan.layers, plan.ends) == asked
            and (not entries or entry in entries)
            and all(group in groups_in(states[stage.node]) for stage in plan.stages)
        )

    def _in_ring(self, group: GroupId) -> RingMember | None:
        """Return this node in a ring in which it takes part, and has opened the model."""
        return next((at for at in self._own.members if at.group == group and at.runtime), None)

    def _serving(self, wanted: Charter, group: GroupId | None = None) -> RingMember | None:
        """Return this node in a ring of a model, of several in the one whose entry it is.

        None if it takes part in none, or not in the ``group`` that is given.
        """
        owned = ((at, at.charter) for at in self._own.members if group in {None, at.group})
        found = [at for at, own in owned if own and own.key == wanted.key]
        entered = (at for at in found if at.plan and at.plan.stages[0].node == self._machine.me)
        return next(entered, found[0] if found else None)

    def _find(self, model: str, group: GroupId | None) -> RingMember:
        """Return this node in a ring of a model, in the ``group`` if that is given.

        Raises:
            LinkLost: it takes part in none; it may have moved, or the ring may have ended.
        """
        wanted = self._wanted(model)
        if wanted is None:  # this node knows no charter yet, and so no plan
            return self._own.first
        if (at := self._serving(wanted, group)) is None:
            raise LinkLost(self._absence(wanted, group), hint="see `meshllm ring status`")
        return at

    def _absence(self, wanted: Charter, group: GroupId | None) -> str:
        """Return that this node does not serve a model, or not in the ring that is given."""
        name, groups = f"`{self._name(wanted)}`", self._groups_of(wanted)
        if group is not None and group not in groups:
            return f"{name} has no ring `{group.hex() or 'first'}` now"
        what = name if group is None else f"replica {groups.index(group) + 1} of {name}"
        return f"This node does not serve {what} now"

    def _awaits(self, wanted: Charter) -> str:
        """Return what the rings of another model wait for."""
        machine, groups = self._machine, set(self._groups_of(wanted))
        loading = [
            node
            for node, state in machine.states.items()
            if node in machine.alive and not groups.isdisjoint(groups_in(state))
        ]
        names = names_of(loading, machine.profiles)
        return f"its nodes load it: {names}" if loading else "no node is free for it"

    def _followed(self, wanted: Charter) -> Plan | None:
        """Return the latest plan that nodes follow to serve a model, loaded or not."""
        machine, groups = self._machine, set(self._groups_of(wanted))
        followed = {
            each.followed
            for node, state in machine.states.items()
            if node in machine.alive
            for each in state.memberships
            if each.group in groups
        }
        asked = wanted.shape.name, wanted.shape.layers
        plans = (plan for plan in map(decoded, followed) if plan)
        own = (plan for plan in plans if (plan.model, plan.layers) == asked)
        return max(own, key=lambda plan: plan.precedence, default=None)

    def _groups_of(self, wanted: Charter) -> list[GroupId]:
        charter = self._machine.charter
        groups = groups_of(charter) if charter else ()
        return [group.id for group in groups if group.charter.key == wanted.key]


def _span_bytes(wanted: Charter, stages: Iterable[PlanStage]) -> int:
    """Return the bytes of the largest span of these; 0 if there are none."""
    sizes = wanted.shape.layer_bytes
    return max((sum(sizes[each.span.start : each.span.stop]) for each in stages), default=0)
