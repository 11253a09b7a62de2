"""Steps of several rows are bit-equal to steps of one row, in every family."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from meshllm.model.files.source import resolve
from meshllm.model.locate import BUILTIN
from meshllm.model.modules import linear_padded
from meshllm.model.modules.kernel_choice import has_bf16_dot
from meshllm.model.modules.linear_bf16 import MAX_ROWS
from meshllm.model.modules.quant_matrix import multiplies_matrices
from meshllm.model.modules.replacement import most_invariant_rows
from meshllm.model.split.shard import Shard
from meshllm.model.split.stubs import ProjectionStub
from meshllm.model.steps import strategies
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import RECOMPUTED_ROWS
from meshllm.model.steps.trial import run_untested
from meshllm.names import Quant, Span
from meshllm.testing.models import tiny_model
from tests.builders.runners import COUNTS, INVARIANT, filled, ids, runner_of
from tests.model.invariance import require_row_invariant


@pytest.mark.parametrize("family", INVARIANT)
def test_rows_in_one_pass_equal_single_rows(tmp_path: Path, family: str) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    require_row_invariant(runner)
    alone, together = filled(runner, 3), filled(runner, 3)
    tokens = ids(40, seed=1)

    one_by_one = torch.cat([runner.step(tokens[:, at : at + 1], alone) for at in range(40)], 1)
    at, steps = 0, []
    for rows in (1, 2, 5, 3, 9, 17, 1, 2):
        steps.append(runner.step(tokens[:, at : at + rows], together))
        at += rows

    assert at == 40
    assert torch.equal(torch.cat(steps, 1), one_by_one)
    assert (alone.length, together.length) == (43, 43)


WIDTHS = "llama", "gpt2", "phi3"
"""Families whose matrices differ in their widths or names."""
OTHERS = tuple(family for family in INVARIANT if family not in WIDTHS)

AGAIN = [RECOMPUTED_ROWS, 2 * MAX_ROWS + 4, 1]
"""Rows that are computed again together: in one pass where the kernels allow, else in several."""
SHORT = {"gpt2": [2 * MAX_ROWS + 4, MAX_ROWS, 1]}
"""The same, of families with few positions."""


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        *((family, Quant.NONE) for family in INVARIANT),
        *((family, Quant.INT8) for family in WIDTHS),
        *(pytest.param(family, Quant.INT8, marks=pytest.mark.slow) for family in OTHERS),
    ],
)
def test_rows_that_are_computed_again_equal_steps(
    tmp_path: Path, family: str, quant: Quant
) -> None:
    source = tiny_model(tmp_path, family, dtype=torch.bfloat16)
    runner = Runner(load_shard(source, Span(0, 6), embed=True, head=True, quant=quant), COUNTS)
    require_row_invariant(runner)
    counts = SHORT.get(family, AGAIN)
    tokens, behind = ids(sum(counts), seed=1), ids(5, seed=2)
    steps, again = filled(runner, 3), filled(runner, 3)
    before = torch.cat([runner.step(row, steps) for row in torch.split(tokens, 1, 1)], 1)

    after = [runner.recompute(part, again) for part in torch.split(tokens, counts, 1)]

    assert torch.equal(torch.cat(after, 1), before)
    assert again.length == steps.length == 3 + len(tokens[0])
    assert torch.equal(runner.step(behind, again), runner.step(behind, steps))


@pytest.mark.parametrize("is_step", [False, True], ids=["prompt", "steps"])
@pytest.mark.parametrize(
    ("family", "counts"),
    [
        *(pytest.param(family, COUNTS, id=f"{family}-row-invariant") for family in INVARIANT),
        *(pytest.param(family, (), id=f"{family}-stock") for family in WIDTHS),
        *(
            pytest.param(family, (), id=f"{family}-stock", marks=pytest.mark.slow)
            for family in OTHERS
        ),
    ],
)
def test_caches_can_be_filled_without_the_output(
    tmp_path: Path, family: str, counts: tuple[int, ...], *, is_step: bool
) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16, counts)
    tokens, behind = ids(2 * MAX_ROWS + 4, seed=1), ids(5, seed=2)
    whole, again = filled(runner, 3), filled(runner, 3)
    runner.recompute(tokens, whole) if is_step else runner.prefill(tokens, whole)

    runner.fill(tokens, again, is_step=is_step)

    assert again.length == whole.length == 3 + len(tokens[0])
    assert torch.equal(runner.step(behind, again), runner.step(behind, whole))


@pytest.mark.parametrize("is_padded", [False, True], ids=["compiled", "padded"])
@pytest.mark.parametrize("is_step", [False, True], ids=["prompt", "steps"])
def test_filled_caches_cost_no_products_behind_the_last_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_step: bool, is_padded: bool
) -> None:
    if is_padded:
        monkeypatch.setattr(linear_padded, "to_native", lambda _: None)
        monkeypatch.setattr(linear_padded, "has_native", lambda _: False)
        monkeypatch.setattr(linear_padded, "_min_rows", lambda *_: 2)
    monkeypatch.setattr(strategies, "most_invariant_rows", lambda _: RECOMPUTED_ROWS)
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True)
    runner = Runner(shard, COUNTS, run_untested)
    require_row_invariant(runner)
    cache, ran = filled(runner, 3), list[tuple[int, str]]()

    def note(place: tuple[int, str], *_: object) -> None:
        ran.append(place)

    matrices = "self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj"
    for layer, name in product((4, 5), matrices):
        module = shard.layer(layer).get_submodule(name)
        module.register_forward_hook(partial(note, (layer, name)))

    runner.fill(ids(RECOMPUTED_ROWS), cache, is_step=is_step)

    names = [name for layer, name in ran if layer == 5]
    assert names == ["self_attn.k_proj"]
    assert len(ran) == len(matrices) + 1
    assert type(shard.layer(5).get_submodule("self_attn.q_proj")) is not ProjectionStub


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before, count = torch.get_num_threads(), int(request.param)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("threads", "quant"),
    [
        (1, Quant.NONE),
        *((2, quant) for quant in Quant),
        *(pytest.param(1, quant, marks=pytest.mark.slow) for quant in (Quant.INT8, Quant.INT4)),
    ],
    indirect=["threads"],
)
def test_rows_of_a_real_model_that_are_computed_again_equal_steps(quant: Quant) -> None:
    shard = load_shard(resolve(BUILTIN), Span(1, 2), embed=False, head=False, quant=quant)
    runner = Runner(shard, COUNTS)
    require_row_invariant(runner)
    rows = torch.randn(1, 160, shard.model.config.hidden_size).to(torch.bfloat16)
    prompt, text = rows[:, :30], rows[:, 30:]
    steps, again = runner.new_cache(), runner.new_cache()
    assert torch.equal(runner.prefill(prompt, steps), runner.prefill(prompt, again))
    before = [runner.step(row, steps) for row in torch.split(text, 1, 1)]

    after = [runner.recompute(part, again) for part in torch.split(text, RECOMPUTED_ROWS, 1)]

    assert torch.equal(torch.cat(after, 1), torch.cat(before, 1))


def test_matrices_without_a_kernel_of_ours_limit_the_rows_of_a_pass(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "gpt2", torch.bfloat16)

    assert most_invariant_rows(runner.shard.model) == MAX_ROWS


def test_an_internal_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bug(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Bug

    monkeypatch.setattr("meshllm.model.steps.runner.try_steps", fail)

    with pytest.raises(Bug):
        runner_of(tmp_path, "qwen3", torch.bfloat16)


def test_wrong_rows_leave_no_trace(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    cache, clean = filled(runner, 11), filled(runner, 11)
    right = ids(3, seed=1)

    runner.step(torch.cat([right[:, :1], ids(4, seed=2)], 1), cache)
    cache.crop(12)

    expected = torch.cat([runner.step(right[:, at : at + 1], clean) for at in range(3)], 1)
    assert torch.equal(runner.step(right[:, 1:], cache), expected[:, 1:])


@pytest.mark.parametrize("family", INVARIANT)
def test_a_step_is_near_the_stock_forward(tmp_path: Path, family: str) -> None:
    runner = runner_of(tmp_path, family, torch.bfloat16)
    steady, stock = filled(runner, 30), filled(runner, 30)

    got = runner.step(ids(1, seed=1), steady)

    expected = runner.shard.forward(ids(1, seed=1), stock)
    assert (got - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("quant", Quant)
def test_a_prefill_is_near_the_stock_forward(tmp_path: Path, quant: Quant) -> None:
    source = tiny_model(tmp_path, "qwen3", dtype=torch.bfloat16)
    shard = load_shard(source, Span(0, 6), embed=True, head=True, quant=quant)
    runner = Runner(shard, COUNTS)
    stock, cache = shard.forward(ids(40), runner.new_cache()), runner.new_cache()

    got = torch.cat(
        [runner.prefill(ids(40)[:, :25], cache), runner.prefill(ids(40)[:, 25:], cache)], 1
    )

    assert (got - stock).norm() <= 0.02 * stock.norm()


@pytest.mark.parametrize("quant", Quant)
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size(quant: Quant) -> None:
    if multiplies_matrices():
        pytest.skip("torch multiplies prompts by matrix instructions here")
    source = resolve(BUILTIN)
    runner = Runner(load_shard(source, Span(0, 2), embed=True, head=False, quant=quant), COUNTS)
    tokens = ids(300)
    whole = runner.prefill(tokens, runner.new_cache())

    has_one_order = quant is not Quant.NONE or has_bf16_dot()  # for few rows and for many
    for chunk in (20, 100, 150, *((1, 7, 129) if has_one_order else ())):
        cache = runner.new_cache()
        parts = [runner.prefill(each, cache) for each in torch.split(tokens, chunk, 1)]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_nothing_keeps_a_runner_alive(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", torch.bfloat16)
    runner.step(ids(1), runner.new_cache())
    gone = ref(runner.shard.model)

    del runner
    gc.collect()

    assert gone() is None


def test_one_deviating_prefill_does_not_fail_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, read = Shard.forward, list[int]()

    def forward_otherwise(self: Shard, x: Tensor, cache: Any, **options: Any) -> Tensor:
        """Compute the first prompt in another way, as a library did before its warm-up."""
        output = forward(self, x, cache, **options)
        if not read and cache is not None:
            for layer in cache.layers:
                layer.keys.mul_(1 + 2**-7)
        read.append(x.shape[1])
        return output

    monkeypatch.setattr(Shard, "forward", forward_otherwise)

    assert runner_of(tmp_path, "qwen3", torch.bfloat16).is_row_invariant
    assert read[0] > max(read[1:])
