"""Hypothesis strategies for mesh link messages and the records in them."""

from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from meshllm.names import DIGEST_BYTES, Digest, Quant, Span
from meshllm.protocol.membership.charter import MAX_VERSION, Amendments, Charter, Term
from meshllm.protocol.membership.codec import (
    MAX_HELD_US,
    MAX_WALL_MS,
    AnswerEvent,
    AskModels,
    Bye,
    CancelRequest,
    CloseReason,
    FallbackList,
    Generate,
    Items,
    MeshHeartbeat,
    Message,
    ModelList,
    Summary,
    UnknownMeshMessage,
    Want,
)
from meshllm.protocol.membership.gossip import Item, Kind, Slot, SummaryEntry
from meshllm.protocol.membership.records import (
    MAX_ADDRESSES,
    MAX_BYTES,
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_MEMBERS,
    MAX_ROUND_TRIP_US,
    Lifecycle,
    ModelOffer,
    Profile,
    RingMembership,
    RingShare,
    StateRecord,
)
from meshllm.protocol.planning.plan import MAX_SECONDS, Ends, ModelSizes
from meshllm.protocol.planning.policies import POLICIES
from meshllm.protocol.session.messages import DType
from meshllm.protocol.trust.fallbacks import Fallback
from tests.property.strategies import digests, nodes, u64

_Grouped = TypeVar("_Grouped", RingShare, RingMembership)

labels = st.text(max_size=16)  # of four bytes each at most
sizes = st.integers(0, MAX_BYTES)
seconds = st.floats(1e-12, MAX_SECONDS)
sixteen = st.binary(min_size=16, max_size=16)
eight = st.binary(min_size=8, max_size=8)
costs = st.dictionaries(st.integers(1, 4096), seconds, max_size=5).map(
    lambda table: tuple(sorted(table.items()))
)
spans = st.integers(1, MAX_LAYERS).flatmap(
    lambda stop: st.integers(0, stop - 1).map(lambda start: Span(start, stop))
)
groups = st.binary(min_size=1, max_size=9)
shares = st.builds(
    RingShare, groups, sizes, costs, st.floats(0, MAX_SECONDS), labels,
    st.lists(sixteen, max_size=3).map(tuple),
)  # fmt: skip


def _with_room(profile: Profile) -> Profile:
    """Let the memory of a node suffice for its shares."""
    shared = sum(each.memory_bytes for each in profile.shares)
    memory = min(MAX_BYTES, profile.memory_bytes + shared)
    left, kept = memory, list[RingShare]()
    for share in profile.shares:
        kept.append(replace(share, memory_bytes=min(left, share.memory_bytes)))
        left -= kept[-1].memory_bytes
    return replace(profile, memory_bytes=memory, shares=tuple(kept))


def _in_order(found: list[_Grouped]) -> tuple[_Grouped, ...]:
    return tuple(sorted(found, key=lambda each: each.group))


def _without_first(state: StateRecord) -> StateRecord:
    further = tuple(each for each in state.further if each.group != state.group)
    return replace(state, further=further)


profiles = st.builds(
    Profile,
    labels,
    labels,
    st.lists(st.text(max_size=20), max_size=MAX_ADDRESSES).map(tuple),
    sizes,
    costs,
    st.floats(0, MAX_SECONDS),
    sizes,
    st.none() | spans,
    labels,
    st.lists(sixteen, max_size=5).map(tuple),
    st.just(b"") | sixteen,
    st.lists(eight, max_size=3).map(tuple),
    st.lists(sixteen, max_size=3).map(tuple),
    st.booleans(),
    st.lists(shares, max_size=3, unique_by=lambda each: each.group).map(_in_order),
).map(_with_room)
memberships = st.builds(
    RingMembership,
    groups,
    st.binary(max_size=40),
    st.booleans(),
    st.booleans(),
    labels,
    st.binary(max_size=DIGEST_BYTES),
)
round_trips = st.tuples(nodes, st.integers(0, MAX_ROUND_TRIP_US))
few_nodes = st.lists(nodes, max_size=3).map(tuple)
states = st.builds(
    StateRecord,
    st.sampled_from(Lifecycle),
    st.lists(round_trips, max_size=5).map(tuple),
    st.binary(max_size=40),
    st.booleans(),
    st.booleans(),
    labels,
    few_nodes,
    st.lists(st.builds(ModelOffer, labels, labels, st.integers(0, MAX_CONTEXT)), max_size=3).map(
        tuple
    ),
    st.binary(max_size=9),
    st.lists(eight, max_size=3).map(tuple),
    st.binary(max_size=DIGEST_BYTES),
    st.lists(memberships, max_size=3, unique_by=lambda each: each.group).map(_in_order),
).map(_without_first)


