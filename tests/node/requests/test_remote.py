"""Requests at other nodes: their lines are bounded and checked, and cancelled when left."""

import asyncio
from collections import Counter
from contextlib import aclosing, suppress

import pytest

from meshllm.errors import LinkLost, PeerFault, UserError
from meshllm.node.requests import remote
from meshllm.node.requests.request_json import event_to_json
from meshllm.protocol.membership.codec import AnswerEvent, CancelRequest, Generate
from meshllm.protocol.ring.failover import ATTEMPTS
from meshllm.request import Event, Interruption, Piece, Prefilled, Request
from tests.builders.fake_ring import answer_of
from tests.builders.request_world import (
    ASK,
    ENTRY,
    ME,
    OTHER,
    REQUEST,
    FakeRing,
    World,
    all_of,
    answer,
    asked,
)


@pytest.mark.parametrize("last", [answer()[-1], UserError("too long")], ids=["answer", "error"])
def test_a_request_costs_one_message_and_one_for_each_event(
    world: World, last: Event | Exception
) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    events = [*answer()[:-1], last]
    world.add(ENTRY, FakeRing(attempts=[events]))

    async def scenario() -> None:
        with suppress(UserError):
            await all_of(router)

    world.run(scenario)
    kinds = Counter(type(message) for _, _, message in world.sent)
    assert kinds == {Generate: 1, AnswerEvent: len(events)}


def test_a_malformed_line_is_a_peer_fault_and_cancels_the_rest(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(0.1)
        for line in (b'{"audio": "a later version"}', b"{"):
            router.receive(ENTRY, AnswerEvent(asked(world), line), is_client=False)
        with pytest.raises(PeerFault):
            await asking

    world.run(scenario)
    assert [type(message) for _, _, message in world.sent] == [Generate, CancelRequest]


def test_closing_cancels_on_the_entry(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))
    world.add(ENTRY, FakeRing(attempts=[[Piece("a"), None]]))

    async def scenario() -> None:
        async with aclosing(router.generate(REQUEST)) as events:
            assert await anext(events) == Piece("a")

    world.run(scenario)
    request, cancel = [message for _, to, message in world.sent if to == ENTRY]
    assert isinstance(request, Generate)
    assert cancel == CancelRequest(request.request_id)
    assert world.rings[ENTRY].closed == 1
    assert (router.counts.served, router.counts.failed) == (0, 0)


def test_a_client_does_not_retry_after_its_ingress(world: World) -> None:
    world.clients = {ME}
    client = world.add(ME, FakeRing(at=OTHER), is_client=True)
    ring = FakeRing(at=OTHER, attempts=[[LinkLost(f"gone {n}")] for n in range(2 * ATTEMPTS)])
    world.add(OTHER, ring)

    async def scenario() -> None:
        with pytest.raises(LinkLost, match=f"gone {ATTEMPTS - 1}"):
            await all_of(client)

    world.run(scenario)
    assert len(ring.asked) == ATTEMPTS


def test_lines_of_other_peers_are_ignored(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(1)
        request_id = asked(world)
        router.receive(OTHER, AnswerEvent(request_id, event_to_json(Piece("lie"))), is_client=False)
        router.receive(ENTRY, AnswerEvent(ASK, event_to_json(Piece("lost"))), is_client=False)
        router.receive(ENTRY, CancelRequest(request_id), is_client=False)
        router.lost(OTHER)
        router.receive(
            ENTRY, AnswerEvent(request_id, event_to_json(answer_of("", 0))), is_client=False
        )
        assert await asking == [answer_of("", 0)]

    world.run(scenario)


def test_a_line_of_a_later_version_is_ignored(world: World) -> None:
    client = world.add(ME, FakeRing(at=ENTRY), is_client=True)

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(client))
        await asyncio.sleep(1)
        for line in (b'{"longing": {"reason": "it loads"}}', event_to_json(answer_of("", 0))):
            client.receive(ENTRY, AnswerEvent(asked(world), line), is_client=False)
        assert await asking == [answer_of("", 0)]

    world.run(scenario)


@pytest.mark.parametrize("data", [b"", b"null", b'{"piece": 1}', b"[" * 9999, b'{"answer": {}}'])
def test_a_malformed_answer_is_a_peer_fault(world: World, data: bytes) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(1)
        router.receive(ENTRY, AnswerEvent(asked(world), data), is_client=False)
        with pytest.raises(PeerFault):
            await asking

    world.run(scenario)
    assert isinstance(world.sent[-1][-1], CancelRequest)
    assert router.counts.failed == 1


def test_an_answer_that_overflows_the_buffer_is_retried(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(event_to_json(Piece("a", (1,)))) + remote.LINE_BYTES
    monkeypatch.setattr(remote, "MAX_UNREAD", 8 * size)
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        async with aclosing(router.generate(REQUEST)) as events:
            first = asyncio.ensure_future(anext(events))
            await asyncio.sleep(1)
            request_id, (call,) = asked(world), router._remote._calls.values()
            letters: list[Event] = [Piece("a", (token,)) for token in range(9)]
            for letter in letters * 9:
                router.receive(
                    ENTRY, AnswerEvent(request_id, event_to_json(letter)), is_client=False
                )
            assert call.lines.qsize() == 8 + 1
            assert await first == letters[0]
            for _ in range(7):
                await anext(events)
            world.rings[ME].at = ME
            world.rings[ME].attempts = [[Prefilled(1, 1), *letters[:8], Piece("b", (8,))]]
            assert isinstance(await anext(events), Interruption)
            assert await anext(events) == Piece("b", (8,))

    world.run(scenario)


@pytest.mark.parametrize("line", [b"", b"{}"])
def test_lines_without_text_fill_the_buffer_too(
    world: World, monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    monkeypatch.setattr(remote, "MAX_UNREAD", 1024)
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        asking = asyncio.ensure_future(all_of(router))
        await asyncio.sleep(1)
        request_id, (call,) = asked(world), router._remote._calls.values()
        for _ in range(1024):
            router.receive(ENTRY, AnswerEvent(request_id, line), is_client=False)
        assert call.lines.qsize() < 32
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    world.run(scenario)


def test_a_prompt_with_a_surrogate_is_not_sent(world: World) -> None:
    router = world.add(ME, FakeRing(at=ENTRY))

    async def scenario() -> None:
        with pytest.raises(UserError, match="unpaired surrogate"):
            await all_of(router, Request(raw="\udcff"))

    world.run(scenario)
    assert not any(isinstance(message, Generate) for _, _, message in world.sent)
