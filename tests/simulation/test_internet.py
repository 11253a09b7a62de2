"""The simulated internet behaves like real kernels and networks."""

import asyncio
import errno
import socket

import pytest

from meshllm.testing.clock import run_virtual
from tests.simulation.ears import ear, seen_as, virtual
from tests.simulation.internet import Internet, measure
from tests.simulation.nat import FULL_CONE, PORT_RESTRICTED, SYMMETRIC
from tests.simulation.wires import Line

PORT = 5000


@virtual
async def test_homes_share_their_private_addresses() -> None:
    internet = Internet()
    home, other = internet.nat(FULL_CONE), internet.nat(FULL_CONE)
    one, two = await ear(home.host("one"), PORT), await ear(other.host("two"), PORT)

    one.send(two.address, b"to myself")
    one.send(("192.168.1.77", PORT))
    one.send(("10.0.0.1", PORT))
    await asyncio.sleep(1)

    assert one.said == [b"to myself"]
    assert two.heard == []
    assert internet.dropped == {"unreachable": 2}
    assert home.outward.datagrams == 1


@pytest.mark.parametrize(("version", "longest"), [(4, 1472), (6, 1452)])
@virtual
async def test_oversized_packets_are_silently_dropped(version: int, longest: int) -> None:
    internet = Internet(is_dual=True)
    one, two = [await ear(internet.host(name, versions=(version,))) for name in ("one", "two")]

    one.send(two.address, bytes(longest + 1))
    one.send(two.address, bytes(longest))
    await asyncio.sleep(1)

    assert list(map(len, two.said)) == [longest]
    assert internet.dropped == {"too large": 1}


@virtual
async def test_the_smallest_mtu_counts() -> None:
    internet = Internet()
    tunnel = internet.nat(FULL_CONE, Line(mtu=1400))
    one, two = await ear(tunnel.host("one")), await ear(internet.host("two"))

    one.send(two.address, bytes(1373))
    one.send(two.address, bytes(1372))
    await asyncio.sleep(1)

    assert list(map(len, two.said)) == [1372]


@virtual
async def test_roaming_keeps_the_socket_and_changes_the_address() -> None:
    internet = Internet()
    home, cafe = internet.nat(PORT_RESTRICTED), internet.nat(SYMMETRIC)
    laptop = home.host("laptop")
    one, server = await ear(laptop), await ear(internet.host("server"))
    (old,) = await seen_as([server], one)
    server.send(old, b"under way")

    laptop.move(cafe)
    (new,) = await seen_as([server], one)
    server.send(old, b"too late")
    server.send(new, b"found")
    await asyncio.sleep(1)

    assert (old[0], new[0]) == (home.public, cafe.public)
    assert one.said == [b"found"]
    assert internet.dropped == {"unreachable": 2}


@virtual
async def test_packets_in_flight_do_not_follow_a_roaming_host() -> None:
    internet = Internet(delay_s=0.1)
    laptop = internet.host("laptop", Line(delay_s=0.1))
    one, server = await ear(laptop), await ear(internet.host("server"))

    server.send(one.address)
    await asyncio.sleep(0.15)
    laptop.move(internet)
    await asyncio.sleep(1)

    assert one.heard == []
    assert internet.dropped == {"unreachable": 1}


@virtual
async def test_a_host_without_a_segment_cannot_send() -> None:
    internet = Internet()
    laptop, server = internet.host("laptop"), await ear(internet.host("server"))
    one = await ear(laptop)

    laptop.leave()
    one.send(server.address)
    assert one.socket.hosts() == []
    laptop.join(internet)
    one.send(server.address, b"back")
    await asyncio.sleep(1)

    assert server.heard == [(b"back", one.address)]
    assert internet.dropped == {"no route": 1}


@pytest.mark.parametrize("blocks", ["host", "router"])
@virtual
async def test_blocked_udp_neither_leaves_nor_arrives(blocks: str) -> None:
    internet = Internet()
    home = internet.nat(FULL_CONE)
    inside = home.host("inside")
    one, server = await ear(inside), await ear(internet.host("server"))
    (outside,) = await seen_as([server], one)
    blocker = inside if blocks == "host" else home

    blocker.block_udp()
    one.send(server.address)
    server.send(outside)
    await asyncio.sleep(1)
    blocker.block_udp(False)
    server.send(outside, b"open")
    await asyncio.sleep(1)

    assert one.said == [b"open"]
    assert len(server.heard) == 1
    assert internet.dropped == {"blocked": 2}


