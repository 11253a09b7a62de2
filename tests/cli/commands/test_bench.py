"""`bench`: parse, call one function, render."""

import errno
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshllm.bench import engine_table, ring_table
from meshllm.bench.machine import processor
from meshllm.names import Quant
from tests.cli.conftest import Invoke

RINGS = [
    ring_table.RingRow("transformers", 0, Quant.NONE, 100.0, 20.0, 50.0, 1.0, 0.5, 1.0, 0.0),
    ring_table.RingRow("ring of 1", 1, Quant.NONE, 50.0, 10.0, 100.0, 2.0, 1.0, 0.5, 2.5),
]
STEPS = (
    engine_table.EngineRow("prefill 32", "none", 1191.7, 100.0, 90.0, 320.0, 1.25, None, True),
    engine_table.EngineRow("decode 1", "int8", 600.0, 40.0, 30.0, 25.0, 2.0, 0.45, None),
)
EVERY = tuple(Quant)


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[ring_table.RingBenchmark]:
    """The measured cases of rings; the figures are fixed."""
    cases: list[ring_table.RingBenchmark] = []

    def measure(case: ring_table.RingBenchmark, _: object) -> list[ring_table.RingRow]:
        cases.append(case)
        return RINGS

    monkeypatch.setattr(ring_table, "measure", measure)
    return cases


@pytest.fixture
def steps() -> list[engine_table.EngineRow]:
    """The rows that an engine benchmark returns; tests may change them."""
    return list(STEPS)


@pytest.fixture
def engines(
    monkeypatch: pytest.MonkeyPatch, steps: list[engine_table.EngineRow]
) -> list[engine_table.EngineBenchmark]:
    """The measured cases of engines."""
    cases: list[engine_table.EngineBenchmark] = []

    def measure(case: engine_table.EngineBenchmark, _: object) -> engine_table.EngineTable:
        cases.append(case)
        return engine_table.EngineTable(32.5, tuple(steps))

    monkeypatch.setattr(engine_table, "measure", measure)
    return cases


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_and_what_it_started(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before, cleaned = signal.getsignal(number), []

    def measure(*_: object) -> None:
        try:
            assert callable(signal.getsignal(number))
            os.kill(os.getpid(), number)
        finally:
            cleaned.append(True)

    monkeypatch.setattr(ring_table, "measure", measure)

    assert meshllm("bench").exit_code == 128 + number
    assert cleaned
    assert signal.getsignal(number) is before


def test_rings_are_measured_as_asked(
    meshllm: Invoke, cases: list[ring_table.RingBenchmark]
) -> None:
    words = "--model tiny --nodes 3,1,1 --prompt-tokens 8 --new-tokens 4 --rounds 2 --threads 1"

    text = meshllm("bench", *words.split()).stdout

    assert cases == [ring_table.RingBenchmark("tiny", (1, 3), 8, 4, 2, 1)]
    assert text.splitlines()[2].split() == [
        "ring", "of", "1", "50.00", "10.00", "100.00", "2.00", "1.00", "0.50", "2.50",
    ]  # fmt: skip
    assert f"measured on {processor()}; 1 thread" in text


def test_rings_are_measured_with_several_quantisations(
    meshllm: Invoke, cases: list[ring_table.RingBenchmark]
) -> None:
    meshllm("bench", "--processes", "--quant", "int8,none,int8")

    (case,) = cases
    assert (case.quants, case.processes) == ((Quant.NONE, Quant.INT8), True)


def test_an_engine_is_measured_as_asked(
    meshllm: Invoke,
    engines: list[engine_table.EngineBenchmark],
    cases: list[ring_table.RingBenchmark],
) -> None:
    words = "--engine --model tiny --quant int4 --rounds 2 --threads 1"

    text = meshllm("bench", *words.split()).stdout
    meshllm("bench", "--engine")

    assert engines == [
        engine_table.EngineBenchmark("tiny", (Quant.INT4,), 2, 1),
        engine_table.EngineBenchmark("qwen3-0.6b", EVERY, 3, None),
    ]
    assert cases == []
    *rows, here, versions = text.splitlines()[1:]
    assert [line.split() for line in rows] == [
        ["prefill", "32", "none", "1192", "100.00", "90.00", "320.00", "1.25", "-", "same"],
        ["decode", "1", "int8", "600", "40.00", "30.00", "25.00", "2.00", "0.45", "-"],
        ["memory", "bandwidth", "32.5", "GB/s"],
    ]
    assert here == f"measured on {processor()}; 1 thread"
    assert versions.startswith("meshllm ")


@pytest.mark.usefixtures("engines")
def test_logits_that_differ_from_transformers_fail(
    meshllm: Invoke, steps: list[engine_table.EngineRow]
) -> None:
    steps[0] = replace(steps[0], same=False)

    result = meshllm("bench", "--engine")

    assert "DIFFERENT" in result.stdout
    assert result.exit_code == 1
    assert "Logits differ from those of transformers: `none` at prefill 32" in result.stderr


@pytest.mark.parametrize(
    "words", ["--nodes 2", "--prompt-tokens 8", "--new-tokens 8", "--processes"]
)
def test_ring_options_are_refused_with_engine(
    meshllm: Invoke, engines: list[engine_table.EngineBenchmark], words: str
) -> None:
    result = meshllm("bench", "--engine", *words.split())

    assert (result.exit_code, engines) == (2, [])
    assert result.stderr.startswith(f"error: `{words.split(maxsplit=1)[0]}` cannot be combined")


@pytest.mark.usefixtures("cases", "engines")
@pytest.mark.parametrize(
    ("kind", "figure"), [([], ("decode_ratio", 2.0)), (["--engine"], ("fraction", 0.45))]
)
def test_json_goes_to_stdout_or_a_file(
    meshllm: Invoke, home: Path, kind: list[str], figure: tuple[str, float]
) -> None:
    to_stdout = meshllm("bench", *kind, "--threads", "3", "--json", "-").stdout
    to_file = meshllm("bench", *kind, "--threads", "3", "--json", "table.json").stdout

    table = json.loads(to_stdout)
    assert (table["schema"], table["model"], table["rounds"]) == (1, "qwen3-0.6b", 3)
    assert table["rows"][1][figure[0]] == figure[1]
    assert table["machine"]["cores"] >= 1
    assert table["machine"]["threads"] == 3
    assert json.loads((home / "table.json").read_text()) == table
    assert "none" in to_file or "ring of 1" in to_file


@pytest.mark.usefixtures("cases")
def test_a_file_that_cannot_be_written_is_named(meshllm: Invoke) -> None:
    result = meshllm("bench", "--json", "no/such/folder.json")

    assert (result.exit_code, result.stdout) == (2, "")  # nothing is measured in vain
    assert result.stderr.startswith("error: There is no folder `no/such`")


def test_figures_that_cannot_be_written_are_shown(
    meshllm: Invoke, cases: list[ring_table.RingBenchmark], tmp_path: Path
) -> None:
    result = meshllm("bench", "--json", str(tmp_path))

    assert result.exit_code == 2
    assert "contestant" in result.stdout
    assert result.stderr.startswith(f"error: `{tmp_path}` cannot be written")


def test_earlier_figures_stay_until_new_ones_are_written(
    meshllm: Invoke,
    cases: list[ring_table.RingBenchmark],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "old.json").write_text("{}")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)  # the last step before it replaces
    result = meshllm("bench", "--json", str(tmp_path / "old.json"))

    assert (result.exit_code, len(cases)) == (2, 1)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("old.json", "{}")]


