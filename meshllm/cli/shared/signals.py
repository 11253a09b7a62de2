"""Graceful shutdown: the first SIGINT or SIGTERM drains, the second exits at once."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Drain:
    """The signal handler."""

    task: "asyncio.Task[Any] | None"
    """Cancelled by a signal while ``leave`` is not set."""
    leave: Callable[[], None] | None = None
    is_asked: bool = False

    def __call__(self) -> None:
        """Handle a signal."""
        if self.is_asked:
            # Not through the event loop: it may be waiting for the compute thread.
            os._exit(INTERRUPTED)
        self.is_asked = True
        if self.leave is not None:
            self.leave()
        elif self.task is not None:
            self.task.cancel()


@contextmanager
def draining() -> Iterator[Drain]:
    """Handle SIGINT and SIGTERM inside the context; enter and exit it in the same task.

    Raises:
        typer.Exit: a signal arrived before ``leave`` was set.
    """
    drain = Drain(asyncio.current_task())
    loop = asyncio.get_running_loop()
    for each in _SIGNALS:
        loop.add_signal_handler(each, drain)
    try:
        yield drain
    except asyncio.CancelledError:
        if drain.is_asked:
            raise typer.Exit(INTERRUPTED) from None
        raise
    finally:
        for each in _SIGNALS:
            loop.remove_signal_handler(each)
