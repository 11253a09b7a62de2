"""Requests that are answered locally, remotely, after a retry, or not at all."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from meshllm.errors import (
    Busy,
    ContextTooLong,
    LinkLost,
    MeshError,
    ModelMissing,
    NotServed,
    PeerFault,
    TimedOut,
    UserError,
)
from meshllm.names import FIRST_GROUP, GroupId, LossCause, NodeId, RingEntry, Span, short, show
from meshllm.node.requests.held_bytes import MAX_HELD_BYTES, size_of
from meshllm.node.requests.peer_requests import MAX_FORWARDED
from meshllm.node.requests.replica_choice import AttemptHistory, ReplicaChoice
from meshllm.node.requests.request_json import REQUEST_BYTES, request_to_json
from meshllm.node.requests.router import MAX_WAITING, QUIET_S, RING_S
from meshllm.node.requests.waits import WAITING_S
from meshllm.protocol.kv_cache.admission import OWNER_S, SHORT_ANSWER
from meshllm.protocol.membership.codec import CancelRequest, Generate
from meshllm.protocol.membership.records import ModelOffer
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.ring.failover import ATTEMPTS, RETRY_DELAY_S
from meshllm.request import Event, Interruption, Piece, Prefilled, Request, Waiting
from meshllm.status import LossCounts
from meshllm.strict_json import WrongField
from tests.builders.fake_ring import answer_of
from tests.builders.request_world import (
    ASK,
    ENTRY,
    ME,
    OTHER,
    REQUEST,
    TEXT,
    THIRD,
    FakeRing,
    World,
    all_of,
    answer,
    note,
    pieces,
    text_of,
)


def test_the_entry_answers_itself(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        assert await all_of(router) == answer()

    world.run(scenario)
    assert world.sent == []
    assert (router.counts.served, router.counts.failed, router.counts.tokens) == (1, 0, 5)


def test_neither_prompt_nor_answer_is_kept(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        await all_of(router)

    world.run(scenario)
    assert router.counts.last is not None
    assert (router.counts.last.text, router.counts.last.tokens, router.counts.last_tokens) == (
        "",
        (),
        5,
    )


def test_an_ingress_forwards_to_the_entry(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    entry = world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        assert await all_of(router) == answer()

    world.run(scenario)
    assert world.rings[ENTRY].asked == [REQUEST]
    assert (router.counts.served, entry.counts.served) == (1, 0)  # its ingress counts it


def test_an_answer_goes_on_with_what_its_name_meant_at_first(world: World) -> None:
    ring = FakeRing(attempts=[[*answer()[:4], LinkLost("gone")], answer()])
    ring.replicas |= dict.fromkeys(("fox", "int8", "bf16"), (ME,))
    ring.pins = {"fox": "int8"}
    router = world.add(ME, ring)

    async def scenario() -> None:
        async for _ in router.generate(replace(REQUEST, model="fox")):
            ring.pins["fox"] = "bf16"

    world.run(scenario)
    assert ring.models == ["int8", "int8"]


def test_a_client_uses_any_node_as_its_ingress(world: World) -> None:
    client = world.add(OTHER, FakeRing(at=ME))
    world.clients.add(OTHER)
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        assert await all_of(client) == answer()

    world.run(scenario)
    assert (client.counts.served, router.counts.served) == (1, 1)


def test_a_client_cannot_choose_the_scope_of_another(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer() for _ in range(5)]))

    async def scenario() -> None:
        await all_of(router, replace(REQUEST, scope="of a key"))  # from this node's API server
        for peer, scope in ((OTHER, ""), (OTHER, "of a key"), (ENTRY, "of a key"), (OTHER, "")):
            request = Generate(ASK, request_to_json(replace(REQUEST, scope=scope)))
            router.receive(peer, request, is_client=True)
            await asyncio.sleep(1)

    world.run(scenario)
    own, *of_clients, again = [each.scope for each in world.rings[ME].asked]
    assert own == "of a key"
    assert len({"", own, *of_clients}) == 5
    assert again == of_clients[0]


def test_only_the_entry_answers_a_node(world: World) -> None:
    world.add(ME, FakeRing(at=ENTRY, attempts=[[LinkLost("This node is not the entry")]]))
    world.add(ENTRY)

    async def scenario() -> None:
        world.routers[ME].receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=False)

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert isinstance(told, LinkLost)
    assert [to for _, to, _ in world.sent] == [OTHER]  # it was not forwarded again


def test_cancelling_at_the_ingress_cancels_on_the_entry(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[[None]]))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(1)
        asking.cancel()
        await asyncio.wait([asking])

    world.run(scenario)
    assert world.rings[ENTRY].closed == 1
    assert world.said(ME) == []


def test_a_request_that_is_cancelled_and_whose_peer_is_lost_is_freed_on_all_ranks(
    world: World,
) -> None:
    router = world.add(ME, FakeRing(attempts=[[None]], frees_s=1.0))

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=False)
        await asyncio.sleep(1)
        router.receive(OTHER, CancelRequest(ASK), is_client=False)
        await asyncio.sleep(0.5)
        router.lost(OTHER)
        await asyncio.sleep(1)

    world.run(scenario)
    assert world.rings[ME].closed == 1


def test_a_request_cancelled_at_once_begins_nothing(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=False)
        router.receive(OTHER, CancelRequest(ASK), is_client=False)

    world.run(scenario)
    assert world.sent == []


def test_a_pause_begins_with_the_text_before_the_loss(world: World) -> None:
    first = [*answer()[:2], LinkLost("gone")]
    ring = FakeRing(attempts=[first, answer()], frees_s=3.0)  # each ends so much later
    router = world.add(ME, ring)

    async def scenario() -> None:
        (pause,) = [each for each in await all_of(router) if isinstance(each, Interruption)]
        assert pause.pause_s == pytest.approx(3)

    world.run(scenario)


def test_only_the_sender_of_a_request_can_cancel_it(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[[*answer()]]))

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=False)
        router.receive(ENTRY, CancelRequest(ASK), is_client=False)

    world.run(scenario)
    assert world.said(OTHER) == answer()


@pytest.mark.parametrize("cut", range(len(pieces(TEXT)) + 2))
def test_a_lost_ring_loses_no_character(world: World, cut: int) -> None:
    first = [*answer()[:cut], LinkLost("gone")]
    router = world.add(ME, FakeRing(attempts=[first, answer()]))

    async def scenario() -> None:
        events = await all_of(router)
        assert text_of(events) == TEXT
        assert events[-1] == answer()[-1]
        assert Piece("") not in events
        told = [event for event in events if isinstance(event, Interruption)]
        assert told == [Interruption(LossCause.NODE_LOST, "they slept", 0.0)]

    world.run(scenario)
    assert (router.counts.served, router.counts.failed, router.counts.losses) == (
        1, 0, {LossCause.NODE_LOST: LossCounts(LossCause.NODE_LOST, 1, 0.0, max(0, cut - 1))},
    )  # fmt: skip


@pytest.mark.parametrize("cut", range(3))
def test_an_embedding_is_asked_for_again_when_its_ring_is_lost(world: World, cut: int) -> None:
    found = replace(answer_of("", 0), embedding="AACAPw==")
    events: list[Event] = [Prefilled(64, 128), Prefilled(128, 128), found]
    ring = FakeRing(attempts=[[*events[:cut], LinkLost("gone")], events])
    router = world.add(ME, ring)

    async def scenario() -> None:
        assert (await all_of(router))[-1] == found

    world.run(scenario)
    assert ring.asked == [REQUEST, REQUEST]
    assert router.counts.last == answer_of("", 0)


def test_a_loss_is_explained_by_the_rings_that_answered_before_and_after(world: World) -> None:
    lost = [*answer()[:3], LinkLost("gone")]
    plans = {ME: _plan(ME), ENTRY: _plan(ENTRY)}
    ring = FakeRing(attempts=[lost, answer()], replicas={"big": (ME,)}, plans=plans)
    router = world.add(ME, ring)

    async def scenario() -> None:
        assert text_of(await all_of(router, replace(REQUEST, model="big"))) == TEXT

    world.run(scenario)
    group = GroupId(b"big")
    assert ring.explained == [((group, plans[ME]), (group, plans[ME]))]
    assert router.counts.by_ring == {group: (router.counts.last, 5)}


def _plan(*nodes: NodeId) -> Plan:
    stages = (PlanStage(node, Span(at, at + 1)) for at, node in enumerate(nodes))
    return Plan(1, "big", Ends.ENTRY, tuple(stages))


def test_the_pause_after_losses_is_counted_until_the_next_text(world: World) -> None:
    lost: list[Event | Exception] = [Prefilled(1, 1), LinkLost("gone")]
    first: list[Event | Exception] = [*answer()[:3], LinkLost("gone")]
    router = world.add(ME, FakeRing(attempts=[first, lost, lost, answer()]))

    async def scenario() -> None:
        assert text_of(await all_of(router)) == TEXT

    world.run(scenario)
    delays = RETRY_DELAY_S + 2 * RETRY_DELAY_S  # the first retry is immediate
    rows = {LossCause.NODE_LOST: 30, LossCause.LINK_LOST: 5}
    other, losses = router.counts.loss_counts(rows)
    assert other == LossCounts(LossCause.LINK_LOST, rows=5)
    assert (losses.cause, losses.count) == (LossCause.NODE_LOST, 1)
    assert (losses.tokens, losses.rows) == (2, 30)
    assert losses.paused_s == pytest.approx(delays)


@pytest.mark.parametrize("cuts", [(3, 1, 2), (1, 5, 3, 4), (2, 2, 2)])
def test_several_lost_rings_lose_no_character(world: World, cuts: tuple[int, ...]) -> None:
    attempts = [[*answer()[:cut], LinkLost("gone")] for cut in cuts]
    router = world.add(ME, FakeRing(attempts=[*attempts, answer()]))

    async def scenario() -> None:
        assert text_of(await all_of(router)) == TEXT

    world.run(scenario)


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_lost_link_to_the_entry_loses_no_character(world: World, cut: int) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[[*answer()[:cut], None], answer()]))

    async def scenario() -> None:
        events: list[Event] = []
        async for event in router.generate(REQUEST):
            events.append(event)
            if len(events) == cut:
                router.lost(ENTRY)
                world.routers[ENTRY].lost(ME)
        assert text_of(events) == TEXT

    world.run(scenario)
    assert world.rings[ENTRY].closed == 2


def test_the_next_ring_is_given_the_tokens_of_the_last(world: World) -> None:
    ring = FakeRing(attempts=[[*answer()[:4], LinkLost("gone")], answer()])
    router = world.add(ME, ring)

    async def scenario() -> None:
        await all_of(router)

    world.run(scenario)
    assert [request.given for request in ring.asked] == [(), (0, 1, 2)]


def test_the_number_of_retries_is_limited(world: World) -> None:
    ring = FakeRing(attempts=[[LinkLost(f"gone {n}")] for n in range(ATTEMPTS + 1)])
    router = world.add(ME, ring)

    async def scenario() -> None:
        with pytest.raises(LinkLost, match=f"gone {ATTEMPTS - 1}"):
            await all_of(router)

    world.run(scenario)
    assert len(ring.asked) == ATTEMPTS


@pytest.mark.parametrize("loads_until", [0.0, 1e9])
def test_rings_that_come_and_go_without_an_event_do_not_hold_a_request(
    world: World, loads_until: float
) -> None:
    lost = [LinkLost("gone")]
    ring = FakeRing(attempts=[lost, lost, answer()], loads_until=loads_until, frees_s=QUIET_S + 1.0)
    router = world.add(ME, ring)

    async def scenario() -> None:
        if loads_until:
            assert text_of(await all_of(router)) == TEXT
            return
        with pytest.raises(LinkLost, match="gone"):
            await all_of(router)
        assert len(ring.asked) == 2

    world.run(scenario)


@pytest.mark.parametrize("first", [[], [Piece(TEXT[:3], (0,))]])
def test_a_ring_that_is_lost_after_a_long_time_without_an_event_is_followed_by_another(
    world: World, first: list[Event]
) -> None:
    ring = FakeRing(attempts=[[*first, LinkLost("gone")], answer()], frees_s=QUIET_S + 1.0)
    router = world.add(ME, ring)

    async def scenario() -> None:
        assert text_of(await all_of(router)) == TEXT

    world.run(scenario)
    assert len(ring.asked) == 2


def test_an_event_between_two_losses_restarts_the_time_of_a_request(world: World) -> None:
    lost: list[Event | Exception | None] = [Piece(TEXT[:3], (0,)), LinkLost("gone")]
    again: list[Event | Exception | None] = [Prefilled(1, 1), LinkLost("gone")]
    ring = FakeRing(attempts=[lost, again, again, answer()], frees_s=QUIET_S + 1.0)
    router = world.add(ME, ring)

    async def scenario() -> None:
        assert text_of(await all_of(router)) == TEXT

    world.run(scenario)
    assert len(ring.asked) == 4


def test_a_client_that_loses_its_ingress_retries(world: World) -> None:
    world.clients = {ME}
    client = world.add(ME, FakeRing(at=OTHER), is_client=True)
    world.add(OTHER, FakeRing(at=OTHER, attempts=[[Piece(TEXT[:3], (0,)), None], answer()]))
    events: list[Event] = []

    async def scenario() -> None:
        asking = asyncio.ensure_future(note(client, events))
        await asyncio.sleep(1)
        client.lost(OTHER)
        world.routers[OTHER].lost(ME)
        await asking

    world.run(scenario)
    assert text_of(events) == TEXT


def test_other_errors_are_not_retried(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[[UserError("too long", hint="cut it")]]))

    async def scenario() -> None:
        with pytest.raises(UserError, match="too long") as raised:
            await all_of(router)
        assert raised.value.hint == "cut it"

    world.run(scenario)
    assert router.counts.failed == 1


def test_waiting_for_a_ring_times_out(world: World) -> None:
    router = world.add(ME, FakeRing(at=None))

    async def scenario() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NotServed, match="There is no ring: they sleep") as raised:
            await all_of(router)
        assert asyncio.get_running_loop().time() - began == RING_S
        assert raised.value.retry_s == 2 * RING_S
        assert raised.value.hint == "retry in 60 s; see `meshllm ring status`"

    world.run(scenario)


def test_the_error_names_the_model_that_was_waited_for(world: World) -> None:
    ring = FakeRing(at=None, groups={"big": (FIRST_GROUP,)}, pins={"big": "0123456789abcdef"})
    router = world.add(ME, ring)

    async def scenario() -> None:
        with pytest.raises(NotServed, match="There is no ring of `big`: they sleep"):
            await all_of(router, replace(REQUEST, model="big"))

    world.run(scenario)


def test_a_client_of_an_ingress_is_told_when_to_retry(world: World) -> None:
    client = world.add(OTHER, FakeRing(at=ME), is_client=True)
    world.clients.add(OTHER)
    world.add(ME, FakeRing(at=None))

    async def scenario() -> None:
        with pytest.raises(NotServed) as raised:
            await all_of(client)
        assert raised.value.retry_s == 2 * RING_S

    world.run(scenario)


def begun(loads_s: float) -> FakeRing:
    """Lose the ring behind the first piece; the next one loads for a while."""
    return FakeRing(attempts=[[*pieces(TEXT)[:1], LinkLost("gone")], answer()], loads_s=loads_s)


def test_a_request_that_has_begun_waits_while_its_ring_loads(world: World) -> None:
    ring = begun(500.0)
    router = world.add(ME, ring)

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(2 * RING_S)
        assert not asking.done()
        ring.at = ME
        assert text_of(await asking) == TEXT

    world.run(scenario)


@pytest.mark.parametrize(
    ("loads_s", "waits_s"),
    [(0.0, RING_S), (500.0, 500.0 + RING_S), (1e9, 900.0)],
    ids=["loaded", "loads", "loads without end"],
)
def test_it_waits_no_longer_than_its_ring_may_load(
    world: World, loads_s: float, waits_s: float
) -> None:
    router = world.add(ME, begun(loads_s))

    async def scenario() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimedOut, match="There is no ring"):
            await all_of(router)
        assert asyncio.get_running_loop().time() - began == waits_s

    with patch("meshllm.node.requests.router.MAX_LOADING_S", 900.0):
        world.run(scenario)


def test_a_new_request_does_not_wait_for_a_ring_that_loads(world: World) -> None:
    router = world.add(ME, FakeRing(at=None, loads_until=500.0))

    async def scenario() -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(TimedOut):
            await all_of(router)
        assert asyncio.get_running_loop().time() - began == RING_S

    world.run(scenario)


def test_requests_beyond_the_limit_wait_their_turn(world: World) -> None:
    count = MAX_FORWARDED + MAX_WAITING
    router = world.add(ME, FakeRing(at=ENTRY))
    entry = world.add(ENTRY, FakeRing(attempts=[answer()] * count))
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, len(entry.peers._running))
            await asyncio.sleep(0)

    async def scenario() -> None:
        watching = asyncio.ensure_future(watch())
        answers = await asyncio.gather(*(all_of(router) for _ in range(count)))
        watching.cancel()
        assert [text_of(each) for each in answers] == [TEXT] * count

    world.run(scenario)
    assert most == MAX_FORWARDED
    assert (router.counts.served, router.counts.failed) == (count, 0)


def test_a_full_queue_refuses_and_a_place_that_is_left_is_free(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[[None]] * MAX_FORWARDED + [answer()]))

    async def scenario() -> None:
        asking = [asyncio.ensure_future(all_of(router)) for _ in range(MAX_FORWARDED + MAX_WAITING)]
        await asyncio.sleep(1)
        with pytest.raises(Busy, match=f"{MAX_WAITING} are waiting"):
            await all_of(router)
        for each in asking[1:]:
            each.cancel()
        await asyncio.wait(asking[1:])
        assert text_of(await all_of(router)) == TEXT
        asking[0].cancel()
        await asyncio.wait(asking)

    world.run(scenario)
    assert not any(queue._waiting for queue in router._queues.values())


def test_a_request_that_waits_for_a_ring_holds_no_place_at_its_lost_entry(world: World) -> None:
    fox, dog = (replace(REQUEST, model=name) for name in ("fox", "dog"))
    lost = set[str]()

    class Ring(FakeRing):
        async def entries(
            self, model: str = "", trusted: Sequence[str] | None = None
        ) -> Sequence[RingEntry]:
            while model in lost:  # noqa: ASYNC110  # in virtual time
                await asyncio.sleep(1)
            return await super().entries(model, trusted)

    router = world.add(ME, Ring(at=ENTRY, replicas={"fox": (ENTRY,), "dog": (ENTRY,)}))
    world.add(ENTRY, FakeRing(attempts=[[None]] * MAX_FORWARDED + [answer()]))

    async def scenario() -> None:
        endless = [asyncio.ensure_future(all_of(router, dog)) for _ in range(MAX_FORWARDED)]
        await asyncio.sleep(1)
        waiting = [asyncio.ensure_future(all_of(router, fox)) for _ in range(MAX_FORWARDED)]
        await asyncio.sleep(1)
        lost.add("fox")
        for each in endless:
            each.cancel()
        await asyncio.wait(endless)
        async with asyncio.timeout(1):
            assert text_of(await all_of(router, dog)) == TEXT
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)

    world.run(scenario)


def test_queues_at_nodes_that_came_and_went_are_forgotten(world: World) -> None:
    ring = FakeRing(at=ENTRY)
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(attempts=[[None]]))
    others = [NodeId(bytes([number]) * 32) for number in range(12)]
    for node in others:
        world.add(node, FakeRing(attempts=[answer()]))
    most = 0

    async def scenario() -> None:
        nonlocal most
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(1)
        for ring.at in others:
            await asyncio.sleep(60)
            assert text_of(await all_of(router)) == TEXT
            most = max(most, len(router._queues) - 1)
        assert ENTRY in router._queues  # a request waits there
        asking.cancel()
        await asyncio.wait([asking])

    world.run(scenario)
    assert most == OWNER_S // 60


def test_requests_that_wait_are_bounded_by_their_memory(world: World) -> None:
    ring = FakeRing(at=None, attempts=[answer()])
    router = world.add(ME, ring)
    long = Request(raw="x" * REQUEST_BYTES, scope="a key")
    most = MAX_HELD_BYTES // size_of(long)

    async def scenario() -> None:
        waiting = [asyncio.ensure_future(all_of(router, long)) for _ in range(most)]
        await asyncio.sleep(1)
        with pytest.raises(Busy, match=f"{most * size_of(long)} bytes are in progress"):
            await all_of(router, long)
        assert (router.counts.active, router.counts.failed) == (most, 1)
        own = asyncio.ensure_future(all_of(router))
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        ring.at = ME
        assert text_of(await own) == TEXT

    world.run(scenario)


def test_the_owner_does_not_wait_behind_the_requests_of_a_key(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(
        ENTRY, FakeRing(attempts=[answer(), *[[None]] * (MAX_FORWARDED - 1), *[answer()] * 2])
    )
    of_key = replace(REQUEST, scope="a key")

    async def scenario() -> None:
        await all_of(router)
        endless = [asyncio.ensure_future(all_of(router, of_key)) for _ in range(3 * MAX_WAITING)]
        await asyncio.sleep(1)
        refused = [each for each in endless if each.done()]
        assert {type(each.exception()) for each in refused} == {Busy}
        assert [text_of(await all_of(router)) for _ in range(2)] == [TEXT] * 2
        assert sum(not each.done() for each in endless) == MAX_FORWARDED - 1 + MAX_WAITING
        for each in endless:
            each.cancel()
        await asyncio.wait(endless)

    world.run(scenario)


def test_answers_that_became_long_at_another_node_leave_a_place(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = 3
    monkeypatch.setattr("meshllm.node.requests.router.MAX_FORWARDED", places)
    router = world.add(ME, FakeRing(at=ENTRY))
    begun = [Piece("a", (token,)) for token in range(SHORT_ANSWER + 1)]
    world.add(ENTRY, FakeRing(attempts=[*[[*begun, None]] * places, answer()]))

    async def scenario() -> None:
        endless = [asyncio.ensure_future(all_of(router)) for _ in range(places)]
        await asyncio.sleep(1)
        assert text_of(await all_of(router)) == TEXT
        assert not any(each.done() for each in endless)
        for each in endless:
            each.cancel()
        await asyncio.wait(endless)

    world.run(scenario)


def test_the_turns_of_keys_at_another_node_are_fair_in_tokens(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    ring = FakeRing(attempts=[[None]] * MAX_FORWARDED + [answer()] * 8)
    world.add(ENTRY, ring)
    of_a, of_b = (replace(REQUEST, scope=key) for key in "ab")
    asked = [replace(of_a, max_tokens=2048), replace(of_b, max_tokens=64)] * 4

    async def scenario() -> None:
        endless = [
            asyncio.ensure_future(all_of(router, replace(REQUEST, scope="c")))
            for _ in range(MAX_FORWARDED)
        ]
        await asyncio.sleep(1)
        waiting = [asyncio.ensure_future(all_of(router, each)) for each in asked]
        await asyncio.sleep(1)
        endless.pop().cancel()
        await asyncio.gather(*waiting)
        for each in endless:
            each.cancel()
        await asyncio.wait(endless)

    world.run(scenario)
    answered = [each.max_tokens for each in ring.asked[MAX_FORWARDED:]]
    assert answered == [64] * 4 + [2048] * 4


def test_a_waiting_request_goes_to_the_entry_of_its_turn(world: World) -> None:
    ring = FakeRing(at=ENTRY)
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(attempts=[[None]] * MAX_FORWARDED))
    world.add(OTHER, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        first = [asyncio.ensure_future(all_of(router)) for _ in range(MAX_FORWARDED)]
        await asyncio.sleep(1)
        last = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(1)
        ring.at = OTHER
        first[0].cancel()
        assert text_of(await last) == TEXT
        for each in first:
            each.cancel()
        await asyncio.wait(first)

    world.run(scenario)
    assert len(world.rings[OTHER].asked) == 1


FOX = replace(REQUEST, model="fox")
OFFERED = {ENTRY: ModelOffer("fox", "bf16", 2048), OTHER: ModelOffer("fox", "int4", 4096)}
IDS = tuple(range(4097))
GONE, BUSY, LATE = LinkLost("gone"), Busy("full"), TimedOut("late")


def test_a_request_for_another_model_goes_to_its_provider(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY,)}))
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        assert text_of(await all_of(router, FOX)) == TEXT

    world.run(scenario)
    assert world.rings[ENTRY].models == ["fox"]
    assert (router.counts.served, router.counts.tokens) == (1, 5)


def test_a_node_asks_its_own_engine_without_a_link(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer()], provided={"fox": (ME,)}))

    async def scenario() -> None:
        assert text_of(await all_of(router, FOX)) == TEXT

    world.run(scenario)
    assert world.sent == []


@pytest.mark.parametrize(
    "error",
    [GONE, BUSY, LATE, MeshError("500"), PeerFault("invalid JSON"), ModelMissing("404")],
    ids=["gone", "busy", "late", "broken", "invalid", "missing"],
)
def test_another_provider_answers_if_one_fails_at_once(world: World, error: MeshError) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    world.add(ENTRY, FakeRing(attempts=[[error]]))
    world.add(OTHER, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        assert text_of(await all_of(router, FOX)) == TEXT

    world.run(scenario)


def test_a_request_that_a_provider_finds_invalid_goes_to_no_other_one(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    for node in (ENTRY, OTHER):
        world.add(node, FakeRing(attempts=[[UserError("too long")]]))

    async def scenario() -> None:
        with pytest.raises(UserError, match="too long"):
            await all_of(router, FOX)

    world.run(scenario)
    assert sum(len(world.rings[node].asked) for node in (ENTRY, OTHER)) == 1


def test_an_answer_of_a_provider_that_has_begun_ends_with_its_error(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    for node in (ENTRY, OTHER):
        world.add(node, FakeRing(attempts=[[Piece("a"), GONE]]))

    async def scenario() -> None:
        with pytest.raises(LinkLost, match="gone"):
            await all_of(router, FOX)

    world.run(scenario)
    assert sum(len(world.rings[node].asked) for node in (ENTRY, OTHER)) == 1
    assert router.counts.failed == 1


def test_the_last_error_is_told_if_all_providers_fail(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    errors: dict[NodeId, MeshError] = {ENTRY: GONE, OTHER: BUSY}
    for node, error in errors.items():
        world.add(node, FakeRing(attempts=[[error]]))

    async def scenario() -> None:
        with pytest.raises((LinkLost, Busy)) as told:
            await all_of(router, FOX)
        asked = [peer for _, peer, message in world.sent if isinstance(message, Generate)]
        assert {*asked} == {ENTRY, OTHER}
        assert type(told.value) is type(errors[asked[-1]])

    world.run(scenario)


def test_a_waiting_request_goes_to_another_provider_if_its_own_is_lost(world: World) -> None:
    ring = FakeRing(provided={"fox": (ENTRY,)})
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(attempts=[[Piece("a"), None]] * MAX_FORWARDED))
    world.add(OTHER, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        first = [asyncio.ensure_future(all_of(router, FOX)) for _ in range(MAX_FORWARDED)]
        await asyncio.sleep(1)
        last = asyncio.ensure_future(all_of(router, FOX))
        await asyncio.sleep(1)
        ring.provided["fox"] = (OTHER,)
        del world.routers[ENTRY]
        router.lost(ENTRY)
        async with asyncio.timeout(1):
            assert text_of(await last) == TEXT
        assert {type(each) for each in await asyncio.gather(*first, return_exceptions=True)} == {
            LinkLost
        }

    world.run(scenario)
    sent = Counter(peer for _, peer, message in world.sent if isinstance(message, Generate))
    assert sent == {ENTRY: MAX_FORWARDED, OTHER: 1}


def test_a_provider_that_is_lost_before_the_turn_of_a_request_is_the_error_if_it_is_the_only_one(
    world: World,
) -> None:
    ring = FakeRing(provided={"fox": (ENTRY,)})
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(attempts=[[None]] * MAX_FORWARDED))

    async def scenario() -> None:
        asking = [asyncio.ensure_future(all_of(router, FOX)) for _ in range(MAX_FORWARDED + 1)]
        await asyncio.sleep(1)
        ring.provided["fox"] = ()
        asking[0].cancel()
        with pytest.raises(LinkLost, match="no longer provides `fox`"):
            await asking[-1]
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)

    world.run(scenario)


def test_requests_are_spread_over_providers_and_chats_stay_where_they_went(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    for node in (ENTRY, OTHER):
        world.add(node, FakeRing(attempts=[answer()] * 6))
    chats = [replace(FOX, raw=f"{number}") for number in range(4)]

    async def scenario() -> None:
        await asyncio.gather(*(all_of(router, chat) for chat in chats))
        for chat in chats * 2:
            await all_of(router, chat)

    world.run(scenario)
    asked = [[each.raw for each in world.rings[node].asked] for node in (ENTRY, OTHER)]
    assert [len(each) for each in asked] == [6, 6]
    assert {*asked[0]}.isdisjoint(asked[1])


def test_a_slow_provider_gets_fewer_new_requests(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    for node, token_ms in ((ENTRY, 10.0), (OTHER, 40.0)):
        timed = [*answer()[:-1], replace(answer_of(TEXT, 5), ms_per_token=token_ms, counted=40)]
        world.add(node, FakeRing(attempts=[timed] * 20))

    async def scenario() -> None:
        for begin, count in (("first", 2), ("second", 10)):
            asked = (replace(FOX, raw=f"{begin} {number}") for number in range(count))
            await asyncio.gather(*(all_of(router, each) for each in asked))

    world.run(scenario)
    assert [len(world.rings[node].asked) for node in (ENTRY, OTHER)] == [9, 3]


@pytest.mark.parametrize(
    ("provided", "kind", "message"),
    [
        ({}, ModelMissing, "No node provides"),
        ({"fox": (OTHER,)}, WrongField, "No trusted node provides"),
    ],
)
def test_a_model_that_nobody_provides_is_an_error(
    world: World, provided: dict[str, tuple[NodeId, ...]], kind: type[MeshError], message: str
) -> None:
    router = world.add(ME, FakeRing(provided=provided))

    async def scenario() -> None:
        with pytest.raises(kind, match=message):
            await all_of(router, replace(FOX, trusted=("entry",)))

    world.run(scenario)
    assert world.sent == []


@pytest.mark.parametrize(
    ("needs", "asked"),
    [
        ({"min_bits": 16}, {ENTRY}),
        ({"min_bits": 4, "min_context": 4096}, {OTHER}),
        ({"min_context": 2048}, {ENTRY, OTHER}),
        ({}, {ENTRY, OTHER, THIRD}),
        ({"raw": None, "ids": IDS[:2048]}, {ENTRY, OTHER, THIRD}),
        ({"raw": None, "ids": IDS[:2049], "min_bits": 4}, {OTHER}),
        ({"raw": None, "ids": IDS}, {THIRD}),  # whose context is unknown
    ],
    ids=["bits", "context", "both", "nothing", "ids", "more ids", "most ids"],
)
def test_a_request_goes_to_providers_that_have_what_it_needs(
    world: World, needs: dict[str, Any], asked: set[NodeId]
) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER, THIRD)}, offered=OFFERED))
    for node in (ENTRY, OTHER, THIRD):
        world.add(node, FakeRing(attempts=[answer()] * 12))

    async def scenario() -> None:
        each = (replace(FOX, affinity=f"{number}", **{"raw": "?"} | needs) for number in range(12))
        texts = await asyncio.gather(*(all_of(router, request) for request in each))
        assert [text_of(events) for events in texts] == [TEXT] * 12

    world.run(scenario)
    assert {node for node in (ENTRY, OTHER, THIRD) if world.rings[node].asked} == asked


def test_more_ids_than_every_provider_takes_are_too_long(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}, offered=OFFERED))

    async def scenario() -> None:
        with pytest.raises(ContextTooLong, match="is 4096 tokens; the prompt has 4097"):
            await all_of(router, replace(FOX, ids=IDS))

    world.run(scenario)
    assert world.sent == []


@pytest.mark.parametrize(
    ("needs", "param", "unmet"),
    [
        ({"min_bits": 32}, "meshllm.min_precision", "`meshllm.min_precision`"),
        ({"min_context": 4097}, "meshllm.min_context", "`meshllm.min_context`"),
        (
            {"min_bits": 16, "min_context": 4096},
            "meshllm.min_precision",
            "`meshllm.min_context` and `meshllm.min_precision`",
        ),
    ],
    ids=["bits", "context", "both at one"],
)
def test_a_need_that_no_provider_meets_is_refused_with_what_there_is(
    world: World, needs: dict[str, Any], param: str, unmet: str
) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER, THIRD)}, offered=OFFERED))

    async def scenario() -> None:
        with pytest.raises(WrongField) as refused:
            await all_of(router, replace(FOX, **needs))
        assert refused.value.name == param
        assert str(refused.value) == (
            f"No ring or provider meets {unmet}: `fox` is served in bf16 by provider entry"
            f" ({short(ENTRY)})"
            f" with context 2048, and in int4 by provider other ({short(OTHER)}) with context 4096,"
            f" and in unknown precision by provider {short(THIRD)} with unknown context"
        )

    world.run(scenario)
    assert world.sent == []


BESIDE: dict[str, Any] = {
    "replicas": {"fox": (ENTRY,), "alias": (ENTRY,)},
    "sizes": {"fox": ModelOffer("fox", "int8", 4096), "alias": ModelOffer("fox", "int8", 4096)},
    "provided": {"fox": (OTHER,)},
    "offered": {OTHER: ModelOffer("fox", "bf16", 32768)},
}
"""A ring and a provider that serve one model."""
SERVED = (
    "`fox` is served in int8 by a ring with context 4096, and in bf16 by provider"
    f" other ({short(OTHER)}) with context 32768"
)


@pytest.mark.parametrize(
    ("needs", "at"),
    [
        ({}, ENTRY),
        ({"min_bits": 8, "min_context": 4096}, ENTRY),
        ({"needs_exact": True}, ENTRY),
        ({"min_bits": 16}, OTHER),
        ({"min_context": 4097}, OTHER),
        ({"min_bits": 16, "min_context": 32768}, OTHER),
        ({"min_bits": 16, "model": "alias"}, OTHER),
    ],
    ids=["nothing", "both", "exact", "precision", "context", "more of both", "alias"],
)
def test_a_request_goes_to_the_provider_of_a_ring_s_model_if_only_it_has_what_it_needs(
    world: World, needs: dict[str, Any], at: NodeId
) -> None:
    router = world.add(ME, FakeRing(**BESIDE, exact=frozenset({ENTRY})))
    for node in (ENTRY, OTHER):
        world.add(node, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        assert text_of(await all_of(router, replace(FOX, **needs))) == TEXT

    world.run(scenario)
    (asked,) = world.rings[at].asked
    assert asked.model == "fox"


@pytest.mark.parametrize(
    ("needs", "param", "said"),
    [
        (
            {"min_bits": 32},
            "min_precision",
            f"No ring or provider meets `meshllm.min_precision`: {SERVED}",
        ),
        (
            {"min_context": 32769},
            "min_context",
            f"No ring or provider meets `meshllm.min_context`: {SERVED}",
        ),
        (
            {"needs_exact": True, "min_bits": 16},
            "min_precision",
            f"No ring or provider meets `meshllm.exact` and `meshllm.min_precision`: {SERVED}",
        ),
        (
            {"needs_exact": True},
            "exact",
            f"The ring of entry ({short(ENTRY)}) is not bit-identical to transformers, and no"
            f" provider is: {SERVED}",
        ),
        (
            {"min_bits": 16, "trusted": ("entry",)},
            "trust",
            "No trusted node provides `fox` as the request needs it",
        ),
        (
            {"min_bits": 32, "ids": (1,) * 40_000},
            "min_precision",
            f"No ring or provider meets `meshllm.min_precision`: {SERVED}",
        ),
        (
            {"min_context": 5000, "ids": (1,) * 40_000},
            "min_context",
            "No ring or provider meets `meshllm.min_context` and a prompt of 40000 tokens: "
            f"{SERVED}",
        ),
    ],
    ids=[
        "precision",
        "context",
        "exact and precision",
        "exact",
        "not trusted",
        "precision, long prompt",
        "context, long prompt",
    ],
)
def test_a_need_that_neither_ring_nor_provider_meets_is_refused_with_what_there_is(
    world: World, needs: dict[str, Any], param: str, said: str
) -> None:
    router = world.add(ME, FakeRing(**BESIDE))

    async def scenario() -> None:
        with pytest.raises(WrongField) as refused:
            await all_of(router, replace(FOX, **needs))
        assert (refused.value.name, str(refused.value)) == (f"meshllm.{param}", said)

    world.run(scenario)
    assert world.sent == []


@pytest.mark.parametrize("at", [ME, OTHER], ids=["owner", "client"])
def test_who_waits_for_a_ring_is_told_once_why(world: World, at: NodeId) -> None:
    ring = FakeRing(at=None, attempts=[answer()])
    world.add(ME, ring)
    world.add(OTHER, FakeRing(at=ME), is_client=True)
    world.clients.add(OTHER)

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(world.routers[at]))
        await asyncio.sleep(4.25 * WAITING_S)
        ring.at = ME
        assert await asking == [Waiting("they sleep"), *answer()]

    world.run(scenario)


def test_only_a_request_for_a_ring_waits_for_it(world: World) -> None:
    router = world.add(ME, FakeRing(**BESIDE, at=None))
    waits: list[Event] = [Waiting("they sleep")]
    beside: list[dict[str, Any]] = [{"min_bits": 16}, {}, {"trusted": ("other",)}]
    waiting: list[dict[str, Any]] = [{"needs_exact": True}, {"trusted": ("entry",)}]

    async def scenario() -> None:
        with pytest.raises(WrongField, match="by a ring that has yet to form with context 4096"):
            await all_of(router, replace(FOX, min_bits=32))
        for changes in (*beside, *waiting):
            request, events = replace(FOX, **changes), list[Event]()
            with suppress(TimeoutError, NotServed):
                async with asyncio.timeout(2 * RING_S):
                    await note(router, events, request)
            assert events == (waits if changes in waiting else [])
        assert len(world.sent) == 2 * len(beside)  # a `Generate` and a `CancelRequest` for each

    world.run(scenario)


@pytest.mark.parametrize(
    "needs",
    [{}, {"min_bits": 8, "min_context": 4096}, {"model": "alias"}, {"trusted": ("other",)}],
    ids=["nothing", "both", "alias", "trusted"],
)
def test_a_new_request_goes_to_a_provider_at_once_while_no_ring_of_its_name_serves(
    world: World, needs: dict[str, Any]
) -> None:
    ring = FakeRing(**BESIDE, at=None)
    router = world.add(ME, ring)
    for node in (ENTRY, OTHER):
        world.add(node, FakeRing(attempts=[answer()]))
    request = replace(FOX, **needs)

    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        begin = now()
        assert text_of(await all_of(router, request)) == TEXT
        assert now() == begin
        ring.at = ENTRY
        assert text_of(await all_of(router, replace(request, trusted=None))) == TEXT

    world.run(scenario)
    assert [each.model for each in world.rings[OTHER].asked] == ["fox"]
    assert len(world.rings[ENTRY].asked) == 1
    assert ring.used == [request.model]  # so that a ring is loaded
    assert router.counts.served == 2


@pytest.mark.parametrize(
    "needs",
    [
        {"needs_exact": True},
        {"given": (0, 1)},
        {"embeds": True},
        {"max_tokens": 0},
        {"max_reasoning": 9},
        {"trusted": ("entry",)},
        {"raw": None, "ids": (1,) * 32769},
    ],
    ids=["exact", "begun", "embedding", "count", "reasoning", "not trusted", "too long"],
)
def test_what_no_provider_may_answer_waits_for_a_ring(world: World, needs: dict[str, Any]) -> None:
    ring = FakeRing(**BESIDE, at=None, exact=frozenset({ENTRY}))
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router, replace(FOX, **needs)))
        await asyncio.sleep(20)
        ring.at = ENTRY
        await asking

    world.run(scenario)
    assert {peer for _, peer, _ in world.sent if peer != ME} == {ENTRY}


@pytest.mark.parametrize(
    "error",
    [GONE, BUSY, MeshError("It broke"), UserError("The engine refused (400): no tools")],
    ids=["gone", "busy", "broken", "refused"],
)
def test_a_request_that_every_provider_fails_or_refuses_waits_for_a_ring(
    world: World, error: MeshError
) -> None:
    ring = FakeRing(**BESIDE, at=None)
    router = world.add(ME, ring)
    world.add(OTHER, FakeRing(attempts=[[error]]))
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router, FOX))
        await asyncio.sleep(20)
        ring.at = ENTRY
        assert text_of(await asking) == TEXT

    world.run(scenario)
    assert len(world.rings[OTHER].asked) == 1


def test_an_answer_that_a_provider_has_begun_in_place_of_a_ring_ends_with_its_error(
    world: World,
) -> None:
    router = world.add(ME, FakeRing(**BESIDE, at=None))
    world.add(OTHER, FakeRing(attempts=[[Piece("a "), MeshError("It broke")]]))

    async def scenario() -> None:
        with pytest.raises(MeshError, match="It broke"):
            await all_of(router, FOX)

    world.run(scenario)
    assert router.counts.failed == 1


def test_a_request_that_a_ring_has_accepted_stays_with_rings(world: World) -> None:
    ring = FakeRing(**BESIDE, at=ENTRY)
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(attempts=[[None], answer()]))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router, FOX))
        await asyncio.sleep(1)
        ring.at = None
        router.lost(ENTRY)
        world.routers[ENTRY].lost(ME)
        await asyncio.sleep(5)
        assert not asking.done()
        ring.at = ENTRY
        assert text_of(await asking) == TEXT

    world.run(scenario)
    assert OTHER not in {peer for _, peer, _ in world.sent}


def test_a_prompt_goes_to_trusted_providers_only(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY, OTHER)}))
    router.trusted = ("other",)  # of the owner
    world.add(ENTRY)
    world.add(OTHER, FakeRing(attempts=[answer(), answer()]))

    async def scenario() -> None:
        await all_of(router, FOX)
        await all_of(router, FOX)

    world.run(scenario)
    assert {peer for _, peer, _ in world.sent if peer != ME} == {OTHER}


def test_a_prompt_does_not_go_to_an_entry_that_is_not_trusted(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        with pytest.raises(WrongField, match="not trusted"):
            await all_of(router, replace(REQUEST, trusted=("other",)))
        await all_of(router, replace(REQUEST, trusted=("entry",)))

    world.run(scenario)
    assert world.rings[ENTRY].asked[0].trusted == (show(ENTRY), show(ME))


def test_an_unknown_name_of_a_trusted_node_is_one_of_that_field(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        with pytest.raises(WrongField, match="`nobody`") as caught:
            await all_of(router, replace(REQUEST, trusted=("nobody",)))
        assert caught.value.name == "meshllm.trust"

    world.run(scenario)


def test_a_client_asks_only_nodes_that_it_trusts(world: World) -> None:
    world.clients.add(OTHER)
    client = world.add(OTHER, FakeRing(at=ME), is_client=True)
    world.add(ME, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        with pytest.raises(WrongField, match="not one of those trusted"):
            await all_of(client, replace(REQUEST, trusted=("entry",)))
        assert text_of(await all_of(client, replace(REQUEST, trusted=("me",)))) == TEXT

    world.run(scenario)


TWINS: dict[str, tuple[NodeId, ...]] = {"fox": (ENTRY, OTHER)}


def first_choice() -> NodeId:
    """Return the entry of the ring that an idle node chooses for `FOX`."""
    return ReplicaChoice().choose(list(map(RingEntry, TWINS["fox"])), FOX, AttemptHistory()).node


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_an_answer_goes_on_at_another_replica(world: World, cut: int) -> None:
    first = first_choice()
    (second,) = {ENTRY, OTHER} - {first}
    router = world.add(ME, FakeRing(replicas=TWINS))
    world.add(first, FakeRing(replicas=TWINS, attempts=[[*answer()[:cut], GONE]]))
    world.add(second, FakeRing(replicas=TWINS, attempts=[answer()]))

    async def scenario() -> None:
        assert text_of(await all_of(router, FOX)) == TEXT

    world.run(scenario)

    assert world.rings[first].models == world.rings[second].models == ["fox"]
    assert len(world.rings[second].asked[0].given) == max(0, cut - 1)


def test_a_request_goes_to_another_replica_at_once_if_the_first_is_busy(world: World) -> None:
    first = first_choice()
    (second,) = {ENTRY, OTHER} - {first}
    router = world.add(ME, FakeRing(replicas=TWINS))
    world.add(first, FakeRing(replicas=TWINS, attempts=[[BUSY], [BUSY]]))
    world.add(second, FakeRing(replicas=TWINS, attempts=[answer(), [BUSY]]))

    async def scenario() -> None:
        now = asyncio.get_running_loop().time
        begin = now()
        events = await all_of(router, FOX)
        assert text_of(events) == TEXT
        assert not [event for event in events if isinstance(event, Interruption)]
        with pytest.raises(Busy, match="full"):
            await all_of(router, FOX)
        assert now() == begin

    world.run(scenario)
    assert [len(world.rings[each].asked) for each in (first, second)] == [2, 2]
    assert (router.counts.served, router.counts.failed, router.counts.losses) == (1, 1, {})


def test_a_request_passes_a_full_queue_for_one_replica(world: World) -> None:
    router = world.add(ME, FakeRing(replicas=TWINS | {"dog": (ENTRY,)}))
    world.add(ENTRY, FakeRing(replicas=TWINS, attempts=[[None]] * MAX_FORWARDED))
    world.add(OTHER, FakeRing(replicas=TWINS, attempts=[answer()] * 9))
    dog = replace(REQUEST, model="dog")

    async def scenario() -> None:
        count = MAX_FORWARDED + MAX_WAITING
        asking = [asyncio.ensure_future(all_of(router, dog)) for _ in range(count)]
        await asyncio.sleep(1)
        for number in range(9):
            assert text_of(await all_of(router, replace(FOX, raw=f"{number}"))) == TEXT
        with pytest.raises(Busy, match=f"{MAX_WAITING} are waiting"):
            await all_of(router, dog)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)

    world.run(scenario)


def test_parallel_requests_are_spread_over_replicas(world: World) -> None:
    router = world.add(ME, FakeRing(replicas=TWINS))
    for entry in (ENTRY, OTHER):
        world.add(entry, FakeRing(replicas=TWINS, attempts=[answer()] * 8))

    async def scenario() -> None:
        texts = await asyncio.gather(*(all_of(router, FOX) for _ in range(8)))
        assert [text_of(each) for each in texts] == [TEXT] * 8
        assert [text_of(await all_of(router, FOX)) for _ in range(2)] == [TEXT] * 2

    world.run(scenario)

    asked = sorted(len(world.rings[entry].asked) for entry in TWINS["fox"])
    assert asked in ([4, 6], [3, 7], [2, 8])  # alike beginnings, but for the margin


@pytest.mark.parametrize("first", [ME, ENTRY], ids=["local", "remote"])
@pytest.mark.parametrize("begin", ["alike", ""])
def test_requests_that_wait_count_where_they_wait(world: World, first: NodeId, begin: str) -> None:
    replicas: dict[str, tuple[NodeId, ...]] = {"fox": (first, OTHER)}
    router = world.add(ME, FakeRing(replicas=replicas))
    for node in {ENTRY, OTHER}:
        world.add(node, FakeRing(replicas=replicas))
    for ring in world.rings.values():
        ring.attempts = [[None]] * 64
    chats = [replace(FOX, raw=begin or f"{number}") for number in range(64)]

    async def scenario() -> None:
        asking = [asyncio.ensure_future(all_of(router, chat)) for chat in chats]
        await asyncio.sleep(1)
        waiting = len(router._queues[OTHER]._waiting)
        assert 26 <= len(world.rings[OTHER].asked) + waiting <= 38
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)

    world.run(scenario)


TWO = FIRST_GROUP, GroupId(b"k" * 8 + b"\1")


def spread() -> list[Request]:
    """Return requests that begin differently."""
    return [replace(FOX, raw=f"{number}") for number in range(16)]


@pytest.mark.parametrize("at", [ME, ENTRY])
def test_a_request_names_the_ring_to_the_entry_of_two(world: World, at: NodeId) -> None:
    router = world.add(ME, FakeRing(at=at, groups={"fox": TWO}))
    if at != ME:
        world.add(at)
    world.rings[at].attempts = [answer() for _ in range(16)]

    async def scenario() -> None:
        await asyncio.gather(*(all_of(router, each) for each in spread()))

    world.run(scenario)
    assert Counter(world.rings[at].named) == dict.fromkeys(TWO, 8)


@pytest.mark.parametrize("at", [ME, ENTRY])
def test_a_request_goes_to_another_ring_of_an_entry_that_left_the_first(
    world: World, at: NodeId
) -> None:
    router = world.add(ME, FakeRing(at=at, groups={"fox": TWO}))
    if at != ME:
        world.add(at)
    gone = LinkLost("This node does not serve replica 2 of `fox` now")
    world.rings[at].attempts = [[gone], answer()]

    async def scenario() -> None:
        assert text_of(await all_of(router, FOX)) == TEXT

    world.run(scenario)
    first, second = world.rings[at].named
    assert {first, second} == {*TWO}


def test_who_asks_an_ingress_cannot_choose_the_ring(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY, groups={"fox": TWO[1:]}, provided={"dog": (OTHER,)}))
    for node in (ENTRY, OTHER):
        world.add(node, FakeRing(attempts=[answer(), answer()], provided={"dog": (OTHER,)}))
    named = replace(FOX, group=FIRST_GROUP.hex())

    async def scenario() -> None:
        await all_of(router, named)  # from this node's API server
        router.receive(THIRD, Generate(ASK, request_to_json(named)), is_client=True)
        await asyncio.sleep(1)
        await all_of(router, replace(named, model="dog"))

    world.run(scenario)
    assert world.rings[ENTRY].named == [TWO[1]] * 2
    assert world.rings[OTHER].named == [None]


def test_an_entry_picks_the_ring_for_an_ingress_of_an_earlier_version(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer(), answer()]))
    fields = json.loads(request_to_json(REQUEST))
    assert "group" not in fields

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, json.dumps(fields).encode()), is_client=False)
        await asyncio.sleep(1)
        for group in ("x" * 18, TWO[1].hex()):
            wanted = json.dumps(fields | {"group": group}).encode()
            router.receive(OTHER, Generate(ASK, wanted), is_client=False)
            await asyncio.sleep(1)

    world.run(scenario)
    assert world.rings[ME].named == [None, TWO[1]]
    (refused,) = (each for each in world.said(OTHER) if isinstance(each, MeshError))
    assert isinstance(refused, WrongField)
    assert refused.name == "group"


def test_a_slow_replica_gets_fewer_new_requests(world: World) -> None:
    router = world.add(ME, FakeRing(replicas=TWINS))
    for entry, token_ms in ((ENTRY, 10.0), (OTHER, 30.0)):
        timed = [*answer()[:-1], replace(answer_of(TEXT, 5), ms_per_token=token_ms, counted=40)]
        world.add(entry, FakeRing(replicas=TWINS, attempts=[timed] * 20))

    async def scenario() -> None:
        first = (replace(FOX, raw=f"first {number}") for number in range(4))
        await asyncio.gather(*(all_of(router, each) for each in first))
        for entry in TWINS["fox"]:
            assert len(world.rings[entry].asked) == 2
        second = (replace(FOX, raw=f"second {number}") for number in range(12))
        await asyncio.gather(*(all_of(router, each) for each in second))

    world.run(scenario)
    assert [len(world.rings[entry].asked) - 2 for entry in TWINS["fox"]] == [9, 3]


def test_a_prompt_goes_to_a_replica_with_a_trusted_entry(world: World) -> None:
    router = world.add(ME, FakeRing(replicas=TWINS))
    world.add(ENTRY, FakeRing(replicas=TWINS))
    world.add(OTHER, FakeRing(replicas=TWINS, attempts=[answer()] * 9))

    async def scenario() -> None:
        for number in range(9):
            request = replace(FOX, raw=f"{number}", trusted=("other",))
            assert text_of(await all_of(router, request)) == TEXT

    world.run(scenario)
    assert world.rings[ENTRY].asked == []


def test_a_prompt_goes_to_a_replica_whose_nodes_are_all_trusted(world: World) -> None:
    plans = {ENTRY: _plan(ENTRY, THIRD), OTHER: _plan(OTHER, ME)}
    router = world.add(ME, FakeRing(replicas=TWINS, plans=plans))
    world.add(ENTRY, FakeRing(replicas=TWINS))
    world.add(OTHER, FakeRing(replicas=TWINS, attempts=[answer()] * 9))

    async def scenario() -> None:
        for number in range(9):
            request = replace(FOX, raw=f"{number}", trusted=("entry", "other"))
            assert text_of(await all_of(router, request)) == TEXT

    world.run(scenario)
    assert world.rings[ENTRY].asked == []


def test_an_answer_does_not_go_on_in_a_ring_with_a_stranger(world: World) -> None:
    """It ends with the error of a request that no ring may answer, instead of a wait."""
    plans = {ENTRY: _plan(ENTRY, OTHER)}
    router = world.add(ME, FakeRing(at=ENTRY, plans=plans))
    world.add(ENTRY, FakeRing(attempts=[[*answer()[:3], LinkLost("gone")], answer()]))
    events: list[Event] = []

    async def read() -> None:
        async for event in router.generate(replace(REQUEST, trusted=("entry", "other"))):
            events.append(event)
            plans[ENTRY] = _plan(ENTRY, THIRD)

    async def scenario() -> None:
        with pytest.raises(WrongField, match=r"nodes that are not trusted: or2hi5d$"):
            await read()

    world.run(scenario)
    assert events == answer()[:3]
    assert len(world.rings[ENTRY].asked) == 1


def test_no_node_of_a_ring_with_a_stranger_gets_a_prompt(world: World) -> None:
    plans = {ENTRY: _plan(ENTRY, THIRD)}
    router = world.add(ME, FakeRing(at=ENTRY, plans=plans))
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        named = rf"not trusted: entry \({short(ENTRY)}\), or2hi5d$"
        with pytest.raises(WrongField, match=r"nodes that are not trusted: or2hi5d$") as refused:
            await all_of(router, replace(REQUEST, trusted=("entry", "other")))
        with pytest.raises(WrongField, match=named):
            await all_of(router, replace(REQUEST, trusted=("other",)))
        assert refused.value.name == "meshllm.trust"

    world.run(scenario)
    assert world.sent == []


def test_an_answer_that_must_be_exact_comes_from_exact_rings_only(world: World) -> None:
    router = world.add(ME, FakeRing(replicas=TWINS, exact=frozenset({OTHER})))
    world.add(ENTRY, FakeRing(replicas=TWINS))
    world.add(OTHER, FakeRing(replicas=TWINS, attempts=[answer()] * 9))

    async def scenario() -> None:
        for number in range(9):
            request = replace(FOX, raw=f"{number}", needs_exact=True)
            assert text_of(await all_of(router, request)) == TEXT
        world.rings[ME].exact = frozenset()
        named = r"The ring of (entry|other) \(\w+\) is not bit-identical"
        with pytest.raises(WrongField, match=named) as refused:
            await all_of(router, replace(FOX, needs_exact=True))
        assert refused.value.name == "meshllm.exact"
        assert "a lossy `--wire`" in (refused.value.hint or "")

    world.run(scenario)
    assert world.rings[ENTRY].asked == []
    assert len(world.rings[OTHER].asked) == 9


def test_a_waiting_request_does_not_go_to_a_ring_that_has_become_unfit(world: World) -> None:
    replicas = TWINS | {"dog": (ENTRY,)}
    ring = FakeRing(replicas=replicas, exact=frozenset({ENTRY}))
    router = world.add(ME, ring)
    world.add(ENTRY, FakeRing(replicas=replicas, attempts=[[None]] * MAX_FORWARDED))
    world.add(OTHER, FakeRing(replicas=replicas, attempts=[answer()]))

    async def scenario() -> None:
        dog = replace(REQUEST, model="dog")
        first = [asyncio.ensure_future(all_of(router, dog)) for _ in range(MAX_FORWARDED)]
        await asyncio.sleep(1)
        last = asyncio.ensure_future(all_of(router, replace(FOX, needs_exact=True)))
        await asyncio.sleep(1)
        assert not last.done()
        ring.exact = frozenset({OTHER})
        first[0].cancel()
        assert text_of(await last) == TEXT
        for each in first:
            each.cancel()
        await asyncio.wait(first)

    world.run(scenario)
    assert len(world.rings[OTHER].asked) == 1


def test_a_request_that_goes_to_another_ring_waits_for_its_turn_there(world: World) -> None:
    replicas = TWINS | {"dog": (ENTRY,), "cat": (OTHER,)}
    ring = FakeRing(replicas=replicas, exact=frozenset({ENTRY}))
    router = world.add(ME, ring)
    for entry in (ENTRY, OTHER):
        never = [[None]] * MAX_FORWARDED
        world.add(entry, FakeRing(replicas=replicas, attempts=[*never, answer()]))

    async def scenario() -> None:
        dogs, cats = (
            [
                asyncio.ensure_future(all_of(router, replace(REQUEST, model=model)))
                for _ in range(MAX_FORWARDED)
            ]
            for model in ("dog", "cat")
        )
        await asyncio.sleep(1)
        moved = asyncio.ensure_future(all_of(router, replace(FOX, needs_exact=True)))
        await asyncio.sleep(1)
        ring.exact = frozenset({OTHER})
        dogs[0].cancel()
        await asyncio.sleep(1)
        assert not moved.done()
        assert text_of(await all_of(router, replace(REQUEST, model="dog"))) == TEXT
        cats[0].cancel()
        assert text_of(await moved) == TEXT
        for each in dogs + cats:
            each.cancel()
        await asyncio.wait(dogs + cats)

    world.run(scenario)
    assert [len(world.rings[each].asked) for each in (ENTRY, OTHER)] == [MAX_FORWARDED + 1] * 2


def test_no_provider_answers_what_must_be_exact(world: World) -> None:
    router = world.add(ME, FakeRing(provided={"fox": (ENTRY,)}))
    world.add(ENTRY, FakeRing(attempts=[answer()]))

    async def scenario() -> None:
        with pytest.raises(
            WrongField, match=r"No ring or provider meets `meshllm\.exact`: "
        ) as refused:
            await all_of(router, replace(FOX, needs_exact=True))
        assert refused.value.name == "meshllm.exact"

    world.run(scenario)
    assert world.sent == []


def test_an_exact_answer_does_not_go_on_at_a_ring_that_is_not_exact(world: World) -> None:
    ring = FakeRing(attempts=[[*answer()[:3], LinkLost("gone")], answer()], exact=frozenset({ME}))
    router = world.add(ME, ring)
    events: list[Event] = []

    async def answer_exactly() -> None:
        async for event in router.generate(replace(REQUEST, needs_exact=True)):
            events.append(event)
            ring.exact = frozenset()  # the next ring has another node

    async def scenario() -> None:
        with pytest.raises(WrongField, match="not bit-identical"):
            await answer_exactly()

    world.run(scenario)
    assert text_of(events) == TEXT[:6]
    assert len(ring.asked) == 1


def test_a_request_waits_until_its_first_event(world: World) -> None:
    router, seen = world.add(ME, FakeRing(attempts=[answer()])), list[tuple[int, int]]()

    async def scenario() -> None:
        async for _ in router.generate(Request(raw="hi")):
            seen.append((router.counts.active, router.counts.begun))

    world.run(scenario)
    assert set(seen) == {(1, 1)}
    assert (router.counts.active, router.counts.begun) == (0, 0)
