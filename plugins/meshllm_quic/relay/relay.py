"""The relay's decisions as a sans-IO machine: registrations, forwarding and limits.

Theory of operation
-------------------
Unauthenticated clients leave no state. A `Register` without a valid cookie is answered with the
cookie of its source address, which is a hash (`cookies.py`); only with the cookie is the signature
verified, at a limited rate per host and in total. A success creates a *registration* for 60 s: a
tag, its key, and the addresses that it came from.

Races. A registration belongs to the first key with its tag while it lasts; another key with the
same tag, a collision among 2**96, is refused. The same key from another address moves its
registration there: datagrams for it go to the latest address. It may send from those before, too,
each for 60 s: a node that knows this relay by an IPv4 and an IPv6 address, or in its own network
and from outside, registers by both. An overheard `Register` can be replayed, but only from the
address of its cookie and for at most two minutes: it restores an earlier state until the owner
registers again. Such an attacker is on the owner's path, and could as well drop its datagrams.

When all slots are taken, a new registration replaces one of the network that has most, first one
that was never used, so that nobody with many addresses in few networks keeps others out.

A `Relayed` packet is forwarded unchanged if its sender is registered from that source address,
and its recipient is registered. So a relay neither amplifies nor creates datagrams; an unregistered
sender gets less than it sent. Tags are not secret: an attacker that forges the source address of a
sender has datagrams forwarded at the expense of that sender's limits, and QUIC drops them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from secrets import token_bytes
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshllm_quic.net.network import Address
from meshllm_quic.path.rate_limit import HostBuckets, TokenBucket, host_of, network_of
from meshllm_quic.wire.cookies import Cookies
from meshllm_quic.wire.packets import (
    MAX_INNER_BYTES,
    AddressReply,
    AddressRequest,
    Cookie,
    Packet,
    Register,
    Registered,
    Relayed,
    Tag,
    UnknownTag,
    is_quic,
)

LASTS_S = 60  # three refresh intervals of a client
BURST_S = 2.0  # seconds of the rate that may be sent as a burst, for a prompt
MAX_ADDRESSES = 3  # of one registration; a node uses no more relays
SHARE = 16  # senders at full rate that the relay can serve at the same time
DAY_S = 86400.0
VERIFICATIONS = 1000.0  # per second; one takes 0.1 ms, 10,000 registrations need 500
HOST_VERIFICATIONS = 8.0  # per second; 64 registrations need 3.2
HOST_ANSWERS = 16.0  # `UnknownTag` replies per second

T = TypeVar("T")

Outgoing = list[tuple[bytes, Address]]


class Refusal(StrEnum):
    """Why a datagram was refused."""

    KEY = "key"
    """Its key is not allowed to register."""
    TAKEN = "taken"
    """Another key is registered with that tag."""
    FULL = "full"
    """The maximum number of registrations is reached."""
    HOST = "host"
    """The maximum number of registrations of its host, or of its network, is reached."""
    BUSY = "busy"
    """Too many signatures to verify."""
    SIGNATURE = "signature"
    """Its signature is invalid."""
    SENDER = "sender"
    """Its sender is not registered, or from another address."""
    RECIPIENT = "recipient"
    """Its recipient is not registered."""
    INNER = "inner"
    """It is too long to be relayed, or not QUIC."""
    RATE = "rate"
    """Its sender exceeds the rate limit."""
    QUOTA = "quota"
    """The host of its sender exceeds the daily quota."""
    TOTAL = "total"
    """All senders together exceed the rate limit."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a relay."""

    rate: float = 4e6
    """Bytes per second and sender, with bursts of 2 s; all senders together have 16 times that."""
    quota: float = 64e9
    """Bytes per host and day."""
    registrations: int = 10_000
    host_registrations: int = 64
    """Registrations per host: many nodes may be behind one NAT."""
    network_registrations: int = 512
    """Registrations per IPv4 /24 or IPv6 /48."""


@dataclass(slots=True)
class Statistics:
    """Counters of a relay."""

    registered: int = 0
    """Current registrations."""
    forwarded: int = 0
    """Datagrams."""
    forwarded_bytes: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    """Refused datagrams, by reason."""


