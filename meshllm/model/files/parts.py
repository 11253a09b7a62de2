"""A model in parts, as nodes send it to each other: small files, and one file for each part.

Parts are those of `manifest`: the layers, then embedding and head. The file of a part has the
safetensors format, with tensors in order of their names: the same bytes on every node that has it,
whatever files they are stored in. A folder of parts is a model folder like any other.
"""

import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import torch

from meshllm.errors import DamagedFile, ModelError, PeerFault, UserError
from meshllm.json_shape import check_shape
from meshllm.local_files import (
    check_regular,
    check_within,
    make_private,
    open_own,
    read_regular,
    try_lock,
)
from meshllm.model.files.loader import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    MAX_TENSORS,
    list_weights,
    select,
)
from meshllm.model.files.manifest import (
    file_digests,
    hash_tensors,
    part_digest,
    part_of,
    read_header,
)
from meshllm.model.files.source import Source, stored_dtype
from meshllm.model.locate import CONFIG, INDEX
from meshllm.model.split.meta_model import build
from meshllm.model.text.pooling import MODULES, POOLING_FOLDER

LISTING = "listing"
SMALL_NAMES = frozenset(
    {
        CONFIG,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
        MODULES,
        f"{POOLING_FOLDER}/{CONFIG}",
    }
)
"""The only files that are sent beside weights: names of a peer never become paths."""
MAX_SENT_BYTES = 64 << 20  # of each; the largest tokenizers have 30 MiB
FREE_BYTES = 1 << 30  # of the disk that fetched weights leave free
KEPT_S = 7 * 86_400.0
"""Seconds for which a part that was set aside is kept, even if its replacement is set aside."""

