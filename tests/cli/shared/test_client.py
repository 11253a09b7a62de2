import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.api.serve import serve
from meshllm.api.unix import SOCKET, is_answered
from meshllm.cli.shared import client as module
from meshllm.cli.shared.client import NodeClient, is_running, open_client, socket_path
from meshllm.config import Settings, state_path
from meshllm.errors import LinkLost, MeshError, ModelError, PeerFault, TimedOut, UserError
from meshllm.node.options import ModelOptions
from meshllm.protocol.trust.credential import ClientLimits
from meshllm.request import Event, Piece, Prefilled, Request
from meshllm.status import PlanTerms
from tests.builders.fake_node import CHANGE, FakeNode
from tests.builders.fake_ring import answer_of
from tests.builders.waiting import until

pytestmark = pytest.mark.socket

ASKED = Request(raw="hi")


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "api.sock"


@pytest.fixture
async def client(node: FakeNode, path: Path) -> AsyncIterator[NodeClient]:
    task = asyncio.ensure_future(serve(node, path))
    await until(lambda: is_answered(path))
    yield NodeClient(path)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def liar(path: Path) -> Iterator[list[bytes]]:
    """A server that responds to every request with the bytes in the list."""
    path.parent.mkdir()
    lies: list[bytes] = []

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(lies[0])
        if lies[1:]:
            await reader.read()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_unix_server(lie, path):
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait)

    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(60)
    yield lies
    done.set()
    thread.join()


async def _events(client: NodeClient) -> list[Event]:
    return [event async for event in client.generate(ASKED)]


def test_the_socket_is_in_the_state_folder(tmp_path: Path) -> None:
    assert socket_path(Settings(state=str(tmp_path))) == tmp_path / "api.sock"


async def test_reports_are_fetched_unchanged(client: NodeClient, node: FakeNode) -> None:
    assert await client.status() == node.report()
    assert await client.members() == node.members()


async def test_other_terms_are_tried(client: NodeClient, node: FakeNode) -> None:
    found = await client.try_plan(PlanTerms("fastest", 2, ("abc",), {"def": 9}))

    assert (found.policy, found.stages) == ("fastest", node.report().ring.stages)
    assert node.calls == [(PlanTerms("fastest", 2, ("abc",), {"def": 9}),)]


async def test_requests_reach_the_node(client: NodeClient, node: FakeNode) -> None:
    assert await client.invite("node", 3600, 2) == "meshllm1abc"
    assert await client.invite("client", 60, 1, tokens_per_day=9) == "meshllm1abc"
    assert await client.remove("abc") == await node.remove("abc")

    limited = ("client", 60, 1, ClientLimits(tokens_per_day=9))
    assert node.calls == [("node", 3600, 2), limited, ("abc",), ("abc",)]


async def test_models_are_served_and_stopped(client: NodeClient, node: FakeNode) -> None:
    asked = ModelOptions("org/m", members=2, aliases=("m", "n"))

    assert (await client.serve(asked)).name == "org/m"
    await client.stop("m")

    assert node.calls == [("serve", asked), ("stop", "m")]


async def test_changes_come_one_by_one(client: NodeClient, node: FakeNode) -> None:
    async with asyncio.timeout(60):
        async with aclosing(client.events()) as events:
            first = await anext(events)
            node.go.set()
            second = await anext(events)

    assert (first, second) == (CHANGE, replace(CHANGE, epoch=8))


async def test_events_are_yielded_unchanged(client: NodeClient, node: FakeNode) -> None:
    events = await _events(client)

    assert events == [Prefilled(2, 2), Piece("hello"), Piece(" w\u2028rld"), answer_of("hello", 5)]
    assert node.requests == [ASKED]


async def test_closing_an_answer_cancels_it_on_the_node(client: NodeClient, node: FakeNode) -> None:
    node.waits_at = 2
    async with asyncio.timeout(60):
        async with aclosing(client.generate(ASKED)) as events:
            await anext(events)

        await node.closed.wait()


