"""The real network: UDP on asyncio, in batches.

One system call carries up to 64 datagrams where the kernel cuts and joins them (Linux: UDP_SEGMENT
since 4.18, UDP_GRO since 5.0); elsewhere, one each. Nothing is fragmented: what is longer than the
path allows is lost, so that a lost probe tells the size of the path (RFC 8899 section 3).
"""

import asyncio
import errno
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshllm_quic.net.interfaces import hosts
from meshllm_quic.net.network import Address, Receive

BUFFER_BYTES = 4 * 1024 * 1024  # 212992 of Linux's default lose bursts; the kernel may grant less
BATCH = 64  # datagrams between two turns of the loop, at some 25 us each above here
MAX_RUN = 64  # datagrams in one system call: UDP_MAX_SEGMENTS of Linux
MAX_RUN_BYTES = 65_000  # below the 65535 of IP with its heads
MAX_DATAGRAM_BYTES = 65_535

_UDP_SEGMENT, _UDP_GRO = 103, 104  # linux/udp.h; Python 3.11 has no names for them
_WHOLE: dict[str, Sequence[tuple[int, int, int]]] = {
    # IP_MTU_DISCOVER and IPV6_MTU_DISCOVER: PMTUDISC_PROBE sets DF and believes no ICMP
    "linux": ((socket.IPPROTO_IP, 10, 3), (socket.IPPROTO_IPV6, 23, 3)),
    # IP_DONTFRAG and IPV6_DONTFRAG of netinet/in.h
    "darwin": ((socket.IPPROTO_IP, 28, 1), (socket.IPPROTO_IPV6, 62, 1)),
}
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}


@dataclass(frozen=True, slots=True)
class UdpStatistics:
    """What a socket has done so far."""

    datagrams_sent: int
    send_calls: int
    datagrams_received: int
    receive_calls: int
    drops: int
    """Datagrams that the kernel refused: its buffer is full, no route, too long for the path."""


