"""Driver of the path selection (`paths`) of one connection.

The sides exchange their addresses only after both are authenticated: an earlier offer would reveal
private addresses to anyone, and would let an unauthenticated peer direct our probes to a third
party.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from meshllm_quic.link.connection import Connection
from meshllm_quic.net.network import Address
from meshllm_quic.path.paths import (
    Action,
    OfferCandidates,
    Paths,
    RouteChanged,
    SendProbe,
    SendReply,
)
from meshllm_quic.wire.lanes import ANSWER, OFFER
from meshllm_quic.wire.offer import KEY_BYTES, CandidateOffer
from meshllm_quic.wire.packets import MAX_INNER_BYTES, TAG_BYTES, Probe, ProbeReply
from meshllm_quic.wire.routes import Direct, Route, ViaRelay

GRACE_S = 0.02
"""After a link is accepted, the application has this long to mark its peer unauthenticated."""
ANSWER_PAUSE_S = 1.0
"""Minimum interval between two answers to offers."""
LATE_S = 0.1
"""Interval of deadline updates; an update for each datagram would cost more."""


class PathHost(Protocol):
    """What a path driver needs from its endpoint."""

    random: Callable[[int], bytes]

    def candidates(self, connection: Connection) -> list[Address]:
        """List our candidate addresses for this connection, most reachable first."""
        ...

    def is_local(self, host: str) -> bool:
        """Return whether a host is this machine."""
        ...

    def is_relay(self, address: Address) -> bool:
        """Return whether this node uses the address as a relay."""
        ...

    def send_packet(self, packet: bytes, to: Address) -> None:
        """Send a non-QUIC datagram."""
        ...

    def may_probe(self, to: Address) -> bool:
        """Count a probe; return False if it exceeds the rate limit of the host or in total."""
        ...

    def watch_path(self, path: bytes, driver: "PathDriver") -> None:
        """Route the probes and replies of a path to its driver."""
        ...

    def proven(self, key: bytes, address: Address) -> None:
        """Remember the direct address of a node."""
        ...

    def authenticated(self, connection: Connection) -> None:
        """Note that the peer is authenticated."""
        ...


class PathDriver:
    """Drives the `Paths` machine of one connection."""

    def __init__(self, host: PathHost, connection: Connection) -> None:
        self.deadline: float | None = None
        """When `expire` must be called; None if nothing is due."""
        self.paths: Paths | None = None
        self.connection = connection
        self.backup: ViaRelay | None = None
        """A relay that reaches the peer; used by `Paths` once it exists."""
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._key = b""
        self.is_authenticated = False
        """Whether the peer is authenticated, and its link not closed."""
        self._is_ended = False
        self._pending: CandidateOffer | None = None
        self._starting: asyncio.TimerHandle | None = None
        self._answered = float("-inf")
        self._looked = 0.0

    @property
    def reason(self) -> str:
        """Why this route is used, in one line."""
        return self.paths.reason if self.paths is not None else "not tried yet"

    def note_authentication(self, *, is_authenticated: bool) -> None:
        """Start `GRACE_S` after the peer is authenticated."""
        if self._starting is not None:
            self._starting.cancel()
        self._starting = None
        if is_authenticated and not (self.is_authenticated or self._is_over):
            self._starting = self._loop.call_later(GRACE_S, self._start)

    def receive_record(self, kind: int, body: bytes) -> None:
        """Handle an OFFER or ANSWER record; raise `PeerFault`."""
        candidates = CandidateOffer.decode(body)
        if self.is_authenticated:
            self._take(kind, candidates)
        elif kind == OFFER:
            self._pending = candidates

    def offer(self) -> None:
        """Send our candidates to the peer, and request its own."""
        self._say(OFFER)

    def take(self, packet: Probe | ProbeReply, source: Address, now: float) -> None:
        """Handle a probe of the peer, or its reply to one."""
        if self.paths is None:
            return
        if isinstance(packet, Probe):
            self._do(self.paths.probed(packet, source, now))
        else:
            self._do(self.paths.answered(packet, source, now))

    def heard(self, route: Route, now: float) -> None:
        """Note a received QUIC datagram and its route."""
        if isinstance(route, ViaRelay) and self._is_backup(route):
            self.backup = route
        if self.paths is not None:
            self.paths.backup = self.backup
            source = route.address if isinstance(route, Direct) else None
            if actions := self.paths.heard(source, now):
                self._do(actions)
            self._look(now)

    def sent(self, now: float) -> None:
        """Note that QUIC sent a datagram."""
        if self.paths is not None:
            self.paths.sent(now)
            self._look(now)

    def expire(self, now: float) -> None:
        """Handle the deadline."""
        if self.paths is not None:
            self._do(self.paths.expire(now))

    def end(self) -> None:
        """Stop; the application may still note an authentication, which changes nothing."""
        self._is_ended = True
        if self._starting is not None:
            self._starting.cancel()
        self.paths = None
        self.deadline = None

    @property
    def _is_over(self) -> bool:
        return self._is_ended or self.connection.link.is_closed

    def _start(self) -> None:
        self._starting = None
        if self._is_over:
            return
        self.is_authenticated = True
        self.connection.link.start_granting()
        self._host.authenticated(self.connection)
        if self.connection.machine.is_client:
            self._begin(self._host.random(KEY_BYTES))
            self.offer()
        elif self._pending is not None:
            self._take(OFFER, self._pending)
        self.connection.transmit_soon()

    def _begin(self, key: bytes) -> None:
        self._key = key
        self.paths = Paths(
            key,
            self.connection.route,
            self._host.random,
            is_local=self._host.is_local,
            is_dialer=self.connection.machine.is_client,
        )
        if self.backup is not None:
            self.paths.backup = self.backup
        self._host.watch_path(self.paths.id, self)

    def _take(self, kind: int, candidates: CandidateOffer) -> None:
        now = self._loop.time()
        if self.paths is None:
            if self.connection.machine.is_client:
                return
            self._begin(candidates.key)
        assert self.paths is not None
        if kind == OFFER and now >= self._answered + ANSWER_PAUSE_S:
            self._answered = now
            self._say(ANSWER)
        self._do(self.paths.offered(candidates.addresses, now))

    def _say(self, kind: int) -> None:
        if self.is_authenticated and self.paths is not None:
            addresses = self._host.candidates(self.connection)
            self.connection.link.put_record(
                kind, CandidateOffer(self._key, tuple(addresses)).encode()
            )
            self.connection.transmit_soon()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendProbe(to, packet):
                    if self._is_route(to) or self._host.may_probe(to):
                        self._host.send_packet(packet.encode(), to)
                case SendReply(to, answer):
                    self._host.send_packet(answer.encode(), to)
                case RouteChanged():
                    self._move()
                case OfferCandidates():
                    self.offer()
                case _:
                    assert_never(action)
        self.deadline = self.paths.deadline if self.paths is not None else None

    def _is_backup(self, route: ViaRelay) -> bool:
        """Return whether the route uses a relay of ours and leads to the authenticated peer."""
        tag = self.connection.link.peer_key[:TAG_BYTES]
        return route.to == tag and self._host.is_relay(route.relay)

    def _is_route(self, address: Address) -> bool:
        return self.connection.route == Direct(address)

    def _move(self) -> None:
        assert self.paths is not None
        route, machine = self.paths.route, self.connection.machine
        size = self.paths.size if isinstance(route, Direct) else MAX_INNER_BYTES
        if route != self.connection.route:
            self.connection.route = route
            machine.reset_path(size)
            machine.send_ping(0)  # its acknowledgement reveals what the old route has lost
        elif size != machine.size:
            machine.size = size
        if isinstance(route, Direct) and self.paths.round_trip_s is not None:
            self._host.proven(self.connection.link.peer_key, route.address)
        self.connection.transmit_soon()

    def _look(self, now: float) -> None:
        if now >= self._looked + LATE_S and self.paths is not None:
            self._looked = now
            self.deadline = self.paths.deadline
