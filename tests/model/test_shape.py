"""A shape is cached, and read without torch."""

import ctypes
import json
import mmap
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshllm.model import shape
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import resolve
from meshllm.model.shape import CachedShape, absent_bytes
from meshllm.names import Quant
from meshllm.testing.models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", "gemma3_text").folder


def test_a_cached_shape_has_the_requested_name(folder: Path, tmp_path: Path) -> None:
    cache, source = tmp_path / "cache", resolve(str(folder))
    for dtype, quant in ((None, Quant.NONE), (torch.bfloat16, Quant.INT8)):
        kept = CachedShape(folder, cache, None if dtype is None else str(dtype), quant)
        assert kept.read("other") is None

        measured = shape_of(source, dtype, quant, cache)

        assert measured == shape_of(source, dtype, quant) == shape_of(source, dtype, quant, cache)
        assert kept.read("other") == replace(measured, name="other")


def test_another_config_has_another_shape(folder: Path, tmp_path: Path) -> None:
    shape_of(resolve(str(folder)), cache=tmp_path / "cache")
    config = json.loads((folder / "config.json").read_text())

    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))

    assert CachedShape(folder, tmp_path / "cache").read("x") is None


@pytest.mark.parametrize("text", ["", "{}", '{"layers": "many"}', "[1]", "3"])
def test_a_damaged_record_counts_as_none(folder: Path, tmp_path: Path, text: str) -> None:
    cache, source = tmp_path / "cache", resolve(str(folder))
    measured = shape_of(source, cache=cache)
    (record,) = cache.glob("*.json")
    record.write_text(text)

    assert CachedShape(folder, cache).read("x") is None
    assert shape_of(source, cache=cache) == measured
    assert CachedShape(folder, cache).read(source.name) == measured


def test_planning_for_a_cached_shape_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from meshllm.cli.app import main\n"
        "sys.argv = ['meshllm', 'ring', 'plan', '--spec', '3x8GiB']\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules, file=sys.stderr)"
    )
    state = {"MESHLLM_STATE": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], check=False, env=state, capture_output=True, text=True
        )
        for _ in range(2)
    ]

    assert [run.stderr.splitlines()[-1] for run in runs] == ["True True", "False False"]
    assert runs[0].stdout == runs[1].stdout
    assert "0:" in runs[0].stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages are in memory")
def test_pages_that_were_never_read_are_absent() -> None:
    pages = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for page in (0, 3, 4):
        pages[page * mmap.PAGESIZE] = 1

    whole = absent_bytes([(begin, begin + len(pages))])
    parts = absent_bytes(
        [(begin + 5, begin + mmap.PAGESIZE), (begin + mmap.PAGESIZE + 1, begin + 5000)]
    )

    assert whole == 5 * mmap.PAGESIZE
    assert parts == 5000 - mmap.PAGESIZE - 1


def test_a_system_that_tells_of_no_pages_has_none_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shape, "_PAGE_MAP", Path("/nowhere"))
    assert absent_bytes([(0, 1 << 20)]) == 0

    monkeypatch.setattr(sys, "platform", "other")
    assert absent_bytes([(0, 1 << 20)]) == 0
