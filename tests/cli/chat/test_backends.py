"""The choice of a backend for `meshllm chat`, with fake backends and a fake node."""

import asyncio
import errno
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from meshllm.api.serve import serve
from meshllm.api.unix import is_answered
from meshllm.cli.app import app
from meshllm.cli.chat import backends, chat
from meshllm.cli.shared.client import NodeClient
from meshllm.config import Scalar, keys, load
from meshllm.errors import TimedOut
from meshllm.names import short
from meshllm.node.membership.bootstrap import client_folder
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import SECRET_BYTES, Ticket
from meshllm.status import ProviderOffer, RingState, ServedRing
from tests.builders.fake_node import FOX, FakeNode
from tests.builders.fake_ring import FakeRing, answer_of
from tests.builders.status import node_id
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

Ask = Callable[..., Result]

INVITER = NodeKey(bytes(32)).node
PARSED = Ticket(INVITER, (), Role.CLIENT, 0, bytes(SECRET_BYTES))
TICKET = PARSED.encode()


@pytest.fixture
def ask() -> Ask:
    """Run `meshllm chat` without passing a backend."""

    def invoke(*words: str) -> Result:
        return CliRunner().invoke(app, [*words, "hi"], prog_name="meshllm")

    return invoke


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> FakeRing:
    """Replace the ring in this process."""
    ring = FakeRing()
    for module in (chat, backends):
        monkeypatch.setattr(module, "open_local", ring)
    monkeypatch.setattr(chat, "import_heavy", lambda: None)
    return ring


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNode]:
    """A fake node that serves in another thread."""
    folder = tmp_path / "s"
    monkeypatch.setenv("MESHLLM_STATE", str(folder))
    api_server = FakeNode()
    loop = asyncio.new_event_loop()
    task = loop.create_task(serve(api_server, folder / "api.sock"))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    asyncio.run(until(lambda: is_answered(folder / "api.sock")))
    yield api_server
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def test_the_running_node_answers(ask: Ask, node: FakeNode, local: FakeRing) -> None:
    result = ask("chat", "--max-tokens", "9")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "hello w\u2028rld\n", "")
    assert (node.requests[0].max_tokens, local.requests) == (9, [])


@pytest.mark.parametrize("words", [("--quiet",), (), ("--model", "builtin")])
def test_times_of_hops_have_the_names_and_ids_of_the_nodes(
    ask: Ask, node: FakeNode, words: tuple[str, ...]
) -> None:
    status = node.report()
    known, named = status.nodes[0].short, status.nodes[1].short
    first, second = answer_of("hi", 3).hops
    hops = replace(first, node=known), replace(second, node=named), replace(second, node="gone")
    node.said = (replace(answer_of("hi", 3), hops=hops),)

    shown = " ".join(ask("chat", "--stats", *words).stderr.split())

    assert f" 0 {status.nodes[0].name} ({known}) 0:4 " in shown
    assert f' 1 a "b"\\\\nc ({named}) 4:8 ' in shown
    assert " 1 gone 4:8 " in shown
    told = json.loads(ask("chat", "--json", *words).stdout)
    assert [hop["node"] for hop in told["hops"]] == [known, named, "gone"]


def test_an_answer_without_names_is_shown(
    ask: Ask, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: NodeClient) -> None:
        raise TimedOut("The node did not answer")

    monkeypatch.setattr(NodeClient, "status", fail)
    node.said = (answer_of("hi", 3),)

    assert "  node-0  0:4 " in ask("chat", "--quiet", "--stats").stderr


def test_the_mesh_that_reads_the_prompt_is_named(ask: Ask, node: FakeNode) -> None:
    node.entry = node_id(1)

    said, quiet = ask("chat"), ask("chat", "-q")

    assert said.stderr == (
        'the prompt leaves this machine: it goes to the entry `a "b"\\\\nc` of mesh 4fa1c09b2d7e\n'
    )
    assert (said.stdout, quiet.stdout, quiet.stderr) == (*["hello w\u2028rld\n"] * 2, "")


