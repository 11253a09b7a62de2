"""Steps of several rows are bit-equal to steps of one row, in every family."""

import gc
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.device import CPU
from meshllm.model.files.source import Source, resolve
from meshllm.model.kernels import attention, jit
from meshllm.model.locate import BUILTIN
from meshllm.model.modules import linear_bf16, linear_padded, rms_norm
from meshllm.model.modules.exchange import most_invariant_rows
from meshllm.model.modules.int8 import multiplies_matrices
from meshllm.model.modules.kernel_choice import LinearKernel, has_bf16_dot
from meshllm.model.modules.linear_bf16 import MOST_ROWS, use_own_gemm
from meshllm.model.modules.linear_padded import PaddedLinear, find_min_rows
from meshllm.model.pauses import pause, pausing
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.shard import Shard
from meshllm.model.split.skeleton import build
from meshllm.model.split.stubs import ProjectionStub
from meshllm.model.steps import execution, strategies, trial
from meshllm.model.steps.execution import (
    NOT_CROPPABLE,
    Execution,
    Strategy,
    describe,
    forecast,
    matrix_bytes,
)
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import RECOMPUTED_ROWS, InvariantSteps, ReplayedSteps
from meshllm.model.steps.trial import TRIED, CachedTrial, run_untested
from meshllm.names import Quant, Span
from meshllm.testing.models import tiny_model
from tests.model.invariance import require_row_invariant

COUNTS = (2, 3, 5, 9, 17)
INVARIANT = ("llama", "qwen3", "mistral", "gemma3_text", "gpt2", "phi3")
REFUSED = {
    "qwen3_moe": "mixture of experts",
    "gpt_oss": "mixture of experts",
    "bloom": "attention is",
    "lfm2": "unsupported layer types: ",
    "falcon": "FalconLinear",
}


def runner_of(folder: Path, family: str, dtype: torch.dtype, counts: Any = COUNTS) -> Runner:
    source = tiny_model(folder, family, dtype=dtype)
    layers = source.config.num_hidden_layers
    return Runner(load_shard(source, Span(0, layers), embed=True, head=True), counts)


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(runner: Runner, length: int) -> SpanCache:
    cache = runner.new_cache()
    runner.prefill(ids(length), cache)
    return cache


@pytest.mark.parametrize("family", INVARIANT)
def test_rows_in_one_pass_equal_single_rows(tmp_path: Path, family: str) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    require_row_invariant(runner)
    alone, together = filled(runner, 3), filled(runner, 3)
    tokens = ids(40, seed=1)

    one_by_one = torch.cat([runner.step(tokens[:, at : at + 1], alone) for at in range(40)], 1)
    at, steps = 0, []
    for rows in (1, 2, 5, 3, 9, 17, 1, 2):
        steps.append(runner.step(tokens[:, at : at + rows], together))
        at += rows

    assert at == 40
    assert torch.equal(torch.cat(steps, 1), one_by_one)
    assert (alone.length, together.length) == (43, 43)


AGAIN = [RECOMPUTED_ROWS, 2 * MOST_ROWS + 4, 1]
"""Rows that are computed again together: in one pass where the kernels allow, else in several."""
SHORT = {"gpt2": [2 * MOST_ROWS + 4, MOST_ROWS, 1]}
"""The same, of families with few positions."""


@pytest.mark.parametrize("quant", [Quant.NONE, Quant.INT8])
@pytest.mark.parametrize("family", INVARIANT)
def test_rows_that_are_computed_again_equal_steps(
    tmp_path: Path, family: str, quant: Quant
) -> None:
    source = tiny_model(tmp_path, family, dtype=torch.bfloat16)
    runner = Runner(load_shard(source, Span(0, 6), embed=True, head=True, quant=quant), COUNTS)
    require_row_invariant(runner)
    counts = SHORT.get(family, AGAIN)
    tokens, behind = ids(sum(counts), seed=1), ids(5, seed=2)
    steps, again = filled(runner, 3), filled(runner, 3)
    before = torch.cat([runner.step(row, steps) for row in torch.split(tokens, 1, 1)], 1)

    after = [runner.recompute(part, again) for part in torch.split(tokens, counts, 1)]

    assert torch.equal(torch.cat(after, 1), before)
    assert again.length == steps.length == 3 + len(tokens[0])
    assert torch.equal(runner.step(behind, again), runner.step(behind, steps))


