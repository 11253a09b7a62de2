import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from meshllm.api import respond
from meshllm.errors import (
    LinkLost,
    MeshError,
    ModelError,
    ModelMissing,
    NotAuthorised,
    PeerFault,
    TimedOut,
    UserError,
)
from meshllm.names import Digest, Span
from meshllm.node.options import ModelOptions
from meshllm.node.requests.request_json import REQUEST_BYTES, event_from_json, request_to_json
from meshllm.node.training import LayerPass
from meshllm.protocol.training.codec import Direction
from meshllm.protocol.trust.credential import ClientLimits
from meshllm.request import Event, Piece, Prefilled, Request, Sampling
from meshllm.status import (
    Change,
    Members,
    MeshStatus,
    PlannedRing,
    PlanTerms,
    from_json,
    to_json,
)
from tests.builders.fake_node import CHANGE, FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.waiting import timers_fired

ASKED = Request(raw="hi", sampling=Sampling(temperature=0.1), stop=("end",))


async def test_snapshots_are_objects(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = [(await client.get(f"/mesh/{each}")).json() for each in ("status", "members")]

    values = (api_server.report(), api_server.members())
    assert said == [{"schema": 1} | to_json(each) for each in values]
    assert from_json(MeshStatus, said[0]) == api_server.report()


async def test_a_ticket_is_created_with_its_limits(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    asked = {"role": "client", "expires_s": 60, "uses": 3, "concurrency": 1, "tokens_per_day": 9}

    said = await client.post("/mesh/ticket", json=asked)

    assert (said.json(), api_server.calls) == (
        {"schema": 1, "ticket": "meshllm1abc"},
        [("client", 60, 3, ClientLimits(1, 9))],
    )


async def test_a_model_is_served_and_stopped(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    asked = {"model": "org/m", "quant": "int8", "replicas": 2, "aliases": ["m"]}

    said = await client.post("/mesh/models", json=asked)
    stopped = await client.request("DELETE", "/mesh/models", json={"model": "m"})
    strange = await client.post("/mesh/models", json={"model": "org/m", "colour": "red"})

    wish = ModelOptions("org/m", quant="int8", replicas=2, aliases=("m",))
    assert (said.json()["name"], said.json()["replicas"]) == ("org/m", 2)
    assert stopped.json() == {"schema": 1, "model": "m"}
    assert api_server.calls == [("serve", wish), ("stop", "m")]
    assert (strange.status_code, "colour" in strange.text) == (400, True)


async def test_a_node_is_removed(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = await client.post("/mesh/remove", json={"node": "abc"})

    spared = [{"node": "def", "name": "attic"}]
    assert said.json() == {
        "schema": 1, "node": "abc", "name": "desk", "spared": spared, "taken": [],
    }  # fmt: skip
    await client.post("/mesh/remove", json={"node": "abc", "spare": ["def"]})
    assert api_server.calls == [("abc",), ("abc", "def")]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/mesh/ticket", {"role": "king"}, "Invalid value `king` for `role`"),
        ("/mesh/ticket", {"hours": 1}, "`hours` is not supported"),
        ("/mesh/remove", {}, "`node` is missing"),
        ("/mesh/ask", {"raw": 1}, "`raw` is a whole number, not text or null"),
        ("/mesh/ask", [], "The JSON is a list, not an object"),
    ],
)
async def test_an_invalid_body_is_refused_by_name(
    client: httpx2.AsyncClient, api_server: FakeNode, path: str, body: Any, message: str
) -> None:
    said = await client.post(path, json=body)

    assert (said.status_code, said.json()["error"]["message"]) == (400, message)
    assert (api_server.calls, api_server.requests) == ([], [])


async def test_a_body_without_end_is_refused(client: httpx2.AsyncClient) -> None:
    said = await client.post("/mesh/ask", content=b" " * (REQUEST_BYTES + 1))

    assert said.status_code == 413
    assert said.json()["error"]["message"] == f"The body is longer than {REQUEST_BYTES} bytes"


async def test_a_body_that_never_arrives_times_out(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respond, "BODY_S", 0.01)

    async def drip() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    said = await client.post("/mesh/ask", content=drip())

    assert (said.status_code, said.json()["error"]["code"]) == (408, "timed_out")


async def test_a_body_has_its_time_again_after_this_process_was_stopped(
    client: httpx2.AsyncClient, advance: Callable[[float], None]
) -> None:
    whole = request_to_json(ASKED)

    async def drip() -> AsyncIterator[bytes]:
        yield whole[:9]
        advance(3 * respond.BODY_S)
        await timers_fired()
        yield whole[9:]

    said = await client.post("/mesh/ask", content=drip())

    assert said.status_code == 200


async def test_an_answer_is_sent_as_lines(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    said = await client.post("/mesh/ask", content=request_to_json(ASKED))

    events: list[Event] = [
        event for line in said.content.split(b"\n") if line if (event := event_from_json(line))
    ]
    assert said.headers["content-type"] == "application/x-ndjson"
    assert events == [Prefilled(2, 2), Piece("hello"), Piece(" w\u2028rld"), answer_of("hello", 5)]
    assert api_server.requests == [ASKED]
    assert api_server.closed.is_set()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (MeshError("x"), 500, 1),
        (UserError("x"), 400, 2),
        (LinkLost("x"), 503, 3),
        (ModelError("x"), 500, 4),
        (ModelMissing("x"), 404, 4),
        (NotAuthorised("x"), 403, 5),
        (TimedOut("x"), 504, 6),
        (PeerFault("x"), 502, 7),
    ],
)
async def test_an_early_error_has_its_own_status(
    client: httpx2.AsyncClient, api_server: FakeNode, error: MeshError, status: int, code: int
) -> None:
    api_server.fails_at, api_server.error = 0, error

    said = await client.post("/mesh/ask", content=request_to_json(ASKED))

    assert (said.status_code, said.json()["error"]["exit_code"]) == (status, code)


async def test_a_late_error_is_the_last_line(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    api_server.fails_at = 2

    said = await client.post("/mesh/ask", content=request_to_json(ASKED))

    lines = [json.loads(line) for line in said.content.split(b"\n") if line]
    assert said.status_code == 200
    assert [next(iter(line)) for line in lines] == ["prefilled", "piece", "error"]
    assert lines[-1]["error"]["hint"] == "mend it"


async def test_events_are_sent_as_lines(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    api_server.go.set()

    said = await client.get("/mesh/events")

    lines = [json.loads(line) for line in said.content.split(b"\n") if line]
    assert [from_json(Change, line) for line in lines] == [CHANGE, replace(CHANGE, epoch=8)]


async def test_an_unknown_path_is_an_error_like_any_other(client: httpx2.AsyncClient) -> None:
    missing, wrong = await client.get("/nothing"), await client.get("/mesh/ask")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (405, "Method Not Allowed")


async def test_only_the_type_of_a_bug_is_sent(
    client: httpx2.AsyncClient, api_server: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Members:
        raise KeyError("canary")

    monkeypatch.setattr(api_server, "members", broken)

    said = await client.get("/mesh/members")

    assert said.status_code == 500
    assert said.json()["error"]["message"] == "This is a bug in meshllm: KeyError"
    assert "canary" not in said.text


async def test_other_terms_are_tried(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    asked = {"policy": "throughput", "members": 2, "memory_bytes": {"abc": 9}}
    found = await client.post("/mesh/plan", json=asked)
    wrong = await client.post("/mesh/plan", json={"policy": "bad"})
    unknown = await client.post("/mesh/plan", json={"planet": "mars"})

    assert from_json(PlannedRing, found.json()).policy == "throughput"
    assert api_server.calls[0] == (PlanTerms("throughput", 2, None, {"abc": 9}),)
    assert (wrong.status_code, unknown.status_code) == (400, 400)
    assert "Unknown policy" in wrong.json()["error"]["message"]


async def test_revoked_keys_are_published(client: httpx2.AsyncClient, api_server: FakeNode) -> None:
    tags = [("01" * 16), ("ab" * 16)]

    said = await client.post("/mesh/revoked", json={"tags": tags})

    assert said.json() == {"schema": 1, "tags": tags}
    assert api_server.calls == [(b"\x01" * 16, b"\xab" * 16)]


@pytest.mark.parametrize("tag", ["", "zz" * 16, "01" * 15, "01" * 17])
async def test_an_invalid_tag_is_refused(
    client: httpx2.AsyncClient, api_server: FakeNode, tag: str
) -> None:
    said = await client.post("/mesh/revoked", json={"tags": ["01" * 16, tag]})

    assert (said.status_code, api_server.calls) == (400, [])
    assert said.json()["error"]["message"] == "A tag is not 16 bytes in hexadecimal"


MODEL = Digest(bytes(range(32)))
PASS = {"model": MODEL.hex(), "span": "0:4", "direction": "backward"}


async def test_layers_say_how_they_are_split(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    said = await client.get("/mesh/layers", params={"model": MODEL.hex()})

    assert said.json() == {"schema": 1, "spans": ["0:4", "4:8"]}
    assert api_server.calls == [("layer_spans", MODEL)]


async def test_a_batch_goes_through_layers(
    client: httpx2.AsyncClient, api_server: FakeNode
) -> None:
    said = await client.post("/mesh/layers", params=PASS, content=b"abc")

    assert (said.status_code, said.content) == (200, b"cba")
    assert api_server.calls == [(LayerPass(MODEL, Span(0, 4), Direction.BACKWARD), 3)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "zz"}, "is not the digest"),
        ({"model": "00" * 31}, "is not the digest"),
        ({"direction": "sideways"}, "none of forward, backward, forward_keeping"),
        ({"span": "4"}, "Invalid layer span"),
    ],
)
async def test_an_invalid_pass_is_refused(
    client: httpx2.AsyncClient, api_server: FakeNode, wrong: dict[str, str], message: str
) -> None:
    said = await client.post("/mesh/layers", params=PASS | wrong, content=b"abc")

    assert (said.status_code, api_server.calls) == (400, [])
    assert message in said.json()["error"]["message"]
