"""The store of accepted items and their decoded records.

Theory of operation
-------------------
A profile carries its author's credential and is accepted while that is valid; a state is accepted
if there is a profile. Both are forgotten when the membership ends.

A charter, its amendments and removals outlive their author's membership, since an inviter may
leave. They carry the credential too. A charter is accepted only from the founder, the others from
every key that ever was a node of the mesh. A former member has no link to publish one, so this
grants it nothing; and acceptance does not depend on the order of arrival, as it would if removals
could void each other.

The terms of removed authors, and of those whose inviters were removed, are not in force, whatever
order they arrived in. The store holds amendments of `MAX_AMENDERS` authors. If there are more, the
oldest without a term in force gives way, void ones first. If all have one, a new author with one
gets a place of the branch with the most authors: anyone can make keys and invite them, but all who
came through one guest of the founder are one branch. The founder always has a place.

Items of unknown kinds are accepted by and about nodes with a profile, `MAX_CARRIED` per node. Those
of a member whose role is unknown are skipped, as a client's are: those who forward them are honest.
"""

from collections import Counter
from math import inf
from typing import TypeAlias, assert_never

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import MeshId, NodeId, short
from meshllm.protocol.membership.charter import Amendments, Charter, merge, overruled
from meshllm.protocol.membership.codec import (
    BRANCH_REMOVALS,
    FOUNDER_REMOVALS,
    MAX_AMENDERS,
    MAX_CARRIED,
    MAX_REMOVALS,
)
from meshllm.protocol.membership.gossip import WHOLE_MESH, Item, ItemStore, Kind, Slot
from meshllm.protocol.membership.records import Profile, StateRecord
from meshllm.protocol.trust.credential import (
    Credential,
    Removal,
    Role,
    check,
    founder_of,
    is_revoked,
)

Record: TypeAlias = Profile | StateRecord | Charter | Amendments | Removal


