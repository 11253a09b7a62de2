"""Which node takes part in which ring of a mesh that serves several models, or replicas of one.

Theory of operation
-------------------
Begin to read at `group_nodes`; `agree_on_ring` is what plans the ring of one group.

A mesh has a group of nodes for each replica of each model in its charter, and a ring per group. A
node takes part in one group, its first, and in further ones with memory that this one leaves, which
its state tells. Every node computes `group_nodes` from the same records, and moves itself if the
result names other groups than its own. There is no vote.

The groups are in a fixed order: each model once, then each a second time, and so on. A group is
*complete* if its nodes have the memory for the layers, one of them may be the entry, and, where
that can be had, there are as many as its charter requests. Nodes stay where they are. A group that
is not complete takes the nodes that it lacks, all or none, in this order: nodes without a group,
nodes that another ring does not use or does not need, nodes of later groups that are not complete,
and nodes of a later replica. So each model is served once before any is served twice, and a node
moves only if a group becomes complete by it. Nodes without a group that are left over take part in
the group that is served worst.

A complete group never gives a node that it needs to an earlier one of the same round, and groups
are filled until nothing changes: assigning again moves nobody.

Where moves do not complete a group, it takes *shares* of nodes that keep their first group: what is
left of their memory once each of their rings serves, at most what the whole model needs. A share
has the workspace of its model too, as models are loaded between the steps of others. A node
publishes the memory of each share, and the ring of its first group has the rest, so that no two
rings plan with the same bytes. A share ends if its group has as many nodes as requested without
it, and does not use it. Other shares end if another group becomes complete by it: those of later
replicas, of models that nobody uses, of groups that are complete with fewer nodes, and of groups
that are not complete; only the last of these for a group that merely has fewer nodes than
requested. Until then a group that lost a node keeps its shares, so that it serves soon after that
node returned. Nodes join one further group at a time, and none while a ring of theirs is not whole:
what such a ring needs next is not known yet. A share that a ring works with serves until a plan
without it is in force; until then its memory is in use. If it ends for another group, its ring
stops at once.

If nothing else completes a group, it takes nodes that no ring uses, and shares of others. A later
replica may then have shares of nodes in an earlier one, so that the layers of these are on several
nodes, with these rules:

- It has a node of its own, which is in no earlier replica. One of these is the entry: a share has
  no memory for the ends, and requests of earlier versions name the entry only, not the ring.
- The share is as small as the nodes of its own allow, and of the node that computes least: what it
  computes in one ring is in the way of the other, see `throughput`.
- All rings of the model, and of other models in use, give more with it than without it, and than
  with the nodes of its own in the ring that shares nodes, as the policy would plan it, by as much
  as another plan must be faster. That takes measured layers: until a node has some, it is a standby
  elsewhere.
- A model that nobody uses has no share of a node that serves a model in use.

This is decided once, from plans in force. Then the share stays, whatever is measured later, so that
noise moves nobody. It ends when the group is complete without it, when nodes that no ring uses can
take its place, or without a node of its own. While it is not published, the group takes it again at
each computation; not while a node of its own, which has moved, has not measured layers there yet.

States tell which models were asked for lately. The first replica of such a model also takes nodes
from any ring of a model that nobody uses, if nothing else completes it. A model that has lost its
nodes to another one gets them back when it is asked for, and the other is not used any more.

What members exclude, or the members that they request, yields for the first replica of a model, if
it is complete with the founder's values alone: else the model would not be served.

A node that awaits weights takes part: it keeps its place while it fetches them, and one that a ring
does not need is free for another. One that cannot load its layers, and offers none for a while,
keeps its place too, but counts for nothing there: its group takes others, and earlier ones it. Nor
do nodes that refuse each other as neighbours suffice for a ring in which they would be.

The memory of a node is what it offers for any model. A ring that follows a plan which its nodes can
hold is complete even if this estimate, which takes all layers as large as the largest, denies it.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshllm.names import FIRST_GROUP, NODE_ID_BYTES, GroupId, NodeId
from meshllm.protocol.agreement.agreement import Agreement, agree
from meshllm.protocol.agreement.candidates import MeshView
from meshllm.protocol.agreement.filling import GroupAssigner
from meshllm.protocol.agreement.group_table import GroupTable
from meshllm.protocol.agreement.groups import Group, NodeGroups, find_group, groups_in, groups_of

_NOBODY = NodeId(bytes(NODE_ID_BYTES))  # where no node may be the entry: none means all


def assign(view: MeshView) -> Mapping[NodeId, GroupId]:
    """Return the first group of each living node that can hold layers; the same on every node."""
    return {node: part.first for node, part in group_nodes(view).items()}


def group_nodes(view: MeshView) -> Mapping[NodeId, NodeGroups]:
    """Return the groups of each living node that can hold layers; the same on every node."""
    bound = _group(view)
    eased = _yielding(view, bound)
    while eased:  # ends: there are fewer each time
        table = _group(view, eased)
        if not (lacking := eased & table.lacks().keys()):
            return table.parts()
        eased -= lacking
    return bound.parts()


def _yielding(view: MeshView, table: GroupTable) -> frozenset[GroupId]:
    """Return the first replicas of models that are not complete with the terms of members."""
    if not view.charter.yields:
        return frozenset()
    lacks = table.lacks()
    return frozenset(each.id for each in table.groups if not each.replica and each.id in lacks)


def _group(view: MeshView, eased: frozenset[GroupId] = frozenset()) -> GroupAssigner:
    """Move nodes until nothing changes; terms of members do not hold for the groups ``eased``.

    Groups that take the same nodes from each other in turn stop where that begins again.
    """
    filling = GroupAssigner(view, eased)
    filling.end_shares()
    seen = [filling.parts()]
    while True:
        for strict in (False, True):
            for number in range(len(filling.groups)):
                filling.fill(number, strict=strict)
        filling.place_rest()
        if (found := filling.parts()) in seen:
            return filling
        seen.append(found)


def shortage(view: MeshView) -> Mapping[GroupId, int]:
    """Return the bytes of memory that each group lacks; only of those that lack some."""
    table = GroupTable(view)
    return GroupTable(view, _yielding(view, table)).lacks()


def has_several(view: MeshView) -> bool:
    """Return whether a mesh has, or had until now, several groups, so that nodes may move."""
    is_moved = any(groups_in(state) != (FIRST_GROUP,) for state in view.states.values())
    return is_moved or len(groups_of(view.charter)) > 1


def ring_of(view: MeshView) -> MeshView | None:
    """Return the view for planning the ring of its group; None if the mesh has no such group."""
    group = find_group(view.charter, view.group)
    if group is None:
        return None
    states, at = view.states, group.id
    further = {node for node, state in states.items() if state.is_further(at)}
    profiles = {
        node: profile.in_ring(at, is_further=node in further)
        for node, profile in view.profiles.items()
    }
    workspace = group.charter.shape.workspace_bytes  # in the first ring it is in the node's reserve
    shares = {
        node: replace(profiles[node], reserve_bytes=workspace) for node in further & profiles.keys()
    }
    charter = group.charter
    if sharing := _sharing(view, group):  # a node of its own is the entry, see above
        able = [node for node in charter.entries or sorted(states) if node not in sharing]
        charter = replace(charter, entries=tuple(able) or (_NOBODY,))
    return replace(
        view,
        charter=charter,
        eases=not group.replica,
        ending=_ending(view, group) if sharing else frozenset(),
        states={node: state.in_ring(at) for node, state in states.items()},
        profiles=profiles | shares,
    )


def agree_on_ring(view: MeshView, before: Agreement | None = None) -> Agreement | None:
    """Return the plan in force of the ring of its group, see `agree`; None without such a group."""
    ring = ring_of(view)
    return agree(ring, before) if ring else None


def _sharing(view: MeshView, group: Group) -> frozenset[NodeId]:
    """Return the nodes of a group that take part in an earlier replica of its model too."""
    states, key = view.states, group.charter.key
    groups = groups_of(view.charter)
    before = [each.id for each in groups[: groups.index(group)] if each.charter.key == key]
    if not before:
        return frozenset()
    return frozenset(
        node
        for node, state in states.items()
        if group.id in (own := groups_in(state)) and not set(before).isdisjoint(own)
    )


def _ending(view: MeshView, group: Group) -> frozenset[NodeId]:
    """Return the nodes whose shares in a ring end once a plan without them is in force."""
    filling = GroupAssigner(view)
    filling.end_shares()
    return frozenset(node for node, shares in filling.ending.items() if group.id in shares)
