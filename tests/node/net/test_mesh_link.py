"""Members that connect, dial each other at once, fall silent and leave, on a virtual clock."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from meshllm.errors import LinkLost, NotAuthorised
from meshllm.names import NodeId
from meshllm.node.net import mesh_link as module
from meshllm.node.net.peer_address import LocalAddressPolicy
from meshllm.node.net.secure import HandshakeClosed, SecureLink, secure_accept, secure_dial
from meshllm.protocol.membership.actions import Dial
from meshllm.protocol.membership.codec import (
    MAX_REQUEST_BYTES,
    AnswerEvent,
    CloseReason,
    Generate,
    encode,
)
from meshllm.protocol.membership.link_table import SILENCE
from meshllm.protocol.membership.read_budget import CLIENT_BYTES_PER_S
from meshllm.protocol.membership.records import MAX_MEMBERS, Lifecycle
from meshllm.protocol.trust.credential import Credential, Role, remove
from meshllm.protocol.trust.handshake import Purpose
from meshllm.testing.clock import run_virtual
from meshllm.transport.contract import Channel, Link
from meshllm.transport.half_open import Limits
from meshllm_loopback import LoopbackTransport, TrafficShape
from meshllm_loopback.transport import _LoopbackListener as LoopbackListener
from meshllm_quic.link import admission as quic
from meshllm_websocket import listener as websocket
from tests.builders.mesh_members import MemberNetwork, MeshMember, network

ASK = b"i" * 16
Scenario = Callable[[MemberNetwork], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Run a scenario in a slow network; check that no task is left."""

    async def main(scenario: Scenario) -> None:
        async with network(tmp_path, LoopbackTransport(TrafficShape(delay_s=0.01))) as made:
            await scenario(made)
        await asyncio.sleep(2)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    return lambda scenario: run_virtual(main(scenario))


Run = Callable[[Scenario], None]


async def pair(network: MemberNetwork) -> tuple[MeshMember, MeshMember]:
    """Link two nodes."""
    a, b = await network.add("a"), await network.add("b")
    b.meet(a)
    await asyncio.sleep(2)
    assert (a.peers, b.peers) == ({b.me}, {a.me})
    return a, b


async def dial(
    member_node: MeshMember, other: MeshMember, purpose: Purpose = Purpose.MESH
) -> SecureLink:
    """Dial as a member that is driven by the test."""
    link = await member_node.transport.dial(other.address)
    return await secure_dial(link, member_node.own, purpose, expect=other.me, now_s=0, removals={})


async def crowd(network: MemberNetwork, member_node: MeshMember, count: int) -> list[Link]:
    """Dial as strangers, all at once."""
    return await asyncio.gather(
        *(network.transport.dial(member_node.address) for _ in range(count))
    )


async def read_all(link: SecureLink) -> None:
    while True:
        await link.receive()


