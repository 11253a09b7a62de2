"""The closed form against the simulator, which knows nothing of it."""

from dataclasses import replace

import pytest

from meshllm.scheduler.estimate import HORIZON_S, UNSERVED_S, Estimate, mean_time
from meshllm.scheduler.load import Lengths, ModelLoad, sample
from meshllm.scheduler.placement import LayerAllocation, make_option
from meshllm.scheduler.simulator import SimulatedReplica, simulate
from tests.builders.meshes import A100, CHAT, GH200, KINDS, LLAMA_8B, LLAMA_70B, mesh, served

CASES = {
    "one machine": (mesh(served(LLAMA_8B)), (0,)),
    "engine of its own": (mesh(served(LLAMA_8B), kinds=(replace(A100, is_provider=True),)), (0,)),
    "ring of two kinds": (mesh(served(LLAMA_70B), kinds=(A100, GH200)), (0, 0, 1)),
    "slow ring": (mesh(served(LLAMA_8B), kinds=(KINDS[4],)), (0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_it_agrees_with_the_simulator(case: str, share: float) -> None:
    where, machines = CASES[case]
    option = make_option(where, 0, machines, LayerAllocation.BALANCED)
    assert option is not None
    estimate = Estimate(option.engine, CHAT)
    load = replace(CHAT, rate=share * estimate.capacity)

    run = simulate([SimulatedReplica(0, option.engine)], sample([load], 3000))

    assert mean_time([estimate], load.rate) == pytest.approx(run.mean_s, rel=0.12)


@pytest.mark.parametrize("case", CASES)
def test_its_capacity_is_where_queues_start_to_grow(case: str) -> None:
    where, machines = CASES[case]
    option = make_option(where, 0, machines, LayerAllocation.BALANCED)
    assert option is not None
    capacity = Estimate(option.engine, CHAT).capacity

    def mean_s(share: float) -> float:
        load = replace(CHAT, rate=share * capacity)
        # Long enough for the queue of an overload to dominate, whatever the places.
        return simulate([SimulatedReplica(0, option.engine)], sample([load], 4000)).mean_s

    assert mean_s(0.8) < 2.5 * mean_s(0.1)
    assert mean_s(1.5) > 4 * mean_s(0.8)


def test_an_overload_waits_in_proportion_to_its_excess() -> None:
    option = make_option(mesh(served(LLAMA_8B)), 0, (0,), LayerAllocation.BALANCED)
    assert option is not None
    one = Estimate(option.engine, CHAT)

    full, double = (mean_time([one], share * one.capacity) for share in (0.98, 1.96))

    assert double - full == pytest.approx(HORIZON_S / 2)


def test_a_model_without_replicas_is_worse_than_any_queue() -> None:
    assert mean_time([], 1.0) == UNSERVED_S > HORIZON_S


def test_answers_of_one_token_take_no_time_beside_prefill() -> None:
    model = replace(LLAMA_8B, experts=64, active_experts=2, intermediate=1024)
    where = mesh(served(model), kinds=(replace(A100, is_provider=True),))
    option = make_option(where, 0, (0,), LayerAllocation.BALANCED)
    assert option is not None
    load = ModelLoad(1.0, Lengths((512,)), Lengths((1,)), cached=0.98)

    estimate = Estimate(option.engine, load)

    assert 0 < estimate.service_time_s(estimate.capacity) < UNSERVED_S
