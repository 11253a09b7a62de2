"""Datagrams that share the socket with QUIC: relaying, address discovery and path probes.

QUIC sets bit 0x40 of the first byte (RFC 9000 section 17.2), and protocols that share its port use
disjoint ranges (RFC 9443 section 3); ours begin with 0x20 to 0x28. Integers are big-endian; bytes
after the fields are padding, of which only the length matters.
"""

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import ClassVar, Self

from meshllm.errors import PeerFault
from meshllm_quic.net.network import Address

MAX_INNER_BYTES = 1200
"""Longest QUIC datagram through a relay: below 1280 with the headers of `Relayed`, UDP and IPv6."""
TAG_BYTES = 12
ADDRESS_BYTES = 18  # 16 of IPv6 or of IPv4 mapped into it, 2 of the port
ASK_BYTES = 64  # padded, so that the reply is never longer than the request
ZERO_COOKIE = bytes(16)

Tag = bytes
"""The first 12 bytes of a node id: identifies a node, never authenticates it."""


def is_quic(datagram: bytes) -> bool:
    """Return whether a datagram is QUIC's."""
    return bool(datagram) and bool(datagram[0] & 0x40)


def pack_address(address: Address) -> bytes:
    """Encode an address in 18 bytes."""
    host = ip_address(address[0])
    if isinstance(host, IPv4Address):
        host = IPv6Address(b"\0" * 10 + b"\xff\xff" + host.packed)
    return host.packed + struct.pack("!H", address[1])


def unpack_address(data: bytes) -> Address:
    """Decode what `pack_address` encoded."""
    host = IPv6Address(data[:16])
    return str(host.ipv4_mapped or host), struct.unpack("!H", data[16:18])[0]


@dataclass(frozen=True, slots=True)
class AddressRequest:
    """Request for the observed source address, like a STUN binding request."""

    KIND: ClassVar[int] = 0x20
    SIZE: ClassVar[int] = ASK_BYTES
    nonce: bytes  # 8

    def encode(self) -> bytes:
        """Encode the packet."""
        return (bytes([self.KIND]) + self.nonce).ljust(ASK_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:9])


@dataclass(frozen=True, slots=True)
class AddressReply:
    """The observed source address, like a STUN binding response."""

    KIND: ClassVar[int] = 0x21
    SIZE: ClassVar[int] = 9 + ADDRESS_BYTES
    nonce: bytes
    address: Address

    def encode(self) -> bytes:
        """Encode the packet."""
        return bytes([self.KIND]) + self.nonce + pack_address(self.address)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:9], unpack_address(data[9:27]))


@dataclass(frozen=True, slots=True)
class Relayed:
    """A QUIC datagram that is forwarded by a relay."""

    KIND: ClassVar[int] = 0x22
    SIZE: ClassVar[int] = 1 + 2 * TAG_BYTES
    to: Tag
    sender: Tag
    inner: bytes

    def encode(self) -> bytes:
        """Encode the packet."""
        return bytes([self.KIND]) + self.to + self.sender + self.inner

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:13], data[13:25], data[25:])


@dataclass(frozen=True, slots=True)
class Register:
    """Registration of a key at a relay; the first one has no cookie, and its signature is ignored.

    The signature covers the cookie, which the relay made for the source address: a registration is
    valid at one relay, from one address, as long as the cookie is.
    """

    KIND: ClassVar[int] = 0x23
    SIZE: ClassVar[int] = 1 + 32 + 8 + 16 + 64
    key: bytes  # 32: Ed25519, the node id
    nonce: bytes  # 8: echoed in the reply
    cookie: bytes  # 16
    signature: bytes  # 64, over `signed`

    @property
    def signed(self) -> bytes:
        """The signed bytes."""
        return b"meshllm relay registration 1" + self.key + self.nonce + self.cookie

    @property
    def tag(self) -> Tag:
        """The short id by which others address it."""
        return self.key[:TAG_BYTES]

    def encode(self) -> bytes:
        """Encode the packet."""
        return bytes([self.KIND]) + self.key + self.nonce + self.cookie + self.signature

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:33], data[33:41], data[41:57], data[57:121])


