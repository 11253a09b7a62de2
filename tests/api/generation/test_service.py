import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from threading import Event

import httpx2
import pytest

from meshllm.api.access.accounts import Accounts, ApiKey, KeyLimits, KeyUsage
from meshllm.api.access.gate import AccessPolicy
from meshllm.api.app import public_application
from meshllm.api.generation.service import Service, day_of
from meshllm.api.respond import SHORT_BYTES
from meshllm.errors import Busy, QuotaUsed
from meshllm.node.requests import held_bytes
from meshllm.node.requests.held_bytes import size_of
from meshllm.outline.eligibility import OutlineMode
from meshllm.protocol.kv_cache.prefix_scope import is_owners
from meshllm.protocol.membership.client_quota import estimate
from meshllm.request import Piece, Prefilled, Request
from meshllm.status import ModelStatus, ProviderOffer
from meshllm.traces.file import TraceFile
from meshllm.traces.recorder import Recorder
from meshllm.traces.trace import read_trace
from tests.builders.bodies import PATHS
from tests.builders.fake_node import FOX, FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.writer import ASKED as OUTLINED
from tests.builders.writer import Writer
from tests.processes.fleet import WAIT_S

PATH = "/v1/chat/completions"
BODY = {"model": "builtin", "messages": [{"role": "user", "content": "hi"}]}
NOON = 1_795_003_200.0  # of 2026-11-18


@pytest.fixture
async def client(service: Service) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(public_application(service, AccessPolicy(needs_key=True)))
    async with httpx2.AsyncClient(transport=transport, base_url="http://node") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_request_is_accounted_for_by_key(
    client: httpx2.AsyncClient, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(), 0)

    for stream in (False, True):
        await client.post(PATH, json=BODY | {"stream": stream}, headers=bearer(key))

    assert accounts.usage("key") == [("laptop", KeyUsage(2, 0, 4, 0, 10))]
    assert accounts.usage("model") == [("builtin", KeyUsage(2, 0, 4, 0, 10))]


async def test_each_key_has_a_scope_of_its_own(api_server: FakeNode, accounts: Accounts) -> None:
    (model,) = await api_server.models()
    keys = [ApiKey(name, "", 0, is_owner=name == "own") for name in ("laptop", "own")]
    requesters: list[tuple[Service, ApiKey | None]] = [(Service(api_server), None)]
    served = Service(api_server, accounts)
    requesters += [(served, key) for key in (None, *keys, keys[0])]

    for service, key in requesters:
        async with aclosing(service.answer(key, model, [Request(raw="hi")])) as events:
            assert [event async for event in events]

    owner, *others, again = [each.scope for each in api_server.requests]
    assert owner == ""
    assert len({owner, *others}) == 4
    assert again == others[1]
    assert "laptop" not in again
    assert [is_owners((None, scope)) for scope in (owner, *others)] == [True, True, False, True]


async def test_requests_but_embeddings_are_recorded(
    api_server: FakeNode, accounts: Accounts, tmp_path: Path
) -> None:
    path, asked = tmp_path / "trace", Request(raw="hi")
    with TraceFile.open(path) as file:
        service = Service(api_server, accounts, Recorder(file))
        model = await service.model(None, "builtin")
        for requests in ([asked, asked], [replace(asked, embeds=True)]):
            _ = [event async for event in service.answer(None, model, requests)]

    assert [each.model for each in read_trace(path)] == ["builtin", "builtin"]
    assert [each.reports_prompt for each in api_server.requests] == [True, True, False]


async def test_a_failed_request_is_an_error(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(), 0)
    api_server.fails_at = 1

    await client.post(PATH, json=BODY, headers=bearer(key))

    assert accounts.usage("key") == [("laptop", KeyUsage(1, 1, 2, 0, 0))]


async def test_a_cancelled_request_counts_what_was_read(
    service: Service, api_server: FakeNode, accounts: Accounts
) -> None:
    (model,) = await service.models(None)
    async with aclosing(service.answer(None, model, [Request(raw="hi")])) as events:
        await anext(events)

    assert accounts.usage("key") == [("", KeyUsage(1, 0, 2, 0, 0))]
    assert api_server.closed.is_set()


async def test_a_cancelled_prompt_counts_what_was_computed(
    service: Service, api_server: FakeNode, accounts: Accounts
) -> None:
    api_server.progress = Prefilled(256, 50_000)
    (model,) = await service.models(None)
    async with aclosing(service.answer(None, model, [Request(raw="hi")])) as events:
        await anext(events)

    assert accounts.usage("key") == [("", KeyUsage(1, 0, 256, 0, 0))]


