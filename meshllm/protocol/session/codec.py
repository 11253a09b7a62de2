"""Wire format of the ring messages, with all its limits.

A message is one version byte, one kind byte and a fixed little-endian layout; only a tensor,
tallies or a text follows it. A tensor takes all the rest; after anything else a later version may
append fields, which are ignored. A message of an unknown kind is `UnknownRingMessage`. Nothing
larger than the input is ever allocated. A number without a limit of its own is bounded by the width
of its field.

Invalid content of a message that names a session is a `MalformedMessage`: it ends that session, and
the link goes on. Any other fault ends the link.
"""

from enum import IntEnum
from struct import Struct
from typing import Any, Literal, assert_never

from meshllm.errors import PeerFault
from meshllm.names import (
    DIGEST_BYTES,
    FIRST_GROUP,
    GROUP_BYTES,
    Digest,
    GroupId,
    NodeId,
    SessionId,
    Span,
)
from meshllm.protocol.binary import Reader, sized
from meshllm.protocol.session.blob import HEADER, MAX_DIMS, check_shape, pack_header, unpack_header
from meshllm.protocol.session.messages import (
    MAX_RANKS,
    PROTOCOL_VERSION,
    Blob,
    Buffer,
    Cancel,
    Close,
    Data,
    Fault,
    FaultCode,
    Flags,
    Gap,
    Heartbeat,
    Hello,
    JobTimes,
    KvOffer,
    KvRows,
    Logits,
    Malformed,
    Message,
    RankStats,
    Resume,
    UnknownRingMessage,
)

MAX_ROWS = 4096  # rows of one Data message; 64 MiB of 8192 bf16 values
MAX_POSITION = 1 << 24  # tokens of one session; the longest context published is 10 million
MAX_LAYERS = 1 << 16  # of a model
MAX_TALLY = 512  # bytes of a tally, with fields of later versions
MAX_TEXT = 512  # bytes of UTF-8 in a Fault; longer text is truncated when it is sent


class _RingKind(IntEnum):
    """The second byte of a message."""

    HELLO = 1
    HEARTBEAT = 2
    DATA = 3
    GAP = 4
    CANCEL = 5
    CLOSE = 6
    FAULT = 7
    RESUME = 8
    LOGITS = 9
    KV_OFFER = 10
    KV_ROWS = 11


_LAYOUTS = {  # version and kind, then the fields of the message
    _RingKind.HELLO: Struct("<BB 32s I 32s"),  # then the group of the ring
    _RingKind.HEARTBEAT: Struct("<BB Q Q Q"),
    _RingKind.DATA: Struct("<BB 16s I I I I B"),  # then a blob: its header, digest and payload
    _RingKind.GAP: Struct("<BB 16s I I I"),
    _RingKind.CANCEL: Struct("<BB 16s I I"),
    _RingKind.CLOSE: Struct("<BB 16s I I H"),  # then this number of tallies, whose
    _RingKind.FAULT: Struct("<BB 16s I B B"),  # then a text
    _RingKind.RESUME: Struct("<BB 16s I 16s I B"),  # then lost spans, and what they hold
    _RingKind.LOGITS: Struct("<BB 16s I I I"),  # then a blob
    _RingKind.KV_OFFER: Struct("<BB 32s I 32s"),  # as Hello
    _RingKind.KV_ROWS: Struct("<BB 16s I I I"),  # then a blob
}
_OF_SESSIONS = set(_RingKind) - {  # of all others, session and epoch are the first two fields
    _RingKind.HELLO,
    _RingKind.HEARTBEAT,
    _RingKind.KV_OFFER,
    _RingKind.KV_ROWS,  # on a link of its own, on whose loss no session depends
}
_Control = Gap | Cancel | Close | Resume
_COUNT = Struct("<H")
_SPAN = Struct("<I I")
_HELD = Struct("<I")
_TALLY = Struct("<Q Q Q I Q I")
_FAULTS = {int(code): code for code in FaultCode}
_DATA_BYTES = _LAYOUTS[_RingKind.DATA].size
_BLOB_BYTES = HEADER.size + DIGEST_BYTES


class MalformedMessage(PeerFault):
    """The content of a message is invalid, but it names its session: only that has to end."""

    def __init__(self, message: Malformed) -> None:
        super().__init__(message.text)
        self.message = message


def encode(message: Message) -> list[Buffer]:
    """Encode a message as parts to be sent in order; a payload is not copied."""
    match message:
        case Data():
            return _pack_data(message)
        case Logits(session, epoch, gen, pos, blob):
            return _pack_blob(_pack(_RingKind.LOGITS, session, epoch, gen, pos), blob)
        case KvRows(session, layer, pos, split, blob):
            return _pack_blob(_pack(_RingKind.KV_ROWS, session, layer, pos, split), blob)
        case _:
            return [_pack_small(message)]


