"""A node in the rings of a mesh, with fakes around it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, TypeVarTuple, cast

from meshllm.names import Digest, GroupId, NodeId, Span
from meshllm.node.agreement.own_state import OwnState
from meshllm.node.agreement.ring_directory import RingDirectory
from meshllm.node.agreement.ring_member import RingMember
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.groups import groups_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Lifecycle, StateRecord
from meshllm.protocol.planning.plan import Plan
from tests.builders.offers import A, B
from tests.builders.snapshots import World, charter, profile

Ts = TypeVarTuple("Ts")


def agreed() -> tuple[Agreement, Plan]:
    agreement = World({A: profile(3), B: profile(3)}).agree(A)
    assert agreement.plan is not None
    return agreement, agreement.plan


AGREEMENT, PLAN = agreed()
ALONE = replace(PLAN, stages=(replace(PLAN.stages[0], span=Span(0, PLAN.layers)),))
LATER = replace(PLAN, epoch=PLAN.epoch + 1)
ENTRY, STAGE = PLAN.stages[0].node, PLAN.stages[1].node


def call_later(delay_s: float, callback: Callable[[*Ts], None], *args: *Ts) -> None:
    asyncio.get_running_loop().call_later(delay_s, callback, *args)


def loaded(plan: Plan = PLAN) -> StateRecord:
    """Return the state of a node that has loaded its span of a plan."""
    return StateRecord(Lifecycle.SERVING, followed=plan.encode(), is_loaded=True)


def several() -> tuple[Charter, GroupId, GroupId]:
    """Return a mesh of two replicas of its first model, and of another model, with their groups."""
    first = replace(charter(), replicas=2)
    other = replace(charter(), config_digest=Digest(b"o" * 32))
    other = replace(other, shape=replace(other.shape, name="other"))
    whole = replace(first, models=(other,))
    _, third, second = (group.id for group in groups_of(whole))
    return whole, second, third


class Place:
    """A node in a ring, with fakes around it."""

    def __init__(self, me: bytes = ENTRY) -> None:
        self.told: list[StateRecord] = []
        self.states: dict[bytes, StateRecord] = {}
        self.alive = {ENTRY, STAGE}
        self.silent = set[NodeId]()
        self.profiles: dict[bytes, Any] = {}
        self.machine = SimpleNamespace(
            me=me, states=self.states, publish=self._publish, alive=self.alive,
            silent=self.silent, profiles=self.profiles, charter=None, author=me,
            woke=-inf,
        )  # fmt: skip
        self.probed: list[bytes] = []
        self.links = SimpleNamespace(
            by_peer=dict[bytes, Any](),
            act=lambda _: None,
            dial_ring=_dial,
            probe=self.probed.append,
        )
        machine, links = cast("Any", self.machine), cast("Any", self.links)
        self.failed = 0
        self.own = OwnState(machine, links, lambda: "nobody", call_later, self._fail, keep_s=60.0)
        self.member = self.own.first
        self.directory = RingDirectory(machine, links, self.own)
        self.formed: list[bool] = []
        self.replaced: Plan | None = None
        self.runtime = self.fake_runtime(sessions=3)

    def fake_runtime(self, plan: Plan | None = None, sessions: int = 0) -> SimpleNamespace:
        return SimpleNamespace(
            plan=plan, entry=None, stage=None, prepared=None, sessions=sessions, recomputed=0,
            formed=self._form, missing=None, take_replaced=lambda: self.replaced,
            preloaded=None, history=(),
        )  # fmt: skip

    def serve(self, plan: Plan | None = PLAN) -> None:
        self.member.runtime = cast("Any", self.runtime)
        self.runtime.plan = plan
        self.own.publish()

    def serve_two(self, further: GroupId) -> tuple[RingMember, SimpleNamespace]:
        """Serve in the first ring, and in a further one of another model; return that one."""
        self.machine.charter = several()[0]
        self.serve()
        member = self.own.begin_further(further, lambda: "")
        runtime = self.fake_runtime(replace(ALONE, epoch=7, model="other"), sessions=2)
        member.runtime = cast("Any", runtime)
        member.loaded(True, None)
        return member, runtime

    def work(self, entry: object = "entry") -> None:
        self.member.model = cast("Any", SimpleNamespace(worker="worker", text=text))
        self.runtime.entry = entry
        self.member.at_work()

    def _publish(self, *, state: StateRecord, now: float) -> list[Any]:
        self.told.append(state)
        return []

    def _fail(self) -> None:
        self.failed += 1

    def _form(self, *, is_formed: bool) -> None:
        self.formed.append(is_formed)


async def _dial(node: bytes) -> Any:
    return node


async def text() -> str:
    """Stand in for the text of a model."""
    return "text"
