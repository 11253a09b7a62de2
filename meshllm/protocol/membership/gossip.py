"""Signed gossip items, and the total order that decides which of two is kept.

Each item has a slot, and of two items for one slot the one of higher rank is kept, so that stores
that received the same items in any order are equal. A node has one slot each for its profile, its
state and its charter amendments, the mesh has one for the charter itself, and each removed node has
one for its removal. Items are signed by their author: a relaying node can withhold but not alter
them.

Items of unknown kinds are stored and relayed: they describe their author, and are shared for as
long as the author's state is. Records of a later version thus reach all nodes of that version, even
through older nodes, and stores with the same items have the same digest.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from struct import Struct
from typing import Self

from blake3 import blake3

from meshllm.names import NODE_ID_BYTES, MeshId, NodeId
from meshllm.protocol.binary import Reader, sized
from meshllm.protocol.trust.credential import MAX_CREDENTIAL_BYTES
from meshllm.protocol.trust.identity import SIGNATURE_BYTES, NodeKey, verify

MAX_ITEM_BYTES = 32 * 1024
MARK_BYTES = 8
WHOLE_MESH = NodeId(bytes(NODE_ID_BYTES))
"""The subject of items about the whole mesh."""

_HEAD = Struct(f"<B {NODE_ID_BYTES}s {NODE_ID_BYTES}s Q Q")
_LABEL = b"meshllm item 1\n"
_EMPTY_BYTES = _HEAD.size + 2 * len(sized(b"")) + SIGNATURE_BYTES


class Kind(IntEnum):
    """The kind of record in an item, in sending order: a state is valid only after a profile."""

    REMOVAL = 1
    PROFILE = 2
    STATE = 3
    CHARTER = 4
    AMENDMENTS = 5


_KINDS = {int(kind): kind for kind in Kind}
_LASTING = {Kind.REMOVAL, Kind.CHARTER, Kind.AMENDMENTS}


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The key of an item in a store; a store keeps one item per slot."""

    kind: int
    """A `Kind`, or a number unknown to this version."""
    subject: NodeId

    @property
    def is_own(self) -> bool:
        """Whether its item describes its author, and is forgotten with the author."""
        return self.kind not in _LASTING


@dataclass(frozen=True, slots=True)
class SummaryEntry:
    """The header of an item in a summary, enough to decide which side has the newer item."""

    slot: Slot
    incarnation: int
    seq: int
    mark: bytes


