"""Links inside one process and one event loop.

The parts of a message are joined to one byte string, as on a network: a ring over loopback runs
the same code as a ring over a network, at one copy per hop. A send to a waiting receiver costs one
wake-up; tasks, timers and sleeps are used only if a `TrafficShape` slows the link.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import ClassVar, Self

from meshllm.errors import LinkLost, UserError
from meshllm.transport.contract import Buffer, Channel, Link, LinkStatistics, Listener, checked_size
from meshllm_loopback.pipe import Pipe
from meshllm_loopback.shaper import Shaper, TrafficShape

_SCHEME = "loopback:"


class LoopbackTransport:
    """Links between the nodes of one process; each instance is a separate network."""

    name: ClassVar[str] = "loopback"
    schemes: ClassVar[tuple[str, ...]] = ("loopback",)

    def __init__(self, shape: TrafficShape | None = None) -> None:
        self._shape = shape
        self._listeners: dict[str, _LoopbackListener] = {}
        self._dials: Counter[str] = Counter()
        self._numbers = count(1)

    @asynccontextmanager
    async def listen(self, address: str | None = None) -> AsyncIterator[Listener]:
        """Accept links at ``loopback:NAME``; without an address, NAME is the next free number."""
        name = self._free_number() if address is None else _name(address)
        if name in self._listeners:
            raise UserError(f"Address `{address}` is in use", hint="listen under another name")
        listener = self._listeners[name] = _LoopbackListener(_SCHEME + name)
        try:
            yield listener
        finally:
            del self._listeners[name]
            await listener.close()

    async def dial(self, address: str) -> Link:
        """Open a link to a listener of this instance; takes one round trip if shaped."""
        name = _name(address)
        if self._shape:
            await asyncio.sleep(2 * self._shape.delay_s)
        listener = self._listeners.get(name)
        if listener is None:
            raise LinkLost(f"No listener at `{address}`")
        self._dials[name] += 1
        outgoing = self._pipe(address, f">{name} {self._dials[name]}")
        incoming = self._pipe(address, f"<{name} {self._dials[name]}")
        listener.arrive(_LoopbackLink(incoming, outgoing))
        return _LoopbackLink(outgoing, incoming)

    def _pipe(self, address: str, link: str) -> Pipe:
        return Pipe(address, Shaper(self._shape, link) if self._shape else None)

    def _free_number(self) -> str:
        return next(name for name in map(str, self._numbers) if name not in self._listeners)


def _name(address: str) -> str:
    name = address.removeprefix(_SCHEME)
    if not name or name == address:
        hint = f"write it as `{_SCHEME}NAME`"
        raise UserError(f"Invalid loopback address `{address}`", hint=hint)
    return name


class _LoopbackListener:
    """Incoming links in order of arrival; also the iterator over them."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.addresses = (address,)
        self._arrivals: asyncio.Queue[_LoopbackLink | None] = asyncio.Queue()  # None: closed

    def arrive(self, link: "_LoopbackLink") -> None:
        self._arrivals.put_nowait(link)

    def links(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Link:
        link = await self._arrivals.get()
        if link is None:
            self._arrivals.put_nowait(None)  # for other tasks that iterate
            raise StopAsyncIteration
        return link

    async def close(self) -> None:
        while not self._arrivals.empty():
            if link := self._arrivals.get_nowait():
                await link.close()
        self._arrivals.put_nowait(None)


class _LoopbackLink:
    """One end of a link: sends into one pipe, receives from the other."""

    def __init__(self, outgoing: Pipe, incoming: Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._closed = False

    async def send(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> None:
        checked_size(message)
        await self._outgoing.put(channel, b"".join(message))

    def offer(self, message: Sequence[Buffer], channel: Channel = Channel.DATA) -> bool:
        checked_size(message)
        return self._outgoing.offer(channel, b"".join(message))

    async def receive(self) -> tuple[Channel, Buffer]:
        return await self._incoming.get()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._outgoing.seal()
            self._incoming.drop()
            self._outgoing.after_the_last(self._hang_up)

    def _hang_up(self) -> None:
        self._outgoing.end()
        self._incoming.seal()

    @property
    def statistics(self) -> LinkStatistics:
        return LinkStatistics(
            self._outgoing.messages_in,
            self._outgoing.bytes_in,
            self._incoming.messages_out,
            self._incoming.bytes_out,
            bytes_per_s=self._outgoing.bytes_per_s,
        )
