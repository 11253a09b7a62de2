"""Sizes of a model and its KV caches, and memory of this machine; imports no torch."""

import ctypes
import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from mmap import PAGESIZE
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # ships no types
from blake3 import blake3

import meshllm
from meshllm.errors import UserError
from meshllm.local_files import read_regular
from meshllm.model.json_cache import load_cached, store_cached
from meshllm.model.locate import CONFIG, MAX_CONFIG_BYTES
from meshllm.names import Quant, Span
from meshllm.strict_json import build

WEIGHTS = "*.safetensors"
WORKSPACE_ROWS = 1024  # rows of a prefill chunk, as a rule
STEP = 32  # rows of a step, as a rule
BLOCK = 256  # rows; buffers grow by whole blocks
SLACK = 64  # tokens kept beyond a sliding window, so that as many can be cropped
MAX_ROWS = 4096  # of one forward
_PAGE_MAP = Path("/proc/self/pagemap")
_PRESENT = bytes(range(0x80, 0x100))  # values of the last byte of a page in memory
_DONT_NEED = 4  # MADV_DONTNEED of Linux


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that the planner needs."""

    name: str
    model_type: str
    layers: int
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    """Of the modules before the layers."""
    head_bytes: int
    """Of the modules after the layers, without weights shared with the embedding."""
    tied: bool
    """Embedding and head share their weights."""
    kv_bytes_per_token: tuple[int, ...]
    """Per layer; 0 if its state does not grow. A sliding window grows until it is full."""
    hidden_size: int
    vocab_size: int
    context: int
    """Longest sequence, in tokens."""
    dtype: str
    """Such as ``bfloat16``."""
    itemsize: int
    """Bytes per element of a hidden state."""
    windows: tuple[int, ...]
    """Per layer: tokens of its sliding window; 0 if it has none."""
    state_bytes: tuple[int, ...]
    """Per layer: bytes of a session that do not depend on its length."""


@dataclass(frozen=True, slots=True)
class CachedShape:
    """The cached shape of a model, readable without torch.

    The first command that needs a shape measures it with torch: which tensors belong to a layer,
    and what a token adds to its cache, is known to the code of the model only, which runs on meta.
    """

    folder: Path
    """Of the model."""
    cache: Path
    dtype: str | None = None
    """None: as stored."""
    quant: Quant = Quant.NONE

    def read(self, name: str) -> ModelShape | None:
        """Return the cached shape under the given name; None if there is none."""
        with suppress(UserError, OSError):  # damaged, or of another version
            if known := load_cached(self.cache, *self._key()):
                return replace(build(ModelShape, known), name=name)
        return None

    def write(self, shape: ModelShape) -> None:
        """Store a shape."""
        store_cached(self.cache, asdict(shape), *self._key())

    def _key(self) -> tuple[str, ...]:
        """Return the cache key: config and, as it may lack a dtype, the weight files."""
        config = blake3(read_regular(self.folder / CONFIG, MAX_CONFIG_BYTES)).hexdigest()
        files = sorted((each.name, each.stat().st_size) for each in self.folder.glob(WEIGHTS))
        versions = meshllm.__version__, version("transformers"), version("torch")
        dtype = self.dtype or "as stored"
        return "shape", config, json.dumps(files), dtype, self.quant, *versions


def rows_for(count: int, window: int = 0) -> int:
    """Return the rows allocated for ``count`` rows, or for the last of them in a ``window``.

    Depends on nothing else, so that memory can be reserved in advance. Growing by blocks of 256
    rows, or of an eighth of many rows, means that a row is copied at most nine times.
    """
    if window:  # with spare rows, or each step would move all rows
        count = min(count, window - 1 + SLACK + MAX_ROWS) + BLOCK
    block = max(BLOCK, 1 << max(0, count.bit_length() - 4))
    return -(-count // block) * block


def cache_cost(shape: ModelShape, span: Span) -> Callable[[int], tuple[int, int]]:
    """Return a function from tokens to the bytes of a session's cache for the layers of a span.

    The first number is what the cache holds, the second what it needs more while one layer grows.
    """
    layers = zip(shape.kv_bytes_per_token, shape.windows, shape.state_bytes, strict=True)
    kinds = Counter(list(layers)[span.start : span.stop])

    def cost(tokens: int) -> tuple[int, int]:
        rows = {kind: kind[0] * rows_for(tokens, kind[1]) for kind in kinds}
        held = sum((rows[kind] + kind[2]) * count for kind, count in kinds.items())
        return held, max(rows.values(), default=0)

    return cost


def mean_kv_bytes(shape: ModelShape, tokens: int) -> tuple[int, ...]:
    """Return per layer the mean bytes of a token, in the cache of a session of ``tokens``."""
    layers = (Span(at, at + 1) for at in range(shape.layers))
    return tuple(-(-cache_cost(shape, layer)(tokens)[0] // tokens) for layer in layers)


def workspace_bytes(shape: ModelShape) -> int:
    """Bound the activations of a forward, besides weights and caches: one layer, and logits.

    Each matrix of a layer gives one output row per row. All outputs together are as wide as the
    layer has weights per column, twice with their float32 copies; a mask adds one row per row.
    """
    row = 2 * max(shape.layer_bytes) // shape.hidden_size + 8 * shape.hidden_size
    mask = min(shape.context, MAX_ROWS) * shape.itemsize
    return WORKSPACE_ROWS * (row + mask) + STEP * shape.vocab_size * 4


def process_memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def absent_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Count the bytes between addresses that are not in memory; 0 if the system does not report it.

    It takes about 1 ms per GB.
    """
    if sys.platform != "linux":
        return 0
    absent = 0
    with suppress(OSError), _PAGE_MAP.open("rb", buffering=0) as pages:  # one u64 for each page
        for begin, end in ranges:
            first, stop = begin // PAGESIZE, -(-end // PAGESIZE)
            pages.seek(8 * first)
            states = pages.read(8 * (stop - first))[7::8]
            absent += min(end - begin, PAGESIZE * len(states.translate(None, _PRESENT)))
    return absent


def reclaim() -> None:
    """Free what only reference cycles hold, and return what is free or not needed to the system.

    A rank that has ended is such a cycle: its timers, batches and errors refer to it, and it refers
    to its layers. The garbage collector would find it much later.
    """
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc only
        trim(0)
    _unmap_code()


def _unmap_code() -> None:
    """Unmap the code of libraries: most of it ran once, when they were loaded.

    It stays in the page cache of the system, and what runs again is mapped from there. Areas that
    this process may write, or has written, resident or swapped out, are left alone.
    """
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    unreadable = psutil.Error, OSError, ValueError, AttributeError, MemoryError
    with suppress(*unreadable):  # the list of areas
        for area in psutil.Process().memory_maps(grouped=False):
            is_code = area.path.startswith("/") and "x" in area.perms and "w" not in area.perms
            if is_code and not (area.anonymous or area.swap):
                begin, end = (int(each, 16) for each in area.addr.split("-"))
                advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)


def free_memory() -> int:
    """Return how many bytes can be allocated without swapping."""
    return int(psutil.virtual_memory().available)
