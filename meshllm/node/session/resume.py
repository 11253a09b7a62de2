"""Keys of sessions, and what an ingress needs to resume one."""

from collections.abc import Sequence
from os import urandom
from typing import NewType

from blake3 import blake3

from meshllm.names import SESSION_ID_BYTES, SessionId
from meshllm.protocol.kv_cache.prefix_index import Chunk, add_chunk, crop_chunks
from meshllm.request import Resumable
from meshllm.strict_json import WrongField

ResumeKey = NewType("ResumeKey", bytes)
"""Proves that a session is its holder's. The other ranks know the session, which is a hash of it:
none of them can ask for what another one's session would say next."""

_KEY_BYTES = 16


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

    ``known`` tokens are known; the last of them was sampled after the others.

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
