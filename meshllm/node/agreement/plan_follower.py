"""Follows what is agreed on for one ring, once it has settled; see `PlanChange`."""

from collections.abc import Callable

from meshllm.node.agreement.own_state import OwnState
from meshllm.node.agreement.planner import Planner
from meshllm.node.agreement.ring_member import RingMember
from meshllm.node.timer import CallLater, loop_time
from meshllm.protocol.ring.plan_change import Follow, PlanChange, PlanChangeState, Prepare

SETTLE_S = 0.5  # s; a heartbeat: in that time both ends report that a link is up or lost
LOST_S = 0.1  # s; all links of a node are lost, and an answer waits: it may dial again meanwhile
GATHER_S = 30.0  # s that the first ring waits for the requested number of members
KEEP_S = 20.0  # s that layers and caches are kept if there is no plan without a node that is lost
END_S = 10.0  # s that a ring serves its sessions after the mesh has stopped to serve its model


class PlanFollower:
    """Drives the `PlanChange` of a node in one ring."""

    def __init__(
        self,
        member: RingMember,
        state: OwnState,
        planner: Planner,
        has_sessions: Callable[[], bool],
        call_later: CallLater,
    ) -> None:
        """Follow for a member; ``has_sessions`` says whether this node answers requests now."""
        self._member = member
        self._state = state
        self._planner = planner
        self._has_sessions = has_sessions
        self._call_later = call_later
        self._change = PlanChange()
        self._due: float | None = None  # when a timer for it fires

    @property
    def progress(self) -> PlanChangeState:
        """The progress towards the plan that was agreed on."""
        return self._change.state

    def reset(self) -> None:
        """Begin again, in another ring or with another runtime."""
        self._change.reset()

    def look(self) -> None:
        """Follow the plan that was agreed on, or prepare for it."""
        agreement, now = self._planner.agreement, loop_time()
        if (runtime := self._member.runtime) is None:
            return
        plan_change_input = self._member.plan_change_input(
            agreement.plan if agreement else None, self._settle_s()
        )
        for action in self._change.look(plan_change_input, now):
            match action:
                case Prepare(plan):
                    runtime.prepare(plan, is_urgent=True)
                case Follow(plan):
                    runtime.follow(plan)
                    self._state.publish()
        due = self._change.deadline
        if due is not None and due != self._due:
            self._due = due
            self._call_later(due - now, self._look_due, due)

    def _settle_s(self) -> float:
        """Return for how long what is agreed on must not change before this node acts on it."""
        agreement = self._planner.agreement
        if agreement is None:  # the mesh no longer serves this model
            return END_S if self._has_sessions() else SETTLE_S
        if agreement.lacking:
            return GATHER_S
        if self._member.waits_for_lost(agreement):
            return KEEP_S
        return LOST_S if agreement.has_lost(self._member.plan) else SETTLE_S

    def _look_due(self, due: float) -> None:
        """Look at a deadline; the timer may be early by a rounding error, and is set again."""
        if due == self._due:
            self._due = None
            self.look()
