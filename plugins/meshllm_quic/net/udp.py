"""UDP sockets on asyncio, with batched system calls (GSO and GRO).

One system call carries up to 64 datagrams if the kernel segments and coalesces them (Linux:
UDP_SEGMENT since 4.18, UDP_GRO since 5.0), otherwise one. Datagrams are never fragmented: those
longer than the path MTU are lost, so that probes can discover the MTU (RFC 8899 section 3).
"""

import asyncio
import errno
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from meshllm.transport.interfaces import hosts
from meshllm.transport.names import look_up
from meshllm_quic.net.network import Address, Receive, Refused

BUFFER_BYTES = 4 * 1024 * 1024  # Linux's default of 212992 drops bursts; the kernel may grant less
BATCH = 64  # datagrams per event loop iteration; processing takes some 25 us each
MAX_RUN = 64  # datagrams in one system call: UDP_MAX_SEGMENTS of Linux
MAX_RUN_BYTES = 65_000  # below IP's limit of 65535, headers included
MAX_DATAGRAM_BYTES = 65_535

_UDP_SEGMENT, _UDP_GRO = 103, 104  # linux/udp.h; Python 3.11 has no names for them
_DONT_FRAGMENT: dict[str, Sequence[tuple[int, int, int]]] = {
    # IP_MTU_DISCOVER and IPV6_MTU_DISCOVER: PMTUDISC_PROBE sets DF and ignores ICMP
    "linux": ((socket.IPPROTO_IP, 10, 3), (socket.IPPROTO_IPV6, 23, 3)),
    # IP_DONTFRAG and IPV6_DONTFRAG of netinet/in.h
    "darwin": ((socket.IPPROTO_IP, 28, 1), (socket.IPPROTO_IPV6, 62, 1)),
}
_REPORT_ERRORS = ((socket.IPPROTO_IP, 11), (socket.IPPROTO_IPV6, 25))
# IP_RECVERR and IPV6_RECVERR: ICMP messages are queued with the address that they are about
_IP_PKTINFO, _IPV6_RECVPKTINFO, _IPV6_PKTINFO = 8, 49, 50  # linux/in.h, linux/in6.h
_REPORT_LOCAL = {
    socket.AF_INET: (socket.IPPROTO_IP, _IP_PKTINFO),
    socket.AF_INET6: (socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO),  # for IPv4 datagrams, too
}
_OF_EARLIER = {
    getattr(errno, name)
    for name in (
        "ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "EHOSTDOWN", "ENONET", "EMSGSIZE", "EPROTO",
        "EACCES", "EPERM", "ENOPROTOOPT", "EOPNOTSUPP",
    )
    if hasattr(errno, name)
}  # fmt: skip
"""Errors that may be about an earlier datagram, to any address: ICMP, icmp_err_convert of Linux."""
_EXTENDED_ERROR = struct.Struct("=IBBBBII")  # sock_extended_err of linux/errqueue.h
_ANCILLARY_BYTES = socket.CMSG_SPACE(4) + socket.CMSG_SPACE(20)  # of GRO, and of in6_pktinfo
_NO_IPV6 = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT}


class _HeardAt(tuple[str, int]):
    """An `Address`, equal to a plain one, that sent to one of the addresses of this machine.

    What is sent to it leaves from there.
    """

    local: tuple[int, int, bytes]
    """Ancillary data that names this address."""


