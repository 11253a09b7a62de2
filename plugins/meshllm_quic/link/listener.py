"""The listener of a QUIC endpoint: its addresses, and the queue of incoming links."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from meshllm.transport.contract import Link
from meshllm_quic.link.connection import Connection


class QuicListener:
    """Queue of incoming links; also the iterator over them."""

    def __init__(
        self, places: Callable[[], tuple[str, ...]], reserve: Callable[[Sequence[str]], None]
    ) -> None:
        self._places = places
        self._reserve = reserve
        self._arrivals: asyncio.Queue[Connection | None] = asyncio.Queue()  # None: closed
        self._callbacks: list[Callable[[], None]] = []

    @property
    def address(self) -> str:
        """The most reachable of `addresses`."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses of this listener, most reachable first."""
        return self._places()

    def reserve(self, hosts: Sequence[str]) -> None:
        """Keep places for the hosts of known peers."""
        self._reserve(hosts)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever `addresses` changes."""
        self._callbacks.append(callback)

    def links(self) -> Self:
        """Iterate over the links; several tasks may do so."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Link:
        while True:
            connection = await self._arrivals.get()
            if connection is None:
                self._arrivals.put_nowait(None)  # for other tasks that iterate
                raise StopAsyncIteration
            connection.take()
            return connection.link

    def arrived(self, connection: Connection) -> None:
        """Queue an incoming link."""
        self._arrivals.put_nowait(connection)

    def notify(self) -> None:
        """Call the callbacks: `addresses` has changed."""
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        """Close links that were not accepted by the application."""
        while not self._arrivals.empty():
            if (connection := self._arrivals.get_nowait()) is not None:
                connection.abort()
        self._arrivals.put_nowait(None)
