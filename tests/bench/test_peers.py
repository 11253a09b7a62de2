"""The table of peers: what llama.cpp is asked and says, ratios, a whole run without it."""

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshllm.bench import engine_table, engines
from meshllm.bench.engines import Engine, EngineTask
from meshllm.bench.machine import commit, processor
from meshllm.bench.ring_table import TRANSFORMERS, random_model
from meshllm.errors import ModelError
from meshllm.names import Quant
from tests.bench import conditions, gguf_file, peer_rings, peers
from tests.bench.conditions import load_of_others, lower_quartile
from tests.bench.goals import LLAMA, Row, authorize
from tests.bench.peers import (
    Llama,
    command_of,
    main,
    seconds_of,
    summarise,
    table,
)

PROMPT, STEP, SESSIONS = (
    EngineTask("prefill", 256),
    EngineTask("decode", 1),
    EngineTask("decode", 8),
)


def test_llama_is_asked_for_the_same_task(tmp_path: Path) -> None:
    prompt, step, sessions = (command_of(task, 2, tmp_path) for task in (PROMPT, STEP, SESSIONS))

    assert prompt[0] == step[0] == "llama-bench"
    assert "-p 256 -n 0" in " ".join(prompt)
    assert "-p 0 -n 8 -d 128" in " ".join(step)
    assert sessions[0] == "llama-batched-bench"
    assert "-npp 128 -ntg 8 -npl 8" in " ".join(sessions)
    assert all("-t 2" in " ".join(command) for command in (prompt, step, sessions))


def test_seconds_are_of_a_prompt_or_a_step() -> None:
    said = json.dumps([{"avg_ts": 128.0}])
    lines = 'noise\n{"speed_tg": 1.0}\n{"speed_tg": 32.0}\n'

    assert seconds_of(PROMPT, said) == 2.0
    assert seconds_of(STEP, said) == 1 / 128
    assert seconds_of(SESSIONS, lines) == 0.25


def test_cpu_time_is_what_a_longer_run_takes_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(_: Llama, command: list[str]) -> tuple[str, float]:
        given = dict(zip(command[1::2], command[2::2], strict=True))
        return "", 7.0 + int(given["-n"]) * 0.5 + int(given["-p"]) * int(given["-r"]) * 0.25

    for program in ("llama-bench", "llama-batched-bench"):
        (tmp_path / program).touch()
    monkeypatch.setattr(Llama, "_run", run)
    peer = Llama("none", tmp_path / "model.gguf", tmp_path, has_cpu_time=True)

    assert peer.seconds(STEP, 1) == 0.5
    assert peer.seconds(PROMPT, 1) == 64.0
    assert peer.seconds(SESSIONS, 1) is None


def test_a_program_that_is_missing_takes_no_task(tmp_path: Path) -> None:
    script = tmp_path / "llama-bench"
    script.write_text(f"#!{sys.executable}\nprint('[{{\"avg_ts\": 64.0}}]')\n")
    script.chmod(0o755)
    peer = Llama("none", tmp_path / "model.gguf", tmp_path)

    assert peer.seconds(STEP, 1) == 1 / 64
    assert peer.seconds(SESSIONS, 1) is None


def test_a_program_that_fails_takes_no_task_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "llama-bench"
    script.write_text(f"#!{sys.executable}\nimport os\nos.kill(os.getpid(), 4)\n")
    script.chmod(0o755)

    assert Llama("int8", tmp_path / "model.gguf", tmp_path).seconds(STEP, 1) is None
    assert re.search("no decode 1, int8: .*SIGILL", capsys.readouterr().err)


