"""Several transports of one node: their listen addresses, and the advertised ones."""

import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from meshllm.errors import PluginError, UserError
from meshllm.node.net.endpoints import Endpoints, assign_addresses, open_endpoints, prepare
from meshllm.node.options import NodeOptions
from meshllm.protocol.membership.records import MAX_ADDRESSES
from meshllm.protocol.trust.identity import NodeKey
from meshllm.transport.contract import Link, Listener, Network, Transport

KEY = NodeKey(bytes(32))


class Ears:
    """A listener whose addresses change."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.callbacks: list[Callable[[], None]] = []

    @property
    def address(self) -> str:
        return self.addresses[0]

    def links(self) -> AsyncIterator[Link]:
        raise NotImplementedError

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


class Plain:
    """A transport that only listens and dials."""

    name: ClassVar[str] = "plain"
    schemes: ClassVar[tuple[str, ...]] = ("plain", "plains")

    def __init__(self) -> None:
        self.listened: list[str | None] = []

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        self.listened.append(address)
        yield Ears(f"{self.name}:here")

    async def dial(self, address: str) -> Link:
        raise NotImplementedError


class Clever(Plain):
    """A transport with an identity, relays and network detection."""

    name: ClassVar[str] = "clever"
    schemes: ClassVar[tuple[str, ...]] = ("clever",)

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[bytes] = []
        self.relays: list[str] = []
        self.network: Network | None = None

    def identify(self, seed: bytes) -> None:
        self.seeds.append(seed)

    def add_relay(self, address: str) -> None:
        self.relays.append(address)

    def survey(self) -> Network | None:
        return self.network


def place(
    *listeners: Ears, transports: tuple[Transport, ...] = (), advertised: str = ""
) -> Endpoints:
    return Endpoints(transports, listeners, (advertised,) if advertised else ())


def test_addresses_of_transports_are_interleaved() -> None:
    own = place(Ears("a:1", "a:2", "a:3"), Ears("b:1"), advertised="proxy:1")

    assert own.addresses == ("proxy:1", "a:1", "b:1", "a:2", "a:3")


def test_addresses_are_unique_and_limited() -> None:
    own = place(Ears("a:1", *(f"a:{n}" for n in range(MAX_ADDRESSES))), advertised="a:1")

    assert len(own.addresses) == MAX_ADDRESSES
    assert own.addresses.count("a:1") == 1


def test_a_change_of_addresses_is_reported() -> None:
    ears, calls = Ears("a:1"), []
    own = place(ears)

    own.on_change(lambda: calls.append(own.addresses))
    ears.addresses = ("a:2",)
    ears.callbacks[0]()

    assert calls == [("a:2",)]


class ApiServer(Ears):
    """A listener that keeps places."""

    def __init__(self) -> None:
        super().__init__("there:1")
        self.hosts: list[str] = []

    def reserve(self, hosts: Sequence[str]) -> None:
        self.hosts += hosts


def test_places_are_kept_for_two_hosts_of_each_known_peer_the_first_ones_first() -> None:
    api_server = ApiServer()
    greedy = [f"ws://10.0.0.{number}:{port}" for number in range(9) for port in (7700, 7701)]
    behind_a_relay = [f"quic://{'a' * 56}@192.0.2.1:8790", "quic://192.0.2.7:7700"]
    named = ["ws://desk.example:7700", "ws://10.0.0.9:7701", "loopback:x"]

    place(Ears("a:1"), api_server).reserve(
        [greedy, behind_a_relay, named, ["ws://[2001:db8::1]:1"]]
    )

    assert api_server.hosts == ["10.0.0.0", "192.0.2.7", "10.0.0.9", "2001:db8::1", "10.0.0.1"]


def test_only_surveying_transports_report_networks() -> None:
    clever, network = Clever(), Network("none", "no NAT", (), ())
    own = place(transports=(Plain(), clever))

    assert own.survey() == []
    clever.network = network
    assert own.survey() == [network]


def test_an_identified_transport_gets_the_key() -> None:
    clever = Clever()

    prepare((Plain(), clever), KEY, ("clever:relay",))

    assert (clever.seeds, clever.relays) == ([bytes(32)], ["clever:relay"])


def test_a_relay_without_a_transport_is_refused() -> None:
    with pytest.raises(UserError, match="`plain` does not support relays") as raised:
        prepare((Plain(),), KEY, ("clever:relay",))

    assert raised.value.hint == "write `--transport websocket,quic`: QUIC does"


def shares(*addresses: str) -> dict[str, str | None]:
    return {each.name: at for each, at in assign_addresses(addresses, (Plain(), Clever()))}


def test_each_transport_gets_the_address_of_its_scheme() -> None:
    assert shares() == {"plain": None, "clever": None}
    assert shares("clever:1", "plains:2") == {"plain": "plains:2", "clever": "clever:1"}


def test_an_address_of_no_scheme_is_for_all() -> None:
    assert shares("host:7700") == {"plain": "host:7700", "clever": "host:7700"}


def test_a_transport_without_an_address_does_not_listen() -> None:
    assert shares("clever:1") == {"clever": "clever:1"}


@pytest.mark.parametrize(
    ("addresses", "error"),
    [
        (("ftp://1",), "`ftp://1` is not an address of `plain`, `clever`"),
        (("plain:1", "plains:2"), "`plain:1` and `plains:2` are both for `plain`"),
    ],
)
def test_unknown_schemes_and_duplicate_addresses_are_refused(
    addresses: tuple[str, ...], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        assign_addresses(addresses, (Plain(), Clever()))


async def test_a_given_transport_listens_at_the_option(tmp_path: Path) -> None:
    clever = Clever()
    options = NodeOptions(
        state=tmp_path, listen=("clever:5",), advertise=("clever:proxy",), relays=("clever:r",)
    )

    async with open_endpoints(options, KEY, clever) as own:
        assert own.addresses == ("clever:proxy", "clever:here")

    assert (clever.listened, clever.relays, clever.seeds) == (
        ["clever:5"],
        ["clever:r"],
        [KEY.seed],
    )
    assert set(own.schemes) == {"clever"}


async def test_a_broken_transport_stops_only_a_node_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "meshllm_quic", None)
    monkeypatch.setitem(sys.modules, "meshllm_quic.transport", None)
    options = NodeOptions(state=tmp_path, listen=("ws://127.0.0.1:0",))

    async with open_endpoints(options, KEY, None) as own:
        assert [each.name for each in own.transports] == ["websocket"]

    assert "Transport `quic` of" in caplog.text
    named = replace(options, transports=("websocket", "quic"))
    with pytest.raises(PluginError, match=r"`quic` of .* is broken"):
        async with open_endpoints(named, KEY, None):
            pass
