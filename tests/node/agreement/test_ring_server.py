"""What a node says of a ring that it serves, and what it does when the plan is agreed on."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.names import FIRST_GROUP, GroupId, short
from meshllm.node.agreement.own_state import provides
from meshllm.node.agreement.plan_follower import SETTLE_S
from meshllm.node.agreement.ring_server import NodeParts, RingServer
from meshllm.node.provider import STARTING
from meshllm.protocol.membership.records import Lifecycle, StateRecord
from meshllm.protocol.weights.holders import FETCHES
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A
from tests.builders.ring_places import AGREEMENT, ENTRY, PLAN, STAGE, Place, call_later
from tests.builders.snapshots import charter

NO_PLAN = replace(AGREEMENT, plan=None, reason="too little memory")
EARLY = replace(NO_PLAN, offers=(), refused={}, ready=frozenset())


class Served:
    """The first ring of a node, with fakes around it."""

    def __init__(self, *, is_founder: bool = False) -> None:
        self.place = Place()
        self.links = self.place.links
        self.links.dial_weights = None
        self.told: list[str] = []
        self.followed: list[Any] = []
        self.offer = SimpleNamespace(hang="", shared_bytes=0, end=lambda: self.told.append("end"))
        editor = SimpleNamespace(amend_again=lambda: self.told.append("amended"))
        parts = SimpleNamespace(
            machine=self.place.machine,
            links=self.links,
            state=self.place.own,
            offer=self.offer,
            editor=editor,
            off_loop=None,
            call_later=call_later,
            is_founder=is_founder,
            spawn=lambda part: self.told.append(part.__name__),
        )
        self.server = RingServer(
            cast("NodeParts", parts), self.place.member, cast("Any", self.offer)
        )

    def agree(self, agreement: Any) -> None:
        self.server.planner.agreement = agreement
        self.server._agreed()

    def follow(self) -> None:
        """Take part with a runtime that notes which plans it follows."""
        runtime = self.place.runtime
        runtime.resize, runtime.follow = lambda: None, self.followed.append
        self.place.serve(None)


@pytest.mark.parametrize("is_founder", [True, False])
def test_without_a_charter_a_founder_loads_and_others_have_no_contact(*, is_founder: bool) -> None:
    server = Served(is_founder=is_founder).server

    loads = server.reason() == "this node is loading the model"

    assert loads is is_founder
    assert loads or server.reason() == "no contact with the mesh yet"


def test_the_reason_follows_what_is_agreed_on() -> None:
    served = Served()
    served.place.states |= dict.fromkeys((ENTRY, STAGE), StateRecord(Lifecycle.JOIN))
    told = []
    for agreement in (
        EARLY,
        NO_PLAN,
        AGREEMENT,
        replace(AGREEMENT, lacking=1),
    ):
        served.server.planner.agreement = agreement
        told.append(served.server.reason())
    served.offer.hang = "the compute thread has hung"

    assert told == [
        f"the nodes are loading the model: {', '.join(sorted(map(short, (ENTRY, STAGE))))}",
        "too little memory",
        "the nodes are agreeing on a plan",
        f"2 of 3 members are ready: {', '.join(sorted(map(short, (ENTRY, STAGE))))};"
        " the others have up to 30 s",
    ]
    assert served.server.reason() == "the compute thread has hung"


@pytest.mark.parametrize(
    ("state", "is_loading"),
    [
        (StateRecord(Lifecycle.JOIN), True),
        (StateRecord(Lifecycle.SERVING, obstacle=FETCHES), True),
        (StateRecord(Lifecycle.SERVING), False),
        (None, False),
    ],
)
def test_members_that_say_that_they_load_are_named(
    state: StateRecord | None, *, is_loading: bool
) -> None:
    served = Served()
    served.place.profiles |= {
        node: SimpleNamespace(name=name) for node, name in ((ENTRY, "attic"), (STAGE, "desk"))
    }
    served.place.states |= {STAGE: state} if state else {}
    agreement = replace(AGREEMENT, ready=frozenset({ENTRY}), lacking=2)
    served.server.planner.agreement = agreement

    reason = served.server.reason()

    assert reason.startswith("1 of 3 members are ready: attic; ")
    assert ("loading the model: desk" in reason) is is_loading


def test_before_any_node_has_published_its_state_no_memory_is_missed() -> None:
    served = Served()
    served.server.planner.agreement = EARLY

    assert served.server.reason() == "the nodes are loading the model"


def test_the_members_that_are_here_are_counted() -> None:
    served = Served()
    served.place.machine.charter = replace(charter(), members=3)
    served.place.states |= dict.fromkeys((ENTRY, STAGE), StateRecord(Lifecycle.JOIN))
    served.server.planner.agreement = EARLY

    assert served.server.reason().startswith("2 of 3 members are here, loading the model: ")


@pytest.mark.parametrize(
    "state",
    [
        StateRecord(Lifecycle.SERVING, obstacle=provides("")),
        StateRecord(Lifecycle.JOIN, obstacle=provides(STARTING)),
        StateRecord(Lifecycle.LEAVING),
        StateRecord(Lifecycle.OTHER),
    ],
)
@pytest.mark.parametrize("members", [1, None])
def test_a_node_that_will_hold_no_layers_is_not_counted_as_here(
    state: StateRecord, members: int | None
) -> None:
    served = Served()
    served.place.machine.charter = replace(charter(), members=members)
    served.place.profiles |= {
        node: SimpleNamespace(name=name) for node, name in ((ENTRY, "attic"), (STAGE, "desk"))
    }
    served.place.states |= {STAGE: state}
    served.server.planner.agreement = EARLY
    assert served.server.reason() == "the nodes are loading the model"  # none says that it does

    served.place.states |= {ENTRY: StateRecord(Lifecycle.JOIN)}

    assert served.server.reason().endswith("loading the model: attic")
    assert not members or served.server.reason().startswith("1 of 1 members")


def test_a_provider_is_not_waited_for() -> None:
    served = Served()
    served.place.own.provider = cast("Any", SimpleNamespace(offers=(), active=0, trouble=STARTING))
    assert served.server.reason() == "no contact with the mesh yet"
    served.links.by_peer[STAGE] = None
    assert served.server.reason() == "it provides whole models; its engine is starting"
    served.place.own.provider.trouble = ""
    assert served.server.reason() == "it provides whole models"


def test_a_plan_that_is_agreed_on_is_followed_once_it_has_settled() -> None:
    async def scenario() -> None:
        served = Served()
        served.follow()
        served.agree(AGREEMENT)
        assert served.told == ["amended"]
        assert served.place.member.agreement is AGREEMENT
        assert served.followed == []
        await asyncio.sleep(2 * SETTLE_S)
        assert served.followed == [PLAN]

    run_virtual(scenario())


@pytest.mark.parametrize("group", [FIRST_GROUP, GroupId(b"other")])
def test_names_of_nodes_are_resolved_again_in_every_ring(group: GroupId) -> None:
    async def scenario() -> None:
        served = Served()
        served.place.member.group = group
        served.agree(None)
        assert served.told == ["amended"]

    run_virtual(scenario())


def test_layers_are_handed_over_until_a_plan_without_the_leaver_is_in_force() -> None:
    served = Served()
    told = []
    for agreement, plan in (
        (None, PLAN),
        (AGREEMENT, None),
        (AGREEMENT, PLAN),
        (replace(AGREEMENT, leaving=frozenset({ENTRY})), PLAN),
        (replace(NO_PLAN, leaving=frozenset({ENTRY})), PLAN),
    ):
        served.server.planner.agreement = agreement
        served.place.member.runtime = cast("Any", served.place.fake_runtime(plan))
        told.append(served.server.is_handing_over)

    assert told == [False, False, True, False, True]


def test_a_ring_that_ends_retracts_its_offer_and_frees_its_model() -> None:
    async def scenario() -> None:
        served = Served()

        def tidy() -> None: ...

        model = SimpleNamespace(release=lambda: served.told.append("release"), tidy=tidy)
        served.place.member.model = cast("Any", model)
        served.server.planner.agreement = AGREEMENT
        served.server.end(FIRST_GROUP)
        assert served.told == ["end", "release", "tidy"]
        assert served.server.agreement is None
        assert served.place.member.model is None

    run_virtual(scenario())


def test_a_view_is_a_snapshot_of_the_records() -> None:
    served = Served()
    machine = served.place.machine
    assert served.server.view() is None
    machine.charter, machine.author, machine.removals = charter(), A, {}

    view = served.server.view()

    assert view is not None
    assert (view.me, view.group) == (ENTRY, FIRST_GROUP)
    assert view.profiles == machine.profiles
    assert view.profiles is not machine.profiles
