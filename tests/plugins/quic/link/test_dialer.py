import asyncio

import pytest

from meshllm.errors import LinkLost, UserError
from meshllm_quic.base.identity import Identity
from meshllm_quic.link import dialer
from meshllm_quic.link.link import QuicLink
from meshllm_quic.net.address import QuicAddress, show_key
from meshllm_quic.net.network import Address
from meshllm_quic.relay.relays import MAX_RELAYS
from meshllm_quic.transport import QuicTransport
from tests.plugins.quic.street import street
from tests.plugins.quic.world import relayed
from tests.simulation.ears import virtual


@virtual
async def test_a_node_does_not_dial_itself_through_a_relay() -> None:
    async with street() as here:
        place = QuicAddress("20.0.0.9", 8790, Identity(b"f" * 32).key)

        with pytest.raises(UserError, match="is this node itself"):
            await here.transport.dial(str(place))


@virtual
async def test_an_unregistered_node_is_reported() -> None:
    async with relayed("none", "none") as nodes:
        nobody_there = nodes.relay.address.replace("//", "//" + show_key(bytes(32)) + "@")

        with pytest.raises(LinkLost, match="not registered at its relay"):
            await nodes.transports[0].dial(nobody_there)


@virtual
@pytest.mark.parametrize("is_known", [False, True])
async def test_a_relay_with_an_address_that_is_silent_is_dialled_by_the_other(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    async with relayed("none", "none") as nodes:
        host = nodes.internet.host("c")
        here = nodes.relay.host.hosts()[0]

        async def resolve(_: str, port: int) -> list[Address]:
            return [("2600::99", port), (here, port)]

        monkeypatch.setattr(host, "resolve", resolve)
        monkeypatch.setattr(dialer, "RELAY_S", 4.0)  # before TCP is tried, which is real here
        dialling = QuicTransport(host)
        async with dialling.listen():
            assert dialling._endpoint is not None
            if is_known:
                dialling._endpoint.proven(nodes.one.peer_key, ("21.0.0.98", 7700))
            link = await dialling.dial(nodes.address)

            assert isinstance(link, QuicLink)
            assert link.peer_key == nodes.one.peer_key
            await link.close()


@virtual
async def test_the_number_of_relays_is_limited() -> None:
    async with relayed("none", "none") as nodes:
        endpoint = nodes.transports[0]._endpoint
        assert endpoint is not None
        for number in range(MAX_RELAYS):
            endpoint.relays.add((f"21.0.0.{number + 1}", 8790), is_wanted=True)

        with pytest.raises(LinkLost, match="too many are in use or tried"):
            await nodes.transports[0].dial(f"quic://{show_key(bytes(32))}@21.0.0.98:8790")
        assert len(endpoint.relays.states()) == MAX_RELAYS


@virtual
async def test_relays_at_silent_hosts_delay_no_dial_through_another_relay() -> None:
    async with relayed("none", "none") as nodes:
        dialling = QuicTransport(nodes.internet.host("c"))
        silent = [
            asyncio.create_task(dialling.dial(f"quic://{show_key(bytes(32))}@21.0.0.{host}:8790"))
            for host in range(90, 90 + MAX_RELAYS)
        ]
        await asyncio.sleep(0.1)

        async with asyncio.timeout(1.0):
            link = await dialling.dial(nodes.address)

        for task in silent:
            task.cancel()
        assert isinstance(link, QuicLink)
        assert link.peer_key == nodes.one.peer_key
        await link.close()
