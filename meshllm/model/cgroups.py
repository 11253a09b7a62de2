"""The cgroups that limit this process: of a container, a unit or a batch job."""

import os
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
LISTED = Path("/proc/self/cgroup")

VERSION_2 = ""
"""Instead of a controller, as all of version 2 share their folders."""

_CPU_FILES = {VERSION_2: ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""By controller: the files with quota and period of a cgroup, in microseconds."""


def own_cgroups(controller: str, mount: Path = MOUNT) -> Iterator[Path]:
    """Yield the folder of our cgroup and of each one around it, whose limits bind, too.

    ``controller`` is one of version 1, or `VERSION_2`. A cgroup outside the mount, as a container
    may see it, is the mount.
    """
    inner = _paths().get(controller, Path())
    yield from (mount / controller / each for each in (inner, *inner.parents))


def cpu_quota(mount: Path = MOUNT) -> float:
    """Return how many cores may be busy all the time by the tightest limit; infinity without."""
    tightest = inf
    for controller, names in _CPU_FILES.items():
        for folder in own_cgroups(controller, mount):
            with suppress(OSError, ValueError):  # no limit, or not readable
                words = " ".join((folder / name).read_text() for name in names).split()
                quota, period = map(int, words)
                if quota > 0 and period > 0:  # -1 means unlimited
                    tightest = min(tightest, quota / period)
    return tightest


def _paths() -> dict[str, Path]:
    """Return our cgroup below the mount, by controller; one outside the mount is the mount."""
    found = dict[str, Path]()
    with suppress(OSError, ValueError):  # another system
        for line in os.fsdecode(LISTED.read_bytes()).splitlines():
            _, controllers, path = line.split(":", 2)
            inner = Path() if ".." in Path(path).parts else Path(path.lstrip("/"))
            found |= dict.fromkeys(controllers.split(","), inner)
    return found
