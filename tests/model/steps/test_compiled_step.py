"""Compiled steps: what they cache, reuse, and leave to torch."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.kernels import jit
from meshllm.model.modules.linear_onednn import PackedLinear
from meshllm.model.steps import compiled_step
from meshllm.model.steps.replay import STEPS_BEFORE_REPLAY, Replay
from meshllm.model.steps.trace import Op
from tests.builders.replayed import check_replay, filled, forget, ids, runner_of, steps_of, tape_of

pytestmark = pytest.mark.skipif(not jit.jit_available(), reason="no memory becomes executable here")


def test_least_recently_used_plans_are_evicted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("meshllm.model.steps.compiled_step.MAX_PLANS", 2)
    runner = runner_of(tmp_path)
    caches = [filled(runner, 4 + at) for at in range(3)]

    for rows in [(1, 1, 1)] * (STEPS_BEFORE_REPLAY + 1) + [(2, 1), (1, 1, 1), (3,)]:
        runner.step_many([ids(count) for count in rows], caches[: len(rows)])

    assert list(tape_of(runner, 3)._plans) == [(1, 1, 1), (3,)]


def test_the_order_of_sessions_needs_no_plan_of_its_own(tmp_path: Path) -> None:
    runner, sessions = runner_of(tmp_path), range(6)
    orders = [tuple(1 + (at in two) for at in sessions) for two in combinations(sessions, 2)]

    def run() -> list[Tensor]:
        caches = [filled(runner, 4 + at, at) for at in sessions]
        return [
            each
            for number, rows in enumerate(orders)
            for each in runner.step_many(
                [ids(count, number + at) for at, count in enumerate(rows)], caches
            )
        ]

    first, plans = run(), tape_of(runner, 8)._plans
    (plan,) = plans.values()
    again = run()
    forget(runner)
    plain = run()

    assert len(orders) == 15
    assert list(plans) == [(2, 2, 1, 1, 1, 1)]
    assert plans[2, 2, 1, 1, 1, 1] is plan
    assert all(map(torch.equal, first, plain))
    assert all(map(torch.equal, again, plain))


def test_all_values_are_compared_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "meshllm.model.steps.compiled_step.private_folder", lambda: tmp_path / "kept"
    )
    tried, try_all = list[object](), compiled_step._try_all

    def trying(*what: Any) -> bool:
        tried.append(what)
        return try_all(*what)

    monkeypatch.setattr(compiled_step, "_try_all", trying)

    def record() -> int:
        compiled_step._agrees_on_all.cache_clear()
        before = len(tried)
        runner = runner_of(tmp_path / f"model {len(list(tmp_path.iterdir()))}")
        cache = filled(runner, 4)
        for _ in range(STEPS_BEFORE_REPLAY):
            runner.step(ids(1), cache)
        return len(tried) - before

    first, again = record(), record()
    monkeypatch.setattr(torch, "__version__", f"{torch.__version__}.1")
    changed = record()

    assert first
    assert (again, changed) == (0, first)


def test_packed_matrices_stay_with_torch(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    head = runner.shard.model.lm_head
    plain = nn.Linear(head.in_features, head.out_features, bias=False, dtype=torch.bfloat16)
    plain.weight.data.copy_(head.weight)
    try:
        runner.shard.model.lm_head = PackedLinear(plain)
    except RuntimeError:
        pytest.skip("this processor has no kernel for packed matrices")
    steps_of(runner).replay = Replay()

    check_replay(runner)


def test_an_operation_that_differs_stays_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def distrust(item: Op) -> bool:
        tried.append(item.function)
        return False

    monkeypatch.setattr("meshllm.model.steps.compiled_step._agrees", distrust)
    runner = runner_of(tmp_path)
    cache = filled(runner, 6)
    outputs = [runner.step(ids(1, seed), cache) for seed in range(8)]
    forget(runner)
    other = filled(runner, 6)

    assert tried
    assert all(map(torch.equal, outputs, [runner.step(ids(1, seed), other) for seed in range(8)]))


def test_arena_blocks_are_reused(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    cache = filled(runner, 6)
    for seed in range(8):
        runner.step(ids(1, seed), cache)
    compiled = steps_of(runner).replay._states[1, torch.get_num_threads()].compiled

    assert compiled is not None
    places = {offset for offset in compiled._offsets if offset >= 0}
    assert len(compiled._offsets) > 5 * len(places)
