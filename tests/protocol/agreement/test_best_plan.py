"""The best plan where the charter's terms hold, and where some of them yield."""

from dataclasses import replace
from typing import Any

import pytest

from meshllm.names import Span, short
from meshllm.protocol.agreement.advice import advise
from meshllm.protocol.agreement.agreement import agree
from meshllm.protocol.membership.charter import OverridableTerm
from tests.builders.agreements import ALONE, THREE, planned, ring, standbys
from tests.builders.offers import A, B, C, D, node, spans
from tests.builders.snapshots import World, charter, profile


def test_no_ring_is_found_without_a_closed_chain_of_links() -> None:
    world = World(
        {A: profile(1.5), B: profile(1.5), C: profile(3)},
        cut=[frozenset({A, C})],
        charter=charter(4),
    )

    agreement = world.agree()

    assert spans(planned(agreement)) == {B: "0:1", C: "1:4"}
    without = replace(world, cut=[frozenset({A, C}), frozenset({B, C})]).agree()
    assert without.plan is None


def test_a_policy_that_needs_a_missing_link_falls_back_to_auto() -> None:
    agreed = replace(charter(), policy="proportional")
    cut = [frozenset({A, C})]

    agreement = World({A: profile(3), B: profile(3), C: profile(3)}, agreed, cut=cut).agree()

    assert len(planned(agreement).stages) == 2


def test_more_members_than_layers_means_one_layer_each() -> None:
    agreed = replace(charter(4), members=9)

    agreement = World({node(at): profile(4) for at in range(1, 5)}, agreed).agree()

    assert len(planned(agreement).stages) == 4
    assert agreement.lacking == 0


def test_a_member_too_small_for_a_layer_does_not_count() -> None:
    agreed = replace(charter(), members=3)

    agreement = World({A: profile(4), B: profile(4), C: profile(0.5)}, agreed).agree()

    assert len(planned(agreement).stages) <= 2
    assert "a layer takes" in standbys(agreement)[C]


def test_the_ring_has_at_most_the_requested_members() -> None:
    agreed = replace(charter(), members=1)

    agreement = World(THREE.profiles, agreed).agree()

    assert agreement.plan is None
    assert "The ring lacks" in agreement.reason


@pytest.mark.parametrize(
    ("changes", "yields", "names"),
    [
        ({"exclude": (A, B, C)}, (OverridableTerm("exclude", C, ()),), "`--exclude` of `{}`"),
        ({"members": 1}, (OverridableTerm("members", C, None),), "`--members` of `{}`"),
        (
            {"exclude": (B, C, D), "members": 1},
            (OverridableTerm("exclude", C, (D,)), OverridableTerm("members", C, None)),
            "`--exclude` of `{}` and `--members` of `{}`",
        ),
    ],
)
def test_a_term_of_a_member_that_leaves_no_ring_yields_to_the_founders(
    changes: dict[str, Any], yields: tuple[OverridableTerm, ...], names: str
) -> None:
    agreed = replace(charter(), **changes)
    world = World(THREE.profiles, agreed)
    assert world.agree().plan is None

    found = replace(world, charter=replace(agreed, yields=yields)).agree()

    assert found.plan == THREE.agree().plan
    said = names.format(*[short(C)] * 2)
    assert advise(found) == (f"No ring is possible with {said}: the founder's apply instead")


def test_a_node_that_the_founder_excludes_is_not_said_to_be_excluded_by_a_member() -> None:
    agreed = replace(charter(), exclude=(A, B, C), yields=(OverridableTerm("exclude", C, (B,)),))

    agreement = World({A: profile(4), B: profile(4)}, agreed).agree()
    bound = World({**THREE.profiles, D: profile(4)}, agreed).agree()

    assert agreement.plan == ring((A, 0, 4), epoch=1)
    assert standbys(agreement) == {B: "it is excluded"}
    by_member = f"it is excluded by `{short(C)}`"
    assert standbys(bound) == {A: by_member, B: "it is excluded", C: by_member}


def test_an_exclusion_of_a_member_holds_where_a_ring_is_possible() -> None:
    agreed = replace(charter(), exclude=(A,), yields=(OverridableTerm("exclude", C, ()),))

    agreement = World({A: profile(4), B: profile(4)}, agreed).agree()

    assert agreement.plan == ring((B, 0, 4), epoch=1)
    assert standbys(agreement) == {A: f"it is excluded by `{short(C)}`"}
    assert not advise(agreement).startswith("No ring is possible")


def test_no_term_of_a_member_helps_where_the_founder_leaves_no_ring() -> None:
    agreed = replace(charter(), exclude=(A, B, C), yields=(OverridableTerm("exclude", C, (A, B)),))

    agreement = World(THREE.profiles, agreed).agree()

    assert agreement.plan is None
    assert "the founder" not in advise(agreement)


def test_a_preferred_node_holds_layers() -> None:
    agreed = replace(charter(), prefer=(B, D))

    agreement = World({A: profile(4), B: profile(4, ms=9.0)}, agreed).agree()

    assert B in spans(planned(agreement))


def test_only_the_named_nodes_are_entries_however_fast_another_is() -> None:
    world = World({A: profile(2), B: profile(4, ms=1e-9), C: profile(2)})
    assert planned(world.agree()).stages[0].node == B
    pinned = replace(charter(), entries=(A, C))

    agreement = replace(world.follow(world.agree()), charter=pinned, busy={B}).agree()

    assert agreement.reason == f"`{short(B)}` may not be the entry"
    assert planned(agreement).stages[0].node in {A, C}


def test_without_a_node_that_may_be_the_entry_there_is_no_ring() -> None:
    world = World({A: profile(2), B: profile(4)}, replace(charter(), entries=(A, D)), gone={A})

    agreement = world.agree()

    assert agreement.plan is None
    assert agreement.reason == "No node that may be the entry can take part"


def test_fixed_spans_override_the_proportional_policy() -> None:
    agreed = replace(charter(), policy="proportional")
    world = World({A: profile(4), B: profile(4, span=Span(1, 4))}, agreed)

    assert spans(planned(world.agree())) == {A: "0:1", B: "1:4"}


def test_a_node_whose_fixed_span_leaves_no_ring_is_a_standby() -> None:
    world = World({A: profile(4), B: profile(4, span=Span(1, 3))})

    agreement = world.agree()

    assert spans(planned(agreement)) == {A: "0:4"}
    assert standbys(agreement) == {B: "its span `1:3` does not fit the ring"}


def test_planning_work_is_reused_only_for_equal_input() -> None:
    first = ALONE.agree()
    grown = World({A: profile(4), B: profile(4, ms=0.5)})

    again = agree(ALONE.view(A), first).best
    assert again
    assert first.best
    assert again.problem is first.best.problem
    assert agree(grown.view(A), first) == grown.agree()
