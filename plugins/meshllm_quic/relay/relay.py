"""Who is reached through us, and what is forwarded to whom.

Theory of operation
-------------------
A stranger leaves nothing behind. `Register` without the right cookie is answered with the cookie
of its source address, which is a hash (`cookies.py`); only with it is a signature looked at, and
so many a second at most, for each host and for all. What passes is a *place*: a tag, its key, and
the address that it was registered from, for 60 s.

Races. A place belongs to the key that took its tag first, as long as it lasts; another key of the
same tag, of which somebody would have to find one among 2**96, is refused. The same key from
another address takes its place along. A `Register` that was overheard can be sent again, but only
from the very address that its cookie was made for, and for two minutes at most: it brings back
what was true a moment ago, and the next one of the owner undoes it. Who can do that reads and
forges on the road of the owner, and could stop its datagrams as well.

`Relayed` goes on as it came, byte for byte, when its sender has a place at the very address it
comes from, and its recipient has one. So a relay makes no datagram longer and none out of
nothing; who has no place gets less than it sent. The tags are no secret: who forges the source
address of a sender has its datagrams forwarded and charged to that sender, and QUIC drops them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from secrets import token_bytes

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshllm_quic.net.network import Address
from meshllm_quic.path.budget import Budget, Shares, host_of
from meshllm_quic.wire.cookies import Cookies
from meshllm_quic.wire.packets import (
    MAX_INNER_BYTES,
    Ask,
    Cookie,
    Packet,
    Register,
    Registered,
    Relayed,
    Tag,
    Tell,
    Unknown,
    is_quic,
)

LASTS_S = 60  # three refreshes of a client
BURST_S = 2.0  # of a rate: what a prompt sends at once
SHARE = 16  # senders at full rate that all of the relay is enough for
DAY_S = 86400.0
VERIFICATIONS = 1000.0  # a second; one takes 0.1 ms, 10,000 places need 500
HOST_VERIFICATIONS = 8.0  # a second; 64 places need 3.2
HOST_ANSWERS = 16.0  # `Unknown` a second

Outgoing = list[tuple[bytes, Address]]


class Refusal(StrEnum):
    """Why a datagram led to nothing."""

    KEY = "key"
    """Its key may not register here."""
    TAKEN = "taken"
    """Another key has that tag."""
    FULL = "full"
    """There is no place left."""
    HOST = "host"
    """Its host has as many places as one may have."""
    BUSY = "busy"
    """Too many signatures were to be checked."""
    SIGNATURE = "signature"
    """It is not signed with its key."""
    SENDER = "sender"
    """Its sender is not registered, or not from there."""
    RECIPIENT = "recipient"
    """Its recipient is not registered."""
    INNER = "inner"
    """It is too long to be relayed, or no QUIC."""
    RATE = "rate"
    """Its sender sends too fast."""
    QUOTA = "quota"
    """The host of its sender has sent enough for today."""
    TOTAL = "total"
    """All senders together send too fast."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a relay gives at most."""

    rate: float = 4e6
    """Bytes per second of each sender; 2 s of it may come at once, and all have 16 times that."""
    quota: float = 64e9
    """Bytes that each host may send in a day."""
    places: int = 10_000
    host_places: int = 64
    """Of one host: many nodes may be behind one NAT."""


@dataclass(slots=True)
class Statistics:
    """What a relay has done so far."""

    registered: int = 0
    """Places that are taken now."""
    forwarded: int = 0
    """Datagrams."""
    forwarded_bytes: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    """Datagrams that led to nothing, by reason."""


@dataclass(slots=True)
class _Place:
    key: bytes
    address: Address
    host: bytes
    until: float
    rate: Budget
    quota: Budget
    """Shared by all places of the host, and not forgotten with them."""


