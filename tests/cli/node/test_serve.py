import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2
import pytest

from meshllm.api.access.accounts import Accounts, KeyLimits
from meshllm.cli.node.serve import _until_signal
from meshllm.cli.shared.signals import Drain
from meshllm.config import Settings
from meshllm.names import NodeId
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.ticket import Ticket
from meshllm.traces.trace import read_trace
from tests.builders.fake_node import FakeNode
from tests.builders.served import running
from tests.cli.conftest import Invoke

pytestmark = pytest.mark.socket


@asynccontextmanager
async def command(*words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """Run `meshllm serve`; yield it and the three lines that it prints."""
    program = (sys.executable, "-m", "meshllm", "serve", "--port", "0", *words)
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*program, stdout=pipe, stderr=pipe)
    assert process.stdout
    try:
        async with asyncio.timeout(60):
            lines = [(await process.stdout.readline()).decode().rstrip() for _ in range(3)]
            yield process, lines
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_the_running_node_is_served(tmp_path: Path) -> None:
    node, state = FakeNode(), tmp_path / "state"
    async with running(node, state / "api.sock"), command("--state", str(state)) as (it, lines):
        url, variables, curl = lines
        async with httpx2.AsyncClient(timeout=None) as client:
            words = curl.partition(" -d ")[2].strip("'")
            said = await client.post(f"{url}/chat/completions", json=json.loads(words))
        it.send_signal(signal.SIGINT)
        code = await it.wait()

    assert said.json()["choices"][0]["message"]["content"] == "hello"
    assert variables == f"OPENAI_BASE_URL={url} OPENAI_API_KEY=none"
    assert curl.startswith(f"curl {url}/chat/completions -H 'content-type: application/json' -d ")
    assert code == 0
    assert len(node.requests) == 1
    with Accounts.open(state) as accounts:
        assert [(name, used.requests) for name, used in accounts.usage("model")] == [("builtin", 1)]


async def test_requests_in_progress_are_finished_after_a_signal(tmp_path: Path) -> None:
    node, state = FakeNode(waits_at=2), tmp_path / "state"
    async with running(node, state / "api.sock"), command("--state", str(state)) as (it, lines):
        async with httpx2.AsyncClient(timeout=None, base_url=lines[0] + "/") as client:
            body = {"model": "builtin", "prompt": "hi"}
            asking = asyncio.ensure_future(client.post("completions", json=body))
            await node.begun.wait()
            it.send_signal(signal.SIGTERM)
            assert it.stderr is not None
            while b"finishing requests" not in await it.stderr.readline():
                pass
            refused = await client.post("completions", json=body)
            node.go.set()
            said = await asking
        code = await it.wait()

    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert said.json()["choices"][0]["text"] == "hello"
    assert (code, len(node.requests)) == (0, 1)


async def test_the_setting_is_where_the_running_node_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_SERVE", "192.0.2.7:8080")
    state = tmp_path / "state"
    async with (
        running(FakeNode(), state / "api.sock"),
        command("--state", str(state)) as (_, told),
    ):
        url = told[0]

    assert url.startswith("http://127.0.0.1:")


async def test_its_requests_are_recorded_on_request(tmp_path: Path) -> None:
    state, trace = tmp_path / "state", tmp_path / "trace.jsonl"
    words = ("--state", str(state), "--trace", str(trace))
    async with running(FakeNode(), state / "api.sock"), command(*words) as (it, lines):
        async with httpx2.AsyncClient(timeout=None) as client:
            body = {"model": "builtin", "prompt": "a secret"}
            await client.post(f"{lines[0]}/completions", json=body)
        it.send_signal(signal.SIGINT)
        await it.wait()

    assert [(each.model, each.new_tokens) for each in read_trace(trace)] == [("builtin", 5)]
    assert "secret" not in trace.read_text("utf-8")


async def test_the_api_server_outlives_its_node(tmp_path: Path) -> None:
    state = tmp_path / "state"
    socket = state / "api.sock"
    async with running(FakeNode(), socket):
        opening = command("--state", str(state))
        _, lines = await opening.__aenter__()
    async with httpx2.AsyncClient(timeout=None) as client:
        gone = await client.get(f"{lines[0]}/models")
        async with running(FakeNode(), socket):
            back = await client.get(f"{lines[0]}/models")
    await opening.__aexit__(None, None, None)

    assert (gone.status_code, gone.headers["retry-after"], back.status_code) == (503, "2", 200)
    assert "No node is running" in gone.json()["error"]["message"]


async def test_a_key_is_shown_where_it_is_needed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Accounts.open(state) as accounts:
        accounts.create("laptop", KeyLimits(), 0)
    async with (
        running(FakeNode(), state / "api.sock"),
        command("--state", str(state), "--require-key") as (_, lines),
    ):
        pass

    assert lines[1].endswith("OPENAI_API_KEY=KEY")
    assert '-H "authorization: Bearer $OPENAI_API_KEY"' in lines[2]


