"""The two ends of a link in one event loop, for benchmarks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from time import perf_counter
from types import MappingProxyType
from typing import Protocol

from meshllm.node.net.secure import secure_accept, secure_dial
from meshllm.protocol.trust.credential import Credential, Removals, founder_credential
from meshllm.protocol.trust.handshake import LocalIdentity, Purpose
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import TicketProof
from meshllm.transport.contract import Buffer, Link, SupportsIdentity, Transport
from meshllm.transport.registry import Registry

HEADER_BYTES = 64
SOCKETS = ("ws", "quic")
"""Schemes of the transports that use sockets."""
SECURE = "+secure"
SEED = bytes(32)
"""Seed of the key of both ends."""


class End(Protocol):
    """The measured part of a link."""

    async def send(self, message: Sequence[Buffer]) -> None: ...

    async def receive(self) -> tuple[object, Buffer]: ...


@dataclass(frozen=True, slots=True)
class Ground:
    """Where the sockets of the two ends are: on this machine, or at both ends of a slow line."""

    host: str = "127.0.0.1"
    """Address of the far end, which listens."""
    far: Callable[[], AbstractContextManager[None]] = nullcontext
    near: Callable[[], AbstractContextManager[None]] = nullcontext
    """Enter its network namespace while sockets are opened."""


HERE = Ground()
Opener = Callable[[Ground], AbstractAsyncContextManager[tuple[End, End]]]


class Wire(asyncio.BufferedProtocol):
    """Length-prefixed messages over TCP, received into a buffer of the exact size."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[tuple[None, bytearray]] = asyncio.Queue()
        self.writable = asyncio.Event()
        self.header, self.body = bytearray(4), bytearray()
        self.position = 0  # in the header while the body is empty

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=1024 * 1024)
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.body or self.header)[self.position :]

    def buffer_updated(self, nbytes: int) -> None:
        self.position += nbytes
        if self.position < len(self.body or self.header):
            return
        self.position = 0
        if self.body:
            self.arrived.put_nowait((None, self.body))
            self.body = bytearray()
        else:
            self.body = bytearray(int.from_bytes(self.header, "big"))

    async def send(self, message: Sequence[Buffer]) -> None:
        self.transport.writelines([sum(map(len, message)).to_bytes(4, "big"), *message])
        await self.writable.wait()

    async def receive(self) -> tuple[None, bytearray]:
        return await self.arrived.get()


@asynccontextmanager
async def open_tcp(ground: Ground) -> AsyncIterator[tuple[End, End]]:
    """Open a connection."""
    loop = asyncio.get_running_loop()
    far = Wire()
    with ground.far():
        listening = await loop.create_server(lambda: far, ground.host, 0)
    async with listening as server:
        with ground.near():
            _, near = await loop.create_connection(Wire, *server.sockets[0].getsockname())
        await far.writable.wait()
        yield near, far
        near.transport.close()


@asynccontextmanager
async def open_link(name: str, ground: Ground) -> AsyncIterator[tuple[End, End]]:
    """Open a link of a named transport, with a handshake if the name ends in `SECURE`."""
    plain_name = name.removesuffix(SECURE)
    theirs = _load(plain_name)
    ours = theirs if ground is HERE else _load(plain_name)  # a socket belongs to one namespace
    scheme = theirs.schemes[0]
    address = f"{scheme}://{ground.host}:0" if scheme in SOCKETS else None
    async with AsyncExitStack() as stack:
        with ground.far():
            listener = await stack.enter_async_context(theirs.listen(address))
        arrivals = aiter(listener.links())
        with ground.near():
            dialling = ours.dial(listener.address)
            near, far = await asyncio.gather(dialling, anext(arrivals))
        if name != plain_name:
            near, far = await secured(near, far)
        yield near, far
        await near.close()
        await far.close()


def _load(name: str) -> Transport:
    transport = Registry.discover().load(name)
    if isinstance(transport, SupportsIdentity):
        transport.identify(SEED)
    return transport


class OpenHouse:
    """Admits every peer with a credential."""

    removals: Removals = MappingProxyType({})

    async def refresh(self) -> None:
        """Do nothing."""

    def guests(self) -> tuple[bytes, ...]:
        return ()

    async def authorize(
        self, _node: object, proof: Credential | TicketProof, *_: object
    ) -> Credential:
        assert isinstance(proof, Credential)
        return proof


async def secured(near: Link, far: Link) -> tuple[Link, Link]:
    """Perform the handshake of two nodes of one mesh."""
    key = NodeKey(SEED)
    credential = founder_credential(key, bytes(16))
    own = LocalIdentity(key, 1, credential)
    return await asyncio.gather(
        secure_dial(near, own, Purpose.RING, expect=key.node, now_s=0, removals={}),
        secure_accept(far, own, OpenHouse()),
    )


def parts(size: int) -> list[bytes]:
    """Return a message like those of a ring: a header and a tensor, not yet joined."""
    return [bytes(HEADER_BYTES), bytes(size - HEADER_BYTES)]


async def round_trips(near: End, far: End, size: int, times: int) -> list[float]:
    """Send a message there and back; return the seconds of each trip."""

    async def echo() -> None:
        for _ in range(times):
            message = memoryview((await far.receive())[1])
            await far.send([message[:HEADER_BYTES], message[HEADER_BYTES:]])

    message, seconds = parts(size), []
    async with asyncio.TaskGroup() as group:
        group.create_task(echo())
        for _ in range(times):
            began = perf_counter()
            await near.send(message)
            await near.receive()
            seconds.append(perf_counter() - began)
    return seconds
