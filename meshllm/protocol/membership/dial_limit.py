"""A limit on failed dials of one port and of one host, shared by all peers that announce it.

Peers choose their addresses, so several of them could make this node call a stranger's server again
and again, or try all ports of a host. A port, or a node behind a relay there, has `BURST` attempts,
then one in each `PAUSE_S`. All ports of a host together have `PORTS` times as many. Where a node
has proved who it is, `MAX_UNANSWERED` attempts come first: a node that restarts is dialled as soon
as it is back. These ports, and no others, do not count for their host: a peer that announces other
ports of a host must not block the one that is known there.
"""

from typing import Any

BURST = 4
PORTS = 4  # two nodes behind one NAT, each with two transports
PAUSE_S = 10.0
MAX_UNANSWERED = 256  # of a node that is away: it is dialled twice a minute, at two addresses
MAX_TARGETS = 4096  # more than MAX_MEMBERS nodes have addresses; a new one replaces the oldest


class DialLimit:
    """Counts the attempts at each target; times are seconds on the driver's clock."""

    def __init__(self) -> None:
        self._ports, self._hosts = _Attempts(BURST), _Attempts(BURST * PORTS)
        self._answered: dict[str, int] = {}
        """Attempts that come first at ports where a node has answered, the oldest answer first."""

    def has(self, host: str, port: str, now: float) -> bool:
        """Return whether an attempt may be made, without counting one."""
        at = f"{host} {port}"
        first = self._answered.get(at)
        is_host_due = first is not None or self._hosts.have(host, now)
        return bool(first) or (is_host_due and self._ports.have(at, now))

    def take(self, host: str, port: str, now: float) -> bool:
        """Count an attempt; return whether it may be made."""
        if not self.has(host, port, now):
            return False
        at = f"{host} {port}"
        first = self._answered.get(at)
        if first:
            self._answered[at] = first - 1
            return True
        self._ports.spend(at)
        if first is None:
            self._hosts.spend(host)
        return True

    def answered(self, host: str, port: str) -> None:
        """Note that a node answered there, and proved who it is."""
        at = f"{host} {port}"
        self._ports.forget(at)
        self._hosts.forget(host)  # there may be more nodes
        self._answered.pop(at, None)
        self._answered[at] = MAX_UNANSWERED
        _shorten(self._answered)


class _Attempts:
    """The attempts left at each target."""

    def __init__(self, burst: int) -> None:
        self._burst = float(burst)
        self._tried: dict[str, tuple[float, float]] = {}
        """Attempts left, and when that was."""

    def have(self, target: str, now: float) -> bool:
        """Return whether an attempt is left."""
        rest, at = self._tried.pop(target, (self._burst, now))
        rest = min(self._burst, rest + (now - at) * self._burst / BURST / PAUSE_S)
        self._tried[target] = rest, now
        _shorten(self._tried)
        return rest >= 1

    def spend(self, target: str) -> None:
        """Count an attempt, after `have`."""
        rest, at = self._tried[target]
        self._tried[target] = rest - 1, at

    def forget(self, target: str) -> None:
        """Allow all attempts again."""
        self._tried.pop(target, None)


def _shorten(targets: dict[str, Any]) -> None:
    if len(targets) > MAX_TARGETS:
        del targets[next(iter(targets))]
