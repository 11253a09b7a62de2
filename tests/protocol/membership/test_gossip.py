"""Signed items: round trips, forgeries, and which of two every store keeps."""

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.names import MeshId
from meshllm.protocol.membership.gossip import (
    MAX_ITEM_BYTES,
    Item,
    ItemStore,
    Kind,
    Slot,
    compare,
    digest,
    summarise,
)
from meshllm.protocol.trust.credential import remove
from tests.builders.identities import (
    CHARTER,
    FOUNDER,
    LAST,
    MESH,
    MIDDLE,
    PROFILE,
    STATE,
    WALL,
    sign,
)
from tests.property.mesh_strategies import items

ITEM = sign(FOUNDER, STATE)


@given(items)
def test_an_item_round_trips(item: Item) -> None:
    assert Item.decode(item.encode()) == item


@given(st.binary())
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(PeerFault):
        Item.decode(b"\xff" + data)


def test_an_item_longer_than_the_limit_is_refused() -> None:
    long = replace(ITEM, payload=bytes(MAX_ITEM_BYTES))

    with pytest.raises(PeerFault, match="bytes; allowed are 0 to 32768"):
        Item.decode(long.encode())


def test_a_signature_is_valid_for_its_author_and_mesh_only() -> None:
    assert ITEM.is_signed(MESH)
    assert not ITEM.is_signed(MeshId(bytes(16)))
    assert not replace(ITEM, author=LAST.node).is_signed(MESH)
    assert not replace(ITEM, seq=2).is_signed(MESH)
    assert not replace(ITEM, payload=b"").is_signed(MESH)
    assert not replace(ITEM, credential=b"x").is_signed(MESH)


def test_the_signature_covers_every_bit_of_an_item() -> None:
    data = ITEM.encode()
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        try:
            item = Item.decode(bytes(changed))
        except PeerFault:
            continue
        assert not item.is_signed(MESH)


def test_stores_converge_for_any_order_of_items() -> None:
    said = [
        sign(FOUNDER, STATE, seq=1),
        sign(FOUNDER, STATE, seq=9),
        sign(FOUNDER, replace(STATE, is_loaded=True), seq=9),
        sign(FOUNDER, STATE, incarnation=2, seq=1),
        sign(MIDDLE, STATE),
    ]
    kept = set()
    for order in permutations(said):
        store = ItemStore()
        for item in order:
            if store.is_news(item):
                store.keep(item)
        kept.add(digest(store.values()))

    assert len(kept) == 1


def test_of_two_charters_of_one_version_the_higher_author_is_kept() -> None:
    store = ItemStore()
    store.keep(sign(LAST, CHARTER))

    assert not store.is_news(sign(FOUNDER, CHARTER))
    assert store.is_news(sign(FOUNDER, replace(CHARTER, version=2)))


def test_of_two_removals_by_one_author_the_one_that_spares_fewer_is_kept() -> None:
    harsh, mild = (
        sign(MIDDLE, remove(MIDDLE, MESH, LAST.node, int(WALL), spared))
        for spared in ((), (FOUNDER.node,))
    )

    for kept, other in ((harsh, mild), (mild, harsh)):
        store = ItemStore()
        store.keep(kept)
        assert store.is_news(other) is (other is harsh)


def test_an_item_is_not_news_to_a_store_that_keeps_it() -> None:
    store = ItemStore()
    store.keep(ITEM)

    assert not store.is_news(Item.decode(ITEM.encode()))
    assert store.is_news(sign(FOUNDER, STATE, seq=ITEM.seq + 1))


def test_forgetting_a_node_deletes_its_profile_and_state() -> None:
    store = ItemStore()
    for item in (sign(FOUNDER, PROFILE), sign(FOUNDER, STATE), sign(FOUNDER, CHARTER)):
        store.keep(item)

    store.forget(FOUNDER.node)
    store.forget(FOUNDER.node)

    assert [slot.kind for slot in store] == [Kind.CHARTER]
    assert len(store) == 1


def test_comparing_finds_what_each_side_lacks() -> None:
    same = sign(FOUNDER, PROFILE)
    newer, older = sign(FOUNDER, STATE, seq=2), sign(FOUNDER, STATE, seq=1)
    mine, theirs = sign(MIDDLE, STATE), sign(LAST, STATE)
    ours = {item.slot: item for item in (same, newer, mine)}
    others = {item.slot: item for item in (same, older, theirs)}

    lacking, wanted = compare(ours, summarise(others.values()))
    back, asked = compare(others, summarise(ours.values()))

    assert lacking == sorted([newer, mine], key=lambda item: item.slot)
    assert wanted == (theirs.slot,)
    assert back == [theirs]
    assert set(asked) == {newer.slot, mine.slot}


def test_a_removal_that_only_one_side_has_is_found() -> None:
    removal = sign(FOUNDER, remove(FOUNDER, MESH, LAST.node, int(WALL)))
    assert (removal.incarnation, removal.seq) == (0, 0)  # the least count of an item

    assert compare({removal.slot: removal}, ()) == ([removal], ())
    assert compare({}, summarise([removal])) == ([], (removal.slot,))


def test_two_items_of_equal_count_are_exchanged_both_ways() -> None:
    one, other = sign(FOUNDER, STATE), sign(FOUNDER, replace(STATE, is_loaded=True))

    lacking, wanted = compare({one.slot: one}, summarise([other]))

    assert lacking == [one]
    assert wanted == (Slot(Kind.STATE, FOUNDER.node),)


def test_equal_items_have_equal_digests_in_any_order() -> None:
    one, other = sign(FOUNDER, STATE), sign(MIDDLE, STATE)

    assert digest([one, other]) == digest([other, one]) != digest([one])
