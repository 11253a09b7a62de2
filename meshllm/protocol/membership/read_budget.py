"""A limit on the work that the messages of one peer make, so that none keeps the others waiting.

A message costs about `MESSAGE_S` to decrypt, decode and handle, and more with its length. Each link
may cause some of that work at any time. What it causes beyond that is done in turns with other such
links of the same role, so that these together get `TURNS` of a thread: its driver pauses before it
reads on. So members do not wait for clients.
"""

from meshllm.protocol.trust.credential import Role

MESSAGE_S = 80e-6  # s; 60 to 100 us measured for the smallest messages
BYTE_S = 20e-9  # s, of requests and answers
GOSSIP_BYTE_S = 200e-9  # s; twice what a summary of 88 KiB takes, as there are few of them
BURST_S = 0.05  # s of work at once: 600 small messages
FREE = {Role.NODE: 0.05, Role.CLIENT: 0.01}  # of a thread: 600 and 120 small messages a second
TURNS = 0.25  # of a thread, for the further messages of all links of a role together
QUANTUM_S = 0.005  # s of work between two pauses, which a timer can measure
SHORT_BYTES = 64 * 1024  # longer messages of clients always wait
CLIENT_BYTES_PER_S = 2 << 20  # of long messages, of all clients of a node together


class ReadBudget:
    """What one link may cause; times are seconds on the driver's clock."""

    def __init__(self, role: Role, now: float) -> None:
        self._role = role
        self._left, self._at = BURST_S, now

    def pause(self, size: int, now: float, *, is_gossip: bool) -> float:
        """Count a message; return for how long to read no other one, in turn with other links."""
        cost = MESSAGE_S + size * (GOSSIP_BYTE_S if is_gossip else BYTE_S)
        earned = (now - self._at) * FREE[self._role]
        self._left, self._at = min(self._left + earned, BURST_S) - cost, now
        owed = -self._left
        long = size / CLIENT_BYTES_PER_S if self._role is Role.CLIENT and size > SHORT_BYTES else 0
        if not long and owed < QUANTUM_S:
            return 0.0
        self._left = max(self._left, 0.0)
        return max(long, owed / TURNS)
