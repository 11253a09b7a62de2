import asyncio
import errno
import io
import json
import logging
import os
import re
import resource
import signal
import stat
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import torch

from meshllm.cli.node.node import OPEN_FILES, SWITCH_S, _print_with_relay, _report, _write_private
from meshllm.cli.shared.events import Notice
from meshllm.cli.terminal import render
from meshllm.errors import MeshError, NotAuthorised, UserError
from meshllm.log import setup
from meshllm.model import device
from meshllm.names import NodeId, Span, WireMode
from meshllm.node.control import NodeControl
from meshllm.node.membership.state_store import StateStore
from meshllm.node.options import InferenceConfig, NodeOptions
from meshllm.protocol.trust.credential import Role
from meshllm.protocol.trust.ticket import Ticket, parse_ticket
from meshllm.status import MeshStatus, ModelStatus, NodeState
from meshllm.testing.clock import run_virtual
from tests.builders.fake_node import FOX
from tests.builders.status import status_of, waiting, with_node
from tests.builders.waiting import timers_fired
from tests.cli.conftest import Invoke

TICKET = Ticket(NodeId(bytes(32)), (), Role.NODE, 0, bytes(16)).encode()


@dataclass
class FakeNode:
    """Replaces `open_node`: reports its statuses in order, then calls ``last``."""

    statuses: list[MeshStatus] = field(default_factory=lambda: [status_of(2)])
    last: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT)
    opening: Callable[[], None] = lambda: None
    options: NodeOptions | None = None
    ticket: str = "meshllm1abc"
    ticket_uses: int = 2
    is_founder: bool = True
    asked: int = 0
    is_open: bool = False
    has_waited: bool = False
    first_model: str | None = None
    is_over: bool = False
    """The reports are at an end, and ``last`` is called."""

    @asynccontextmanager
    async def __call__(self, options: NodeOptions, provider: None) -> AsyncIterator["FakeNode"]:
        self.options = options
        self.stopped = asyncio.get_running_loop().create_future()
        self.opening()
        await timers_fired()  # a signal is handled, too
        self.is_open = True
        yield self
        self.is_open = False

    def status_now(self) -> MeshStatus:
        return self.statuses.pop(0)

    async def events(self) -> AsyncGenerator[MeshStatus, None]:
        while self.statuses:
            yield self.statuses[0]
            await asyncio.sleep(0)  # several tasks listen, and one takes the reports
        if not self.is_over:
            self.is_over = True
            self.last()
        await asyncio.Event().wait()

    async def wait_for_charter(self) -> None:
        self.has_waited = True

    async def create_ticket(self) -> str:
        return self.ticket

    async def models(self) -> list[ModelStatus]:
        return [FOX] if self.has_waited else []

    async def revoke(self, tags: Sequence[bytes]) -> None:
        assert not tags

    def revocations(self) -> dict[str, tuple[bytes, ...]]:
        return {}

    def leave(self) -> None:
        self.asked += 1
        self.stopped.set_result(None)

    def fail(self, error: MeshError) -> None:
        self.stopped.set_exception(error)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    node = FakeNode()
    for name, entry, fake in (
        ("node", "open_node", node),
        ("control", "control_of", lambda it: it),
    ):
        module = ModuleType(f"meshllm.node.{name}")
        monkeypatch.setattr(module, entry, fake, raising=False)
        monkeypatch.setitem(sys.modules, f"meshllm.node.{name}", module)
    monkeypatch.setattr("meshllm.api.serve.serve", _serve)
    monkeypatch.setattr("meshllm.api.unix.is_answered", lambda _: True)
    return node


async def _serve(*_: object) -> None:
    await asyncio.Event().wait()


def test_stdout_is_a_ticket_and_the_command_for_the_next_machine(
    meshllm: Invoke, node: FakeNode
) -> None:
    result = meshllm("node")

    assert (result.exit_code, result.stdout) == (
        0,
        "meshllm1abc\nmeshllm node --join meshllm1abc\n",
    )
    assert not node.is_open


