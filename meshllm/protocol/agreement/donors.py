"""Where a group may take nodes from, in order; it takes from the first that suffice."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from meshllm.names import NodeId
from meshllm.protocol.agreement.group_table import GroupTable
from meshllm.protocol.agreement.groups import UNASSIGNED

NodeSources: TypeAlias = Callable[[GroupTable, int, list[NodeId], bool], list[NodeId]]
"""The nodes that a group may take, besides those that it takes; strict or not."""


def free(table: GroupTable, number: int, _taken: list[NodeId], _strict: bool) -> list[NodeId]:
    """Return the nodes without a group."""
    return _movable(table, number, (node for node, at in table.place.items() if at == UNASSIGNED))


def unneeded(table: GroupTable, number: int, taken: list[NodeId], strict: bool) -> list[NodeId]:
    """Return the nodes without which their groups are complete, standbys first."""
    used = {stage.node for plan in table.plans.values() for stage in plan.stages}
    found = [
        node
        for other in range(len(table.groups))
        if other != number
        for node in _spare(table, other, taken, strict=strict)
    ]
    able = _movable(table, number, found)
    return [node for node in able if node not in used] or able


def incomplete(table: GroupTable, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
    """Return the nodes of later groups that are not complete."""
    return _movable(
        table,
        number,
        (
            node
            for other in range(number + 1, len(table.groups))
            if not table.is_complete(
                other, (each for each in table.nodes(other) if each not in taken), strict=False
            )
            for node in _firsts(table, other)
        ),
    )


def replicas(table: GroupTable, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
    """Return the nodes of the last replica from which this group may take more."""
    replica = table.groups[number].replica
    for other in range(len(table.groups) - 1, number, -1):
        if table.groups[other].replica > replica:
            able = _movable(table, number, _firsts(table, other))
            if found := [node for node in able if node not in taken]:
                return found
    return []


def unused(table: GroupTable, number: int, taken: list[NodeId], _strict: bool) -> list[NodeId]:
    """Return the nodes of the last ring of a model that nobody uses, for one that is used."""
    group = table.groups[number]
    if group.replica or table.keys[number] not in table.used:
        return []
    for other in range(len(table.groups) - 1, -1, -1):
        if table.keys[other] not in table.used:
            able = _movable(table, number, _firsts(table, other))
            if found := [node for node in able if node not in taken]:
                return found
    return []


def left_over(table: GroupTable, number: int, taken: list[NodeId], strict: bool) -> list[NodeId]:
    """Return the nodes of any group that no ring uses or needs."""
    used = {stage.node for plan in table.plans.values() for stage in plan.stages}
    moves = free, unneeded, incomplete
    found = dict.fromkeys(node for find in moves for node in find(table, number, taken, strict))
    return [node for node in found if node not in used]


def _spare(
    table: GroupTable, number: int, taken: list[NodeId], *, strict: bool
) -> Iterator[NodeId]:
    nodes = [node for node in table.nodes(number) if node not in taken]
    for node in [each for each in _firsts(table, number) if each not in taken]:
        if table.is_complete(number, (each for each in nodes if each != node), strict=strict):
            yield node


def _movable(table: GroupTable, number: int, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Return the nodes that can hold layers of a model, and have no ring of it yet."""
    key = table.keys[number]
    return [
        node for node in table.able(number, nodes) if key not in map(table.key, table.shares[node])
    ]


def _firsts(table: GroupTable, number: int) -> list[NodeId]:
    group = table.groups[number].id
    return [node for node, at in table.place.items() if at == group]
