"""How fast the kernel sees a connection deliver."""

import socket
import sys
from struct import Struct

_INFO = Struct("<7x B 152x Q")
"""Of ``struct tcp_info`` in linux/tcp.h, since Linux 4.9: a byte of flags, and bytes per second."""
_APP_LIMITED = 1  # the rate says how much there was to send, not how much could have been


def delivery_rate(sock: socket.socket | None) -> float | None:
    """Return the bytes per second of the last time that the connection had enough to send.

    None where that was never so, and where the kernel does not tell; ``sock`` is None where a
    connection over TLS is closed.
    """
    if sock is None or sys.platform != "linux" or sys.byteorder != "little":
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # it is closed
        return None
    if len(info) < _INFO.size:
        return None
    flags, rate = _INFO.unpack(info)
    return float(rate) if rate and not flags & _APP_LIMITED else None
