"""When one node follows a plan that was agreed on: at once, or when the next ring is ready.

Theory of operation
-------------------
::

               another plan is agreed on       the ring of the followed plan is whole
    FOLLOWING ---------------------------> SETTLING ---------------------------> PREPARING
        ^                                      |                                      |
        |        it is not, or a node follows  |      all nodes are prepared, it is   |
        |        the other plan                v      late, a node follows, not whole v
        '---------------------------------- Follow <----------------------------------'

When a node joins or leaves, its links change one by one, and each change could give a short-lived
plan: a plan is settled once it has not changed for a while (debounce). If plans keep changing, as
with a round trip that changes what is best, that takes at most twice the longest such time.

If the ring of the followed plan still serves, it goes on while each node of the next plan loads
what it lacks, as far as its memory allows, and publishes that it has prepared. A node that is not
among them hands over KV caches of the layers that it had, and publishes it, too. Following the plan
then costs no more than the links and the latest rows of the layers that moved. Every node of the
mesh runs this machine, on the same records; the first one that follows takes all others along, so
no two of them serve different plans for longer than one message takes.

Races, and who wins:

- The ring breaks while the next one is prepared: the plan is followed at once, loaded or not.
- Another plan is agreed on meanwhile: it settles and is prepared instead; the limit of the time
  runs on, so that plans that keep changing hold up nothing.
- The followed plan is agreed on again, as when a session begins: nothing more happens.
- An older plan than the followed one is agreed on: if another of its nodes follows it, as where two
  rings meet and the later one breaks, this node follows it once it has settled. Otherwise a newer
  one will come.
- A node cannot prepare, for lack of memory or weights: it publishes that it has prepared too, and
  loads when it follows the plan. A node that says nothing holds up the rest for `PREPARE_S`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto

from meshllm.names import NodeId
from meshllm.protocol.planning.plan import MAX_JUMP, Plan

PREPARE_S = 60.0  # s; a leaving node drains as long


class PlanChangeState(Enum):
    """The progress of a node towards the plan that was agreed on."""

    FOLLOWING = auto()
    SETTLING = auto()
    PREPARING = auto()


@dataclass(frozen=True, slots=True)
class PlanChangeInput:
    """What one node knows about two plans."""

    plan: Plan | None
    """The plan that was agreed on."""
    followed: Plan | None
    settle_s: float
    """Seconds for which a plan must not change before it is settled."""
    is_whole: bool = False
    """Whether the ring of the followed plan serves, as far as known here."""
    is_begun: bool = False
    """Whether another node follows the plan that was agreed on."""
    prepared: Collection[NodeId] = ()
    """The nodes that have prepared for it, or cannot."""
    leaving: Collection[NodeId] = ()
    """The nodes of the followed plan that are leaving, and hand over KV caches before."""

    @property
    def is_ready(self) -> bool:
        """Whether all nodes of the plan that was agreed on have prepared, and those that leave."""
        nodes = [stage.node for stage in self.plan.stages] if self.plan else []
        return all(node in self.prepared for node in (*nodes, *self.leaving))


@dataclass(frozen=True, slots=True)
class Prepare:
    """Load in advance what this node lacks for a plan."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow a plan from now on."""

    plan: Plan | None


class PlanChange:
    """One node's way from plan to plan; times are on the driver's clock."""

    def __init__(self) -> None:
        self.state = PlanChangeState.FOLLOWING
        self._wanted: tuple[Plan | None, float] | None = None  # since it settles
        self._settled_at = 0.0
        self._settles: tuple[float, float] | None = None  # since when, and its longest `settle_s`
        self._latest: float | None = None  # when the next plan is followed, prepared or not

    @property
    def deadline(self) -> float | None:
        """When to call ``look`` again at the latest; None if nothing is awaited."""
        match self.state:
            case PlanChangeState.SETTLING:
                return self._settled_at
            case PlanChangeState.PREPARING:
                return self._latest
            case _:
                return None

    def reset(self) -> None:
        """Begin again, with nothing followed."""
        self.state, self._wanted, self._latest = PlanChangeState.FOLLOWING, None, None
        self._settles = None

    def look(self, plan_change_input: PlanChangeInput, now: float) -> list[Prepare | Follow]:
        """Decide what to do now; called after each change, and at the deadline."""
        plan, followed = plan_change_input.plan, plan_change_input.followed
        is_older = _is_older(plan, followed)
        if plan == followed or (is_older and not plan_change_input.is_begun):
            self.reset()
            return []
        wanted = plan, plan_change_input.settle_s
        if self.state is PlanChangeState.PREPARING and self._wanted and self._wanted[0] == plan:
            return self._prepared(plan_change_input, now)
        if wanted != self._wanted:
            self._wanted, self.state = wanted, PlanChangeState.SETTLING
            since, longest_s = self._settles or (now, 0.0)
            self._settles = since, max(longest_s, plan_change_input.settle_s)
            self._settled_at = min(now + plan_change_input.settle_s, since + 2 * self._settles[1])
        if now < self._settled_at and (is_older or not plan_change_input.is_begun):
            return []
        if plan is None or not plan_change_input.is_whole or plan_change_input.is_begun:
            return self._follow(plan)
        self.state, self._settles = PlanChangeState.PREPARING, None
        self._latest = now + PREPARE_S if self._latest is None else self._latest
        return [Prepare(plan), *self._prepared(plan_change_input, now)]

    def _prepared(self, plan_change_input: PlanChangeInput, now: float) -> list[Prepare | Follow]:
        is_late = self._latest is not None and now >= self._latest
        if (
            plan_change_input.is_ready
            or plan_change_input.is_begun
            or is_late
            or not plan_change_input.is_whole
        ):
            return self._follow(plan_change_input.plan)
        return []

    def _follow(self, plan: Plan | None) -> list[Prepare | Follow]:
        self.reset()
        return [Follow(plan)]


def _is_older(plan: Plan | None, followed: Plan | None) -> bool:
    """Return whether a plan is older than the followed one, unless the epoch of that is absurd."""
    if plan is None or followed is None:
        return False
    return plan.precedence < followed.precedence and followed.epoch <= plan.epoch + MAX_JUMP
