"""Tensors on the wire: header, limits and keyed hash.

The hash is keyed per session: a plain hash of an activation would confirm a guessed prompt to
anyone who sees it.
"""

import struct
from dataclasses import dataclass, field

from blake3 import blake3

from meshllm.errors import IntegrityFault, PeerFault
from meshllm.names import Digest, SessionId
from meshllm.protocol.session.messages import Blob, Buffer, DType

MAX_DIMS = 4
MAX_DIM = 65_536  # elements; the widest hidden state published so far has 16,384

HEADER = struct.Struct("<BB4I")
"""dtype, number of dimensions, dimensions; unused dimensions are 0."""

_CONTEXT = "meshllm 2026-11 session blob"  # a blake3 context is a constant of one application


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The key that seals the blobs of one session."""

    session: SessionId
    secret: bytes = field(repr=False)
    """32 bytes."""


def session_key(session: SessionId) -> SessionKey:
    """Derive the key of a session from its id, which only the ring's members know."""
    return SessionKey(session, blake3(session, derive_key_context=_CONTEXT).digest())


def seal(key: SessionKey, dtype: DType, shape: tuple[int, ...], payload: Buffer) -> Blob:
    """Hash ``payload``, C order and little endian, with its header under the session's key."""
    return Blob(dtype, shape, _hash(key, pack_header(dtype, shape), payload), payload)


def check(key: SessionKey, blob: Blob) -> None:
    """Verify a blob.

    Raises:
        IntegrityFault: the bytes do not match the hash.
        PeerFault: the header breaks a limit or does not fit the payload; nothing was hashed.
    """
    check_shape(blob.dtype, blob.shape, len(blob.payload))
    if _hash(key, pack_header(blob.dtype, blob.shape), blob.payload) != blob.digest:
        raise IntegrityFault(
            f"Blob of {len(blob.payload)} bytes, shape {list(blob.shape)}, in session"
            f" `{key.session.hex()[:8]}` does not match its hash"
        )


def check_shape(dtype: DType, shape: tuple[int, ...], length: int) -> None:
    """Raise `PeerFault` unless ``shape`` is within the limits and can take ``length`` bytes."""
    if not 1 <= len(shape) <= MAX_DIMS:
        raise PeerFault(f"Blob with {len(shape)} dimensions; allowed are 1 to {MAX_DIMS}")
    if min(shape) < 1 or max(shape) > MAX_DIM:
        raise PeerFault(f"Blob of shape {list(shape)}; each dimension is 1 to {MAX_DIM}")
    if length not in (sizes := dtype.sizes(shape)):
        least, most = sizes.start, sizes.stop - 1  # len() overflows at sizes a header can claim
        few = "" if least == most else f"{least} to "
        raise PeerFault(
            f"Blob of shape {list(shape)} {dtype.name.lower()} is {few}{most} bytes, not {length}"
        )


def pack_header(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """Encode dtype and shape in the layout of `HEADER`."""
    return HEADER.pack(dtype, len(shape), *shape, *(MAX_DIMS - len(shape)) * (0,))


def unpack_header(header: Buffer) -> tuple[DType, tuple[int, ...]]:
    """Decode dtype and shape; raise `PeerFault` for what `pack_header` would not write."""
    code, dims, *sizes = HEADER.unpack(header)
    if dims > MAX_DIMS or any(sizes[dims:]):
        raise PeerFault(f"Blob with {dims} dimensions of sizes {sizes}")
    try:
        return DType(code), tuple(sizes[:dims])
    except ValueError:
        raise PeerFault(f"Blob of unknown dtype {code}") from None


def _hash(key: SessionKey, header: bytes, payload: Buffer) -> Digest:
    # One thread, blake3's default: the model needs the cores, and idle pool threads would spin.
    return Digest(blake3(header, key=key.secret, max_threads=1).update(payload).digest())
