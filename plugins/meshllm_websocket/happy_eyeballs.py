"""Connects to the first address of a host that answers: happy eyeballs, RFC 8305.

`loop.create_connection` can do so, too, but loses a connected socket if it is cancelled before the
other attempts have ended, and fails if two addresses answer at once (Python 3.11).
"""

import asyncio
import socket
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import chain, zip_longest

from meshllm.transport.names import Address, look_up

ATTEMPT_S = 0.25
"""Delay before the next address is tried in parallel, RFC 8305 section 5."""


async def connect(hosts: Sequence[str], port: int) -> socket.socket:
    """Return a socket that is connected to one of the hosts.

    If cancelled, all sockets are closed.

    Raises:
        OSError: a host has no address, or none could be connected to; the first such error.
    """
    found = [await look_up(host, port, socket.SOCK_STREAM) for host in hosts]
    addresses = interleaved(chain.from_iterable(found))
    winner: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
    attempts: list[asyncio.Task[None]] = []
    errors: list[OSError] = []
    with ExitStack() as failed:
        failed.callback(lambda: winner.result().close() if winner.done() else None)
        winner.add_done_callback(lambda _: [each.cancel() for each in attempts])
        async with asyncio.TaskGroup() as group:
            for address in addresses:
                attempts.append(group.create_task(_attempt(address, winner, errors)))
                now = attempts[-1], winner
                await asyncio.wait(now, timeout=ATTEMPT_S, return_when=asyncio.FIRST_COMPLETED)
                if winner.done():
                    break
        if not winner.done():
            del errors[1:]
            raise errors.pop()  # kept nowhere: its traceback refers to this frame
        failed.pop_all()
    return winner.result()


def interleaved(addresses: Iterable[Address]) -> list[Address]:
    """Order addresses so that their families alternate, RFC 8305 section 4."""
    families: dict[socket.AddressFamily, list[Address]] = {}
    for address in addresses:
        families.setdefault(address[0], []).append(address)
    return [each for some in zip_longest(*families.values()) for each in some if each is not None]


async def _attempt(
    address: Address, winner: asyncio.Future[socket.socket], errors: list[OSError]
) -> None:
    family, kind, protocol, _, to = address
    with ExitStack() as failed:
        try:
            one = failed.enter_context(socket.socket(family, kind, protocol))
            one.setblocking(False)
            await asyncio.get_running_loop().sock_connect(one, to)
        except OSError as error:
            errors.append(error)
            return
        if not winner.done():
            winner.set_result(one)
            failed.pop_all()
