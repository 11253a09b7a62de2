"""How a model is run: described for the user, and foreseen without weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from meshllm.model.device import CPU
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.meta_model import build
from meshllm.model.steps import execution
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
from meshllm.names import Quant, Span
from meshllm.testing.models import tiny_model
from tests.builders.runners import COUNTS, filled, how, ids, runner_of, warnings_of
from tests.model.invariance import require_row_invariant


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


def test_the_execution_of_a_quantised_model_is_foreseen(tmp_path: Path) -> None:
    config = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16).config

    foreseen = forecast(config, torch.bfloat16, CPU, Quant.INT8)

    assert dict(foreseen.linears).keys() == {"quantised"}
