"""Nodes are found by their names and ids, and listed by name."""

from dataclasses import replace

import pytest

from meshllm.errors import UserError
from meshllm.names import NodeId, short, show
from meshllm.node.node_names import MAX_NAMES, Names, find_node, names_of, resolve_names
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.trust.identity import NodeKey
from tests.builders.snapshots import profile

A, B, C = (NodeKey(bytes([n]) * 32).node for n in range(3))
PROFILES = {A: Profile("desk", "1", (), 0), B: Profile("attic", "1", (), 0),
            C: Profile("attic", "1", (), 0)}  # fmt: skip
LISTED = {
    node: replace(profile(4), name=name) for node, name in ((A, "attic"), (B, "desk"), (C, "barn"))
}


def test_the_id_of_another_node_is_not_a_name() -> None:
    profiles = PROFILES | {C: Profile(show(A), "1", (), 0)}

    assert resolve_names((show(A),), profiles) == Names((A,), (), ())
    assert find_node(show(A), profiles) == A


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("desk", A),
        (show(B), B),
        (show(B).upper(), B),
        (show(B)[:10], B),
        (show(NodeKey(b"x" * 32).node), NodeKey(b"x" * 32).node),
    ],
)
def test_a_node_is_found_by_name_or_id(text: str, node: NodeId) -> None:
    assert find_node(text, PROFILES) == node


@pytest.mark.parametrize(
    "text", ["", "nobody", show(B)[:5], show(B)[:-1] + "?", "\x1b[2J", "d" * 9]
)
def test_an_unknown_node_is_not_found(text: str) -> None:
    is_long = len(text) > 50
    with pytest.raises(UserError, match="Invalid node id" if is_long else "No node has the name"):
        find_node(text, PROFILES)


def test_an_ambiguous_name_is_reported() -> None:
    with pytest.raises(UserError, match="2 nodes match `attic`"):
        find_node("attic", PROFILES)


def test_nodes_are_listed_by_name() -> None:
    assert names_of([A, B, C], LISTED) == "attic, barn, desk"


def test_nodes_of_one_name_have_their_ids_too() -> None:
    twins = {**LISTED, B: LISTED[A]}

    assert names_of([A, B, C], twins) == ", ".join(
        sorted([f"attic ({short(A)})", f"attic ({short(B)})", "barn"])
    )


def test_a_node_without_a_profile_has_its_id() -> None:
    assert names_of([A], {}) == short(A)


@pytest.mark.parametrize(("more", "end"), [(0, ""), (3, " and 3 more")])
def test_not_all_of_many_nodes_are_listed(more: int, end: str) -> None:
    nodes = [NodeId(bytes([at]) * 32) for at in range(MAX_NAMES + more)]
    profiles = {node: replace(profile(4), name=f"n{at}") for at, node in enumerate(nodes)}

    assert names_of(nodes, profiles) == f"n0, n1, n2, n3{end}"