@dataclass(slots=True)
class _Registration:
    key: bytes
    addresses: dict[Address, float]
    """Until when each may send, the latest last."""
    host: bytes
    """Of the latest address."""
    rate: TokenBucket
    quota: TokenBucket
    """Shared by all registrations of the host, and kept when they expire."""
    is_used: bool = False
    """Whether a datagram was forwarded from or to it."""

    @property
    def address(self) -> Address:
        """Where datagrams for it are sent."""
        return next(reversed(self.addresses))

    @property
    def until(self) -> float:
        """When it expires."""
        return self.addresses[self.address]


class Relay:
    """State of one relay; times are seconds on the driver's clock."""

    def __init__(
        self,
        allow: Callable[[bytes], bool],
        *,
        limits: RelayLimits | None = None,
        observer_port: int = 0,
        random: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.allow = allow
        """Returns whether a key (32 bytes) may register; also called for each refresh."""
        self.observer_port = observer_port
        """Sent to clients: another port that answers `AddressRequest`; 0 if there is none."""
        self.statistics = Statistics()
        self._limits = limits = limits or RelayLimits()
        self._cookies = Cookies(random)
        # The next registration to expire comes first.
        self._registrations: OrderedDict[Tag, _Registration] = OrderedDict()
        self._hosts: Counter[bytes] = Counter()
        self._networks: Counter[bytes] = Counter()
        self._sources: Counter[Address] = Counter()
        self._total = _budget(SHARE * limits.rate, BURST_S)
        self._verifications = _budget(VERIFICATIONS, 1.0)
        self._host_verifications = _shares(HOST_VERIFICATIONS, 8.0, random)
        self._answers = _shares(HOST_ANSWERS, BURST_S, random)
        self._quotas = _shares(limits.quota / DAY_S, DAY_S, random)

    def receive(self, packet: Packet, source: Address, size: int, now: float) -> Outgoing:
        """Handle a packet from a datagram of ``size`` bytes; return datagrams and destinations.

        Packets that are not for a relay (replies, probes) are ignored.
        """
        self.expire(now)
        match packet:
            case Relayed():
                return self._forward(packet, source, size, now)
            case AddressRequest():
                return [(AddressReply(packet.nonce, source).encode(), source)]
            case Register():
                return self._register(packet, source, now)
            case _:
                return []

    def expire(self, now: float) -> None:
        """Remove registrations that were not refreshed; `receive` does it too."""
        while self._registrations and next(iter(self._registrations.values())).until <= now:
            _, registration = self._registrations.popitem(last=False)
            self._leave(registration)
        self.statistics.registered = len(self._registrations)

    def is_registered(self, source: Address, now: float) -> bool:
        """Return whether a node is registered from an address."""
        self.expire(now)
        return source in self._sources

    def _forward(self, packet: Relayed, source: Address, size: int, now: float) -> Outgoing:
        sender = self._registrations.get(packet.sender)
        if sender is None or sender.addresses.get(source, now) <= now:
            return self._unknown(Refusal.SENDER, packet.sender, source, now)
        recipient = self._registrations.get(packet.to)
        if recipient is None:
            return self._unknown(Refusal.RECIPIENT, packet.to, source, now)
        if len(packet.inner) > MAX_INNER_BYTES or not is_quic(packet.inner):
            return self._refuse(Refusal.INNER)
        for reason, budget in (
            (Refusal.RATE, sender.rate),
            (Refusal.QUOTA, sender.quota),
            (Refusal.TOTAL, self._total),
        ):
            if not budget.take(size, now):
                return self._refuse(reason)
        sender.is_used = recipient.is_used = True
        self.statistics.forwarded += 1
        self.statistics.forwarded_bytes += size
        return [(packet.encode(), recipient.address)]

    def _register(self, packet: Register, source: Address, now: float) -> Outgoing:
        if not self._cookies.check(packet.cookie, source, now):
            cookie = self._cookies.make(source, now)
            return [(Cookie(packet.nonce, cookie).encode(), source)]
        host = host_of(source)
        reason = self._objection(packet, host, now)
        if reason is not None:
            return self._refuse(reason)
        self._store(packet, source, host, now)
        answer = Registered(packet.nonce, source, LASTS_S, self.observer_port)
        return [(answer.encode(), source)]

    def _objection(self, packet: Register, host: bytes, now: float) -> Refusal | None:
        """Return a reason to refuse a registration, cheapest check first, the signature last."""
        registration = self._registrations.get(packet.tag)
        if not self.allow(packet.key):
            return Refusal.KEY
        if registration is not None and registration.key != packet.key:
            return Refusal.TAKEN
        is_new = registration is None or registration.host != host
        if is_new and self._has_many(host):
            return Refusal.HOST
        if not self._host_verifications.of(host).take(1, now):
            return Refusal.BUSY
        if registration is None and self._is_full() and not self._may_displace(network_of(host)):
            return Refusal.FULL
        if not self._verifications.take(1, now):
            return Refusal.BUSY
        return None if _verify(packet) else Refusal.SIGNATURE

    def _store(self, packet: Register, source: Address, host: bytes, now: float) -> None:
        """Create, move or refresh a registration, and put it last in the order of expiry."""
        before = self._registrations.pop(packet.tag, None)
        addresses = _with(before.addresses if before else {}, source, now)
        if before is not None:
            self._leave(before)
        elif self._is_full():
            self._make_room()
        self._hosts[host] += 1
        self._networks[network_of(host)] += 1
        self._sources.update(addresses.keys())
        self._registrations[packet.tag] = _Registration(
            packet.key,
            addresses,
            host,
            before.rate if before else _budget(self._limits.rate, BURST_S),
            self._quotas.of(host),
            is_used=before is not None and before.is_used,
        )
        self.statistics.registered = len(self._registrations)

    def _leave(self, gone: _Registration) -> None:
        _drop(self._hosts, gone.host)
        _drop(self._networks, network_of(gone.host))
        for address in gone.addresses:
            _drop(self._sources, address)

    def _is_full(self) -> bool:
        return len(self._registrations) >= self._limits.registrations

    def _has_many(self, host: bytes) -> bool:
        """Return whether a host, or its network, has as many registrations as it may have."""
        is_crowded = self._networks[network_of(host)] >= self._limits.network_registrations
        return is_crowded or self._hosts[host] >= self._limits.host_registrations

    def _may_displace(self, own: bytes) -> bool:
        """Return whether another network has more registrations than ``own`` will have."""
        ((_, most),) = self._networks.most_common(1)
        return most > self._networks[own] + 1

    def _make_room(self) -> None:
        """Remove a registration of the most crowded network: a never used one, else the oldest."""
        ((crowded, _),) = self._networks.most_common(1)
        there = [
            tag for tag, each in self._registrations.items() if network_of(each.host) == crowded
        ]
        unused = (tag for tag in there if not self._registrations[tag].is_used)
        self._leave(self._registrations.pop(next(unused, there[0])))

    def _unknown(self, reason: Refusal, tag: Tag, source: Address, now: float) -> Outgoing:
        self._refuse(reason)
        if not self._answers.of(host_of(source)).take(1, now):
            return []
        return [(UnknownTag(tag).encode(), source)]

    def _refuse(self, reason: Refusal) -> Outgoing:
        self.statistics.refused[reason] += 1
        return []


def _with(addresses: dict[Address, float], latest: Address, now: float) -> dict[Address, float]:
    """Return the addresses that may still send, few of them, and a new one."""
    others = [(at, until) for at, until in addresses.items() if at != latest and until > now]
    return dict([*others[1 - MAX_ADDRESSES :], (latest, now + LASTS_S)])


def _drop(counts: Counter[T], what: T) -> None:
    counts[what] -= 1
    if not counts[what]:
        del counts[what]


def _budget(rate: float, burst_s: float) -> TokenBucket:
    return TokenBucket(rate, rate * burst_s)


def _shares(rate: float, burst_s: float, random: Callable[[int], bytes]) -> HostBuckets:
    return HostBuckets(rate, rate * burst_s, random)


def _verify(packet: Register) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(packet.key)
        key.verify(packet.signature, packet.signed)
    except (InvalidSignature, ValueError):
        return False
    return True
