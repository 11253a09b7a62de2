"""Running blocking work, planning and disk I/O, off the event loop."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class OffLoop(Protocol):
    """Runs a function in a thread, as `asyncio.to_thread`; a simulation may replace it."""

    def __call__(self, function: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        """Return an awaitable of the result; if cancelled, the function still runs to its end."""
        ...
