"""Contract of a datagram network: the real one, or a simulated one in tests."""

from collections.abc import Callable, Sequence
from typing import Protocol

Address = tuple[str, int]
"""A numeric host, IPv4 never as IPv4-mapped IPv6, and a port."""

Receive = Callable[[Sequence[tuple[bytes, Address]]], None]
"""Receives the datagrams that arrived since the last call, each with its source."""

Refused = Callable[[Address], None]
"""Hears of an address at which nobody listens: its host refused a datagram. That can be forged."""


def of_each_family(addresses: Sequence[Address]) -> list[Address]:
    """Return the first IPv4 and the first IPv6 address, in their order."""
    firsts: dict[bool, Address] = {}
    for address in addresses:
        firsts.setdefault(":" in address[0], address)
    return list(firsts.values())


class Socket(Protocol):
    """A UDP socket, shared by all connections of a process."""

    @property
    def port(self) -> int:
        """The port it is bound to."""
        ...

    def hosts(self) -> Sequence[str]:
        """List the addresses of this machine that peers may reach, most reachable first.

        The list is not cached: a laptop may change its network.
        """
        ...

    def send(self, datagrams: Sequence[bytes], to: Address) -> None:
        """Send datagrams to one address, of equal size; the last may be shorter.

        Never blocks; datagrams that the kernel does not accept are dropped.
        """
        ...

    def close(self) -> None:
        """Close the socket and stop receiving."""
        ...


class DatagramNetwork(Protocol):
    """Opens sockets and resolves names."""

    async def open(
        self, host: str | None, port: int, receive: Receive, refused: Refused | None = None
    ) -> Socket:
        """Open a socket; host None binds all IPv4 and IPv6 addresses, port 0 any free port.

        ``refused`` is called where the kernel reports refusals.

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        ...

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Resolve a name or a numeric host to addresses, in the order to try them.

        Raises:
            OSError: the name cannot be resolved.
        """
        ...
