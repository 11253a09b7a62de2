"""Real datagrams on loopback: batches, both address families, and kernel errors."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

import pytest

from meshllm_quic.net import udp
from meshllm_quic.net.network import Address, DatagramNetwork, Socket
from meshllm_quic.net.udp import UdpNetwork, UdpSocket

pytestmark = pytest.mark.socket

Batch = Sequence[tuple[bytes, Address]]
LOCAL = "127.0.0.1"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


def has_gso() -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return udp._has_gso(probe)


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
needs_gso = pytest.mark.skipif(not has_gso(), reason="this kernel has no UDP_SEGMENT")


class Heard:
    """What a socket received, batch by batch."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[Batch] = asyncio.Queue()

    async def take(self, count: int) -> list[tuple[bytes, Address]]:
        taken: list[tuple[bytes, Address]] = []
        while len(taken) < count:
            taken += await self.batches.get()
        return taken


class Watched(socket.socket):
    """A socket that counts its calls, which fail, once or always, with these errors."""

    send_calls = receive_calls = 0
    sent: tuple[int, ...] = ()
    """Bytes of each call that the kernel accepted."""

    sending: OSError | None = None
    """Raised by each call with more than one datagram."""
    sending_any: OSError | None = None
    receiving: OSError | None = None
    """Raised once."""
    once: OSError | None = None
    """Raised by one call that sends."""

    def sendmsg(self, buffers: Any, ancillary: Any = (), *where: Any) -> int:
        self.send_calls += 1
        error, self.once = self.once, None
        if error:
            raise error
        if self.sending_any or (ancillary and self.sending):
            raise self.sending_any or self.sending or OSError
        size = super().sendmsg(buffers, ancillary, *where)
        self.sent += (size,)
        return size

    def recvmsg_into(self, *arguments: Any) -> Any:
        self.receive_calls += 1
        error, self.receiving = self.receiving, None
        if error:
            raise error
        return super().recvmsg_into(*arguments)


@asynccontextmanager
async def opened(
    host: str | None = LOCAL, *, keeps_local: bool = False
) -> AsyncIterator[tuple[UdpSocket, Heard]]:
    heard = Heard()
    network = UdpNetwork(keeps_local=keeps_local)
    made = await network.open(host, 0, heard.batches.put_nowait)
    try:
        yield made, heard
    finally:
        made.close()


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Watched, UdpSocket, Heard]]:
    heard = Heard()
    kernel = Watched(fileno=udp._bind(socket.AF_INET, (LOCAL, 0)).detach())
    kernel.setblocking(False)
    made = UdpSocket(kernel, heard.batches.put_nowait)
    try:
        yield kernel, made, heard
    finally:
        made.close()


async def test_it_implements_the_network_contract() -> None:
    network: DatagramNetwork = UdpNetwork()

    made: Socket = await network.open(LOCAL, 0, lambda _: None)

    made.close()


async def test_a_datagram_arrives_with_its_source() -> None:
    async with opened() as (one, _), opened() as (other, heard):
        one.send([b"hello"], (LOCAL, other.port))

        assert await heard.take(1) == [(b"hello", (LOCAL, one.port))]


@pytest.mark.parametrize("sizes", [[1200] * 64, [1200] * 63 + [7], [1452] * 200, [16_000] * 9])
async def test_datagrams_keep_their_boundaries(sizes: list[int]) -> None:
    datagrams = [bytes([number % 251]) * size for number, size in enumerate(sizes)]

    async with opened() as (one, _), opened() as (other, heard):
        one.send(datagrams, (LOCAL, other.port))

        assert [data for data, _ in await heard.take(len(sizes))] == datagrams


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux queues ICMP errors")
@pytest.mark.parametrize("host", [LOCAL, None])
async def test_a_closed_port_is_reported_and_no_datagram_to_another_is_lost(
    host: str | None,
) -> None:
    refused = asyncio.Queue[Address]()
    one = await UdpNetwork().open(host, 0, lambda _: None, refused.put_nowait)
    async with opened() as (gone, _), opened() as (other, heard):
        gone.close()
        for _ in range(3):
            one.send([b"anybody?"], (LOCAL, gone.port))
            one.send([b"hello"], (LOCAL, other.port))
            assert await refused.get() == (LOCAL, gone.port)

        assert [data for data, _ in await heard.take(3)] == [b"hello"] * 3
    one.close()


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.EMSGSIZE, errno.ECONNREFUSED])
async def test_an_error_about_an_earlier_datagram_loses_none(number: int) -> None:
    async with watched() as (kernel, made, _), opened() as (other, heard):
        kernel.once = OSError(number, "of another address")

        made.send([b"hello"], (LOCAL, other.port))

        assert [data for data, _ in await heard.take(1)] == [b"hello"]


