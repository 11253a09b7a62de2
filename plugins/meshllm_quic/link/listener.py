"""Where links arrive."""

import asyncio
from collections.abc import Callable
from typing import Self

from meshllm.transport.contract import Link
from meshllm_quic.link.connection import Connection


class Listener:
    """Hands out the links that arrive; also the iterator over them."""

    def __init__(self, places: Callable[[], tuple[str, ...]]) -> None:
        self._places = places
        self._arrivals: asyncio.Queue[Connection | None] = asyncio.Queue()  # None: closed
        self._callbacks: list[Callable[[], None]] = []

    @property
    def address(self) -> str:
        """Where others most likely reach this listener."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """Everywhere others may reach this listener, likeliest first."""
        return self._places()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call this whenever the addresses are others."""
        self._callbacks.append(callback)

    def links(self) -> Self:
        """Yield the links, also to several tasks."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Link:
        while True:
            connection = await self._arrivals.get()
            if connection is None:
                self._arrivals.put_nowait(None)  # for whoever asks next
                raise StopAsyncIteration
            connection.take()
            return connection.link

    def arrived(self, connection: Connection) -> None:
        """Queue a link for whoever asks next."""
        self._arrivals.put_nowait(connection)

    def moved(self) -> None:
        """Tell that the addresses are others."""
        for callback in self._callbacks:
            callback()

    def close(self) -> None:
        """Close what nobody took."""
        while not self._arrivals.empty():
            if (connection := self._arrivals.get_nowait()) is not None:
                connection.abort()
        self._arrivals.put_nowait(None)
