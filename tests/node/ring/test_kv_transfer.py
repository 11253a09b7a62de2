"""KV caches on the way from a node that leaves: what is sent, and what is taken."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from meshllm.errors import LinkLost, MeshError, OutOfMemory, PeerFault
from meshllm.model.shape import rows_for
from meshllm.model.split.kv_cache import SpanCache
from meshllm.model.split.session_cache import SessionCache
from meshllm.names import Digest, NodeId, SessionId, Span
from meshllm.node.compute.worker import Worker
from meshllm.node.ring import kv_transfer
from meshllm.node.ring.kv_transfer import BLOCK_ROWS, FEW_ROWS, MAX_RECEIVED, KvReceiver, KvSender
from meshllm.node.session.wire import sealed
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.codec import decode, encode
from meshllm.protocol.session.messages import (
    Buffer,
    DType,
    Heartbeat,
    KvOffer,
    KvRows,
    Message,
    UnknownRingMessage,
)
from meshllm.testing.clock import InlineExecutor, run_virtual
from meshllm.transport.contract import Channel, Link
from meshllm_loopback import LoopbackTransport, TrafficShape

ONE, OTHER = SessionId(b"1" * 16), SessionId(b"2" * 16)
OFFER = KvOffer(NodeId(bytes(32)), 2, Digest(bytes(32)))
ANSWER = replace(OFFER, node=NodeId(b"n" * 32))
LATER = UnknownRingMessage(99, b"of a later version")
LAYERS, LAST, CONTEXT = range(2, 4), 6, 4096
HEADS, WIDTH, HIDDEN = 2, 8, 16
ROW = HEADS * 2 * WIDTH * 4  # bytes


class Sizes:
    """Sizes of the caches of the model."""

    context = CONTEXT
    hidden_row_bytes = HIDDEN * 4

    def hidden_bytes(self, positions: int) -> int:
        return rows_for(positions) * self.hidden_row_bytes

    def kv_row_bytes(self, layer: int) -> int:
        return ROW

    def kv_bytes(self, layer: int, positions: int) -> int:
        return rows_for(positions) * ROW


def states(start: int, stop: int, width: int = WIDTH, heads: int = HEADS) -> Tensor:
    """Rows that tell their position."""
    rows = torch.arange(start, stop, dtype=torch.float32)
    return rows[None, None, :, None].expand(1, heads, -1, width)


def cache_of(length: int, *, records: bool = True) -> SessionCache:
    """A cache of layers 2 to 4, and the rows that entered the layer behind."""
    span = SpanCache(LlamaConfig(num_hidden_layers=8), Span(2, 4))
    for layer in LAYERS:
        span.update(states(0, length) + layer, states(0, length) - layer, layer)
    span.length = length
    cache = SessionCache([span])
    if records:
        cache.record(4, 0, states(0, length, HIDDEN, 1)[0])
    return cache


@dataclass
class Rank:
    """Sessions that are handed over."""

    caches: dict[SessionId, SessionCache]
    committed: dict[SessionId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.committed = {session: cache.length for session, cache in self.caches.items()}

    def cache_of(self, session: SessionId) -> SessionCache | None:
        return self.caches.get(session)


async def linked(
    theirs: Callable[[Link], Awaitable[object]], ours: Callable[[Link], Awaitable[object]]
) -> object:
    """Run both ends of a link; return what ours returns."""
    transport = LoopbackTransport(TrafficShape(delay_s=0.01))
    async with transport.listen("loopback:x") as listener:
        link = await transport.dial("loopback:x")
        other = await anext(aiter(listener.links()))
        task = asyncio.ensure_future(theirs(other))
        try:
            return await ours(link)
        finally:
            await link.close()
            await task


@dataclass
class Peer:
    """Answers each offer, and notes the rows before."""

    rows: list[KvRows] = field(default_factory=list)
    on_offer: Callable[[int], None] = lambda _: None
    offers: int = 0
    answers: Sequence[Message] = (ANSWER,)

    async def serve(self, link: Link) -> None:
        with suppress(LinkLost):
            while True:
                match decode((await link.receive())[1]):
                    case KvRows() as rows:
                        self.rows.append(rows)
                    case message:
                        assert message == OFFER
                        self.on_offer(self.offers)
                        self.offers += 1
                        for answer in self.answers:
                            await link.send(encode(answer))

    def ends(self, session: SessionId) -> list[tuple[int, int, int]]:
        """Return layer, first and last position of what came of a session."""
        mine = [each for each in self.rows if each.session == session]
        return [(each.layer, each.pos, each.pos + each.rows) for each in mine]


def send(
    rank: Rank,
    peer: Peer,
    recompute_s: Callable[[range], float | None] = lambda _: None,
    next_layer: int | None = 4,
) -> int:
    """Hand over the sessions of a rank; return how many rows."""

    async def ours(link: Link) -> int:
        worker = Worker(InlineExecutor())
        sender = KvSender(link, OFFER, worker, rank, LAYERS, next_layer, recompute_s)
        await sender.catch_up()
        return sender.rows

    sent = run_virtual(linked(peer.serve, ours))
    assert isinstance(sent, int)
    return sent


def test_all_rows_of_each_layer_are_sent_and_the_rows_behind() -> None:
    peer, length = Peer(), BLOCK_ROWS + 5

    assert send(Rank({ONE: cache_of(length), OTHER: cache_of(3)}), peer) == length + 3

    whole, rest = (0, BLOCK_ROWS), (BLOCK_ROWS, length)
    assert peer.ends(ONE) == [(at, *part) for part in (whole, rest) for at in (2, 3, 4)]
    assert peer.ends(OTHER) == [(2, 0, 3), (3, 0, 3), (4, 0, 3)]
    assert peer.offers == 2
    splits = {each.layer: each.split for each in peer.rows}
    assert splits == {2: WIDTH, 3: WIDTH, 4: 0}


@pytest.mark.parametrize(("next_layer", "records"), [(None, True), (4, False)])
def test_rows_behind_the_layers_are_optional(next_layer: int | None, *, records: bool) -> None:
    peer = Peer()

    assert send(Rank({ONE: cache_of(9, records=records)}), peer, next_layer=next_layer) == 9

    assert [layer for layer, *_ in peer.ends(ONE)] == [2, 3]


@pytest.mark.parametrize("more", [FEW_ROWS - 1, FEW_ROWS])
def test_a_session_that_goes_on_is_sent_until_few_rows_are_left(more: int) -> None:
    rank = Rank({ONE: cache_of(200)})
    rank.committed[ONE] = 20

    def grow(_: int) -> None:
        rank.committed[ONE] += more if rank.committed[ONE] > 20 or peer.offers else 0

    peer = Peer(on_offer=grow)
    sent = send(rank, peer, next_layer=None)

    is_more = more >= FEW_ROWS
    assert (sent > 20) is is_more
    assert peer.offers == (kv_transfer.MAX_PASSES + 1 if is_more else 2)


def test_what_ends_while_it_is_sent_is_left() -> None:
    rank = Rank({ONE: cache_of(4), OTHER: cache_of(4)})
    del rank.caches[ONE]
    peer = Peer()

    assert send(rank, peer) == 4

    assert peer.ends(ONE) == []


def test_a_layer_that_does_not_keep_all_rows_is_not_sent() -> None:
    peer = Peer()
    rank = Rank({ONE: cache_of(4)})
    rank.committed[ONE] = 5  # what a window has dropped, or was never there

    assert send(rank, peer) == 0

    assert peer.rows == []


def test_values_that_are_not_finite_are_not_sent() -> None:
    cache = cache_of(4)
    cache.parts[0].layers[3].keys[..., 2, :] = torch.nan
    peer = Peer()

    assert send(Rank({ONE: cache}), peer) == 0

    assert 3 not in {layer for layer, *_ in peer.ends(ONE)}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory")])
def test_rows_for_whose_message_there_is_no_memory_are_not_sent(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(kv_transfer, "sealed", fails)

    assert send(Rank({ONE: cache_of(4)}), Peer()) == 0


def test_a_layer_that_fails_once_is_not_sent_again() -> None:
    """Nor the session, while others are sent in another pass."""
    rank = Rank({ONE: cache_of(300), OTHER: cache_of(300)})
    rank.committed = {ONE: 100, OTHER: 100}
    copied = rank.caches[ONE].copied_rows
    failing = iter([False] * 3 + [True])  # both layers are looked at first

    def fails(layer: int, start: int, stop: int) -> tuple[Tensor, int] | None:
        return None if next(failing, False) else copied(layer, start, stop)

    rank.caches[ONE].copied_rows = fails  # type: ignore[method-assign]
    peer = Peer(on_offer=lambda _: rank.committed.update(dict.fromkeys(rank.committed, 200)))

    assert send(rank, peer, next_layer=None) == 200

    assert peer.ends(ONE) == [(2, 0, 200)]
    assert peer.ends(OTHER) == [(2, 0, 200), (3, 0, 200)]


def test_hidden_states_behind_a_hole_are_not_sent() -> None:
    length = 3 * BLOCK_ROWS
    cache = cache_of(length, records=False)
    cache._late.add(4)
    cache.record(4, 2 * BLOCK_ROWS, states(2 * BLOCK_ROWS, length, HIDDEN, 1)[0])
    peer = Peer()

    assert send(Rank({ONE: cache}), peer) == length

    assert {layer for layer, *_ in peer.ends(ONE)} == {2, 3}


@pytest.mark.parametrize("is_slow", [True, False])
def test_rows_that_are_computed_sooner_are_not_sent(
    monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    monkeypatch.setattr(kv_transfer, "MEASURED_BYTES", 1)
    length = 4 * BLOCK_ROWS
    peer, asked = Peer(), list[range]()

    def recompute_s(rows: range) -> float:
        asked.append(rows)
        return 0.0 if is_slow else 1000.0

    sent = send(Rank({ONE: cache_of(length)}), peer, recompute_s)

    assert sent == (BLOCK_ROWS if is_slow else length)
    assert asked[0] == range(length)


def test_time_between_two_passes_does_not_slow_the_link_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_transfer, "MEASURED_BYTES", 1)
    rank, peer = Rank({ONE: cache_of(400)}), Peer()
    rank.committed[ONE] = 200

    async def ours(link: Link) -> int:
        worker = Worker(InlineExecutor())
        sender = KvSender(link, OFFER, worker, rank, LAYERS, None, lambda _: 1.0)
        await sender.catch_up()
        await asyncio.sleep(50)  # another node loads
        rank.committed[ONE] = 400
        await sender.catch_up()
        return sender.rows

    assert run_virtual(linked(peer.serve, ours)) == 400


def test_another_answer_than_an_offer_breaks_the_rules() -> None:
    peer = Peer(answers=[Heartbeat(1, 0, 0)])

    with pytest.raises(PeerFault, match="No answer to an offer"):
        send(Rank({ONE: cache_of(4)}), peer)


def test_what_a_later_version_sends_before_its_answer_is_skipped() -> None:
    assert send(Rank({ONE: cache_of(4)}), Peer(answers=[LATER, LATER, ANSWER])) == 4


# What is taken.


def rows(
    layer: int = 2,
    pos: int = 0,
    count: int = 4,
    session: SessionId = ONE,
    split: int = WIDTH,
    tensor: Tensor | None = None,
) -> KvRows:
    if tensor is None:
        width, heads = (2 * WIDTH, HEADS) if split else (HIDDEN, 1)
        tensor = states(pos, pos + count, width, heads)
    return KvRows(session, layer, pos, split, sealed(session_key(session), tensor.contiguous()))


def take(*messages: Message, room: int = 1 << 20) -> tuple[KvReceiver, list[Buffer]]:
    """Send messages to a receiver; return it, and the answers."""
    receiver = KvReceiver(Worker(InlineExecutor()), lambda: receiver.bytes <= room, Sizes())
    answers = list[Buffer]()

    async def ours(link: Link) -> None:
        for message in messages:
            await link.send(encode(message), Channel.DATA)
            if isinstance(message, KvOffer):
                answers.append((await link.receive())[1])

    async def theirs(link: Link) -> None:
        try:
            await receiver.serve(link, ANSWER, LAYERS, LAST)
        except (LinkLost, OutOfMemory):
            pass
        finally:
            await link.close()

    run_virtual(linked(theirs, ours))
    return receiver, answers


def test_rows_are_taken_before_an_offer_is_answered() -> None:
    receiver, answers = take(OFFER, rows(), rows(3), rows(2, 4, 3), rows(LAST, split=0), OFFER)

    assert [decode(each) for each in answers] == [ANSWER, ANSWER]
    (held,) = receiver.sessions.values()
    keys, values = held.layers[2]
    assert keys.held.shape == values.held.shape == (1, HEADS, 7, WIDTH)
    assert keys.held[0, 0, :, 0].tolist() == [*range(7)]
    assert held.layers[3][0].used == 4
    assert held.sent[LAST].held.shape == (1, 4, HIDDEN)


def test_what_a_later_version_sends_between_rows_is_skipped() -> None:
    receiver, answers = take(LATER, OFFER, rows(), LATER, rows(2, 4, 3), OFFER)

    assert [decode(each) for each in answers] == [ANSWER, ANSWER]
    assert receiver.sessions[ONE].layers[2][0].used == 7


NAN = torch.full((1, HEADS, 2, 2 * WIDTH), torch.nan)
PLAIN = states(0, 4, 2 * WIDTH).contiguous()
INT8 = replace(rows(), blob=sealed(session_key(ONE), PLAIN, int8=True))
BROKEN = replace(rows(), blob=replace(rows().blob, payload=bytes(len(rows().blob.payload))))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([rows(1)], "KvRows instead of"),
        ([rows(4)], "KvRows instead of"),
        ([rows(2, split=0)], "KvRows instead of"),
        ([rows(LAST)], "KvRows instead of"),
        ([Heartbeat(1, 0, 0)], "Heartbeat instead of"),
        ([rows(2, 1)], "position 1, not 0"),
        ([rows(2), rows(2)], "position 0, not 4"),
        ([rows(2), rows(2, 5)], "position 5, not 4"),
        ([rows(2), rows(2, 4, tensor=states(0, 4, WIDTH + 1))], "do not continue 4 rows of"),
        ([rows(2), rows(2, 4, tensor=states(0, 4, 2 * WIDTH, 1))], "do not continue 4 rows of"),
        ([rows(2), rows(2, 4, tensor=states(0, 4, 2 * WIDTH).bfloat16())], "bfloat16 rows"),
        ([INT8], "KV rows cannot have dtype float32_int8"),
        ([rows(tensor=states(0, 4, 2 * WIDTH + 1))], f"rows of {ROW + 8} bytes; .* {ROW}"),
        ([rows(LAST, split=0, tensor=states(0, 4, HIDDEN + 1, 1))], "rows of 68 bytes"),
        ([rows(2, 0, CONTEXT - 1), rows(2, CONTEXT - 1, 2)], "exceed the context"),
        ([BROKEN], "does not match its hash"),
    ],
    ids=[
        *("another layer", "one behind", "not keys", "not a hidden state", "another message"),
        *("a gap", "twice", "a later gap", "another width", "other heads", "another type"),
        *("rounded", "too wide", "a wide hidden state", "the context", "changed"),
    ],
)
def test_what_breaks_the_rules_is_refused(messages: list[Message], words: str) -> None:
    with pytest.raises(MeshError, match=words):
        take(*messages)


def test_values_that_are_not_finite_are_refused() -> None:
    blob = seal(session_key(ONE), DType.FLOAT32, tuple(NAN.shape), NAN.numpy().tobytes())

    with pytest.raises(PeerFault, match="infinite values or NaN"):
        take(replace(rows(), blob=blob))


@pytest.mark.parametrize(
    ("messages", "room", "taken"),
    [
        (
            [rows(session=SessionId(bytes([at]) * 16)) for at in range(MAX_RECEIVED + 3)],
            1 << 23,
            MAX_RECEIVED,
        ),
        ([rows(2, 4 * at) for at in range(99)], rows_for(1) * ROW, 1),
        ([rows(2), rows(3)], rows_for(1) * ROW, 1),
        ([rows()], 0, 0),
    ],
    ids=["sessions", "bytes", "layers", "nothing"],
)
def test_no_more_is_taken_than_there_is_room_for(
    messages: list[Message], room: int, taken: int
) -> None:
    receiver, _ = take(*messages, room=room)

    assert len(receiver.sessions) == taken


def test_nothing_is_taken_any_more_once_it_is_used() -> None:
    async def main() -> int:
        receiver = KvReceiver(Worker(InlineExecutor()), lambda: True, Sizes())

        async def ours(link: Link) -> None:
            await link.send(encode(rows()))
            await asyncio.sleep(1)
            receiver.is_closed = True
            await link.send(encode(rows(2, 4)))
            with suppress(LinkLost):
                await link.receive()

        async def theirs(link: Link) -> None:
            await receiver.serve(link, ANSWER, LAYERS, LAST)
            await link.close()

        await linked(theirs, ours)
        return receiver.sessions[ONE].layers[2][0].used

    assert run_virtual(main()) == 4