def _pack_small(
    message: Hello | KvOffer | Heartbeat | _Control | Fault | UnknownRingMessage,
) -> bytes:
    match message:
        case Hello(node, epoch, plan, group):
            return _pack(_RingKind.HELLO, node, epoch, plan) + sized(group)
        case KvOffer(node, epoch, plan, group):
            return _pack(_RingKind.KV_OFFER, node, epoch, plan) + sized(group)
        case Fault(session, epoch, code, rank, text):
            return _pack(_RingKind.FAULT, session, epoch, code, rank) + sized(_cut(text))
        case UnknownRingMessage(unknown, body):
            return bytes([PROTOCOL_VERSION, unknown]) + body
        case _:
            return _pack_control(message)


def _pack_control(message: Heartbeat | _Control) -> bytes:
    match message:
        case Close(session, epoch, keep, tallies, is_own):
            head = _pack(_RingKind.CLOSE, session, epoch, keep, len(tallies))
            packed = (sized(_pack_tally(tally)) for tally in tallies)
            return b"".join((head, *packed, bytes([is_own])))
        case Resume(session, epoch, base, length, whole, lost, held):
            head = _pack(_RingKind.RESUME, session, epoch, base, length, whole)
            spans = (_SPAN.pack(span.start, span.stop) for span in lost)
            return b"".join((head, _COUNT.pack(len(lost)), *spans, _HELD.pack(held)))
        case Heartbeat() | Gap() | Cancel():
            return _pack_plain(message)
        case _:
            assert_never(message)


def size(message: Data) -> int:
    """Return the encoded size of a Data message."""
    blob = message.blob
    return _DATA_BYTES + (0 if blob is None else _BLOB_BYTES + len(blob.payload))


def decode(buffer: Buffer) -> Message:
    """Decode one whole message; a payload is a view into ``buffer``, not a copy.

    Raises:
        MalformedMessage: it is a message of a session, and its content breaks a limit.
        PeerFault: any other message breaks a limit, is too short for its kind, or has another major
            version. That has to end the link: nobody knows which session lacks the message, and
            that session would wait until its timeout.
    """
    view = memoryview(buffer)
    if len(view) < 2:
        raise PeerFault(f"Message of {len(view)} bytes")
    if view[0] != PROTOCOL_VERSION:
        raise PeerFault(
            f"Message of protocol version {view[0]}; this node speaks {PROTOCOL_VERSION}",
            hint="run the same version of meshllm on every node",
        )
    try:
        kind = _RingKind(view[1])
    except ValueError:
        return UnknownRingMessage(view[1], bytes(view[2:]))
    layout, name = _LAYOUTS[kind], kind.name.capitalize()
    if len(view) < layout.size:
        raise PeerFault(f"{name} of {len(view)} bytes; it takes {layout.size}")
    _, _, *fields = layout.unpack_from(view)
    try:
        return _build(kind, fields, view[layout.size :])
    except PeerFault as fault:
        if kind not in _OF_SESSIONS:
            raise
        session, epoch, *_ = fields
        is_close = kind is _RingKind.CLOSE
        malformed = Malformed(SessionId(session), epoch, str(fault), is_close=is_close)
        raise MalformedMessage(malformed) from None


def _build(kind: _RingKind, fields: list[Any], rest: memoryview) -> Message:
    match kind:
        case _RingKind.HELLO | _RingKind.KV_OFFER:
            node, epoch, plan = fields
            named = Hello if kind is _RingKind.HELLO else KvOffer
            return named(NodeId(node), epoch, Digest(plan), _group(bytes(rest), kind))
        case _RingKind.HEARTBEAT:
            return Heartbeat(*fields)
        case _RingKind.DATA:
            return _data(fields, rest)
        case _RingKind.LOGITS:
            session, epoch, gen, pos = fields
            _bounded("pos", pos, 0, MAX_POSITION - 1)
            return Logits(SessionId(session), epoch, gen, pos, _blob(rest))
        case _RingKind.KV_ROWS:
            return _kv_rows(SessionId(fields[0]), fields[1:], _blob(rest))
        case _RingKind.FAULT:
            return _fault(fields, rest)
        case _:
            return _control(kind, SessionId(fields[0]), fields[1:], rest)


def _control(
    kind: Literal[_RingKind.GAP, _RingKind.CANCEL, _RingKind.CLOSE, _RingKind.RESUME],
    session: SessionId,
    fields: list[Any],
    rest: memoryview,
) -> _Control:
    match kind:
        case _RingKind.GAP:
            epoch, gen, kv_len = fields
            return Gap(session, epoch, gen, _bounded("kv_len", kv_len, 0, MAX_POSITION))
        case _RingKind.CANCEL:
            return Cancel(session, *fields)
        case _RingKind.CLOSE:
            epoch, keep, count = fields
            _bounded("keep", keep, 0, MAX_POSITION)
            return _close(session, epoch, keep, count, Reader(bytes(rest), "Close"))
        case _RingKind.RESUME:
            epoch, base, length, whole = fields
            _bounded("length", length, 1, MAX_POSITION)
            is_whole = bool(_bounded("whole", whole, 0, 1))
            reader = Reader(bytes(rest), "Resume")
            lost = _lost(reader) if rest else ()
            (held,) = reader.unpack(_HELD) if reader.left else (0,)
            _bounded("held", held, 0, length)
            return Resume(session, epoch, SessionId(base), length, is_whole, lost, held)
        case _:
            assert_never(kind)