class Relay:
    """The places at one relay; times are seconds on the driver's clock."""

    def __init__(
        self,
        allow: Callable[[bytes], bool],
        *,
        limits: Limits | None = None,
        observer_port: int = 0,
        random: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.allow = allow
        """Tells which keys (32 bytes) may register; asked at each refresh too."""
        self.observer_port = observer_port
        """Told to who registers: another port of this host that answers `Ask`; 0 is none."""
        self.statistics = Statistics()
        self._limits = limits = limits or Limits()
        self._cookies = Cookies(random)
        self._places: OrderedDict[Tag, _Place] = OrderedDict()  # the next to end comes first
        self._hosts: Counter[bytes] = Counter()
        self._total = _budget(SHARE * limits.rate, BURST_S, 0.0)
        self._verifications = _budget(VERIFICATIONS, 1.0, 0.0)
        self._host_verifications = _shares(HOST_VERIFICATIONS, 8.0, random)
        self._answers = _shares(HOST_ANSWERS, BURST_S, random)
        self._quotas = _shares(limits.quota / DAY_S, DAY_S, random)

    def receive(self, packet: Packet, source: Address, size: int, now: float) -> Outgoing:
        """Take a packet that came in a datagram of ``size`` bytes; return what to send, and where.

        What is of no concern to a relay (answers, probes) is ignored.
        """
        self.expire(now)
        match packet:
            case Relayed():
                return self._forward(packet, source, size, now)
            case Ask():
                return [(Tell(packet.nonce, source).encode(), source)]
            case Register():
                return self._register(packet, source, now)
            case _:
                return []

    def expire(self, now: float) -> None:
        """Forget who has not registered again; `receive` does it too."""
        while self._places and next(iter(self._places.values())).until <= now:
            _, place = self._places.popitem(last=False)
            self._leave(place.host)
        self.statistics.registered = len(self._places)

    def _forward(self, packet: Relayed, source: Address, size: int, now: float) -> Outgoing:
        sender = self._places.get(packet.sender)
        if sender is None or sender.address != source:
            return self._unknown(Refusal.SENDER, packet.sender, source, now)
        recipient = self._places.get(packet.to)
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
        self._settle(packet, source, host, now)
        answer = Registered(packet.nonce, source, LASTS_S, self.observer_port)
        return [(answer.encode(), source)]

    def _objection(self, packet: Register, host: bytes, now: float) -> Refusal | None:
        """Find a reason not to register, the cheapest first: the signature is the last."""
        place = self._places.get(packet.tag)
        if not self.allow(packet.key):
            return Refusal.KEY
        if place is not None and place.key != packet.key:
            return Refusal.TAKEN
        if place is None and len(self._places) >= self._limits.places:
            return Refusal.FULL
        is_new = place is None or place.host != host
        if is_new and self._hosts[host] >= self._limits.host_places:
            return Refusal.HOST
        is_own = self._host_verifications.of(host, now).take(1, now)
        if not (is_own and self._verifications.take(1, now)):
            return Refusal.BUSY
        return None if _verify(packet) else Refusal.SIGNATURE

    def _settle(self, packet: Register, source: Address, host: bytes, now: float) -> None:
        """Give a place, or move one, and put it at the end of the queue of those that end."""
        before = self._places.pop(packet.tag, None)
        if before is not None:
            self._leave(before.host)
        self._hosts[host] += 1
        self._places[packet.tag] = _Place(
            packet.key,
            source,
            host,
            now + LASTS_S,
            before.rate if before else _budget(self._limits.rate, BURST_S, now),
            self._quotas.of(host, now),
        )
        self.statistics.registered = len(self._places)

    def _leave(self, host: bytes) -> None:
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]

    def _unknown(self, reason: Refusal, tag: Tag, source: Address, now: float) -> Outgoing:
        self._refuse(reason)
        if not self._answers.of(host_of(source), now).take(1, now):
            return []
        return [(Unknown(tag).encode(), source)]

    def _refuse(self, reason: Refusal) -> Outgoing:
        self.statistics.refused[reason] += 1
        return []


def _budget(rate: float, burst_s: float, now: float) -> Budget:
    return Budget(rate, rate * burst_s, rate * burst_s, now)


def _shares(rate: float, burst_s: float, random: Callable[[int], bytes]) -> Shares:
    return Shares(rate, rate * burst_s, random)


def _verify(packet: Register) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(packet.key)
        key.verify(packet.signature, packet.signed)
    except (InvalidSignature, ValueError):
        return False
    return True
