"""What the rings of a mesh gain from a replica that shares nodes with an earlier one."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction

from meshllm.names import NodeId
from meshllm.protocol.agreement.agreement import GAIN
from meshllm.protocol.agreement.candidates import links_of
from meshllm.protocol.agreement.group_table import GroupTable
from meshllm.protocol.agreement.throughput import TimedRing, limit, plan_ring, throughput
from meshllm.protocol.planning.plan import Plan


def is_worth(table: GroupTable, number: int) -> bool:
    """Return whether nodes that a group shares with earlier replicas are worth it.

    All rings of the model, and of others in use, must give more than with a longer ring, by as
    much as another plan must be faster, see `agreement`.
    """
    nodes = table.nodes(number)
    own = [node for node in nodes if table.is_own(node, number)]
    if len(own) == len(nodes):
        return True
    rings, key = rings_beside(table, number), table.keys[number]
    counted = {at: ring for at, ring in rings.items() if table.keys[at] in {key, *table.used}}
    others = [ring for at, ring in rings.items() if at not in counted]
    least = throughput(counted.values(), others) * (1 + Fraction(GAIN))
    if _limit(table, number, nodes, counted) <= least:
        return False  # whatever the plan, which takes a while to find
    if (new := _plan_of(table, number, nodes)) is None:
        return False
    shared = throughput([*counted.values(), _timed(table, number, new)], others)
    if shared <= least:
        return False
    for at in counted:
        here = table.nodes(at)
        if table.keys[at] == key and at < number and not set(nodes).isdisjoint(here):
            longer = _plan_of(table, at, [*here, *own])
            if longer is not None:
                after = counted | {at: _timed(table, at, longer)}
                least = max(least, throughput(after.values(), others) * (1 + Fraction(GAIN)))
    return shared > least


def rings_beside(table: GroupTable, number: int) -> dict[int, TimedRing]:
    """Return the rings of other groups that follow a plan."""
    return {
        at: _timed(table, at, plan)
        for at, group in enumerate(table.groups)
        if at != number and (plan := table.plans.get(group.id)) is not None
    }


def _limit(
    table: GroupTable, number: int, nodes: Iterable[NodeId], counted: Mapping[int, TimedRing]
) -> Fraction:
    """Return what rings cannot exceed together if nodes make another one of a model."""
    key, layers = table.keys[number], table.groups[number].charter.shape.layers
    same = [ring for at, ring in counted.items() if table.keys[at] == key]
    others = [ring for at, ring in counted.items() if table.keys[at] != key]
    busy = {stage.node for ring in same for stage in ring.plan.stages}
    known = [table.offer(node, number) for node in {*nodes, *busy}]
    offers = [offer for offer in known if offer is not None]
    unknown = len(known) - len(offers)  # their layers count as if they took no time
    return limit(offers, layers) + throughput(others) + unknown


def _plan_of(table: GroupTable, number: int, nodes: Iterable[NodeId]) -> Plan | None:
    """Return the plan that those of the nodes make that have measured layers, if any."""
    charter, known = table.groups[number].charter, {at: table.offer(at, number) for at in nodes}
    offers = [offer for offer in known.values() if offer is not None]
    nodes = [offer.node for offer in offers]
    entries = [
        node
        for node in nodes
        if table.is_own(node, number) and (not charter.entries or node in charter.entries)
    ]
    if not entries:
        return None
    group = table.groups[number].id
    spans = {
        node: span
        for node in nodes
        if (span := table.view.profiles[node].span) and group not in table.shares[node]
    }
    links = links_of(table.view.states, nodes)
    return plan_ring(replace(charter, entries=tuple(entries)), offers, links, spans)


def _timed(table: GroupTable, number: int, plan: Plan) -> TimedRing:
    known = ((stage.node, table.offer(stage.node, number)) for stage in plan.stages)
    offers = {node: offer for node, offer in known if offer is not None}
    return TimedRing(plan, table.groups[number].charter.shape, offers)
