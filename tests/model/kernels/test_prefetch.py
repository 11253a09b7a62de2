"""How weights are read is measured once on a machine, and changes no bit."""

from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from meshllm.model.hardware import uncached_bytes
from meshllm.model.kernels import gemm_bf16, gemm_int4, gemm_int8, jit, measured, prefetch
from meshllm.model.kernels.gemm_bf16 import Bf16Matrix
from meshllm.model.kernels.ir import LANES
from meshllm.model.modules import int4, int8
from meshllm.model.modules.kernel_choice import has_bf16_dot

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Provide an empty cache of measurements."""
    monkeypatch.setattr(measured, "cache_path", lambda: tmp_path)
    monkeypatch.setattr(measured, "ENOUGH_S", inf)
    kept = [
        *(gemm_int8._prefetches, gemm_int4._prefetches),
        gemm_bf16._choose_way,
    ]
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.mark.parametrize(
    ("threads", "expected"),
    [(1, {"plain": 9.05, "prefetched": 8.05}), (3, {"plain": 9.0, "prefetched": 8.0})],
    ids=["median", "shortest"],
)
def test_ways_are_measured_in_turns_by_the_rounds_after_the_first(
    monkeypatch: pytest.MonkeyPatch, threads: int, expected: dict[str, float]
) -> None:
    asked = list[tuple[str, int]]()
    seconds = {"plain": 9.0, "prefetched": 8.0}

    def multiply(way: str, number: int) -> None:
        asked.append((way, number))

    def timed(run: Callable[[], object], on: int) -> float:
        assert on == threads
        run()
        name, number = asked[-1]
        is_first = len(asked) <= 4
        return 100.0 if is_first else seconds[name] + number / 10

    monkeypatch.setattr(prefetch, "seconds_of", timed)

    times = prefetch.reading_times("kernel", "row", threads, [*seconds], lambda: (2, multiply))

    a_round = [("plain", 0), ("plain", 1), ("prefetched", 0), ("prefetched", 1)]
    assert asked == a_round * (1 + prefetch._ROUNDS)
    assert times == pytest.approx(expected)


def test_what_was_measured_needs_no_matrices() -> None:
    prepare = Mock(return_value=(1, Mock()))

    first, again = (
        prefetch.reading_times("kernel", "row", 1, ["plain", "prefetched"], prepare)
        for _ in range(2)
    )

    assert first == again
    assert prepare.call_count == 1


@pytest.mark.parametrize("module", [gemm_int8, gemm_int4])
@pytest.mark.parametrize("helps", [False, True])
def test_a_row_is_prefetched_if_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *, helps: bool
) -> None:
    times = {"plain": 1.0, "prefetched": 0.9 if helps else 1.1}
    monkeypatch.setattr(prefetch, "reading_times", lambda *_: times)

    assert module._prefetches(1) is helps


@pytest.mark.parametrize("module", [gemm_int8, gemm_int4])
def test_a_kernel_is_measured_with_more_weights_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    multiplied = list[tuple[Tensor, bool]]()

    def multiply(_row: Tensor, weights: Tensor, _scales: Tensor, has_prefetch: bool) -> None:
        multiplied.append((weights, has_prefetch))

    monkeypatch.setattr(module, "_multiply", multiply)
    module._prefetches(torch.get_num_threads())

    a_round = multiplied[: len(multiplied) // (1 + prefetch._ROUNDS)]
    for way in (False, True):
        weights = {each.data_ptr(): each.nbytes for each, is_way in a_round if is_way is way}
        assert sum(weights.values()) >= uncached_bytes()


@pytest.mark.skipif(not has_bf16_dot(), reason="no instruction for pairs of bf16 here")
def test_ways_of_bf16_are_measured_with_more_weights_than_caches_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiplied, multiply = list[int](), Bf16Matrix._multiply

    def note(matrix: Bf16Matrix, rows: Tensor, way: gemm_bf16._ReadMode) -> Tensor:
        multiplied.append(matrix._weights)
        return multiply(matrix, rows, way)

    monkeypatch.setattr(prefetch, "_ROUNDS", 1)
    monkeypatch.setattr(Bf16Matrix, "_multiply", note)

    threads = torch.get_num_threads()
    assert gemm_bf16._choose_way(1, 1, 64, 1024, threads) in gemm_bf16._READ_MODES.values()

    assert len(set(multiplied)) * 2 * 2048 * 1024 >= uncached_bytes()


@pytest.mark.parametrize(
    ("rows", "tiles", "outputs", "inputs", "way"),
    [
        (1, 1, 6144, 256, "one stream"),  # stays in a CPU cache
        (1, 1, 256, 704, "one stream"),
        (1, 1, 49152, 576, "measured"),
        (1, 1, 64, 768, "measured"),
        (2, 1, 64, 6144, "prefetched"),  # the rows stay in the nearest cache
        (2, 1, 64, 6208, "together"),
        (3, 1, 64, 4096, "prefetched"),
        (3, 1, 64, 4160, "together"),
        (4, 1, 64, 64, "together"),
        (4, 1, 64, 3072, "measured"),
        (4, 1, 64, 3136, "together"),
        (6, 1, 64, 2048, "measured"),
        (6, 2, 64, 2048, "together"),  # the second tile finds the weights in a cache
        (7, 1, 64, 1024, "together"),
        (4, 1, 63, 1024, "prefetched"),  # not in fours
        (1, 1, 64, (1 << 16) + 64, "prefetched"),  # would take gigabytes
    ],
)
def test_how_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, rows: int, tiles: int, outputs: int, inputs: int, way: str
) -> None:
    one = {"a stream": 3.0, "four streams": 1.0, "a stream, prefetched": 2.0}
    several = {"a stream, prefetched": 1.0, "four streams, prefetched": 2.0}
    measured = Mock(return_value=one if rows == 1 else several)
    monkeypatch.setattr(gemm_bf16, "reading_times", measured)
    monkeypatch.setattr(gemm_bf16, "registers", lambda: 32)

    found = gemm_bf16._choose_way(rows, tiles, outputs, inputs, 1)

    assert found == {
        "one stream": (1, False), "measured": (4, False) if rows == 1 else (1, True),
        "prefetched": (1, True), "together": (4, True),
    }[way]  # fmt: skip
    assert measured.call_count == (way == "measured")


@pytest.mark.parametrize(("outputs", "registers"), [(66, 32), (64, 16)])
def test_four_streams_need_their_outputs_and_registers(
    monkeypatch: pytest.MonkeyPatch, outputs: int, registers: int
) -> None:
    times = {"a stream": 3.0, "four streams": 1.0, "a stream, prefetched": 2.0}
    monkeypatch.setattr(gemm_bf16, "reading_times", lambda *_: times)
    monkeypatch.setattr(gemm_bf16, "registers", lambda: registers)

    assert gemm_bf16._choose_way(1, 1, outputs, 1024, 1) == (1, True)


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
    results = []
    for helps in (False, True):
        for module in (gemm_int8, gemm_int4):
            monkeypatch.setattr(module, "_prefetches", lambda _, helps=helps: helps)
        results.append(products(x, weight))

    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.skipif(not has_bf16_dot(), reason="no instruction for pairs of bf16 here")
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("bias", [None, torch.arange(128).bfloat16()])
def test_ways_to_read_change_no_bit(rows: int, bias: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    matrix = Bf16Matrix(torch.randn(128, 256, generator=generator).bfloat16(), bias, dot=True)
    together = [1, 4] if jit.registers() > LANES else [1]

    first, *others = (
        matrix._multiply(x, gemm_bf16._ReadMode(outputs, has_prefetch))
        for outputs in together
        for has_prefetch in (False, True)
    )

    assert all(torch.equal(first, other) for other in others)


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
        for module in (gemm_int8, gemm_int4, gemm_bf16):
            monkeypatch.setattr(module, "claim", lambda *_, run=run: run)
        results.append(products(x, weight))

    first, *others = results
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
