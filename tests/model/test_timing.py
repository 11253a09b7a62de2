"""Timing and memory budget of this machine; the figures themselves are not tested."""

import gc
import time
import weakref
from itertools import count
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.model import cgroups, json_cache
from meshllm.model import timing as module
from meshllm.model.device import CPU
from meshllm.model.files.source import Source, open_folder
from meshllm.model.pauses import pausing
from meshllm.model.shape import free_memory
from meshllm.model.split.meta_model import MetaModel, Part, build
from meshllm.model.split.shard import Shard
from meshllm.model.steps.cuda_graph import Graph
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY
from meshllm.model.steps.runner import Runner
from meshllm.model.timing import (
    BUSY_AGE_S,
    LONGEST_S,
    MAX_AGE_S,
    ROWS,
    Speed,
    measure_speed,
    memory_budget,
)
from meshllm.names import Quant, Span
from meshllm.testing.models import tiny_model
from tests.builders.fake_gpu import OTHER_CPU, graphs_pretended

KNOWN = Speed(((1, 0.5), (8, 0.75)), 0.25)


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not evict CPU caches: the figures are not used."""
    monkeypatch.setattr(module, "uncached_bytes", lambda: 1)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """Collect the spans of the shards that are made."""
    random_shard, found = module._random_shard, list[Span]()

    def making(meta_model: MetaModel, part: Part, **options: Any) -> Shard:
        found.append(part.span)
        return random_shard(meta_model, part, **options)

    monkeypatch.setattr(module, "_random_shard", making)
    return found


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_layer_seconds", lambda *_: KNOWN.layer_s)
    monkeypatch.setattr(module, "_head_seconds", lambda *_: KNOWN.head_s)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "mamba", "gemma3_text", "lfm2"])
def test_any_family_is_timed_without_its_weights(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_S", inf)  # a busy machine skips no number of rows
    found = tiny_model(tmp_path / "model", name)
    for file in found.folder.glob("*.safetensors"):
        file.unlink()

    speed = measure_speed(found, torch.float32, tmp_path)

    context = getattr(found.config, "max_position_embeddings", None) or max(ROWS)
    assert [rows for rows, _ in speed.layer_s] == [rows for rows in ROWS if rows <= context]
    assert all(0 < seconds < 60 for _, seconds in speed.layer_s)
    assert 0 < speed.head_s < 60


@pytest.mark.parametrize("name", ["doge", "diffllama"])
def test_a_family_that_only_stock_steps_can_run_is_timed(tmp_path: Path, name: str) -> None:
    """Attention with a mask of its own, and a norm without weights."""
    found = tiny_model(tmp_path / "model", name, dtype=torch.bfloat16)

    assert measure_speed(found, torch.bfloat16, tmp_path).head_s > 0


@pytest.mark.parametrize(
    ("seconds", "context", "longest"),
    [(1e-9, 4096, 1024), (1e-9, 1000, 256), (LONGEST_S, 4096, 256), (LONGEST_S, 9, 8)],
)
def test_the_largest_number_of_rows_is_skipped_if_slow(
    source: Source, monkeypatch: pytest.MonkeyPatch, seconds: float, context: int, longest: int
) -> None:
    monkeypatch.setattr(module, "_typical", lambda _, rows, __: rows * seconds)
    source.config.max_position_embeddings = context

    with torch.inference_mode():
        table = module._layer_seconds(source, torch.float32, Quant.NONE)

    assert [rows for rows, _ in table] == [rows for rows in ROWS if rows <= longest]


def test_compiling_a_kernel_is_not_timed(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, ran, timed = Runner.prefill, set[int](), set[int]()

    def run(self: Runner, x: Tensor, *args: Any) -> Tensor:
        ran.add(x.shape[1])
        return prefill(self, x, *args)

    def typical(_: Any, rows: int, __: Any) -> float:
        if rows in ran:
            timed.add(rows)
        return 1e-9

    monkeypatch.setattr(Runner, "prefill", run)
    monkeypatch.setattr(module, "_typical", typical)

    with torch.inference_mode():
        module._stock_seconds(source, torch.float32, Quant.NONE, CPU, ROWS)

    assert timed == {1, 8, 16, 32, 128}


def test_what_surrounds_the_layers_counts_with_the_share_of_one(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(module, "_step_seconds", lambda *_: ({}, None))

    with torch.inference_mode():
        table = dict(module._layer_seconds(source, torch.float32, Quant.NONE))

    around = 2.0  # ticks: from the call to the layer, and from the layer to the end
    assert table[128] == pytest.approx(1.0 + around / source.config.num_hidden_layers)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 0.01), (8, 0.01), (128, 0.02)])
def test_a_step_is_as_fast_as_it_can_be_and_a_chunk_as_usual(rows: int, seconds: float) -> None:
    times = iter((0.03, 0.01, 0.02))

    assert module._typical(lambda _: next(times), rows, CPU) == seconds


@pytest.mark.parametrize("quant", [Quant.INT8, Quant.INT4])
def test_quantised_weights_are_timed(tmp_path: Path, quant: Quant) -> None:
    source = tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)

    speed = measure_speed(source, torch.bfloat16, tmp_path, quant)

    assert all(seconds > 0 for _, seconds in speed.layer_s)
    assert speed.head_s > 0


def test_random_weights_are_plausible(source: Source) -> None:
    # Infinities and denormals take longer, and equal rows choose the same expert.
    meta_model = build(source.config, torch.bfloat16)
    part = Part(Span(6, 6), embed=False, head=True)
    shard = module._random_shard(meta_model, part)

    logits = shard.forward(torch.ones(1, 2, 64, dtype=torch.bfloat16), shard.new_cache())

    assert logits.isfinite().all()
    assert len(set(logits.flatten().tolist())) > 50


@pytest.mark.parametrize("is_large", [False, True])
def test_matrices_that_no_cache_holds_share_their_memory(
    source: Source, monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    monkeypatch.setattr(module, "uncached_bytes", lambda: 1 if is_large else 1 << 30)
    meta_model = build(source.config, torch.float32)

    shard = module._random_shard(meta_model, Part(Span(0, 1), embed=False, head=False))

    weights = [each.data_ptr() for each in shard.layer(0).parameters()]
    assert len(weights) > 2
    assert len(set(weights)) == (1 if is_large else len(weights))


def test_a_measurement_is_cached(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_measuring(monkeypatch)
    assert measure_speed(source, torch.float32, tmp_path) == KNOWN
    monkeypatch.setattr(module, "_layer_seconds", None)

    assert measure_speed(source, torch.float32, tmp_path) == KNOWN
    with pytest.raises(TypeError):
        measure_speed(source, torch.bfloat16, tmp_path)


def test_waiting_for_another_process_that_measures_pauses(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_measuring(monkeypatch)
    monkeypatch.setattr(json_cache, "try_lock", lambda _: False)
    monkeypatch.setattr(json_cache, "WAIT_S", 0.01)
    pauses = list[int]()

    with pausing(lambda: pauses.append(1)):
        measure_speed(source, torch.float32, tmp_path)

    assert pauses


def test_other_kernels_and_processors_are_measured_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_measuring(monkeypatch)
    measure_speed(source, torch.float32, tmp_path)
    monkeypatch.setattr(module, "_head_seconds", lambda *_: 0.125)
    assert measure_speed(source, torch.float32, tmp_path) == KNOWN

    for library in ("meshllm", "torch", "transformers", "llvmlite"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(module, library), "__version__", "99.0")
            assert measure_speed(source, torch.float32, tmp_path).head_s == 0.125
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 99)
        assert measure_speed(source, torch.float32, tmp_path).head_s == 0.125
    with monkeypatch.context() as patch:
        patch.setattr(module, "machine", lambda: ("other", "+feature"))
        assert measure_speed(source, torch.float32, tmp_path).head_s == 0.125


@pytest.mark.parametrize("age", [MAX_AGE_S + 1, -60.0])
def test_a_day_later_it_is_measured_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    no_measuring(monkeypatch)
    measure_speed(source, torch.float32, tmp_path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age)
    monkeypatch.setattr(module, "_head_seconds", lambda *_: 0.125)

    assert measure_speed(source, torch.float32, tmp_path).head_s == 0.125


@pytest.mark.parametrize(("share", "head_s"), [(0.5, 0.125), (1.0, KNOWN.head_s)])
def test_what_was_measured_beside_other_programs_is_soon_measured_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, head_s: float
) -> None:
    no_measuring(monkeypatch)
    passed_s = [0.0]

    def measure_layers(*_: object) -> tuple[tuple[int, float], ...]:
        passed_s[0] += 1.0  # of which this thread has a share
        return KNOWN.layer_s

    with monkeypatch.context() as patch:
        patch.setattr(module, "_layer_seconds", measure_layers)
        patch.setattr(time, "perf_counter", lambda: passed_s[0])
        patch.setattr(time, "thread_time", lambda: share * passed_s[0])
        measure_speed(source, torch.float32, tmp_path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + BUSY_AGE_S + 1)
    monkeypatch.setattr(module, "_head_seconds", lambda *_: 0.125)

    assert measure_speed(source, torch.float32, tmp_path).head_s == head_s


def test_a_damaged_record_is_measured_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_measuring(monkeypatch)
    measure_speed(source, torch.float32, tmp_path)
    (record,) = tmp_path.glob("*.json")
    record.write_text('{"at_s": "now"}')

    assert measure_speed(source, torch.float32, tmp_path) == KNOWN


def test_the_budget_is_a_share_of_free_memory(tmp_path: Path) -> None:
    given = memory_budget(cgroup=tmp_path)

    assert 0 < given < free_memory()
    assert memory_budget(1000, cgroup=tmp_path) == 1000
    assert memory_budget(1 << 60, cgroup=tmp_path) < 1 << 60


def test_the_limit_of_a_container_binds(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")

    assert memory_budget(cgroup=tmp_path) == 400_000
    assert memory_budget(share=0.5, cgroup=tmp_path) == 250_000
    assert memory_budget(share=0.5, cgroup=tmp_path, own=7) == 250_007
    assert memory_budget(600_000, cgroup=tmp_path, own=7) == 500_007
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_budget(cgroup=tmp_path) > 1_000_000


def test_the_limit_of_an_older_container_binds(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("1000000\n")
    (folder / "memory.usage_in_bytes").write_text("600000\n")
    (folder / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 100000\n")

    assert memory_budget(cgroup=tmp_path) == 400_000


UNIT = "system.slice/mesh.service"


@pytest.mark.parametrize("limited", [UNIT, "system.slice"], ids=["its own", "that around it"])
@pytest.mark.parametrize(
    ("listed", "mount", "limit", "used", "inactive"),
    [
        (f"0::/{UNIT}", ".", "memory.max", "memory.current", "inactive_file"),
        (
            f"5:cpu,memory:/{UNIT}\n1:name=systemd:/else\n0::/",
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_unit_or_job_binds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limited: str,
    listed: str,
    mount: str,
    limit: str,
    used: str,
    inactive: str,
) -> None:
    (tmp_path / "listed").write_text(f"{listed}\n")
    monkeypatch.setattr(cgroups, "LISTED", tmp_path / "listed")
    for name in (UNIT, "system.slice"):
        folder = tmp_path / mount / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit).write_text("1000000\n" if name == limited else "2000000\n")
        (folder / used).write_text("600000\n")
        (folder / "memory.stat").write_text(f"{inactive} 100000\n")

    assert memory_budget(share=1.0, cgroup=tmp_path) == 500_000


@pytest.mark.parametrize("path", ["/../other", "/docker/7", "/"])
def test_the_mount_binds_a_cgroup_that_is_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    mount, outside = tmp_path / "mount", tmp_path / "other"
    (tmp_path / "listed").write_text(f"0::{path}\n")
    monkeypatch.setattr(cgroups, "LISTED", tmp_path / "listed")
    for folder, most in ((mount, 1_000_000), (outside, 1000)):
        folder.mkdir()
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("500000\n")
        (folder / "memory.stat").write_text("inactive_file 0\n")

    assert memory_budget(share=1.0, cgroup=mount) == 500_000


def test_a_system_without_cgroups_has_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "LISTED", tmp_path / "missing")

    assert memory_budget(cgroup=tmp_path) > 0


def test_a_full_container_has_no_budget(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")

    assert memory_budget(cgroup=tmp_path) == 0


@pytest.mark.parametrize(
    ("family", "dtype", "by_steps"),
    [
        ("llama", torch.bfloat16, [1, 8, 16]),
        ("llama", torch.float32, []),
        ("qwen3_moe", torch.bfloat16, []),
        ("mamba", torch.bfloat16, []),
    ],
)
def test_few_rows_are_timed_as_a_node_runs_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: torch.dtype,
    by_steps: list[int],
) -> None:
    source = tiny_model(tmp_path, family)
    monkeypatch.setattr(module, "_typical", lambda seconds, rows, _: seconds(rows) and 7.0)
    plain = module._stock_seconds
    monkeypatch.setattr(module, "_stock_seconds", lambda *what: dict.fromkeys(plain(*what), 5.0))

    with torch.inference_mode():
        table = module._layer_seconds(source, dtype, Quant.NONE)

    assert [rows for rows, seconds in table if seconds == 7] == by_steps
    assert {rows for rows, _ in table} > {1, 8}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"], ids=["untied", "tied"])
def test_a_part_of_a_large_head_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    source = tiny_model(tmp_path, family)
    text = source.config.get_text_config()
    whole, width = text.vocab_size, text.hidden_size
    monkeypatch.setattr(module, "_typical", lambda seconds, rows, _: seconds(rows) and 0.5)
    monkeypatch.setattr(module, "_HEAD_BYTES", 8 * width * 2)
    random_shard, heads = module._random_shard, list[int]()

    def making(*what: Any, **options: Any) -> Shard:
        shard = random_shard(*what, **options)
        heads.append(len(shard.model.get_output_embeddings().weight))
        return shard

    monkeypatch.setattr(module, "_random_shard", making)

    with torch.inference_mode():
        seconds = module._head_seconds(source, torch.bfloat16, Quant.NONE)

    assert seconds == 0.5 * whole / 8
    assert heads == [8]
    assert text.vocab_size == whole


@pytest.mark.parametrize(("layers", "timed"), [(99, 6), (3, 3), (0, 1)])
def test_where_little_memory_is_free_fewer_layers_are_timed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spans: list[Span],
    layers: int,
    timed: int,
) -> None:
    source = tiny_model(tmp_path, "llama")
    sizes = module._sizes(build(source.config, torch.bfloat16))
    assert len(sizes) == 6
    monkeypatch.setattr(module, "memory_budget", lambda **_: 4 * layers * sizes[0] + 3)
    monkeypatch.setattr(module, "_MIN_BYTES", 0)
    monkeypatch.setattr(module, "_typical", lambda seconds, rows, _: seconds(rows))
    with torch.inference_mode():
        module._step_seconds(source, torch.bfloat16, Quant.NONE, CPU, [1])
        head = module._head_seconds(source, torch.bfloat16, Quant.NONE)

    assert spans[0] == Span(0, timed)
    assert head > 0


@pytest.mark.parametrize(("free", "written"), [(0, 500), (4000, 1000), (1 << 40, 2000)])
def test_caches_are_evicted_with_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, written: int
) -> None:
    monkeypatch.setattr(module, "uncached_bytes", lambda: 2000)
    monkeypatch.setattr(module, "_MIN_BYTES", 500)
    monkeypatch.setattr(module, "memory_budget", lambda **_: free)
    made: list[int] = []
    empty = torch.empty

    def making(size: int, **options: Any) -> Tensor:
        made.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", making)

    assert module._typical(float, 1, CPU) == 1
    assert made == [written]


def test_one_shard_is_timed_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_model(tmp_path, "llama")
    made: list[weakref.ref[nn.Module]] = []
    random_shard = module._random_shard

    def making(*what: Any, **options: Any) -> Shard:
        assert [model for model in made if model() is not None] == []
        shard = random_shard(*what, **options)
        made.append(weakref.ref(shard.model))
        return shard

    monkeypatch.setattr(module, "_random_shard", making)
    with torch.inference_mode():
        module._layer_seconds(source, torch.bfloat16, Quant.NONE)

    assert len(made) == 2


def test_a_layer_that_is_timed_alone_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spans: list[Span]
) -> None:
    source = tiny_model(tmp_path, "llama")
    monkeypatch.setattr(module, "_STEP_BYTES", 1)
    monkeypatch.setattr(module, "_MIN_BYTES", 0)
    with torch.inference_mode():
        table = module._layer_seconds(source, torch.bfloat16, Quant.NONE)

    assert [len(span) for span in spans] == [1]
    longest = source.config.max_position_embeddings
    assert [rows for rows, _ in table] == [rows for rows in ROWS if rows <= longest]
    assert all(0 < seconds < 60 for _, seconds in table)


def test_nothing_that_was_timed_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tmp_path / "model", "llama")
    made: list[weakref.ref[nn.Module]] = []
    random_shard = module._random_shard

    def making(*what: Any, **options: Any) -> Shard:
        shard = random_shard(*what, **options)
        made.append(weakref.ref(shard.model))
        return shard

    monkeypatch.setattr(module, "_random_shard", making)
    gc.collect()
    gc.disable()
    try:
        measure_speed(source, torch.bfloat16, tmp_path)
        left = [model for model in made if model() is not None]
    finally:
        gc.enable()

    assert len(made) == 3
    assert left == []


def test_a_gpu_is_timed_by_its_graph(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    step = Graph.step

    def counting(graph: Graph, x: Tensor, *given: Any) -> Tensor:
        launched.append(x.shape[1])
        return step(graph, x, *given)

    monkeypatch.setattr(Graph, "step", counting)
    with graphs_pretended(monkeypatch), torch.inference_mode():
        table, _ = module._step_seconds(source, torch.float32, Quant.NONE, OTHER_CPU, [1, 8])
        assert launched.count(8) > STEPS_BEFORE_REPLAY
        head = module._head_seconds(source, torch.float32, Quant.NONE, OTHER_CPU)

    assert list(table) == [1, 8]
    assert all(seconds > 0 for seconds in (*table.values(), head))