class UdpSocket:
    """A UDP socket of the kernel, read by the loop; see `meshllm_quic.net.network.Socket`."""

    def __init__(self, bound: socket.socket, receive: Receive) -> None:
        """Own a socket that is bound and does not block."""
        self._socket = bound
        self._receive = receive
        self._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES))
        self._can_cut = _can_cut(bound)
        self._sent = self._send_calls = self._received = self._receive_calls = self._drops = 0
        self._host, self._port = _address(bound.getsockname())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound, self._read)

    @property
    def port(self) -> int:
        """The port it is bound to."""
        return self._port

    @property
    def statistics(self) -> UdpStatistics:
        """What it has sent and received."""
        return UdpStatistics(
            self._sent, self._send_calls, self._received, self._receive_calls, self._drops
        )

    def hosts(self) -> Sequence[str]:
        """List the addresses of this machine that others may reach, likeliest first."""
        if self._host == "::":
            return hosts()
        if self._host == "0.0.0.0":
            return [host for host in hosts() if ":" not in host]
        return [self._host]

    def send(self, datagrams: Sequence[bytes], to: Address) -> None:
        """Send datagrams to one place, each of the size of the first, the last perhaps shorter."""
        if self._socket.fileno() < 0 or not datagrams:
            return
        size = max(1, len(datagrams[0]))
        run = min(MAX_RUN, max(1, MAX_RUN_BYTES // size)) if self._can_cut else 1
        for start in range(0, len(datagrams), run):
            self._send(datagrams[start : start + run], size, to)

    def close(self) -> None:
        """Close it; more calls do nothing."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _send(self, datagrams: Sequence[bytes], size: int, to: Address) -> None:
        """Send in one call what the kernel cuts into datagrams of ``size`` bytes."""
        ancillary: list[tuple[int, int, bytes]] = []
        if len(datagrams) > 1:
            ancillary = [(socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", size))]
        self._send_calls += 1
        try:
            self._socket.sendmsg(datagrams, ancillary, 0, _destination(self._socket.family, to))
        except BlockingIOError:
            self._drops += len(datagrams)
        except OSError as error:
            if len(datagrams) == 1:
                self._drops += 1
                return
            if error.errno == errno.EIO:  # an interface that computes no checksums
                self._can_cut = False
            for datagram in datagrams:  # some kernels do not cut what others do
                self._send([datagram], size, to)
        else:
            self._sent += len(datagrams)

    def _read(self) -> None:
        """Take what has arrived, as much as fits one turn of the loop, and hand it on at once."""
        batch: list[tuple[bytes, Address]] = []
        for _ in range(BATCH):
            self._receive_calls += 1
            try:
                size, ancillary, _, source = self._socket.recvmsg_into(
                    [self._buffer], socket.CMSG_SPACE(4)
                )
            except BlockingIOError:
                break
            except (
                OSError
            ):  # what ICMP said about a datagram sent before: one of many peers is gone
                continue
            address, step = _address(source), _segment(ancillary) or size
            batch += [
                (bytes(self._buffer[start : min(start + step, size)]), address)
                for start in range(0, size, step or 1)
            ]
            if len(batch) >= BATCH:
                break
        if batch:
            self._received += len(batch)
            self._receive(batch)


class UdpNetwork:
    """Opens UDP sockets on the running loop; see `meshllm_quic.net.network.Network`."""

    async def open(self, host: str | None, port: int, receive: Receive) -> UdpSocket:
        """Open a socket; no host is every address, IPv4 and IPv6, and port 0 a free one.

        Raises:
            OSError: the address is in use, or not one of this machine.
        """
        if host is None:
            return UdpSocket(_bind_all(port), receive)
        address, *_ = await self.resolve(host, port)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return UdpSocket(_bind(family, address), receive)

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Find the addresses of a name or a numeric host, in the order they are to be tried.

        Raises:
            OSError: there is none.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except UnicodeError as error:  # a label that no name may have
            raise OSError(errno.EINVAL, f"`{host}` is no host") from error
        return list(dict.fromkeys(_address(sockaddr) for *_, sockaddr in found))


def _bind_all(port: int) -> socket.socket:
    """Bind every address, of IPv4 alone where the kernel has no IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return _bind(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return _bind(socket.AF_INET, ("0.0.0.0", port))


def _bind(family: socket.AddressFamily, address: Address) -> socket.socket:
    """Make a socket that does not block, with all that the kernel has to offer, and bind it."""
    made = socket.socket(family, socket.SOCK_DGRAM)
    wishes = [
        (socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES),
        *_WHOLE.get(sys.platform, ()),
    ]
    if sys.platform == "linux":
        wishes.append((socket.IPPROTO_UDP, _UDP_GRO, 1))
    try:
        made.setblocking(False)
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        for wish in wishes:
            with suppress(OSError):  # it works without, slower
                made.setsockopt(*wish)
        made.bind(_destination(family, address))
    except OSError:
        made.close()
        raise
    return made


def _can_cut(bound: socket.socket) -> bool:
    """Tell whether the kernel knows UDP_SEGMENT; one that does not would send it all as one."""
    if sys.platform != "linux":
        return False
    try:
        bound.getsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT)
    except OSError:
        return False
    return True


def _segment(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Find the size of the datagrams that the kernel joined; 0 where it is one."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_UDP, _UDP_GRO):
            return int(struct.unpack("=i", data[:4])[0])
    return 0


def _address(sockaddr: tuple[Any, ...]) -> Address:
    """Write an address of the kernel as others read it; a link-local one with its zone number."""
    host, port, *rest = sockaddr
    if len(rest) == 2 and rest[1]:
        return f"{host}%{rest[1]}", port
    is_mapped = host.startswith("::ffff:") and "." in host
    return host.removeprefix("::ffff:") if is_mapped else host, port


def _destination(family: int, address: Address) -> tuple[Any, ...]:
    """Write an address as the kernel takes it; raise `OSError` when the family has none such."""
    host, port = address
    if family == socket.AF_INET:
        return address
    if ":" not in host:
        return f"::ffff:{host}", port
    host, _, zone = host.partition("%")
    if not zone:
        return host, port
    return host, port, 0, int(zone) if zone.isdigit() else socket.if_nametoindex(zone)
