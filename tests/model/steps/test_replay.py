"""Replayed steps are bit-equal to the forward, in every family."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.kernels import jit
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps import replay
from meshllm.model.steps.execution import Strategy
from meshllm.model.steps.replay import CHECKS, MAX_TRIES, STEPS_BEFORE_REPLAY, Replay, _State
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant, Span
from tests.builders.replayed import check_replay, filled, forget, ids, runner_of, steps_of, tape_of

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma3_text", "gpt2", "phi3", "olmo2", "granite", "opt",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not jit.jit_available(), reason="no memory becomes executable here")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    own = [each for each in caplog.records if each.name == replay.__name__]
    return [each.getMessage() for each in own if each.levelno == logging.WARNING]


def count_forwards(runner: Runner) -> list[int]:
    """Record each forward of the model that is not replayed."""
    seen: list[int] = []
    runner.shard.model.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


@pytest.mark.parametrize(
    ("family", "quant"),
    [*((family, Quant.NONE) for family in FAMILIES), ("qwen3", Quant.INT8), ("llama", Quant.INT4)],
)
def test_replay_has_the_bits_of_the_model(tmp_path: Path, family: str, quant: Quant) -> None:
    runner = runner_of(tmp_path, family, quant)
    tokens, sizes = ids(100, seed=1), (1, 3, 1, 5) * 10  # beyond the sliding windows

    def run() -> tuple[Tensor, SpanCache]:
        cache, at, outputs = filled(runner, 6), 0, []
        for size in sizes:
            outputs.append(runner.step(tokens[:, at : at + size], cache))
            at += size
        return torch.cat(outputs, 1), cache

    recorded, cache = run()
    forwards = count_forwards(runner)
    again, _ = run()
    taken = len(forwards)
    forget(runner)
    plain, other = run()

    assert torch.equal(recorded, plain)
    assert torch.equal(again, plain)
    assert taken == 1  # of the prompt
    assert cache.length == other.length == 6 + sum(sizes)
    for mine, its in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(mine.keys, its.keys)
        assert torch.equal(mine.values, its.values)


def test_slow_first_and_traced_steps_are_counted(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    cache, counts = filled(runner, 6), []

    for seed in range(STEPS_BEFORE_REPLAY + 2):
        before = runner.prepared
        runner.step(ids(3, seed), cache)
        counts.append(runner.prepared - before)

    first, recorded = counts[0], counts[STEPS_BEFORE_REPLAY - CHECKS - 1 : STEPS_BEFORE_REPLAY]
    assert [first, *recorded] == [1] * (2 + CHECKS)
    assert sum(counts) == 2 + CHECKS


def test_cropped_and_branched_caches_are_replayed(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    tokens = ids(60, seed=2)

    def run() -> list[Tensor]:
        cache = filled(runner, 6)
        outputs = [runner.step(tokens[:, at : at + 1], cache) for at in range(20)]
        cache.crop(9)
        other = cache.branch(8)
        for at in range(20, 40):
            outputs += [runner.step(tokens[:, at : at + 1], each) for each in (cache, other)]
        return outputs

    recorded = run()
    forget(runner)

    assert all(map(torch.equal, recorded, run()))


def test_batched_sessions_are_replayed(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "gemma3_text")
    tokens = ids(400, seed=3)
    layouts = [(1, 1, 1), (2, 1), (1, 2), (3,)] * (STEPS_BEFORE_REPLAY + 1)

    def run() -> list[Tensor]:
        caches, at, outputs = [filled(runner, 4 + seed, seed) for seed in range(3)], 0, []
        for rows in layouts:
            parts = torch.split(tokens[:, at : at + 3], list(rows), 1)
            outputs += runner.step_many(parts, caches[: len(rows)])
            at += 3
        return outputs

    recorded = run()
    forwards = count_forwards(runner)
    again = run()
    taken = len(forwards)
    forget(runner)
    plain = run()

    assert all(map(torch.equal, recorded, plain))
    assert all(map(torch.equal, again, plain))
    assert taken == 3  # prompts


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_fewer_rows_are_padded_to_a_traced_number(tmp_path: Path, kind: str) -> None:
    runner, tokens = runner_of(tmp_path, kind), ids(400, seed=3)
    steps_of(runner).replay = Replay()
    for _ in range(STEPS_BEFORE_REPLAY):
        runner.step(tokens[:, :9], filled(runner, 6))
    layouts = [(1, 1, 1, 4), (3, 1, 1, 2), (1, 2, 1, 4), (5, 1, 1), (6, 1), (2, 2, 3, 2)]

    def run() -> list[Tensor]:
        caches, at, outputs = [filled(runner, 4 + seed, seed) for seed in range(4)], 0, []
        for rows in layouts * 2:
            parts = torch.split(tokens[:, at : at + sum(rows)], list(rows), 1)
            outputs += runner.step_many(parts, caches[: len(rows)])
            at += sum(rows)
        return outputs

    forwards = count_forwards(runner)
    padded = run()
    taken, prompts = len(forwards), 4
    states = steps_of(runner).replay._states
    forget(runner)

    assert all(map(torch.equal, padded, run()))
    assert taken == prompts
    assert [rows for (rows, _), state in states.items() if state.compiled] == [9]


def test_a_number_of_rows_far_below_a_traced_one_is_traced(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    replay, sessions = Replay(), [filled(runner, 6) for _ in range(2)]
    steps_of(runner).replay = replay

    def run(*counts: int) -> None:
        for seed in range(STEPS_BEFORE_REPLAY):
            for rows in counts:
                runner.step_many([ids(rows - 1, seed), ids(1, seed)], sessions)

    run(9)
    run(5, 7, 8)  # 7 and 8 are padded to 9
    run(6)
    run(3, 4)  # 4 is padded to 5
    with replay.tracing(8):
        run(8)

    traced = {rows for (rows, _), state in replay._states.items() if state.compiled}
    assert traced == {3, 5, 6, 8, 9}


@pytest.mark.parametrize("part", ["front", "middle", "back", "head"])
def test_every_part_of_a_model_is_replayed(tmp_path: Path, part: str) -> None:
    span = {"front": Span(0, 2), "middle": Span(1, 3), "back": Span(4, 6), "head": Span(6, 6)}[part]
    embed, head = part == "front", part in ("back", "head")
    runner = runner_of(tmp_path, span=span, embed=embed, head=head)
    width = runner.shard.model.config.hidden_size
    rows = torch.randn(1, 40, width, generator=torch.Generator().manual_seed(4)).bfloat16()
    rows = ids(40) if part == "front" else rows

    def run() -> Tensor:
        cache = runner.new_cache() if span else None
        if cache is not None:
            runner.prefill(rows[:, :6], cache)
        return torch.cat([runner.step(rows[:, at : at + 1], cache) for at in range(6, 40)], 1)

    recorded = run()
    assert steps_of(runner).replay._states[1, torch.get_num_threads()].checks == CHECKS
    assert tape_of(runner, 1)
    forget(runner)

    assert torch.equal(recorded, run())


def test_a_head_takes_sessions_in_any_order(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, span=Span(6, 6), embed=False, head=True)
    width = runner.shard.model.config.hidden_size
    rows = torch.randn(1, 6, width, generator=torch.Generator().manual_seed(4)).bfloat16()
    layouts = [(1, 2, 3), (3, 2, 1), (1, 3, 2)] * (STEPS_BEFORE_REPLAY + 1)
    layouts += [(1, 2, 2), (2, 1, 2)]  # padded

    def run() -> list[Tensor]:
        return [
            torch.cat(
                runner.step_many(torch.split(rows[:, : sum(counts)], list(counts), 1), [None] * 3),
                1,
            )
            for counts in layouts
        ]

    recorded = run()
    assert tape_of(runner, 6)
    forget(runner)

    assert all(map(torch.equal, recorded, run()))
    compiled = tape_of(runner, 6)
    assert compiled
    assert len(compiled._plans) == 1
    traced = [rows for (rows, _), state in steps_of(runner).replay._states.items() if state.tries]
    assert traced == [6]


def test_tracing_costs_two_more_forwards_after_the_first_step(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    steps_of(runner).replay, cache, counts = Replay(), filled(runner, 6), list[int]()
    forwards = count_forwards(runner)

    for seed in range(7):
        before = len(forwards)
        runner.step(ids(1, seed), cache)
        counts.append(len(forwards) - before)

    assert counts == [1, 1 + 2, *[1] * CHECKS, 0, 0, 0]


def test_each_number_of_threads_has_its_trace(tmp_path: Path) -> None:
    runner, threads = runner_of(tmp_path), torch.get_num_threads()
    cache, other = filled(runner, 6), filled(runner, 6)
    try:
        for at in range(12):
            torch.set_num_threads(1 + at % 2)
            assert torch.equal(runner.step(ids(1, at), cache), runner.step(ids(1, at), other))
        replay = steps_of(runner).replay
        assert {(1, 1), (1, 2)} <= replay._states.keys()
        shared = {id(each.compiled._scores) for each in replay._states.values() if each.compiled}
        assert shared == {id(replay._scores)}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "rows", [torch.full((1, 1), 1 << 40), torch.full((1, 1), -5), torch.zeros(1, 1, 64)]
)
def test_bad_rows_are_refused_and_leave_no_trace(tmp_path: Path, rows: Tensor) -> None:
    runner = runner_of(tmp_path)
    cache, other = filled(runner, 6), filled(runner, 6)

    with pytest.raises((IndexError, RuntimeError, ValueError)):
        runner.step(rows, cache)
    cache.crop(cache.length)

    for seed in range(3):
        assert torch.equal(runner.step(ids(1, seed), cache), runner.step(ids(1, seed), other))


def test_a_bad_row_of_a_session_leaves_no_trace_in_others(tmp_path: Path) -> None:
    runner = runner_of(tmp_path)
    caches = [filled(runner, 6), filled(runner, 6)]
    for seed in range(STEPS_BEFORE_REPLAY + 1):
        runner.step_many([ids(1, seed), ids(1, seed)], caches)

    with pytest.raises(IndexError):
        runner.step_many([ids(1), torch.full((1, 1), 1 << 40)], caches)

    assert all(cache.layers[0].rows[0].used == cache.length for cache in caches)
    one, other = runner.step_many([ids(1, 9), ids(1, 9)], caches)
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["no rows", "a session twice", "int32 token ids"])
def test_unusual_steps_run_eagerly(tmp_path: Path, kind: str) -> None:
    runner = runner_of(tmp_path)

    def run() -> list[Tensor]:
        caches = [filled(runner, 6), filled(runner, 6)]
        for seed in range(STEPS_BEFORE_REPLAY + 1):
            runner.step_many([ids(1, seed), ids(1, seed)], caches)
        match kind:
            case "no rows":
                with pytest.raises((RuntimeError, ValueError)):
                    runner.step_many([ids(0), ids(1)], caches)
                for cache in caches:
                    cache.crop(cache.length)
            case "a session twice":
                return runner.step_many([ids(1, 7), ids(1, 8)], [caches[0], caches[0]])
            case _:
                return [runner.step(ids(1, 7).int(), caches[0])]
        return runner.step_many([ids(1, 7), ids(1, 8)], caches)

    recorded = run()
    forget(runner)

    assert all(map(torch.equal, recorded, run()))


def test_rows_with_nan_prove_nothing(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, span=Span(1, 3), embed=False, head=False)
    width = runner.shard.model.config.hidden_size
    cache = runner.new_cache()
    runner.prefill(torch.zeros(1, 6, width, dtype=torch.bfloat16), cache)
    bad = torch.full((1, 2, width), float("nan"), dtype=torch.bfloat16)

    for _ in range(STEPS_BEFORE_REPLAY + 3):
        assert runner.step(bad, cache).isnan().all()

    state = steps_of(runner).replay._states[2, torch.get_num_threads()]
    assert not state.unfit
    assert state.checks == 0
    for _ in range(MAX_TRIES):
        assert runner.step(bad, cache).isnan().all()
    assert (bool(state.unfit), state.compiled) == (True, None)  # each try costs time


class Untraceable(nn.Module):
    """A module that does what a trace does not contain."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept, self.steps = kind, torch.zeros(1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        match self.kind:
            case "looks":
                return x * 2 if bool(x.sum() > 1e9) else x
            case "counts":
                return x * (1 + self.steps % 2)
            case "draws":
                return x + torch.rand(1).to(x.dtype) * 0
            case "picks":
                return x + x[x > 0].sum() * 0
            case "widens":
                return x + torch.sigmoid(x[..., :1].expand(x.shape))
            case _:
                return x


