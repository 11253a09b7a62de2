"""A limit on failed dials of one port and of one host, whichever peers name it.

Peers choose their addresses, so several of them could make this node call a stranger's server again
and again, or try all ports of a host. A port has `BURST` attempts, then one in each `PAUSE_S`. All
ports of a host together have `PORTS` times as many. Where a node has proved who it is,
`MOST_UNANSWERED` attempts come first: a node that restarts is dialled as soon as it is back.
"""

from typing import Any

BURST = 4
PORTS = 4  # two nodes behind one NAT, each with two transports
PAUSE_S = 10.0
MOST_UNANSWERED = 256  # of a node that is away: it is dialled twice a minute, at two addresses
MAX_TARGETS = 4096  # more than MAX_MEMBERS nodes have addresses; a new one replaces the oldest


class DialLimit:
    """Counts the attempts at each target; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._ports, self._hosts = _Attempts(BURST), _Attempts(BURST * PORTS)

    def take(self, host: str, port: str, now: float) -> bool:
        """Count an attempt; return whether it may be made."""
        if not self._ports.have(f"{host} {port}", now) or not self._hosts.have(host, now):
            return False
        self._ports.spend(f"{host} {port}")
        self._hosts.spend(host)
        return True

    def answered(self, host: str, port: str) -> None:
        """Note that a node answered there, and proved who it is."""
        self._ports.answered(f"{host} {port}")
        self._hosts.answered(host)


class _Attempts:
    """The attempts left at each target."""

    def __init__(self, burst: int) -> None:
        self._burst = float(burst)
        self._tried: dict[str, tuple[float, float]] = {}
        """Attempts left, and when that was."""
        self._answered: dict[str, int] = {}
        """Attempts left at targets where a node has answered, oldest first."""

    def have(self, target: str, now: float) -> bool:
        """Return whether an attempt is left."""
        rest, at = self._tried.pop(target, (self._burst, now))
        rest = min(self._burst, rest + (now - at) * self._burst / BURST / PAUSE_S)
        self._tried[target] = rest, now
        _shorten(self._tried)
        return rest >= 1 or self._answered.get(target, 0) > 0

    def spend(self, target: str) -> None:
        """Count an attempt, after `have`."""
        if left := self._answered.get(target, 0):
            self._answered[target] = left - 1
        else:
            rest, at = self._tried[target]
            self._tried[target] = rest - 1, at

    def answered(self, target: str) -> None:
        """Allow `MOST_UNANSWERED` attempts before others."""
        self._tried.pop(target, None)
        self._answered.pop(target, None)
        self._answered[target] = MOST_UNANSWERED
        _shorten(self._answered)


def _shorten(targets: dict[str, Any]) -> None:
    if len(targets) > MAX_TARGETS:
        del targets[next(iter(targets))]