def test_a_node_shortens_the_switch_interval_of_its_process(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[float] = []
    monkeypatch.setattr(sys, "setswitchinterval", chosen.append)

    meshllm("node")

    assert chosen == [SWITCH_S]


def test_events_are_logged_with_the_time(meshllm: Invoke, node: FakeNode) -> None:
    node.statuses = [waiting("alone"), status_of(2)]

    lines = meshllm("node").stderr.splitlines()

    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "ticket for 2 more machines, and the command:",
        "waiting: alone",
        "desk joined (desk1bc, 8.0 GiB)",
        "ring of 2 serving, epoch 3: attic 0:10, desk 10:20",
        "finishing requests, then leaving; Ctrl-C again exits at once",
    ]
    assert re.match(r"\d\d:\d\d:\d\d ", lines[1])


def test_the_log_can_be_json(meshllm: Invoke, node: FakeNode) -> None:
    result = meshllm("node", "--log-format", "json")
    setup(0)

    lines = [json.loads(line)["fields"] for line in result.stderr.splitlines()]

    assert [each["event"] for each in lines] == ["ready", "joined", "serving", "leaving"]
    assert lines[1]["name"] == "desk"
    assert "meshllm1abc" not in result.stderr


@pytest.mark.parametrize("words", [("--join", "meshllm1x"), ("--state", "/dev/null")])
def test_an_invalid_ticket_or_state_is_refused_before_loading(
    meshllm: Invoke, node: FakeNode, words: tuple[str, str]
) -> None:
    result = meshllm("node", *words)

    assert result.exit_code == 2
    assert node.options is None


