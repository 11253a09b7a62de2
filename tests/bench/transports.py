"""Round trips and throughput of the transports, relative to raw TCP in the same run.

``python -m tests.bench.transports [--transport NAME]... [--json FILE]``

``NAME+secure`` is a transport under `meshllm.node.net.secure`. For every row, both ends run in one
event loop of one process. ``tcp`` is the asyncio baseline for messages over 127.0.0.1: a length
prefix and a `BufferedProtocol`, without channels and limits. The transports take turns, so that a
busy machine slows all of them: compare the ratios, which are medians over the rounds. If the
machine can shape, a slow line follows, see `tests.bench.far`. The command fails if a row misses its
`TARGETS` or `far.TARGET_MS`.
"""

import asyncio
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Self

from meshllm.transport.registry import Registry
from tests.bench import far
from tests.bench.ends import HERE, SECURE, End, Opener, open_link, open_tcp, parts, round_trips
from tests.bench.report import Report, parser_of

ROUNDS = 10
TRIPS = {4 * 1024: 100, 64 * 1024: 50, 4 * 1024 * 1024: 4}
"""Message bytes: round trips per round."""
STREAM_BYTES = 32 * 1024 * 1024
"""Limit of the bytes sent one way per round; small messages are sent 1000 times."""
BASELINE = "tcp"


@dataclass(frozen=True, slots=True)
class Target:
    """Targets of a row, as ratios to the baseline of the same run."""

    message_bytes: int
    trip_ratio: float = float("inf")
    """Upper limit."""
    rate_ratio: float = 0.0
    """Lower limit."""


TARGETS = {
    "websocket" + SECURE: (
        Target(4 * 1024, trip_ratio=3.0),
        Target(4 * 1024 * 1024, rate_ratio=0.5),
    ),
    "quic": (
        Target(4 * 1024, trip_ratio=10.0),
        Target(64 * 1024, rate_ratio=0.12),
    ),
}


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one transport in one turn."""

    trips_s: list[float]
    bytes_per_s: float
    cpu_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Row:
    transport: str
    message_bytes: int
    p50_us: float
    p99_us: float
    trip_ratio: float
    """Round trip divided by the baseline's; lower is better."""
    megabytes_per_s: float
    rate_ratio: float
    """One-way rate divided by the baseline's; higher is better."""
    cpu_s_per_gb: float
    """CPU time of both ends, one way."""

    @classmethod
    def of(cls, name: str, size: int, mine: list[Round], base: list[Round]) -> Self:
        """Summarise the rounds of one transport, each relative to that of the baseline."""
        median = statistics.median
        trips = [trip for turn in mine for trip in turn.trips_s]
        pairs = list(zip(mine, base, strict=True))
        return cls(
            name,
            size,
            p50_us=median(trips) * 1e6,
            p99_us=statistics.quantiles(trips, n=100)[-1] * 1e6,
            trip_ratio=median(median(a.trips_s) / median(b.trips_s) for a, b in pairs),
            megabytes_per_s=median(turn.bytes_per_s for turn in mine) / 1e6,
            rate_ratio=median(a.bytes_per_s / b.bytes_per_s for a, b in pairs),
            cpu_s_per_gb=median(turn.cpu_s_per_byte for turn in mine) * 1e9,
        )


async def rate(near: End, far: End, size: int) -> tuple[float, float]:
    """Send messages one way; return bytes per second, and CPU seconds per byte."""
    times = min(1000, STREAM_BYTES // size)
    message = parts(size)

    async def send() -> None:
        for _ in range(times):
            await near.send(message)

    began, busy = perf_counter(), process_time()
    async with asyncio.TaskGroup() as group:
        group.create_task(send())
        for _ in range(times):
            await far.receive()
    sent = times * size
    return sent / (perf_counter() - began), (process_time() - busy) / sent


async def measure(openers: dict[str, Opener], size: int) -> list[Row]:
    """Measure all transports in turns with messages of one size."""
    rounds: dict[str, list[Round]] = {name: [] for name in openers}
    for _ in range(ROUNDS):
        for name, opener in openers.items():
            async with opener(HERE) as (near, far):
                await round_trips(near, far, size, 2)
                trips = await round_trips(near, far, size, TRIPS[size])
                rounds[name].append(Round(trips, *await rate(near, far, size)))
    return [Row.of(name, size, mine, rounds[BASELINE]) for name, mine in rounds.items()]


async def measure_all(openers: dict[str, Opener]) -> list[Row]:
    return [row for size in TRIPS for row in await measure(openers, size)]


def table(rows: list[Row]) -> str:
    """Format the rows as a table."""
    heads = ("transport", "KiB", "p50 us", "p99 us", "x tcp", "MB/s", "x tcp", "cpu s/GB")
    lines = ["{:<18}{:>6}{:>10}{:>10}{:>8}{:>10}{:>8}{:>10}".format(*heads)]
    for row in rows:
        trip = f"{row.p50_us:>10.1f}{row.p99_us:>10.1f}{row.trip_ratio:>8.2f}"
        speed = f"{row.megabytes_per_s:>10.0f}{row.rate_ratio:>8.2f}{row.cpu_s_per_gb:>10.2f}"
        lines.append(f"{row.transport:<18}{row.message_bytes // 1024:>6}{trip}{speed}")
    return "\n".join(lines)


def missed(rows: list[Row]) -> list[str]:
    """List the targets that the rows miss."""
    failures = []
    for row in rows:
        for target in TARGETS.get(row.transport, ()):
            if row.message_bytes != target.message_bytes:
                continue
            what = f"{row.transport} with messages of {row.message_bytes // 1024} KiB"
            if row.trip_ratio > target.trip_ratio:
                failures.append(f"{what}: {row.trip_ratio:.2f}x, {target.trip_ratio}x at most")
            if row.rate_ratio < target.rate_ratio:
                failures.append(f"{what}: {row.rate_ratio:.2f}x, {target.rate_ratio}x at least")
    return failures


def main() -> None:
    installed = [n + end for n in Registry.discover().names() for end in ("", SECURE)]
    parser = parser_of("transports", "Measure round trips and throughput of the transports.")
    parser.add_argument("--transport", action="append", choices=installed, metavar="NAME")
    arguments = parser.parse_args()
    report = Report(arguments)

    openers: dict[str, Opener] = {BASELINE: open_tcp}
    openers |= {name: partial(open_link, name) for name in arguments.transport or installed}
    rows = asyncio.run(measure_all(openers))
    report.say(table(rows))
    openers.pop("loopback", None)  # has no sockets
    openers.pop("loopback" + SECURE, None)
    far_rows: list[far.Row] = []
    if reason := far.reason():
        report.say(f"No slow line: {reason}")
    else:
        far_rows = asyncio.run(far.measure(openers))
        report.say("", far.table(far_rows))
    report.write(rows, far=[asdict(row) for row in far_rows])
    if failures := missed(rows) + far.missed(far_rows):
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