def test_what_the_ring_waits_for_is_said(ask: Ask, node: FakeNode) -> None:
    node.waits_for = "1 of 2 members\nare ready"

    said, quiet = ask("chat"), ask("chat", "-q")

    assert said.stderr == "waiting: 1 of 2 members\\nare ready\n"
    assert (said.stdout, quiet.stdout, quiet.stderr) == (*["hello w\u2028rld\n"] * 2, "")


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        (None, "its nodes are loading"),
        ("", "its nodes are loading"),
        ("1 of 2 ready", "1 of 2 ready"),
    ],
)
def test_the_node_of_a_ring_knows_best_what_it_waits_for(
    ask: Ask, node: FakeNode, monkeypatch: pytest.MonkeyPatch, own: str | None, cause: str
) -> None:
    status = node.report()
    ring = ServedRing(
        "builtin",
        0,
        RingState.FORMING,
        "its nodes are loading",
        is_own=own is not None,
        epoch=1,
        entry=None,
        stages=(),
        status=None if own is None else replace(status.ring, reason=own),
    )
    monkeypatch.setattr(node, "report", lambda: replace(status, rings=(ring,)))

    assert ask("chat").stderr == f"waiting: {cause}\n"


def test_a_provided_model_waits_for_no_ring(ask: Ask, node: FakeNode) -> None:
    node.provided, node.waits_for = (FOX,), "no plan yet"

    assert "waiting" not in ask("chat", "--model", "fox").stderr


def test_a_provider_that_answers_in_place_of_a_ring_is_named(ask: Ask, node: FakeNode) -> None:
    node.beside, node.waits_for = (ProviderOffer("gpu"),), "no plan yet"
    forming = ask("chat").stderr
    node.waits_for = ""

    assert forming == "the prompt leaves this machine: it goes to the provider `gpu` of the mesh\n"
    assert ask("chat").stderr == ""


def test_a_name_with_a_precision_means_no_provider(
    ask: Ask, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.beside, node.waits_for = (ProviderOffer("gpu"),), "no plan yet"
    status = node.report()
    assert status.model is not None
    known = replace(status, model=replace(status.model, key="0" * 16))
    monkeypatch.setattr(node, "report", lambda: known)
    precise = f"builtin@{status.model.weight_precision}"

    said = ask("chat", "--model", precise).stderr

    assert said == "waiting: no plan yet\n"
    assert [each.model for each in node.requests] == [precise]


def test_one_serving_replica_is_enough(
    ask: Ask, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    forming, serving = (
        ServedRing(
            "builtin",
            replica,
            state,
            "no plan yet",
            is_own=True,
            epoch=1,
            entry=node_id(0),
            stages=(),
        )
        for replica, state in enumerate((RingState.FORMING, RingState.SERVING))
    )
    status = replace(node.report(), rings=(forming, serving))
    monkeypatch.setattr(node, "report", lambda: status)

    assert ask("chat").stderr == ""


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({}, "the node of this machine, in a ring of 2"),
        ({"nodes": 3}, "a ring of 3 in this process"),
    ],
)
def test_who_answers_is_named_with_the_size_of_its_ring(
    node: FakeNode, given: dict[str, Scalar], where: str
) -> None:
    flags = dict.fromkeys(keys()) | given

    _, _, found = backends.choose(load(flags).settings, flags)

    assert found == where


