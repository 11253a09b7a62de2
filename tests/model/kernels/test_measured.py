"""A machine is measured once for each processor, version of the libraries and number of threads."""

import json
import os
from importlib.metadata import PackageNotFoundError
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from meshllm.model.kernels import measured as module
from meshllm.model.kernels.measured import (
    Times,
    measure_once,
    remembered,
    rounds_in_time,
    seconds_of,
)


class Measuring:
    """Counts measurements."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Times:
        self.count += 1
        return {"own": float(self.count), "torch": 8.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache of measurements, in a folder that is not there yet."""
    monkeypatch.setattr(module, "cache_path", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_each_shape_is_measured_once_with_each_number_of_threads() -> None:
    measuring, asked = Measuring(), [("1024", 1), ("2048", 1), ("1024", 2), ("1024", 1)]

    found = [measure_once("matrix", shape, threads, measuring) for shape, threads in asked]

    assert [each.seconds["own"] for each in found] == [1.0, 2.0, 3.0, 1.0]
    assert found[0] == found[3]
    assert remembered() == tuple(found[:3])
    assert measure_once("other", "1024", 1, measuring).seconds["own"] == 4.0


def test_what_was_measured_is_found_before_and_after_onemkl_is_set_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    measure_once("matrix", "1024", 1, Measuring())

    monkeypatch.setenv("MKL_CBWR", "AUTO")

    assert [each.shape for each in remembered()] == ["1024"]


def test_a_choice_is_kept_with_its_gain_even_if_it_is_not_the_fastest() -> None:
    measure_once("matrix", "1024", 1, lambda: {"own": 5.0, "torch": 4.0, "old": 8.0}, max)
    measure_once("matrix", "2048", 1, lambda: {"own": 2.0, "torch": 4.0, "old": 8.0})

    assert [(each.best, each.gain) for each in remembered()] == [("torch", 1.25), ("own", 2.0)]


@pytest.mark.parametrize("change", ["cpu_kind", "library_environment", "torch", "llvmlite"])
def test_another_processor_or_library_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    measuring, versions = Measuring(), {"torch": "1", "llvmlite": "1"}
    monkeypatch.setattr(module, "library_environment", lambda: ("OMP_NUM_THREADS=2",))
    monkeypatch.setattr(module, "version", versions.__getitem__)
    measure_once("matrix", "1024", 1, measuring)
    if change in versions:
        versions[change] = "2"
    else:
        monkeypatch.setattr(module, change, lambda: ("ATEN_CPU_CAPABILITY=default",))

    assert remembered() == ()
    measure_once("matrix", "1024", 1, measuring)

    assert measuring.count == 2


@pytest.mark.parametrize(
    "change",
    [
        "{",
        [1],
        {"1024": {"own": 1.0}},
        {"seconds": {}},
        {"seconds": {"own": 1.0}},
        {"seconds": {"own": "1", "torch": 2.0}},
        {"seconds": {"own": 0.0, "torch": 2.0}},
        {"seconds": {"own": 1.0, "torch": 10**400}},
        {"best": "older"},
        {"at_s": 1e20},
        {"threads": None},
    ],
)
def test_damaged_measurements_are_ignored_and_repeated(folder: Path, change: Any) -> None:
    measuring = Measuring()
    measure_once("matrix", "1024", 1, measuring)
    (record,) = folder.glob("*.json")
    (whole,) = json.loads(record.read_text())
    is_field = isinstance(change, dict) and change.keys() <= whole.keys()
    text = json.dumps([whole | change] if is_field else change)
    record.write_text(change if isinstance(change, str) else text)

    assert remembered() == ()
    assert measure_once("matrix", "1024", 1, measuring).seconds["own"] == 2.0
    assert [each.seconds["own"] for each in remembered()] == [2.0]


def test_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)

    for shape in ("1", "2", "3"):
        measure_once("matrix", shape, 1, Measuring())

    assert [each.shape for each in remembered()] == ["2", "3"]


def test_what_is_measured_meanwhile_is_kept() -> None:
    def measure() -> Times:  # a kernel may have to be measured to measure another one
        measure_once("inner", "1024", 1, Measuring())
        return Measuring()()

    measure_once("outer", "1024", 1, measure)

    assert [each.what for each in remembered()] == ["inner", "outer"]


def test_looking_creates_nothing_and_torch_may_be_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remembered() == ()
    assert not folder.exists()

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", version)

    assert remembered() == ()


def test_without_a_folder_every_call_measures(folder: Path) -> None:
    folder.write_text("not a folder")
    measuring = Measuring()

    for _ in range(2):
        measure_once("matrix", "1024", 1, measuring)

    assert measuring.count == 2


@pytest.mark.parametrize(("threads", "clock"), [(1, "thread_time"), (2, "perf_counter")])
def test_one_thread_is_measured_by_its_cpu_time(
    monkeypatch: pytest.MonkeyPatch, threads: int, clock: str
) -> None:
    monkeypatch.setattr(module, "time", Mock(**{clock: Mock(side_effect=[3.0, 3.5])}))

    assert seconds_of(os.getpid, threads) == 0.5


@pytest.mark.parametrize(("seconds", "rounds"), [(0.01, 5), (0.1, 4), (9.0, 2)])
def test_no_round_begins_late_but_one_counts(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    clock = (seconds * number for number in count())
    monkeypatch.setattr(module, "time", Mock(perf_counter=lambda: next(clock)))

    assert [*rounds_in_time(4)] == [*range(rounds)]
