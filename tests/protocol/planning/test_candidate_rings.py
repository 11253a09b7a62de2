"""Which rings are tried, of few nodes and of many."""

from itertools import pairwise

import pytest

from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import Ends, Links, Offer, PlanConstraints
from meshllm.protocol.planning.policies import make_plan
from tests.builders.offers import A, B, C, D, apart, model, node, offer
from tests.builders.policies import NEAR


def test_the_ring_is_the_shortest_tour() -> None:
    offers = [offer(at, 1) for at in (A, B, C, D)]
    links = apart({(A, C): 1, (C, B): 1, (B, D): 1, (D, A): 1}, others=5)

    plan = make_plan(offers, links, model(4), terms=PlanConstraints(entry=A))

    order = [stage.node for stage in plan.stages]
    assert order in ([A, C, B, D], [A, D, B, C])


def two_sites(count: int) -> tuple[list[Offer], Links]:
    """Even nodes are 1 ms from each other and 50 ms from the odd ones; each holds two layers."""
    offers = [offer(node(at), 2, ms=1 + at % 5) for at in range(count)]
    pairs = ((low, high) for high in range(count) for low in range(high))
    ways = {(node(low), node(high)): 1.0 if (high - low) % 2 == 0 else 50.0 for low, high in pairs}
    return offers, apart(ways)


@pytest.mark.parametrize("count", [8, 12, 14, 20])
def test_many_nodes_stay_within_one_site(count: int) -> None:
    offers, links = two_sites(count)

    plan = make_plan(offers, links, model(6), terms=PlanConstraints(members=3))

    assert len({stage.node[-1] % 2 for stage in plan.stages}) == 1
    assert [str(stage.span) for stage in plan.stages] == ["0:2", "2:4", "4:6"]


def test_throughput_takes_the_fastest_of_many_nodes() -> None:
    offers, links = two_sites(20)

    plan = make_plan(offers, links, model(4), policy="throughput")

    assert [stage.node[-1] % 5 for stage in plan.stages] == [0] * 4


def test_more_nodes_than_are_searched_exactly_can_all_be_needed() -> None:
    offers, links = two_sites(16)

    plan = make_plan(offers, links, model(32))

    assert len(plan.stages) == 16


def test_of_more_nodes_than_layers_the_largest_form_a_ring() -> None:
    # Fourteen fast nodes hold one layer of fifteen each: dropping one by one ends with too many.
    offers = [offer(node(at), 1, ms=1) for at in range(14)]
    offers += [offer(node(at), 15, ms=90) for at in range(14, 16)]

    plan = make_plan(offers, NEAR, model(28), terms=PlanConstraints(members=2, entry=node(14)))

    assert [stage.node for stage in plan.stages] == [node(14), node(15)]


@pytest.mark.parametrize("members", [None, 14])
def test_a_client_plans_with_many_nodes(members: int | None) -> None:
    offers, links = two_sites(20)
    terms = PlanConstraints(ends=Ends.CLIENT, entry=node(0), members=members, prefer=[node(1)])

    plan = make_plan(offers, links, model(24), terms=terms)

    assert plan.stages[0].node == node(0)
    assert plan.rank(node(1)) is not None
    assert len(plan.stages) == members or members is None


def fixed(order: list[int], layers: int) -> dict[NodeId, Span]:
    """Fix consecutive spans of nodes in an order; each but the first has one layer."""
    first = layers - len(order) + 1
    stops = [0, *range(first, layers + 1)]
    return {node(at): Span(*ends) for at, ends in zip(order, pairwise(stops), strict=True)}


@pytest.mark.parametrize("count", [3, 6, 7, 12, 13])
@pytest.mark.parametrize("ends", list(Ends))
def test_fixed_spans_are_followed_in_whatever_order_of_nodes(count: int, ends: Ends) -> None:
    order = [at * 5 % count + 1 for at in range(count)] if count % 5 else list(range(count, 0, -1))
    spans = fixed(order, 20)
    offers = [offer(node(at), 20) for at in range(count + 1)]
    entry = node(0) if ends is Ends.CLIENT else None

    plan = make_plan(
        offers, NEAR, model(20), terms=PlanConstraints(ends=ends, entry=entry, spans=spans)
    )

    assert {stage.node: stage.span for stage in plan.stages if len(stage.span)} == spans


@pytest.mark.parametrize("count", [5, 7, 14])
def test_layers_between_fixed_spans_go_to_free_nodes(count: int) -> None:
    spans = {node(0): Span(10, 20), node(1): Span(40, 60)}
    offers = [offer(node(at), 21) for at in range(count)]

    plan = make_plan(offers, NEAR, model(80), terms=PlanConstraints(spans=spans))

    held = {stage.node: str(stage.span) for stage in plan.stages}
    assert (held[node(0)], held[node(1)]) == ("10:20", "40:60")
    assert sorted(held.values()) == ["0:10", "10:20", "20:40", "40:60", "60:80"]


def test_no_ring_begins_at_a_node_that_cannot_be_the_entry() -> None:
    spans = {node(0): Span(2, 4)}
    offers = [offer(node(at), 2) for at in range(8)]

    plan = make_plan(offers, NEAR, model(6), terms=PlanConstraints(spans=spans, entries=(node(5),)))

    assert [str(stage.span) for stage in plan.stages] == ["0:2", "2:4", "4:6"]
    assert [plan.stages[0].node, plan.stages[1].node] == [node(5), node(0)]
