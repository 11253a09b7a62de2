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
from meshllm.protocol.membership.charter import MAX_STEP, Amendments, OverridableTerm, Term
from meshllm.protocol.membership.codec import BRANCH_REMOVALS, MAX_CARRIED
from meshllm.protocol.membership.gossip import Item, Kind, Slot, digest
from meshllm.protocol.membership.record_store import RecordStore, expires_at_s
from meshllm.protocol.membership.records import Profile
from meshllm.protocol.trust.credential import Removal, Role, issue, remove
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


def stored(*items: Item) -> RecordStore:
    records = RecordStore(MESH)
    for item in items:
        assert records.take(item, WALL)
    return records


def test_items_of_members_are_stored_and_decoded() -> None:
    records = stored(
        sign(LAST, PROFILE), sign(LAST, STATE), sign(FOUNDER, CHARTER), sign(FOUNDER, REMOVAL)
    )

    assert records.profiles == {LAST.node: PROFILE}
    assert records.states == {LAST.node: STATE}
    assert records.charter == CHARTER
    assert records.removals == {MIDDLE.node: REMOVAL}


def test_an_item_that_is_not_newer_is_not_taken() -> None:
    records = stored(sign(LAST, PROFILE, seq=2))

    assert not records.take(sign(LAST, PROFILE, seq=2), WALL)
    assert not records.take(sign(LAST, replace(PROFILE, name="old"), seq=1), WALL)
    assert records.profiles == {LAST.node: PROFILE}


@pytest.mark.parametrize("key", [CLIENT, STRANGER], ids=["client", "stranger"])
@pytest.mark.parametrize("record", [PROFILE, AMENDED], ids=["profile", "amendments"])
def test_items_of_non_members_and_clients_are_rejected(
    key: NodeKey, record: Profile | Amendments
) -> None:
    records = RecordStore(MESH)

    assert not records.take(sign(key, record), WALL)
    assert not records.store


def test_a_state_needs_a_profile() -> None:
    records = RecordStore(MESH)

    assert not records.take(sign(LAST, STATE), WALL)
    assert records.take(sign(LAST, PROFILE), WALL)
    assert records.take(sign(LAST, STATE), WALL)


def test_a_profile_with_the_credential_of_another_is_rejected() -> None:
    item = replace(sign(STRANGER, PROFILE), credential=CREDENTIALS[LAST.node].encode())

    assert not RecordStore(MESH).take(item.sign(STRANGER, MESH), WALL)


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
    records = RecordStore(MESH)

    with pytest.raises(PeerFault):
        records.take(forge(sign(LAST, PROFILE)), WALL)
    assert not records.store


@pytest.mark.parametrize("record", [PROFILE, AMENDED, remove(LAST, MESH, MIDDLE.node, 0)])
def test_items_of_a_member_whose_role_is_unknown_are_skipped(
    record: Profile | Amendments | Removal,
) -> None:
    records, item = RecordStore(MESH), sign(LAST, record)
    shown = bytearray(item.credential)
    shown[64] = 7  # its role

    assert not records.take(replace(item, credential=bytes(shown)).sign(LAST, MESH), WALL)
    assert not records.store


def test_fields_of_a_later_version_are_skipped_and_forwarded() -> None:
    item = sign(FOUNDER, REMOVAL)
    later = replace(
        item, credential=item.credential + bytes(10) + b"more", payload=item.payload + b"more"
    ).sign(FOUNDER, MESH)

    records = stored(later)

    assert records.removals == {MIDDLE.node: REMOVAL}
    assert list(records.store.values()) == [later]


def test_a_charter_is_accepted_from_the_founder_only() -> None:
    records = stored(sign(FOUNDER, CHARTER))

    assert not records.take(sign(LAST, replace(CHARTER, version=2**32)), WALL)
    assert records.charter == CHARTER


