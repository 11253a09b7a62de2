"""Holds plan changes up while the entry of a ring has requests, for at most `BUSY_S`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshllm.node.timer import CallLater, loop_time

CALM_S = 1.0  # s without a request after which an entry allows the plan to change,
BUSY_S = 60.0  # or with requests: far more than the pause until answers continue on the next ring


class PlanHold:
    """Counts the requests that an entry answers; ``may_change`` says whether the plan may change.

    A ring that is never idle must be able to grow: after `BUSY_S` the plan may change until no
    request was there for a while.
    """

    def __init__(self, changed: Callable[[], None], call_later: CallLater) -> None:
        self.may_change = True
        self._changed = changed
        self._call_later = call_later
        self._requests = 0
        self._since: float | None = None  # until no request was there for a while
        self._ended = 0.0  # when the last request ended

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Count a request inside the context."""
        self._requests += 1
        if self._since is None:
            self._since = loop_time()
            self._set(may_change=False)
            self._call_later(BUSY_S, self._yield, self._since)
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._ended = loop_time()
                self._call_later(CALM_S, self._calm, self._ended)

    def _calm(self, ended: float) -> None:
        if not self._requests and self._ended == ended:  # else others have come and gone
            self._since = None
            self._set(may_change=True)

    def _yield(self, since: float) -> None:
        if self._since == since:
            self._set(may_change=True)

    def _set(self, *, may_change: bool) -> None:
        if may_change is not self.may_change:
            self.may_change = may_change
            self._changed()
