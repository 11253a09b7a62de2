"""Who serves a model, and how a request waits for it."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import LinkLost, ModelMissing
from meshllm.names import FIRST_GROUP, GroupId, Quant, RingEntry, Span, short
from meshllm.node.agreement.plan_hold import CALM_S
from meshllm.node.agreement.ring_member import FORM_S
from meshllm.node.session.text import RingBackend
from meshllm.protocol.agreement.groups import REFUSES, groups_of
from meshllm.protocol.membership.records import (
    MAX_CONTEXT,
    Lifecycle,
    ModelOffer,
    RingMembership,
    StateRecord,
)
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.testing.clock import run_virtual
from tests.builders.offers import C, D
from tests.builders.ring_places import ALONE, ENTRY, PLAN, STAGE, Place, loaded, several, text
from tests.builders.snapshots import profile

THEIRS = replace(ALONE, epoch=7, stages=(PlanStage(STAGE, Span(0, 4)),))
ELSEWHERE = D


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


async def ask(place: Place) -> None:
    async with place.directory.backend():
        pass


def used(place: Place) -> tuple[bytes, ...]:
    return place.told[-1].used


async def want(place: Place, model: str) -> None:
    with suppress(TimeoutError, ModelMissing):
        async with asyncio.timeout(1):
            await place.directory.entries(model)


def test_the_entry_is_known_when_it_serves() -> None:
    async def scenario() -> None:
        place = Place()
        waiting = asyncio.ensure_future(place.directory.entries())
        place.serve()
        await asyncio.sleep(1)
        assert not waiting.done()
        place.work()
        assert await waiting == [RingEntry(ENTRY, FIRST_GROUP)]

    run(scenario)


def test_the_longest_context_is_that_of_all_models_and_providers() -> None:
    whole, *_ = several()
    further = whole.models[0]
    longer = replace(further, shape=replace(further.shape, context=4096))

    async def scenario() -> None:
        place = Place()
        place.machine.charter = None
        assert place.directory.longest_context == 0
        place.machine.charter = replace(whole, models=(longer,))
        assert place.directory.longest_context == 4096
        place.states[STAGE] = StateRecord(offers=(ModelOffer("fox", context=8192),))
        assert place.directory.longest_context == 8192
        place.states[STAGE] = StateRecord(offers=(ModelOffer("fox"),))  # of unknown context
        assert place.directory.longest_context == MAX_CONTEXT

    run(scenario)


def test_providers_of_a_ring_s_model_are_those_that_may_read_its_prompts() -> None:
    whole, *_ = several()
    model, offer = replace(whole.models[0], aliases=("small",)), ModelOffer("other", "fp32", 9)

    async def scenario() -> None:
        place = Place()
        assert place.directory.of_rings("other") is None
        place.machine.charter = replace(whole, models=(model,))
        place.states[STAGE] = StateRecord(lifecycle=Lifecycle.SERVING, offers=(offer,))
        place.links.by_peer[STAGE] = None
        expected = ModelOffer("other", model.dtype.name.lower(), model.shape.context)
        for name in ("other", "small"):
            assert place.directory.of_rings(name) == expected
            assert place.directory.offers(name) == {STAGE: offer}
        assert place.directory.offers("tiny") == {}
        for terms, found in (
            ({"entries": (ENTRY,)}, {}),
            ({"entries": (ENTRY, STAGE)}, {STAGE: offer}),
            ({"ends": Ends.CLIENT}, {}),
        ):
            changed = replace(model, **terms)
            place.machine.charter = replace(whole, models=(changed,))
            assert place.directory.offers("other") == found

    run(scenario)


def test_a_name_with_a_precision_means_rings_whatever_other_ones_are_served() -> None:
    whole, *_ = several()
    small = replace(whole.models[0], quant=Quant.INT8)
    stored, offer = whole.models[0], ModelOffer("other", "fp32")

    async def scenario() -> None:
        place = Place()
        find, precise = place.directory, f"other@{stored.precision}"
        assert find.pinned("other") == "other"
        place.states[STAGE] = StateRecord(lifecycle=Lifecycle.SERVING, offers=(offer,))
        place.links.by_peer[STAGE] = None
        place.machine.charter = replace(whole, models=(small,))
        assert find.pinned("other") == find.pinned("other@int8") == small.key.hex()
        place.machine.charter = replace(whole, models=(small, stored))
        assert find.pinned("other") == find.pinned(precise) == stored.key.hex()
        assert find.pinned("tiny") == whole.key.hex()
        assert [find.pinned(each) for each in ("owl", "")] == ["owl", ""]
        keys = [stored.key.hex(), small.key.hex(), "owl"]
        assert [find.shown(each) for each in keys] == ["other", "other@int8", "owl"]
        assert [find.offers(each) for each in ("other", precise)] == [{STAGE: offer}, {}]
        assert [each and each.model for each in map(find.of_rings, ("other", precise))] == [
            "other", precise,
        ]  # fmt: skip
        assert "of `other@int8`" in find.awaited("other@int8")

    run(scenario)


def test_a_request_for_a_model_that_is_stopped_waits_for_nothing() -> None:
    whole, *_ = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        waiting = asyncio.ensure_future(place.directory.entries("other"))
        await asyncio.sleep(1)
        assert not waiting.done()
        place.machine.charter = replace(whole, models=())
        place.own.publish()
        with pytest.raises(ModelMissing, match="no longer serves"):
            await waiting

    run(scenario)


def test_a_provider_of_a_ring_s_model_serves_it() -> None:
    whole, *_ = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.own.provider = cast("Any", SimpleNamespace(has=lambda model: model == "other"))
        async with place.directory.backend(None, "other") as backend:
            assert backend is place.own.provider

    run(scenario)


def test_the_entries_of_all_rings_of_a_model_are_known() -> None:
    whole, second, third = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        plan = replace(ALONE, epoch=7, stages=(replace(ALONE.stages[0], node=STAGE),))
        place.states[STAGE] = replace(loaded(plan), group=second)
        place.own.publish()
        assert place.directory.serving_entries() == []
        place.links.by_peer[STAGE] = None
        assert place.directory.serving_entries("tiny") == [RingEntry(STAGE, second)]
        assert place.directory.ring(second) == (plan, True)
        assert place.directory.ring(FIRST_GROUP) == (None, False)
        place.states[STAGE] = replace(place.states[STAGE], group=FIRST_GROUP)
        assert place.directory.ring(FIRST_GROUP) == (plan, True)  # of others
        place.states[STAGE] = replace(place.states[STAGE], group=second)
        place.serve()
        assert place.directory.ring(FIRST_GROUP) == (PLAN, False)
        place.work()
        own = RingEntry(ENTRY, FIRST_GROUP)
        assert await place.directory.entries() == [own, RingEntry(STAGE, second)]
        assert place.directory.serving_entries("other") == []
        assert place.directory.plan_of(second) == plan
        place.states[STAGE] = replace(place.states[STAGE], followed=b"garbage")
        assert place.directory.plan_of(second) is None
        place.states[STAGE] = replace(loaded(replace(plan, model="other")), group=third)
        assert place.directory.serving_entries("other") == [RingEntry(STAGE, third)]
        assert place.directory.serving_entries() == [own]

    run(scenario)


@pytest.mark.parametrize(
    "lie",
    [
        replace(THEIRS, model="other"),
        replace(THEIRS, stages=(PlanStage(STAGE, Span(0, 3)),)),
        replace(
            THEIRS,
            ends=Ends.CLIENT,
            stages=(PlanStage(STAGE, Span(0, 0)), PlanStage(C, Span(0, 4))),
        ),
        replace(THEIRS, stages=(PlanStage(C, Span(0, 4)),)),
        replace(THEIRS, stages=(PlanStage(STAGE, Span(0, 2)), PlanStage(ELSEWHERE, Span(2, 4)))),
    ],
    ids=["model", "layers", "ends", "entry", "group"],
)
def test_a_ring_that_the_charter_does_not_allow_is_not_asked(lie: Plan) -> None:
    whole, second, third = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = replace(whole, entries=(STAGE,))
        place.alive.update({C, ELSEWHERE})
        for node in (STAGE, C, ELSEWHERE):
            place.links.by_peer[node] = None
            place.states[node] = replace(loaded(THEIRS), group=second)
        place.own.publish()
        assert place.directory.serving_entries("tiny") == [RingEntry(STAGE, second)]
        for node in (STAGE, C, ELSEWHERE):
            group = third if node == ELSEWHERE else second
            place.states[node] = replace(loaded(lie), group=group)
        assert place.directory.serving_entries("tiny") == []

    run(scenario)


def test_a_node_is_named_as_in_the_status() -> None:
    async def scenario() -> None:
        place = Place()
        place.profiles[ENTRY] = replace(profile(3), name="attic")
        assert place.directory.name_of(ENTRY) == f"attic ({short(ENTRY)})"
        assert place.directory.name_of(STAGE) == short(STAGE)

    run(scenario)


def test_a_ring_is_exact_if_all_its_nodes_are() -> None:
    whole, second, _ = several()

    async def scenario() -> None:
        place, (exact, other) = (
            Place(),
            (replace(profile(3), is_exact=each) for each in (True, False)),
        )
        rings, plan = place.directory, replace(ALONE, epoch=7)
        plan = replace(plan, stages=(replace(plan.stages[0], node=STAGE),))
        assert not rings.is_exact(RingEntry(ENTRY))
        place.machine.charter = whole
        place.profiles |= {ENTRY: other, STAGE: exact}
        place.states[STAGE] = replace(loaded(plan), group=second)
        place.links.by_peer[STAGE] = None
        place.serve()
        place.work()
        own, others = rings.serving_entries()
        assert (own.node, others.node) == (ENTRY, STAGE)
        assert [rings.is_exact(each) for each in (own, others)] == [False, True]
        nodes = map(RingEntry, (ENTRY, STAGE, C))
        assert [rings.is_exact(each) for each in nodes] == [False, True, False]
        assert not rings.is_exact(RingEntry(STAGE, FIRST_GROUP))
        place.profiles[ENTRY] = exact
        assert rings.is_exact(own, "tiny")

    run(scenario)


def test_an_entry_refuses_requests_for_a_model_that_its_ring_does_not_serve() -> None:
    whole, *_ = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        place.work()
        async with place.directory.backend(None, "tiny") as backend:
            assert isinstance(backend, RingBackend)
        with pytest.raises(LinkLost, match="does not serve `other` now"):
            async with place.directory.backend(STAGE, "other"):
                pass
        assert place.directory.reason("other") == "no node is free for it"
        *_, third = (group.id for group in groups_of(whole) if not group.replica)
        place.states[STAGE] = StateRecord(group=third)
        assert "its nodes load it" in place.directory.reason("other")
        refused = RingMembership(third, obstacle=REFUSES)
        place.states[STAGE] = StateRecord(further=(refused,))
        assert "no node is free for it" in place.directory.reason("other")

    run(scenario)


def test_a_request_waits_for_the_ring_of_this_node() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        asking = asyncio.ensure_future(ask(place))
        await asyncio.sleep(FORM_S / 2)
        assert not asking.done()
        place.work()
        await asking

    run(scenario)


def test_a_ring_that_is_not_ready_in_time_is_lost() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        with pytest.raises(LinkLost, match="was not ready within"):
            await ask(place)
        assert asyncio.get_running_loop().time() == FORM_S

    run(scenario)


@pytest.mark.parametrize("me", [STAGE, C])
def test_only_the_entry_has_a_backend(me: bytes) -> None:
    async def scenario() -> None:
        place = Place(me)
        with pytest.raises(LinkLost, match="not the entry"):
            await ask(place)
        place.serve()
        with pytest.raises(LinkLost, match="not the entry"):
            await ask(place)
        await asyncio.sleep(2 * CALM_S)
        assert place.told[-1].may_change

    run(scenario)


def test_the_plan_is_fixed_while_the_entry_serves_and_a_little_longer() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.work()
        for _ in range(2):
            async with place.directory.backend(STAGE) as backend:
                assert backend == RingBackend(
                    *cast("Any", ("entry", "worker", "text", PLAN, STAGE, place.directory.name_of))
                )
                await asyncio.sleep(CALM_S * 3)
                assert not place.told[-1].may_change
            await asyncio.sleep(CALM_S / 2)
            assert not place.told[-1].may_change
        await asyncio.sleep(CALM_S)
        assert place.told[-1].may_change
        assert [state.may_change for state in place.told].count(False) == 1

    run(scenario)


def test_the_models_that_were_asked_for_lately_are_published() -> None:
    whole, *_ = several()
    first, other = (each.key for each in whole.served)

    async def scenario() -> None:
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
        place.own.publish()
        assert used(place) == ()  # a mesh of one model does not tell

    run(scenario)


def test_a_model_is_used_while_answers_are_in_progress_or_awaited() -> None:
    whole, *_ = several()
    first, other = (each.key for each in whole.served)

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        place.work()
        async with place.directory.backend(STAGE, "tiny"):
            await asyncio.sleep(200)
            assert used(place) == (first,)
        await asyncio.sleep(59)
        assert used(place) == (first,)
        await asyncio.sleep(2)
        assert used(place) == ()

        waiting = asyncio.ensure_future(place.directory.entries("other"))
        await asyncio.sleep(200)
        assert used(place) == (other,)
        waiting.cancel()
        await asyncio.sleep(61)
        assert used(place) == ()

        with place.directory.using("other"):  # while a provider answers
            assert used(place) == (other,)

    run(scenario)


def test_a_node_that_claims_to_serve_alone_takes_no_requests_from_a_ring_of_others() -> None:
    whole, second, _ = several()
    span = ALONE.stages[0].span

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.alive.update({C, D})
        stages = PlanStage(STAGE, Span(0, 1)), PlanStage(C, Span(1, span.stop))
        plan = replace(ALONE, epoch=7, stages=stages)
        claimed = replace(ALONE, epoch=8, stages=(PlanStage(D, span),))
        for node, followed in ((STAGE, plan), (C, plan), (D, claimed)):
            place.states[node] = replace(loaded(followed), group=second)

        assert place.directory.plan_of(second) == plan

    run(scenario)


def test_a_node_in_two_rings_serves_requests_in_both() -> None:
    whole, *_ = several()
    *_, third = (group.id for group in groups_of(whole) if not group.replica)

    async def scenario() -> None:
        place = Place()
        further, runtime = place.serve_two(third)
        other = runtime.plan
        place.states[ENTRY] = place.told[-1]
        assert place.directory.plan_of(third) == other
        assert (
            place.directory.reason("other") == "1 of 1 nodes have loaded their layers and connect"
        )
        until = [each.loads_until for each in place.own.members]
        assert place.directory.loads_until == max(until) > 0
        further.model = cast("Any", SimpleNamespace(worker="worker", text=text, runners={1}))
        runtime.entry = cast("Any", "entry")
        further.at_work()
        assert await place.directory.entries("other") == [RingEntry(ENTRY, third)]
        async with place.directory.backend(None, "other") as backend:
            assert isinstance(backend, RingBackend)
            assert not place.told[-1].further[0].may_change
            assert place.told[-1].may_change

    run(scenario)


def test_a_node_in_two_rings_of_a_model_answers_in_the_one_whose_entry_it_is() -> None:
    whole, second, _ = several()

    async def scenario() -> None:
        place, other = Place(), replace(ALONE.stages[0], node=STAGE)
        place.machine.charter = whole
        place.serve(replace(ALONE, epoch=9, stages=(other,)))
        further = place.own.begin_further(second, lambda: "")
        runtime = place.fake_runtime(ALONE)
        runtime.entry = cast("Any", "entry")
        further.runtime = cast("Any", runtime)
        further.model = cast("Any", SimpleNamespace(worker="worker", text=text, runners={1}))
        place.own.publish()

        assert place.directory.serving_entries("tiny") == [RingEntry(ENTRY, second)]
        async with place.directory.backend(None, "tiny") as backend:
            assert isinstance(backend, RingBackend)
            assert not place.told[-1].further[0].may_change
            assert place.told[-1].may_change

    run(scenario)


def test_a_request_names_which_ring_of_a_model_an_entry_of_two_answers_in() -> None:
    whole, second, third = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve(ALONE)
        place.work("entry of the first")
        further = place.own.begin_further(second, lambda: "")
        runtime = place.fake_runtime(replace(ALONE, epoch=7))
        runtime.entry = cast("Any", "entry of the second")
        further.runtime = cast("Any", runtime)
        further.model = cast("Any", SimpleNamespace(worker="worker", text=text, runners={1}))
        place.own.publish()
        rings = [RingEntry(ENTRY, each) for each in (FIRST_GROUP, second)]
        assert place.directory.serving_entries("tiny") == rings
        plans = [place.directory.ring_at(each, "tiny") for each in rings]
        assert [ring and ring[1].epoch for ring in plans] == [ALONE.epoch, 7]

        for group, name, may_change in (
            (None, "first", [False, True]),
            (FIRST_GROUP, "first", [False, True]),
            (second, "second", [True, False]),
        ):
            async with place.directory.backend(STAGE, "tiny", group) as backend:
                assert isinstance(backend, RingBackend)
                assert cast("Any", backend.entry) == f"entry of the {name}"
                told = place.told[-1]
                assert [told.may_change, told.further[0].may_change] == may_change
            await asyncio.sleep(2 * CALM_S)

        del place.own.further[second]
        unknown = GroupId(b"?" * 9)
        for group, message in (
            (second, "This node does not serve replica 2 of `tiny` now"),
            (third, f"`tiny` has no ring `{third.hex()}` now"),
            (unknown, f"`tiny` has no ring `{unknown.hex()}` now"),
        ):
            with pytest.raises(LinkLost) as refused:
                async with place.directory.backend(STAGE, "tiny", group):
                    pass
            assert (str(refused.value), bool(refused.value.hint)) == (message, True)
        with pytest.raises(LinkLost, match="`other` has no ring `first` now"):
            async with place.directory.backend(STAGE, "other", FIRST_GROUP):
                pass

    run(scenario)


def test_the_time_of_a_load_on_request_tells_that_of_the_next_one() -> None:
    whole, *_ = several()
    *_, third = (group.id for group in groups_of(whole) if not group.replica)
    plan = replace(ALONE, epoch=7, model="other", stages=(PlanStage(STAGE, Span(0, 4)),))
    first, second = PlanStage(STAGE, Span(0, 2)), PlanStage(ENTRY, Span(2, 4))
    halves = replace(plan, epoch=8, stages=(first, second))

    async def scenario() -> None:
        place = Place()
        directory, place.machine.charter = place.directory, whole
        watching = asyncio.ensure_future(directory.watch_loads())
        await want(place, "other")
        await asyncio.sleep(29)
        assert directory.retry_s("other", 30) == 30  # nothing is known: as long again
        place.states[STAGE] = replace(loaded(plan), group=third, is_loaded=False)
        place.own.publish()
        await want(place, "other")
        await asyncio.sleep(29)
        place.links.by_peer[STAGE] = None
        place.states[STAGE] = replace(loaded(plan), group=third)
        place.own.publish()
        await asyncio.sleep(1)
        del place.states[STAGE]
        await want(place, "other")
        await asyncio.sleep(9)
        assert directory.retry_s("other", 10) == 10  # there is no plan yet
        place.states[STAGE] = replace(loaded(plan), group=third, is_loaded=False)
        assert directory.retry_s("other", 10) == 30
        for node in (STAGE, ENTRY):
            place.states[node] = replace(loaded(halves), group=third, is_loaded=node == ENTRY)
        assert directory.retry_s("other", 10) == 15
        assert directory.retry_s("tiny", 10) == 1  # nobody waits for it
        place.machine.charter = None
        assert directory.retry_s("", 10) == 10
        place.own.publish()
        await asyncio.sleep(1)
        assert directory._loads.awaited == ()
        watching.cancel()

    run(scenario)


def test_a_wait_that_was_given_up_is_not_the_beginning_of_a_later_one() -> None:
    whole, *_ = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        watching = asyncio.ensure_future(place.directory.watch_loads())
        await want(place, "other")
        await asyncio.sleep(200)
        await want(place, "other")
        await asyncio.sleep(9)
        assert place.directory.retry_s("other", 10) == 10
        watching.cancel()

    run(scenario)


def test_a_request_waits_for_a_ring_only_while_none_serves() -> None:
    whole, *_ = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        assert place.directory.awaited("other") == (
            "there is no ring of `other` yet: no node is free for it"
        )
        assert "nodes have loaded their layers" in place.directory.awaited("tiny")
        place.work()
        assert place.directory.awaited("tiny") == ""
        place.machine.charter = None
        place.serve(None)
        assert place.directory.awaited() == "there is no ring yet: nobody"

    run(scenario)