class RecordStore:
    """The accepted items and their records."""

    def __init__(self, mesh: MeshId) -> None:
        self.mesh = mesh
        self.store = ItemStore()
        self.profiles: dict[NodeId, Profile] = {}
        self.states: dict[NodeId, StateRecord] = {}
        self.base: Charter | None = None
        self.amendments: dict[NodeId, Amendments] = {}
        self._amenders: dict[NodeId, Credential] = {}  # of those authors, as shown with them
        self.founder: NodeId | None = None
        """Known from the first credential."""
        self.removals: dict[NodeId, Removal] = {}
        self._branches: dict[NodeId, NodeId | None] = {}
        """By removed node, see `_branch`."""
        self._credentials: dict[NodeId, Credential] = {}
        self._merged: Charter | None = None

    @property
    def charter(self) -> Charter | None:
        """The founder's charter with the terms in force; merged once for all items of a message."""
        if self._merged is None and self.base is not None:
            self._merged = merge(self.base, self.valid, self.founder)
        return self._merged

    def role(self, credential: Credential, node: NodeId, wall_s: float) -> Role | None:
        """Return the role of a node at this time of day; None if it is not a member."""
        try:
            return check(credential, node, self.mesh, wall_s, self.removals)
        except NotAuthorised:
            return None

    def take(self, item: Item, wall_s: float) -> bool:
        """Store an item if it is new and acceptable; return whether it was.

        Raises:
            PeerFault: the item is forged or malformed; no honest node forwards it.
        """
        if not self.store.is_news(item) or not self._has_room_for(item):
            return False
        record = _read(item) if item.kind in _RECORDS else None
        if not item.is_signed(self.mesh):
            raise PeerFault(f"Item of node `{short(item.author)}` with a forged signature")
        if record is None:
            self.store.keep(item)
            return True
        if item.kind is not Kind.STATE:
            credential = _credential(item)
            if credential is None or not self._is_accepted(item, credential, wall_s):
                return False
            if isinstance(record, Amendments) and not self._make_room(item, credential, record):
                return False
            self._learn_from(item, credential)
        self.store.keep(item)
        self._index(item.subject, record)
        return True

    def _learn_from(self, item: Item, credential: Credential) -> None:
        self.founder = founder_of(credential, item.author)
        if item.kind is Kind.PROFILE:
            self._credentials[item.author] = credential
        elif item.kind is Kind.AMENDMENTS:
            self._amenders[item.author] = credential
        elif item.kind is Kind.REMOVAL:
            self._branches[item.subject] = _branch(credential)

    @property
    def valid(self) -> dict[NodeId, Amendments]:
        """The amendments of authors that are not removed, and nor are their inviters."""
        return {
            node: at for node, at in self.amendments.items()
            if not is_revoked(self._amenders[node], node, self.removals)
        }  # fmt: skip

    def forget(self, node: NodeId) -> None:
        """Delete the items and records that describe a node."""
        self.store.forget(node)
        for records in (self.profiles, self.states, self._credentials):
            records.pop(node, None)

    def has_ended(self, verified: Credential, node: NodeId, wall_s: float) -> bool:
        """Return whether a membership that was verified once has ended at this time of day."""
        return expires_at_s(verified) <= wall_s or is_revoked(verified, node, self.removals)

    def ended_members(self, wall_s: float) -> set[NodeId]:
        """Return the nodes with a profile that are not members at this time of day."""
        holders = self._credentials.items()
        return {node for node, shown in holders if self.has_ended(shown, node, wall_s)}

    def expires_at_s(self) -> float:
        """Return the time of day when the next membership expires."""
        return min(map(expires_at_s, self._credentials.values()), default=inf)

    def _has_room_for(self, item: Item) -> bool:
        if item.kind is Kind.REMOVAL:
            return item.subject in self.removals or self._has_room_to_remove(item)
        if item.kind in _RECORDS:
            return item.kind is not Kind.STATE or item.author in self.profiles
        carried = {
            slot.kind for slot in self.store
            if slot.subject == item.author and slot.kind not in _RECORDS
        }  # fmt: skip
        has_room = len(carried | {item.kind}) <= MAX_CARRIED
        return item.subject == item.author and item.author in self.profiles and has_room

    def _has_room_to_remove(self, item: Item) -> bool:
        """Return whether a removal is within the limits of its author.

        Anyone can make keys and invite them, so that all who came through one guest of the founder
        share a limit.
        """
        credential = _credential(item)
        if credential is None:
            return False
        branch = _branch(credential)
        if branch is None:
            return len(self.removals) < MAX_REMOVALS
        others = [each for each in self._branches.values() if each is not None]
        is_crowded = others.count(branch) >= BRANCH_REMOVALS
        return not is_crowded and len(others) < MAX_REMOVALS - FOUNDER_REMOVALS

    def _make_room(self, item: Item, credential: Credential, record: Amendments) -> bool:
        """Evict another author's amendments if there are too many; return whether there is room."""
        if item.author in self.amendments or len(self.amendments) < MAX_AMENDERS:
            return True
        evicted = self._giving_way(item.author, credential, record)
        if evicted == item.author:
            return False
        for records in (self.amendments, self._amenders):
            del records[evicted]
        self.store.drop(Slot(Kind.AMENDMENTS, evicted))
        return True

    def _giving_way(self, author: NodeId, credential: Credential, record: Amendments) -> NodeId:
        """Return which author gives way to a new one; itself if it is refused."""
        valid, known = self.valid, self.amendments | {author: record}
        if not is_revoked(credential, author, self.removals):
            valid[author] = record
        needed = {self.founder, *(valid.keys() - overruled(valid, self.founder))}
        if idle := known.keys() - needed:
            return min(idle, key=lambda node: (node in valid, known[node].newest, node))
        branches = {node: _branch(at) for node, at in self._amenders.items() if at.chain}
        sizes = Counter(branches.values())
        crowd = max(sizes, key=lambda branch: (sizes[branch], branch))
        if credential.chain and sizes[crowd] <= sizes[_branch(credential)] + 1:
            return author
        crowded = (node for node, branch in branches.items() if branch == crowd)
        return min(crowded, key=lambda node: (known[node].newest, node))

    def _is_accepted(self, item: Item, credential: Credential, wall_s: float) -> bool:
        if item.kind is Kind.PROFILE:
            return self.role(credential, item.author, wall_s) is Role.NODE
        if item.kind is Kind.CHARTER and credential.chain:
            return False
        if item.kind is Kind.REMOVAL and item.subject == founder_of(credential, item.author):
            return False  # without the founder's certificates there is no mesh
        try:
            return check(credential, item.author, self.mesh, 0, {}) is Role.NODE
        except NotAuthorised:
            return False

    def _index(self, subject: NodeId, record: Record) -> None:
        match record:
            case Profile():
                self.profiles[subject] = record
            case StateRecord():
                self.states[subject] = record
            case Charter():
                self.base, self._merged = record, None
            case Amendments():
                self.amendments[subject], self._merged = record, None
            case Removal():
                self.removals[subject], self._merged = record, None
            case _:
                assert_never(record)


def expires_at_s(credential: Credential) -> float:
    """Return the time of day when a credential expires; infinity for never."""
    return min((link.expires_s for link in credential.chain if link.expires_s), default=inf)


def slot_of(author: NodeId, record: Record) -> tuple[Slot, int | None]:
    """Return the slot of a record, and its own version if it has one instead of a sequence."""
    match record:
        case Profile():
            return Slot(Kind.PROFILE, author), None
        case StateRecord():
            return Slot(Kind.STATE, author), None
        case Charter():
            return Slot(Kind.CHARTER, WHOLE_MESH), record.version
        case Amendments():
            return Slot(Kind.AMENDMENTS, author), record.version
        case Removal():
            return Slot(Kind.REMOVAL, record.node), 0
        case _:
            assert_never(record)


def _credential(item: Item) -> Credential | None:
    """Return the credential of an item; None if it has a role of a later version."""
    try:
        return Credential.decode(item.credential)
    except NotAuthorised:
        return None


def _branch(credential: Credential) -> NodeId | None:
    """Return the guest of the founder through whom a member joined; None for the founder."""
    return credential.chain[0].subject if credential.chain else None


_RECORDS: dict[int, type[Record]] = {
    Kind.PROFILE: Profile,
    Kind.STATE: StateRecord,
    Kind.CHARTER: Charter,
    Kind.AMENDMENTS: Amendments,
    Kind.REMOVAL: Removal,
}


def _read(item: Item) -> Record:
    record = _RECORDS[item.kind].decode(item.payload)
    slot, version = slot_of(item.author, record)
    counted = version is None or (item.incarnation, item.seq) == (version, 0)
    signer = record.issuer if isinstance(record, Removal) else item.author
    if slot != item.slot or not counted or signer != item.author:
        raise PeerFault(f"{type(record).__name__} in the wrong slot")
    return record