@needs_gso
async def test_one_system_call_carries_many_datagrams() -> None:
    async with watched() as (sender, one, _), watched() as (receiver, other, heard):
        one.send([bytes(1000)] * 128, (LOCAL, other.port))

        assert len(await heard.take(128)) == 128
        assert (sender.sent, sender.send_calls) == ((64_000, 64_000), 2)
        assert receiver.receive_calls <= 4  # two, and one that finds no datagram


@needs_gso
async def test_a_system_call_carries_no_more_than_ip_does() -> None:
    async with watched() as (kernel, one, _), opened() as (other, heard):
        one.send([bytes(16_000)] * 8, (LOCAL, other.port))
        await heard.take(8)

        assert kernel.send_calls == 2


async def test_waiting_datagrams_arrive_in_one_batch() -> None:
    async with opened() as (one, _), opened() as (other, heard):
        for number in range(10):
            one.send([bytes([number])], (LOCAL, other.port))

        assert len(await heard.batches.get()) == 10


async def test_a_flood_does_not_block_the_event_loop() -> None:
    async with opened() as (one, _), opened() as (other, heard):
        for _ in range(3 * udp.BATCH):
            one.send([b"x"], (LOCAL, other.port))

        assert len(await heard.batches.get()) < 2 * udp.BATCH


async def test_an_empty_datagram_is_ignored() -> None:
    async with opened() as (one, _), opened() as (other, heard):
        one.send([b""], (LOCAL, other.port))
        one.send([], (LOCAL, other.port))
        one.send([b"x"], (LOCAL, other.port))

        assert [data for data, _ in await heard.take(1)] == [b"x"]


@needs_ipv6
async def test_every_address_is_both_families() -> None:
    async with opened(None) as (all_, heard), opened() as (four, _), opened("::1") as (six, _):
        four.send([b"4"], (LOCAL, all_.port))
        six.send([b"6"], ("::1", all_.port))

        expected = {(b"4", (LOCAL, four.port)), (b"6", ("::1", six.port))}
        assert set(await heard.take(2)) == expected


@needs_ipv6
@pytest.mark.parametrize("host", [LOCAL, "::1"])
async def test_every_address_sends_to_both_families(host: str) -> None:
    async with opened(None) as (all_, _), opened(host) as (other, heard):
        all_.send([bytes(900)] * 3, (host, other.port))

        assert await heard.take(3) == [(bytes(900), (host, all_.port))] * 3


async def test_without_ipv6_every_address_is_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)

    async with opened(None) as (all_, heard), opened() as (other, _):
        other.send([b"4"], (LOCAL, all_.port))

        assert await heard.take(1) == [(b"4", (LOCAL, other.port))]
        assert not any(":" in host for host in all_.hosts())


async def test_disabled_ipv6_falls_back_to_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = udp._bind

    def off(family: socket.AddressFamily, address: Address) -> socket.socket:
        if family is socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        return bind(family, address)

    monkeypatch.setattr(udp, "_bind", off)

    async with opened(None) as (all_, _):
        assert LOCAL in all_.hosts()


async def test_a_port_is_bound_once() -> None:
    async with opened() as (one, _):
        with pytest.raises(OSError, match="in use"):
            await UdpNetwork().open(LOCAL, one.port, lambda _: None)
        with pytest.raises(OSError, match="in use"):
            await UdpNetwork().open(None, one.port, lambda _: None)


async def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(OSError, match="assign"):
        await UdpNetwork().open("192.0.2.77", 0, lambda _: None)


async def test_datagrams_longer_than_the_mtu_are_dropped() -> None:
    async with watched() as (kernel, one, _), opened() as (other, heard):
        one.send([bytes(66_000)], (LOCAL, other.port))
        one.send([b"x"], (LOCAL, other.port))

        assert [data for data, _ in await heard.take(1)] == [b"x"]
        assert kernel.sent == (1,)


@pytest.mark.skipif(sys.platform != "linux", reason="binds all of 127.0.0.0/8")
@pytest.mark.parametrize("host", [None, "0.0.0.0"])
async def test_an_answer_leaves_from_the_address_that_was_asked(host: str | None) -> None:
    async with opened(host, keeps_local=True) as (one, asked), opened() as (other, heard):
        for place in ((LOCAL, one.port), ("127.0.0.2", one.port)):
            other.send([b"?"], place)
            ((_, source),) = await asked.take(1)
            one.send([b"a", b"b", b"c"], source)

            assert source == (LOCAL, other.port)
            assert await heard.take(3) == [(b"a", place), (b"b", place), (b"c", place)]


@needs_ipv6
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the address")
async def test_an_answer_over_ipv6_leaves_from_the_address_that_was_asked() -> None:
    async with opened(None, keeps_local=True) as (one, asked), opened("::1") as (other, heard):
        other.send([b"?"], ("::1", one.port))
        ((_, source),) = await asked.take(1)
        one.send([b"a"], source)

        assert await heard.take(1) == [(b"a", ("::1", one.port))]


