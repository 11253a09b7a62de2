"""Plans from any offers: they tile the layers, fit the nodes, and are optimal."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, permutations
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshllm.errors import ModelError, UserError
from meshllm.names import NodeId
from meshllm.protocol.planning.plan import Ends, Links, ModelSizes, Offer, Plan, PlanConstraints
from meshllm.protocol.planning.policies import POLICIES, SLACK, WORTH, make_plan
from meshllm.protocol.planning.prediction import predict
from tests.builders.offers import apart, model, offer
from tests.property import strategies

pytestmark = pytest.mark.property
names = strategies.nodes  # their module loads the profile of hypothesis


@dataclass(frozen=True)
class Case:
    """Nodes and a model."""

    offers: tuple[Offer, ...]
    links: Links
    shape: ModelSizes
    terms: PlanConstraints = field(default_factory=PlanConstraints)

    def plan(self, policy: str) -> Plan:
        """Make the plan of a policy."""
        return make_plan(self.offers, self.links, self.shape, policy=policy, terms=self.terms)


@st.composite
def cases(draw: st.DrawFn, *, nodes: int = 4, layers: int = 6, alike: bool = False) -> Case:
    """Nodes of various latency, speed and memory, and a model."""
    ids = draw(st.lists(names, min_size=1, max_size=nodes, unique=True))
    ms = st.integers(0, 6).map(float)
    offers = tuple(
        offer(name, draw(st.integers(0, layers)), ms=draw(st.integers(1, 4)), head_ms=draw(ms))
        for name in ids
    )
    links = apart({pair: draw(ms) for pair in permutations(ids, 2)})
    count = draw(st.integers(2, layers))
    size = st.just(80) if alike else st.integers(20, 200)
    sizes = tuple(draw(st.lists(size, min_size=count, max_size=count)))
    entry = draw(st.none() | st.sampled_from(ids))
    ends = Ends.ENTRY if entry is None else draw(st.sampled_from(Ends))
    shape = model(sizes=sizes, ends=draw(st.sampled_from([0, 80])))
    return Case(offers, links, shape, PlanConstraints(ends=ends, entry=entry))


policies = st.sampled_from(sorted(POLICIES))


@given(cases(), policies)
def test_a_plan_tiles_the_layers_within_the_memory_of_nodes(case: Case, policy: str) -> None:
    try:
        plan = case.plan(policy)
    except ModelError:
        return

    memory = {one.node: one.memory_bytes for one in case.offers}
    assert plan.layers == case.shape.layers
    for rank, stage in enumerate(plan.stages):
        held = sum(case.shape.layer_bytes[stage.span.start : stage.span.stop])
        held += case.shape.ends_bytes if rank == 0 else 0
        assert held * 100 <= memory[stage.node] * 80
        assert stage.span or (rank == 0 and plan.ends is Ends.CLIENT)
    assert plan.stages[0].node == case.terms.entry or case.terms.entry is None


@given(cases(), policies, st.data())
def test_the_order_of_offers_changes_nothing(case: Case, policy: str, data: st.DataObject) -> None:
    shuffled = replace(case, offers=tuple(data.draw(st.permutations(case.offers))))
    try:
        plan = case.plan(policy)
    except ModelError as error:
        with pytest.raises(ModelError, match=re.escape(str(error))):
            shuffled.plan(policy)
        return

    other = shuffled.plan(policy)

    assert other.digest == plan.digest
    assert [at.reason for at in other.standbys] == [at.reason for at in plan.standbys]


@given(cases(layers=5))
def test_nothing_is_faster_than_fastest(case: Case) -> None:
    best = min((sum(times) + way for times, way in every_ring(case)), default=inf)

    # Each layer's share of the work is rounded to a millionth of a layer.
    assert measured(case, "fastest")[0] == pytest.approx(best, rel=1e-4)


@given(cases(), st.booleans())
def test_auto_is_the_fastest_ring_a_little_slower_for_a_faster_slowest_stage(
    case: Case, together: bool
) -> None:
    if together:
        case = replace(case, terms=replace(case.terms, members=min(2, len(case.offers))))
    try:
        fastest, auto = case.plan("fastest"), case.plan("auto")
    except (ModelError, UserError):  # no room, or too few members for a client
        return

    before, after = measured(case, "fastest"), measured(case, "auto")

    assert [stage.node for stage in auto.stages] == [stage.node for stage in fastest.stages]
    assert after[0] <= before[0] * (1 + 1 / SLACK) * (1 + 1e-9)
    assert after[1] <= before[1] * (1 + 1e-9)
    loss, gain = after[0] / before[0] - 1, 1 - after[1] / before[1]
    assert auto.stages == fastest.stages or 0 < gain >= WORTH * loss - 1e-9


@given(cases(layers=5, alike=True))
def test_nothing_has_a_faster_slowest_stage_than_throughput(case: Case) -> None:
    best = min((max(times) for times, _ in every_ring(case)), default=inf)

    assert measured(case, "throughput")[1] == pytest.approx(best)


@given(cases(alike=True))
def test_proportional_is_as_close_to_the_shares_as_whole_layers_allow(case: Case) -> None:
    assume(case.terms.ends is Ends.ENTRY and not case.shape.ends_bytes)
    try:
        plan = case.plan("proportional")
    except ModelError:
        return

    memory = {one.node: one.memory_bytes for one in case.offers}
    total = sum(memory[stage.node] for stage in plan.stages)
    off = [len(at.span) - memory[at.node] * plan.layers / total for at in plan.stages]
    free = [gap for gap, at in zip(off, plan.stages, strict=True) if len(at.span) > 1]
    assert all(gap < 1 for gap in free)


@given(cases(nodes=5))
def test_another_node_never_makes_the_ring_slower(case: Case) -> None:
    fewer = replace(case, offers=case.offers[:-1])
    assume(case.terms.entry in {None, *(one.node for one in fewer.offers)})

    before, after = measured(fewer, "fastest")[0], measured(case, "fastest")[0]

    assert after <= before * (1 + 1e-9)


def measured(case: Case, policy: str) -> tuple[float, float]:
    """Predict the seconds per token and of the slowest stage; infinite if no plan fits."""
    try:
        plan = case.plan(policy)
    except ModelError:
        return inf, inf
    prediction = predict(plan, case.offers, case.links, case.shape)
    return prediction.seconds_per_token, prediction.slowest_stage_s


def every_ring(case: Case) -> Iterator[tuple[list[float], float]]:
    """Yield the seconds of all stages and of the network, for every ring that fits."""
    client = case.terms.ends is Ends.CLIENT
    sizes = range(1 + client, len(case.offers) + 1)
    for ring in (ring for size in sizes for ring in permutations(case.offers, size)):
        if case.terms.entry not in {None, ring[0].node}:
            continue
        for cuts in combinations(range(1, case.shape.layers), len(ring) - client - 1):
            held = [0] * client + held_bytes(case, cuts)
            if fits(case, ring, held):
                yield times(case, ring, held), way(case.links, [one.node for one in ring])


def held_bytes(case: Case, cuts: Sequence[int]) -> list[int]:
    """Return the bytes of the spans between cuts."""
    ends = pairwise([0, *cuts, case.shape.layers])
    return [sum(case.shape.layer_bytes[start:stop]) for start, stop in ends]


def fits(case: Case, ring: Sequence[Offer], held: Sequence[int]) -> bool:
    """Return whether the layers fit each node, and the ends the first."""
    all_held = [held[0] + case.shape.ends_bytes, *held[1:]]
    return all(
        size * 100 <= one.memory_bytes * 80 for size, one in zip(all_held, ring, strict=True)
    )


def times(case: Case, ring: Sequence[Offer], held: Sequence[int]) -> list[float]:
    """Return the seconds of each stage, the head with the first."""
    mean = sum(case.shape.layer_bytes) / case.shape.layers
    stages = [size / mean * one.layer_seconds(1) for size, one in zip(held, ring, strict=True)]
    return [stages[0] + ring[0].head_s, *stages[1:]]


def way(links: Links, nodes: Sequence[NodeId]) -> float:
    """Return the network latency of a trip round the ring, in seconds."""
    pairs = zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    return sum(links.between(*pair).latency_s for pair in pairs) if len(nodes) > 1 else 0.0
