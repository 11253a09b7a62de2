"""Invitations: the text that is handed on, and the proof of knowing it.

A ticket names whom to ask, so its bearer can check that key before it proves that it knows the
secret; the secret itself never travels again. It names no mesh: who finds a ticket that is over
has nothing that any member would answer. What is written is the word ``meshllm``, the version
digit, and base32 of the fields and four bytes of blake3 over all before them.
"""

import base64
import binascii
import hmac
from dataclasses import dataclass, field
from struct import Struct

import blake3

from meshllm.errors import UserError
from meshllm.names import NodeId
from meshllm.protocol.trust.credential import Role

SECRET_BYTES = 16
MAX_ADDRESSES = 16  # interfaces, IPv4 and IPv6, and what is advertised
MAX_ADDRESS_BYTES = 255  # a DNS name is no longer (RFC 1035)
PREFIX = "meshllm"
VERSION = "1"

_HEAD = Struct("<32s B Q 16s")  # inviter, role, expiry, secret; and addresses
_CHECK_BYTES = 4
_MAX_CHARACTERS = 8192  # of base32: MAX_ADDRESSES of the longest, and room
_ROLES = tuple(Role)


@dataclass(frozen=True, slots=True)
class TicketProof:
    """The claim of a joiner to hold a ticket for a role; the inviter tries its secrets on it."""

    role: Role
    mac: bytes
    context: bytes = field(repr=False)
    """The handshake and the joiner's key, so that the proof is worth nothing elsewhere."""

    def proves(self, secret: bytes) -> bool:
        """Tell whether the joiner knows this secret."""
        return hmac.compare_digest(self.mac, _mac(secret, self.role, self.context))


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation to the mesh of the inviter."""

    inviter: NodeId
    addresses: tuple[str, ...]
    """Where the inviter may be reached, likeliest first."""
    role: Role
    expires_s: int
    """Seconds since 1970; 0 is never. Whoever uses the ticket looks at it."""
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.addresses) > MAX_ADDRESSES:
            raise UserError(f"{len(self.addresses)} addresses; a ticket holds {MAX_ADDRESSES}")
        for address in self.addresses:
            if not _is_address(address):
                raise UserError(f"`{address[:80]}` is no address for a ticket")

    def encode(self) -> str:
        """Write it as one word that `parse_ticket` reads."""
        head = _HEAD.pack(self.inviter, _ROLES.index(self.role), self.expires_s, self.secret)
        rest = (bytes([len(address)]) + address.encode() for address in self.addresses)
        body = head + b"".join(rest)
        text = base64.b32encode(body + _checksum(body)).decode()
        return PREFIX + VERSION + text.rstrip("=").lower()

    @property
    def psk(self) -> bytes:
        """Under which the bearer speaks to the inviter, as members do under the mesh id."""
        return guest_psk(self.secret)

    def prove(self, context: bytes) -> TicketProof:
        """Prove that this ticket is known, without showing it."""
        return TicketProof(self.role, _mac(self.secret, self.role, context), context)


def guest_psk(secret: bytes) -> bytes:
    """Return the pre-shared key of who knows the secret of a ticket: 32 bytes, no proof of it."""
    return hmac.digest(secret, b"meshllm ticket psk 1", "sha256")


def parse_ticket(text: str) -> Ticket:
    """Read a ticket, with any white space that copying put into it.

    Raises:
        UserError: it is mistyped, cut short, or of another version.
    """
    word = "".join(text.split()).lower()
    if not word.startswith(PREFIX) or len(word) > _MAX_CHARACTERS:
        raise UserError(f"`{text[:20]}` is no ticket", hint=f"a ticket begins with `{PREFIX}`")
    version, digits = word[len(PREFIX) : len(PREFIX) + 1], word[len(PREFIX) + 1 :]
    if version != VERSION:
        raise UserError(
            f"Ticket of version `{version}`; this is version {VERSION}",
            hint="run the same version of meshllm on every node",
        )
    try:
        data = base64.b32decode(digits.upper() + "=" * (-len(digits) % 8))
        ticket = _read(data[:-_CHECK_BYTES], data[-_CHECK_BYTES:])
    except (binascii.Error, ValueError, IndexError):
        raise _mistyped() from None
    if ticket.encode() != word:  # base32 leaves bits over
        raise _mistyped()
    return ticket


def _read(body: bytes, checksum: bytes) -> Ticket:
    if len(body) < _HEAD.size or checksum != _checksum(body):
        raise ValueError
    inviter, role, expires_s, secret = _HEAD.unpack_from(body)
    addresses, place = [], _HEAD.size
    while place < len(body):
        stop = place + 1 + body[place]
        addresses.append(body[place + 1 : stop].decode("ascii"))
        place = stop
    return Ticket(inviter, tuple(addresses), _ROLES[role], expires_s, secret)


def _is_address(address: str) -> bool:
    # It goes to a terminal and to a transport: neither is to see more than printable ASCII.
    printable = address.isascii() and address.isprintable() and " " not in address
    return printable and 0 < len(address) <= MAX_ADDRESS_BYTES


def _mistyped() -> UserError:
    return UserError("The ticket is mistyped or cut short", hint="copy it whole, it is one word")


def _checksum(body: bytes) -> bytes:
    return blake3.blake3(PREFIX.encode() + VERSION.encode() + body).digest()[:_CHECK_BYTES]


def _mac(secret: bytes, role: Role, context: bytes) -> bytes:
    words = b"meshllm ticket 1" + bytes([_ROLES.index(role)]) + context
    return hmac.digest(secret, words, "sha256")
