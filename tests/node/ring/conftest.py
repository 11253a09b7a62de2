"""Runtimes on one slow network and the rows that they compute, and the model of a rank."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from torch import Tensor

from meshllm.model.files.source import resolve
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps import lm_head as head
from meshllm.model.steps.runner import Runner
from meshllm.node.compute.worker import Worker
from meshllm.node.ring.model_runtime import ModelRuntime
from meshllm.testing.clock import InlineExecutor
from tests.builders.ring_takeover import Rows
from tests.builders.ring_world import World


@pytest.fixture
def world(llama: Path) -> World:
    return World(llama)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """Count the rows of each layer that any rank computes."""
    counted, prefill, build = Rows(), Runner.prefill, Runner.__init__

    def count(runner: Runner, number: int) -> None:
        for layer in range(runner.span.start, runner.span.stop):
            counted[layer] += number

    def counted_prefill(
        self: Runner, x: Tensor, cache: SpanCache, rows: int | None = None
    ) -> Tensor:
        count(self, x.shape[1])
        return prefill(self, x, cache, rows)

    def counted_build(self: Runner, *what: object) -> None:
        build(self, *what)  # type: ignore[arg-type]
        step_many, recompute, fill = self.step_many, self.recompute, self.fill

        def counted_steps(
            parts: Sequence[Tensor], caches: Sequence[SpanCache | None]
        ) -> list[Tensor]:
            count(self, sum(part.shape[1] for part in parts))
            return step_many(parts, caches)

        def counted_recompute(x: Tensor, cache: SpanCache) -> Tensor:
            count(self, x.shape[1])
            return recompute(x, cache)

        def counted_fill(x: Tensor, cache: SpanCache, *, is_step: bool) -> None:
            count(self, x.shape[1])
            fill(x, cache, is_step=is_step)

        self.step_many, self.recompute, self.fill = counted_steps, counted_recompute, counted_fill
        self.step = lambda x, cache: counted_steps([x], [cache])[0]

    monkeypatch.setattr(Runner, "prefill", counted_prefill)
    monkeypatch.setattr(Runner, "__init__", counted_build)
    return counted


@pytest.fixture
async def model(llama: Path) -> ModelRuntime:
    return await ModelRuntime.open(resolve(str(llama)), Worker(InlineExecutor()))


@pytest.fixture
def divided_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the last rank hold a part of an LM head however small that is."""
    monkeypatch.setattr(head, "LEAST", 1)
    monkeypatch.setattr(head, "MIN_OUTPUTS", 1)
