"""What carries datagrams: the real network or one in memory."""

from collections.abc import Callable, Sequence
from typing import Protocol

Address = tuple[str, int]
"""A numeric host, IPv4 never written as IPv6, and a port."""

Receive = Callable[[Sequence[tuple[bytes, Address]]], None]
"""Takes the datagrams that arrived since the last call, with where each came from."""


class Socket(Protocol):
    """One UDP socket, for everything that a process says and hears."""

    @property
    def port(self) -> int:
        """The port it is bound to."""
        ...

    def hosts(self) -> Sequence[str]:
        """List the addresses of this machine that others may reach, likeliest first.

        It is asked anew when it matters: a laptop changes its network.
        """
        ...

    def send(self, datagrams: Sequence[bytes], to: Address) -> None:
        """Send datagrams to one place, each of the size of the first, the last perhaps shorter.

        Never waits; what the kernel does not take is lost, as any datagram may be.
        """
        ...

    def close(self) -> None:
        """Close it; nothing is received any more."""
        ...


class Network(Protocol):
    """Where sockets are opened."""

    async def open(self, host: str | None, port: int, receive: Receive) -> Socket:
        """Open a socket; no host is every address, IPv4 and IPv6, and port 0 a free one.

        Raises:
            OSError: the address is in use, or not one of this machine.
        """
        ...

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Find the addresses of a name or a numeric host, in the order they are to be tried.

        Raises:
            OSError: there is none.
        """
        ...
