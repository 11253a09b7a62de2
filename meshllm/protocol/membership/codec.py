"""Messages of mesh links to bytes and back, with every limit.

A message is one version byte, one kind byte and fields. The version is the major one of the
protocol: within it kinds are added, and fields behind those that are known. A message of an unknown
kind is `Unknown`, other fields are not read, and a reason that is not known is `Why.OTHER`. An item
is only taken apart here: whether it is to be believed is not decided by its bytes.
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
    Entry,
    Item,
    Slot,
    kind_of,
)
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.protocol.session.messages import PROTOCOL_VERSION, Buffer

MAX_REMOVALS = 1024  # nodes that were removed from one mesh, ever
MAX_AMENDERS = 128  # nodes that changed the charter, those that are gone among them
MAX_CARRIED = 4  # records of one node that this version does not know
MAX_SLOTS = (2 + MAX_CARRIED) * MAX_MEMBERS + 1 + MAX_AMENDERS + MAX_REMOVALS
MAX_ITEMS = 256  # of one message
MAX_ITEMS_BYTES = 256 * 1024  # of one message
MAX_ASK_BYTES = 4 * 1024 * 1024  # of JSON: a prompt of a million tokens
MAX_SAID_BYTES = 4 * 1024 * 1024  # of JSON: one event of an answer
ASK_ID_BYTES = 16
MAX_HELD_US = 2**32 - 1  # 71 minutes; a stamp that old measures nothing
MAX_WALL_MS = 253_402_300_799_999  # the last millisecond of the year 9999

_PREFIX = Struct("<BB")
_COUNT = Struct("<H")
_BEAT = Struct(f"<QQIQ {MARK_BYTES}s")
_SLOT = Struct(f"<B {NODE_ID_BYTES}s")
_ENTRY = Struct(f"<B {NODE_ID_BYTES}s Q Q {MARK_BYTES}s")


class Why(IntEnum):
    """Why a link is closed by one side."""

    OTHER = 0
    """For a reason of a later version."""
    LEAVING = 1
    """Its node stops."""
    TWIN = 2
    """Another process with the same key is linked already."""
    CROSSED = 3
    """Both sides dialled, and the other link stays."""
    SILENT = 4
    """Nothing was heard."""
    REMOVED = 5
    """The node, or who let it in, was removed from the mesh, or its membership is over."""
    RULES = 6
    """It sent what the rules forbid."""
    FULL = 7
    """There are as many links as may be."""


@dataclass(frozen=True, slots=True)
class Beat:
    """I am here, and this is what I hold; ``echo`` and ``held`` are for the round trip."""

    stamp: int
    """Microseconds on the sender's clock."""
    echo: int
    """The other side's last stamp, or 0."""
    held: int
    """Microseconds between hearing that stamp and sending this beat; `MAX_HELD_US` at most."""
    wall_ms: int
    """Time of day where the sender is, in milliseconds since 1970; `MAX_WALL_MS` at most."""
    digest: bytes
    """8 bytes that name the items that the sender shares."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Which items the sender shares; the answer is Items and Want."""

    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """Items that the other side lacks, as far as the sender knows."""

    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """Slots of which the sender lacks the item that the other side has."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a generation; what it says is the business of the node."""

    ask: bytes
    """16 bytes that name the request on this link."""
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class Said:
    """One event of the answer."""

    ask: bytes
    body: bytes
    """JSON."""


@dataclass(frozen=True, slots=True)
class Hush:
    """The rest of the answer is not wanted."""

    ask: bytes


@dataclass(frozen=True, slots=True)
class Bye:
    """The last message of a link: why it is closed."""

    why: Why


@dataclass(frozen=True, slots=True)
class Unknown:
    """A message of a later version, which proves that its sender is there, and nothing else."""

    kind: int
    body: bytes


Talk: TypeAlias = Ask | Said | Hush
"""What goes through a link for the node above."""

Message: TypeAlias = Beat | Summary | Items | Want | Bye | Talk | Unknown


class _Kind(IntEnum):
    BEAT = 1
    SUMMARY = 2
    ITEMS = 3
    WANT = 4
    ASK = 5
    SAID = 6
    HUSH = 7
    BYE = 8


_KINDS = set(_Kind)
_WHYS = {int(why): why for why in Why}


