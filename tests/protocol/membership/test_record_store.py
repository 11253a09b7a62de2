"""The record store: which items are accepted, from which authors, and until when."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import inf
from unittest.mock import patch

import pytest

from meshllm.errors import PeerFault
from meshllm.names import NodeId
from meshllm.protocol.membership import record_store as module
from meshllm.protocol.membership.charter import MAX_STEP, Amendments, Term
from meshllm.protocol.membership.codec import MAX_CARRIED, MAX_REMOVALS
from meshllm.protocol.membership.gossip import Item, Kind, Slot, digest
from meshllm.protocol.membership.record_store import Census, ends_s
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.trust.credential import Role, remove
from meshllm.protocol.trust.identity import NodeKey
from tests.builders.identities import (
    CHARTER,
    CLIENT,
    CREDENTIALS,
    DAY,
    FOUNDER,
    LAST,
    MESH,
    MIDDLE,
    PROFILE,
    STATE,
    STRANGER,
    WALL,
    sign,
)

AMENDED = Amendments((Term("members", 1, "2"),))
REMOVAL = remove(FOUNDER, MESH, MIDDLE.node, int(WALL))


def later(key: NodeKey, kind: int, seq: int = 1) -> Item:
    """Make an item of a kind of a later version."""
    item = Item(kind, key.node, key.node, 1, seq, b"", b"whatever")
    return item.sign(key, MESH)


def told(*items: Item) -> Census:
    census = Census(MESH)
    for item in items:
        assert census.take(item, WALL)
    return census


def test_items_of_members_are_stored_and_decoded() -> None:
    census = told(
        sign(LAST, PROFILE), sign(LAST, STATE), sign(FOUNDER, CHARTER), sign(FOUNDER, REMOVAL)
    )

    assert census.profiles == {LAST.node: PROFILE}
    assert census.states == {LAST.node: STATE}
    assert census.charter == CHARTER
    assert census.removals == {MIDDLE.node: REMOVAL}


def test_an_item_that_is_not_newer_is_not_taken() -> None:
    census = told(sign(LAST, PROFILE, seq=2))

    assert not census.take(sign(LAST, PROFILE, seq=2), WALL)
    assert not census.take(sign(LAST, replace(PROFILE, name="old"), seq=1), WALL)
    assert census.profiles == {LAST.node: PROFILE}


@pytest.mark.parametrize("key", [CLIENT, STRANGER], ids=["client", "stranger"])
@pytest.mark.parametrize("record", [PROFILE, AMENDED], ids=["profile", "amendments"])
def test_items_of_non_members_and_clients_are_rejected(
    key: NodeKey, record: Profile | Amendments
) -> None:
    census = Census(MESH)

    assert not census.take(sign(key, record), WALL)
    assert not census.store


def test_a_state_needs_a_profile() -> None:
    census = Census(MESH)

    assert not census.take(sign(LAST, STATE), WALL)
    assert census.take(sign(LAST, PROFILE), WALL)
    assert census.take(sign(LAST, STATE), WALL)


def test_a_profile_with_the_credential_of_another_is_rejected() -> None:
    item = replace(sign(STRANGER, PROFILE), credential=CREDENTIALS[LAST.node].encode())

    assert not Census(MESH).take(item.sign(STRANGER, MESH), WALL)


@pytest.mark.parametrize(
    "forge",
    [
        lambda item: replace(item, signature=bytes(64)),
        lambda item: replace(item, author=FOUNDER.node, subject=FOUNDER.node),
        lambda item: replace(item, seq=99),
        lambda item: replace(item, payload=replace(PROFILE, name="forged").encode()),
        lambda item: replace(item, payload=b"\x09").sign(LAST, MESH),
        lambda item: replace(item, credential=b"?").sign(LAST, MESH),
        lambda item: replace(item, subject=FOUNDER.node).sign(LAST, MESH),
        lambda item: replace(item, kind=Kind.CHARTER).sign(LAST, MESH),
    ],
    ids=["signature", "author", "seq", "payload", "no record", "credential", "subject", "kind"],
)
def test_a_forged_item_is_a_peer_fault(forge: Callable[[Item], Item]) -> None:
    census = Census(MESH)

    with pytest.raises(PeerFault):
        census.take(forge(sign(LAST, PROFILE)), WALL)
    assert not census.store


def test_a_charter_is_accepted_from_the_founder_only() -> None:
    census = told(sign(FOUNDER, CHARTER))

    assert not census.take(sign(LAST, replace(CHARTER, version=2**32)), WALL)
    assert census.charter == CHARTER


def test_amendments_apply_before_and_after_the_charter_arrives() -> None:
    items = sign(LAST, AMENDED), sign(FOUNDER, CHARTER)

    charters = [told(*order).charter for order in permutations(items)]

    assert charters == [replace(CHARTER, members=2)] * 2


def test_amendments_are_bounded_and_the_oldest_overruled_one_is_evicted() -> None:
    census = told(sign(FOUNDER, CHARTER), sign(MIDDLE, AMENDED))
    with patch.object(module, "MAX_AMENDERS", 1):
        assert not census.take(sign(LAST, Amendments((Term("members", 1, "3"),))), WALL)
        assert not census.take(sign(LAST, Amendments((Term("policy", 9, "auto"),))), WALL)
        assert census.take(sign(MIDDLE, Amendments((Term("members", 2, "4"),), 2)), WALL)
    with patch.object(module, "MAX_AMENDERS", 2):
        assert census.take(sign(LAST, Amendments((Term("members", 3, "3"),))), WALL)
        assert not census.take(sign(FOUNDER, Amendments((Term("policy", 2, "auto"),))), WALL)
        assert census.take(sign(FOUNDER, Amendments((Term("members", 4, "5"),))), WALL)

    assert census.amendments.keys() == {LAST.node, FOUNDER.node}
    assert Slot(Kind.AMENDMENTS, MIDDLE.node) not in census.store
    assert census.charter == replace(CHARTER, members=5)


def test_an_absurd_version_does_not_freeze_a_term() -> None:
    absurd = Amendments((Term("members", 2 * MAX_STEP, "9"),))
    census = told(sign(FOUNDER, CHARTER), sign(LAST, absurd), sign(MIDDLE, AMENDED))

    assert census.charter == replace(CHARTER, members=2)


def test_records_of_unknown_kinds_are_carried_for_known_nodes_up_to_a_limit() -> None:
    census = told(sign(LAST, PROFILE))

    taken = [census.take(later(LAST, kind), WALL) for kind in range(99, 99 + MAX_CARRIED + 1)]

    assert taken == [True] * MAX_CARRIED + [False]
    assert census.take(later(LAST, 99, seq=2), WALL)
    assert not census.take(later(MIDDLE, 99), WALL)
    assert not census.take(replace(later(LAST, 99, seq=3), subject=MIDDLE.node), WALL)
    with pytest.raises(PeerFault, match="forged"):
        census.take(replace(later(LAST, 99, seq=3), payload=b"other"), WALL)
    census.forget(LAST.node)
    assert not census.store


def test_the_count_of_a_charter_item_is_its_version() -> None:
    item = replace(sign(FOUNDER, CHARTER), incarnation=99).sign(FOUNDER, MESH)

    with pytest.raises(PeerFault, match="Charter in the wrong slot"):
        Census(MESH).take(item, WALL)


def test_the_author_of_a_removal_item_is_its_issuer() -> None:
    with pytest.raises(PeerFault, match="Removal in the wrong slot"):
        Census(MESH).take(sign(LAST, REMOVAL), WALL)


def test_a_removed_node_is_expelled_permanently() -> None:
    census = told(sign(MIDDLE, PROFILE), sign(MIDDLE, STATE), sign(LAST, PROFILE))
    census.take(sign(FOUNDER, REMOVAL), WALL)

    gone = census.expelled(WALL)
    for node in gone:
        census.forget(node)

    assert gone == {MIDDLE.node}
    assert set(census.profiles) == {LAST.node}
    assert not census.states
    assert not census.take(sign(MIDDLE, PROFILE, incarnation=9), WALL)


def test_a_membership_ends_when_it_expires() -> None:
    census = told(sign(MIDDLE, PROFILE), sign(LAST, PROFILE))

    assert census.ends_s() == WALL + DAY
    assert not census.expelled(WALL + DAY - 1)
    assert census.expelled(WALL + DAY) == {LAST.node}
    assert census.role(CREDENTIALS[CLIENT.node], CLIENT.node, WALL) is Role.CLIENT


def test_a_membership_without_expiry_does_not_end() -> None:
    assert Census(MESH).ends_s() == inf
    assert ends_s(CREDENTIALS[MIDDLE.node]) == inf


def test_charter_and_removals_outlive_their_authors() -> None:
    by_last = remove(LAST, MESH, CLIENT.node, int(WALL))
    of_last = remove(FOUNDER, MESH, LAST.node, int(WALL))
    items = sign(FOUNDER, CHARTER), sign(LAST, AMENDED), sign(LAST, by_last), sign(FOUNDER, of_last)
    late = WALL + 2 * DAY

    digests = set()
    for order in permutations(items):
        census = Census(MESH)
        taken = [census.take(item, late) for item in order]
        digests.add(digest(census.store.values()))

        assert all(taken)
    assert len(digests) == 1


def test_removals_are_bounded() -> None:
    census = told(sign(FOUNDER, REMOVAL))
    for number in range(MAX_REMOVALS - 1):
        node = NodeId(number.to_bytes(32))
        census.removals[node] = remove(FOUNDER, MESH, node, 0)

    another = remove(FOUNDER, MESH, LAST.node, int(WALL))
    newer = remove(LAST, MESH, MIDDLE.node, int(WALL))

    assert not census.take(sign(FOUNDER, another), WALL)
    assert census.take(sign(LAST, newer), WALL)
