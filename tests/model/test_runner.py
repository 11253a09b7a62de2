"""Steps of several rows give what steps of one give, in every family, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.model.cache import SpanCache
from meshllm.model.runner import STOCK, Runner
from meshllm.model.shard import Shard
from meshllm.names import Span
from meshllm.testing.models import tiny_model

COUNTS = (2, 3, 5, 9, 17)
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "falcon", "bloom",
            "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3")  # fmt: skip


def runner_of(folder: Path, family: str, dtype: torch.dtype, counts: Any = COUNTS) -> Runner:
    source = tiny_model(folder, family, dtype=dtype)
    layers = source.config.num_hidden_layers
    return Runner(Shard.load(source, Span(0, layers), embed=True, head=True), counts)


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(runner: Runner, length: int) -> SpanCache:
    cache = runner.new_cache()
    runner.prefill(ids(length), cache)
    return cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_together_are_rows_alone(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    runner = runner_of(tmp_path, family, dtype)
    alone, together = filled(runner, 11), filled(runner, 11)
    tokens = ids(40, seed=1)

    one_by_one = torch.cat([runner.step(tokens[:, at : at + 1], alone) for at in range(40)], 1)
    at, steps = 0, []
    for rows in (1, 2, 5, 3, 9, 17, 1, 2):
        steps.append(runner.step(tokens[:, at : at + rows], together))
        at += rows

    assert at == 40
    assert torch.equal(torch.cat(steps, 1), one_by_one)
    assert (alone.length, together.length) == (51, 51)


def test_wrong_rows_leave_no_trace(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    cache, clean = filled(runner, 11), filled(runner, 11)
    right = ids(3, seed=1)

    runner.step(torch.cat([right[:, :1], ids(4, seed=2)], 1), cache)
    cache.crop(12)

    expected = torch.cat([runner.step(right[:, at : at + 1], clean) for at in range(3)], 1)
    assert torch.equal(runner.step(right[:, 1:], cache), expected[:, 1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_that_of_the_stock_model_but_for_rounding(tmp_path: Path, family: str) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    steady, stock = filled(runner, 30), filled(runner, 30)

    got = runner.step(ids(1, seed=1), steady)

    expected = runner.shard.forward(ids(1, seed=1), stock)
    assert (got - expected).norm() <= 0.02 * expected.norm()


def test_without_counts_a_step_is_that_of_the_stock_model(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16, ())
    steps, stock = filled(runner, 30), filled(runner, 30)

    assert torch.equal(
        runner.step(ids(1, seed=1), steps), runner.shard.forward(ids(1, seed=1), stock)
    )


class Biased(Shard):
    """A model whose attention does what no other does."""

    def forward(self, x: Tensor, cache: SpanCache | None, **options: Any) -> Tensor:
        logits = super().forward(x, cache, **options)
        return logits if self.model.config._attn_implementation == STOCK else logits * 1.2


def test_a_model_that_steps_otherwise_than_it_should_keeps_to_its_own(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    runner.shard.__class__ = Biased
    cache, stock = filled(runner, 30), filled(runner, 30)

    got = runner.step(ids(2, seed=1), cache)

    expected = [runner.shard.forward(row, stock) for row in torch.split(ids(2, seed=1), 1, 1)]
    assert torch.equal(got, torch.cat(expected, 1))