@virtual
async def test_a_machine_without_power_is_silent_and_may_come_back() -> None:
    internet = Internet()
    machine, server = internet.host("machine"), await ear(internet.host("server"))
    one = await ear(machine, PORT)

    machine.stop()
    one.send(server.address)
    server.send((machine.hosts()[0], PORT))
    await asyncio.sleep(1)
    again = await ear(machine, PORT)
    server.send(again.address, b"back")
    await asyncio.sleep(1)

    assert (one.heard, server.heard) == ([], [])
    assert again.said == [b"back"]
    assert internet.dropped == {"no socket": 1}


@virtual
async def test_a_relay_with_two_addresses_answers_from_the_first() -> None:
    internet = Internet()
    relay, client = internet.host("relay"), await ear(internet.host("client"))
    relay.join(internet)
    first, second = relay.hosts()
    on_all, on_second = await ear(relay), await ear(relay, bound=second)

    for each in (on_all, on_second):
        client.send((second, each.socket.port))
        each.send(client.address)
    await asyncio.sleep(1)

    assert (len(on_all.heard), len(on_second.heard)) == (1, 1)
    assert client.sources == [(first, on_all.socket.port), (second, on_second.socket.port)]


@virtual
async def test_a_host_on_two_segments_uses_the_right_interface() -> None:
    internet = Internet()
    home = internet.nat(FULL_CONE)
    printer = await ear(home.host("printer"))
    server, laptop = await ear(internet.host("server")), internet.host("laptop")
    laptop.join(home)
    one = await ear(laptop)

    public, private = await seen_as([server, printer], one)

    assert (public[0], private[0]) == tuple(laptop.hosts())


@virtual
async def test_a_machine_reaches_itself_with_large_datagrams() -> None:
    host = Internet(is_dual=True).host("host")
    one, two = await ear(host), await ear(host)

    for own in ("127.0.0.1", "::1", *host.hosts()):
        one.send((own, two.socket.port), bytes(16000))
    await asyncio.sleep(1)

    assert [each[0] for each in two.sources] == ["127.0.0.1", "::1", *host.hosts()]


@virtual
async def test_a_bound_socket_sends_from_its_own_address() -> None:
    internet = Internet(is_dual=True)
    host, server = internet.host("host"), internet.host("server")
    ipv4, ipv6 = server.hosts()
    ears = await ear(server, PORT), await ear(host, bound="127.0.0.1"), await ear(host, bound="::1")

    for end in (*ears[1:], await ear(host, bound=host.hosts()[0])):
        end.send((ipv6, PORT))
    ears[1].send((ipv4, PORT))
    await asyncio.sleep(1)

    assert ears[0].heard == []
    assert internet.dropped == {"no route": 4}


@virtual
async def test_a_port_is_allocated_once() -> None:
    host = Internet().host("host")
    (own,) = host.hosts()
    first = await ear(host, PORT, own)
    beside = await ear(host, PORT, "127.0.0.1")

    for bound in (own, None):
        with pytest.raises(OSError, match="in use") as caught:
            await ear(host, PORT, bound)
        assert caught.value.errno == errno.EADDRINUSE
    with pytest.raises(OSError, match="not an address of `host`"):
        await ear(host, 0, "20.0.99.99")
    for each in (first, beside):
        each.socket.close()

    assert (await ear(host, PORT)).socket.port == PORT
    assert (await ear(host)).socket.port != (await ear(host)).socket.port


@virtual
async def test_names_are_those_of_hosts() -> None:
    internet = Internet(is_dual=True)
    host, relay = internet.host("host"), internet.host("relay")

    assert await host.resolve("relay", 7) == [(each, 7) for each in relay.hosts()]
    assert await host.resolve("::1", 7) == [("::1", 7)]
    with pytest.raises(socket.gaierror, match="nobody"):
        await host.resolve("nobody", 7)
    with pytest.raises(ValueError, match="relay"):
        internet.host("relay")


@virtual
async def test_datagrams_of_one_moment_come_together_and_in_order() -> None:
    internet = Internet(delay_s=0.05)
    one, two = await ear(internet.host("one")), await ear(internet.host("two"))

    one.socket.send([b"aa", b"bb", b"c"], two.address)
    one.send(two.address, b"d")
    await asyncio.sleep(1)

    assert len(two.batches) == 1
    assert two.said == [b"aa", b"bb", b"c", b"d"]
    assert {each.time for each in internet.capture} == {0.05}


@pytest.mark.parametrize("batch", [[b"a", b"bb"], [b"aa", b"b", b"b"]])
@virtual
async def test_an_invalid_gso_batch_fails_the_test(batch: list[bytes]) -> None:
    one = await ear(Internet().host("one"))

    with pytest.raises(AssertionError, match="batch"):
        one.socket.send(batch, ("20.0.0.9", 1))


