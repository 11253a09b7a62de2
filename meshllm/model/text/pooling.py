"""How a model makes one vector of the rows of a text, as its folder says.

The files are those of the sentence-transformers library: `modules.json` lists what follows the
model, and the config of its pooling is in a folder such as `1_Pooling`. Most have a flag for each
mode, the latest ones name it (`sentence_transformers/models/Pooling.py`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from meshllm.errors import ModelError
from meshllm.local_files import read_regular
from meshllm.model.locate import MAX_CONFIG_BYTES
from meshllm.model.text.generation_config import read_config


class PoolingMode(StrEnum):
    """Which rows become the vector, by its name in the config."""

    LAST = "lasttoken"
    MEAN = "mean"
    FIRST = "cls"


_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_MODES = {mode.value: mode for mode in PoolingMode}
MODULES = "modules.json"
POOLING_FOLDER = "1_Pooling"
"""Where nearly all models have the config of their pooling."""
POOLING_CONFIGS = "*_Pooling/config.json"
"""Where all have it, as a pattern."""

_SUPPORTED = {"Transformer", "Pooling", "Normalize"}
_FOLDER = re.compile("[0-9]{1,2}_Pooling")


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the rows after the final norm become one vector."""

    mode: PoolingMode = PoolingMode.LAST
    normalises: bool = True
    """To length 1."""
    obstacle: str = ""
    """Why it cannot be computed; empty if it can."""


LAST_ROW = Pooling()
"""The default: the last row attends to all others."""


def read_pooling(folder: Path) -> Pooling:
    """Read what the folder of a model says; `LAST_ROW` if it says nothing."""
    try:
        modules = _read_modules(folder / MODULES)
        if modules is None:
            return LAST_ROW
        inner = modules.get("Pooling", "")  # it becomes a path
        config = read_config(folder / inner / "config.json") if _FOLDER.fullmatch(inner) else {}
    except ModelError as error:
        return Pooling(obstacle=str(error))
    names = _names(config)
    obstacles = [f"a `{kind[:40]}` module" for kind in sorted(modules.keys() - _SUPPORTED)]
    if len(names) != 1 or names[0] not in _MODES:
        obstacles.append(f"pooling by `{'+'.join(names)[:80]}`")
    if obstacles:
        return Pooling(obstacle=f"The model needs {' and '.join(obstacles)}")
    return Pooling(_MODES[names[0]], "Normalize" in modules)


def _read_modules(path: Path) -> dict[str, str] | None:
    """Return the kinds of modules and the folder of each; None if there is no list."""
    try:
        listed = json.loads(read_regular(path, MAX_CONFIG_BYTES))
        return {str(each["type"]).rpartition(".")[2]: str(each["path"]) for each in listed}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ModelError(f"`{path}` is damaged") from error


def _names(config: Mapping[str, Any]) -> list[str]:
    """Return the modes that a config names; their vectors are concatenated."""
    match config.get("pooling_mode"):
        case str(name):
            return [name]
        case [*names]:
            return [str(name) for name in names]
    return [name for flag, name in _FLAGS.items() if config.get(flag) is True]
