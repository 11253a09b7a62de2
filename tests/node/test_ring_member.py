"""Readiness of a node in its ring, its published state, and waiters for it."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import LinkLost, ModelError
from meshllm.names import FIRST_GROUP, Digest, GroupId, LossCause, NodeId, short
from meshllm.node.ring_member import BUSY_S, CALM_S, FORM_S, HANGS, LOAD_S, RingMember
from meshllm.node.session.text import RingBackend
from meshllm.protocol.agreement.agreement import Agreement
from meshllm.protocol.agreement.groups import groups_of
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Lifecycle, StateRecord
from meshllm.protocol.membership.strikes import FAULTS_S, MAX_FAULTS
from meshllm.protocol.planning.chunking import ring_times
from meshllm.protocol.planning.plan import Plan
from meshllm.protocol.ring.forming import LINK_S
from meshllm.protocol.ring.handover import Outlook
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A, B, C
from tests.builders.snapshots import World, charter, profile


def agreed() -> tuple[Agreement, Plan]:
    agreement = World({A: profile(3), B: profile(3)}).agree(A)
    assert agreement.plan is not None
    return agreement, agreement.plan


AGREEMENT, PLAN = agreed()
ALONE = replace(PLAN, stages=PLAN.stages[:1])
LATER = replace(PLAN, epoch=PLAN.epoch + 1)
ENTRY, STAGE = PLAN.stages[0].node, PLAN.stages[1].node


class Place:
    """A node in a ring, with fakes around it."""

    def __init__(self, me: bytes = ENTRY) -> None:
        self.told: list[StateRecord] = []
        self.states: dict[bytes, StateRecord] = {}
        self.alive = {ENTRY, STAGE}
        self.silent = set[NodeId]()
        self.profiles: dict[bytes, Any] = {}
        self.machine = machine = SimpleNamespace(
            me=me, states=self.states, publish=self.publish, alive=self.alive,
            silent=self.silent,
            profiles=self.profiles, charter=None,
        )  # fmt: skip
        self.probed: list[bytes] = []
        self.links = SimpleNamespace(
            by_peer=dict[bytes, Any](), act=lambda _: None, dial_ring=dial, probe=self.probed.append
        )
        self.ring_member = RingMember(
            cast("Any", machine), cast("Any", self.links), lambda: "nobody", keep_s=60.0
        )
        self.formed: list[bool] = []
        self.runtime = SimpleNamespace(
            plan=None, entry=None, stage=None, prepared=None, sessions=3, formed=self.form,
            missing=None,
        )  # fmt: skip

    def publish(self, *, state: StateRecord, now: float) -> list[Any]:
        self.told.append(state)
        return []

    def form(self, *, is_formed: bool) -> None:
        self.formed.append(is_formed)

    def serve(self, plan: Plan | None = PLAN) -> None:
        self.ring_member.runtime = cast("Any", self.runtime)
        self.runtime.plan = plan
        self.ring_member.publish()

    def work(self, entry: object = "entry") -> None:
        self.ring_member.model = cast("Any", SimpleNamespace(worker="worker", text=text))
        self.runtime.entry = entry
        self.ring_member.at_work()


async def dial(node: bytes) -> Any:
    return node


async def text() -> str:
    return "text"


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(story())


def loaded(plan: Plan = PLAN) -> StateRecord:
    return StateRecord(Lifecycle.SERVING, followed=plan.encode(), is_loaded=True)


def test_a_node_without_a_model_is_joining() -> None:
    async def story() -> None:
        place = Place()
        place.ring_member.publish()
        assert place.told == []  # nothing has changed
        assert (place.ring_member.plan, place.ring_member.sessions) == (None, 0)
        assert place.ring_member.serving_entry() is None
        assert place.ring_member.reason() == "nobody"

    run(story)


def test_a_change_is_published_once() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        place.ring_member.publish()
        place.ring_member.loaded(True, None)
        place.ring_member.loaded(True, None)
        assert [(state.lifecycle, state.is_loaded) for state in place.told] == [
            (Lifecycle.SERVING, False), (Lifecycle.SERVING, True),
        ]  # fmt: skip
        assert {state.followed for state in place.told} == {PLAN.encode()}
        assert place.ring_member.sessions == 3

    run(story)


def test_all_nodes_of_a_broken_ring_are_probed() -> None:
    async def story() -> None:
        place = Place()
        place.ring_member.broke(PLAN)
        assert place.probed == [ENTRY, STAGE]

    run(story)


def test_a_leaving_node_says_so_until_it_has_left() -> None:
    async def story() -> None:
        place = Place()
        place.ring_member.is_leaving = True
        place.ring_member.publish()
        place.serve()
        place.ring_member.has_left = True
        place.ring_member.loaded(True, None)
        assert [state.lifecycle for state in place.told] == [Lifecycle.LEAVING] * 2

    run(story)


def test_the_plan_for_which_layers_are_loaded_in_advance_is_published() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        place.runtime.prepared = LATER
        place.ring_member.at_work()
        place.runtime.prepared = None
        place.ring_member.at_work()
        assert [state.prepared for state in place.told] == [b"", LATER.digest, b""]

    run(story)


def test_a_ring_is_whole_while_all_nodes_have_loaded_and_this_one_serves() -> None:
    async def story() -> None:
        place, told = Place(), list[bool]()

        def look() -> None:
            told.append(place.ring_member.outlook(LATER, 0.5).is_whole)

        look()
        place.serve()
        place.states |= {ENTRY: loaded(), STAGE: loaded()}
        look()
        place.work()
        look()
        assert place.ring_member.outlook(None, 0.5) == Outlook(None, PLAN, 0.5, is_whole=True)
        place.states[STAGE] = loaded(LATER)
        look()
        assert told == [False, False, True, False]

    run(story)


def test_what_other_nodes_have_prepared_or_follow_is_known_while_they_are_there() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        place.states |= {ENTRY: loaded(LATER), STAGE: replace(loaded(), prepared=LATER.digest)}
        outlook = place.ring_member.outlook(LATER, 0.5)
        assert (set(outlook.prepared), outlook.is_begun) == ({ENTRY, STAGE}, False)
        place.states[STAGE] = loaded(LATER)
        assert place.ring_member.outlook(LATER, 0.5).is_begun
        place.alive.discard(STAGE)
        outlook = place.ring_member.outlook(LATER, 0.5)
        assert (set(outlook.prepared), outlook.is_begun) == ({ENTRY}, False)

    run(story)


def test_a_loss_is_explained_with_the_names_of_nodes() -> None:
    async def story() -> None:
        place = Place()
        place.serve(replace(ALONE, epoch=PLAN.epoch + 1))
        after = place.ring_member.ring_at(ENTRY)
        place.alive.discard(STAGE)
        place.profiles[STAGE] = SimpleNamespace(name="cellar")
        cause, text = place.ring_member.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_LOST, "cellar is gone")
        place.silent.add(STAGE)
        cause, text = place.ring_member.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_SILENT, "cellar is silent")
        place.states[ENTRY] = StateRecord(faulty=(STAGE,))
        cause, text = place.ring_member.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_REFUSED, "cellar is refused")
        place.alive.add(STAGE)
        place.states[STAGE] = StateRecord(obstacle=HANGS)
        cause, text = place.ring_member.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_HUNG, "cellar hangs")
        del place.states[ENTRY]
        place.states[STAGE] = StateRecord(Lifecycle.LEFT)
        cause, text = place.ring_member.explain((FIRST_GROUP, PLAN), after)
        assert (cause, text.partition(";")[0]) == (LossCause.NODE_LEFT, "cellar left")

    run(story)


def test_the_last_plan_is_published_while_there_is_none() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        place.serve(None)
        place.ring_member.loaded(True, None)
        assert place.told[-1].followed == PLAN.encode()

    run(story)


def test_a_span_loaded_for_the_last_plan_does_not_count_for_the_next() -> None:
    async def story() -> None:
        place = Place()
        place.serve(ALONE)
        place.ring_member.loaded(True, None)
        place.serve(PLAN)  # published before the runtime begins to load
        assert [(state.followed, state.is_loaded) for state in place.told] == [
            (ALONE.encode(), False), (ALONE.encode(), True), (PLAN.encode(), False),
        ]  # fmt: skip

    run(story)


def test_the_reason_why_the_ring_does_not_serve_is_reported() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        assert place.ring_member.reason() == "its nodes are loading and connecting"
        place.alive.remove(STAGE)
        assert place.ring_member.reason() == f"{short(PLAN.stages[1].node)} is gone"
        place.alive.remove(ENTRY)
        place.profiles |= {ENTRY: SimpleNamespace(name="a"), STAGE: SimpleNamespace(name="b")}
        assert place.ring_member.reason() == "a, b are gone"

    run(story)


def test_a_node_that_has_left_publishes_no_more() -> None:
    async def story() -> None:
        place = Place()
        place.ring_member.has_left = True
        place.serve()
        assert place.told == []

    run(story)


def test_an_error_is_the_reason() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        assert place.ring_member.reason() == "its nodes are loading and connecting"
        place.ring_member.loaded(False, ModelError("no memory"))
        assert place.ring_member.reason() == "no memory"

    run(story)


def test_waiters_for_changes_are_woken() -> None:
    async def story() -> None:
        place = Place()
        async with aclosing(place.ring_member.changes()) as changes:
            await anext(changes)
            waiting = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(1)
            assert not waiting.done()
            place.serve()
            await waiting
            place.ring_member.publish()  # between two iterations
            await anext(changes)

    run(story)


def test_the_entry_is_known_when_it_serves() -> None:
    async def story() -> None:
        place = Place()
        waiting = asyncio.ensure_future(place.ring_member.entries())
        place.serve()
        await asyncio.sleep(1)
        assert not waiting.done()
        place.work()
        assert await waiting == [ENTRY]

    run(story)


def test_another_entry_is_known_when_all_have_loaded_and_it_is_linked() -> None:
    async def story() -> None:
        place = Place(STAGE)
        place.serve()
        place.states[STAGE] = loaded()
        place.states[ENTRY] = StateRecord(Lifecycle.SERVING, followed=b"another", is_loaded=True)
        place.links.by_peer[ENTRY] = object()
        assert place.ring_member.serving_entry() is None
        place.states[ENTRY] = loaded()
        assert place.ring_member.serving_entry() == ENTRY
        del place.states[STAGE]
        assert place.ring_member.serving_entry() is None
        place.states[STAGE] = loaded()
        place.links.by_peer.clear()
        assert place.ring_member.serving_entry() is None

    run(story)


def test_the_runtime_is_notified_when_all_have_loaded() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        for node in (ENTRY, STAGE):
            assert not any(place.formed)
            place.states[node] = loaded()
            place.ring_member.publish()
        assert place.formed[-1]
        assert await place.ring_member.dial(C) == C  # type: ignore[comparison-overlap]  # a fake

    run(story)


def test_the_plan_may_change_although_requests_never_end() -> None:
    async def story() -> None:
        place, told = Place(), list[bool]()
        place.serve()
        place.work()
        async with place.ring_member.backend():
            await asyncio.sleep(BUSY_S - 1)
            told.append(place.told[-1].may_change)
            async with place.ring_member.backend():
                await asyncio.sleep(2)
                told.append(place.told[-1].may_change)
            async with place.ring_member.backend():
                told.append(place.told[-1].may_change)
        await asyncio.sleep(2 * CALM_S)
        async with place.ring_member.backend():
            told.append(place.told[-1].may_change)
        await asyncio.sleep(2 * BUSY_S)
        assert told == [False, True, True, False]
        assert [state.may_change for state in place.told].count(False) == 2

    run(story)


def test_the_plan_is_fixed_while_the_entry_serves_and_a_little_longer() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        place.work()
        for _ in range(2):
            async with place.ring_member.backend(STAGE) as backend:
                assert backend == RingBackend(
                    *cast("Any", ("entry", "worker", "text", PLAN, STAGE))
                )
                await asyncio.sleep(CALM_S * 3)
                assert not place.told[-1].may_change
            await asyncio.sleep(CALM_S / 2)
            assert not place.told[-1].may_change
        await asyncio.sleep(CALM_S)
        assert place.told[-1].may_change
        assert [state.may_change for state in place.told].count(False) == 1

    run(story)


def test_a_neighbour_with_several_faults_is_published_as_faulty_for_a_while() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        for _ in range(MAX_FAULTS):
            assert not place.told[-1].faulty
            await asyncio.sleep(1)
            place.ring_member.faulty(NodeId(STAGE))
        assert place.told[-1].faulty == (STAGE,)
        await asyncio.sleep(FAULTS_S)
        assert not place.told[-1].faulty

    run(story)


@pytest.mark.parametrize("loads", [True, False])
def test_a_node_that_does_not_load_in_time_is_published_as_faulty(*, loads: bool) -> None:
    async def story() -> None:
        place = Place()
        place.machine.charter = charter()
        place.serve()
        await asyncio.sleep(LOAD_S - 1)
        assert not place.told[-1].faulty
        if loads:
            place.states[STAGE] = loaded()
        await asyncio.sleep(2)
        assert place.told[-1].faulty == (() if loads else (STAGE,))

    run(story)


def test_a_plan_loads_until_its_living_nodes_have_loaded() -> None:
    async def story() -> None:
        place = Place()
        place.machine.charter = charter()
        assert place.ring_member.loads_until == 0
        place.serve()
        place.states[ENTRY] = loaded()
        assert place.ring_member.loads_until >= LOAD_S
        place.states[STAGE] = loaded()
        assert place.ring_member.loads_until == 0
        place.states[STAGE] = StateRecord()
        place.alive.discard(STAGE)
        assert place.ring_member.loads_until == 0

    run(story)


def test_a_hang_is_published_as_an_obstacle() -> None:
    async def story() -> None:
        place = Place()
        for is_hung in (True, False):
            place.ring_member.is_hung = is_hung
            place.ring_member.publish()
            assert place.told[-1].obstacle == (HANGS if is_hung else "")

    run(story)


def test_a_neighbour_that_does_not_link_is_published_as_faulty() -> None:
    async def story() -> None:
        place = Place()
        place.machine.charter = charter()
        place.states[STAGE] = loaded()
        place.serve()
        await asyncio.sleep(3 * LINK_S)
        assert not place.told[-1].faulty
        place.runtime.missing = STAGE
        await asyncio.sleep(LINK_S)
        assert place.told[-1].faulty == (STAGE,)

    run(story)


def test_a_plan_that_was_replaced_in_time_leaves_no_node_out() -> None:
    async def story() -> None:
        place = Place()
        place.machine.charter = charter()
        place.serve()
        place.serve(ALONE)
        await asyncio.sleep(2 * LOAD_S)
        assert not place.told[-1].faulty

    run(story)


def test_a_request_waits_for_the_ring_of_this_node() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        asking = asyncio.ensure_future(ask(place))
        await asyncio.sleep(FORM_S / 2)
        assert not asking.done()
        place.work()
        await asking

    run(story)


async def ask(place: Place) -> None:
    async with place.ring_member.backend():
        pass


def test_a_ring_that_is_not_ready_in_time_is_lost() -> None:
    async def story() -> None:
        place = Place()
        place.serve()
        with pytest.raises(LinkLost, match="was not ready within"):
            await ask(place)
        assert asyncio.get_running_loop().time() == FORM_S

    run(story)


@pytest.mark.parametrize("me", [STAGE, C])
def test_only_the_entry_has_a_backend(me: bytes) -> None:
    async def story() -> None:
        place = Place(me)
        with pytest.raises(LinkLost, match="not the entry"):
            await ask(place)
        place.serve()
        with pytest.raises(LinkLost, match="not the entry"):
            await ask(place)
        await asyncio.sleep(2 * CALM_S)
        assert place.told[-1].may_change

    run(story)


def test_times_of_ranks_follow_from_the_latest_offers() -> None:
    place = Place()
    unknown = place.ring_member.times(PLAN)
    place.ring_member.agreement = AGREEMENT
    without_charter = place.ring_member.times(PLAN)
    place.machine.charter = charter()

    times = place.ring_member.times(PLAN)

    slow = [replace(each, layer_s=((1, 9.0),)) for each in AGREEMENT.offers]
    place.ring_member.agreement = replace(AGREEMENT, offers=tuple(slow))
    slower = place.ring_member.times(PLAN)
    place.ring_member.agreement = replace(AGREEMENT, offers=AGREEMENT.offers[:1])
    gone = place.ring_member.times(PLAN)
    assert times == ring_times(PLAN, AGREEMENT.offers, AGREEMENT.links, charter().shape)
    assert slower is not None
    assert [rank.offer for rank in slower.ranks] == slow
    assert (unknown, without_charter, gone) == (None, None, None)


def test_begin_creates_a_runtime() -> None:
    async def story() -> None:
        place = Place()
        model: Any = SimpleNamespace()
        runtime = place.ring_member.begin(model)
        assert (place.ring_member.runtime, place.ring_member.model) == (runtime, model)
        assert runtime.plan is None

    run(story)


def several() -> tuple[Charter, GroupId, GroupId]:
    """A mesh of two replicas of its first model, and another model."""
    first = replace(charter(), replicas=2)
    other = replace(charter(), config_digest=Digest(b"o" * 32))
    other = replace(other, shape=replace(other.shape, name="other"))
    whole = replace(first, models=(other,))
    _, third, second = (group.id for group in groups_of(whole))
    return whole, second, third


def test_the_entries_of_all_rings_of_a_model_are_known() -> None:
    whole, second, third = several()

    async def story() -> None:
        place = Place()
        place.machine.charter = whole
        plan = replace(ALONE, epoch=7, stages=(replace(ALONE.stages[0], node=STAGE),))
        place.states[STAGE] = replace(loaded(plan), group=second)
        place.ring_member.publish()
        assert place.ring_member.serving_entries() == []
        place.links.by_peer[STAGE] = None
        assert place.ring_member.serving_entries("tiny") == [STAGE]
        assert place.ring_member.ring(second) == (plan, True)
        assert place.ring_member.ring(FIRST_GROUP) == (None, False)
        place.states[STAGE] = replace(place.states[STAGE], group=FIRST_GROUP)
        assert place.ring_member.ring(FIRST_GROUP) == (plan, True)  # of others
        place.states[STAGE] = replace(place.states[STAGE], group=second)
        place.serve()
        assert place.ring_member.ring(FIRST_GROUP) == (PLAN, False)
        place.work()
        assert await place.ring_member.entries() == [ENTRY, STAGE]
        assert place.ring_member.serving_entries("other") == []
        assert place.ring_member.plan_of(second) == plan
        place.states[STAGE] = replace(place.states[STAGE], followed=b"garbage")
        assert place.ring_member.plan_of(second) is None
        place.states[STAGE] = replace(loaded(replace(plan, model="other")), group=third)
        assert place.ring_member.serving_entries("other") == [STAGE]
        assert place.ring_member.serving_entries() == [ENTRY]

    run(story)


def test_a_ring_is_exact_if_all_its_nodes_are() -> None:
    whole, second, _ = several()

    async def story() -> None:
        place, (exact, other) = (
            Place(),
            (replace(profile(3), is_exact=each) for each in (True, False)),
        )
        member, plan = place.ring_member, replace(ALONE, epoch=7)
        plan = replace(plan, stages=(replace(plan.stages[0], node=STAGE),))
        assert not member.is_exact(ENTRY)
        place.machine.charter = whole
        place.profiles |= {ENTRY: other, STAGE: exact}
        place.states[STAGE] = replace(loaded(plan), group=second)
        place.links.by_peer[STAGE] = None
        place.serve()
        place.work()
        assert member.serving_entries() == [ENTRY, STAGE]
        assert [member.is_exact(entry) for entry in (ENTRY, STAGE, C)] == [False, True, False]
        place.profiles[ENTRY] = exact
        assert member.is_exact(ENTRY, "tiny")

    run(story)


def test_an_entry_refuses_requests_for_a_model_that_its_ring_does_not_serve() -> None:
    whole, *_ = several()

    async def story() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        place.work()
        async with place.ring_member.backend(None, "tiny") as backend:
            assert isinstance(backend, RingBackend)
        with pytest.raises(LinkLost, match="does not serve `other` now"):
            async with place.ring_member.backend(STAGE, "other"):
                pass
        assert place.ring_member.reason("other") == (
            "the ring of `other` does not serve: no node is free for it"
        )
        *_, third = (group.id for group in groups_of(whole) if not group.replica)
        place.states[STAGE] = StateRecord(group=third)
        assert "its nodes load it" in place.ring_member.reason("other")

    run(story)


def test_a_node_in_two_rings_serves_and_publishes_both() -> None:
    whole, *_ = several()
    *_, third = (group.id for group in groups_of(whole) if not group.replica)

    async def story() -> None:
        place, other = Place(), replace(ALONE, epoch=7, model="other")
        first = place.ring_member
        place.machine.charter = whole
        place.serve()
        further = RingMember(
            cast("Any", place.machine), cast("Any", place.links), lambda: "", keep_s=0.0,
            first=first,
        )  # fmt: skip
        further.group, first.further[third] = third, further
        runtime = SimpleNamespace(
            prepared=None,
            plan=other,
            entry=None,
            sessions=2,
            recomputed=5,
            formed=place.form,
            missing=None,
        )
        further.runtime = cast("Any", runtime)
        further.loaded(True, None)

        state = place.told[-1]
        assert (state.group, state.followed) == (FIRST_GROUP, PLAN.encode())
        assert [(each.group, each.followed) for each in state.further] == [(third, other.encode())]
        assert state.further[0].is_loaded
        place.states[ENTRY] = state
        assert first.plan_of(third) == other
        assert first.sessions == 5
        assert first.reason("other") == "its nodes are loading and connecting"
        assert first.loads_until == max(further.loads_own_until, first.loads_own_until)
        further.model = cast("Any", SimpleNamespace(worker="worker", text=text, runners={1}))
        runtime.entry = cast("Any", "entry")
        further.at_work()
        assert await first.entries("other") == [ENTRY]
        async with first.backend(None, "other") as backend:
            assert isinstance(backend, RingBackend)
            assert not place.told[-1].further[0].may_change
            assert place.told[-1].may_change
        first.is_hung = True
        first.publish()
        assert place.told[-1].further[0].obstacle == HANGS
        del first.further[third]
        first.publish()
        assert place.told[-1].further == ()

    run(story)


def test_a_node_that_moves_publishes_its_group_and_keeps_the_epoch() -> None:
    whole, _, third = several()

    async def story() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        released: list[bool] = []
        model = SimpleNamespace(release=lambda: released.append(True))
        place.ring_member.model = cast("Any", model)
        place.ring_member.end(third)
        state = place.told[-1]
        assert (state.group, state.lifecycle, state.is_loaded) == (third, Lifecycle.JOIN, False)
        assert state.followed == PLAN.encode()
        assert released == [True]
        assert place.ring_member.plan is None
        assert place.ring_member.charter
        assert place.ring_member.charter.shape.name == "other"

    run(story)


def used(place: Place) -> tuple[bytes, ...]:
    return place.told[-1].used


async def want(place: Place, model: str) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(1):
            await place.ring_member.entries(model)


def test_the_models_that_were_asked_for_lately_are_published() -> None:
    whole, *_ = several()
    first, other = (each.key for each in whole.served)

    async def story() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        place.work()
        await want(place, "of an engine")
        assert used(place) == ()
        await want(place, "other")
        assert used(place) == (other,)
        told = len(place.told)
        await asyncio.sleep(40)
        await want(place, "other")
        assert len(place.told) == told  # nothing new
        await asyncio.sleep(40)
        assert used(place) == (other,)
        await asyncio.sleep(21)
        assert used(place) == ()
        await want(place, "")
        assert used(place) == (first,)
        place.machine.charter = replace(whole, models=())
        place.ring_member.publish()
        assert used(place) == ()  # a mesh of one model does not tell

    run(story)


def test_a_model_is_used_while_answers_are_in_progress_or_awaited() -> None:
    whole, *_ = several()
    first, other = (each.key for each in whole.served)

    async def story() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        place.work()
        async with place.ring_member.backend(STAGE, "tiny"):
            await asyncio.sleep(200)
            assert used(place) == (first,)
        await asyncio.sleep(59)
        assert used(place) == (first,)
        await asyncio.sleep(2)
        assert used(place) == ()

        waiting = asyncio.ensure_future(place.ring_member.entries("other"))
        await asyncio.sleep(200)
        assert used(place) == (other,)
        waiting.cancel()
        await asyncio.sleep(61)
        assert used(place) == ()

    run(story)
