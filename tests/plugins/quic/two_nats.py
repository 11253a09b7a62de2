"""Simulation of two `Paths` machines behind NATs, on a manual clock.

QUIC is modelled as periodic datagrams, an acknowledgement of each, and a reliable control stream.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from meshllm.errors import PeerFault
from meshllm_quic.net.network import Address
from meshllm_quic.path.candidates import MAX_OFFERED, MAX_REFLEXIVE
from meshllm_quic.path.paths import (
    Action,
    OfferCandidates,
    Paths,
    RouteChanged,
    SendProbe,
    SendReply,
)
from meshllm_quic.path.probing import MAX_NONCES
from meshllm_quic.wire.packets import Probe, ProbeReply, decode
from meshllm_quic.wire.routes import Direct, ViaRelay

KEY = bytes(range(32))
RELAY: Address = ("203.0.113.100", 7700)
BEAT = 0.1  # s between two datagrams of QUIC
KINDS = ("open", "full", "restricted", "port", "symmetric")


def meets(one: str, other: str) -> bool:
    """Return whether hole punching works between two kinds of NAT (RFC 5128 section 3.3)."""
    return {one, other} not in ({"symmetric"}, {"symmetric", "port"})


@dataclass
class Nat:
    """A NAT: its mapping and its filtering."""

    kind: str
    inside: str
    outside: str
    ports: dict[tuple[int, Address | None], int] = field(default_factory=dict)
    spoken: set[tuple[int, Address]] = field(default_factory=set)

    def leave(self, port: int, to: Address) -> Address:
        if self.kind == "open":
            return self.inside, port
        mapping = (port, to if self.kind == "symmetric" else None)
        outer = self.ports.setdefault(mapping, 40000 + len(self.ports))
        self.spoken.add((outer, to))
        return self.outside, outer

    def enter(self, to: Address, source: Address) -> Address | None:
        if self.kind == "open":
            return to if to[0] == self.inside else None
        inner = next((p for (p, _), outer in self.ports.items() if outer == to[1]), None)
        if to[0] != self.outside or inner is None or not self._lets_in(to[1], source):
            return None
        return self.inside, inner

    def _lets_in(self, outer: int, source: Address) -> bool:
        if self.kind == "full":
            return True
        if self.kind == "restricted":
            return source[0] in {to[0] for port, to in self.spoken if port == outer}
        return (outer, source) in self.spoken

    def rebind(self) -> None:
        self.outside = self.outside + "9"
        self.ports.clear()
        self.spoken.clear()


@dataclass(frozen=True)
class Talk:
    """An item of the control stream."""

    candidates: list[Address]
    is_reply: bool


@dataclass
class Host:
    """One side: its machine, and its model of QUIC."""

    nat: Nat
    paths: Paths
    port: int = 7000
    control: deque[Talk] = field(default_factory=deque)
    extra: list[Address] = field(default_factory=list)
    """Candidates besides its own."""
    heard_at: float = 0.0
    gap: float = 0.0
    """Longest time without a received QUIC datagram."""
    proven: set[Address] = field(default_factory=set)
    sent: Counter[Address] = field(default_factory=Counter)
    """Number of probes and replies."""


class World:
    """Two hosts, the networks between them, and a relay."""

    def __init__(self, one: str, other: str, seed: int, **shape: float) -> None:
        self.chance = random.Random(seed)
        self.now, self.numbers, self.heap = (
            100.0,
            count(),
            list[tuple[float, int, Callable[[], None]]](),
        )
        self.delay, self.jitter = shape.get("delay", 0.02), shape.get("jitter", 0.0)
        self.loss, self.twice = shape.get("loss", 0.0), shape.get("twice", 0.0)
        self.is_relay_up = self.is_direct_up = True
        self.captured = deque[tuple[bytes, Address, Address]](maxlen=2000)
        self.hosts = [
            self._host(Nat(one, "10.0.1.2", "203.0.113.1"), is_dialer=True),
            self._host(Nat(other, "10.0.2.2", "203.0.113.2"), is_dialer=False),
        ]
        for host in self.hosts:
            self.later(self.chance.random() * BEAT, self._beat(host))
        self.offer(self.hosts[0])

    def _host(self, nat: Nat, *, is_dialer: bool) -> Host:
        paths = Paths(
            KEY,
            ViaRelay(RELAY, b"tag"),
            self.chance.randbytes,
            is_local=lambda _: False,
            is_dialer=is_dialer,
        )
        return Host(nat, paths, heard_at=self.now)

    def later(self, delay: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.numbers), work))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """Advance the clock; return how much time it took."""
        start, end = self.now, self.now + seconds
        while self.now < end and not until():
            due = [(host.paths.deadline, host) for host in self.hosts]
            timers = [(at, host) for at, host in due if at is not None]
            at, host = min(timers, key=lambda timer: timer[0], default=(end, None))
            if self.heap and self.heap[0][0] <= at:
                self.now, _, work = heapq.heappop(self.heap)
                work()
            elif host is None or at > end:
                self.now = end
            else:
                self.now = max(self.now, at)
                self.act(host, host.paths.expire(self.now))
            self.check()
        return self.now - start

    def check(self) -> None:
        for host in self.hosts:
            route = host.paths.route
            assert isinstance(route, ViaRelay) or route.address in host.proven
            assert len(list(host.paths._candidates)) <= MAX_OFFERED + MAX_REFLEXIVE + 2
            assert len(host.paths._probing._sent) <= MAX_NONCES

    def other(self, host: Host) -> Host:
        return self.hosts[host is self.hosts[0]]

    def offer(self, host: Host, *, is_reply: bool = False) -> None:
        mine = [(host.nat.inside, host.port), host.nat.leave(host.port, RELAY), *host.extra]
        host.control.append(Talk(mine, is_reply))

    def act(self, host: Host, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendProbe(to, packet) | SendReply(to, packet):
                    host.sent[to] += 1
                    self.send(host, packet.encode(), to)
                case OfferCandidates():
                    self.offer(host)
                case RouteChanged():
                    assert host.paths.size >= 1200

    def send(self, host: Host, datagram: bytes, to: Address) -> None:
        source = host.nat.leave(host.port, to)
        self.captured.append((datagram, source, to))
        self.carry(datagram, source, to)

    def carry(self, datagram: bytes, source: Address, to: Address) -> None:
        for _ in range(1 + (self.chance.random() < self.twice)):
            if self.is_direct_up and self.chance.random() >= self.loss:
                delay = self.delay + self.chance.random() * self.jitter
                self.later(delay, lambda: self.arrive(datagram, source, to))

    def arrive(self, datagram: bytes, source: Address, to: Address) -> None:
        for host in self.hosts:
            if host.nat.enter(to, source) == (host.nat.inside, host.port):
                self.receive(host, datagram, source)

    def receive(self, host: Host, datagram: bytes, source: Address) -> None:
        if datagram[0] & 0x40:
            self.hear(host, datagram, source)
            return
        try:
            packet = decode(datagram)
        except PeerFault:
            return
        match packet:
            case Probe() as probe:
                self.act(host, host.paths.probed(probe, source, self.now))
            case ProbeReply() as answer:
                host.proven.add(source)  # proven before the route is checked
                self.act(host, host.paths.answered(answer, source, self.now))

    def quic(self, host: Host, *, is_acknowledgement: bool = False) -> None:
        """Send one datagram, with all items of the control stream that have not arrived yet."""
        host.paths.sent(self.now)
        datagram = b"A" if is_acknowledgement else b"Q"
        route, other = host.paths.route, self.other(host)
        if isinstance(route, Direct):
            self.send(host, datagram, route.address)
        elif self.is_relay_up and self.chance.random() >= self.loss:
            self.later(2 * self.delay, lambda: self.hear(other, datagram, None))

    def hear(self, host: Host, datagram: bytes, source: Address | None) -> None:
        host.gap = max(host.gap, self.now - host.heard_at)
        host.heard_at = self.now
        self.act(host, host.paths.heard(source, self.now))
        control = self.other(host).control
        while control:
            self.take(host, control.popleft())
        if datagram == b"Q":
            self.quic(host, is_acknowledgement=True)

    def take(self, host: Host, talk: Talk) -> None:
        if not talk.is_reply:
            self.offer(host, is_reply=True)
        self.act(host, host.paths.offered(talk.candidates, self.now))

    def _beat(self, host: Host) -> Callable[[], None]:
        def beat() -> None:
            self.quic(host)
            self.later(BEAT, beat)

        return beat

    def is_direct(self) -> bool:
        return all(isinstance(host.paths.route, Direct) for host in self.hosts)

    def is_relayed(self) -> bool:
        return all(isinstance(host.paths.route, ViaRelay) for host in self.hosts)
