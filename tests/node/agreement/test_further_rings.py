"""When a node begins, resizes and ends its further rings."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshllm.errors import ModelError
from meshllm.names import GroupId, ModelKey
from meshllm.node.agreement import further_rings
from meshllm.node.agreement.further_rings import DRAIN_S, MOVE_S, SecondaryRing, SecondaryRings
from meshllm.node.agreement.offer import FIRST_RETRY_S, LAST_RETRY_S
from meshllm.node.agreement.plan_follower import SETTLE_S
from meshllm.node.timer import loop_time
from meshllm.protocol.membership.records import MAX_RINGS
from meshllm.testing.clock import run_virtual
from tests.builders.ring_places import call_later

ONE, OTHER = GroupId(b"1" * 9), GroupId(b"2" * 9)
KEY = ModelKey(b"k" * 32)
SHORT_S = 3 * SETTLE_S


class Server:
    """Stands in for the server of a ring that serves until it is cancelled, or cannot."""

    def __init__(self, memory: int) -> None:
        self.memory, self.sessions = memory, 0
        self.error: ModelError | None = None
        self.fails = asyncio.Event()
        self.member = SimpleNamespace(
            charter=SimpleNamespace(key=KEY), end=lambda _: None, runtime=None
        )
        self.offer = SimpleNamespace(resize=lambda _: None, close=lambda: None)
        self.planner = SimpleNamespace(run=self._run, invalidate=lambda: None)
        self.ended: list[GroupId] = []

    async def serve(self) -> None:
        if self.error is not None:
            await asyncio.sleep(SETTLE_S)
            raise self.error
        self.member.runtime = "serves"
        await self.fails.wait()
        raise ModelError("a part was deleted")

    def end(self, group: GroupId) -> None:
        self.ended.append(group)

    async def _run(self) -> None:
        await asyncio.Event().wait()


class Node:
    """The further rings of a node, with servers that compute nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Server] = []
        self.begun_at: list[float] = []
        self.most = 0  # further rings in the state at a time
        self.error: ModelError | None = None
        self.failed: list[tuple[ModelKey, ModelError]] = []
        self.shares: list[tuple[GroupId, Any]] = []
        self.members: list[Any] = []  # this node in other rings
        self.wanted: dict[GroupId, int] | None = None  # by the records, from now on
        self.refused: set[GroupId] = set()
        self.published: list[set[GroupId]] = []  # what it refuses, each time
        further = dict[GroupId, Any]()
        self.state = SimpleNamespace(
            is_leaving=False, further=further, begin_further=self._member, members=self.members,
            end_further=further.pop,
            refused=self.refused, publish=lambda: self.published.append(set(self.refused)),
        )  # fmt: skip
        parts = SimpleNamespace(
            state=self.state,
            offer=SimpleNamespace(profile=None, share=lambda *share: self.shares.append(share)),
            call_later=call_later,
            spawn=lambda part: asyncio.ensure_future(part()),
            changed=lambda: asyncio.get_running_loop().call_soon(self._changed),
        )
        monkeypatch.setattr(further_rings, "replace", lambda profile, **_: profile)
        monkeypatch.setattr(further_rings, "NodeOffer", lambda *_: None)
        monkeypatch.setattr(further_rings, "RingServer", self._server)
        self.rings = SecondaryRings(cast("Any", parts), lambda *why: self.failed.append(why))

    @property
    def running(self) -> dict[GroupId, int | None]:
        return {group: each.server.memory for group, each in self.rings.rings.items()}

    def _changed(self) -> None:
        if self.wanted is not None:
            self.rings.want(self.wanted)

    def _member(self, group: GroupId, _: Callable[[], str]) -> None:
        self.state.further[group] = None
        self.most = max(self.most, len(self.state.further))

    def _server(self, *_: object, memory: int) -> Server:
        self.begun.append(Server(memory))
        self.begun_at.append(loop_time())
        self.begun[-1].error = self.error
        return self.begun[-1]


