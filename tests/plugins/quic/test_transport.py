"""QUIC transport on real sockets: contract, addresses, cleanup."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from meshllm.errors import LinkLost, UserError
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport.contract import (
    Channel,
    HasPeerHost,
    HasPeerKey,
    ImmediateSender,
    Link,
    Listener,
    NotifiesAddressChange,
    Path,
    SupportsIdentity,
    SupportsNatDetection,
    SupportsRelays,
    SupportsUnreadLimit,
    Transport,
)
from meshllm_quic.base.identity import Identity
from meshllm_quic.link import connection
from meshllm_quic.link.link import QuicLink
from meshllm_quic.net.network import Receive, Refused
from meshllm_quic.net.udp import UdpNetwork, UdpSocket
from meshllm_quic.relay import registration
from meshllm_quic.relay.relay_server import open_relay
from meshllm_quic.transport import PORTS, QuicTransport
from tests.builders.waiting import until
from tests.plugins.quic.world import echo

pytestmark = pytest.mark.socket

ANY = "quic://127.0.0.1:0"
LONG_S = 120.0  # longer than anything here takes on a busy machine


class LocalAddressPolicy(QuicTransport):
    """Listens on a free port of 127.0.0.1 by default, and is patient where somebody listens.

    UDP does not always report a closed port, so that only a deadline ends a dial to one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._listening = set[str]()

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        async with super().listen(address or ANY) as listener:
            self._listening.add(listener.address)
            yield listener
        self._listening.discard(listener.address)

    async def dial(self, address: str) -> Link:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "OPEN_S", LONG_S if address in self._listening else 0.1)
            return await super().dial(address)


@asynccontextmanager
async def linked(
    transport: QuicTransport | None = None,
) -> AsyncIterator[tuple[QuicLink, QuicLink]]:
    transport = transport or QuicTransport()
    async with transport.listen(ANY) as listener:
        one, other = await asyncio.gather(
            transport.dial(listener.address), anext(aiter(listener.links()))
        )
        assert isinstance(one, QuicLink)
        assert isinstance(other, QuicLink)
        yield one, other
        await asyncio.gather(one.close(), other.close())


@pytest.mark.timeout(600)  # it computes for ten seconds
async def test_quic_implements_the_contract() -> None:
    await check_transport(LocalAddressPolicy, Terms(deadline_s=LONG_S))


async def test_a_message_is_sent_within_the_call_that_offers_it() -> None:
    async with linked() as (one, other):
        assert isinstance(one, ImmediateSender)
        assert one.offer([b"now"])
        assert one.statistics.messages_sent == 1
        assert await other.receive() == (Channel.DATA, b"now")


async def test_optional_contracts_are_implemented() -> None:
    transport = QuicTransport()

    async with linked(transport) as (one, _), transport.listen(ANY) as listener:
        assert isinstance(transport, Transport)
        assert isinstance(transport, SupportsIdentity)
        assert isinstance(transport, SupportsRelays)
        assert isinstance(transport, SupportsNatDetection)
        assert isinstance(listener, NotifiesAddressChange)
        assert isinstance(one, SupportsUnreadLimit)
        assert isinstance(one, HasPeerKey)
        assert isinstance(one, HasPeerHost)


async def test_two_processes_reach_each_other() -> None:
    far, near = QuicTransport(), QuicTransport()
    far.identify(b"f" * 32)
    async with far.listen(ANY) as listener:
        one, other = await asyncio.gather(
            near.dial(listener.address), anext(aiter(listener.links()))
        )

        assert isinstance(one, QuicLink)
        assert isinstance(other, QuicLink)
        await echo(one, other)
        assert one.peer_key == Identity(b"f" * 32).key
        assert one.statistics.path is Path.DIRECT
        assert one.peer_host == other.peer_host == "127.0.0.1"
        await asyncio.gather(one.close(), other.close())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux queues ICMP errors")
async def test_a_link_ends_soon_after_the_process_of_its_peer() -> None:
    sockets = list[UdpSocket]()

    class Mortal(UdpNetwork):
        async def open(self, *where: Any) -> UdpSocket:
            sockets.append(await super().open(*where))
            return sockets[-1]

    far, near = QuicTransport(Mortal()), QuicTransport()
    async with far.listen(ANY) as listener:
        one, _ = await asyncio.gather(near.dial(listener.address), anext(aiter(listener.links())))

        sockets[0].close()  # as `kill -9` does: without a CONNECTION_CLOSE
        await one.send([b"anybody?"])

        with pytest.raises(LinkLost, match="no longer listens"):
            await one.receive()


