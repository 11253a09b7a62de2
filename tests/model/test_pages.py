"""Advice about memory pages changes no content."""

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from meshllm.model.pages import LEAST, huge_zeros, page_out, prefer_huge_pages

SIZES = 64, LEAST // 4 + 3


@pytest.mark.parametrize("size", SIZES)
def test_zeros_are_zeros_and_can_be_written(size: int) -> None:
    tensor = huge_zeros(3, size, dtype=torch.int32)

    assert tensor.shape == (3, size)
    assert tensor.dtype is torch.int32
    assert not tensor.any()
    tensor[1] = torch.arange(size, dtype=torch.int32)
    page_out(tensor)
    assert torch.equal(tensor.sum(1), torch.tensor([0, size * (size - 1) // 2, 0]))


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_more_zeros_than_there_is_memory_for_are_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        huge_zeros(1 << 60, dtype=torch.uint8)


def test_a_tensor_of_a_file_reads_the_same(tmp_path: Path) -> None:
    stored = torch.arange(LEAST // 4)
    save_file({"first": torch.ones(3), "stored": stored}, tmp_path / "file.safetensors")
    with safe_open(tmp_path / "file.safetensors", framework="pt") as file:
        tensor = prefer_huge_pages(file.get_tensor("stored"))

    assert torch.equal(tensor, stored)
    page_out(tensor)
    assert torch.equal(tensor, stored)


def test_tensors_without_memory_here_are_left_alone() -> None:
    tensor = torch.empty(LEAST, device="meta")

    assert prefer_huge_pages(tensor) is tensor


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_large_tensors_are_advised_and_small_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int]] = []

    class Library:
        def __init__(self, _: None) -> None: ...

        def madvise(self, begin: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> None:
            asked.append((size.value, advice))

    monkeypatch.setattr("ctypes.CDLL", Library)

    prefer_huge_pages(torch.empty(LEAST - 1, dtype=torch.uint8))
    assert not asked
    huge_zeros(LEAST, dtype=torch.uint8)
    assert asked == [(LEAST, 14)]


def test_other_systems_do_not_advise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("ctypes.CDLL")

    page_out(torch.ones(1))
    assert not huge_zeros(LEAST, dtype=torch.uint8).any()