def test_shards_that_share_their_warnings_warn_of_a_reason_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, warned = runner_of(tmp_path), set[str]()
    module = Untraceable("draws")
    hook = runner.shard.model.model.layers[1].mlp.register_forward_hook
    hook(lambda _module, _args, output: module(output))

    for _ in range(2):
        steps_of(runner).replay = replay = Replay(warned=warned)
        cache = filled(runner, 6)
        for seed in range(12):
            runner.step(ids(1, seed), cache)
        assert replay.unfit

    assert len(warnings_of(caplog)) == 1


def test_each_reason_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    replay, threads = Replay(), torch.get_num_threads()
    replay._threads = threads

    for rows, reason in ((1, "it draws"), (2, "it counts"), (3, "it draws")):
        state = replay._states[rows, threads] = _State()
        replay._disable(state, ids(rows), reason)

    assert replay.unfit == {1: "it draws", 2: "it counts", 3: "it draws"}
    assert [each.rpartition(": ")[2] for each in warnings_of(caplog)] == ["it draws", "it counts"]


def test_steps_with_another_number_of_threads_are_not_reported(tmp_path: Path) -> None:
    runner, threads = runner_of(tmp_path), torch.get_num_threads()
    steps_of(runner).replay = replay = Replay()
    replay._states[1, threads + 1] = _State(unfit="it draws")
    replay._states[2, threads] = _State(unfit="it counts")

    runner.step(ids(1), filled(runner, 6))

    assert replay.unfit == {2: "it counts"}


