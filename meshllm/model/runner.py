"""Runs a shard for sessions: prompts as the stock model does, decode steps steadily.

Theory of operation: guesses may be checked many at a time only if that changes no text. So from the
second token on matrices and attention compute each row as they would in any company, see
`meshllm.model.steady` and `meshllm.model.attention`. Whether that is all of a model is not believed
but tried: where a number of rows is first asked for, and again whenever the context has grown
fourfold, rows are computed both ways and compared. Where one bit differs they are computed one
after the other from then on, which costs time but no text. A model whose stock forward gives
something else than these parts do, beyond rounding, keeps to that, one row at a time.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from meshllm.model.attention import RowAttention
from meshllm.model.cache import SpanCache
from meshllm.model.shard import Shard
from meshllm.model.steady import steady

STOCK = "sdpa"
STEADY = "meshllm_steady"
"""Names of attention functions, as transformers calls them."""

ALIKE = 0.05  # of the norm of a row: what rounding may change in half precision
_KNOWN = {
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "position_ids",
    "scaling",
    "sliding_window",
    "use_cache",
}
"""Options of attention that are heeded, or change nothing where a row sees all before it."""


class Strange(Exception):
    """This model's attention is asked for something that only its own knows."""


logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, SpanCache | None], Tensor]


class Runner:
    """Runs one shard."""

    def __init__(self, shard: Shard, counts: Sequence[int] = ()) -> None:
        """Prepare for steps of one row and of each of ``counts``; none are stock steps."""
        self.shard = shard
        self._attention = RowAttention(counts)
        self._equal: dict[tuple[int, int], bool] = {}  # by rows and size of the context
        model = shard.model
        self._is_steady = (
            bool(counts)
            and model.config._attn_implementation == STOCK
            and not _mixes(model)
            and steady(model, (1, *counts))
        )

    def new_cache(self) -> SpanCache:
        """Make an empty cache for one session."""
        return self.shard.new_cache()

    def prefill(self, x: Tensor, cache: SpanCache, rows: int | None = None) -> Tensor:
        """Run a part of a prompt, see `Shard.forward`."""
        return self.shard.forward(x, cache, rows=rows)

    def step(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        """Run rows ``x`` [1, T or T, D], each as if it came alone; return what all give."""
        size = cache.length.bit_length() // 2 if cache else 0
        for part in (x[:, :1], x):
            case = part.shape[1], size
            if self._is_steady and case not in self._equal:
                self._equal[case] = self._try(part, cache)
        if self._is_steady and self._equal[x.shape[1], size]:
            return self._steady(x, cache)
        one: Forward = self._steady if self._is_steady else self.shard.forward
        return torch.cat([one(row, cache) for row in _alone(x)], 1)

    def _try(self, x: Tensor, cache: SpanCache | None) -> bool:
        """Compare the rows together with the rows alone, or one row with the stock forward."""
        start = cache.length if cache else 0

        def rerun(forward: Forward, *rows: Tensor) -> Tensor:
            try:
                return torch.cat([forward(row, cache) for row in rows], 1)
            finally:
                if cache is not None:
                    cache.crop(start)

        if x.shape[1] > 1:
            return torch.equal(rerun(self._steady, x), rerun(self._steady, *_alone(x)))
        stock = rerun(self.shard.forward, x)
        try:
            self._is_steady = bool((rerun(self._steady, x) - stock).norm() <= ALIKE * stock.norm())
        except Strange as reason:
            self._is_steady = False
            logger.info("one row at a time: %s", reason)
        return self._is_steady

    def _steady(self, x: Tensor, cache: SpanCache | None) -> Tensor:
        with self._steadily():
            return self.shard.forward(x, cache)

    @contextmanager
    def _steadily(self) -> Iterator[None]:
        config: Any = self.shard.model.config
        ALL_ATTENTION_FUNCTIONS.register(STEADY, self._attend)
        config._attn_implementation = STEADY  # no masks are made for a name that has none
        try:
            yield
        finally:
            config._attn_implementation = STOCK

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attend in the place of a function of transformers: query [1, H, T, D] to [1, T, H, E]."""
        if strange := {name for name in options.keys() - _KNOWN if options[name] is not None}:
            raise Strange(f"attention with {', '.join(sorted(strange))}")
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        window = options.get("sliding_window")
        return self._attention.attend(query, key, value, scale, window), None


def _mixes(model: nn.Module) -> bool:
    """Whether rows share stacked matrices of experts: which ones do, no trial tells for others."""
    return any(parameter.dim() > 2 and min(parameter.shape) > 1 for parameter in model.parameters())


def _alone(x: Tensor) -> list[Tensor]:
    """Give each row [1, 1 or 1, D] of ``x`` by itself."""
    return [x[:, at : at + 1] for at in range(x.shape[1])]
