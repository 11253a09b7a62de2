"""Shaped lines between network namespaces, and the latency that transports add to them.

The table is a part of `tests.bench.transports`: the sockets of the two ends are in two namespaces,
both ends run in one event loop, and the transports take turns.
"""

import os
import socket
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Protocol, Self

from tests.bench.ends import Ground, Opener, round_trips
from tests.plugins.quic.shaper import Shaper, can_shape, open_device
from tests.processes.namespaces import Space, can_make_namespaces, new_spaces, open_spaces
from tests.simulation.wires import Line

LINE = Line(delay_s=0.0205, bytes_per_s=100e6 / 8)
"""Round trip of 41 ms; the bytes of a message add 0.7 ms."""
BYTES = 4 * 1024
TRIPS = 10
ROUNDS = 4
TARGET_MS = 5.0
"""Limit of the added latency."""
ECHOES = 10
ECHO_PORT = 7000
MTU = 1500
FIRST = -20
"""Niceness of the shaping process: its delays must not depend on a free processor."""


@dataclass(frozen=True, slots=True)
class Row:
    """Latency that one transport adds to the round trip of a slow line, in milliseconds."""

    transport: str
    round_trip_ms: float
    p50_ms: float
    p90_ms: float
    most_ms: float

    @classmethod
    def of(cls, name: str, trips_ms: Sequence[float]) -> Self:
        """Summarise the trips of one transport."""
        line_ms = 2e3 * LINE.delay_s
        added = [trip - line_ms for trip in trips_ms]
        p90 = statistics.quantiles(added, n=10, method="inclusive")[-1]
        return cls(name, line_ms, statistics.median(added), p90, max(added))


def reason() -> str:
    """Return why this machine cannot shape, or an empty string."""
    return can_make_namespaces() or can_shape()


class Change(Protocol):
    """Changes the shape of a network."""

    def __call__(self, line: Line, cuts: Iterable[tuple[Space, Space]] = ()) -> None:
        """Treat packets so, and drop those from one to the other of each pair of ``cuts``."""
        ...


@contextmanager
def changing(spaces: Sequence[Space]) -> Iterator[Change]:
    """Connect namespaces by a shaped network; yield what changes its shape.

    Raises:
        EOFError: the shaping process failed; its reason is on stderr.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_shape, args=(theirs, list(spaces)), daemon=True)
    process.start()
    theirs.close()

    def change(line: Line, cuts: Iterable[tuple[Space, Space]] = ()) -> None:
        pairs = [(socket.inet_aton(one.host), socket.inet_aton(other.host)) for one, other in cuts]
        ours.send((line, frozenset(pairs)))
        ours.recv()

    try:
        ours.recv()
        yield change
    finally:
        process.kill()
        process.join()


def _shape(pipe: Connection, spaces: Sequence[Space]) -> None:
    with suppress(PermissionError):  # not permitted for root of `unshare -r`
        os.nice(FIRST)
    devices = {socket.inet_aton(space.host): open_device(space, MTU) for space in spaces}
    shaper = Shaper(devices, Line())

    def obey() -> None:
        while True:
            shaper.line, shaper.cuts = pipe.recv()
            pipe.send(True)

    Thread(target=obey, daemon=True).start()
    pipe.send(True)
    shaper.run()


def echo_ms(one: Space, other: Space, *, size: int) -> float:
    """Measure the round trip of a datagram."""
    with _socket(one) as near, _socket(other) as far:
        trips = []
        for _ in range(ECHOES):
            begin = time.perf_counter()
            near.sendto(bytes(size), (other.host, ECHO_PORT))
            far.recv(size)
            far.sendto(bytes(size), (one.host, ECHO_PORT))
            near.recv(size)
            trips.append(time.perf_counter() - begin)
    return statistics.median(trips) * 1e3


def _socket(space: Space) -> socket.socket:
    with space.entered():
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((space.host, ECHO_PORT))
    return made


@contextmanager
def open_far() -> Iterator[Ground]:
    """Create a slow line between two namespaces."""
    near, far = new_spaces(2)
    with open_spaces(near, far), changing([near, far]) as change:
        change(LINE)
        yield Ground(far.host, far.entered, near.entered)


async def measure(openers: dict[str, Opener]) -> list[Row]:
    """Measure round trips over a slow line, with the transports in turn."""
    trips_ms: dict[str, list[float]] = {name: [] for name in openers}
    with open_far() as ground:
        for _ in range(ROUNDS):
            for name, opener in openers.items():
                async with opener(ground) as (near, far):
                    await round_trips(near, far, BYTES, 2)
                    seconds = await round_trips(near, far, BYTES, TRIPS)
                trips_ms[name] += [second * 1e3 for second in seconds]
    return [Row.of(name, trips) for name, trips in trips_ms.items()]


def table(rows: list[Row]) -> str:
    """Format the rows as a table."""
    head = f"{BYTES // 1024} KiB there and back over {2e3 * LINE.delay_s:g} ms: added latency"
    lines = [head, "{:<18}{:>10}{:>10}{:>10}".format("transport", "p50 ms", "p90 ms", "most ms")]
    for row in rows:
        figures = row.p50_ms, row.p90_ms, row.most_ms
        lines.append(f"{row.transport:<18}" + "".join(f"{figure:>10.2f}" for figure in figures))
    return "\n".join(lines)


def missed(rows: list[Row]) -> list[str]:
    """List the rows that exceed `TARGET_MS`."""
    return [
        f"{row.transport} over {row.round_trip_ms:g} ms: {row.p50_ms:.2f} ms more,"
        f" {TARGET_MS:g} at most"
        for row in rows
        if row.p50_ms > TARGET_MS
    ]
