import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any

import httpx2
import pytest

from meshllm import strict_json
from meshllm.api.respond import SHORT_BYTES
from meshllm.names import Span
from meshllm.request import Answer, HopReport, Piece
from meshllm.status import ModelStatus
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
}
HOP = HopReport(1, "desk", Span(2, 5), 1.23456, 0.5, 0.25, 0.125, 99.0)
TRACED = {"x-meshllm-trace": "1"}


@pytest.fixture
def exact(door: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        known = door.report().model
        assert known
        return [replace(known, epoch=7, is_exact=True)]

    monkeypatch.setattr(FakeNode, "models", models)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_every_answer_says_what_answered(
    client: httpx2.AsyncClient, door: FakeNode, path: str, *, streams: bool
) -> None:
    if path == "/v1/embeddings":
        door.said = (replace(answer_of("", 0), embedding="AAAAAA=="),)
    asked = {"model": "builtin", **PATHS[path], **({"stream": True} if streams else {})}
    if path == "/v1/embeddings" and streams:
        return

    said = await client.post(path, json=asked)

    assert said.status_code == 200, said.text
    assert said.headers["x-meshllm-model-digest"] == "0123456789ab"
    assert said.headers["x-meshllm-ring-epoch"] == "7"
    assert said.headers["x-meshllm-precision"] == "bfloat16"
    assert said.headers["x-request-id"]


async def test_what_is_unknown_is_left_out(client: httpx2.AsyncClient, door: FakeNode) -> None:
    door.provided = (ModelStatus("fox", 0, 0, "", "", providers=("desk",)),)

    said = await client.post("/v1/chat/completions", json={"model": "fox", "messages": MESSAGES})

    found = {name for name in said.headers if name.startswith("x-")}
    assert found == {"x-request-id"}


@pytest.mark.usefixtures("exact")
async def test_an_exact_ring_meets_exact(client: httpx2.AsyncClient, door: FakeNode) -> None:
    asked = {"model": "builtin", "messages": MESSAGES, "meshllm": {"exact": True}}

    assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    assert [each.needs_exact for each in door.requests] == [True]  # others may not answer it


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("needs", "told"),
    [({"exact": True}, "bit-identically"), ({"min_precision": "fp32"}, "is bfloat16")],
    ids=["exact", "min_precision"],
)
async def test_every_route_refuses_what_is_not_met(
    client: httpx2.AsyncClient, door: FakeNode, path: str, needs: dict[str, object], told: str
) -> None:
    body = PATHS.get(path, {"messages": MESSAGES})

    said = await client.post(path, json={"model": "builtin", **body, "meshllm": needs})

    assert said.status_code == 400
    assert told in said.json()["error"]["message"]
    assert not door.requests


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_every_route_reads_a_long_body_off_the_loop(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads = list[int]()

    def parse(data: bytes) -> object:
        threads.append(get_ident())
        return strict_json.parse(data)

    monkeypatch.setattr("meshllm.api.respond.parse", parse)
    body = PATHS.get(path, {"messages": MESSAGES})

    said = await client.post(path, json={"model": "builtin", **body, "x" * SHORT_BYTES: 1})

    assert said.status_code == 400
    assert len(threads) == 1
    assert threads != [get_ident()]


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_a_deadline_ends_the_answer_of_every_route(
    client: httpx2.AsyncClient, door: FakeNode, advance: Callable[[float], None], path: str
) -> None:
    door.waits_at = 0
    body = PATHS.get(path, {"messages": MESSAGES})
    asked = {"model": "builtin", **body, "meshllm": {"deadline_ms": 3_600_000}}

    asking = asyncio.ensure_future(client.post(path, json=asked))
    await door.begun.wait()
    advance(3600)
    said = await asking

    assert said.status_code == 503
    assert "not complete within 3600 s" in said.json()["error"]["message"]
    assert door.closed.is_set()


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages/count_tokens"])
async def test_an_answer_of_every_route_begins_in_time_or_is_refused(
    client: httpx2.AsyncClient, door: FakeNode, advance: Callable[[float], None], path: str
) -> None:
    door.waits_at = 1  # behind the progress of the prompt
    body = PATHS.get(path, {"messages": MESSAGES})
    asked = {"model": "builtin", **body, "meshllm": {"first_token_ms": 3_600_000}}

    asking = asyncio.ensure_future(client.post(path, json=asked))
    await door.begun.wait()
    advance(3600)
    said = await asking

    assert (said.status_code, said.headers["retry-after"]) == (503, "2")
    assert "did not begin within 3600 s; retry later" in said.json()["error"]["message"]
    assert door.closed.is_set()


def traced_answer(door: FakeNode) -> Answer:
    """Let the node answer with times."""
    answer = replace(answer_of("hello", 5), ttft_ms=12.34567, hops=(HOP,))
    door.said = (Piece("hello"), answer)
    return answer


TRACING = [path for path in PATHS if path != "/v1/embeddings"]


@pytest.mark.parametrize("path", TRACING)
async def test_a_trace_is_told_once_at_the_end_and_names_no_machine(
    client: httpx2.AsyncClient, door: FakeNode, path: str
) -> None:
    traced_answer(door)
    asked = {"model": "builtin", **PATHS[path]}

    whole = (await client.post(path, json=asked, headers=TRACED)).json()
    streamed = await client.post(path, json=asked | {"stream": True}, headers=TRACED)
    without = (await client.post(path, json=asked)).json()

    (told,) = whole["meshllm"]["trace"]
    assert told["ttft_ms"] == 12.346
    assert told["hops"] == [
        {
            "rank": 1, "span": "2:5", "compute_ms": 1.235, "serialise_ms": 0.5, "queue_ms": 0.25,
            "wire_ms": 0.125, "bytes_per_token": 99.0,
        }
    ]  # fmt: skip
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    ends = [json.loads(line) for line in lines if '"trace"' in line]
    assert [end.get("response", end)["meshllm"]["trace"] for end in ends] == [[told]]
    assert ends[0] in [json.loads(line) for line in lines[-2:]]
    assert "trace" not in without["meshllm"]
    assert "desk" not in json.dumps(whole) + streamed.text


@pytest.mark.parametrize("path", TRACING)
async def test_another_value_of_the_trace_header_is_refused(
    client: httpx2.AsyncClient, door: FakeNode, path: str
) -> None:
    asked = {"model": "builtin", **PATHS[path]}

    said = await client.post(path, json=asked, headers={"x-meshllm-trace": "yes"})

    assert (said.status_code, door.requests) == (400, [])
    assert "x-meshllm-trace" in said.json()["error"]["message"]


@pytest.mark.parametrize("said", ["x\r\nset-cookie: a=b", "\u20ac", "x" * 129])
async def test_what_another_node_says_breaks_no_header(
    client: httpx2.AsyncClient, door: FakeNode, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        known = door.report().model
        assert known
        return [replace(known, fingerprint=f"fp_{said}", providers=("desk",), precision=said)]

    monkeypatch.setattr(FakeNode, "models", models)

    asked = PATHS["/v1/chat/completions"] | {"model": "builtin"}
    got = await client.post("/v1/chat/completions", json=asked)

    assert got.status_code == 200
    assert not [name for name in got.headers if name.startswith("x-meshllm")]