@pytest.mark.parametrize("fails_at", [0, 2])
async def test_an_error_of_the_node_keeps_its_type(
    client: NodeClient, node: FakeNode, fails_at: int
) -> None:
    node.fails_at, node.error = fails_at, ModelError("no such model", hint="pull it")

    with pytest.raises(ModelError, match="no such model") as raised:
        await _events(client)

    assert (raised.value.hint, raised.value.exit_code) == ("pull it", 4)


@pytest.mark.parametrize(
    ("folder", "command"),
    [("state/meshllm", "meshllm node"), ("my state", "meshllm node --state '{}/my state'")],
)
async def test_without_a_node_the_hint_is_to_start_one(
    home: Path, folder: str, command: str
) -> None:
    with pytest.raises(LinkLost, match="No node is running at") as raised:
        await NodeClient(home / folder / SOCKET).status()

    assert raised.value.hint == f"start one with `{command.format(home)}`"
    assert raised.value.exit_code == 3


async def test_a_folder_that_cannot_be_used_is_said(home: Path) -> None:
    (home / "file").write_text("")

    with pytest.raises(UserError, match="cannot be used: not a directory"):
        await NodeClient(home / "file" / SOCKET).status()


async def test_the_hint_knows_the_folder_of_the_settings(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = state_path(Settings())
    monkeypatch.setenv("MESHLLM_STATE", "mine")

    with pytest.raises(LinkLost) as known:
        await NodeClient(home / "mine" / SOCKET).status()
    with pytest.raises(LinkLost) as other:
        await NodeClient(usual / SOCKET).status()

    assert known.value.hint == "start one with `meshllm node`"
    assert other.value.hint == f"start one with `meshllm node --state {usual}`"


async def test_a_node_that_stops_in_the_middle_is_a_lost_link(node: FakeNode, path: Path) -> None:
    node.waits_at = 2
    task = asyncio.ensure_future(serve(node, path))
    await until(lambda: is_answered(path))
    asking = asyncio.ensure_future(_events(NodeClient(path)))
    await node.begun.wait()

    task.cancel()

    with pytest.raises(LinkLost, match="The connection to the node"):
        await asking
    await asyncio.wait({task})


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("lie", "error", "message"),
    [
        (b"HTTP/1.1 503 X\r\ncontent-length: 4\r\n\r\nBusy", PeerFault, "HTTP status 503"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}", PeerFault, "HTTP status 500"),
        (HEAD % 2 + b"[]", PeerFault, "not a JSON object"),
        (HEAD % 2 + b"{}", PeerFault, "Invalid status from the node: `.*` is missing"),
        (HEAD % 1 + b"x", PeerFault, "not a JSON object"),
        (HEAD % 9 + b"{}", LinkLost, "The connection to the node"),
        (b"what\r\n\r\n", LinkLost, "The connection to the node"),
    ],
)
async def test_an_invalid_response_is_a_clear_error(
    path: Path, liar: list[bytes], lie: bytes, error: type[MeshError], message: str
) -> None:
    liar.append(lie)

    with pytest.raises(error, match=message):
        await NodeClient(path).status()


async def test_an_answer_without_an_end_is_a_lost_link(path: Path, liar: list[bytes]) -> None:
    liar.append(HEAD % 15 + b'{"piece":"a"}\n\n')

    with pytest.raises(LinkLost, match="before the answer was complete"):
        await _events(NodeClient(path))


async def test_a_node_that_does_not_respond_times_out(
    path: Path, liar: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    liar += [b"", b"wait"]
    monkeypatch.setattr(module, "REPLY_S", 0.05)

    with pytest.raises(TimedOut, match="did not answer within"):
        await NodeClient(path).status()


async def test_is_running_checks_for_a_node(client: NodeClient, tmp_path: Path) -> None:
    assert is_running(Settings(state=str(client.socket.parent)))
    assert not is_running(Settings(state=str(tmp_path / "other")))
    with pytest.raises(UserError, match="at most 100"):
        is_running(Settings(state="x" * 300))


async def test_a_node_that_answers_may_be_of_another_user(
    client: NodeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: -1)  # as root

    assert is_running(Settings(state=str(client.socket.parent)))


async def test_the_client_uses_the_state_folder_of_the_settings(client: NodeClient) -> None:
    async with open_client(Settings(state=str(client.socket.parent))) as ring:
        assert ring == client
