"""The items that a node signs, accepts, forwards, shares and forgets."""

from dataclasses import replace

import pytest

from meshllm.errors import PeerFault, UserError
from meshllm.names import GroupId, NodeId
from meshllm.protocol.membership.charter import Amendments, Term
from meshllm.protocol.membership.gossip import MAX_ITEM_BYTES, Item, Kind, Slot
from meshllm.protocol.membership.link_table import AMENDMENTS_COST, REPLACEMENT_COST, PeerLink
from meshllm.protocol.membership.records import (
    MAX_MEMBERS,
    MAX_PLAN_BYTES,
    MAX_RINGS,
    RingMembership,
    StateRecord,
)
from meshllm.protocol.membership.sync import FORGET, GossipState
from meshllm.protocol.trust.credential import Credential, Role, founder_credential, issue, remove
from meshllm.protocol.trust.identity import NodeKey
from tests.builders.identities import (
    CHARTER,
    CREDENTIALS,
    FOUNDED,
    FOUNDER,
    LAST,
    MESH,
    MIDDLE,
    PROFILE,
    STATE,
    WALL,
    sign,
)


def contact() -> PeerLink:
    return PeerLink(1, Role.NODE, FOUNDED, True, 0.0, 0.0)


def replica(incarnation: int = 1) -> GossipState:
    return GossipState(MIDDLE, CREDENTIALS[MIDDLE.node], incarnation)


def taken(
    node: GossipState, *items: Item, peer: NodeId = LAST.node
) -> tuple[list[Item], list[Item]]:
    return node.take(peer, contact(), items, WALL)


def linked(*peers: NodeId) -> StateRecord:
    return replace(STATE, links=tuple((peer, 1) for peer in peers))


def test_own_records_are_signed_and_counted() -> None:
    node = replica(incarnation=7)

    items = node.sign([PROFILE, STATE, CHARTER], WALL)

    assert all(item.is_signed(MESH) for item in items)
    assert [(item.incarnation, item.seq) for item in items] == [(7, 1), (7, 2), (1, 0)]
    assert [bool(item.credential) for item in items] == [True, False, True]
    assert node.own() == items[:2]


@pytest.mark.parametrize("more", [0, 1])
def test_an_own_record_is_at_most_as_large_as_peers_accept(more: int) -> None:
    node = replica()
    first, rest = GroupId(b"a"), GroupId(b"b")
    half = replace(STATE, followed=bytes(MAX_PLAN_BYTES - 1))

    def state(size: int) -> StateRecord:
        parts = RingMembership(first, bytes(8000)), RingMembership(rest, bytes(size))
        return replace(half, further=parts)

    profile, partly = node.sign([PROFILE, state(0)], WALL)
    record = state(MAX_ITEM_BYTES - len(partly.encode()) + more)

    if more:
        with pytest.raises(UserError, match=f"state record .* takes {MAX_ITEM_BYTES + 1} bytes"):
            node.sign([record], WALL)
        assert node.own() == [profile, partly]
    else:
        (whole,) = node.sign([record], WALL)
        assert Item.decode(whole.encode()) == whole
        assert whole.size == len(whole.encode()) == MAX_ITEM_BYTES


def test_an_own_record_of_more_than_64_kib_is_refused_too() -> None:
    node = replica()
    groups = [GroupId(bytes([number])) for number in range(MAX_RINGS - 1)]
    plans = tuple(RingMembership(group, bytes(MAX_PLAN_BYTES)) for group in groups)

    with pytest.raises(UserError, match="The state record of this node takes"):
        node.sign([replace(STATE, further=plans)], WALL)

    assert node.own() == []


def test_a_new_item_is_taken_once() -> None:
    node = replica()
    items = [sign(LAST, PROFILE), sign(LAST, STATE)]

    assert taken(node, *items) == (items, [])
    assert taken(node, *items) == ([], [])


def test_items_beyond_the_allowance_are_ignored() -> None:
    node, at = replica(), contact()
    at.allowance = 1

    news, _ = node.take(LAST.node, at, [sign(LAST, PROFILE), sign(LAST, STATE)], WALL)

    assert [item.kind for item in news] == [Kind.PROFILE]


def test_amendments_take_more_of_the_allowance_as_they_take_longer_to_read() -> None:
    node, at = replica(), contact()
    at.allowance = 2 * AMENDMENTS_COST - 1
    amended = Amendments((Term("members", 1, "2"),))

    news, _ = node.take(LAST.node, at, [sign(key, amended) for key in (LAST, FOUNDER)], WALL)

    assert [item.author for item in news] == [LAST.node]
    assert at.allowance == AMENDMENTS_COST - 1


def test_removals_that_replace_one_of_the_same_key_take_more_of_the_allowance() -> None:
    node, at = replica(), contact()
    at.allowance = 2 + 3 * REPLACEMENT_COST + 1
    key, other = NodeId(bytes([9]) * 32), NodeId(bytes([8]) * 32)
    removals = [sign(LAST, remove(LAST, MESH, key, at_s)) for at_s in range(9)]
    removals.sort(key=lambda item: item.mark)
    first = [sign(LAST, remove(LAST, MESH, other, 0)), removals[1]]

    news, _ = node.take(LAST.node, at, [*first, removals[0], *removals[2:]], WALL)

    assert news == [*first, *removals[2:5]]
    assert at.allowance == 0


