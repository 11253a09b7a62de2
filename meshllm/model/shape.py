"""How large a model is, and what its caches take; knows the sizes only, and imports no torch."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # ships no types
from blake3 import blake3

import meshllm
from meshllm.errors import UserError
from meshllm.model.json_cache import recall, remember
from meshllm.model.locate import CONFIG
from meshllm.names import Quant, Span
from meshllm.strict_json import build

WEIGHTS = "*.safetensors"
CHUNK = 1024  # rows of a prompt that are computed at a time, as a rule
STEP = 32  # rows of a step, as a rule
BLOCK = 256  # rows; buffers grow by whole blocks
SLACK = 64  # tokens that a sliding window keeps behind it, so that as many can be taken back
MOST_ROWS = 4096  # of one forward


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a planner has to know of a model."""

    name: str
    model_type: str
    layers: int
    layer_bytes: tuple[int, ...]
    embed_bytes: int
    """What stands before the layers."""
    head_bytes: int
    """What stands after them, without what it shares with the embedding."""
    tied: bool
    """Embedding and head share their weights."""
    kv_bytes_per_token: tuple[int, ...]
    """Per layer; 0 where the state does not grow. A sliding window grows until it is full."""
    hidden_size: int
    vocab_size: int
    context: int
    """Longest sequence, in tokens."""
    dtype: str
    """As ``bfloat16``."""
    itemsize: int
    """Bytes per element of a hidden state."""
    windows: tuple[int, ...]
    """Per layer: tokens of its sliding window; 0 where it has none."""
    state_bytes: tuple[int, ...]
    """Per layer: what a session takes however long it is."""


@dataclass(frozen=True, slots=True)
class KeptShape:
    """Where a shape is kept, so that it can be told without torch."""

    folder: Path
    """Of the model."""
    cache: Path
    dtype: str | None = None
    """None is as stored."""
    quant: Quant = Quant.NONE

    def read(self, name: str) -> ModelShape | None:
        """Return what was kept, for a model of this name; None when there is nothing."""
        with suppress(UserError, OSError):  # damaged, or of another version
            if known := recall(self.cache, *self._key()):
                return replace(build(ModelShape, known), name=name)
        return None

    def write(self, shape: ModelShape) -> None:
        """Keep a shape."""
        remember(self.cache, asdict(shape), *self._key())

    def _key(self) -> tuple[str, ...]:
        """Name the config and, as it may not name a dtype, the files of weights."""
        config = blake3((self.folder / CONFIG).read_bytes()).hexdigest()
        files = sorted((each.name, each.stat().st_size) for each in self.folder.glob(WEIGHTS))
        versions = meshllm.__version__, version("transformers"), version("torch")
        dtype = self.dtype or "as stored"
        return "shape", config, json.dumps(files), dtype, self.quant, *versions


def rows_for(count: int, window: int = 0) -> int:
    """Count the rows that are allocated for so many, of which a ``window`` keeps its last only.

    It depends on nothing else, so that memory can be reserved before it is taken. Blocks of 256
    rows, and of an eighth where there are many, mean that a row is copied nine times at most.
    """
    if window:  # with room to spare, or each step would move all rows
        count = min(count, window - 1 + SLACK + MOST_ROWS) + BLOCK
    block = max(BLOCK, 1 << max(0, count.bit_length() - 4))
    return -(-count // block) * block


def cache_cost(shape: ModelShape, span: Span) -> Callable[[int], tuple[int, int]]:
    """Return what tells the bytes of a session's cache for the layers of a span, by its tokens.

    The first is what the cache holds, the second what it takes beside that while one layer grows.
    """
    layers = zip(shape.kv_bytes_per_token, shape.windows, shape.state_bytes, strict=True)
    kinds = Counter(list(layers)[span.start : span.stop])

    def cost(tokens: int) -> tuple[int, int]:
        rows = {kind: kind[0] * rows_for(tokens, kind[1]) for kind in kinds}
        held = sum((rows[kind] + kind[2]) * count for kind, count in kinds.items())
        return held, max(rows.values(), default=0)

    return cost


def mean_kv_bytes(shape: ModelShape, tokens: int) -> tuple[int, ...]:
    """Tell for each layer what one token takes in the cache of a session of so many, at most."""
    layers = (Span(at, at + 1) for at in range(shape.layers))
    return tuple(-(-cache_cost(shape, layer)(tokens)[0] // tokens) for layer in layers)


def workspace_bytes(shape: ModelShape) -> int:
    """Bound what a forward takes beside weights and caches: the results of one layer, and logits.

    A row comes out of each matrix of a layer once. All of them together are as wide as the layer
    has weights per column, twice with what is made of them in float32; a mask has a row for each.
    """
    row = 2 * max(shape.layer_bytes) // shape.hidden_size + 8 * shape.hidden_size
    mask = min(shape.context, MOST_ROWS) * shape.itemsize
    return CHUNK * (row + mask) + STEP * shape.vocab_size * 4


def process_memory() -> int:
    """Tell how many bytes of memory this process takes."""
    return int(psutil.Process().memory_info().rss)


def free_memory() -> int:
    """Tell how many bytes can be used without swapping."""
    return int(psutil.virtual_memory().available)
