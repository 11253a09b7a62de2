import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from meshllm.api.serve import serve
from meshllm.api.unix import is_answered
from meshllm.cli import door as module
from meshllm.cli.door import Client, door_path, open_door, running
from meshllm.config import Settings
from meshllm.errors import LinkLost, MeshError, ModelError, PeerFault, TimedOut, UserError
from meshllm.request import Event, Piece, Prefilled, Request
from tests.api.fake import FakeDoor, status_of
from tests.cli.fake import answer_of

pytestmark = pytest.mark.socket

ASKED = Request(raw="hi")


@pytest.fixture
def node() -> FakeDoor:
    return FakeDoor()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "door.sock"


@pytest.fixture
async def client(node: FakeDoor, path: Path) -> AsyncIterator[Client]:
    task = asyncio.ensure_future(serve(node, path))
    while not is_answered(path):  # noqa: ASYNC110  # what is waited for is the file
        await asyncio.sleep(0.01)
    yield Client(path)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def liar(path: Path) -> Iterator[list[bytes]]:
    """A server that answers every request with what is put into the list."""
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
    ready.wait(5)
    yield lies
    done.set()
    thread.join()


async def _events(client: Client) -> list[Event]:
    return [event async for event in client.generate(ASKED)]


def test_the_socket_is_in_the_state_folder(tmp_path: Path) -> None:
    assert door_path(Settings(state=str(tmp_path))) == tmp_path / "door.sock"


async def test_an_object_is_fetched(client: Client) -> None:
    assert await client.get("/mesh/status") == {"schema": 1} | status_of()


async def test_an_object_is_sent(client: Client, node: FakeDoor) -> None:
    said = await client.post("/mesh/ticket", {"uses": 2})

    assert (said, node.calls) == ({"ticket": "meshllm1abc"}, [("node", 3600, 2)])


async def test_text_is_fetched(client: Client) -> None:
    assert (await client.text("/metrics")).startswith("# HELP meshllm_info")


async def test_lines_come_one_by_one(client: Client, node: FakeDoor) -> None:
    async with asyncio.timeout(5):
        async with aclosing(client.stream_lines("/mesh/events")) as lines:
            first = await anext(lines)
            node.go.set()
            second = await anext(lines)

    assert [json.loads(line)["event"] for line in (first, second)] == ["joined", "left"]


async def test_an_answer_is_what_the_node_made(client: Client, node: FakeDoor) -> None:
    events = await _events(client)

    assert events == [Prefilled(2, 2), Piece("hello"), Piece(" w\u2028rld"), answer_of("hello", 5)]
    assert node.requests == [ASKED]


async def test_closing_an_answer_cancels_it_on_the_node(client: Client, node: FakeDoor) -> None:
    node.waits_at = 2
    async with asyncio.timeout(5):
        async with aclosing(client.generate(ASKED)) as events:
            await anext(events)

        await node.closed.wait()


@pytest.mark.parametrize("fails_at", [0, 2])
async def test_an_error_of_the_node_stays_what_it_is(
    client: Client, node: FakeDoor, fails_at: int
) -> None:
    node.fails_at, node.error = fails_at, ModelError("no such model", hint="pull it")

    with pytest.raises(ModelError, match="no such model") as raised:
        await _events(client)

    assert (raised.value.hint, raised.value.exit_code) == ("pull it", 4)


async def test_what_is_not_served_is_an_error_too(client: Client) -> None:
    with pytest.raises(UserError, match="Not Found"):
        await client.get("/nothing")


async def test_without_a_node_it_says_how_to_start_one(path: Path) -> None:
    with pytest.raises(LinkLost, match="No node is running at") as raised:
        await Client(path).get("/mesh/status")

    assert (raised.value.hint, raised.value.exit_code) == ("start one with `meshllm node`", 3)


async def test_a_node_that_stops_in_the_middle_is_a_lost_link(node: FakeDoor, path: Path) -> None:
    node.waits_at = 2
    task = asyncio.ensure_future(serve(node, path))
    while not is_answered(path):  # noqa: ASYNC110  # what is waited for is the file
        await asyncio.sleep(0.01)
    asking = asyncio.ensure_future(_events(Client(path)))
    await node.begun.wait()

    task.cancel()

    with pytest.raises(LinkLost, match="The node went away"):
        await asking
    await asyncio.wait({task})


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("lie", "error", "message"),
    [
        (b"HTTP/1.1 503 X\r\ncontent-length: 4\r\n\r\nBusy", PeerFault, "answered with status 503"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}", PeerFault, "answered with status 500"),
        (HEAD % 2 + b"[]", PeerFault, "no JSON object"),
        (HEAD % 1 + b"x", PeerFault, "no JSON object"),
        (HEAD % 9 + b"{}", LinkLost, "The node went away"),
        (b"what\r\n\r\n", LinkLost, "The node went away"),
    ],
)
async def test_nonsense_is_one_clear_line(
    path: Path, liar: list[bytes], lie: bytes, error: type[MeshError], message: str
) -> None:
    liar.append(lie)

    with pytest.raises(error, match=message):
        await Client(path).get("/mesh/status")


async def test_an_answer_without_an_end_is_a_lost_link(path: Path, liar: list[bytes]) -> None:
    liar.append(HEAD % 15 + b'{"piece":"a"}\n\n')

    with pytest.raises(LinkLost, match="before its answer was complete"):
        await _events(Client(path))


async def test_a_node_that_does_not_answer_is_given_up(
    path: Path, liar: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    liar += [b"", b"wait"]
    monkeypatch.setattr(module, "REPLY_S", 0.05)

    with pytest.raises(TimedOut, match="did not answer within"):
        await Client(path).get("/mesh/status")


async def test_running_tells_whether_a_node_answers(client: Client, tmp_path: Path) -> None:
    assert running(Settings(state=str(client.socket.parent)))
    assert not running(Settings(state=str(tmp_path / "other")))
    assert not running(Settings(state="x" * 300))


async def test_the_door_of_the_settings_is_opened(client: Client) -> None:
    async with open_door(Settings(state=str(client.socket.parent))) as ring:
        assert ring == client
