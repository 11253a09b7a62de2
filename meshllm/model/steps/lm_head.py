"""The head of a model in two parts, each of some of its outputs.

Theory of operation: while a row goes back to the entry, and the entry multiplies it by the head,
the last rank has nothing to do; it has the same row, so it may multiply it by half of the head.
What a matrix gives for one token of the vocabulary does not depend on the others. Whatever else a
model does to its logits could, so that is tried on rows: parts, one behind the other, against the
whole.
"""

import logging

import torch
from torch import Tensor

from meshllm.model.files.source import Source, stored_dtype
from meshllm.model.shape import ModelShape
from meshllm.model.split.anatomy import PROBE_ERRORS
from meshllm.model.steps.load import load_shard
from meshllm.names import Span

LEAST_OUTPUTS = 1 << 13
"""Of fewer a part might not be multiplied as the whole is."""
LEAST = 1 << 23
"""Values of a matrix; half of a smaller one takes no longer than to send what it gives."""
BLOCK = 64
"""Outputs that kernels take at a time."""

_ROWS = 1, 2, 17

logger = logging.getLogger(__name__)

Parts = tuple[range, range]
"""Tokens of the vocabulary: those of the last rank, whole blocks, then those of the entry."""


def find_parts(source: Source, shape: ModelShape) -> Parts | None:
    """Divide the head of a model at the same place as any node; None where it is to stay whole.

    That is where it is small, or where its parts do not have the logits of the whole. Of a matrix
    that is cast on load each part would hold all.
    """
    parts = parts_of(shape.vocab_size, shape.hidden_size)
    is_mapped = str(stored_dtype(source)) == f"torch.{shape.dtype}"
    return parts if parts and is_mapped and _may_part(source, shape, parts) else None


def parts_of(outputs: int, inputs: int) -> Parts | None:
    """Divide a head of so many tokens and inputs; None is too small, or no whole blocks."""
    if outputs < LEAST_OUTPUTS or outputs % BLOCK or outputs * inputs < LEAST:
        return None
    middle = outputs // (2 * BLOCK) * BLOCK
    return range(middle), range(middle, outputs)


@torch.inference_mode()
def _may_part(source: Source, shape: ModelShape, parts: Parts) -> bool:
    """Try rows on the plain weights; what quantises them gives no token the company of others."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    end = Span(shape.layers, shape.layers)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1, max(_ROWS), shape.hidden_size, generator=generator).to(dtype)

    def logits(outputs: range | None) -> list[Tensor]:
        shard = load_shard(
            source, end, embed=False, head=True, dtype=dtype, packed=False, outputs=outputs
        )
        return [shard.forward(drawn[:, :rows], None) for rows in _ROWS]

    try:
        given = zip(*(logits(part) for part in parts), strict=True)
        joined = [torch.cat(each, -1) for each in given]
        is_same = all(map(torch.equal, joined, logits(None)))
    except PROBE_ERRORS as reason:  # foreign code meets what it was not made for
        logger.info("the head is in one part: %s: %s", type(reason).__name__, reason)
        return False
    if not is_same:
        logger.info("the head is in one part: its logits depend on one another")
    return is_same
