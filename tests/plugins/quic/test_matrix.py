"""Connectivity for all pairs of NATs, and changes of the network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from meshllm.errors import LinkLost
from meshllm.testing.transports import Terms, check_transport
from meshllm.transport.contract import Listener, Path
from meshllm_quic.transport import QuicTransport
from tests.plugins.quic.world import KEYS, PublicRelay, echo, relayed
from tests.simulation.ears import virtual
from tests.simulation.internet import Internet
from tests.simulation.nat import KINDS, PORT_RESTRICTED, is_reachable
from tests.simulation.wires import Line

CHUNK = 64 * 1024


@pytest.mark.parametrize(
    ("a", "b"),
    [  # either of the two may dial; in the gate, one of them does
        pytest.param(
            a, b, marks=[] if at == to or (at > to) == (at + to) % 2 else [pytest.mark.slow]
        )
        for at, a in enumerate(KINDS)
        for to, b in enumerate(KINDS)
    ],
)
@virtual
async def test_links_are_direct_if_the_nats_allow_it(a: str, b: str) -> None:
    async with relayed(a, b) as nodes:
        if is_reachable(a, b):
            took_s = await nodes.until(Path.DIRECT)
            nodes.relay.host.stop()
            await echo(nodes.one, nodes.other)
            await asyncio.sleep(120)
            print(f"{a} - {b}: direct after {took_s * 1e3:.0f} ms")
        else:
            await asyncio.sleep(20)
            print(f"{a} - {b}: {nodes.one.statistics.path_reason}")

        await echo(nodes.one, nodes.other)

        assert nodes.paths == {Path.DIRECT if is_reachable(a, b) else Path.RELAY}


@virtual
async def test_a_transfer_continues_while_a_node_roams() -> None:
    async with relayed("port-restricted", "port-restricted") as nodes:
        await nodes.until(Path.DIRECT)
        cafe = nodes.internet.nat(PORT_RESTRICTED)
        sent = [number.to_bytes(4, "big") * (CHUNK // 4) for number in range(100)]

        async def send() -> None:
            for number, message in enumerate(sent):
                await nodes.one.send([message])
                await asyncio.sleep(0.05)
                if number == 40:
                    nodes.hosts[0].move(cafe)

        sending = asyncio.create_task(send())
        got = [bytes((await nodes.other.receive())[1]) for _ in sent]
        await sending

        assert got == sent
        await nodes.until(Path.DIRECT)


@virtual
async def test_a_transfer_continues_after_a_nat_rebinding() -> None:
    internet = Internet(seed=1)
    home = internet.nat(PORT_RESTRICTED)
    async with relayed("none", "none", internet) as nodes:
        nodes.hosts[0].move(home)
        await asyncio.sleep(20)
        await nodes.until(Path.DIRECT)

        home.reboot(renumber=True)
        for _ in range(20):
            await echo(nodes.one, nodes.other)

        await nodes.until(Path.DIRECT)


@pytest.mark.parametrize("seconds", [600, pytest.param(3600, marks=pytest.mark.slow)])
@virtual
async def test_an_idle_path_outlives_the_mappings_of_nats(seconds: float) -> None:
    async with relayed("port-restricted", "port-restricted") as nodes:
        await nodes.until(Path.DIRECT)

        await asyncio.sleep(seconds)

        assert nodes.paths == {Path.DIRECT}
        await echo(nodes.one, nodes.other)


@virtual
async def test_a_dead_direct_path_falls_back_to_the_relay_and_recovers() -> None:
    async with relayed("none", "none") as nodes:
        await nodes.until(Path.DIRECT)

        nodes.internet.line_between(*nodes.hosts, Line(loss=1.0))
        await asyncio.gather(nodes.until(Path.RELAY), echo(nodes.one, nodes.other))
        nodes.internet.line_between(*nodes.hosts, Line(delay_s=0.01))
        await echo(nodes.one, nodes.other)

        await nodes.until(Path.DIRECT, within_s=90.0)


@virtual
async def test_without_its_relay_a_relayed_link_is_lost() -> None:
    async with relayed("symmetric", "symmetric") as nodes:
        nodes.relay.host.stop()

        with pytest.raises(LinkLost):
            await nodes.one.receive()


@virtual
async def test_the_next_dial_uses_the_remembered_direct_address() -> None:
    async with relayed("port-restricted", "port-restricted") as nodes:
        await nodes.until(Path.DIRECT)

        again = await nodes.transports[0].dial(nodes.address)

        assert again.statistics.path is Path.DIRECT
        await again.close()


@virtual
async def test_a_moved_node_is_reached_through_the_relay() -> None:
    async with relayed("none", "none") as nodes:
        await nodes.until(Path.DIRECT)
        nodes.hosts[1].move(nodes.internet.nat(PORT_RESTRICTED))
        await asyncio.sleep(10)

        again = await nodes.transports[0].dial(nodes.address)

        await again.close()


@virtual
async def test_a_dial_with_blocked_udp_reports_the_relay() -> None:
    internet = Internet()
    relay = PublicRelay(internet.host("relay"))
    await relay.open()
    office = internet.host("office")
    office.block_udp()
    transport = QuicTransport(office)
    transport.identify(KEYS[0])
    address = relay.address.replace("//", "//" + "a" * 56 + "@")

    with pytest.raises(LinkLost, match="No answer from the relay of"):
        await transport.dial(address)


@pytest.mark.slow
@virtual
async def test_the_contract_holds_on_a_lossy_network() -> None:
    internet = Internet(seed=3)
    names = iter(range(1000))

    class Two(QuicTransport):
        """Listens on one host and dials from another."""

        def __init__(self) -> None:
            line = Line(delay_s=0.002, loss=0.01, jitter_s=0.001)
            super().__init__(internet.host(f"dials {next(names)}", line))
            self._far = QuicTransport(internet.host(f"listens {next(names)}", line))

        @asynccontextmanager
        async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
            async with self._far.listen(address) as listener:
                yield listener

    terms = Terms(longest_bytes=300_000, settle_s=2.0, deadline_s=600.0)
    await check_transport(Two, terms)
