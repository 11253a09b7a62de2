"""The IP addresses of this machine, for transports over IP."""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address

import psutil  # type: ignore[import-untyped]  # ships no types


def hosts() -> Sequence[str]:
    """List the addresses of the interfaces that are up, most reachable first, loopback last.

    Link-local IPv6 addresses are omitted: they are meaningless without a local interface name.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(sorted(host for host in found if "%" not in host), key=by_reach())


def by_reach() -> Callable[[str], tuple[bool, bool, bool]]:
    """Return a sort key of hosts: those of the default routes first, loopback last."""
    usual = {_default(family) for family in (socket.AF_INET, socket.AF_INET6)}
    return lambda host: (ip_address(host).is_loopback, host not in usual, ":" in host)


def _default(family: socket.AddressFamily) -> str | None:
    """Return the source address of the default route; sends nothing."""
    target = "192.0.2.1" if family is socket.AF_INET else "2001:db8::1"  # RFC 5737, RFC 3849
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))
        return str(probe.getsockname()[0])
    return None
