"""Signed items and which of two is kept.

Each item stands in a slot, and of two items for one slot the higher rank is kept, so that stores
that saw the same items in any order are equal. A node has one slot for its profile, one for its
state and one for what it changed of the charter, the mesh has one for the charter itself, and each
removed node has one for its removal. Only the author's signature makes an item; whoever passes it
on can hold it back and nothing else.

An item of a kind that this version does not know is carried: it says what its author is or does,
and goes as far as the author's state does. So records of a later version reach each of its nodes,
also where only others stand between them, and stores that hold the same items have one digest.
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
NOBODY = NodeId(bytes(NODE_ID_BYTES))
"""The subject of what is about the whole mesh."""

_HEAD = Struct(f"<B {NODE_ID_BYTES}s {NODE_ID_BYTES}s Q Q")
_LABEL = b"meshllm item 1\n"


class Kind(IntEnum):
    """What an item says; the order in which they are sent, because a state needs a profile."""

    REMOVAL = 1
    PROFILE = 2
    STATE = 3
    CHARTER = 4
    AMENDMENTS = 5


_KINDS = {int(kind): kind for kind in Kind}
_LASTING = {Kind.REMOVAL, Kind.CHARTER, Kind.AMENDMENTS}


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """The place of an item: of two items for one slot, one is kept."""

    kind: int
    """A `Kind`, or a number that this version does not know."""
    subject: NodeId

    @property
    def is_own(self) -> bool:
        """Whether its item says what its author is or does, and is forgotten with that."""
        return self.kind not in _LASTING


@dataclass(frozen=True, slots=True)
class Entry:
    """An item in a summary: enough to tell which of two is kept."""

    slot: Slot
    incarnation: int
    seq: int
    mark: bytes


@dataclass(frozen=True)
class Item:
    """One signed record."""

    kind: int
    subject: NodeId
    """Whom it is about: its author, the removed node, or `NOBODY`."""
    author: NodeId
    incarnation: int
    """Of the author; the version of a charter and of amendments, 0 of a removal."""
    seq: int
    """Counts the author's items of this incarnation; 0 of what has a version, or is a removal."""
    credential: bytes
    """The author's; empty in a state, which needs a profile to be believed."""
    payload: bytes
    signature: bytes = b""

    def sign(self, key: NodeKey, mesh: MeshId) -> Self:
        """Return the item with the signature of its author, who holds the key."""
        return replace(self, signature=key.sign(self._signed(mesh)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read one item; raise `PeerFault` for anything else."""
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
        """Write the item."""
        return self._body + self.signature

    def is_signed(self, mesh: MeshId) -> bool:
        """Tell whether its author signed it for this mesh."""
        return verify(self.author, self._signed(mesh), self.signature)

    @property
    def slot(self) -> Slot:
        """Where it belongs."""
        return Slot(self.kind, self.subject)

    @property
    def entry(self) -> Entry:
        """Sum it up."""
        return Entry(self.slot, self.incarnation, self.seq, self.mark)

    @property
    def rank(self) -> tuple[int, int, bytes, bytes]:
        """Of two items for one slot the higher one is kept, on every node the same."""
        return self.incarnation, self.seq, self.author, self.mark

    @cached_property
    def mark(self) -> bytes:
        """Name it by 8 bytes of blake3."""
        return blake3(self.encode()).digest(MARK_BYTES)

    def _signed(self, mesh: MeshId) -> bytes:
        return _LABEL + mesh + self._body

    @cached_property
    def _body(self) -> bytes:
        head = _HEAD.pack(self.kind, self.subject, self.author, self.incarnation, self.seq)
        return head + sized(self.credential) + sized(self.payload)


class Store(Mapping[Slot, Item]):
    """The items that are kept, one per slot."""

    def __init__(self) -> None:
        self._items: dict[Slot, Item] = {}

    def __getitem__(self, slot: Slot) -> Item:
        return self._items[slot]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def is_news(self, item: Item) -> bool:
        """Tell whether the item ranks above the one that is kept."""
        kept = self.get(item.slot)
        return kept is None or item.rank > kept.rank

    def keep(self, item: Item) -> None:
        """Put the item in its slot."""
        self._items[item.slot] = item

    def forget(self, author: NodeId) -> None:
        """Drop what a node said of itself."""
        for slot in [each for each in self if each.is_own and each.subject == author]:
            del self._items[slot]

    def drop(self, slot: Slot) -> None:
        """Drop the item of a slot."""
        del self._items[slot]


def kind_of(code: int) -> int:
    """Return the kind of this number, or the number where this version does not know it."""
    return _KINDS.get(code, code)


def summarise(items: Iterable[Item]) -> tuple[Entry, ...]:
    """Sum up items, in order of their slots."""
    return tuple(sorted((item.entry for item in items), key=lambda entry: entry.slot))


def digest(items: Iterable[Item]) -> bytes:
    """Hash which items these are, in 8 bytes."""
    return blake3(b"".join(sorted(item.mark for item in items))).digest(MARK_BYTES)


def compare(
    ours: Mapping[Slot, Item], theirs: Iterable[Entry]
) -> tuple[list[Item], tuple[Slot, ...]]:
    """Return which of our items the others lack, and the slots of which we lack theirs.

    Where both have an item of one incarnation and seq, both are exchanged and each side decides.
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
