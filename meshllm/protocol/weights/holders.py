"""Which parts of a model a node needs, which digests they have, and who has them.

Parts are numbered as in a manifest: the layers, then embedding and head. A digest in a profile is a
claim of its node. Of each part the founder's digest counts, or that of the node with the lowest id
while the founder does not have the part; what arrives is compared with it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from meshllm.names import NodeId
from meshllm.protocol.membership.charter import Charter
from meshllm.protocol.membership.records import DIGEST_PART_BYTES, ENDS, Profile, StateRecord
from meshllm.protocol.planning.plan import Plan

FETCHES = "it fetches weights"
"""The obstacle of a node that will hold layers once it has their weights."""

LACKS = "it has no weights"
"""The beginning of the obstacle of a node that needs none, and why."""

ABSENT = bytes(DIGEST_PART_BYTES)
MAX_LETTERS = 64  # of the name of a model in that of a folder


def digests_in_force(
    charter: Charter, profiles: Mapping[NodeId, Profile], author: NodeId
) -> tuple[bytes, ...]:
    """Return the digest of each part, `ABSENT` if no node has it."""
    nodes = sorted(profiles, key=lambda node: (node != author, node))
    known = [profiles[node].weights for node in nodes if has_model(charter, profiles[node])]
    return tuple(
        next((each[part] for each in known if each[part] != ABSENT), ABSENT)
        for part in range(charter.shape.layers + ENDS - 1)
    )


def holders(
    charter: Charter,
    profiles: Mapping[NodeId, Profile],
    nodes: Iterable[NodeId],
    digests: Sequence[bytes],
) -> dict[NodeId, frozenset[int]]:
    """Return those of ``nodes`` that have parts with the digests in force, and which."""
    found = {
        node: frozenset(
            part
            for part, (own, digest) in enumerate(
                zip(profiles[node].weights[:-1], digests, strict=True)
            )
            if own == digest != ABSENT
        )
        for node in nodes
        if node in profiles and has_model(charter, profiles[node])
    }
    return {node: parts for node, parts in found.items() if parts}


def needed_parts(plan: Plan, node: NodeId) -> frozenset[int]:
    """Return the parts that a node holds in a plan: its layers, and the ends on the entry."""
    rank = plan.rank(node)
    if rank is None:
        return frozenset()
    span = plan.stages[rank].span
    ends = range(plan.layers, plan.layers + ENDS - 1) if rank == 0 else ()
    return frozenset((*range(span.start, span.stop), *ends))


def missing_parts(weights: Sequence[bytes], parts: Collection[int]) -> frozenset[int]:
    """Return those of the parts that a manifest lacks."""
    return frozenset(part for part in parts if weights[part] == ABSENT)


def stale_parts(
    charter: Charter, profiles: Mapping[NodeId, Profile], author: NodeId, own: Sequence[bytes]
) -> frozenset[int] | None:
    """Return the parts of which the founder has other weights; None while its own are unknown."""
    profile = profiles.get(author)
    if profile is None or not has_model(charter, profile) or len(own) != len(profile.weights):
        return None
    pairs = enumerate(zip(own[:-1], profile.weights[:-1], strict=True))
    return frozenset(part for part, pair in pairs if ABSENT not in pair and pair[0] != pair[1])


def spare_parts(
    held: Mapping[NodeId, Collection[int]], parts: int, able: Iterable[NodeId], me: NodeId
) -> frozenset[int]:
    """Return the parts that a node fetches so that the loss of their only holder loses none.

    ``able`` are the living nodes with the model, the same on each of them; every part that only one
    holds is fetched by one other.
    """
    nodes = sorted(able)
    found = set()
    for part in range(parts):
        without = [node for node in nodes if part not in held.get(node, ())]
        if len(nodes) - len(without) == 1 and without and without[part % len(without)] == me:
            found.add(part)
    return frozenset(found)


def has_model(charter: Charter, profile: Profile) -> bool:
    """Return whether a node has opened the model of a charter, with or without weights."""
    weights = profile.weights
    is_whole = len(weights) == charter.shape.layers + ENDS
    return is_whole and weights[-1] == charter.config_digest[:DIGEST_PART_BYTES]


def is_bare(weights: Sequence[bytes]) -> bool:
    """Return whether a manifest has no layer."""
    return not any(part != ABSENT for part in weights[:-ENDS])


def awaits_weights(state: StateRecord) -> bool:
    """Return whether only weights keep a node from holding layers."""
    return state.obstacle.startswith((FETCHES, LACKS))


def with_fetched(states: Mapping[NodeId, StateRecord]) -> dict[NodeId, StateRecord]:
    """Return states in which the nodes that await weights have them already.

    The plan for them says which layers such a node will hold, the same on all of them.
    """
    return {
        node: replace(state, obstacle="") if awaits_weights(state) else state
        for node, state in states.items()
    }


def name_of(charter: Charter) -> str:
    """Return a name for the folder of a model that comes from peers."""
    name = charter.shape.name[-MAX_LETTERS:]
    letters = (each if each.isalnum() and each.isascii() else "-" for each in name)
    return f"{charter.config_digest.hex()[:16]}-{''.join(letters)}"
