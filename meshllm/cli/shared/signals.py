"""What Ctrl-C does to a node: the first lets it leave, the second ends it."""

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
    """What is to be done when a signal comes."""

    task: "asyncio.Task[Any] | None"
    """Cancelled as long as there is nothing that can leave."""
    leave: Callable[[], None] | None = None
    is_asked: bool = False

    def __call__(self) -> None:
        """Take a signal."""
        if self.is_asked:
            # No way through the event loop: it may be waiting for a thread that computes.
            os._exit(INTERRUPTED)
        self.is_asked = True
        if self.leave is not None:
            self.leave()
        elif self.task is not None:
            self.task.cancel()


@contextmanager
def draining() -> Iterator[Drain]:
    """Catch SIGINT and SIGTERM inside the context, which is left by the task that entered it.

    Raises:
        typer.Exit: a signal came before there was anything that could leave.
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
