"""What a model's `generation_config.json` recommends."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshllm.errors import ModelError
from meshllm.local_files import read_regular
from meshllm.model.locate import MAX_CONFIG_BYTES
from meshllm.request import MODEL_SAMPLING, RANGES


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one if the file is missing.

    Raises:
        ModelError: the file is damaged.
    """
    try:
        config = json.loads(read_regular(path, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"`{path}` is damaged") from error
    if not isinstance(config, dict):
        raise ModelError(f"`{path}` is damaged")
    return config


def recommended(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that a generation config sets, by name.

    Values out of range are ignored: no request would be accepted with them.
    Without `do_sample` the model is used greedily, as transformers does.
    """
    kinds = {name: int if name == "top_k" else int | float for name in MODEL_SAMPLING}
    given = {
        name: value
        for name, kind in kinds.items()
        if isinstance(value := config.get(name), kind)
        and not isinstance(value, bool)
        and RANGES[name][0] <= value <= RANGES[name][1]
    }
    if config.get("do_sample") is True:
        return {"temperature": 1.0, **given}
    return {name: value for name, value in given.items() if name == "repetition_penalty"}
