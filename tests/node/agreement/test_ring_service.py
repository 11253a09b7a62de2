"""When a node moves to another ring, and what it says of all rings."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import ModelError, ModelMissing, OutOfMemory
from meshllm.names import FIRST_GROUP, GroupId, ModelKey
from meshllm.node.agreement.further_rings import MOVE_S
from meshllm.node.agreement.offer import NodeOffer
from meshllm.node.agreement.plan_follower import SETTLE_S
from meshllm.node.agreement.ring_server import NodeParts
from meshllm.node.agreement.ring_service import (
    FIRST_OPEN_S,
    LAST_OPEN_S,
    LAST_RETRY_S,
    RETRY_S,
    RingService,
)
from meshllm.node.training import TrainingServer
from meshllm.protocol.agreement.groups import UNASSIGNED, NodeGroups
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import Profile
from meshllm.testing.clock import run_virtual
from tests.builders.offers import A
from tests.builders.ring_places import ENTRY, PLAN, Place, call_later, several
from tests.builders.snapshots import profile

WHOLE, SECOND, THIRD = several()
FIRST, OTHER = (each.key for each in WHOLE.served)
SHORT_S = 3 * SETTLE_S


class Moving:
    """A node in the first of several rings, with fakes around it."""

    def __init__(self) -> None:
        self.place = Place()
        self.place.links.dial_weights = None
        machine = self.place.machine
        machine.charter, machine.author, machine.removals = WHOLE, A, {}
        self.amended: list[GroupId] = []
        self.models: list[tuple[ModelKey, ...]] = []
        profile = SimpleNamespace(models=(FIRST, OTHER))
        offer = SimpleNamespace(
            hang="",
            profile=profile,
            publish=lambda *, models: self.models.append(models),
            end=lambda: None,
        )
        parts = SimpleNamespace(
            machine=machine,
            links=self.place.links,
            state=self.place.own,
            offer=offer,
            editor=SimpleNamespace(
                check_layers=lambda: None,
                amend_nodes=lambda: self.amended.append(self.group),
            ),
            prepared=None,
            is_founder=True,
            off_loop=None,
            call_later=call_later,
            training=TrainingServer(call_later),
        )
        self.service = RingService(cast("NodeParts", parts))

    @property
    def group(self) -> GroupId:
        return self.place.member.group

    @property
    def moves(self) -> bool:
        return self.service._moving.is_set()

    def want(self, first: bytes) -> None:
        """Let the records name a first ring for this node."""
        parts = {ENTRY: NodeGroups(cast("Any", first))}
        self.service.first.planner.parts = cast("Any", parts)
        self.service._regrouped()

    def work(self, sessions: int) -> None:
        self.place.member.runtime = cast("Any", self.place.fake_runtime(PLAN, sessions))


def run(scenario: Callable[[Moving], Coroutine[Any, Any, None]]) -> None:
    run_virtual(scenario(Moving()))


def test_a_node_moves_once_another_ring_has_been_wanted_for_a_while() -> None:
    async def scenario(node: Moving) -> None:
        node.want(SECOND)
        node.want(FIRST_GROUP)  # at once
        await asyncio.sleep(SHORT_S)
        assert not node.moves
        node.want(SECOND)
        await asyncio.sleep(SHORT_S)
        assert node.moves

    run(scenario)


def test_a_ring_that_is_wanted_again_has_to_be_wanted_for_a_while_and_is_moved_to_once() -> None:
    async def scenario(node: Moving) -> None:
        moves = list[bool]()
        node.want(SECOND)
        await asyncio.sleep(SETTLE_S - 0.1)
        node.want(FIRST_GROUP)
        node.want(SECOND)
        await asyncio.sleep(SETTLE_S - 0.1)
        moves.append(node.moves)  # the time of the first wish is over
        await asyncio.sleep(0.2)
        moves.append(node.moves)
        node.service._regroup(SECOND)
        await asyncio.sleep(2 * MOVE_S)
        assert [*moves, node.moves] == [False, True, False]

    run(scenario)


def test_a_ring_that_is_wanted_again_during_sessions_is_moved_to_once() -> None:
    async def scenario(node: Moving) -> None:
        node.work(sessions=1)
        node.want(SECOND)
        await asyncio.sleep(SHORT_S + SETTLE_S / 2)  # between two looks at the sessions
        node.want(FIRST_GROUP)
        node.want(SECOND)
        await asyncio.sleep(SHORT_S)
        moves = [node.moves]
        node.work(sessions=0)
        async with asyncio.timeout(SHORT_S):
            while not node.service._moving.is_set():  # noqa: ASYNC110  # no time passes
                await asyncio.sleep(SETTLE_S / 10)
        node.service._regroup(SECOND)
        await asyncio.sleep(2 * MOVE_S)
        assert [*moves, node.moves] == [False, False]

    run(scenario)


def test_the_nodes_that_the_options_name_are_published_before_a_ring_has_been_assigned() -> None:
    async def scenario(node: Moving) -> None:
        running = asyncio.ensure_future(node.service.run())
        await asyncio.sleep(SHORT_S)
        assert node.amended == []
        node.service._charter_known.set()
        await asyncio.sleep(SHORT_S)
        assert node.amended == [UNASSIGNED]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(scenario)


def test_a_move_waits_for_sessions_but_not_for_long() -> None:
    async def scenario(node: Moving) -> None:
        node.work(sessions=1)
        node.want(SECOND)
        await asyncio.sleep(MOVE_S - 1)
        assert not node.moves
        await asyncio.sleep(1 + SHORT_S)
        assert node.moves

    run(scenario)


def test_a_move_waits_for_the_end_of_the_further_ring_that_is_to_be_the_first() -> None:
    async def scenario(node: Moving) -> None:
        rings = cast("dict[bytes, Any]", node.service.further.rings)
        rings[SECOND] = SimpleNamespace(end=lambda _: False, latest=None)
        node.want(SECOND)
        await asyncio.sleep(2 * MOVE_S)
        assert not node.moves
        del rings[SECOND]
        await asyncio.sleep(SHORT_S)
        assert node.moves

    run(scenario)


@pytest.mark.parametrize("state", ["is_leaving", "provider"])
def test_a_node_that_leaves_or_provides_does_not_move(state: str) -> None:
    async def scenario(node: Moving) -> None:
        setattr(node.place.own, state, True)
        node.want(SECOND)
        await asyncio.sleep(2 * MOVE_S)
        assert not node.moves

    run(scenario)


def test_a_model_that_cannot_be_served_is_offered_again_later_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delays: list[float] = []

    async def scenario(node: Moving) -> None:
        parts = cast("Any", node.service._parts)
        monkeypatch.setattr(parts, "call_later", lambda delay_s, *_: delays.append(delay_s))
        for _ in range(7):
            node.service._give_up(OTHER, ModelError("the disk is full"))
        assert node.models == [(FIRST,)] * 7
        assert delays == [min(RETRY_S * 2**number, LAST_RETRY_S) for number in range(7)]
        node.work(sessions=0)
        node.service._give_up(FIRST, ModelError("a part was deleted"))
        node.service._give_up(FIRST, ModelError("a part was deleted"))
        assert delays[7:] == [RETRY_S] * 2  # it has served it each time

    run(scenario)


def test_a_node_begins_again_in_the_only_ring_that_it_can_serve_in() -> None:
    async def scenario(node: Moving) -> None:
        begun = list[GroupId]()

        async def serving(_: object) -> None:
            begun.append(node.group)
            if node.group == SECOND and begun.count(SECOND) == 1:
                raise ModelError("the disk is full")

        first = cast("Any", node.service.first)
        first.serve = serving
        node.service._charter_known.set()
        running = asyncio.ensure_future(node.service.run())
        node.want(SECOND)
        await asyncio.sleep(SHORT_S)
        assert node.group == UNASSIGNED
        node.want(UNASSIGNED)  # it says that it cannot hold the model
        await asyncio.sleep(RETRY_S + SHORT_S)
        assert node.service._may_hold(WHOLE, (FIRST, OTHER)) == (FIRST, OTHER)
        node.want(SECOND)
        await asyncio.sleep(SHORT_S)
        assert begun == [UNASSIGNED, SECOND, SECOND]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run(scenario)


def test_a_node_that_lacks_memory_for_the_only_model_says_so_and_tries_again_later_and_later() -> (
    None
):
    lack = OutOfMemory("Not enough memory to prepare `it`", hint="free some", needed_bytes=9)
    damage = ModelError("it is damaged")
    failures = [*(6 * [lack]), None, *(2 * [lack]), damage]
    begun = list[tuple[float, str]]()

    async def scenario(node: Moving) -> None:
        loop, parts = asyncio.get_running_loop(), cast("Any", node.service._parts)
        parts.offer.profile = SimpleNamespace(models=())
        parts.machine.charter = None
        parts.editor.publish = lambda charter: setattr(parts.machine, "charter", charter)

        async def open_model(*_: object) -> tuple[object, Charter]:
            begun.append((loop.time(), node.place.member.reason))
            if failure := failures.pop(0):
                raise failure
            return "model", WHOLE

        parts.prepared = SimpleNamespace(open_founding_model=open_model)
        cast("Any", node.service.first).serve = open_model
        running = asyncio.ensure_future(node.service.run())
        await asyncio.sleep(FIRST_OPEN_S / 2)
        told = node.place.member.trouble
        assert node.place.member.reason == str(lack)
        assert isinstance(told, OutOfMemory)
        assert (told.hint, told.needed_bytes) == (lack.hint, lack.needed_bytes)
        assert told.__traceback__ is None  # its frames would keep memory
        await asyncio.wait({running})
        assert running.exception() is damage

    run(scenario)
    times = [time for time, _ in begun]
    pauses = [late - early for early, late in pairwise(times)]
    doubled = [min(FIRST_OPEN_S * 2**number, LAST_OPEN_S) for number in range(6)]
    assert pauses == pytest.approx([*doubled, 0.0, *doubled[:2]])
    assert {reason for _, reason in begun} == {"nobody"}  # it says so only while it waits


def test_a_model_that_no_node_could_send_is_offered_again_later() -> None:
    async def scenario(node: Moving) -> None:
        node.service._give_up(OTHER, ModelMissing("it is not here"))
        await asyncio.sleep(RETRY_S - 1)
        assert node.service._may_hold(WHOLE, (FIRST, OTHER)) == (FIRST,)
        news = node.place.own.news
        await asyncio.sleep(2)
        assert news.is_set()  # the survey looks again
        assert node.service._may_hold(WHOLE, (FIRST, OTHER)) == (FIRST, OTHER)
        node.service._give_up(OTHER, ModelMissing("it is not here still"))
        await asyncio.sleep(RETRY_S + 1)  # no longer than before
        assert node.service._may_hold(WHOLE, (FIRST, OTHER)) == (FIRST, OTHER)

    run(scenario)


def test_a_model_is_offered_again_if_the_mesh_serves_nothing_else_by_then() -> None:
    async def scenario(node: Moving) -> None:
        held = list[tuple[ModelKey, ...]]()

        async def here(_: object) -> tuple[ModelKey, ...]:
            return (FIRST,)

        parts = cast("Any", node.service._parts)
        parts.prepared = SimpleNamespace(held=here, described=[])
        parts.offer.hold = held.append
        parts.offer.profile = SimpleNamespace(models=(), memory_bytes=1)  # it gave up all it had
        node.service._give_up(FIRST, ModelError("the disk is full"))
        node.place.machine.charter = replace(WHOLE, models=(), replicas=1)
        surveying = asyncio.ensure_future(node.service.survey())
        await asyncio.sleep(RETRY_S - 1)
        assert held == []
        await asyncio.sleep(2)
        assert held == [(FIRST,)]
        surveying.cancel()
        await asyncio.gather(surveying, return_exceptions=True)

    run(scenario)


def test_a_model_that_was_described_again_is_offered() -> None:
    async def scenario(node: Moving) -> None:
        held, described = list[tuple[ModelKey, ...]](), list[str]()

        async def here(_: object) -> tuple[ModelKey, ...]:
            return (FIRST, OTHER) if described else (FIRST,)

        parts = cast("Any", node.service._parts)
        parts.prepared = SimpleNamespace(held=here, described=described)
        parts.offer.hold = held.append
        parts.offer.profile = SimpleNamespace(models=(FIRST,), memory_bytes=1)
        parts.has_own_model = True
        surveying = asyncio.ensure_future(node.service.survey())
        await asyncio.sleep(1)
        assert held == []
        described.append("other")
        node.place.own.publish()
        await asyncio.sleep(1)
        assert held[-1] == (FIRST, OTHER)
        surveying.cancel()
        await asyncio.gather(surveying, return_exceptions=True)

    run(scenario)


def test_an_offer_that_is_made_while_the_memory_is_looked_up_stays() -> None:
    async def scenario(node: Moving) -> None:
        measured, told = profile(4), list[Profile]()
        bare = replace(measured, weights=(), layer_s=(), memory_bytes=0)
        offer = NodeOffer(bare, told.append, node.place.member, call_later)

        async def here(_: object) -> tuple[ModelKey, ...]:
            return (FIRST, OTHER)

        async def room(found: Profile) -> Profile:
            offer.begin(measured)
            return replace(found, memory_bytes=1)

        parts = cast("Any", node.service._parts)
        parts.prepared, parts.offer = SimpleNamespace(held=here, room=room, described=[]), offer
        surveying = asyncio.ensure_future(node.service.survey())
        await asyncio.sleep(1)
        assert told[-1] == offer.profile == replace(measured, models=(FIRST, OTHER))
        surveying.cancel()
        await asyncio.gather(surveying, return_exceptions=True)

    run(scenario)


def test_all_rings_of_the_mesh_are_shown_with_those_of_this_node() -> None:
    async def scenario(node: Moving) -> None:
        node.work(sessions=0)
        node.service.first.planner.lacks = {SECOND: 7}
        rings = node.service.rings(node.place.directory)
        assert [ring.group.id for ring in rings] == [FIRST_GROUP, THIRD, SECOND]
        assert [ring.plan for ring in rings] == [PLAN, None, None]
        assert [ring.own is not None for ring in rings] == [True, False, False]
        assert [ring.lacks_bytes for ring in rings] == [0, 0, 7]

    run(scenario)
