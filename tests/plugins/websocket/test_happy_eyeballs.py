"""Which address of a host is connected to, with real sockets of this machine."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from meshllm.transport.names import Address
from meshllm_websocket import happy_eyeballs
from meshllm_websocket.happy_eyeballs import connect, interleaved

pytestmark = pytest.mark.socket

HOST = "node.example"


def address(port: int, host: str = "127.0.0.1") -> Address:
    return socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def refused_port() -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Address]:
    """The addresses of `HOST`."""
    addresses: list[Address] = []

    async def look_up(*_: object) -> list[Address]:
        return addresses

    monkeypatch.setattr(happy_eyeballs, "look_up", look_up)
    return addresses


def hang(monkeypatch: pytest.MonkeyPatch, *ports: int) -> list[socket.socket]:
    """Let connecting to some ports never end; return the sockets that do so."""
    loop, hung = asyncio.get_running_loop(), list[socket.socket]()
    sock_connect = loop.sock_connect

    async def connect_one(one: socket.socket, to: Any) -> None:
        if to[1] in ports:
            hung.append(one)
            await asyncio.Event().wait()
        await sock_connect(one, to)

    monkeypatch.setattr(loop, "sock_connect", connect_one)
    return hung


def test_families_alternate() -> None:
    six: list[Address] = [
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", (f"::{number}", 1, 0, 0)) for number in (1, 2)
    ]

    assert interleaved([*six, address(1)]) == [six[0], address(1), six[1]]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_host_is_a_number_or_a_name(host: str, server: socket.socket) -> None:
    with await connect([host], server.getsockname()[1]) as one:
        assert one.getpeername() == server.getsockname()


async def test_the_next_address_is_tried_at_once_after_one_that_refuses(
    found: list[Address], server: socket.socket, refused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(happy_eyeballs, "ATTEMPT_S", None)
    found += [address(refused_port), address(server.getsockname()[1])]

    with await connect([HOST], 1) as one:
        assert one.getpeername() == server.getsockname()


async def test_the_next_address_is_tried_beside_one_that_does_not_answer(
    found: list[Address], server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(happy_eyeballs, "ATTEMPT_S", 0.0)
    hung = hang(monkeypatch, 1, 2)
    found += [address(1), address(2), address(server.getsockname()[1]), address(3)]

    with await connect([HOST], 1) as one:
        assert one.getpeername() == server.getsockname()
    assert [each.fileno() for each in hung] == [-1, -1]


async def test_of_two_addresses_that_answer_at_once_one_is_closed(
    found: list[Address], server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(happy_eyeballs, "ATTEMPT_S", 0.0)
    loop, both = asyncio.get_running_loop(), list[socket.socket]()
    sock_connect, met = loop.sock_connect, asyncio.Event()

    async def connect_together(one: socket.socket, to: Any) -> None:
        await sock_connect(one, to)
        both.append(one)
        if len(both) == 2:
            met.set()
        await met.wait()

    monkeypatch.setattr(loop, "sock_connect", connect_together)
    found += [address(server.getsockname()[1])] * 2

    with await connect([HOST], 1) as one:
        assert [each.fileno() for each in both if each is not one] == [-1]


async def test_the_first_error_is_raised_if_no_address_answers(
    found: list[Address], refused_port: int
) -> None:
    found += [address(refused_port), (99, socket.SOCK_STREAM, 0, "", ())]  # type: ignore[list-item]  # a family that this machine lacks

    with pytest.raises(OSError, match=r".") as raised:
        await connect([HOST], 1)

    assert raised.value.errno == errno.ECONNREFUSED


async def test_a_host_without_an_address_is_an_error() -> None:
    with pytest.raises(socket.gaierror):
        await connect(["nobody.invalid"], 1)


async def test_nothing_is_open_once_it_is_cancelled(
    found: list[Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(happy_eyeballs, "ATTEMPT_S", 0.0)
    hung = hang(monkeypatch, 1, 2)
    found += [address(1), address(2)]
    connecting = asyncio.create_task(connect([HOST], 1))
    for _ in range(20):
        await asyncio.sleep(0)

    connecting.cancel()
    await asyncio.wait([connecting])

    assert connecting.cancelled()
    assert len(hung) == 2
    assert [each.fileno() for each in hung] == [-1, -1]
