"""Admission control for incoming QUIC connections.

Theory of operation. The first datagram of a client costs a key exchange and some memory, so a
connection counts as half-open until its peer is authenticated: in total, per host and network, and
per relay that it came through. A newcomer takes the place of the oldest one, see
`meshllm.transport.half_open`, and at a full relay that of the oldest one of the node that has most.
Above `RETRY_ABOVE` half-open connections, or that many new ones per second, the client must
validate its address with a Retry token (RFC 9000 section 8.1.2), which needs no state here. That
rules out forged sources, so that the limits per host are effective.
"""

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aioquic._buffer import Buffer
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE
from aioquic.quic.packet import (
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_retry,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from aioquic.quic.retry import QuicRetryTokenHandler

from meshllm.transport.half_open import HalfOpen, Limits, groups
from meshllm_quic.net.network import Address
from meshllm_quic.path.rate_limit import HostBuckets, TokenBucket

ID_BYTES = 8
RETRY_ABOVE = 32
LIMITS = Limits(total=256, host=64, network=96)
"""Connections in the handshake, not yet accepted by the application, or not yet authenticated."""
MAX_HALF_OPEN_PER_RELAY = 128
"""A client with many registrations at one relay must leave room for direct clients."""
HOST_RATE = 64.0
"""New connections per second and host; each takes 2 ms."""


T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The connection is accepted."""

    original_id: bytes
    """The destination connection id of the client's first datagram."""
    retried_id: bytes | None
    """The connection id of the Retry packet; None without one."""


class ConnectionAdmission(Generic[T]):
    """Counts half-open connections, and decides on new ones."""

    def __init__(self) -> None:
        self._half_open = HalfOpen[T](LIMITS)
        self._relays: dict[T, tuple[str, str]] = {}
        """The relay and the host of each half-open connection that came through one."""
        self._tokens = QuicRetryTokenHandler()
        self._unproven = TokenBucket(RETRY_ABOVE, RETRY_ABOVE)
        self._proven = HostBuckets(HOST_RATE, 2 * HOST_RATE, os.urandom)

    def __len__(self) -> int:
        return len(self._half_open)

    def decide(
        self, datagram: bytes, source: Address, host: str, now: float
    ) -> Admitted | bytes | None:
        """Decide on a datagram without a connection: accept it, return a reply, or ignore it."""
        if len(datagram) < SMALLEST_MAX_DATAGRAM_SIZE:
            return None
        try:
            header = pull_quic_header(Buffer(data=datagram), host_cid_length=ID_BYTES)
        except ValueError:
            return None
        if header.version != QuicProtocolVersion.VERSION_1:
            return self._negotiate(header.version, header.source_cid, header.destination_cid)
        if header.packet_type != QuicPacketType.INITIAL or len(header.destination_cid) < ID_BYTES:
            return None
        if header.token:
            verdict = self._check(header.token, header.destination_cid, source, now)
            rate = self._proven.of(groups(host)[0].encode())
            return verdict if verdict and rate.take(1, now) else None
        if len(self) < RETRY_ABOVE and self._unproven.take(1, now):
            return Admitted(header.destination_cid, None)
        return self._retry(header.source_cid, header.destination_cid, source, now)

    def count(self, who: T, host: str, *, relay: str = "") -> list[T]:
        """Count a connection as half-open; return those to close for it, no longer counted.

        It counts for ``host``, and for the ``relay`` that it came through, if any.
        """
        dropped = self._crowding(who, host, relay)
        for each in dropped:
            self.forget(each)
        if (other := self._half_open.add(who, host)) is not None:
            self._relays.pop(other, None)
            dropped.append(other)
        if relay:
            self._relays[who] = relay, host
        return dropped

    def authenticated(self, who: T) -> None:
        """Stop counting a connection; its host has reserved places from now on."""
        if who not in self._relays:  # the tag of a relay is not a host
            self._half_open.authenticated(who)
        self.forget(who)

    def reserve(self, hosts: Sequence[str]) -> None:
        """Reserve places for the hosts of peers known from earlier."""
        self._half_open.reserve(hosts)

    def forget(self, who: T) -> None:
        """Stop counting a connection."""
        self._half_open.remove(who)
        self._relays.pop(who, None)

    def _crowding(self, who: T, host: str, relay: str) -> list[T]:
        """Return the oldest connection of the host that has most at a relay, if that is full."""
        hosts = {each: at[1] for each, at in self._relays.items() if at[0] == relay}
        if who in hosts or len(hosts) < MAX_HALF_OPEN_PER_RELAY:
            return []
        ((most, _),) = Counter([*hosts.values(), host]).most_common(1)
        return [next(each for each, at in hosts.items() if at == most)]

    def _negotiate(self, version: int | None, source: bytes, destination: bytes) -> bytes | None:
        if not version:  # a short header, or Version Negotiation, which is never answered
            return None
        return encode_quic_version_negotiation(
            source_cid=destination,
            destination_cid=source,
            supported_versions=[QuicProtocolVersion.VERSION_1],
        )

    def _retry(self, source_id: bytes, original: bytes, source: Address, now: float) -> bytes:
        retried = os.urandom(ID_BYTES)
        return encode_quic_retry(
            version=QuicProtocolVersion.VERSION_1,
            source_cid=retried,
            destination_cid=source_id,
            original_destination_cid=original,
            retry_token=self._tokens.create_token(
                address=source,
                original_destination_connection_id=original,
                retry_source_connection_id=retried,
                now=now,
            ),
        )

    def _check(
        self, token: bytes, destination: bytes, source: Address, now: float
    ) -> Admitted | None:
        try:
            original = self._tokens.validate_token(
                address=source, destination_cid=destination, token=token, now=now
            )
        except ValueError:
            return None
        return Admitted(original, destination)
