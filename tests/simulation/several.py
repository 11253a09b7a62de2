"""Whole nodes that serve two models, with replicas: faults as in `schedule`, and checks by ring."""

from collections.abc import Sequence

from meshllm.names import GroupId, RingEntry
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.options import ModelOptions
from meshllm.protocol.agreement.grouping import group_nodes, shortage
from meshllm.protocol.agreement.groups import UNASSIGNED, NodeGroups, groups_of
from tests.simulation.checks import Checks
from tests.simulation.schedule import Schedule
from tests.simulation.toy import LAYERS
from tests.simulation.world import World

OTHER = "toy2"


class RingChecks(Checks):
    """Checks each ring of a world."""

    @property
    def fits(self) -> bool:
        """Whether the nodes can hold each model that is served, however they are divided."""
        charters = [node.machine.charter for node in self.here.values()]
        served = len(charters[0].served) if charters and charters[0] else 1
        room = sum(self._world.capacity[number] for number in self.here)
        return room >= served * (LAYERS + max(self._world.capacity.values()) - 1)

    def _no_ring(self) -> str | None:
        for number, node in self.here.items():
            view = node.service.first.view()
            if view is None:
                return f"{number} knows no charter"
            part = group_nodes(view).get(node.me, NodeGroups(UNASSIGNED))
            wanted = [part.first, *sorted(part.further)]
            first, *further = (each.group for each in node.state.members)
            if wanted != [first, *sorted(further)]:
                return f"{number} is in {_shown([first, *further])}, not {_shown(wanted)}"
        view = next(iter(self.here.values())).service.first.view()
        assert view is not None
        lacking = shortage(view)
        for group in groups_of(view.charter):
            ring = {
                number: member
                for number, node in self.here.items()
                for member in node.state.members
                if member.group == group.id
            }
            if group.id in lacking and not group.replica:
                return f"{group.charter.shape.name} lacks {lacking[group.id]} bytes"
            if group.id not in lacking and (why := self._no_ring_of(ring)):
                return f"{group.charter.shape.name}, replica {group.replica}: {why}"
        return None

    def _no_ring_of(self, ring: dict[int, RingMember]) -> str | None:
        here = {self.here[number].me for number in ring}
        plans = {member.plan for member in ring.values()}
        (plan, *others) = plans or {None}
        if plan is None or others:
            return f"{sorted(ring)} follow {len(plans)} plans"
        if not {stage.node for stage in plan.stages} <= here:
            return f"{sorted(ring)} follow {plan}"
        for number, member in ring.items():
            runtime, rank = member.runtime, plan.rank(self.here[number].me)
            if not runtime or (rank is not None) is not bool(runtime.entry or runtime.stage):
                return f"{number} {'is not' if rank is not None else 'is'} at work"
        first = next(iter(ring.values()))
        entry, model = RingEntry(plan.stages[0].node, first.group), first.charter
        assert model is not None
        for number, other in self.here.items():
            if entry not in other.rings.serving_entries(model.shape.name):
                return f"{number} does not know its entry"
        return None


def _shown(groups: Sequence[GroupId]) -> str:
    return ", ".join(group.hex() or "the first" for group in groups)


class SeveralSchedule(Schedule):
    """A world that serves a second model, or replicas of the first, after a while."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        world.plans.may_rejoin, self.has_shortage = True, False
        random = self.random
        self.checks = RingChecks(world)
        self.count = random.choice((3, 4, 5))
        world.capacity = {number: random.choice((2, 3, 4, 4)) for number in range(self.count)}
        world.newcomers = {each for each in world.newcomers if each < self.count}
        world.names, world.prefer, world.exclude = {}, None, None
        world.replicas = random.choice((None, None, 2))
        world.ring_size = random.choice((None, None, 2))
        world.is_calm = False  # rings that know nothing of each other choose the same epochs
        replicas, members = random.choice((None, 2)), random.choice((None, None, 2))
        self.asked = ModelOptions(OTHER, replicas=replicas, members=members)
        world.loop.call_later(random.uniform(2, 8), self._serve)

    def _serve(self) -> None:
        awake = [each for each in self._awake() if self.world.nodes[each].machine.charter]
        if awake:
            self.world.serve(self.random.choice(awake), self.asked)
        elif not self.is_healed:
            self.world.loop.call_later(1.0, self._serve)

    async def _ask_all(self) -> None:
        charters = [node.machine.charter for node in self.checks.here.values()]
        if not any(charter and charter.models for charter in charters):
            self.world.models = ("",)  # the node that served it died before it told anyone
        await super()._ask_all()


class SharedChecks(RingChecks):
    """The same where nodes have shares of their memory in the other ring."""

    @property
    def fits(self) -> bool:
        """Whether one node has the memory for both models, or each of two for one of them."""
        rooms = [self._world.capacity[number] for number in self.here]
        return max(rooms, default=0) > 2 * LAYERS or sum(room > LAYERS for room in rooms) > 1


class SharedSchedule(SeveralSchedule):
    """The same with nodes that have memory for both models, or for one and a part of the other."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.checks = SharedChecks(world)
        self.count = self.random.choice((2, 3))
        world.capacity = {number: self.random.choice((3, 5, 9)) for number in range(self.count)}
        world.newcomers = {each for each in world.newcomers if each < self.count}
        world.replicas = world.ring_size = None
        self.asked = ModelOptions(OTHER)


class SpanChecks(SharedChecks):
    """The same where the replicas of a model may share nodes."""

    @property
    def fits(self) -> bool:
        """Whether a node has the memory for the model."""
        return any(self._world.capacity[number] > LAYERS for number in self.here)


class SpanSchedule(SharedSchedule):
    """Nodes that serve two replicas of one model, of which the second may be no ring of its own."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self.checks = SpanChecks(world)
        rooms = [self.random.choice((9, 12)), *self.random.choices((2, 2, 3, 9), k=self.count - 1)]
        self.random.shuffle(rooms)
        world.capacity = dict(enumerate(rooms))
        world.replicas = 2

    def _serve(self) -> None:
        """Serve no second model."""
