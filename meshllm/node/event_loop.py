"""The event loop of a node: what has arrived is read before a timer fires.

After a stop of the process (Ctrl-Z, SIGSTOP, a suspended virtual machine), `asyncio` calls the
timers that are overdue before it reads what its sockets received meanwhile, and peers or clients
that sent in time would be dropped: the call that waits for sockets is interrupted, and returns
nothing once its time has passed. This loop looks at its sockets again.

A timeout of a task still wins over what its task awaits, see `asyncio.timeout`.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(main)


def _new_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(_LookingTwice())


class _LookingTwice(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout) or (super().select(0) if timeout else [])
