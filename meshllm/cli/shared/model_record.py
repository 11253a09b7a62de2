"""What a command computed of a model, kept so that the next one need not import torch."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import meshllm
from meshllm.config import Settings, cache_path
from meshllm.errors import UserError
from meshllm.model.hardware import fingerprint, uses_cpu
from meshllm.model.json_cache import hash_code, load_cached, store_cached
from meshllm.model.locate import find_folder
from meshllm.strict_json import build, lay_out

T = TypeVar("T")

KEPT_S = 86_400.0
"""s; the fastest number of threads depends on what else runs on the machine, which changes."""

_SETTINGS = "device", "dtype", "quant", "threads", "exact"  # that such results depend on
_LIBRARIES = "torch", "transformers", "tokenizers", "safetensors", "llvmlite", "jinja2"


@dataclass(frozen=True, slots=True)
class _Stamped:
    at_s: float
    value: object


class ModelRecord:
    """The record of a command about a model, readable without torch.

    It is valid for a day, while nothing changes that it depends on: the files of the model, the
    settings, the code here, the installed libraries and the machine. Where a GPU may be used,
    nothing is kept: what is free of its memory, and whether its driver works, changes.
    """

    def __init__(self, command: str, model: str, chosen: Settings) -> None:
        """Take the state of all that the record depends on, before it is computed.

        Raises:
            ModelError: there is no such model.
        """
        self._is_kept = uses_cpu(chosen.device)
        folder = find_folder(model).resolve()
        self._key = (
            *("model record", command, model, str(folder)),
            *_states((*folder.glob("*"), *folder.glob("*/*"))),
            *(str(getattr(chosen, name)) for name in _SETTINGS),
            *(hash_code(Path(meshllm.__file__).parent), *map(version, _LIBRARIES)),
            *_states(path for name in _LIBRARIES for path in _modules_of(name)),
            *fingerprint(),
        )

    def read(self, kind: type[T]) -> T | None:
        """Return the record; None if there is none, or it is too old or damaged."""
        if not self._is_kept:
            return None
        with suppress(UserError):
            kept = build(_Stamped, load_cached(cache_path(), *self._key))
            if 0 <= time.time() - kept.at_s < KEPT_S:
                return build(kind, kept.value)
        return None

    def write(self, value: object) -> None:
        """Store a dataclass of JSON."""
        if self._is_kept:
            store_cached(cache_path(), lay_out(_Stamped(time.time(), lay_out(value))), *self._key)


def _modules_of(library: str) -> list[Path]:
    """Find the files that an import of a library reads first, without importing it."""
    spec = find_spec(library)
    if not (spec and spec.origin):
        return []
    origin = Path(spec.origin)
    return [origin, *origin.parent.glob("*.so"), *origin.parent.glob("lib/*")]


def _states(paths: Iterable[Path]) -> list[str]:
    """Return path, size, times of change and readability of each file that is there."""
    found = list[str]()
    for path in paths:
        with suppress(OSError):  # a link to nothing: what is missing may come
            status, is_readable = path.stat(), os.access(path, os.R_OK)
            times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
            found.append(f"{path} {status.st_size} {times} {is_readable}")
    return sorted(found)
