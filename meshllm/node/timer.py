"""The clock of the event loop, and a timer for a moving deadline."""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import Protocol, Self, TypeVarTuple

AFTER_ERROR_S = 0.5  # s; a heartbeat

Ts = TypeVarTuple("Ts")


class CallLater(Protocol):
    """Schedules a callback of a node, in the context of its supervisor."""

    def __call__(self, delay_s: float, callback: Callable[[*Ts], None], /, *args: *Ts) -> object:
        """Call back after a time, unless the node ends before."""


def loop_time() -> float:
    """Return the time of the event loop, in seconds."""
    return asyncio.get_running_loop().time()


class DeadlineTimer:
    """Calls ``expire`` soon after ``deadline()``, in loop time, has passed.

    The callback runs on the loop, never inside ``reset``, and may be early: a deadline that is
    extended by every message needs no new timer each time. Its errors go to the exception handler
    of the loop, in the context in which the timer was created, and do not stop it.
    """

    def __init__(self, deadline: Callable[[], float | None], expire: Callable[[], None]) -> None:
        self._deadline = deadline
        self._expire = expire
        self._context = copy_context()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self.reset()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer:
            self._timer.cancel()

    def reset(self) -> None:
        """Update the timer after the deadline may have changed."""
        self.fire_by(self._deadline())

    def fire_by(self, deadline: float | None) -> None:
        """Update the timer after one of several deadlines has changed, to this one."""
        if deadline is None or (self._timer and self._timer.when() <= deadline):
            return
        if self._timer:
            self._timer.cancel()
        self._arm(deadline)

    def _arm(self, at: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(at, self._fire, context=self._context)

    def _fire(self) -> None:
        self._timer, has_expired = None, False
        try:
            self._expire()
            has_expired = True
        finally:  # an error goes on to the supervisor
            if has_expired:
                self.reset()
            # The deadline may be the same: without a pause this would be a busy loop.
            elif (deadline := self._deadline()) is not None:
                self._arm(max(deadline, loop_time() + AFTER_ERROR_S))
