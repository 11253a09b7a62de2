"""Codec of mesh link messages, and all their limits.

A message is a version byte, a kind byte and fields. The version is the major protocol version:
minor versions add kinds, and append fields to known kinds. Unknown kinds decode to
`UnknownMeshMessage`, appended fields are ignored, and an unknown close reason decodes to
`CloseReason.OTHER`. Items are only parsed here, not verified.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import TypeAlias, assert_never

from meshllm.errors import PeerFault
from meshllm.names import NODE_ID_BYTES, NodeId
from meshllm.protocol.binary import Reader, sized
from meshllm.protocol.membership.gossip import (
    MARK_BYTES,
    MAX_ITEM_BYTES,
    Item,
    Slot,
    SummaryEntry,
    kind_of,
)
from meshllm.protocol.membership.records import MACHINE_BYTES, MAX_ADDRESS_BYTES, MAX_MEMBERS
from meshllm.protocol.session.messages import PROTOCOL_VERSION, Buffer
from meshllm.protocol.trust.fallbacks import MAX_FALLBACK_ADDRESSES, MAX_FALLBACKS, Fallback

MAX_REMOVALS = 1024  # nodes removed over the lifetime of one mesh
FOUNDER_REMOVALS = 512  # of these, for the founder only
BRANCH_REMOVALS = 64  # by one guest of the founder and those that it invited, together
MAX_AMENDERS = 128  # nodes that changed the charter, including departed ones
MAX_CARRIED = 4  # records of unknown kinds per node
MAX_SLOTS = (2 + MAX_CARRIED) * MAX_MEMBERS + 1 + MAX_AMENDERS + MAX_REMOVALS
MAX_ITEMS = 256  # of one message
MAX_ITEMS_BYTES = 256 * 1024  # of one message
MAX_REQUEST_BYTES = 4 * 1024 * 1024  # of JSON: a prompt of a million tokens
MAX_EVENT_BYTES = 4 * 1024 * 1024  # of JSON: one event of an answer
MAX_MESH_BYTES = MAX_REQUEST_BYTES + 64 * 1024  # of any message, also of a later version
MAX_MODEL_LIST_BYTES = 128 * 1024  # of JSON: some 300 models
REQUEST_ID_BYTES = 16
MAX_HELD_US = 2**32 - 1  # 71 minutes; far too old to measure a round trip
MAX_WALL_MS = 253_402_300_799_999  # the last millisecond of the year 9999

_PREFIX = Struct("<BB")
_COUNT = Struct("<H")
_NODE = Struct(f"<{NODE_ID_BYTES}s")
_BEAT = Struct(f"<QQIQ {MARK_BYTES}s")
_SLOT = Struct(f"<B {NODE_ID_BYTES}s")
_ENTRY = Struct(f"<B {NODE_ID_BYTES}s Q Q {MARK_BYTES}s")


class CloseReason(IntEnum):
    """Why one side closes a link."""

    OTHER = 0
    """A reason added by a later version."""
    LEAVING = 1
    """The node is shutting down."""
    DUPLICATE = 2
    """Another process with the same key is already linked."""
    CROSSED = 3
    """Both sides dialled; the other link is kept."""
    SILENT = 4
    """Idle timeout: no message arrived."""
    REMOVED = 5
    """The node or one of its inviters was removed from the mesh, or its membership expired."""
    RULES = 6
    """The peer violated the protocol."""
    FULL = 7
    """The limit of links is reached."""


@dataclass(frozen=True, slots=True)
class MeshHeartbeat:
    """Keep-alive that measures the round trip and carries a digest of the sender's items."""

    stamp: int
    """Microseconds on the sender's clock."""
    echo: int
    """The peer's last stamp, or 0."""
    held: int
    """Microseconds from receiving that stamp to sending this beat, at most `MAX_HELD_US`."""
    wall_ms: int
    """The sender's time of day in milliseconds since 1970, at most `MAX_WALL_MS`."""
    digest: bytes
    """8-byte hash of the items that the sender shares."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of the items that the sender shares, answered with `Items` and `Want`."""

    entries: tuple[SummaryEntry, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """Items that the receiver lacks, as far as the sender knows."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Slots whose items the sender requests."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Generate:
    """Request a generation; the node defines the body."""

    request_id: bytes
    """16-byte id of the request on this link."""
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """One event of the answer."""

    request_id: bytes
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel a request."""

    request_id: bytes


@dataclass(frozen=True, slots=True)
class AskModels:
    """Ask for the models of the mesh: a client knows no records."""


@dataclass(frozen=True, slots=True)
class ModelList:
    """The models of the mesh; the node defines the body."""

    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class FallbackList:
    """Other nodes that a client may ask when the sender is lost."""

    fallbacks: tuple[Fallback, ...]
    machine: bytes = b""
    """The sender's tag, which shows a client on the same machine that the sender is there, too."""


@dataclass(frozen=True, slots=True)
class Bye:
    """The last message on a link, with the reason for closing it."""

    why: CloseReason


@dataclass(frozen=True, slots=True)
class UnknownMeshMessage:
    """A message of a kind added by a later version; counts as a sign of life only."""

    kind: int
    body: bytes


RequestMessage: TypeAlias = Generate | AnswerEvent | CancelRequest | AskModels | ModelList
"""Messages that the mesh machine passes through to the node."""

Message: TypeAlias = (
    MeshHeartbeat
    | Summary
    | Items
    | Want
    | Bye
    | FallbackList
    | RequestMessage
    | UnknownMeshMessage
)


class _MeshKind(IntEnum):
    BEAT = 1
    SUMMARY = 2
    ITEMS = 3
    WANT = 4
    GENERATE = 5
    ANSWER_EVENT = 6
    CANCEL_REQUEST = 7
    BYE = 8
    ASK_MODELS = 9
    MODEL_LIST = 10
    FALLBACK_LIST = 11


_KINDS = set(_MeshKind)
_WHYS = {int(why): why for why in CloseReason}


def encode(message: Message) -> bytes:
    """Encode a message."""
    match message:
        case MeshHeartbeat(stamp, echo, held, wall_ms, digest):
            return _pack(_MeshKind.BEAT, _BEAT.pack(stamp, echo, held, wall_ms, digest))
        case Summary(entries):
            return _pack_list(_MeshKind.SUMMARY, map(_pack_entry, entries))
        case Items(items):
            return _pack_list(_MeshKind.ITEMS, (sized(item.encode()) for item in items))
        case Want(slots):
            return _pack_list(
                _MeshKind.WANT, (_SLOT.pack(slot.kind, slot.subject) for slot in slots)
            )
        case Generate() | AnswerEvent() | CancelRequest() | AskModels() | ModelList():
            return _pack_request(message)
        case FallbackList(fallbacks, machine):
            packed = _pack_list(_MeshKind.FALLBACK_LIST, map(_pack_fallback, fallbacks))
            return packed + sized(machine)
        case Bye() | UnknownMeshMessage():
            return _pack_plain(message)
        case _:
            assert_never(message)


def decode(buffer: Buffer) -> Message:
    """Decode one message.

    Raises:
        PeerFault: another major version, too long, or a malformed message of a known kind.
    """
    if len(buffer) > MAX_MESH_BYTES:
        raise PeerFault(f"Message of {len(buffer)} B; at most {MAX_MESH_BYTES} B are allowed")
    reader = Reader(bytes(buffer), "Message")
    version, code = reader.unpack(_PREFIX)
    if version != PROTOCOL_VERSION:
        raise PeerFault(
            f"Message of protocol version {version}; this node speaks {PROTOCOL_VERSION}",
            hint="run the same version of meshllm on every node",
        )
    if code not in _KINDS:
        return UnknownMeshMessage(code, reader.rest(reader.left))
    return _read(_MeshKind(code), reader)


def batches(items: list[Item]) -> list[Items]:
    """Pack items, in order, into as few messages as the limits allow."""
    messages, batch, size = [], list[Item](), _COUNT.size
    for item in items:
        length = len(sized(item.encode()))
        if size + length > MAX_ITEMS_BYTES or len(batch) == MAX_ITEMS:
            messages.append(Items(tuple(batch)))
            batch, size = [], _COUNT.size
        batch.append(item)
        size += length
    return [*messages, Items(tuple(batch))] if batch else messages


def _read(kind: _MeshKind, reader: Reader) -> Message:
    match kind:
        case _MeshKind.BEAT:
            return _beat(reader)
        case _MeshKind.SUMMARY:
            count = _counted(reader, "entries", MAX_SLOTS)
            return Summary(tuple(_entry(reader) for _ in range(count)))
        case _MeshKind.ITEMS:
            reader.bounded("bytes of items", reader.left, 0, MAX_ITEMS_BYTES)
            count = _counted(reader, "items", MAX_ITEMS)
            return Items(tuple(Item.decode(reader.sized(MAX_ITEM_BYTES)) for _ in range(count)))
        case _MeshKind.WANT:
            count = _counted(reader, "slots", MAX_SLOTS)
            return Want(tuple(_slot(*reader.unpack(_SLOT)) for _ in range(count)))
        case _MeshKind.BYE:
            return Bye(_WHYS.get(reader.take(1)[0], CloseReason.OTHER))
        case _MeshKind.FALLBACK_LIST:
            count = _counted(reader, "fallbacks", MAX_FALLBACKS)
            fallbacks = tuple(_fallback(reader) for _ in range(count))
            return FallbackList(fallbacks, reader.sized(MACHINE_BYTES))
        case _:
            return _request_message(kind, reader)


def _beat(reader: Reader) -> MeshHeartbeat:
    stamp, echo, held, wall_ms, digest = reader.unpack(_BEAT)
    reader.bounded("milliseconds since 1970", wall_ms, 0, MAX_WALL_MS)
    return MeshHeartbeat(stamp, echo, held, wall_ms, digest)


def _request_message(kind: _MeshKind, reader: Reader) -> RequestMessage:
    if kind is _MeshKind.ASK_MODELS:
        return AskModels()
    if kind is _MeshKind.MODEL_LIST:
        return ModelList(reader.rest(MAX_MODEL_LIST_BYTES))
    request_id = reader.take(REQUEST_ID_BYTES)
    if kind is _MeshKind.CANCEL_REQUEST:
        return CancelRequest(request_id)
    if kind is _MeshKind.GENERATE:
        return Generate(request_id, reader.rest(MAX_REQUEST_BYTES))
    return AnswerEvent(request_id, reader.rest(MAX_EVENT_BYTES))


def _counted(reader: Reader, name: str, most: int) -> int:
    (count,) = reader.unpack(_COUNT)
    reader.bounded(name, count, 0, most)
    return int(count)


def _entry(reader: Reader) -> SummaryEntry:
    code, subject, incarnation, seq, mark = reader.unpack(_ENTRY)
    return SummaryEntry(_slot(code, subject), incarnation, seq, mark)


def _fallback(reader: Reader) -> Fallback:
    (node,) = reader.unpack(_NODE)
    machine = reader.sized(MACHINE_BYTES)
    count = _counted(reader, "addresses", MAX_FALLBACK_ADDRESSES)
    return Fallback(
        NodeId(node), machine, tuple(reader.text(MAX_ADDRESS_BYTES) for _ in range(count))
    )


def _slot(code: int, subject: bytes) -> Slot:
    return Slot(kind_of(code), NodeId(subject))


def _pack(kind: int, *parts: bytes) -> bytes:
    return _PREFIX.pack(PROTOCOL_VERSION, kind) + b"".join(parts)


def _pack_request(message: RequestMessage) -> bytes:
    match message:
        case Generate(request_id, body):
            return _pack(_MeshKind.GENERATE, request_id, body)
        case AnswerEvent(request_id, body):
            return _pack(_MeshKind.ANSWER_EVENT, request_id, body)
        case CancelRequest(request_id):
            return _pack(_MeshKind.CANCEL_REQUEST, request_id)
        case AskModels():
            return _pack(_MeshKind.ASK_MODELS)
        case ModelList(body):
            return _pack(_MeshKind.MODEL_LIST, body)
        case _:
            assert_never(message)


def _pack_plain(message: Bye | UnknownMeshMessage) -> bytes:
    if isinstance(message, Bye):
        return _pack(_MeshKind.BYE, bytes([message.why]))
    return _pack(message.kind, message.body)


def _pack_list(kind: _MeshKind, parts: Iterable[bytes]) -> bytes:
    packed = list(parts)
    return _pack(kind, _COUNT.pack(len(packed)), *packed)


def _pack_entry(entry: SummaryEntry) -> bytes:
    slot = entry.slot
    return _ENTRY.pack(slot.kind, slot.subject, entry.incarnation, entry.seq, entry.mark)


def _pack_fallback(fallback: Fallback) -> bytes:
    addresses = [sized(address.encode()) for address in fallback.addresses]
    return b"".join(
        (
            _NODE.pack(fallback.node),
            sized(fallback.machine),
            _COUNT.pack(len(addresses)),
            *addresses,
        )
    )
