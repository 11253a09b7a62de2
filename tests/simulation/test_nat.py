"""NATs behave as RFC 4787 defines for their type."""

import asyncio
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from tests.simulation.ears import ear, seen_as, virtual
from tests.simulation.internet import Internet
from tests.simulation.nat import (
    FULL_CONE,
    KINDS,
    PORT_RESTRICTED,
    RESTRICTED,
    SYMMETRIC,
    Behaviour,
    Kind,
    Table,
)
from tests.simulation.wires import Dropped

PORT = 5000
INSIDE = ("192.168.1.2", PORT)
SERVER, OTHER = ("20.0.0.9", 1), ("20.0.0.9", 2)
ENDPOINT, ADDRESS, ADDRESS_AND_PORT = Behaviour
COMBINATIONS = [
    Kind(mapping, filtering, keeps_ports=keeps_ports)
    for mapping, filtering, keeps_ports in product(Behaviour, Behaviour, (True, False))
]


@pytest.mark.parametrize("kind", COMBINATIONS)
@virtual
async def test_mapping_behaviour_matches_the_nat_type(kind: Kind) -> None:
    internet = Internet()
    server, other = internet.host("server"), internet.host("other")
    ears = [await ear(server), await ear(server), await ear(other)]
    inside = await ear(internet.nat(kind).host("inside"), PORT)

    one, same_host, other_host = await seen_as(ears, inside)
    again = await seen_as(ears, inside)

    assert again == [one, same_host, other_host]
    assert (one == same_host) == (kind.mapping is not ADDRESS_AND_PORT)
    assert (one == other_host) == (kind.mapping is ENDPOINT)
    assert (one[1] == PORT) == kind.keeps_ports


@pytest.mark.parametrize("kind", COMBINATIONS)
@virtual
async def test_filtering_behaviour_matches_the_nat_type(kind: Kind) -> None:
    internet = Internet()
    server = internet.host("server")
    asked, same_host, other_host = (
        await ear(server), await ear(server), await ear(internet.host("other"))
    )  # fmt: skip
    inside = await ear(internet.nat(kind).host("inside"), PORT)
    (outside,) = await seen_as([asked], inside)

    asked.send(outside, b"asked")
    same_host.send(outside, b"same host")
    other_host.send(outside, b"other host")
    await asyncio.sleep(1)

    assert b"asked" in inside.said
    assert (b"same host" in inside.said) == (kind.filtering is not ADDRESS_AND_PORT)
    assert (b"other host" in inside.said) == (kind.filtering is ENDPOINT)


@virtual
async def test_unsolicited_packets_are_dropped() -> None:
    internet = Internet()
    home = internet.nat(FULL_CONE)
    inside = await ear(home.host("inside"), PORT)
    stranger = await ear(internet.host("stranger"))

    stranger.send((home.public, PORT))
    await asyncio.sleep(1)

    assert inside.heard == []
    assert internet.dropped == {"no mapping": 1}


# Whether two hosts reach each other when both send to the address that a third saw.
REACHES = {
    ("none", "symmetric"): True,
    ("full cone", "symmetric"): True,
    ("restricted", "symmetric"): True,
    ("restricted", "symmetric address"): True,
    ("port-restricted", "port-restricted"): True,
    ("port-restricted", "restricted"): True,
    ("port-restricted", "symmetric"): False,
    ("port-restricted", "symmetric full"): False,  # its answers leave by another port
    ("restricted", "symmetric full"): True,
    ("symmetric", "symmetric"): False,
    ("symmetric", "symmetric full"): False,
    ("symmetric full", "symmetric full"): True,
}


@pytest.mark.parametrize(("kinds", "expected"), REACHES.items())
@virtual
async def test_hole_punching_works_if_the_nats_allow_it(
    kinds: tuple[str, str], expected: bool
) -> None:
    internet = Internet()
    observer = await ear(internet.host("observer"))
    ends = [await ear(internet.behind(kind).host(str(at))) for at, kind in enumerate(kinds)]
    seen = [(await seen_as([observer], end))[0] for end in ends]
    for _ in range(3):
        for end, other in zip(ends, reversed(seen), strict=True):
            end.send(other, b"probe")
        await asyncio.sleep(1)
        for end in ends:
            for source in end.sources[-1:]:
                end.send(source, b"answer")
    await asyncio.sleep(1)

    assert all(b"answer" in end.said for end in ends) == expected


