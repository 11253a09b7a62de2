"""Which models were asked for here lately, so that one that nobody uses makes room for another."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshllm.names import ModelKey
from meshllm.node.timer import CallLater, loop_time
from meshllm.protocol.membership.mesh import Mesh


class ModelUse:
    """The use of the models of a mesh by the requests at one node.

    A model is used while a request for it waits or is answered, and for ``keep_s`` afterwards.
    """

    def __init__(
        self, machine: Mesh, keep_s: float, changed: Callable[[], None], call_later: CallLater
    ) -> None:
        self._machine = machine
        self._keep_s = keep_s
        self._changed = changed
        self._call_later = call_later
        self._active: Counter[ModelKey] = Counter()  # requests in progress
        self._asked: dict[ModelKey, float] = {}  # when each began or ended last, if lately

    @property
    def used(self) -> tuple[ModelKey, ...]:
        """The models in use; empty if the mesh serves only one."""
        charter = self._machine.charter
        if charter is None or not charter.models:
            return ()
        return tuple(sorted(self._asked.keys() & {each.key for each in charter.served}))

    def is_used(self, model: ModelKey) -> bool:
        """Return whether a model is in use, also if the mesh serves only one."""
        return model in self._asked

    @contextmanager
    def using(self, model: str) -> Iterator[None]:
        """Count a model as used inside the context, and for a while afterwards."""
        charter = self._machine.charter
        wanted = charter.find(model) if charter else None
        if wanted is None:
            yield
            return
        self._active[wanted.key] += 1
        self._note(wanted.key)
        try:
            yield
        finally:
            self._active[wanted.key] -= 1
            self._note(wanted.key)

    def _note(self, model: ModelKey) -> None:
        is_known = model in self._asked
        self._asked[model] = loop_time()
        if not is_known:
            self._changed()
            self._call_later(self._keep_s, self._forget, model)

    def _forget(self, model: ModelKey) -> None:
        """Note that a model is not used any more, unless it was asked for again."""
        if self._active[model]:
            self._asked[model] = loop_time()
        left_s = self._asked[model] + self._keep_s - loop_time()
        if left_s > 0:
            self._call_later(left_s, self._forget, model)
            return
        del self._asked[model]
        self._changed()
