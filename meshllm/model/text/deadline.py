"""A deadline for Python code of others, such as chat templates."""

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

GRACE_S = 1.0  # s; an exception arrives between two bytecodes


class DeadlineExceeded(Exception):
    """A function ran past its deadline."""

    def __init__(self, thread: Thread | None = None) -> None:
        super().__init__()
        self.thread = thread
        """Its thread, which may still run; None inside the function itself."""


def run_within(limit_s: float, function: Callable[[], T]) -> T:
    """Return the result of a function that runs in a thread of its own.

    Past its limit the thread is interrupted. One that is inside a call of C code ends only after
    that call; nobody waits for it.

    Raises:
        DeadlineExceeded: it did not end within its limit.
    """
    outcome: Future[T] = Future()
    thread = Thread(target=_report, args=(function, outcome), name="deadline", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive() and thread.ident is not None:
        # The thread ends with `function`, so the exception cannot meet other code.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(DeadlineExceeded)
        )
        thread.join(GRACE_S)
    if not outcome.done():
        raise DeadlineExceeded(thread)
    return outcome.result()


def _report(function: Callable[[], T], outcome: Future[T]) -> None:
    try:
        outcome.set_result(function())
    except BaseException as error:  # for the caller; includes Rust panics
        if not outcome.done():
            outcome.set_exception(error)
