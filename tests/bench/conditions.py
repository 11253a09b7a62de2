"""What benchmarks beside peers share: the load of other programs, the machine, progress."""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from meshllm.bench.machine import commit, processor


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value below which a quarter of them are."""
    return sorted(values)[(len(values) - 1) // 4]


@contextmanager
def load_of_others() -> Iterator[list[float]]:
    """Yield a list that gets the cores which other programs used inside the block."""
    found: list[float] = []
    begin, used, own = time.perf_counter(), _busy_s(), _own_s()
    yield found
    spent = time.perf_counter() - begin
    if used is not None and (now := _busy_s()) is not None:
        found.append(max(0.0, now - used - (_own_s() - own)) / spent)


def conditions(options: Namespace, others: Sequence[float], **found: object) -> dict[str, object]:
    """Return what a table says about the machine and the model; ``others`` of `load_of_others`."""
    return {
        "processor": processor(),
        "commit": commit(),
        "others": round(others[0], 2) if others else None,
        **found,
        "model": options.model,
        "layers": options.layers,
    }


def _busy_s() -> float | None:
    """Return the seconds that all cores were busy since the start; None if unknown."""
    with suppress(OSError):
        fields = Path("/proc/stat").read_text("utf-8").split()[1:9]
        ticks = [int(each) for each in fields]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # idle and waiting
    return None


def _own_s() -> float:
    return sum(os.times()[:4])


def progress(text: str) -> None:
    """Tell on stderr what is done now."""
    print(text, file=sys.stderr, flush=True)
