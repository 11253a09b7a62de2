"""A machine is measured once for each processor and version of the libraries."""

import json
from pathlib import Path
from typing import Any

import llvmlite
import pytest
import torch

from meshllm.model.kernels import jit
from meshllm.model.kernels.measured import Times, measure_once, one_thread


class Measured:
    """Counts measurements."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Times:
        self.count += 1
        return {"own": float(self.count)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache of measurements."""
    monkeypatch.setattr(jit, "private_folder", lambda: tmp_path)
    return tmp_path


def test_each_name_is_measured_once() -> None:
    measured = Measured()

    found = [measure_once(("matrix",), name, measured) for name in ("1024", "2048", "1024")]

    assert found == [{"own": 1.0}, {"own": 2.0}, {"own": 1.0}]


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (jit, "machine", lambda: ("another processor",)),
        (torch, "__version__", "99"),
        (llvmlite, "__version__", "99"),
    ],
)
def test_another_processor_or_library_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, value: Any
) -> None:
    measured = Measured()
    measure_once(("matrix",), "1024", measured)
    monkeypatch.setattr(place, name, value)

    measure_once(("matrix",), "1024", measured)

    assert measured.count == 2


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"1024": {}}', '{"1024": [1]}', '{"1024": {"own": "1"}}']
)
def test_damaged_measurements_are_repeated(folder: Path, text: str) -> None:
    measured = Measured()
    measure_once(("matrix",), "1024", measured)
    (record,) = folder.glob("*.json")
    record.write_text(text)

    assert measure_once(("matrix",), "1024", measured) == {"own": 2.0}
    assert "1024" in json.loads(record.read_text())


def test_without_a_folder_every_call_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "private_folder", lambda: None)
    measured = Measured()

    for _ in range(2):
        measure_once(("matrix",), "1024", measured)

    assert measured.count == 2


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
