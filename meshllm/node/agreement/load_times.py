"""How long models take to load that are asked for here, to tell clients when to retry.

A load begins with the first plan for a model, and ends when a ring serves it; before, the model may
wait for a free node. Only one that begins after a request is measured: of a model that has a plan
already, nobody knows here how long it has been loading.
"""

from meshllm.names import ModelKey
from meshllm.node.timer import loop_time
from meshllm.protocol.agreement.load_estimate import PastLoad, retry_s


class LoadTimes:
    """The models that requests wait for at one node, and the last one that was loaded."""

    def __init__(self) -> None:
        self._since: dict[ModelKey, float] = {}  # the first request of each, in loop time
        self._unplanned: set[ModelKey] = set()  # those without a plan since then
        self._begun: dict[ModelKey, float] = {}  # the first plan of each of these, in loop time
        self._last: PastLoad | None = None

    @property
    def awaited(self) -> tuple[ModelKey, ...]:
        """The models that were asked for, and not served since."""
        return tuple(self._since)

    def ask(self, model: ModelKey, *, has_plan: bool) -> None:
        """Note a request for a model that no ring serves, unless there was one before."""
        if model not in self._since:
            self._since[model] = loop_time()
            if not has_plan:
                self._unplanned.add(model)

    def begin(self, model: ModelKey) -> None:
        """Note that an awaited model has a plan."""
        if model in self._unplanned:
            self._unplanned.remove(model)
            self._begun[model] = loop_time()

    def served(self, model: ModelKey, span_bytes: int) -> None:
        """Note that a ring serves an awaited model, with so many bytes in its largest span."""
        if model in self._begun and span_bytes:
            self._last = PastLoad(span_bytes, loop_time() - self._begun[model])
        self.forget(model)

    def forget(self, model: ModelKey) -> None:
        """Stop to measure how long an awaited model takes to load."""
        del self._since[model]
        self._unplanned.discard(model)
        self._begun.pop(model, None)

    def retry_s(self, model: ModelKey, span_bytes: int) -> int:
        """Return after how many seconds a model may be asked for again.

        ``span_bytes`` are those of the largest span that is not loaded yet, 0 if unknown.
        """
        now = loop_time()
        waited_s, loading_s = (now - each.get(model, now) for each in (self._since, self._begun))
        return retry_s(waited_s, loading_s, span_bytes, self._last)
