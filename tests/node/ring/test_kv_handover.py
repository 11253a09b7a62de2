"""A node that leaves hands over the KV caches of its layers, and the text does not change."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest
import torch

from meshllm.errors import LinkLost
from meshllm.names import NodeId, SessionId, Span
from meshllm.node.ring.kv_handover import _recompute_s
from meshllm.node.ring.kv_transfer import KvSender
from meshllm.node.session.wire import sealed
from meshllm.protocol.planning.chunking import RankTimes
from meshllm.protocol.planning.plan import Ends, LinkSpeed, Plan, PlanStage
from meshllm.protocol.ring.plan_change import PREPARE_S
from meshllm.protocol.session.blob import session_key
from meshllm.protocol.session.codec import decode, encode
from meshllm.protocol.session.messages import Buffer, KvOffer, KvRows
from meshllm.protocol.session.stage import MAX_RECOMPUTE_ROWS
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Channel, Link
from tests.builders.offers import A, B, C, D, offer
from tests.builders.ring_takeover import (
    BEFORE,
    IN_FLIGHT,
    PROMPT,
    THREE,
    TOKENS,
    Ingress,
    Rows,
    kept_layers,
    ring_of_three,
)
from tests.builders.ring_world import NAMES, Place, World, at_work, plan_of, until
from tests.builders.slow_cases import each_of

LEAVES = {
    "middle, to both neighbours": (plan_of((A, "0:3"), (C, "3:6"), epoch=2), {2, 3}),
    "middle, to the one before": (plan_of((A, "0:4"), (C, "4:6"), epoch=2), {2, 3}),
    "middle, to the one behind": (plan_of((A, "0:2"), (C, "2:6"), epoch=2), {2, 3}),
    "middle, to a standby": (plan_of((A, "0:2"), (D, "2:4"), (C, "4:6"), epoch=2), {2, 3}),
    "last, to the one before": (plan_of((A, "0:2"), (B, "2:6"), epoch=2), {4, 5}),
    "last, to a standby": (plan_of((A, "0:2"), (B, "2:4"), (D, "4:6"), epoch=2), {4, 5}),
    "entry, to the one behind": (plan_of((B, "0:4"), (C, "4:6"), epoch=2), {0, 1}),
    "entry, to a standby": (plan_of((D, "0:2"), (B, "2:4"), (C, "4:6"), epoch=2), {0, 1}),
    "two of three": (plan_of((A, "0:6"), epoch=2), {2, 3, 4, 5}),
}
LATE = 20
"""Rows of a session that were not handed over: its last steps, while the ring changed. Without a
handover they are all of the prompt and `BEFORE`, which are more."""


@dataclass
class Leave:
    """Prepares for a plan within an answer, as all nodes of a mesh do, and follows it."""

    places: Sequence[Place]
    plan: Plan
    written: int = 0
    """Tokens of the answer when the plan was followed."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    then: Callable[[], None] | None = None
    """Called in the answer of the next ring, which goes on in a ring of its entry."""

    async def answer(self, ingress: Ingress | None = None) -> list[int]:
        """Return the answer of both rings."""
        ingress = ingress or Ingress()
        await ingress.ask(self.places[0], lambda: self._begin(ingress))
        (leaving,) = self.tasks
        await leaving
        after = [place for place in self.places if self.plan.rank(place.me) is not None]
        await until(lambda: at_work(*after))
        (entry,) = [place for place in after if self.plan.rank(place.me) == 0]
        if self.then:
            asyncio.get_running_loop().call_later(0.05, self.then)
            await ingress.ask(entry)
            await until(lambda: at_work(entry))
        await ingress.ask(entry)
        return ingress.answer

    def _begin(self, ingress: Ingress) -> None:
        self.tasks.append(asyncio.ensure_future(self._leave(ingress)))

    async def _leave(self, ingress: Ingress) -> None:
        for place in self.places:
            place.runtime.prepare(self.plan, is_urgent=True)
        while any(each.runtime.prepared != self.plan for each in self.places):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.written = len(ingress.answer)
        for place in self.places:
            place.runtime.follow(self.plan)


