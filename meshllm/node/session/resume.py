"""KV caches that a session continues from: taken over, copied or new."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import urandom
from typing import NewType

from blake3 import blake3
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.split.session_cache import SessionCache
from meshllm.model.steps.runner import SpanRunner
from meshllm.names import SESSION_ID_BYTES, SessionId
from meshllm.protocol.kv_cache.prefix_index import Chunk, PrefixHit, add_chunk, crop_chunks
from meshllm.request import Resumable
from meshllm.strict_json import WrongField

ResumeKey = NewType("ResumeKey", bytes)
"""Proves that a session is its holder's. The other ranks know the session, which is a hash of it:
none of them can ask for what another one's session would say next."""

_KEY_BYTES = 16


class CacheMiss(Exception):
    """A cache lacks the positions that a job continues from."""


def crop_cache(cache: SessionCache, length: int) -> None:
    """Crop a cache; raise `CacheMiss` if it is shorter, or cannot be cropped that far."""
    try:
        cache.crop(length)
    except ModelError as error:
        raise CacheMiss(str(error)) from None


def refill(
    layers: SpanRunner,
    x: Tensor | None,
    cache: SessionCache,
    places: range,
    *,
    is_step: bool,
    is_sent: bool,
) -> Tensor | None:
    """Run rows only in the layers that lack them; raise `CacheMiss` if their input is unknown.

    See `SpanRunner.refill`.
    """
    try:
        return layers.refill(x, cache, places, is_step=is_step, is_sent=is_sent)
    except ModelError as error:
        raise CacheMiss(str(error)) from None


@dataclass(frozen=True, slots=True)
class Start:
    """The cache that a generation begins with."""

    base: PrefixHit | None
    cache: SessionCache | None
    """Taken over from the base; it may hold more."""
    make: Callable[[], SessionCache]
    """Called on the compute thread if none is taken over."""


def start_from(
    found: tuple[PrefixHit, SessionCache] | None, new_cache: Callable[[], SessionCache]
) -> Start:
    """Begin with a prefix cache hit, or with an empty cache."""
    if found is None:
        return Start(None, None, new_cache)
    base, cache = found
    return Start(base, cache if base.whole else None, lambda: cache.branch(base.length))


def new_key() -> ResumeKey:
    """Draw a key."""
    return ResumeKey(urandom(_KEY_BYTES))


def session_of(key: ResumeKey) -> SessionId:
    """Return the session that a key belongs to."""
    return SessionId(blake3(key).digest(SESSION_ID_BYTES))


def resumable(
    key: ResumeKey, chunks: Sequence[Chunk], held: int | None = None, cached: int = 0
) -> Resumable:
    """Return what an ingress needs to resume a session; see `Resumable` for the last two."""
    steps = tuple(chunk.stop for chunk in chunks if chunk.is_step)
    return Resumable(key.hex(), tuple(chunk.stop for chunk in chunks), steps, held, cached)


def read_resumable(
    given: Resumable, known: int, max_chunk: int
) -> tuple[SessionId, list[Chunk], int]:
    """Return the session, how its first positions were computed, and how many every rank holds.

    ``known`` tokens are known; the last of them was sampled behind the others.

    Raises:
        WrongField: no entry has sent that.
    """
    steps, start, chunks = set(given.steps), 0, list[Chunk]()
    length = known - 1 if given.held is None else min(given.held, known - 1)
    if length < 0:
        raise WrongField("resume.held", f"{given.held} positions are held")
    for stop in given.stops:
        is_step = stop in steps
        if stop <= start or (stop - start > max_chunk and not is_step):
            text = f"A chunk from {start} to {stop}; the limit is {max_chunk} rows"
            raise WrongField("resume.stops", text)
        chunks.append(Chunk(stop, is_step))
        start = stop
    try:
        key = ResumeKey(bytes.fromhex(given.key))
    except ValueError:
        raise WrongField("resume.key", "`resume.key` is not hexadecimal") from None
    if start < length:
        chunks = add_chunk(chunks, start, length, is_step=True)
    return session_of(key), crop_chunks(chunks, length), length
