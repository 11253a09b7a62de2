"""Two nodes and a relay on a simulated internet."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshllm.transport.contract import Path
from meshllm_quic.link.link import QuicLink
from meshllm_quic.net.network import Address, Socket
from meshllm_quic.relay.relay import Relay
from meshllm_quic.transport import QuicTransport
from meshllm_quic.wire.packets import AddressReply, AddressRequest, decode
from tests.simulation.hosts import Host
from tests.simulation.internet import Internet

PORT = 8790
KEYS = b"a" * 32, b"b" * 32
"""Key seeds of the dialling and the listening node."""


class PublicRelay:
    """A public relay with its observer port."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._relay = Relay(lambda _: True, observer_port=PORT + 1)
        self._sockets: list[Socket] = []

    @property
    def address(self) -> str:
        return f"quic://{self.host.hosts()[0]}:{PORT}"

    async def open(self) -> None:
        self._sockets = [
            await self.host.open(None, PORT, self._receive),
            await self.host.open(None, PORT + 1, self._observe),
        ]

    def _receive(self, batch: Sequence[tuple[bytes, Address]]) -> None:
        now = asyncio.get_running_loop().time()
        for data, source in batch:
            for answer, to in self._relay.receive(decode(data), source, len(data), now):
                self._sockets[0].send([answer], to)

    def _observe(self, batch: Sequence[tuple[bytes, Address]]) -> None:
        for data, source in batch:
            if isinstance(ask := decode(data), AddressRequest):
                self._sockets[1].send([AddressReply(ask.nonce, source).encode()], source)


@dataclass
class Nodes:
    """Two linked nodes: `one` has dialled `other`."""

    internet: Internet
    relay: PublicRelay
    hosts: tuple[Host, Host]
    transports: tuple[QuicTransport, QuicTransport]
    one: QuicLink
    other: QuicLink
    address: str
    """The dialled address."""

    @property
    def paths(self) -> set[Path]:
        return {link.statistics.path for link in (self.one, self.other)}

    async def until(self, path: Path, within_s: float = 20.0) -> float:
        """Wait until both ends use this path; return how long that took."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while self.paths != {path}:
            if clock() > began + within_s:
                raise AssertionError(f"{self.paths}, {self.one.statistics.path_reason}")
            await asyncio.sleep(0.01)
        return clock() - began


@asynccontextmanager
async def relayed(a: str, b: str, internet: Internet | None = None) -> AsyncIterator[Nodes]:
    """Link two nodes behind NATs of these kinds, through a relay."""
    internet = internet or Internet(seed=1)
    relay = PublicRelay(internet.host("relay"))
    await relay.open()
    hosts = internet.behind(a).host("a"), internet.behind(b).host("b")
    transports = QuicTransport(hosts[0]), QuicTransport(hosts[1])
    for transport, key in zip(transports, KEYS, strict=True):
        transport.identify(key)
    transports[1].add_relay(relay.address)
    async with transports[1].listen() as listener:
        await asyncio.sleep(1.0)
        (address,) = (each for each in listener.addresses if "@" in each)
        one, other = await asyncio.gather(
            transports[0].dial(address), anext(aiter(listener.links()))
        )
        assert isinstance(one, QuicLink)
        assert isinstance(other, QuicLink)
        yield Nodes(internet, relay, hosts, transports, one, other, address)
        await asyncio.gather(one.close(), other.close())


async def echo(one: QuicLink, other: QuicLink, size: int = 5000) -> None:
    """Send a message there and back."""
    await one.send([bytes(size)])
    _, message = await other.receive()
    await other.send([message])
    await one.receive()
