"""How long models take to load after they were asked for here, to tell clients when to retry.

Only a load that began with the first request is measured: of a model that some nodes hold already,
nobody knows here how long it has been loading.
"""

from meshllm.names import ModelKey
from meshllm.node.timer import loop_time
from meshllm.protocol.agreement.load_estimate import PastLoad, retry_s


class LoadTimes:
    """The models that requests wait for at one node, and the last one that was loaded."""

    def __init__(self) -> None:
        self._since: dict[ModelKey, float] = {}  # the first request of each, in loop time
        self._unloaded: set[ModelKey] = set()  # those of which no node held anything then
        self._last: PastLoad | None = None

    @property
    def awaited(self) -> tuple[ModelKey, ...]:
        """The models that were asked for, and not served since."""
        return tuple(self._since)

    def ask(self, model: ModelKey, *, is_unloaded: bool) -> None:
        """Note a request for a model that no ring serves, unless there was one before."""
        if model not in self._since:
            self._since[model] = loop_time()
            if is_unloaded:
                self._unloaded.add(model)

    def served(self, model: ModelKey, span_bytes: int) -> None:
        """Note that a ring serves an awaited model, with so many bytes in its largest span."""
        seconds = loop_time() - self._since[model]
        if model in self._unloaded and span_bytes:
            self._last = PastLoad(span_bytes, seconds)
        self.forget(model)

    def forget(self, model: ModelKey) -> None:
        """Measure no more how long an awaited model takes to load."""
        del self._since[model]
        self._unloaded.discard(model)

    def retry_s(self, model: ModelKey, span_bytes: int) -> int:
        """Return after how many seconds a model may be asked for again.

        ``span_bytes`` are those of the largest span that is not loaded yet, 0 if unknown.
        """
        waited_s = loop_time() - self._since.get(model, loop_time())
        return retry_s(waited_s, span_bytes, self._last)