def test_a_model_that_no_ring_serves_has_no_size(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = node.report()
    assert status.model
    big = replace(status.model, name="big")
    forming = ServedRing(
        "big", 0, RingState.FORMING, "no plan yet", is_own=False, epoch=0, entry="", stages=()
    )
    status = replace(status, models=(status.model, big), rings=(forming,))
    monkeypatch.setattr(node, "report", lambda: status)
    flags = dict.fromkeys(keys()) | {"model": "big"}

    _, _, found = backends.choose(load(flags).settings, flags)

    assert found == "the node of this machine"


def test_a_mesh_without_an_entry_is_named(ask: Ask, node: FakeNode) -> None:
    node.entry = ""

    assert ask("chat").stderr.endswith("it goes to mesh 4fa1c09b2d7e\n")


def test_the_reported_model_is_that_of_the_mesh(ask: Ask, node: FakeNode) -> None:
    node.served = "mesh/model"

    result = ask("chat", "--json")

    assert json.loads(result.stdout)["model"] == "mesh/model"


def test_a_name_of_another_machine_does_not_control_the_terminal(ask: Ask, node: FakeNode) -> None:
    name = "fox\x1b]0;moo\x07\n"
    node.provided = (replace(FOX, name=name),)
    flags = dict.fromkeys(keys()) | {"model": name}

    _, chosen, _ = backends.choose(load({}).settings, flags)
    ask("chat", "--model", name)

    assert chosen.model == r"fox\x1b]0;moo\x07\n"
    assert [each.model for each in node.requests] == [name]


def test_a_model_of_a_provider_is_asked_for(ask: Ask, node: FakeNode) -> None:
    node.provided = (FOX,)

    result, other = ask("chat", "--model", "fox"), ask("chat", "--model", "cow")

    assert result.stderr.endswith("it goes to the provider `gpu` of the mesh\n")
    assert [each.model for each in node.requests] == ["fox"]
    assert "The running node serves `builtin`, `fox`, not `cow`" in other.stderr


def test_the_node_in_use_is_logged(
    ask: Ask, node: FakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "meshllm"):
        ask("chat")

    assert "using the node at" in caplog.text


def test_an_error_of_the_node_keeps_its_exit_code(ask: Ask, node: FakeNode) -> None:
    node.fails_at = 1

    result = ask("chat")

    assert (result.exit_code, result.stderr) == (1, "error: It broke\nhint: mend it\n")


def test_without_a_node_a_ring_runs_in_this_process(ask: Ask, local: FakeRing) -> None:
    assert ask("chat").stdout == "You said: hi\n"


@pytest.mark.parametrize("words", [(), ("--nodes", "2")])
def test_a_ring_in_this_process_has_the_first_model_of_the_settings(
    ask: Ask, local: FakeRing, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("MESHLLM_MODEL", "first, second")

    result = ask("chat", "--json", *words)

    assert local.settings
    assert local.settings.model == json.loads(result.stdout)["model"] == "first"


def test_a_ring_in_this_process_has_no_state_folder(ask: Ask, local: FakeRing) -> None:
    result = ask("chat", "--nodes", "2", "--state", "there")

    assert (result.exit_code, local.settings) == (2, None)
    assert "`--nodes`, a ring in this process, cannot be combined with `--state`" in result.stderr


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        ("file", "State folder `{}` cannot be used: not a directory"),
        ("file/below", "State folder `{}` cannot be used: not a directory"),
        ("link", "State folder `{}` cannot be used: too many levels of symbolic links"),
        ("others", "State folder `{}` cannot be used: it belongs to another user"),
        ("x" * 100, "Socket path `{}/api.sock` is too long"),
    ],
)
def test_a_state_folder_that_cannot_be_used_is_refused(
    ask: Ask,
    local: FakeRing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    why: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "others").mkdir()
    if folder == "others":
        monkeypatch.setattr("os.geteuid", lambda: -1)

    result = ask("chat", "--state", str(tmp_path / folder))

    assert (result.exit_code, local.requests) == (2, [])
    assert result.stderr.startswith(f"error: {why.format(tmp_path / folder)}")
    assert "\nhint: choose a " in result.stderr


