from dataclasses import replace

from meshllm.scheduler.proportional import memory_proportional
from tests.builders.meshes import (
    A100,
    LLAMA_8B,
    LLAMA_70B,
    mesh,
    served,
)


def test_memory_alone_gives_models_machines_by_their_weights() -> None:
    both = mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(replace(A100, count=8),))

    found = memory_proportional(both)

    machines = [sum(each.machines for each in found if each.model == model) for model in (0, 1)]
    assert machines == [1, 7]
    assert [each.machines for each in found if each.model == 1] == [3, 4]


def test_memory_alone_gives_a_machine_only_models_that_it_may_hold() -> None:
    own = replace(A100, name="own", count=2, models=frozenset({LLAMA_8B.name}))
    none = replace(A100, name="none", models=frozenset())
    both = mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(none, own, replace(A100, count=4)))

    found = memory_proportional(both)

    uses = [[each.uses for each in found if each.model == model] for model in (0, 1)]
    assert [sum(each) for each in zip(*uses[0], strict=True)][:2] == [0, 2]
    assert [sum(each) for each in zip(*uses[1], strict=True)][:2] == [0, 0]


def test_memory_alone_still_serves_all_models_that_fit() -> None:
    tight = mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(replace(A100, count=4),))

    assert {each.model for each in memory_proportional(tight)} == {0, 1}
    lone = mesh(served(LLAMA_8B), served(LLAMA_70B), kinds=(replace(A100, count=1),))
    assert {each.model for each in memory_proportional(lone)} == {0}
