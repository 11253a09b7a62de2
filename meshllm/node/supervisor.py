"""Errors that no task waits for, as the end of the node they happened in.

Theory of operation
-------------------
A callback, a timer or a forgotten task that raises ends nothing: the event loop only reports it to
its exception handler. A `Supervisor` is such a handler for one program on the loop. What is
scheduled inside its `scope` is its own, and what that schedules in turn, because a context variable
is inherited; it fails at the first error of those. Other errors, as of a transport, which ends its
link only, go to the handler that was there before, as all errors do. Several programs on one loop
may start and end in any order: a handler that has ended passes everything on until those above it
have ended, too.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

_Handler: TypeAlias = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]
_OWNER: ContextVar["Supervisor | None"] = ContextVar("supervisor", default=None)


class Supervisor:
    """An exception handler of the event loop, while it is entered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._before: _Handler | None = None
        self._is_open = False
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Gets the first error of what was scheduled in the scope; cancelled when there is none."""

    def __enter__(self) -> Self:
        self._is_open = True
        self._before = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        handler = self._loop.get_exception_handler()
        while isinstance(handler, Supervisor) and not handler._is_open:
            handler = handler._before
        self._loop.set_exception_handler(handler)
        if not self.failed.cancel():
            self.failed.exception()  # nobody needs to have asked

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Own what is scheduled inside; use it within one task."""
        token = _OWNER.set(self)
        try:
            yield
        finally:
            _OWNER.reset(token)

    def __call__(self, loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        """Hear of an error, as `asyncio.loop.set_exception_handler` says."""
        error = told.get("exception")
        if isinstance(error, Exception) and self._owns(told) and not self.failed.done():
            self.failed.set_exception(error)
        if self._before is None:
            loop.default_exception_handler(told)
        else:
            self._before(loop, told)

    def _owns(self, told: dict[str, Any]) -> bool:
        source = told.get("handle") or told.get("future")
        if not isinstance(source, asyncio.Handle | asyncio.Task):
            return False  # of a transport, or a future that a library forgot
        get_context = getattr(source, "get_context", None)  # since Python 3.12
        context = get_context() if get_context else getattr(source, "_context", None)
        return context is None or context.get(_OWNER) is self
