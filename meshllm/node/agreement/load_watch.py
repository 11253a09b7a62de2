"""Watches that the nodes of a plan load their spans in time, and link to their neighbours.

A plan with a node that only claims to take part would wait for it without end. If this process was
suspended, the others may have loaded and linked meanwhile: they get `LINK_S` to say so, up to
`RENEWALS` times in a row, as each check of an overloaded process is late.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from meshllm.names import GroupId, NodeId
from meshllm.node.node_names import name_of
from meshllm.node.timer import CallLater, loop_time
from meshllm.protocol.agreement.groups import find_group
from meshllm.protocol.membership.link_table import BEAT
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import ENDS
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.forming import LINK_S
from meshllm.protocol.weights.holders import missing_parts, needed_parts

LOAD_S = 60.0  # s until a node of a plan must have loaded its span,
LOAD_BYTES_PER_S = 10e6  # and for its bytes, from a slow disk,
FETCH_BYTES_PER_S = 1e6  # or from other nodes over a slow network
MAX_UNLOADS = 3  # times that a node of a plan may say that it has not loaded any more
RENEWALS = 3  # times in a row that a check which is late is repeated
_CHECK_S = LINK_S + 1.0  # more than the rounding error by which a timer may be early

logger = logging.getLogger(__name__)


class WatchedRing(Protocol):
    """A ring as its runtime sees it."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force."""

    @property
    def missing(self) -> NodeId | None:
        """A neighbour that has loaded and does not link."""


def has_loaded(machine: Mesh, plan: Plan, node: NodeId) -> bool:
    """Return whether a node says that it has loaded its span of a plan."""
    state = machine.states.get(node)
    return state is not None and state.has_loaded(plan.encode())


def is_formed(machine: Mesh, plan: Plan) -> bool:
    """Return whether all nodes of a plan have loaded their spans."""
    return all(has_loaded(machine, plan, stage.node) for stage in plan.stages)


class ModelLoadWatch:
    """The time that the nodes of the plan in force have to load and to link."""

    def __init__(
        self, machine: Mesh, exclude: Callable[[NodeId], None], call_later: CallLater
    ) -> None:
        """Watch; ``exclude`` is called with a node that is late."""
        self._machine = machine
        self._put_out = exclude
        self._call_later = call_later
        self._ring: WatchedRing | None = None
        self._plan: Plan | None = None  # the latest that was watched,
        self._until: dict[NodeId, float] = {}  # and until when each of its nodes may load,
        self._limits: dict[NodeId, float] = {}  # seconds,
        self._loaded: set[NodeId] = set()  # which had loaded when the records changed last,
        self._unloads = Counter[NodeId]()  # and how often each has taken that back

    @property
    def until(self) -> float:
        """Until when living nodes of the plan in force may still load, in loop time; 0 if none."""
        if (plan := self._ring.plan if self._ring else None) is None:
            return 0.0
        here = self._machine.alive.intersection(self._until)
        loading = (node for node in here if not has_loaded(self._machine, plan, node))
        return max(map(self._until.__getitem__, loading), default=0.0)

    def begin(self, ring: WatchedRing, group: GroupId) -> None:
        """Watch the plan in force of a ring, unless it is watched already."""
        self._ring, plan, whole = ring, ring.plan, self._machine.charter
        own = find_group(whole, group) if whole else None
        if plan is None or own is None:
            return
        if plan == self._plan:
            self._note_unloaded(plan)
            return
        self._plan, shape = plan, own.charter.shape
        for known in (self._until, self._limits, self._loaded, self._unloads):
            known.clear()
        for stage in plan.stages:
            size = sum(shape.layer_bytes[stage.span.start : stage.span.stop]) + shape.ends_bytes
            is_slow = self._fetches(plan, stage.node, group)
            bytes_per_s = FETCH_BYTES_PER_S if is_slow else LOAD_BYTES_PER_S
            self._limits[stage.node] = LOAD_S + size / bytes_per_s
            self._await_load(plan, stage.node)
        self._call_later(_CHECK_S, self._check_linked, plan, loop_time())

    def _await_load(self, plan: Plan, node: NodeId) -> None:
        limit_s = self._limits[node]
        self._until[node] = until = loop_time() + limit_s
        if node != self._machine.me:
            self._call_later(limit_s, self._check_loaded, plan, node, until)

    def _note_unloaded(self, plan: Plan) -> None:
        """Let nodes load again that have loaded before, such as after a restart, a few times."""
        for node in self._limits:
            if has_loaded(self._machine, plan, node):
                self._loaded.add(node)
            elif node in self._loaded:
                self._loaded.discard(node)
                self._unloads[node] += 1
                if self._unloads[node] <= MAX_UNLOADS:
                    self._await_load(plan, node)
                elif node != self._machine.me:
                    self._report(node, "reloads its layers again and again")

    def end(self) -> None:
        """Watch no ring; the same plan is watched again in the next one."""
        self._ring = self._plan = None

    def _fetches(self, plan: Plan, node: NodeId, group: GroupId) -> bool:
        """Return whether a node lacks weights of its span, and fetches them from others."""
        machine = self._machine
        profile, state = machine.profiles.get(node), machine.states.get(node)
        if profile is not None and state is not None:
            profile = profile.in_ring(group, is_further=state.is_further(group))
        if profile is None or len(profile.weights) != plan.layers + ENDS:
            return False
        return bool(missing_parts(profile.weights, needed_parts(plan, node)))

    def _check_loaded(
        self, plan: Plan, node: NodeId, until: float, renewals: int = RENEWALS
    ) -> None:
        if renewals and self._was_suspended(until):
            until, renewals = loop_time() + LINK_S, renewals - 1
            self._call_later(LINK_S, self._check_loaded, plan, node, until, renewals)
        elif self._is_in_force(plan) and not has_loaded(self._machine, plan, node):
            self._report(node, "did not load its layers in time")

    def _check_linked(self, plan: Plan, since: float, renewals: int = RENEWALS) -> None:
        """Check that the neighbours link, as long as a plan is in force."""
        if self._ring is None or not self._is_in_force(plan):
            return
        is_awake = self._machine.woke < since and not self._was_suspended(since + _CHECK_S)
        if (is_awake or not renewals) and (node := self._ring.missing):
            self._report(node, "does not link to its neighbour")
        left = RENEWALS if is_awake else max(0, renewals - 1)
        self._call_later(_CHECK_S, self._check_linked, plan, loop_time(), left)

    def _was_suspended(self, due: float) -> bool:
        """Return whether a check is late, or was due while this process was suspended."""
        now = loop_time()
        return now > due + BEAT or now < self._machine.woke + BEAT

    def _is_in_force(self, plan: Plan) -> bool:
        return self._ring is not None and self._ring.plan == plan

    def _report(self, node: NodeId, what: str) -> None:
        logger.warning("node %s %s", name_of(node, self._machine.profiles), what)
        self._put_out(node)
