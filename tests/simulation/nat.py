"""NAT behaviour in the terms of RFC 4787: mapping and filtering.

Theory of operation
-------------------
Mapping (section 4.1) says when two datagrams from one inside endpoint leave with the same outside
endpoint: always (endpoint-independent, EIM), to the same host (address-dependent, ADM), or to the
same host and port (address and port-dependent, APDM). Filtering (section 5) says who may send to
such an outside endpoint: any host (EIF), the hosts to which it has sent something (ADF), or
those hosts and ports (APDF). The two are independent; the old names of RFC 3489 are pairs of them.

A *session* is one mapping and one remote endpoint. Only outbound traffic creates or refreshes it
(section 4.3: a stranger cannot hold a mapping open), and an answer extends it, as in Linux. A
mapping lives as long as one of its sessions. Two mappings never share an outside port.

A table without a public host does not translate, but still filters: the firewall of an IPv6
router (RFC 6092 section 3.3).
"""

from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from random import Random

from meshllm_quic.net.network import Address
from tests.simulation.wires import Dropped

Scope = tuple[str | int, ...]


class Behaviour(Enum):
    """Parts of a remote endpoint that matter; the value is their number."""

    ENDPOINT_INDEPENDENT = 0
    ADDRESS_DEPENDENT = 1
    ADDRESS_AND_PORT_DEPENDENT = 2

    def scope(self, remote: Address) -> Scope:
        """Return the parts of a remote endpoint that matter."""
        return remote[: self.value]


@dataclass(frozen=True, slots=True)
class Kind:
    """Behaviour of one type of NAT."""

    mapping: Behaviour
    filtering: Behaviour
    is_hairpin: bool = False
    """Insiders reach each other by their outside endpoints (section 6)."""
    keeps_ports: bool = True
    """Preserve the inside port if it is free; else draw an outside port."""
    ports: range = range(1024, 65536)
    """Ports to draw from."""
    unreplied_s: float = 30.0
    """Timeout after the last outbound datagram, as in Linux (nf_conntrack_udp_timeout)."""
    replied_s: float = 120.0
    """The same after an answer (nf_conntrack_udp_timeout_stream)."""


_INDEPENDENT, _ADDRESS, _PORT = Behaviour
FULL_CONE = Kind(_INDEPENDENT, _INDEPENDENT)
RESTRICTED = Kind(_INDEPENDENT, _ADDRESS)
PORT_RESTRICTED = Kind(_INDEPENDENT, _PORT)
SYMMETRIC = Kind(_PORT, _PORT, keeps_ports=False)
SYMMETRIC_ADDRESS = Kind(_ADDRESS, _ADDRESS, keeps_ports=False)
"""One outside port for each remote host, open to all its ports."""
SYMMETRIC_FULL = Kind(_PORT, _INDEPENDENT, keeps_ports=False)
"""Another outside port for each remote endpoint, and each open to all."""

KINDS: dict[str, Kind | None] = {
    "none": None,
    "full cone": FULL_CONE,
    "restricted": RESTRICTED,
    "port-restricted": PORT_RESTRICTED,
    "symmetric": SYMMETRIC,
    "symmetric address": SYMMETRIC_ADDRESS,
    "symmetric full": SYMMETRIC_FULL,
}


@dataclass(slots=True)
class _Session:
    sent_at: float = 0.0
    is_replied: bool = False


@dataclass(slots=True)
class _Mapping:
    inside: Address
    outside: Address
    sessions: dict[Address, _Session] = field(default_factory=dict)


class Table:
    """The mappings and sessions of one NAT."""

    def __init__(self, kind: Kind, host: str | None, random: Random) -> None:
        self.kind = kind
        self._host = host
        self._random = random
        self._by_inside: dict[tuple[Address, Scope], _Mapping] = {}
        self._by_outside: dict[Address, _Mapping] = {}

    def outbound(self, inside: Address, remote: Address, now: float) -> Address:
        """Return the outside endpoint of an insider for a remote endpoint; raise `Dropped`."""
        key = inside, self.kind.mapping.scope(remote)
        mapping = self._by_inside.get(key)
        if mapping is None or not self._is_alive(mapping, now):
            mapping = self._map(key, now)
        session = mapping.sessions.get(remote)
        if session is None or not self._lives(session, now):
            session = mapping.sessions[remote] = _Session()
        session.sent_at = now
        return mapping.outside

    def inbound(self, source: Address, outside: Address, now: float) -> Address:
        """Return the insider that receives from a remote endpoint; raise `Dropped`."""
        mapping = self._by_outside.get(outside)
        if mapping is None or not self._is_alive(mapping, now):
            raise Dropped("no mapping")
        scope = self.kind.filtering.scope
        if not any(
            scope(remote) == scope(source) and self._lives(session, now)
            for remote, session in mapping.sessions.items()
        ):
            raise Dropped("filtered")
        session = mapping.sessions.get(source)
        if session is not None and self._lives(session, now):
            session.is_replied = True
        return mapping.inside

    def _map(self, key: tuple[Address, Scope], now: float) -> _Mapping:
        inside, _ = key
        mapping = _Mapping(inside, self._free(inside, now))
        if taken := self._by_outside.get(mapping.outside):  # an expired one
            self._by_inside = {k: each for k, each in self._by_inside.items() if each is not taken}
        self._by_inside[key] = self._by_outside[mapping.outside] = mapping
        return mapping

    def _free(self, inside: Address, now: float) -> Address:
        if self._host is None:
            return inside
        ports = self.kind.ports
        begin = self._random.randrange(len(ports))
        kept = [inside[1]] if self.kind.keeps_ports else []
        for port in chain(kept, ports[begin:], ports[:begin]):
            taken = self._by_outside.get((self._host, port))
            if taken is None or not self._is_alive(taken, now):
                return self._host, port
        raise Dropped("no port")

    def _is_alive(self, mapping: _Mapping, now: float) -> bool:
        return any(self._lives(session, now) for session in mapping.sessions.values())

    def _lives(self, session: _Session, now: float) -> bool:
        life_s = self.kind.replied_s if session.is_replied else self.kind.unreplied_s
        return now < session.sent_at + life_s


HARD = {"symmetric", "symmetric address", "symmetric full"}
FILTERED_BY_PORT = {"port-restricted", "symmetric"}


def is_reachable(a: str, b: str) -> bool:
    """Return whether hole punching works without port prediction (RFC 5128 section 3.3.5)."""
    if a not in HARD and b not in HARD:
        return True
    if {a, b} <= HARD:
        return {a, b} == {"symmetric address", "symmetric full"}
    easy = b if a in HARD else a
    return easy not in FILTERED_BY_PORT
