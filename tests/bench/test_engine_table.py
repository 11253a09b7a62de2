from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.bench import engine_table
from meshllm.bench.engine_table import EngineBenchmark, Rounds, measure, summarise, take_turns
from meshllm.bench.engines import Engine, EngineTask, Forward, line_up
from meshllm.model import device
from meshllm.names import Quant

PREFILL, DECODE = EngineTask("prefill", 8), EngineTask("decode", 2)
TASKS = (PREFILL, EngineTask("decode", 1), DECODE)


def test_every_contestant_runs_every_task_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_table, "TASKS", TASKS)
    monkeypatch.setattr(engine_table, "PROBE_BYTES", 1 << 20)
    threads, report = torch.get_num_threads(), list[str]()

    table = measure(EngineBenchmark("tiny", tuple(Quant), rounds=1, threads=1), report.append)

    by_task = {task.name: [r for r in table.rows if r.task == task.name] for task in TASKS}
    many, single = ["transformers", *Quant], ["stock", "two shards, exact"]
    for task, names in (("prefill 8", single), ("decode 1", single), ("decode 2", [])):
        own = [row.name for row in by_task[task]]
        assert [name for name in own if not name.endswith(", eager")] == [*many, *names]
        assert {name.partition(",")[0] for name in own if name.endswith(", eager")} <= set(Quant)
    assert all(row.ms >= row.best_ms > 0 for row in table.rows)
    assert torch.get_num_threads() == threads
    assert report[-1] == "decode 2, round 4 of 4"
    size = {row.name: row.megabytes for row in table.rows}
    assert size["transformers"] == size["none"] == size["stock"] == size["two shards, exact"]
    assert size["int8"] < 0.7 * size["none"]


def test_contestants_use_no_more_threads_than_cores_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_table, "TASKS", (EngineTask("decode", 1),))
    monkeypatch.setattr(engine_table, "PROBE_BYTES", 8)
    monkeypatch.setattr(device, "default_threads", lambda: 3)
    used = list[int]()

    def noted(*args: Any) -> list[Engine]:
        used.append(torch.get_num_threads())
        return line_up(*args)

    monkeypatch.setattr(engine_table, "line_up", noted)

    measure(EngineBenchmark("tiny", (), rounds=1, threads=None), lambda _: None)

    assert used == [3]


def test_different_logits_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_table, "PROBE_BYTES", 8)
    kinds = ("prefill", "decode")
    contestants = [
        Engine("transformers", 1, _giving(lambda ids: ids.float())),
        Engine("same", 1, _giving(lambda ids: ids.float()), kinds),
        Engine("other", 1, _giving(lambda ids: ids.float() + 1e-3), kinds),
        Engine("free", 1, _giving(lambda ids: ids.float() + 1)),
    ]

    rounds = take_turns(contestants, DECODE, 2, lambda _: None)

    assert rounds.same == {"same": True, "other": False}


def test_rows_are_medians_of_pairs() -> None:
    contestants = [
        Engine("transformers", 10**9, _giving(Tensor.float)),
        Engine("none", 10**9, _giving(Tensor.float), ("prefill",)),
    ]
    ms = {"transformers": [100.0, 400.0, 200.0], "none": [50.0, 100.0, 200.0]}

    _, one = summarise(contestants, DECODE, Rounds(ms, {}, [20.0, 20.0, 10.0]))

    assert (one.ms, one.best_ms, one.tokens_per_second) == (100.0, 50.0, 20.0)
    assert (one.ratio, one.fraction, one.same) == (2.0, 0.5, None)


def test_a_prompt_has_no_limit_by_memory() -> None:
    contestants = [Engine("transformers", 1, _giving(Tensor.float))]

    (row,) = summarise(contestants, PREFILL, Rounds({"transformers": [1.0]}, {}, [1.0]))

    assert (row.task, row.tokens_per_second, row.fraction) == ("prefill 8", 8000.0, None)


def _giving(logits: Callable[[Tensor], Tensor]) -> Callable[[EngineTask], Forward]:
    return lambda _: logits
