"""Whom to dial, and when.

The lower of two node ids dials at once and the higher a moment later, so that two dials rarely
cross. Each dial that leads to nothing doubles the pause. Its jitter is a hash, which is different
on every node and the same in every run.
"""

from collections.abc import Collection

from blake3 import blake3

from meshllm.names import NodeId

HIGHER = 1.0  # s that the higher id waits: a few round trips on the worst road
PAUSE = 1.0  # s after the first dial that led to nothing
MAX_PAUSE = 30.0  # s
PATIENCE = 30.0  # s until a dial of which nothing was heard counts as one that did not work


class Dialling:
    """The dials of one node; times are seconds on the driver's clock."""

    def __init__(self, me: NodeId) -> None:
        self._me = me
        self._due: dict[NodeId, float] = {}
        self._tries: dict[NodeId, int] = {}

    @property
    def deadline(self) -> float | None:
        """When the next dial is due; None for never."""
        return min(self._due.values(), default=None)

    def want(self, peers: Collection[NodeId], now: float) -> None:
        """Note who is to be dialled: exactly these."""
        due = self._due
        self._due = {peer: due[peer] if peer in due else self._first(peer, now) for peer in peers}

    def due(self, now: float) -> list[NodeId]:
        """Take the peers that are to be dialled now."""
        peers = [peer for peer, due in self._due.items() if due <= now]
        for peer in peers:
            self._tries[peer] = self._tries.get(peer, 0) + 1
            self._due[peer] = now + PATIENCE
        return peers

    def refused(self, peer: NodeId, now: float) -> None:
        """Note that a dial did not work."""
        if peer in self._due:
            self._due[peer] = now + self._pause(peer)

    def settled(self, peer: NodeId) -> None:
        """Note that a link to the peer has proved to last, or that it is not dialled again."""
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
