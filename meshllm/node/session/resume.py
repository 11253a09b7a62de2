"""KV caches that a session continues from: taken over, copied or new."""

from collections.abc import Callable
from dataclasses import dataclass

from meshllm.errors import ModelError
from meshllm.model.split.kv_cache import SpanCache
from meshllm.protocol.kv_cache.prefix_index import PrefixHit


class CacheMiss(Exception):
    """A cache lacks the positions that a job continues from."""


def crop_cache(cache: SpanCache, length: int) -> None:
    """Crop a cache; raise `CacheMiss` if it is shorter, or cannot be cropped that far."""
    try:
        cache.crop(length)
    except ModelError as error:
        raise CacheMiss(str(error)) from None


@dataclass(frozen=True, slots=True)
class Start:
    """The cache that a generation begins with."""

    base: PrefixHit | None
    make: Callable[[], SpanCache]
    """Called once, on the compute thread; the cache holds the base, and possibly more."""


def start_from(
    found: tuple[PrefixHit, SpanCache] | None, new_cache: Callable[[], SpanCache]
) -> Start:
    """Begin with a prefix cache hit, or with an empty cache."""
    if found is None:
        return Start(None, new_cache)
    base, cache = found
    return Start(base, (lambda: cache) if base.whole else lambda: cache.branch(base.length))
