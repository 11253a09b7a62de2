"""When to dial each peer: exponential backoff with deterministic jitter.

The lower of two node ids dials at once and the higher a moment later, so that two dials rarely
cross. Each dial doubles the backoff, until a link has lasted. The jitter of a quarter comes from a
hash, so that it differs between nodes and is the same in every run.
"""

from collections.abc import Collection

from blake3 import blake3

from meshllm.names import NodeId
from meshllm.protocol.membership.records import MAX_MEMBERS

HIGHER_ID_DELAY = 1.0  # s that the higher id waits: a few round trips of the slowest path
BACKOFF = 1.0  # s of backoff after the first failed dial
MAX_BACKOFF = 30.0  # s, before jitter
MAX_COUNTED = 4 * MAX_MEMBERS  # peers with failed dials, the latest; a member may invent others
DIAL_TIMEOUT = 30.0  # s after which a dial without a reported outcome counts as failed


class DialSchedule:
    """The dial schedule of one node; times are seconds on the driver's clock."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._due: dict[NodeId, float] = {}
        self._attempts: dict[NodeId, int] = {}

    @property
    def deadline(self) -> float | None:
        """When the next dial is due; None if there is none."""
        return min(self._due.values(), default=None)

    def want(self, peers: Collection[NodeId], now: float) -> None:
        """Replace the set of peers to dial."""
        due = self._due
        self._due = {at: due[at] if at in due else self._first_due(at, now) for at in peers}

    def due(self, now: float) -> list[NodeId]:
        """Return the peers to dial now, and count the attempts."""
        peers = [peer for peer, due in self._due.items() if due <= now]
        for peer in peers:
            self._attempts[peer] = self._attempts.pop(peer, 0) + 1
            if len(self._attempts) > MAX_COUNTED:
                del self._attempts[next(iter(self._attempts))]
            self._due[peer] = now + DIAL_TIMEOUT
        return peers

    def failed(self, peer: NodeId, now: float) -> None:
        """Note that a dial failed."""
        if peer in self._due:
            self._due[peer] = now + self._backoff(peer)

    def reset(self, peer: NodeId) -> None:
        """Reset the backoff of a peer, after a link to it lasted."""
        self._attempts.pop(peer, None)

    def _first_due(self, peer: NodeId, now: float) -> float:
        if peer in self._attempts:
            return now + self._backoff(peer)
        return now if self._me < peer else now + HIGHER_ID_DELAY

    def _backoff(self, peer: NodeId) -> float:
        attempts = self._attempts.get(peer, 1)
        seed = self._me + peer + attempts.to_bytes(8, "little")
        jitter = int.from_bytes(blake3(seed).digest(2), "little") / 65536
        return min(BACKOFF * 2.0 ** min(attempts - 1, 16), MAX_BACKOFF) * (0.75 + jitter / 2)
