"""Whether prefetches help is measured once on a machine, and changes no bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import gemm_int4, gemm_int8, jit, prefetch
from meshllm.model.kernels.gemm_bf16 import Bf16Matrix
from meshllm.model.modules import int4, int8
from meshllm.model.modules.kernel_choice import has_bf16_dot

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide an empty cache of measurements."""
    monkeypatch.setattr(jit, "private_folder", lambda: tmp_path)
    measured = prefetch.helps  # a test may replace it
    measured.cache_clear()
    yield
    measured.cache_clear()


class Clock:
    """The CPU time of a thread that only reads."""

    def __init__(self, seconds: dict[bool, float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.places: list[int] = []

    def reader(self, ahead: bool) -> Callable[..., None]:
        def read(_blocks: int, _threads: int, place: int, *_: int) -> None:
            self.now += self.seconds[ahead]
            self.places.append(place)

        return read


@pytest.mark.parametrize(
    ("plain", "fetched", "expected"), [(1.0, 0.9, True), (1.0, 0.97, False), (1.0, 1.5, False)]
)
def test_prefetches_are_used_if_they_are_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, plain: float, fetched: float, expected: bool
) -> None:
    clock = Clock({False: plain, True: fetched})
    monkeypatch.setattr(prefetch, "_reader", clock.reader)
    monkeypatch.setattr("time.thread_time", lambda: clock.now)

    assert prefetch.helps() is expected


def test_no_part_is_read_again_before_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({False: 1.0, True: 1.0})
    monkeypatch.setattr(prefetch, "_reader", clock.reader)

    prefetch.helps()

    parts = len(set(clock.places))
    assert len(clock.places) > parts
    assert clock.places == clock.places[:parts] * (len(clock.places) // parts)


def test_the_kernel_reads_what_it_should() -> None:
    memory = torch.zeros(64, 16, dtype=torch.int32)
    memory[63, 5], memory[0, 5], memory[7, 15] = 4, 1, -1
    for ahead in (False, True):
        found = torch.empty(16, dtype=torch.int32)
        prefetch._reader(ahead)(1, 1, memory.data_ptr(), found.data_ptr(), 64)
        assert found.tolist() == [0] * 5 + [5] + [0] * 9 + [-1]


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([True])
    monkeypatch.setattr(prefetch, "_measure", lambda: next(measured))

    for _ in range(2):
        prefetch.helps.cache_clear()  # as in another process
        assert prefetch.helps() is True


def test_without_a_folder_a_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "private_folder", lambda: None)
    monkeypatch.setattr(prefetch, "_measure", lambda: True)

    assert prefetch.helps() is True


@pytest.mark.parametrize(
    ("outputs", "inputs", "is_measured"),
    [(6144, 256, False), (256, 704, False), (49152, 576, True), (64, 768, True)],
)
def test_nothing_is_measured_for_small_matrices(
    monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, *, is_measured: bool
) -> None:
    measure = Mock(return_value=True)
    monkeypatch.setattr(prefetch, "_measure", measure)

    assert prefetch.helps_to_read(outputs, inputs) is is_measured
    assert measure.call_count == is_measured


def products(x: Tensor, weight: Tensor) -> list[Tensor]:
    found = [kind.pack(weight) for kind in (int8, int4)]
    products = [
        gemm.multiply(x, *packed.values())
        for gemm, packed in zip((gemm_int8, gemm_int4), found, strict=True)
    ]
    own = [False, True] if has_bf16_dot() else [False]
    return products + [Bf16Matrix(weight.bfloat16(), dot=dot).gemv(x) for dot in own]


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_prefetches_change_no_bit(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    weight = torch.randn(128, 256, generator=generator)
    monkeypatch.setattr(prefetch, "NARROW", 0)
    results = []
    for helps in (False, True):
        for module in (gemm_int8, gemm_int4, prefetch):
            monkeypatch.setattr(module, "helps", lambda helps=helps: helps)
        results.append(products(x, weight))

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("blocks", "size", "threads", "run"),
    [
        (64, 1 << 15, 2, 8),  # the threads' shares
        (1000, 1 << 15, 2, 16),  # half a MiB
        (1000, 1 << 20, 2, 1),  # a block is long enough
        (3, 1 << 15, 2, 1),
    ],
)
def test_threads_claim_runs_of_blocks(blocks: int, size: int, threads: int, run: int) -> None:
    assert prefetch.claim(blocks, size, threads) == run


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 16, 40])
def test_runs_change_no_bit(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    weight = torch.randn(832, 256, generator=generator)
    results = []
    for run in (1, 3, 64):
        for module in (gemm_int8, gemm_int4, prefetch):
            monkeypatch.setattr(module, "claim", lambda *_, run=run: run)
        results.append(products(x, weight))

    first, *others = results
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