def test_two_nodes_meet(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        await asyncio.sleep(60)
        both = {a.me, b.me}
        assert a.machine.alive == b.machine.alive == both
        assert set(a.machine.profiles) == set(b.machine.profiles) == both
        assert (a.peers, b.peers) == ({b.me}, {a.me})
        assert a.machine.links[b.me].round_trip_us == 20_000
        assert a.lost_ones == b.lost_ones == []

    run(scenario)


def test_a_node_that_meets_one_meets_all(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        others = [await network.add(name) for name in "bcde"]
        for other in others:
            other.meet(a)
        await asyncio.sleep(5)
        everyone = {member_node.me for member_node in network.member_nodes.values()}
        for member_node in network.member_nodes.values():
            assert member_node.peers == everyone - {member_node.me}
            assert member_node.machine.alive == everyone

    run(scenario)


@pytest.mark.parametrize("apart_s", [0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.3])
def test_crossing_dials_leave_one_link(run: Run, apart_s: float) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        for one, other in ((a, b), (b, a)):
            one.meet(other)
            await asyncio.sleep(apart_s)
        await asyncio.sleep(10)
        assert (a.peers, b.peers) == ({b.me}, {a.me})
        a.links.post(b.me, AnswerEvent(ASK, b"one"))
        b.links.post(a.me, AnswerEvent(ASK, b"two"))
        await asyncio.sleep(1)
        assert b.talked == [(a.me, AnswerEvent(ASK, b"one"), False)]
        assert a.talked == [(b.me, AnswerEvent(ASK, b"two"), False)]

    run(scenario)


def test_a_probed_peer_hears_a_beat_at_once(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        heard = b.machine.links[a.me].heard
        a.links.probe(b.me)
        await asyncio.sleep(0.02)
        assert b.machine.links[a.me].heard > heard

    run(scenario)


def test_a_lost_link_is_dialled_again(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        await a.links.by_peer[b.me].close()
        await asyncio.sleep(0.1)
        assert a.lost_ones == [b.me]
        await asyncio.sleep(20)
        assert (a.peers, b.peers) == ({b.me}, {a.me})

    run(scenario)


def test_a_restarted_node_has_another_incarnation(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        await b.close()
        await asyncio.sleep(1)
        assert not a.peers
        assert a.machine.alive == {a.me}
        again = await network.add("b", life=2)
        again.meet(a)
        await asyncio.sleep(3)
        assert a.peers == {b.me}
        assert a.machine.alive == again.machine.alive == {a.me, b.me}

    run(scenario)


def test_a_silent_peer_is_dropped(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        link = await dial(b, a)
        await asyncio.sleep(1)
        assert a.peers == {b.me}
        await asyncio.sleep(SILENCE)
        assert a.peers == set()
        with pytest.raises(LinkLost):
            await read_all(link)

    run(scenario)


def test_a_peer_that_does_not_read_is_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 10_000)

    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        await dial(b, a)
        await asyncio.sleep(0.1)
        assert a.peers == {b.me}
        for _ in range(1000):  # the link itself buffers 256
            a.links.post(b.me, AnswerEvent(ASK, bytes(100)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert a.peers == set()
        assert a.lost_ones == [b.me]

    run(scenario)


def test_heartbeats_are_not_blocked_by_answers(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        reads, stop = 0, asyncio.Event()

        def stuck(*_: object, **__: object) -> None:
            nonlocal reads
            reads += 1

        b.deliver_request = stuck  # type: ignore[method-assign]  # it reads slowly
        for _ in range(2000):
            a.links.post(b.me, AnswerEvent(ASK, bytes(1000)))
        await asyncio.sleep(20)
        assert (a.peers, reads, stop.is_set()) == ({b.me}, 2000, False)

    run(scenario)


def test_the_reason_of_leaving_arrives(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        began = asyncio.get_running_loop().time()
        await b.links.leave()
        assert asyncio.get_running_loop().time() - began < module.FAREWELL_S
        await asyncio.sleep(1)
        assert a.byes == [(b.me, CloseReason.LEAVING)]
        assert (a.peers, b.peers) == (set(), set())
        assert a.machine.states[b.me].lifecycle is Lifecycle.LEFT
        await asyncio.sleep(30)
        assert a.peers == set()  # a node that has left is not dialled

    run(scenario)


def test_a_leaving_node_has_left_for_all(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        c = await network.add("c")
        c.meet(a)
        await asyncio.sleep(3)
        await b.links.leave()
        await asyncio.sleep(1)
        for member_node in (a, c):
            assert member_node.machine.states[b.me].lifecycle is Lifecycle.LEFT
            assert member_node.machine.alive == {a.me, c.me}

    run(scenario)


def test_leaving_does_not_wait_for_a_peer_that_does_not_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        await dial(b, a)
        await asyncio.sleep(0.1)
        monkeypatch.setattr(SecureLink, "send", never)  # a full pipe
        began = asyncio.get_running_loop().time()
        await a.links.leave()
        assert asyncio.get_running_loop().time() - began == pytest.approx(module.FAREWELL_S)

    run(scenario)


async def never(*_: object) -> None:
    await asyncio.Event().wait()


def test_a_removal_closes_the_link_at_once(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        c = await network.add("c")
        c.meet(a)
        await asyncio.sleep(3)
        removal = remove(a.store.key, a.credential.mesh, b.me, 1)
        a.links.act(a.machine.remove(removal, asyncio.get_running_loop().time()))
        assert (a.peers, a.lost_ones) == ({c.me}, [b.me])
        await asyncio.sleep(0.5)
        assert c.peers == {a.me}
        assert (a.me, CloseReason.REMOVED) in b.byes
        b.meet(a)
        await asyncio.sleep(20)
        assert a.peers == {c.me}

    run(scenario)


def test_a_removal_closes_links_for_weights_and_admits_no_others(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        c = await network.add("c")
        c.meet(a)
        await asyncio.sleep(3)
        served = list[NodeId]()

        async def serve(link: SecureLink) -> None:
            with suppress(LinkLost):
                while True:
                    await link.receive()
                    served.append(link.peer)

        a.send_weights = serve
        links = [await each.links.dial_weights(a.me) for each in (b, c)]
        await asyncio.sleep(1)
        removal = remove(a.store.key, a.credential.mesh, b.me, 1)
        a.links.act(a.machine.remove(removal, asyncio.get_running_loop().time()))
        await asyncio.sleep(1)

        async with asyncio.timeout(9):
            with pytest.raises(LinkLost):
                await links[0].receive()
        await links[1].send([b"more"])
        await asyncio.sleep(1)
        assert served == [c.me]
        assert [each.peer for each in a.links._served] == [c.me]
        await links[1].close()
        await asyncio.sleep(1)
        assert not a.links._served

    run(scenario)


@pytest.mark.parametrize("purpose", [Purpose.RING, Purpose.WEIGHTS, Purpose.TRAINING])
def test_a_member_that_is_removed_during_its_handshake_gets_no_link(
    run: Run, monkeypatch: pytest.MonkeyPatch, purpose: Purpose
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        accept = secure_accept

        async def slow(*args: Any) -> SecureLink:
            link = await accept(*args)
            removal = remove(a.store.key, a.credential.mesh, b.me, 1)
            a.links.act(a.machine.remove(removal, asyncio.get_running_loop().time()))
            return link

        monkeypatch.setattr(module, "secure_accept", slow)
        a.send_weights = a.train = never
        link = await dial(b, a, purpose)
        async with asyncio.timeout(9):
            with pytest.raises(LinkLost):
                await link.receive()
        assert a.rings == []

    run(scenario)


def test_a_member_that_is_known_to_be_removed_is_not_dialled(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        removal = remove(a.store.key, a.credential.mesh, b.me, 1)
        a.links.act(a.machine.remove(removal, asyncio.get_running_loop().time()))
        await asyncio.sleep(1)
        stays, dialled = NodeId(bytes(32)), list[list[str]]()

        async def dial(own: object, addresses: list[str], *_: object, **__: object) -> None:
            if own is a.dialer:
                dialled.append(addresses)
            raise LinkLost("nobody is there")

        monkeypatch.setattr(type(a.dialer), "dial", dial)
        for peer, name in ((b.me, "removed"), (stays, "stays")):
            a.links.hint(peer, [f"{name}, as saved"])
            a.links.redial(peer, [f"{name}, as told"], LocalAddressPolicy.NO)
        await asyncio.sleep(1)
        assert dialled == [["stays, as saved"], ["stays, as told"]]

    run(scenario)


def test_a_second_process_with_the_same_key_is_rejected(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        twin = MeshMember("twin", b.store, b.credential, network.transport, 2)
        network.member_nodes["twin"] = twin
        await twin.open()
        twin.meet(a)
        await asyncio.sleep(1)
        assert twin.byes == [(a.me, CloseReason.DUPLICATE)]
        assert a.peers == {b.me}
        assert set(a.machine.links) == {b.me}

    run(scenario)


def test_a_client_gets_answers_and_no_gossip(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        client = await network.add("client", Role.CLIENT)
        client.meet(a)
        await asyncio.sleep(2)
        client.links.post(a.me, Generate(ASK, b"{}"))
        await asyncio.sleep(10)
        assert client.peers == {a.me}
        assert dict(client.machine.profiles) == {}
        assert a.talked == [(client.me, Generate(ASK, b"{}"), True)]
        assert client.me not in {*a.machine.alive, *b.machine.alive, *a.machine.profiles}

    run(scenario)


def test_clients_that_flood_a_node_are_read_slowly_and_others_at_once(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        clients = [await network.add(name, Role.CLIENT) for name in ("one", "two", "three")]
        links = [await dial(client, a) for client in clients[:2]]
        long = Generate(ASK, bytes(CLIENT_BYTES_PER_S))
        floods = [asyncio.create_task(flood(link, long)) for link in links]
        await asyncio.sleep(10)
        links.append(await dial(clients[2], a))
        await links[2].send([encode(Generate(ASK, b"short"))], Channel.DATA)
        b.links.post(a.me, Generate(ASK, bytes(2 * CLIENT_BYTES_PER_S)))
        await asyncio.sleep(0.5)
        heard = [peer for peer, _, _ in a.talked]
        assert {clients[2].me, b.me} <= set(heard)
        assert 8 <= sum(peer in {each.me for each in clients[:2]} for peer in heard) <= 12
        for task in floods:
            task.cancel()
        for link in links:
            await link.close()

    run(scenario)


def test_clients_that_send_much_do_not_make_a_node_drop_members(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        links = [await dial(await network.add(name, Role.CLIENT), a) for name in "cd"]
        long = Generate(ASK, bytes(MAX_REQUEST_BYTES - 100))
        for link in links:
            await link.send([encode(long)], Channel.DATA)
        await asyncio.sleep(0.02)
        b.links.post(a.me, long)
        await asyncio.sleep(SILENCE + 1)
        assert a.talked[2:] == [(b.me, long, False)]
        assert b.me not in a.lost_ones
        for link in links:
            await link.close()

    run(scenario)


async def flood(link: SecureLink, message: Generate) -> None:
    with suppress(LinkLost):
        while True:
            await link.send([encode(message)], Channel.DATA)


def test_only_nodes_open_ring_links(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        client = await network.add("client", Role.CLIENT)
        link = await b.links.dial_ring(a.me)
        refused = await dial(client, a, Purpose.RING)
        with pytest.raises(LinkLost):
            await refused.receive()
        assert [each.peer for each in a.rings] == [b.me]
        assert (link.purpose, a.rings[0].purpose) == (Purpose.RING, Purpose.RING)
        assert (a.peers, b.peers) == ({b.me}, {a.me})

    run(scenario)


def test_a_link_for_a_purpose_of_a_later_version_is_refused_and_no_other(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        ring = await b.links.dial_ring(a.me)

        with pytest.raises(NotAuthorised, match="Purpose 9 of a link is unknown to the dialled"):
            await b.links._dial_member(a.me, cast("Purpose", 9))

        await asyncio.sleep(SILENCE + 1)
        assert (a.peers, b.peers) == ({b.me}, {a.me})
        await ring.send([b"rows"])
        assert await a.rings[0].receive() == (Channel.DATA, b"rows")

    run(scenario)


def test_an_unknown_node_cannot_be_dialled(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        with pytest.raises(LinkLost, match="it has none"):
            await a.links.dial_ring(NodeId(bytes(32)))

    run(scenario)


def test_hints_are_rate_limited(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, dialled = await network.add("a"), list[list[str]]()

        async def dial(_: object, addresses: list[str], *__: object, **___: object) -> None:
            dialled.append(addresses)
            raise LinkLost("nobody is there")

        monkeypatch.setattr(type(a.dialer), "dial", dial)
        a.links.hint(a.me, ["loopback:a"])
        for _ in range(3):
            a.links.hint(NodeId(bytes(32)), ["loopback:x"])
        a.links.hint(NodeId(bytes(32)), ["loopback:y"])  # where it is now
        await asyncio.sleep(module.HINT_S)
        assert dialled == [["loopback:x"], ["loopback:y"]]
        for number in range(1000):  # a member invents them
            a.links.hint(NodeId(number.to_bytes(32)), ["loopback:x"])
        await asyncio.sleep(1)
        assert len(dialled) == 2 + module.MAX_HINTED

    run(scenario)


def test_hints_after_the_end_are_ignored(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a = await network.add("a")
        await a.close()
        a.links.hint(NodeId(bytes(32)), ["loopback:x"])
        a.links.redial(NodeId(bytes(32)), ["loopback:x"], LocalAddressPolicy.LITERAL)

    run(scenario)


def test_failed_hints_do_not_delay_the_dials_of_the_machine(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        dialled = list[tuple[str, ...]]()

        async def dial(own: object, addresses: tuple[str, ...], *_: object, **__: object) -> None:
            if own is a.dialer:
                dialled.append(addresses)
            raise LinkLost("nobody is there")

        monkeypatch.setattr(type(a.dialer), "dial", dial)
        await a.links.by_peer[b.me].close()
        for _ in range(40):
            a.links.hint(b.me, ("loopback:saved",))
            await asyncio.sleep(module.HINT_S + 1)
        later = len(dialled) // 2
        assert (b.address,) in dialled[later:]

    run(scenario)


def test_invented_peers_are_dialled_a_limited_number_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, dialled = await network.add("a"), list[tuple[str, ...]]()

        async def dial(_: object, addresses: tuple[str, ...], *__: object, **___: object) -> None:
            dialled.append(addresses)
            await asyncio.sleep(10)
            raise LinkLost("nobody is there")

        monkeypatch.setattr(type(a.dialer), "dial", dial)
        for number in range(MAX_MEMBERS + 9):
            a.links.act([Dial(NodeId(number.to_bytes(32)), ("loopback:x",))])
        await asyncio.sleep(9)
        assert len(dialled) == MAX_MEMBERS
        await asyncio.sleep(2)
        a.links.act([Dial(NodeId(bytes(32)), ("loopback:y",))])
        await asyncio.sleep(11)
        assert dialled[MAX_MEMBERS:] == [("loopback:y",)]

    run(scenario)


def test_a_peer_is_redialled_once_at_a_time_until_it_is_given_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, dialled, ended = await network.add("a"), list[list[str]](), list[list[str]]()

        async def dial(_: object, addresses: list[str], *__: object, **___: object) -> None:
            dialled.append(addresses)
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(addresses)
            raise LinkLost("nobody is there")

        monkeypatch.setattr(type(a.dialer), "dial", dial)
        peers = [NodeId(bytes([number]) * 32) for number in range(2)]

        def redial() -> None:
            for peer, address in zip(peers, "xy", strict=True):
                a.links.redial(peer, [address], LocalAddressPolicy.NO)

        redial()
        redial()
        await asyncio.sleep(1)
        assert (dialled, ended) == ([["x"], ["y"]], [])
        a.links.give_up(lambda peer: peer == peers[1])
        redial()  # of the first, at once
        await asyncio.sleep(1)
        assert (dialled, ended) == ([["x"], ["y"], ["x"]], [["x"]])
        await asyncio.sleep(60)
        redial()  # they have failed
        a.links.give_up(lambda _: False)  # before they begin
        redial()
        await asyncio.sleep(1)
        assert (dialled[3:], ended[1:]) == ([["x"], ["y"]], [["y"], ["x"]])

    run(scenario)


def test_unknown_peers_do_no_harm(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        strangers = await crowd(network, a, module.MAX_HANDSHAKES + 5)
        for number, link in enumerate(strangers):
            if number % 2:
                await link.send([b"GET / HTTP/1.1"], Channel.CONTROL)
        await asyncio.sleep(30)  # silent ones time out
        c = await network.add("c")
        c.meet(a)
        await asyncio.sleep(3)
        assert a.peers == {b.me, c.me}

    run(scenario)


@pytest.mark.parametrize("limits", [quic.LIMITS, websocket.LIMITS], ids=["quic", "websocket"])
def test_handshakes_of_as_many_strangers_as_a_transport_keeps_delay_no_member(
    run: Run, limits: Limits
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        await crowd(network, a, limits.total - 1)
        b.meet(a)
        await asyncio.sleep(1)
        assert a.peers == {b.me}

    run(scenario)


def test_a_link_is_taken_only_when_its_handshake_can_begin(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HANDSHAKES", 2)

    async def scenario(network: MemberNetwork) -> None:
        taken, begun = list[Link](), list[Link]()
        take = LoopbackListener.__anext__

        async def note(listener: LoopbackListener) -> Link:
            taken.append(link := await take(listener))
            return link

        async def begin(link: Link, *args: Any) -> SecureLink:
            begun.append(link)
            return await secure_accept(link, *args)

        monkeypatch.setattr(LoopbackListener, "__anext__", note)
        monkeypatch.setattr("meshllm.node.net.mesh_link.secure_accept", begin)
        a = await network.add("a")
        await crowd(network, a, 4)
        await asyncio.sleep(1)  # silent ones are given two

        assert (len(taken), taken) == (2, begun)
        await asyncio.sleep(2)
        assert (len(taken), taken) == (4, begun)

    run(scenario)


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x01\x63", b"\x63\x01", bytes(99)])
def test_a_protocol_violation_closes_the_link(run: Run, data: bytes) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")
        link = await dial(b, a)
        await asyncio.sleep(0.1)
        await link.send([data], Channel.CONTROL)
        await asyncio.sleep(0.1)
        assert a.peers == set()
        assert a.lost_ones == [b.me]

    run(scenario)


def test_a_bug_closes_its_link_and_not_the_node(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)

        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(a, "deliver_request", broken)
            b.links.post(a.me, AnswerEvent(ASK, b""))
            await asyncio.sleep(0.1)
        assert "bug in a link" in caplog.text
        await asyncio.sleep(20)
        assert a.peers == {b.me}

    run(scenario)


def test_a_bug_of_the_gate_does_not_end_the_node(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await network.add("a"), await network.add("b")

        def broken(*_: object) -> Credential:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr("meshllm.node.membership.admission.MemberAdmission.authorize", broken)
            with pytest.raises(LinkLost):
                await dial(b, a)
        assert "bug in a link" in caplog.text
        b.meet(a)
        await asyncio.sleep(2)
        assert a.peers == {b.me}

    run(scenario)


def test_a_rejected_link_is_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshllm")

    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        now = asyncio.get_running_loop().time()
        removal = remove(a.store.key, a.credential.mesh, b.me, 1)
        a.links.act(a.machine.remove(removal, now))
        with pytest.raises(HandshakeClosed):
            await dial(b, a)
        assert "rejected an incoming link" in caplog.text
        assert "is removed from the mesh" in caplog.text

    run(scenario)


def test_a_node_that_stops_while_rejecting_leaves_nothing(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        await dial(b, a)  # a second one of the same process
        await asyncio.sleep(0.015)
        await a.close()

    run(scenario)


def test_a_node_that_stops_closes_its_links(run: Run) -> None:
    async def scenario(network: MemberNetwork) -> None:
        a, b = await pair(network)
        link = a.links.by_peer[b.me]
        await a.close()
        with pytest.raises(LinkLost):
            await link.send([b""])
        await asyncio.sleep(0.1)
        assert b.peers == set()

    run(scenario)
