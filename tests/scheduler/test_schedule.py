from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import NormalDist, fmean

import pytest

from meshllm.errors import ModelError
from meshllm.scheduler.load import Lengths, ModelLoad, sample
from meshllm.scheduler.machine import MachineKind
from meshllm.scheduler.options import Options
from meshllm.scheduler.placement import (
    LayerAllocation,
    ReplicaOption,
    ServedModel,
    Workload,
    make_option,
)
from meshllm.scheduler.schedule import (
    Assessment,
    Schedule,
    assess,
    candidates,
    is_same_placement,
    one_more,
    schedule,
)
from meshllm.scheduler.simulator import Arrival
from tests.bench.placements import compare
from tests.builders.meshes import (
    A100,
    CHAT,
    CODELLAMA_34B,
    GH200,
    LLAMA_8B,
    LLAMA_13B,
    LLAMA_70B,
    QWEN_32B,
    mesh,
    random_mesh,
    served,
)

REQUESTS = 1000
"""Of each draw, by which placements are chosen and compared: fewer than by default."""
DRAWS = 77, 78

THINKING = ModelLoad(1.0, Lengths.lognormal(300, 900), Lengths.lognormal(800, 2500))
STATIC = mesh(
    served(LLAMA_8B, 18.0),
    served(LLAMA_70B, 1.5),
    served(QWEN_32B, 3.0, THINKING),
    kinds=(replace(A100, count=8), replace(GH200, count=4)),
)
"""Three models on two generations of GPUs, within their capacity."""


def mean_s(where: Workload, placement: Assessment) -> float:
    """Return the mean time of a request in draws of the load that no placement is chosen by."""
    loads = [each.load for each in where.models]
    draws = (sample(loads, REQUESTS, seed=seed) for seed in range(9, 15))
    return fmean(assess(where, placement.replicas, draw).mean_s for draw in draws)


def normal(mean: float, deviation: float) -> Lengths:
    """Return lengths of a normal distribution, of 5 tokens at least."""
    drawn = NormalDist(mean, deviation)
    return Lengths(tuple(max(5, int(drawn.inv_cdf((at + 0.5) / 100))) for at in range(100)))


STUDIED = (
    ServedModel(LLAMA_13B, ModelLoad(110, normal(599, 822), normal(74, 211))),
    ServedModel(CODELLAMA_34B, ModelLoad(185.5, normal(1169, 1276), normal(532, 435))),
    ServedModel(LLAMA_70B, ModelLoad(221, normal(727, 777), normal(64, 190))),
)
"""The static study of LLMFabric: three models, the requests per second of each, and the lengths.

Of the public experiments of its authors (OpenTela, `contrib/benchmark/experiments/2_1_placement`,
`contrib/serving-simulator/tools/bench_placement`): 24 A100 of 80 GB and 32 GH200 in nodes of four,
instances of vLLM on 1, 2 or 4 of them, three placements. The text of the paper with its Table 1
was not at hand: whether it has the same values is not known, and its results are not compared.
The speeds of the GPUs are the vendor's; the study asks for more than any placement can serve.
"""


def sliced(kind: MachineKind, devices: int, count: int, link: float) -> MachineKind:
    """Return instances of an engine on so many GPUs each."""
    return replace(
        kind, name=f"{devices} {kind.name}", memory_bytes=devices * kind.memory_bytes,
        devices=devices, count=count, device_link=link, is_provider=True,
    )  # fmt: skip


def a100(devices: int, count: int) -> MachineKind:
    return sliced(A100, devices, count, 300e9)


def gh200(devices: int, count: int) -> MachineKind:
    return sliced(GH200, devices, count, 450e9)


STUDY = mesh(*STUDIED, kinds=(a100(1, 6), a100(2, 5), a100(4, 2), gh200(2, 8), gh200(4, 4)))
"""The GPUs as the study's own scheduler splits them into instances."""
KINDS = {kind.name: at for at, kind in enumerate(STUDY.kinds)}
PLACEMENTS = {
    "own": {(0, "1 a100"): 6, (1, "2 a100"): 5, (1, "2 gh200"): 8, (2, "4 a100"): 2,
            (2, "4 gh200"): 4},
    "throughput": {(0, "1 a100"): 4, (1, "2 a100"): 10, (1, "2 gh200"): 4, (2, "4 gh200"): 6},
    "memory": {(0, "1 a100"): 4, (1, "2 a100"): 8, (2, "4 a100"): 1, (2, "4 gh200"): 8},
}  # fmt: skip
"""Of the study: instances of a model on GPUs. `memory` gives GPUs by rate times size of a model."""


@pytest.fixture(scope="module", autouse=True)
def _few() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshllm.scheduler.schedule.REQUESTS", REQUESTS)
        patch.setattr("tests.bench.placements.REQUESTS", REQUESTS)
        patch.setattr("tests.bench.placements.SEEDS", DRAWS)
        yield


@pytest.fixture(scope="module")
def of_study() -> Schedule:
    """The schedule of the study, which takes seconds; nothing changes it."""
    return schedule(STUDY)