@pytest.mark.parametrize("nodes", ["", "1,", "two", "0", "1;2", "-1", "9" * 5000])
def test_invalid_ring_sizes_are_refused(
    meshllm: Invoke, cases: list[ring_table.RingBenchmark], nodes: str
) -> None:
    result = meshllm("bench", "--nodes", nodes)

    assert (result.exit_code, cases) == (2, [])


@pytest.mark.parametrize("quant", ["int9", "none,", "none;int8"])
def test_unknown_quantisations_are_refused(
    meshllm: Invoke, cases: list[ring_table.RingBenchmark], quant: str
) -> None:
    result = meshllm("bench", "--quant", quant)

    assert (result.exit_code, cases) == (2, [])
    assert "Unknown quantisation" in result.stderr


@pytest.mark.parametrize(
    ("options", "device", "quants"),
    [
        (["--engine"], "cuda:0", (Quant.NONE,)),
        (["--engine", "--device", "cpu"], "cpu", EVERY),
        (["--engine", "--quant", "none,int8"], "cpu", (Quant.NONE, Quant.INT8)),
        ([], "cuda:0", (Quant.NONE,)),
        (["--quant", "int8"], "cpu", (Quant.INT8,)),
    ],
)
def test_the_device_supports_every_quantisation(
    meshllm: Invoke,
    monkeypatch: pytest.MonkeyPatch,
    cases: list[ring_table.RingBenchmark],
    engines: list[engine_table.EngineBenchmark],
    options: list[str],
    device: str,
    quants: tuple[Quant, ...],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fake 100")

    told = json.loads(meshllm("bench", *options, "--json", "-").stdout)

    measured: list[ring_table.RingBenchmark | engine_table.EngineBenchmark] = [*cases, *engines]
    (case,) = measured
    assert (case.device, case.quants) == (device, quants)
    assert told["machine"]["device"] == ("cpu" if device == "cpu" else "cuda:0 Fake 100")


def test_a_missing_gpu_is_refused(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch, cases: list[ring_table.RingBenchmark]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    result = meshllm("bench", "--device", "cuda")

    assert (result.exit_code, cases) == (2, [])
    assert "There is no device `cuda`" in result.stderr