def test_rows_have_ratios_of_the_same_threads_and_width() -> None:
    times = {
        (1, STEP, "none", TRANSFORMERS): [4.0, 9.0, 4.0],
        (1, STEP, "none", "meshllm"): [1.0, 1.0, 8.0],
        (1, STEP, "none", LLAMA): [2.0],
        (1, STEP, "int8", "meshllm"): [0.5],
        (2, PROMPT, "none", "meshllm"): [2.0],
    }
    sizes = {(width, name): 4 * 10**9 for _, _, width, name in times}

    rows = {
        (row.threads, row.width, row.name): row for row in summarise(times, sizes, {1: 8, 2: 8})
    }

    own, narrow = rows[1, "none", "meshllm"], rows[1, "int8", "meshllm"]
    assert (own.of_transformers, own.of_llama, own.of_limit) == (4.0, 2.0, 0.5)
    assert (narrow.of_transformers, narrow.of_llama) == (8.0, None)
    alone = rows[2, "none", "meshllm"]
    assert (alone.of_transformers, alone.of_limit, alone.tokens_per_second) == (None, None, 128.0)
    lines = table(list(rows.values()))
    assert len(lines) == 1 + len(times)
    assert "4.00x" in next(line for line in lines if "meshllm" in line)


def test_ratios_are_held_against_the_goals() -> None:
    rows = [
        Row(2, "decode 1", "int8", "meshllm", 20.0, 50.0, 4.0, 1.2, 0.8),
        Row(2, "decode 1", "int4", "meshllm", 16.0, 62.5, 5.0, None, 0.6),
        Row(2, "decode 1", "int8", LLAMA, 24.0, 41.7, 3.3, 1.0, 0.6),
        Row(2, "prefill 256", "none", "meshllm", 500.0, 512.0, 0.99, 1.0, None),
        Row(2, "decode 4", "none", "meshllm", 30.0, 133.3, 2.0, 1.0, None),
    ]

    found = {(each.task, each.width, each.against): each.is_met for each in authorize(rows)}

    assert found == {
        ("decode 1", "int8", LLAMA): False,
        ("decode 1", "int8", "the limit"): True,
        ("decode 1", "int4", "int8"): True,
        ("decode 1", "int4", "the limit"): True,
        ("prefill 256", "none", LLAMA): True,
        ("prefill 256", "none", TRANSFORMERS): False,
    }
    (missed,) = [str(each) for each in authorize(rows) if each.against == LLAMA and not each.is_met]
    assert " ".join(missed.split()) == "2 decode 1 int8 1.200 of llama.cpp goal 1.30 missed"


def test_rings_follow_where_llama_has_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = peer_rings.Row("int8", 2, 20.0, 25.0, 1.25)
    asked: list[Namespace] = []

    def measure_all(options: Namespace) -> list[peer_rings.Row]:
        asked.append(options)
        return [row]

    monkeypatch.setattr(peer_rings, "measure_all", measure_all)
    given = {"model": "tiny", "layers": 2, "quants": [Quant.INT8], "llama": tmp_path}
    options = Namespace(**given, quick=False, cpu_time=False)

    assert peers.measure_rings(options, {"int8"}) == []
    (tmp_path / peer_rings.SERVER).touch()
    assert peers.measure_rings(options, {"int8"}) == [row]
    assert peers.measure_rings(Namespace(**given, quick=True, cpu_time=False), {"int8"}) == []

    (asked_for,) = asked
    assert (asked_for.model, asked_for.layers, asked_for.quants) == ("tiny", 2, [Quant.INT8])
    assert [each.is_met for each in peer_rings.authorize([row])] == [True]


def test_a_quarter_of_the_values_is_not_above_the_lower_quartile() -> None:
    assert lower_quartile([5.0]) == 5.0
    assert lower_quartile([4.0, 3.0, 2.0, 1.0, 5.0]) == 2.0


