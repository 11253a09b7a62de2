"""Caches that a session goes on from: taken, copied, or new; made on the compute thread."""

from collections.abc import Callable
from dataclasses import dataclass

from meshllm.errors import ModelError
from meshllm.model.split.kv_cache import SpanCache
from meshllm.protocol.kv_cache.prefix_index import Base


class Missed(Exception):
    """A cache is not what a job was to go on from."""


def go_back(cache: SpanCache, length: int) -> None:
    """Crop a cache; raise `Missed` where it does not hold so much, or cannot go back so far."""
    try:
        cache.crop(length)
    except ModelError as error:
        raise Missed(str(error)) from None


@dataclass(frozen=True, slots=True)
class Start:
    """What a generation begins with."""

    base: Base | None
    make: Callable[[], SpanCache]
    """Called once, on the compute thread; the cache holds the base, and perhaps more."""


def start_from(found: tuple[Base, SpanCache] | None, new_cache: Callable[[], SpanCache]) -> Start:
    """Begin with what was found of a prompt, or with nothing."""
    if found is None:
        return Start(None, new_cache)
    base, cache = found
    return Start(base, (lambda: cache) if base.whole else lambda: cache.branch(base.length))