@pytest.mark.parametrize("command", [("node",), ("provide", "--url", "http://x/v1")])
def test_an_expired_ticket_is_refused_before_loading(
    meshllm: Invoke, node: FakeNode, command: tuple[str, ...]
) -> None:
    late = replace(parse_ticket(TICKET), expires_s=1).encode()

    result = meshllm(*command, "--join", late)

    assert (result.exit_code, node.options) == (5, None)
    assert result.stderr.startswith(
        "error: The ticket has expired\n"
        "hint: ask a member for another one, of `meshllm ring ticket`; it was good until"
        " 1970-01-01 00:00:01 UTC, and the clock here says 20"
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_makes_the_node_leave(
    meshllm: Invoke, node: FakeNode, number: signal.Signals
) -> None:
    node.last = lambda: os.kill(os.getpid(), number)

    assert meshllm("node").exit_code == 0
    assert node.asked == 1


def test_a_signal_before_the_node_is_open_ends_the_command(meshllm: Invoke, node: FakeNode) -> None:
    node.opening = lambda: os.kill(os.getpid(), signal.SIGINT)

    result = meshllm("node")

    assert (result.exit_code, result.output, node.asked) == (130, "", 0)


def test_the_error_of_the_node_is_the_error_of_the_command(meshllm: Invoke, node: FakeNode) -> None:
    node.last = lambda: node.fail(NotAuthorised("This node was shut out of the mesh"))

    result = meshllm("node")

    assert result.exit_code == 5
    assert result.stderr.endswith("error: This node was shut out of the mesh\n")


def test_errors_are_records_of_a_json_log(meshllm: Invoke, node: FakeNode) -> None:
    error = NotAuthorised("This node was shut out of the mesh", hint="ask for a ticket")
    node.last = lambda: node.fail(error)

    result = meshllm("node", "--log-format", "json")
    early = meshllm("node", "--log-format", "json", "--join", "meshllm1x")
    setup(0)

    *_, last = map(json.loads, result.stderr.splitlines())
    assert result.exit_code == 5
    assert last.pop("time")
    assert last == {
        "level": "error",
        "logger": "meshllm",
        "message": "This node was shut out of the mesh",
        "hint": "ask for a ticket",
    }
    assert early.exit_code == 2
    assert json.loads(early.stderr)["level"] == "error"


def test_an_address_no_transport_can_dial_is_refused(meshllm: Invoke, node: FakeNode) -> None:
    result = meshllm("node", "--advertise", "192.0.2.7:7700")

    assert (result.exit_code, node.options) == (2, None)
    assert result.stderr == (
        "error: Invalid address `192.0.2.7:7700` for `websocket` or `quic`\n"
        "hint: start `--advertise` with `ws:` or `wss:` or `quic:`\n"
    )
    assert meshllm("node", "--advertise", "ws://192.0.2.7:7700").exit_code == 0
    path = meshllm("node", "--advertise", "wss://mesh.example/node")
    assert (path.exit_code, "has more than a host and a port" in path.stderr) == (2, True)


def test_a_founder_needs_its_model_before_it_prints_a_ticket(
    meshllm: Invoke, node: FakeNode, home: Path
) -> None:
    typo = meshllm("node", "--model", "builtn")
    absent = meshllm("node", "--model", "no/model")
    empty = [meshllm("node", "--model", name).exit_code for name in ("", ",")]

    assert (typo.exit_code, absent.exit_code, node.options) == (4, 4, None)
    assert empty == [4, 4]
    assert typo.stdout == absent.stdout == ""
    assert typo.stderr.endswith("hint: did you mean `builtin`?\n")

    StateStore.open(home / "state" / "meshllm").create_mesh()
    assert meshllm("node", "--model", "no/model").exit_code == 0  # other nodes may have it
    assert meshllm("node", "--model", "builtn").exit_code == 4


@pytest.mark.parametrize(
    "address", ["unix:/tmp/a.sock", "unix:///a", "ws://0.0.0.0:7700/mesh", "ws://0.0.0.0:7700?a=b"]
)
def test_an_address_that_no_node_dials_is_refused(
    meshllm: Invoke, node: FakeNode, address: str
) -> None:
    result = meshllm("node", "--listen", address)

    assert (result.exit_code, node.options) == (2, None)
    assert result.stderr == (
        f"error: Nodes do not dial an address such as `{address}`\n"
        "hint: listen on `SCHEME://HOST:PORT`, or on `SCHEME:NAME`\n"
    )


@pytest.mark.parametrize(
    "address", ["ws://127.0.0.1:0,loopback:here", "127.0.0.1:7700", "[::1]:7700", "localhost:0"]
)
def test_an_address_may_be_one_for_all_transports(
    meshllm: Invoke, node: FakeNode, address: str
) -> None:
    assert meshllm("node", "--listen", address).exit_code == 0


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((256, 4096), [4096]),
        ((256, 1 << 20), [OPEN_FILES]),
        ((256, -1), [OPEN_FILES]),
        ((1 << 20, -1), []),
        ((-1, -1), []),
    ],
)
def test_as_many_files_as_allowed_are_opened(
    meshllm: Invoke,
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    raised: list[int],
) -> None:
    hard = resource.RLIM_INFINITY if limits[1] < 0 else limits[1]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[0], hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: asked.append(pair))

    assert meshllm("node").exit_code == 0
    assert asked == [(each, hard) for each in raised]


def test_the_ticket_file_is_private(meshllm: Invoke, node: FakeNode, home: Path) -> None:
    path = home / "ticket"
    path.write_text("old")
    path.chmod(0o644)

    meshllm("node", "--ticket-file", "ticket")

    assert path.read_text() == "meshllm1abc\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_node_goes_on_if_nobody_takes_its_ticket(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(render, "put", fail)  # such as `meshllm node --serve ... | head -1`

    result = meshllm("node")

    assert result.exit_code == 0
    assert "the ticket was not printed: stdout cannot be written: broken pipe" in result.stderr


