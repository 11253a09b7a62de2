"""Codec of mesh links: every message round-trips, every limit holds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import PeerFault
from meshllm.protocol.membership.codec import (
    MAX_EVENT_BYTES,
    MAX_ITEMS,
    MAX_ITEMS_BYTES,
    MAX_MESH_BYTES,
    MAX_MODEL_LIST_BYTES,
    MAX_REQUEST_BYTES,
    MAX_SLOTS,
    MAX_WALL_MS,
    AnswerEvent,
    AskModels,
    Bye,
    CancelRequest,
    CloseReason,
    FallbackList,
    Generate,
    Items,
    MeshHeartbeat,
    Message,
    ModelList,
    Summary,
    UnknownMeshMessage,
    Want,
    batches,
    decode,
    encode,
)
from meshllm.protocol.membership.gossip import Slot, summarise
from meshllm.protocol.membership.records import MACHINE_BYTES, MAX_ADDRESS_BYTES
from meshllm.protocol.trust.fallbacks import MAX_FALLBACK_ADDRESSES, MAX_FALLBACKS, Fallback
from tests.builders.identities import FOUNDER, STATE, sign
from tests.property.mesh_strategies import mesh_messages

ITEM = sign(FOUNDER, STATE)
FALLBACK = Fallback(FOUNDER.node, bytes(16), ("ws://192.0.2.7:7700", "loopback:a"))
ID = bytes(range(16))
MESSAGES: list[Message] = [
    MeshHeartbeat(5, 4, 12, 1_795_000_000_000, bytes(8)),
    Summary(summarise([ITEM])),
    Items((ITEM, ITEM)),
    Want((ITEM.slot,)),
    Generate(ID, b"{}"),
    AnswerEvent(ID, b"{}"),
    CancelRequest(ID),
    Bye(CloseReason.DUPLICATE),
    AskModels(),
    ModelList(b"{}"),
    FallbackList((FALLBACK, Fallback(FOUNDER.node, b"", ())), bytes(range(16))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_round_trips(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@pytest.mark.parametrize(("kind", "message"), [*enumerate(MESSAGES, start=1)])
def test_a_message_keeps_the_number_of_its_kind(kind: int, message: Message) -> None:
    assert encode(message)[:2] == bytes([3, kind])


def test_messages_keep_the_recorded_bytes() -> None:
    """A change of these bytes needs a new version of the wire; new kinds are appended."""
    recorded = json.loads(Path(__file__).with_name("wire_bytes.json").read_text("utf-8"))

    assert [bytes(encode(message)).hex() for message in MESSAGES] == recorded


@given(mesh_messages)
def test_any_message_round_trips(message: Message) -> None:
    assert decode(encode(message)) == message


@given(st.integers(0, 12), st.binary())
def test_garbage_is_a_message_or_a_fault(kind: int, data: bytes) -> None:
    try:
        message = decode(bytes([3, kind]) + data)
    except PeerFault:
        return
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_missing_byte_is_refused_and_appended_fields_are_ignored(
    message: Message,
) -> None:
    if isinstance(message, Generate | AnswerEvent):  # JSON has no length of its own
        with pytest.raises(PeerFault):
            decode(encode(message)[:17])
        return
    if isinstance(message, ModelList):
        assert decode(encode(message)[:-1]) == ModelList(b"{")
        return
    with pytest.raises(PeerFault):
        decode(encode(message)[:-1])
    assert decode(encode(message) + b"later") == message


def test_a_message_of_a_later_version_is_unknown() -> None:
    assert decode(b"\x03\x63abc") == UnknownMeshMessage(0x63, b"abc")
    assert encode(UnknownMeshMessage(0x63, b"abc")) == b"\x03\x63abc"


@pytest.mark.parametrize("message", [UnknownMeshMessage(0x63, b""), Bye(CloseReason.LEAVING)])
def test_a_message_of_a_later_version_is_bounded(message: Message) -> None:
    longest = encode(message).ljust(MAX_MESH_BYTES, b"x")
    assert type(decode(longest)) is type(message)
    with pytest.raises(PeerFault, match="at most"):
        decode(longest + b"x")


def test_unknown_reasons_and_item_kinds_are_accepted() -> None:
    later = Slot(99, ITEM.author)

    assert decode(b"\x03\x08\x63") == Bye(CloseReason.OTHER)
    assert decode(encode(Want((later,)))) == Want((later,))
    assert decode(encode(Items((replace(ITEM, kind=99),)))) == Items((replace(ITEM, kind=99),))


@pytest.mark.parametrize("data", [b"", b"\x03", b"\x03\x08", b"\x01\x09"])
def test_a_malformed_message_is_refused(data: bytes) -> None:
    with pytest.raises(PeerFault):
        decode(data)


def test_another_version_of_the_protocol_is_refused_with_a_hint() -> None:
    with pytest.raises(PeerFault, match="protocol version 4; this node speaks 3") as caught:
        decode(b"\x04\x01")
    assert caught.value.hint


@pytest.mark.parametrize(
    "message",
    [
        Summary(summarise([ITEM]) * (MAX_SLOTS + 1)),
        Want((ITEM.slot,) * (MAX_SLOTS + 1)),
        Items((ITEM,) * (MAX_ITEMS + 1)),
        Items((replace(ITEM, payload=bytes(30_000)),) * 9),
        Generate(ID, bytes(MAX_REQUEST_BYTES + 1)),
        AnswerEvent(ID, bytes(MAX_EVENT_BYTES + 1)),
        ModelList(bytes(MAX_MODEL_LIST_BYTES + 1)),
        FallbackList((FALLBACK,) * (MAX_FALLBACKS + 1)),
        FallbackList((replace(FALLBACK, addresses=("a",) * (MAX_FALLBACK_ADDRESSES + 1)),)),
        FallbackList((replace(FALLBACK, addresses=("a" * (MAX_ADDRESS_BYTES + 1),)),)),
        FallbackList((replace(FALLBACK, machine=bytes(MACHINE_BYTES + 1)),)),
        FallbackList((FALLBACK,), bytes(MACHINE_BYTES + 1)),
    ],
    ids=[
        *("summary", "want", "items", "bytes of items", "ask", "said", "models"),
        *("fallbacks", "addresses", "bytes of an address", "bytes of a tag", "own tag"),
    ],
)
def test_a_message_beyond_a_limit_is_refused(message: Message) -> None:
    with pytest.raises(PeerFault, match="allowed are 0 to"):
        decode(encode(message))


@pytest.mark.parametrize("count", [0, 1, MAX_ITEMS, MAX_ITEMS + 1])
def test_items_go_into_few_messages_within_the_limits(count: int) -> None:
    messages = batches([ITEM] * count)

    assert sum(len(message.items) for message in messages) == count
    assert len(messages) == -(-count // MAX_ITEMS)
    assert [decode(encode(message)) for message in messages] == messages


def test_long_items_go_into_messages_within_the_limits() -> None:
    messages = batches([replace(ITEM, payload=bytes(30_000))] * 20)

    assert sum(len(message.items) for message in messages) == 20
    assert all(len(encode(message)) <= MAX_ITEMS_BYTES + 2 for message in messages)
    assert [decode(encode(message)) for message in messages] == messages


@pytest.mark.parametrize("spare", [-1, 0, 1, 2, 3])
def test_items_that_fill_a_message_to_the_last_byte_are_read(spare: int) -> None:
    head = len(replace(ITEM, payload=b"").encode()) + 2
    each = (MAX_ITEMS_BYTES - 2) // 16
    items = [replace(ITEM, payload=bytes(each - head))] * 15
    last = MAX_ITEMS_BYTES - 2 - 15 * each - head - spare
    items.append(replace(ITEM, payload=bytes(last)))

    messages = batches(items)

    assert len(messages) == (1 if spare >= 0 else 2)
    assert [decode(encode(message)) for message in messages] == messages


def test_a_time_of_day_beyond_the_year_9999_is_refused() -> None:
    last = MeshHeartbeat(5, 4, 12, MAX_WALL_MS, bytes(8))
    data = bytearray(encode(replace(last, wall_ms=0)))
    data[22:30] = (MAX_WALL_MS + 1).to_bytes(8, "little")

    with pytest.raises(PeerFault, match="milliseconds since 1970"):
        decode(data)
    assert decode(encode(last)) == last
