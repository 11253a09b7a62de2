"""The table of a step's parts: its calls are named, and their times add up to the step."""

import json
from pathlib import Path

import pytest
import torch

from meshllm.bench.ring_table import random_model
from meshllm.model.kernels import jit
from meshllm.model.steps.lowering import calls_for
from meshllm.names import Quant
from tests.bench import step
from tests.bench.step import OTHER, WHOLE, Timed, TimedProgram, main, measure, table

aten = torch.ops.aten

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)


def test_a_timed_program_tells_the_ticks_of_each_call() -> None:
    x, y = torch.zeros(1 << 20), torch.ones(1 << 20)
    (add,) = calls_for(aten.add.Tensor, (x, y), {}, [x]) or []
    (small,) = calls_for(aten.add.Tensor, (x[:1], y[:1]), {}, [x[:1]]) or []
    timed = Timed()
    program = TimedProgram([add, small, add], timed.extend)
    program.share(2, 2)

    program.run()

    assert [call for call, _ in timed] == [add, small, add]
    assert x[1:].eq(2.0).all()
    assert x[0] == 3.0
    assert all(ticks > 0 for _, ticks in timed)


@pytest.mark.parametrize("quant", [Quant.INT8, Quant.INT4])
def test_parts_of_a_step_are_named_with_their_calls(quant: Quant) -> None:
    threads = torch.get_num_threads()
    with random_model("tiny", torch.bfloat16, 2) as folder, torch.inference_mode():
        rows = {row.part: row for row in measure(folder, quant, 1, 1)}
    torch.set_num_threads(threads)

    assert rows["matrix 64 to 512"].calls == 1
    assert rows["attention"].calls == 2
    assert rows[WHOLE].share == 1.0
    assert OTHER in rows
    matrices = [row for part, row in rows.items() if part.startswith("matrix")]
    assert all(row.gb_per_s and row.gb_per_s > 0 for row in matrices)
    assert "matrix 64 to 512" in "\n".join(table(list(rows.values())))


def test_the_command_measures_all_widths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step, "STEPS", 2)
    monkeypatch.setattr(step, "probe", lambda: torch.ones(1 << 10))
    file, threads = tmp_path / "step.json", torch.get_num_threads()

    assert main(["--model", "tiny", "--threads", "1", "--json", str(file)]) == 0

    found = json.loads(file.read_text("utf-8"))
    assert {row["width"] for row in found["rows"]} == {"none", "int8", "int4"}
    assert torch.get_num_threads() == threads
