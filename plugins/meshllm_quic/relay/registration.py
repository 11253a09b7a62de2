"""How a node stays reachable through one relay.

Theory of operation
-------------------
One *round* is a `Register` and what it leads to. The first carries no cookie; the relay answers
with a `Cookie` for the address that it saw, and the round goes on with a signed `Register`, until
`Registered` ends it. What stays unanswered is sent again, the same, after 0.5 s, 1 s, 2 s, and then
every 5 s, so that a late answer to an earlier one counts too. A round begins at the start, when
this node `moved`, every 20 s, and when the relay says that it does not know us.

Every answer carries the nonce of what it answers: who does not see our packets cannot forge one.
`Unknown` alone has none; it begins a round, at most every 5 s, and takes nothing away. A relay
that wants one cookie after another gets the next signature only with the next try.

Whoever drives it sends the actions to the relay, by UDP or through a stream alike, and feeds it
what came from there. Through a stream the relay sees no address of ours: `observed` is None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_bytes

from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import (
    TAG_BYTES,
    ZERO_COOKIE,
    Cookie,
    Packet,
    Register,
    Registered,
    Unknown,
)

REFRESH_S = 20.0  # a NAT may forget a binding after 30 s (RFC 4787 REQ-5 asks for 120 s)
MIN_REFRESH_S = 5.0  # whatever a relay says
RETRY_S = 0.5  # longer than most round trips, so that one answer rarely meets two questions
MAX_RETRY_S = 5.0
MAX_MISSED = 3
"""So many tries in a row without success end a registration: 3.5 s after the first."""
SILENT_S = 3.0  # from a first question; then another way to the relay is worth a try
UNKNOWN_S = 5.0  # between two rounds that an `Unknown` began
_NONCE_BYTES = 8
_NO_SIGNATURE = bytes(64)


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the relay."""

    packet: Register


@dataclass(frozen=True, slots=True)
class Changed:
    """An attribute is another one now: registered or not, observed or silent."""


Action = Send | Changed


class Registration:
    """Our place at one relay; times are seconds on the driver's clock."""

    def __init__(
        self,
        relay: Address,
        key: bytes,
        sign: Callable[[bytes], bytes],
        random: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.relay = relay
        self.is_registered = False
        """Whether the relay sends us what is for our tag, as far as we know."""
        self.observed: Address | None = None
        """Where the relay sees us."""
        self.observer: Address | None = None
        """Another port of the relay, which answers `Ask`."""
        self.is_silent = False
        """Whether nothing was heard for 3 s of what was asked."""
        self._key = key
        self._sign = sign
        self._random = random
        self._cookie = ZERO_COOKIE
        self._pending: Register | None = None
        self._asked: float | None = None  # since when no question was answered
        self._due: float | None = None  # the next try, or the next round
        self._missed = 0
        self._signed = self._doubted = float("-inf")  # the last cookie, the last `Unknown` obeyed

    @property
    def deadline(self) -> float | None:
        """When ``expire`` has something to do; None before the start."""
        if self._due is None or self._asked is None or self.is_silent:
            return self._due
        return min(self._due, self._asked + SILENT_S)

    def start(self, now: float) -> list[Action]:
        """Ask for a place."""
        return self.moved(now)

    def moved(self, now: float) -> list[Action]:
        """Ask anew, from wherever we are now or by another way: a new address, or a stream."""
        before = self._view
        self.observed = self.observer = self._asked = None
        self.is_silent = False
        self._missed = 0
        self._cookie = ZERO_COOKIE
        self._signed = float("-inf")
        return self._changed(before, self._ask(now))

    def receive(self, packet: Packet, now: float) -> list[Action]:
        """Take what came from the relay; what is no answer to a question of ours does nothing."""
        before = self._view
        match packet:
            case Cookie() if self._is_answer(packet.nonce):
                return self._changed(before, self._sign_for(packet.cookie, now))
            case Registered() if self._is_answer(packet.nonce):
                return self._changed(before, self._settle(packet, now))
            case Unknown() if packet.tag == self._key[:TAG_BYTES]:
                return self._doubt(now)
            case _:
                return []

    def expire(self, now: float) -> list[Action]:
        """Do what is due: ask again, refresh, or see that nobody answers."""
        before = self._view
        if self._asked is not None and now >= self._asked + SILENT_S:
            self.is_silent = True
        if self._due is None or now < self._due:
            return self._changed(before, [])
        if self._pending is None:
            return self._changed(before, self._ask(now))
        self._missed += 1
        if self._missed >= MAX_MISSED:
            self.is_registered = False
            self.observed = self.observer = None
        is_stale = self._pending.cookie != self._cookie
        return self._changed(before, self._ask(now) if is_stale else self._send(now))

    def _ask(self, now: float) -> list[Action]:
        """Begin a round, or its second half, with the cookie that we have."""
        bare = Register(self._key, self._random(_NONCE_BYTES), self._cookie, _NO_SIGNATURE)
        is_first = self._cookie == ZERO_COOKIE
        signature = _NO_SIGNATURE if is_first else self._sign(bare.signed)
        self._pending = Register(bare.key, bare.nonce, bare.cookie, signature)
        return self._send(now)

    def _send(self, now: float) -> list[Action]:
        assert self._pending is not None
        if self._asked is None:
            self._asked = now
        self._due = now + min(RETRY_S * 2.0 ** min(self._missed, 8), MAX_RETRY_S)
        return [Send(self._pending)]

    def _is_answer(self, nonce: bytes) -> bool:
        return self._pending is not None and nonce == self._pending.nonce

    def _sign_for(self, cookie: bytes, now: float) -> list[Action]:
        self._cookie = cookie
        self._asked = now
        self.is_silent = False
        if now < self._signed + RETRY_S:
            return []
        self._signed = now
        return self._ask(now)

    def _settle(self, packet: Registered, now: float) -> list[Action]:
        self._pending = self._asked = None
        self._missed = 0
        self._due = now + min(REFRESH_S, max(packet.lasts_s / 3, MIN_REFRESH_S))
        self.is_registered = True
        self.is_silent = False
        # Through a stream the relay writes port 0, where nobody can be.
        self.observed = packet.address if packet.address[1] else None
        has_observer = self.observed is not None and packet.observer_port
        self.observer = (self.relay[0], packet.observer_port) if has_observer else None
        return []

    def _doubt(self, now: float) -> list[Action]:
        """Register again: the relay may have been started anew, or may never have said so."""
        if self._due is None or self._pending is not None or now < self._doubted + UNKNOWN_S:
            return []
        self._doubted = now
        return self._ask(now)

    @property
    def _view(self) -> tuple[object, ...]:
        return self.is_registered, self.observed, self.observer, self.is_silent

    def _changed(self, before: tuple[object, ...], actions: list[Action]) -> list[Action]:
        return actions if before == self._view else [*actions, Changed()]
