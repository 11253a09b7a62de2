"""The link table of one node: keep-alive, round trips, and which of two links to a peer is kept.

Races, and who wins:
  two dials cross                the link dialled by the lower id is kept, on both sides
  a second link to one peer      the old one if active within `FRESH`, else the new one
  this process was suspended     a peer that was silent meanwhile gets one more `BEAT`

After a suspension, beats that have waited for it are read first: what they say of round trips and
clocks is out of date, and is ignored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from meshllm.names import NodeId
from meshllm.protocol.binary import micros
from meshllm.protocol.membership.codec import (
    MAX_HELD_US,
    MAX_SLOTS,
    MAX_WALL_MS,
    CloseReason,
    MeshHeartbeat,
)
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.protocol.trust.credential import Credential, Role
from meshllm.protocol.trust.fallbacks import Fallback

SILENCE = 3.0  # s; as on a link of the ring
BEAT = 0.5  # s; six beats per SILENCE
FRESH = 1.5  # s; three beats: a link active within it is not replaced by another
ITEMS_PER_S = 100.0  # per peer; 64 nodes that each publish once a second, and some slack
AMENDMENTS_COST = 10  # items; each may describe 32 models, which takes milliseconds to read
REPLACEMENT_COST = 10  # items; a removal that replaces another of its key changes the charter too
MAX_CLIENTS = 64  # links of members in the role of a client
PROBE_PAUSE = 0.1  # s between two beats ahead of time to one peer
SUMMARY_PAUSE = 1.0  # s before a second summary to the same peer; doubles up to MAX_SUMMARY_PAUSE
MAX_SUMMARY_PAUSE = 8.0  # s; bounds the cost of a difference that never resolves

LINKS_INTERVAL = 0.1  # s; least interval between two publications of changed links
ROUND_TRIPS_INTERVAL = 5.0  # s; least interval between two publications of changed round trips
MIN_CHANGE = 0.25  # change of a round trip, as a fraction, that may change a plan
MIN_CHANGE_US = 250  # us; a smaller change never does

_GAIN = 1 / 8  # weight of a new sample in the smoothed round trip (RFC 6298, alpha)


@dataclass(slots=True)
class PeerLink:
    """An open link; times are seconds on the driver's clock."""

    instance: int
    """Identifies the process of the peer."""
    role: Role
    credential: Credential
    is_favoured: bool
    """It was dialled by the lower node id, and is kept when two dials cross."""
    since: float
    heard: float
    round_trip_us: int = 0
    """Smoothed; 0 until it is measured."""
    ahead_s: float | None = None
    """How far the peer's time of day is ahead of ours; None before its first beat. For display
    only: a delayed beat or a lying peer looks the same as a wrong clock."""
    allowance: float = field(default=MAX_SLOTS)
    """Items that the peer may send now (a token bucket)."""
    differs: int = 0
    """Consecutive beats whose digest differed from ours."""
    summary_due: float = 0.0
    """Earliest time for the next summary."""
    summary_pause: float = SUMMARY_PAUSE
    echo: tuple[int, float] | None = None
    """The peer's last stamp, and when it arrived."""
    probe_due: float = 0.0
    """Earliest time for the next beat ahead of time."""
    awake: float = -inf
    """When this process was last noticed to have been suspended."""
    host: str = ""
    """The IP address that the peer comes from; empty if it is unknown."""
    fallbacks: tuple[Fallback, ...] = ()
    """What was last sent to a client of other nodes."""

    def beat(self, now: float, wall_s: float, digest: bytes) -> MeshHeartbeat:
        """Return the next beat for the peer."""
        stamp, heard = self.echo or (0, now)
        held = min(micros(now - heard), MAX_HELD_US)
        wall_ms = min(max(0, round(wall_s * 1e3)), MAX_WALL_MS)
        return MeshHeartbeat(micros(now), stamp, held, wall_ms, digest)

    def receive_beat(self, beat: MeshHeartbeat, now: float, wall_s: float) -> None:
        """Handle a beat of the peer; measure the round trip and the clock offset."""
        if now < self.awake + BEAT:  # it may have waited; an earlier echo stays right
            return
        self.echo = (beat.stamp, now)
        self._measure(beat, now)
        # The beat was sent half a round trip ago.
        self.ahead_s = beat.wall_ms / 1e3 + self.round_trip_us / 2e6 - wall_s

    def wants_summary(self, *, differs: bool, now: float) -> bool:
        """Return whether to send a summary after a beat whose digest ``differs`` from ours or not.

        Two differing beats in a row are needed, because an item may have crossed one beat. The
        interval backs off exponentially while the difference persists.
        """
        if not differs:
            self.differs, self.summary_pause = 0, SUMMARY_PAUSE
            return False
        self.differs += 1
        if self.differs < 2 or now < self.summary_due:
            return False
        self.summary_due = now + self.summary_pause
        self.summary_pause = min(2 * self.summary_pause, MAX_SUMMARY_PAUSE)
        return True

    def may_probe(self, now: float) -> bool:
        """Return whether a beat may be sent ahead of time, and count it."""
        is_due = now >= self.probe_due
        self.probe_due = now + PROBE_PAUSE if is_due else self.probe_due
        return is_due

    def wake(self, now: float) -> None:
        """Give the peer one more beat, which may wait to be read, after a suspension."""
        self.heard = max(self.heard, now + BEAT - SILENCE)
        self.awake = now

    def is_fresh(self, now: float) -> bool:
        """Return whether a message arrived within `FRESH`."""
        return now < self.heard + FRESH

    def refill(self, seconds: float) -> None:
        """Add the allowance of an interval."""
        self.allowance = min(MAX_SLOTS, self.allowance + seconds * ITEMS_PER_S)

    def spend(self, items: int = 1) -> bool:
        """Use the allowance for this many items; return whether there was enough."""
        is_allowed = self.allowance >= items
        self.allowance -= items * is_allowed
        return is_allowed

    def _measure(self, beat: MeshHeartbeat, now: float) -> None:
        sample = micros(now) - beat.echo - beat.held
        # No stamp was echoed yet, or it was not ours: no round trip takes longer than SILENCE.
        if beat.echo == 0 or not 0 <= sample <= micros(SILENCE):
            return
        smoothed = self.round_trip_us or sample
        # 0 means not measured, so the minimum is one microsecond.
        self.round_trip_us = max(1, round(smoothed + _GAIN * (sample - smoothed)))


