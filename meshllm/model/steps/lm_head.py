"""The LM head, split over the vocabulary between the last rank and the entry.

Theory of operation: while a row returns to the entry, and the entry multiplies it by the head, the
last rank is idle; it has the same row, so it can compute half of the logits. The product of one
token of the vocabulary does not depend on the others, but what else a model does to its logits may
mix them. So the concatenated logits of the parts are compared with those of the whole head.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from meshllm.model.device import CPU
from meshllm.model.files.source import Source, stored_dtype
from meshllm.model.json_cache import load_cached, store_cached
from meshllm.model.pauses import pause
from meshllm.model.shape import ModelShape
from meshllm.model.split.shard import Shard
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.trial import trial_key
from meshllm.names import Span

MIN_OUTPUTS = 1 << 13
"""Tokens of the vocabulary; a part of a smaller one might use another kernel than the whole."""
LEAST = 1 << 23
"""Elements of the matrix; half of a smaller one takes no longer than sending its logits."""
BLOCK = 64
"""Outputs that kernels compute at a time."""

_ROWS = 1, 2, 17

logger = logging.getLogger(__name__)

Parts = tuple[range, range]
"""Tokens of the last rank, in whole blocks, then those of the entry."""


def find_parts(source: Source, shape: ModelShape, cache: Path | None = None) -> Parts | None:
    """Split the head of a model, at the same token on every node; None if it stays whole.

    It stays whole if it is small, if its parts do not give the same logits, or if it is cast on
    load, as each part would hold the whole matrix. That they do is cached in the folder ``cache``:
    the products of a large vocabulary take half a second, and a ring waits for them after a loss.
    """
    parts = parts_of(shape.vocab_size, shape.hidden_size)
    if parts is None or str(stored_dtype(source)) != f"torch.{shape.dtype}":
        return None
    key = trial_key(source.config, CPU, "split head", shape.dtype)
    if cache and load_cached(cache, *key) is True:
        return parts
    if not _is_splittable(source, shape, parts):
        return None
    if cache:
        store_cached(cache, True, *key)
    return parts


def parts_of(outputs: int, inputs: int) -> Parts | None:
    """Split a head by its size; None if it is too small or not a multiple of `BLOCK`."""
    if outputs < MIN_OUTPUTS or outputs % BLOCK or outputs * inputs < LEAST:
        return None
    middle = outputs // (2 * BLOCK) * BLOCK
    return range(middle), range(middle, outputs)


@torch.inference_mode()
def _is_splittable(source: Source, shape: ModelShape, parts: Parts) -> bool:
    """Compare parts and whole on plain weights; quantisation treats each token separately."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    end = Span(shape.layers, shape.layers)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, max(_ROWS), shape.hidden_size, generator=generator).to(dtype)

    def forward(shard: Shard, rows: int) -> Tensor:
        pause()
        return shard.forward(drawn[:, :rows], None)

    def logits(outputs: range | None) -> list[Tensor]:
        shard = load_shard(
            source, end, embed=False, head=True, dtype=dtype, packed=False, outputs=outputs
        )
        return [forward(shard, rows) for rows in _ROWS]

    try:
        given = zip(*(logits(part) for part in parts), strict=True)
        joined = [torch.cat(each, -1) for each in given]
        is_same = all(map(torch.equal, joined, logits(None)))
    except PROBE_ERRORS as reason:  # model code may not expect a part
        logger.warning("the LM head is not split: %s: %s", type(reason).__name__, reason)
        return False
    if not is_same:
        logger.warning("the LM head is not split: its logits depend on one another")
    return is_same
