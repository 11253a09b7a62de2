"""When to dial each peer: exponential backoff with deterministic jitter.

The lower of two node ids dials at once and the higher a moment later, so that two dials rarely
cross. Each failed dial doubles the backoff. The jitter comes from a hash, so that it differs
between nodes and is the same in every run.
"""

from collections.abc import Collection

from blake3 import blake3

from meshllm.names import NodeId

HIGHER = 1.0  # s that the higher id waits: a few round trips of the slowest path
PAUSE = 1.0  # s of backoff after the first failed dial
MAX_PAUSE = 30.0  # s
PATIENCE = 30.0  # s after which a dial without a reported outcome counts as failed


class Dialling:
    """The dial schedule of one node; times are seconds on the driver's clock."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._due: dict[NodeId, float] = {}
        self._tries: dict[NodeId, int] = {}

    @property
    def deadline(self) -> float | None:
        """When the next dial is due; None if there is none."""
        return min(self._due.values(), default=None)

    def want(self, peers: Collection[NodeId], now: float) -> None:
        """Replace the set of peers to dial."""
        due = self._due
        self._due = {peer: due[peer] if peer in due else self._first(peer, now) for peer in peers}

    def due(self, now: float) -> list[NodeId]:
        """Return the peers to dial now, and count the attempts."""
        peers = [peer for peer, due in self._due.items() if due <= now]
        for peer in peers:
            self._tries[peer] = self._tries.get(peer, 0) + 1
            self._due[peer] = now + PATIENCE
        return peers

    def refused(self, peer: NodeId, now: float) -> None:
        """Note that a dial failed."""
        if peer in self._due:
            self._due[peer] = now + self._pause(peer)

    def settled(self, peer: NodeId) -> None:
        """Reset the backoff of a peer, after a link to it lasted."""
        self._tries.pop(peer, None)

    def _first(self, peer: NodeId, now: float) -> float:
        if peer in self._tries:
            return now + self._pause(peer)
        return now if self._me < peer else now + HIGHER

    def _pause(self, peer: NodeId) -> float:
        tries = self._tries.get(peer, 1)
        seed = self._me + peer + tries.to_bytes(8, "little")
        jitter = int.from_bytes(blake3(seed).digest(2), "little") / 65536
        return min(PAUSE * 2.0 ** min(tries - 1, 16), MAX_PAUSE) * (0.75 + jitter / 2)
