"""Fourteen kinds of bad tickets at the entrance of a mesh: none admits, none shuts others out."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.errors import NotAuthorised, UserError
from meshllm.node.membership.bootstrap import Membership, enter
from meshllm.node.membership.state_store import StateStore
from meshllm.node.options import NodeOptions
from meshllm.protocol.trust.credential import Role, remove
from meshllm.protocol.trust.ticket import Ticket
from meshllm.testing.clock import run_virtual
from meshllm_loopback import LoopbackTransport
from tests.builders.mesh_members import MemberNetwork, MeshMember, network

HOUR_S = 3600


class Entrance:
    """A member with open tickets, and a guest that comes with what it got."""

    def __init__(self, network: MemberNetwork, member_node: MeshMember) -> None:
        self.network, self.member_node = network, member_node
        self.guest = StateStore.open(network.folder / "guest")

    def ticket(self, role: Role = Role.NODE, *, lasts_s: int = HOUR_S, uses: int = 9) -> Ticket:
        at = [self.member_node.address]
        return self.member_node.store.invite(at, role, lasts_s=lasts_s, uses=uses)

    async def come(self, text: str, store: StateStore | None = None) -> Membership:
        store = store or self.guest
        options = NodeOptions(state=store.folder, join=text, discovery=False)
        own = await enter(store, options, (self.network.transport,))
        assert own.link is not None
        await own.link.close()
        return own

    def remove(self, store: StateStore) -> None:
        key, mesh = self.member_node.store.key, self.member_node.credential.mesh
        self.member_node.links.act(
            self.member_node.machine.remove(remove(key, mesh, store.key.node, 1), 0.0)
        )


async def no_ticket(_: Entrance) -> str:
    return "sesame"


async def made_up(_: Entrance) -> str:
    return "meshllm1" + "a" * 120


async def of_another_version(at: Entrance) -> str:
    return at.ticket().encode().replace("meshllm1", "meshllm2", 1)


async def cut_short(at: Entrance) -> str:
    return at.ticket().encode()[:-1]


async def mistyped(at: Entrance) -> str:
    text = at.ticket().encode()
    return text[:40] + ("b" if text[40] != "b" else "c") + text[41:]


async def expired(at: Entrance) -> str:
    return at.ticket(lasts_s=-5).encode()


async def expired_and_extended(at: Entrance) -> str:
    return replace(at.ticket(lasts_s=-5), expires_s=0).encode()


async def used_up(at: Entrance) -> str:
    text = at.ticket(uses=1).encode()
    await at.come(text, StateStore.open(at.network.folder / "first"))
    return text


async def with_a_guessed_secret(at: Entrance) -> str:
    return replace(at.ticket(), secret=bytes(len(at.ticket().secret))).encode()


async def for_a_client(at: Entrance) -> str:
    return at.ticket(Role.CLIENT).encode()


async def for_a_client_and_raised(at: Entrance) -> str:
    return replace(at.ticket(Role.CLIENT), role=Role.NODE).encode()


async def of_another_inviter(at: Entrance) -> str:
    other = StateStore.open(at.network.folder / "other").key.node
    return replace(at.ticket(), inviter=other).encode()


async def dropped_with_whom_it_admitted(at: Entrance) -> str:
    text, first = at.ticket().encode(), StateStore.open(at.network.folder / "first")
    await at.come(text, first)
    at.remove(first)
    await asyncio.sleep(1)
    return text


async def of_a_removed_guest(at: Entrance) -> str:
    at.remove(at.guest)
    return at.ticket().encode()


KINDS = {
    no_ticket: "Invalid ticket `sesame`",
    made_up: "mistyped",
    of_another_version: "version `2` is not supported",
    cut_short: "mistyped",
    mistyped: "mistyped",
    expired: "has expired",
    expired_and_extended: "Ticket rejected",
    used_up: "used up",
    with_a_guessed_secret: "Ticket rejected",
    for_a_client: "for a client",
    for_a_client_and_raised: "Ticket rejected",
    of_another_inviter: "answered instead of node",
    dropped_with_whom_it_admitted: "Ticket rejected",
    of_a_removed_guest: "permanently removed",
}


@pytest.mark.parametrize(("kind", "words"), KINDS.items(), ids=[kind.__name__ for kind in KINDS])
def test_a_bad_ticket_admits_nobody_and_a_good_one_does(
    tmp_path: Path, kind: Callable[[Entrance], Awaitable[str]], words: str
) -> None:
    async def scenario() -> None:
        async with network(tmp_path, LoopbackTransport()) as made:
            at = Entrance(made, await made.add("inviter"))
            text = await kind(at)
            with pytest.raises((NotAuthorised, UserError), match=words) as raised:
                await at.come(text)
            assert raised.value.hint
            assert at.guest.credential is None
            assert at.guest.key.node not in at.member_node.peers

            honest = StateStore.open(made.folder / "honest")
            assert await at.come(at.ticket().encode(), honest)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(scenario())