def encode(message: Message) -> bytes:
    """Write a message."""
    match message:
        case Beat(stamp, echo, held, wall_ms, digest):
            return _pack(_Kind.BEAT, _BEAT.pack(stamp, echo, held, wall_ms, digest))
        case Summary(entries):
            return _pack_list(_Kind.SUMMARY, map(_pack_entry, entries))
        case Items(items):
            return _pack_list(_Kind.ITEMS, (sized(item.encode()) for item in items))
        case Want(slots):
            return _pack_list(_Kind.WANT, (_SLOT.pack(slot.kind, slot.subject) for slot in slots))
        case Ask() | Said() | Hush():
            body = b"" if isinstance(message, Hush) else message.body
            return _pack(_Kind[type(message).__name__.upper()], message.ask, body)
        case Bye(why):
            return _pack(_Kind.BYE, bytes([why]))
        case Unknown(kind, body):
            return _pack(kind, body)
        case _:
            assert_never(message)


def decode(buffer: Buffer) -> Message:
    """Read one whole message.

    Raises:
        PeerFault: a message of another major version, or of a known kind and beyond the limits.
    """
    reader = Reader(bytes(buffer), "Message")
    version, code = reader.unpack(_PREFIX)
    if version != PROTOCOL_VERSION:
        raise PeerFault(
            f"Message of protocol version {version}; this node speaks {PROTOCOL_VERSION}",
            hint="run the same version of meshllm on every node",
        )
    if code not in _KINDS:
        return Unknown(code, reader.rest(reader.left))
    return _read(_Kind(code), reader)


def batches(items: list[Item]) -> list[Items]:
    """Put items into as few messages as the limits of one allow, in order."""
    messages, batch, size = [], list[Item](), 0
    for item in items:
        size += len(item.encode()) + 2
        if size > MAX_ITEMS_BYTES or len(batch) == MAX_ITEMS:
            messages.append(Items(tuple(batch)))
            batch, size = [], len(item.encode()) + 2
        batch.append(item)
    return [*messages, Items(tuple(batch))] if batch else messages


def _read(kind: _Kind, reader: Reader) -> Message:
    match kind:
        case _Kind.BEAT:
            return _beat(reader)
        case _Kind.SUMMARY:
            count = _counted(reader, "entries", MAX_SLOTS)
            return Summary(tuple(_entry(reader) for _ in range(count)))
        case _Kind.ITEMS:
            reader.bounded("bytes of items", reader.left, 0, MAX_ITEMS_BYTES)
            count = _counted(reader, "items", MAX_ITEMS)
            return Items(tuple(Item.decode(reader.sized(MAX_ITEM_BYTES)) for _ in range(count)))
        case _Kind.WANT:
            count = _counted(reader, "slots", MAX_SLOTS)
            return Want(tuple(_slot(*reader.unpack(_SLOT)) for _ in range(count)))
        case _Kind.ASK | _Kind.SAID | _Kind.HUSH:
            return _talk(kind, reader)
        case _Kind.BYE:
            return Bye(_WHYS.get(reader.take(1)[0], Why.OTHER))
        case _:
            assert_never(kind)


def _beat(reader: Reader) -> Beat:
    stamp, echo, held, wall_ms, digest = reader.unpack(_BEAT)
    reader.bounded("milliseconds since 1970", wall_ms, 0, MAX_WALL_MS)
    return Beat(stamp, echo, held, wall_ms, digest)


def _talk(kind: _Kind, reader: Reader) -> Talk:
    ask = reader.take(ASK_ID_BYTES)
    if kind is _Kind.HUSH:
        return Hush(ask)
    if kind is _Kind.ASK:
        return Ask(ask, reader.rest(MAX_ASK_BYTES))
    return Said(ask, reader.rest(MAX_SAID_BYTES))


def _counted(reader: Reader, name: str, most: int) -> int:
    (count,) = reader.unpack(_COUNT)
    reader.bounded(name, count, 0, most)
    return int(count)


def _entry(reader: Reader) -> Entry:
    code, subject, incarnation, seq, mark = reader.unpack(_ENTRY)
    return Entry(_slot(code, subject), incarnation, seq, mark)


def _slot(code: int, subject: bytes) -> Slot:
    return Slot(kind_of(code), NodeId(subject))


def _pack(kind: int, *parts: bytes) -> bytes:
    return _PREFIX.pack(PROTOCOL_VERSION, kind) + b"".join(parts)


def _pack_list(kind: _Kind, parts: Iterable[bytes]) -> bytes:
    packed = list(parts)
    return _pack(kind, _COUNT.pack(len(packed)), *packed)


def _pack_entry(entry: Entry) -> bytes:
    slot = entry.slot
    return _ENTRY.pack(slot.kind, slot.subject, entry.incarnation, entry.seq, entry.mark)
