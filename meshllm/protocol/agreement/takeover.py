"""The plan that a node prepares for: which layers it would have to load, if it has the memory.

A better plan that waits until sessions end is the next one. Otherwise a node without layers, which
has memory that nothing uses, can load in advance what the next plan would give it if a node of the
ring were lost; then that takeover loads nothing. Of the nodes that may be lost, it prepares for the
one whose loss would make it load most.
"""

from dataclasses import replace

from meshllm.names import NodeId
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.planning.plan import Plan

MAX_TRIED = 16  # nodes of a ring, those with the most bytes: each of them takes a planning


def takeover(agreement: Agreement) -> Plan | None:
    """Return the plan that waits, or the one after the loss that a standby prepares for.

    None if this node is in the ring, or takes nothing over. A pure function of the agreement.
    """
    plan, best = agreement.plan, agreement.best
    if plan is None or best is None:
        return None
    if agreement.ahead is not None:
        return agreement.ahead
    view = best.case.view
    if plan.rank(view.me) is not None:
        return None
    sizes = {stage.node: _bytes_of(plan, stage.node, view) for stage in plan.stages}
    tried = sorted(sizes, key=lambda node: -sizes[node])[:MAX_TRIED]
    after = [agree(replace(view, removed=(*view.removed, node))).plan for node in tried]
    helped = [each for each in after if each and each.rank(view.me) is not None]
    return max(helped, key=lambda each: _bytes_of(each, view.me, view), default=None)


def _bytes_of(plan: Plan, node: NodeId, view: MeshView) -> int:
    rank, shape = plan.rank(node) or 0, view.charter.shape
    span = plan.stages[rank].span
    return sum(shape.layer_bytes[span.start : span.stop]) + (0 if rank else shape.ends_bytes)
