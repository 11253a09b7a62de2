"""Admission by credential and by ticket."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import pytest

from meshllm.errors import NotAuthorised
from meshllm.names import NodeId
from meshllm.node.membership import admission as module
from meshllm.node.membership import state_store as keyring_module
from meshllm.node.membership.admission import MemberAdmission
from meshllm.node.membership.state_store import StateStore
from meshllm.protocol.trust.credential import (
    MAX_CHAIN,
    ClientLimits,
    Credential,
    Removal,
    Role,
    check,
    founder_credential,
    issue,
    remove,
)
from meshllm.protocol.trust.handshake import Purpose
from meshllm.protocol.trust.identity import NodeKey
from meshllm.protocol.trust.ticket import Ticket, TicketProof
from tests.builders.handshakes import GUEST, OTHER

T = TypeVar("T")

CONTEXT = b"of one handshake"


class MeshMember:
    """A founder with a gate."""

    def __init__(self, folder: Path) -> None:
        self.store = StateStore.open(folder)
        self.credential = self.store.create_mesh()
        self.removals: dict[NodeId, Removal] = {}
        self.gate = MemberAdmission(self.store, self.credential, self.removals)

    def ticket(
        self, role: Role = Role.NODE, lasts_s: float | None = None, uses: int | None = None
    ) -> Ticket:
        return self.store.invite([], role, lasts_s=lasts_s, uses=uses)

    def authorize(self, proof: Credential | TicketProof, peer: NodeId = GUEST.node) -> Credential:
        return asyncio.run(self.gate.authorize(peer, proof, Purpose.MESH, 1))

    def remove(self, node: NodeId, *spared: NodeId) -> None:
        mesh = self.credential.mesh
        self.removals[node] = remove(self.store.key, mesh, node, 1, spared)


@pytest.fixture
def member_node(tmp_path: Path) -> MeshMember:
    return MeshMember(tmp_path / "state")


def test_a_member_is_admitted_by_its_own_credential(member_node: MeshMember) -> None:
    credential = issue(member_node.store.key, member_node.credential, GUEST.node, Role.NODE)

    assert member_node.authorize(credential) == credential


def test_a_member_of_another_mesh_is_rejected(member_node: MeshMember) -> None:
    with pytest.raises(NotAuthorised, match="another mesh"):
        member_node.authorize(founder_credential(GUEST, bytes(16)))


def test_a_credential_of_another_node_is_rejected(member_node: MeshMember) -> None:
    credential = issue(member_node.store.key, member_node.credential, OTHER.node, Role.NODE)

    with pytest.raises(NotAuthorised, match="shows the credential of"):
        member_node.authorize(credential)


def test_a_removed_member_and_its_guests_are_rejected(member_node: MeshMember) -> None:
    credential = issue(member_node.store.key, member_node.credential, GUEST.node, Role.NODE)
    friend = issue(GUEST, credential, OTHER.node, Role.NODE)
    member_node.remove(GUEST.node)

    with pytest.raises(NotAuthorised, match="removed"):
        member_node.authorize(credential)
    with pytest.raises(NotAuthorised, match="removed"):
        member_node.authorize(friend, OTHER.node)
    member_node.remove(GUEST.node, OTHER.node)
    assert member_node.authorize(friend, OTHER.node) == friend


@pytest.mark.parametrize("role", Role)
def test_a_ticket_admits_a_member_in_its_role(member_node: MeshMember, role: Role) -> None:
    credential = member_node.authorize(member_node.ticket(role).prove(CONTEXT))

    assert check(credential, GUEST.node, member_node.credential.mesh, time.time(), {}) is role
    assert member_node.authorize(credential) == credential


@pytest.mark.parametrize("uses", [3, None])
def test_a_ticket_is_closed_when_a_member_that_it_admitted_is_removed(
    member_node: MeshMember, uses: int | None
) -> None:
    ticket, other = member_node.ticket(uses=uses), member_node.ticket()
    member_node.authorize(ticket.prove(CONTEXT))
    member_node.remove(GUEST.node)

    with pytest.raises(NotAuthorised, match="used up"):
        member_node.authorize(ticket.prove(CONTEXT), OTHER.node)
    assert list(member_node.gate.guests()) == [other.psk]
    assert member_node.authorize(other.prove(CONTEXT), OTHER.node)


def test_a_ticket_without_a_limit_has_one(member_node: MeshMember) -> None:
    proof = member_node.ticket().prove(CONTEXT)
    with patch.object(keyring_module, "MAX_GUESTS", 1):
        member_node.authorize(proof)
        with pytest.raises(NotAuthorised, match="used up"):
            member_node.authorize(proof, OTHER.node)


@pytest.mark.parametrize("uses", [1, 2])
def test_a_used_up_ticket_still_admits_its_guests(member_node: MeshMember, uses: int) -> None:
    proof = member_node.ticket(uses=uses).prove(CONTEXT)
    guests = [NodeKey(bytes([n]) * 32).node for n in range(uses + 1)]
    for guest in guests[:uses]:
        member_node.authorize(proof, guest)

    with pytest.raises(NotAuthorised, match=r"or is used up$") as raised:
        member_node.authorize(proof, guests[-1])

    assert raised.value.hint
    for guest in guests[:uses]:
        assert member_node.authorize(proof, guest).chain[-1].subject == guest


def test_a_ticket_without_a_limit_admits_all(member_node: MeshMember) -> None:
    proof = member_node.ticket().prove(CONTEXT)

    for guest in (GUEST.node, OTHER.node):
        assert member_node.authorize(proof, guest).chain[-1].subject == guest


def test_a_ticket_expires(member_node: MeshMember, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = member_node.ticket(lasts_s=60).prove(CONTEXT)
    member_node.authorize(proof)

    later = SimpleNamespace(time=lambda: time.time() + 61)
    monkeypatch.setattr(module, "time", later)

    with pytest.raises(NotAuthorised, match="expired"):
        member_node.authorize(proof)


def test_the_key_of_a_ticket_is_valid_until_it_expires(
    member_node: MeshMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting, short = member_node.ticket(), member_node.ticket(lasts_s=60, uses=1)
    member_node.authorize(short.prove(CONTEXT))

    assert [*member_node.gate.guests()] == [short.psk, lasting.psk]  # a guest may retry

    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: time.time() + 61))
    assert [*member_node.gate.guests()] == [lasting.psk]


def test_a_ticket_for_another_role_is_rejected(member_node: MeshMember) -> None:
    ticket = member_node.ticket(Role.CLIENT)
    claimed = replace(ticket, role=Role.NODE)

    with pytest.raises(NotAuthorised, match="Ticket rejected"):
        member_node.authorize(claimed.prove(CONTEXT))


def test_the_role_of_a_proof_cannot_be_changed(member_node: MeshMember) -> None:
    proof = member_node.ticket(Role.CLIENT).prove(CONTEXT)

    with pytest.raises(NotAuthorised, match="Ticket rejected"):
        member_node.authorize(TicketProof(Role.NODE, proof.mac, CONTEXT))


def test_an_unknown_secret_is_rejected(member_node: MeshMember) -> None:
    member_node.ticket()

    with pytest.raises(NotAuthorised, match="Ticket rejected") as raised:
        member_node.authorize(TicketProof(Role.NODE, bytes(32), CONTEXT))

    assert raised.value.hint


def test_a_ticket_does_not_admit_a_removed_key(member_node: MeshMember) -> None:
    proof = member_node.ticket(uses=1).prove(CONTEXT)
    member_node.remove(GUEST.node)

    with pytest.raises(NotAuthorised, match="permanently removed"):
        member_node.authorize(proof)

    assert member_node.authorize(proof, OTHER.node)  # it is not used up


def test_a_too_long_credential_chain_does_not_use_up_a_ticket(member_node: MeshMember) -> None:
    credential, key = member_node.credential, member_node.store.key
    for number in range(MAX_CHAIN):
        guest = NodeKey(bytes([number]) * 32)
        credential, key = issue(key, credential, guest.node, Role.NODE), guest
    member_node.gate = MemberAdmission(member_node.store, credential, {})

    with pytest.raises(NotAuthorised, match="invitations away"):
        member_node.authorize(member_node.ticket(uses=1).prove(CONTEXT))

    assert member_node.store.invitations()[0].guests == ()


def test_one_of_two_concurrent_guests_gets_the_last_use(member_node: MeshMember) -> None:
    proof = member_node.ticket(uses=1).prove(CONTEXT)
    authorize = member_node.gate.authorize

    async def both() -> list[Credential | BaseException]:
        guests = [authorize(guest.node, proof, Purpose.MESH, 1) for guest in (GUEST, OTHER)]
        return await asyncio.gather(*guests, return_exceptions=True)

    outcomes = asyncio.run(both())

    assert sorted(type(each).__name__ for each in outcomes) == ["Credential", "NotAuthorised"]
    (invitation,) = member_node.store.invitations()
    assert len(invitation.guests) == 1


async def test_unknown_peers_cause_no_disk_reads(member_node: MeshMember) -> None:
    ticket = member_node.ticket()
    reads = list[Path]()
    read = keyring_module._read

    def noting(path: Path) -> object:
        reads.append(path)
        return read(path)

    with patch.object(keyring_module, "_read", noting):
        for _ in range(5):
            await member_node.gate.refresh()
            assert [*member_node.gate.guests()] == [ticket.psk]
        assert not reads

        other = StateStore.open(member_node.store.folder).invite(
            [], Role.NODE, lasts_s=None, uses=None
        )
        reads.clear()
        for _ in range(5):
            await member_node.gate.refresh()
            assert [*member_node.gate.guests()] == [other.psk, ticket.psk]

    assert len(reads) == 1


async def test_tickets_of_another_process_are_read_off_the_loop(member_node: MeshMember) -> None:
    ticket, jobs = member_node.ticket(), list[object]()
    other = StateStore.open(member_node.store.folder).invite([], Role.NODE, lasts_s=None, uses=None)

    async def elsewhere(function: Callable[..., T], /, *args: Any) -> T:
        jobs.append(function)
        return function(*args)

    gate = MemberAdmission(member_node.store, member_node.credential, {}, elsewhere)
    assert [*gate.guests()] == [ticket.psk]

    await gate.refresh()

    assert jobs == [member_node.store.refresh]
    assert [*gate.guests()] == [other.psk, ticket.psk]


async def test_a_use_of_a_ticket_is_saved_off_the_loop_before_the_reply(
    member_node: MeshMember,
) -> None:
    ticket, jobs = member_node.ticket(uses=1), list[object]()

    async def elsewhere(function: Callable[..., T], /, *args: Any) -> T:
        jobs.append(function)
        return function(*args)

    gate = MemberAdmission(member_node.store, member_node.credential, {}, elsewhere)
    await gate.authorize(GUEST.node, ticket.prove(CONTEXT), Purpose.MESH, 1)

    assert jobs == [member_node.store.use]
    (kept,) = StateStore.open(member_node.store.folder).invitations()
    assert kept.guests == (GUEST.node,)


def test_a_ticket_dropped_meanwhile_admits_no_guest(member_node: MeshMember) -> None:
    member_node.ticket(uses=1)
    (invitation,) = member_node.store.invitations()
    for _ in range(keyring_module.MAX_INVITATIONS):
        member_node.ticket()

    assert not member_node.store.use(invitation, GUEST.node)


def test_a_client_is_admitted_with_the_limits_of_its_ticket(member_node: MeshMember) -> None:
    limits = ClientLimits(1, 5000)
    ticket = member_node.store.invite([], Role.CLIENT, lasts_s=60, uses=1, limits=limits)

    granted = member_node.authorize(ticket.prove(b"context"))

    assert granted.limits == limits
    assert member_node.authorize(Credential.decode(granted.encode())) == granted
