"""How long models take to load that are asked for here, to tell clients when to retry.

A load begins with the first plan for a model, and ends when a ring serves it; before, the model may
wait for a free node. Only one that begins after a request is measured: if the model already has a
plan, the start of its load is not known here.
"""

from meshllm.names import ModelKey
from meshllm.node.timer import loop_time
from meshllm.protocol.agreement.load_estimate import PastModelLoad, retry_s


class ModelLoadTimes:
    """The models that requests wait for at one node, and the last one that was loaded."""

    def __init__(self) -> None:
        self._since: dict[ModelKey, float] = {}  # the first request of each, in loop time
        self._begun: dict[ModelKey, float] = {}  # when each was first seen to have a plan
        self._unplanned: set[ModelKey] = set()  # those that were seen without one before
        self._last: PastModelLoad | None = None

    @property
    def awaited(self) -> tuple[ModelKey, ...]:
        """The models that were asked for, and not served since."""
        return tuple(self._since)

    def ask(self, model: ModelKey, *, has_plan: bool) -> None:
        """Note a request for a model that no ring serves, unless there was one before."""
        if model not in self._since:
            self._since[model] = loop_time()
            self.look(model, has_plan=has_plan)

    def look(self, model: ModelKey, *, has_plan: bool) -> None:
        """Note whether an awaited model has a plan; without one its load begins again."""
        if has_plan:
            self._begun.setdefault(model, loop_time())
        else:
            self._begun.pop(model, None)
            self._unplanned.add(model)

    def served(self, model: ModelKey, span_bytes: int) -> None:
        """Note that a ring serves an awaited model, with this many bytes in its largest span."""
        seconds = loop_time() - self._begun.get(model, loop_time())
        if model in self._unplanned and span_bytes and seconds:  # 0: it was loaded already
            self._last = PastModelLoad(span_bytes, seconds)
        self.forget(model)

    def forget(self, model: ModelKey) -> None:
        """Stop measuring how long an awaited model takes to load."""
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