async def test_counting_tokens_uses_none(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(tokens_per_day=9), 0)
    api_server.said, api_server.progress = (answer_of("", 0),), Prefilled(0, 2)
    path = "/v1/messages/count_tokens"
    counted = [await client.post(path, json=BODY, headers=bearer(key)) for _ in range(5)]

    assert [each.json() for each in counted] == [{"input_tokens": 2}] * 5
    assert accounts.tokens(day_of(time.time()), "laptop") == 0
    api_server.said = ()
    assert (await client.post(PATH, json=BODY, headers=bearer(key))).status_code == 200


async def test_a_cancelled_answer_of_a_provider_counts_its_pieces(
    service: Service, accounts: Accounts
) -> None:
    async with aclosing(service.answer(None, FOX, [Request(raw="hi")])) as events:
        for _ in range(3):  # its prompt and two pieces
            await anext(events)

    assert accounts.usage("key") == [("", KeyUsage(1, 0, 2, 0, 2))]


async def test_a_key_may_name_an_alias(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = api_server.report().model
    assert known

    async def models(_: FakeNode) -> list[ModelStatus]:
        return [replace(known, aliases=("small",))]

    monkeypatch.setattr(FakeNode, "models", models)
    key = accounts.create("guest", KeyLimits(models=("small",)), 0)

    said = await client.post(PATH, json=BODY | {"model": "small"}, headers=bearer(key))

    assert said.status_code == 200, said.text


@pytest.mark.parametrize(
    ("limit", "statuses", "listed"),
    [
        ("fox", (200, 200, 200), ["fox", "fox@bfloat16"]),
        ("fox@int8", (404, 200, 404), ["fox@int8"]),
        ("fox@bfloat16", (404, 404, 200), ["fox@bfloat16"]),
        ("small", (200, 200, 404), ["fox"]),
    ],
)
async def test_a_key_is_for_all_quantisations_of_a_name_or_for_the_rings_of_one(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    limit: str,
    statuses: tuple[int, ...],
    listed: list[str],
) -> None:
    fox = ModelStatus("fox", 1, 1, "bfloat16", "int8", 2048, key="0" * 16, aliases=("small",))
    small = replace(fox, beside=(ProviderOffer("gpu", "bf16"),))
    stored = replace(fox, name="fox@bfloat16", quant="none", key="1" * 16, shared="fox", aliases=())
    api_server.served, api_server.provided = "", (small, stored)
    headers = bearer(accounts.create("guest", KeyLimits(models=(limit,)), 0))

    names = "fox", "fox@int8", "fox@bfloat16"
    said = [await client.post(PATH, json=BODY | {"model": it}, headers=headers) for it in names]
    seen = (await client.get("/v1/models", headers=headers)).json()["data"]

    assert tuple(each.status_code for each in said) == statuses
    assert [each["id"] for each in seen] == listed
    if "@" in limit:
        assert not any(each["meshllm"].get("offers") for each in seen)


async def test_a_key_sees_only_its_models(client: httpx2.AsyncClient, accounts: Accounts) -> None:
    other = accounts.create("other", KeyLimits(models=("gpt-5",)), 0)
    right = accounts.create("right", KeyLimits(models=("gpt-5", "builtin")), 0)

    listed = [
        (await client.get("/v1/models", headers=bearer(key))).json()["data"]
        for key in (other, right)
    ]
    refused = await client.post(PATH, json=BODY, headers=bearer(other))

    assert [len(each) for each in listed] == [0, 1]
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_long_requests_of_a_guest_delay_neither_the_owner_nor_all_of_another(
    client: httpx2.AsyncClient, service: Service, accounts: Accounts
) -> None:
    key = accounts.create("own", KeyLimits(), 0, is_owner=True)
    begun, go, order = asyncio.Event(), Event(), list[str]()
    loop = asyncio.get_running_loop()

    async def read(name: str, size: int) -> None:
        def convert(_: object) -> None:
            loop.call_soon_threadsafe(begun.set)
            go.wait()
            order.append(name)

        await service.read(ApiKey(name, "", 0), b"[" + b" " * size + b"]", convert)

    reading = [asyncio.create_task(read("many", 1 << 20)) for _ in range(3)]
    try:
        await begun.wait()
        reading.append(asyncio.create_task(read("one", SHORT_BYTES)))
        fields = BODY | {"user": "x" * SHORT_BYTES}
        async with asyncio.timeout(WAIT_S):
            answered = await client.post(PATH, json=fields, headers=bearer(key))
    finally:
        go.set()
    await asyncio.gather(*reading)

    assert answered.status_code == 200
    assert order == ["many", "one", "many", "many"]


async def test_all_prompts_of_a_batch_are_held_from_its_beginning(
    service: Service, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = await service.models(None)
    batch = [Request(ids=tuple(range(16)), max_tokens=0) for _ in range(2048)]
    monkeypatch.setattr(held_bytes, "MAX_HELD_BYTES", size_of(*batch))
    keys = ApiKey("guest", "", 0), ApiKey("own", "", 0, is_owner=True)

    async with AsyncExitStack() as stack:
        for key in keys:
            begun = await stack.enter_async_context(aclosing(service.answer(key, model, batch)))
            await anext(begun)
        for key in keys:
            with pytest.raises(Busy, match="bytes are in progress"):
                await anext(service.answer(key, model, batch))
    async with aclosing(service.answer(keys[0], model, batch)) as events:
        await anext(events)


async def test_a_key_has_so_many_tokens_a_day(
    client: httpx2.AsyncClient, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [NOON]
    monkeypatch.setattr(time, "time", lambda: now[0])
    key = accounts.create("laptop", KeyLimits(tokens_per_day=9), 0)  # 8 of them estimated

    statuses = [
        (await client.post(PATH, json=BODY, headers=bearer(key))).status_code for _ in range(2)
    ]
    refused = await client.post(PATH, json=BODY, headers=bearer(key))
    now[0] += float(refused.headers["retry-after"])
    later = await client.post(PATH, json=BODY, headers=bearer(key))

    assert statuses == [200, 429]
    assert refused.json()["error"]["type"] == "tokens"
    assert refused.headers["retry-after"] == str(12 * 3600)
    assert later.status_code == 200


async def test_requests_of_a_key_at_the_same_time_share_its_tokens(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(tokens_per_day=1000), 0)
    api_server.waits_at = 1
    body = BODY | {"max_tokens": 900}
    first = asyncio.ensure_future(client.post(PATH, json=body, headers=bearer(key)))
    await api_server.begun.wait()

    second = asyncio.ensure_future(client.post(PATH, json=body, headers=bearer(key)))
    while len(api_server.requests) < 2:  # noqa: ASYNC110  # polls until the API server asks both
        await asyncio.sleep(0)
    third = await client.post(PATH, json=body, headers=bearer(key))
    api_server.go.set()

    assert [(await each).status_code for each in (first, second)] == [200, 200]
    assert [each.max_tokens for each in api_server.requests] == [900, 1000 - 900 - 2 * 8]
    assert (third.status_code, third.headers["retry-after"]) == (429, "2")
    assert (await client.post(PATH, json=body, headers=bearer(key))).status_code == 200


async def test_all_answers_of_a_request_have_to_fit_into_the_day(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(tokens_per_day=1000), 0)
    body = BODY | {"max_tokens": 600}

    several = await client.post(PATH, json=body | {"n": 3}, headers=bearer(key))
    one = await client.post(PATH, json=body, headers=bearer(key))

    assert (several.status_code, one.status_code) == (429, 200)
    assert [each.max_tokens for each in api_server.requests] == [600]


async def test_a_prompt_that_proves_too_long_for_the_day_ends_its_request(
    client: httpx2.AsyncClient, api_server: FakeNode, accounts: Accounts
) -> None:
    key = accounts.create("laptop", KeyLimits(tokens_per_day=100), 0)
    api_server.said = (Prefilled(50, 200), Piece("never"))

    refused = await client.post(PATH, json=BODY, headers=bearer(key))

    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
    assert api_server.closed.is_set()


async def test_the_tokens_of_another_api_server_are_counted(
    client: httpx2.AsyncClient, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOON)
    key = accounts.create("laptop", KeyLimits(tokens_per_day=1000), 0)
    assert (await client.post(PATH, json=BODY, headers=bearer(key))).status_code == 200

    accounts.record(day_of(time.time()), "laptop", "builtin", KeyUsage(1, 0, 990, 0, 3))

    assert (await client.post(PATH, json=BODY, headers=bearer(key))).status_code == 429


async def test_an_answer_is_worth_more_than_its_account(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Accounts, "record", full)
    (model,) = await service.models(None)

    events = [event async for event in service.answer(None, model, [Request(raw="hi")])]

    assert len(events) == 4
    assert "disk is full" in caplog.text


async def test_a_limit_is_checked_before_the_mesh_is_asked(
    service: Service, api_server: FakeNode, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOON)  # a day could end in between
    key = ApiKey("laptop", "", 0, KeyLimits(tokens_per_day=1))
    accounts.record(day_of(time.time()), "laptop", "builtin", KeyUsage(1, 0, 1))
    (model,) = await service.models(key)

    with pytest.raises(QuotaUsed, match="1 of 1 tokens of today"):
        await anext(service.answer(key, model, [Request(raw="hi")]))

    assert api_server.requests == []


async def test_an_answer_is_outlined_if_its_key_has_tokens_for_all_of_it(
    service: Service, api_server: FakeNode
) -> None:
    api_server.backend = writer = Writer()
    [model] = await service.models(None)
    reads = 9 * estimate(OUTLINED)

    async def sessions(left: int, mode: OutlineMode) -> int:
        key = ApiKey(f"{mode} {left}", "", 0, KeyLimits(tokens_per_day=left))
        before = len(writer.requests)
        _ = [event async for event in service.answer(key, model, [OUTLINED], mode)]
        return len(writer.requests) - before

    enough = reads + OUTLINED.expected_tokens
    assert await sessions(enough, OutlineMode.ON) > 1
    assert await sessions(enough - 1, OutlineMode.AUTO) == 1
    with pytest.raises(QuotaUsed, match=f"may take {enough} tokens; {enough - 1} of today"):
        await sessions(enough - 1, OutlineMode.ON)


async def test_two_outlines_at_once_share_the_tokens_of_their_key(
    service: Service, api_server: FakeNode
) -> None:
    api_server.backend = writer = Writer()
    [model] = await service.models(None)
    enough = 9 * estimate(OUTLINED) + OUTLINED.expected_tokens
    key = ApiKey("laptop", "", 0, KeyLimits(tokens_per_day=2 * enough - 1))
    short = replace(OUTLINED, turns=({"role": "user", "content": "Who is that?"},))

    async with aclosing(service.answer(key, model, [OUTLINED], OutlineMode.ON)) as first:
        await anext(first)
        with pytest.raises(QuotaUsed, match=f"may take {enough} tokens; {enough - 1} of today"):
            await anext(service.answer(key, model, [OUTLINED], OutlineMode.ON))
        before = len(writer.requests)
        _ = [event async for event in service.answer(key, model, [OUTLINED], OutlineMode.AUTO)]
        assert len(writer.requests) == before + 1

    async with aclosing(service.answer(key, model, [short], OutlineMode.AUTO)) as first:
        await anext(first)  # it is not outlined, and reads its prompt once
        _ = [event async for event in service.answer(key, model, [OUTLINED], OutlineMode.ON)]
    assert len(writer.requests) > before + 3


async def test_a_cancelled_outline_ends_all_its_sessions_which_are_accounted_for(
    service: Service, api_server: FakeNode, accounts: Accounts
) -> None:
    writer = Writer(held={1: asyncio.Event(), 2: asyncio.Event(), 3: asyncio.Event()})
    api_server.backend = writer
    [model] = await service.models(None)
    answer = service.answer(None, model, [OUTLINED], OutlineMode.ON)

    told = 0
    async with aclosing(answer) as events:
        while told < 4 + 3 * 2:  # the outline, and all words of the points but the last ones
            _, event = await anext(events)
            told += len(event.tokens) if isinstance(event, Piece) else 0

    assert (writer.open, writer.cancelled) == (0, 3)
    [(_, used)] = accounts.usage("model")
    assert used == KeyUsage(1, 0, 40, 0, 10)


@pytest.mark.parametrize(
    ("asked", "trusted"),
    [(None, ("attic", "cellar")), (["cellar"], ("cellar",)), ([], ())],
    ids=["all of the key", "fewer", "none"],
)
async def test_only_the_trusted_nodes_of_a_key_see_its_requests(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    asked: list[str] | None,
    trusted: tuple[str, ...],
) -> None:
    key = accounts.create("clinic", KeyLimits(trust=("attic", "cellar")), 0)

    said = await client.post(PATH, json=BODY | {"meshllm": {"trust": asked}}, headers=bearer(key))

    assert (said.status_code, api_server.requests[0].trusted) == (200, trusted)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_cannot_trust_more_nodes_than_its_key(
    client: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode, *, stream: bool
) -> None:
    key = accounts.create("clinic", KeyLimits(trust=("attic",)), 0)
    body = BODY | {"meshllm": {"trust": ["attic", "desk"]}, "stream": stream}

    said = await client.post(PATH, json=body, headers=bearer(key))

    error = said.json()["error"]
    assert (said.status_code, error["param"]) == (400, "meshllm.trust")
    assert "does not trust the node `desk`" in error["message"]
    assert not api_server.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "builtin", "prompt": "hi"}),
        ("/v1/responses", {"model": "builtin", "input": "hi"}),
        ("/v1/messages", BODY | {"max_tokens": 4}),
    ],
)
async def test_the_trusted_nodes_of_a_key_hold_for_every_route(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    path: str,
    body: dict[str, object],
) -> None:
    key = accounts.create("clinic", KeyLimits(trust=("attic",)), 0)

    said = await client.post(path, json=body, headers=bearer(key))

    assert (said.status_code, api_server.requests[0].trusted) == (200, ("attic",))


