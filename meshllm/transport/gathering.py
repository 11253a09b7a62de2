"""Writing several messages of a link in one call to the operating system."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from meshllm.transport.contract import Link, SupportsBatchedSend

MAX_BYTES = 64 * 1024
"""Of what is gathered: more gains nothing by another copy."""


def together(link: Link) -> AbstractContextManager[None]:
    """Send what is offered to a link inside the context together, if the link can do that."""
    return link.together() if isinstance(link, SupportsBatchedSend) else nullcontext()


class Gathering:
    """Writes parts to a stream one by one, or together.

    Each call to the operating system wakes the peer.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._parts: list[bytes] | None = None
        self._size = 0

    def write(self, part: bytes) -> None:
        """Write a part, or gather it."""
        if self._parts is None:
            self._write(part)
            return
        self._parts.append(part)
        self._size += len(part)
        if self._size > MAX_BYTES:
            self._flush(self._parts)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Gather what is written inside the context, and write it at the end."""
        if self._parts is not None:
            yield
            return
        parts = self._parts = []
        try:
            yield
        finally:
            self._parts = None
            self._flush(parts)

    def _flush(self, parts: list[bytes]) -> None:
        if parts:
            self._write(b"".join(parts))
        parts.clear()
        self._size = 0
