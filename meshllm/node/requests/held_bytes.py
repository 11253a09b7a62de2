"""Memory of the requests in progress, of which the owner has a share that others cannot fill."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from sys import getsizeof

from meshllm.errors import Busy
from meshllm.protocol.kv_cache.admission import Requester
from meshllm.request import Request, Turn

MAX_HELD_BYTES = 128 << 20  # of one asker: 32 of the longest requests, or 8,000 of 16 KiB
ID_BYTES = getsizeof((1 << 16,)) - getsizeof(()) + getsizeof(1 << 16)  # of a token id in a tuple


class HeldBytes:
    """Counts the memory of the requests in progress by asker.

    As in `meshllm.protocol.kv_cache.admission`, an asker may have as much as it leaves free, of
    twice `MAX_HELD_BYTES` for all but the owner; the owner has `MAX_HELD_BYTES` of its own.
    """

    def __init__(self) -> None:
        self._held = Counter[Requester]()

    @property
    def total(self) -> int:
        """Bytes of all askers."""
        return self._held.total()

    @contextmanager
    def holding(self, requester: Requester, size: int) -> Iterator[None]:
        """Count this many bytes of an asker inside the context.

        Raises:
            Busy: its asker has too many bytes in progress.
        """
        own = self._held[requester]
        alike = own if requester is None else self._held.total() - self._held[None]
        if own + alike + 2 * size > 2 * MAX_HELD_BYTES:
            raise Busy(f"Prompts of {alike} bytes are in progress", hint="retry later")
        self._held[requester] += size
        try:
            yield
        finally:
            self._held[requester] -= size
            if not self._held[requester]:
                del self._held[requester]


def size_of(*requests: Request) -> int:
    """Return the bytes of memory that requests take; what several share counts once."""
    parts = {id(part): part for each in requests for part in _parts(each)}
    ids = {id(each): each for request in requests for each in (request.ids, request.given)}
    return sum(map(getsizeof, parts.values())) + ID_BYTES * sum(map(len, ids.values()))


def size_of_turns(turns: Iterable[Turn]) -> int:
    """Return the bytes of memory that turns take; what several share counts once."""
    parts = {id(part): part for part in _parts_of(turns)}
    return sum(map(getsizeof, parts.values()))


def _parts(request: Request) -> Iterator[object]:
    """Yield what takes memory but the token ids."""
    yield from (request, request.sampling, request.raw, request.schema, *request.stop)
    yield request.tools and request.tools.functions
    yield from _parts_of(request.turns)


def _parts_of(turns: Iterable[Turn]) -> Iterator[object]:
    for turn in turns:
        yield from (turn, turn["content"], turn.get("tool_call_id"))
        for call in turn.get("tool_calls", ()):
            yield from (call, call.name, call.arguments, call.id)
