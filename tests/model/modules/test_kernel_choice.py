"""The kernel of a matrix is the fastest one, measured once on a machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshllm.model.kernels import jit, measured
from meshllm.model.modules import kernel_choice
from meshllm.model.modules.kernel_choice import (
    FEWEST,
    MOST,
    LinearKernel,
    choose,
    fastest,
    has_bf16_dot,
    has_slow_dot,
)

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)
TORCH, FMA, DOT = LinearKernel.TORCH, LinearKernel.FMA, LinearKernel.DOT


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide an empty cache of measurements."""
    monkeypatch.setattr(measured, "cache_path", lambda: tmp_path)
    fastest.cache_clear()
    yield tmp_path
    fastest.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the numbers of inputs that are measured; torch is slow with 1024."""
    found: list[int] = []

    def measure(inputs: int) -> dict[str, float]:
        found.append(inputs)
        return {FMA: 2.0, TORCH: 3.0 if inputs == 1024 else 1.0}

    monkeypatch.setattr(kernel_choice, "_measure", measure)
    return found


@pytest.mark.parametrize(
    ("times", "kernel"),
    [
        ({FMA: 2.0, DOT: 1.0, TORCH: 3.0}, DOT),
        ({FMA: 1.0, DOT: 2.0, TORCH: 3.0}, FMA),
        ({FMA: 2.0, DOT: 2.0, TORCH: 1.0}, TORCH),
        ({FMA: 1.14, TORCH: 1.0}, FMA),
        ({FMA: 1.16, TORCH: 1.0}, TORCH),
    ],
)
def test_the_fastest_kernel_is_chosen_and_ours_in_a_tie(
    times: dict[str, float], kernel: LinearKernel
) -> None:
    assert choose(times) is kernel


@pytest.mark.skipif(not has_bf16_dot(), reason="no instruction for pairs of bf16 here")
@pytest.mark.parametrize("has_matrices", [False, True])
def test_only_kernels_with_the_bits_of_prompts_are_tried(
    monkeypatch: pytest.MonkeyPatch, has_matrices: bool
) -> None:
    monkeypatch.setattr(kernel_choice, "multiplies_matrices", lambda: has_matrices)
    weights = torch.zeros(1, 64, 64, dtype=torch.bfloat16)

    tried = [kernel for kernel, _ in kernel_choice._candidates(weights)]

    assert tried == ([FMA] if has_matrices else []) + [DOT, TORCH]


@pytest.mark.parametrize("order", ["as it is", "another"])
def test_torch_is_timed_with_packed_copies_only_if_they_have_its_bits(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    packed = list[Tensor]()

    def pack(weight: Tensor) -> kernel_choice.Multiply:
        packed.append(weight)
        places = torch.arange(weight.shape[1])
        if order == "another":
            places = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        return lambda x: functional.linear(x[:, places], weight[:, places])

    monkeypatch.setattr(kernel_choice, "_packed", pack)
    weights = torch.ones(3, 64, 1024, dtype=torch.bfloat16)

    (*_, (kernel, products)) = kernel_choice._candidates(weights)

    assert (kernel, len(products)) == (TORCH, 3)
    assert len(packed) - 1 == (0 if order == "another" else 3)  # but for a probe


def test_a_number_of_inputs_is_measured_once_on_a_machine(asked: list[int]) -> None:
    for _ in range(2):
        fastest.cache_clear()  # as in another process
        assert fastest(1024) is FMA
        assert fastest(2048) is TORCH

    assert asked == [1024, 2048]


@pytest.mark.parametrize("inputs", [FEWEST - 64, MOST + 64, 2**31])
def test_matrices_of_few_or_absurdly_many_inputs_are_not_measured(
    asked: list[int], inputs: int
) -> None:
    assert fastest(inputs) is (DOT if has_bf16_dot() else TORCH)
    assert not asked


def test_every_kernel_is_timed_and_threads_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_BYTES", 1 << 21)
    before = torch.get_num_threads()

    times = kernel_choice._measure(512)

    assert {TORCH, DOT if has_bf16_dot() else FMA} <= set(times) <= {FMA, TORCH, DOT}
    assert all(seconds > 0 for seconds in times.values())
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("has_dot", "has_matrices", "fma_s", "is_slow"),
    [
        (True, False, 0.89, True),
        (True, False, 0.91, False),
        (True, True, 0.1, False),
        (False, False, 0.1, False),
    ],
)
def test_the_instruction_for_pairs_is_slow_if_float32_clearly_beats_it_with_a_prompt(
    monkeypatch: pytest.MonkeyPatch,
    has_dot: bool,
    has_matrices: bool,
    fma_s: float,
    is_slow: bool,
) -> None:
    monkeypatch.setattr(kernel_choice, "has_bf16_dot", lambda: has_dot)
    monkeypatch.setattr(kernel_choice, "multiplies_matrices", lambda: has_matrices)
    monkeypatch.setattr(kernel_choice, "_measure_prompt", lambda: {DOT: 1.0, FMA: fma_s})

    assert has_slow_dot.__wrapped__() is is_slow


@pytest.mark.skipif(not has_bf16_dot(), reason="no instruction for pairs of bf16 here")
def test_both_kernels_of_a_prompt_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_PROMPT", (13, 64, 64))
    before = torch.get_num_threads()

    times = kernel_choice._measure_prompt()

    assert set(times) == {DOT, FMA}
    assert all(seconds > 0 for seconds in times.values())
    assert torch.get_num_threads() == before
