"""Steps as one CUDA graph: its inputs, what it refuses, and that it replays the forward."""

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from meshllm.model.device import choose
from meshllm.model.files.source import Source, open_folder
from meshllm.model.modules.linear_bf16 import MAX_ROWS
from meshllm.model.split.kv_cache import GrowingLayer, SpanCache
from meshllm.model.steps import cuda_graph as module
from meshllm.model.steps.attention_switch import AttentionSwitch
from meshllm.model.steps.cuda_graph import Graph
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import StockSteps
from meshllm.model.steps.trace import NotReplayable
from meshllm.names import Span
from meshllm.testing.models import tiny_model
from tests.builders.fake_gpu import GPU, OTHER_CPU, graphs_pretended, needs_gpu, pretended

LAYERS = 6
STEPS = (2, 3, 5, 9, 17)
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt2", "qwen2", "phi3"]
TOLERANCE = 0.02  # of the norm of all logits, between stock steps and these


@pytest.fixture
def llama_source(llama: Path) -> Source:
    return open_folder("llama", llama)


@pytest.fixture(scope="module")
def shared(llama: Path) -> Runner:
    """A whole model for tests that leave it as it is."""
    with pytest.MonkeyPatch.context() as patch, graphs_pretended(patch):
        return whole(open_folder("llama", llama))