@pytest.mark.parametrize("kind", ["looks", "counts", "draws", "picks"])
def test_a_forward_that_cannot_be_traced_runs_eagerly(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(tmp_path)
    layer, module = runner.shard.model.model.layers[1].mlp, Untraceable(kind)
    layer.register_forward_hook(lambda _module, _args, output: module(output))
    steps_of(runner).replay = Replay()
    cache, other = filled(runner, 6), filled(runner, 6)

    outputs = [runner.step(ids(1, seed), cache) for seed in range(12)]
    assert "no replay of steps of 1 row: " in runner.execution.reason
    forget(runner)
    module.steps = 2 if kind == "counts" else 0
    plain = [runner.step(ids(1, seed), other) for seed in range(12)]

    (warning,) = warnings_of(caplog)
    assert warning.startswith("steps of 1 rows are not replayed: ")
    assert steps_of(runner).replay._states[1, torch.get_num_threads()].unfit
    if kind != "counts":
        assert all(map(torch.equal, outputs, plain))


def doubling(is_so: Callable[[int], bool]) -> Callable[..., Any]:
    """Make a hook that doubles the output of a layer, depending on the length of its cache."""

    def double(_module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        length = kwargs["past_key_values"].get_seq_length()
        return output * (1 + is_so(length))

    return double


def refuse_long(length: int) -> bool:
    if length > 1000:
        raise ValueError("too long")
    return False


@pytest.mark.parametrize("sessions", [1, 2])
@pytest.mark.parametrize(
    "is_so",
    [lambda length: length > 20, lambda length: length < 40, refuse_long],
    ids=["long", "short", "raises"],
)
def test_a_forward_that_reads_the_cache_length_is_not_replayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_so: Callable[[int], bool], sessions: int
) -> None:
    runner = runner_of(tmp_path)
    layer = runner.shard.model.model.layers[2]
    layer.register_forward_hook(doubling(is_so), with_kwargs=True)
    steps_of(runner).replay = Replay()
    before = 12 if is_so(30) else 6  # so that the switch comes after the checks

    def run() -> list[Tensor]:
        caches = [filled(runner, before + at) for at in range(sessions)]
        return [
            each
            for seed in range(36)
            for each in runner.step_many([ids(1, seed)] * sessions, caches)
        ]

    outputs = run()
    forget(runner)

    assert all(map(torch.equal, outputs, run()))
    (warning,) = warnings_of(caplog)
    assert "cache" in warning


def test_steps_that_are_not_replayed_are_told_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner, module = runner_of(tmp_path), Untraceable("draws")
    layer = runner.shard.model.model.layers[1].mlp
    before = runner.execution
    layer.register_forward_hook(lambda _module, _args, output: module(output))
    steps_of(runner).replay = Replay()
    cache, told = filled(runner, 6), list[tuple[Strategy, str, bool]]()

    for counts in ([3, 2], [1, 5, 9]):
        for count in counts:
            for seed in range(STEPS_BEFORE_REPLAY):
                runner.step(ids(count, seed), cache)
        found = runner.execution
        told.append((found.strategy, found.reason.partition(": ")[0], found.is_fallback))

    assert (before.strategy, before.reason, before.is_fallback) == (Strategy.REPLAYED, "", False)
    assert told == [
        (Strategy.REPLAYED, "no replay of steps of 2, 3 rows", True),
        (Strategy.INVARIANT, "no replay", True),
    ]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("steps of 3 rows are not replayed: ")


def test_overlapping_tensors_stay_with_torch(tmp_path: Path) -> None:
    runner, module = runner_of(tmp_path), Untraceable("widens")
    layer = runner.shard.model.model.layers[1].mlp
    layer.register_forward_hook(lambda _module, _args, output: module(output))
    steps_of(runner).replay = Replay()

    check_replay(runner)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise error

    return call


def test_a_trace_that_fails_without_a_text_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tmp_path)
    cache = filled(runner, 6)
    steps_of(runner).replay = Replay()
    monkeypatch.setattr(replay, "CompiledStep", raising(NotImplementedError()))

    for seed in range(4):
        runner.step(ids(1, seed), cache)

    assert steps_of(runner).replay.unfit == {1: "NotImplementedError"}
    assert [each.tries for each in steps_of(runner).replay._states.values()] == [1]