@pytest.mark.parametrize(
    ("uses", "is_founder", "options", "why"),
    [
        (0, True, (), "the mesh has as many members as requested"),
        (0, False, ("--join", TICKET), "the mesh has as many members as requested"),
        (1, False, ("--join", TICKET), "joined the mesh"),
        (1, False, (), "joined the mesh"),
    ],
    ids=["founder of a whole mesh", "joiner of a whole mesh", "joiner", "joiner that returns"],
)
def test_a_ticket_is_printed_by_a_founder_that_lacks_members_or_to_a_file(
    meshllm: Invoke,
    node: FakeNode,
    home: Path,
    uses: int,
    is_founder: bool,
    options: tuple[str, ...],
    why: str,
) -> None:
    node.ticket_uses, node.is_founder = uses, is_founder

    result = meshllm("node", *options)
    asked = meshllm("node", "--ticket-file", "ticket", *options)

    assert (result.exit_code, result.stdout) == (0, "")
    assert f"{why}; `meshllm ring ticket` makes a ticket for another node" in result.stderr
    assert (home / "ticket").read_text() == "meshllm1abc\n"
    assert asked.stdout.startswith("meshllm1abc\n")
    assert node.has_waited is bool(options)


def test_the_request_to_try_names_the_model_of_the_mesh(meshllm: Invoke, node: FakeNode) -> None:
    result = meshllm("node", "--serve", "127.0.0.1:0", "--model", "builtin,cow", "--join", TICKET)

    assert result.exit_code == 0, result.stderr
    assert '{"model": "fox", ' in result.stdout.splitlines()[2]


@pytest.mark.parametrize(("known", "name"), [("cow", "cow"), (None, "MODEL")])
def test_a_mesh_that_serves_nothing_yet_has_the_model_that_it_will_serve(
    meshllm: Invoke, node: FakeNode, known: str | None, name: str
) -> None:
    node.first_model = known

    result = meshllm("node", "--serve", "127.0.0.1:0")

    assert f'{{"model": "{name}", ' in result.stdout.splitlines()[2]


def test_a_ticket_file_needs_a_folder(meshllm: Invoke, node: FakeNode) -> None:
    result = meshllm("node", "--ticket-file", "nowhere/ticket")

    assert (result.exit_code, node.options) == (2, None)
    assert "error: There is no folder `nowhere`" in result.stderr


