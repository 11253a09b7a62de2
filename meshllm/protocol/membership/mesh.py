"""The membership machine: one node's links, gossip and view of its mesh.

Theory of operation
-------------------
Every node dials every other known node and publishes its records on all its links. A node that
receives a new item forwards it to those peers that the author does not list among its links: a full
mesh carries each item about once per link, and in a partial mesh items still reach every node.

Anti-entropy: a beat carries a digest of all items that its sender shares. When two beats in a row
differ from our digest, the node with the lower id sends a summary; the other replies with the items
that the lower one lacks and requests those it lacks itself. The same happens when a link opens.
This repairs lost and reordered items, since every node keeps the same one of two items.

A node is alive while a path of links, each listed by both its ends, leads to it. Links are listed
in the states, and only a node itself removes a link from its state: at once when the stream closes,
or after `SILENCE`. No node can declare another dead. A node whose ring broke, or that learns that
a link to a peer was lost elsewhere, sends that peer a beat at once: if its process has ended, the
host refuses the beat, which ends a link over UDP too. If an item of our own returns with a higher
count than we remember, an earlier run of this node signed it; we sign another one above it.

`link_table` decides which of two links to a peer is kept, `record_store` which items are accepted,
`dial_schedule` when to dial. Clients have links but take no part in the gossip, but that each node
sends them all removals: a client refuses removed members, and knows of its own removal. It is also
named a few other nodes (`fallbacks`), of which it believes only where they may be: they prove who
they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import assert_never

from meshllm.errors import PeerFault
from meshllm.names import NodeId
from meshllm.protocol.membership.actions import (
    Action,
    Changed,
    ClosedByPeer,
    DeliverRequest,
    Dial,
    Drop,
    SendToPeer,
)
from meshllm.protocol.membership.charter import Amendments, Charter, amend, effective_terms, merge
from meshllm.protocol.membership.codec import (
    Bye,
    CloseReason,
    FallbackList,
    Items,
    MeshHeartbeat,
    Message,
    Summary,
    UnknownMeshMessage,
    Want,
    batches,
)
from meshllm.protocol.membership.dial_schedule import DialSchedule
from meshllm.protocol.membership.gossip import WHOLE_MESH, Item, Kind, Slot, compare, summarise
from meshllm.protocol.membership.link_table import BEAT, LinkTable, PeerLink, republish_delay
from meshllm.protocol.membership.record_store import Record, expires_at_s
from meshllm.protocol.membership.records import MAX_OBSTACLE_BYTES, Lifecycle, Profile, StateRecord
from meshllm.protocol.membership.sync import GossipState
from meshllm.protocol.trust.credential import NO_LIMITS, Credential, Removal, Role
from meshllm.protocol.trust.fallbacks import Fallback, fallbacks_for
from meshllm.protocol.trust.identity import NodeKey

STABLE = 10.0  # s; a link that lasted this long resets the backoff of its dials
RECLAIM = 1.0  # s; least interval between signing over items of an earlier run of ours


class Mesh:
    """The mesh as one node sees it; times are seconds on the driver's clock.

    A link that an action closes is removed already: the driver does not report it as unlinked.
    """

    def __init__(
        self, key: NodeKey, credential: Credential, incarnation: int, *, now: float, wall_s: float
    ) -> None:
        self.me = key.node
        self.links = LinkTable(key.node)
        """The open links, including those of clients."""
        self.heard = -inf
        """When a peer last sent a beat, and so accepted this process as the holder of its key."""
        self.woke = -inf
        """When this process was last noticed to have been suspended for longer than a beat."""
        self.silent = frozenset[NodeId]()
        """The nodes whose last link here ended because nothing arrived, rather than by closing."""
        self.fallbacks: tuple[Fallback, ...] = ()
        """Of a client: other nodes that it may ask, as the latest node named them."""
        self.teller: tuple[NodeId, bytes] = self.me, b""
        """That node, and its tag, which shows whether it is on the machine of the client."""
        self._is_node = credential.role is Role.NODE
        self._open: list[Fallback] = []  # the nodes which clients know from the last message
        self._replica = GossipState(key, credential, incarnation)
        self._dials = DialSchedule(key.node)
        self._state: StateRecord | None = None
        self._profile: Profile | None = None
        self._wall_s = wall_s  # time of day, for the expiry of memberships
        self._origin = now - wall_s  # 1970 on the driver's clock, for the time of day in beats
        self._next_expiry_s = inf  # time of day when the next membership expires
        self._beat_due = now
        self._published_at = -inf  # when our state was last published
        self._published_links: tuple[tuple[NodeId, int], ...] = ()
        self._published_obstacle = ""
        self._republish_due = inf
        self._is_changed = False
        self._suspects = set[NodeId]()  # whose link to another node was lost

    @property
    def alive(self) -> frozenset[NodeId]:
        """The living nodes, including this one."""
        return self._replica.alive

    @property
    def profiles(self) -> Mapping[NodeId, Profile]:
        """The profiles of the nodes, including departed ones."""
        return self._replica.records.profiles

    @property
    def states(self) -> Mapping[NodeId, StateRecord]:
        """The last state of each node."""
        return self._replica.records.states

    def inviters(self, node: NodeId) -> tuple[NodeId, ...]:
        """Return the chain of inviters of a node: the founder first, its own inviter last."""
        item = self._replica.records.store.get(Slot(Kind.PROFILE, node))
        chain = Credential.decode(item.credential).chain if item else ()
        return tuple(certificate.issuer for certificate in chain)

    @property
    def charter(self) -> Charter | None:
        """The charter with the terms in force; None until it is known."""
        return self._replica.records.charter

    @property
    def removals(self) -> Mapping[NodeId, Removal]:
        """The removed members."""
        return self._replica.records.removals

    @property
    def author(self) -> NodeId | None:
        """The founder, who wrote the first charter; None until it is known."""
        item = self._replica.records.store.get(Slot(Kind.CHARTER, WHOLE_MESH))
        return item.author if item else None

    @property
    def lasting(self) -> tuple[Item, ...]:
        """The items to save across restarts: charter, amendments and removals, in slot order."""
        store = self._replica.records.store
        return tuple(store[slot] for slot in sorted(store) if not slot.is_own)

    def restore(self, items: Iterable[Item], now: float) -> None:
        """Take the saved `lasting` items of an earlier run."""
        for item in items:
            self._is_changed |= self._replica.records.take(item, self._wall_s)
        self._conclude([], now)

    @property
    def digest(self) -> bytes:
        """8-byte hash of the shared items, equal on all connected nodes once they converged."""
        return self._replica.digest

    @property
    def deadline(self) -> float:
        """When to call ``expire`` next."""
        return min(
            self._beat_due, self._republish_due, self.links.deadline, self._dials.deadline or inf
        )

    def publish(
        self,
        *,
        profile: Profile | None = None,
        state: StateRecord | None = None,
        charter: Charter | None = None,
        now: float,
    ) -> list[Action]:
        """Sign and send records of our own; the links of the state are filled in here.

        Of a charter, only the difference from the one in force is published, or all if none is.

        Raises:
            PeerFault: a record exceeds its limits.
            UserError: a record is larger than peers accept.
        """
        self._profile, self._state = profile or self._profile, state or self._state
        actions = self._broadcast([profile] if profile else [])
        if charter is not None:
            actions += self._publish_charter(charter)
        if state is not None:
            actions += self._publish_state(now)
        return self._conclude(actions, now)

    def _publish_charter(self, wanted: Charter) -> list[Action]:
        records = self._replica.records
        actions = self._broadcast([wanted]) if records.base is None else []
        said = records.valid
        if own := records.amendments.get(self.me):  # void if another member invited it again
            said.setdefault(self.me, replace(own, terms=()))
        changed = amend(wanted, records.charter or wanted, self.me, said, records.founder)
        return [*actions, *(self._broadcast([changed]) if changed else ())]

    def remove(self, removal: Removal, now: float) -> list[Action]:
        """Publish a removal that this node signed, and close the links that it revokes."""
        published = self._broadcast([removal])
        item = self._replica.records.store.get(Slot(Kind.REMOVAL, removal.node))
        sent = self._tell_clients([item] if item else [])
        return self._conclude([*published, *sent, *self._expel(now)], now)

    def leave(self, now: float) -> list[Action]:
        """Publish that this node has left, and close its links."""
        left = replace(self._state or StateRecord(), lifecycle=Lifecycle.LEFT)
        actions = self.publish(state=left, now=now)
        return [
            *actions,
            *(self._drop(peer, CloseReason.LEAVING, now) for peer in list(self.links)),
        ]

    def linked(
        self,
        peer: NodeId,
        instance: int,
        credential: Credential,
        *,
        dialled: bool,
        now: float,
        host: str = "",
    ) -> list[Action]:
        """Accept or drop a new link to an authenticated peer, which comes from ``host``."""
        role = self._replica.records.role(credential, peer, self._wall_s)
        if role is None:
            return [Drop(peer, CloseReason.REMOVED, is_newcomer=True)]
        is_favoured = dialled is (self.me < peer)
        contact = PeerLink(instance, role, credential, is_favoured, now, now, host=host)
        if why := self.links.refusal(peer, contact, now):
            return [Drop(peer, why, is_newcomer=True)]
        actions: list[Action] = []
        if old := self.links.get(peer):
            why = CloseReason.CROSSED if old.is_fresh(now) else CloseReason.SILENT
            actions.append(self._drop(peer, why, now))
        self.links.add(peer, contact)
        self.silent -= {peer}
        self._is_changed = True
        return self._conclude([*actions, *self._greet(peer, contact, now)], now)

    def has_ended(self, peer: NodeId, credential: Credential) -> bool:
        """Return whether the membership that a peer showed over another link has ended."""
        return self._replica.records.has_ended(credential, peer, self._wall_s)

    def unlinked(self, peer: NodeId, now: float) -> list[Action]:
        """Note that the stream of a link closed."""
        self._unlink(peer, now)
        return self._conclude([], now)

    def probe(self, peer: NodeId, now: float) -> list[Action]:
        """Send a beat ahead of time to a peer that may have ended."""
        contact = self.links.get(peer)
        if contact is None or not contact.may_probe(now):
            return []
        return [self._beat_for(peer, contact, self._replica.digest, now)]

    def refused(self, peer: NodeId, now: float) -> None:
        """Note that a dial failed."""
        self._dials.failed(peer, now)

    def receive(self, peer: NodeId, message: Message, now: float) -> list[Action]:
        """Handle a message of a linked peer; a peer that violates the protocol is dropped."""
        contact = self.links.get(peer)
        if contact is None:
            return []
        self._notice_suspension(now)
        contact.heard = now
        removed = len(self.removals)
        try:
            actions = self._read(peer, contact, message, now)
        except PeerFault as fault:
            actions = [self._drop(peer, CloseReason.RULES, now, str(fault))]
            if len(self.removals) > removed:  # of valid items before a forged one
                actions += self._expel(now)
        return self._conclude(actions, now)

    def expire(self, now: float, wall_s: float) -> list[Action]:
        """Handle the deadline; ``wall_s`` is the time of day in seconds since 1970."""
        self._wall_s, self._origin = wall_s, now - wall_s
        if now < self.deadline:
            return []
        self._notice_suspension(now)
        actions: list[Action] = [
            Dial(peer, self.profiles[peer].addresses) for peer in self._dials.due(now)
        ]
        actions += [self._drop(peer, CloseReason.SILENT, now) for peer in self.links.timed_out(now)]
        if now >= self._beat_due:
            actions += self._beat(now)
        return self._conclude(actions, now)

    def _notice_suspension(self, now: float) -> None:
        """Give peers time if this process was suspended: its next beat is late."""
        if now > self._beat_due + BEAT:
            self.woke = now
            for contact in self.links.values():
                contact.wake(now)

    def _beat(self, now: float) -> list[Action]:
        self._beat_due = now + BEAT
        for contact in self.links.values():
            contact.refill(BEAT)
        self._is_changed |= bool(self._replica.watch(now))
        ended_members = self._expel(now) if self._wall_s >= self._next_expiry_s else []
        digest = self._replica.digest
        beats = [self._beat_for(peer, contact, digest, now) for peer, contact in self.links.items()]
        return [*ended_members, *beats, *self._tell_fallbacks()]

    def _read(self, peer: NodeId, contact: PeerLink, message: Message, now: float) -> list[Action]:
        match message:
            case MeshHeartbeat():
                return self._receive_beat(peer, contact, message, now)
            case Bye(why):
                self._unlink(peer, now)
                return [ClosedByPeer(peer, why)]
            case FallbackList(fallbacks, machine):
                if self._is_node or contact.role is not Role.NODE:
                    raise PeerFault("Fallbacks that are not sent by a node to a client")
                self._is_changed |= fallbacks != self.fallbacks
                self.fallbacks, self.teller = fallbacks, (peer, machine)
                return []
            case UnknownMeshMessage():
                return []
            case Items() | Summary() | Want():
                if not (self._gossips(contact) or self._is_told(contact, message)):
                    raise PeerFault("Gossip on a client link")
                return self._gossip(peer, contact, message, now)
            case _:
                return [DeliverRequest(peer, message)]

    def _receive_beat(
        self, peer: NodeId, contact: PeerLink, beat: MeshHeartbeat, now: float
    ) -> list[Action]:
        is_first = contact.echo is None
        self.heard = now
        contact.receive_beat(beat, now, now - self._origin)
        digest = self._replica.digest
        if is_first and contact.echo:  # reply at once: both sides measure from the start
            return [self._beat_for(peer, contact, digest, now)]
        differs = self._gossips(contact) and self.me < peer and beat.digest != digest
        if contact.wants_summary(differs=differs, now=now):
            return [SendToPeer(peer, Summary(summarise(self._replica.shared.values())))]
        return []

    def _gossip(
        self, peer: NodeId, contact: PeerLink, message: Items | Summary | Want, now: float
    ) -> list[Action]:
        store, shared = self._replica.records.store, self._replica.shared
        match message:
            case Items(items):
                return self._take(peer, contact, items, now)
            case Want(slots):
                wanted = [store[slot] for slot in slots if slot in store and contact.spend()]
                return self._send(peer, wanted)
            case Summary(entries):
                lacking, slots = compare(store, entries)
                theirs = {entry.slot for entry in entries}
                covered = [item for item in lacking if item.slot in shared or item.slot in theirs]
                actions = self._send(peer, [item for item in covered if contact.spend()])
                return [*actions, SendToPeer(peer, Want(slots))] if slots else actions
            case _:
                assert_never(message)

    def _take(
        self, peer: NodeId, contact: PeerLink, items: Iterable[Item], now: float
    ) -> list[Action]:
        records = self._replica.records
        items, own = list(items), Amendments(())
        slot = Slot(Kind.AMENDMENTS, self.me)
        if any(item.slot == slot and records.store.is_news(item) for item in items):
            own = effective_terms(self.me, records.valid, records.founder)
        before = {item.author: self._shown(item.author) for item in items}
        news, answers = self._replica.take(peer, contact, items, self._wall_s)
        actions = self._send(peer, answers) if self._gossips(contact) else []
        if own.terms and records.charter is not None:  # an item of an earlier run may outrank them
            wanted = merge(records.charter, {self.me: own}, records.founder)
            actions += self._publish_charter(wanted)
        for other, at in self.links.nodes() if news else ():
            if other != peer and self._gossips(at):
                actions += self._send(other, self._replica.for_peer(other, news))
        self._is_changed |= bool(news)
        for author in {item.author for item in news if item.kind is Kind.STATE}:
            (earlier, then), (run, peers) = before[author], self._shown(author)
            if run == earlier and peers:  # else it has just started, or is apart itself
                self._suspects |= then - peers
        removals = [item for item in news if item.kind is Kind.REMOVAL]
        actions += self._tell_clients(removals)
        return [*actions, *(self._expel(now) if removals else ())]

    def _shown(self, author: NodeId) -> tuple[int, set[NodeId]]:
        """Return the run of a node, and whom it is linked to, as it has published."""
        records = self._replica.records
        item, state = records.store.get(Slot(Kind.STATE, author)), records.states.get(author)
        links = state.links if state else ()
        return item.incarnation if item else 0, {peer for peer, _ in links}

    def _greet(self, peer: NodeId, contact: PeerLink, now: float) -> list[Action]:
        actions: list[Action] = [self._beat_for(peer, contact, self._replica.digest, now)]
        if self._gossips(contact):
            actions += self._send(peer, self._replica.own())
            if self.me < peer:
                actions.append(SendToPeer(peer, Summary(summarise(self._replica.shared.values()))))
        elif self._is_node:
            actions += self._send(peer, [at for at in self.lasting if at.kind is Kind.REMOVAL])
            actions += self._tell_fallbacks_to(peer, contact, self._find_open())
            self._open = []  # compare with what was sent to this one at the next beat, too
        return actions

    def _tell_clients(self, removals: list[Item]) -> list[Action]:
        clients = [peer for peer, _ in self.links.clients()]
        return [action for peer in clients for action in self._send(peer, removals)]

    def _tell_fallbacks(self) -> list[Action]:
        """Tell the clients which other nodes they may ask, if that has changed."""
        clients = self.links.clients() if self._is_node else []
        nodes = self._find_open() if clients else []
        if nodes == self._open:
            return []
        self._open = nodes
        return [each for client in clients for each in self._tell_fallbacks_to(*client, nodes)]

    def _tell_fallbacks_to(
        self, client: NodeId, contact: PeerLink, nodes: Iterable[Fallback]
    ) -> list[Action]:
        if contact.credential.limits != NO_LIMITS:  # each node counts by itself
            return []
        fallbacks = fallbacks_for(client, contact.host, nodes)
        if fallbacks == contact.fallbacks:
            return []
        contact.fallbacks = fallbacks
        own = self.profiles.get(self.me)
        return [SendToPeer(client, FallbackList(fallbacks, own.machine if own else b""))]

    def _find_open(self) -> list[Fallback]:
        """Return the other living nodes that do not leave."""
        ends, states = {Lifecycle.LEFT, Lifecycle.LEAVING}, self.states
        return [
            Fallback(node, profile.machine, profile.addresses)
            for node, profile in self.profiles.items()
            if node in self.alive and node != self.me and states[node].lifecycle not in ends
        ]

    def _is_told(self, contact: PeerLink, message: Items | Summary | Want) -> bool:
        """Return whether this client got removals, and nothing else, from a node."""
        return (
            not self._is_node
            and contact.role is Role.NODE
            and isinstance(message, Items)
            and all(item.kind is Kind.REMOVAL for item in message.items)
        )

    def _republish(self, now: float) -> list[Action]:
        """Publish our state again if the links changed, or a peer holds a newer one of ours."""
        if self._state is None:
            return []
        is_other = self._published_obstacle != self._obstacle
        wait = 0.0 if is_other else republish_delay(self._published_links, self.links.round_trips())
        wait = min(wait, RECLAIM if self._replica.is_behind else inf)
        self._republish_due = self._published_at + wait
        return self._publish_state(now) if now >= self._republish_due else []

    @property
    def _obstacle(self) -> str:
        """Why this node is a standby, as published in its state."""
        why = self.charter.obstacle if self.charter else ""
        return why.encode()[:MAX_OBSTACLE_BYTES].decode(errors="ignore")

    def _publish_state(self, now: float) -> list[Action]:
        self._published_at, self._republish_due = now, inf
        self._published_links = self.links.round_trips()
        lost = self._profile if self._replica.is_behind else None
        self._replica.is_behind = False
        self._published_obstacle = self._obstacle
        state = replace(
            self._state or StateRecord(),
            links=self._published_links,
            obstacle=self._published_obstacle or (self._state.obstacle if self._state else ""),
        )
        return self._broadcast([record for record in (lost, state) if record])

    def _broadcast(self, records: Iterable[Record]) -> list[Action]:
        items = self._replica.sign(records, self._wall_s)
        self._is_changed |= bool(items)
        pairs = ((peer, contact) for peer, contact in self.links.nodes() if self._gossips(contact))
        return [action for peer, _ in pairs for action in self._send(peer, items)]

    def _send(self, peer: NodeId, items: list[Item]) -> list[Action]:
        return [SendToPeer(peer, batch) for batch in batches(items)]

    def _beat_for(self, peer: NodeId, contact: PeerLink, digest: bytes, now: float) -> SendToPeer:
        return SendToPeer(peer, contact.beat(now, now - self._origin, digest))

    def _gossips(self, contact: PeerLink) -> bool:
        return self._is_node and contact.role is Role.NODE

    def _expel(self, now: float) -> list[Action]:
        """Forget nodes that are no longer members, and close the links to them."""
        records = self._replica.records
        for node in records.ended_members(self._wall_s):
            records.forget(node)
        self._is_changed = True
        strangers = [
            peer
            for peer, contact in self.links.items()
            if records.has_ended(contact.credential, peer, self._wall_s)
        ]
        return [self._drop(peer, CloseReason.REMOVED, now) for peer in strangers]

    def _drop(self, peer: NodeId, why: CloseReason, now: float, text: str = "") -> Drop:
        self._unlink(peer, now)
        if why is CloseReason.SILENT:
            self.silent = (self.silent | {peer}) & self.profiles.keys()
        return Drop(peer, why, text=text)

    def _unlink(self, peer: NodeId, now: float) -> None:
        contact = self.links.remove(peer)
        if contact is None:
            return
        self._is_changed = True
        if now >= contact.since + STABLE:
            self._dials.reset(peer)

    def _conclude(self, actions: list[Action], now: float) -> list[Action]:
        """Update everything derived from what changed in this call."""
        actions += self._republish(now)
        if not self._is_changed:
            return actions
        self._is_changed = False
        self._replica.refresh(now)
        suspects, self._suspects = sorted(self._suspects), set()
        actions += [action for peer in suspects for action in self.probe(peer, now)]
        shown = (expires_at_s(contact.credential) for contact in self.links.values())
        self._next_expiry_s = min([self._replica.records.expires_at_s(), *shown])
        self._dials.want([peer for peer in self.profiles if self._should_dial(peer)], now)
        return [*actions, Changed()]

    def _should_dial(self, peer: NodeId) -> bool:
        """Return whether to dial a peer: it has an address, and neither side has left."""
        states = self._state, self.states.get(peer)
        has_left = any(state and state.lifecycle is Lifecycle.LEFT for state in states)
        is_there = peer == self.me or peer in self.links
        return bool(self.profiles[peer].addresses) and not (has_left or is_there)
