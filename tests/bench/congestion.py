"""Utilisation of a slow, lossy link by one connection, and the queueing delay that it causes.

``python -m tests.bench.congestion [--mbit 100,10] [--rtt 40] [--loss 0,0.5,1,3] [--queue 512,64]
[--size 5] [--seeds 3]``

It simulates QUIC connections of aioquic on a virtual clock, independent of the machine. A new
connection sends ``--size`` megabytes; its share is the bytes that arrive, from the start to the
last acknowledgement, relative to the capacity of the link in that time. The wait is the 95th
percentile of the queueing delay. Medians of the seeds.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from meshllm_quic.base.congestion import NAME
from tests.bench.report import Report, parser_of
from tests.plugins.quic.pipe import Pipe, TrafficShape

ALGORITHMS = ("reno", "cubic", NAME)
PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Row:
    """One controller on one link."""

    algorithm: str
    mbit: float
    rtt_ms: float
    loss_percent: float
    queue_kib: float
    megabytes: float
    share: float
    """Share of the link's capacity."""
    wait_ms: float


def measure(algorithm: str, link: Sequence[float], megabytes: float, seeds: int) -> Row:
    """Send over one kind of link, once per seed."""
    mbit, rtt_ms, loss, queue = link
    shares: list[float] = []
    waits: list[float] = []
    for seed in range(seeds):
        shape = TrafficShape(mbit * 1e6 / 8, rtt_ms / 2e3, loss / 100, int(queue * 1024))
        pipe = Pipe(shape, seed=seed)
        one, other = pipe.connect(algorithm)
        seconds = pipe.transfer(one, other, int(megabytes * 1e6), within_s=PATIENCE_S)
        shares.append(megabytes * 1e6 / seconds / shape.bytes_per_s)
        waits.append(statistics.quantiles(pipe.forth.waits, n=20)[-1] * 1e3)
    middle = statistics.median
    return Row(algorithm, mbit, rtt_ms, loss, queue, megabytes, middle(shares), middle(waits))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = parser_of("congestion", __doc__)
    parser.add_argument("--mbit", default="100,10", help="rates in Mbit/s, separated by commas")
    parser.add_argument("--rtt", default="40", help="round trips in milliseconds")
    parser.add_argument("--loss", default="0,0.5,1,3", help="lost datagrams in percent")
    parser.add_argument("--queue", default="512,64", help="queue before the link, in KiB")
    parser.add_argument("--size", type=float, default=5.0, help="what is sent, in MB")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    report = Report(options)
    texts = options.mbit, options.rtt, options.queue, options.loss
    rows: list[Row] = []
    for mbit, rtt, queue, loss in product(*map(_numbers, texts)):
        link = mbit, rtt, loss, queue
        new = [measure(name, link, options.size, options.seeds) for name in ALGORITHMS]
        report.say(*_lines(new, is_first=not rows))
        rows += new
    report.write(rows)
    return 0


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",") if number]


def _lines(rows: Sequence[Row], *, is_first: bool) -> Iterator[str]:
    line = ("{:>7} {:>7} {:>10} {:>7}" + " {:>16}" * len(rows)).format
    if is_first:
        yield line("Mbit/s", "RTT ms", "queue KiB", "loss %", *(row.algorithm for row in rows))
    cells = [f"{row.share:.0%} ({row.wait_ms:.0f} ms)" for row in rows]
    link = rows[0]
    numbers = link.mbit, link.rtt_ms, link.queue_kib, link.loss_percent
    yield line(*(f"{number:g}" for number in numbers), *cells)


if __name__ == "__main__":
    raise SystemExit(main())