@pytest.fixture(scope="module")
def of_static() -> Schedule:
    return schedule(STATIC)


def assessed(placement: dict[tuple[int, str], int], requests: Sequence[Arrival]) -> Assessment:
    replicas = list[ReplicaOption]()
    for (model, kind), count in placement.items():
        option = make_option(STUDY, model, (KINDS[kind],), LayerAllocation.BALANCED)
        assert option is not None
        replicas += [option] * count
    return assess(STUDY, replicas, requests)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_placements_of_a_study_are_in_its_order_and_ours_is_before_them(
    seed: int, of_study: Schedule
) -> None:
    asked = sample([each.load for each in STUDIED], 3000, seed=seed)

    own, throughput, memory = (assessed(each, asked) for each in PLACEMENTS.values())

    ours = assess(STUDY, of_study.best.replicas, asked)
    assert ours.mean_s < own.mean_s < throughput.mean_s < memory.mean_s
    assert min(each.tokens_per_s for each in (ours, own, throughput)) > 1.3 * memory.tokens_per_s
    assert ours.mean_s < 0.6 * memory.mean_s
    assert sum(each.refused for each in ours.models) == 0


def test_three_models_on_two_generations_of_gpus_beat_the_placement_by_memory(
    of_static: Schedule,
) -> None:
    again = sample([each.load for each in STATIC.models], 3000, seed=77)
    ours, by_memory = (
        assess(STATIC, each.replicas, again) for each in (of_static.best, of_static.proportional)
    )
    assert ours.mean_s < 0.5 * by_memory.mean_s
    assert ours.tokens_per_s > 1.3 * by_memory.tokens_per_s
    assert [each.refused for each in ours.models] == [0, 0, 0]


def test_the_runner_up_is_another_placement_and_no_better(of_static: Schedule) -> None:
    best, runner_up = of_static.best, of_static.runner_up

    assert runner_up is not None
    assert mean_s(STATIC, best) <= mean_s(STATIC, runner_up) < inf
    assert runner_up.replicas != best.replicas


def test_an_incomplete_placement_is_not_the_runner_up() -> None:
    found = schedule(mesh(served(LLAMA_8B), kinds=(A100,)))

    assert found.runner_up is None or found.runner_up.mean_s < inf
    assert is_same_placement(found.best, found.proportional)


def test_one_more_machine_of_each_kind_is_told_and_a_fast_one_helps(of_static: Schedule) -> None:
    asked = sample([each.load for each in STATIC.models], REQUESTS)
    best = assess(STATIC, of_static.best.replicas, asked)

    found = one_more(STATIC, best, asked)

    assert [each.kind for each in found] == ["a100", "gh200"]
    assert found[1].mean_s < best.mean_s


@pytest.mark.parametrize("kind", [0, 1])
def test_a_larger_mesh_is_searched_for_a_placement_that_is_as_good(kind: int) -> None:
    kinds = list(STATIC.kinds)
    kinds[kind] = replace(kinds[kind], count=kinds[kind].count + 1)

    (larger, *_), _ = candidates(Options(replace(STATIC, kinds=tuple(kinds))))

    assert larger.mean_s <= candidates(Options(STATIC))[0][0].mean_s


@pytest.mark.parametrize(
    "seed", [2, 8, 21, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 4))]
)
def test_random_meshes_beat_the_placement_by_memory(seed: int) -> None:
    """A sample of what `python -m tests.bench.placements` prints."""
    assert compare(seed).ratio < 1


def test_requests_may_be_given() -> None:
    asked = sample([replace(each.load, rate=0.01) for each in STATIC.models], 50)

    found = schedule(STATIC, asked)

    assert sum(each.served for each in found.best.models) == len(asked)


def test_a_model_that_no_machines_hold_is_named() -> None:
    figures = "it takes [0-9.]+ GiB and workspace, .* have [0-9.]+ GiB"
    with pytest.raises(ModelError, match=rf"holds `llama-3\.1-70b` .*{figures}"):
        schedule(mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(A100,)))


def test_models_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ModelError, match="do not hold all 2 models at once"):
        schedule(mesh(served(LLAMA_8B), served(LLAMA_8B, 1.0, CHAT), kinds=(A100,)))


def test_a_placement_without_a_model_is_infinitely_slow_also_if_nobody_asks_for_it() -> None:
    both = mesh(served(LLAMA_8B), served(LLAMA_13B), kinds=(A100,))
    (option,) = [each for each in Options(both).all if not each.model]
    asked = [each for each in sample([each.load for each in both.models], 100) if not each.model]

    assert assess(both, [option], asked).mean_s == inf


def test_placements_that_are_about_as_good_are_compared_by_further_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = random_mesh(81)
    first = schedule(where)
    monkeypatch.setattr("meshllm.scheduler.schedule.SAMPLES", 1)
    by_one_draw = schedule(where)

    assert mean_s(where, first.best) < mean_s(where, by_one_draw.best)
