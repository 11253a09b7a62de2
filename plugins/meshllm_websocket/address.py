"""Parsing and formatting of WebSocket addresses, and the addresses of this machine."""

import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]  # ships no types
from websockets.uri import WebSocketURI

from meshllm.errors import UserError

_PORTS = {"ws": 80, "wss": 443}  # RFC 6455 section 3


def parse(address: str) -> WebSocketURI:
    """Parse ``ws://HOST:PORT/PATH``, the same with ``wss``, or ``HOST:PORT``; raise `UserError`."""
    is_short = "://" not in address
    try:
        parts = urlsplit(f"ws://{address}" if is_short else address)
        port = None if is_short and parts.path else parts.port
        (parts.hostname or "").encode("idna")  # as the resolver will
    except ValueError:  # an unclosed bracket, a port that is not a number, an empty label
        raise _refusal(address) from None
    if not is_short and port is None:
        port = _PORTS.get(parts.scheme)
    is_plain = address.isascii() and address.isprintable() and not {" ", "@", "#"} & set(address)
    if not is_plain or parts.scheme not in _PORTS or not parts.hostname or port is None:
        raise _refusal(address)
    return WebSocketURI(parts.scheme == "wss", parts.hostname, port, parts.path, parts.query)


def _refusal(address: str) -> UserError:
    hint = "write it as `ws://HOST:PORT`, `wss://HOST:PORT/PATH` or `HOST:PORT`"
    return UserError(f"Invalid WebSocket address `{address}`", hint=hint)


def show(host: str, port: int, path: str = "") -> str:
    """Format an address."""
    return f"ws://[{host}]:{port}{path}" if ":" in host else f"ws://{host}:{port}{path}"


def reachable(bound: Iterable[tuple[str, int]], path: str = "") -> tuple[str, ...]:
    """List the addresses of bound sockets, most reachable first, loopback last."""
    bound = list(bound)
    places = [(host, port) for name, port in bound for host in _expand(name)] or bound
    usual = {_default(family) for family in (socket.AF_INET, socket.AF_INET6)}
    places.sort(key=lambda at: (ip_address(at[0]).is_loopback, at[0] not in usual, ":" in at[0]))
    return tuple(show(host, port, path) for host, port in places)


def _expand(host: str) -> list[str]:
    """Expand a wildcard to the addresses of the interfaces, without those that need a zone."""
    address = ip_address(host)
    if not address.is_unspecified:
        return [host]
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family is family and "%" not in entry.address
    ]


def _default(family: socket.AddressFamily) -> str | None:
    """Return the source address of the default route; sends nothing."""
    target = "192.0.2.1" if family is socket.AF_INET else "2001:db8::1"  # RFC 5737, RFC 3849
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return None
