from dataclasses import replace

import pytest

from meshllm.names import NodeId, Span
from meshllm.protocol.membership.records import ENDS, Profile, StateRecord
from meshllm.protocol.planning.plan import Ends, Plan, PlanStage
from meshllm.protocol.weights.holders import (
    ABSENT,
    FETCHES,
    LACKS,
    awaits_weights,
    digests_in_force,
    has_model,
    holders,
    is_bare,
    missing_parts,
    name_of,
    needed_parts,
    spare_parts,
    stale_parts,
    with_fetched,
)
from tests.builders.offers import A, B, C, D
from tests.builders.snapshots import charter, profile, weights

CHARTER = charter()
LAYERS = CHARTER.shape.layers
PARTS = LAYERS + ENDS - 1
WHOLE = weights()


def having(*parts: int, other: bool = False) -> Profile:
    """Return the profile of a node that has some parts, or others under their numbers."""
    have = [b"y" * 16] * PARTS if other else WHOLE
    own = [have[at] if at in parts else ABSENT for at in range(PARTS)]
    return replace(profile(4), weights=(*own, WHOLE[-1]))


def test_the_digests_of_the_founder_count_then_those_of_low_ids() -> None:
    profiles = {A: having(0, 1, other=True), B: having(1, 2), C: having(0)}

    assert digests_in_force(CHARTER, profiles, author=C)[:3] == (
        WHOLE[0],
        profiles[A].weights[1],
        WHOLE[2],
    )
    assert digests_in_force(CHARTER, {}, author=C) == (ABSENT,) * PARTS


def test_a_node_with_another_model_has_no_say_and_no_parts() -> None:
    wrong = replace(having(0), weights=(*having(0).weights[:-1], b"y" * 16))
    short = replace(having(0), weights=WHOLE[1:])

    assert not has_model(CHARTER, wrong)
    assert digests_in_force(CHARTER, {A: wrong, B: short}, author=A) == (ABSENT,) * PARTS
    assert holders(CHARTER, {A: wrong, B: short}, [A, B], WHOLE[:-1]) == {}


def test_holders_have_the_digests_in_force() -> None:
    profiles = {A: having(0, 1), B: having(1, other=True), C: having(), D: having(1, PARTS - 1)}

    found = holders(CHARTER, profiles, [A, B, C, D, NodeId(b"?" * 32)], WHOLE[:-1])

    assert found == {A: {0, 1}, D: {1, PARTS - 1}}


def test_parts_are_stale_of_which_the_founder_has_others() -> None:
    own = having(0, 1, 3, other=True).weights

    assert stale_parts(CHARTER, {A: having(1, 2, 3)}, A, own) == frozenset({1, 3})
    assert stale_parts(CHARTER, {A: having(1, 2)}, A, having(1, 2).weights) == frozenset()
    assert stale_parts(CHARTER, {B: having(1, 2, 3)}, A, own) is None
    assert stale_parts(CHARTER, {A: replace(having(), weights=())}, A, own) is None
    assert stale_parts(CHARTER, {A: having()}, A, ()) is None


def test_a_node_needs_its_layers_and_the_entry_the_ends() -> None:
    stages = PlanStage(A, Span(0, 1)), PlanStage(B, Span(1, LAYERS))
    plan = Plan(1, "tiny", Ends.ENTRY, stages)

    assert needed_parts(plan, A) == {0, LAYERS, LAYERS + 1}
    assert needed_parts(plan, B) == set(range(1, LAYERS))
    assert needed_parts(plan, C) == frozenset()
    assert missing_parts(having(1).weights, needed_parts(plan, B)) == set(range(2, LAYERS))


def test_a_manifest_without_layers_is_bare() -> None:
    assert is_bare(having().weights)
    assert is_bare(having(LAYERS).weights)
    assert not is_bare(having(LAYERS - 1).weights)


def test_each_part_of_only_one_holder_is_fetched_by_one_other_node() -> None:
    nodes = [A, B, C, D]
    held = {A: set(range(8)), B: {6, 7}}

    shares = [spare_parts(held, 9, nodes, me) for me in nodes]

    assert sorted(part for share in shares for part in share) == list(range(6))
    assert shares[0] == frozenset()
    assert all(shares[1:])
    assert spare_parts(held, 9, [A], A) == frozenset()


def test_nodes_that_await_weights_are_planned_with_as_if_they_had_them() -> None:
    states = {
        A: StateRecord(),
        B: StateRecord(obstacle=FETCHES),
        C: StateRecord(obstacle=f"{LACKS}: it would be slower"),
        D: StateRecord(obstacle="it provides whole models"),
    }

    assert [awaits_weights(state) for state in states.values()] == [False, True, True, False]
    assert {node: state.obstacle for node, state in with_fetched(states).items()} == {
        A: "",
        B: "",
        C: "",
        D: "it provides whole models",
    }


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen-Qwen3-0-6B"),
        ("../../etc/passwd", "------etc-passwd"),
        ("x" * 65 + "é\0", "x" * 62 + "--"),
        ("", ""),
    ],
)
def test_the_folder_of_a_model_has_its_digest_and_a_harmless_name(name: str, folder: str) -> None:
    named = replace(CHARTER, shape=replace(CHARTER.shape, name=name))

    assert name_of(named) == f"{CHARTER.config_digest.hex()[:16]}-{folder}"
