import json
from dataclasses import replace

import httpx2
import pytest

from meshllm.names import Span
from meshllm.request import Answer, HopReport, Piece
from meshllm.status import ModelStatus
from tests.builders.bodies import MESSAGES, PATHS
from tests.builders.fake_node import FakeNode
from tests.builders.fake_ring import answer_of

HOP = HopReport(1, "desk", Span(2, 5), 1.23456, 0.5, 0.25, 0.125, 99.0)
TRACED = {"x-meshllm-trace": "1"}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streams", [False, True])
async def test_every_answer_says_what_answered(
    client: httpx2.AsyncClient, api_server: FakeNode, path: str, *, streams: bool
) -> None:
    if path == "/v1/embeddings":
        api_server.said = (replace(answer_of("", 0), embedding="AAAAAA=="),)
    asked = {"model": "builtin", **PATHS[path], **({"stream": True} if streams else {})}
    if path == "/v1/embeddings" and streams:
        return

    said = await client.post(path, json=asked)

    assert said.status_code == 200, said.text
    assert said.headers["x-meshllm-model-digest"] == "0123456789ab"
    assert said.headers["x-meshllm-ring-epoch"] == "7"
    assert said.headers["x-meshllm-precision"] == "bfloat16"
    assert said.headers["x-request-id"]


async def test_what_is_unknown_is_left_out(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.provided = (ModelStatus("fox", 0, 0, "", "", providers=("desk",)),)

    said = await client.post("/v1/chat/completions", json={"model": "fox", "messages": MESSAGES})

    found = {name for name in said.headers if name.startswith("x-")}
    assert found == {"x-request-id"}


def traced_answer(api_server: FakeNode) -> Answer:
    """Let the node answer with times."""
    answer = replace(answer_of("hello", 5), ttft_ms=12.34567, hops=(HOP,))
    api_server.said = (Piece("hello"), answer)
    return answer


TRACING = [path for path in PATHS if path != "/v1/embeddings"]


@pytest.mark.parametrize("path", TRACING)
async def test_a_trace_is_told_once_at_the_end_and_names_no_machine(
    client: httpx2.AsyncClient, api_server: FakeNode, path: str
) -> None:
    traced_answer(api_server)
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
    client: httpx2.AsyncClient, api_server: FakeNode, path: str
) -> None:
    asked = {"model": "builtin", **PATHS[path]}

    said = await client.post(path, json=asked, headers={"x-meshllm-trace": "yes"})

    assert (said.status_code, api_server.requests) == (400, [])
    assert "x-meshllm-trace" in said.json()["error"]["message"]


@pytest.mark.parametrize("said", ["x\r\nset-cookie: a=b", "\u20ac", "x" * 129])
async def test_what_another_node_says_breaks_no_header(
    client: httpx2.AsyncClient, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    async def models(_: FakeNode) -> list[ModelStatus]:
        known = api_server.report().model
        assert known
        return [replace(known, fingerprint=f"fp_{said}", providers=("desk",), precision=said)]

    monkeypatch.setattr(FakeNode, "models", models)

    asked = PATHS["/v1/chat/completions"] | {"model": "builtin"}
    got = await client.post("/v1/chat/completions", json=asked)

    assert got.status_code == 200
    assert not [name for name in got.headers if name.startswith("x-meshllm")]
