"""What a replica that shares nodes must give, and how many plans that takes.

A node with 2000 of memory holds 16 layers, one with 650 holds 6.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from meshllm.names import FIRST_GROUP, NodeId
from meshllm.protocol.agreement import replica_gain
from meshllm.protocol.agreement.grouping import group_nodes
from meshllm.protocol.agreement.groups import NodeGroups
from meshllm.protocol.agreement.throughput import plan_ring
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.planning.plan import Offer, Plan
from tests.builders.model_groups import WHOLE, ids_of, ring, spans_of, speeds_of
from tests.builders.sharing import NODES, SharedMesh, served_model, shared_mesh


@pytest.mark.parametrize(
    ("memory", "layer_ms", "found"),
    [
        ({0: 2000, 1: 650}, {}, {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}),
        ({0: 1600, 1: 650}, {}, {0: WHOLE}),  # 390 are left: three layers
        ({0: 2000, 1: 350}, {}, {0: WHOLE}),  # 9 layers more on the first cost more than they give
        ({0: 2300, 1: 650}, {"b": 80}, {0: WHOLE}),  # so does a node that is too slow
        ({0: 2300, 1: 650}, {"b": 30}, {0: WHOLE, 1: [(1, "0:6"), (0, "6:12")]}),
        (  # all layers are on two nodes each, but for the last three of the second replica
            {0: 950, 1: 650, 2: 950},
            {},
            {0: [(0, "0:6"), (1, "6:12")], 1: [(2, "0:9"), (0, "9:12")]},
        ),
        ({0: 650, 1: 650, 2: 650}, {}, {0: [(0, "0:6"), (1, "6:12")]}),  # nobody has memory left
        ({0: 2000, 1: 650, 2: 650}, {}, {0: WHOLE, 1: [(1, "0:6"), (2, "6:12")]}),  # none is needed
        ({0: 4000}, {}, {0: WHOLE}),  # a ring of the same node adds nothing
    ],
)
def test_a_replica_shares_nodes_where_that_gives_more(
    memory: dict[int, int], layer_ms: dict[str, float], found: dict[int, list[tuple[int, str]]]
) -> None:
    mesh = speeds_of(shared_mesh(memory, served_model(0, 12, 2)), **layer_ms)

    mesh.settle()

    assert spans_of(mesh) == found
    holders = [node for stages in found.values() for node, _ in stages]
    shares = [each for part in mesh.parts.values() for each in part.further]
    assert len(shares) == len(holders) - len(set(holders))


@pytest.mark.parametrize("unmeasured", [160, 560])
def test_nodes_that_have_measured_no_layers_change_no_replica(unmeasured: int) -> None:
    for memory, ms, count in (({0: 2000, 1: 550}, 10, 2), ({0: 2000, 1: 650}, 5, 1)):
        mesh = speeds_of(shared_mesh(memory, served_model(0, 12, 2)), b=ms)
        mesh.settle()
        found = spans_of(mesh)
        assert len(found) == count

        mesh = speeds_of(shared_mesh({**memory, 2: unmeasured}, served_model(0, 12, 2)), b=ms)
        mesh.unmeasured = {NODES[2]}
        mesh.settle()

        assert spans_of(mesh) == found


def test_a_longer_ring_counts_only_if_measured_nodes_can_make_it() -> None:
    mesh = shared_mesh({0: 900, 1: 830, 2: 650, 3: 350}, served_model(0, 12, 2))
    speeds_of(mesh, d=100)
    first, replica = ids_of(mesh)
    plan = ring("m0", (NODES[0], 0, 8), (NODES[1], 8, 10), (NODES[3], 10, 12))
    mesh.parts = {at: NodeGroups(first) for at in mesh.memory}
    mesh.followed = {(at, first): plan for at in mesh.memory}
    mesh.unmeasured = {NODES[0]}

    found = group_nodes(mesh.view())

    assert found[NODES[2]] == NodeGroups(replica)
    assert list(found[NODES[1]].further) == [replica]
    assert not found[NODES[0]].further


@pytest.mark.parametrize(("policy", "is_shared"), [("auto", True), ("throughput", False)])
def test_a_replica_must_give_more_than_the_longer_ring_that_the_policy_makes(
    policy: str, *, is_shared: bool
) -> None:
    """Two rings take 90 ms of each slowest node; one of 3 nodes 40 ms, 15 % more is 34.8 ms."""
    charter = replace(served_model(0, 12, 2), policy=policy)
    mesh = shared_mesh({0: 950, 1: 650, 2: 950}, charter)
    first, replica = ids_of(mesh)
    plan = ring("m0", (NODES[0], 0, 6), (NODES[1], 6, 12))
    mesh.parts = {at: NodeGroups(first) for at in mesh.memory}
    mesh.followed = {(at, first): plan for at in mesh.memory}

    found = group_nodes(mesh.view())

    assert found[NODES[2]].first == (replica if is_shared else first)
    assert found[NODES[0]].further == ({replica: 300} if is_shared else {})


def crowd(monkeypatch: pytest.MonkeyPatch, layer_s: float) -> list[int]:
    """Return how many nodes were planned with, where two serve and 30 more hold a layer each."""
    nodes = [NodeId(bytes([number + 1]) * 32) for number in range(32)]
    mesh = SharedMesh(served_model(0, 40, 2), dict.fromkeys(nodes, 150))
    mesh.memory |= dict.fromkeys(nodes[:2], 4500)
    mesh.layer_s = dict.fromkeys(nodes[2:], layer_s)
    plan = ring("m0", (nodes[0], 0, 20), (nodes[1], 20, 40))
    for at in nodes:
        mesh.parts[at], mesh.followed[at, FIRST_GROUP] = NodeGroups(FIRST_GROUP), plan
    planned = list[int]()

    def count(charter: Charter, offers: Sequence[Offer], *others: Any) -> Plan | None:
        planned.append(len(offers))
        return plan_ring(charter, offers, *others)

    monkeypatch.setattr(replica_gain, "plan_ring", count)
    group_nodes(mesh.view())
    return planned


def test_no_ring_is_planned_with_nodes_that_are_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crowd(monkeypatch, 5.0) == []


def test_few_rings_are_planned_with_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = crowd(monkeypatch, 0.05)

    assert planned
    assert len(planned) <= 2 * (30).bit_length()


def test_a_model_that_nobody_uses_slows_no_model_in_use() -> None:
    mesh = shared_mesh({0: 4200, 1: 650}, served_model(0, 12, 2), served_model(1, 12))
    other = mesh.charter.models[0].key
    mesh.used = (other,)

    mesh.settle()

    assert len(mesh.served()) == 2
    assert spans_of(mesh).keys() == {0}
    mesh.used = tuple(sorted((mesh.charter.key, other)))
    mesh.settle()
    assert spans_of(mesh).keys() == {0, 1}
    mesh.used = (other,)
    mesh.settle()
    assert spans_of(mesh).keys() == {0, 1}  # decided once
