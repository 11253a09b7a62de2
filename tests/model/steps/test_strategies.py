"""The strategy of a shard: which steps are chosen, and why no better ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.device import CPU
from meshllm.model.files.source import Source
from meshllm.model.kernels import attention, jit
from meshllm.model.modules import linear_bf16, rms_norm
from meshllm.model.modules.kernel_choice import LinearKernel
from meshllm.model.modules.linear_bf16 import MAX_ROWS, use_own_gemm
from meshllm.model.modules.linear_padded import PaddedLinear, find_min_rows
from meshllm.model.pauses import pause, pausing
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.steps import execution, strategies, trial
from meshllm.model.steps.execution import Strategy, forecast
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import RECOMPUTED_ROWS, InvariantSteps, ReplayedSteps
from meshllm.model.steps.trial import TRIED, CachedTrial
from meshllm.names import Span
from meshllm.testing.models import tiny_model
from tests.builders.runners import COUNTS, filled, how, ids, runner_of, warnings_of
from tests.model.invariance import require_row_invariant

REFUSED = {
    "qwen3_moe": "mixture of experts",
    "gpt_oss": "mixture of experts",
    "bloom": "attention is",
    "lfm2": "unsupported layer types: ",
    "falcon": "FalconLinear",
}


@pytest.mark.parametrize("is_replayed", [False, True])
def test_many_rows_are_tried_after_load_unless_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_replayed: bool
) -> None:
    source, tried = tiny_model(tmp_path / "model", dtype=torch.bfloat16), list[int]()
    shard = load_shard(source, Span(0, 6), embed=True, head=False)
    monkeypatch.setattr(strategies, "most_invariant_rows", lambda _: RECOMPUTED_ROWS)
    if not is_replayed:
        monkeypatch.setattr(execution, "REPLAYED_BYTES", 0)

    def try_steps(_: object, steps: InvariantSteps, most: int) -> str:
        tried.append(most)
        assert most in steps.counts
        pause()
        return ""

    monkeypatch.setattr(trial, "try_steps", try_steps)
    runner = Runner(shard, (2,), CachedTrial(tmp_path / "cache"))
    steps = runner.steps.inner if isinstance(runner.steps, ReplayedSteps) else runner.steps
    assert isinstance(steps, InvariantSteps)
    before, between = (steps.counts, steps.most_recomputed, list(tried)), list[frozenset[int]]()
    with pausing(lambda: between.append(steps.counts)):
        warmed_up = [list(runner.warm_up_steps()) for _ in range(2)]
    again = Runner(
        load_shard(source, Span(0, 6), embed=True, head=False),
        (2,),
        CachedTrial(tmp_path / "cache"),
    )
    next_steps = again.steps.inner if isinstance(again.steps, ReplayedSteps) else again.steps

    assert isinstance(runner.steps, ReplayedSteps) is is_replayed
    assert before == (frozenset((1, 2)), MAX_ROWS, [TRIED])
    assert len(warmed_up[0]) > len(warmed_up[1]) == 0
    assert (steps.counts, steps.most_recomputed) == (frozenset((1, 2)), RECOMPUTED_ROWS)
    assert tried == [TRIED, RECOMPUTED_ROWS]
    assert between == [frozenset((1, 2))]
    assert isinstance(next_steps, InvariantSteps)
    assert next_steps.most_recomputed == RECOMPUTED_ROWS


@pytest.mark.parametrize("reason", ["", "they differ"])
def test_many_rows_are_computed_again_in_one_pass_only_if_that_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    source, passes, run = tiny_model(tmp_path, dtype=torch.bfloat16), [], InvariantSteps.run
    shard = load_shard(source, Span(0, 6), embed=True, head=False)
    monkeypatch.setattr(strategies, "most_invariant_rows", lambda _: RECOMPUTED_ROWS)
    runner = Runner(shard, (2,), lambda _, __, most: reason if most == RECOMPUTED_ROWS else "")
    cache = filled(runner, 3)

    def noted(steps: InvariantSteps, x: Tensor, *rest: Any) -> Tensor:
        passes.append(x.shape[1])
        return run(steps, x, *rest)

    monkeypatch.setattr(InvariantSteps, "run", noted)
    runner.recompute(ids(RECOMPUTED_ROWS + 1), cache)

    assert passes == ([MAX_ROWS] * 7 if reason else [RECOMPUTED_ROWS])  # one row is a step
    assert runner.is_row_invariant
    assert warnings_of(caplog) == (
        [f"recomputation is limited to {MAX_ROWS} rows at a time: {reason}"] if reason else []
    )


def test_a_model_with_few_positions_is_row_invariant_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "most_invariant_rows", lambda _: RECOMPUTED_ROWS)

    runner = runner_of(tmp_path, "gpt2", torch.bfloat16)

    assert runner.is_row_invariant
    assert runner.recompute(ids(MAX_ROWS + 1), filled(runner, 3)).shape[1] == MAX_ROWS + 1


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_is_not_row_invariant_says_why(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    together, alone = filled(runner, 9), filled(runner, 9)

    given = runner.step(ids(3, seed=1), together)

    assert runner.execution.strategy is Strategy.STOCK
    assert REFUSED[family] in runner.execution.reason
    assert runner.execution.is_fallback
    (warning,) = warnings_of(caplog)
    assert REFUSED[family] in warning
    assert not runner.is_row_invariant
    assert not runner.runs_in_one_pass(3)
    rows = torch.split(ids(3, seed=1), 1, 1)
    assert torch.equal(given, torch.cat([runner.shard.forward(row, alone) for row in rows], 1))


@pytest.mark.parametrize("lacking", ["Triton", None])
def test_a_gpu_without_graphs_says_what_they_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str | None
) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True)
    shard.device = torch.device("cuda")
    monkeypatch.setattr(execution, "missing_for_cuda_graphs", lambda: lacking)

    def capture(_: object) -> None:
        raise ImportError("no module")

    monkeypatch.setattr(strategies, "GraphSteps", capture)

    told = Runner(shard, COUNTS).execution

    reason = "a CUDA graph needs Triton; " if lacking else ""
    assert how(told) == (Strategy.STOCK, f"{reason}ImportError: no module", True)


def test_a_failed_trial_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)

    Runner(load_as(Coupled, source), COUNTS)

    (warning,) = warnings_of(caplog)
    assert "row-invariant kernels disabled (" in warning
    assert "no batched verification, no session batching" in warning


def test_without_executable_memory_nothing_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (jit, attention, rms_norm):
        monkeypatch.setattr(module, "jit_available", lambda: False)
    use_own_gemm.cache_clear()
    try:
        runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
        config = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16).config
        foreseen = forecast(config, torch.bfloat16, CPU)
    finally:
        use_own_gemm.cache_clear()

    assert runner.execution.strategy is Strategy.INVARIANT
    assert runner.execution.reason == "no replay: executable memory is forbidden"
    assert how(foreseen) == how(runner.execution)


def test_a_trial_without_enough_memory_disables_nothing(tmp_path: Path) -> None:
    def trial(*_: object) -> str:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True)

    with pytest.raises(RuntimeError, match="can't allocate memory"):
        Runner(shard, COUNTS, trial)

    require_row_invariant(Runner(shard, COUNTS))


def test_without_counts_a_step_is_a_stock_step(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16, ())
    steps, stock = filled(runner, 30), filled(runner, 30)

    assert torch.equal(
        runner.step(ids(1, seed=1), steps), runner.shard.forward(ids(1, seed=1), stock)
    )


def load_as(kind: type[Shard], source: Source) -> Shard:
    shard = load_shard(source, Span(0, 6), embed=True, head=True)
    shard.__class__ = kind
    return shard


class Biased(Shard):
    """A model whose row-invariant steps differ from the stock forward."""

    def forward(self, x: Tensor, cache: SpanCache | None, **options: Any) -> Tensor:
        logits = super().forward(x, cache, **options)
        is_step = options.get("position_ids") is not None
        return logits * 1.1 if is_step else logits


class Coupled(Shard):
    """A model whose rows depend on other rows."""

    def forward(self, x: Tensor, cache: SpanCache | None, **options: Any) -> Tensor:
        return super().forward(x, cache, **options) + (x.shape[1] > 1)


@pytest.mark.parametrize("kind", [Biased, Coupled])
def test_a_model_that_fails_its_trial_runs_stock_steps(tmp_path: Path, kind: type[Shard]) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    tried, stock = (load_as(kind, source) for _ in range(2))
    runner = Runner(tried, COUNTS)
    caches = filled(runner, 30), filled(Runner(stock), 30)

    got = runner.step(ids(2, seed=1), caches[0])

    assert not runner.is_row_invariant
    expected = [stock.forward(row, caches[1]) for row in torch.split(ids(2, seed=1), 1, 1)]
    assert torch.equal(got, torch.cat(expected, 1))


def test_a_failed_trial_restores_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(model: nn.Module, *how: Any) -> dict[Any, int]:
        return dict.fromkeys(find_min_rows(model, *how) or (), 2)

    monkeypatch.setattr("meshllm.model.modules.replacement.find_min_rows", find)
    monkeypatch.setattr(linear_bf16, "choose_kernel", lambda _: LinearKernel.TORCH)
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)

    runners = [Runner(load_as(kind, source), COUNTS) for kind in (Shard, Coupled)]

    padded = [
        any(isinstance(module, PaddedLinear) for module in runner.shard.model.modules())
        for runner in runners
    ]
    assert padded == [runner.is_row_invariant for runner in runners] == [True, False]


@pytest.mark.parametrize("family", ["glm4_moe", "llama4_text", "qwen3_moe", "falcon"])
def test_refused_models_run_row_by_row_in_every_part(tmp_path: Path, family: str) -> None:
    source = tiny_model(tmp_path, family, dtype=torch.bfloat16)

    parts = [Span(0, 1), Span(0, 6), Span(5, 6)]
    shards = [load_shard(source, span, embed=False, head=False) for span in parts]

    assert not any(Runner(shard, COUNTS).is_row_invariant for shard in shards)