@st.composite
def charters(draw: st.DrawFn) -> Charter:
    """Charters within the limits, of small models."""
    layers = draw(st.lists(st.tuples(st.integers(1, MAX_BYTES), sizes), min_size=1, max_size=4))
    shape = ModelSizes(
        draw(labels),
        tuple(weights for weights, _ in layers),
        tuple(cache for _, cache in layers),
        draw(sizes),
        draw(sizes),
        tied=draw(st.booleans()),
        hidden_size=draw(st.integers(1, 9000)),
        itemsize=draw(st.sampled_from([2, 4])),
        context=draw(st.integers(1, 99_999)),
        workspace_bytes=draw(sizes),
    )
    return Charter(
        draw(st.integers(0, MAX_VERSION)),
        shape,
        draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16])),
        Digest(draw(digests)),
        quant=draw(st.sampled_from(Quant)),
    )


TEXTS: dict[str, st.SearchStrategy[str]] = {
    "aliases": st.lists(st.sampled_from("abc"), max_size=4).map(",".join),
    "context": st.integers(1, 99_999).map(str),
    "ends": st.sampled_from([*map(str, Ends), "nowhere"]),
    "entries": few_nodes.map(lambda found: b"".join(found).hex()),
    "exclude": few_nodes.map(lambda found: b"".join(found).hex()),
    "members": st.integers(0, MAX_MEMBERS).map(str),
    "policy": st.sampled_from([*POLICIES, "greenest"]),
    "prefer": few_nodes.map(lambda found: b"".join(found).hex()),
    "replicas": st.integers(1, 16).map(str),
    "sessions": st.integers(1, 9).map(str),
    "tariff": st.text(max_size=9),
}
"""The values of each term; ``tariff`` and some values are of a later version."""
versions = st.integers(0, 5) | st.integers(0, 2**64 - 1)
terms = st.one_of([st.builds(Term, st.just(name), versions, text) for name, text in TEXTS.items()])
amendments = st.lists(terms, max_size=4, unique_by=lambda term: term.name).map(
    lambda found: Amendments(tuple(sorted(found, key=lambda term: term.name)))
)


kinds = st.sampled_from(Kind) | st.integers(100, 255)
slots = st.builds(Slot, kinds, nodes)
signatures = st.binary(min_size=64, max_size=64)
items = st.builds(
    Item, kinds, nodes, nodes, u64, u64, st.binary(max_size=30), st.binary(max_size=30), signatures
)
fallbacks = st.builds(
    Fallback, nodes, st.binary(max_size=16), st.lists(st.text(max_size=20), max_size=4).map(tuple)
)
mesh_messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        MeshHeartbeat, u64, u64, st.integers(0, MAX_HELD_US), st.integers(0, MAX_WALL_MS), eight
    ),
    st.builds(
        Summary, st.lists(st.builds(SummaryEntry, slots, u64, u64, eight), max_size=4).map(tuple)
    ),
    st.builds(Items, st.lists(items, max_size=4).map(tuple)),
    st.builds(Want, st.lists(slots, max_size=4).map(tuple)),
    st.builds(Generate, sixteen, st.binary(max_size=30)),
    st.builds(AnswerEvent, sixteen, st.binary(max_size=30)),
    st.builds(CancelRequest, sixteen),
    st.builds(AskModels),
    st.builds(ModelList, st.binary(max_size=30)),
    st.builds(FallbackList, st.lists(fallbacks, max_size=4).map(tuple), st.binary(max_size=16)),
    st.builds(Bye, st.sampled_from(CloseReason)),
    st.builds(UnknownMeshMessage, st.integers(100, 255), st.binary(max_size=30)),
)