@dataclass(frozen=True)
class Item:
    """One signed record."""

    kind: int
    subject: NodeId
    """The node described: the author, the removed node, or `WHOLE_MESH`."""
    author: NodeId
    incarnation: int
    """Of the author; for a charter and amendments their version, for a removal 0."""
    seq: int
    """Counts the author's items of this incarnation; 0 for charter, amendments and removals."""
    credential: bytes
    """The author's; empty in a state, which is accepted only if the profile is known."""
    payload: bytes
    signature: bytes = b""

    def sign(self, key: NodeKey, mesh: MeshId) -> Self:
        """Return the item signed with its author's key."""
        return replace(self, signature=key.sign(self._signed(mesh)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode an item; raise `PeerFault` if it is malformed."""
        reader = Reader(data, "Item")
        reader.bounded("bytes", len(data), 0, MAX_ITEM_BYTES)
        kind, subject, author, incarnation, seq = reader.unpack(_HEAD)
        credential = reader.sized(MAX_CREDENTIAL_BYTES)
        payload = reader.sized(MAX_ITEM_BYTES)
        signature = reader.take(SIGNATURE_BYTES)
        return cls(
            kind_of(kind),
            NodeId(subject),
            NodeId(author),
            incarnation,
            seq,
            credential,
            payload,
            signature,
        )

    def encode(self) -> bytes:
        """Encode the item."""
        return self._body + self.signature

    @property
    def size(self) -> int:
        """How many bytes it takes, encoded and signed."""
        return _EMPTY_BYTES + len(self.credential) + len(self.payload)

    def is_signed(self, mesh: MeshId) -> bool:
        """Return whether its author signed it for this mesh."""
        return verify(self.author, self._signed(mesh), self.signature)

    @property
    def slot(self) -> Slot:
        """The slot that the item belongs to."""
        return Slot(self.kind, self.subject)

    @property
    def entry(self) -> SummaryEntry:
        """The header of the item, for a summary."""
        return SummaryEntry(self.slot, self.incarnation, self.seq, self.mark)

    @property
    def precedence(self) -> tuple[int, int, int, int, NodeId, bytes]:
        """Sort key: of two items for one slot every node keeps the higher one.

        Of two removals of one member that is the one whose author is fewer invitations away from
        the founder, as its credential is shorter, then the one that spares fewer: nobody can spare
        members that one nearer to the founder, or as near, has removed.
        """
        credential, payload = len(self.credential), len(self.payload)
        above, spares = (-credential, -payload) if self.kind == Kind.REMOVAL else (0, 0)
        return self.incarnation, self.seq, above, spares, self.author, self.mark

    @cached_property
    def mark(self) -> bytes:
        """The first 8 bytes of the blake3 hash of the encoded item."""
        return blake3(self.encode()).digest(MARK_BYTES)

    def _signed(self, mesh: MeshId) -> bytes:
        return _LABEL + mesh + self._body

    @cached_property
    def _body(self) -> bytes:
        head = _HEAD.pack(self.kind, self.subject, self.author, self.incarnation, self.seq)
        return head + sized(self.credential) + sized(self.payload)


class ItemStore(Mapping[Slot, Item]):
    """The current items, one per slot."""

    def __init__(self) -> None:
        self._items: dict[Slot, Item] = {}

    def __getitem__(self, slot: Slot) -> Item:
        return self._items[slot]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def is_news(self, item: Item) -> bool:
        """Return whether the item ranks above the stored one."""
        kept = self.get(item.slot)
        return kept is None or item.precedence > kept.precedence

    def keep(self, item: Item) -> None:
        """Store the item in its slot."""
        self._items[item.slot] = item

    def forget(self, author: NodeId) -> None:
        """Delete the items that describe a node."""
        for slot in [each for each in self if each.is_own and each.subject == author]:
            del self._items[slot]

    def drop(self, slot: Slot) -> None:
        """Delete the item of a slot."""
        del self._items[slot]


def kind_of(code: int) -> int:
    """Return the `Kind` of a number, or the number itself if it is unknown to this version."""
    return _KINDS.get(code, code)


def summarise(items: Iterable[Item]) -> tuple[SummaryEntry, ...]:
    """Return the headers of items, sorted by slot."""
    return tuple(sorted((item.entry for item in items), key=lambda entry: entry.slot))


def digest(items: Iterable[Item]) -> bytes:
    """Return an 8-byte hash of a set of items, independent of their order."""
    return blake3(b"".join(sorted(item.mark for item in items))).digest(MARK_BYTES)


def compare(
    ours: Mapping[Slot, Item], theirs: Iterable[SummaryEntry]
) -> tuple[list[Item], tuple[Slot, ...]]:
    """Return our items that the peer lacks, and the slots whose items we lack.

    Different items of equal incarnation and seq are exchanged both ways; each side decides.
    """
    entries = {entry.slot: entry for entry in theirs}
    lacking, wanted = [], []
    for slot in sorted(ours.keys() | entries.keys()):
        mine, other = ours.get(slot), entries.get(slot)
        if mine is not None and other is not None and mine.mark == other.mark:
            continue
        here = (mine.incarnation, mine.seq) if mine else (-1, -1)
        there = (other.incarnation, other.seq) if other else (-1, -1)
        if mine is not None and here >= there:
            lacking.append(mine)
        if there >= here:
            wanted.append(slot)
    return lacking, tuple(wanted)
