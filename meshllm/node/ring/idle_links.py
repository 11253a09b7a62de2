"""Links of a rank that are not in use yet: they are read ahead, so that their loss is noticed."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count

from meshllm.errors import MeshError
from meshllm.node.net.secure import SecureLink
from meshllm.protocol.trust.handshake import ALL_FEATURES, Features
from meshllm.transport import contract
from meshllm.transport.gathering import together

MAX_BUFFERED = 16  # messages buffered of an idle link; a peer sends two before it is answered
MAX_BUFFERED_BYTES = 64 << 10  # of these messages, which are short

logger = logging.getLogger(__name__)


class IdleLink:
    """A link that is read ahead until it is used."""

    def __init__(self, link: contract.Link) -> None:
        self._link = link
        self._buffered: deque[tuple[contract.Channel, contract.Buffer]] = deque()
        self._immediate = link if isinstance(link, contract.ImmediateSender) else None
        self.send = link.send
        self.close = link.close
        self.watching: asyncio.Task[None] | None = None
        self.is_closing = False

    def offer(
        self,
        message: Sequence[contract.Buffer],
        channel: contract.Channel = contract.Channel.DATA,
    ) -> bool:
        """See `contract.ImmediateSender`."""
        return self._immediate is not None and self._immediate.offer(message, channel)

    def together(self) -> AbstractContextManager[None]:
        """See `contract.SupportsBatchedSend`."""
        return together(self._link)

    async def receive(self) -> tuple[contract.Channel, contract.Buffer]:
        """Return the next message, a buffered one first."""
        return self._buffered.popleft() if self._buffered else await self._link.receive()

    async def first(self) -> contract.Buffer:
        """Wait for the first message, and keep it buffered."""
        self._buffered.append(await self._link.receive())
        return self._buffered[0][1]

    async def watch(self, gone: Callable[[], None]) -> None:
        """Read ahead until the peer closes the link, or sends more than it may unanswered."""
        try:
            while len(self._buffered) < MAX_BUFFERED and self._size <= MAX_BUFFERED_BYTES:
                self._buffered.append(await self._link.receive())
        except MeshError as error:
            logger.debug("idle ring link lost: %s", error)
        gone()

    @property
    def _size(self) -> int:
        return sum(len(message) for _, message in self._buffered)

    def stop_watching(self) -> None:
        """Stop reading ahead; `watch_ended` waits until that has ended."""
        if self.watching is not None:
            self.watching.cancel()

    async def watch_ended(self) -> None:
        """Wait until nothing is read ahead any more."""
        if self.watching is not None:
            await asyncio.wait([self.watching])

    @property
    def features(self) -> Features:
        """Features that the peer supports; all of them inside one process."""
        return self._link.features if isinstance(self._link, SecureLink) else ALL_FEATURES

    @property
    def statistics(self) -> contract.LinkStatistics:
        """See `contract.Link`."""
        return self._link.statistics


class IdleLinks:
    """The idle links of a rank, by number, and those that are closing."""

    def __init__(self, tasks: asyncio.TaskGroup, gone: Callable[[int], None]) -> None:
        """Watch links in ``tasks``; ``gone`` is called with the number of one that was lost."""
        self._tasks = tasks
        self._gone = gone
        self._open: dict[int, IdleLink] = {}
        self._closing = set[asyncio.Task[None]]()
        self._numbers = count()

    def add(self, link: IdleLink) -> int:
        """Watch a link from now on; return its number."""
        number = next(self._numbers)
        self._open[number] = link
        link.watching = self._tasks.create_task(link.watch(partial(self._gone, number)))
        return number

    def stop_watching(self, *numbers: int | None) -> None:
        """Stop reading links ahead that are about to be used."""
        for number in numbers:
            if number is not None:
                self._open[number].stop_watching()

    def take(self, *numbers: int | None) -> list[IdleLink]:
        """Return links for use, but those that were closed; their user discards them."""
        found = [self._open.pop(number, None) for number in numbers if number is not None]
        return [link for link in found if link is not None]

    def close(self, number: int) -> None:
        """Close a link, unless it is closed or in use."""
        if link := self._open.pop(number, None):
            link.stop_watching()
            self.discard(link)

    def discard(self, link: IdleLink) -> None:
        """Close a link in the background, once: that waits for the peer."""
        if link.is_closing:
            return
        link.is_closing = True
        task = asyncio.create_task(_closed(link))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close_all(self) -> None:
        """Close all; wait for those that are closing."""
        links, self._open = self._open, {}
        await asyncio.gather(*(link.close() for link in links.values()), *self._closing)


async def _closed(link: IdleLink) -> None:
    await link.watch_ended()
    await link.close()
