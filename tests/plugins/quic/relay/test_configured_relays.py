"""Configured relays that start late, stop, or change their address."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from meshllm_quic.net.network import DatagramNetwork
from meshllm_quic.relay import configured_relays
from meshllm_quic.relay.configured_relays import READY_S, SEEK_S
from meshllm_quic.relay.registration import REFRESH_S
from meshllm_quic.relay.relays import RelayUsage
from meshllm_quic.transport import QuicTransport
from tests.plugins.quic.world import PORT, PublicRelay
from tests.simulation.ears import virtual
from tests.simulation.hosts import Host
from tests.simulation.internet import Internet

SILENT_V6 = "2600::99"


class Names:
    """A host with a resolver that tests can change."""

    def __init__(self, host: Host) -> None:
        self.known: dict[str, str] = {}
        """The addresses of a name, separated by spaces."""
        self.slow: dict[str, float] = {}
        """How many seconds the lookup of a name takes."""
        self.open = host.open

    async def resolve(self, host: str, port: int) -> list[tuple[str, int]]:
        await asyncio.sleep(self.slow.get(host, 0.0))
        if host not in self.known:
            raise OSError(-2, "Name or service not known")
        return [(each, port) for each in self.known[host].split()]


@asynccontextmanager
async def node(
    network: DatagramNetwork, *others: str
) -> AsyncIterator[tuple[QuicTransport, float]]:
    """Listen with configured relays; yield the transport and how long that took."""
    transport, clock = QuicTransport(network), asyncio.get_running_loop().time
    for relay in (*others, "relay.example"):
        transport.add_relay(relay)
    began = clock()
    async with transport.listen():
        yield transport, clock() - began


def states(transport: QuicTransport) -> list[tuple[str, str]]:
    network = transport.survey()
    assert network is not None
    return list(network.relays)


@virtual
async def test_addresses_include_a_reachable_relay() -> None:
    internet = Internet(seed=1)
    relay = PublicRelay(internet.host("relay"))
    await relay.open()
    names = Names(internet.behind("symmetric").host("a"))
    names.known["relay.example"] = relay.host.hosts()[0]

    async with node(names) as (transport, took):
        assert states(transport) == [(f"{relay.host.hosts()[0]}:{PORT}", "registered over UDP")]
        assert took < 1


@virtual
async def test_a_relay_that_starts_later_is_found() -> None:
    internet = Internet(seed=1)
    relay = PublicRelay(internet.host("relay"))
    await relay.open()
    names = Names(internet.behind("full cone").host("a"))

    async with node(names) as (transport, _):
        assert states(transport) == []
        names.known["relay.example"] = relay.host.hosts()[0]
        await asyncio.sleep(SEEK_S + 1)

        assert [state for _, state in states(transport)] == ["registered over UDP"]


@virtual
async def test_a_relay_with_a_new_address_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm_quic.relay.relays.RelayStream", Silent)
    internet = Internet(seed=1)
    first, second = (PublicRelay(internet.host(name)) for name in ("first", "second"))
    await first.open()
    await second.open()
    names = Names(internet.behind("full cone").host("a"))
    names.known["relay.example"] = first.host.hosts()[0]

    async with node(names) as (transport, _):
        first.host.stop()
        names.known["relay.example"] = second.host.hosts()[0]
        await asyncio.sleep(4 * SEEK_S)

        assert states(transport) == [(f"{second.host.hosts()[0]}:{PORT}", "registered over UDP")]


async def relay_at(addresses: str) -> tuple[PublicRelay, Names]:
    """Open a relay whose name has these addresses, its own for `{}`; return a host that asks."""
    internet = Internet(seed=1)
    relay = PublicRelay(internet.host("relay"))
    await relay.open()
    names = Names(internet.behind("full cone").host("a"))
    names.known["relay.example"] = addresses.format(relay.host.hosts()[0])
    return relay, names


@virtual
async def test_a_relay_with_an_address_that_is_silent_is_reached_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshllm_quic.relay.relays.RelayStream", Silent)
    relay, names = await relay_at("21.0.0.98 {} " + SILENT_V6)
    here = relay.host.hosts()[0]

    async with node(names) as (transport, _):
        await asyncio.sleep(SEEK_S + 1)
        assert states(transport) == [(f"{here}:{PORT}", "registered over UDP")]
        assert transport._endpoint is not None
        assert transport._endpoint.listener is not None
        relayed = [each for each in transport._endpoint.listener.addresses if "@" in each]
        assert [each.partition("@")[2] for each in relayed] == [
            f"{here}:{PORT}",
            f"[{SILENT_V6}]:{PORT}",
        ]


@pytest.mark.parametrize("usage", [RelayUsage.ROUTE, RelayUsage.RESERVE])
@virtual
async def test_a_silent_relay_that_a_link_may_need_is_not_left_for_its_next_address(
    monkeypatch: pytest.MonkeyPatch, usage: RelayUsage
) -> None:
    monkeypatch.setattr("meshllm_quic.relay.relays.RelayStream", Silent)
    relay, names = await relay_at("{} " + SILENT_V6)
    here = relay.host.hosts()[0]

    async with node(names) as (transport, _):
        endpoint = transport._endpoint
        assert endpoint is not None
        monkeypatch.setattr(endpoint, "usage", lambda _: usage)
        relay.host.stop()
        await asyncio.sleep(REFRESH_S + 2 * SEEK_S)

        assert [place for place, _ in states(transport)] == [f"{here}:{PORT}"]


@virtual
async def test_a_silent_relay_delays_a_listener_only_briefly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("meshllm_quic.relay.relays.RelayStream", Silent)
    internet = Internet(seed=1)
    nobody = internet.host("nobody")
    names = Names(internet.host("a"))
    names.known["relay.example"] = nobody.hosts()[0]

    async with node(names) as (_, took):
        assert took == pytest.approx(READY_S)

    assert "no answer yet from quic://relay.example:8790" in caplog.text
    assert configured_relays.logger.name == "meshllm_quic.relay.configured_relays"


@virtual
async def test_a_relay_whose_name_resolves_slowly_delays_no_other_relay() -> None:
    internet = Internet(seed=1)
    relays = [PublicRelay(internet.host(name)) for name in ("slow", "relay")]
    for relay in relays:
        await relay.open()
    slow, fast = (relay.host.hosts()[0] for relay in relays)
    names = Names(internet.behind("full cone").host("a"))
    names.known = {"slow.example": slow, "relay.example": fast}
    names.slow["slow.example"] = 2 * READY_S

    async with node(names, "slow.example") as (transport, took):
        assert took == pytest.approx(READY_S)
        assert states(transport) == [(f"{fast}:{PORT}", "registered over UDP")]
        await asyncio.sleep(SEEK_S + 2 * READY_S + 1)

        assert dict(states(transport)).keys() == {f"{fast}:{PORT}", f"{slow}:{PORT}"}


@virtual
async def test_a_lost_relay_is_sought_while_another_name_resolves_slowly() -> None:
    internet = Internet(seed=1)
    relay = PublicRelay(internet.host("relay"))
    await relay.open()
    names = Names(internet.behind("full cone").host("a"))
    names.slow["slow.example"] = 10 * SEEK_S

    async with node(names, "slow.example") as (transport, _):
        await asyncio.sleep(SEEK_S)
        names.known["relay.example"] = relay.host.hosts()[0]
        await asyncio.sleep(SEEK_S + 1)

        assert [state for _, state in states(transport)] == ["registered over UDP"]


@virtual
async def test_a_bug_in_the_background_is_reported_at_once() -> None:
    loop, reports = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, report: reports.append(report))
    names = Names(Internet(seed=1).behind("full cone").host("a"))

    async with node(names):
        names.slow["relay.example"] = cast("float", "a bug")
        await asyncio.sleep(2 * SEEK_S)

        assert [type(each["exception"]) for each in reports] == [TypeError]


class Silent:
    """A stream to a relay that is never open."""

    is_open = False
    last_error = ""

    def __init__(self, *_: object) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()
