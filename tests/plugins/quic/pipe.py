"""Simulated QUIC connections over a slow, lossy link, on a virtual clock.

All flows share one queue per direction, as behind one router. It uses aioquic directly.
"""

import heapq
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import count
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionTerminated, HandshakeCompleted, StreamDataReceived
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

ADDRESS = ("peer", 1)
MAX_EVENTS = 1_000_000
LATE_S = 1e-6  # timers fire slightly late: an exact one may, by rounding, find nothing due
WINDOW_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class TrafficShape:
    """Properties of each direction of a link; they may change while it is used."""

    bytes_per_s: float
    delay_s: float
    """One-way delay."""
    loss: float = 0.0
    """Share of the datagrams that are lost at random."""
    queue_bytes: int = 512 * 1024
    """Queue limit; datagrams beyond it are dropped."""


@dataclass(slots=True)
class Direction:
    """One direction of a link."""

    shape: TrafficShape
    chance: random.Random
    free_at: float = 0.0
    """When the queue will be empty."""
    waits: list[float] = field(default_factory=list)
    """Queueing delay of each datagram, in seconds."""
    lost: int = 0
    overflown: int = 0

    def carry(self, size: int, now: float) -> float | None:
        """Return when a datagram arrives; None if it is lost."""
        wait = max(0.0, self.free_at - now)
        if wait * self.shape.bytes_per_s + size > self.shape.queue_bytes:
            self.overflown += 1
            return None
        self.waits.append(wait)
        self.free_at = now + wait + size / self.shape.bytes_per_s
        if self.chance.random() < self.shape.loss:
            self.lost += 1
            return None
        return self.free_at + self.shape.delay_s


@dataclass(slots=True, eq=False)
class End:
    """One end of one connection."""

    quic: QuicConnection
    direction: Direction
    other: "End | None" = None
    timer: float | None = None
    is_up: bool = False
    received: int = 0


class Pipe:
    """A link and the connections over it; `now` is its clock, in seconds."""

    def __init__(self, shape: TrafficShape, *, seed: int = 0) -> None:
        self.now = 0.0
        self.forth = Direction(shape, random.Random(seed))
        self.back = Direction(shape, random.Random(seed + 1))
        self._events: list[tuple[float, int, End, bytes | None]] = []
        self._order = count()

    def connect(self, algorithm: str, **options: Any) -> tuple[End, End]:
        """Open a connection, and run until both ends are connected."""
        key, certificate = _identity()
        common = {
            "congestion_control_algorithm": algorithm,
            "max_data": WINDOW_BYTES,
            "max_stream_data": WINDOW_BYTES,
            "alpn_protocols": ["pipe"],
            **options,
        }
        dialer = QuicConnection(
            configuration=QuicConfiguration(is_client=True, verify_mode=ssl.CERT_NONE, **common)
        )
        settings = QuicConfiguration(is_client=False, **common)
        settings.certificate, settings.private_key = certificate, key
        listener = QuicConnection(
            configuration=settings,
            original_destination_connection_id=dialer.original_destination_connection_id,
        )
        one, other = End(dialer, self.forth), End(listener, self.back)
        one.other, other.other = other, one
        dialer.connect(ADDRESS, now=self.now)
        self.push(one)
        self.run(self.now + 10.0, lambda: one.is_up and other.is_up)
        return one, other

    def send(self, end: End, size: int, *, stream: int = 0) -> None:
        """Send ``size`` bytes on a stream, without ending it."""
        end.quic.send_stream_data(stream, bytes(size))
        self.push(end)

    def push(self, end: End) -> None:
        """Let an end send as much as it can."""
        for datagram, _ in end.quic.datagrams_to_send(now=self.now):
            arrival = end.direction.carry(len(datagram), self.now)
            if arrival is not None and end.other is not None:
                heapq.heappush(self._events, (arrival, next(self._order), end.other, datagram))
        timer = end.quic.get_timer()
        at = None if timer is None else max(timer, self.now) + LATE_S
        if at is not None and at != end.timer:
            heapq.heappush(self._events, (at, next(self._order), end, None))
        end.timer = at

    def run(self, until: float, is_done: Callable[[], bool] = lambda: False) -> bool:
        """Advance the clock; return whether ``is_done`` was reached in time."""
        for _ in range(MAX_EVENTS):
            if is_done():
                return True
            if not self._events or self._events[0][0] > until:
                self.now = until
                return is_done()
            at, _, end, datagram = heapq.heappop(self._events)
            self.now = max(self.now, at)
            if datagram is not None:
                end.quic.receive_datagram(datagram, ADDRESS, now=self.now)
            elif at != end.timer:
                continue  # it was set again since
            else:
                end.timer = None
                end.quic.handle_timer(now=self.now)
            self._take(end)
            self.push(end)
        raise RuntimeError(f"no end after {MAX_EVENTS} events at {self.now} s")

    def transfer(self, one: End, other: End, size: int, *, within_s: float = 60.0) -> float:
        """Send ``size`` bytes, and return the seconds until the last one arrived."""
        begin, goal = self.now, other.received + size
        self.send(one, size)
        if not self.run(begin + within_s, lambda: other.received >= goal):
            raise TimeoutError(f"{goal - other.received} of {size} B have not arrived")
        return self.now - begin

    def _take(self, end: End) -> None:
        while (event := end.quic.next_event()) is not None:
            match event:
                case StreamDataReceived(data=data):
                    end.received += len(data)
                case HandshakeCompleted():
                    end.is_up = True
                case ConnectionTerminated(reason_phrase=reason):
                    raise ConnectionError(reason)


@cache
def _identity() -> tuple[Ed25519PrivateKey, x509.Certificate]:
    """Make a certificate; it is not verified."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipe")])
    made = datetime(2026, 1, 1, tzinfo=UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(made)
        .not_valid_after(made + timedelta(days=36_500))
        .sign(key, None)
    )
    return key, certificate