@needs_ipv6
async def test_another_family_is_dropped() -> None:
    async with watched() as (kernel, one, _):
        one.send([b"x"], ("::1", 9))
        one.send([b"x"], ("fe80::1%nowhere", 9))

        assert kernel.sent == ()


async def test_a_full_buffer_drops_and_does_not_raise() -> None:
    async with watched() as (kernel, made, _):
        kernel.sending_any = BlockingIOError(errno.EAGAIN, "full")

        made.send([b"x"] * 3, (LOCAL, 9))

        assert (kernel.sent, kernel.send_calls) == ((), 1 if has_gso() else 3)


@pytest.mark.parametrize(("error", "calls"), [(errno.EIO, 7), (errno.EINVAL, 8)])
@needs_gso
async def test_without_working_gso_datagrams_are_sent_one_by_one(error: int, calls: int) -> None:
    async with watched() as (kernel, made, _), opened() as (other, heard):
        kernel.sending = OSError(error, os.strerror(error))

        made.send([b"a", b"b", b"c"], (LOCAL, other.port))
        made.send([b"d", b"e", b"f"], (LOCAL, other.port))

        assert [data for data, _ in await heard.take(6)] == [bytes([x]) for x in b"abcdef"]
        assert kernel.send_calls == calls  # without checksums it is not tried again


async def test_gso_is_not_used_on_a_kernel_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "_UDP_SEGMENT", 9999)

    async with watched() as (kernel, one, _), opened() as (other, heard):
        one.send([b"a", b"b"], (LOCAL, other.port))

        assert len(await heard.take(2)) == 2
        assert kernel.send_calls == 2


async def test_icmp_errors_are_ignored() -> None:
    async with watched() as (kernel, made, heard), opened() as (other, _):
        kernel.receiving = ConnectionRefusedError(errno.ECONNREFUSED, "refused")

        other.send([b"x"], (LOCAL, made.port))

        assert [data for data, _ in await heard.take(1)] == [b"x"]


async def test_a_closed_port_raises_no_error() -> None:
    async with watched() as (kernel, one, _):
        async with opened() as (other, _):
            gone = LOCAL, other.port
        one.send([b"x"] * 2, gone)
        one.send([b"x"], gone)

        assert sum(kernel.sent) == 3


async def test_closing_twice_leaves_nothing_behind() -> None:
    async with opened() as (one, _), watched() as (kernel, other, heard):
        number = kernel.fileno()
        one.send([b"x"], (LOCAL, other.port))
        other.close()
        other.close()
        other.send([b"x"], (LOCAL, one.port))
        await asyncio.sleep(0)

        assert not asyncio.get_running_loop().remove_reader(number)
        assert heard.batches.empty()
        assert kernel.send_calls == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads options of Linux")
async def test_datagrams_are_never_fragmented() -> None:
    async with opened(None) as (one, _):
        assert one._socket.getsockopt(socket.IPPROTO_IP, 10) == 3
        if one._socket.family is socket.AF_INET6:
            assert one._socket.getsockopt(socket.IPPROTO_IPV6, 23) == 3


async def test_hosts_are_of_this_machine_with_loopback_last() -> None:
    async with opened(None) as (all_, _), opened() as (one, _):
        loopback = [ip_address(host).is_loopback for host in all_.hosts()]

        assert loopback == sorted(loopback)
        assert LOCAL in all_.hosts()
        assert one.hosts() == [LOCAL]


async def test_names_and_numbers_are_resolved() -> None:
    network = UdpNetwork()

    assert await network.resolve("10.1.2.3", 7700) == [("10.1.2.3", 7700)]
    assert (LOCAL, 7700) in await network.resolve("localhost", 7700)


@needs_ipv6
async def test_ipv4_mapped_addresses_are_resolved_as_ipv4() -> None:
    network = UdpNetwork()

    assert await network.resolve("2001:db8::1", 1) == [("2001:db8::1", 1)]
    assert await network.resolve("::ffff:10.1.2.3", 1) == [("10.1.2.3", 1)]


@pytest.mark.parametrize("name", ["", "a" * 70 + ".invalid", "fe80::1%nowhere"])
async def test_invalid_names_raise(name: str) -> None:
    with pytest.raises(OSError, match=r"\w"):
        await UdpNetwork().resolve(name, 1)


def test_a_link_local_address_keeps_its_zone() -> None:
    address = udp._address(("fe80::1", 7, 0, 2))

    assert address == ("fe80::1%2", 7)
    assert udp._destination(socket.AF_INET6, address) == ("fe80::1", 7, 0, 2)
