"""The embedding of a prompt: its rows after the final norm, pooled on the entry.

Theory of operation: the last row of a prompt comes back to the entry, as for an answer. If all rows
are wanted, the prompt is its first token, and the others are forced after it as drafts that are
all right: the rows of these decode steps come back, too. So pooling needs nothing new of the other
ranks. If the ring is lost, the ingress asks again, from the first token. The prefix cache is left
to answers.
"""

import base64
import math
import struct
from collections.abc import AsyncGenerator
from contextlib import aclosing

import torch
from torch import Tensor

from meshllm.errors import ModelError, UserError
from meshllm.model.text.pooling import Pooling, PoolingMode
from meshllm.node.session.entry import EntryNode
from meshllm.node.session.generation import Ended, GenerationRequest, Token
from meshllm.protocol.kv_cache.prefix_scope import PrefixScope
from meshllm.protocol.session.actions import check_prompt
from meshllm.request import Answer, Event, FinishReason, Prefilled, Sampling
from meshllm.strict_json import WrongField

PROGRESS_TOKENS = 64  # between two events, which keep the ingress patient


class RowPool:
    """Pools rows as they come, on the compute thread."""

    def __init__(self, mode: PoolingMode) -> None:
        self._mode = mode
        self._sum: Tensor | None = None  # [D], float64
        self._count = 0

    def take(self, rows: Tensor) -> None:
        """Take the next rows [T, D]."""
        taken = rows[-1:] if self._mode is PoolingMode.LAST else rows
        added = taken.double().sum(0)
        self._sum = added if self._sum is None else self._sum + added
        self._count += len(taken)

    def vector(self, dimensions: int | None, *, normalises: bool) -> list[float]:
        """Return the first values of the pooled row, as many as wanted, as one vector.

        Raises:
            ModelError: a value is not finite.
        """
        assert self._sum is not None
        pooled = (self._sum / self._count)[:dimensions]
        if normalises:
            pooled = torch.nn.functional.normalize(pooled, dim=0)
        values: list[float] = pooled.tolist()
        if not all(map(math.isfinite, values)):
            raise ModelError("The embedding has a value that is not finite")
        return values


async def embed(
    entry: EntryNode,
    pooling: Pooling,
    prompt: tuple[int, ...],
    dimensions: int | None,
    scope: PrefixScope,
    *,
    hands_over: bool = True,
) -> AsyncGenerator[Event, None]:
    """Yield the progress of an embedding, and the `Answer` that has it.

    ``hands_over``: see `GenerationRequest`.

    Raises:
        UserError: the prompt exceeds the context, or the model has no such embedding.
        WrongField: it has fewer dimensions.
        MeshError: it failed; no rank holds any of its state.
    """
    if pooling.obstacle:
        raise UserError(f"{pooling.obstacle}, which embeddings do not support here")
    check_prompt(len(prompt), entry.context)  # of all of it: what is forced would be cut
    width = entry.layers.row_format.width
    if dimensions is not None and not 0 < dimensions <= width:
        text = f"`dimensions` is {dimensions}, not between 1 and {width}"
        raise WrongField("dimensions", text)
    wanted = prompt[:1] if pooling.mode is PoolingMode.FIRST else prompt
    known = 1 if pooling.mode is PoolingMode.MEAN else len(wanted)
    pool = RowPool(pooling.mode)
    order = GenerationRequest(
        wanted[:known],
        Sampling(),
        max_tokens=len(wanted) - known + 1,
        take_token=bool,
        forced=wanted[known:],
        on_rows=pool.take,
        requester=scope[0],
        scope=scope[1],
        hands_over=hands_over,
    )
    done = 0
    async with aclosing(entry.generate(order)) as outputs:
        async for output in outputs:
            match output:
                case Prefilled() if known == len(prompt):
                    yield output
                case Token():
                    done += 1
                    if done % PROGRESS_TOKENS == 0:
                        yield Prefilled(done, len(prompt))
                case Ended(measured=measured):
                    pass
    values = pool.vector(dimensions, normalises=pooling.normalises)
    yield Answer(
        text="",
        tokens=(),
        prompt_tokens=len(prompt),
        finish_reason=FinishReason.STOP,
        ttft_ms=measured.ttft_s * 1e3,
        ms_per_token=0.0,
        tokens_per_second=0.0,
        tokens_per_step=0.0,
        hops=(),
        embedding=base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode(),
    )
