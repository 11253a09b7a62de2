"""Invariants of a simulated world, at all times or in the end; changes nothing in it."""

from collections import Counter
from itertools import combinations

from meshllm.node.node import MeshNode
from meshllm.protocol.ring.plan_change import PlanChangeState
from tests.simulation.machines import Process
from tests.simulation.mesh_world import member
from tests.simulation.toy import LAYERS
from tests.simulation.world import World

TASKS, TASKS_OF_LINK, TASKS_OF_DIAL = 21, 5, 4  # of an idle node
TASKS_OF_RING, TASKS_OF_RING_LINK = 7, 4
FOLLOW_S = 5  # s at most that a node follows a plan that it knows to be outdated
WRITES = 4  # disk writes at most, before a node publishes which plan it follows


class Checks:
    """Checks the invariants of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._knows_s: Counter[tuple[Process, int]] = Counter()
        self._rivals_s: Counter[tuple[Process, Process]] = Counter()

    def look(self) -> None:
        """Check, once a second, the conditions that may hold only for a moment."""
        self._look_for_removed()
        for one, other in combinations(sorted(self._world.nodes), 2):
            ends = self._world.running[one].process, self._world.running[other].process
            if not self._are_rivals(one, other):
                del self._rivals_s[ends]
                continue
            self._rivals_s[ends] += 1
            if self._rivals_s[ends] > FOLLOW_S + WRITES * self._world.disk_s:
                self._world.fault(f"{one} and {other} are linked, and follow two plans of an epoch")

    def _are_rivals(self, one: int, other: int) -> bool:
        """Return whether two connected nodes follow two plans of one epoch."""
        world, nodes = self._world, self._world.nodes
        plan, rival = nodes[one].ring_member.plan, nodes[other].ring_member.plan
        if plan is None or rival is None or plan == rival or plan.epoch != rival.epoch:
            return False
        if nodes[one].ring_member.group != nodes[other].ring_member.group:
            return False
        if any(world.running[each].process.is_paused for each in (one, other)):
            return False
        changes = [nodes[each].service.first.follower.progress for each in (one, other)]
        if changes == [PlanChangeState.PREPARING] * 2:  # the rings of both serve meanwhile
            return False
        hears = [nodes[b].me in nodes[a].links.by_peer for a, b in ((one, other), (other, one))]
        return all(hears) and world.network.is_open(one, other)

    def _look_for_removed(self) -> None:
        """Check that no node that knows of a removal still has the removed one."""
        for number, node in self._world.nodes.items():
            process = self._world.running[number].process
            removals = node.machine.removals
            if process.is_paused or not removals:
                continue
            for key, gone in self._world.members.out(removals).items():
                if key != node.me:
                    self._knows_s[process, gone] += 1
                    self._without(number, node, gone, self._knows_s[process, gone])

    def _without(self, number: int, node: MeshNode, gone: int, knows_s: int) -> None:
        key = member(gone)[0].node
        for name, those in (
            ("alive", node.machine.alive),
            ("with a profile", node.machine.profiles),
            ("linked", node.links.by_peer),
        ):
            if key in those:
                self._world.fault(f"for {number} {gone} is {name}, and is removed")
        plan = node.ring_member.plan
        if knows_s > FOLLOW_S and plan and plan.rank(key) is not None:
            self._world.fault(f"{number} follows a plan with {gone}, which is removed")

    @property
    def here(self) -> dict[int, MeshNode]:
        """The nodes that are members."""
        members = self._world.members
        return {
            number: node for number, node in self._world.nodes.items() if not members.is_out(number)
        }

    @property
    def fits(self) -> bool:
        """Whether the running nodes that are not excluded can hold the model."""
        charters = [node.machine.charter for node in self.here.values()]
        out = {each for charter in charters if charter for each in charter.exclude}
        usable = [number for number, node in self.here.items() if node.me not in out]
        return sum(self._world.room(number) for number in usable) >= LAYERS

    def unsettled(self) -> str | None:
        """Return what is still wrong; None if all is well."""
        world = self._world
        if world.coming or len(world.nodes) < len(world.running):
            return "not all nodes have come back"
        if any(at.hung_s is not None for at in world.running.values()):
            return "a node hangs"
        if leaving := [number for number, node in world.nodes.items() if node.is_leaving]:
            return f"{leaving} are leaving"
        for number, node in world.nodes.items():
            if node.me in node.machine.removals:
                return f"{number} knows that it is removed, and goes on"
        if any(not one.outcome for one in world.asked):
            return "requests are under way"
        strangers = self._strangers() or self._oversized()
        return strangers or (self._no_ring() if self.fits else None) or self._left_over()

    def _oversized(self) -> str | None:
        """Return which node follows a plan with more layers than it had memory for."""
        for number, node in self.here.items():
            plan, ran_out = node.ring_member.plan, self._world.running[number].process.ran_out
            rank = plan.rank(node.me) if plan else None
            if plan is None or rank is None or ran_out is None:
                continue
            if (held := len(plan.stages[rank].span)) >= ran_out:
                return f"{number} is to hold {held} layers, without memory for {ran_out}"
        return None

    def _strangers(self) -> str | None:
        here = {node.me for node in self.here.values()}
        for number, node in self.here.items():
            if node.machine.alive != here:
                return f"{number} holds {len(node.machine.alive)} alive, not {len(here)}"
            if node.links.by_peer.keys() != here - {node.me}:
                return f"{number} has {len(node.links.by_peer)} links"
        return None

    def _no_ring(self) -> str | None:
        here = {node.me for node in self.here.values()}
        plans = {number: node.ring_member.plan for number, node in self.here.items()}
        for number, plan in plans.items():
            node = self.here[number]
            if plan is None:
                return f"{number} follows no plan: {node.ring_member.reason}"
            if plan != plans[min(plans)]:
                return f"{number} follows another plan"
            if not all(stage.node in here for stage in plan.stages):
                return f"{number} follows a plan with nodes that are not here"
            if node.ring_member.serving_entry() is None:
                return f"{number} sees no ring"
            if not node.machine.profiles[node.me].layer_s:
                return f"{number} offers no layers"
            runtime = node.ring_member.runtime
            is_rank = plan.rank(node.me) is not None
            if not runtime or is_rank is not bool(runtime.entry or runtime.stage):
                return f"{number} {'is not' if is_rank else 'is'} at work"
        return None

    def _left_over(self) -> str | None:
        world, links = self._world, len(self.here) - 1
        for number, node in self.here.items():
            if (
                node.router._remote._calls
                or node.router.peers._running
                or node.router.counts.active
            ):
                return f"{number} has requests on its desk"
            if node.state.sessions:
                return f"{number} has {node.state.sessions} sessions"
            if why := _caches_left(node):
                return f"{number} {why}"
            process, rings = world.running[number].process, node.state.members
            plans = [member.plan for member in rings if member.plan]
            linked = [at for at in plans if len(at.stages) > 1 and at.rank(node.me) is not None]
            if len(process.ends) != links + 2 * len(linked):
                return f"{number} has {len(process.ends)} links, of the ring and others"
            dials = len(world.capacity) - 1 - links
            most = TASKS + TASKS_OF_LINK * links + TASKS_OF_DIAL * dials
            most += TASKS_OF_RING * len(rings) + TASKS_OF_RING_LINK * 2 * len(linked)
            if len(process.tasks) > most:
                return f"{number} has {len(process.tasks)} tasks, more than {most}"
        return None


def _caches_left(node: MeshNode) -> str | None:
    """Return what a node without sessions still holds for one, in any of its rings."""
    for at in node.state.members:
        store = at.runtime._held.store if at.runtime else None
        if at.rank and (size := at.rank.budget.live_bytes):
            return f"reserves {size} bytes of its KV cache"
        if store is None:
            continue
        kept = store.prefixes
        for name, held in (("caches", kept.caches), ("texts", kept._texts)):
            if lost := [session for session in held if not kept.index.holds(session)]:
                return f"has {name} of {len(lost)} sessions that it does not keep"
    return None
