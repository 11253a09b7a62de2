"""Path selection of one connection: NAT hole punching, validation, migration and failover.

Theory of operation
-------------------
::

    RELAYED --a reply--> DIRECT --a check without reply--> RELAYED, or another DIRECT
                          |  ^
                          '--' another address, at least 5 ms faster

A QUIC connection starts through a relay, or directly at the dialled address. Inside it the sides
exchange their candidate addresses (an *offer*), then each probes all candidates of the other at the
same time: an outgoing probe opens the sender's NAT for the probes of the peer (hole punching). If a
NAT maps the peer to an address that was not offered, the source of its probe reveals it (a
peer-reflexive candidate), and it is probed too. Each side selects its own outgoing route.

Invariants:

- A direct route is one that replied to a probe, or the one of the QUIC handshake. A datagram from
  another address only makes that address a candidate.
- An attacker without the key, which was sent inside QUIC, cannot change a route: probes and replies
  carry a MAC. A replayed probe gets a reply that is 20 bytes longer, at most `MAX_ANSWERS` per
  second; a reply counts once, and only from the address of its probe; reflected packets fail the
  MAC. An on-path attacker can redirect packets past itself, as it already could, but reads nothing.
- An offered address that never replies gets at most `MAX_PROBES` probes of 33 bytes per offer, for
  at most `MAX_OFFERED` addresses, and at most one offer per `OFFER_PAUSE` is accepted. Any other
  address gets at most one reply and one probe per probe from there, so a replay is amplified less
  than 3 times. An offer cannot cause probes to multicast or invalid addresses, nor to loopback and
  link-local ones unless the route leads there, nor to own ones if it leads elsewhere.
- Memory is bounded.
- While a direct route does not reply, datagrams go through the relay, if there is one; the relay is
  never given up. A direct route that timed out needs twice as many replies as the last time before
  it is used again, so a flapping route is avoided.

A relayed connection sends an offer every minute, and soon after its direct route timed out.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf

from meshllm_quic.net.network import Address
from meshllm_quic.path.candidates import Candidate, PathCandidates, probeable
from meshllm_quic.path.liveness import Liveness, RouteVerdict
from meshllm_quic.path.path_mtu import PathMtu
from meshllm_quic.path.probing import Probing
from meshllm_quic.path.rate_limit import TokenBucket
from meshllm_quic.wire.packets import MAX_INNER_BYTES, Probe, ProbeReply
from meshllm_quic.wire.routes import Direct, Route, ViaRelay, show

OFFER_PAUSE = 2.0  # s between two accepted offers of the peer
OFFER_AGAIN = 5.0  # s from any offer to one that follows the loss of a route
OFFER_RELAYED = 60.0  # s between the offers of a relayed connection
PROBE_BACK_PAUSE = 0.1  # s between two probes to sources of QUIC datagrams
MAX_ANSWERS = 128  # per second
COMPARED = 3  # replies before round trips are compared
GAIN = 0.005  # s by which a path must be faster than the route to replace it
LENGTHS = (1452,)  # bytes: Ethernet MTU minus the headers of IPv6 and UDP
LOCAL_LENGTHS = (1452, 16000)  # bytes; the longest packet that aioquic writes


@dataclass(frozen=True, slots=True)
class SendProbe:
    """Send this probe directly to the address."""

    to: Address
    packet: Probe


@dataclass(frozen=True, slots=True)
class SendReply:
    """Send this reply directly to the address."""

    to: Address
    packet: ProbeReply


@dataclass(frozen=True, slots=True)
class RouteChanged:
    """The route or its datagram size has changed, or its first round trip was measured."""


@dataclass(frozen=True, slots=True)
class OfferCandidates:
    """Send our candidates to the peer, and request its own."""


Action = SendProbe | SendReply | RouteChanged | OfferCandidates


class Paths:
    """Path selection of one connection; times are seconds on the driver's clock."""

    def __init__(
        self,
        key: bytes,
        route: Route,
        random: Callable[[int], bytes] = secrets.token_bytes,
        *,
        is_local: Callable[[str], bool],
        is_dialer: bool,
    ) -> None:
        self.route = route
        self.backup = route if isinstance(route, ViaRelay) else None
        """The relay to use while no direct path is validated; may be set later."""
        self._probing = Probing(key, random, is_dialer=is_dialer)
        self._is_local = is_local
        self._candidates = PathCandidates()
        self._liveness: Liveness | None = None
        self._mtu: PathMtu | None = None
        self._taken = -inf  # when the last offer of the peer was accepted
        self._held: list[Address] | None = None  # an offer that came too soon after it
        self._offered: float  # when either side last sent an offer
        self._offer_at: float | None = None
        self._probed_back_at = -inf
        self._answers = TokenBucket(MAX_ANSWERS, MAX_ANSWERS)
        self._silent: Address | None = None  # the direct route that timed out
        if isinstance(route, Direct):
            self._candidates.keep(route.address)

    @property
    def id(self) -> bytes:
        """The ``path`` field of its probes and replies, 8 bytes."""
        return self._probing.id

    @property
    def size(self) -> int:
        """Longest datagram that can be sent on the route, in bytes."""
        return self._mtu.size if self._mtu else MAX_INNER_BYTES

    @property
    def round_trip_s(self) -> float | None:
        """Smoothed round trip of a direct route; None if no probe has measured it."""
        return here.round_trip_s if (here := self._here) else None

    @property
    def reason(self) -> str:
        """Why this route is used, in one line."""
        if isinstance(self.route, Direct):
            if self.round_trip_s is None:
                return f"dialled at {show(self.route.address)}, not measured yet"
            return f"{show(self.route.address)} answers in {self.round_trip_s * 1e3:.1f} ms"
        if self._silent is not None:
            return f"{show(self._silent)} stopped answering"
        tried = [candidate.probes for candidate in self._candidates if candidate.probes]
        if not tried:
            return "the peer has offered no usable address" if self._liveness else "not tried yet"
        return f"no answer to {sum(tried)} probes at {len(tried)} addresses"

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called; None until the first offer."""
        due = [candidate.due for candidate in self._candidates]
        due += [None if self._held is None else self._taken + OFFER_PAUSE, self._offer_at]
        due.append(self._liveness.deadline if self._liveness else None)
        due.append(self._mtu.deadline if self._mtu else None)
        return min((moment for moment in due if moment is not None), default=None)

    def offered(self, candidates: Sequence[Address], now: float) -> list[Action]:
        """Handle the peer's candidates, with numeric hosts: start probing, or start again."""
        self._held = probeable(candidates, self._may_probe)
        return self._take_held(now)

    def _may_probe(self, host: str) -> bool:
        """Return whether an offered host is probed: one of this machine, or of its links, only for
        a peer that is there already.

        Behind a relay the peer may be on this machine: it is probed there, but not on loopback.
        """
        place = self.route.address[0] if isinstance(self.route, Direct) else ""
        if place and self._is_local(place):
            return True
        if ip_address(host).is_link_local:
            return bool(place) and ip_address(place).is_link_local
        return not (ip_address(host).is_loopback or (place and self._is_local(host)))

    def probed(self, probe: Probe, source: Address, now: float) -> list[Action]:
        """Handle a probe; a valid one is answered, and its source is probed in return."""
        if not self._probing.is_theirs(probe) or not self._answers.take(1, now):
            return []
        self._start(now)
        answer = SendReply(source, self._probing.answer(probe, source))
        return [answer, *self._probe_back(source, now)]

    def answered(self, answer: ProbeReply, source: Address, now: float) -> list[Action]:
        """Handle a probe reply; it may validate a path or a datagram size."""
        sent, liveness = self._probing.match(answer, source, now), self._liveness
        if sent is None or liveness is None:
            return []
        if sent.length > Probe.SIZE:
            return self._grow(source, min(sent.length, answer.length))
        candidate = self._candidates.get(source)
        if candidate is None:
            return []
        is_first = candidate.round_trip_s is None
        round_trip_s = candidate.answer(now, now - sent.at)
        if source == self._direct:
            liveness.answered(now, round_trip_s)
            self._mtu = self._mtu or self._sizes(now)
            self._offer_at = None
            return [RouteChanged()] if is_first else []
        liveness.shorten()
        return self._move(Direct(source), now) if self._is_better(candidate) else []

    def heard(self, source: Address | None, now: float) -> list[Action]:
        """Note a QUIC datagram from a direct ``source``; None: through the relay."""
        if self._liveness is None:
            return []
        if source == self._direct or self._direct is None:
            self._liveness.heard()
        else:
            self._liveness.suspect(now)
        if source is None and self.backup is not None and self._is_lost:
            return self._move(self.backup, now)
        if source in {None, self._direct} or now < self._probed_back_at + PROBE_BACK_PAUSE:
            return []
        probes = self._probe_back(source, now)
        self._probed_back_at = now if probes else self._probed_back_at
        return probes

    def sent(self, now: float) -> None:
        """Note that QUIC sent a datagram on the route."""
        if self._liveness is not None:
            self._liveness.sent(now)

    def expire(self, now: float) -> list[Action]:
        """Handle the deadline: send probes or an offer, or give up a route that does not reply."""
        actions = self._take_held(now) + self._judge(now)
        if self._offer_at is not None and now >= self._offer_at:
            actions += self._offer(now)
        return actions + self._probe_due(now) + self._probe_sizes(now)

    @property
    def _direct(self) -> Address | None:
        return self.route.address if isinstance(self.route, Direct) else None

    @property
    def _here(self) -> Candidate | None:
        return self._candidates.get(self.route.address) if isinstance(self.route, Direct) else None

    @property
    def _is_lost(self) -> bool:
        """Whether the route timed out without an alternative to fall back to."""
        here = self._here
        return here is not None and here.address == self._silent and here.answered is None

    def _start(self, now: float) -> None:
        if self._liveness is None:
            self._liveness = Liveness(now, is_direct=isinstance(self.route, Direct))
            self._note_offer(now)

    def _take_held(self, now: float) -> list[Action]:
        if self._held is None or now < self._taken + OFFER_PAUSE:
            return []
        self._start(now)
        self._candidates.offer(self._held, self._direct)
        self._held, self._taken = None, now
        self._note_offer(now)
        return self._probe_all(now)

    def _offer(self, now: float) -> list[Action]:
        self._note_offer(now)
        return [OfferCandidates(), *self._probe_all(now)]

    def _note_offer(self, now: float) -> None:
        self._offered = now
        self._offer_at = now + OFFER_RELAYED  # unless a direct route answers before

    def _move(self, route: Route, now: float) -> list[Action]:
        self.route = route
        self._liveness = Liveness(now, is_direct=isinstance(route, Direct))
        self._mtu = self._sizes(now)
        if isinstance(route, Direct):
            self._offer_at = None
        return [RouteChanged()]

    def _sizes(self, now: float) -> PathMtu | None:
        if (place := self._direct) is None:
            return None
        return PathMtu(LOCAL_LENGTHS if self._is_local(place[0]) else LENGTHS, now)

    def _grow(self, source: Address, length: int) -> list[Action]:
        """Note that a datagram of ``length`` bytes fits the path."""
        if self._mtu is None or source != self._direct:
            return []
        size = self.size
        self._mtu.proved(length)
        return [RouteChanged()] if size != self.size else []

    def _is_better(self, candidate: Candidate) -> bool:
        if candidate.answers < candidate.trust:
            return False
        here = self._here
        if here is None or self._is_lost:
            return True
        is_measured = candidate.answers >= COMPARED and here.round_trip_s is not None
        return is_measured and candidate.cost_s + GAIN <= here.cost_s

    def _judge(self, now: float) -> list[Action]:
        if self._liveness is None:
            return []
        since = self._liveness.since or now
        verdict = self._liveness.expire(now)
        if verdict is RouteVerdict.DEAD:
            return self._give_up(since, now)
        if verdict is RouteVerdict.CHECK and (here := self._here):
            here.start(now, wanted=1)
        return []

    def _give_up(self, since: float, now: float) -> list[Action]:
        """Leave a route that has not replied since ``since``."""
        if (here := self._here) is None:
            for candidate in self._candidates:  # the relay may be down, and a direct path up again
                if candidate.round_trip_s is not None:
                    candidate.start(now)
            return []
        here.timed_out()
        others = [
            other
            for other in self._candidates
            if other.answered is not None and other.answered >= since
        ]
        if others:
            return self._move(Direct(min(others, key=lambda other: other.cost_s).address), now)
        self._silent, size, self._mtu = here.address, self.size, None
        moved: list[Action] = [RouteChanged()] if size > MAX_INNER_BYTES else []
        if self.backup is not None:
            moved = self._move(self.backup, now)
        self._offer_at = max(now, self._offered + OFFER_AGAIN)
        return moved

    def _probe_all(self, now: float) -> list[Action]:
        for candidate in self._candidates:
            if candidate.is_offered or candidate.round_trip_s is not None:
                candidate.start(now)
        return self._probe_due(now)

    def _probe_due(self, now: float) -> list[Action]:
        due = [each for each in self._candidates if each.due is not None and now >= each.due]
        return [self._probe(candidate, now) for candidate in due]

    def _probe(self, candidate: Candidate, now: float) -> Action:
        candidate.probe_sent(now)
        return SendProbe(candidate.address, self._probing.probe(candidate.address, now))

    def _probe_sizes(self, now: float) -> list[Action]:
        if self._mtu is None or self._direct is None:
            return []
        size, to = self._mtu.size, self._direct
        lengths = self._mtu.expire(now, self.round_trip_s)
        probes: list[Action] = [
            SendProbe(to, self._probing.probe(to, now, length)) for length in lengths
        ]
        return probes if size == self._mtu.size else [RouteChanged(), *probes]

    def _probe_back(self, source: Address, now: float) -> list[Action]:
        """Probe the source of a packet once, unless it is being probed or has replied recently."""
        candidate = self._candidates.find_or_add(source, self._direct, now)
        if candidate is None or candidate.due is not None or candidate.is_fresh(now):
            return []
        return [self._probe(candidate, now)]
