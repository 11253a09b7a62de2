"""An idle mesh, as seen by its owner and by a client, and its logs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from meshllm.node.membership.state_store import StateStore
from tests.builders.own_cache import own_cache
from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import (
    ALONE,
    MESHLLM,
    WAIT_S,
    Fleet,
    ask,
    environment,
    free_address,
    meshllm,
)

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]

CANARY = "zyxwcanary"


def test_every_node_answers_and_shows_the_same_ring(trio: Fleet, answers: Answers) -> None:
    nodes = trio.nodes.values()

    said = [ask(node, QUESTION) for node in nodes]
    shown = [
        json.loads(meshllm("ring", "status", "--json", state=node.state).stdout)["ring"]
        for node in nodes
    ]

    assert said == [answers[QUESTION]] * 3
    assert answers[QUESTION].startswith("A ring is")
    assert len({json.dumps([ring["epoch"], ring["digest"], ring["stages"]]) for ring in shown}) == 1
    assert len(shown[0]["stages"]) == 3


def test_a_client_with_a_ticket_needs_no_torch(
    trio: Fleet, answers: Answers, tmp_path: Path
) -> None:
    made = meshllm("ring", "ticket", "--role", "client", state=trio.node("bench").state)

    done = subprocess.run(
        [sys.executable, "-X", "importtime", *MESHLLM, "chat", "--state", str(tmp_path / "new"),
         "--join", made.stdout.strip(), QUESTION],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip

    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout == answers[QUESTION], done.stderr
    assert "meshllm.node.client" in imported
    assert not {"torch", "transformers", "numpy"} & imported


def test_no_log_holds_a_prompt_an_answer_or_a_secret(trio: Fleet) -> None:
    ingress = trio.node("cellar")
    ticket = meshllm("ring", "ticket", state=ingress.state).stdout.strip()
    rings = [StateStore.open(node.state) for node in trio.nodes.values()]
    keys = [(ring.folder / "node.key").read_text().strip() for ring in rings]
    tickets = [each.secret.hex() for ring in rings for each in ring.invitations()]

    answer = ask(ingress, f"Repeat after me: {CANARY}").strip()
    refused = meshllm("chat", state=ingress.state, stdin=f"{CANARY} " * 4000)

    logs = {node.name: node.stderr for node in trio.nodes.values()}
    assert refused.returncode == 2
    assert CANARY not in refused.stderr
    assert all("meshllm.node" in log for log in logs.values())  # they did tell everything
    assert all(json.loads(line)["level"] for line in logs["bench"].splitlines())
    for secret in (CANARY, answer, ticket, ticket[60:90], *keys, *tickets):
        assert len(secret) > 5
        assert [name for name, log in logs.items() if secret in log] == []


def test_no_file_of_a_node_holds_a_prompt_or_an_answer(fleet: Fleet) -> None:
    address, trace, node = free_address(), fleet.folder / "trace.jsonl", fleet.node("attic")
    fleet.create_mesh("attic")
    api_server = "--model", "builtin", "--serve", address, "--trace", str(trace)
    variables = {"XDG_CACHE_HOME": own_cache(node.folder)}
    node.start(*api_server, *ALONE, root=("-vv",), variables=variables)
    fleet.form()

    told = [ask(node, f"Repeat after me: {CANARY}")]
    asked = {"model": "builtin", "input": f"Tell me of {CANARY}", "max_output_tokens": 32}
    said = httpx2.post(f"http://{address}/v1/responses", json=asked, timeout=WAIT_S).json()
    told.append(said["output"][0]["content"][0]["text"])
    node.send(signal.SIGINT)
    node.ended()

    written = {each: each.read_bytes() for each in fleet.folder.rglob("*") if each.is_file()}
    lines = [max(text.splitlines(), key=len, default="").encode() for text in told]
    assert all(len(line) > 5 for line in lines)
    assert b"prompt_tokens" in written[trace]
    assert {"mesh.json", "node.key", "err"} <= {each.name for each in written}
    for secret in (CANARY.encode(), *lines):
        assert [each for each, data in written.items() if secret in data] == []
