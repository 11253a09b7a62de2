"""Digests of the weights on this machine, by part of the model."""

import json
import mmap
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from meshllm.errors import DamagedFile, ModelError
from meshllm.local_files import check_regular, reason_of
from meshllm.model.files.loader import LENGTH_BYTES, MAX_HEADER_BYTES, list_weights, select
from meshllm.model.files.source import Source
from meshllm.model.json_cache import load_cached, locked, store_cached
from meshllm.model.pauses import pause
from meshllm.model.split.meta_model import MetaModel, build
from meshllm.names import Digest

PART_BYTES = 16

_INCIDENTAL = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a configuration about its origin and how it was run, not about the model."""


def manifest(source: Source, cache: Path) -> tuple[bytes, ...]:
    """Digest every layer, then embedding, head and configuration, 16 bytes each.

    The digest of a part is over its tensors as stored: names, dtypes, shapes and bytes; how they
    are divided over files does not matter. A part that is not completely on this machine is zeros.
    Digests are cached in the folder ``cache`` by path, size and modification time.

    Raises:
        ModelError: a weight file is damaged.
    """
    meta_model = build(source.config, torch.float32)
    weights = list_weights(source.folder)
    hashed = {file: file_digests(source.folder / file, cache) for file in set(weights.values())}
    parts: list[dict[str, str]] = [{} for _ in range(meta_model.layers + 2)]
    absent: set[int] = set()
    for name, place in select(meta_model, weights).items():
        part, digests = part_of(meta_model, place), hashed[weights[name]]
        if digests is None:
            absent.add(part)
        elif name not in digests:
            raise ModelError(f"Tensor `{name}` is not in `{source.folder / weights[name]}`")
        else:
            parts[part][name] = digests[name]
    return (
        *(
            bytes(PART_BYTES) if index in absent else part_digest(tensors)
            for index, tensors in enumerate(parts)
        ),
        config_digest(source)[:PART_BYTES],
    )


def part_digest(tensors: Mapping[str, str]) -> bytes:
    """Digest a part of a model from the digests of its tensors, by name."""
    whole = "".join(f"{name}\0{digest}\0" for name, digest in sorted(tensors.items()))
    return blake3(whole.encode()).digest(PART_BYTES)


def hash_files(source: Source, cache: Path) -> None:
    """Hash the weights ahead, in parallel to other work; `manifest` reports damaged files."""
    with suppress(ModelError):
        for file in set(list_weights(source.folder).values()):
            file_digests(source.folder / file, cache)


def config_digest(source: Source) -> Digest:
    """Hash the part of a configuration that defines the model, 32 bytes.

    Its location, its author and the stored dtype do not matter.
    """
    kept = _essential(source.config.to_diff_dict())
    return Digest(blake3(json.dumps(kept, sort_keys=True, default=str).encode()).digest())


def _essential(config: Any) -> Any:
    if not isinstance(config, Mapping):
        return config
    return {str(name): _essential(config[name]) for name in set(config) - _INCIDENTAL}


def part_of(meta_model: MetaModel, place: str) -> int:
    """Return the index of a tensor's part; tensors of several parts count to the embedding."""
    layers = f"{meta_model.structure.layers}."
    if place.startswith(layers):
        return int(place.removeprefix(layers).partition(".")[0])
    outputs = tuple(f"{module}." for module in meta_model.structure.outputs)
    return meta_model.layers + place.startswith(outputs)


def file_digests(path: Path, cache: Path) -> dict[str, str] | None:
    """Digest every tensor of a file: name -> hexadecimal; None if there is no such file.

    Raises:
        DamagedFile: its content is damaged.
        ModelError: it cannot be read.
    """
    try:
        path = path.resolve(strict=True)
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"`{path}` cannot be read: {reason_of(error)}") from error
    key = str(path), stat.st_size, stat.st_mtime_ns
    known: dict[str, str] | None = load_cached(cache, *key)
    if isinstance(known, dict):
        return known
    with locked(cache, *key, meanwhile=pause):
        known = load_cached(cache, *key)
        if not isinstance(known, dict):
            known = hash_tensors(path)
            store_cached(cache, known, *key)
    return known


def hash_tensors(path: Path) -> dict[str, str]:
    """Hash the tensors of a safetensors file in place, without a copy.

    Raises:
        DamagedFile: its content is damaged.
        ModelError: it cannot be read.
    """
    found = dict[str, str]()
    with _mapped(path) as data:
        for name, (kind, shape, start, stop) in _tensors(data):
            pause()
            found[name] = _digest(json.dumps([kind, shape]).encode(), memoryview(data)[start:stop])
    return found


def read_header(path: Path) -> dict[str, tuple[str, list[int], int, int]]:
    """Read dtype, shape, start and stop offset of each tensor of a safetensors file.

    Raises:
        DamagedFile: its content is damaged.
        ModelError: it is missing, or cannot be read.
    """
    with _mapped(path) as data:
        return dict(_tensors(data))


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        check_regular(path, sys.maxsize)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise ModelError(f"`{path}` cannot be read: {reason_of(error)}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"`{path}` is damaged: {error}", hint="fetch it again") from None


def _tensors(data: mmap.mmap) -> Iterator[tuple[str, tuple[str, list[int], int, int]]]:
    """Read the header: dtype, shape, start and stop offset of each tensor, by name.

    As safetensors, it takes no gap between tensors, and nothing after them.
    """
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    begin = LENGTH_BYTES + length
    ranges = list[tuple[int, int]]()
    for name, tensor in json.loads(data[LENGTH_BYTES:begin]).items():
        if name != "__metadata__":
            start, stop = (begin + offset for offset in tensor["data_offsets"])
            if not begin <= start <= stop <= len(data):
                raise ValueError(f"it ends before `{name}`")
            ranges.append((start, stop))
            yield name, (tensor["dtype"], tensor["shape"], start, stop)
    ranges.sort()
    if [begin, *(stop for _, stop in ranges)] != [*(start for start, _ in ranges), len(data)]:
        raise ValueError("its tensors have gaps, or do not end with it")


def _digest(kind: bytes, data: memoryview) -> str:
    with data:  # an open view would prevent closing the file
        return blake3(kind + b"\0").update(data).hexdigest(PART_BYTES)
