"""What is measured once on a machine, to choose among kernels and ways to run them.

Measurements are stored with the processor, the versions of the libraries and the number of threads:
several threads share the memory bandwidth, which can make another kernel the fastest. One thread is
measured by its CPU time, which other programs change least. This module imports no torch.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import inf

from meshllm.config import cache_path, library_environment
from meshllm.errors import UserError
from meshllm.model.hardware import cpu_kind
from meshllm.model.json_cache import load_cached, locked, store_cached
from meshllm.strict_json import build, lay_out

MOST = 512
"""Measurements that are kept, the latest ones."""

ENOUGH_S = 0.25
"""Seconds of rounds after which no further one begins: on a busy machine each takes long."""

_RECORD = "measured 2"  # another number if kernels, their names or their speed change
_CPU_LIMITS = (  # variables that hide instructions from torch and its libraries
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    "MKL_ENABLE_INSTRUCTIONS",  # not `MKL_CBWR`, which meshllm sets itself, see `warm_up_onemkl`
)

_LAST_S = 253_402_300_799  # Unix time of the end of 9999, the last year with a date

Times = Mapping[str, float]
"""Seconds of each candidate."""


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The times of some candidates, and which of them was chosen."""

    what: str
    shape: str
    threads: int
    best: str
    seconds: dict[str, float]
    at_s: float
    """When it was measured, in Unix time."""

    @property
    def gain(self) -> float:
        """The time of the best of the others, divided by that of the chosen one."""
        others = (seconds for name, seconds in self.seconds.items() if name != self.best)
        return min(others) / self.seconds[self.best]


def shortest(times: Times) -> str:
    """Choose the candidate with the shortest time."""
    return min(times, key=times.__getitem__)


def measure_once(
    what: str,
    shape: str,
    threads: int,
    measure: Callable[[], Times],
    choose: Callable[[Times], str] = shortest,
) -> KernelTimes:
    """Return what ``measure`` found when it was first called for this on this machine."""

    def known() -> KernelTimes | None:
        wanted = what, shape, threads
        same = (it for it in remembered() if (it.what, it.shape, it.threads) == wanted)
        return next(same, None)

    def measured() -> KernelTimes:
        times = dict(measure())
        return KernelTimes(what, shape, threads, choose(times), times, time.time())

    try:
        folder, key = cache_path(), _key()
    except PackageNotFoundError:  # the version of a library is unknown
        return measured()
    with locked(folder, *key, what):  # of two processes, one measures
        if found := known():
            return found
        found = measured()
        with locked(folder, *key):
            if earlier := known():  # files cannot be locked here, and another process measured
                return earlier
            store_cached(folder, lay_out((*remembered(), found)[-MOST:]), *key)
    return found


def remembered() -> tuple[KernelTimes, ...]:
    """Return all that was measured with this processor and these libraries; measure nothing."""
    # It may be damaged, or there is nothing, or a library is missing.
    with suppress(UserError, PackageNotFoundError, OverflowError):
        found = build(tuple[KernelTimes, ...], load_cached(cache_path(), *_key()))
        return tuple(each for each in found if _is_whole(each))
    return ()


def _is_whole(found: KernelTimes) -> bool:
    """Whether there are times to choose among, which a damaged record may lack."""
    times = found.seconds
    are_times = all(0 < each < inf for each in times.values())
    return are_times and found.best in times and len(times) > 1 and 0 < found.at_s < _LAST_S


def _key() -> tuple[str, ...]:
    limits = (each for each in library_environment() if each.partition("=")[0] in _CPU_LIMITS)
    return _RECORD, version("torch"), version("llvmlite"), *cpu_kind(), *limits


def rounds_in_time(most: int) -> Iterator[int]:
    """Count a round that compiles, one that counts, and more up to ``most`` within `ENOUGH_S`."""
    yield 0
    begin = time.perf_counter()
    for number in range(1, 1 + most):
        yield number
        if time.perf_counter() - begin > ENOUGH_S:
            return


def seconds_of(run: Callable[[], object], threads: int) -> float:
    """Return the CPU time of a call that runs on one thread; else the time that passes."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    begin = clock()
    run()
    return clock() - begin