def test_amendments_apply_before_and_after_the_charter_arrives() -> None:
    items = sign(LAST, AMENDED), sign(FOUNDER, CHARTER)

    charters = [stored(*order).charter for order in permutations(items)]

    yields = (OverridableTerm("members", LAST.node, CHARTER.members),)
    assert charters == [replace(CHARTER, members=2, yields=yields)] * 2


def test_amendments_are_bounded_and_the_oldest_overruled_one_is_evicted() -> None:
    records = stored(sign(FOUNDER, CHARTER), sign(LAST, AMENDED))
    with patch.object(module, "MAX_AMENDERS", 1):
        assert not records.take(sign(MIDDLE, Amendments((Term("members", 1, "3"),))), WALL)
        assert not records.take(sign(MIDDLE, Amendments((Term("policy", 9, "auto"),))), WALL)
        assert records.take(sign(LAST, Amendments((Term("members", 2, "4"),), 2)), WALL)
        assert records.take(sign(MIDDLE, Amendments((Term("members", 3, "3"),))), WALL)
    with patch.object(module, "MAX_AMENDERS", 2):
        assert records.take(sign(LAST, Amendments((Term("members", 2, "4"),), 2)), WALL)
        assert records.take(sign(FOUNDER, Amendments((Term("members", 4, "5"),))), WALL)
        assert not records.take(sign(LAST, Amendments((Term("members", 2, "4"),), 2)), WALL)

    assert records.amendments.keys() == {MIDDLE.node, FOUNDER.node}
    assert Slot(Kind.AMENDMENTS, LAST.node) not in records.store
    assert records.charter == replace(CHARTER, members=5)


MINTED = [NodeKey(bytes([number]) * 32) for number in range(100, 112)]
GUESTS = {key.node: issue(MIDDLE, CREDENTIALS[MIDDLE.node], key.node, Role.NODE) for key in MINTED}


def crowd(version: int = 1) -> list[Item]:
    """Make items of a member that minted keys, each of which stops another model."""
    with patch.dict(CREDENTIALS, GUESTS):
        return [
            sign(key, Amendments((Term(f"model.{number:016x}", version, ""),)))
            for number, key in enumerate(MINTED)
        ]


@pytest.mark.parametrize("version", [1, MAX_STEP, 2 * MAX_STEP], ids=["low", "high", "absurd"])
def test_a_member_and_its_guests_cannot_take_the_room_for_amendments(version: int) -> None:
    records = stored(sign(FOUNDER, CHARTER))
    by_last, by_founder = (Amendments((Term("members", at, "2"),)) for at in (1, 2))

    with patch.object(module, "MAX_AMENDERS", 4):
        for item in crowd(version):
            records.take(item, WALL)
        taken = records.take(sign(LAST, by_last), WALL), records.charter
        for item in crowd(version):
            records.take(item, WALL)
        last = records.take(sign(FOUNDER, by_founder), WALL), records.charter

    yields = (OverridableTerm("members", LAST.node, CHARTER.members),)
    assert taken == (True, replace(CHARTER, members=2, yields=yields))
    assert last == (True, replace(CHARTER, members=2))
    assert len(records.amendments) == 4


def test_the_founder_has_a_place_among_as_many_branches_as_there_are_places() -> None:
    records = stored(sign(FOUNDER, CHARTER), sign(MIDDLE, AMENDED))
    policy = Amendments((Term("policy", 1, "throughput"),))

    with patch.object(module, "MAX_AMENDERS", 1):
        assert not records.take(sign(LAST, policy), WALL)
        assert records.take(sign(FOUNDER, policy), WALL)

    assert records.charter == replace(CHARTER, policy="throughput")


def test_the_terms_of_those_whose_inviter_is_removed_are_void_in_any_order() -> None:
    guest, other = MINTED[:2]
    spared = remove(FOUNDER, MESH, MIDDLE.node, int(WALL), (other.node,))
    with patch.dict(CREDENTIALS, GUESTS):
        items = (
            sign(FOUNDER, CHARTER),
            sign(guest, Amendments((Term("members", 7, "64"),))),
            sign(other, Amendments((Term("policy", 1, "throughput"),))),
            sign(FOUNDER, spared),
        )

    charters = [stored(*order).charter for order in permutations(items)]

    assert charters == [replace(CHARTER, policy="throughput")] * 24


