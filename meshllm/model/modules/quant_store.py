"""On-disk cache of packed matrices, which are memory-mapped when they are loaded again.

A matrix is a safetensors file of bytes, so reading one runs no code. The file contains its key and
a hash of its contents, and is used only if both and every size are as expected, and if no other
user could have written it; otherwise the matrix is packed again. The hash is verified once, and
again if the size, time or inode of the file has changed; the rest is mapped and read only when it
is used. A file that was unused for `UNUSED_S` is evicted when a model is quantised: it can be made
again.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.local_files import is_own, make_private, replacing
from meshllm.model.files.loader import list_weights, open_file, select
from meshllm.model.files.manifest import file_digests
from meshllm.model.json_cache import load_cached, store_cached
from meshllm.model.modules.quant_matrix import Form, Packed
from meshllm.model.pages import prefer_huge_pages
from meshllm.model.split.meta_model import MetaModel

_NAME_DIGITS = 64  # hexadecimal digits of a file name
UNUSED_S = 30 * 86_400.0
"""Seconds after which an unread file is evicted."""
_TICK_NS = 2_000_000_000  # more than the granularity of file timestamps
ALIGNMENT = 64  # bytes; a vector register loads a cache line at once

log = logging.getLogger(__name__)


def digest_weights(meta_model: MetaModel, folder: Path, cache: Path) -> dict[str, str]:
    """Return digests, in hexadecimal, of the stored tensors of a stripped model, by parameter.

    Digests are cached in the folder ``cache``, so that the weights are read only once.

    Raises:
        ModelError: a file of weights is damaged.
    """
    weights = list_weights(folder)
    chosen = select(meta_model, weights)
    hashed = {file: file_digests(folder / file, cache) for file in {weights[n] for n in chosen}}
    found: dict[str, str] = {}
    for name, place in sorted(chosen.items()):  # several may be merged into one
        digest = (hashed[weights[name]] or {}).get(name)
        if digest is not None:
            found[place] = found.get(place, "") + digest
    return found


def load(folder: Path, key: str, form: Form) -> dict[str, Tensor] | None:
    """Map a packed matrix of a known form; None if it is missing or invalid."""
    path = _path(folder, key)
    if not is_own(path):
        return None
    try:
        stat = path.stat()
        with open_file(path) as file:
            about = file.metadata() or {}
            stored = {name: prefer_huge_pages(file.get_tensor(name)) for name in form}
    except (ModelError, SafetensorError, OSError) as error:
        log.info("`%s` is packed again: %s", path, error)
        return None
    verified = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    is_verified = load_cached(folder, "verified", key) == verified
    is_right = about.get("key") == key and _fits(stored, form)
    if not is_right or not (is_verified or about.get("hash") == _hash(stored)):
        log.info("`%s` is packed again: its key, size or hash does not match", path)
        return None
    if not is_verified and time.time_ns() - stat.st_mtime_ns >= _TICK_NS:
        store_cached(folder, verified, "verified", key)
    with suppress(OSError):  # another user's, or read-only: it may be evicted too early
        os.utime(path, ns=(time.time_ns(), stat.st_mtime_ns))
    return {
        name: stored[name][: _bytes(shape, dtype)].view(dtype).view(shape)
        for name, (shape, dtype) in form.items()
    }


def save(folder: Path, key: str, packed: Packed) -> None:
    """Write a packed matrix atomically; if that is not possible, log it."""
    path = _path(folder, key)
    stored = {name: _padded(tensor) for name, tensor in packed.items()}
    try:
        make_private(folder)
        with replacing(path) as file:
            file.write(_header(stored, {"key": key, "hash": _hash(stored)}))
            for tensor in stored.values():
                file.write(tensor.numpy().data)
            file.flush()
            os.fsync(file.fileno())  # or a crash leaves a file of the right size without its bytes
            now = time.time_ns()
            os.utime(file.fileno(), ns=(now, now - _TICK_NS))  # any later change has another time
    except OSError as error:
        log.info("`%s` is not cached: %s", path, error)


def evict(folder: Path) -> None:
    """Evict files unused for `UNUSED_S`; what a process has mapped stays until it ends."""
    oldest = time.time() - UNUSED_S
    for path in folder.glob(f"{'[0-9a-f]' * _NAME_DIGITS}.safetensors"):
        with suppress(OSError):  # another process may have removed it
            stat = path.stat()
            if max(stat.st_atime, stat.st_mtime) < oldest:
                path.unlink()
                log.info("`%s` evicted: unused for %d days", path, UNUSED_S // 86_400)


def _path(folder: Path, key: str) -> Path:
    return folder / f"{blake3(key.encode()).hexdigest(_NAME_DIGITS // 2)}.safetensors"


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize


def _fits(stored: Mapping[str, Tensor], form: Form) -> bool:
    """Whether the stored tensors have exactly the bytes of a form."""
    return all(
        stored[name].dtype is torch.uint8 and stored[name].shape == (_ceil(_bytes(shape, dtype)),)
        for name, (shape, dtype) in form.items()
    )


def _ceil(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, padded to whole cache lines."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    missing = _ceil(len(flat)) - len(flat)
    return torch.cat((flat, flat.new_zeros(missing))) if missing else flat


def _hash(stored: Mapping[str, Tensor]) -> str:
    hasher = blake3()
    for name in sorted(stored):
        hasher.update(stored[name].numpy().data)
    return hasher.hexdigest()


def _header(stored: Mapping[str, Tensor], about: dict[str, str]) -> bytes:
    """Return the header of a safetensors file; trailing spaces, which are valid, align tensors."""
    entries: dict[str, object] = {"__metadata__": about}
    begin = 0
    for name, tensor in stored.items():
        stop = begin + len(tensor)
        entries[name] = {"dtype": "U8", "shape": [len(tensor)], "data_offsets": [begin, stop]}
        begin = stop
    text = json.dumps(entries).encode()
    text = text.ljust(_ceil(len(text) + 8) - 8)
    return len(text).to_bytes(8, "little") + text
