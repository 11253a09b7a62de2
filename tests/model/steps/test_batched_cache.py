"""Several sessions in one pass: each gets the bits as if alone."""

from pathlib import Path

import pytest
import torch

from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Span
from meshllm.testing.models import tiny_model
from tests.builders.runners import COUNTS, INVARIANT, filled, ids, runner_of
from tests.model.invariance import require_row_invariant


def test_a_nan_row_does_not_affect_other_sessions(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    runner = Runner(load_shard(source, Span(1, 3), embed=False, head=False), COUNTS)
    rows = torch.randn(1, 3, 64).to(torch.bfloat16)
    expected = runner.step(rows, runner.new_cache())

    for count in (1, 3):
        runner.step(torch.full((1, count, 64), torch.nan).to(torch.bfloat16), runner.new_cache())

    assert torch.equal(runner.step(rows, runner.new_cache()), expected)


@pytest.mark.parametrize("family", INVARIANT)
def test_batched_sessions_equal_single_sessions(tmp_path: Path, family: str) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    require_row_invariant(runner)
    lengths = (11, 3, 40, 25)
    alone = [filled(runner, length) for length in lengths]
    together = [filled(runner, length) for length in lengths]

    for turn, rows in enumerate(
        ((1, 1, 1, 1), (1, 5, 2, 1), (1, 1, 1, 1), (9, 5, 5, 3), (1, 17, 1, 2))
    ):
        parts = [ids(count, seed=10 * turn + at) for at, count in enumerate(rows)]
        expected = [runner.step(*each) for each in zip(parts, alone, strict=True)]

        got = runner.step_many(parts, together)

        assert all(map(torch.equal, got, expected)), turn
        assert [cache.length for cache in together] == [cache.length for cache in alone]


def test_sessions_run_in_one_pass(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    require_row_invariant(runner)
    caches = [filled(runner, length) for length in (5, 9, 30)]
    rows = []
    runner.shard.model.get_submodule("model.layers.3.mlp").register_forward_pre_hook(
        lambda _, args: rows.append(args[0].shape[1])
    )
    for turn in range(2):
        runner.step_many([ids(1, seed=turn)] * 3, caches)

    assert rows[-1] == 3
