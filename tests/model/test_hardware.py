"""The machine is described without torch."""

import mmap
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from meshllm.model import cgroups, hardware


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "version", "may_have"),
    [
        ("nvidiactl", "2.13.0", True),
        ("kfd", "2.13.0+rocm7.0", True),
        ("dxg", "2.13.0+cu130", True),
        ("nvidia0", "2.13.0+cpu", False),
        ("nvme0", "2.13.0", False),
        ("null", "2.13.0", False),
    ],
)
def test_a_gpu_needs_a_driver_and_a_build_of_torch_for_it(
    devices: Path, monkeypatch: pytest.MonkeyPatch, file: str, version: str, may_have: bool
) -> None:
    (devices / file).touch()
    monkeypatch.setattr(hardware, "version", {"torch": version}.__getitem__)

    assert hardware.may_have_gpu() is may_have
    assert hardware.uses_cpu("auto") is not may_have
    assert hardware.uses_cpu("cpu")
    assert not hardware.uses_cpu("cuda:0")


def test_variables_of_libraries_change_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    find = hardware.fingerprint.__wrapped__
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    plain = find()
    monkeypatch.setenv("HOME", "/elsewhere")
    assert find() == plain

    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    assert {*find()} == {*plain, "OMP_NUM_THREADS=7"}


def test_a_system_that_forbids_executable_memory_has_another_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = hardware.fingerprint.__wrapped__
    plain = find()
    pages: list[mmap.mmap] = []

    monkeypatch.setattr(hardware, "make_executable", pages.append)

    assert find() != plain
    assert len(pages) == 1


def test_a_system_without_a_list_of_cpus_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", read)
    assert hardware.cpu_lines.__wrapped__() == ()

    monkeypatch.setattr(Path, "read_text", lambda *_: "model name : fast\n")
    assert hardware.cpu_lines.__wrapped__() == ()


def test_the_machine_is_described_without_torch() -> None:
    code = "import sys; from meshllm.model.hardware import *; fingerprint(), uses_cpu('auto')"
    told = f"{code}; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("sizes", "size"),
    [((), 64 << 20), (("32K", "1024K", "32768K"), 64 << 20), (("98304K", "48K", "?"), 192 << 20)],
)
def test_no_cache_holds_twice_the_largest_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: tuple[str, ...], size: int
) -> None:
    monkeypatch.setattr(hardware, "CACHES", tmp_path)
    for number, text in enumerate(sizes):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{text}\n")

    assert hardware.uncached_bytes.__wrapped__() == size


@pytest.mark.parametrize(
    ("quota", "usable"),
    [("max", 6), ("50000", 1), ("100000", 1), ("299999", 2), ("300000", 3), ("1600000", 6)],
)
def test_a_quota_of_a_container_limits_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, usable: int
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(6)}, raising=False)
    monkeypatch.setattr(cgroups, "LISTED", tmp_path / "listed")
    monkeypatch.setattr(hardware, "cpu_quota", partial(cgroups.cpu_quota, tmp_path))
    (tmp_path / "listed").write_text("0::/\n")
    (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")

    assert hardware.usable_cores() == usable
    assert hardware.allowed_cores() == 6