@virtual
async def test_a_closed_socket_delivers_nothing() -> None:
    internet = Internet(delay_s=0)
    one, two = await ear(internet.host("one")), await ear(internet.host("two"))

    one.send(two.address)  # it has arrived, and waits for the event loop
    two.socket.close()
    two.socket.close()
    await asyncio.sleep(1)

    assert two.heard == []
    assert len(internet.capture) == 1


@virtual
async def test_the_path_between_two_hosts_may_be_cut_or_slow() -> None:
    internet = Internet(delay_s=0.01)
    home, other = internet.nat(FULL_CONE), internet.nat(FULL_CONE)
    one, two = await ear(home.host("one")), await ear(other.host("two"), PORT)
    relay = await ear(internet.host("relay"))
    await seen_as([relay], two)

    internet.line_between(home, other, Line(loss=1))
    one.send((other.public, PORT))
    one.send(relay.address)
    await asyncio.sleep(1)
    internet.line_between(home, other, Line(delay_s=0.5))
    one.send((other.public, PORT))
    await asyncio.sleep(1)

    assert internet.dropped == {"lost": 1}
    assert len(relay.heard) == 2
    assert internet.capture[-1].time == pytest.approx(2.5, abs=0.01)


@virtual
async def test_the_capture_tells_direct_from_relayed() -> None:
    internet = Internet(delay_s=0.01)
    hosts = [internet.host(name) for name in ("one", "two", "relay")]
    one, two, relay = [await ear(host) for host in hosts]

    one.send(relay.address, b"\x22 by the relay")
    await asyncio.sleep(1)
    relay.send(two.address, relay.said[0])
    await asyncio.sleep(1)
    one.send(two.address, b"\x40 direct")
    one.send(two.address, b"")
    await asyncio.sleep(1)

    direct = internet.seen(hosts[0], hosts[1])
    assert [(each.time, each.size, each.first) for each in direct] == [
        (2.01, 8, 0x40),
        (2.01, 0, -1),
    ]
    assert [each.first for each in internet.seen(hosts[2], hosts[1])] == [0x22]
    assert internet.seen(hosts[0], hosts[2], since=1.0) == []
    assert measure(direct) == measure(internet.capture[-2:])
    assert (measure(direct).datagrams, measure(direct).bytes) == (2, 8)


async def talk(seed: int, is_busy: bool = False) -> Internet:
    """Let two homes talk over a lossy line, and perhaps others too."""
    internet = Internet(seed)
    bad = Line(delay_s=0.01, jitter_s=0.02, loss=0.2, duplicate=0.1)
    one = await ear(internet.nat(SYMMETRIC, bad).host("one"))
    two = await ear(internet.host("two"))
    busy = await ear(internet.nat(SYMMETRIC, bad).host("busy"))
    for number in range(50):
        one.send(two.address, bytes([number]))
        if is_busy:
            busy.send(two.address)
        await asyncio.sleep(0.001)
    await asyncio.sleep(1)
    return internet


def test_the_same_seed_gives_the_same_capture() -> None:
    first, second, other = (run_virtual(talk(seed)) for seed in (1, 1, 2))

    assert first.capture == second.capture
    assert first.capture != other.capture


def test_unrelated_traffic_does_not_change_random_draws() -> None:
    alone, among = (run_virtual(talk(1, is_busy)) for is_busy in (False, True))

    assert alone.capture == [each for each in among.capture if each.sender == "one"]
    assert len(alone.capture) < len(among.capture)


@virtual
async def test_each_of_two_copies_has_its_own_end() -> None:
    internet = Internet(delay_s=0)
    one = await ear(internet.host("one", Line(duplicate=1)))
    two = internet.host("two")

    one.send((two.hosts()[0], PORT))
    await asyncio.sleep(1)

    assert internet.dropped == {"no socket": 2}


@virtual
async def test_a_line_may_get_worse() -> None:
    internet = Internet(delay_s=0)
    host = internet.host("one")
    one, two = await ear(host), await ear(internet.host("two"))

    host.interfaces[0].line = Line(delay_s=0.3)
    one.send(two.address)
    await asyncio.sleep(1)

    assert internet.capture[0].time == 0.3


@virtual
async def test_a_host_may_lie_about_its_source() -> None:
    internet = Internet()
    liar, server = internet.host("liar"), await ear(internet.host("server"))
    victim = await ear(internet.host("victim"))

    liar.send(b"lie", victim.address, server.address)
    server.send(victim.address, b"answer")
    await asyncio.sleep(1)

    assert server.heard == [(b"lie", victim.address)]
    assert internet.capture[0].sender == "liar"
