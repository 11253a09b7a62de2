"""What links wait for: senders for room, in turn, and one reader for messages."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SendTurns(Generic[T]):
    """The senders of one channel, first come, first served."""

    def __init__(self, has_room: Callable[[int], bool], admit: Callable[[T, int], None]) -> None:
        """Send a message by ``admit``, with its size, once ``has_room`` for this many bytes."""
        self._has_room = has_room
        self._admit = admit
        self._waiters: dict[asyncio.Future[bool], tuple[T, int]] = {}

    def offer(self, message: T, size: int) -> bool:
        """Send a message if there is room and no sender waits; return whether it was sent."""
        if self._waiters or not self._has_room(size):
            return False
        self._admit(message, size)
        return True

    async def send(self, message: T, size: int) -> bool:
        """Send a message in its turn; return False if sending has ended before.

        If cancelled, the message is not sent, and the next sender has its turn.
        """
        if self.offer(message, size):
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = message, size
        try:
            return await waiter
        except asyncio.CancelledError:
            self._waiters.pop(waiter, None)
            self.advance()  # the next waiter may fit where this one did not
            raise

    def advance(self) -> None:
        """Send the messages that fit now."""
        while self._waiters:
            waiter, (message, size) = next(iter(self._waiters.items()))
            if not waiter.cancelled():
                if not self._has_room(size):
                    return
                self._admit(message, size)
                waiter.set_result(True)
            self._waiters.pop(waiter, None)

    def end(self) -> None:
        """Send nothing more."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(False)
        self._waiters.clear()


class ReadTurn:
    """The one task that may wait for a message."""

    def __init__(self) -> None:
        self._reader: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait for the next `wake`; raise `RuntimeError` if another task waits."""
        if self._reader is not None and not self._reader.done():
            raise RuntimeError("two tasks receive from one link")
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def wake(self) -> None:
        """Let the waiting task look again."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
