"""`meshllm serve --join` with a client's ticket: an API server without weights, in processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import (
    ALONE,
    MESHLLM,
    WAIT_S,
    Fleet,
    Node,
    environment,
    free_address,
    meshllm,
    open_fleet,
    until,
)
from tests.processes.fork_server import ForkServer

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]

TURNS = [{"role": "user", "content": QUESTION}]
ASKED = {"model": "builtin", "messages": TURNS, "temperature": 0, "max_tokens": 512}


@pytest.fixture(scope="module")
def host(server: ForkServer) -> Iterator[Node]:
    """A node that holds the whole model."""
    with open_fleet(server) as fleet:
        fleet.create_mesh("host")
        fleet.node("host").start(*ALONE)
        fleet.form()
        yield fleet.node("host")


@contextmanager
def api_server(
    host: Node, place: Path, *limits: str, options: tuple[str, ...] = ()
) -> Iterator[str]:
    """Run an API server with a new ticket of a client; yield its URL."""
    ticket = meshllm("ring", "ticket", "--role", "client", *limits, state=host.state).stdout.strip()
    port = free_address().rpartition(":")[2]
    words = ("serve", "--port", port, "--join", ticket, "--state", str(place), *options)
    command = [sys.executable, *MESHLLM, "-vv", *words]
    with (place.parent / "out").open("wb") as out, (place.parent / "err").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment())
    read = (place.parent / "out").read_text
    told = (place.parent / "err").read_text
    try:
        until(lambda: "curl" in read() or process.poll() is not None, told)
        assert process.poll() is None, told()
        yield read().split()[0]
        process.terminate()
        assert process.wait(WAIT_S) == 0, told()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=WAIT_S) as client:
        yield client


def test_every_dialect_answers_without_weights(
    host: Node, client: httpx2.Client, tmp_path: Path, answers: Answers
) -> None:
    with api_server(host, tmp_path / "thin") as url:
        listed = client.get(f"{url}/models").json()["data"]
        chat = client.post(f"{url}/chat/completions", json=ASKED)
        streamed = client.post(f"{url}/chat/completions", json=ASKED | {"stream": True}).text
        response = client.post(f"{url}/responses", json={"model": "builtin", "input": QUESTION})
        embedded = client.post(f"{url}/embeddings", json={"model": "builtin", "input": "a ring"})
        counted = client.post(
            f"{url}/messages/count_tokens", json={"model": "builtin", "messages": TURNS}
        )
        with client.stream("GET", f"{url.removesuffix('v1')}page/events") as events:
            page = json.loads(next(events.iter_lines()).removeprefix("data: "))

    assert [each["id"] for each in listed] == ["builtin"]
    text = answers[QUESTION].strip()
    assert chat.json()["choices"][0]["message"]["content"].strip() == text
    chunks = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [each["delta"] for line in chunks for each in json.loads(line)["choices"]]
    assert "".join(each.get("content") or "" for each in deltas).strip() == text
    assert chat.headers["x-meshllm-precision"] == "bfloat16"
    assert response.json()["status"] == "completed"
    assert len(embedded.json()["data"][0]["embedding"]) > 16
    assert counted.json()["input_tokens"] > 0
    assert (page["state"], page["model"], page["is_client"]) == ("serving", "builtin", True)
    assert (page["nodes"], page["hops"], page["memory"]) == ([], [], None)
    assert QUESTION not in (tmp_path / "err").read_text()


def test_its_keys_and_their_usage_are_its_own(
    host: Node, client: httpx2.Client, tmp_path: Path
) -> None:
    place = tmp_path / "thin"
    key = meshllm("key", "create", "laptop", state=place).stdout.strip()
    headers = {"authorization": f"Bearer {key}"}
    with api_server(host, place, options=("--require-key",)) as url:
        statuses = [
            client.post(f"{url}/chat/completions", json=ASKED, headers=each).status_code
            for each in ({}, headers)
        ]
        meshllm("key", "revoke", "laptop", state=place)
        refused = client.post(f"{url}/chat/completions", json=ASKED, headers=headers)

    assert (statuses, refused.status_code) == ([401, 200], 401)
    used = json.loads(meshllm("usage", "--json", "--by", "key", state=place).stdout)
    assert [(each["key"], each["requests"]) for each in used["usage"]] == [("laptop", 1)]
    assert meshllm("key", "list", "--json", state=host.state).stdout.count("laptop") == 0
    assert key not in (tmp_path / "err").read_text()


def test_the_limits_of_the_ticket_are_told_with_a_time(
    host: Node, client: httpx2.Client, tmp_path: Path
) -> None:
    with api_server(host, tmp_path / "thin", "--tokens-per-day", "50") as url:
        first = client.post(f"{url}/chat/completions", json=ASKED | {"max_tokens": 512})
        second = client.post(f"{url}/chat/completions", json=ASKED | {"max_tokens": 512})

    assert first.json()["usage"]["total_tokens"] <= 50
    error = second.json()["error"]
    assert (second.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert "the limit of the ticket" in error["message"]
    assert 2 <= int(second.headers["retry-after"]) <= 86_400


@pytest.mark.slow
def test_the_api_server_outlives_its_mesh(
    client: httpx2.Client, tmp_path: Path, fleet: Fleet
) -> None:
    node = fleet.node("host")
    fleet.create_mesh("host")
    node.start(*ALONE)
    fleet.form()
    with api_server(node, tmp_path / "thin") as url:
        page = f"{url.removesuffix('v1')}page/events"
        node.kill()
        gone = client.post(f"{url}/chat/completions", json=ASKED)
        with client.stream("GET", page) as events:
            seen = json.loads(next(events.iter_lines()).removeprefix("data: "))
        node.start(*ALONE)
        until(lambda: client.get(f"{url}/models").status_code == 200)
        until(lambda: client.post(f"{url}/chat/completions", json=ASKED).status_code == 200)

    assert (gone.status_code, gone.headers["retry-after"]) == (503, "2")
    assert (seen["state"], seen["reason"]) == ("waiting", "no node of the mesh answers")
