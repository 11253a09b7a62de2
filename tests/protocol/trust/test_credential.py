"""RingMembership: the founder, chains of invitations, and permanent removal."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import NotAuthorised, PeerFault
from meshllm.names import MeshId, NodeId
from meshllm.protocol.trust.credential import (
    MAX_CHAIN,
    MAX_CREDENTIAL_BYTES,
    MAX_LATER_BYTES,
    MAX_SPARED,
    NO_LIMITS,
    Certificate,
    ClientLimits,
    Credential,
    Removal,
    Role,
    check,
    founder_credential,
    issue,
    remove,
)
from meshllm.protocol.trust.identity import NodeKey
from tests.property.strategies import nodes, u64

NOW = 1_800_000_000
SALT = bytes(range(16))
KEYS = [NodeKey(bytes([number]) * 32) for number in range(MAX_CHAIN + 2)]
A, B, C, D = KEYS[:4]
FOUNDED = founder_credential(A, SALT)
MESH = FOUNDED.mesh
OF_B = issue(A, FOUNDED, B.node, Role.NODE)
OF_C = issue(B, OF_B, C.node, Role.NODE, NOW + 60)
CLIENT = issue(B, OF_B, D.node, Role.CLIENT)
LIMITS = ClientLimits(2, 5000)

ids = st.binary(min_size=16, max_size=16)
signatures = st.binary(min_size=64, max_size=64)
certificates = st.builds(Certificate, nodes, st.sampled_from(Role), u64, nodes, signatures)
credentials = st.builds(
    Credential, ids.map(MeshId), ids, st.lists(certificates, max_size=MAX_CHAIN).map(tuple)
)
removals = st.builds(
    Removal, nodes, nodes, u64, st.lists(nodes, max_size=20).map(tuple), signatures
)


def refused(credential: Credential, node: NodeId, *gone: Removal, mesh: MeshId = MESH) -> str:
    """Return why a credential is refused."""
    with pytest.raises(NotAuthorised) as caught:
        check(credential, node, mesh, NOW, {removal.node: removal for removal in gone})
    return str(caught.value)


def test_the_founder_is_a_member_by_its_key() -> None:
    assert check(FOUNDED, A.node, MESH, NOW, {}) is FOUNDED.role is Role.NODE
    assert founder_credential(A, bytes(16)).mesh != MESH


def test_an_invited_key_is_a_member_in_its_role() -> None:
    assert check(OF_B, B.node, MESH, NOW, {}) is Role.NODE
    assert check(OF_C, C.node, MESH, NOW, {}) is Role.NODE
    assert check(CLIENT, D.node, MESH, NOW, {}) is CLIENT.role is Role.CLIENT


@pytest.mark.parametrize(
    ("credential", "holder"), [(FOUNDED, A), (OF_B, B), (OF_C, C), (CLIENT, D)]
)
def test_a_credential_names_its_holder(credential: Credential, holder: NodeKey) -> None:
    assert [key for key in (A, B, C, D) if credential.is_of(key.node)] == [holder]


def test_a_membership_ends_when_it_expires() -> None:
    check(OF_C, C.node, MESH, NOW + 59.9, {})

    with pytest.raises(NotAuthorised, match="has expired") as caught:
        check(OF_C, C.node, MESH, NOW + 60, {})
    assert caught.value.hint == "join with a new ticket"


def test_a_membership_ends_when_that_of_its_inviter_expires() -> None:
    of_d = issue(C, OF_C, D.node, Role.NODE)

    with pytest.raises(NotAuthorised, match="expired"):
        check(of_d, D.node, MESH, NOW + 60, {})


def changed(credential: Credential, **fields: Any) -> Credential:
    """Change the last certificate and leave its signature."""
    return replace(
        credential, chain=(*credential.chain[:-1], replace(credential.chain[-1], **fields))
    )


@pytest.mark.parametrize(
    ("credential", "node", "words"),
    [
        (FOUNDED, B.node, "a member of another mesh"),
        (replace(FOUNDED, salt=bytes(16)), A.node, "another mesh"),
        (founder_credential(B, SALT), B.node, "another mesh"),
        (replace(founder_credential(B, SALT), mesh=MESH), B.node, "another mesh"),
        (replace(OF_B, mesh=MeshId(bytes(16))), B.node, "another mesh"),
        (OF_B, C.node, "shows the credential of"),
        (OF_C, B.node, "shows the credential of"),
        (changed(OF_B, subject=C.node), C.node, "not signed by its issuer"),
        (changed(CLIENT, role=Role.NODE), D.node, "not signed by its issuer"),
        (changed(OF_C, expires_s=0), C.node, "not signed by its issuer"),
        (changed(OF_C, issuer=A.node), C.node, "not signed by its issuer"),
        (changed(OF_C, signature=bytes(64)), C.node, "not signed by its issuer"),
        (replace(OF_C, chain=OF_C.chain[::-1]), C.node, "another mesh"),
        (replace(OF_C, chain=(OF_B.chain[0], *CLIENT.chain)), D.node, "not signed by its issuer"),
    ],
)
def test_a_false_credential_is_refused(credential: Credential, node: NodeId, words: str) -> None:
    assert words in refused(credential, node)


def test_a_certificate_is_valid_for_one_mesh() -> None:
    other = founder_credential(A, bytes(16))

    moved = replace(OF_B, mesh=other.mesh, salt=bytes(16))

    assert "not signed by its issuer" in refused(moved, B.node, mesh=other.mesh)


def test_a_client_cannot_invite() -> None:
    with pytest.raises(NotAuthorised, match="A client cannot invite"):
        issue(D, CLIENT, C.node, Role.NODE)

    pretended = issue(D, replace(CLIENT, chain=CLIENT.chain[:1]), C.node, Role.NODE)
    forged = replace(CLIENT, chain=(*CLIENT.chain, pretended.chain[-1]))
    assert "is a client and cannot invite" in refused(forged, C.node)


def without_last(credential: Credential) -> Credential:
    return replace(credential, chain=credential.chain[:-1])


def test_the_length_of_a_chain_is_limited() -> None:
    credential = FOUNDED
    for issuer, subject in pairwise(KEYS[: MAX_CHAIN + 1]):
        credential = issue(issuer, credential, subject.node, Role.NODE)

    assert check(credential, KEYS[MAX_CHAIN].node, MESH, NOW, {}) is Role.NODE
    client = issue(KEYS[MAX_CHAIN - 1], without_last(credential), B.node, Role.CLIENT, 0, LIMITS)
    assert len(client.encode()) + MAX_LATER_BYTES == MAX_CREDENTIAL_BYTES
    Credential.decode(client.encode() + bytes(MAX_LATER_BYTES))
    with pytest.raises(NotAuthorised, match="16 invitations away"):
        issue(KEYS[MAX_CHAIN], credential, KEYS[-1].node, Role.NODE)


def test_a_removed_key_is_not_a_member() -> None:
    assert "is removed from the mesh" in refused(OF_C, C.node, remove(A, MESH, C.node, NOW))
    assert "is removed from the mesh" in refused(FOUNDED, A.node, remove(B, MESH, A.node, NOW))


def test_a_removal_revokes_what_the_key_issued_except_the_spared() -> None:
    removal = remove(A, MESH, B.node, NOW, (C.node,))
    removals = {B.node: removal}

    assert check(OF_C, C.node, MESH, NOW, removals) is Role.NODE
    assert "which was removed" in refused(CLIENT, D.node, removal)
    assert "is removed" in refused(OF_B, B.node, removal)


def test_a_spared_member_may_still_invite() -> None:
    removals = {B.node: remove(A, MESH, B.node, NOW, (C.node,))}

    assert check(issue(C, OF_C, D.node, Role.NODE), D.node, MESH, NOW, removals) is Role.NODE


def test_a_founder_can_be_removed_and_its_mesh_goes_on() -> None:
    removal = remove(B, MESH, A.node, NOW, (B.node,))

    assert check(OF_C, C.node, MESH, NOW, {A.node: removal}) is Role.NODE
    assert "which was removed" in refused(issue(A, FOUNDED, D.node, Role.NODE), D.node, removal)


def test_a_removal_is_signed_for_one_mesh() -> None:
    removal = remove(A, MESH, B.node, NOW, (C.node,))

    assert removal.is_signed(MESH)
    assert not removal.is_signed(MeshId(bytes(16)))
    assert not replace(removal, node=C.node).is_signed(MESH)
    assert not replace(removal, issuer=B.node).is_signed(MESH)
    assert not replace(removal, at_s=NOW + 1).is_signed(MESH)
    assert not replace(removal, spared=()).is_signed(MESH)


@pytest.mark.property
@given(credentials)
def test_a_credential_round_trips(credential: Credential) -> None:
    assert Credential.decode(credential.encode()) == credential


@pytest.mark.property
@given(removals)
def test_a_removal_round_trips(removal: Removal) -> None:
    assert Removal.decode(removal.encode()) == removal


@pytest.mark.property
@given(st.binary(max_size=800) | credentials.map(Credential.encode))
def test_garbage_is_not_a_credential(data: bytes) -> None:
    try:
        credential = Credential.decode(data)
    except (PeerFault, NotAuthorised):
        return
    assert data.startswith(credential.encode())
    refused(credential, A.node)


@pytest.mark.property
@given(st.binary(max_size=800))
def test_garbage_is_not_a_removal(data: bytes) -> None:
    try:
        removal = Removal.decode(data)
    except PeerFault:
        return
    assert data.startswith(removal.encode())
    assert not removal.is_signed(MESH)


def test_bytes_beyond_the_limits_are_refused() -> None:
    longest, most = OF_B.chain * (MAX_CHAIN + 1), (C.node,) * (MAX_SPARED + 1)
    whole = len(FOUNDED.encode()), len(OF_B.encode())

    for length in (*range(32), *(start + more for start in whole for more in range(1, 10))):
        with pytest.raises(PeerFault, match=f"Credential of {length} bytes"):
            Credential.decode(OF_C.encode()[:length])
    with pytest.raises(PeerFault, match="Credential of 2361 bytes; 2298 at most"):
        Credential.decode(replace(OF_B, chain=longest).encode())
    with pytest.raises(PeerFault, match="256 spared at most"):
        Removal.decode(Removal(A.node, B.node, 0, most, bytes(64)).encode())
    with pytest.raises(PeerFault, match="Removal of 135 bytes"):
        Removal.decode(bytes(135))


def test_a_role_of_a_later_version_is_not_a_fault_of_who_forwards_it() -> None:
    role = bytearray(OF_B.encode())
    role[32 + 32] = 2

    with pytest.raises(NotAuthorised, match="has role 2, unknown to this version") as caught:
        Credential.decode(bytes(role))
    assert caught.value.hint == "update meshllm"


@pytest.mark.parametrize("more", [b"", b"?", b"?" * 31])
def test_fields_of_a_later_version_are_skipped(more: bytes) -> None:
    removal = remove(A, MESH, B.node, NOW, (C.node,))

    for member in (FOUNDED, OF_B, CLIENT):
        assert Credential.decode(member.encode() + bytes(10) + more) == member
    assert Credential.decode(LIMITED.encode() + more) == LIMITED
    assert Removal.decode(removal.encode() + more) == removal


def test_a_removal_that_spares_as_many_as_it_may_is_read() -> None:
    spared = tuple(NodeId(number.to_bytes(32)) for number in range(MAX_SPARED))
    removal = remove(A, MESH, B.node, NOW, spared)

    assert Removal.decode(removal.encode()) == removal
    assert removal.is_signed(MESH)


LIMITED = issue(B, OF_B, D.node, Role.CLIENT, 0, LIMITS)


def test_limits_of_a_client_are_signed() -> None:
    forged = replace(LIMITED.chain[-1], limits=ClientLimits(9, 5000))
    unlimited = replace(LIMITED.chain[-1], limits=NO_LIMITS)

    assert check(LIMITED, D.node, MESH, NOW, {}) is Role.CLIENT
    assert Credential.decode(LIMITED.encode()) == LIMITED
    assert (LIMITED.limits, CLIENT.limits, FOUNDED.limits) == (
        LIMITS,
        NO_LIMITS,
        NO_LIMITS,
    )
    for each in (forged, unlimited):
        changed = replace(LIMITED, chain=(*LIMITED.chain[:-1], each))
        assert "was not signed" in refused(changed, D.node)


def test_the_encoding_without_limits_is_that_of_earlier_versions() -> None:
    assert len(LIMITED.encode()) == len(CLIENT.encode()) + 10
    assert len(CLIENT.encode()) == 32 + 2 * 137