@pytest.mark.parametrize("is_step", [False, True], ids=["prompt", "steps"])
@pytest.mark.parametrize("counts", [COUNTS, ()], ids=["row-invariant", "stock"])
@pytest.mark.parametrize("family", INVARIANT)
def test_caches_can_be_filled_without_the_output(
    tmp_path: Path, family: str, counts: tuple[int, ...], *, is_step: bool
) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16, counts)
    tokens, behind = ids(2 * MOST_ROWS + 4, seed=1), ids(5, seed=2)
    whole, again = filled(runner, 3), filled(runner, 3)
    runner.recompute(tokens, whole) if is_step else runner.prefill(tokens, whole)

    runner.fill(tokens, again, is_step=is_step)

    assert again.length == whole.length == 3 + len(tokens[0])
    assert torch.equal(runner.step(behind, again), runner.step(behind, whole))


@pytest.mark.parametrize("is_padded", [False, True], ids=["compiled", "padded"])
@pytest.mark.parametrize("is_step", [False, True], ids=["prompt", "steps"])
def test_filled_caches_cost_no_products_behind_the_last_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_step: bool, is_padded: bool
) -> None:
    if is_padded:
        monkeypatch.setattr(linear_padded, "to_native", lambda _: None)
        monkeypatch.setattr(linear_padded, "has_native", lambda _: False)
        monkeypatch.setattr(linear_padded, "_min_rows", lambda *_: 2)
    monkeypatch.setattr(strategies, "most_invariant_rows", lambda _: RECOMPUTED_ROWS)
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True)
    runner = Runner(shard, COUNTS, run_untested)
    require_row_invariant(runner)
    cache, ran = filled(runner, 3), list[tuple[int, str]]()

    def note(place: tuple[int, str], *_: object) -> None:
        ran.append(place)

    matrices = "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"
    for layer, name in product((4, 5), matrices):
        module = shard.layer(layer).get_submodule(name)
        module.register_forward_hook(partial(note, (layer, name)))

    runner.fill(ids(RECOMPUTED_ROWS), cache, is_step=is_step)

    names = [name for layer, name in ran if layer == 5]
    assert names == ["self_attn.k_proj"]
    assert len(ran) == len(matrices) + 1
    assert type(shard.layer(5).get_submodule("self_attn.q_proj")) is not ProjectionStub


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before, count = torch.get_num_threads(), int(request.param)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("quant", Quant)
def test_rows_of_a_real_model_that_are_computed_again_equal_steps(quant: Quant) -> None:
    shard = load_shard(resolve(BUILTIN), Span(1, 4), embed=False, head=False, quant=quant)
    runner = Runner(shard, COUNTS)
    require_row_invariant(runner)
    rows = torch.randn(1, 180, shard.model.config.hidden_size).to(torch.bfloat16)
    prompt, text = rows[:, :30], rows[:, 30:]
    steps, again = runner.new_cache(), runner.new_cache()
    assert torch.equal(runner.prefill(prompt, steps), runner.prefill(prompt, again))
    before = [runner.step(row, steps) for row in torch.split(text, 1, 1)]

    after = [runner.recompute(part, again) for part in torch.split(text, RECOMPUTED_ROWS, 1)]

    assert torch.equal(torch.cat(after, 1), torch.cat(before, 1))


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
    assert before == (frozenset((1, 2)), MOST_ROWS, [TRIED])
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

    assert passes == ([MOST_ROWS] * 7 if reason else [RECOMPUTED_ROWS])  # one row is a step
    assert runner.is_row_invariant
    assert warnings_of(caplog) == (
        [f"{MOST_ROWS} rows at a time are computed again, not more: {reason}"] if reason else []
    )


def test_a_model_with_few_positions_is_row_invariant_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strategies, "most_invariant_rows", lambda _: RECOMPUTED_ROWS)

    runner = runner_of(tmp_path, "gpt2", torch.bfloat16)

    assert runner.is_row_invariant
    assert runner.recompute(ids(MOST_ROWS + 1), filled(runner, 3)).shape[1] == MOST_ROWS + 1


def test_matrices_without_a_kernel_of_ours_limit_the_rows_of_a_pass(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "gpt2", torch.bfloat16)

    assert most_invariant_rows(runner.shard.model) == MOST_ROWS


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes_on_a_cpu_hint_at_bfloat16(tmp_path: Path, dtype: torch.dtype) -> None:
    told = runner_of(tmp_path, "qwen3", dtype).execution

    assert told.strategy is Strategy.STOCK
    assert "--dtype bfloat16" in told.reason
    assert dict(told.linears).keys() == {"torch"}


