"""Parsing and formatting of ``quic://`` addresses.

``quic://HOST:PORT`` is a node that listens there; ``quic://NODE@HOST:PORT`` is the node NODE behind
the relay at HOST:PORT. NODE is its public key as `meshllm id` prints it, without the dashes.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

from meshllm.errors import UserError
from meshllm.names import NodeId, parse_node, show

RELAY_PORT = 8790
"""Default port of a relay."""
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


def parse(address: str, default_port: int | None = None) -> QuicAddress:
    """Parse ``quic://HOST:PORT``, ``quic://NODE@HOST:PORT`` or ``HOST:PORT``; raise `UserError`.

    The port may be omitted if there is a ``default_port``.
    """
    try:
        parts = urlsplit(address if "://" in address else f"quic://{address}")
        port = default_port if parts.port is None else parts.port
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
    return show(NodeId(key)).replace("-", "")


def _parse_key(text: str, address: str) -> bytes:
    try:
        return parse_node(text)
    except UserError:
        hint = "copy the whole address; its check digits do not match"
        raise UserError(f"Invalid node id in `{address[:160]}`", hint=hint) from None


def _refusal(address: str) -> UserError:
    return UserError(f"Invalid QUIC address `{address[:160]}`", hint=_HINT)
