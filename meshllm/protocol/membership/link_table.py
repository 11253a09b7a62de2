"""The links of one node: who is heard, how far away, which of two stays.

Races, and who wins:
  two dials cross                the link dialled by the lower id stays, on both sides
  a second link to one peer      the old one while it was heard within `FRESH`, else the new one
  this process slept             a peer that was not heard meanwhile gets one `BEAT` more
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from meshllm.names import NodeId
from meshllm.protocol.membership.codec import MAX_HELD_US, MAX_SLOTS, MAX_WALL_MS, Beat, Why
from meshllm.protocol.membership.records import MAX_MEMBERS
from meshllm.protocol.trust.credential import Credential, Role

SILENCE = 3.0  # s; as on a link of the ring
BEAT = 0.5  # s; six chances to be heard before SILENCE
FRESH = 1.5  # s; three beats: a link that was heard since is not given up for another
ITEMS_PER_S = 100.0  # of one peer: 64 nodes that each tell something new each second, and more
MAX_CLIENTS = 64  # links of members that only ask
PAUSE = 1.0  # s before a second summary to the same peer
MAX_PAUSE = 8.0  # s; what two nodes can never agree on costs little

GAP = 0.1  # s between two tellings of our links while many come and go
RETELL = 5.0  # s between two tellings of round trips
MOVED = 0.25  # of a round trip: what may change a plan
MOVED_US = 250  # less never does

_GAIN = 1 / 8  # of a new round trip in the smoothed one (RFC 6298, alpha)


@dataclass(slots=True)
class Contact:
    """A link that stands; times are seconds on the driver's clock."""

    instance: int
    """Which process of the peer it is."""
    role: Role
    credential: Credential
    is_favoured: bool
    """It was dialled by the lower node id, and stays when two dials cross."""
    since: float
    heard: float
    round_trip_us: int = 0
    """Smoothed; 0 until it is measured."""
    ahead_s: float | None = None
    """By how much the peer's time of day is ahead of ours; None until it told it. Only shown: a
    beat that was late, or a liar, is as good as a clock that is wrong."""
    allowance: float = field(default=MAX_SLOTS)
    """Items that it may send now."""
    differs: int = 0
    """Beats in a row that named other items than ours."""
    quiet_until: float = 0.0
    """No summary goes out before."""
    pause: float = PAUSE
    echo: tuple[int, float] | None = None
    """The peer's last stamp, and when it was heard."""

    def beat(self, now: float, wall_s: float, digest: bytes) -> Beat:
        """Make the next beat for the peer."""
        stamp, heard = self.echo or (0, now)
        held = min(_micros(now - heard), MAX_HELD_US)
        wall_ms = min(max(0, round(wall_s * 1e3)), MAX_WALL_MS)
        return Beat(_micros(now), stamp, held, wall_ms, digest)

    def hear(self, beat: Beat, now: float, wall_s: float) -> None:
        """Take a beat of the peer, and measure round trip and clock by it."""
        self.echo = (beat.stamp, now)
        self._measure(beat, now)
        # What it said was true when it was sent, half a round trip ago.
        self.ahead_s = beat.wall_ms / 1e3 + self.round_trip_us / 2e6 - wall_s

    def wants_summary(self, *, differs: bool, now: float) -> bool:
        """Tell whether to exchange summaries, after a beat that named the same items or others.

        Two in a row, because one may have crossed an item; and ever more rarely while it is of no
        use.
        """
        if not differs:
            self.differs, self.pause = 0, PAUSE
            return False
        self.differs += 1
        if self.differs < 2 or now < self.quiet_until:
            return False
        self.quiet_until, self.pause = now + self.pause, min(2 * self.pause, MAX_PAUSE)
        return True

    def refill(self, seconds: float) -> None:
        """Let it send more items, as time goes by."""
        self.allowance = min(MAX_SLOTS, self.allowance + seconds * ITEMS_PER_S)

    def spend(self) -> bool:
        """Count one item; tell whether it is to be looked at."""
        is_allowed = self.allowance >= 1
        self.allowance -= is_allowed
        return is_allowed

    def _measure(self, beat: Beat, now: float) -> None:
        sample = _micros(now) - beat.echo - beat.held
        # Nothing to return yet, or a stamp that is not ours: longer than silence no beat takes.
        if beat.echo == 0 or not 0 <= sample <= _micros(SILENCE):
            return
        smoothed = self.round_trip_us or sample
        # 0 is for what was not measured, so that a shorter one is told as a microsecond.
        self.round_trip_us = max(1, round(smoothed + _GAIN * (sample - smoothed)))


class Links(Mapping[NodeId, Contact]):
    """The links that stand, by peer."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._contacts: dict[NodeId, Contact] = {}

    def __getitem__(self, peer: NodeId) -> Contact:
        return self._contacts[peer]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._contacts)

    def __len__(self) -> int:
        return len(self._contacts)

    @property
    def deadline(self) -> float:
        """When the first link falls silent, unless it is heard."""
        return min((contact.heard for contact in self.values()), default=inf) + SILENCE

    def nodes(self) -> list[tuple[NodeId, Contact]]:
        """Return the links to nodes, without those to clients, in order of node id."""
        return sorted(
            (pair for pair in self.items() if pair[1].role is Role.NODE), key=lambda pair: pair[0]
        )

    def refusal(self, peer: NodeId, contact: Contact, now: float) -> Why | None:
        """Tell why a new link is not to stand; None when it may, in place of an old one or not."""
        if peer == self._me:
            return Why.TWIN
        old = self.get(peer)
        if old is None:
            most = MAX_MEMBERS - 1 if contact.role is Role.NODE else MAX_CLIENTS
            same = sum(other.role is contact.role for other in self.values())
            return Why.FULL if same >= most else None
        if now >= old.heard + FRESH:
            return None
        if old.instance != contact.instance:
            return Why.TWIN
        return None if contact.is_favoured and not old.is_favoured else Why.CROSSED

    def add(self, peer: NodeId, contact: Contact) -> None:
        """Let a link stand."""
        self._contacts[peer] = contact

    def remove(self, peer: NodeId) -> Contact | None:
        """Let go of a link, if there is one."""
        return self._contacts.pop(peer, None)

    def silent(self, now: float) -> list[NodeId]:
        """Return the peers that were not heard for too long; called late, this node slept."""
        if now > self.deadline + BEAT:
            for contact in self.values():
                contact.heard = max(contact.heard, now + BEAT - SILENCE)
        return [peer for peer, contact in self.items() if now >= contact.heard + SILENCE]

    def told(self) -> tuple[tuple[NodeId, int], ...]:
        """Return what is told of the links to nodes: peer, and round trip in microseconds."""
        return tuple((peer, contact.round_trip_us) for peer, contact in self.nodes())


def worth(told: tuple[tuple[NodeId, int], ...], links: tuple[tuple[NodeId, int], ...]) -> float:
    """Return how many seconds after the last telling the links are to be told again."""
    before, after = dict(told), dict(links)
    if before.keys() != after.keys() or any(after[peer] and not before[peer] for peer in after):
        return GAP
    moved = (abs(after[peer] - us) > max(MOVED * us, MOVED_US) for peer, us in told)
    return RETELL if any(moved) else inf


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
