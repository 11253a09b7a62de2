"""Plans after a loss in which every node that stays keeps its layers, and with them its KV caches.

What lost nodes held goes to the rank before, to the rank behind, to both of them, or to a node
without layers. Two neighbours compute the lost caches at the same time, as a pipeline. In a plan
that moves other layers too, sessions compute those again as well.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, groupby, islice, product

from meshllm.names import NodeId, Span
from meshllm.protocol.planning.plan import Plan, PlanStage

MAX_SPARE = 3
"""Nodes without layers that are tried for each gap."""
CUTS = 4
"""Parts of a gap: its neighbours may divide it at the end of any of them."""
MAX_TRIED = 64
"""Plans."""

Stages = tuple[PlanStage, ...]


def continuations(
    plan: Plan, staying: Collection[NodeId], spare: Sequence[NodeId]
) -> Iterator[Stages]:
    """Iterate over the stages of such plans; none if no node or every node of ``plan`` stays.

    ``spare`` are nodes without layers, the preferred ones first.
    """
    groups = [
        (stays, [*stages])
        for stays, stages in groupby(plan.stages, key=lambda stage: stage.node in staying)
    ]
    kept = [stage for stays, stages in groups if stays for stage in stages]
    if not kept or len(kept) == len(plan.stages):
        return
    most = _most_for_each(sum(not stays for stays, _ in groups))
    options = [
        [stages] if stays else [*islice(_filled(stages, kept, spare[:MAX_SPARE]), most)]
        for stays, stages in groups
    ]
    for chosen in islice(product(*options), MAX_TRIED):
        stages = _merged(chain.from_iterable(chosen))
        nodes = [stage.node for stage in stages]
        if len(set(nodes)) == len(nodes):
            yield stages


def _most_for_each(gaps: int) -> int:
    """Return how many ways to fill each gap are tried, so that all of them can be combined.

    At least 2: with too many gaps for that, only the last ones vary.
    """
    return max(2, *(ways for ways in range(1, MAX_TRIED + 1) if ways**gaps <= MAX_TRIED))


def _filled(
    gap: Sequence[PlanStage], kept: Sequence[PlanStage], spare: Sequence[NodeId]
) -> Iterator[list[PlanStage]]:
    """Iterate over the stages that may take the place of a gap, those of one node first."""
    start, stop = gap[0].span.start, gap[-1].span.stop
    neighbours = _neighbours(gap, kept)
    for heir in (*neighbours, *spare):
        yield [PlanStage(heir, Span(start, stop))]
    if len(neighbours) == 2:
        before, behind = neighbours
        cuts = {start + (stop - start) * part // CUTS for part in range(1, CUTS)}
        for cut in sorted(cuts - {start}):
            yield [PlanStage(before, Span(start, cut)), PlanStage(behind, Span(cut, stop))]


def _neighbours(gap: Sequence[PlanStage], kept: Sequence[PlanStage]) -> list[NodeId]:
    """Return who holds the layers next to a gap, in order; a client's entry stays without."""
    start, stop = gap[0].span.start, gap[-1].span.stop
    return [
        stage.node
        for stage in kept
        if len(stage.span) and (stage.span.stop == start or stage.span.start == stop)
    ]


def _merged(stages: Iterator[PlanStage]) -> Stages:
    """Join the spans of consecutive stages of one node."""
    merged = list[PlanStage]()
    for stage in stages:
        if merged and merged[-1].node == stage.node:
            span = Span(merged[-1].span.start, stage.span.stop)
            merged[-1] = PlanStage(stage.node, span)
        else:
            merged.append(stage)
    return tuple(merged)
