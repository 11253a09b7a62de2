"""Supervision of a node: unhandled errors of callbacks and tasks end the node.

Theory of operation
-------------------
An error in a callback, a timer or an unawaited task stops nothing: the event loop only reports it
to its exception handler. A `Supervisor` is such a handler for one program on the loop. It owns the
callbacks and tasks scheduled inside its `scope`, and those that they schedule in turn, because a
context variable is inherited; their first error makes it fail. All errors are also passed to the
previous handler, and others, such as those of a transport, which end its link only, to that alone.
Several programs on one loop may start and end in any order: a handler that has ended passes errors
on until the handlers installed after it have ended, too.

What a peer can cause by its messages is `contained`: a bug there ends the job for that peer.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

logger = logging.getLogger(__name__)

_Handler: TypeAlias = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]
_OWNER: ContextVar["Supervisor | None"] = ContextVar("supervisor", default=None)


class Supervisor:
    """An exception handler of the event loop, installed while the context is entered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._before: _Handler | None = None
        self._is_open = False
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """Holds the first error in the scope; cancelled at exit if there was none."""

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
            self.failed.exception()  # mark as retrieved

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Own the callbacks and tasks scheduled inside; use it within one task."""
        token = _OWNER.set(self)
        try:
            yield
        finally:
            _OWNER.reset(token)

    def __call__(self, loop: asyncio.AbstractEventLoop, report: dict[str, Any]) -> None:
        """Handle an error, see `asyncio.loop.set_exception_handler`."""
        error = report.get("exception")
        if isinstance(error, Exception) and self._owns(report) and not self.failed.done():
            self.failed.set_exception(error)
        if self._before is None:
            loop.default_exception_handler(report)
        else:
            self._before(loop, report)

    def _owns(self, report: dict[str, Any]) -> bool:
        source = report.get("handle") or report.get("future")
        if not isinstance(source, asyncio.Handle | asyncio.Task):
            return False  # of a transport, or an unawaited future of a library
        get_context = getattr(source, "get_context", None)  # since Python 3.12
        context = get_context() if get_context else getattr(source, "_context", None)
        return context is None or context.get(_OWNER) is self


@contextmanager
def contained(text: str, report: Callable[[Exception], None] = lambda _: None) -> Iterator[None]:
    """Log and report a bug in what is done for one peer: it ends that job, not the node."""
    try:
        yield
    except Exception as error:
        logger.exception(text)
        report(error)