def test_a_removal_frees_the_room_that_minted_keys_took() -> None:
    records = stored(sign(FOUNDER, CHARTER), *crowd(2 * MAX_STEP), sign(FOUNDER, REMOVAL))

    with patch.object(module, "MAX_AMENDERS", len(MINTED)):
        taken = records.take(sign(LAST, AMENDED), WALL)
        again = [records.take(item, WALL) for item in crowd(2 * MAX_STEP)]

    assert taken
    assert not any(again)


def test_an_absurd_version_does_not_freeze_a_term() -> None:
    absurd = Amendments((Term("members", 2 * MAX_STEP, "9"),))
    records = stored(sign(FOUNDER, CHARTER), sign(LAST, absurd), sign(MIDDLE, AMENDED))

    yields = (OverridableTerm("members", MIDDLE.node, CHARTER.members),)
    assert records.charter == replace(CHARTER, members=2, yields=yields)


def test_the_terms_of_a_removed_author_are_void_in_any_order() -> None:
    hostile = Amendments((Term("members", 7, "64"), Term("tariff", 1, "night")))
    items = sign(FOUNDER, CHARTER), sign(MIDDLE, hostile), sign(FOUNDER, REMOVAL)

    charters = [stored(*order).charter for order in permutations(items)]

    assert charters == [CHARTER] * 6


def test_amendments_of_removed_authors_make_room() -> None:
    records = stored(sign(FOUNDER, CHARTER), sign(MIDDLE, AMENDED), sign(FOUNDER, REMOVAL))

    with patch.object(module, "MAX_AMENDERS", 1):
        assert records.take(sign(LAST, Amendments((Term("policy", 3, "auto"),))), WALL)

    assert records.amendments.keys() == {LAST.node}


def test_the_founder_wins_of_equal_versions() -> None:
    by_founder = Amendments((Term("members", 1, "5"),))
    items = [sign(FOUNDER, CHARTER), sign(FOUNDER, by_founder)]
    items += [sign(key, AMENDED) for key in (MIDDLE, LAST)]

    charters = [stored(*order).charter for order in permutations(items)]

    assert charters == [replace(CHARTER, members=5)] * 24


def test_records_of_unknown_kinds_are_carried_for_known_nodes_up_to_a_limit() -> None:
    records = stored(sign(LAST, PROFILE))

    taken = [records.take(later(LAST, kind), WALL) for kind in range(99, 99 + MAX_CARRIED + 1)]

    assert taken == [True] * MAX_CARRIED + [False]
    assert records.take(later(LAST, 99, seq=2), WALL)
    assert not records.take(later(MIDDLE, 99), WALL)
    assert not records.take(replace(later(LAST, 99, seq=3), subject=MIDDLE.node), WALL)
    with pytest.raises(PeerFault, match="forged"):
        records.take(replace(later(LAST, 99, seq=3), payload=b"other"), WALL)
    records.forget(LAST.node)
    assert not records.store


def test_the_count_of_a_charter_item_is_its_version() -> None:
    item = replace(sign(FOUNDER, CHARTER), incarnation=99).sign(FOUNDER, MESH)

    with pytest.raises(PeerFault, match="Charter in the wrong slot"):
        RecordStore(MESH).take(item, WALL)


def test_the_author_of_a_removal_item_is_its_issuer() -> None:
    with pytest.raises(PeerFault, match="Removal in the wrong slot"):
        RecordStore(MESH).take(sign(LAST, REMOVAL), WALL)


def test_a_removed_node_is_expelled_permanently() -> None:
    records = stored(sign(MIDDLE, PROFILE), sign(MIDDLE, STATE), sign(LAST, PROFILE))
    records.take(sign(FOUNDER, REMOVAL), WALL)

    gone = records.ended_members(WALL)
    for node in gone:
        records.forget(node)

    assert gone == {MIDDLE.node}
    assert set(records.profiles) == {LAST.node}
    assert not records.states
    assert not records.take(sign(MIDDLE, PROFILE, incarnation=9), WALL)


