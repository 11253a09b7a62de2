"""Runners of tiny models whose steps are replayed, and how they are compared."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.compiled_step import CompiledStep
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.replay import CHECKS
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import ReplayedSteps
from meshllm.names import Quant, Span
from meshllm.testing.models import tiny_model
from tests.model.invariance import require_row_invariant


def runner_of(
    folder: Path, family: str = "qwen3", quant: Quant = Quant.NONE, **parts: Any
) -> Runner:
    source = tiny_model(folder, family, dtype=torch.bfloat16)
    parts = parts or {"span": Span(0, source.config.num_hidden_layers), "embed": True, "head": True}
    runner = Runner(load_shard(source, quant=quant, **parts), (2, 3, 5, 9))
    require_row_invariant(runner)
    return runner


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(runner: Runner, length: int, seed: int = 0) -> SpanCache:
    cache = runner.new_cache()
    runner.prefill(ids(length, seed), cache)
    return cache


def steps_of(runner: Runner) -> ReplayedSteps:
    assert isinstance(runner.steps, ReplayedSteps)
    return runner.steps


def forget(runner: Runner) -> None:
    """Make a runner run all steps eagerly."""
    steps = steps_of(runner)
    runner.step, runner.step_many = steps.inner.step, steps.inner.step_many


def check_replay(runner: Runner) -> None:
    """Compare replayed steps with the same steps run eagerly."""
    cache, other = filled(runner, 6), filled(runner, 6)

    outputs = [runner.step(ids(1, seed), cache) for seed in range(8)]
    assert steps_of(runner).replay._states[1, torch.get_num_threads()].checks == CHECKS
    forget(runner)

    assert all(map(torch.equal, outputs, [runner.step(ids(1, seed), other) for seed in range(8)]))


def tape_of(runner: Runner, rows: int) -> CompiledStep:
    """Return the compiled step of ``rows`` rows."""
    compiled = steps_of(runner).replay._states[rows, torch.get_num_threads()].compiled
    assert compiled is not None
    return compiled
