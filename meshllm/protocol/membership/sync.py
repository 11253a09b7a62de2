"""The items that one node signs, accepts, forwards and shares.

Each accepted item is forwarded once, to the peers that its author does not list among its links. A
summary covers lasting items and those of living nodes. Items of departed nodes are kept for their
addresses, but not shared.
"""

from collections.abc import Iterable

from meshllm.errors import PeerFault, UserError
from meshllm.names import NodeId
from meshllm.protocol.membership.gossip import MAX_ITEM_BYTES, Item, Kind, Slot, digest
from meshllm.protocol.membership.link_table import AMENDMENTS_COST, REPLACEMENT_COST, PeerLink
from meshllm.protocol.membership.record_store import Record, RecordStore, slot_of
from meshllm.protocol.membership.records import MAX_MEMBERS, StateRecord, alive
from meshllm.protocol.trust.credential import Credential
from meshllm.protocol.trust.identity import NodeKey

FORGET = 24 * 3600.0  # s; a laptop that slept for a day finds its mesh again
_OWN = (Kind.PROFILE, Kind.STATE)


class GossipState:
    """One node's replica of the gossip; times are seconds on the driver's clock."""

    def __init__(self, key: NodeKey, credential: Credential, incarnation: int) -> None:
        self.me = key.node
        self.records = RecordStore(credential.mesh)
        self.shared: dict[Slot, Item] = {}
        """The items that summaries cover."""
        self.digest = digest(())
        """8-byte hash of the shared items."""
        self.alive = frozenset({self.me})
        self.is_behind = False
        """A peer sent an item of ours with a higher count than ours: sign a newer one."""
        self._key = key
        self._credential = credential
        self._incarnation, self._seq = incarnation, 0
        self._seen: dict[NodeId, float] = {}

    def sign(self, records: Iterable[Record], wall_s: float) -> list[Item]:
        """Sign records of our own as items, and store them.

        Raises:
            UserError: a record is larger than peers accept.
        """
        items = [self._item(record) for record in records]
        for number, item in enumerate(items):
            items[number] = item.sign(self._key, self.records.mesh)
            self.records.take(items[number], wall_s)
        return items

    def _item(self, record: Record) -> Item:
        """Return a record of our own as the next item, not signed yet."""
        slot, version = slot_of(self.me, record)
        self._seq += version is None
        count = (self._incarnation, self._seq) if version is None else (version, 0)
        shown = b"" if slot.kind is Kind.STATE else self._credential.encode()
        item = Item(slot.kind, slot.subject, self.me, *count, shown, record.encode())
        if item.size > MAX_ITEM_BYTES:
            raise UserError(
                f"The {Kind(slot.kind).name.lower()} record of this node takes {item.size} bytes,"
                f" and peers accept {MAX_ITEM_BYTES}",
                hint="let it take part in fewer rings, or hold fewer models",
            )
        return item

    def own(self) -> list[Item]:
        """Return the profile and state items of this node."""
        items = (self.records.store.get(Slot(kind, self.me)) for kind in _OWN)
        return [item for item in items if item is not None]

    def take(
        self, peer: NodeId, contact: PeerLink, items: Iterable[Item], wall_s: float
    ) -> tuple[list[Item], list[Item]]:
        """Take items from a peer; return the new ones, and newer items of the peer's own to return.

        Raises:
            PeerFault: one of them is forged or malformed.
        """
        news, answers = [], []
        store = self.records.store
        for item in items:
            kept = store.get(item.slot)
            if kept is not None and kept.mark == item.mark:
                continue
            if not contact.spend(self._cost(item)):
                break
            if item.author == self.me and item.kind in _OWN:
                self._adopt_count(item)
            elif self._has_room(item) and self.records.take(item, wall_s):
                self._make_room(item.author)
                news.append(item)
            elif kept is not None and item.author == peer and kept.precedence > item.precedence:
                answers.append(kept)  # the peer lost its count; only it can sign a newer one
        return news, answers

    def _cost(self, item: Item) -> int:
        """Return for how many items one counts."""
        store = self.records.store
        if item.kind is Kind.AMENDMENTS:
            return AMENDMENTS_COST
        # One member can sign ever higher removals of one key; other removals are few.
        is_replacement = item.kind is Kind.REMOVAL and item.slot in store and store.is_news(item)
        return REPLACEMENT_COST if is_replacement else 1

    def for_peer(self, peer: NodeId, items: Iterable[Item]) -> list[Item]:
        """Return which of these items to forward to a peer."""
        return [item for item in items if peer != item.author and peer not in self._linked_to(item)]

    def refresh(self, now: float) -> None:
        """Recompute which nodes are alive and which items are shared, after a change."""
        states = self.records.states
        self.alive = alive(states, self.me)
        self.shared = {
            slot: item
            for slot, item in self.records.store.items()
            if not slot.is_own or slot.subject in self.alive
        }
        self.digest = digest(self.shared.values())
        self.watch(now)

    def watch(self, now: float) -> list[NodeId]:
        """Record who is alive now; forget nodes that departed `FORGET` ago, and return them."""
        known = self.records.profiles.keys()
        self._seen = {
            node: now if node in self.alive else self._seen.get(node, now) for node in known
        }
        gone = [node for node, seen in self._seen.items() if now - seen > FORGET]
        for node in gone:
            self.records.forget(node)
        return gone

    def _adopt_count(self, item: Item) -> None:
        if not item.is_signed(self.records.mesh):
            raise PeerFault("Item of this node with a forged signature")
        kept = self.records.store.get(item.slot)
        if kept is None or item.precedence > kept.precedence:
            count = (self._incarnation, self._seq), (item.incarnation, item.seq)
            self._incarnation, self._seq = max(count)
            self.is_behind = True

    def _has_room(self, item: Item) -> bool:
        """Return whether there is room for the profile of another node."""
        profiles = self.records.profiles
        if item.author in profiles or item.kind is not Kind.PROFILE:
            return True
        return len(profiles) < MAX_MEMBERS or not profiles.keys() <= self.alive

    def _make_room(self, newcomer: NodeId) -> None:
        """If there are too many profiles, evict that of the node that departed first."""
        profiles = self.records.profiles
        if len(profiles) > MAX_MEMBERS:
            gone = profiles.keys() - self.alive - {newcomer}
            self.records.forget(min(gone, key=lambda node: (self._seen.get(node, 0.0), node)))

    def _linked_to(self, item: Item) -> set[NodeId]:
        state = self.records.states.get(item.author, StateRecord())
        return {node for node, _ in state.links}
