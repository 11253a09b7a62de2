"""Steps traced during warm-up are bit-equal to those of the model."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.steps.load import load_shard
from meshllm.model.steps.replay import CHECKS
from meshllm.model.steps.runner import Runner
from meshllm.model.steps.strategies import BATCH_ROWS, ReplayedSteps
from meshllm.names import Quant, Span
from meshllm.protocol.drafting.window import STEPS
from meshllm.testing.models import tiny_model
from tests.model.invariance import require_row_invariant

SIZES = (1, *STEPS)
SEEN = 6
PARTS: dict[str, dict[str, Any]] = {
    "whole": {"start": 0, "stop": None, "embed": True, "head": True},
    "front": {"start": 0, "stop": 1, "embed": True, "head": False},
    "layers": {"start": 1, "stop": 3, "embed": False, "head": False},
    "head": {"start": None, "stop": None, "embed": False, "head": True},
}

pytestmark = pytest.mark.skipif(not jit.jit_available(), reason="no memory becomes executable here")


def runner_of(folder: Path, family: str, part: str, quant: Quant = Quant.NONE) -> Runner:
    source = tiny_model(folder, family, dtype=torch.bfloat16)
    layers, which = source.config.num_hidden_layers, dict(PARTS[part])
    start, stop = (layers if at is None else at for at in (which.pop("start"), which.pop("stop")))
    runner = Runner(load_shard(source, Span(start, stop), quant=quant, **which), STEPS)
    require_row_invariant(runner)
    return runner


def rows(runner: Runner, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if runner.shard.embed:
        return torch.randint(3, 90, (1, count), generator=generator)
    width = runner.shard.model.config.hidden_size
    return torch.randn(1, count, width, generator=generator).to(torch.bfloat16)


def begun(runner: Runner) -> SpanCache | None:
    """Prefill a cache, if the shard has layers."""
    if not runner.shard.span:
        return None
    cache = runner.new_cache()
    runner.prefill(rows(runner, SEEN, 0), cache)
    return cache


def written(runner: Runner, cache: SpanCache | None, sizes: tuple[int, ...]) -> list[Tensor]:
    return [runner.step(rows(runner, size, size), cache) for size in sizes]


def forwards_of(runner: Runner) -> list[int]:
    """Record each forward of the model that is not replayed."""
    seen: list[int] = []
    for module in runner.shard.model.modules():
        module.register_forward_pre_hook(lambda *_: seen.append(1))
    return seen


@pytest.mark.parametrize(
    ("family", "part", "quant"),
    [
        *(("qwen3", part, Quant.NONE) for part in PARTS),
        ("llama", "whole", Quant.INT8),
        ("llama", "head", Quant.INT8),
        ("gemma3_text", "whole", Quant.NONE),
        ("mistral", "layers", Quant.INT4),
        ("gpt2", "whole", Quant.NONE),
    ],
)
def test_a_warmed_up_step_has_the_bits_of_the_model(
    tmp_path: Path, family: str, part: str, quant: Quant
) -> None:
    runner = runner_of(tmp_path, family, part, quant)
    text, other, between = begun(runner), begun(runner), list[Tensor]()

    for number, _ in enumerate(runner.warm_up_steps()):
        between += written(runner, text, (1 + number % 3,))
    forwards, count = forwards_of(runner), len(between)
    outputs = between + written(runner, text, SIZES)
    taken = len(forwards)
    assert isinstance(runner.steps, ReplayedSteps)
    runner.step = runner.steps.inner.step
    sizes = [output.shape[1] for output in between]
    plain = written(runner, other, (*sizes, *SIZES))

    assert taken == 0
    assert count
    traced = {rows for (rows, _), state in runner.steps.replay._states.items() if state.compiled}
    assert traced == {*SIZES, *BATCH_ROWS}
    assert all(map(torch.equal, outputs, plain))


def test_an_interrupted_warm_up_is_continued(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", "whole")

    assert len(list(islice(runner.warm_up_steps(), 4))) == 4
    rest = len(list(runner.warm_up_steps()))
    prompts = forwards_of(runner)

    assert 0 < rest < len((*SIZES, *BATCH_ROWS)) * (1 + CHECKS)
    assert not list(runner.warm_up_steps())
    assert not prompts


def test_a_running_step_is_padded_while_its_warm_up_waits(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", "whole")
    assert isinstance(runner.steps, ReplayedSteps)
    replay, warm_up = runner.steps.replay, runner.warm_up_steps()
    texts = [begun(runner), begun(runner)]
    while replay.needs(STEPS[-1]):
        next(warm_up)  # and then it waits before a batch
    forwards = forwards_of(runner)

    for seed in range(3):
        runner.step_many([rows(runner, count, seed) for count in (3, 4)], texts)

    assert not forwards
    assert replay.needs(7)


def test_warm_up_ends_if_nothing_can_be_traced(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "qwen3", "whole")
    assert isinstance(runner.steps, ReplayedSteps)
    most = 200
    with torch.inference_mode():
        norm = next(
            value for name, value in runner.shard.model.named_parameters() if "norm" in name
        )
        norm.fill_(float("nan"))  # NaN proves nothing

    assert 0 < len(list(islice(runner.warm_up_steps(), most))) < most
    assert not any(state.unfit for state in runner.steps.replay._states.values())