def test_an_author_that_lost_its_count_receives_its_newer_item() -> None:
    node = replica()
    newer, older = sign(LAST, PROFILE, seq=9), sign(LAST, PROFILE, seq=1)
    taken(node, newer)

    assert taken(node, older, peer=LAST.node) == ([], [newer])
    assert taken(node, older, peer=FOUNDER.node) == ([], [])


def test_an_own_item_that_returns_newer_is_superseded() -> None:
    node = replica()
    node.sign([PROFILE, STATE], WALL)

    news, answers = taken(node, sign(MIDDLE, replace(PROFILE, name="old"), incarnation=4, seq=8))
    (item,) = node.sign([PROFILE], WALL)

    assert not news
    assert not answers
    assert node.is_behind
    assert (item.incarnation, item.seq) == (4, 9)
    assert node.own()[0] == item


def test_an_older_own_item_is_ignored() -> None:
    node = replica(incarnation=5)
    node.sign([PROFILE, STATE], WALL)

    taken(node, sign(MIDDLE, PROFILE, incarnation=4, seq=8))

    assert not node.is_behind


def test_an_unknown_own_item_is_superseded() -> None:
    node = replica(incarnation=5)

    taken(node, sign(MIDDLE, PROFILE, incarnation=4, seq=8))

    assert node.is_behind
    assert not node.records.profiles


def test_an_own_item_that_we_never_signed_is_a_fault() -> None:
    node = replica()
    forged = replace(sign(MIDDLE, PROFILE, incarnation=9), signature=bytes(64))

    with pytest.raises(PeerFault, match="forged"):
        taken(node, forged)
    assert not node.is_behind


def test_new_items_are_forwarded_to_peers_that_the_author_does_not_list() -> None:
    node = replica()
    state = sign(LAST, linked(MIDDLE.node))
    taken(node, sign(LAST, PROFILE), state)

    assert node.for_peer(FOUNDER.node, [state]) == [state]
    assert node.for_peer(MIDDLE.node, [state]) == []
    assert node.for_peer(LAST.node, [state]) == []
    charter = sign(FOUNDER, CHARTER)
    assert node.for_peer(LAST.node, [charter]) == [charter]


def test_only_items_of_living_nodes_are_shared() -> None:
    node = replica()
    node.sign([PROFILE, linked(LAST.node)], WALL)
    charter = sign(FOUNDER, CHARTER)
    taken(node, sign(LAST, PROFILE), sign(LAST, linked(MIDDLE.node)), charter)
    taken(node, sign(FOUNDER, PROFILE), sign(FOUNDER, linked(MIDDLE.node)))

    node.refresh(0.0)

    authors = {slot.subject for slot in node.shared if slot.kind is Kind.STATE}
    assert authors == node.alive == {MIDDLE.node, LAST.node}
    assert charter.slot in node.shared
    assert FOUNDER.node in node.records.profiles


def test_a_node_that_departed_long_ago_is_forgotten() -> None:
    node = replica()
    node.sign([PROFILE, linked(LAST.node)], WALL)
    taken(node, sign(LAST, PROFILE), sign(LAST, linked(MIDDLE.node)), sign(FOUNDER, PROFILE))
    node.refresh(0.0)

    assert node.watch(FORGET) == []
    assert node.watch(FORGET + 1) == [FOUNDER.node]
    assert set(node.records.profiles) == {MIDDLE.node, LAST.node}


def many(count: int) -> list[tuple[NodeKey, Credential]]:
    keys = [NodeKey(bytes([9, number]) * 16) for number in range(count)]
    return [(key, issue(FOUNDER, FOUNDED, key.node, Role.NODE)) for key in keys]


def test_the_node_that_departed_first_is_evicted_for_another() -> None:
    node = replica()
    node.sign([PROFILE], WALL)
    *others, last = (
        Item(Kind.PROFILE, key.node, key.node, 1, 1, shown.encode(), PROFILE.encode()).sign(
            key, MESH
        )
        for key, shown in many(MAX_MEMBERS)
    )
    taken(node, *others)
    for now in range(MAX_MEMBERS):
        node.alive = frozenset(item.author for item in others[now:])
        node.watch(float(now))
    node.alive = frozenset({MIDDLE.node})

    news, _ = taken(node, last)

    assert news == [last]
    assert len(node.records.profiles) == MAX_MEMBERS
    assert others[0].author not in node.records.profiles


def test_a_non_member_evicts_no_node() -> None:
    node = replica()
    node.sign([PROFILE], WALL)
    *others, (stranger, _) = many(MAX_MEMBERS)
    taken(
        node,
        *(
            Item(Kind.PROFILE, key.node, key.node, 1, 1, shown.encode(), PROFILE.encode()).sign(
                key, MESH
            )
            for key, shown in others
        ),
    )
    known = set(node.records.profiles)
    shown = founder_credential(stranger, bytes(16)).encode()
    item = Item(Kind.PROFILE, stranger.node, stranger.node, 1, 1, shown, PROFILE.encode())

    news, _ = taken(node, item.sign(stranger, MESH))

    assert news == []
    assert set(node.records.profiles) == known


def test_living_nodes_are_not_evicted() -> None:
    node = replica()
    keys = many(MAX_MEMBERS + 1)
    items = [
        Item(Kind.PROFILE, key.node, key.node, 1, 1, shown.encode(), PROFILE.encode()).sign(
            key, MESH
        )
        for key, shown in keys
    ]
    node.alive = frozenset(key.node for key, _ in keys)

    news, _ = taken(node, *items)

    assert len(news) == MAX_MEMBERS
    assert Slot(Kind.PROFILE, keys[-1][0].node) not in node.records.store
