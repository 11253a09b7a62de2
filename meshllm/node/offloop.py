"""Where a node runs what would hold up the event loop: planning, and waiting for the disk."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class OffLoop(Protocol):
    """Runs a function, as `asyncio.to_thread` does; a simulation has its own way."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        """Wait for the result; if cancelled, the function still runs to its end."""
        ...
