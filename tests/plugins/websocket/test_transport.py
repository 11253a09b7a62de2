"""WebSocket transport over real sockets: contract, ports, proxies."""

import asyncio
import errno
import socket
import ssl
from asyncio import Server
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import LinkLost, UserError
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport import contract
from meshllm.transport.gathering import Gathering
from meshllm.transport.registry import Registry
from meshllm_websocket import WebsocketTransport, address
from meshllm_websocket.connection import WebsocketConnection
from meshllm_websocket.transport import PORTS
from tests.builders.certificates import certificate
from tests.builders.websocket import ANY, linked

pytestmark = pytest.mark.socket


class LocalAddressPolicy(WebsocketTransport):
    """Listens on a free port of 127.0.0.1 by default."""

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[contract.Listener]:
        async with super().listen(address or ANY) as listener:
            yield listener


@asynccontextmanager
async def proxy(
    backend: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Forward requests like a reverse proxy; yield its port, and the request lines it received."""
    seen: list[bytes] = []
    port = int(backend.rpartition(":")[2])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        line, rest = head.split(b"\r\n", 1)
        seen.append(line)
        behind, before = await asyncio.open_connection("127.0.0.1", port)
        before.write(line + b"\r\nX-Forwarded-For: 192.0.2.7\r\n" + rest)
        await asyncio.gather(pump(reader, before), pump(behind, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield server.sockets[0].getsockname()[1], seen


async def test_websocket_implements_the_contract() -> None:
    await check_transport(LocalAddressPolicy, Terms(settle_s=0.05, deadline_s=120.0))


async def test_messages_that_are_offered_together_are_one_write() -> None:
    async with linked() as (one, other):
        assert isinstance(one, contract.SupportsBatchedSend)
        assert isinstance(one._wire, WebsocketConnection)
        written, write = list[bytes](), one._wire.socket.write

        def counted(part: bytes) -> None:
            written.append(part)
            write(part)

        one._wire._gathering = Gathering(counted)
        with one.together():
            assert all(one.offer([bytes([number])]) for number in range(16))
            assert not written
        assert len(written) == 1
        for number in range(16):
            assert bytes((await other.receive())[1]) == bytes([number])


async def test_a_message_is_sent_within_the_call_that_offers_it() -> None:
    async with linked() as (one, other):
        assert isinstance(one, contract.ImmediateSender)
        assert isinstance(other, contract.HasPeerHost)
        assert one.peer_host == other.peer_host == "127.0.0.1"
        assert one.offer([b"now"])
        assert one.statistics.messages_sent == 1
        assert await other.receive() == (contract.Channel.DATA, b"now")


def test_it_is_found_by_its_entry_point() -> None:
    transport = Registry.discover().load("websocket")

    assert transport.schemes == ("ws", "wss")
    assert isinstance(transport, contract.Transport)


async def test_two_default_listeners_use_different_ports() -> None:
    transport = WebsocketTransport()
    async with transport.listen() as one, transport.listen() as other:
        for listener in (one, other):
            assert listener.address == listener.addresses[0]
            assert address.parse(listener.address).port in PORTS
            hosts = [ip_address(address.parse(place).host) for place in listener.addresses]
            assert not any(host.is_unspecified for host in hosts)
            assert hosts == sorted(hosts, key=lambda host: host.is_loopback)
            assert hosts[-1].is_loopback
        assert not set(one.addresses) & set(other.addresses)
        link = await transport.dial(other.addresses[-1])
        await link.close()


async def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = WebsocketTransport()
    async with transport.listen() as listener:
        taken = address.parse(listener.address).port
        monkeypatch.setattr("meshllm_websocket.transport.PORTS", range(taken, taken + 1))

        with pytest.raises(UserError, match=f"No free port from {taken} to {taken}"):
            await transport.listen().__aenter__()


async def test_what_no_other_port_would_cure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("meshllm_websocket.transport._serve", fail)

    with pytest.raises(UserError, match="too many open files"):
        await WebsocketTransport().listen().__aenter__()


async def test_a_port_in_use_is_one_line_with_a_hint() -> None:
    async with LocalAddressPolicy().listen() as listener:
        with pytest.raises(UserError) as caught:
            async with WebsocketTransport().listen(listener.address):
                pass

    assert str(caught.value) == f"Cannot listen on `{listener.address}`: address already in use"
    assert caught.value.hint == "choose another port, or an address of this machine"


async def test_a_machine_without_ipv6_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    create = loop.create_server

    async def without_ipv6(make: Any, hosts: list[str], port: int, backlog: int) -> Server:
        if "::" in hosts:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return await create(make, hosts, port, backlog=backlog)

    monkeypatch.setattr(loop, "create_server", without_ipv6)
    with socket.create_server(("", 0)) as taken:
        free = taken.getsockname()[1]
    monkeypatch.setattr("meshllm_websocket.transport.PORTS", range(free, free + 1))
    async with WebsocketTransport().listen() as listener:
        assert not any("[" in place for place in listener.addresses)


async def test_listening_with_tls_is_rejected() -> None:
    with pytest.raises(UserError, match="TLS is not supported"):
        await WebsocketTransport().listen("wss://127.0.0.1:0").__aenter__()


async def test_a_reverse_proxy_is_transparent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")  # the environment is not used
    transport = WebsocketTransport()
    async with (
        transport.listen(ANY) as listener,
        proxy(listener.address) as (port, seen),
    ):
        link = await transport.dial(f"ws://127.0.0.1:{port}/mesh/one?a=b")
        behind = await anext(aiter(listener.links()))
        await link.send([bytes(1_000_000)])

        assert len((await behind.receive())[1]) == 1_000_000
        assert seen == [b"GET /mesh/one?a=b HTTP/1.1"]
        await asyncio.gather(link.close(), behind.close())


async def test_a_reverse_proxy_can_terminate_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(file)
    transport = WebsocketTransport()
    async with (
        transport.listen(ANY) as listener,
        proxy(listener.address, tls) as (port, _),
    ):
        with pytest.raises(LinkLost, match="certificate verify failed"):
            await transport.dial(f"wss://127.0.0.1:{port}")

        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        link = await transport.dial(f"wss://127.0.0.1:{port}")
        behind = await anext(aiter(listener.links()))
        await behind.send([bytes(1_000_000)])

        assert len((await link.receive())[1]) == 1_000_000
        await asyncio.gather(link.close(), behind.close())