class UdpSocket:
    """A UDP socket read by the event loop; see `meshllm_quic.net.network.Socket`."""

    def __init__(
        self, bound: socket.socket, receive: Receive, refused: Refused | None = None
    ) -> None:
        """Take ownership of a bound, non-blocking socket."""
        self._socket = bound
        self._receive = receive
        self._refused = refused if sys.platform == "linux" else None
        for option in _REPORT_ERRORS if self._refused else ():
            with suppress(OSError):  # IPv6 on an IPv4 socket
                bound.setsockopt(*option, 1)
        self._buffer = memoryview(bytearray(MAX_DATAGRAM_BYTES))
        self._has_gso = _has_gso(bound)
        self._host, self._port = _address(bound.getsockname())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound, self._read)

    @property
    def port(self) -> int:
        """The port it is bound to."""
        return self._port

    def hosts(self) -> Sequence[str]:
        """List the addresses of this machine that peers may reach, most reachable first."""
        if self._host == "::":
            return hosts()
        if self._host == "0.0.0.0":
            return [host for host in hosts() if ":" not in host]
        return [self._host]

    def send(self, datagrams: Sequence[bytes], to: Address) -> None:
        """Send datagrams to one address, of equal size; the last may be shorter."""
        if self._socket.fileno() < 0 or not datagrams:
            return
        size = max(1, len(datagrams[0]))
        run = min(MAX_RUN, max(1, MAX_RUN_BYTES // size)) if self._has_gso else 1
        for start in range(0, len(datagrams), run):
            self._send(datagrams[start : start + run], size, to)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def _send(self, datagrams: Sequence[bytes], size: int, to: Address) -> None:
        """Send in one call; the kernel segments the data into datagrams of ``size`` bytes."""
        ancillary = [to.local] if isinstance(to, _HeardAt) else []
        if len(datagrams) > 1:
            ancillary.append((socket.IPPROTO_UDP, _UDP_SEGMENT, struct.pack("=H", size)))
        destination = _destination(self._socket.family, to)
        try:
            self._sendmsg(datagrams, ancillary, 0, destination)
        except BlockingIOError:  # the buffer is full
            return
        except OSError as error:
            if len(datagrams) == 1:  # no route, or longer than the path MTU
                return
            if error.errno == errno.EIO:  # an interface without checksum offload
                self._has_gso = False
            for datagram in datagrams:  # some kernels reject what others segment
                self._send([datagram], size, to)

    def _sendmsg(self, *arguments: Any) -> None:
        try:
            self._socket.sendmsg(*arguments)
        except OSError as error:
            if error.errno not in _OF_EARLIER:
                raise
            self._socket.sendmsg(*arguments)

    def _read(self) -> None:
        """Receive up to `BATCH` datagrams and pass them on in one call."""
        batch: list[tuple[bytes, Address]] = []
        for _ in range(BATCH):
            try:
                size, ancillary, _, source = self._socket.recvmsg_into(
                    [self._buffer], _ANCILLARY_BYTES
                )
            except BlockingIOError:
                if not batch:  # then an error has woken it
                    self._read_errors()
                break
            except OSError:  # an ICMP error for an earlier datagram: one of many peers is gone
                self._read_errors()
                continue
            address = _heard_at(_address(source), ancillary)
            step = _segment(ancillary) or size
            batch += [
                (bytes(self._buffer[start : min(start + step, size)]), address)
                for start in range(0, size, step or 1)
            ]
            if len(batch) >= BATCH:
                break
        if batch:
            self._receive(batch)

    def _read_errors(self) -> None:
        """Empty the queue of ICMP errors, and report refusals."""
        for _ in range(BATCH if self._refused else 0):
            try:
                _, ancillary, _, to = self._socket.recvmsg(0, 512, socket.MSG_ERRQUEUE)
            except OSError:  # it is empty
                return
            codes = [
                _EXTENDED_ERROR.unpack_from(data)[0]
                for level, kind, data in ancillary
                if (level, kind) in _REPORT_ERRORS
            ]
            if errno.ECONNREFUSED in codes and self._refused:
                self._refused(_address(to))


class UdpNetwork:
    """Opens UDP sockets on the running loop; see `meshllm_quic.net.network.DatagramNetwork`."""

    def __init__(self, *, keeps_local: bool = False) -> None:
        """With ``keeps_local``, on Linux, answers leave from the address that was asked.

        Else the route decides: the paths of a node move when its network changes.
        """
        self._keeps_local = keeps_local and sys.platform == "linux"

    async def open(
        self, host: str | None, port: int, receive: Receive, refused: Refused | None = None
    ) -> UdpSocket:
        """Open a socket; host None binds all IPv4 and IPv6 addresses, port 0 any free port.

        Raises:
            OSError: the address is in use, or does not belong to this machine.
        """
        if host is None:
            bound = _bind_all(port)
        else:
            address, *_ = await self.resolve(host, port)
            bound = _bind(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, address)
        if self._keeps_local:
            bound.setsockopt(*_REPORT_LOCAL[bound.family], 1)
        return UdpSocket(bound, receive, refused)

    async def resolve(self, host: str, port: int) -> Sequence[Address]:
        """Resolve a name or a numeric host to addresses, in the order to try them.

        Raises:
            OSError: the name cannot be resolved.
        """
        try:
            found = await look_up(host, port, socket.SOCK_DGRAM)
        except UnicodeError as error:  # an invalid IDNA label
            raise OSError(errno.EINVAL, f"invalid host `{host}`") from error
        return list(dict.fromkeys(_address(sockaddr) for *_, sockaddr in found))


def _bind_all(port: int) -> socket.socket:
    """Bind all addresses; only IPv4 if the kernel has no IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return _bind(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
    return _bind(socket.AF_INET, ("0.0.0.0", port))


def _bind(family: socket.AddressFamily, address: Address) -> socket.socket:
    """Bind a non-blocking socket with large buffers, GRO and DF, as far as the kernel allows."""
    made = socket.socket(family, socket.SOCK_DGRAM)
    options = [
        (socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES),
        *_DONT_FRAGMENT.get(sys.platform, ()),
    ]
    if sys.platform == "linux":
        options.append((socket.IPPROTO_UDP, _UDP_GRO, 1))
    try:
        made.setblocking(False)
        if family is socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        for option in options:
            with suppress(OSError):  # optional: it only costs speed
                made.setsockopt(*option)
        made.bind(_destination(family, address))
    except OSError:
        made.close()
        raise
    return made


def _has_gso(bound: socket.socket) -> bool:
    """Return whether the kernel supports UDP_SEGMENT; others would send one large datagram."""
    if sys.platform != "linux":
        return False
    try:
        bound.getsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT)
    except OSError:
        return False
    return True


def _segment(ancillary: Iterable[tuple[int, int, bytes]]) -> int:
    """Return the size of the datagrams that the kernel coalesced; 0 for a single one."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_UDP, _UDP_GRO):
            return int(struct.unpack("=i", data[:4])[0])
    return 0


def _heard_at(source: Address, ancillary: Iterable[tuple[int, int, bytes]]) -> Address:
    """Return a source, with the local address that its datagram came to, if the kernel reports it.

    The index of the interface becomes 0: the route chooses it for answers.
    """
    heard = _HeardAt(source)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            heard.local = level, kind, bytes(4) + data[4:]
            return heard
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO):
            heard.local = level, kind, data[:16] + bytes(4)
            return heard
    return source


def _address(sockaddr: tuple[Any, ...]) -> Address:
    """Convert a kernel address to an `Address`; link-local ones keep their zone number."""
    host, port, *rest = sockaddr
    if len(rest) == 2 and rest[1]:
        return f"{host}%{rest[1]}", port
    is_mapped = host.startswith("::ffff:") and "." in host
    return host.removeprefix("::ffff:") if is_mapped else host, port


def _destination(family: int, address: Address) -> tuple[Any, ...]:
    """Convert an `Address` to the kernel's form; raise `OSError` for the wrong family."""
    host, port = address
    if family == socket.AF_INET:
        return address
    if ":" not in host:
        return f"::ffff:{host}", port
    host, _, zone = host.partition("%")
    if not zone:
        return host, port
    return host, port, 0, int(zone) if zone.isdigit() else socket.if_nametoindex(zone)
