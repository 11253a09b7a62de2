"""Which other nodes a client is told."""

import pytest

from meshllm.names import NodeId
from meshllm.protocol.trust.fallbacks import (
    MAX_FALLBACK_ADDRESSES,
    MAX_FALLBACKS,
    Fallback,
    fallbacks_for,
)
from tests.builders.identities import CLIENT, FOUNDER, LAST

HOME = "ws://192.168.1.5:7700"
PUBLIC = "ws://8.8.8.8:7700"


def told(host: str, *addresses: str) -> tuple[str, ...]:
    """Return which addresses of a node a client from ``host`` is told."""
    nodes = [Fallback(FOUNDER.node, b"", addresses)]
    return tuple(
        at for fallback in fallbacks_for(CLIENT.node, host, nodes) for at in fallback.addresses
    )


@pytest.mark.parametrize(
    "address",
    [
        PUBLIC,
        "ws://[2a00:1450::8]:7700",
        "wss://mesh.example.org/fallback",
        "quic://somenode@9.9.9.9:8790",
        "loopback:attic",
    ],
)
def test_public_addresses_and_names_are_told_to_every_client(address: str) -> None:
    assert told("", address) == (address,)
    assert told("203.0.113.9", address) == (address,)


@pytest.mark.parametrize(
    ("address", "near"),
    [
        (HOME, "192.168.7.9"),
        ("ws://10.1.2.3:7700", "10.9.9.9"),
        ("ws://172.20.0.2:7700", "172.17.0.1"),
        ("ws://100.100.1.2:7700", "100.64.0.1"),
        ("ws://169.254.3.4:7700", "169.254.1.1"),
        ("ws://127.0.0.1:7700", "127.0.0.1"),
        ("ws://[::1]:7700", "::1"),
        ("ws://[fd00::7]:7700", "fd12::1"),
        ("ws://[fe80::7]:7700", "fe80::1"),
        ("ws://[fe80::7]:7700", "fe80::1%eth0"),
        ("ws://[::ffff:192.168.1.5]:7700", "::ffff:192.168.7.9"),
        ("quic://somenode@192.168.1.5:8790", "192.168.7.9"),
    ],
)
def test_addresses_of_a_home_network_are_told_to_clients_in_such_a_one(
    address: str, near: str
) -> None:
    far = {"", "8.8.4.4", "2a00:1450::9", "127.0.0.1", "192.168.1.9", "10.0.0.1"} - {near}

    assert told(near, address) == (address,)
    assert {host for host in far if told(host, address)} <= {"192.168.1.9", "10.0.0.1"}
    assert told("", address) == told("8.8.4.4", address) == told("name", address) == ()


@pytest.mark.parametrize(
    "address",
    ["ws://nas:1", "ws://nas.lan:1", "wss://NAS.Home.arpa", "quic://node@nas.local.:8790"],
)
def test_a_name_of_a_home_network_is_told_to_clients_in_any_such_one(address: str) -> None:
    assert told("192.168.1.9", address) == told("fd12::1", address) == (address,)
    for host in ("", "8.8.4.4", "127.0.0.1", "::1", "name"):
        assert told(host, address, PUBLIC) == (PUBLIC,)


@pytest.mark.parametrize("address", ["ws://localhost:5432", "ws://a.localhost:1"])
def test_names_of_this_machine_are_told_to_clients_on_it(address: str) -> None:
    assert told("127.0.0.1", address) == (address,)
    assert told("192.168.1.9", address) == told("", address) == told("8.8.4.4", address) == ()


def test_a_client_of_another_home_network_is_told_nothing_of_this_one() -> None:
    assert told("10.0.0.1", HOME, PUBLIC) == (PUBLIC,)
    assert told("127.0.0.1", HOME) == ()  # as a proxy on the machine of the node shows all clients


@pytest.mark.parametrize(
    "address",
    ["", "ws://", "ws://[", "ws://:1", "ws://0.0.0.0:1", "ws://224.0.0.1:1", "ws://192.0.2.1:1"],
)
def test_an_address_that_cannot_be_dialled_is_not_told(address: str) -> None:
    assert not any(told(host, address) for host in ("", "192.168.1.9", "0.0.0.0", "8.8.8.8"))


def node(number: int, *addresses: str) -> Fallback:
    return Fallback(NodeId(bytes([number]) * 32), b"tag", addresses)


def test_a_client_is_told_few_nodes_with_few_addresses() -> None:
    nodes = [node(number, *[PUBLIC] * 16) for number in range(64)]

    fallbacks = fallbacks_for(CLIENT.node, "", nodes)

    assert len(fallbacks) == MAX_FALLBACKS
    assert {len(each.addresses) for each in fallbacks} == {MAX_FALLBACK_ADDRESSES}
    assert {each.machine for each in fallbacks} == {b"tag"}
    assert len({each.node for each in fallbacks}) == MAX_FALLBACKS


def test_nodes_that_the_client_may_not_know_take_no_place() -> None:
    shown = Fallback(LAST.node, b"", (PUBLIC,))

    assert fallbacks_for(CLIENT.node, "", [*(node(at, HOME) for at in range(60)), shown]) == (
        shown,
    )


def test_clients_are_told_different_nodes_first() -> None:
    nodes = [node(number, PUBLIC) for number in range(8)]

    firsts = {fallbacks_for(NodeId(bytes([at]) * 32), "", nodes)[0] for at in range(100, 200)}

    assert firsts == set(nodes)
