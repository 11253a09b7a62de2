"""Requests of other nodes and of clients: answered within their limits."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from meshllm.errors import Busy, MeshError, PeerFault, UserError
from meshllm.names import NodeId
from meshllm.node.requests.peer_requests import (
    CLIENT_TOKENS,
    LISTS_S,
    MAX_LISTS,
    MAX_OF_CLIENTS,
    MAX_PER_CLIENT,
    MAX_PER_PEER,
    SHORT_BYTES,
)
from meshllm.node.requests.request_json import request_to_json
from meshllm.node.requests.router import RequestRouter
from meshllm.protocol.membership.codec import AskModels, Generate, ModelList
from meshllm.protocol.membership.peer_limit import MAX_INVALID, WINDOW_S
from meshllm.protocol.trust.credential import ClientLimits
from meshllm.request import Answer, Prefilled, Request
from tests.builders.request_world import (
    ASK,
    ENTRY,
    ME,
    OTHER,
    REQUEST,
    TEXT,
    FakeRing,
    World,
    all_of,
    answer,
    text_of,
)


def test_a_bug_ends_its_request_and_no_other(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    router = world.add(ME, FakeRing(attempts=[[ZeroDivisionError()], answer()]))

    async def scenario() -> None:
        for request_id in (ASK, b"j" * 16):
            router.receive(OTHER, Generate(request_id, request_to_json(REQUEST)), is_client=False)

    world.run(scenario)
    told = world.said(OTHER)
    assert [str(each) for each in told if isinstance(each, MeshError)] == ["Bug: ZeroDivisionError"]
    assert text_of(told) == TEXT
    assert "bug while serving a request" in caplog.text


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"raw": 1}', b"\xff", b'{"max_tokens": -1}'])
def test_an_invalid_request_is_reported_to_its_sender(world: World, data: bytes) -> None:
    router = world.add(ME)

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, data), is_client=True)

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert isinstance(told, UserError)


def test_a_peer_with_many_malformed_requests_is_refused(world: World) -> None:
    router = world.add(ME)

    async def scenario() -> None:
        for number in range(MAX_INVALID):
            router.receive(OTHER, Generate(bytes([number]) * 16, b"{"), is_client=True)
            await asyncio.sleep(0.1)
        with pytest.raises(PeerFault, match="malformed requests"):
            router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=True)
        router.receive(ENTRY, Generate(ASK, b"{"), is_client=True)
        await asyncio.sleep(WINDOW_S)
        router.receive(OTHER, Generate(ASK, b"{"), is_client=True)

    world.run(scenario)
    assert [len(world.said(peer)) for peer in (OTHER, ENTRY)] == [MAX_INVALID + 1, 1]


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize(
    "data", [b" " * (SHORT_BYTES + 1), b'{"max_tokens": -1}'], ids=["length", "value"]
)
def test_a_peer_whose_user_asks_for_too_much_keeps_its_link(
    world: World, data: bytes, *, is_client: bool
) -> None:
    router = world.add(ME, FakeRing(attempts=[answer()]))
    router.peers._longest = lambda: SHORT_BYTES

    async def scenario() -> None:
        for number in range(MAX_INVALID):
            request = Generate(bytes([number]) * 16, data)
            router.receive(OTHER, request, is_client=is_client)
            await asyncio.sleep(0.1)
        router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=is_client)

    world.run(scenario)
    assert text_of(world.said(OTHER)) == TEXT


def test_a_request_longer_than_the_context_needs_is_refused_unread(world: World) -> None:
    router = world.add(ME)
    router.peers._longest = lambda: 100

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, b"{" * 101), is_client=True)

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert str(told) == "The request is 101 bytes long; the limit is 100"


def test_a_long_request_is_parsed_off_the_event_loop(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[answer(), answer()]))
    lengths: list[int] = []

    async def off_loop(function: Callable[..., Any], /, *args: Any) -> Any:
        lengths.append(len(args[0]))
        return function(*args)

    router.peers._off_loop = off_loop
    long = replace(REQUEST, raw="x" * SHORT_BYTES, turns=())

    async def scenario() -> None:
        for peer, request in ((OTHER, REQUEST), (ENTRY, long)):
            router.receive(peer, Generate(ASK, request_to_json(request)), is_client=True)

    world.run(scenario)
    assert lengths == [len(request_to_json(long))]
    assert text_of(world.said(OTHER)) == text_of(world.said(ENTRY)) == TEXT


def test_the_requests_of_a_peer_are_limited(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[[None]] * (MAX_PER_PEER + 1)))

    async def scenario() -> None:
        for number in range(MAX_PER_PEER + 1):
            request = Generate(number.to_bytes(16), request_to_json(REQUEST))
            router.receive(OTHER, request, is_client=False)
        router.receive(ENTRY, Generate(ASK, request_to_json(REQUEST)), is_client=False)
        await asyncio.sleep(1)
        assert len(router.peers._running) == MAX_PER_PEER + 1  # the other peer has its own
        router.lost(OTHER)
        router.lost(ENTRY)

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert isinstance(told, Busy)
    assert str(told) == f"{MAX_PER_PEER} requests of this node are in progress"
    assert world.said(ENTRY) == []


def test_the_bytes_of_the_requests_of_a_peer_are_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.node.requests.held_bytes.MAX_HELD_BYTES", 100_000)
    router = world.add(ME, FakeRing(attempts=[[None]] * 9 + [answer()]))
    long = request_to_json(replace(REQUEST, raw="x" * 10_000, turns=()))

    async def scenario() -> None:
        references = sys.getrefcount(long)
        for number in range(12):
            router.receive(OTHER, Generate(number.to_bytes(16), long), is_client=False)
        await asyncio.sleep(1)
        assert sys.getrefcount(long) == references  # not kept once it is read
        assert len(router.peers._running) == 9  # 10,000 bytes each, of half of what there is
        assert 90_000 <= router.request_bytes < 100_000
        router.lost(OTHER)
        await asyncio.sleep(1)
        assert router.request_bytes == 0
        router.receive(ENTRY, Generate(ASK, long), is_client=False)

    world.run(scenario)
    refused = world.said(OTHER)
    assert [type(each) for each in refused] == [Busy] * 3
    assert text_of(world.said(ENTRY)) == TEXT


def test_the_requests_of_clients_are_limited_alone_and_together(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[[None]] * (MAX_OF_CLIENTS + 1)))
    clients = [NodeId(bytes([number]) * 32) for number in range(90, 93)]

    async def scenario() -> None:
        for client in clients:
            for number in range(MAX_PER_CLIENT + 1):
                request = Generate(bytes([number]) * 16, request_to_json(REQUEST))
                router.receive(client, request, is_client=True)
        router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=False)
        await asyncio.sleep(1)
        assert len(router.peers._running) == MAX_OF_CLIENTS + 1
        for peer in (*clients, OTHER):
            router.lost(peer)
        await asyncio.sleep(1)
        assert not router.peers._of_clients

    world.run(scenario)
    told = [[str(each) for each in world.said(client)] for client in clients]
    assert told == [
        ["2 requests of this node are in progress"],
        ["2 requests of this node are in progress"],
        ["4 requests of clients are in progress"] * (MAX_PER_CLIENT + 1),
    ]
    assert world.said(OTHER) == []


@pytest.mark.parametrize("concurrency", [1, MAX_PER_CLIENT, MAX_PER_CLIENT + 1, 65_535])
def test_the_ticket_of_a_client_only_lowers_how_many_requests_it_may_have(
    world: World, concurrency: int
) -> None:
    most = min(concurrency, MAX_PER_CLIENT)
    router = world.add(ME, FakeRing(attempts=[[None]] * most))
    router.peers.limits_of = lambda _: ClientLimits(concurrency)

    async def scenario() -> None:
        for number in range(most + 1):
            request = Generate(bytes([number]) * 16, request_to_json(REQUEST))
            router.receive(OTHER, request, is_client=True)
        await asyncio.sleep(1)
        router.lost(OTHER)

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert isinstance(told, Busy)
    assert str(told) == f"{most} requests of this node are in progress"


def test_a_peer_that_asks_is_told_the_models_but_not_too_often(world: World) -> None:
    router = world.add(ME, FakeRing())
    lists = iter(range(100))
    router.peers.list_models = lambda: b"%d" % next(lists)

    async def scenario() -> None:
        for _ in range(3):
            for peer in (OTHER, *[ENTRY] * (MAX_LISTS + 1)):
                router.receive(peer, AskModels(), is_client=peer == OTHER)
            await asyncio.sleep(LISTS_S)
        router.receive(ENTRY, ModelList(b"unasked"), is_client=False)

    world.run(scenario)
    told = [peer for _, peer, message in world.sent if isinstance(message, ModelList)]
    assert told == 3 * [OTHER, *[ENTRY] * MAX_LISTS]
    assert next(lists) == len(told)  # no list is made in vain


def test_the_ticket_of_a_client_limits_its_tokens_of_a_day(world: World) -> None:
    ring = FakeRing(attempts=[answer(), answer()])
    router = world.add(ME, ring)
    whole = next(each for each in answer() if isinstance(each, Answer))
    most = whole.prompt_tokens + whole.completion_tokens
    router.peers.limits_of = lambda client: ClientLimits(0, most if client == OTHER else 0)

    async def scenario() -> None:
        for number, peer in enumerate((OTHER, OTHER, ENTRY)):
            request = Generate(bytes([number]) * 16, request_to_json(REQUEST))
            router.receive(peer, request, is_client=True)
            await asyncio.sleep(1)

    world.run(scenario)
    assert text_of(world.said(ENTRY)) == text_of(world.said(OTHER)) == TEXT
    refusal = world.said(OTHER)[-1]
    assert isinstance(refusal, Busy)
    assert f"{most} of {most} tokens of today (UTC) are used" in str(refusal)


async def asks(router: RequestRouter, *requests: Request) -> None:
    """Send requests of a client, at once."""
    for number, request in enumerate(requests):
        message = Generate(bytes([number]) * 16, request_to_json(request))
        router.receive(OTHER, message, is_client=True)
    await asyncio.sleep(1)


def test_requests_of_a_client_at_the_same_time_share_what_is_left_of_the_day(
    world: World,
) -> None:
    router = world.add(ME, FakeRing(attempts=[[None]] * 2))
    router.peers.limits_of = lambda _: ClientLimits(0, 100)
    prompt, wishes = len(REQUEST.raw or "") // 4, (60, 512)

    async def scenario() -> None:
        await asks(router, *(replace(REQUEST, max_tokens=each) for each in wishes))
        router.lost(OTHER)

    world.run(scenario)
    asked = [request.max_tokens for request in world.rings[ME].asked]
    assert asked == [60, 100 - 60 - 2 * prompt]


def test_a_prompt_beyond_what_is_left_of_the_day_is_not_asked(world: World) -> None:
    router = world.add(ME, FakeRing())
    router.peers.limits_of = lambda _: ClientLimits(0, 100)

    async def scenario() -> None:
        await asks(router, Request(raw="x" * 400))

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert isinstance(told, Busy)
    assert world.rings[ME].asked == []


def test_a_prompt_that_proves_too_long_for_the_day_is_cancelled(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[[Prefilled(50, 200), None]]))
    router.peers.limits_of = lambda _: ClientLimits(0, 100)

    async def scenario() -> None:
        await asks(router, REQUEST)
        assert world.rings[ME].closed == 1

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert isinstance(told, Busy)


def test_a_request_that_fails_at_once_costs_a_client_nothing(world: World) -> None:
    failing = [[UserError("the prompt is too long")]] * 3
    router = world.add(ME, FakeRing(attempts=[*failing, answer()]))
    router.peers.limits_of = lambda _: ClientLimits(0, 1000)
    request = Request(raw="x" * 3900)

    async def scenario() -> None:
        for _ in range(4):
            await asks(router, request)

    world.run(scenario)
    assert [type(each) for each in world.said(OTHER)[:3]] == [UserError] * 3
    assert text_of(world.said(OTHER)) == TEXT


def test_a_resumed_answer_of_a_client_is_not_cut(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[[None]]))
    router.peers.limits_of = lambda _: ClientLimits(0, 301)
    given = tuple(range(400))

    async def scenario() -> None:
        await asks(router, replace(REQUEST, given=given, max_tokens=2000))
        router.lost(OTHER)

    world.run(scenario)
    (asked,) = world.rings[ME].asked
    assert asked.max_tokens == 400 + 300


@pytest.mark.parametrize("is_client", [True, False])
def test_the_ring_learns_which_peer_asks(world: World, is_client: bool) -> None:
    router = world.add(ME, FakeRing(attempts=[answer(), answer()]))

    async def scenario() -> None:
        await all_of(router)
        router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=is_client)

    world.run(scenario)
    assert world.rings[ME].requesters == [None, OTHER]


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("most", [10_000_000, None])
def test_the_answer_to_a_client_has_a_limit(
    world: World, is_client: bool, most: int | None
) -> None:
    router = world.add(ME, FakeRing(attempts=[answer()]))
    endless = replace(REQUEST, max_tokens=most)

    async def scenario() -> None:
        router.receive(OTHER, Generate(ASK, request_to_json(endless)), is_client=is_client)

    world.run(scenario)
    (asked,) = world.rings[ME].asked
    limit = asked.bound if most is None else asked.max_tokens
    assert limit == (CLIENT_TOKENS if is_client else most)


def test_a_duplicate_request_id_is_refused(world: World) -> None:
    router = world.add(ME, FakeRing(attempts=[[None], [None]]))

    async def scenario() -> None:
        for _ in range(2):
            router.receive(OTHER, Generate(ASK, request_to_json(REQUEST)), is_client=False)
        await asyncio.sleep(0.1)
        router.lost(OTHER)

    world.run(scenario)
    (told,) = world.said(OTHER)
    assert type(told) is Busy
    assert len(world.rings[ME].asked) == 1
