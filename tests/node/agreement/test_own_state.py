"""What a node publishes of itself and of its rings."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.names import FIRST_GROUP, GroupId, LossCause, NodeId
from meshllm.node.agreement.load_watch import LOAD_S
from meshllm.node.agreement.own_state import HANGS, trouble_of
from meshllm.node.provider import NO_ANSWER, STARTING
from meshllm.protocol.agreement.groups import groups_in, groups_of
from meshllm.protocol.membership.peer_limit import FAULTS_S, MAX_FAULTS
from meshllm.protocol.membership.records import Lifecycle, ModelOffer, StateRecord
from meshllm.testing.clock import run_virtual
from tests.builders.ring_places import (
    LATER,
    PLAN,
    STAGE,
    Place,
    several,
)
from tests.builders.snapshots import charter


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario())


def test_a_change_is_published_once() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.own.publish()
        place.member.loaded(True, None)
        place.member.loaded(True, None)
        assert [(state.lifecycle, state.is_loaded) for state in place.told] == [
            (Lifecycle.SERVING, False), (Lifecycle.SERVING, True),
        ]  # fmt: skip
        assert {state.followed for state in place.told} == {PLAN.encode()}
        assert place.own.sessions == 3

    run(scenario)


def test_a_leaving_node_says_so_until_it_has_left() -> None:
    async def scenario() -> None:
        place = Place()
        place.own.is_leaving = True
        place.own.publish()
        place.serve()
        place.own.has_left = True
        place.member.loaded(True, None)
        assert [state.lifecycle for state in place.told] == [Lifecycle.LEAVING] * 2

    run(scenario)


def test_the_plan_for_which_layers_are_loaded_in_advance_is_published() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.runtime.prepared = LATER
        place.member.at_work()
        place.runtime.prepared = None
        place.member.at_work()
        assert [state.prepared for state in place.told] == [b"", LATER.digest, b""]

    run(scenario)


def test_the_last_plan_is_published_while_there_is_none() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        place.serve(None)
        place.member.loaded(True, None)
        assert place.told[-1].followed == PLAN.encode()

    run(scenario)


def test_a_node_that_has_left_publishes_no_more() -> None:
    async def scenario() -> None:
        place = Place()
        place.own.has_left = True
        place.serve()
        assert place.told == []

    run(scenario)


def test_waiters_for_changes_are_woken() -> None:
    async def scenario() -> None:
        place = Place()
        async with aclosing(place.own.changes()) as changes:
            await anext(changes)
            waiting = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(1)
            assert not waiting.done()
            place.serve()
            await waiting
            place.own.publish()  # between two iterations
            await anext(changes)

    run(scenario)


def test_a_neighbour_with_several_faults_is_published_as_faulty_for_a_while() -> None:
    async def scenario() -> None:
        place = Place()
        place.serve()
        for _ in range(MAX_FAULTS):
            assert not place.told[-1].faulty
            await asyncio.sleep(1)
            place.member.faulty(NodeId(STAGE))
        assert place.told[-1].faulty == (STAGE,)
        await asyncio.sleep(FAULTS_S)
        assert not place.told[-1].faulty

    run(scenario)


def test_a_neighbour_that_sends_thousands_of_faults_is_logged_a_few_times(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduled = list[float]()

    async def scenario() -> None:
        place = Place()
        place.serve()
        later: Callable[..., None] = lambda delay_s, *_: scheduled.append(delay_s)  # noqa: E731
        monkeypatch.setattr(place.own, "_call_later", later)
        for _ in range(5000):
            place.member.faulty(NodeId(STAGE))

    with caplog.at_level("WARNING"):
        run(scenario)

    assert len(caplog.records) == len(scheduled) == MAX_FAULTS


def test_a_hang_is_published_as_an_obstacle() -> None:
    async def scenario() -> None:
        place = Place()
        for is_hung in (True, False):
            place.own.is_hung = is_hung
            place.own.publish()
            assert place.told[-1].obstacle == (HANGS if is_hung else "")

    run(scenario)


def test_a_provider_serves_while_its_engine_lists_models() -> None:
    async def scenario() -> None:
        place = Place()
        engine = SimpleNamespace(offers=(), trouble=STARTING, active=0)
        place.own.provider = cast("Any", engine)
        told = [(Lifecycle.JOIN, STARTING), (Lifecycle.SERVING, ""), (Lifecycle.JOIN, NO_ANSWER)]
        for _, engine.trouble in told:
            engine.offers = () if engine.trouble else (ModelOffer("fox"),)
            place.own.publish()
        assert [(each.lifecycle, trouble_of(each)) for each in place.told] == told
        assert [bool(each.offers) for each in place.told] == [False, True, False]
        assert all(each.obstacle.startswith("it provides whole models") for each in place.told)

    run(scenario)


def test_a_node_that_hangs_does_not_count_as_a_provider() -> None:
    assert trouble_of(StateRecord(obstacle=HANGS)) is None


def test_a_node_in_two_rings_serves_and_publishes_both() -> None:
    whole, *_ = several()
    *_, third = (group.id for group in groups_of(whole) if not group.replica)

    async def scenario() -> None:
        place = Place()
        further, runtime = place.serve_two(third)
        other = runtime.plan

        state = place.told[-1]
        assert (state.group, state.followed) == (FIRST_GROUP, PLAN.encode())
        assert [(each.group, each.followed) for each in state.further] == [(third, other.encode())]
        assert state.further[0].is_loaded
        assert place.own.sessions == 5
        with further.hold.holding():
            assert not place.told[-1].further[0].may_change
            assert place.told[-1].may_change
        place.own.is_hung = True
        place.own.publish()
        assert place.told[-1].further[0].obstacle == HANGS
        del place.own.further[third]
        place.own.publish()
        assert place.told[-1].further == ()

    run(scenario)


def test_a_node_that_hangs_takes_part_in_no_ring_that_it_refused() -> None:
    whole, *_ = several()
    *_, third = (group.id for group in groups_of(whole) if not group.replica)

    async def scenario() -> None:
        place = Place()
        place.own.refused.add(third)
        for place.own.is_hung in (False, True):
            place.own.publish()
            state = place.told[-1]
            assert state.obstacle == (HANGS if place.own.is_hung else "")
            assert groups_in(state) == (FIRST_GROUP,)
            assert [each.group for each in state.further] == [third]

    run(scenario)


def test_a_node_that_moves_publishes_its_group_and_keeps_the_epoch() -> None:
    whole, _, third = several()

    async def scenario() -> None:
        place = Place()
        place.machine.charter = whole
        place.serve()
        released: list[bool] = []
        model = SimpleNamespace(release=lambda: released.append(True))
        place.member.model = cast("Any", model)
        place.member.end(third)
        state = place.told[-1]
        assert (state.group, state.lifecycle, state.is_loaded) == (third, Lifecycle.JOIN, False)
        assert state.followed == PLAN.encode()
        assert released == [True]
        assert place.member.plan is None
        assert place.member.charter
        assert place.member.charter.shape.name == "other"

    run(scenario)


def test_a_node_that_does_not_load_in_time_is_published_as_faulty() -> None:
    async def scenario() -> None:
        place = Place()
        place.machine.charter = charter()
        place.serve()
        await asyncio.sleep(LOAD_S + 2)
        assert place.told[-1].faulty == (STAGE,)
        await asyncio.sleep(FAULTS_S)
        assert not place.told[-1].faulty

    run(scenario)


def test_what_a_further_ring_has_counted_stays_counted() -> None:
    async def scenario() -> None:
        own, group = Place().own, GroupId(b"1" * 9)
        ended = SimpleNamespace(recomputed=Counter({LossCause.NODE_LOST: 3}))
        own.further[group] = cast("Any", ended)
        before = own.recomputed

        own.end_further(group)

        assert own.recomputed == before == Counter({LossCause.NODE_LOST: 3})
        assert own.further == {}

    run(scenario)
