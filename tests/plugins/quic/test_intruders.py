"""Forgers, unauthenticated clients and members cannot affect the connections of others."""

import asyncio
from collections.abc import Sequence

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import ConnectionIdIssued

from meshllm.errors import LinkLost
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Path
from meshllm_quic.base.identity import Identity
from meshllm_quic.link import dialer
from meshllm_quic.link.connection import OPEN_S
from meshllm_quic.link.link import QuicLink
from meshllm_quic.link.machine import PEER, ConnectionMachine
from meshllm_quic.net.address import show_key
from meshllm_quic.net.network import Address
from meshllm_quic.transport import QuicTransport
from meshllm_quic.wire.packets import Probe, Relayed
from meshllm_quic.wire.routes import Direct
from tests.plugins.quic.stranger import Stranger, damaged, somebody
from tests.plugins.quic.street import PORT, street
from tests.plugins.quic.world import PORT as RELAY_PORT
from tests.plugins.quic.world import Nodes, echo, relayed
from tests.simulation.ears import ear, virtual


@virtual
async def test_an_unreadable_certificate_ends_only_its_connection() -> None:
    async with street() as here:
        stranger = Stranger((here.far.hosts()[0], PORT), damaged())
        endpoint = here.transport._endpoint
        assert endpoint is not None
        stranger.socket = await here.near.open(None, 0, stranger._receive)
        stranger.quic.connect(stranger.to, now=0.0)
        source = here.near.hosts()[0], stranger.socket.port

        stranger.transmit()
        await asyncio.sleep(0.1)
        second = [data for data, _ in stranger.quic.datagrams_to_send(0.1)]
        endpoint._receive([(data, source) for data in second])  # raises nothing

        assert len(endpoint.table) == 0
        one, other = await here.meet()
        await echo(one, other)
        await asyncio.gather(one.close(), other.close())


@virtual
async def test_only_authentic_datagrams_change_the_route_of_a_handshake() -> None:
    async with street() as here:
        stranger = await here.knock(somebody())
        endpoint = here.transport._endpoint
        assert endpoint is not None
        (connection,) = endpoint.table
        before, elsewhere = connection.route, ("20.0.200.200", 53)
        stranger.quic.send_ping(1)
        ((true, _),) = stranger.quic.datagrams_to_send(asyncio.get_running_loop().time())

        forged = b"\x40" + connection.machine.host_cid + bytes(30)
        endpoint._receive([(forged, elsewhere), (true[:-1] + bytes([true[-1] ^ 1]), elsewhere)])
        assert connection.route == before
        endpoint._receive([(true, elsewhere)])

        assert not connection.is_open
        assert connection.route == Direct(elsewhere)


@virtual
async def test_repeated_close_datagrams_amplify_at_most_three_times() -> None:
    async with street() as here:
        victim = await ear(here.internet.host("victim"))
        endpoint = here.transport._endpoint
        assert endpoint is not None
        machine = ConnectionMachine(somebody())
        machine.connect(PEER, now=0.0)
        ((first, _),) = machine.datagrams_to_send(now=0.0)
        endpoint._receive([(first, ("20.0.200.200", 53))])
        await asyncio.sleep(OPEN_S + 1.0)

        short = b"\x40" + machine.original_destination_connection_id + b"x"
        endpoint._receive([(short, victim.address)] * 10)
        await asyncio.sleep(0.1)
        assert victim.said == []
        endpoint._receive([(first, victim.address)] * 10)
        await asyncio.sleep(0.1)

        assert len(endpoint.table) == 0
        assert 0 < len(victim.said) < 10
        assert len(short) * 3 < len(victim.said[0]) < len(first)


@virtual
async def test_datagrams_do_not_reopen_a_closed_connection() -> None:
    async with street() as here:
        await here.knock(somebody())
        endpoint = here.transport._endpoint
        assert endpoint is not None
        (connection,) = endpoint.table

        connection.abort()
        connection.machine._events.append(ConnectionIdIssued(connection_id=b"12345678"))
        connection.work()

        assert len(endpoint.table) == 0


@virtual
async def test_a_probe_in_return_does_not_amplify() -> None:
    async with relayed("none", "none") as nodes:
        await nodes.until(Path.DIRECT)
        elsewhere = await ear(nodes.internet.host("elsewhere"))
        endpoint = nodes.transports[1]._endpoint
        assert endpoint is not None
        (connection,) = endpoint.table
        head = b"\x40" + connection.machine.host_cid

        endpoint._receive([(head, elsewhere.address)])
        await asyncio.sleep(0.1)
        assert elsewhere.said == []
        endpoint._receive([(head.ljust(Probe.SIZE, b"\0"), elsewhere.address)])
        await asyncio.sleep(0.1)

        assert list(map(len, elsewhere.said)) == [Probe.SIZE]