Run = Callable[[Callable[[Node], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return lambda scenario: run_virtual(scenario(Node(monkeypatch)))


def test_a_ring_begins_once_it_has_been_wanted_for_a_while(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.rings.want({ONE: 5})
        node.rings.want({})  # at once
        await asyncio.sleep(SHORT_S)
        assert node.running == {}
        node.rings.want({ONE: 5, OTHER: 7})
        await asyncio.sleep(SHORT_S)
        assert node.running == {ONE: 5, OTHER: 7}

    run(scenario)


def test_a_ring_is_resized_and_begun_once(run: Run) -> None:
    async def scenario(node: Node) -> None:
        for memory in (5, 8):
            node.rings.want({ONE: memory})
            await asyncio.sleep(SHORT_S)
        assert node.running == {ONE: 8}
        assert len(node.begun) == 1

    run(scenario)


def test_a_new_ring_waits_for_the_sessions_of_one_that_ends(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.rings.want({ONE: 5})
        await asyncio.sleep(SHORT_S)
        node.begun[0].sessions = 1
        node.wanted = {OTHER: 5}
        node.rings.want(node.wanted)
        await asyncio.sleep(MOVE_S / 2)
        assert node.running == {ONE: 5}
        node.begun[0].sessions = 0
        await asyncio.sleep(SHORT_S)
        assert node.running == {OTHER: 5}
        assert node.begun[0].ended == [ONE]
        assert node.shares == [(ONE, None)]
        assert ONE not in node.state.further

    run(scenario)


@pytest.mark.parametrize("is_next", [False, True])
def test_a_ring_with_sessions_ends_late_and_later_if_it_is_to_be_the_first(
    run: Run, *, is_next: bool
) -> None:
    async def scenario(node: Node) -> None:
        node.rings.want({ONE: 5})
        await asyncio.sleep(SHORT_S)
        node.begun[0].sessions = 1
        node.rings.next_first = ONE if is_next else None
        node.rings.want({})
        await asyncio.sleep(MOVE_S + SHORT_S)
        assert node.running == ({ONE: 5} if is_next else {})
        await asyncio.sleep(DRAIN_S)
        assert node.running == {}

    run(scenario)


def test_a_model_that_cannot_be_served_is_given_up(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.error = ModelError("damaged")
        node.rings.want({ONE: 5})
        await asyncio.sleep(SHORT_S)
        assert node.failed == [(KEY, node.error)]
        assert node.running == {}
        node.error = None
        node.rings.want({ONE: 5})  # looked at again
        await asyncio.sleep(SHORT_S)
        assert node.running == {ONE: 5}

    run(scenario)


def test_a_ring_that_cannot_be_served_leaves_another_one_of_its_model(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.members.append(SimpleNamespace(group=OTHER, charter=SimpleNamespace(key=KEY)))
        node.error = ModelError("damaged")
        node.rings.want({ONE: 5})
        await asyncio.sleep(SHORT_S)
        assert (node.failed, node.running) == ([], {})
        node.rings.want({ONE: 5})  # looked at again
        await asyncio.sleep(SHORT_S)
        assert len(node.begun) == 1

    run(scenario)


def test_a_ring_that_could_not_be_served_is_tried_again_with_backoff(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.members.append(SimpleNamespace(group=OTHER, charter=SimpleNamespace(key=KEY)))
        node.error = ModelError("the disk is full")
        node.wanted = {ONE: 5}
        node.rings.want({ONE: 5})
        await asyncio.sleep(3 * LAST_RETRY_S)
        first, second, third, *_, last_but_one, last = node.begun_at
        assert third - second == pytest.approx(second - first + FIRST_RETRY_S)
        assert FIRST_RETRY_S <= second - first < FIRST_RETRY_S + SHORT_S
        assert LAST_RETRY_S <= last - last_but_one < LAST_RETRY_S + SHORT_S
        node.error = None
        await asyncio.sleep(LAST_RETRY_S + SHORT_S)
        assert node.running == {ONE: 5}
        assert node.failed == []
        assert node.refused == set()
        assert node.published == [set()] * (len(node.begun_at) - 1)

    run(scenario)


@pytest.mark.parametrize("ends", ["not wanted", "failed"])
def test_the_backoff_begins_again_after_a_ring_that_could_be_served(run: Run, ends: str) -> None:
    async def scenario(node: Node) -> None:
        node.members.append(SimpleNamespace(group=OTHER, charter=SimpleNamespace(key=KEY)))
        node.error = error = ModelError("the disk is full")
        node.wanted = {ONE: 5}
        node.rings.want({ONE: 5})
        await asyncio.sleep(LAST_RETRY_S)
        node.error = None
        await asyncio.sleep(LAST_RETRY_S + SHORT_S)
        assert node.running == {ONE: 5}

        node.error = error
        if ends == "failed":
            node.begun[-1].fails.set()
        else:
            node.wanted = {}
            node.rings.want({})
            await asyncio.sleep(SHORT_S)
            node.wanted = {ONE: 5}
            node.rings.want({ONE: 5})
        await asyncio.sleep(SHORT_S)
        assert node.refused == {ONE}
        tries = len(node.begun)
        await asyncio.sleep(FIRST_RETRY_S + SHORT_S)
        assert len(node.begun) == tries + 1

    run(scenario)


def test_a_ring_that_cannot_be_served_is_refused_until_the_backoff_is_over(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.members.append(SimpleNamespace(group=OTHER, charter=SimpleNamespace(key=KEY)))
        node.error = ModelError("the memory does not suffice")
        node.rings.want({ONE: 5})
        await asyncio.sleep(FIRST_RETRY_S)
        assert node.refused == {ONE}
        await asyncio.sleep(SHORT_S)
        assert node.refused == set()

    run(scenario)


def test_a_node_in_all_rings_that_it_may_have_changes_one(run: Run) -> None:
    async def scenario(node: Node) -> None:
        groups = [GroupId(bytes([number]) * 9) for number in range(MAX_RINGS)]
        for begin in (0, 1):
            node.wanted = dict.fromkeys(groups[begin : begin + MAX_RINGS - 1], 5)
            node.rings.want(node.wanted)
            await asyncio.sleep(SHORT_S)
        assert [*node.rings.rings] == groups[1:]
        assert node.most == MAX_RINGS - 1

    run(scenario)


def test_rings_begin_in_the_order_of_the_records(run: Run) -> None:
    async def scenario(node: Node) -> None:
        wanted = {GroupId(bytes([number]) * 9): number for number in range(1, 9)}
        node.rings.want(wanted)
        await asyncio.sleep(SHORT_S)
        assert [*node.rings.rings] == [*wanted]

    run(scenario)


def test_a_node_that_leaves_begins_no_ring(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.rings.want({ONE: 5})
        node.state.is_leaving = True
        await asyncio.sleep(SHORT_S)
        assert node.running == {}

    run(scenario)


def test_a_ring_is_ended_once(run: Run) -> None:
    async def scenario(node: Node) -> None:
        node.rings.want({ONE: 5})
        await asyncio.sleep(SHORT_S)
        ring: SecondaryRing = node.rings.rings[ONE]
        ring.end(0.0)
        ring.end(0.0)
        await asyncio.sleep(SETTLE_S)
        assert node.begun[0].ended == [ONE]

    run(scenario)
