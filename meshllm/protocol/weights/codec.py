"""Codec of the messages on a link for weights, and their limits.

One side asks for a file of a model, from an offset on; the other replies with the size of the file
and its bytes in chunks, or refuses. It asks for the next file when it has this one whole::

    WantFile(model, name, offset) -->
                              <-- FileSize(size), FileChunk, FileChunk, ... up to the size
                              <-- or FileRefused(reason)

A message is a kind byte and fields; a later version may append fields, except to FileChunk, and
kinds, which are ignored. Each side closes the link on anything else.
"""

from dataclasses import dataclass
from struct import Struct
from typing import TypeAlias, assert_never

from meshllm.errors import PeerFault
from meshllm.names import DIGEST_BYTES, Digest
from meshllm.protocol.binary import Reader, sized
from meshllm.protocol.session.messages import Buffer

MAX_FILE_NAME_BYTES = 64
MAX_FILE_BYTES = 1 << 40  # of one part; the largest embedding of 2026 has 4 GB
MAX_REASON_BYTES = 256
CHUNK_BYTES = 256 * 1024  # 21 ms at 100 Mbit/s: messages of a ring on the same path wait that long

_KIND = Struct("<B")
_OFFSET = Struct("<Q")


@dataclass(frozen=True, slots=True)
class WantFile:
    """Asks for a file from an offset on."""

    model: Digest
    """blake3 of the configuration of the model."""
    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class FileSize:
    """Announces the bytes of the whole file."""

    size: int


@dataclass(frozen=True, slots=True)
class FileChunk:
    """The next bytes of the file."""

    data: Buffer


@dataclass(frozen=True, slots=True)
class FileRefused:
    """Says why the file is not sent."""

    reason: str


WeightMessage: TypeAlias = WantFile | FileSize | FileChunk | FileRefused

_WANT, _SIZE, _CHUNK, _REFUSED = range(1, 5)


def encode(message: WeightMessage) -> list[Buffer]:
    """Encode a message as parts, without a copy of a chunk."""
    match message:
        case WantFile(model, name, offset):
            return [_KIND.pack(_WANT) + model + sized(name.encode()) + _OFFSET.pack(offset)]
        case FileSize(size):
            return [_KIND.pack(_SIZE) + _OFFSET.pack(size)]
        case FileChunk(data):
            return [_KIND.pack(_CHUNK), data]
        case FileRefused(reason):
            text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
            return [_KIND.pack(_REFUSED) + sized(text.encode())]
    assert_never(message)


def decode(data: Buffer) -> WeightMessage | None:
    """Decode a message; None is one of a kind that a later version has added.

    Raises:
        PeerFault: it is malformed.
    """
    kind = data[0] if len(data) else 0
    if kind == _CHUNK:
        if not 1 < len(data) <= CHUNK_BYTES + 1:
            raise PeerFault(f"FileChunk of {len(data) - 1} bytes; allowed are 1 to {CHUNK_BYTES}")
        return FileChunk(data[1:])
    reader = Reader(bytes(data[1:]), "Message about weights")
    if kind == _WANT:
        model, name = Digest(reader.take(DIGEST_BYTES)), reader.text(MAX_FILE_NAME_BYTES)
        return WantFile(model, name, _size(reader, "as offset"))
    if kind == _SIZE:
        return FileSize(_size(reader, "bytes of a file"))
    if kind == _REFUSED:
        return FileRefused(reader.text(MAX_REASON_BYTES))
    if kind > _REFUSED:
        return None
    raise PeerFault("Message about weights without a kind")


def _size(reader: Reader, what: str) -> int:
    (size,) = reader.unpack(_OFFSET)
    bounded: int = reader.bounded(what, size, 0, MAX_FILE_BYTES)
    return bounded
