"""What a connection does with a client that does not read; more of HTTP is in `test_tcp`."""

import asyncio
from collections.abc import Callable

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from meshllm.api import connection
from meshllm.api.app import owner_application
from meshllm.api.connection import PublicProtocol, SocketProtocol
from tests.builders.fake_node import FakeNode
from tests.builders.waiting import timers_fired


class Wire(asyncio.Transport):
    """A transport that records what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.aborted = asyncio.Event()

    def pause_reading(self) -> None:
        self.asked.append("pause")

    def resume_reading(self) -> None:
        self.asked.append("resume")

    def abort(self) -> None:
        self.aborted.set()

    def is_closing(self) -> bool:
        return self.aborted.is_set()

    def close(self) -> None:
        self.asked.append("close")


@pytest.fixture
async def protocol() -> SocketProtocol:
    config = Config(owner_application(FakeNode()), log_config=None)
    config.load()
    protocol = SocketProtocol(config, ServerState(), {})
    protocol.connection_made(Wire())
    return protocol


def wire_of(protocol: SocketProtocol) -> Wire:
    assert isinstance(protocol.transport, Wire)
    return protocol.transport


async def test_nothing_is_read_while_the_client_does_not_read(protocol: SocketProtocol) -> None:
    protocol.pause_writing()
    protocol.resume_writing()

    assert wire_of(protocol).asked == ["pause", "resume"]


async def test_reading_stays_paused_for_the_application(protocol: SocketProtocol) -> None:
    protocol.read_paused = True
    protocol.pause_writing()
    protocol.resume_writing()

    assert wire_of(protocol).asked == ["pause"]


async def test_a_client_that_never_reads_is_dropped(
    protocol: SocketProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.0)
    protocol.pause_writing()

    await wire_of(protocol).aborted.wait()


async def test_a_client_has_its_time_again_after_this_process_was_stopped(
    protocol: SocketProtocol, advance: Callable[[float], None]
) -> None:
    protocol.pause_writing()
    advance(3 * connection.STALL_S)
    await timers_fired()
    advance(connection.STALL_S / 2)
    await timers_fired()
    assert not wire_of(protocol).aborted.is_set()

    advance(connection.STALL_S / 2)
    await wire_of(protocol).aborted.wait()


async def test_a_client_has_its_time_again_a_few_times_only(
    protocol: SocketProtocol, advance: Callable[[float], None]
) -> None:
    protocol.pause_writing()
    for _ in range(connection.RENEWALS):
        advance(3 * connection.STALL_S)
        await timers_fired()
        assert not wire_of(protocol).aborted.is_set()

    advance(3 * connection.STALL_S)

    await wire_of(protocol).aborted.wait()


async def test_a_client_that_reads_after_a_stop_of_this_process_is_kept(
    protocol: SocketProtocol, advance: Callable[[float], None]
) -> None:
    protocol.pause_writing()
    advance(3 * connection.STALL_S)
    await timers_fired()
    protocol.resume_writing()
    advance(connection.STALL_S)
    await timers_fired()

    assert not wire_of(protocol).aborted.is_set()


async def test_a_client_that_has_read_is_kept(
    protocol: SocketProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STALL_S", 0.0)
    protocol.pause_writing()
    protocol.resume_writing()
    protocol.pause_writing()
    protocol.connection_lost(None)
    await timers_fired()

    assert not wire_of(protocol).aborted.is_set()


async def test_the_next_headers_have_their_time_once_the_last_response_is_read(
    advance: Callable[[float], None],
) -> None:
    config = Config(owner_application(FakeNode()), log_config=None)
    config.load()
    public, wire = PublicProtocol(config, ServerState(), {}), Wire()
    public.connection_made(wire)
    public._headers.stop()  # those of a request have come

    public.pause_writing()
    public.on_response_complete()
    await advanced(advance, connection.HEADERS_S)
    assert not wire.aborted.is_set()
    public.resume_writing()
    await advanced(advance, connection.HEADERS_S / 2)
    assert not wire.aborted.is_set()
    await advanced(advance, connection.HEADERS_S / 2)

    assert wire.aborted.is_set()


async def advanced(advance: Callable[[float], None], seconds: float) -> None:
    """Advance the clock, until the timers have fired."""
    advance(seconds)
    await timers_fired()
