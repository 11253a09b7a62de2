from dataclasses import replace

import pytest

from meshllm.names import Span
from meshllm.protocol.planning.plan import Ends, LinkSpeed, Plan, PlanStage
from meshllm.protocol.planning.problem import memory_for
from meshllm.scheduler.load import Lengths, ModelLoad
from meshllm.scheduler.placement import LayerAllocation, ReplicaOption, Workload, make_option
from tests.builders.meshes import A100, CHAT, GH200, GIB, KINDS, LLAMA_8B, LLAMA_70B, mesh, served
from tests.builders.offers import A

DESKTOP = KINDS[4]
PAIR = mesh(served(LLAMA_70B), kinds=(A100, GH200))


def layers(option: ReplicaOption | None) -> list[int]:
    """Return the layers of each machine, those of the first kind first."""
    assert option is not None
    pairs = sorted(zip(option.kinds, option.spans, strict=True), key=lambda pair: pair[0])
    return [len(span) for _, span in pairs]


def test_equal_machines_get_equal_spans_and_the_entry_less_for_its_head() -> None:
    option = make_option(PAIR, 0, (0, 0, 0, 0), LayerAllocation.BALANCED)

    assert layers(option) == [19, 21, 20, 20]


def test_a_faster_machine_gets_more_layers_when_balanced_and_all_that_fit_when_fastest() -> None:
    balanced = make_option(PAIR, 0, (0, 0, 1), LayerAllocation.BALANCED)
    fastest = make_option(PAIR, 0, (0, 0, 1), LayerAllocation.FASTEST)

    assert layers(balanced)[2] > layers(balanced)[1]
    assert layers(fastest)[2] > layers(balanced)[2]
    assert sum(layers(fastest)) == 80


def test_memory_decides_when_it_is_the_only_measure() -> None:
    small = replace(GH200, memory_bytes=48 * GIB)
    odd = mesh(served(LLAMA_8B), kinds=(A100, small))

    first, second = layers(make_option(odd, 0, (0, 1), LayerAllocation.PROPORTIONAL))

    assert first / second == pytest.approx(80 / 48, rel=0.1)


def test_a_model_that_does_not_fit_has_no_option() -> None:
    assert make_option(PAIR, 0, (0,), LayerAllocation.BALANCED) is None
    assert make_option(PAIR, 0, (0, 0, 0), LayerAllocation.BALANCED) is not None


@pytest.mark.parametrize("load", [CHAT, replace(CHAT, prompt=Lengths((50_000,)))])
def test_a_machine_holds_a_model_with_the_memory_that_the_mesh_asks_for(load: ModelLoad) -> None:
    model = served(LLAMA_8B, 1.0, load)
    whole = Plan(1, "llama", Ends.ENTRY, (PlanStage(A, Span(0, LLAMA_8B.layers)),))
    sizes = model.sizes
    least = memory_for(whole, A, sizes, sessions=1, reserve=sizes.workspace_bytes)

    def fits(memory: int) -> bool:
        where = mesh(model, kinds=(replace(A100, memory_bytes=memory),))
        return make_option(where, 0, (0,), LayerAllocation.BALANCED) is not None

    assert fits(least)
    assert not fits(least - 2)


def test_a_provider_serves_whole_models_only() -> None:
    node = replace(A100, devices=4, memory_bytes=320 * GIB, is_provider=True, device_link=300e9)
    cluster = mesh(served(LLAMA_70B), kinds=(node,))

    alone = make_option(cluster, 0, (0,), LayerAllocation.BALANCED)

    assert alone is not None
    assert alone.engine.max_sessions > 8
    assert make_option(cluster, 0, (0, 0), LayerAllocation.BALANCED) is None


def test_a_machine_of_other_models_has_no_option() -> None:
    kind = replace(A100, models=frozenset({LLAMA_70B.name}))
    where = mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(kind,))

    assert make_option(where, 0, (0,), LayerAllocation.BALANCED) is None
    assert make_option(where, 1, (0, 0, 0), LayerAllocation.BALANCED) is not None


def test_sessions_get_the_memory_that_weights_leave() -> None:
    option = make_option(mesh(served(LLAMA_8B)), 0, (0,), LayerAllocation.BALANCED)

    assert option is not None
    workspace = served(LLAMA_8B).sizes.workspace_bytes
    spare = (80 * GIB - workspace) * 0.8 - 2 * 8.03e9
    assert option.engine.room_tokens == pytest.approx(spare / (128 << 10), rel=0.001)


def test_a_ring_visits_near_machines_one_after_another() -> None:
    far = Workload(
        (served(LLAMA_70B),),
        (A100, GH200),
        {("a100", "gh200"): LinkSpeed(0.1)},
        LinkSpeed(0.001),
    )

    option = make_option(far, 0, (0, 1, 0, 1), LayerAllocation.BALANCED)

    assert option is not None
    assert option.kinds in {(0, 0, 1, 1), (0, 1, 1, 0)}
    assert option.engine.decode(1, 0).base > 0.2
