"""What is measured once on a machine, to choose among kernels and ways to run them.

Measurements are stored with the processor and the versions of the libraries. What counts is CPU
time on one thread, which other programs change least.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import llvmlite
import torch

from meshllm.model.json_cache import load_cached, locked, store_cached
from meshllm.model.kernels import jit

Times = Mapping[str, float]
"""Seconds of each candidate."""


def measure_once(record: tuple[str, ...], name: str, measure: Callable[[], Times]) -> Times:
    """Return what ``measure`` returned when it was first asked for ``name`` on this machine.

    ``record`` is the key of the stored times, besides the processor and the versions.
    """
    folder = jit.private_folder()
    if folder is None:
        return measure()
    key = *record, torch.__version__, llvmlite.__version__, *jit.machine()
    with locked(folder, *key):  # of two processes, one measures
        known = _whole(load_cached(folder, *key))
        if name not in known:
            known[name] = measure()
            store_cached(folder, known, *key)
    return known[name]


def _whole(stored: object) -> dict[str, Times]:
    """Return what of a stored record has the seconds of candidates."""
    if not isinstance(stored, dict):
        return {}
    return {
        name: times
        for name, times in stored.items()
        if isinstance(times, dict)
        and times
        and all(isinstance(seconds, float) for seconds in times.values())
    }


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, whose CPU time is measured."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cpu_seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of this thread that a call takes."""
    begin = time.thread_time()
    run()
    return time.thread_time() - begin
