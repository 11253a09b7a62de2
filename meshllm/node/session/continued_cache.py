"""The KV cache that a session continues from: taken over, copied or new; cropped, recomputed."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import SpanRunner
from meshllm.protocol.kv_cache.prefix_index import PrefixHit


class CacheMiss(Exception):
    """A cache lacks the positions that a job continues from."""


@dataclass(frozen=True, slots=True)
class Start:
    """The cache that a generation begins with."""

    base: PrefixHit | None
    cache: SessionCache | None
    """Taken over from the base; it may hold more."""
    make: Callable[[], SessionCache]
    """Called on the compute thread if none is taken over."""
    chunk: int | None = None
    """Rows of a chunk of the prompt, if a session of the last ring goes on in the middle of it."""


def start_from(
    found: tuple[PrefixHit, SessionCache] | None, new_cache: Callable[[], SessionCache]
) -> Start:
    """Begin with a prefix cache hit, or with an empty cache."""
    if found is None:
        return Start(None, None, new_cache)
    base, cache = found
    return Start(base, cache if base.whole else None, lambda: cache.branch(base.length))


def crop_cache(cache: SessionCache, length: int) -> None:
    """Crop a cache; raise `CacheMiss` if it is shorter, or cannot be cropped that far."""
    try:
        cache.crop(length)
    except ModelError as error:
        raise CacheMiss(str(error)) from None


def undo_step(cache: SessionCache, length: int) -> None:
    """Undo a step that failed in some layer; raise `CacheMiss` where a state has changed in place.

    Such a session is computed again from its first position.
    """
    if not all(part.croppable for part in cache.parts):
        raise CacheMiss("a step failed that changes states")
    crop_cache(cache, length)


def recompute(
    layers: SpanRunner,
    x: Tensor | None,
    cache: SessionCache,
    places: range,
    *,
    is_step: bool,
    is_sent: bool,
) -> Tensor | None:
    """Run rows only in the layers that lack them; raise `CacheMiss` if their input is unknown.

    See `SpanRunner.recompute`.
    """
    try:
        return layers.recompute(x, cache, places, is_step=is_step, is_sent=is_sent)
    except ModelError as error:
        raise CacheMiss(str(error)) from None
