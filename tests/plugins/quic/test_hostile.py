"""Hostile datagrams to a UDP port: no crash, no unbounded memory, no amplification."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from random import Random

import pytest
from aioquic.quic.rangeset import RangeSet
from aioquic.tls import Epoch

from meshllm.transport.contract import Path
from meshllm_quic.base.identity import Identity
from meshllm_quic.link.admission import LIMITS
from meshllm_quic.link.connection import OPEN_S
from meshllm_quic.link.endpoint import Endpoint
from meshllm_quic.link.link import QuicLink
from meshllm_quic.link.machine import MAX_CRYPTO_BYTES, PEER, ConnectionMachine
from meshllm_quic.link.table import MAX_CLOSED
from meshllm_quic.net.network import Address, DatagramNetwork, Receive, Refused, Socket
from meshllm_quic.transport import QuicTransport
from meshllm_quic.wire.packets import (
    AddressReply,
    AddressRequest,
    Cookie,
    Packet,
    Probe,
    ProbeReply,
    Register,
    Registered,
    Relayed,
    UnknownTag,
)
from tests.plugins.quic.world import echo
from tests.simulation.ears import virtual
from tests.simulation.hosts import Host
from tests.simulation.internet import Internet

IN_THE_GATE = 2_000
BATCH = 64
MEMORY_BYTES = 24 * 1024 * 1024
"""Upper bound of the memory of half-open connections and of other state."""

Junk = Callable[[Random, list[bytes]], bytes]


class Tapped:
    """A network that records received datagrams and counts sent ones."""

    def __init__(self, network: DatagramNetwork) -> None:
        self._network = network
        self.heard: list[bytes] = []
        self.sent_bytes = 0

    async def open(
        self, host: str | None, port: int, receive: Receive, refused: Refused | None = None
    ) -> Socket:
        def hear(batch: Sequence[tuple[bytes, Address]]) -> None:
            self.heard += [datagram for datagram, _ in batch]
            receive(batch)

        opened = await self._network.open(host, port, hear)
        send = opened.send

        def count(datagrams: Sequence[bytes], to: Address) -> None:
            self.sent_bytes += sum(map(len, datagrams))
            if not to[0].startswith("21."):  # unused addresses
                send(datagrams, to)

        opened.send = count  # type: ignore[method-assign]
        return opened

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        return await self._network.resolve(host, port)


class Siege:
    """A node under attack, with one link to a peer."""

    def __init__(
        self, network: Tapped, endpoint: Endpoint, friend: QuicLink, link: QuicLink
    ) -> None:
        self.network = network
        self.endpoint = endpoint
        self.friend, self.link = friend, link
        self.random = Random(1)

    async def throw(self, junk: Iterator[bytes]) -> None:
        """Send datagrams from random addresses."""
        while batch := list(islice(junk, BATCH)):
            self.endpoint._receive([(each, self._somewhere()) for each in batch])
            await asyncio.sleep(0.001)

    def _somewhere(self) -> Address:
        return f"21.0.{self.random.randrange(256)}.{self.random.randrange(1, 255)}", 5000


@asynccontextmanager
async def siege() -> AsyncIterator[Siege]:
    internet = Internet(seed=1)
    network, friend_host = Tapped(internet.host("node")), internet.host("friend")
    transport = QuicTransport(network)
    async with transport.listen() as listener:
        friend = await QuicTransport(friend_host).dial(listener.address)
        link = await anext(aiter(listener.links()))
        assert transport._endpoint is not None
        assert isinstance(friend, QuicLink)
        assert isinstance(link, QuicLink)
        await asyncio.sleep(1.0)
        await echo(friend, link, 50_000)
        yield Siege(network, transport._endpoint, friend, link)
        await asyncio.gather(friend.close(), link.close())


def initial(random: Random, ahead: int = 0) -> bytes:
    """Return the first datagram of a client, whose handshake begins so many bytes ahead."""
    machine = ConnectionMachine(Identity(random.randbytes(32)).configure(is_client=True))
    machine.connect(PEER, now=0.0)
    sender = machine._crypto_streams[Epoch.INITIAL].sender
    sender._pending = RangeSet(
        [range(each.start + ahead, each.stop + ahead) for each in sender._pending]
    )
    sender._buffer = bytearray(ahead) + sender._buffer
    sender._buffer_stop += ahead
    return machine.datagrams_to_send(now=0.0)[0][0]


def mutated(random: Random, heard: list[bytes]) -> bytes:
    datagram = bytearray(random.choice(heard))
    for _ in range(random.randint(1, 4)):
        datagram[random.randrange(len(datagram))] = random.randrange(256)
    return bytes(datagram)


def truncated(random: Random, heard: list[bytes]) -> bytes:
    datagram = random.choice(heard)
    return datagram[: random.randrange(len(datagram) + 1)]


def replayed(random: Random, heard: list[bytes]) -> bytes:
    return random.choice(heard)


def noise(random: Random, _: list[bytes]) -> bytes:
    return random.randbytes(random.randrange(1500))


def forged(random: Random, heard: list[bytes]) -> bytes:
    address = f"21.0.0.{random.randrange(1, 255)}", random.randrange(65536)
    path = next((each[1:9] for each in reversed(heard) if each[0] in (0x27, 0x28)), bytes(8))
    quic = next(each for each in heard if each[0] & 0x40)
    packets: list[Packet] = [
        AddressRequest(random.randbytes(8)),
        AddressReply(random.randbytes(8), address),
        Relayed(random.randbytes(12), random.randbytes(12), quic[:1200]),
        Register(random.randbytes(32), bytes(8), random.randbytes(16), bytes(64)),
        Cookie(random.randbytes(8), random.randbytes(16)),
        Registered(random.randbytes(8), address, 60, 9),
        UnknownTag(random.randbytes(12)),
        Probe(path, random.randbytes(8), random.randbytes(16), random.randrange(33, 1500)),
        ProbeReply(path, random.randbytes(8), address, 33, random.randbytes(16)),
    ]
    return random.choice(packets).encode()


def stream(junk: Junk, random: Random, heard: list[bytes], count: int) -> Iterator[bytes]:
    return (junk(random, heard) for _ in range(count))


async def survive(junk: Junk, count: int) -> None:
    """Send ``count`` datagrams, and check that nothing has changed."""
    async with siege() as here:
        heard = [each for each in here.network.heard if each]
        route = here.friend.statistics.path
        tracemalloc.start()
        before, sent = tracemalloc.get_traced_memory()[0], here.network.sent_bytes

        await here.throw(stream(junk, here.random, heard, count))
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()

        assert grown < MEMORY_BYTES
        assert here.network.sent_bytes - sent < 3 * 600 * count
        assert len(here.endpoint.table) <= LIMITS.total + 1
        await asyncio.sleep(2 * OPEN_S)
        assert len(here.endpoint.table) == 1
        assert len(here.endpoint.table._closed) <= MAX_CLOSED
        await echo(here.friend, here.link)
        assert here.friend.statistics.path is here.link.statistics.path is route is Path.DIRECT


@pytest.mark.parametrize("junk", [mutated, truncated, replayed, noise, forged])
@virtual
async def test_hostile_datagrams_do_no_harm(junk: Junk) -> None:
    await survive(junk, IN_THE_GATE)


@pytest.mark.slow
@pytest.mark.parametrize("junk", [mutated, truncated, replayed, noise, forged])
@virtual
async def test_a_million_datagrams_do_no_harm(junk: Junk) -> None:
    await survive(junk, 200_000)


@pytest.mark.parametrize("ahead", [0, MAX_CRYPTO_BYTES - 1024, 500_000])
@virtual
async def test_a_flood_of_clients_uses_bounded_memory(ahead: int) -> None:
    async with siege() as here:
        clients = [initial(here.random, ahead) for _ in range(2 * LIMITS.total)]
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]

        sent = here.network.sent_bytes
        await here.throw(iter(clients))
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()

        assert grown < MEMORY_BYTES / 3  # most are sent a Retry
        assert len(here.endpoint.table) <= LIMITS.total + 1
        assert here.network.sent_bytes - sent < 3 * sum(map(len, clients))
        await asyncio.sleep(2 * OPEN_S)
        assert len(here.endpoint.table) == 1
        await echo(here.friend, here.link)


@virtual
async def test_amplification_towards_silent_clients_is_at_most_three() -> None:
    async with siege() as here:
        datagrams = [initial(here.random) for _ in range(300)]
        sent = here.network.sent_bytes

        await here.throw(iter(datagrams))
        await asyncio.sleep(20.0)

        assert here.network.sent_bytes - sent < 3 * sum(map(len, datagrams)) + 5_000
        assert len(here.endpoint.table) == 1
        assert len(here.endpoint.admission) == 0


@virtual
async def test_a_client_connects_during_a_flood() -> None:
    internet = Internet(seed=1)
    node, near = internet.host("node"), internet.host("near")
    transport = QuicTransport(node)
    async with transport.listen() as listener:
        endpoint = transport._endpoint
        assert endpoint is not None
        random = Random(1)
        endpoint._receive([(initial(random), (f"21.0.0.{n}", 1)) for n in range(1, 60)])

        link = await QuicTransport(near).dial(listener.address)

        await link.close()


@virtual
async def test_a_replayed_datagram_does_not_change_the_route() -> None:
    async with siege() as here:
        thief: Host = here.network._network  # type: ignore[assignment]  # one of its addresses
        quic = [each for each in here.network.heard if each[0] & 0x40][-20:]
        elsewhere = "22.0.0.9", 4444

        for datagram in quic:
            here.endpoint._receive([(datagram, elsewhere)])
            await asyncio.sleep(0.2)

        assert thief
        route = here.link._wire.route  # type: ignore[attr-defined]
        assert route.address != elsewhere
        await echo(here.friend, here.link)
