from dataclasses import replace
from math import inf

import pytest

from meshllm.errors import ModelError
from meshllm.scheduler.load import Lengths, ModelLoad, sample
from meshllm.scheduler.schedule import assess, one_more, schedule
from tests.bench.placements import compare
from tests.builders.meshes import (
    A100,
    CHAT,
    GH200,
    LLAMA_8B,
    LLAMA_70B,
    QWEN_32B,
    mesh,
    served,
)

THINKING = ModelLoad(1.0, Lengths.lognormal(300, 900), Lengths.lognormal(800, 2500))
STATIC = mesh(
    served(LLAMA_8B, 6.0),
    served(LLAMA_70B, 0.5),
    served(QWEN_32B, 1.0, THINKING),
    kinds=(replace(A100, count=8), replace(GH200, count=4)),
)
"""Three models on two generations of GPUs, after the static study of LLMFabric."""


def test_three_models_on_two_generations_of_gpus_beat_the_placement_by_memory() -> None:
    found = schedule(STATIC)

    again = sample([each.load for each in STATIC.models], 3000, seed=77)
    ours, by_memory = (
        assess(STATIC, each.replicas, again) for each in (found.best, found.proportional)
    )
    assert ours.mean_s < 0.5 * by_memory.mean_s
    assert ours.tokens_per_s > 1.3 * by_memory.tokens_per_s
    assert [each.refused for each in ours.models] == [0, 0, 0]


def test_the_runner_up_is_another_placement_and_no_better() -> None:
    found = schedule(STATIC)

    assert found.runner_up is not None
    assert found.best.mean_s <= found.runner_up.mean_s < inf
    assert found.runner_up.replicas != found.best.replicas


def test_one_more_machine_of_a_kind_never_hurts() -> None:
    asked = sample([each.load for each in STATIC.models], 1500)
    best = schedule(STATIC, asked).best

    found = one_more(STATIC, best, asked)

    assert [each.kind for each in found] == ["a100", "gh200"]
    assert all(each.mean_s <= best.mean_s for each in found)
    assert found[1].mean_s < best.mean_s


@pytest.mark.parametrize("seed", [1, 2, 4, 8, 21])
def test_random_meshes_beat_the_placement_by_memory(seed: int) -> None:
    """A sample of what `python -m tests.bench.placements` prints."""
    assert compare(seed).ratio < 1


def test_requests_may_be_given() -> None:
    asked = sample([replace(each.load, rate=0.01) for each in STATIC.models], 50)

    found = schedule(STATIC, asked)

    assert sum(each.served for each in found.best.models) == len(asked)


def test_a_model_that_no_machines_hold_is_named() -> None:
    with pytest.raises(ModelError, match=r"No set of machines holds `llama-3\.1-70b`"):
        schedule(mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(A100,)))


def test_models_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ModelError, match="do not hold all 2 models at once"):
        schedule(mesh(served(LLAMA_8B), served(LLAMA_8B, 1.0, CHAT), kinds=(A100,)))