async def test_datagrams_on_loopback_use_a_large_mtu() -> None:
    async with linked() as (one, other):
        while one._wire.machine.size <= 1452:  # type: ignore[attr-defined]
            await echo(one, other)

        assert one._wire.machine.size == 16_000  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "address",
    ["quic://192.0.2.1:7700", "no address at all", f"quic://{'a' * 56}@127.0.0.1:0"],
)
async def test_an_unusable_listen_address_is_a_user_error(address: str) -> None:
    with pytest.raises(UserError):
        async with QuicTransport().listen(address):
            pass


async def test_a_relay_address_must_not_name_a_node() -> None:
    transport = QuicTransport()

    with pytest.raises(UserError, match="is a node, not a relay"):
        transport.add_relay(f"quic://{'a' * 56}@127.0.0.1:8790")


async def test_an_unresolvable_relay_does_not_stop_a_listener(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = QuicTransport()
    transport.add_relay("quic://nowhere.invalid:8790")

    async with transport.listen(ANY):
        pass

    assert "cannot resolve the relay quic://nowhere.invalid:8790" in caplog.text


async def test_without_an_address_the_first_free_port_is_taken() -> None:
    async with QuicTransport().listen() as one, QuicTransport().listen() as other:
        ports = {int(each.address.rpartition(":")[2]) for each in (one, other)}

        assert len(ports) == 2
        assert ports <= set(PORTS)


async def test_a_listener_reuses_the_socket_of_earlier_dials() -> None:
    here, there = QuicTransport(), QuicTransport()
    async with there.listen(ANY) as far:
        link, met = await asyncio.gather(here.dial(far.address), anext(aiter(far.links())))
        async with here.listen() as near:
            endpoint = here._endpoint
            assert endpoint is not None

            assert near.address.endswith(f":{endpoint.port}")
        await asyncio.gather(link.close(), met.close())


async def test_the_socket_closes_with_the_last_link() -> None:
    transport = QuicTransport()
    async with linked(transport):
        endpoint = transport._endpoint
        assert endpoint is not None

    assert not endpoint.is_open
    assert transport.survey() is None


async def test_a_cancelled_dial_leaves_nothing_behind() -> None:
    transport = QuicTransport()
    dialling = asyncio.create_task(transport.dial("quic://127.0.0.1:9"))
    await until(lambda: transport._live)

    dialling.cancel()
    await asyncio.wait([dialling])

    assert dialling.cancelled()
    assert transport._live is None


async def test_one_of_two_listeners_is_registered_at_the_relays() -> None:
    async with open_relay(UdpNetwork(), "127.0.0.1", 0) as relay:
        transport = QuicTransport()
        transport.add_relay(f"quic://127.0.0.1:{relay.udp.port}")
        async with transport.listen(ANY) as one, transport.listen(ANY) as other:
            await registered(one)

            assert "@" in "".join(one.addresses)
            assert "@" not in "".join(other.addresses)


async def test_an_unresolvable_name_is_a_lost_link() -> None:
    with pytest.raises(LinkLost, match="Cannot resolve"):
        await QuicTransport().dial("quic://nowhere.invalid:7700")


async def registered(listener: Listener) -> None:
    """Wait until the listener is registered at a relay."""
    changed = asyncio.Event()
    assert isinstance(listener, NotifiesAddressChange)
    listener.on_change(changed.set)
    if "@" not in "".join(listener.addresses):
        await changed.wait()


class Office(UdpNetwork):
    """A network that blocks outgoing UDP."""

    async def open(
        self, host: str | None, port: int, receive: Receive, refused: Refused | None = None
    ) -> UdpSocket:
        opened = await super().open(host, port, receive, refused)
        opened.send = lambda datagrams, to: None  # type: ignore[method-assign]
        return opened


async def test_with_udp_blocked_the_relay_is_reached_over_tcp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "SILENT_S", 0.3)
    monkeypatch.setattr(connection, "OPEN_S", LONG_S)
    far, near = QuicTransport(), QuicTransport(Office())
    async with open_relay(UdpNetwork(), "127.0.0.1", 0) as relay:
        far.add_relay(f"quic://127.0.0.1:{relay.udp.port}")
        async with far.listen(ANY) as listener:
            await registered(listener)
            (address,) = (each for each in listener.addresses if "@" in each)

            one, other = await asyncio.gather(near.dial(address), anext(aiter(listener.links())))
            assert isinstance(one, QuicLink)
            assert isinstance(other, QuicLink)
            await echo(one, other, 200_000)

            assert one.statistics.path is other.statistics.path is Path.RELAY
            assert one.peer_host == other.peer_host == ""
            survey = near.survey()
            assert survey is not None
            assert [state for _, state in survey.relays] == ["registered over TCP"]
            await asyncio.gather(one.close(), other.close())


async def test_statistics_contain_round_trip_and_rate() -> None:
    async with linked() as (one, other):
        await asyncio.gather(one.send([bytes(3_000_000)]), other.receive())
        await echo(one, other)

        assert one.statistics.bytes_per_s
        assert one.statistics.round_trip_s
        assert one.statistics.path_reason
