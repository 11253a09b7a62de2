"""How long a closing connection waits until its peer has taken what was sent."""

import asyncio
from collections.abc import Callable

STALL_S = 5.0
"""A closing connection is aborted if the peer takes no data for this long."""
MAX_S = 30.0
"""After so long it is aborted in any case: a peer may take a few bytes at a time for days."""


class Linger:
    """Aborts a closing connection whose peer takes no more of the remaining data, or too slowly."""

    def __init__(self, left: Callable[[], int], abort: Callable[[], None]) -> None:
        """Watch the bytes ``left`` once started."""
        self._left = left
        self._abort = abort
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start to watch; further calls do nothing."""
        if self._timer is None:
            self._check(before=-1, until=asyncio.get_running_loop().time() + MAX_S)

    def cancel(self) -> None:
        """Stop: the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self, before: int, until: float) -> None:
        loop, left = asyncio.get_running_loop(), self._left()
        if left == before or loop.time() >= until:
            self._abort()
        else:
            self._timer = loop.call_later(STALL_S, self._check, left, until)
