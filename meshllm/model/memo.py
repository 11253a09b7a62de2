"""Results kept in small files, so that they are not computed twice; knows not what they mean."""

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from blake3 import blake3

log = logging.getLogger(__name__)


def recall(folder: Path, *key: str | float) -> Any:
    """Return what was remembered under a key; None when it is missing or damaged."""
    try:
        return json.loads(_record(folder, key).read_bytes())
    except (OSError, ValueError):
        return None


def remember(folder: Path, value: Any, *key: str | float) -> None:
    """Write a value of JSON so that a reader sees all of it or nothing."""
    record = _record(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            json.dump(value, file)
        Path(file.name).replace(record)
    except OSError as error:
        log.info("`%s` is not kept: %s", record, error)


def _record(folder: Path, key: tuple[str | float, ...]) -> Path:
    return folder / f"{blake3(json.dumps(key).encode()).hexdigest(32)}.json"