def test_a_state_folder_without_a_node_is_not_an_error(
    ask: Ask, local: FakeRing, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()

    for folder, found in (
        ("empty", "no node is running at"),
        ("missing/below", "no node has used"),
    ):
        path = tmp_path / folder
        shown = ask("chat", "--state", str(path))
        quiet = ask("chat", "--state", str(path), "--quiet")
        assert shown.stdout == quiet.stdout == "You said: hi\n"
        assert shown.stderr == f"{found} `{path}`: a ring of 1 in this process answers\n"
        assert quiet.stderr == ""


def test_a_stopped_node_of_a_mesh_is_named(
    ask: Ask, local: FakeRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHLLM_STATE", raising=False)
    monkeypatch.setattr("meshllm.config.user_state_path", lambda *_, **__: tmp_path)

    assert ask("chat").stderr == ""
    (tmp_path / "mesh.json").touch()
    assert ask("chat").stderr.startswith(f"no node is running at `{tmp_path}`: ")
    assert ask("chat", "--quiet").stderr == ""


def test_a_usual_state_folder_that_may_not_be_searched_does_not_matter(
    ask: Ask, local: FakeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = os.stat

    def refusing(path: Any, *more: Any, **options: Any) -> os.stat_result:
        if str(path).endswith("mesh.json"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, *more, **options)

    monkeypatch.delenv("MESHLLM_STATE", raising=False)
    monkeypatch.setattr("os.stat", refusing)

    assert ask("chat").stdout == "You said: hi\n"


def test_a_usual_state_folder_that_cannot_be_used_does_not_matter(
    ask: Ask, local: FakeRing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("MESHLLM_STATE", raising=False)
    monkeypatch.setattr("meshllm.config.user_state_path", lambda *_, **__: tmp_path / "file")

    assert ask("chat").stdout == "You said: hi\n"


def test_nodes_runs_a_ring_in_this_process(ask: Ask, node: FakeNode, local: FakeRing) -> None:
    result = ask("chat", "--nodes", "2", "--model", "m")

    assert (result.stdout, node.requests) == ("You said: hi\n", [])
    assert local.settings is not None
    assert (local.settings.nodes, local.settings.model) == (2, "m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "other"), "The running node serves `builtin`, not `other`"),
        (("--threads", "2"), "`--threads` has no effect: the running node already has a ring"),
        (("--dtype", "auto"), "`--dtype` has no effect: the running node already has a ring"),
        (("--device", "cpu"), "`--device` has no effect: the running node already has a ring"),
        (("--draft", "m"), "`--draft` has no effect: the running node already has a ring"),
        (("--wire", "int8"), "`--wire` has no effect: the running node already has a ring"),
        (
            ("--prefix-cache", "0"),
            "`--prefix-cache` has no effect: the running node already has a ring",
        ),
    ],
)
def test_a_flag_that_contradicts_the_running_node_is_refused(
    ask: Ask, node: FakeNode, words: tuple[str, ...], message: str
) -> None:
    result = ask("chat", *words)

    assert (result.exit_code, node.requests) == (2, [])
    assert result.stderr.startswith(f"error: {message}\nhint: omit ")


def test_the_model_of_the_mesh_is_accepted(ask: Ask, node: FakeNode) -> None:
    assert ask("chat", "--model", "builtin").exit_code == 0


def test_a_mesh_without_a_model_yet_is_used(ask: Ask, node: FakeNode) -> None:
    node.served = None

    assert ask("chat", "--model", "builtin").exit_code == 0


@pytest.fixture
def thin(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Replace the client without weights."""
    opened: list[tuple[str, Path]] = []

    @asynccontextmanager
    async def open_mesh_client(ticket: str, state: Path) -> AsyncIterator[FakeRing]:
        opened.append((ticket, state))
        yield FakeRing()

    module = ModuleType("meshllm.node.client")
    module.open_mesh_client = open_mesh_client  # type: ignore[attr-defined]  # a new module
    monkeypatch.setitem(sys.modules, "meshllm.node.client", module)
    return opened


def test_a_ticket_makes_it_a_client(
    ask: Ask, node: FakeNode, thin: list[tuple[str, Path]], home: Path
) -> None:
    result = ask("chat", "--join", TICKET)

    assert (result.stdout, node.requests) == ("You said: hi\n", [])
    assert thin == [(TICKET, home / "s")]


def test_a_client_can_ask_for_a_model(ask: Ask, thin: list[tuple[str, Path]]) -> None:
    result = ask("chat", "--join", TICKET, "--model", "fox", "--json")
    other = ask("chat", "--join", TICKET, "--json")

    assert json.loads(result.stdout)["model"] == "fox"
    assert json.loads(other.stdout)["model"] is None  # the mesh chooses it


def test_the_mesh_of_a_ticket_is_named(ask: Ask, thin: list[tuple[str, Path]]) -> None:
    said, quiet = ask("chat", "--join", TICKET), ask("chat", "--join", TICKET, "--quiet")

    assert said.stderr == (
        "the prompt leaves this machine: it goes to the mesh of node"
        f" `{short(INVITER)}`, which made the ticket\n"
    )
    assert (said.stdout, quiet.stdout, quiet.stderr) == (*["You said: hi\n"] * 2, "")


@pytest.mark.parametrize(
    ("role", "expires_s", "code", "error"),
    [(Role.CLIENT, 1, 5, "The ticket has expired"), (Role.NODE, 0, 2, "The ticket is for a node")],
)
def test_a_ticket_of_no_use_is_refused_before_the_prompt_leaves(
    ask: Ask,
    thin: list[tuple[str, Path]],
    role: Role,
    expires_s: int,
    code: int,
    error: str,
) -> None:
    result = ask("chat", "--join", replace(PARSED, role=role, expires_s=expires_s).encode())

    assert (result.exit_code, result.stdout, thin) == (code, "", [])
    assert result.stderr.startswith(f"error: {error}")
    assert "hint: " in result.stderr


def test_an_expired_ticket_that_was_used_here_may_still_serve(
    ask: Ask, thin: list[tuple[str, Path]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_STATE", str(home / "s"))
    late = replace(PARSED, expires_s=1)
    client_folder(late, home / "s").mkdir(parents=True)

    assert ask("chat", "--join", late.encode()).stdout == "You said: hi\n"
    assert len(thin) == 1


def test_a_project_file_cannot_send_the_prompt_away(
    ask: Ask, thin: list[tuple[str, Path]], local: FakeRing, home: Path
) -> None:
    (home / "meshllm.toml").write_text(f'join = "{TICKET}"')

    result = ask("chat")

    assert (result.exit_code, result.stdout, thin, local.requests) == (2, "", [], [])
    assert "`join` cannot be set by a project file" in result.stderr


def test_a_ticket_in_the_environment_is_used_beside_a_node(
    ask: Ask, node: FakeNode, thin: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_JOIN", TICKET)

    ask("chat")

    assert ([ticket for ticket, _ in thin], node.requests) == ([TICKET], [])


def test_a_ticket_of_a_node_in_the_environment_is_not_asked(
    ask: Ask, node: FakeNode, thin: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_JOIN", replace(PARSED, role=Role.NODE).encode())

    ask("chat")

    assert (thin, len(node.requests)) == ([], 1)


def test_a_ticket_in_the_environment_is_used_without_a_node(
    ask: Ask, thin: list[tuple[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_JOIN", TICKET)

    ask("chat")

    assert [ticket for ticket, _ in thin] == [TICKET]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nodes", "2"), "`--nodes`, a ring in this process, cannot be combined with `--join`"),
        (("--ends", "entry"), "`--ends` has no effect: the mesh of the ticket already has a ring"),
    ],
)
def test_a_flag_without_effect_for_a_client_is_refused(
    ask: Ask, thin: list[tuple[str, Path]], words: tuple[str, ...], message: str
) -> None:
    result = ask("chat", "--join", TICKET, *words)

    assert (result.exit_code, thin) == (2, [])
    assert result.stderr.startswith(f"error: {message}")
    assert "\nhint: omit " in result.stderr