ALIKE = "middle, to the one before", "middle, to the one behind", "last, to a standby"
"""What other leaves show, too: a rank that grows at either end, and a standby."""


@pytest.mark.parametrize("name", each_of(LEAVES, ALIKE))
def test_what_was_handed_over_is_not_computed_again(world: World, rows: Rows, name: str) -> None:
    after, lost = LEAVES[name]

    async def main() -> None:
        async with ring_of_three(world, D) as (places, undisturbed):
            rows.clear()  # the second time the prompt is cached

            leave = Leave(places, after)
            assert await leave.answer() == undisturbed
            assert BEFORE < leave.written < TOKENS
            told = sum(place.runtime.recomputed for place in places)
            assert told <= LATE * len(lost)
            told_of = [each.runtime.entry._config for each in places if each.runtime.entry]
            assert [each.is_handed_over for each in told_of] == [True]
            assert all(rows[layer] <= TOKENS + IN_FLIGHT for layer in kept_layers(lost))
            assert all(rows[layer] <= TOKENS + IN_FLIGHT + LATE for layer in lost)

    run_virtual(main())


MIDDLE = LEAVES["middle, to the one behind"][0]


@asynccontextmanager
async def answering(world: World) -> AsyncIterator[tuple[list[Place], Ingress]]:
    """A ring of three and a standby, in the middle of an answer."""
    async with world.serving(A, B, C, D) as places:
        world.follow(THREE)
        await until(lambda: at_work(*places[:3]))
        ingress, is_begun = Ingress(), asyncio.Event()
        task = asyncio.ensure_future(ingress.ask(places[0], is_begun.set))
        await is_begun.wait()
        try:
            yield places, ingress
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def offered(world: World, node: NodeId, to: NodeId, plan: Plan = MIDDLE) -> Link:
    """Offer caches to a place as another node does."""
    link = await world.transport.dial(NAMES[to])
    await link.send([node], Channel.CONTROL)  # stands for the handshake
    await link.send(encode(KvOffer(node, plan.epoch, plan.digest)))
    return link


async def answer_to(link: Link) -> object:
    """Return the answer to an offer; None if the link is closed without."""
    with suppress(LinkLost):
        return decode((await link.receive())[1])
    return None


ROWS = torch.zeros(1, 2, 3, 32)


def rows_of(layer: int, pos: int = 0, session: bytes = bytes(16)) -> KvRows:
    key = session_key(SessionId(session))
    return KvRows(key.session, layer, pos, 16, sealed(key, ROWS))


def test_an_offer_is_answered_once_the_layers_are_loaded(world: World) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            link = await offered(world, B, C)
            asked = asyncio.ensure_future(answer_to(link))
            await asyncio.sleep(1)
            assert not asked.done()

            places[2].runtime.prepare(MIDDLE, is_urgent=True)
            assert await asked == KvOffer(C, MIDDLE.epoch, MIDDLE.digest)

    run_virtual(main())


@pytest.mark.parametrize(
    ("node", "to"), [(D, C), (A, C), (B, D)], ids=["no rank", "it stays", "no layers"]
)
def test_an_offer_of_a_node_that_has_nothing_to_give_is_refused(
    world: World, node: NodeId, to: NodeId
) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            for place in places:
                place.runtime.prepare(MIDDLE, is_urgent=True)
            assert await answer_to(await offered(world, node, to)) is None

    run_virtual(main())


def test_an_offer_of_a_stranger_waits_for_nothing(world: World) -> None:
    async def main() -> None:
        async with answering(world):
            begin = asyncio.get_running_loop().time()
            assert await answer_to(await offered(world, D, C)) is None
            assert asyncio.get_running_loop().time() - begin < PREPARE_S / 2

    run_virtual(main())


