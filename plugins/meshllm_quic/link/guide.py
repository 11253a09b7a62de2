"""Leads one connection over the best way: does what `paths` decides.

The two sides tell each other where they may be reached only when neither is a stranger to the other
any more: before that, an offer would show the addresses of a home to anybody, and could make us
send probes to whom a stranger names.
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
"""Who limits what a stranger may send does it in this time after the link is taken."""
ANSWER_PAUSE_S = 1.0
"""Between two offers that get an answer."""
LATE_S = 0.1
"""How late a silence may be noticed; looking at the clock for each datagram costs more."""


class Ground(Protocol):
    """What a guide needs of its endpoint."""

    random: Callable[[int], bytes]

    def candidates(self, connection: Connection) -> list[Address]:
        """List where this side may be reached, likeliest first."""
        ...

    def is_local(self, host: str) -> bool:
        """Tell whether a host is this machine."""
        ...

    def is_relay(self, address: Address) -> bool:
        """Tell whether that is a relay that this side has chosen."""
        ...

    def send_packet(self, packet: bytes, to: Address) -> None:
        """Send a datagram that is not QUIC's."""
        ...

    def may_probe(self, to: Address) -> bool:
        """Count a probe; False where that host has enough of all connections together."""
        ...

    def watch_path(self, path: bytes, guide: "Guide") -> None:
        """Bring the probes and answers of that path to the guide."""
        ...

    def proven(self, key: bytes, address: Address) -> None:
        """Remember where a node was reached directly."""
        ...

    def trusted(self, connection: Connection) -> None:
        """Take note that the other side is no stranger any more."""
        ...


class Guide:
    """The way of one connection."""

    def __init__(self, ground: Ground, connection: Connection) -> None:
        self.deadline: float | None = None
        """When ``expire`` has something to do."""
        self.paths: Paths | None = None
        self.connection = connection
        self.backup: Through | None = None
        """A relay that reaches the other side, while there are no paths yet."""
        self._ground = ground
        self._loop = asyncio.get_running_loop()
        self._key = b""
        self.is_trusted = False
        """Whether the other side has said who it is."""
        self._pending: Whereabouts | None = None
        self._starting: asyncio.TimerHandle | None = None
        self._answered = float("-inf")
        self._looked = 0.0

    @property
    def reason(self) -> str:
        """Why the route is what it is."""
        return self.paths.reason if self.paths is not None else "not tried yet"

    def know(self, *, is_stranger: bool) -> None:
        """Begin when the other side is no stranger, a moment later."""
        if self._starting is not None:
            self._starting.cancel()
        self._starting = None
        if not is_stranger and not self.is_trusted:
            self._starting = self._loop.call_later(GRACE_S, self._start)

    def hear(self, kind: int, body: bytes) -> None:
        """Take an offer or an answer; raise `PeerFault`."""
        candidates = Whereabouts.decode(body)
        if self.is_trusted:
            self._take(kind, candidates)
        elif kind == OFFER:
            self._pending = candidates

    def offer(self) -> None:
        """Tell the other side where this one may be reached, and ask for the same."""
        self._say(OFFER)

    def take(self, packet: Probe | Answer, source: Address, now: float) -> None:
        """Take a probe of the other side, or its answer to one."""
        if self.paths is None:
            return
        if isinstance(packet, Probe):
            self._do(self.paths.probed(packet, source, now))
        else:
            self._do(self.paths.answered(packet, source, now))

    def heard(self, route: Route, now: float) -> None:
        """Note where QUIC was heard from."""
        if isinstance(route, Through) and self._is_backup(route):
            self.backup = route
        if self.paths is not None:
            self.paths.backup = self.backup
            source = route.address if isinstance(route, Direct) else None
            if actions := self.paths.heard(source, now):
                self._do(actions)
            self._look(now)

    def sent(self, now: float) -> None:
        """Note that QUIC sent something."""
        if self.paths is not None:
            self.paths.sent(now)
            self._look(now)

    def expire(self, now: float) -> None:
        """Do what is due."""
        if self.paths is not None:
            self._do(self.paths.expire(now))

    def end(self) -> None:
        """Do nothing more."""
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
        """Tell whether a relay that we chose would reach the other side, and nobody else."""
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
            machine.send_ping(0)  # its answer shows what the old way has lost
        elif size != machine.size:
            machine.size = size
        if isinstance(route, Direct) and self.paths.round_trip_s is not None:
            self._ground.proven(self.connection.link.peer_key, route.address)
        self.connection.transmit_soon()

    def _look(self, now: float) -> None:
        if now >= self._looked + LATE_S and self.paths is not None:
            self._looked = now
            self.deadline = self.paths.deadline
