"""The client's registration with one relay, as a sans-IO machine.

Theory of operation
-------------------
One *round* is a `Register` exchange. The first `Register` carries no cookie; the relay replies with
a `Cookie` for the observed source address, and the client sends a signed `Register` with it;
`Registered` ends the round. An unanswered packet is retransmitted unchanged after 0.5 s, 1 s, 2 s,
then every 5 s, so that a late reply to an earlier copy still counts. A round begins at the start,
on `restart`, every 20 s, and when the relay reports this node as unknown.

Every reply carries the nonce of its request, so an off-path attacker cannot forge one. Only
`UnknownTag` has no nonce; it triggers a round, at most every 5 s, and removes no state. A relay
that sends one cookie after another gets the next signature only with the next retry.

The driver sends the actions to the relay, over UDP or a stream, and passes in what the relay sends.
Through a stream the relay does not see our address: `observed` is None.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from secrets import token_bytes

from meshllm_quic.net.network import Address
from meshllm_quic.wire.packets import (
    TAG_BYTES,
    ZERO_COOKIE,
    Cookie,
    Packet,
    Register,
    Registered,
    UnknownTag,
)

REFRESH_S = 20.0  # a NAT may forget a binding after 30 s (RFC 4787 REQ-5 asks for 120 s)
MIN_REFRESH_S = 5.0  # even if a relay asks for less
RETRY_S = 0.5  # longer than most round trips: few needless retransmissions
MAX_RETRY_S = 5.0
MAX_MISSED = 3
"""Unanswered tries in a row that end a registration: 3.5 s after the first."""
SILENT_S = 3.0  # after the first request; then the stream is tried
UNKNOWN_S = 5.0  # between two rounds triggered by `UnknownTag`
_NONCE_BYTES = 8
_NO_SIGNATURE = bytes(64)


@dataclass(frozen=True, slots=True)
class SendToRelay:
    """Send this packet to the relay."""

    packet: Register


@dataclass(frozen=True, slots=True)
class RegistrationChanged:
    """One of `is_registered`, `observed`, `observer` and `is_silent` has changed."""


Action = SendToRelay | RegistrationChanged


class Registration:
    """Registration with one relay; times are seconds on the driver's clock."""

    def __init__(
        self,
        relay: Address,
        key: bytes,
        sign: Callable[[bytes], bytes],
        random: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.relay = relay
        self.is_registered = False
        """Whether the relay forwards packets for our tag to us, as far as we know."""
        self.observed: Address | None = None
        """Our address as the relay sees it."""
        self.observer: Address | None = None
        """Another port of the relay, which answers `AddressRequest`; None if unknown."""
        self.is_silent = False
        """Whether a request has been unanswered for 3 s."""
        self._key = key
        self._sign = sign
        self._random = random
        self._cookie: bytes
        self._pending: Register | None = None
        self._asked: float | None = None  # when the oldest unanswered request was sent
        self._due: float | None = None  # time of the next retransmission or round
        self._missed: int
        self._until = -inf  # when the relay forgets this node
        self._signed: float  # time of the last signature
        self._doubted = -inf  # time of the last round triggered by `UnknownTag`

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called; None before the start."""
        if self._due is None or self._asked is None or self.is_silent:
            return self._due
        return min(self._due, self._asked + SILENT_S)

    def is_over(self, now: float) -> bool:
        """Return whether the relay is silent, and has forgotten this node."""
        return self.is_silent and now >= self._until

    def start(self, now: float) -> list[Action]:
        """Begin the first round."""
        return self.restart(now)

    def restart(self, now: float) -> list[Action]:
        """Register again after a change of our address or of the transport (UDP or stream)."""
        before = self._view
        self.observed = self.observer = self._asked = None
        self.is_silent = False
        self._missed = 0
        self._cookie = ZERO_COOKIE
        self._signed = -inf
        return self._changed(before, self._ask(now))

    def receive(self, packet: Packet, now: float) -> list[Action]:
        """Handle a packet from the relay; packets that answer no pending request are ignored."""
        before = self._view
        match packet:
            case Cookie() if self._is_answer(packet.nonce):
                return self._changed(before, self._sign_for(packet.cookie, now))
            case Registered() if self._is_answer(packet.nonce):
                return self._changed(before, self._on_registered(packet, now))
            case UnknownTag() if packet.tag == self._key[:TAG_BYTES]:
                return self._on_unknown(now)
            case _:
                return []

    def expire(self, now: float) -> list[Action]:
        """Handle the deadline: retransmit, refresh, or report the relay as silent."""
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
        """Send a `Register` with the current cookie: the first or the second half of a round."""
        bare = Register(self._key, self._random(_NONCE_BYTES), self._cookie, _NO_SIGNATURE)
        is_first = self._cookie == ZERO_COOKIE
        signature = _NO_SIGNATURE if is_first else self._sign(bare.signed)
        self._pending = Register(bare.key, bare.nonce, bare.cookie, signature)
        return self._send(now)

    def _send(self, now: float) -> list[Action]:
        assert self._pending is not None
        if self._asked is None:
            self._asked = now
        backoff_s = min(RETRY_S * 2.0 ** min(self._missed, 8), MAX_RETRY_S)
        self._due = now + backoff_s
        return [SendToRelay(self._pending)]

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

    def _on_registered(self, packet: Registered, now: float) -> list[Action]:
        self._pending = self._asked = None
        self._missed = 0
        self._until = now + packet.lasts_s
        self._due = now + min(REFRESH_S, max(packet.lasts_s / 3, MIN_REFRESH_S))
        self.is_registered = True
        self.is_silent = False
        # Through a stream the relay reports port 0, which is not a real address.
        self.observed = packet.address if packet.address[1] else None
        has_observer = self.observed is not None and packet.observer_port
        self.observer = (self.relay[0], packet.observer_port) if has_observer else None
        return []

    def _on_unknown(self, now: float) -> list[Action]:
        """Register again: the relay may have restarted, or the packet may be forged."""
        if self._due is None or self._pending is not None or now < self._doubted + UNKNOWN_S:
            return []
        self._doubted = now
        return self._ask(now)

    @property
    def _view(self) -> tuple[object, ...]:
        return self.is_registered, self.observed, self.observer, self.is_silent

    def _changed(self, before: tuple[object, ...], actions: list[Action]) -> list[Action]:
        return actions if before == self._view else [*actions, RegistrationChanged()]
