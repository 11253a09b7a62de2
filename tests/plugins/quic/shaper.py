"""A shaped network between network namespaces, for kernels without `netem`.

Theory of operation
-------------------
Each namespace has a TUN device with an address in 10.9.0.0/24; one process reads packets from these
devices and writes them, delayed, to the device with the destination address. Each ordered pair of
devices has its own wire with rate, queue, loss and delay. It runs in real time on one thread, at
some 10 us per packet, so above about 500 Mbit/s the process is the bottleneck. As a command, it
prints `up` when the addresses are reachable:

    python -m tests.plugins.quic.shaper NAMESPACE=ADDRESS ... --delay-ms 20 --mbit-per-s 100
"""

import argparse
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from random import Random

from tests.processes.namespaces import Space, run
from tests.simulation.wires import Dropped, Line, Wire

TUN = Path("/dev/net/tun")
DEVICE = "slow"
TUNSETIFF = 0x400454CA  # linux/if_tun.h, as the next two
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
KERNEL_QUEUE = 5000  # packets queued for this process
BATCH = 64  # packets read from one device before the others are served
LONGEST = 65536


@dataclass(eq=False)
class Shaper:
    """The devices by address, and the packets in flight between them."""

    devices: dict[bytes, int]
    line: Line
    seed: int = 0
    dropped: int = 0
    cuts: frozenset[tuple[bytes, bytes]] = frozenset()
    """Pairs of addresses from one to the other of which nothing passes."""
    _wires: dict[tuple[int, int], Wire] = field(default_factory=dict)
    _under_way: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _orders: Iterator[int] = field(default_factory=count)

    def run(self) -> None:
        """Forward packets until the process is killed."""
        files = list(self.devices.values())
        while True:
            self.deliver(time.monotonic())
            wait_s = None if self.next_at is None else max(0.0, self.next_at - time.monotonic())
            # Not epoll: its timeouts are whole milliseconds.
            for file in select.select(files, (), (), wait_s)[0]:
                self._read(file)

    @property
    def next_at(self) -> float | None:
        """When the next packet arrives."""
        return self._under_way[0][0] if self._under_way else None

    def take(self, sender: int, packet: bytes, now: float) -> None:
        """Schedule a packet; those that are not IPv4, or have no destination here, are dropped."""
        receiver = self.devices.get(packet[16:20])
        if receiver is None or packet[0] >> 4 != 4:
            return
        if (packet[12:16], packet[16:20]) in self.cuts:
            self.dropped += 1
            return
        pair = sender, receiver
        wire = self._wires.get(pair) or Wire(Random(f"{self.seed}/{pair}"))
        self._wires[pair] = wire
        try:
            arrivals = wire.arrivals(self.line, len(packet), now)
        except Dropped:
            self.dropped += 1
            return
        for arrival in arrivals:
            heapq.heappush(self._under_way, (arrival, next(self._orders), receiver, packet))

    def deliver(self, now: float) -> None:
        """Write the packets that are due."""
        while self._under_way and self._under_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(self._under_way)
            with suppress(BlockingIOError):  # its queue is full, as that of any kernel
                os.write(receiver, packet)

    def _read(self, file: int) -> None:
        with suppress(BlockingIOError):
            for _ in range(BATCH):
                self.take(file, os.read(file, LONGEST), time.monotonic())


@contextmanager
def shaped(spaces: Sequence[Space], line: Line, seed: int = 0) -> Iterator[None]:
    """Connect namespaces by a shaped network, on which each has its `host` as address."""
    command = [
        sys.executable, "-m", "tests.plugins.quic.shaper",
        *(f"{space.name}={space.host}" for space in spaces),
        *("--delay-ms", str(line.delay_s * 1e3), "--jitter-ms", str(line.jitter_s * 1e3)),
        *("--loss", str(line.loss), "--mbit-per-s", str(line.bytes_per_s * 8 / 1e6)),
        *("--queue-kib", str(line.queue_bytes / 1024), "--mtu", str(line.mtu)),
        *("--seed", str(seed)),
    ]  # fmt: skip
    here = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "up\n":
                raise OSError("The shaper has ended")
            yield
        finally:
            process.kill()


def can_shape() -> str:
    """Return why this machine has no TUN devices, or an empty string."""
    return "" if TUN.exists() else f"`{TUN}` does not exist"


def open_device(space: Space, mtu: int) -> int:
    """Create a TUN device in a namespace, with the address of the space; return its file."""
    with space.entered():
        file = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(file, TUNSETIFF, request)
    link = f"{DEVICE} mtu {mtu} txqueuelen {KERNEL_QUEUE} up"
    run(*space.command("ip", "address", "add", f"{space.host}/24", "dev", DEVICE))
    run(*space.command("ip", "link", "set", *link.split()))
    return file


def main(words: Sequence[str] | None = None) -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser(description="Connect network namespaces by a shaped network.")
    parser.add_argument("spaces", nargs="+", metavar="NAMESPACE=ADDRESS")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="at most so much later")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument("--mbit-per-s", type=float, default=inf, help="of IP packets, one way")
    parser.add_argument("--queue-kib", type=float, default=512.0, help="what waits for the rate")
    parser.add_argument("--mtu", type=int, default=1500, help="longest IP packet in bytes")
    parser.add_argument("--seed", type=int, default=0, help="of loss and jitter")
    given = parser.parse_args(words)
    line = Line(
        delay_s=given.delay_ms / 1e3,
        jitter_s=given.jitter_ms / 1e3,
        loss=given.loss,
        bytes_per_s=given.mbit_per_s * 1e6 / 8,
        queue_bytes=given.queue_kib * 1024,
        mtu=given.mtu,
    )
    spaces = [Space(*each.split("=", 1)) for each in given.spaces]
    files = {bytes(map(int, each.host.split("."))): open_device(each, line.mtu) for each in spaces}
    print("up", flush=True)
    Shaper(files, line, given.seed).run()


if __name__ == "__main__":
    main()