@pytest.mark.parametrize(("layers", "rows"), [(2, 40), (4, 300)])
def test_the_time_to_compute_rows_again_is_that_of_their_layers(layers: int, rows: int) -> None:
    times = RankTimes(offer(A, 6, ms=10), 4.0, LinkSpeed(0.0))
    blocks = [(at, min(MAX_RECOMPUTE_ROWS, rows - at)) for at in range(0, rows, MAX_RECOMPUTE_ROWS)]

    taken = _recompute_s(times, layers, range(rows))

    assert taken == pytest.approx(sum(times.compute_s(n, at) for at, n in blocks) * layers / 4)
    assert _recompute_s(None, layers, range(rows)) is None
    assert _recompute_s(replace(times, layers=0.0), layers, range(rows)) is None


def test_an_offer_for_a_plan_that_never_comes_ends(world: World) -> None:
    async def main() -> None:
        async with answering(world):
            begin = asyncio.get_running_loop().time()
            assert await answer_to(await offered(world, B, C)) is None
            assert asyncio.get_running_loop().time() - begin >= PREPARE_S

    run_virtual(main())


def test_a_later_offer_replaces_one_that_waits_and_what_came_by_it(world: World) -> None:
    other = plan_of((A, "0:2"), (C, "2:6"), epoch=3)

    async def main() -> None:
        async with answering(world) as (places, _):
            first = await offered(world, B, C)
            places[2].runtime.prepare(MIDDLE, is_urgent=True)
            assert await answer_to(first) is not None
            await first.send(encode(rows_of(2)))
            places[2].runtime.prepare(other, is_urgent=True)
            second = await offered(world, B, C, other)

            begin = asyncio.get_running_loop().time()
            assert await answer_to(first) is None
            assert await answer_to(second) is not None
            assert asyncio.get_running_loop().time() - begin < PREPARE_S / 2  # it was not too late
            await second.send(encode(rows_of(2)))  # from the first position again
            await second.send(encode(KvOffer(B, other.epoch, other.digest)))
            assert await answer_to(second) is not None
            assert places[2].blamed == []

    run_virtual(main())


@pytest.mark.parametrize("layer", [1, 4])
def test_rows_of_other_layers_are_blamed_on_their_node(world: World, layer: int) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            places[2].runtime.prepare(MIDDLE, is_urgent=True)
            link = await offered(world, B, C)
            await answer_to(link)
            await link.send(encode(rows_of(layer)))

            assert await answer_to(link) is None
            assert places[2].blamed == [B]

    run_virtual(main())


def test_layers_in_advance_and_caches_share_what_sessions_lend(world: World) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            c = places[2]
            c.runtime.prepare(MIDDLE, is_urgent=True)
            link = await offered(world, B, C)
            await answer_to(link)
            assert c.runtime.stage is not None
            lent, budget = list[int](), c.runtime.stage.budget
            layers = budget._lent
            for at in range(3):
                await link.send(encode(rows_of(2, 3 * at)))
                await link.send(encode(KvOffer(B, MIDDLE.epoch, MIDDLE.digest)))
                await answer_to(link)
                lent.append(budget._lent - layers)
            assert layers > 0
            assert lent == [c.runtime._model.kv_bytes(2, 9)] * 3

            c.runtime.prepare(None, is_urgent=True)
            await until(lambda: c.runtime.prepared is None)
            assert budget._lent == 0
            await link.send(encode(rows_of(2, 9)))
            assert await answer_to(link) is None
            assert (budget._lent, c.blamed) == (0, [])

    run_virtual(main())


def test_finished_sessions_make_room_for_caches_that_are_handed_over(world: World) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            c = places[2]
            await Ingress(PROMPT[::-1]).ask(places[0])
            assert c.runtime.stage is not None
            budget = c.runtime.stage.budget
            c.runtime.prepare(MIDDLE, is_urgent=True)
            link = await offered(world, B, C)
            await answer_to(link)
            assert budget.kept_bytes > 0
            c.room = budget.live_bytes + budget.kept_bytes + budget._lent
            c.runtime.resize()
            await until(lambda: [room.total for room in budget.rooms] == [c.room])

            await link.send(encode(rows_of(2)))
            await link.send(encode(KvOffer(B, MIDDLE.epoch, MIDDLE.digest)))

            assert await answer_to(link) == KvOffer(C, MIDDLE.epoch, MIDDLE.digest)
            assert not budget.is_exceeded

    run_virtual(main())


