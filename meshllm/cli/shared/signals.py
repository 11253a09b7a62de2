"""Graceful shutdown: the first SIGINT or SIGTERM drains, the second exits at once.

That is for nodes and API servers: what shows or measures something only unwinds.

A closed terminal (SIGHUP) drains, too. It does not exit at once: both the system and a shell may
send one.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import typer

INTERRUPTED = 130
TERMINATED = 143
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Drain:
    """The signal handler."""

    task: "asyncio.Task[Any] | None"
    """Cancelled by a signal while ``leave`` is not set."""
    leave: Callable[[], None] | None = None
    kill: Callable[[], None] | None = None
    """Called before the process exits at once; what it started would outlive it."""
    is_asked: bool = False

    def hang_up(self) -> None:
        """Handle the end of the terminal."""
        if not self.is_asked:
            self()

    def __call__(self) -> None:
        """Handle a signal."""
        if self.is_asked:
            if self.kill is not None:
                self.kill()
            # Not through the event loop: it may be waiting for the compute thread.
            os._exit(INTERRUPTED)
        self.is_asked = True
        if self.leave is not None:
            self.leave()
        elif self.task is not None:
            self.task.cancel()


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP inside unwind like Ctrl-C; a SIGTERM after it ends at once.

    By default each ends a process without `finally`, which leaves its terminal without echo, and
    its processes and files behind. A signal that is ignored, as SIGHUP by `nohup`, stays ignored.
    Enter it in the main thread.

    Raises:
        SystemExit: one arrived.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    code: int | None = None

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal code
        code = 128 + number
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal may send several
        # Raised here, it may end a callback or a child task: `asyncio.run` cancels its main task.
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)
        else:  # a shell's background job ignores Ctrl-C, and then `asyncio.run` does, too
            _exit(code)

    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        if code is not None:  # whatever else was raised on the way out, or nothing
            raise SystemExit(code)


def _exit(code: int) -> None:
    """Exit between two callbacks of the event loop, whose tasks are then cancelled; else here."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise SystemExit(code) from None
    loop.call_soon_threadsafe(sys.exit, code)


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Let SIGTERM or SIGHUP cancel the task that is inside; a SIGTERM after it ends at once.

    For a loop in which something else handles SIGINT, such as prompt_toolkit. A process that
    ignores SIGHUP goes on to ignore it.

    Raises:
        SystemExit: a signal arrived.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    code: int | None = None
    handled = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handled.append(signal.SIGHUP)

    def end(number: int) -> None:
        nonlocal code
        if code is None and task is not None:
            task.cancel()
        code = code or 128 + number  # a closed terminal may send several
        loop.remove_signal_handler(signal.SIGTERM)

    for each in handled:
        loop.add_signal_handler(each, end, each)
    try:
        yield
    except BaseException as error:  # what is closed on the way out may fail, too
        if code is not None:
            raise SystemExit(code) from error
        raise
    finally:
        for each in handled:
            loop.remove_signal_handler(each)


@contextmanager
def draining() -> Iterator[Drain]:
    """Handle these signals inside the context; enter and exit it in the same task.

    A process that ignores SIGHUP, as `nohup` starts it, goes on to ignore it.

    Raises:
        typer.Exit: a signal arrived before ``leave`` was set.
    """
    drain = Drain(asyncio.current_task())
    loop = asyncio.get_running_loop()
    handlers: dict[signal.Signals, Callable[[], None]] = dict.fromkeys(_SIGNALS, drain)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = drain.hang_up
    for each, handler in handlers.items():
        loop.add_signal_handler(each, handler)
    try:
        yield drain
    except asyncio.CancelledError:
        if drain.is_asked:
            raise typer.Exit(INTERRUPTED) from None
        raise
    finally:
        for each in handlers:
            loop.remove_signal_handler(each)