def test_a_failed_trace_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(tmp_path)
    cache, other = filled(runner, 6), filled(runner, 6)
    steps_of(runner).replay = Replay()
    monkeypatch.setattr(replay, "CompiledStep", lambda *_: 1 / 0)

    outputs = [runner.step(ids(1, seed), cache) for seed in range(4)]
    forget(runner)

    assert all(map(torch.equal, outputs, [runner.step(ids(1, seed), other) for seed in range(4)]))


def test_ranks_of_one_process_trace_at_the_same_time(tmp_path: Path) -> None:
    runners = [runner_of(tmp_path / str(at)) for at in range(2)]
    both_record = threading.Barrier(2, timeout=60)

    def wait(runner: Runner, *_: Any) -> None:
        if steps_of(runner).replay.tracer:
            both_record.wait()

    expected = runners[0].step(ids(1), filled(runners[0], 6))
    for runner in runners:
        layer = runner.shard.model.model.layers[1]
        layer.register_forward_pre_hook(partial(wait, runner))
        steps_of(runner).replay = Replay()

    def step(runner: Runner) -> Tensor:
        runner.step(ids(1), filled(runner, 6))  # the first one is not traced
        return runner.step(ids(1), filled(runner, 6))

    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(step, runners))

    assert all(torch.equal(output, expected) for output in outputs)
    assert all(tape_of(runner, 1) for runner in runners)


def test_without_compilation_nothing_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tmp_path)
    monkeypatch.setattr(jit, "jit_available", lambda: False)
    steps_of(runner).replay = Replay()
    cache = filled(runner, 6)

    for seed in range(4):
        runner.step(ids(1, seed), cache)

    assert all(each.compiled is None for each in steps_of(runner).replay._states.values())
