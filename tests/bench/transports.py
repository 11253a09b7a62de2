"""How fast messages go round and through, beside raw TCP in the same run.

``python -m tests.bench.transports [--transport NAME]... [--json FILE]``

Both ends run in one event loop of one process, for every row alike. ``tcp`` is the least that
asyncio can do for messages over 127.0.0.1: a length and a `BufferedProtocol`, no channels and no
limits. The transports take turns, so that a busy machine slows all of them: compare the ratios.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

from meshllm.transport.contract import Buffer
from meshllm.transport.registry import Registry

ROUNDS = 10
TRIPS = {4 * 1024: 100, 64 * 1024: 50, 4 * 1024 * 1024: 4}
"""Message bytes: round trips in one round."""
STREAM_BYTES = 32 * 1024 * 1024
"""Sent one way in one round, at most; small messages are sent 1000 times."""
HEADER_BYTES = 64
BASELINE = "tcp"


class End(Protocol):
    """What of a link is measured."""

    async def send(self, message: Sequence[Buffer]) -> None: ...

    async def receive(self) -> tuple[object, Buffer]: ...


Opener = Callable[[], AbstractAsyncContextManager[tuple[End, End]]]


@dataclass(frozen=True, slots=True)
class Row:
    transport: str
    message_bytes: int
    p50_us: float
    p99_us: float
    trip_ratio: float
    """Median round trip, over that of the baseline: less is better."""
    megabytes_per_s: float
    rate_ratio: float
    """Median rate one way, over that of the baseline: more is better."""


class Wire(asyncio.BufferedProtocol):
    """Messages over TCP, received into a buffer of their own size."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[tuple[None, bytearray]] = asyncio.Queue()
        self.writable = asyncio.Event()
        self.header, self.body = bytearray(4), bytearray()
        self.position = 0  # in the header while the body is empty

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=1024 * 1024)
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.body or self.header)[self.position :]

    def buffer_updated(self, nbytes: int) -> None:
        self.position += nbytes
        if self.position < len(self.body or self.header):
            return
        self.position = 0
        if self.body:
            self.arrived.put_nowait((None, self.body))
            self.body = bytearray()
        else:
            self.body = bytearray(int.from_bytes(self.header, "big"))

    async def send(self, message: Sequence[Buffer]) -> None:
        self.transport.writelines([sum(map(len, message)).to_bytes(4, "big"), *message])
        await self.writable.wait()

    async def receive(self) -> tuple[None, bytearray]:
        return await self.arrived.get()


@asynccontextmanager
async def open_tcp() -> AsyncIterator[tuple[End, End]]:
    loop = asyncio.get_running_loop()
    far = Wire()
    async with await loop.create_server(lambda: far, "127.0.0.1", 0) as server:
        _, near = await loop.create_connection(Wire, *server.sockets[0].getsockname())
        await far.writable.wait()
        yield near, far
        near.transport.close()


@asynccontextmanager
async def open_link(name: str) -> AsyncIterator[tuple[End, End]]:
    transport = Registry.discover().load(name)
    async with transport.listen() as listener:
        arrivals = aiter(listener.links())
        near, far = await asyncio.gather(transport.dial(listener.address), anext(arrivals))
        yield near, far
        await near.close()
        await far.close()


def parts(size: int) -> list[bytes]:
    """Make a message as a ring sends it: a header and a tensor, not yet one string."""
    return [bytes(HEADER_BYTES), bytes(size - HEADER_BYTES)]


async def round_trips(near: End, far: End, size: int, times: int) -> list[float]:
    """Send a message there and back; return the seconds of each trip."""

    async def echo() -> None:
        for _ in range(times):
            message = memoryview((await far.receive())[1])
            await far.send([message[:HEADER_BYTES], message[HEADER_BYTES:]])

    message, seconds = parts(size), []
    async with asyncio.TaskGroup() as group:
        group.create_task(echo())
        for _ in range(times):
            began = perf_counter()
            await near.send(message)
            await near.receive()
            seconds.append(perf_counter() - began)
    return seconds


async def rate(near: End, far: End, size: int) -> float:
    """Send messages one way; return bytes per second until the last has arrived."""
    times = min(1000, STREAM_BYTES // size)
    message = parts(size)

    async def send() -> None:
        for _ in range(times):
            await near.send(message)

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        for _ in range(times):
            await far.receive()
    return times * size / (perf_counter() - began)


async def measure(openers: dict[str, Opener], size: int) -> list[Row]:
    """Measure all transports in turn with messages of one size."""
    trips: dict[str, list[float]] = {name: [] for name in openers}
    rates: dict[str, list[float]] = {name: [] for name in openers}
    for _ in range(ROUNDS):
        for name, opener in openers.items():
            async with opener() as (near, far):
                await round_trips(near, far, size, 2)
                trips[name] += await round_trips(near, far, size, TRIPS[size])
                rates[name].append(await rate(near, far, size))

    base_trip = statistics.median(trips[BASELINE])
    base_rate = statistics.median(rates[BASELINE])
    rows = []
    for name in openers:
        trip, speed = statistics.median(trips[name]), statistics.median(rates[name])
        last = statistics.quantiles(trips[name], n=100)[-1]
        ratios = trip / base_trip, speed / base_rate
        rows.append(Row(name, size, trip * 1e6, last * 1e6, ratios[0], speed / 1e6, ratios[1]))
    return rows


async def measure_all(openers: dict[str, Opener]) -> list[Row]:
    return [row for size in TRIPS for row in await measure(openers, size)]


def table(rows: list[Row]) -> str:
    """Lay the rows out for a terminal."""
    heads = ("transport", "KiB", "p50 us", "p99 us", "x tcp", "MB/s", "x tcp")
    lines = ["{:<12}{:>6}{:>10}{:>10}{:>8}{:>10}{:>8}".format(*heads)]
    for row in rows:
        trip = f"{row.p50_us:>10.1f}{row.p99_us:>10.1f}{row.trip_ratio:>8.2f}"
        speed = f"{row.megabytes_per_s:>10.0f}{row.rate_ratio:>8.2f}"
        lines.append(f"{row.transport:<12}{row.message_bytes // 1024:>6}{trip}{speed}")
    return "\n".join(lines)


def main() -> None:
    installed = Registry.discover().names()
    parser = argparse.ArgumentParser(description="How fast messages go round and through.")
    parser.add_argument("--transport", action="append", choices=installed, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()

    openers: dict[str, Opener] = {BASELINE: open_tcp}
    openers |= {name: partial(open_link, name) for name in arguments.transport or installed}
    rows = asyncio.run(measure_all(openers))

    print(table(rows))
    if arguments.json:
        machine = {"python": platform.python_version(), "system": platform.platform()}
        report = {**machine, "cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