def test_outbound_traffic_keeps_a_mapping_alive() -> None:
    table = Table(RESTRICTED, "20.0.0.2", Random(1))
    outside = table.outbound(INSIDE, SERVER, now=0)

    assert table.outbound(INSIDE, SERVER, now=29) == outside
    assert table.inbound(SERVER, outside, now=58) == INSIDE
    with pytest.raises(Dropped, match="no mapping"):
        table.inbound(SERVER, outside, now=29 + 120)


def test_an_unanswered_mapping_expires_sooner() -> None:
    table = Table(FULL_CONE, "20.0.0.2", Random(1))
    outside = table.outbound(INSIDE, SERVER, now=0)

    table.inbound(OTHER, outside, now=29)

    with pytest.raises(Dropped, match="no mapping"):
        table.inbound(SERVER, outside, now=30)


def test_inbound_traffic_does_not_refresh_a_mapping() -> None:
    table = Table(PORT_RESTRICTED, "20.0.0.2", Random(1))
    outside = table.outbound(INSIDE, SERVER, now=0)

    for now in range(0, 120, 10):
        table.inbound(SERVER, outside, now)

    with pytest.raises(Dropped, match="no mapping"):
        table.inbound(SERVER, outside, now=120)


def test_a_filter_expires_while_the_mapping_lives_on() -> None:
    table = Table(PORT_RESTRICTED, "20.0.0.2", Random(1))
    outside = table.outbound(INSIDE, SERVER, now=0)

    assert table.outbound(INSIDE, OTHER, now=20) == outside

    with pytest.raises(Dropped, match="filtered"):
        table.inbound(SERVER, outside, now=31)
    assert table.inbound(OTHER, outside, now=31) == INSIDE


def test_an_expired_session_restarts_while_the_mapping_lives_on() -> None:
    table = Table(PORT_RESTRICTED, "20.0.0.2", Random(1))
    outside = table.outbound(INSIDE, SERVER, now=0)
    table.inbound(SERVER, outside, now=1)
    for now in range(0, 150, 20):
        table.outbound(INSIDE, OTHER, now)

    assert table.outbound(INSIDE, SERVER, now=150) == outside
    table.outbound(INSIDE, OTHER, now=160)

    with pytest.raises(Dropped, match="filtered"):
        table.inbound(SERVER, outside, now=180)


def test_timeouts_depend_on_the_nat_type() -> None:
    table = Table(replace(FULL_CONE, unreplied_s=1, replied_s=2), "20.0.0.2", Random(1))
    outside = table.outbound(INSIDE, SERVER, now=0)

    table.inbound(SERVER, outside, now=0.5)

    assert table.inbound(OTHER, outside, now=1.9) == INSIDE
    with pytest.raises(Dropped):
        table.inbound(OTHER, outside, now=2)


def test_an_expired_mapping_gets_another_port() -> None:
    table = Table(SYMMETRIC, "20.0.0.2", Random(1))

    old, new = (table.outbound(INSIDE, SERVER, now) for now in (0, 30))

    assert old != new
    with pytest.raises(Dropped, match="no mapping"):
        table.inbound(SERVER, old, now=30)


def test_a_taken_port_stays_with_its_owner() -> None:
    table = Table(FULL_CONE, "20.0.0.2", Random(1))
    neighbour = ("192.168.1.3", PORT)

    first = table.outbound(INSIDE, SERVER, now=0)
    second = table.outbound(neighbour, SERVER, now=1)

    assert first == ("20.0.0.2", PORT)
    assert second[1] != PORT
    assert table.inbound(SERVER, first, now=2) == INSIDE
    assert table.inbound(SERVER, second, now=2) == neighbour


def test_the_port_of_an_expired_mapping_is_free() -> None:
    table = Table(FULL_CONE, "20.0.0.2", Random(1))
    neighbour = ("192.168.1.3", PORT)
    table.outbound(INSIDE, SERVER, now=0)

    outside = table.outbound(neighbour, SERVER, now=30)
    back = table.outbound(INSIDE, SERVER, now=30)

    assert outside == ("20.0.0.2", PORT)
    assert back[1] != PORT
    assert table.inbound(SERVER, outside, now=30) == neighbour
    assert table.inbound(SERVER, back, now=30) == INSIDE


def test_a_nat_without_a_free_port_drops() -> None:
    table = Table(replace(SYMMETRIC, ports=range(2000, 2010)), "20.0.0.2", Random(1))

    taken = {table.outbound(INSIDE, ("20.0.0.9", port), now=0)[1] for port in range(10)}

    assert taken == set(range(2000, 2010))
    with pytest.raises(Dropped, match="no port"):
        table.outbound(INSIDE, ("20.0.0.8", 1), now=0)