@virtual
async def test_a_failed_dial_does_not_close_the_socket_of_another() -> None:
    async with street() as here:
        dialling = QuicTransport(here.near)
        resolve = here.near.resolve

        async def slowly(host: str, port: int) -> Sequence[Address]:
            await asyncio.sleep(1.0 if host == here.far.name else 0.1)
            return await resolve(host, port)

        here.near.resolve = slowly  # type: ignore[method-assign]

        link, failed = await asyncio.gather(
            dialling.dial(f"quic://{here.far.name}:{PORT}"),
            dialling.dial("quic://nowhere.example:1"),
            return_exceptions=True,
        )

        assert isinstance(failed, LinkLost)
        assert isinstance(link, QuicLink)
        await link.close()


async def falls_back(nodes: Nodes, outdated: str) -> None:
    """Dial a node whose remembered address is another's: its relay leads to it."""
    dialling = nodes.transports[0]._endpoint
    assert dialling is not None
    host, port = outdated.removeprefix("quic://").split(":")
    dialling.known = {nodes.one.peer_key: (host, int(port))}

    link = await nodes.transports[0].dial(nodes.address)

    assert isinstance(link, QuicLink)
    assert link.peer_key == nodes.one.peer_key
    await link.close()


@virtual
async def test_an_outdated_direct_address_falls_back_to_the_relay() -> None:
    async with (
        relayed("none", "none") as nodes,
        QuicTransport(nodes.internet.host("else")).listen() as elsewhere,
    ):
        await falls_back(nodes, elsewhere.address)


class OtherProtocol(Identity):
    """A server that speaks another protocol."""

    def configure(self, *, is_client: bool) -> QuicConfiguration:
        configuration = super().configure(is_client=is_client)
        configuration.alpn_protocols = ["h3"]
        return configuration


@virtual
async def test_a_direct_address_that_closes_the_connection_falls_back_to_the_relay() -> None:
    async with relayed("none", "none") as nodes:
        other = QuicTransport(nodes.internet.host("else"))
        async with other.listen() as elsewhere:
            assert other._endpoint is not None
            other._endpoint.identity = OtherProtocol(b"o" * 32)
            await falls_back(nodes, elsewhere.address)


@virtual
async def test_a_silent_direct_address_and_relay_are_tried_once() -> None:
    async with relayed("none", "none") as nodes:
        dialling, now = nodes.transports[0]._endpoint, asyncio.get_running_loop().time
        assert dialling is not None
        dialling.known = {nodes.one.peer_key: ("21.0.0.98", 7700)}
        nodes.hosts[1].stop()
        nodes.relay.host.stop()
        began = now()

        with pytest.raises(LinkLost, match=r"No answer from `.*` within 5 s"):
            await nodes.transports[0].dial(nodes.address)

        assert now() - began == pytest.approx(OPEN_S, abs=0.1)


def test_a_relay_that_does_not_answer_a_dial_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialer, "RELAY_S", 2.0)  # before TCP is tried, which is real here
    run_virtual(_dial_through_nobody())


async def _dial_through_nobody() -> None:
    async with relayed("none", "none") as nodes:
        endpoint = nodes.transports[0]._endpoint
        assert endpoint is not None
        before = endpoint.relays.states()

        with pytest.raises(LinkLost, match="No answer from the relay"):
            await nodes.transports[0].dial(f"quic://{show_key(bytes(32))}@21.0.0.98:8790")

        assert endpoint.relays.states() == before


@virtual
async def test_a_forged_sender_tag_does_not_change_the_backup_route() -> None:
    async with relayed("none", "none") as nodes:
        await nodes.until(Path.DIRECT)
        endpoint = nodes.transports[1]._endpoint
        assert endpoint is not None
        (connection,) = endpoint.table
        relay = nodes.relay.host.hosts()[0], RELAY_PORT
        before = connection.path_driver.backup

        forged = b"\x40" + connection.machine.host_cid + bytes(40)
        endpoint._receive([(Relayed(endpoint.identity.tag, b"t" * 12, forged).encode(), relay)])

        assert before is not None
        assert connection.path_driver.backup == before
