"""Links over a byte stream keep the contract, also against a peer that does not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshllm.errors import LinkLost, PeerFault
from meshllm.testing.clock import run_virtual
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport.contract import MAX_MESSAGE_BYTES, Link
from meshllm.transport.lanes import BACK, CREDIT, FIRST, NEXT, PIECE_BYTES, head
from meshllm.transport.linger import STALL_S
from meshllm.transport.stream import StreamWire
from tests.transport.unix import UnixTransport


@asynccontextmanager
async def stranger(path: Path) -> AsyncIterator[tuple[asyncio.StreamWriter, Link]]:
    """Connect a bare socket; yield it and the link at the other end."""
    async with UnixTransport().listen(f"unix:{path}") as listener:
        _, writer = await asyncio.open_unix_connection(path)
        link = await anext(aiter(listener.links()))
        yield writer, link
        writer.close()
        await link.close()


async def drain(link: Link) -> None:
    while True:
        await link.receive()


async def test_a_plugin_for_a_byte_stream_is_short_and_keeps_the_contract() -> None:
    assert len((Path(__file__).parent / "unix.py").read_text("utf-8").splitlines()) < 80
    await check_transport(UnixTransport, Terms(deadline_s=120.0))


async def test_heads_and_bodies_may_arrive_byte_by_byte(tmp_path: Path) -> None:
    async with stranger(tmp_path / "s") as (writer, link):
        for byte in head(FIRST, 3) + b"abc" + head(FIRST | 1, 0):
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0)

        messages = [(int(channel), bytes(it)) for channel, it in [await link.receive()]]
        assert messages == [(0, b"abc")]
        assert bytes((await link.receive())[1]) == b""


@pytest.mark.parametrize(
    "sent",
    [
        head(FIRST, MAX_MESSAGE_BYTES + 1),
        head(BACK, 1),
        bytes((NEXT,)),
        bytes((7,)) + bytes(4),
        head(FIRST, 2 * PIECE_BYTES) + bytes(PIECE_BYTES) + head(FIRST, 1),
        (head(FIRST, 0)) * (CREDIT // 256 + 1),
    ],
    ids=["too long", "credit", "no message", "kind", "overlap", "flood"],
)
async def test_a_peer_that_breaks_the_rules_loses_its_link(tmp_path: Path, sent: bytes) -> None:
    async with stranger(tmp_path / "s") as (writer, link):
        writer.write(sent)

        with pytest.raises(PeerFault, match="Protocol violation"):
            await drain(link)


async def test_a_peer_that_leaves_within_a_message_is_a_lost_link(tmp_path: Path) -> None:
    async with stranger(tmp_path / "s") as (writer, link):
        writer.write(head(FIRST, 10) + b"half")
        writer.write_eof()

        with pytest.raises(LinkLost):
            await link.receive()


async def test_a_listener_that_closes_before_it_accepts_is_a_lost_link(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = await asyncio.start_unix_server(lambda _, writer: writer.close(), path)

    with pytest.raises(LinkLost, match="closed before it accepted"):
        await UnixTransport().dial(f"unix:{path}")

    server.close()


class SlowReader(asyncio.Transport):
    """A stream whose peer takes a byte per second."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.left = size
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return max(0, self.left - int(asyncio.get_running_loop().time()))

    def abort(self) -> None:
        self.is_aborted = True


def test_a_peer_that_reads_slowly_gets_the_rest_after_close() -> None:
    run_virtual(_close_on_a_slow_reader())


async def _close_on_a_slow_reader() -> None:
    wire, reader = StreamWire("there"), SlowReader(20)
    wire.connection_made(reader)

    await wire.link.close()
    await asyncio.sleep(19.0)
    assert not reader.is_aborted
    await asyncio.sleep(2 * STALL_S + 1.0)

    assert reader.is_aborted


async def test_a_cancelled_dial_leaves_no_stream(tmp_path: Path) -> None:
    path = tmp_path / "s"
    there, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.set()
        await reader.read()
        writer.close()
        gone.set()

    server = await asyncio.start_unix_server(serve, path)
    dialling = asyncio.ensure_future(UnixTransport().dial(f"unix:{path}"))
    await there.wait()

    dialling.cancel()
    await asyncio.wait([dialling])

    await gone.wait()
    assert dialling.cancelled()
    server.close()
