"""The self-test on load: a bounded part of the weights, one layer of each kind, tight bounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.model.pauses import pausing
from meshllm.model.split.shard import Shard
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.trial import (
    TOLERANCE,
    TRIED,
    CachedTrial,
    chosen_layers,
    draw_rows,
    only_layers,
    try_steps,
)
from meshllm.names import Span
from meshllm.testing.models import tiny_model


class Stepped:
    """Stock steps of one row, scaled by a factor.

    ``coupling`` makes rows of a session depend on each other, ``batch_coupling`` those of a batch.
    """

    def __init__(
        self,
        shard: Shard,
        factor: float = 1.0,
        coupling: float = 0.0,
        batch_coupling: float = 0.0,
    ) -> None:
        self.shard, self.factor = shard, factor
        self.coupling, self.batch_coupling = coupling, batch_coupling

    def prefill(self, x: Tensor, cache: Any, rows: int | None = None) -> Tensor:
        return self.shard.forward(x, cache, rows=rows)

    def step(self, x: Tensor, cache: Any) -> Tensor:
        return self._run(x, cache, self.coupling)

    def step_many(self, parts: Any, caches: Any) -> list[Tensor]:
        pairs = zip(parts, caches, strict=True)
        return [self._run(*pair, self.batch_coupling) for pair in pairs]

    def _run(self, x: Tensor, cache: Any, coupling: float) -> Tensor:
        alone = [self.shard.forward(row, cache) for row in torch.split(x, 1, 1)]
        return torch.cat(alone, 1) * self.factor + coupling * (x.shape[1] > 1)


def shard_of(folder: Path, family: str = "qwen3") -> Shard:
    source = tiny_model(folder, family, dtype=torch.bfloat16)
    return load_shard(source, Span(0, source.config.num_hidden_layers), embed=True, head=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"factor": 1.1}, "steps differ from the stock forward by 0.1"),
        ({"factor": 1 - 1.2 * TOLERANCE}, "steps differ from the stock forward by 0.0"),
        ({"coupling": 1e-2}, "a row depends on the other rows of its step"),
        ({"batch_coupling": 1e-2}, "a row depends on the other rows of its step"),
        ({"factor": float("nan")}, "a row depends"),
    ],
    ids=["equal", "larger", "smaller", "rows of a session", "rows of a batch", "NaN"],
)
def test_steps_far_from_the_stock_forward_are_refused(
    tmp_path: Path, change: dict[str, float], reason: str
) -> None:
    shard = shard_of(tmp_path)

    found = try_steps(shard, Stepped(shard, **change))

    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def test_a_trial_reads_a_bounded_part_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, computed = shard_of(tmp_path), set[int]()
    for index in range(6):
        mlp = shard.layer(index).get_submodule("mlp")
        mlp.register_forward_pre_hook(lambda *_, index=index: computed.add(index))
    size = sum(each.nbytes for each in shard.layer(0).parameters())
    monkeypatch.setattr("meshllm.model.steps.trial.BUDGET", 2 * size)

    assert try_steps(shard, Stepped(shard)) == ""

    assert computed == {0, 1}


def test_a_layer_of_each_kind_is_tested(tmp_path: Path) -> None:
    shard = shard_of(tmp_path, "gemma3_text")  # some layers have a sliding window

    assert chosen_layers(shard, 1 << 30) == list(range(6))
    few = chosen_layers(shard, 0)
    assert few[0] == 0
    assert len(few) == 2


def test_skipped_layers_compute_again_afterwards(tmp_path: Path) -> None:
    shard, x = shard_of(tmp_path), torch.arange(3, 9)[None]
    before = shard.forward(x, shard.new_cache())

    with only_layers(shard, [0]):
        assert not torch.equal(shard.forward(x, shard.new_cache()), before)

    assert torch.equal(shard.forward(x, shard.new_cache()), before)


def test_steps_in_a_pause_of_a_trial_use_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, x = shard_of(tmp_path), torch.arange(3, 9)[None]
    monkeypatch.setattr("meshllm.model.steps.trial.BUDGET", 0)
    before, during = shard.forward(x, shard.new_cache()), list[Tensor]()

    with pausing(lambda: during.append(shard.forward(x, shard.new_cache()))):
        found = try_steps(shard, Stepped(shard))

    assert found == ""
    assert len(during) == 4
    assert all(torch.equal(each, before) for each in during)


def test_an_inner_span_is_tested_up_to_its_end(tmp_path: Path) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(1, 5), embed=False, head=False)

    with only_layers(shard, [1]):
        output = shard.forward(draw_rows(shard), shard.new_cache())

    assert output.shape == (1, 29, 64)


def test_a_passed_trial_is_cached_per_kind_of_layer_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    whole = load_shard(source, Span(0, 6), embed=True, head=True)
    part = load_shard(source, Span(2, 4), embed=False, head=False)
    front = load_shard(source, Span(0, 4), embed=True, head=False)
    trial, bad = CachedTrial(tmp_path / "cache"), "steps differ"

    assert trial(whole, Stepped(whole, 1.1)).startswith(bad)  # not cached
    assert trial(whole, Stepped(whole)) == ""
    assert trial(whole, Stepped(whole, 1.1)) == ""  # cached: not tested again
    assert trial(part, Stepped(part, 1.1)) == ""  # no layer of another kind
    assert trial(front, Stepped(front, 1.1)).startswith(bad)  # other ends
    setattr(whole.model.lm_head, "kernel", "another")  # noqa: B010 -- as that of another choice
    assert trial(whole, Stepped(whole, 1.1)).startswith(bad)
    delattr(whole.model.lm_head, "kernel")
    norm = part.layer(3).get_submodule("input_layernorm")
    setattr(norm, "is_strange", True)  # noqa: B010 -- a kind of its own
    assert trial(part, Stepped(part, 1.1)).startswith(bad)
    assert trial(whole, Stepped(whole, 1.1), TRIED + 1).startswith(bad)
    for name, other in (("model_code", "other code"), ("machine", ("another",))):
        with monkeypatch.context() as patch:
            patch.setattr(f"meshllm.model.steps.trial.{name}", lambda other=other: other)
            assert trial(whole, Stepped(whole, 1.1)).startswith(bad), name
