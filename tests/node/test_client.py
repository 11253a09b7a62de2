"""A client, and a fake node that answers it."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import Busy, LinkLost, NotAuthorised, TimedOut, UserError
from meshllm.names import GroupId, LossCause, NodeId, RingEntry, short, show
from meshllm.node import client as thin_module
from meshllm.node.client import (
    ASK_S,
    MODELS_S,
    REDIAL_S,
    STAGGER_S,
    MeshClient,
    _NoAdmission,
    _transports_for,
    local_of,
    open_mesh_client,
)
from meshllm.node.membership import saved_records
from meshllm.node.membership.saved_records import SavedRecords
from meshllm.node.membership.state_store import StateStore
from meshllm.node.net import beacon
from meshllm.node.net.peer_address import LocalAddressPolicy, SameHostDetector, machine_secret
from meshllm.node.requests.model_list import models_to_json
from meshllm.node.requests.router import RequestRouter
from meshllm.node.requests.waits import WAITING_S
from meshllm.protocol.membership.codec import (
    CloseReason,
    FallbackList,
    Generate,
    RequestMessage,
)
from meshllm.protocol.membership.dial_limit import BURST, PAUSE_S
from meshllm.protocol.membership.records import ModelOffer
from meshllm.protocol.ring.interruption import RingPlan
from meshllm.protocol.trust.credential import ClientLimits, Role, remove
from meshllm.protocol.trust.fallbacks import Fallback
from meshllm.protocol.trust.handshake import Purpose
from meshllm.protocol.trust.ticket import Ticket
from meshllm.request import Event, Interruption, Piece, Request, Waiting
from meshllm.strict_json import WrongField
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Link
from meshllm_loopback import LoopbackTransport, TrafficShape
from tests.builders.disk_threads import note_threads
from tests.builders.fake_node import FOX
from tests.builders.fake_ring import answer_of
from tests.builders.identities import CLIENT, CREDENTIALS, FOUNDER, LAST, MIDDLE
from tests.builders.mesh_members import MemberNetwork, MeshMember, network

REQUEST = Request(raw="what?")
ANSWER: list[Event] = [Piece("a "), Piece("ring"), answer_of("a ring", 2)]
SAID: list[Event] = [Piece("a ", (7,)), Piece("ring", (8,)), answer_of("a ring", 2)]
Scenario = Callable[[MemberNetwork], Coroutine[Any, Any, None]]
Run = Callable[[Scenario], None]


class Inn(MeshMember):
    """A node that answers requests of clients."""

    asked = 0
    pause_s = 0.1
    says: Sequence[Event] = ANSWER
    given: tuple[int, ...] = ()
    """Tokens of the latest request, which it continues."""
    loads = ""
    """What its ring waits for."""

    async def entries(
        self, model: str = "", trusted: Sequence[str] | None = None
    ) -> Sequence[RingEntry]:
        while self.loads:  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.1)
        return [RingEntry(self.me)]

    def reason(self, model: str = "") -> str:
        return ""

    def retry_s(self, model: str, waited_s: float) -> int:
        return 1

    loads_until = 0.0

    def ring_at(self, entry: RingEntry, model: str = "") -> RingPlan | None:
        return None

    def is_exact(self, entry: RingEntry, model: str = "") -> bool:
        return True

    def explain(self, before: RingPlan | None, after: RingPlan | None) -> tuple[LossCause, str]:
        raise NotImplementedError

    def is_provided(self, model: str) -> bool:
        return bool(model)

    def awaited(self, model: str) -> str:
        return self.loads

    def pinned(self, model: str) -> str:
        return model

    def shown(self, model: str) -> str:
        return model

    def of_rings(self, model: str) -> ModelOffer | None:
        return None

    def using(self, model: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def offers(self, model: str) -> dict[NodeId, ModelOffer]:
        return {self.me: ModelOffer(model)} if model else {}

    def name_of(self, node: NodeId) -> str:
        raise NotImplementedError

    def ids_of(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(show(self.me) if name == self.name else name for name in names)

    def backend(
        self, requester: NodeId | None = None, model: str = "", group: GroupId | None = None
    ) -> AbstractAsyncContextManager["Inn"]:
        return nullcontext(self)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.asked += 1
        self.given = request.given
        for event in self.says[len(self.given) :]:
            await asyncio.sleep(self.pause_s)
            yield event

    async def serve(self) -> None:
        """Begin to answer."""
        self.router = RequestRouter(self.me, self, self.links.post)
        running = asyncio.ensure_future(self.router.run())

        async def end() -> None:
            running.cancel()
            await asyncio.wait([running])

        self.stack.push_async_callback(end)
        await asyncio.sleep(0)

    def deliver_request(self, peer: NodeId, message: RequestMessage, *, is_client: bool) -> None:
        super().deliver_request(peer, message, is_client=is_client)
        self.router.receive(peer, message, is_client=is_client)

    def lost(self, peer: NodeId) -> None:
        super().lost(peer)
        self.router.lost(peer)


@pytest.fixture(autouse=True)
def _no_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Iterator[Any] = iter(())
    monkeypatch.setattr(beacon, "_sockets", lambda: nothing)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    async def main(scenario: Scenario) -> None:
        async with network(tmp_path, LoopbackTransport(TrafficShape(delay_s=0.01))) as made:
            await scenario(made)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda scenario: run_virtual(main(scenario))


async def inn(network: MemberNetwork, life: int = 1, name: str = "a") -> Inn:
    member_node = await network.add(name, life=life)
    member_node.__class__ = Inn
    assert isinstance(member_node, Inn)
    await member_node.serve()
    return member_node


def ticket(member_node: MeshMember, role: Role = Role.CLIENT, uses: int | None = None) -> str:
    return member_node.store.invite([member_node.address], role, lasts_s=None, uses=uses).encode()


def client(network: MemberNetwork, text: str) -> Any:
    return open_mesh_client(text, network.folder / "client", network.transport)


async def ask(thin: MeshClient) -> list[Event]:
    return [event async for event in thin.generate(REQUEST)]


def test_a_client_gets_an_answer(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            assert await ask(thin) == ANSWER
        assert a.talked[0][2] is True

    run(scenario)


def test_a_client_is_told_what_its_request_waits_for(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        a.loads = "b loads it"
        async with client(network, ticket(a)) as thin:
            asking = asyncio.ensure_future(ask(thin))
            await asyncio.sleep(2.5 * WAITING_S)
            a.loads = ""
            assert await asking == [Waiting("b loads it"), *ANSWER]

    run(scenario)


@pytest.mark.parametrize(("concurrency", "most"), [(0, 2), (1, 1), (2, 2)])
def test_a_client_asks_no_more_at_once_than_its_ticket_allows(
    run: Run, concurrency: int, most: int
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        limits = ClientLimits(concurrency)
        made = a.store.invite([a.address], Role.CLIENT, lasts_s=None, uses=1, limits=limits)
        async with client(network, made.encode()) as thin:
            asking = [asyncio.ensure_future(ask(thin)) for _ in range(4)]
            await asyncio.sleep(0.15)  # the first are being answered
            assert a.asked == most
            assert await asyncio.gather(*asking) == [ANSWER] * 4

    run(scenario)


def test_no_more_requests_wait_than_the_queue_holds(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thin_module, "MAX_WAITING", 2)

    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        limits = ClientLimits(1)
        made = a.store.invite([a.address], Role.CLIENT, lasts_s=None, uses=1, limits=limits)
        async with client(network, made.encode()) as thin:
            asking = [asyncio.ensure_future(ask(thin)) for _ in range(3)]
            await asyncio.sleep(0.15)  # the first is being answered
            assert (a.asked, thin.waiting) == (1, 2)
            with pytest.raises(Busy, match="1 requests are in progress, the limit of the ticket"):
                await ask(thin)
            assert await asyncio.gather(*asking) == [ANSWER] * 3
            assert (thin.waiting, await ask(thin)) == (0, ANSWER)

    run(scenario)


def test_a_client_learns_the_models_and_asks_again_later(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        lists = [[FOX], [], [FOX]]
        a.router.peers.list_models = lambda: models_to_json(lists.pop(0))
        async with client(network, ticket(a)) as thin:
            assert list(await asyncio.gather(*(thin.models() for _ in range(9)))) == [(FOX,)] * 9
            await asyncio.sleep(MODELS_S / 2)
            assert await thin.models() == (FOX,)
            await asyncio.sleep(MODELS_S)
            assert await thin.models() == ()
        assert len(lists) == 1

    run(scenario)


def test_the_models_are_asked_of_the_node_that_comes_back(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            asked = asyncio.Event()
            a.router.receive = lambda *_, **__: asked.set()  # type: ignore[method-assign]
            asking = asyncio.ensure_future(thin.models())
            await asked.wait()
            await a.close()
            a = await inn(network, life=2)
            a.router.peers.list_models = lambda: models_to_json([FOX])
            assert await asking == (FOX,)

    run(scenario)


@pytest.mark.parametrize("is_here", [True, False])
def test_models_that_nobody_tells_are_unknown(run: Run, is_here: bool) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            await ask(thin)
            if is_here:
                a.router.receive = lambda *_, **__: None  # type: ignore[method-assign]
            else:
                await a.close()
                await asyncio.sleep(5)
            begin = asyncio.get_running_loop().time()
            others = [asyncio.ensure_future(thin.models()) for _ in range(3)]
            with pytest.raises(TimedOut) as raised:
                await thin.models()
            assert asyncio.get_running_loop().time() == begin + ASK_S
            await asyncio.sleep(1)
            assert all(isinstance(each.exception(), TimedOut) for each in others)
        why = f"node {short(a.me)} does not list them" if is_here else "no node of the mesh answers"
        assert str(raised.value) == f"The models of the mesh are unknown: {why}"

    run(scenario)


def test_a_node_that_tells_nonsense_is_dropped(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            await ask(thin)
            first = thin.links.by_peer[a.me]
            a.router.peers.list_models = lambda: b"[]"
            asking = asyncio.ensure_future(thin.models())
            await asyncio.sleep(1)
            assert thin.links.by_peer.get(a.me) is not first
            a.router.peers.list_models = lambda: models_to_json([FOX])
            assert await asking == (FOX,)

    run(scenario)


def test_a_client_comes_back_without_a_ticket(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a, uses=1)
        for _ in range(2):
            async with client(network, text) as thin:
                assert await ask(thin) == ANSWER
            await asyncio.sleep(2)
        (invitation,) = a.store.invitations()
        assert len(invitation.guests) == 1

    run(scenario)


def test_several_clients_of_one_folder_run_at_once(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a, uses=2)
        async with client(network, text) as one, client(network, text) as two:
            assert list(await asyncio.gather(ask(one), ask(two))) == [ANSWER, ANSWER]
        await asyncio.sleep(2)
        async with client(network, text) as one, client(network, text) as two:
            assert list(await asyncio.gather(ask(one), ask(two))) == [ANSWER, ANSWER]
        (invitation,) = a.store.invitations()
        assert len(invitation.guests) == 2

    run(scenario)


def test_a_client_runs_next_to_the_node_of_its_folder(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        with a.store.locked():
            async with open_mesh_client(ticket(a), a.store.folder, network.transport) as thin:
                assert await ask(thin) == ANSWER

    run(scenario)


def test_more_clients_than_a_ticket_admits_are_refused_at_once(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a, uses=1)
        async with client(network, text) as one:
            with pytest.raises(UserError, match="no more clients than already run") as raised:
                async with client(network, text):
                    pass
            assert "--uses" in str(raised.value.hint)
            assert await ask(one) == ANSWER

    run(scenario)


def test_clients_of_one_ticket_are_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_module, "MAX_CLIENTS", 1)

    async def scenario(network: MemberNetwork) -> None:
        text = ticket(await inn(network))
        async with client(network, text):
            with pytest.raises(UserError, match="no more clients than already run"):
                async with client(network, text):
                    pass

    run(scenario)


def test_a_client_relinks_to_its_node(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            assert await ask(thin) == ANSWER
            await a.close()
            await asyncio.sleep(5)
            assert thin.links.by_peer == {}
            a = await inn(network, life=2)
            assert await ask(thin) == ANSWER

    run(scenario)


def test_a_client_that_begins_first_waits_for_its_node(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a)
        async with client(network, text) as thin:
            await ask(thin)
        await a.close()
        async with client(network, text) as thin:
            asking = asyncio.ensure_future(ask(thin))
            await asyncio.sleep(3 * REDIAL_S)
            assert not asking.done()
            await inn(network, life=2)
            assert await asking == ANSWER

    run(scenario)


def test_an_answer_survives_a_node_that_restarts(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        a.says = SAID
        async with client(network, ticket(a)) as thin:
            events: list[Event] = []
            async for event in thin.generate(REQUEST):
                events.append(event)
                if len(events) == 1:
                    await a.close()
                    a = await inn(network, life=2)
                    a.says = SAID
            told = [event for event in events if isinstance(event, Interruption)]
            assert [event for event in events if isinstance(event, Piece)] == SAID[:-1]
            assert [event.cause for event in told] == [LossCause.LINK_LOST]
            assert "another one answers" in told[0].text

    run(scenario)


def test_an_answer_without_tokens_ends_with_its_node(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        a.says = [Piece("a "), Piece("ring"), answer_of("a ring", 0)]  # as an engine tells it
        async with client(network, ticket(a)) as thin:
            events = thin.generate(REQUEST)
            assert await anext(events) == Piece("a ")
            await a.close()
            a = await inn(network, life=2)
            with pytest.raises(LinkLost):
                await anext(events)
            assert a.asked == 0

    run(scenario)


def test_an_answer_goes_on_at_another_node_with_the_tokens_so_far(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        nodes = [await inn(network), await inn(network, name="b")]
        for node in nodes:
            node.says = SAID
        async with client(network, ticket(nodes[0])) as thin:
            await thin.entries()
            # As its beacon does.
            thin.links.hint(nodes[1].me, [nodes[1].address], LocalAddressPolicy.YES)
            await asyncio.sleep(1)
            told = list[Event]()
            async for event in thin.generate(REQUEST):
                told.append(event)
                if len(told) == 1:
                    first, second = sorted(nodes, key=lambda node: -node.asked)
                    await first.close()
            assert "".join(event.text for event in told if isinstance(event, Piece)) == "a ring"
            assert [event.cause for event in told if isinstance(event, Interruption)] == [
                LossCause.LINK_LOST
            ]
            assert (first.asked, second.asked, second.given) == (1, 1, (7,))

    run(scenario)


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_client_of_one_ticket_goes_on_at_a_node_that_its_lost_one_told(
    run: Run, is_leaving: bool
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await inn(network, name="b")
        b.meet(a)
        for node in (a, b):
            node.says = [Piece("a ", (7,)), Piece("ring", (8,)), answer_of("a ring", 2)]
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(2)
            assert [fallback.node for fallback in thin.machine.fallbacks] == [b.me]
            assert thin.links.by_peer.keys() == {a.me}
            told, clock = list[Event](), asyncio.get_running_loop().time
            lost_at = resumed_at = 0.0
            async for event in thin.generate(REQUEST):
                told.append(event)
                resumed_at = resumed_at or (clock() if len(told) == 2 else 0.0)
                if len(told) == 1:
                    lost_at = clock()
                    await (a.links.leave() if is_leaving else a.close())
            assert "".join(event.text for event in told if isinstance(event, Piece)) == "a ring"
            assert (a.asked, b.asked, b.given) == (1, 1, (7,))
            assert thin.links.by_peer.keys() == {b.me}
            # A lost link is noticed at once here, as that of a killed process on one machine.
            assert resumed_at - lost_at < 2.0  # of the virtual clock

    run(scenario)


def was_asked(member_node: MeshMember) -> bool:
    return any(isinstance(message, Generate) for _, message, _ in member_node.talked)


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("is_restarting", [False, True])
def test_a_request_goes_on_at_the_node_that_it_trusts_and_is_sent_to_no_other(
    run: Run, is_restarting: bool, is_named: bool
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await inn(network, name="b")
        b.meet(a)
        a.says = [Piece("a ", (7,)), Piece("ring", (8,)), answer_of("a ring", 2)]
        text = ticket(a)
        request = replace(REQUEST, trusted=("a",) if is_named else (show(a.me),))
        async with client(network, text) as thin:
            await asyncio.sleep(2)
            told = list[Event]()
            async for event in thin.generate(request):
                told.append(event)
                if len(told) == 1 and is_restarting:
                    await a.close()
                    await asyncio.sleep(5)
                    assert thin.links.by_peer.keys() == {b.me}
                    says, a = a.says, await inn(network, life=2)
                    a.says = says
                elif len(told) == 1:
                    await a.links.by_peer[thin.me].close()
            assert "".join(event.text for event in told if isinstance(event, Piece)) == "a ring"
            assert a.given == (7,)
            assert await ask(thin)  # any may read this one
        assert not was_asked(b) or b.given == ()

    run(scenario)


def test_a_request_is_sent_to_the_node_that_it_trusts_and_not_to_the_inviter(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await inn(network, name="b")
        b.meet(a)
        request = replace(REQUEST, trusted=(show(b.me),))
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(2)
            assert thin.links.by_peer.keys() == {a.me}
            assert [event async for event in thin.generate(request)] == ANSWER
            await b.close()
            await asyncio.sleep(5)
            with pytest.raises(TimedOut, match="no node that the request trusts answers"):
                await anext(thin.generate(request))
        assert (was_asked(a), was_asked(b)) == (False, True)

    run(scenario)


def test_a_request_that_trusts_no_known_node_is_refused_and_sent_to_none(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await inn(network, name="b")
        b.meet(a)
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(2)
            for trusted in ((), (show(LAST.node),)):
                with pytest.raises(WrongField, match="knows no node that the request trusts"):
                    await anext(thin.generate(replace(REQUEST, trusted=trusted)))
            assert await ask(thin) == ANSWER
        assert ([message for _, message, _ in b.talked], a.asked) == ([], 1)

    run(scenario)


@pytest.mark.parametrize("delay_s", [0.02, 0.1, 0.2, 0.4])
def test_a_client_keeps_one_link_after_a_loss_however_slow_the_path(
    tmp_path: Path, delay_s: float
) -> None:
    async def main() -> None:
        async with network(tmp_path, LoopbackTransport(TrafficShape(delay_s=delay_s))) as made:
            member_nodes = [await inn(made, name=name) for name in "abcde"]
            for member_node in member_nodes[1:]:
                member_node.meet(member_nodes[0])
            async with client(made, ticket(member_nodes[0])) as thin:
                await asyncio.sleep(8)
                assert len(thin.machine.fallbacks) == 4
                await member_nodes[0].close()
                await asyncio.sleep(30)
                assert len(thin.links.by_peer) == 1
                assert sum(thin.me in member_node.peers for member_node in member_nodes[1:]) == 1

    run_virtual(main())


@pytest.mark.parametrize("down_s", [0.3, 0.8])
def test_a_client_dials_its_only_node_again_soon_after_that_refused(
    run: Run, down_s: float
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, clock = await inn(network), asyncio.get_running_loop().time
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(30)
            await a.close()
            await asyncio.sleep(down_s)
            back = clock()
            await inn(network, life=2)
            await thin.entries()
            assert clock() - back < REDIAL_S + 2 * STAGGER_S  # of the virtual clock

    run(scenario)


def test_a_client_tries_the_nodes_it_was_told_until_one_answers(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        names = "abcd"
        member_nodes = [await inn(network, name=name) for name in names]
        for member_node in member_nodes[1:]:
            member_node.meet(member_nodes[0])
        async with client(network, ticket(member_nodes[0])) as thin:
            await asyncio.sleep(2)
            order = [fallback.node for fallback in thin.machine.fallbacks]
            assert set(order) == {member_node.me for member_node in member_nodes[1:]}
            for member_node in member_nodes:
                if member_node.me != order[-1]:
                    await member_node.close()
            await asyncio.sleep(5)
            assert thin.links.by_peer.keys() == {order[-1]}
            assert await ask(thin) == ANSWER

    run(scenario)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_node_that_tells_lists_without_end_has_few_of_them_saved(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    saved = list[int]()
    save = saved_records.save_records

    def counted(store: StateStore, records: SavedRecords) -> None:
        save(store, records)
        saved.append(len(store.peers))

    monkeypatch.setattr(saved_records, "save_records", counted)

    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(5)
            saved.clear()
            for number in range(100):
                nodes = [NodeId(bytes([1 if is_same else number, each]) * 16) for each in range(8)]
                told = tuple(Fallback(node, b"", ("ws://192.0.2.7:1",)) for node in nodes)
                a.links.post(thin.me, FallbackList(told))
                await asyncio.sleep(0.05)
            assert len(thin.machine.fallbacks) == 8
            await asyncio.sleep(5)

    run(scenario)

    assert set(saved) == {8}
    assert len(saved) <= (2 if is_same else 7)  # a save each second for 5 s, and those at its ends


def test_a_client_reads_and_writes_its_state_off_the_loop(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        threads = note_threads(network.folder / "client", monkeypatch)
        async with client(network, ticket(a)) as thin:
            await ask(thin)
            thin.records.changed()
        assert threads
        assert threading.get_ident() not in threads

    run(scenario)


def test_what_a_client_is_told_last_is_saved_when_it_ends(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a)
        async with client(network, text) as thin:
            await asyncio.sleep(5)
            a.links.post(thin.me, FallbackList((Fallback(LAST.node, b"", ("loopback:x",)),)))
            await asyncio.sleep(0.1)
            assert thin.machine.fallbacks
        async with client(network, text) as thin:
            assert [each.node for each in thin.machine.fallbacks] == [LAST.node]

    run(scenario)


def test_a_client_that_starts_again_knows_the_nodes_that_it_was_told(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await inn(network, name="b")
        b.meet(a)
        text = ticket(a)
        async with client(network, text):
            await asyncio.sleep(2)
        await a.close()
        async with client(network, text) as thin:
            assert await ask(thin) == ANSWER
            assert thin.links.by_peer.keys() == {b.me}

    run(scenario)


@pytest.mark.parametrize("is_here", [False, True])
def test_a_client_dials_no_address_of_this_machine_that_a_node_elsewhere_tells(
    is_here: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ("ws://127.0.0.1:6379", "ws://169.254.169.254:80", "ws://localhost:5432")
    dialled = list[str]()

    class Recording(LoopbackTransport):
        async def dial(self, address: str) -> Link:
            dialled.append(address)
            return await super().dial(address)

    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        monkeypatch.setattr(thin_module, "by_scheme", lambda _: {"ws": Recording()})
        async with client(network, ticket(a)) as thin:
            here = SameHostDetector(machine_secret(), thin.mesh)
            lie = Fallback(LAST.node, here.tag(LAST.node), addresses)  # all members know its tag
            tag = here.tag(a.me) if is_here else here.tag(LAST.node)
            a.links.post(thin.me, FallbackList((lie,), tag))
            await asyncio.sleep(1)
            assert thin.machine.fallbacks == (lie,)
            await a.close()
            await asyncio.sleep(60)

    run(scenario)

    tried = Counter(dialled)
    assert set(tried) == (set(addresses) if is_here else set())
    assert all(BURST <= times <= BURST + 60 / PAUSE_S for times in tried.values())


def test_a_fallback_is_on_this_machine_only_if_its_teller_is_there_too() -> None:
    here = SameHostDetector(b"this machine", CREDENTIALS[CLIENT.node].mesh)
    local = ("ws://127.0.0.1:22",)
    told = [
        Fallback(LAST.node, here.tag(LAST.node), local),
        Fallback(MIDDLE.node, here.tag(LAST.node), local),
        Fallback(MIDDLE.node, b"", local),
    ]
    tellers = [here.tag(FOUNDER.node), here.tag(LAST.node), b""]

    found = [local_of(here, (FOUNDER.node, tag), fallback) for tag in tellers for fallback in told]
    unknown = local_of(None, (FOUNDER.node, tellers[0]), told[0])

    assert (found, unknown) == (
        [LocalAddressPolicy.HERE, *[LocalAddressPolicy.NO] * 8],
        LocalAddressPolicy.NO,
    )


def test_a_client_refuses_a_fallback_that_is_another_node_or_was_removed(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await inn(network, name="b")
        b.meet(a)
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(2)
            (fallback,) = thin.machine.fallbacks
            publish_removal(a, b.me, thin.machine.me)
            await asyncio.sleep(2)
            assert thin.machine.fallbacks == ()  # and if a node told it all the same:
            thin.machine.fallbacks = (fallback, replace(fallback, node=NodeId(bytes(32))))
            await a.close()
            await asyncio.sleep(10)
            assert thin.links.by_peer == {}
        assert b.asked == 0

    run(scenario)


def test_closing_ends_the_answer(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            async with aclosing(thin.generate(REQUEST)) as events:
                await anext(events)
            await asyncio.sleep(1)
            assert (a.asked, a.router.peers._running) == (1, {})

    run(scenario)


def test_a_ticket_for_a_node_is_not_used_up_by_a_client(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        with pytest.raises(UserError, match="The ticket is for a node"):
            async with client(network, ticket(a, Role.NODE)):
                pass

    run(scenario)


def test_a_rejection_is_reported(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a, uses=1)
        async with client(network, text):
            pass
        with pytest.raises(NotAuthorised, match="used up") as raised:
            async with open_mesh_client(text, network.folder / "other", network.transport):
                pass
        assert "`meshllm ring ticket --role client`" in str(raised.value.hint)

    run(scenario)


def publish_removal(by: MeshMember, node: NodeId, *spared: NodeId) -> None:
    """Remove a member."""
    removal = remove(by.store.key, by.credential.mesh, node, 1, spared)
    by.links.act(by.machine.remove(removal, asyncio.get_running_loop().time()))


def test_a_removed_client_is_told_so_now_and_at_its_next_start(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        text = ticket(a)
        async with client(network, text) as thin:
            await ask(thin)
            publish_removal(a, thin.machine.me)
            with pytest.raises(NotAuthorised, match="is removed from the mesh") as raised:
                await ask(thin)
            assert "ask a member for a new ticket" in str(raised.value.hint)
            await asyncio.sleep(20)
            assert thin.links.by_peer == {}
            assert thin.reason() == "no node of the mesh answers"
            assert thin.retry_s("", 30.0) == 30
        await a.close()
        with pytest.raises(NotAuthorised, match="is removed from the mesh"):
            async with client(network, text):
                pass

    run(scenario)


def test_a_client_of_a_removed_inviter_is_told_so(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await network.add("b")
        b.meet(a)
        async with client(network, ticket(b)) as thin:
            await asyncio.sleep(1)
            thin.links.hint(a.me, [a.address])
            await asyncio.sleep(2)
            assert thin.links.by_peer.keys() == {a.me, b.me}
            publish_removal(a, b.me)
            with pytest.raises(NotAuthorised, match="was invited by"):
                await ask(thin)

    run(scenario)


def test_a_client_asks_no_removed_member_even_after_a_restart(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await inn(network), await network.add("b")
        b.meet(a)
        text = ticket(b)
        async with client(network, text) as thin:
            await asyncio.sleep(1)
            thin.links.hint(a.me, [a.address])
            await asyncio.sleep(2)
            publish_removal(a, b.me, thin.machine.me)
            await asyncio.sleep(1)
            assert await ask(thin) == ANSWER
            assert thin.links.by_peer.keys() == {a.me}
        async with client(network, text) as thin:
            assert await ask(thin) == ANSWER
            await asyncio.sleep(20)  # its inviter, which was removed, still listens
            assert thin.links.by_peer.keys() == {a.me}  # which the inviter told once
        assert b.talked == []

    run(scenario)


def test_a_client_that_cannot_save_removals_goes_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise UserError("The disk is full")

    monkeypatch.setattr(saved_records, "save_records", fail)

    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            await ask(thin)
            assert await ask(thin) == ANSWER
        assert "The disk is full" in caplog.text

    run(scenario)


def test_a_client_serves_no_requests(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await inn(network)
        async with client(network, ticket(a)) as thin:
            await asyncio.sleep(1)
            with pytest.raises(LinkLost, match="A client does not serve requests"):
                thin.backend()
            link = thin.links.by_peer[a.me]
            await thin.ring(link)
            with pytest.raises(LinkLost):
                await link.send([b""])
            thin.dropped(a.me, CloseReason.LEAVING)
        with pytest.raises(UserError, match="does not accept links"):
            await _NoAdmission().authorize(a.me, a.credential, Purpose.MESH, 1)

    run(scenario)


def test_the_transport_is_chosen_by_the_addresses(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        made = await network.add("a")
        text = ticket(made)
        from meshllm.protocol.trust.ticket import parse_ticket

        assert [each.name for each in _transports_for(parse_ticket(text))] == ["loopback"]

    run(scenario)


@pytest.mark.parametrize(
    ("addresses", "listed"), [(("carrier:pigeon",), "`carrier:pigeon`"), ((), "it has none")]
)
def test_addresses_without_a_transport_are_reported(
    addresses: tuple[str, ...], listed: str
) -> None:
    odd = Ticket(NodeId(bytes(32)), addresses, Role.CLIENT, 0, bytes(16))

    with pytest.raises(UserError, match="No installed transport dials an address") as raised:
        _transports_for(odd)

    assert f"of the ticket ({listed})" in str(raised.value)
    assert "loopback" in str(raised.value.hint)


async def test_a_mistyped_ticket_is_reported_before_any_file_is_created(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Invalid ticket"):
        async with open_mesh_client("nonsense", tmp_path / "client"):
            pass

    assert not (tmp_path / "client").exists()


@pytest.mark.parametrize("where", ["task", "timer"])
def test_a_bug_ends_the_requests_of_a_client(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def seek(*_: object) -> None:
        await asyncio.sleep(0.5)
        if where == "task":
            fail()
        asyncio.get_running_loop().call_soon(fail)

    monkeypatch.setattr(MeshClient, "_redial", seek)

    async def scenario(network: MemberNetwork) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        a = await inn(network)
        a.pause_s = 100.0
        async with client(network, ticket(a)) as thin:
            with pytest.raises((ZeroDivisionError, ExceptionGroup)) as raised:
                await ask(thin)
        error = raised.value
        assert isinstance(error, ZeroDivisionError) is (where == "timer")

    run(scenario)