def test_the_load_of_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own = iter([10.0, 30.0]), iter([1.0, 6.0])
    clock = SimpleNamespace(perf_counter=iter([0.0, 5.0]).__next__)
    monkeypatch.setattr(conditions, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(conditions, "_own_s", lambda: next(own))
    monkeypatch.setattr(conditions, "time", clock)

    with load_of_others() as others:
        pass

    assert others == [3.0]


@pytest.mark.parametrize("more", [(), ("--cpu-time",)])
def test_a_run_without_llama_prints_a_table(
    more: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engine_table, "PROBE_BYTES", 1 << 20)
    threads, file = torch.get_num_threads(), tmp_path / "table.json"
    options = "--model tiny --threads 1 --prompts 8 --sessions 1,2 --rounds 1 --quants none,int8"

    assert main([*options.split(), *more, "--json", str(file)]) == 0

    lines, report = capsys.readouterr().out.splitlines(), json.loads(file.read_text())
    assert sum("meshllm" in line for line in lines) == 6
    assert sum(" transformers " in line for line in lines[7:] if "goal" not in line) == 3
    assert any("prefill 8" in line and " of transformers " in line for line in lines)
    assert (report["processor"], report["commit"]) == (processor(), commit())
    assert {f"processor: {processor()}", f"commit: {commit()}"} <= {*lines}
    assert {row["width"] for row in report["rows"]} == {"none", "int8"}
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("has_writer", [False, True])
def test_llama_takes_part_if_it_can_and_its_absence_is_told_if_it_is_asked_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_writer: bool,
) -> None:
    parser, folder = ArgumentParser(), tmp_path / "bin"
    folder.mkdir()
    (folder / "llama-bench").touch(0o755)
    monkeypatch.setattr(peers, "find_spec", lambda _: object() if has_writer else None)
    monkeypatch.setenv("PATH", str(folder))

    assert peers.folder_of_llama(parser, None) == (folder if has_writer else None)
    with pytest.raises(SystemExit):
        peers.folder_of_llama(parser, tmp_path)
    assert f"there is no `llama-bench` in {tmp_path}" in capsys.readouterr().err
    if has_writer:
        assert peers.folder_of_llama(parser, folder) == folder
    else:
        with pytest.raises(SystemExit):
            peers.folder_of_llama(parser, folder)
        assert "llama.cpp needs the package `gguf`" in capsys.readouterr().err


def test_a_width_without_a_kernel_on_this_machine_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_node(source: Any, quant: Quant, device: Any) -> Iterator[Engine]:
        if quant is Quant.INT8:
            raise ModelError("No int8 kernel on this machine")
        yield from engines.open_node(source, quant, device)

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(engine_table, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(peers, "open_node", open_node)
    options = "--model tiny --threads 1 --prompts 8 --sessions 1 --rounds 1 --quants none,int8"

    assert main(options.split()) == 0

    told = capsys.readouterr()
    assert "without int8: No int8 kernel on this machine" in told.err
    assert [line.split()[3] for line in told.out.splitlines() if " meshllm " in line] == [
        "none"
    ] * 2


def test_the_file_of_llama_has_every_tensor_in_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: dict[str, Any] = {}
    monkeypatch.setattr(gguf_file, "import_module", lambda _: fake_gguf(added))

    with random_model("tiny", torch.bfloat16, 2) as folder:
        gguf_file.write_gguf(folder, Quant.INT8, tmp_path / "model.gguf")

    assert added["model.embed_tokens.weight"] == "of Q8_0"
    assert added["model.layers.1.mlp.down_proj.weight"] == "of Q8_0"
    assert added["model.norm.weight"] is None
    assert added["head_count_kv"] == 2
    assert added["closed"]


def fake_gguf(added: dict[str, Any]) -> Any:
    """Stand in for the package: note what is written."""

    class Writer:
        def __init__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *values: added.update({name.removeprefix("add_"): [*values, None][0]})

        def add_tensor(self, name: str, _values: Any, raw_dtype: str | None = None) -> None:
            added[name] = raw_dtype

        def close(self) -> None:
            added["closed"] = True

    names = SimpleNamespace(get_name=lambda name, **_: name)
    formats = {"BF16": "of BF16", "Q8_0": "of Q8_0", "Q4_0": "of Q4_0"}
    return SimpleNamespace(
        GGUFWriter=Writer,
        MODEL_ARCH={"QWEN3": 1},
        GGMLQuantizationType=formats,
        get_tensor_name_map=lambda *_: names,
        quants=SimpleNamespace(quantize=lambda values, _: values),
    )