@pytest.mark.parametrize("is_hairpin", [False, True])
@virtual
async def test_hairpinning_depends_on_the_nat_type(is_hairpin: bool) -> None:
    internet = Internet()
    home = internet.nat(replace(PORT_RESTRICTED, is_hairpin=is_hairpin))
    one, two = await ear(home.host("one")), await ear(home.host("two"))
    observer = await ear(internet.host("observer"))
    (one_outside,), (two_outside,) = await seen_as([observer], one), await seen_as([observer], two)

    one.send(two_outside, b"opens the filter of one")
    two.send(one_outside, b"passes")
    await asyncio.sleep(1)

    assert one.heard == ([(b"passes", two_outside)] if is_hairpin else [])
    assert two.heard == []
    assert internet.dropped == ({"filtered": 1} if is_hairpin else {"no hairpin": 2})


@virtual
async def test_a_router_that_reboots_forgets() -> None:
    internet = Internet()
    home = internet.nat(FULL_CONE)
    inside, server = await ear(home.host("inside")), await ear(internet.host("server"))
    (old,) = await seen_as([server], inside)

    home.reboot(renumber=True)
    server.send(old)
    (new,) = await seen_as([server], inside)
    server.send(new, b"found")
    await asyncio.sleep(1)

    assert old[0] != new[0] == home.public
    assert inside.said == [b"found"]
    assert internet.dropped == {"unreachable": 1}


@virtual
async def test_a_reboot_may_keep_the_address() -> None:
    internet = Internet()
    home = internet.nat(SYMMETRIC)
    inside, server = await ear(home.host("inside")), await ear(internet.host("server"))
    (old,) = await seen_as([server], inside)

    home.reboot()
    server.send(old)
    (new,) = await seen_as([server], inside)

    assert old[0] == new[0]
    assert old[1] != new[1]
    assert internet.dropped == {"no mapping": 1}


@virtual
async def test_nats_nest() -> None:
    internet = Internet()
    carrier = internet.nat(SYMMETRIC, subnet="100.64.0.0/10")
    flat = carrier.nat(FULL_CONE)
    phone = await ear(flat.host("phone"), PORT)
    neighbour = await ear(carrier.host("neighbour"))
    server = await ear(internet.host("server"))

    outside, among_flats = await seen_as([server, neighbour], phone)
    server.send(outside, b"back")
    await asyncio.sleep(1)

    assert outside[0] == carrier.public
    assert among_flats == (flat.public, PORT)
    assert phone.said == [b"back"]
    assert (flat.outward.datagrams, carrier.outward.datagrams) == (2, 1)
    assert (flat.inward.bytes, carrier.inward.bytes) == (4, 4)


@virtual
async def test_an_ipv6_firewall_admits_only_solicited_packets() -> None:
    internet = Internet(is_dual=True)
    home = internet.nat(FULL_CONE)
    inside, server = home.host("inside"), internet.host("server")
    one, asked, other = await ear(inside, PORT), await ear(server), await ear(server)
    here, there = inside.hosts()[1], server.hosts()[1]

    one.send((there, asked.socket.port))
    await asyncio.sleep(1)
    asked.send((here, PORT), b"asked")
    other.send((here, PORT), b"not asked")
    await asyncio.sleep(1)

    assert asked.sources == [(here, PORT)]
    assert one.heard == [(b"asked", (there, asked.socket.port))]
    assert internet.dropped == {"filtered": 1}


@virtual
async def test_ipv6_works_through_two_routers() -> None:
    internet = Internet(is_dual=True)
    carrier = internet.nat(SYMMETRIC, subnet="100.64.0.0/10")
    inside, server = carrier.nat(FULL_CONE).host("inside"), internet.host("server")
    one, other = await ear(inside), await ear(server)
    one.send((server.hosts()[1], other.socket.port))
    await asyncio.sleep(1)

    inside.move(internet)
    other.send(other.sources[0])
    await asyncio.sleep(1)

    assert one.heard == []
    assert internet.dropped == {"unreachable": 1}


def test_every_named_kind_makes_a_place() -> None:
    internet = Internet()

    places = {name: internet.behind(name) for name in KINDS}

    assert places["none"] is internet
    assert len(set(map(id, places.values()))) == len(KINDS)
