"""The same model on a GPU: one transfer there and one back per job, without waits between."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from meshllm.errors import ModelError, UserError
from meshllm.model import device as module
from meshllm.model import timing
from meshllm.model.capacity import shape_of
from meshllm.model.device import (
    CPU,
    all_to_device,
    all_to_host,
    choose,
    default_threads,
    is_out_of_memory,
    name_of,
    refused_gpu,
    to_device,
    to_host,
    using_threads,
)
from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity.cases import WholeSession
from meshllm.model.speculation.draft_model import Draft
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant, Span
from meshllm.testing.models import stock_model, tiny_model
from tests.builders.fake_gpu import GPU, ONCE, needs_gpu, pretended

PARTS = (Span(0, 1), Span(1, 6), Span(6, 6))
Gpus = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Make torch find so many GPUs of a generation."""

    def see(count: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fake 100")

    return see


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


def load(source: Source, device: torch.device, dtype: torch.dtype | None = None) -> list[Runner]:
    """Load the parts of a model of 6 layers, for steps of one row at a time."""
    shards = [
        load_shard(source, span, embed=not span.start, head=not span, dtype=dtype, device=device)
        for span in PARTS
    ]
    return [Runner(shard) for shard in shards]


def caches_of(runners: Sequence[Runner]) -> list[SpanCache | None]:
    """Make a cache for each part but the head, as nodes do."""
    return [runner.new_cache() if runner.shard.span else None for runner in runners]


# Choosing a device


@pytest.mark.parametrize(("of_torch", "usable", "threads"), [(8, 2, 2), (4, 64, 4)])
def test_no_more_threads_are_used_than_cores_can_be(
    monkeypatch: pytest.MonkeyPatch, of_torch: int, usable: int, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: of_torch)
    monkeypatch.setattr(module, "usable_cores", lambda: usable)

    assert default_threads() == threads


@pytest.mark.parametrize(("asked", "threads"), [(None, 3), (2, 2)])
def test_threads_are_restored(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, threads: int
) -> None:
    monkeypatch.setattr(module, "default_threads", lambda: 3)
    before = torch.get_num_threads()

    with using_threads(asked):
        assert torch.get_num_threads() == threads

    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("wanted", "count", "found"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_device_is_found_by_its_name(gpus: Gpus, wanted: str, count: int, found: str) -> None:
    gpus(count)

    assert choose(wanted, torch.bfloat16) == torch.device(found)


@pytest.mark.parametrize(
    ("wanted", "count", "reason"),
    [
        ("cuda", 0, "finds no GPU$"),
        ("cuda:1", 1, "There is no device `cuda:1`: torch .* finds 1 GPU$"),
        ("cuda:2", 2, "finds 2 GPUs$"),
        ("gpu", 1, "Invalid device `gpu`"),
        ("cuda:", 1, "Invalid device `cuda:`"),
        ("cuda:-1", 1, "Invalid device `cuda:-1`"),
        ("", 1, "Invalid device ``"),
        (f"cuda:{'9' * 5000}", 1, "Invalid device `cuda:9"),
    ],
)
def test_an_invalid_device_is_refused(gpus: Gpus, wanted: str, count: int, reason: str) -> None:
    gpus(count)

    with pytest.raises(UserError, match=reason):
        choose(wanted, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "quant", "capability", "reason"),
    [
        (torch.float32, Quant.INT8, (9, 0), "Weights in int8 run on the CPU only, not on `cuda:0`"),
        (torch.bfloat16, Quant.NONE, (7, 5), "`cuda:0 Fake 100` does not support bfloat16"),
    ],
)
def test_unsupported_weights_stay_on_the_cpu_or_are_refused(
    gpus: Gpus,
    dtype: torch.dtype,
    quant: Quant,
    capability: tuple[int, int],
    reason: str,
) -> None:
    gpus(1, capability)

    assert choose("auto", dtype, quant) == CPU

    assert refused_gpu("auto", dtype, quant) == reason
    assert refused_gpu("cpu", dtype, quant) == refused_gpu("auto", torch.float16) == ""
    with pytest.raises(ModelError, match=reason) as caught:
        choose("cuda", dtype, quant)
    assert "--device cpu" in (caught.value.hint or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_older_gpu_takes_other_dtypes(gpus: Gpus, dtype: torch.dtype) -> None:
    gpus(1, (7, 5))

    assert choose("auto", dtype) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("modules", "programs", "lacking"),
    [
        (["triton"], ["gcc"], None),
        (["triton"], ["clang"], None),
        (["triton"], [], "a C compiler"),
        ([], ["gcc"], "Triton"),
    ],
)
def test_requirements_of_cuda_graphs_are_checked(
    monkeypatch: pytest.MonkeyPatch,
    modules: Sequence[str],
    programs: Sequence[str],
    lacking: str | None,
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(module, "find_spec", lambda name: name if name in modules else None)
    monkeypatch.setattr(module, "which", lambda name: name if name in programs else None)

    assert module.missing_for_cuda_graphs() == lacking


def test_a_c_compiler_can_be_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    monkeypatch.setattr(module, "which", lambda _: None)
    monkeypatch.setenv("CC", "/opt/cc")

    assert module.missing_for_cuda_graphs() is None


# Transfers


def test_on_the_cpu_nothing_is_copied() -> None:
    parts = [torch.ones(1, 2, 4), torch.ones(1, 3, 4)]

    assert to_device(parts[0], CPU) is parts[0]
    assert to_host(parts[0]) is parts[0]
    for same in (all_to_device(parts, CPU), all_to_host(parts)):
        assert [id(part) for part in same] == [id(part) for part in parts]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bloom"])
def test_a_job_is_copied_there_and_back_once_and_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    runners = load(tiny_model(tmp_path, family, dtype=torch.bfloat16), GPU)
    tokens = torch.zeros(1, 8, dtype=torch.long)

    with pretended(monkeypatch) as traffic:
        x = tokens
        caches = [runner.new_cache() for runner in runners[:2]]
        for runner, cache in zip(runners[:2], caches, strict=True):
            x = runner.prefill(x, cache)
            assert traffic.taken() == ONCE
        for rows in (1, 3, 2):
            x = tokens[:, :rows]
            for runner, held in zip(runners, (*caches, None), strict=True):
                x = runner.step(x, held)
                assert traffic.taken() == ONCE

    assert (x.shape[:2], x.device) == ((1, 2), CPU)
    assert [cache.length for cache in caches] == [14, 14]


def test_batched_sessions_are_copied_together(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = load(source, GPU)
    parts = [torch.zeros(1, rows, dtype=torch.long) for rows in (3, 1, 2, 17)]

    with pretended(monkeypatch) as traffic:
        for runner in runners:
            caches = [runner.new_cache() if runner.shard.span else None for _ in parts]
            parts = runner.step_many(parts, caches)
            assert traffic.taken() == ONCE

    assert [part.shape[1] for part in parts] == [3, 1, 2, 17]
    assert {part.device for part in parts} == {CPU}


def test_a_cache_is_branched_and_cropped_on_its_device(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(source, GPU)[0]
    cache = runner.new_cache()

    with pretended(monkeypatch) as traffic:
        runner.prefill(torch.zeros(1, 9, dtype=torch.long), cache)
        traffic.taken()
        other = cache.branch(5)
        other.crop(2)

    assert traffic.taken() == []
    assert (cache.length, other.length) == (9, 2)
    assert other.layers[0].keys.device == GPU


def test_a_draft_reads_with_one_transfer_there_and_back(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Draft(source, shape_of(source), 100)

    with pretended(monkeypatch) as traffic:
        drafting = draft.load(GPU)
        traffic.taken()
        drafting.read([1, 2, 3], drafting.new_cache())

    assert traffic.taken() == ONCE


# Loading


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text", "gpt2"])
def test_all_of_a_part_is_on_its_device(
    tmp_path: Path, family: str, dtype: torch.dtype | None
) -> None:
    runners = load(tiny_model(tmp_path, family), GPU, dtype)

    for runner in runners:
        model = runner.shard.model
        assert runner.shard.device == GPU
        assert {each.device for each in (*model.parameters(), *model.buffers())} == {GPU}


def test_only_the_cpu_has_another_layout(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[object] = []
    monkeypatch.setattr(
        "meshllm.model.modules.replacement.replace_linears",
        lambda model, **_: replaced.append(model),
    )

    load(source, GPU)
    load(source, CPU)

    assert len(replaced) == len(PARTS)


# Memory and speed


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "no room"),
        torch.OutOfMemoryError("no room"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        RuntimeError("unable to mmap 9 bytes from file <x>: Cannot allocate memory (12)"),
        RuntimeError("Could not allocate memory for Tensor SizesAndStrides!"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=repr,
)
def test_an_allocation_that_failed_is_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_torch_says_that_an_allocation_failed_as_it_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("this cache type cannot allocate a ring buffer"),
        OSError(errno.ENOSPC, "Cannot allocate memory"),
        ModelError("out of memory"),
    ],
    ids=repr,
)
def test_what_model_code_says_of_its_allocations_is_not_taken_for_a_lack_of_memory(
    error: Exception,
) -> None:
    assert not is_out_of_memory(error)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)


@pytest.mark.usefixtures("free")
def test_the_budget_of_a_gpu_is_its_own_memory() -> None:
    gpu = torch.device("cuda", 1)

    assert timing.memory_budget(device=gpu) == 640
    assert timing.memory_budget(10_000, device=gpu) == 800


@pytest.mark.usefixtures("free")
def test_timing_takes_no_more_memory_than_a_full_gpu_has() -> None:
    assert timing._affordable(10**9, torch.device("cuda", 1)) == timing._MIN_BYTES


def test_each_device_has_its_own_speed(
    source: Source, tmp_path: Path, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def seconds(_source: Source, _dtype: object, _quant: object, device: torch.device) -> float:
        asked.append(device)
        return 0.5

    monkeypatch.setattr(timing, "_head_seconds", seconds)
    monkeypatch.setattr(timing, "_layer_seconds", lambda *_: ((1, 0.5),))
    gpus(1)
    devices = [CPU, torch.device("cuda", 0), CPU]

    for device in devices:
        timing.measure_speed(source, torch.float32, tmp_path, device=device)

    assert asked == devices[:2]


def test_timing_waits_for_the_gpu(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_step_seconds", lambda *_: ({}, None))

    with pretended(monkeypatch) as traffic, torch.inference_mode():
        timing._layer_seconds(source, torch.float32, Quant.NONE, GPU)
        layer = traffic.taken()
        timing._head_seconds(source, torch.float32, Quant.NONE, GPU)
        head = traffic.taken()

    assert layer[-6:] == ["wait", "there", "wait", "wait", "back", "wait"]
    assert head[-4:] == ["wait", *ONCE]


# On a GPU


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "qwen3_moe"])
def test_the_parts_are_the_stock_model(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    source = tiny_model(tmp_path, family)
    gpu = choose("cuda", dtype)
    runners, stock = load(source, gpu, dtype), stock_model(source, dtype).to(gpu)
    ids = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(0))

    caches, whole = caches_of(runners), WholeSession(stock)
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    for rows in (ids[:, :20], *torch.split(ids[:, 20:], 1, 1)):
        x = rows
        for runner, cache in zip(runners, caches, strict=True):
            x = runner.prefill(x, cache) if cache else runner.step(x, cache)
        with torch.inference_mode():
            expected = whole.write(rows.to(gpu))

        torch.testing.assert_close(x, expected.cpu(), rtol=limit, atol=limit)


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_no_layer_waits(tmp_path: Path, family: str) -> None:
    runners = load(tiny_model(tmp_path, family), choose("cuda", torch.float32))
    tokens = to_device(torch.zeros(1, 9, dtype=torch.long), runners[0].shard.device)

    caches = caches_of(runners)
    for rows in (9, 1):  # the first call may wait
        for mode in ("default", "error"):
            x = tokens[:, :rows]
            torch.cuda.set_sync_debug_mode(mode)
            try:
                for runner, cache in zip(runners, caches, strict=True):
                    x = runner.shard.forward(x, cache)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    assert to_host(x).isfinite().all()


@needs_gpu
def test_a_gpu_is_timed(source: Source, tmp_path: Path) -> None:
    gpu = choose("cuda", torch.float32)

    found = timing.measure_speed(source, torch.float32, tmp_path, device=gpu)

    assert all(0 < seconds < 60 for _, seconds in found.layer_s)
    assert 0 < found.head_s < 60
    assert 0 < timing.memory_budget(device=gpu) < torch.cuda.mem_get_info(gpu)[1]
    assert torch.cuda.get_device_name(gpu) in name_of(gpu)
