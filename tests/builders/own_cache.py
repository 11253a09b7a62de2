"""A cache folder without the weights that were fetched, as on a machine of its own."""

import shutil
from pathlib import Path

from meshllm.config import cache_path


def own_cache(folder: Path) -> str:
    """Create the folder ``cache`` below a folder, unless it exists; return `XDG_CACHE_HOME`.

    It has what was measured and compiled on this machine.
    """
    cache, shared = folder / "cache", cache_path()
    left_out = shutil.ignore_patterns("weights", "*.part")  # parts are still being written
    if not cache.exists() and shared.exists():
        shutil.copytree(shared, cache / shared.name, ignore=left_out)
    return str(cache)