@dataclass(frozen=True, slots=True)
class Cookie:
    """Reply to a `Register` without a valid cookie: register again with this one."""

    KIND: ClassVar[int] = 0x24
    SIZE: ClassVar[int] = 1 + 8 + 16
    nonce: bytes
    cookie: bytes

    def encode(self) -> bytes:
        """Encode the packet."""
        return bytes([self.KIND]) + self.nonce + self.cookie

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:9], data[9:25])


@dataclass(frozen=True, slots=True)
class Registered:
    """Reply to a successful `Register`: lifetime and observed address."""

    KIND: ClassVar[int] = 0x25
    SIZE: ClassVar[int] = 1 + 8 + ADDRESS_BYTES + 2 + 2
    nonce: bytes
    address: Address
    lasts_s: int
    observer_port: int
    """Another port that answers `AddressRequest`, to detect NAT mappings; 0 if there is none."""

    def encode(self) -> bytes:
        """Encode the packet."""
        tail = struct.pack("!HH", self.lasts_s, self.observer_port)
        return bytes([self.KIND]) + self.nonce + pack_address(self.address) + tail

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:9], unpack_address(data[9:27]), *struct.unpack("!HH", data[27:31]))


@dataclass(frozen=True, slots=True)
class UnknownTag:
    """Reply to a `Relayed` whose sender or recipient, the tag, is not registered."""

    KIND: ClassVar[int] = 0x26
    SIZE: ClassVar[int] = 1 + TAG_BYTES
    tag: Tag

    def encode(self) -> bytes:
        """Encode the packet."""
        return bytes([self.KIND]) + self.tag

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:13])


@dataclass(frozen=True, slots=True)
class Probe:
    """Path probe, padded to test a size; a peer that knows the key of the path answers it."""

    KIND: ClassVar[int] = 0x27
    SIZE: ClassVar[int] = 1 + 8 + 8 + 16
    path: bytes  # 8: which connection
    nonce: bytes  # 8
    mac: bytes = b""  # 16
    length: int = SIZE
    """Length of the datagram in bytes, with padding."""

    @property
    def sealed(self) -> bytes:
        """The bytes under the MAC."""
        return bytes([self.KIND]) + self.path + self.nonce

    def encode(self) -> bytes:
        """Encode the packet."""
        return (self.sealed + self.mac).ljust(self.length, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        return cls(data[1:9], data[9:17], data[17:33], len(data))


@dataclass(frozen=True, slots=True)
class ProbeReply:
    """Reply to a `Probe`: the observed address, and the number of bytes received."""

    KIND: ClassVar[int] = 0x28
    SIZE: ClassVar[int] = 1 + 8 + 8 + ADDRESS_BYTES + 2 + 16
    path: bytes
    nonce: bytes
    address: Address
    length: int
    mac: bytes = b""

    @property
    def sealed(self) -> bytes:
        """The bytes under the MAC."""
        body = self.path + self.nonce + pack_address(self.address) + struct.pack("!H", self.length)
        return bytes([self.KIND]) + body

    def encode(self) -> bytes:
        """Encode the packet."""
        return self.sealed + self.mac

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a datagram of at least `SIZE` bytes."""
        (length,) = struct.unpack("!H", data[35:37])
        return cls(data[1:9], data[9:17], unpack_address(data[17:35]), length, data[37:53])


Packet = (
    AddressRequest
    | AddressReply
    | Relayed
    | Register
    | Cookie
    | Registered
    | UnknownTag
    | Probe
    | ProbeReply
)

_KINDS: dict[int, type[Packet]] = {
    kind.KIND: kind
    for kind in (
        AddressRequest,
        AddressReply,
        Relayed,
        Register,
        Cookie,
        Registered,
        UnknownTag,
        Probe,
        ProbeReply,
    )
}


def decode(datagram: bytes) -> Packet:
    """Decode a datagram that is not QUIC's; raise `PeerFault` if it is invalid."""
    kind = _KINDS.get(datagram[0]) if datagram else None
    if kind is None or len(datagram) < kind.SIZE:
        raise PeerFault(f"Unknown or truncated datagram of {len(datagram)} bytes")
    return kind.decode(datagram)