def test_the_execution_is_described(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    require_row_invariant(runner)
    config = runner.shard.model.config
    plain = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16).config
    whole, foreseen = build(plain, torch.bfloat16).model, forecast(plain, torch.bfloat16, CPU)

    assert (runner.execution.strategy, runner.execution.reason) == (Strategy.REPLAYED, "")
    assert sum(count for _, count in runner.execution.linears) == sum(
        isinstance(module, nn.Linear) for module in whole.modules()
    )
    assert foreseen.strategy is Strategy.REPLAYED
    assert (runner.execution.threads, foreseen.threads) == (torch.get_num_threads(), 0)
    assert str(replace(foreseen, threads=2)) == f"{foreseen}; 2 threads"
    before = config._attn_implementation
    runner.step(ids(1), filled(runner, 3))
    assert config._attn_implementation == before


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [each for each in caplog.records if each.name.startswith("meshllm.")]
    return [each.getMessage() for each in own if each.levelno == logging.WARNING]


def how(told: Execution) -> tuple[Strategy, str, bool]:
    return told.strategy, told.reason, told.is_fallback


@pytest.mark.parametrize("quant", [Quant.NONE, Quant.INT8])
def test_large_layers_are_foreseen_to_run_without_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quant: Quant
) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    monkeypatch.setattr(execution, "REPLAYED_BYTES", 0)

    runner = Runner(load_shard(source, Span(0, 6), embed=True, head=True, quant=quant), COUNTS)

    require_row_invariant(runner)
    told = runner.execution
    assert (told.strategy, told.is_fallback) == (Strategy.INVARIANT, False)
    assert "less than 5 %" in told.reason
    assert how(forecast(source.config, torch.bfloat16, CPU, quant)) == how(told)
    assert not warnings_of(caplog)  # as measured: nothing is lost


def test_the_size_of_quantised_layers_is_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True, quant=Quant.INT8)
    whole = build(source.config, torch.bfloat16)

    sizes = [matrix_bytes(each, Quant.INT8) for each in (shard.layer(0), whole.parts[0])]

    assert sizes[0] == sizes[1] < matrix_bytes(whole.parts[0], Quant.NONE)


@pytest.mark.parametrize("family", ["qwen3", "mamba2"])
def test_one_row_per_step_is_a_fallback_only_if_the_model_needs_it(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = runner_of(tmp_path, family, torch.bfloat16, ()).execution

    is_able = family == "qwen3"
    reason = "one row per step is requested" if is_able else NOT_CROPPABLE
    assert how(told) == (Strategy.STOCK, reason, not is_able)
    assert len(warnings_of(caplog)) == (not is_able)
    if not is_able:
        config = tiny_model(tmp_path, family, dtype=torch.bfloat16).config
        assert how(forecast(config, torch.bfloat16, CPU)) == how(told)


def test_caches_that_cannot_be_written_from_a_trace_are_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SpanCache, "extends", False)
    config = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16).config

    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)

    require_row_invariant(runner)
    assert how(forecast(config, torch.bfloat16, CPU)) == how(runner.execution)
    reason = "no replay: its caches cannot be written from a trace"
    assert how(runner.execution) == (Strategy.INVARIANT, reason, True)
    assert warnings_of(caplog) == [f"steps are slower: {reason}"]
    graph = forecast(config, torch.bfloat16, torch.device("cuda"))
    assert how(graph) == (
        Strategy.STOCK, "its caches cannot be written from a CUDA graph", True
    )  # fmt: skip


@pytest.mark.parametrize("lacking", ["Triton", None])
def test_what_cuda_graphs_lack_is_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str | None
) -> None:
    config = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16).config
    monkeypatch.setattr(execution, "missing_for_cuda_graphs", lambda: lacking)

    foreseen = forecast(config, torch.bfloat16, torch.device("cuda"))

    if lacking:
        assert how(foreseen) == (Strategy.STOCK, "a CUDA graph needs Triton", True)
    else:
        assert how(foreseen) == (Strategy.GRAPH, "", False)


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


def test_parts_that_run_alike_are_described_together() -> None:
    layers = Execution(Strategy.REPLAYED, (("own bf16", 7),), "own", threads=2)
    head = replace(layers, linears=(("own bf16", 1),))
    slow = layers.without_replay({3: "it draws", 2: "it draws"}, frozenset({1, 2, 3}))

    alike = describe([("layers 0:1", layers), ("LM head", head)])
    unlike = describe([("layers 0:1", slow), ("LM head", head), ("LM head", head)], layers)

    assert alike == "replayed; attention: own; linears: 8 own bf16; 2 threads"
    assert unlike == (
        "layers 0:1: replayed (no replay of steps of 2, 3 rows: it draws); attention: own;"
        " linears: 7 own bf16; 2 threads; LM head: replayed; attention: own; linears: 2 own bf16;"
        f" 2 threads; draft model: {layers}"
    )