def test_rows_for_which_there_is_no_room_end_the_handover(world: World) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            places[2].room = 100
            places[2].runtime.prepare(MIDDLE, is_urgent=True)
            link = await offered(world, B, C)
            await answer_to(link)
            await link.send(encode(rows_of(2)))

            assert await answer_to(link) is None
            assert places[2].blamed == []

    run_virtual(main())


def test_a_node_that_takes_nothing_holds_up_a_leave_for_a_while(world: World) -> None:
    async def main() -> None:
        async with answering(world) as (places, _):
            begin = asyncio.get_running_loop().time()
            places[1].runtime.prepare(MIDDLE, is_urgent=True)
            while places[1].runtime.prepared != MIDDLE:  # noqa: ASYNC110  # no time passes
                await asyncio.sleep(1)
            took_s = asyncio.get_running_loop().time() - begin
            assert PREPARE_S <= took_s <= PREPARE_S + 2

    run_virtual(main())


@pytest.mark.parametrize("is_urgent", [True, False])
def test_nothing_is_handed_over_in_vain(world: World, *, is_urgent: bool) -> None:
    """Without sessions, and for a plan that only may follow."""

    async def main() -> None:
        async with world.serving(A, B, C) as places:
            world.follow(THREE)
            await until(lambda: at_work(*places))
            if not is_urgent:
                task = asyncio.ensure_future(Ingress().ask(places[0]))
                await asyncio.sleep(0.2)
            entry = places[0].runtime.entry
            assert entry is not None
            assert not entry._config.is_handed_over
            before = len(places[1].dialled)
            places[1].runtime.prepare(MIDDLE, is_urgent=is_urgent)
            await until(lambda: places[1].runtime.prepared == MIDDLE)
            assert len(places[1].dialled) == before
            if not is_urgent:
                await task

    run_virtual(main())


@pytest.mark.parametrize("name", ["middle, to a standby", "middle, to the one before"])
def test_what_entered_the_next_rank_is_handed_over_too(world: World, name: str) -> None:
    """So that a later loss of that rank costs its layers only."""
    after = LEAVES[name][0]

    async def main() -> None:
        async with ring_of_three(world, D) as (places, _):
            await Leave(places, after).answer()
            owner = next(each for each in places if after.stages[-2].node == each.me)
            store = owner.runtime._held.store
            assert store is not None
            recorded = [each.recorded(4, 0, len(PROMPT)) for each in store.prefixes.caches.values()]
            assert any(each is not None for each in recorded)

    run_virtual(main())


def test_a_loss_after_a_handover_recomputes_the_layers_of_both(world: World) -> None:
    """What a node has taken over, it recorded from then on: before, it computes it again."""
    after, last = LEAVES["middle, to both neighbours"][0], plan_of((A, "0:6"), epoch=3)

    async def main() -> None:
        async with ring_of_three(world, D) as (places, undisturbed):
            leave = Leave(places, after)
            leave.then = lambda: places[0].runtime.follow(last)
            assert await leave.answer() == undisturbed

    run_virtual(main())


