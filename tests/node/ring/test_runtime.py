"""Nodes that serve one plan after the other, over links that come and go."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from meshllm.errors import LinkLost, ModelError
from meshllm.model.shape import workspace_bytes
from meshllm.names import GroupId, SessionId
from meshllm.node.ring import runtime
from meshllm.node.ring.idle_links import IdleLink
from meshllm.node.ring.runtime import RECORD_PROPAGATION_S, RingRuntime
from meshllm.node.ring.shape import reserved_bytes
from meshllm.node.ring.span_loader import LoadedSpan, RankPart, SpanLoader
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.generation import GenerationRequest
from meshllm.node.session.stage import StageNode
from meshllm.protocol.planning.chunking import RankTimes, RingTimes, default_pace
from meshllm.protocol.planning.plan import LinkSpeed
from meshllm.protocol.ring import slowdown
from meshllm.protocol.ring.forming import Begin
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.codec import MAX_ROWS, encode
from meshllm.protocol.session.link import SILENCE
from meshllm.protocol.session.messages import (
    Data,
    DType,
    Fault,
    FaultCode,
    Flags,
    Forward,
    Heartbeat,
    Hello,
    Message,
)
from meshllm.protocol.session.stage import Compute
from meshllm.protocol.session.waiting import RowQueueLimits
from meshllm.protocol.trust.handshake import Features
from meshllm.request import Sampling
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Channel, Link
from tests.builders.offers import A, B, C, offer
from tests.builders.ring_world import (
    ALONE,
    BOTH,
    NAMES,
    Place,
    World,
    at_work,
    plan_of,
    tokens,
    until,
)


def test_two_nodes_write_what_one_writes(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            world.follow(ALONE)
            await until(lambda: at_work(a))
            alone = await tokens(a)
            world.follow(plan_of((A, "0:2"), (B, "2:6"), epoch=2))
            await until(lambda: at_work(a, b))
            assert await tokens(a) == alone
            assert (a.runtime.sessions, b.runtime.stage is not None) == (0, True)
            world.follow(None)
            await asyncio.sleep(1)
            assert not at_work(a)
            assert not at_work(b)
            assert a.told[-1] == (False, "")

    run_virtual(main())


@asynccontextmanager
async def serving_alone(world: World) -> AsyncIterator[tuple[Place, EntryNode]]:
    """Serve with a ring of one node; yield it and its entry."""
    async with world.serving(A) as (a,):
        world.follow(ALONE)
        await until(lambda: at_work(a))
        entry = a.runtime.entry
        assert entry is not None
        yield a, entry


def test_the_prefill_pace_follows_the_latest_times(world: World) -> None:
    async def main() -> None:
        async with serving_alone(world) as (a, entry):
            before = entry.pace(2000, 0)
            a.known = RingTimes((RankTimes(offer(A, 6, ms=100), 6.0, LinkSpeed(0.0)),), 0.0, 8)
            assert before == default_pace(2000, 1)
            assert entry.pace(2000, 1).chunk == a.known.best_pace(2000, 1).chunk != before.chunk

    run_virtual(main())


def test_steps_of_answers_show_how_fast_the_layers_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MIN_S", "WINDOW_S"):
        monkeypatch.setattr(slowdown, name, 0.0)
    monkeypatch.setattr(slowdown, "WINDOW_STEPS", 1)

    async def main() -> None:
        async with world.serving(A) as (a,):
            offered = replace(offer(A, 6), layer_s=((1, 1e-9),))
            a.known = RingTimes((RankTimes(offered, 6.0, LinkSpeed(0.0)),), 0.0, 8)
            world.follow(ALONE)
            await until(lambda: at_work(a))
            while (layer_s := a.runtime.take_layer_s()) is None:
                await tokens(a)
            assert layer_s > 1e-9

    run_virtual(main())


def test_a_broken_ring_forms_again(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            world.follow(BOTH)
            for count in (2, 4, 6):
                await until(lambda: at_work(a, b))
                text = await tokens(a)
                assert len(text) == 6
                assert len(world.links) >= count
                await world.links[-1].close()
                await asyncio.sleep(0.2)

    run_virtual(main())


@asynccontextmanager
async def serving_both(world: World) -> AsyncIterator[tuple[Place, Place, EntryNode, StageNode]]:
    """Serve with a ring of two nodes; yield them, the entry and the stage."""
    async with world.serving(A, B) as (a, b):
        world.follow(BOTH)
        await until(lambda: at_work(a, b))
        entry, stage = a.runtime.entry, b.runtime.stage
        assert entry is not None
        assert stage is not None
        yield a, b, entry, stage


def test_a_rank_knows_what_its_neighbours_support(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IdleLink, "features", Features.PACKED)

    async def main() -> None:
        async with serving_both(world) as (_, _, entry, _):
            assert entry._neighbours is not None
            assert entry._neighbours.features == Features.PACKED
            assert not entry._neighbours.helps

    run_virtual(main())


def rooms_of(*ranks: EntryNode | StageNode) -> list[list[int]]:
    return [[room.total for room in rank.budget.rooms] for rank in ranks]


def test_every_rank_has_the_room_for_rows_that_the_plan_counts(world: World) -> None:
    async def main() -> None:
        async with serving_both(world) as (a, b, entry, stage):
            room = RowQueueLimits(64 * 4)
            shape = a.runtime._model.shape

            assert entry.waiting_room == stage.waiting_room == room.total
            assert reserved_bytes(shape) == workspace_bytes(shape) + room.total
            assert stage._machine._max_waiting == room.max_waiting
            assert entry._prompts.most_rows == 4 * MAX_ROWS
            assert await tokens(a)
            assert b.runtime.stage is stage

    run_virtual(main())


def test_what_waits_to_be_sent_and_the_rows_of_a_stage_share_its_room(world: World) -> None:
    async def main() -> None:
        async with serving_both(world) as (_, _, _, stage):
            link = stage._neighbours._next
            rows = RowQueueLimits(64 * 4).max_waiting
            session, other = (SessionId(bytes([number]) * 16) for number in (1, 2))
            blob = seal(session_key(session), DType.FLOAT32, (1, 4, 64), bytes(4 * 64 * 4))
            data = Data(session, stage._machine.epoch, 0, 0, 4, Flags.PREFILL, blob)
            link._queued_bytes += rows - len(blob.payload)  # almost all of it waits to be sent

            assert [type(each) for each in stage._machine.receive(data, 0.0)] == [Compute]
            assert link._held() == len(blob.payload)
            (refused,) = stage._machine.receive(replace(data, session=other), 0.0)[-1:]
            assert isinstance(refused, Forward)
            assert isinstance(refused.message, Fault)
            assert refused.message.session == other
            assert refused.message.code is FaultCode.BUSY
            link._queued_bytes -= rows - len(blob.payload)

    run_virtual(main())


def test_a_ring_goes_on_with_other_rooms_of_which_the_entry_never_uses_more_than_a_stage(
    world: World,
) -> None:
    async def main() -> None:
        async with serving_both(world) as (a, b, entry, stage):
            text, first, ranks = await tokens(a), a.room, (entry, stage)
            seen = list[list[list[int]]]()
            for room in (first // 2, first):
                for place in (a, b):
                    place.room = room
                    place.runtime.resize()
                await asyncio.sleep(RECORD_PROPAGATION_S / 2)
                seen.append(rooms_of(*ranks))
                await asyncio.sleep(RECORD_PROPAGATION_S)
                assert rooms_of(*ranks) == [[room, room], [room]]
                assert await tokens(a) == text

            half = first // 2
            assert seen == [[[half, half], [first]], [[half, half], [first]]]
            assert (a.runtime.entry, b.runtime.stage) == ranks
            assert (a.broken, b.broken) == ([], [])

    run_virtual(main())


def test_rooms_that_change_again_while_a_rank_waits_are_used_too(world: World) -> None:
    async def main() -> None:
        async with serving_both(world) as (a, b, entry, stage):
            first = a.room
            for divisor in (2, 8, 4):
                for place in (a, b):
                    place.room = first // divisor
                    place.runtime.resize()
                await asyncio.sleep(RECORD_PROPAGATION_S / 4)
            assert rooms_of(entry, stage) == [[first // 8] * 2, [first]]
            await asyncio.sleep(3 * RECORD_PROPAGATION_S)
            assert rooms_of(entry, stage) == [[first // 4] * 2, [first // 4]]
            assert (a.broken, b.broken) == ([], [])

    run_virtual(main())


def test_a_stage_with_less_memory_frees_finished_sessions_at_once(world: World) -> None:
    async def main() -> None:
        async with serving_both(world) as (_, b, entry, stage):
            order = GenerationRequest(tuple(range(3, 30)), Sampling(), 6, lambda _: False)
            assert [out async for out in entry.generate(order)]
            assert stage.budget.kept_bytes > 0

            before, b.room = b.room, 0
            b.runtime.resize()
            await asyncio.sleep(0.1)

            assert (stage.budget.kept_bytes, rooms_of(stage)) == (0, [[before]])

    run_virtual(main())


@pytest.mark.parametrize("which", [0, 1])
def test_a_ring_forms_again_with_less_memory_than_its_answers_need(
    world: World, which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "RECORD_PROPAGATION_S", 0.1)

    async def main() -> None:
        async with serving_both(world) as (*places, entry, stage):
            order = GenerationRequest((3, 1, 4, 1, 5), Sampling(), 200, lambda _: False)
            outputs = entry.generate(order)
            await anext(outputs)

            rank: EntryNode | StageNode = stage if which else entry
            place = places[which]
            place.room = rank.budget.live_bytes - 1
            place.runtime.resize()

            with pytest.raises(LinkLost):
                async for _ in outputs:
                    pass
            await until(lambda: places[0].runtime.entry not in {None, entry})
            assert place.broken == [BOTH]

    run_virtual(main())


def test_a_ring_of_one_goes_on_with_less_memory_and_with_more(world: World) -> None:
    async def main() -> None:
        async with serving_alone(world) as (a, entry):
            order = GenerationRequest(tuple(range(3, 30)), Sampling(), 6, lambda _: False)
            assert [out async for out in entry.generate(order)]
            assert entry.budget.kept_bytes

            a.room = entry.budget.kept_bytes
            a.runtime.resize()
            await asyncio.sleep(1)
            assert a.runtime.entry is entry
            assert entry.budget.rooms[0].total == entry.budget.kept_bytes == a.room
            a.room -= 1
            a.runtime.resize()
            await asyncio.sleep(1)
            assert a.runtime.entry is entry
            assert (entry.budget.rooms[0].total, entry.budget.kept_bytes) == (a.room, 0)
            a.room *= 2
            a.runtime.resize()
            await asyncio.sleep(0.1)
            assert rooms_of(entry) == [[a.room]]
            assert a.broken == []

    run_virtual(main())


def test_a_ring_of_one_forms_again_with_less_memory_than_its_answers_need(world: World) -> None:
    async def main() -> None:
        async with serving_alone(world) as (a, entry):
            order = GenerationRequest((3, 1, 4, 1, 5), Sampling(), 99, lambda _: False)
            outputs = entry.generate(order)
            await anext(outputs)

            a.room = entry.budget.live_bytes - 1
            a.runtime.resize()

            with pytest.raises(LinkLost):
                async for _ in outputs:
                    pass
            await until(lambda: a.runtime.entry not in {None, entry})
            assert a.broken == [ALONE]

    run_virtual(main())


def test_a_link_for_no_ring_of_this_node_is_closed(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            link = await b.dial(A)
            hello = Hello(B, 1, BOTH.digest, GroupId(b"other"))
            await link.send(encode(hello), Channel.CONTROL)

            with pytest.raises(LinkLost):
                await link.receive()

            a.runtime.resize()  # does nothing without a rank

    run_virtual(main())


def test_the_rank_before_is_blamed_for_what_it_sends(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            world.follow(BOTH)
            await until(lambda: at_work(a, b))
            (link,) = a.dialled
            await link.send([b""])  # no message is that short
            await until(lambda: b.blamed)
            assert (a.blamed, b.blamed) == ([], [A])
            await until(lambda: a.broken and b.broken)
            assert {*a.broken, *b.broken} == {BOTH}

    run_virtual(main())


def test_a_node_that_stops_closes_its_links_at_once(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            world.follow(BOTH)
            await until(lambda: at_work(a, b))
        for link in world.links:
            with pytest.raises(LinkLost):
                await link.send([b""])

    run_virtual(main())


@pytest.mark.parametrize("turns", [1, 5, 7, 8, 9])
def test_a_plan_that_follows_at_once_leaves_no_link_open(world: World, turns: int) -> None:
    def after(turns: int, call: Callable[[], None]) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(after, turns - 1, call)
        else:
            call()

    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            world.follow(BOTH)
            begin = RingRuntime._job_of

            def changed(self: RingRuntime, action: Begin) -> object:
                job = begin(self, action)
                if isinstance(action, Begin):
                    after(turns, partial(self.follow, None))
                return job

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RingRuntime, "_job_of", changed)
                await until(lambda: not a.runtime.plan and not b.runtime.plan)
                await asyncio.sleep(1)
            assert not a.runtime._links._open
            for link in world.links:
                with pytest.raises(LinkLost):
                    await link.send([b""])

    run_virtual(main())


def test_following_another_plan_ends_serving_at_once(world: World) -> None:
    async def main() -> None:
        async with world.serving(A) as (a,):
            a.runtime.follow(ALONE)
            await until(lambda: at_work(a))
            a.runtime.follow(BOTH)
            assert not at_work(a)

    run_virtual(main())


def test_a_late_neighbour_is_waited_for(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            a.runtime.follow(BOTH)
            world.hidden.add(B)  # its progress is unknown
            world.changed()
            await asyncio.sleep(20)
            assert a.told[-1] == (True, "")
            assert not at_work(a)
            b.runtime.follow(BOTH)
            await until(lambda: at_work(a, b))
            assert len(await tokens(a)) == 6

    run_virtual(main())


def test_a_load_error_is_reported(world: World) -> None:
    async def main() -> None:
        async with world.serving(A) as (a,):
            a.runtime.follow(plan_of((A, "0:7")))
            await asyncio.sleep(1)
            assert not a.told[-1][0]
            assert a.told[-1][1]
            a.runtime.follow(ALONE)
            await until(lambda: at_work(a))

    with pytest.MonkeyPatch.context() as patch:
        load = SpanLoader._load

        def refuse(self: SpanLoader, part: RankPart) -> LoadedSpan:
            if part.span.stop > 6:
                raise ModelError("there are 6 layers")
            return load(self, part)

        patch.setattr(SpanLoader, "_load", refuse)
        run_virtual(main())


HELLO = Hello(B, 1, BOTH.digest)


@pytest.mark.parametrize(
    "first",
    [None, Hello(C, 1, BOTH.digest), Hello(B, 0, BOTH.digest), Heartbeat(1, 0, 0), b"noise"],
)
def test_an_invalid_link_is_closed(world: World, first: Message | bytes | None) -> None:
    async def main() -> None:
        async with world.serving(A) as (a,):
            a.runtime.follow(BOTH)
            link = await world.transport.dial(NAMES[A])
            await link.send([B], Channel.CONTROL)
            if first is not None:
                parts = [first] if isinstance(first, bytes) else encode(first)
                await link.send(parts, Channel.CONTROL)
            await asyncio.sleep(SILENCE + 1)
            with pytest.raises(LinkLost):
                await link.send([b""])
            assert a.runtime._machine._arrivals == {}

    run_virtual(main())


def test_the_later_of_two_links_stays(world: World) -> None:
    async def main() -> None:
        async with world.serving(A) as (a,):
            links = []
            for _ in range(2):
                links.append(await world.transport.dial(NAMES[A]))
                await links[-1].send([B], Channel.CONTROL)
                await links[-1].send(encode(HELLO), Channel.CONTROL)
                await asyncio.sleep(1)
            with pytest.raises(LinkLost):
                await links[0].receive()
            assert set(a.runtime._machine._arrivals) == {B}
        with pytest.raises(LinkLost):
            await links[1].receive()  # unused

    run_virtual(main())


async def dial_and_greet(world: World, hello: Hello) -> Link:
    link = await world.transport.dial(NAMES[A])
    await link.send([B], Channel.CONTROL)
    await link.send(encode(hello), Channel.CONTROL)
    await asyncio.sleep(1)
    return link


def test_links_of_an_old_plan_are_closed(world: World) -> None:
    async def main() -> None:
        async with world.serving(A) as (a,):
            link = await dial_and_greet(world, HELLO)
            assert set(a.runtime._machine._arrivals) == {B}
            a.runtime.follow(plan_of((A, "0:6"), epoch=2))
            await asyncio.sleep(1)
            assert a.runtime._machine._arrivals == {}
            with pytest.raises(LinkLost):
                await link.receive()

    run_virtual(main())


def test_an_idle_link_that_was_lost_is_not_used(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            gone = await dial_and_greet(world, HELLO)
            await gone.close()
            await asyncio.sleep(1)
            world.follow(BOTH)
            await until(lambda: at_work(a, b))
            assert len(await tokens(a)) == 6

    run_virtual(main())


def test_a_previous_rank_with_a_later_plan_is_not_served(world: World) -> None:
    async def main() -> None:
        async with world.serving(A, B) as (a, _):
            await dial_and_greet(world, Hello(B, 9, BOTH.digest))
            a.runtime.follow(BOTH)
            await asyncio.sleep(20)
            assert not at_work(a)

    run_virtual(main())
