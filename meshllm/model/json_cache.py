"""On-disk cache of small JSON results, with locks so that processes do not compute one twice."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from meshllm.local_files import make_private, open_own, read_own, replacing, try_lock

UNUSED_S = 90 * 86_400.0
"""Seconds after which an unused record is evicted."""
MAX_RECORD_BYTES = 256 << 20  # machine code and digests have some MiB
MOST = 4096
"""Records per folder, of some hundred to some thousand bytes; the least recently used go."""

WAIT_S = 60.0
"""Seconds to wait for another process that computes the same record."""

_CODE = ".py", ".json", ".toml"
_DIGITS = 64  # of a record's file name, hexadecimal
_LOCK = ".lock"
_POLL_S = 0.02
_PART = ".part"  # suffix of files being written

log = logging.getLogger(__name__)


def load_cached(folder: Path, *key: str | float) -> Any:
    """Return the value stored under a key; None if it is missing, damaged, or another user's."""
    record = _record(folder, key)
    with suppress(OSError):  # missing, or owned by another user
        os.utime(record)
    try:
        return json.loads(read_own(record, MAX_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def store_cached(folder: Path, value: Any, *key: str | float) -> None:
    """Store a JSON value under a key, atomically; an error is only logged."""
    record, text = _record(folder, key), json.dumps(value)
    try:
        make_private(folder)
        _prune(folder)
        with replacing(record, suffix=_PART) as file:
            file.write(text.encode())
    except OSError as error:
        log.info("cannot write `%s`: %s", record, error)


def model_code() -> str:
    """Hash the code of `meshllm.model`, for keys of what was tested: a checkout has one version."""
    return hash_code(Path(__file__).parent)


@cache
def hash_code(root: Path) -> str:
    """Hash the modules of a package, and its tables, which hold what was found of models."""
    paths = [each for each in root.rglob("*") if each.suffix in _CODE]
    files = [(str(each.relative_to(root)), each.read_bytes()) for each in paths]
    return blake3(repr(sorted(files)).encode()).hexdigest(16)


@contextmanager
def locked(
    folder: Path, *key: str | float, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock of a key; call `load_cached` again inside: another process may have stored it.

    After `WAIT_S`, and if files cannot be locked, both processes compute the value. While waiting,
    ``meanwhile`` is called again and again. It must not be `pause` where a forward may be running.
    """
    lock = _record(folder, key).with_suffix(_LOCK)
    with ExitStack() as stack:
        try:
            make_private(folder)
            file = stack.enter_context(os.fdopen(open_own(lock, 0), "wb"))
        except OSError as error:
            log.info("cannot lock `%s`: %s", lock, error)
        else:
            _wait_for(file.fileno(), meanwhile)
        yield


def _wait_for(file: int, meanwhile: Callable[[], None]) -> None:
    """Wait `WAIT_S` at most for a lock, on the compute thread: `flock` itself has no time limit."""
    until = time.monotonic() + WAIT_S
    while not try_lock(file) and time.monotonic() <= until:
        meanwhile()
        time.sleep(_POLL_S)


@cache
def _prune(folder: Path) -> None:
    """Evict old records, once per process and folder: all can be computed again."""
    oldest = time.time() - UNUSED_S
    used = list[tuple[float, Path]]()
    names = f"{'[0-9a-f]' * _DIGITS}.json", f"{'[0-9a-f]' * _DIGITS}{_LOCK}", f"tmp*{_PART}"
    for path in (each for name in names for each in folder.glob(name)):
        with suppress(OSError):  # another process removed it
            used.append((path.stat().st_mtime, path))
    used.sort(reverse=True)
    for number, (at, path) in enumerate(used):
        if number >= MOST or at < oldest:
            with suppress(OSError):
                path.unlink()


def _record(folder: Path, key: tuple[str | float, ...]) -> Path:
    return folder / f"{blake3(json.dumps(key).encode()).hexdigest(_DIGITS // 2)}.json"
