"""Capture of the UDP datagrams on an interface of a namespace."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.processes.namespaces import Space

ETH_P_ALL = 3  # linux/if_ether.h; ETH_P_IP alone would not capture sent packets
IPPROTO_UDP = 17
HEAD_BYTES = 128  # enough for the headers of IPv4 and UDP and the first byte of the data
BUFFER_BYTES = 4 * 2**20  # capped by the kernel
WAKE_S = 0.05


@dataclass(frozen=True, slots=True)
class Passed:
    """A captured UDP datagram."""

    time: float
    """Of `time.monotonic`."""
    source: tuple[str, int]
    to: tuple[str, int]
    size: int
    """Bytes of its data."""
    first: int
    """First byte of its data, which identifies the protocol; -1 if empty."""


@dataclass
class Capture:
    """The datagrams captured so far."""

    passed: list[Passed] = field(default_factory=list)

    def between(self, one: str, other: str, since: float = 0.0) -> list[Passed]:
        """List the datagrams between two hosts, in both directions."""
        hosts = {one, other}
        return [
            each
            for each in self.passed
            if {each.source[0], each.to[0]} == hosts and each.time >= since
        ]


@contextmanager
def capturing(space: Space, interface: str = "wan") -> Iterator[Capture]:
    """Capture in a thread; large packets that the kernel segments later are one."""
    capture, is_over = Capture(), threading.Event()
    with space.entered():
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    with tap:
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        tap.settimeout(WAKE_S)
        tap.bind((interface, ETH_P_ALL))
        reader = threading.Thread(target=_read, args=(tap, capture, is_over))
        reader.start()
        try:
            yield capture
        finally:
            is_over.set()
            reader.join()


def parse(packet: bytes, now: float) -> Passed | None:
    """Parse the header of an IPv4 packet; None if it is not UDP, or a later fragment."""
    if len(packet) < 28 or packet[0] >> 4 != 4 or packet[9] != IPPROTO_UDP:
        return None
    if int.from_bytes(packet[6:8]) & 0x1FFF:
        return None
    head = (packet[0] & 15) * 4
    source, to = (socket.inet_ntoa(packet[at : at + 4]) for at in (12, 16))
    sender, receiver, length = struct.unpack_from("!HHH", packet, head)
    first = packet[head + 8] if length > 8 else -1
    return Passed(now, (source, sender), (to, receiver), length - 8, first)


def _read(tap: socket.socket, capture: Capture, is_over: threading.Event) -> None:
    while True:
        try:
            packet = tap.recv(HEAD_BYTES)
        except TimeoutError:
            if is_over.is_set():  # and nothing is left to read
                return
            continue
        if passed := parse(packet, time.monotonic()):
            capture.passed.append(passed)
