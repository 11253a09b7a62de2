"""A connection of a Python process to the node on its machine."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from meshllm.api.unix import SOCKET
from meshllm.errors import Busy, LinkLost, MeshError, PeerFault
from meshllm.names import Digest, Span
from meshllm.node.training import LayerPass
from meshllm.protocol.training.codec import Direction
from meshllm.remote.connection import NodeConnection
from tests.builders.fake_node import FakeNode
from tests.builders.served import running

T = TypeVar("T")
MODEL = Digest(bytes(range(32)))


@contextmanager
def served(node: FakeNode, folder: Path) -> Iterator[NodeConnection]:
    """Serve a node in another thread."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with running(node, folder / SOCKET):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    connection = NodeConnection(folder / SOCKET)
    try:
        yield connection
    finally:
        connection.close()
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def test_a_node_says_how_layers_are_split_and_computes_batches(tmp_path: Path) -> None:
    node = FakeNode()
    with served(node, tmp_path) as connection:
        spans = connection.spans(MODEL)
        result = connection.compute(MODEL, spans[0], Direction.FORWARD_KEEPING, b"abc")

    assert (spans, result) == ([Span(0, 4), Span(4, 8)], b"cba")
    asked = LayerPass(MODEL, Span(0, 4), Direction.FORWARD_KEEPING)
    assert node.calls == [("layer_spans", MODEL), (asked, 3)]


def test_the_error_of_a_node_is_raised_here(tmp_path: Path) -> None:
    node = FakeNode(fails_at=0, error=Busy("later", hint="wait"))
    with served(node, tmp_path) as connection, pytest.raises(Busy, match="later") as caught:
        connection.compute(MODEL, Span(0, 4), Direction.FORWARD, b"abc")

    assert caught.value.hint == "wait"


def test_without_a_node_the_command_that_starts_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(LinkLost, match="No node is running") as caught:
        NodeConnection(tmp_path / SOCKET)

    assert caught.value.hint == "start one with `meshllm node`"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (b"", LinkLost),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\n{}", PeerFault),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", PeerFault),
        (b'HTTP/1.1 200 OK\r\n\r\n{"spans": ["x"]}', PeerFault),
    ],
)
def test_an_invalid_reply_of_a_node_is_refused(
    tmp_path: Path, reply: bytes, error: type[MeshError]
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async def scenario() -> None:
        async with await asyncio.start_unix_server(answer, tmp_path / SOCKET):
            await asyncio.to_thread(NodeConnection(tmp_path / SOCKET).spans, MODEL)

    with pytest.raises(error):
        asyncio.run(scenario())