def _close(session: SessionId, epoch: int, keep: int, count: int, reader: Reader) -> Close:
    tallies = _tallies(count, reader)
    is_own = bool(_bounded("owner", reader.take(1)[0], 0, 1)) if reader.left else False
    return Close(session, epoch, keep, tallies, is_own)


def _data(fields: list[Any], rest: memoryview) -> Data:
    session, epoch, gen, pos, rows, flags = fields
    _bounded("rows", rows, 1, MAX_ROWS)
    _bounded("pos", pos, 0, MAX_POSITION - rows)
    blob = _blob(rest) if rest else None
    return Data(SessionId(session), epoch, gen, pos, rows, Flags(flags), blob)


def _blob(rest: memoryview) -> Blob:
    if len(rest) < _BLOB_BYTES:
        raise PeerFault(f"Blob of {len(rest)} bytes; its header takes {_BLOB_BYTES}")
    payload = rest[_BLOB_BYTES:]
    dtype, shape = unpack_header(rest[: HEADER.size])
    check_shape(dtype, shape, len(payload))
    return Blob(dtype, shape, Digest(bytes(rest[HEADER.size : _BLOB_BYTES])), payload)


def _kv_rows(session: SessionId, fields: list[Any], blob: Blob) -> KvRows:
    layer, pos, split = fields
    if len(blob.shape) != MAX_DIMS or blob.shape[0] != 1:
        raise PeerFault(f"KvRows of shape {list(blob.shape)}; it is 1, heads, rows, width")
    if not split:
        _bounded("heads", blob.shape[1], 1, 1)  # hidden states
    _bounded("rows", blob.shape[2], 1, MAX_ROWS)
    _bounded("pos", pos, 0, MAX_POSITION - blob.shape[2])
    _bounded("layer", layer, 0, MAX_LAYERS)
    _bounded("split", split, 0, blob.shape[3] - 1)
    return KvRows(session, layer, pos, split, blob)


def _lost(reader: Reader) -> tuple[Span, ...]:
    (count,) = reader.unpack(_COUNT)
    _bounded("lost spans", count, 0, MAX_RANKS)
    pairs = [reader.unpack(_SPAN) for _ in range(count)]
    return tuple(
        Span(start, _bounded("last layer", stop, start, MAX_LAYERS)) for start, stop in pairs
    )


def _tallies(count: int, reader: Reader) -> tuple[RankStats, ...]:
    _bounded("tallies", count, 0, MAX_RANKS)
    return tuple(_tally(Reader(reader.sized(MAX_TALLY), "RankStats")) for _ in range(count))


def _tally(reader: Reader) -> RankStats:
    *spent, steps, bytes_sent, round_trip_us = reader.unpack(_TALLY)
    return RankStats(JobTimes(*spent), steps, bytes_sent, round_trip_us)


def _group(rest: bytes, kind: _RingKind) -> GroupId:
    name = kind.name.capitalize()
    return GroupId(Reader(rest, name).sized(GROUP_BYTES)) if rest else FIRST_GROUP


def _fault(fields: list[Any], rest: memoryview) -> Fault:
    session, epoch, code, rank = fields
    text = Reader(bytes(rest), "Fault").text(MAX_TEXT)
    return Fault(SessionId(session), epoch, _FAULTS.get(code, FaultCode.OTHER), rank, text)


def _bounded(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise PeerFault(f"Message with {value} {name}; allowed are {low} to {high}")
    return value


def _pack_plain(message: Heartbeat | Gap | Cancel) -> bytes:
    fields = [getattr(message, name) for name in message.__match_args__]
    return _pack(_RingKind[type(message).__name__.upper()], *fields)


def _pack(kind: _RingKind, *fields: bytes | int) -> bytes:
    return _LAYOUTS[kind].pack(PROTOCOL_VERSION, kind, *fields)


def _pack_data(data: Data) -> list[Buffer]:
    head = _pack(
        _RingKind.DATA, data.session, data.epoch, data.gen, data.pos, data.rows, data.flags
    )
    return [head] if data.blob is None else _pack_blob(head, data.blob)


def _pack_blob(head: bytes, blob: Blob) -> list[Buffer]:
    return [head + pack_header(blob.dtype, blob.shape) + blob.digest, blob.payload]


def _pack_tally(tally: RankStats) -> bytes:
    spent = tally.spent
    return _TALLY.pack(
        spent.compute_us,
        spent.serialise_us,
        spent.queue_us,
        tally.steps,
        tally.bytes_sent,
        tally.round_trip_us,
    )


def _cut(text: str) -> bytes:
    # "ignore" drops a character that the cut splits, and lone surrogates.
    return text.encode(errors="ignore")[:MAX_TEXT].decode(errors="ignore").encode()
