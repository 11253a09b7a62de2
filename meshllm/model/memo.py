"""Results kept in small files, so that they are not computed twice; knows not what they mean."""

import json
import logging
import os
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

UNUSED_S = 90 * 86_400.0
"""Seconds after which a record goes that was not read again."""
MOST = 4096
"""Records of a folder, of some hundred bytes to some thousand each; those used last stay."""

_DIGITS = 64  # of the name of a record, hexadecimal
_PART = ".part"  # ends the names of those that are being written

log = logging.getLogger(__name__)


def recall(folder: Path, *key: str | float) -> Any:
    """Return what was remembered under a key; None when it is missing or damaged."""
    record = _record(folder, key)
    with suppress(OSError):  # missing, or of somebody else: it counts as older than it is
        os.utime(record)
    try:
        return json.loads(record.read_bytes())
    except (OSError, ValueError):
        return None


def remember(folder: Path, value: Any, *key: str | float) -> None:
    """Write a value of JSON so that a reader sees all of it or nothing."""
    record, text = _record(folder, key), json.dumps(value)
    unfinished = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _prune(folder)
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=_PART, delete=False) as file:
            unfinished = Path(file.name)
            file.write(text)
        unfinished.replace(record)
    except OSError as error:
        log.info("`%s` is not kept: %s", record, error)
        if unfinished is not None:
            with suppress(OSError):
                unfinished.unlink()


@cache
def _prune(folder: Path) -> None:
    """Remove what was not used for long, once in a process and folder: all can be made again."""
    oldest = time.time() - UNUSED_S
    used = list[tuple[float, Path]]()
    for path in (*folder.glob(f"{'[0-9a-f]' * _DIGITS}.json"), *folder.glob(f"tmp*{_PART}")):
        with suppress(OSError):  # another process removes it, too
            used.append((path.stat().st_mtime, path))
    used.sort(reverse=True)
    for number, (at, path) in enumerate(used):
        if number >= MOST or at < oldest:
            with suppress(OSError):
                path.unlink()


def _record(folder: Path, key: tuple[str | float, ...]) -> Path:
    return folder / f"{blake3(json.dumps(key).encode()).hexdigest(_DIGITS // 2)}.json"
