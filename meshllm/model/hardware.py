"""What is seen of this machine without torch: its CPU, whether torch may find a GPU or run code."""

import ctypes
import mmap
import os
import platform
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from meshllm.config import library_environment
from meshllm.model.cgroups import cpu_quota

DEVICES = Path("/dev")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_UNCACHED_BYTES = 64 << 20  # the last-level cache of most machines is smaller
_CPU_ONLY = "+cpu"  # ends the version of such a build of torch
_GPU_FILES = "nvidia*", "nvhost*", "nvmap", "dxg", "kfd"  # also of Jetson, WSL and ROCm
_CPU = frozenset(
    (
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),  # x86
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),  # Arm
        "Features",
    )
)
"""Lines of `/proc/cpuinfo` that identify the model of the CPU and its features."""


@cache
def uncached_bytes() -> int:
    """Return how many bytes no CPU cache holds: written, they evict what it held."""
    sizes = [_UNCACHED_BYTES]
    for file in CACHES.glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(2 * int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


@cache
def cpu_lines() -> tuple[str, ...]:
    """Return what describes the CPU to Linux; nothing if its features are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ()
    described = {line for line in lines if line.partition(":")[0].strip() in _CPU}
    if not any(line.startswith(("flags", "Features")) for line in described):
        return ()  # too little to tell CPUs apart
    return tuple(sorted(described))


def make_executable(memory: mmap.mmap) -> bool:
    """Make memory executable, and no longer writable; return whether the system allows it."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    place, size = ctypes.c_void_p(address), ctypes.c_size_t(len(memory))
    return not ctypes.CDLL(None).mprotect(place, size, mmap.PROT_READ | mmap.PROT_EXEC)


def allows_executable_memory() -> bool:
    """Whether memory can be made executable, which hardened systems forbid."""
    if os.name != "posix":
        return True
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        return make_executable(page)


def uses_cpu(wanted: str) -> bool:
    """Whether a device setting means the CPU, as far as that is certain without torch."""
    return wanted == "cpu" or (wanted == "auto" and not may_have_gpu())


def may_have_gpu() -> bool:
    """Whether torch may find a GPU: its build can use one, and the files of a driver are there."""
    is_there = any(any(DEVICES.glob(pattern)) for pattern in _GPU_FILES)
    return is_there and not version("torch").endswith(_CPU_ONLY)


def allowed_cores() -> int:
    """Count the cores on which this process may run, which a cpuset or `taskset` may limit."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def usable_cores() -> int:
    """Count the cores that this process may keep busy: a container or job may have a CPU quota.

    With more threads all of them would be stopped together, in the middle of a step, until the next
    period of the quota.
    """
    return max(1, int(min(allowed_cores(), cpu_quota())))


@cache
def fingerprint() -> tuple[str, ...]:
    """Return all that changes how the CPU of this machine is used, for keys of what is cached.

    It is as on the first call: libraries set variables for themselves when they are imported.
    """
    return (*cpu_kind(), str(usable_cores()), *library_environment())


def cpu_kind() -> tuple[str, ...]:
    """Return the kind of the CPU, and whether this process may compile kernels for it."""
    kind = platform.machine(), platform.processor(), *cpu_lines()
    return *kind, str(allows_executable_memory())
