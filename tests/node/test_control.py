"""The status and the commands of a node."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from meshllm.errors import Busy, MeshError, UserError
from meshllm.names import short, show
from meshllm.node.control import MAX_LASTS_S
from meshllm.node.requests.peer_requests import MAX_PER_CLIENT
from meshllm.protocol.membership.client_quota import MAX_TOKENS_PER_DAY
from meshllm.protocol.membership.records import MAX_REVOKED
from meshllm.protocol.trust.credential import ClientLimits, Role
from meshllm.request import Piece, Request
from meshllm.status import (
    Change,
    MemoryStatus,
    Named,
    NodeState,
    PlannedRing,
    PlanTerms,
    RingState,
    Unplaced,
)
from tests.builders.owned import Owned
from tests.builders.view import A, B, C, D, plan_of, view_of


@pytest.fixture
def node() -> Owned:
    return Owned()


async def test_the_status_is_a_report(node: Owned) -> None:
    assert await node.control.status() == node.status()


async def test_a_status_at_once_has_no_memory_measured(node: Owned) -> None:
    assert node.control.status_now() == replace(node.status(), memory=MemoryStatus())


async def test_a_ticket_without_limits(node: Owned) -> None:
    assert await node.control.invite("client", 0, 0) == "ticket"
    assert await node.control.invite("node", 60, 2) == "ticket"
    assert node.invited == [(Role.CLIENT, None, None), (Role.NODE, 60, 2)]


@pytest.mark.parametrize(
    ("role", "expires_s", "uses"),
    [("king", 1, 1), ("", 0, 0), ("node", -1, 1), ("node", 1, -1), ("node", MAX_LASTS_S + 1, 1)],
)
async def test_invalid_limits_of_a_ticket_are_refused(
    node: Owned, role: str, expires_s: int, uses: int
) -> None:
    with pytest.raises(UserError) as raised:
        await node.control.invite(role, expires_s, uses)

    assert raised.value.hint
    assert node.invited == []


async def test_a_ticket_limits_its_clients(node: Owned) -> None:
    limits = ClientLimits(MAX_PER_CLIENT, 1)

    await node.control.invite("client", 60, 1, limits)

    assert node.limits == limits


@pytest.mark.parametrize(
    ("role", "limits"),
    [
        ("node", ClientLimits(1)),
        ("node", ClientLimits(0, 1)),
        ("client", ClientLimits(MAX_PER_CLIENT + 1)),
        ("client", ClientLimits(-1)),
        ("client", ClientLimits(0, -1)),
        ("client", ClientLimits(0, MAX_TOKENS_PER_DAY + 1)),
    ],
)
async def test_invalid_limits_of_a_client_are_refused(
    node: Owned, role: str, limits: ClientLimits
) -> None:
    with pytest.raises(UserError) as raised:
        await node.control.invite(role, 60, 1, limits)

    assert raised.value.hint
    assert node.invited == []


async def test_a_removal_takes_the_guests_with_it(node: Owned) -> None:
    told = await node.control.remove("there")

    assert (told.node, told.name, told.spared) == (show(B), "there", ())
    assert told.taken == (Named(show(C), "spare"),)
    (removal,) = node.ended_members
    assert (removal.node, removal.issuer, removal.spared) == (B, A, ())
    assert removal.is_signed(node.view.mesh)


async def test_a_removal_spares_a_named_guest_and_its_inviters(node: Owned) -> None:
    told = await node.control.remove("there", ["spare"])

    assert (told.spared, told.taken) == ((Named(show(C), "spare"),), ())
    assert node.ended_members[0].spared == (D,)


async def test_a_removal_spares_this_node(node: Owned) -> None:
    node.see(inviters={B: (D,), A: (D, B), C: (D, B)})

    told = await node.control.remove("there")

    assert (told.spared, told.taken) == (
        (Named(show(A), "here"),), (Named(show(C), "spare"),),
    )  # fmt: skip
    assert node.ended_members[0].spared == (A,)


async def test_only_guests_can_be_spared(node: Owned) -> None:
    node.see(inviters={B: (A,), C: (A,)})

    with pytest.raises(UserError, match="was not invited by"):
        await node.control.remove("there", ["spare"])
    assert node.ended_members == []


async def test_the_founder_cannot_be_removed(node: Owned) -> None:
    node.see(inviters={A: (B,)})

    with pytest.raises(UserError, match="founder cannot be removed"):
        await node.control.remove("there")
    assert node.ended_members == []


async def test_a_removal_that_cannot_be_stored_is_reported(node: Owned) -> None:
    node.is_full = True

    with pytest.raises(MeshError, match="cannot store more removals"):
        await node.control.remove("there")


async def test_an_unknown_node_can_be_removed_by_its_id(node: Owned) -> None:
    assert (await node.control.remove(show(D))).name == ""


@pytest.mark.parametrize("name", ["here", show(A)])
async def test_a_node_cannot_remove_itself(node: Owned, name: str) -> None:
    with pytest.raises(UserError, match="cannot remove itself"):
        await node.control.remove(name)

    assert node.ended_members == []


async def test_events_begin_with_the_current_state(node: Owned) -> None:
    async with aclosing(node.control.events()) as events, asyncio.timeout(60):
        first = await anext(events)
        node.see(plan=None)
        second = await anext(events)

    plan = plan_of(view_of())
    states = {show(A): NodeState.LOADING, show(B): NodeState.LOADING, show(C): NodeState.STANDBY}
    digest = plan.digest.hex()[:12]
    assert first == Change("changed", RingState.FORMING, plan.epoch, digest, states)
    assert (second.ring, second.epoch, second.digest) == (RingState.WAITING, 0, "")


async def test_requests_are_served_until_the_node_leaves(node: Owned) -> None:
    assert [event async for event in node.control.generate(Request(raw="x"))] == [Piece("x")]

    node.see(is_leaving=True)

    with pytest.raises(Busy, match="is leaving"):
        node.control.generate(Request(raw="x"))


async def test_other_terms_are_tried_without_moving(node: Owned) -> None:
    before = node.view

    found = await node.control.try_plan(
        PlanTerms(members=1, exclude=(short(A),), memory_bytes={show(B): 400})
    )

    assert [(each.node, each.name, str(each.layers)) for each in found.stages] == [
        (show(B), "there", "0:4")
    ]
    assert found.predicted
    assert found.predicted.ms_per_token > 0
    assert (found.reason, found.policy) == ("", "auto")
    assert Unplaced(show(A), "here", "it is excluded") in found.standbys
    assert node.view == before


async def test_terms_without_a_ring_say_why(node: Owned) -> None:
    terms = PlanTerms(memory_bytes={show(each): 0 for each in (A, B, C)})

    found = await node.control.try_plan(terms)

    assert (found.stages, found.predicted) == ((), None)
    assert "lacks" in found.reason


async def test_one_trial_runs_at_a_time(node: Owned) -> None:
    done = await asyncio.gather(
        *(node.control.try_plan(PlanTerms()) for _ in range(3)), return_exceptions=True
    )

    assert [type(each) for each in done] == [PlannedRing, Busy, Busy]


async def test_a_trial_of_an_unknown_node_is_refused(node: Owned) -> None:
    with pytest.raises(UserError):
        await node.control.try_plan(PlanTerms(exclude=("nobody",)))


async def test_before_the_mesh_has_formed_there_is_nothing_to_try(node: Owned) -> None:
    node.see(agreement=None)

    with pytest.raises(Busy, match="not possible yet"):
        await node.control.try_plan(PlanTerms())


async def test_the_newest_revoked_keys_are_published_and_those_of_others_listed() -> None:
    owned = Owned()
    tags = [bytes([number]) * 16 for number in (1, 2)]
    mine, theirs = (replace(owned.view.profiles[each], revoked=(tags[0],)) for each in (A, B))
    owned.see(profiles={**owned.view.profiles, A: mine, B: theirs})

    await owned.control.revoke(tags * MAX_REVOKED)

    assert owned.revoked == tuple(tags * (MAX_REVOKED // 2))
    assert owned.control.revocations() == {show(B): (tags[0],)}