def test_a_ticket_file_needs_a_folder_that_may_be_used(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_symlink", refuse)

    result = meshllm("node", "--ticket-file", "ticket")

    assert (result.exit_code, node.options) == (2, None)
    assert "error: `ticket` cannot be written: permission denied" in result.stderr
    assert "hint: check who may use it" in result.stderr


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_a_ticket_replaces_only_files(
    meshllm: Invoke, node: FakeNode, home: Path, kind: str
) -> None:
    path = home / "ticket"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/dev/stdout")
    else:
        path.mkdir()
    before = path.lstat()

    result = meshllm("node", "--ticket-file", "ticket")

    assert (result.exit_code, node.options) == (2, None)
    assert "`ticket` is not a regular file" in result.stderr
    assert path.lstat().st_ino == before.st_ino


def test_an_old_ticket_stays_if_the_disk_is_full(
    meshllm: Invoke, node: FakeNode, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "ticket").write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.open", full)
    with pytest.raises(UserError, match="No space left"):
        _write_private(home / "ticket", "new")

    assert (home / "ticket").read_text() == "old"


def test_unset_options_are_left_to_the_mesh(meshllm: Invoke, node: FakeNode) -> None:
    meshllm("node", "--state", "here", "--dtype", "auto")

    assert node.options == NodeOptions(
        state=Path.cwd() / "here", inference=InferenceConfig(device="auto")
    )


def test_set_options_are_passed_on(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_NAME", "attic")

    meshllm(
        "node", "--state", "here", "--model", "builtin", "--transport", "quic, websocket",
        "--listen", "quic://0.0.0.0:7701", "--relay", "quic://relay.example:8790",
        "--memory", "4GiB", "--layers", "2:5", "--exclude", "desk, laptop", "--members", "3",
        "--join", TICKET, "--no-discovery", "--policy", "auto", "--wire", "auto",
        "--draft", "org/small", "--device", "cpu", "--keep", "90s",
    )  # fmt: skip

    assert node.options == NodeOptions(
        state=Path.cwd() / "here",
        model="builtin",
        transports=("quic", "websocket"),
        listen=("quic://0.0.0.0:7701",),
        relays=("quic://relay.example:8790",),
        name="attic",
        inference=InferenceConfig(
            device="cpu", memory_bytes=4 << 30, wire=WireMode.AUTO, draft="org/small"
        ),
        layers=Span(2, 5),
        exclude=("desk", "laptop"),
        members=3,
        join=TICKET,
        discovery=False,
        policy="auto",
        keep_s=90,
    )


def test_a_node_holds_what_is_lacking_whatever_the_settings_name(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_MODEL", "org/a,org/b")
    StateStore.open(Path("here")).create_mesh()

    meshllm("node", "--state", "here")
    named = node.options
    assert named
    meshllm("node", "--state", "here", "--auto")

    assert named == NodeOptions(
        state=Path.cwd() / "here",
        model="org/a",
        more_models=("org/b",),
        inference=InferenceConfig(device="auto"),
    )
    assert node.options == replace(named, model=None, more_models=())
    done = meshllm("node", "--auto", "--model", "org/a")
    assert done.exit_code == 2
    assert "`--auto` cannot be combined with `--model`" in done.stderr


def test_a_draft_without_speculation_is_refused(meshllm: Invoke, node: FakeNode) -> None:
    result = meshllm("node", "--draft", "builtin", "--exact", "--log-format", "json")
    setup(0)

    assert (result.exit_code, node.options) == (2, None)
    told = json.loads(result.stderr)
    assert told["message"].startswith("`--draft` cannot be combined with `--exact`")


def test_memory_may_be_a_share(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Memory", (), {"available": 1000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    meshllm("node", "--memory", "25%")

    assert node.options
    assert node.options.inference.memory_bytes == 250


@pytest.mark.parametrize(
    ("words", "expected"), [((), None), (("0",), 0), (("2MiB",), 2 << 20), (("10%",), 100)]
)
def test_the_prefix_cache_may_be_off_a_size_or_a_share(
    meshllm: Invoke,
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    expected: int | None,
) -> None:
    free = type("Memory", (), {"available": 1000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)

    meshllm("node", *(("--prefix-cache", *words) if words else ()))

    assert node.options
    assert node.options.inference.prefix_bytes == expected


@pytest.mark.parametrize(
    ("words", "memory"), [(("--device", "cuda"), 500), (("--device", "cpu"), 50), ((), 500)]
)
def test_a_share_is_of_the_memory_of_the_device(
    meshllm: Invoke,
    node: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    memory: int,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    monkeypatch.setattr(device, "choose", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(device, "free_bytes", lambda _: 1000)

    meshllm("node", "--memory", "50%", *words)

    assert node.options
    assert node.options.inference.memory_bytes == memory
    assert node.options.inference.device == (words[1] if words else "auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "0%"), "Invalid memory share `0%`"),
        (("--memory", "101%"), "Invalid memory share `101%`"),
        (("--prefix-cache", "much"), "Invalid memory size `much`"),
        (("--memory", "much"), "Invalid memory size `much`"),
        (("--keep", "0s"), "Invalid duration `0s`"),
        (("--layers", "3"), "Invalid layer span `3`"),
        (("--policy", "best"), "Invalid value for '--policy'"),
    ],
)
def test_an_invalid_option_is_refused_before_loading(
    meshllm: Invoke, node: FakeNode, words: tuple[str, ...], message: str
) -> None:
    result = meshllm("node", *words)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert node.options is None


def test_the_printed_unit_omits_the_ticket(meshllm: Invoke, node: FakeNode) -> None:
    result = meshllm("node", "--print-service", "--name", "attic", "--join", "meshllm1secret")

    assert " node --name attic\n" in result.stdout
    assert "meshllm1secret" not in result.output
    assert result.stderr.startswith("the unit contains no ticket")
    assert node.options is None


def test_a_unit_is_printed_only_if_its_node_can_start(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = meshllm("node", "--print-service", "--draft", "builtin", "--exact")
    monkeypatch.setenv("MESHLLM_MODEL", "org/a")
    auto = meshllm("node", "--print-service", "--auto")

    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "`--draft` cannot be combined with `--exact`" in refused.stderr
    assert " node --auto\n" in auto.stdout


def test_a_unit_writes_no_ticket_file(meshllm: Invoke) -> None:
    result = meshllm("node", "--print-service", "--ticket-file", "ticket")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "`--ticket-file` cannot be combined with `--print-service`" in result.stderr


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("status", "shown"), [(waiting("it waits"), True), (status_of(2), False)])
def test_a_terminal_shows_the_reason_and_duration_of_waiting(
    status: MeshStatus, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node(FakeNode):
        async def events(self) -> AsyncGenerator[MeshStatus, None]:
            for _ in range(2):  # an event without a change does not restart the count
                yield status
                await asyncio.sleep(2.5)

    screen, node = Screen(), Node(statuses=[status] * 3)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    run_virtual(_report(cast("NodeControl", node), lambda _: None))

    line = rf"{re.escape(status.ring.reason)} \(waited (\d+) s\)"
    seconds = re.findall(line, screen.getvalue())
    assert seconds == (["1", "2", "3", "4"] if shown else [])
    assert not screen.getvalue() or screen.getvalue().endswith("\r\x1b[K")


def test_the_duration_of_a_wait_goes_on_while_other_nodes_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = waiting("1 of 2 members are ready: a")
    second = waiting("1 of 2 members are ready: a; loading: b")

    class Node(FakeNode):
        async def events(self) -> AsyncGenerator[MeshStatus, None]:
            for status in (first, second):
                yield status
                await asyncio.sleep(1.5)

    screen, told = Screen(), list[str]()
    node = Node(statuses=[first, first, second])
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    run_virtual(_report(cast("NodeControl", node), lambda notice: told.append(notice.text)))

    shown = re.findall(r"ready: (a.*?) \(waited (\d+) s\)", screen.getvalue())
    assert shown == [("a", "1"), ("a; loading: b", "2")]
    assert told == ["waiting: 1 of 2 members are ready: a"]


@pytest.mark.parametrize("state", [NodeState.LEAVING, NodeState.LEFT, NodeState.DOWN])
def test_a_node_that_leaves_reports_no_losses(
    state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = with_node(waiting("The ring lacks 17.8 MiB"), 0, state=state)
    node, told = FakeNode(statuses=[status_of(2), leaving, leaving]), list[str]()
    monkeypatch.setattr(sys, "stderr", Screen())

    run_virtual(_report(cast("NodeControl", node), lambda notice: told.append(notice.event)))

    assert told == ["joined", "serving"]


@pytest.mark.socket
def test_a_provider_opens_no_api_server_of_the_settings(
    meshllm: Invoke, node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHLLM_SERVE", "127.0.0.1:0")

    result = meshllm("provide", "--url", "http://x/v1", "--join", TICKET)

    assert (result.exit_code, result.stdout) == (0, "")
    assert node.is_over


@pytest.mark.parametrize(("has_layers", "told"), [(True, ["waiting"]), (False, [])])
def test_a_provider_does_not_report_what_the_ring_waits_for(
    has_layers: bool, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node(FakeNode):
        async def events(self) -> AsyncGenerator[MeshStatus, None]:
            yield status_of(2)
            await asyncio.sleep(2.5)

    lacking = waiting("The ring lacks 17.8 MiB")
    node, events, screen = Node(statuses=[lacking, status_of(2)]), list[str](), Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    report = _report(
        cast("NodeControl", node), lambda notice: events.append(notice.event), has_layers=has_layers
    )

    run_virtual(report)

    assert events == [*told, "joined", "serving"]
    assert "lacks" not in screen.getvalue()


@pytest.mark.parametrize(("has_layers", "told"), [(True, ["standby"]), (False, [])])
def test_a_provider_does_not_report_that_it_is_on_standby(
    has_layers: bool, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node(FakeNode):
        async def events(self) -> AsyncGenerator[MeshStatus, None]:
            yield status_of(2)

    spare = with_node(status_of(2), 0, state=NodeState.STANDBY, reason="it provides whole models")
    node, events = Node(statuses=[spare, spare]), list[str]()
    monkeypatch.setattr(sys, "stderr", Screen())

    run_virtual(
        _report(
            cast("NodeControl", node), lambda each: events.append(each.event), has_layers=has_layers
        )
    )

    assert sorted(events) == sorted(["joined", "serving", *told])


def test_a_log_record_erases_the_progress_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    setup(0)
    logging.getLogger("meshllm").warning("news")

    assert screen.getvalue().startswith("\r\x1b[K")
    assert screen.getvalue().endswith(" news\n")


def test_a_setting_of_the_api_server_needs_one(meshllm: Invoke, tmp_path: Path) -> None:
    result = meshllm("node", "--trace", str(tmp_path / "trace"))

    assert result.exit_code == 2
    assert result.stderr.startswith("error: `--trace` has no effect without `--serve`")


RELAYED = "quic://abcdef@relay.example:7777"


def test_a_ticket_that_lacks_the_relay_is_printed_again_with_it(
    meshllm: Invoke, node: FakeNode, home: Path
) -> None:
    node.ticket = TICKET
    there = replace(status_of(2), listening=("ws://10.0.0.1:7700", RELAYED))
    # Each report is read by two tasks.
    node.statuses = [status_of(2), status_of(2), there, there]

    result = meshllm("node", "--relay", "relay.example:7777", "--ticket-file", "ticket")

    first, _, again, command = result.stdout.splitlines()
    assert first == TICKET
    assert parse_ticket(again).addresses == there.listening
    assert parse_ticket(again).secret == parse_ticket(first).secret
    assert command == f"meshllm node --join {again}"
    assert (home / "ticket").read_text() == f"{again}\n"
    assert "the relay has answered" in result.stderr


@pytest.mark.parametrize("lost", ["stdout", "file"])
def test_a_node_goes_on_if_nobody_takes_the_ticket_with_the_relay(
    node: FakeNode, home: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    reader, writer = os.pipe()
    node.statuses = [replace(status_of(2), listening=(RELAYED,))]
    file = home / ("ticket" if lost == "stdout" else "nowhere/ticket")
    said: list[Notice] = []
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        if lost == "stdout":
            os.close(reader)

        printing = _print_with_relay(cast("NodeControl", node), TICKET, said.append, file)
        run_virtual(printing)

    assert said[-1].event == "unprinted"
    assert said[-1].text.startswith("the ticket with the address of the relay was not printed: ")
    assert file.exists() is (lost == "stdout")
    if lost == "file":
        os.close(reader)


def test_a_ticket_with_the_relay_is_printed_once(meshllm: Invoke, node: FakeNode) -> None:
    ticket = replace(parse_ticket(TICKET), addresses=(RELAYED,)).encode()
    node.ticket = ticket

    result = meshllm("node", "--relay", "relay.example:7777")

    assert result.stdout.splitlines() == [ticket, f"meshllm node --join {ticket}"]
