"""Delivery rate of a TCP connection, as measured by the Linux kernel."""

import socket
import sys
from struct import Struct

_INFO = Struct("<7x B 152x Q")
"""``struct tcp_info`` of linux/tcp.h (since 4.9): the flags, and ``tcpi_delivery_rate`` in B/s."""
_APP_LIMITED = 1  # the sender, not the path, limited the rate


def delivery_rate(sock: socket.socket | None) -> float | None:
    """Return the last delivery rate in bytes per second that was not application-limited.

    None if there was no such period, or if the platform does not report it. ``sock`` is None for a
    closed TLS connection.
    """
    if sock is None or sys.platform != "linux" or sys.byteorder != "little":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # closed
        return None
    if len(info) < _INFO.size:
        return None
    flags, rate = _INFO.unpack(info)
    return float(rate) if rate and not flags & _APP_LIMITED else None