def test_the_reason_against_a_gpu_comes_first() -> None:
    told = Execution(Strategy.STOCK, reason="float32")

    assert told.instead_of_gpu("") == told
    assert how(told.instead_of_gpu("too old")) == (Strategy.STOCK, "too old; float32", True)


def test_a_failed_trial_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)

    Runner(load_as(Coupled, source), COUNTS)

    (warning,) = warnings_of(caplog)
    assert "row-invariant kernels disabled (" in warning
    assert "no batched verification, no session batching" in warning


def test_an_internal_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bug(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Bug

    monkeypatch.setattr("meshllm.model.steps.runner.try_steps", fail)

    with pytest.raises(Bug):
        runner_of(tmp_path, "qwen3", torch.bfloat16)


def test_the_execution_of_a_quantised_model_is_foreseen(tmp_path: Path) -> None:
    config = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16).config

    foreseen = forecast(config, torch.bfloat16, CPU, Quant.INT8)

    assert dict(foreseen.linears).keys() == {"quantised"}


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


def test_wrong_rows_leave_no_trace(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    cache, clean = filled(runner, 11), filled(runner, 11)
    right = ids(3, seed=1)

    runner.step(torch.cat([right[:, :1], ids(4, seed=2)], 1), cache)
    cache.crop(12)

    expected = torch.cat([runner.step(right[:, at : at + 1], clean) for at in range(3)], 1)
    assert torch.equal(runner.step(right[:, 1:], cache), expected[:, 1:])


@pytest.mark.parametrize("family", INVARIANT)
def test_a_step_is_near_the_stock_forward(tmp_path: Path, family: str) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    steady, stock = filled(runner, 30), filled(runner, 30)

    got = runner.step(ids(1, seed=1), steady)

    expected = runner.shard.forward(ids(1, seed=1), stock)
    assert (got - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("quant", Quant)
def test_a_prefill_is_near_the_stock_forward(tmp_path: Path, quant: Quant) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True, quant=quant)
    runner = Runner(shard, COUNTS)
    stock, cache = shard.forward(ids(40), runner.new_cache()), runner.new_cache()

    got = torch.cat(
        [runner.prefill(ids(40)[:, :25], cache), runner.prefill(ids(40)[:, 25:], cache)], 1
    )

    assert (got - stock).norm() <= 0.02 * stock.norm()


@pytest.mark.parametrize("quant", Quant)
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(quant: Quant) -> None:
    if multiplies_matrices():
        pytest.skip("torch multiplies prompts by matrix instructions here")
    source = resolve(BUILTIN)
    runner = Runner(load_shard(source, Span(0, 2), embed=True, head=False, quant=quant), COUNTS)
    tokens = ids(300)
    whole = runner.prefill(tokens, runner.new_cache())

    has_one_order = quant is not Quant.NONE or has_bf16_dot()  # for few rows and for many
    for chunk in (20, 100, 150, *((1, 7, 129) if has_one_order else ())):
        cache = runner.new_cache()
        parts = [runner.prefill(each, cache) for each in torch.split(tokens, chunk, 1)]
        assert torch.equal(torch.cat(parts, 1), whole)


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

    monkeypatch.setattr("meshllm.model.modules.exchange.find_min_rows", find)
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


def test_a_nan_row_does_not_affect_other_sessions(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    runner = Runner(load_shard(source, Span(1, 3), embed=False, head=False), COUNTS)
    rows = torch.randn(1, 3, 64).to(torch.bfloat16)
    expected = runner.step(rows, runner.new_cache())

    for count in (1, 3):
        runner.step(torch.full((1, count, 64), torch.nan).to(torch.bfloat16), runner.new_cache())

    assert torch.equal(runner.step(rows, runner.new_cache()), expected)


def test_nothing_keeps_a_runner_alive(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    runner.step(ids(1), runner.new_cache())
    gone = ref(runner.shard.model)

    del runner
    gc.collect()

    assert gone() is None


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


def test_one_deviating_prefill_does_not_fail_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, read = Shard.forward, list[int]()

    def forward_otherwise(self: Shard, x: Tensor, cache: Any, **options: Any) -> Tensor:
        """Compute the first prompt in another way, as a library did before its warm-up."""
        output = forward(self, x, cache, **options)
        if not read and cache is not None:
            for layer in cache.layers:
                layer.keys.mul_(1 + 2**-7)
        read.append(x.shape[1])
        return output

    monkeypatch.setattr(Shard, "forward", forward_otherwise)

    assert runner_of(tmp_path, "qwen3", torch.bfloat16).is_row_invariant
    assert read[0] > max(read[1:])
