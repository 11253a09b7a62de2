"""Tickets (invitations to a mesh): their text form, and the proof of knowing their secret.

A ticket contains the inviter's node id, so its bearer authenticates the inviter before it proves
that it knows the secret; the secret itself is never sent. A ticket does not name the mesh, so no
member answers to an expired one. The text form is the word ``meshllm``, a version digit, and base32
of the fields and a checksum: four bytes of blake3 over everything before it.
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
MAX_ADDRESSES = 16  # interfaces with IPv4 and IPv6, and advertised addresses
MAX_ADDRESS_BYTES = 255  # the longest DNS name (RFC 1035)
PREFIX = "meshllm"
VERSION = "1"

_HEAD = Struct("<32s B Q 16s")  # inviter, role, expiry, secret; the addresses follow
_QUOTES = "\"'`<>\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}"
_CHECK_BYTES = 4
_MAX_CHARACTERS = 8192  # of base32; above MAX_ADDRESSES of the longest
_ROLES = tuple(Role)


@dataclass(frozen=True, slots=True)
class TicketProof:
    """A joiner's proof that it holds a ticket; the inviter checks it against its open tickets."""

    role: Role
    mac: bytes
    context: bytes = field(repr=False)
    """Hash of the handshake, and the joiner's key: binds the proof to both."""

    def proves(self, secret: bytes) -> bool:
        """Return whether the joiner knows this secret."""
        return hmac.compare_digest(self.mac, _mac(secret, self.role, self.context))


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation to the mesh of the inviter."""

    inviter: NodeId
    addresses: tuple[str, ...]
    """Addresses of the inviter, likeliest first."""
    role: Role
    expires_s: int
    """Seconds since 1970; 0 means never. The joiner checks it, and the inviter its own copy."""
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.addresses) > MAX_ADDRESSES:
            raise UserError(f"{len(self.addresses)} ticket addresses; at most {MAX_ADDRESSES}")
        for address in self.addresses:
            if not _is_address(address):
                raise UserError(f"Invalid ticket address `{address[:80]}`")

    def encode(self) -> str:
        """Return the text form, one word that `parse_ticket` reads."""
        head = _HEAD.pack(self.inviter, _ROLES.index(self.role), self.expires_s, self.secret)
        rest = (bytes([len(address)]) + address.encode() for address in self.addresses)
        body = head + b"".join(rest)
        text = base64.b32encode(body + _checksum(body)).decode()
        return PREFIX + VERSION + text.rstrip("=").lower()

    @property
    def psk(self) -> bytes:
        """The pre-shared key of the handshake with the inviter, instead of the mesh id."""
        return guest_psk(self.secret)

    def prove(self, context: bytes) -> TicketProof:
        """Prove knowledge of the secret without revealing it."""
        return TicketProof(self.role, _mac(self.secret, self.role, context), context)


def guest_psk(secret: bytes) -> bytes:
    """Derive the 32-byte pre-shared key of a ticket; knowing it does not prove the secret."""
    return hmac.digest(secret, b"meshllm ticket psk 1", "sha256")


def parse_ticket(text: str) -> Ticket:
    """Parse a ticket, ignoring white space and quotes added by copying.

    Raises:
        UserError: it is mistyped, truncated, of another version, or for a role of a later one.
    """
    word = "".join(text.split()).strip(_QUOTES).lower()
    if not word.startswith(PREFIX) or len(word) > _MAX_CHARACTERS:
        raise UserError(f"Invalid ticket `{text[:20]}`", hint=f"a ticket begins with `{PREFIX}`")
    version, digits = word[len(PREFIX) : len(PREFIX) + 1], word[len(PREFIX) + 1 :]
    if version != VERSION:
        raise UserError(
            f"Ticket version `{version}` is not supported; expected `{VERSION}`",
            hint="run the same version of meshllm on every node",
        )
    try:
        data = base64.b32decode(digits.upper() + "=" * (-len(digits) % 8))
        ticket = _read(data[:-_CHECK_BYTES], data[-_CHECK_BYTES:])
    except (binascii.Error, ValueError):
        raise _mistyped() from None
    if ticket.encode() != word:  # the padding bits of base32 are not canonical
        raise _mistyped()
    return ticket


def _read(body: bytes, checksum: bytes) -> Ticket:
    if len(body) < _HEAD.size or checksum != _checksum(body):
        raise ValueError
    inviter, role, expires_s, secret = _HEAD.unpack_from(body)
    if role >= len(_ROLES):
        raise UserError(
            f"Role {role} of this ticket is unknown to this version of meshllm",
            hint="a newer version may know it: update meshllm, or ask for a ticket of another role",
        )
    addresses, place = [], _HEAD.size
    while place < len(body):
        stop = place + 1 + body[place]
        addresses.append(body[place + 1 : stop].decode("ascii"))
        place = stop
    return Ticket(inviter, tuple(addresses), _ROLES[role], expires_s, secret)


def _is_address(address: str) -> bool:
    # Terminals and transports receive the address: only printable ASCII is safe for both.
    printable = address.isascii() and address.isprintable() and " " not in address
    return printable and 0 < len(address) <= MAX_ADDRESS_BYTES


def _mistyped() -> UserError:
    return UserError("The ticket is mistyped or cut short", hint="copy the whole word")


def _checksum(body: bytes) -> bytes:
    return blake3.blake3(PREFIX.encode() + VERSION.encode() + body).digest()[:_CHECK_BYTES]


def _mac(secret: bytes, role: Role, context: bytes) -> bytes:
    words = b"meshllm ticket 1" + bytes([_ROLES.index(role)]) + context
    return hmac.digest(secret, words, "sha256")
