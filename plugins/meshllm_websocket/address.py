"""Parsing and formatting of WebSocket addresses, and the addresses of this machine."""

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from websockets.uri import WebSocketURI

from meshllm.errors import UserError
from meshllm.transport.interfaces import by_reach, hosts

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
    reach = by_reach()
    places.sort(key=lambda at: reach(at[0]))
    return tuple(show(host, port, path) for host, port in places)


def _expand(host: str) -> list[str]:
    """Expand a wildcard to the addresses of the interfaces, without those that need a zone."""
    address = ip_address(host)
    if not address.is_unspecified:
        return [host]
    return [host for host in hosts() if ip_address(host).version == address.version]