COUNTED = "/v1/messages/count_tokens"
REASON = {"/v1/chat/completions", "/v1/messages", "/v1/responses"}


@pytest.mark.parametrize("path", [*PATHS, COUNTED])
async def test_the_deadline_and_the_reasoning_of_a_key_hold_for_every_route(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    advance: Callable[[float], None],
    path: str,
) -> None:
    key = accounts.create("class", KeyLimits(deadline_s=3600, max_reasoning=9), 0)
    body = {"model": "builtin", **PATHS.get(path, {"messages": BODY["messages"]})}
    api_server.waits_at = 0

    asking = asyncio.ensure_future(client.post(path, json=body, headers=bearer(key)))
    await api_server.begun.wait()
    advance(3600)
    said = await asking

    assert (said.status_code, said.headers["retry-after"]) == (503, "2")
    told = "not complete within 3600 s, the deadline of the key `class`; request a shorter answer"
    assert told in said.json()["error"]["message"]
    assert api_server.closed.is_set()
    assert [used.errors for _, used in accounts.usage("key")] == [1]
    assert api_server.requests[0].deadline_ms == 3_600_000
    assert api_server.requests[0].max_reasoning == (9 if path in REASON else None)


@pytest.mark.parametrize(
    ("own_ms", "whose"),
    [(60_001, "the key `class`"), (60_000, "the request"), (30_000, "the request")],
)
async def test_the_earlier_deadline_counts_and_is_named(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    advance: Callable[[float], None],
    own_ms: int,
    whose: str,
) -> None:
    key = accounts.create("class", KeyLimits(deadline_s=60), 0)
    api_server.waits_at, deadline_ms = 0, min(own_ms, 60_000)
    body = BODY | {"meshllm": {"deadline_ms": own_ms, "affinity": "x"}}

    asking = asyncio.ensure_future(client.post(PATH, json=body, headers=bearer(key)))
    await api_server.begun.wait()
    advance(deadline_ms / 1000)
    said = await asking

    told = f"within {deadline_ms / 1000:g} s, the deadline of {whose}"
    assert told in said.json()["error"]["message"]
    assert (api_server.requests[0].deadline_ms, api_server.requests[0].affinity) == (
        deadline_ms,
        "x",
    )


