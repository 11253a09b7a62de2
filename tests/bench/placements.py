"""Placements of random workloads against memory alone: ``python -m tests.bench.placements``.

Each workload has two or three models, two to four kinds of machines and random links, and loads
of 0.3 to 1.2 times what the placement by memory serves, but no model has more than 30 times as many
requests as another. Both placements get the same requests, which are not those that the placement
was chosen by, in four draws: near its capacity the queue of one draw says little. A ratio below 1
is a shorter mean time.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from meshllm.scheduler.load import sample
from meshllm.scheduler.schedule import assess, schedule
from tests.bench.report import Report, parser_of
from tests.builders.meshes import random_mesh

REQUESTS = 4000
SEEDS = 77, 78, 79, 80
"""Of the requests."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One workload."""

    seed: int
    machines: int
    models: int
    mean_s: float
    """Mean time of a request on the chosen placement."""
    by_memory_s: float
    """The same on the placement by memory."""

    @property
    def ratio(self) -> float:
        return self.mean_s / self.by_memory_s


def compare(seed: int) -> Compared:
    """Place one random workload, and simulate it on other requests."""
    where = random_mesh(seed)
    found = schedule(where)
    loads = [each.load for each in where.models]
    draws = [sample(loads, REQUESTS, seed=seed) for seed in SEEDS]
    ours, by_memory = (
        fmean(assess(where, each.replicas, draw).mean_s for draw in draws)
        for each in (found.best, found.proportional)
    )
    return Compared(seed, sum(where.counts), len(where.models), ours, by_memory)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = parser_of("placements", __doc__)
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    options = parser.parse_args(arguments)
    report, rows = Report(options), list[Compared]()
    report.say("seed  machines  models   request s  by memory    ratio")
    for seed in range(options.first, options.first + options.workloads):
        row = compare(seed)
        rows.append(row)
        report.say(
            f"{row.seed:>4}  {row.machines:>8}  {row.models:>6}  {row.mean_s:>10.2f}"
            f" {row.by_memory_s:>10.2f}  {row.ratio:>7.3f}"
        )
    ratios = [row.ratio for row in rows]
    better = sum(ratio < 1 for ratio in ratios) / len(ratios)
    report.say(
        f"faster on {better:.1%} of {len(rows)} workloads,"
        f" ratio {median(ratios):.3f} in the median and {max(ratios):.3f} at worst"
    )
    report.write(rows, better=better)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
