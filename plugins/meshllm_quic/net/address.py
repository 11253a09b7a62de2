"""Parsing and formatting of ``quic://`` addresses.

``quic://HOST:PORT`` is a node that listens there; ``quic://NODE@HOST:PORT`` is the node NODE behind
the relay at HOST:PORT. NODE is its public key as `meshllm id` prints it, without the dashes.
"""

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from meshllm.errors import UserError

RELAY_PORT = 8790
"""Default port of a relay."""
KEY_BYTES = 32
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"  # RFC 4648
_CHECKED = 13  # characters before their check digit
_HINT = "write it as `quic://HOST:PORT`, or `quic://NODE@HOST:PORT` for a node behind a relay"


@dataclass(frozen=True, slots=True)
class QuicAddress:
    """A parsed ``quic://`` address."""

    host: str
    port: int
    key: bytes | None = None
    """Public key of a node behind the relay at ``host``; None if the node itself is at ``host``."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        node = f"{show_key(self.key)}@" if self.key is not None else ""
        return f"quic://{node}{host}:{self.port}"


def parse(address: str, usual_port: int | None = None) -> QuicAddress:
    """Parse ``quic://HOST:PORT``, ``quic://NODE@HOST:PORT`` or ``HOST:PORT``; raise `UserError`.

    The port may be omitted if there is a ``usual_port``.
    """
    try:
        parts = urlsplit(address if "://" in address else f"quic://{address}")
        port = usual_port if parts.port is None else parts.port
        (parts.hostname or "").encode("idna")  # as the resolver will
    except ValueError:  # an unclosed bracket, a port that is not a number, an empty label
        raise _refusal(address) from None
    is_plain = address.isascii() and address.isprintable() and " " not in address
    rest = parts.path or parts.query or parts.fragment or parts.password
    if not is_plain or parts.scheme != "quic" or rest or not parts.hostname or port is None:
        raise _refusal(address)
    key = None if parts.username is None else _parse_key(parts.username, address)
    return QuicAddress(parts.hostname, port, key)


def show_key(key: bytes) -> str:
    """Format a key like a node id without the dashes: 56 characters."""
    digits = base64.b32encode(key).decode().rstrip("=").lower()
    return "".join(block + _check_digit(block) for block in _blocks(digits, _CHECKED))


def _parse_key(text: str, address: str) -> bytes:
    typed = text.replace("-", "").lower()
    digits = "".join(block[:_CHECKED] for block in _blocks(typed, _CHECKED + 1))
    try:
        key = base64.b32decode(digits.upper() + "====")
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES or show_key(key) != typed:
        hint = "copy the whole address; its check digits do not match"
        raise UserError(f"Invalid node id in `{address[:160]}`", hint=hint)
    return key


def _blocks(text: str, size: int) -> Iterable[str]:
    return (text[place : place + size] for place in range(0, len(text), size))


def _check_digit(block: str) -> str:
    """Compute the Luhn mod N check digit, N = 32, with weights 2, 1, 2..."""
    total = 0
    for place, character in enumerate(block):
        product = _ALPHABET.index(character) * (2 - place % 2)
        total += product // 32 + product % 32
    return _ALPHABET[-total % 32]


def _refusal(address: str) -> UserError:
    return UserError(f"Invalid QUIC address `{address[:160]}`", hint=_HINT)
