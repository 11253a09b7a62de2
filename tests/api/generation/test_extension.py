"""The object `meshllm` of a request: what it needs, its deadlines, outlines."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.request import Turn
from meshllm.status import ModelStatus, ProviderOffer
from tests.builders.bodies import BODY, MESSAGES, PATH, PATHS
from tests.builders.fake_node import FOX, FakeNode
from tests.builders.waiting import timers_fired


@pytest.mark.usefixtures("exact")
async def test_an_exact_ring_meets_exact(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    asked = {"model": "builtin", "messages": MESSAGES, "meshllm": {"exact": True}}

    assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    assert [each.needs_exact for each in api_server.requests] == [True]  # others may not answer it


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("needs", "told"),
    [({"exact": True}, "bit-identically"), ({"min_precision": "fp32"}, "is bfloat16")],
    ids=["exact", "min_precision"],
)
async def test_every_route_refuses_what_is_not_met(
    client: httpx2.AsyncClient, api_server: FakeNode, path: str, needs: dict[str, object], told: str
) -> None:
    body = PATHS.get(path, {"messages": MESSAGES})

    said = await client.post(path, json={"model": "builtin", **body, "meshllm": needs})

    assert said.status_code == 400
    assert told in said.json()["error"]["message"]
    assert not api_server.requests


async def test_a_model_of_unknown_precision_meets_none(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.provided = (replace(FOX, precision=""),)

    said = await client.post(
        PATH, json=BODY | {"model": "fox", "meshllm": {"min_precision": "int4"}}
    )

    assert "of unknown precision" in said.json()["error"]["message"]


async def an_hour_late(
    asked: Coroutine[Any, Any, httpx2.Response],
    api_server: FakeNode,
    advance: Callable[[float], None],
) -> httpx2.Response:
    """Let an hour pass once a request has begun; return what it gets."""
    asking = asyncio.ensure_future(asked)
    await api_server.begun.wait()
    advance(3600)
    return await asking


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_a_deadline_ends_the_answer_of_every_route(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None], path: str
) -> None:
    api_server.waits_at = 0
    body = PATHS.get(path, {"messages": MESSAGES})
    asked = {"model": "builtin", **body, "meshllm": {"deadline_ms": 3_600_000}}

    said = await an_hour_late(client.post(path, json=asked), api_server, advance)

    assert said.status_code == 503
    told = "not complete within 3600 s, the deadline of the request; request a shorter answer"
    assert told in said.json()["error"]["message"]
    assert api_server.closed.is_set()
    assert api_server.requests[0].deadline_ms == 3_600_000


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_an_answer_of_every_route_begins_in_time_or_is_refused(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None], path: str
) -> None:
    api_server.waits_at = 1  # behind the progress of the prompt
    body = PATHS.get(path, {"messages": MESSAGES})
    asked = {"model": "builtin", **body, "meshllm": {"first_token_ms": 3_600_000}}

    said = await an_hour_late(client.post(path, json=asked), api_server, advance)

    assert (said.status_code, said.headers["retry-after"]) == (503, "2")
    assert "did not begin within 3600 s; retry later" in said.json()["error"]["message"]
    assert api_server.closed.is_set()


@pytest.mark.parametrize("extension", [None, {}, {"outline": None}, {"outline": False}])
async def test_no_answer_is_outlined_unless_asked(
    client: httpx2.AsyncClient, api_server: FakeNode, extension: Any
) -> None:
    await client.post(PATH, json=BODY | {"meshllm": extension})

    assert [each.turns for each in api_server.requests] == [(Turn(role="user", content="hi"),)]


async def test_several_answers_are_not_outlined(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    for outline, status in ((True, 400), ("auto", 200)):
        asked = BODY | {"n": 2, "meshllm": {"outline": outline}}
        assert (await client.post(PATH, json=asked)).status_code == status

    assert [each.turns[0]["content"] for each in api_server.requests] == ["hi", "hi"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"meshllm": {"outline": "maybe"}}, "meshllm.outline"),
        ({"meshllm": {"outline": 1}}, "meshllm.outline"),
        ({"meshllm": {"outlines": True}}, "meshllm.outlines"),
        ({"meshllm": True}, "meshllm"),
        ({"meshllm": {"outline": True}, "stop": "END"}, "meshllm.outline"),
        ({"meshllm": {"outline": True}, "max_tokens": 9}, "meshllm.outline"),
    ],
)
async def test_an_outline_that_cannot_be_made_is_refused(
    client: httpx2.AsyncClient, api_server: FakeNode, fields: dict[str, Any], param: str
) -> None:
    said = await client.post(PATH, json=BODY | fields)

    assert (said.status_code, said.json()["error"]["param"]) == (400, param)
    assert api_server.requests == []


@pytest.mark.parametrize(
    ("needs", "answers"),
    [
        ({}, "fox"),
        ({"min_precision": "int4"}, "fox"),
        ({"min_precision": "int8"}, "fox@bfloat16"),  # the most precise of the others
        ({"exact": True}, "fox@bfloat16"),
        ({"min_precision": "fp32"}, ""),
    ],
)
async def test_the_first_quantisation_that_meets_the_needs_answers(
    client: httpx2.AsyncClient, api_server: FakeNode, needs: dict[str, Any], answers: str
) -> None:
    own = ModelStatus("fox", 1, 1, "bfloat16", "int4", 2048, key="0" * 16, rings=1)
    small = replace(own, name="fox@int8", quant="int8", key="1" * 16, shared="fox")
    stored = replace(small, name="fox@bfloat16", quant="none", key="2" * 16, is_exact=True)
    api_server.provided = (own, small, stored)

    said = await client.post(PATH, json=BODY | {"model": "fox", "meshllm": needs})

    assert said.status_code == (200 if answers else 400)
    assert [each.model for each in api_server.requests] == [answers] * bool(answers)
    if answers:
        assert said.json()["model"] == answers


@pytest.mark.parametrize(
    ("rings", "needs", "answers"),
    [
        ((0, 1), {}, "fox@bfloat16"),
        ((0, 0), {}, "gpu"),
        ((1, 0), {}, "fox"),
        ((1, 0), {"min_precision": "bf16"}, "gpu"),
        ((1, 1), {"min_precision": "bf16"}, "fox@bfloat16"),
        ((1, 0), {"min_precision": "fp16", "min_context": 4096}, "fox@bfloat16"),
        ((0, 1), {"trust": ["gpu"]}, "gpu"),
    ],
)
async def test_what_serves_now_precedes_what_has_yet_to_form(
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    rings: tuple[int, int],
    needs: dict[str, Any],
    answers: str,
) -> None:
    offers = (ProviderOffer("gpu", "bf16", 2048),)
    own = ModelStatus("fox", 1, 1, "bfloat16", "int8", 4096, key="0" * 16, beside=offers)
    stored = replace(own, name="fox@bfloat16", quant="none", key="1" * 16, shared="fox", beside=())
    api_server.provided = tuple(
        replace(it, rings=n) for it, n in zip((own, stored), rings, strict=True)
    )

    said = await client.post(PATH, json=BODY | {"model": "fox", "meshllm": needs})

    assert said.status_code == 200
    [asked] = api_server.requests
    told = said.headers["x-meshllm-precision"]
    assert (asked.model, told) == (
        ("fox", "bf16")
        if answers == "gpu"
        else (answers, "int8" if answers == "fox" else "bfloat16")
    )


@pytest.mark.parametrize(
    ("name", "needs", "answers"),
    [
        ("fox@int8", {"min_precision": "bf16"}, ""),
        ("fox@int4", {"min_precision": "bf16"}, ""),
        ("fox@int4", {}, "fox@int4"),
        ("fox", {"min_precision": "fp32"}, "fox"),  # by the provider
    ],
)
async def test_a_name_with_a_precision_means_one_quantisation(
    client: httpx2.AsyncClient, api_server: FakeNode, name: str, needs: dict[str, Any], answers: str
) -> None:
    offers = (ProviderOffer("gpu", "fp32", 2048),)
    own = ModelStatus("fox", 1, 1, "bfloat16", "int4", 2048, key="0" * 16, beside=offers)
    small = replace(own, name="fox@int8", quant="int8", key="1" * 16, shared="fox", beside=())
    api_server.provided = (own, small)

    said = await client.post(PATH, json=BODY | {"model": name, "meshllm": needs})

    assert said.status_code == (200 if answers else 400)
    assert [each.model for each in api_server.requests] == [answers] * bool(answers)


@pytest.mark.parametrize(
    ("model", "needs", "param"),
    [
        ("builtin", {"min_precision": "bf16", "min_context": 0}, None),
        ("builtin", {"min_precision": "fp32"}, "min_precision"),
        ("builtin", {"min_precision": "gold"}, "min_precision"),
        ("builtin", {"min_context": 1}, "min_context"),
        ("builtin", {"deadline_ms": 0}, "deadline_ms"),
        ("builtin", {"first_token_ms": 0}, "first_token_ms"),
        ("builtin", {"affinity": "x" * 128}, None),
        ("builtin", {"affinity": "x" * 129}, "affinity"),
        ("builtin", {"exact": True}, "exact"),
        ("builtin", {"exact": False, "min_precision": "bf16"}, None),
        ("fox", {"exact": True}, "exact"),
        ("fox", {"min_precision": "bf16", "min_context": 2048}, None),
        ("fox", {"min_context": 2049}, "min_context"),
    ],
)
async def test_what_a_request_needs_is_met_or_refused(
    client: httpx2.AsyncClient,
    api_server: FakeNode,
    model: str,
    needs: dict[str, Any],
    param: str | None,
) -> None:
    api_server.provided = (FOX,)

    said = await client.post(PATH, json=BODY | {"model": model, "meshllm": needs})

    assert said.status_code == (400 if param else 200)
    assert len(api_server.requests) == (0 if param else 1)
    if param:
        assert said.json()["error"]["param"] == f"meshllm.{param}"
    else:
        assert said.headers["x-meshllm-precision"] in {"bfloat16", "bf16"}


async def test_of_several_providers_those_are_asked_that_have_what_a_request_needs(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.provided = (replace(FOX, precision="", context=2048, providers=("gpu", "desk")),)
    needs = {"min_precision": "bf16", "min_context": 4096, "affinity": "manual"}

    said = await client.post(PATH, json=BODY | {"model": "fox", "meshllm": needs})

    assert said.status_code == 200
    (asked,) = api_server.requests
    assert (asked.min_bits, asked.min_context, asked.affinity) == (16, 4096, "manual")


@pytest.mark.parametrize(
    ("needs", "precision"),
    [
        ({"exact": False}, "bfloat16"),
        ({"min_precision": "bf16"}, "bfloat16"),
        ({"min_precision": "fp32"}, "fp32"),
        ({"min_context": 4096}, "fp32"),
        ({"min_context": 8193}, "bfloat16"),  # which the router refuses
        ({"min_context": 4096, "exact": True}, "bfloat16"),
        ({"exact": True}, "bfloat16"),
    ],
)
async def test_a_response_says_whether_a_ring_or_a_provider_of_the_model_answers(
    client: httpx2.AsyncClient, api_server: FakeNode, needs: dict[str, Any], precision: str
) -> None:
    api_server.beside = (ProviderOffer("gpu", "fp32", 8192),)

    said = await client.post(PATH, json=BODY | {"meshllm": needs})

    assert (said.status_code, said.headers["x-meshllm-precision"]) == (200, precision)
    assert ("x-meshllm-model-digest" in said.headers) == (precision == "bfloat16")
    assert len(api_server.requests) == 1


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({}, "fp32"),
        ({"meshllm": {"min_precision": "bf16"}}, "fp32"),
        ({"meshllm": {"outline": "auto"}}, "fp32"),
        ({"meshllm": {"outline": True}, "max_tokens": 512}, "bfloat16"),
        ({"meshllm": {"exact": True}}, "bfloat16"),
        ({"max_reasoning_tokens": 64}, "bfloat16"),
    ],
)
async def test_a_response_says_that_a_provider_answers_while_no_ring_serves(
    client: httpx2.AsyncClient, api_server: FakeNode, fields: dict[str, Any], precision: str
) -> None:
    api_server.beside, api_server.waits_for = (ProviderOffer("gpu", "fp32", 8192),), "it loads"

    said = await client.post(PATH, json=BODY | fields)

    assert (said.status_code, said.headers["x-meshllm-precision"]) == (200, precision)
    assert ("x-meshllm-model-digest" in said.headers) == (precision == "bfloat16")


@pytest.mark.parametrize(("count", "precision"), [(8192, "fp32"), (8193, "bfloat16")])
async def test_more_ids_than_a_provider_takes_wait_for_the_ring(
    client: httpx2.AsyncClient, api_server: FakeNode, count: int, precision: str
) -> None:
    api_server.beside, api_server.waits_for = (ProviderOffer("gpu", "fp32", 8192),), "it loads"

    asked = {"model": "builtin", "prompt": [1] * count}
    said = await client.post("/v1/completions", json=asked)

    assert said.headers["x-meshllm-precision"] == precision


async def test_an_answer_of_a_provider_beside_a_ring_is_not_outlined(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.beside = (ProviderOffer("gpu", "fp32", 8192),)

    asked = BODY | {"meshllm": {"min_precision": "fp32", "outline": True}}
    said = await client.post(PATH, json=asked)

    assert said.json()["error"]["param"] == "meshllm.outline"


async def test_an_answer_before_its_deadline_is_whole(client: httpx2.AsyncClient) -> None:
    said = await client.post(PATH, json=BODY | {"meshllm": {"deadline_ms": 3_600_000}})

    assert said.json()["choices"][0]["message"]["content"] == "hello"


async def test_an_answer_that_has_begun_in_time_may_take_longer(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None]
) -> None:
    api_server.waits_at = 2  # behind the first text
    needs = {"first_token_ms": 1_800_000, "deadline_ms": 3_600_000}

    asking = asyncio.ensure_future(client.post(PATH, json=BODY | {"meshllm": needs}))
    await api_server.begun.wait()
    advance(1800)
    await timers_fired()
    assert not asking.done()
    advance(1800)
    said = await asking

    assert "not complete within 3600 s" in said.json()["error"]["message"]
    assert api_server.closed.is_set()


@pytest.mark.parametrize(("mode", "status"), [(True, 400), ("auto", 200)])
async def test_a_model_of_a_provider_is_not_outlined(
    client: httpx2.AsyncClient, api_server: FakeNode, mode: object, status: int
) -> None:
    api_server.provided = (FOX,)

    said = await client.post(PATH, json=BODY | {"model": "fox", "meshllm": {"outline": mode}})

    assert said.status_code == status


async def test_an_answer_behind_its_deadline_is_an_error(
    client: httpx2.AsyncClient, api_server: FakeNode, advance: Callable[[float], None]
) -> None:
    api_server.waits_at = 2

    fields = BODY | {"meshllm": {"deadline_ms": 3_600_000}}
    said = await an_hour_late(client.post(PATH, json=fields), api_server, advance)

    assert said.status_code == 503
    assert "not complete within 3600 s" in said.json()["error"]["message"]
    assert api_server.closed.is_set()