class LinkTable(Mapping[NodeId, PeerLink]):
    """The open links, by peer."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._contacts: dict[NodeId, PeerLink] = {}

    def __getitem__(self, peer: NodeId) -> PeerLink:
        return self._contacts[peer]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._contacts)

    def __len__(self) -> int:
        return len(self._contacts)

    @property
    def deadline(self) -> float:
        """When the first link times out, unless a message arrives."""
        return min((contact.heard for contact in self._contacts.values()), default=inf) + SILENCE

    def nodes(self) -> list[tuple[NodeId, PeerLink]]:
        """Return the links to nodes, without those to clients, sorted by node id."""
        return sorted(
            (pair for pair in self._contacts.items() if pair[1].role is Role.NODE),
            key=lambda pair: pair[0],
        )

    def clients(self) -> list[tuple[NodeId, PeerLink]]:
        """Return the links to clients."""
        return [pair for pair in self._contacts.items() if pair[1].role is Role.CLIENT]

    def refusal(self, peer: NodeId, contact: PeerLink, now: float) -> CloseReason | None:
        """Return why to refuse a new link; None to accept it, replacing an old one if any."""
        if peer == self._me:
            return CloseReason.DUPLICATE
        old = self.get(peer)
        if old is None:
            most = MAX_MEMBERS - 1 if contact.role is Role.NODE else MAX_CLIENTS
            same = sum(other.role is contact.role for other in self._contacts.values())
            return CloseReason.FULL if same >= most else None
        if not old.is_fresh(now):
            return None
        if old.instance != contact.instance:
            return CloseReason.DUPLICATE
        return None if contact.is_favoured and not old.is_favoured else CloseReason.CROSSED

    def add(self, peer: NodeId, contact: PeerLink) -> None:
        """Add a link, replacing any other to the peer."""
        self._contacts[peer] = contact

    def remove(self, peer: NodeId) -> PeerLink | None:
        """Remove and return the link to a peer, if any."""
        return self._contacts.pop(peer, None)

    def timed_out(self, now: float) -> list[NodeId]:
        """Return the peers that timed out."""
        return [peer for peer, contact in self._contacts.items() if now >= contact.heard + SILENCE]

    def round_trips(self) -> tuple[tuple[NodeId, int], ...]:
        """Return the links to nodes as published: peer, and round trip in microseconds."""
        return tuple((peer, contact.round_trip_us) for peer, contact in self.nodes())


def republish_delay(
    published: tuple[tuple[NodeId, int], ...], links: tuple[tuple[NodeId, int], ...]
) -> float:
    """Return how many seconds after their last publication to publish the links again."""
    before, after = dict(published), dict(links)
    if before.keys() != after.keys() or any(after[peer] and not before[peer] for peer in after):
        return LINKS_INTERVAL
    changed = (
        abs(after[peer] - us) > max(MIN_CHANGE * us, MIN_CHANGE_US) for peer, us in published
    )
    return ROUND_TRIPS_INTERVAL if any(changed) else inf