def test_a_membership_ends_when_it_expires() -> None:
    records = stored(sign(MIDDLE, PROFILE), sign(LAST, PROFILE))

    assert records.expires_at_s() == WALL + DAY
    assert not records.ended_members(WALL + DAY - 1)
    assert records.ended_members(WALL + DAY) == {LAST.node}
    assert records.role(CREDENTIALS[CLIENT.node], CLIENT.node, WALL) is Role.CLIENT


def test_a_membership_without_expiry_does_not_end() -> None:
    records = RecordStore(MESH)

    assert records.expires_at_s() == inf
    assert records.founder is None
    assert expires_at_s(CREDENTIALS[MIDDLE.node]) == inf


def test_charter_and_removals_outlive_their_authors() -> None:
    by_last = remove(LAST, MESH, CLIENT.node, int(WALL))
    of_last = remove(FOUNDER, MESH, LAST.node, int(WALL))
    items = sign(FOUNDER, CHARTER), sign(LAST, AMENDED), sign(LAST, by_last), sign(FOUNDER, of_last)
    late = WALL + 2 * DAY

    digests = set()
    for order in permutations(items):
        records = RecordStore(MESH)
        taken = [records.take(item, late) for item in order]
        digests.add(digest(records.store.values()))

        assert all(taken)
    assert len(digests) == 1


def removal(key: NodeKey, number: int) -> Item:
    """Make the removal of a made-up key."""
    return sign(key, remove(key, MESH, NodeId(number.to_bytes(32)), int(WALL)))


def test_a_member_and_its_guests_cannot_take_the_room_for_removals() -> None:
    records = stored(sign(FOUNDER, CHARTER))
    guest = issue(MIDDLE, CREDENTIALS[MIDDLE.node], STRANGER.node, Role.NODE)

    with patch.dict(CREDENTIALS, {STRANGER.node: guest}):
        taken = [
            records.take(removal(key, 1000 * at + number), WALL)
            for at, key in enumerate((MIDDLE, STRANGER))
            for number in range(BRANCH_REMOVALS)
        ]

    assert taken == [True] * BRANCH_REMOVALS + [False] * BRANCH_REMOVALS
    assert records.take(removal(LAST, 5000), WALL)
    assert records.take(sign(FOUNDER, REMOVAL), WALL)


def test_the_founder_has_room_for_removals_of_its_own() -> None:
    records = RecordStore(MESH)
    with patch.multiple(module, MAX_REMOVALS=3, FOUNDER_REMOVALS=2):
        taken = [records.take(removal(LAST, number), WALL) for number in range(2)]
        taken += [records.take(removal(FOUNDER, number), WALL) for number in range(9, 12)]

    assert taken == [True, False, True, True, False]


def test_of_two_removals_that_of_the_author_nearer_to_the_founder_is_kept() -> None:
    of = CLIENT.node
    harsh = sign(MIDDLE, remove(MIDDLE, MESH, of, int(WALL)))
    mild = sign(LAST, remove(LAST, MESH, of, int(WALL), (STRANGER.node,)))
    founders = sign(FOUNDER, remove(FOUNDER, MESH, of, int(WALL), (STRANGER.node,) * 2))
    assert FOUNDER.node < MIDDLE.node < LAST.node  # the id does not decide

    for order in permutations([harsh, mild, founders]):
        records, without = RecordStore(MESH), RecordStore(MESH)
        for item in order:
            records.take(item, WALL)
            if item is not founders:
                without.take(item, WALL)

        assert records.removals[of].issuer == FOUNDER.node
        assert without.removals[of].issuer == MIDDLE.node


def test_the_founder_cannot_be_removed() -> None:
    records = RecordStore(MESH)

    assert not records.take(sign(LAST, remove(LAST, MESH, FOUNDER.node, int(WALL))), WALL)
    assert not records.removals
