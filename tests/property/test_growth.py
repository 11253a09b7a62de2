"""Forward compatibility: messages of a later minor version break no link and no agreement."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.protocol.membership.actions import Drop
from meshllm.protocol.membership.charter import Amendments
from meshllm.protocol.membership.codec import (
    CloseReason,
    Items,
    Message,
    UnknownMeshMessage,
    decode,
    encode,
)
from meshllm.protocol.membership.gossip import Item
from meshllm.protocol.membership.mesh import Mesh
from meshllm.protocol.membership.records import Lifecycle, Profile, StateRecord
from tests.builders.identities import (
    CHARTER,
    CREDENTIALS,
    FOUNDER,
    LAST,
    MESH,
    MIDDLE,
    PROFILE,
    STATE,
    WALL,
    sign,
)
from tests.property.mesh_strategies import amendments, mesh_messages, profiles, states

pytestmark = pytest.mark.property
tails = st.binary(max_size=20)
bodies = st.binary(max_size=30)


@st.composite
def later_items(draw: st.DrawFn) -> Item:
    """Items of a later version: appended fields, unknown values, unknown kinds."""
    record: Profile | StateRecord | Amendments = draw(st.one_of(profiles, states, amendments))
    seq = draw(st.integers(2, 9))
    if isinstance(record, Amendments):
        record = replace(record, version=seq)
    item = sign(LAST, record, seq=seq)
    data = bytearray(draw(st.integers(1, 9)).to_bytes() + item.payload[1:] + draw(tails))
    if isinstance(record, StateRecord):
        data[1] = draw(st.sampled_from([*map(int, Lifecycle), 17, 255]))
    if draw(st.booleans()):
        item, data = replace(item, kind=draw(st.integers(100, 103))), bytearray(draw(bodies))
        item = replace(item, subject=item.author, incarnation=1, seq=seq)
    return replace(item, payload=bytes(data)).sign(LAST, MESH)


def node() -> Mesh:
    """Return a node that has a charter and is linked to one of a later version."""
    made = Mesh(MIDDLE, CREDENTIALS[MIDDLE.node], 1, now=0.0, wall_s=WALL)
    made.publish(profile=PROFILE, state=STATE, now=0.0)
    made.linked(LAST.node, 1, CREDENTIALS[LAST.node], dialled=True, now=1.0)
    known = (sign(FOUNDER, PROFILE), sign(FOUNDER, CHARTER), sign(LAST, PROFILE))
    made.receive(LAST.node, Items(known), 1.0)
    return made


@given(
    st.lists(
        st.one_of(
            later_items().map(lambda item: Items((item,))),
            st.builds(UnknownMeshMessage, st.integers(100, 255), bodies),
        ),
        max_size=9,
    ),
    tails,
)
def test_messages_of_a_later_version_close_no_link(heard: list[Message], tail: bytes) -> None:
    mesh = node()

    for message in heard:
        actions = mesh.receive(LAST.node, decode(encode(message) + tail), 2.0)

        assert not [action for action in actions if isinstance(action, Drop)]
    assert LAST.node in mesh.links
    assert {FOUNDER.node, LAST.node} <= mesh.profiles.keys()
    mesh.expire(9e9, WALL)


@given(st.lists(later_items(), max_size=6), st.data())
def test_nodes_converge_on_items_of_a_later_version(items: list[Item], data: st.DataObject) -> None:
    one, other = node(), node()
    for item in items:
        one.receive(LAST.node, Items((item,)), 2.0)
    for item in data.draw(st.permutations(items)):
        other.receive(LAST.node, Items((item,)), 2.0)

    assert (one.charter, one.profiles) == (other.charter, other.profiles)
    assert one.states.get(LAST.node) == other.states.get(LAST.node)


@given(mesh_messages, st.integers(0, 255), st.binary(max_size=99))
def test_garbage_closes_only_the_link_of_its_sender(
    message: Message, kind: int, garbage: bytes
) -> None:
    mesh = node()

    for data in (encode(message), bytes([2, kind]) + garbage, garbage):
        with suppress(PeerFault):
            for action in mesh.receive(LAST.node, decode(data), 2.0):
                assert not isinstance(action, Drop) or action.why is CloseReason.RULES
    mesh.expire(9e9, WALL)
