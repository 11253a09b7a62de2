"""Codec of the messages on a link for training, and their limits.

One side sends a batch for the layers of a span; the other sends what comes out, or refuses::

    StartPass(model, span, direction, size), TensorBytes, TensorBytes, ... up to the size -->
                                 <-- StillComputing, each few seconds while it computes
                                 <-- PassDone(size), TensorBytes, ... up to the size
                                 <-- or PassRefused(reason)

The bytes are opaque here, see `meshllm.model.training.batch`. A message is a kind byte and fields;
a later version may append fields, except to TensorBytes, and kinds, which are ignored. Each side
closes the link on anything else.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import TypeAlias, assert_never

from meshllm.errors import PeerFault
from meshllm.names import DIGEST_BYTES, Digest, Span
from meshllm.protocol.binary import Reader, sized
from meshllm.protocol.session.messages import Buffer

MAX_BATCH_BYTES = 1 << 29
"""Bytes of the tensors of one batch: 16,384 tokens of 8,192 values in 32 bits."""
MAX_REASON_BYTES = 512
TENSOR_CHUNK_BYTES = 256 * 1024  # 21 ms at 100 Mbit/s: messages of a ring wait that long
STILL_S = 5.0
"""s between two StillComputing."""

_KIND = Struct("<B")
_START = Struct("<HHBQ")  # start and stop of the span, direction, bytes
_SIZE = Struct("<Q")


class Direction(IntEnum):
    """Where a batch goes through the layers; the number is the code on the wire."""

    FORWARD = 1
    """Hidden states, to those after the span."""
    BACKWARD = 2
    """Gradients, to those before the span."""
    FORWARD_KEEPING = 3
    """Forward, and the node keeps what backward needs, if it has memory for it."""


@dataclass(frozen=True, slots=True)
class StartPass:
    """Announces a batch for the layers of a span."""

    model: Digest
    """blake3 of the configuration of the model."""
    span: Span
    direction: Direction
    size: int
    """Bytes of the batch."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """The next bytes of a batch, or of what comes out."""

    data: Buffer


@dataclass(frozen=True, slots=True)
class StillComputing:
    """Shows that the node has not forgotten the batch."""


@dataclass(frozen=True, slots=True)
class PassDone:
    """Announces the bytes of what comes out."""

    size: int


@dataclass(frozen=True, slots=True)
class PassRefused:
    """Says why nothing comes out."""

    reason: str
    is_final: bool
    """Whether the batch is at fault: repeating it is useless."""


TrainingMessage: TypeAlias = StartPass | TensorBytes | StillComputing | PassDone | PassRefused

_START_PASS, _BYTES, _STILL, _DONE, _REFUSED = range(1, 6)


def encode(message: TrainingMessage) -> list[Buffer]:
    """Encode a message as parts, without a copy of a chunk."""
    match message:
        case StartPass(model, span, direction, size):
            fields = _START.pack(span.start, span.stop, direction, size)
            return [_KIND.pack(_START_PASS) + model + fields]
        case TensorBytes(data):
            return [_KIND.pack(_BYTES), data]
        case StillComputing():
            return [_KIND.pack(_STILL)]
        case PassDone(size):
            return [_KIND.pack(_DONE) + _SIZE.pack(size)]
        case PassRefused(reason, is_final):
            text = reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
            return [_KIND.pack(_REFUSED) + bytes([is_final]) + sized(text.encode())]
    assert_never(message)


def decode(data: Buffer) -> TrainingMessage | None:
    """Decode a message; None is one of a kind that a later version has added.

    Raises:
        PeerFault: it is malformed.
    """
    kind = data[0] if len(data) else 0
    if kind == _BYTES:
        if not 1 < len(data) <= TENSOR_CHUNK_BYTES + 1:
            raise PeerFault(
                f"TensorBytes of {len(data) - 1} bytes; allowed are 1 to {TENSOR_CHUNK_BYTES}"
            )
        return TensorBytes(data[1:])
    reader = Reader(bytes(data[1:]), "Message about training")
    if kind == _START_PASS:
        return _start(reader)
    if kind == _STILL:
        return StillComputing()
    if kind == _DONE:
        return PassDone(reader.bounded("bytes", reader.unpack(_SIZE)[0], 1, MAX_BATCH_BYTES))
    if kind == _REFUSED:
        is_final = bool(reader.take(1)[0])
        return PassRefused(reader.text(MAX_REASON_BYTES), is_final)
    if kind > _REFUSED:
        return None
    raise PeerFault("Message about training without a kind")


def _start(reader: Reader) -> StartPass:
    model = Digest(reader.take(DIGEST_BYTES))
    start, stop, direction, size = reader.unpack(_START)
    if start >= stop:
        raise PeerFault(f"StartPass for the empty span `{start}:{stop}`")
    if direction not in set(Direction):
        raise PeerFault(f"StartPass in the unknown direction {direction}")
    bounded = reader.bounded("bytes of a batch", size, 1, MAX_BATCH_BYTES)
    return StartPass(model, Span(start, stop), Direction(direction), bounded)
