"""`bench --replay`: a trace on a ring of this process, the running node or another API."""

import asyncio
import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from meshllm.cli.commands import replay
from meshllm.config import Settings
from meshllm.errors import MeshError, UserError
from meshllm.node.ring import local_ring
from meshllm.status import ModelStatus
from meshllm.traces.trace import TraceLine
from tests.builders.fake_node import FakeNode
from tests.builders.served import running
from tests.cli.conftest import Invoke

LINE = TraceLine(0.0, "m", 40, 0, 3, 8, 10.0, 20.0, "length", {"temperature": 0.5}, "aa bb")
MODEL = ModelStatus("m", 1, 1, "", "")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that share two buckets, and one whose prompt was not read."""
    later = replace(LINE, at=0.001, cached_tokens=32, buckets="aa bb")
    empty = replace(LINE, prompt_tokens=0, new_tokens=0, ttft_ms=None, buckets=None)
    refused = replace(empty, finish_reason="error")
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(each.to_json() for each in (LINE, later, refused)))
    return path


def test_a_trace_is_replayed_on_a_ring_of_this_process(meshllm: Invoke, trace: Path) -> None:
    words = f"--replay {trace} --speed 1000 --nodes 2 --model tiny --threads 1 --json figures.json"

    result = meshllm("bench", *words.split())

    rows = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in result.stdout.splitlines()}
    assert result.exit_code == 0
    assert (rows["requests"], rows["prompt tokens"]) == (["2", "2"], ["80", "80"])
    assert (rows["new tokens"], rows["first token ms p90"][0]) == (["6", "6"], "10.00")
    assert rows["ms per token p50"][0] == "5.00"
    assert rows["prefix hits %"][0] == "40.00"
    told = json.loads(Path("figures.json").read_text("utf-8"))
    assert (told["speed"], told["requests"], told["compared"], told["errors"]) == (1000, 2, 2, {})
    assert told["replay"]["ttft_ms"]["p99"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--speed 2", "`--speed` needs `--replay`"),
        ("--state s", "`--state` needs `--replay`"),
        ("--replay TRACE --threads 1", "`--threads` has no effect: the running node answers"),
        ("--replay TRACE --url http://127.0.0.1:9 --device cpu", "`--device` has no effect: the"),
        ("--replay TRACE --url http://127.0.0.1:9 --state s", "`--state` has no effect: the API"),
        ("--replay TRACE --nodes 1 --state s", "`--state` has no effect: a ring in this process"),
        ("--rounds 100", "Invalid value for '--rounds': more than 99"),
        ("--replay TRACE --rounds 2", "`--rounds` cannot be combined with `--replay`"),
        ("--replay TRACE --url http://127.0.0.1:9 --nodes 1", "cannot be combined with `--url`"),
        ("--replay TRACE --key-file k", "`--key-file` needs `--url`"),
        ("--replay TRACE --nodes 1,2", "Invalid ring size `1,2`"),
        ("--replay TRACE", "There is no running node"),
        ("--replay missing", "record one with `meshllm serve --trace FILE`"),
        ("--replay .", "Cannot read the trace `.`: is a directory"),
        ("--replay TRACE --url http://127.0.0.1:9/v1", "Nothing answers at"),
        ("--replay TRACE --url ftp://a/v1", "Nothing answers at"),
        ("--replay TRACE --url http://127.0.0.1:x", "Invalid URL"),
    ],
)
def test_a_replay_that_cannot_be_is_refused(
    meshllm: Invoke, trace: Path, words: str, told: str
) -> None:
    result = meshllm("bench", *words.replace("TRACE", str(trace)).split())

    assert result.exit_code != 0
    assert told in result.stderr
    assert "\nhint: " in result.stderr


def test_the_key_of_another_api_may_be_short(meshllm: Invoke, trace: Path, home: Path) -> None:
    (home / "key").touch(0o600)
    (home / "key").write_text("sk-1\n")
    words = ["--replay", str(trace), "--url", "http://127.0.0.1:9/v1", "--key-file", "key"]

    assert "Nothing answers at" in meshllm("bench", *words).stderr

    (home / "key").chmod(0o644)
    assert "Other users can read the key file" in meshllm("bench", *words).stderr


def test_sigterm_during_a_replay_removes_its_model(
    meshllm: Invoke, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    written: list[Path] = []

    def end(*_: object) -> None:
        written.extend(folder.iterdir())
        assert callable(signal.getsignal(signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(local_ring, "open_local_ring", end)

    result = meshllm("bench", "--replay", str(trace), "--nodes", "1", "--model", "tiny")

    assert result.exit_code == 143
    assert written
    assert not [*folder.iterdir()]


@pytest.mark.socket
async def test_a_trace_is_replayed_on_the_running_node(
    meshllm: Invoke, trace: Path, tmp_path: Path
) -> None:
    node, state = FakeNode(), tmp_path / "state"
    words = ["--replay", str(trace), "--state", str(state)]
    async with running(node, state / "api.sock"):
        unserved = await asyncio.to_thread(meshllm, "bench", *words)
        words += ["--model", "builtin"]
        result = await asyncio.to_thread(meshllm, "bench", *words, "--json", "-")
        other = await asyncio.to_thread(meshllm, "bench", *words, "--model", "other")
        node.fails_at = 0
        failed = await asyncio.to_thread(meshllm, "bench", *words)

    assert json.loads(result.stdout)["replay"]["new_tokens"] == 10
    assert "The model `other` is not served" in other.stderr
    assert unserved.exit_code == 2
    assert "The trace names 1 model that is not served: `m`" in unserved.stderr
    assert "served: `builtin`; `--model NAME` sends all requests to one" in unserved.stderr
    assert (failed.exit_code, "No request was answered: It broke" in failed.stderr) == (1, True)


@pytest.mark.socket
async def test_each_request_is_sent_to_the_model_that_it_names(
    meshllm: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [replace(MODEL, name=name, key=name * 16) for name in "ab"]
    named = ["b", "a", "other", "b" * 6]
    lines = [replace(LINE, model=name, at=number / 1e3) for number, name in enumerate(named)]
    path, node, state = tmp_path / "trace.jsonl", FakeNode(), tmp_path / "state"
    path.write_bytes(b"".join(each.to_json() for each in lines))
    models[1] = replace(models[1], aliases=("other",))

    async def served(_: FakeNode) -> list[ModelStatus]:
        return models

    monkeypatch.setattr(FakeNode, "models", served)
    words = ["bench", "--replay", str(path), "--state", str(state)]
    async with running(node, state / "api.sock"):
        told = await asyncio.to_thread(meshllm, *words)
        by_name = [(each.sampling.seed, each.model) for each in node.requests]
        node.requests.clear()
        one = await asyncio.to_thread(meshllm, *words, "--model", "a")

    assert (told.exit_code, one.exit_code) == (0, 0)
    assert sorted(by_name) == [(0, "b"), (1, "a"), (2, "b"), (3, "b")]
    assert {each.model for each in node.requests} == {"a"}


@pytest.mark.parametrize("model", [None, "one"])
async def test_each_request_names_its_model_to_another_api(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str | None
) -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("models"):
            return httpx2.Response(200, json={"data": [{"id": "one"}, {"id": "two"}]})
        asked.append(json.loads(request.content)["model"])
        return httpx2.Response(500)

    plain = httpx2.AsyncClient
    transport = httpx2.MockTransport(answer)
    monkeypatch.setattr(httpx2, "AsyncClient", lambda **terms: plain(transport=transport, **terms))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(replace(LINE, model=name).to_json() for name in ("two", "one")))
    options = replay.ReplayOptions(path, 1.0, model, url="http://node/v1")

    await replay._measure(options, Settings(), lambda _: None)

    assert sorted(asked) == (["one"] * 2 if model else ["one", "two"])


@pytest.mark.parametrize(
    ("served", "model", "asked"),
    [
        (("",), None, {"m0": ""}),
        (("", "p"), "m1", {"m0": "m1"}),
        (("p", ""), None, {"m0": "m0"}),
        (("p", ""), None, {"": "m0", "m1": ""}),
    ],
)
def test_the_model_of_a_provider_is_asked_by_name(
    served: tuple[str, ...], model: str | None, asked: dict[str, str]
) -> None:
    models = [
        replace(MODEL, name=f"m{number}", providers=tuple(filter(None, [each])))
        for number, each in enumerate(served)
    ]

    assert replay.asked_names(model, list(asked), models) == asked


@pytest.mark.parametrize("name", ["second", "other", "bbbbbb"])
def test_a_further_model_is_asked_by_name(name: str) -> None:
    first = replace(MODEL, name="first", key="a" * 16)
    second = replace(MODEL, name="second", aliases=("other",), key="b" * 16)

    assert replay.asked_names(name, ["first"], [first, second]) == {"first": "second"}
    assert replay.asked_names(None, [name], [first, second]) == {name: "second"}


@pytest.mark.parametrize("model", [None, "fox@int8"])
def test_a_name_with_a_precision_is_asked_as_such(model: str | None) -> None:
    fox = replace(MODEL, name="fox", quant="int8", key="a" * 16)

    asked = replay.asked_names(model, ["fox@int8", "fox"], [fox])

    assert asked == {"fox@int8": "fox@int8", "fox": model or "fox"}


def test_models_of_a_trace_that_are_not_served_are_named_within_a_limit() -> None:
    names = ["one", *(f"{number}{'x' * 200}" for number in range(7))]

    with pytest.raises(UserError) as raised:
        replay.served_models(names, [replace(MODEL, name="one")])

    told = str(raised.value)
    assert told.startswith("The trace names 7 models that are not served: `0xx")
    assert told.endswith("x` and 2 more")
    assert len(told) < 600


def test_a_node_without_a_model_replays_nothing() -> None:
    with pytest.raises(MeshError, match="serves no model yet"):
        replay.asked_names(None, ["m"], [])