async def test_a_setting_of_the_node_has_no_effect(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with running(FakeNode(), state / "api.sock"):
        program = (sys.executable, "-m", "meshllm", "serve", "--state", str(state))
        done = await asyncio.create_subprocess_exec(
            *program, "--prefix-cache", "1GiB", stderr=subprocess.PIPE
        )
        _, told = await done.communicate()

    assert (done.returncode, b"`--prefix-cache` has no effect" in told) == (2, True)


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--model", "fox"), "model"),
        (("--memory", "1GiB"), "memory"),
        (("--no-discovery",), "no-discovery"),
    ],
)
def test_a_setting_of_a_node_has_no_effect_on_a_client(
    meshllm: Invoke, words: tuple[str, ...], flag: str
) -> None:
    result = meshllm("serve", "--port", "0", "--join", ticket(Role.CLIENT), *words)

    assert (result.exit_code, result.stdout) == (2, "")
    assert f"`--{flag}` has no effect: a client holds no layers" in result.stderr


async def test_a_ticket_of_a_client_is_used_beside_the_running_node(tmp_path: Path) -> None:
    node, state = FakeNode(), tmp_path / "state"
    async with running(node, state / "api.sock"):
        program = (sys.executable, "-m", "meshllm", "serve", "--state", str(state))
        words = ("--port", "0", "--join", ticket(Role.CLIENT))
        done = await asyncio.create_subprocess_exec(*program, *words, stderr=subprocess.PIPE)
        _, told = await done.communicate()

    assert (done.returncode, b"No installed transport dials" in told) == (2, True)


async def test_a_ticket_in_the_environment_is_used_beside_the_running_node(tmp_path: Path) -> None:
    node, state = FakeNode(), tmp_path / "state"
    async with running(node, state / "api.sock"):
        program = (sys.executable, "-m", "meshllm", "serve", "--state", str(state), "--port", "0")
        variables = {**os.environ, "MESHLLM_JOIN": ticket(Role.CLIENT)}
        done = await asyncio.create_subprocess_exec(*program, stderr=subprocess.PIPE, env=variables)
        _, told = await done.communicate()

    assert (done.returncode, b"No installed transport dials" in told) == (2, True)


def test_the_printed_unit_is_of_a_node_that_serves(meshllm: Invoke) -> None:
    printed = meshllm("serve", "--print-service", "--port", "7799", "--model", "builtin")
    client = meshllm("serve", "--print-service", "--join", ticket(Role.CLIENT))

    (command,) = re.findall("^ExecStart=.* meshllm (.*)$", printed.stdout, re.MULTILINE)
    assert command == "node --model builtin --serve 127.0.0.1:7799"
    assert (client.exit_code, client.stdout) == (2, "")
    assert "MESHLLM_JOIN" in client.stderr


@pytest.mark.parametrize(
    ("words", "address"),
    [
        ((), "[::1]:8080"),
        (("--port", "7780"), "[::1]:7780"),
        (("--host", "127.0.0.1"), "127.0.0.1:8080"),
        (("--host", "127.0.0.1", "--port", "0"), "127.0.0.1:0"),
    ],
)
def test_the_setting_says_where_to_listen_unless_flags_do(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], address: str
) -> None:
    monkeypatch.setenv("MESHLLM_SERVE", "[::1]:8080")

    printed = meshllm("serve", "--print-service", *words).stdout

    assert f" --serve {address}\n" in printed


def test_an_invalid_setting_is_refused(meshllm: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHLLM_SERVE", "8080")

    result = meshllm("serve")

    assert (result.exit_code, "Invalid address `8080`" in result.stderr) == (2, True)


def test_an_invalid_ticket_is_refused_before_the_api_server_opens(meshllm: Invoke) -> None:
    result = meshllm("serve", "--port", "0", "--join", "meshllm1nonsense")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "ticket" in result.stderr


def ticket(role: Role) -> str:
    """A ticket that no installed transport can use."""
    return Ticket(NodeId(bytes(32)), ("carrier:pigeon",), role, 0, bytes(16)).encode()


async def test_a_failure_ends_the_api_server() -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    closed = asyncio.Event()

    async def serve(_: asyncio.Event) -> None:
        asyncio.get_running_loop().call_soon(failed.set_exception, ZeroDivisionError("a bug"))
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()

    with pytest.raises(ZeroDivisionError):
        await _until_signal(Drain(None), serve, failed)
    assert closed.is_set()


def test_without_a_key_other_addresses_are_refused(meshllm: Invoke) -> None:
    result = meshllm("serve", "--host", "0.0.0.0", "--port", "0")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "hint: create one with `meshllm key create NAME`" in result.stderr


def test_a_hint_about_keys_names_the_state_folder_that_was_given(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("serve", "--host", "0.0.0.0", "--port", "0")
    folder = str(tmp_path / "my state")

    given = meshllm(*words, "--state", folder)
    listed = meshllm("key", "list", "--state", folder)
    monkeypatch.setenv("MESHLLM_STATE", folder)
    known = meshllm(*words)

    command = f"`meshllm key create NAME --state '{folder}'`"
    assert command in given.stderr
    assert command in listed.stderr
    assert "`meshllm key create NAME`" in known.stderr


@pytest.mark.parametrize("address", ["7780", "0.0.0.0"])
def test_a_node_names_host_and_port(meshllm: Invoke, address: str) -> None:
    result = meshllm("node", "--serve", address)

    assert (result.exit_code, f"Invalid address `{address}`" in result.stderr) == (2, True)


def test_the_api_server_has_settings() -> None:
    settings = Settings()

    assert (settings.serve, settings.require_key, settings.origins) == (None, False, None)
    assert "MESHLLM_SERVE" not in os.environ