_ALIGNED = 8  # bytes; data begins at a multiple, as the safetensors library writes it
_PARTIAL = ".partial"
_KEPT = ".kept"  # suffix of parts that were set aside
_LOCK = "lock"
_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64"})


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file that is put together from ranges of others, without a copy on disk."""

    header: bytes
    ranges: tuple[tuple[Path, int, int], ...]
    """Path, start and stop of each range after the header."""

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(stop - start for _, start, stop in self.ranges)

    def read(self, offset: int, count: int) -> bytes:
        """Read up to ``count`` bytes; fewer only at the end.

        Raises:
            ModelError: a file was changed or removed meanwhile.
        """
        found = bytearray(self.header[offset : offset + count])
        at = len(self.header)
        for path, start, stop in self.ranges:
            begin = max(start, start + offset + len(found) - at)
            if begin < stop and (left := count - len(found)):
                found += _read_range(path, begin, min(stop, begin + left))
            at += stop - start
        return bytes(found)


class ModelParts:
    """The parts of a model that are on this machine."""

    def __init__(self, source: Source) -> None:
        """Read the headers of the weights.

        Raises:
            ModelError: they are damaged.
        """
        meta_model = build(source.config, torch.float32)
        self._folder = source.folder
        self._files = list_weights(source.folder)
        places = select(meta_model, self._files)
        self._parts = {name: part_of(meta_model, place) for name, place in sorted(places.items())}
        self._count = meta_model.layers + 2
        self._dtype = str(stored_dtype(source)).removeprefix("torch.")
        self._opened: dict[str, PartFile] = {}

    def listing(self) -> PartFile:
        """Describe the model: small files, the part of each tensor, and the stored dtype."""
        small = [name for name in sorted(SMALL_NAMES) if self._is_sent(name)]
        found = {"files": small, "weights": self._parts, "dtype": self._dtype}
        return PartFile(json.dumps(found, separators=(",", ":")).encode(), ())

    def open(self, name: str) -> PartFile:
        """Open the listing, a small file, or the file of a part.

        Raises:
            ModelError: it is not on this machine.
        """
        if name == LISTING:
            return self.listing()
        if name not in self._opened:
            self._opened[name] = self._small(name) if name in SMALL_NAMES else self._part(name)
        return self._opened[name]

    def _small(self, name: str) -> PartFile:
        if not self._is_sent(name):
            raise ModelError(f"There is no file `{name}` here")
        path = self._folder / name
        return PartFile(b"", ((path, 0, path.stat().st_size),))

    def _is_sent(self, name: str) -> bool:
        path = self._folder / name
        try:
            check_regular(path, MAX_SENT_BYTES)
            check_within(path, self._folder)
        except OSError:
            return False
        return True

    def _part(self, name: str) -> PartFile:
        part = next((at for at in range(self._count) if part_name(at) == name), None)
        if part is None:
            raise ModelError("There is no such file")
        tensors = [tensor for tensor, number in self._parts.items() if number == part]
        stored = {
            file: read_header(self._folder / file)
            for file in {self._files[tensor] for tensor in tensors}
        }
        ranges, fields, at = [], {}, 0
        for tensor in tensors:
            file = self._files[tensor]
            kind, shape, start, stop = stored[file][tensor]
            ranges.append((self._folder / file, start, stop))
            size = stop - start
            fields[tensor] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        return PartFile(len(text).to_bytes(LENGTH_BYTES, "little") + text, tuple(ranges))


@dataclass(frozen=True, slots=True)
class Listing:
    """What a peer says of a model, checked."""

    files: tuple[str, ...]
    weights: Mapping[str, int]
    """The part of each tensor."""
    dtype: str

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Parse a listing; raise `PeerFault` if it is malformed."""
        try:
            check_shape(data, values=4 * MAX_TENSORS)
            found = json.loads(data)
            files, weights, dtype = found["files"], found["weights"], found["dtype"]
            is_right = (
                CONFIG in files
                and SMALL_NAMES.issuperset(files)
                and len(weights) <= MAX_TENSORS
                and all(type(part) is int and 0 <= part < 1 << 12 for part in weights.values())
                and dtype in _DTYPES
            )
        except (UserError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            is_right = False
        if not is_right:
            raise PeerFault("The listing of a model is malformed")
        return cls(tuple(sorted(set(files))), weights, dtype)


class PartFolder:
    """A folder with the parts of a model that the nodes of this user have fetched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def is_described(self) -> bool:
        """Whether the small files are complete: the index, which is written last, is whole."""
        try:
            found = (self.folder / INDEX).stat()
            _check_index(self.folder, found.st_mtime_ns, found.st_size)
        except (OSError, ModelError):
            return False
        return True

    def prepare(self) -> None:
        """Create the folder; raise `ModelError` if it cannot be written."""
        try:
            make_private(self.folder / POOLING_FOLDER)
            make_private(self.folder)
        except OSError as error:
            raise ModelError(f"`{self.folder}` cannot be written: {error.strerror}") from None

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Try to lock the folder for this process; give whether that is so.

        Raises:
            ModelError: the folder cannot be written.
        """
        try:
            lock = open_own(self.folder / _LOCK, 0)
        except OSError as error:
            raise ModelError(f"`{self.folder}` cannot be written: {error.strerror}") from None
        with os.fdopen(lock, "wb") as file:
            yield try_lock(file.fileno())

    def has(self, part: int) -> bool:
        """Return whether a part is in its place."""
        return (self.folder / part_name(part)).is_file()

    def partial(self, name: str) -> Path:
        """Return where a file is collected until it is whole."""
        return self.folder / f"{name}{_PARTIAL}"

    def has_begun(self, name: str) -> bool:
        """Return whether an earlier attempt to collect a file left some bytes."""
        path = self.partial(name)
        return path.is_file() and path.stat().st_size > 0

    def finish(self, name: str) -> None:
        """Put a whole file in its place."""
        self.partial(name).replace(self.folder / name)

    def remove_unlisted(self, listing: Listing) -> None:
        """Delete the small files that are not in a listing: a holder that failed sent them."""
        for name in SMALL_NAMES.difference(listing.files):
            (self.folder / name).unlink(missing_ok=True)

    def describe(self, name: str, listing: Listing) -> None:
        """Write the index, which says which file holds which tensor, and the name of the model."""
        self._name_dtype(listing.dtype)
        files = {tensor: part_name(part) for tensor, part in listing.weights.items()}
        self.partial(INDEX).write_text(
            json.dumps({"metadata": {"name": name}, "weight_map": files})
        )
        for each in (*(self.folder / file for file in listing.files), self.partial(INDEX)):
            _sync(each)
        self.finish(INDEX)

    def _name_dtype(self, dtype: str) -> None:
        """Name the dtype in the config, since there may be no weights to read it from."""
        path = self.folder / CONFIG
        config = json.loads(read_regular(path, MAX_SENT_BYTES))
        if not (config.get("dtype") or config.get("torch_dtype")):
            path.write_text(json.dumps(config | {"dtype": dtype}))

    def verify(self, part: int, digest: bytes) -> None:
        """Put a collected part in its place if it has the digest, else delete it.

        Raises:
            PeerFault: it has another digest, or is damaged.
            ModelError: it cannot be read.
        """
        name = part_name(part)
        path = self.partial(name)
        if self._digest(path, name) != digest:
            path.unlink(missing_ok=True)
            raise PeerFault(f"The weights of part {part} lack the digest of the mesh")
        _sync(path)
        self.finish(name)

    def _digest(self, path: Path, name: str) -> bytes:
        """Return the digest of a file of the part with this name; empty if it is damaged."""
        files = list_weights(self.folder)
        try:
            hashed = hash_tensors(path)
            own = [tensor for tensor, file in files.items() if file == name]
            return part_digest({tensor: hashed[tensor] for tensor in own})
        except (DamagedFile, LookupError):
            return b""

    def set_aside(self, parts: Mapping[int, bytes]) -> None:
        """Take parts that lack the given digest out of their place, under the lock of the folder.

        A copy that has the digest is put back instead. Else what is taken out is kept until its
        space is needed: the weights that replace it may be damaged ones. Of several changes within
        `KEPT_S` the copy from before the first is kept: a disk that fails damages a file more than
        once.
        """
        for part, digest in parts.items():
            path, kept = self.folder / part_name(part), self._kept(part)
            if self._put_back(part, digest):
                continue
            if kept.is_file() and time.time() - kept.stat().st_mtime < KEPT_S:
                path.unlink(missing_ok=True)
            elif path.is_file():
                os.utime(path)
                path.replace(kept)

    def restore(self, part: int, digest: bytes) -> None:
        """Put a part back that was set aside, if it has the digest and its place is free."""
        if not self.has(part):
            self._put_back(part, digest)

    def _put_back(self, part: int, digest: bytes) -> bool:
        """Put a part that was set aside in its place if it has the digest; return whether so."""
        name, kept = part_name(part), self._kept(part)
        with suppress(ModelError):  # it cannot be read now, and is fetched instead
            if kept.is_file() and self._digest(kept, name) == digest:
                kept.replace(self.folder / name)
                return True
        return False

    def _kept(self, part: int) -> Path:
        return self.folder / f"{part_name(part)}{_KEPT}"

    def damaged(self, cache: Path) -> list[str]:
        """Return the names of the parts in their place that are damaged, or lack a tensor.

        What others have hashed before is in the folder ``cache``, see `manifest`.

        Raises:
            ModelError: a part cannot be read, which says nothing of its content.
        """
        tensors = defaultdict[str, set[str]](set)
        for tensor, name in list_weights(self.folder).items():
            tensors[name].add(tensor)
        return [name for name in sorted(tensors) if self._is_damaged(name, tensors[name], cache)]

    def _is_damaged(self, name: str, tensors: set[str], cache: Path) -> bool:
        try:
            found = file_digests(self.folder / name, cache)
        except DamagedFile:
            return True
        return found is not None and not tensors <= found.keys()

    def remove_damaged(self, cache: Path) -> list[str]:
        """Delete the parts that are damaged, under the lock of the folder; return their names."""
        damaged = self.damaged(cache)
        for name in damaged:
            (self.folder / name).unlink(missing_ok=True)
        return damaged

    def check_space(self, more: int) -> None:
        """Raise `ModelError` if the disk lacks room for this many bytes more.

        Parts that were set aside, of any model, make room, the oldest first, if that is enough:
        ``more`` is a claim of a peer.
        """
        free, kept = self._free_bytes(), self._all_kept()
        room = free + sum(size for _, size, _ in kept)
        for _, _, path in kept:
            if free < more <= room:
                path.unlink(missing_ok=True)
                free = self._free_bytes()
        if more > free:
            raise ModelError(
                f"This node has too little space: the disk of `{self.folder}` has"
                f" {max(0, free)} bytes left, but {more} are needed",
                hint="free some space, or set `XDG_CACHE_HOME` to a folder on a larger disk",
            )

    def _all_kept(self) -> list[tuple[int, int, Path]]:
        """Return when each part of any model was set aside, its bytes and path, oldest first."""
        found = []
        for path in self.folder.parent.glob(f"*/*{_KEPT}"):
            with suppress(FileNotFoundError):  # another node of this user may need it
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        return sorted(found)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free - FREE_BYTES


def most_bytes(source: Source) -> list[int]:
    """Return the most bytes that the file of each part can have: all values in 8 bytes."""
    meta_model = build(source.config, torch.float32)
    sizes = [0] * (meta_model.layers + 2)
    for place, tensor in meta_model.model.state_dict().items():
        sizes[part_of(meta_model, place)] += tensor.numel() * 8
    return [MAX_HEADER_BYTES + size for size in sizes]


def check_parts(source: Source, weights: Mapping[str, int]) -> None:
    """Check the part of each tensor in a listing against the model; raise `PeerFault` if wrong.

    A wrong one would let the right weights look wrong for good.
    """
    meta_model = build(source.config, torch.float32)
    found = {
        name: part_of(meta_model, place) for name, place in select(meta_model, weights).items()
    }
    if found != weights or not set(range(meta_model.layers + 1)).issubset(found.values()):
        raise PeerFault("The listing does not match the tensors of the model")


def part_name(part: int) -> str:
    """Return the name of the file of a part."""
    return f"part-{part:05}.safetensors"


def limit_of(name: str, sizes: Sequence[int]) -> int:
    """Return the most bytes that a file may have; ``sizes`` are those of the parts."""
    if name == LISTING:
        return MAX_INDEX_BYTES
    if name in SMALL_NAMES:
        return MAX_SENT_BYTES
    return {part_name(part): size for part, size in enumerate(sizes)}[name]


@lru_cache(maxsize=64)
def _check_index(folder: Path, _changed_ns: int, _size: int) -> None:
    """Raise `ModelError` if the index of a folder is damaged; a whole one is read once."""
    list_weights(folder)


def _sync(path: Path) -> None:
    """Write a file to the disk: one that takes its place must be whole after a power cut too."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_range(path: Path, start: int, stop: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise ModelError(f"`{path}` cannot be read: {error.strerror}") from None
    if len(data) < stop - start:
        raise ModelError(f"`{path}` ends too early", hint="fetch it again")
    return data
