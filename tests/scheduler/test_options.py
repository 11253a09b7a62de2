"""Which replicas a search may choose, however many mixes of kinds there are."""

from dataclasses import replace

import pytest

from meshllm.scheduler.architecture import Architecture
from meshllm.scheduler.machine import MachineKind
from meshllm.scheduler.options import Options
from tests.builders.meshes import A100, GH200, KINDS, LLAMA_8B, LLAMA_70B, mesh, served

A, B = replace(A100, count=2), replace(GH200, count=2)
LAPTOPS = replace(KINDS[5], count=8)


def uses(*kinds: MachineKind, architecture: Architecture = LLAMA_8B) -> set[tuple[int, ...]]:
    """Return how many machines of each kind the options of a model take."""
    return {each.uses for each in Options(mesh(served(architecture), kinds=kinds)).all}


@pytest.fixture(autouse=True)
def few_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.scheduler.options.MAX_MIXES", 1)


def test_a_ring_of_machines_of_one_kind_does_not_depend_on_their_place_in_the_file() -> None:
    assert (0, 0, 2) in uses(A, B, LAPTOPS)
    assert (2, 0, 0) in uses(LAPTOPS, A, B)


def test_machines_of_one_kind_of_which_one_holds_a_model_do_not_hide_larger_rings() -> None:
    small = replace(LAPTOPS, name="old", memory_bytes=LAPTOPS.memory_bytes // 3)

    found = uses(A, small)

    assert {ring for whole, ring in found if not whole} == {7, 8}


def test_mixes_without_the_memory_are_not_counted() -> None:
    assert (0, 1, 1) in uses(LAPTOPS, A, B, architecture=LLAMA_70B)


def test_a_machine_holds_only_the_models_that_it_may() -> None:
    other = replace(B, models=frozenset({"other"}))
    own = replace(B, models=frozenset({LLAMA_70B.name}))

    assert uses(A, other, architecture=LLAMA_70B) == set()
    assert uses(A, own, architecture=LLAMA_70B) == uses(A, B, architecture=LLAMA_70B) != set()


def test_providers_are_not_mixed() -> None:
    engine = replace(A, is_provider=True)

    assert uses(engine, B, architecture=LLAMA_70B) == {(0, 2)}
