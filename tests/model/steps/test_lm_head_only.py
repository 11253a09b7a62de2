"""Head-only steps: bit-equal to the stock forward, or the stock forward."""

from pathlib import Path

import pytest
import torch

from meshllm.model.files.source import Source
from meshllm.model.split.shard import Shard
from meshllm.model.steps.lm_head_only import find_head_modules, run_modules
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Span
from meshllm.testing.models import tiny_model


def head_of(source: Source, dtype: torch.dtype | None = None) -> Shard:
    return load_shard(source, Span(6, 6), embed=False, head=True, dtype=dtype)


def rows_of(shard: Shard, count: int) -> torch.Tensor:
    width = shard.model.config.get_text_config(decoder=True).hidden_size
    return torch.randn(1, count, width).to(shard.model.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt_neox", "lfm2"])
def test_most_heads_are_a_norm_and_a_matrix(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shard = head_of(tiny_model(tmp_path, name, dtype=dtype))
    names = find_head_modules(shard)
    x = rows_of(shard, 5)

    assert len(names) == 2
    assert torch.equal(run_modules(shard, names, x), shard.forward(x, None))


@pytest.mark.parametrize("name", ["gemma2", "cohere"])
def test_a_head_that_does_more_runs_the_stock_forward(name: str, tmp_path: Path) -> None:
    assert find_head_modules(head_of(tiny_model(tmp_path, name))) == ()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_runner_gives_the_logits_of_the_stock_forward(name: str, tmp_path: Path) -> None:
    shard = head_of(tiny_model(tmp_path, name))
    x = rows_of(shard, 1)

    assert torch.equal(Runner(shard).step(x, None), shard.forward(x, None))


def test_only_a_head_only_shard_has_head_modules(tmp_path: Path) -> None:
    source = tiny_model(tmp_path)

    for span, embed, head in ((Span(4, 6), False, True), (Span(0, 6), True, True)):
        assert find_head_modules(load_shard(source, span, embed=embed, head=head)) == ()
