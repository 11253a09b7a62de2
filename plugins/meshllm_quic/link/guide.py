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
from meshllm_quic.path.paths import Action, Moved, Offer, Paths, SendAnswer, SendProbe
from meshllm_quic.wire.lanes import ANSWER, OFFER
from meshllm_quic.wire.offer import KEY_BYTES, Whereabouts
from meshllm_quic.wire.packets import MAX_INNER_BYTES, TAG_BYTES, Answer, Probe
from meshllm_quic.wire.routes import Direct, Route, Through

GRACE_S = 0.02
"""After a link is accepted, the application has this long to mark its peer unauthenticated."""
ANSWER_PAUSE_S = 1.0
"""Minimum interval between two answers to offers."""
LATE_S = 0.1
"""Interval of deadline updates; an update for each datagram would cost more."""


class Ground(Protocol):
    """What a guide needs from its endpoint."""

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

    def watch_path(self, path: bytes, guide: "Guide") -> None:
        """Route the probes and replies of a path to the guide."""
        ...

    def proven(self, key: bytes, address: Address) -> None:
        """Remember the direct address of a node."""
        ...

    def trusted(self, connection: Connection) -> None:
        """Note that the peer is authenticated."""
        ...


class Guide:
    """Drives the `Paths` machine of one connection."""

    def __init__(self, ground: Ground, connection: Connection) -> None:
        self.deadline: float | None = None
        """When `expire` must be called; None if nothing is due."""
        self.paths: Paths | None = None
        self.connection = connection
        self.backup: Through | None = None
        """A relay that reaches the peer; used by `Paths` once it exists."""
        self._ground = ground
        self._loop = asyncio.get_running_loop()
        self._key = b""
        self.is_trusted = False
        """Whether the peer is authenticated."""
        self._pending: Whereabouts | None = None
        self._starting: asyncio.TimerHandle | None = None
        self._answered = float("-inf")
        self._looked = 0.0

    @property
    def reason(self) -> str:
        """Why this route is used, in one line."""
        return self.paths.reason if self.paths is not None else "not tried yet"

    def know(self, *, is_stranger: bool) -> None:
        """Start `GRACE_S` after the peer is authenticated."""
        if self._starting is not None:
            self._starting.cancel()
        self._starting = None
        if not is_stranger and not self.is_trusted:
            self._starting = self._loop.call_later(GRACE_S, self._start)

    def hear(self, kind: int, body: bytes) -> None:
        """Handle an OFFER or ANSWER record; raise `PeerFault`."""
        candidates = Whereabouts.decode(body)
        if self.is_trusted:
            self._take(kind, candidates)
        elif kind == OFFER:
            self._pending = candidates

    def offer(self) -> None:
        """Send our candidates to the peer, and request its own."""
        self._say(OFFER)

    def take(self, packet: Probe | Answer, source: Address, now: float) -> None:
        """Handle a probe of the peer, or its reply to one."""
        if self.paths is None:
            return
        if isinstance(packet, Probe):
            self._do(self.paths.probed(packet, source, now))
        else:
            self._do(self.paths.answered(packet, source, now))

    def heard(self, route: Route, now: float) -> None:
        """Note a received QUIC datagram and its route."""
        if isinstance(route, Through) and self._is_backup(route):
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
        """Stop."""
        if self._starting is not None:
            self._starting.cancel()
        self.paths = None
        self.deadline = None

    def _start(self) -> None:
        self._starting = None
        self.is_trusted = True
        self._ground.trusted(self.connection)
        if self.connection.machine.is_client:
            self._begin(self._ground.random(KEY_BYTES))
            self.offer()
        elif self._pending is not None:
            self._take(OFFER, self._pending)
        self.connection.transmit_soon()

    def _begin(self, key: bytes) -> None:
        self._key = key
        self.paths = Paths(
            key,
            self.connection.route,
            self._ground.random,
            is_local=self._ground.is_local,
            is_dialer=self.connection.machine.is_client,
        )
        if self.backup is not None:
            self.paths.backup = self.backup
        self._ground.watch_path(self.paths.id, self)

    def _take(self, kind: int, candidates: Whereabouts) -> None:
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
        if self.is_trusted and self.paths is not None:
            addresses = self._ground.candidates(self.connection)
            self.connection.link.put_word(kind, Whereabouts(self._key, tuple(addresses)).encode())
            self.connection.transmit_soon()

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case SendProbe(to, packet):
                    if self._is_route(to) or self._ground.may_probe(to):
                        self._ground.send_packet(packet.encode(), to)
                case SendAnswer(to, answer):
                    self._ground.send_packet(answer.encode(), to)
                case Moved():
                    self._move()
                case Offer():
                    self.offer()
                case _:
                    assert_never(action)
        self.deadline = self.paths.deadline if self.paths is not None else None

    def _is_backup(self, route: Through) -> bool:
        """Return whether the route uses a relay of ours and leads to the authenticated peer."""
        tag = self.connection.link.peer_key[:TAG_BYTES]
        return route.to == tag and self._ground.is_relay(route.relay)

    def _is_route(self, address: Address) -> bool:
        return self.connection.route == Direct(address)

    def _move(self) -> None:
        assert self.paths is not None
        route, machine = self.paths.route, self.connection.machine
        size = self.paths.size if isinstance(route, Direct) else MAX_INNER_BYTES
        if route != self.connection.route:
            self.connection.route = route
            machine.moved(size)
            machine.send_ping(0)  # its acknowledgement reveals what the old route has lost
        elif size != machine.size:
            machine.size = size
        if isinstance(route, Direct) and self.paths.round_trip_s is not None:
            self._ground.proven(self.connection.link.peer_key, route.address)
        self.connection.transmit_soon()

    def _look(self, now: float) -> None:
        if now >= self._looked + LATE_S and self.paths is not None:
            self._looked = now
            self.deadline = self.paths.deadline