@pytest.fixture
def pretending(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with graphs_pretended(monkeypatch):
        yield


def load(
    source: Source, spans: Sequence[Span], device: torch.device = OTHER_CPU, **options: Any
) -> list[Runner]:
    """Load parts of a model for steps of one row, and of several."""
    return [
        Runner(
            load_shard(
                source,
                span,
                embed=not span.start,
                head=span.stop == LAYERS,
                device=device,
                **options,
            ),
            STEPS,
        )
        for span in spans
    ]


def whole(source: Source, device: torch.device = OTHER_CPU, **options: Any) -> Runner:
    return load(source, [Span(0, LAYERS)], device, **options)[0]


def tokens(rows: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 90, (1, rows), generator=torch.Generator().manual_seed(seed))


def test_the_attention_of_a_graph_outlives_its_capture(
    llama_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[Callable[[], Tensor]] = []  # not kept alive by a CUDA graph

    def capture(forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        held.append(forward)
        output = forward().clone()

        def replay() -> None:
            output.copy_(held[0]())

        return replay, output

    with graphs_pretended(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(module, "_capture", capture)
        runner = whole(llama_source)
        config = runner.shard.model.config
        held.clear()
        gc.collect()

    assert config._attn_implementation in AttentionInterface()
    assert config._attn_implementation.startswith("meshllm_")


@pytest.mark.usefixtures("pretending")
def test_a_graph_that_fails_its_trial_restores_the_model(
    llama_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.model.steps.runner.try_steps", lambda *_: "not alike")

    runner = whole(llama_source)

    assert not runner.is_row_invariant
    assert runner.shard.model.config._attn_implementation == "sdpa"


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def after(runner: Runner, rows: int, seed: int = 0) -> SpanCache:
    """Make a cache with ``length`` tokens."""
    cache = runner.new_cache()
    runner.prefill(tokens(rows, seed), cache, 1)
    return cache


def stock(runner: Runner, x: Tensor, cache: SpanCache) -> Tensor:
    """Run rows one after the other with the stock forward."""
    device = runner.shard.device
    given = [runner.shard.forward(row.to(device), cache) for row in torch.split(x, 1, 1)]
    return torch.cat(given, 1).cpu()


def try_all(runner: Runner) -> None:
    """Compare single rows, rows in one pass, batched sessions, and the stock forward."""
    assert runner.is_row_invariant
    x = tokens(MAX_ROWS + 4, 1)
    alone, together = after(runner, 30), after(runner, 30)

    one_by_one = torch.cat([runner.step(row, alone) for row in torch.split(x, 1, 1)], 1)
    assert torch.equal(runner.step(x, together), one_by_one)
    assert (alone.length, together.length) == (51, 51)
    assert apart(one_by_one, stock(runner, x, after(runner, 30))) < TOLERANCE

    lengths, counts = (7, 30, 1, 19), (2, 12, 9, 3)
    parts = [tokens(count, 10 + count) for count in counts]
    caches = [after(runner, length, length) for length in lengths]
    both = runner.step_many(parts, caches)
    for part, length, given in zip(parts, lengths, both, strict=True):
        assert torch.equal(given, runner.step(part, after(runner, length, length)))
    assert [cache.length for cache in caches] == [9, 42, 10, 22]


@pytest.mark.usefixtures("pretending")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", torch.float32),
        ("qwen3", torch.bfloat16),
        ("gemma3_text", torch.float32),
        ("gpt2", torch.float16),
        pytest.param("qwen2", torch.bfloat16, marks=pytest.mark.slow),  # like `qwen3`
        ("phi3", torch.float16),
    ],
    ids=str,
)
def test_a_row_does_not_depend_on_other_rows(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    try_all(whole(tiny_model(tmp_path, family), dtype=dtype))


@pytest.mark.usefixtures("pretending")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_each_part_of_a_model_has_its_graph(tmp_path: Path, family: str) -> None:
    source = tiny_model(tmp_path, family)
    spans = [Span(0, 0), Span(0, 2), Span(2, 6), Span(6, 6)]
    shards = [
        load_shard(source, span, embed=not at, head=at == 3, device=OTHER_CPU)
        for at, span in enumerate(spans)
    ]
    runners = [Runner(shard, STEPS) for shard in shards]
    caches = [runner.new_cache() if runner.shard.span else None for runner in runners]
    one = whole(source)

    x = tokens(20)
    for runner, cache in zip(runners, caches, strict=True):
        x = runner.prefill(x, cache) if cache else runner.step(x, cache)
    x = tokens(3, 1)
    for runner, cache in zip(runners, caches, strict=True):
        assert runner.is_row_invariant
        x = runner.step(x, cache)

    assert apart(x, one.step(tokens(3, 1), after(one, 20))) < 1e-5


@pytest.mark.usefixtures("pretending")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_caches_grow_and_are_cropped(tmp_path: Path, family: str) -> None:
    runner = whole(tiny_model(tmp_path, family))
    cache, x = after(runner, 20), tokens(900, 2)

    for rows in torch.split(x[:, :800], MAX_ROWS, 1):  # more than the first allocations
        runner.step(rows, cache)
    runner.step(tokens(5, 3), cache)
    cache.crop(820)
    other = cache.branch(810)
    last = runner.step(x[:, 800:809], cache)

    read = runner.new_cache()
    runner.prefill(torch.cat([tokens(20), x[:, :800]], 1), read, 1)
    assert apart(last, stock(runner, x[:, 800:809], read)) < 1e-4
    assert torch.equal(runner.step(x[:, 790:809], other)[:, 10:], last)


@pytest.mark.usefixtures("pretending")
def test_a_failed_step_leaves_the_caches_unchanged(
    llama_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, x = whole(llama_source), tokens(1)
    caches = [after(runner, 20, seed) for seed in (1, 2)]
    expected = [runner.step(x, after(runner, 20, seed)) for seed in (1, 2)]
    extend, calls = GrowingLayer.extend, list[int]()

    def run_out(layer: GrowingLayer, count: int) -> int:
        calls.append(count)
        if len(calls) == LAYERS + 3:
            raise torch.OutOfMemoryError("no room")
        return extend(layer, count)

    monkeypatch.setattr(GrowingLayer, "extend", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        runner.step_many([x, x], caches)
    again = runner.step_many([x, x], caches)

    assert all(map(torch.equal, again, expected))
    with pytest.raises(ValueError, match="twice"):
        runner.step_many([x, x], [caches[0], caches[0]])
    assert [cache.length for cache in caches] == [21, 21]


@pytest.mark.usefixtures("pretending")
def test_an_empty_cache_takes_a_step(shared: Runner) -> None:
    cache, x = shared.new_cache(), tokens(4)

    given = shared.step(x, cache)

    assert apart(given, shared.prefill(x, shared.new_cache())) < 1e-5
    assert cache.length == 4


@pytest.mark.usefixtures("pretending")
@pytest.mark.parametrize("family", ["bloom", "qwen3_moe", "mamba"])
def test_a_model_without_a_graph_runs_the_stock_forward(tmp_path: Path, family: str) -> None:
    runner = whole(tiny_model(tmp_path, family))

    assert not runner.is_row_invariant
    given = runner.step(tokens(3), after(runner, 9))
    assert torch.equal(given, stock(runner, tokens(3), after(runner, 9)))


def test_without_triton_steps_are_stock_steps(
    llama_source: Source, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = module._kernel
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "meshllm.model.kernels.triton_attention", raising=False)
    monkeypatch.delattr("meshllm.model.kernels.triton_attention", raising=False)
    with (
        graphs_pretended(monkeypatch),
        monkeypatch.context() as patch,  # undone first, else the pretended kernel would stay
        caplog.at_level(logging.INFO, "meshllm"),
    ):
        patch.setattr(module, "_kernel", kernel)
        runner = whole(llama_source)
        given = runner.step(tokens(3), after(runner, 9))
        expected = stock(runner, tokens(3), after(runner, 9))

    assert "row-invariant kernels disabled (" in caplog.text
    assert "NotReplayable: " in caplog.text
    assert "triton" in caplog.text
    assert torch.equal(given, expected)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("/sbin/ldconfig"), CalledProcessError(1, "gcc")]
)
def test_where_triton_cannot_compile_steps_are_stock_steps(
    llama_source: Source,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def attend(*_: object) -> Tensor:
        raise error

    with graphs_pretended(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(module, "_kernel", lambda: attend)
        runner = whole(llama_source)
        given = runner.step(tokens(3), after(runner, 9))
        expected = stock(runner, tokens(3), after(runner, 9))

    assert f"Triton cannot compile the attention: {error}" in caplog.text
    assert torch.equal(given, expected)


Faulty = Callable[[Tensor, Any, Tensor, Graph], Tensor]


def looks(x: Tensor, _cache: Any, places: Tensor, _graph: Graph) -> Tensor:
    return x * int(places.max())


def asks(x: Tensor, cache: Any, _places: Tensor, graph: Graph) -> Tensor:
    return attends(x, cache, _places, graph) + torch.tensor(float(cache.get_seq_length()))


def goes_away(x: Tensor, _cache: Any, places: Tensor, _graph: Graph) -> Tensor:
    return x + places.to("meta")


def draws(x: Tensor, _cache: Any, _places: Tensor, _graph: Graph) -> Tensor:
    return x + torch.rand_like(x, dtype=torch.float32)


def forgets(x: Tensor, cache: Any, _places: Tensor, _graph: Graph) -> Tensor:
    cache.update(*states(x), 0)
    return x


def adds_twice(x: Tensor, cache: Any, _places: Tensor, _graph: Graph) -> Tensor:
    cache.update(*states(x), 0)
    cache.update(*states(x), 1)
    return x


def turns_away(x: Tensor, cache: Any, _places: Tensor, graph: Graph) -> Tensor:
    key, value = states(x)
    cache.update(key, value, 0)
    return graph.attend(key, key.clone(), value, 1.0, None)


def attends_to_nothing(x: Tensor, _cache: Any, _places: Tensor, graph: Graph) -> Tensor:
    key, value = states(x)
    return graph.attend(key, key, value, 1.0, None)


def attends(x: Tensor, cache: Any, _places: Tensor, graph: Graph) -> Tensor:
    for layer in range(LAYERS):
        key, value = states(x)
        cache.update(key, value, layer)
        graph.attend(key, key, value, 1.0, None)
    return x.float()


def states(x: Tensor) -> tuple[Tensor, Tensor]:
    """Make keys and values [1, G, T, D] of tokens."""
    key = x[:, None, :, None].float().expand(1, 2, -1, 16).clone()
    return key, key + 1


@pytest.mark.usefixtures("pretending")
@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (looks, "data-dependent"),
        (asks, "depends on the cache length"),
        (goes_away, "uses another device"),
        (draws, "or random"),
        (forgets, "not every layer attends"),
        (adds_twice, "without attending"),
        (turns_away, "something other than the cache"),
        (attends_to_nothing, "something other than the cache"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_forward_that_a_graph_cannot_replay_is_refused(
    shared: Runner, forward: Faulty, reason: str
) -> None:
    graph = Graph(shared.shard, MAX_ROWS)

    with pytest.raises(NotReplayable, match=reason):
        graph.record(
            lambda x, cache, places: forward(x, cache, places, graph),
            tokens(MAX_ROWS),
            lambda: after(shared, 9),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_step_is_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    def attend(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    monkeypatch.setattr(module, "_kernel", lambda: attend)
    shard = load_shard(
        tiny_model(tmp_path, family), Span(0, LAYERS), embed=True, head=True, device=GPU
    )
    switch, stock = AttentionSwitch(shard), StockSteps(shard)
    with pretended(monkeypatch) as traffic, torch.inference_mode():
        graph = Graph(shard, MAX_ROWS)
        traffic.taken()
        with module._Watch(GPU), switch.using(graph.attend):
            graph._run(stock.forward, 0)

    assert traffic.taken() == []


@pytest.mark.usefixtures("pretending")
def test_an_unexpected_cache_layout_is_refused(shared: Runner) -> None:
    graph, other = Graph(shared.shard, MAX_ROWS), after(shared, 9)
    for layer in other.layers:
        layer.rows[1].hold(layer.rows[1].buffer.half())

    with pytest.raises(NotReplayable, match="unexpected shape or dtype"):
        graph.record(
            lambda x, cache, places: attends(x, cache, places, graph),
            tokens(MAX_ROWS),
            lambda: other,
        )


@pytest.mark.usefixtures("pretending")
def test_a_graph_that_differs_from_the_forward_is_refused(
    llama_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(forward: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        return lambda: None, forward().clone()

    monkeypatch.setattr(module, "_capture", capture)

    assert not whole(llama_source).is_row_invariant


# On a GPU


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_invariant_on_a_gpu(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    try_all(whole(tiny_model(tmp_path, family), choose("cuda", dtype), dtype=dtype))


@needs_gpu
@pytest.mark.parametrize("family", ["bloom", "qwen3_moe"])
def test_a_gpu_runs_a_model_without_a_graph(tmp_path: Path, family: str) -> None:
    runner = whole(tiny_model(tmp_path, family), choose("cuda", torch.float32))

    assert not runner.is_row_invariant
    given = runner.step(tokens(3), after(runner, 9))
    assert apart(given, stock(runner, tokens(3), after(runner, 9))) < TOLERANCE
