"""How fast messages go round and through, beside raw TCP in the same run.

``python -m tests.bench.transports [--transport NAME]... [--json FILE]``

``NAME+secure`` is a transport under `meshllm.node.net.secure`. Both ends run in one event loop of
one process, for every row alike. ``tcp`` is the least that asyncio can do for messages over
127.0.0.1: a length and a `BufferedProtocol`, no channels and no limits. The transports take turns,
so that a busy machine slows all of them: compare the ratios, each the median of those of the
rounds. Where the machine can, the ends are then put at a slow line, see `tests.bench.far`. The
command fails when a row misses what `TARGETS` asks of it, or `far.TARGET_MS`.
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
"""Message bytes: round trips in one round."""
STREAM_BYTES = 32 * 1024 * 1024
"""Sent one way in one round, at most; small messages are sent 1000 times."""
BASELINE = "tcp"


@dataclass(frozen=True, slots=True)
class Target:
    """What a row is to reach, as ratios to the baseline of the same run."""

    message_bytes: int
    trip_ratio: float = float("inf")
    """At most."""
    rate_ratio: float = 0.0
    """At least."""


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
    """What one transport did in one of its turns."""

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
    """Round trip over that of the baseline: less is better."""
    megabytes_per_s: float
    rate_ratio: float
    """Rate one way over that of the baseline: more is better."""
    cpu_s_per_gb: float
    """Of both ends, one way."""

    @classmethod
    def of(cls, name: str, size: int, mine: list[Round], base: list[Round]) -> Self:
        """Sum up the rounds of one transport, each beside that of the baseline."""
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
    """Send messages one way; return bytes per second, and seconds of processor per byte."""
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
    """Measure all transports in turn with messages of one size."""
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
    """Lay the rows out for a terminal."""
    heads = ("transport", "KiB", "p50 us", "p99 us", "x tcp", "MB/s", "x tcp", "cpu s/GB")
    lines = ["{:<18}{:>6}{:>10}{:>10}{:>8}{:>10}{:>8}{:>10}".format(*heads)]
    for row in rows:
        trip = f"{row.p50_us:>10.1f}{row.p99_us:>10.1f}{row.trip_ratio:>8.2f}"
        speed = f"{row.megabytes_per_s:>10.0f}{row.rate_ratio:>8.2f}{row.cpu_s_per_gb:>10.2f}"
        lines.append(f"{row.transport:<18}{row.message_bytes // 1024:>6}{trip}{speed}")
    return "\n".join(lines)


def missed(rows: list[Row]) -> list[str]:
    """Name the targets that the rows miss."""
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
    parser = parser_of("transports", "How fast messages go round and through.")
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
