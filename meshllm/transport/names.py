"""Look-ups of host names, in threads of their own: a slow name server holds up nothing else."""

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

Address: TypeAlias = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""What `getaddrinfo` returns: family, kind, protocol, canonical name, address of the socket."""

_threads = ThreadPoolExecutor(8, "transport-names")


async def look_up(host: str, port: int, kind: socket.SocketKind) -> Sequence[Address]:
    """Return the addresses of a host, at once for a number, which needs no look-up.

    Raises:
        OSError: the name cannot be resolved.
        UnicodeError: it has an invalid label.
    """
    find = partial(socket.getaddrinfo, host, port, type=kind)
    try:
        return find(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().run_in_executor(_threads, find)
