"""Founding, returning to and joining a mesh."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest

from meshllm.errors import LinkLost, NotAuthorised, UserError
from meshllm.names import NodeId
from meshllm.node.membership import bootstrap as module
from meshllm.node.membership.bootstrap import MAX_CLOSED, REDIAL_S, Membership, check_ticket, enter
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net.beacon import Beacon, BeaconCode
from meshllm.node.net.dialer import NodeDialer
from meshllm.node.net.secure import SecureLink
from meshllm.node.options import NodeOptions
from meshllm.protocol.trust.credential import Credential, Role, check, remove
from meshllm.protocol.trust.ticket import parse_ticket
from meshllm.testing.clock import run_virtual
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.mesh_members import MemberNetwork, MeshMember, network

Scenario = Callable[[MemberNetwork], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    async def main(scenario: Scenario) -> None:
        async with network(tmp_path, LoopbackTransport(TrafficShape(delay_s=0.01))) as made:
            await scenario(made)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda scenario: run_virtual(main(scenario))


def guest(network: MemberNetwork, name: str = "guest") -> StateStore:
    return StateStore.open(network.folder / name)


async def come(network: MemberNetwork, store: StateStore, ticket: str | None = None) -> Membership:
    options = NodeOptions(state=store.folder, join=ticket, discovery=False)
    return await enter(store, options, (network.transport,))


def ticket(member_node: MeshMember, role: Role = Role.NODE, **limits: Any) -> str:
    limits = {"lasts_s": None, "uses": None} | limits
    return member_node.store.invite([member_node.address], role, **limits).encode()


def test_without_a_ticket_a_mesh_is_founded(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        store = guest(network)
        own = await come(network, store)
        assert own.is_founder
        assert (own.link, own.hints, own.incarnation) == (None, (), 1)
        assert store.credential == own.credential

    run(scenario)


def test_a_returning_member_has_the_addresses_of_others(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        store = guest(network)
        first = await come(network, store)
        store.peers = {NodeId(bytes(32)): ["loopback:x"]}
        again = await come(network, store)
        assert again.credential == first.credential
        assert (again.incarnation, again.link) == (2, None)
        assert again.hints == ((NodeId(bytes(32)), ("loopback:x",)),)

    run(scenario)


def test_a_ticket_used_before_adds_to_the_saved_addresses_of_its_inviter(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        text, other = ticket(a), NodeId(bytes(32))
        first = await come(network, store, text)
        assert first.link is not None
        await first.link.close()
        store.peers = {other: ["loopback:x"], a.me: ["loopback:moved"]}
        again = await come(network, store, text)
        assert dict(again.hints) == {
            other: ("loopback:x",),
            a.me: ("loopback:moved", a.address),
        }
        assert len(again.hints) == 2

    run(scenario)


def test_a_ticket_gives_a_membership(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        own = await come(network, store, ticket(a))
        assert own.link is not None
        assert (own.link.peer, own.is_founder) == (a.me, False)
        assert own.hints == ((a.me, (a.address,)),)
        assert store.credential == own.credential
        mesh, node = a.credential.mesh, store.key.node
        assert check(own.credential, node, mesh, 0, {}) is Role.NODE
        await own.link.close()

    run(scenario)


def test_a_ticket_is_used_once_by_one_node(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        text = ticket(a, uses=1)
        first = await come(network, store, text)
        assert first.link is not None
        await first.link.close()
        again = await come(network, store, text)
        assert (again.credential, again.link) == (first.credential, None)
        assert again.hints[0] == (a.me, (a.address,))
        other = guest(network, "other")
        with pytest.raises(NotAuthorised, match="used up") as raised:
            await come(network, other, text)
        assert raised.value.hint == "ask a member for another one, of `meshllm ring ticket`"
        assert other.credential is None

    run(scenario)


def test_a_node_waits_for_its_inviter(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        await a.close()
        coming = asyncio.ensure_future(come(network, store, ticket(a)))
        await asyncio.sleep(100)
        assert not coming.done()
        assert caplog.text.count("waiting for the inviter") == 1
        again = await network.add("a", life=2)
        again.links._admission = a.links._admission
        own = await coming
        assert own.link is not None
        await own.link.close()

    run(scenario)


@pytest.mark.parametrize(
    ("addresses", "listed"), [((), "it has none"), (("quic:a", "ws://b:1"), "`quic:a`, `ws://b:1`")]
)
def test_an_inviter_without_a_transport_is_an_error_at_once(
    run: Run, addresses: tuple[str, ...], listed: str
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        text = a.store.invite(addresses, Role.NODE, lasts_s=None, uses=None).encode()
        began = asyncio.get_running_loop().time()
        with pytest.raises(UserError, match="`loopback` cannot dial any address") as raised:
            await come(network, guest(network), text)
        assert f"of the ticket ({listed})" in str(raised.value)
        assert asyncio.get_running_loop().time() == began

    run(scenario)


def test_a_cancelled_wait_leaves_nothing(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        await a.close()
        coming = asyncio.ensure_future(come(network, store, ticket(a)))
        await asyncio.sleep(REDIAL_S / 2)
        coming.cancel()
        await asyncio.wait([coming])
        assert store.credential is None

    run(scenario)


def test_a_rejection_is_reported_at_once(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        removal = remove(a.store.key, a.credential.mesh, store.key.node, 1)
        a.links.act(a.machine.remove(removal, 0.0))
        began = asyncio.get_running_loop().time()
        with pytest.raises(NotAuthorised, match="permanently removed") as raised:
            await come(network, store, ticket(a))
        assert "another ticket and `--state FOLDER`" in str(raised.value.hint)
        assert asyncio.get_running_loop().time() - began < REDIAL_S

    run(scenario)


def test_an_expired_ticket_is_not_sent(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        await a.close()
        late = ticket(a, lasts_s=-5)
        with pytest.raises(NotAuthorised, match="has expired") as raised:
            await come(network, guest(network), late)
        assert "`meshllm ring ticket`" in str(raised.value.hint)
        with pytest.raises(NotAuthorised, match="has expired"):
            check_ticket(guest(network), late)
        assert check_ticket(a.store, late) == parse_ticket(late)  # its own: it is in the mesh

    run(scenario)


def test_a_node_cannot_use_a_ticket_for_a_client(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        with pytest.raises(UserError, match="for a client") as raised:
            await come(network, store, ticket(a, Role.CLIENT))
        assert raised.value.hint
        assert store.credential is None

    run(scenario)


def test_a_mistyped_ticket_is_reported(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        with pytest.raises(UserError, match="mistyped"):
            await come(network, guest(network), ticket(a)[:-1])

    run(scenario)


def test_joining_another_mesh_replaces_the_membership(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        before = await come(network, store)
        own = await come(network, store, ticket(a))
        assert own.credential.mesh == a.credential.mesh != before.credential.mesh
        assert own.incarnation == 2
        assert "leaves its previous mesh" in caplog.text
        assert own.link is not None
        await own.link.close()

    run(scenario)


def test_a_new_ticket_renews_a_void_membership(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b, store = await network.add("a"), await network.add("b"), guest(network)
        first = await come(network, store, ticket(b))
        store.peers = {NodeId(bytes(32)): ["loopback:x"]}
        again = await come(network, store, ticket(a))
        assert [own.credential.chain[-1].issuer for own in (first, again)] == [b.me, a.me]
        assert store.credential == again.credential
        assert store.peers  # other data of the mesh is kept
        for own in (first, again):
            assert own.link is not None
            await own.link.close()

    run(scenario)


def test_a_founder_keeps_its_own_credential(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        await a.close()
        own = await come(network, a.store, ticket(b))
        assert own.is_founder
        assert a.store.credential == a.credential
        assert own.link is not None
        await own.link.close()

    run(scenario)


def test_an_inviter_without_the_ticket_is_not_dialled_endlessly(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        text = ticket(a)
        a.store._change(lambda content: {**content, "invitations": []})
        began = asyncio.get_running_loop().time()
        with pytest.raises(NotAuthorised, match="Ticket rejected") as raised:
            await come(network, store, text)
        assert raised.value.hint
        assert asyncio.get_running_loop().time() - began < 2 * MAX_CLOSED * REDIAL_S

    run(scenario)


def test_a_ticket_of_this_node_does_not_replace_its_membership(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        store = guest(network)
        own = await come(network, store)
        text = store.invite(["loopback:x"], Role.NODE, lasts_s=None, uses=None).encode()
        again = await come(network, store, text)
        assert (again.credential, again.link) == (own.credential, None)

    run(scenario)


def test_the_ticket_is_not_sent_to_another_node_at_the_address(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        real = a.store.invite([b.address], Role.NODE, lasts_s=None, uses=None)
        with pytest.raises(NotAuthorised, match="Ticket rejected"):
            await come(network, guest(network), real.encode())
        assert await guest_of(network, replace(real, addresses=(b.address, a.address)).encode())

    run(scenario)


async def guest_of(network: MemberNetwork, text: str) -> Credential:
    own = await come(network, guest(network), text)
    assert own.link is not None
    await own.link.close()
    return own.credential


def test_an_inviter_must_issue_a_credential() -> None:
    class Stingy:
        granted = None

    with pytest.raises(NotAuthorised, match="issued no credential"):
        module.granted(cast("SecureLink", Stingy()))


def test_a_beacon_gives_the_address_of_the_inviter(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    @asynccontextmanager
    async def fake(code: BeaconCode, me: NodeId, hear: Any) -> Any:
        heard.append(hear)
        yield Beacon(code, me, hear)

    monkeypatch.setattr(module, "open_beacon", fake)

    async def scenario(network: MemberNetwork) -> None:
        a, store = await network.add("a"), guest(network)
        text = a.store.invite([], Role.NODE, lasts_s=None, uses=None).encode()
        options = NodeOptions(state=store.folder, join=text)
        coming = asyncio.ensure_future(enter(store, options, (network.transport,)))
        await asyncio.sleep(10)
        heard[0](a.me, (a.address,))
        own = await coming
        assert own.link is not None
        await own.link.close()

    run(scenario)


class Requester(Beacon):
    """A beacon with a bug, or one that notes when it ends."""

    bug: ClassVar[Exception | None] = None
    order: ClassVar[list[str]] = []

    async def run(self, longest_s: float = 0) -> None:
        if self.bug is not None:
            raise self.bug
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.order.append("asked")


@asynccontextmanager
async def requester(code: BeaconCode, me: NodeId, hear: Any) -> AsyncIterator[Beacon]:
    yield Requester(code, me, hear)
    Requester.order.append("closed")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_bug_of_the_queries_ends_the_joining(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr(module, "open_beacon", requester)
    monkeypatch.setattr(Requester, "bug", ZeroDivisionError())

    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        at = [a.address] if is_there else []
        text = a.store.invite(at, Role.NODE, lasts_s=None, uses=None).encode()
        options = NodeOptions(state=guest(network).folder, join=text)
        with pytest.raises(ZeroDivisionError):
            await enter(guest(network), options, (network.transport,))

    run(scenario)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[SecureLink]:
    """All links that are dialled."""
    links = list[SecureLink]()
    dial = NodeDialer.dial

    async def dial_and_keep(self: NodeDialer, *given: Any, **more: Any) -> SecureLink:
        links.append(await dial(self, *given, **more))
        return links[-1]

    monkeypatch.setattr(NodeDialer, "dial", dial_and_keep)
    return links


def test_a_bug_of_the_queries_closes_the_link_to_the_inviter(
    run: Run, monkeypatch: pytest.MonkeyPatch, dialled: list[SecureLink]
) -> None:
    monkeypatch.setattr(module, "open_beacon", requester)
    monkeypatch.setattr(Requester, "bug", ZeroDivisionError())

    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        options = NodeOptions(state=guest(network).folder, join=ticket(a))
        with pytest.raises(ZeroDivisionError):
            await enter(guest(network), options, (network.transport,))
        (link,) = dialled
        with pytest.raises(LinkLost):
            await link.send([b"hello"])

    run(scenario)


def test_a_credential_that_cannot_be_stored_closes_the_link_to_the_inviter(
    run: Run, monkeypatch: pytest.MonkeyPatch, dialled: list[SecureLink]
) -> None:
    def fail(*_: object) -> Credential:
        raise UserError("The disk is full")

    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        monkeypatch.setattr(StateStore, "join", fail)
        with pytest.raises(UserError, match="The disk is full"):
            await come(network, guest(network), ticket(a))
        (link,) = dialled
        with pytest.raises(LinkLost):
            await link.send([b"hello"])

    run(scenario)


def test_the_queries_end_before_their_beacon_closes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "open_beacon", requester)
    monkeypatch.setattr(Requester, "order", [])

    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        options = NodeOptions(state=guest(network).folder, join=ticket(a))
        own = await enter(guest(network), options, (network.transport,))
        assert own.link is not None
        await own.link.close()

    run(scenario)
    assert Requester.order == ["asked", "closed"]