def noting_rows(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[KvRows]:
    """Note the rows that a place sends over links that it dials from now on."""
    sent, dial = list[KvRows](), place.dial

    async def noted(node: NodeId) -> Link:
        link = await dial(node)
        send = link.send

        async def note(parts: list[Buffer], channel: Channel = Channel.DATA) -> None:
            message = decode(b"".join(parts))
            if isinstance(message, KvRows):
                sent.append(message)
            await send(parts, channel)

        monkeypatch.setattr(link, "send", note)
        return link

    monkeypatch.setattr(place, "dial", noted)
    return sent


@pytest.mark.parametrize("role", [0, 1, 2], ids=["entry", "middle", "last"])
def test_a_session_that_may_not_be_handed_over_is_not_and_others_are(
    world: World, monkeypatch: pytest.MonkeyPatch, role: int
) -> None:
    """A standby takes over the layers of a rank; the next ring computes the session again."""
    stages = list(THREE.stages)
    stages[role] = replace(stages[role], node=D)
    after = replace(THREE, epoch=2, stages=tuple(stages))

    async def main() -> None:
        async with ring_of_three(world, D) as (places, _):
            undisturbed = Ingress(tokens=2 * TOKENS)
            await undisturbed.ask(places[0])
            sent = noting_rows(places[role], monkeypatch)
            entry = places[0].runtime.entry
            assert entry is not None
            confined = Ingress(tokens=2 * TOKENS, hands_over=False)
            other, leave = Ingress(PROMPT[::-1], tokens=2 * TOKENS), Leave(places, after)
            asked = asyncio.ensure_future(other.ask(places[0]))
            while not entry._sessions:  # noqa: ASYNC110  # no time passes
                await asyncio.sleep(0)
            (handed_over,) = entry._sessions

            assert await leave.answer(confined) == undisturbed.answer
            await asked

            assert BEFORE < leave.written < confined.tokens
            own = THREE.stages[role].span
            assert {(rows.session, rows.layer) for rows in sent if rows.split} == {
                (handed_over, layer) for layer in range(own.start, own.stop)
            }
            assert {rows.session for rows in sent} == {handed_over}

    run_virtual(main())


CLIENT = Plan(1, "tiny", Ends.CLIENT, (PlanStage(A, Span(0, 0)), PlanStage(B, Span(0, 6))))


def test_a_rank_without_layers_hands_over_nothing(world: World) -> None:
    after = plan_of((B, "0:6"), epoch=2)

    async def main() -> None:
        async with world.serving(A, B) as (a, b):
            world.follow(CLIENT)
            await until(lambda: at_work(a, b))
            ingress, is_begun = Ingress(), asyncio.Event()
            task = asyncio.ensure_future(ingress.ask(a, is_begun.set))
            await is_begun.wait()
            a.runtime.prepare(after, is_urgent=True)
            await until(lambda: a.runtime.prepared == after)
            await task
            assert len(ingress.answer) == TOKENS

    run_virtual(main())


@pytest.mark.parametrize("is_late", [True, False])
def test_one_node_that_takes_nothing_keeps_the_other_waiting_but_not_behind(
    world: World, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """It prepares late, or cannot be reached; the other takes what is written meanwhile."""
    catch_up, caught = KvSender.catch_up, Counter[KvSender]()

    async def counted(sender: KvSender) -> None:
        await catch_up(sender)
        caught[sender] += 1

    monkeypatch.setattr(KvSender, "catch_up", counted)
    after = LEAVES["middle, to both neighbours"][0]

    async def main() -> None:
        async with answering(world) as (places, _):
            a, b, c, _ = places
            dial = b.dial

            async def dial_a(node: NodeId) -> Link:
                if node == C:
                    raise LinkLost("nothing listens")
                return await dial(node)

            if not is_late:
                monkeypatch.setattr(b, "dial", dial_a)
            b.runtime.prepare(after, is_urgent=True)
            a.runtime.prepare(after, is_urgent=True)
            await asyncio.sleep(5)
            assert (b.runtime.prepared == after) is not is_late
            assert [each > 3 for each in caught.values()] == [is_late]  # the one to `a`
            if is_late:
                c.runtime.prepare(after, is_urgent=True)
            await until(lambda: b.runtime.prepared == after)

    run_virtual(main())


def test_what_a_node_loads_in_advance_survives_a_plan_without_it(world: World) -> None:
    """Releasing its rank ends its handover, and nothing else."""

    async def main() -> None:
        async with world.serving(A, B, C, D) as places:
            world.follow(THREE)
            await until(lambda: at_work(*places[:3]))
            standby = places[3].runtime
            standby.prepare(LEAVES["middle, to a standby"][0], is_urgent=True)
            preparing = standby._held._preparing
            standby.follow(plan_of((A, "0:2"), (B, "2:4"), (C, "4:6"), epoch=3))
            assert preparing is not None
            await asyncio.wait([preparing])
            assert not preparing.cancelled()

    run_virtual(main())