@pytest.mark.parametrize(
    ("keys", "own", "most"),
    [(9, None, 9), (9, 10, 9), (9, 8, 8), (9, 0, 0), (0, 8, 0), (0, None, 0), (None, 8, 8)],
)
async def test_the_lower_limit_of_reasoning_counts(
    client: httpx2.AsyncClient,
    accounts: Accounts,
    api_server: FakeNode,
    keys: int | None,
    own: int | None,
    most: int,
) -> None:
    key = accounts.create("class", KeyLimits(max_reasoning=keys), 0)
    body = BODY | {"max_reasoning_tokens": own}

    said = await client.post(PATH, json=body, headers=bearer(key))

    assert (said.status_code, api_server.requests[0].max_reasoning) == (200, most)


async def test_a_deadline_that_is_invalid_is_refused_with_a_key_that_has_one(
    client: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode
) -> None:
    key = accounts.create("class", KeyLimits(deadline_s=60), 0)

    said = await client.post(PATH, json=BODY | {"meshllm": {"deadline_ms": 0}}, headers=bearer(key))

    assert said.json()["error"]["param"] == "meshllm.deadline_ms"
    assert not api_server.requests


async def test_a_key_that_limits_reasoning_gets_outlines(
    client: httpx2.AsyncClient, accounts: Accounts, api_server: FakeNode
) -> None:
    key = accounts.create("class", KeyLimits(max_reasoning=9), 0)
    api_server.backend = writer = Writer()

    said = await client.post(PATH, json=BODY | {"meshllm": {"outline": True}}, headers=bearer(key))

    assert said.status_code == 200
    assert [each.max_reasoning for each in writer.requests] == [0] * 4
