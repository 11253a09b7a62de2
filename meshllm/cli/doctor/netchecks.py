"""Checks of ports and networks for `meshllm doctor`; they contact this machine only."""

import socket
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from meshllm.cli.doctor.finding import Finding
from meshllm.errors import MeshError, UserError
from meshllm.status import NetworkStatus

PORT = 7700
"""The first port a node tries, TCP or UDP."""
DIAL_S = 2.0
DATAGRAMS = {"quic"}
"""Transports and address schemes over UDP."""

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_ports(transports: Sequence[str], listen: Sequence[str]) -> Iterator[Finding]:
    """Check the addresses of a node, and try to bind the ports on which it would listen."""
    from meshllm.node.net.endpoints import assign_addresses, load_transports

    try:
        loaded = load_transports(transports)
    except MeshError:  # another check says which is missing
        loaded = ()
    try:
        assign_addresses(listen if loaded else (), loaded)
    except UserError as error:
        yield Finding("fail", "port", str(error), error.hint or "")
        return
    for transport in transports:
        is_udp = transport in DATAGRAMS
        for address in listen:
            if "://" not in address or (_scheme(address) in DATAGRAMS) == is_udp:
                yield check_free_port(address, is_udp=is_udp)
        if not listen:
            yield check_free_port(None, is_udp=is_udp)


def check_free_port(listen: str | None, *, is_udp: bool = False) -> Finding:
    """Try to bind the port on which a node would listen."""
    place = ("", PORT) if listen is None else _place(listen)
    if place is None:
        hint = "write it as `SCHEME://HOST:PORT`, with a port of at most 65535"
        return Finding("fail", "port", f"Invalid address `{listen}`", hint)
    host, port = place
    what = f"{'UDP' if is_udp else 'TCP'} port {port}"
    try:
        _bind(host if port else "", port, is_udp=is_udp)
    except (OSError, UnicodeError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else f"`{host}` cannot be the name of a host"
        )
        found = f"{what} is not available: {why}"
        if listen is None:
            return Finding("warn", "port", found, "nothing to do: the node picks another port")
        return Finding("fail", "port", found, "choose another with `--listen`")
    return Finding("ok", "port", f"{what} is free")


def _bind(host: str, port: int, *, is_udp: bool) -> None:
    """Bind a port for a moment; an empty host is every interface with IPv4."""
    kind = socket.SOCK_DGRAM if is_udp else socket.SOCK_STREAM
    family, *_, address = socket.getaddrinfo(host or "0.0.0.0", port, type=kind)[0]
    with socket.socket(family, kind) as probe:
        if not is_udp:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)


def check_listening(address: str) -> Finding:
    """Dial one of this node's listening addresses."""
    host, port = ("://" in address and _place(address)) or ("", 0)
    if not port or _scheme(address) in DATAGRAMS:  # no port, or UDP, which cannot be dialled
        return Finding("ok", "listening", address)
    try:
        socket.create_connection((_ANYWHERE.get(host, host), port), DIAL_S).close()
    except OSError as error:
        found = f"{address} does not answer: {error.strerror or error}"
        return Finding("warn", "listening", found, f"allow TCP port {port} in the firewall")
    return Finding("ok", "listening", f"{address} accepts connections from this machine")


def check_network(network: NetworkStatus) -> Iterator[Finding]:
    """Report the kind of NAT, the observed addresses, and the registration with each relay."""
    yield Finding("ok", "nat", network.line)
    for relay, state in network.relays:
        is_well = state.startswith("registered")
        advice = "" if is_well else "allow UDP in the firewall, or use another `--relay`"
        yield Finding("ok" if is_well else "warn", "relay", f"{relay} {state}", advice)


def _scheme(address: str) -> str:
    return address.partition(":")[0]


def _place(address: str) -> tuple[str, int] | None:
    """Return host and port of an address, port 0 when it has none; None if it is invalid."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return None if "://" in address else ("", 0)  # or a plain name of its transport
    return host or "", port or 0
