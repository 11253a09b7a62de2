"""A link to a neighbour that keeps the protocol, or violates it."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from unittest.mock import AsyncMock, patch

import pytest

from meshllm.errors import LinkLost, MeshError, PeerFault
from meshllm.names import DIGEST_BYTES, NODE_ID_BYTES, Digest, NodeId, SessionId
from meshllm.node.session import ring_link
from meshllm.node.session.ring_link import Neighbours, RingLink
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.codec import MAX_POSITION, decode, encode
from meshllm.protocol.session.link import BEAT, MAX_MALFORMED, SILENCE, NeighbourLink
from meshllm.protocol.session.messages import (
    Cancel,
    Close,
    Data,
    Delivered,
    DType,
    Flags,
    Forward,
    Gap,
    Heartbeat,
    Hello,
    Malformed,
    Message,
)
from meshllm.testing.clock import run_virtual
from meshllm.transport import contract
from meshllm_loopback import LoopbackTransport
from meshllm_loopback.pipe import QUEUE_MESSAGES

OURS, THEIRS = NodeId(b"a" * NODE_ID_BYTES), NodeId(b"b" * NODE_ID_BYTES)
PLAN = Digest(b"p" * DIGEST_BYTES)
CANCEL = Cancel(SessionId(b"s" * 16), 1, 2)
CHUNK = seal(session_key(CANCEL.session), DType.BFLOAT16, (1, 1024, 1024), bytes(2 << 20))
GAP = Gap(SessionId(b"s" * 16), 1, 2, 3)
INVALID = replace(GAP, kv_len=MAX_POSITION + 1)
INVALID_TEXT = f"Message with {MAX_POSITION + 1} kv_len; allowed are 0 to {MAX_POSITION}"


def rows(pos: int) -> Data:
    """A chunk of a prompt, of 2 MiB."""
    return Data(CANCEL.session, 1, 0, pos, 1024, Flags.PREFILL, CHUNK)


async def pair() -> tuple[contract.Link, contract.Link]:
    transport = LoopbackTransport()
    async with transport.listen() as listener:
        ours = await transport.dial(listener.address)
        theirs = await anext(listener.links())
    return ours, theirs


class OwnedLink(RingLink):
    """A ring link that closes its link at its end, as its owner does."""

    async def run(self, deliver: Callable[[Delivered], None]) -> MeshError:
        try:
            return await super().run(deliver)
        finally:
            await self._link.close()


def ring_link_on(link: contract.Link, blame: Callable[[], None] = lambda: None) -> RingLink:
    return OwnedLink(link, NeighbourLink(Hello(OURS, 1, PLAN), peer=THEIRS), blame)


async def say(link: contract.Link, *messages: Message) -> None:
    for message in messages:
        await link.send(encode(message), contract.Channel.CONTROL)


async def hear(link: contract.Link) -> list[Message]:
    heard = []
    with suppress(LinkLost):
        while True:
            heard.append(decode((await link.receive())[1]))
    return heard


def test_messages_go_both_ways_after_a_hello() -> None:
    async def scenario() -> tuple[list[Delivered], list[Message], MeshError]:
        ours, theirs = await pair()
        peer, delivered = ring_link_on(ours), list[Delivered]()
        peer.post(Forward(CANCEL))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0), GAP)
        running = asyncio.create_task(peer.run(delivered.append))
        await asyncio.sleep(1)
        await theirs.send([b""])  # ends the link: no message is that short
        reason = await running
        return delivered, await hear(theirs), reason

    delivered, heard, reason = run_virtual(scenario())

    assert delivered == [GAP]
    assert heard[0] == Hello(OURS, 1, PLAN)
    assert CANCEL in heard
    assert any(isinstance(message, Heartbeat) for message in heard)
    assert isinstance(reason, PeerFault)


def test_a_silent_neighbour_is_lost_before_its_link_is_closed() -> None:
    async def scenario() -> tuple[MeshError, float]:
        ours, theirs = await pair()
        ended = list[None]()
        machine = NeighbourLink(Hello(OURS, 1, PLAN), peer=THEIRS)
        peer = RingLink(ours, machine, lambda: None, ended=lambda: ended.append(None))
        await say(theirs, Hello(THEIRS, 1, PLAN))
        begin = asyncio.get_running_loop().time()
        with patch.object(ours, "close", AsyncMock(side_effect=AssertionError)):
            reason = await peer.run(lambda _: None)
        assert ended == [None]
        return reason, asyncio.get_running_loop().time() - begin

    reason, took_s = run_virtual(scenario())

    assert isinstance(reason, LinkLost)
    assert took_s == pytest.approx(SILENCE)


def test_only_a_neighbour_of_the_same_plan_is_blamed_for_what_it_sends() -> None:
    async def scenario(*messages: Message) -> int:
        ours, theirs = await pair()
        faults = list[None]()
        peer = ring_link_on(ours, lambda: faults.append(None))
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, *messages)
        await theirs.send([b""])  # no message is that short
        assert isinstance(await running, PeerFault)
        return len(faults)

    assert run_virtual(scenario(Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))) == 1
    assert run_virtual(scenario(Hello(THEIRS, 2, PLAN))) == 0  # not this one's plan, or not yet


async def delivered_of(
    messages: Iterable[Message], *, is_met: bool = True
) -> tuple[list[Delivered], int, MeshError | None]:
    """Send messages to a link; return what it delivers, its faults, and why it ended if it did."""
    ours, theirs = await pair()
    faults, delivered = list[None](), list[Delivered]()
    running = asyncio.create_task(
        ring_link_on(ours, lambda: faults.append(None)).run(delivered.append)
    )
    await say(theirs, Hello(THEIRS, 1, PLAN), *([Heartbeat(1, 0, 0)] if is_met else []))
    with suppress(LinkLost):
        await say(theirs, *messages)
    await asyncio.sleep(0.1)
    reason = running.result() if running.done() else None
    running.cancel()
    return delivered, len(faults), reason


def test_an_invalid_message_ends_its_session_and_not_the_link() -> None:
    other = replace(GAP, session=SessionId(b"o" * 16))

    delivered, faults, reason = run_virtual(delivered_of([INVALID, INVALID, other]))

    assert delivered == [Malformed(GAP.session, 1, INVALID_TEXT), other]
    assert (faults, reason) == (1, None)


def test_a_neighbour_that_may_follow_another_plan_is_not_blamed_for_an_invalid_message() -> None:
    delivered, faults, reason = run_virtual(delivered_of([INVALID], is_met=False))

    assert (delivered, faults) == ([], 0)
    assert isinstance(reason, PeerFault)


def test_thousands_of_invalid_messages_end_the_link_or_are_dropped() -> None:
    sessions = (SessionId(number.to_bytes(16)) for number in range(5000))
    of_many = [replace(INVALID, session=session) for session in sessions]

    delivered, faults, reason = run_virtual(delivered_of(of_many))
    of_one = run_virtual(delivered_of([INVALID] * 5000))

    assert (len(delivered), faults) == (MAX_MALFORMED, MAX_MALFORMED + 1)
    assert "More than 16 invalid messages" in str(reason)
    assert of_one == ([Malformed(GAP.session, 1, INVALID_TEXT)], 1, None)


def test_a_neighbour_is_not_blamed_for_what_was_altered_on_the_way() -> None:
    async def scenario() -> int:
        ours, theirs = await pair()
        faults = list[None]()
        peer = ring_link_on(Altered(ours), lambda: faults.append(None))
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await theirs.send([b""])
        assert isinstance(await running, PeerFault)
        return len(faults)

    assert run_virtual(scenario()) == 0


class Altered:
    """A secure link on whose way an empty message was altered."""

    def __init__(self, link: contract.Link) -> None:
        self._link = link
        self.send, self.close, self.statistics = link.send, link.close, link.statistics

    async def receive(self) -> tuple[contract.Channel, contract.Buffer]:
        channel, message = await self._link.receive()
        if not message:
            raise PeerFault("A message was altered")
        return channel, message


def test_session_messages_wait_for_the_handshake() -> None:
    async def scenario() -> list[Message]:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        peer.post(Forward(CANCEL))
        await say(theirs, Hello(THEIRS, 1, PLAN))
        await peer.run(lambda _: None)  # until it is silent for too long
        return await hear(theirs)

    heard = run_virtual(scenario())

    assert {type(message) for message in heard} == {Hello, Heartbeat}


def test_a_message_leaves_at_once_if_the_queues_are_empty_else_in_order() -> None:
    async def scenario() -> tuple[list[int], list[Message]]:
        ours, theirs = await pair()
        peer, sent = ring_link_on(ours), []
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await asyncio.sleep(0.1)
        peer.post(Forward(CANCEL))
        sent.append(ours.statistics.messages_sent)
        peer._add(peer._own, Heartbeat(7, 0, 0))  # the link's own: sent before all others
        peer.post(Forward(GAP))
        sent.append(ours.statistics.messages_sent)
        peer.post(Forward(CANCEL))
        sent.append(ours.statistics.messages_sent)
        await asyncio.sleep(0.1)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return sent, await hear(theirs)

    sent, heard = run_virtual(scenario())

    assert sent == [3, 3, 3]  # a Hello, a Beat and the first message
    assert heard[2:] == [CANCEL, Heartbeat(7, 0, 0), GAP, CANCEL]


def test_a_failed_offer_ends_the_link_and_not_its_caller() -> None:
    async def scenario() -> BaseException | None:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await asyncio.sleep(0.1)

        def refuse(*_: object) -> bool:
            raise LinkLost("too many were cancelled")

        ours.offer = ours.send = refuse  # type: ignore[attr-defined, method-assign, assignment]
        peer.post(Forward(CANCEL))
        return await running

    assert "too many were cancelled" in str(run_virtual(scenario()))


def test_silence_is_loss() -> None:
    async def scenario() -> tuple[float, MeshError]:
        ours, theirs = await pair()
        await say(theirs, Hello(THEIRS, 1, PLAN))
        reason = await ring_link_on(ours).run(lambda _: None)
        return asyncio.get_running_loop().time(), reason

    at, reason = run_virtual(scenario())

    assert isinstance(reason, LinkLost)
    assert at == SILENCE


def test_a_neighbour_that_stops_reading_is_lost_too() -> None:
    async def scenario() -> MeshError:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        for _ in range(QUEUE_MESSAGES + 9):  # more than the link buffers
            peer.post(Forward(CANCEL))
        return await peer.run(lambda _: None)

    assert "No message" in str(run_virtual(scenario()))


def test_beats_do_not_pile_up_before_a_neighbour_that_does_not_read() -> None:
    async def scenario() -> tuple[int, bool]:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        for _ in range(QUEUE_MESSAGES + 9):
            peer.post(Forward(CANCEL))
        running = asyncio.create_task(peer.run(lambda _: None))
        for stamp in range(2, 60):
            await asyncio.sleep(0.5)
            await say(theirs, Heartbeat(stamp, 0, 0))
        alive = not running.done()
        running.cancel()
        return len(peer._own), alive

    waiting, alive = run_virtual(scenario())

    assert alive
    assert waiting <= 1


@pytest.mark.parametrize("count", [60, 100_000])
def test_what_a_neighbour_does_not_read_is_bounded(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(ring_link, "MAX_QUEUED_BYTES", 64 << 20)

    async def scenario() -> tuple[MeshError, int, bool]:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await asyncio.sleep(0.1)
        alive = False
        for number in range(count):
            peer.post(Forward(rows(number) if count < 1000 else GAP))
            if number == 20:
                await asyncio.sleep(2 * BEAT)
                alive = not running.done()
        reason = await running
        return reason, peer.queued_bytes, alive

    reason, waiting, alive = run_virtual(scenario())

    assert alive
    assert "More than 64 MiB wait" in str(reason)
    assert waiting <= 68 << 20


@pytest.mark.parametrize(("held", "ends"), [(4096, False), (32 << 20, True)])
def test_what_the_rank_holds_leaves_less_room_for_messages_that_wait(held: int, ends: bool) -> None:
    async def scenario() -> bool:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        peer.share(64 << 20, lambda: held)
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await asyncio.sleep(0.1)
        for number in range(20):  # of 2 MiB
            peer.post(Forward(rows(number)))
        await asyncio.sleep(0.1)
        has_ended = running.done()
        running.cancel()
        return has_ended

    assert run_virtual(scenario()) is ends


def test_a_link_on_which_too_much_has_waited_ends_even_if_the_neighbour_reads_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring_link, "MAX_QUEUED_BYTES", 64 << 20)

    async def scenario() -> tuple[MeshError, list[Message]]:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await asyncio.sleep(0.1)
        for number in range(QUEUE_MESSAGES + 40):
            peer.post(Forward(rows(number)))
        heard = asyncio.create_task(hear(theirs))
        return await running, await heard

    reason, heard = run_virtual(scenario())

    assert "More than 64 MiB wait" in str(reason)
    positions = [each.pos for each in heard if isinstance(each, Data)]
    assert positions == list(range(len(positions)))


def test_rows_that_the_next_rank_would_drop_are_not_sent() -> None:
    other = SessionId(b"o" * 16)

    async def scenario() -> list[Message]:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        for gen in (1, 2):
            peer.post(Forward(replace(rows(gen), gen=gen)))
            peer.post(Forward(replace(rows(gen), gen=gen, session=other)))
        peer.post(Forward(CANCEL))  # of gen 2
        peer.post(Forward(Close(other, 1)))
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN), Heartbeat(1, 0, 0))
        await asyncio.sleep(0.1)
        assert peer.queued_bytes == 0
        running.cancel()
        return await hear(theirs)

    heard = [each for each in run_virtual(scenario()) if not isinstance(each, Hello | Heartbeat)]

    assert heard == [CANCEL, Close(other, 1), replace(rows(2), gen=2)]


def test_messages_that_are_sent_do_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_link, "MAX_QUEUED_BYTES", 4096)

    async def scenario() -> int:
        ours, theirs = await pair()
        peer = ring_link_on(ours)
        running = asyncio.create_task(peer.run(lambda _: None))
        await say(theirs, Hello(THEIRS, 1, PLAN))
        heard = asyncio.create_task(hear(theirs))
        for stamp in range(1, 20):
            await say(theirs, Heartbeat(stamp, 0, 0))
            await asyncio.sleep(0.5)
            for _ in range(2):  # the second one is queued
                peer.post(Forward(CANCEL))
        running.cancel()
        return sum(isinstance(each, Cancel) for each in await heard)

    assert run_virtual(scenario()) == 38


def test_a_neighbour_of_another_plan_is_refused() -> None:
    async def scenario() -> MeshError:
        ours, theirs = await pair()
        await say(theirs, Hello(THEIRS, 2, PLAN))
        return await ring_link_on(ours).run(lambda _: None)

    assert "epoch 2" in str(run_virtual(scenario()))


def test_the_next_rank_may_not_send_against_the_ring() -> None:
    async def scenario() -> MeshError:
        (before, before_them), (after, after_them) = await pair(), await pair()
        for link in (before_them, after_them):
            await say(link, Hello(THEIRS, 1, PLAN))
        await say(after_them, GAP)
        return await Neighbours(ring_link_on(before), ring_link_on(after)).run(lambda _: None)

    assert "against the direction" in str(run_virtual(scenario()))
