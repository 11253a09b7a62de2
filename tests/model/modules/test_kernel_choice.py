"""The kernel of a matrix is the fastest one, measured once on a machine."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from meshllm.model.kernels import jit
from meshllm.model.modules import kernel_choice
from meshllm.model.modules.kernel_choice import (
    SMALLEST,
    LinearKernel,
    choose,
    fastest,
    has_bf16_dot,
)

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)
TORCH, FMA, DOT = LinearKernel.TORCH, LinearKernel.FMA, LinearKernel.DOT


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Provide an empty cache of measurements."""
    monkeypatch.setattr(jit, "private_folder", lambda: tmp_path)
    fastest.cache_clear()
    yield tmp_path
    fastest.cache_clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect the shapes that are measured; torch is slow for those of 1024 inputs."""
    shapes: list[tuple[int, int]] = []

    def measure(outputs: int, inputs: int) -> dict[str, float]:
        shapes.append((outputs, inputs))
        return {FMA: 2.0, TORCH: 3.0 if inputs == 1024 else 1.0}

    monkeypatch.setattr(kernel_choice, "_measure", measure)
    return shapes


@pytest.mark.parametrize(
    ("times", "kernel"),
    [
        ({FMA: 2.0, DOT: 1.0, TORCH: 3.0}, DOT),
        ({FMA: 1.0, DOT: 2.0, TORCH: 3.0}, FMA),
        ({FMA: 2.0, DOT: 2.0, TORCH: 1.0}, TORCH),
        ({FMA: 1.04, TORCH: 1.0}, FMA),
        ({FMA: 1.06, TORCH: 1.0}, TORCH),
    ],
)
def test_the_fastest_kernel_is_chosen_and_ours_in_a_tie(
    times: dict[str, float], kernel: LinearKernel
) -> None:
    assert choose(times) is kernel


def test_a_shape_is_measured_once_on_a_machine(asked: list[tuple[int, int]]) -> None:
    for _ in range(2):
        fastest.cache_clear()  # as in another process
        assert fastest(2048, 1024) is FMA
        assert fastest(1024, 2048) is TORCH
        assert fastest(150_000, 1024) is fastest(4096, 1024) is FMA

    assert asked == [(2048, 1024), (1024, 2048), (4096, 1024)]


def test_damaged_measurements_are_repeated(asked: list[tuple[int, int]], folder: Path) -> None:
    fastest(2048, 1024)
    (record,) = folder.glob("*.json")
    record.write_text("{")
    fastest.cache_clear()

    assert fastest(2048, 1024) is FMA
    assert len(asked) == 2
    assert "2048x1024" in json.loads(record.read_text())


def test_without_a_folder_it_is_measured_by_each_process(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "private_folder", lambda: None)

    assert fastest(2048, 1024) is FMA
    assert fastest(2048, 1024) is FMA
    assert len(asked) == 1


def test_small_matrices_are_not_measured(asked: list[tuple[int, int]]) -> None:
    assert fastest(64, SMALLEST // 64 - 64) is (DOT if has_bf16_dot() else TORCH)
    assert not asked


def test_every_kernel_is_timed_and_threads_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_BYTES", 1 << 21)
    before = torch.get_num_threads()

    times = kernel_choice._measure(512, 512)

    assert set(times) == {FMA, TORCH, *([DOT] if has_bf16_dot() else [])}
    assert all(seconds > 0 for seconds in times.values())
    assert torch.get_num_threads() == before
