"""Ring codec: each message round-trips, every limit holds, nothing is copied."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.errors import PeerFault
from meshllm.names import Digest, GroupId, NodeId, SessionId, Span
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.codec import (
    MAX_LAYERS,
    MAX_POSITION,
    MAX_ROWS,
    MAX_TEXT,
    MalformedMessage,
    decode,
    encode,
    size,
)
from meshllm.protocol.session.messages import (
    MAX_RANKS,
    Cancel,
    Close,
    Data,
    DType,
    Fault,
    FaultCode,
    Flags,
    Gap,
    Heartbeat,
    Hello,
    JobTimes,
    KvOffer,
    KvRows,
    Logits,
    Malformed,
    Message,
    RankStats,
    Resume,
    UnknownRingMessage,
)

SESSION, BASE = SessionId(bytes(range(16))), SessionId(bytes(16))
BLOB = seal(session_key(SESSION), DType.BFLOAT16, (1, 2, 4), bytes(range(16)))
DATA = Data(SESSION, 3, 1, 7, 2, Flags.PREFILL | Flags.NEED_ROW, BLOB)
TALLY = RankStats(JobTimes(1200, 80, 15), steps=3, bytes_sent=9000, round_trip_us=450)
LOST = Resume(SESSION, 3, BASE, 40, whole=True, lost=(Span(2, 4), Span(7, 8)), held=17)
KV = seal(session_key(SESSION), DType.BFLOAT16, (1, 2, 3, 4), bytes(range(48)))
KV_ROWS = KvRows(SESSION, 5, 7, 2, KV)
FAULT = Fault(SESSION, 3, FaultCode.MODEL, 2, "no memory for 4 rows")
MESSAGES: list[Message] = [
    Hello(NodeId(bytes(32)), 3, Digest(bytes(range(32)))),
    Heartbeat(5_000_000, 4_000_000, 12),
    DATA,
    Data(SESSION, 3, 1, 7, 2, Flags(0), None),
    Gap(SESSION, 3, 1, 512),
    Cancel(SESSION, 3, 2),
    Close(SESSION, 3),
    Close(SESSION, 3, 17, (TALLY, TALLY), is_own=True),
    Resume(SESSION, 3, BASE, 40, whole=True),
    Resume(SESSION, 3, BASE, 1, whole=False),
    LOST,
    Logits(SESSION, 3, 1, 7, BLOB),
    FAULT,
    KvOffer(NodeId(bytes(32)), 3, Digest(bytes(range(32)))),
    KV_ROWS,
    Data(SESSION, 3, 1, 7, 2, Flags.PREFILL | Flags.NO_HANDOVER, BLOB),
]
NAMES = [
    "hello",
    "beat",
    "data",
    "answer",
    "gap",
    "cancel",
    "close",
    "closed",
    "resume",
    "branch",
    "resume with lost layers",
    "logits",
    "fault",
    "KV offer",
    "KV rows",
    "confined data",
]


def packed(message: Message) -> bytearray:
    return bytearray(b"".join(encode(message)))


KINDS = [1, 2, 3, 3, 4, 5, 6, 6, 8, 8, 8, 9, 7, 10, 11, 3]


@pytest.mark.parametrize(("kind", "message"), [*zip(KINDS, MESSAGES, strict=True)], ids=NAMES)
def test_a_message_keeps_the_number_of_its_kind(kind: int, message: Message) -> None:
    assert packed(message)[:2] == bytes([3, kind])


def test_messages_keep_the_recorded_bytes() -> None:
    """A change of these bytes needs a new version of the wire; new kinds are appended."""
    recorded = json.loads(Path(__file__).with_name("wire_bytes.json").read_text("utf-8"))

    assert [b"".join(encode(message)).hex() for message in MESSAGES] == recorded


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_a_message_comes_back_from_its_bytes(message: Message) -> None:
    assert decode(packed(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=NAMES)
def test_a_missing_byte_is_refused_and_appended_fields_are_ignored(
    message: Message,
) -> None:
    encoded = packed(message)

    with pytest.raises(PeerFault):
        decode(encoded[: -2 if isinstance(message, Close) else -1])  # whose it is may be absent
    if isinstance(message, Data | Logits | KvRows):  # a tensor is all of the rest
        with pytest.raises(PeerFault):
            decode(encoded + b"\0")
    else:
        assert decode(encoded + b"later") == message


def test_the_rows_of_a_cache_are_counted() -> None:
    assert KV_ROWS.rows == 3


def test_a_message_of_a_later_version_is_unknown() -> None:
    assert decode(b"\x03\x63abc") == UnknownRingMessage(0x63, b"abc")
    assert packed(UnknownRingMessage(0x63, b"abc")) == b"\x03\x63abc"


def test_unknown_flags_codes_and_tally_fields_are_tolerated() -> None:
    data = packed(Data(SESSION, 0, 0, 0, 1, Flags(128 | Flags.HELP), None))
    fault = packed(FAULT)
    fault[22] = 99
    close = packed(Close(SESSION, 3, 17, (TALLY,)))
    longer = close[:28] + (40 + 3).to_bytes(2, "little") + close[30:-1] + b"new\0"

    assert decode(data) == Data(SESSION, 0, 0, 0, 1, Flags(128 | Flags.HELP), None)
    assert decode(fault) == replace(FAULT, code=FaultCode.OTHER)
    assert decode(longer) == Close(SESSION, 3, 17, (TALLY,))


def test_a_close_of_an_earlier_version_is_of_nobody() -> None:
    close = packed(Close(SESSION, 3, 17, (TALLY,), is_own=True))

    assert decode(close[:-1]) == Close(SESSION, 3, 17, (TALLY,))
    with pytest.raises(PeerFault, match="2 owner"):
        decode(close[:-1] + b"\2")


def test_a_payload_is_not_copied_on_either_side() -> None:
    buffer = packed(DATA)

    _, payload = encode(DATA)
    decoded = decode(buffer)
    buffer[-1] = 99

    assert payload is BLOB.payload
    assert isinstance(decoded, Data)
    assert decoded.blob is not None
    assert decoded.blob.payload[-1] == 99


def test_the_header_of_data_leaves_room_in_the_budget() -> None:
    head, _ = encode(DATA)

    assert len(head) == size(DATA) - 16 == 85


def test_another_version_is_refused_with_a_hint() -> None:
    with pytest.raises(PeerFault, match=r"version 4.*speaks 3") as caught:
        decode(b"\x04" + packed(DATA)[1:])

    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Data(SESSION, 0, 0, 0, 0, Flags(0), None), "0 rows"),
        (Data(SESSION, 0, 0, 0, MAX_ROWS + 1, Flags(0), None), "4097 rows"),
        (Data(SESSION, 0, 0, MAX_POSITION, 1, Flags(0), None), "pos"),
        (Gap(SESSION, 0, 0, MAX_POSITION + 1), "kv_len"),
        (Logits(SESSION, 0, 0, MAX_POSITION, BLOB), "pos"),
        (Resume(SESSION, 0, BASE, 0, whole=True), "0 length"),
        (Resume(SESSION, 0, BASE, MAX_POSITION + 1, whole=True), "length"),
        (Close(SESSION, 0, MAX_POSITION + 1), "keep"),
        (Close(SESSION, 0, 0, (TALLY,) * (MAX_RANKS + 1)), "257 tallies"),
    ],
)
def test_a_number_beyond_its_limit_is_refused(message: Message, words: str) -> None:
    with pytest.raises(PeerFault, match=words):
        decode(packed(message))


@pytest.mark.parametrize(
    "message",
    [
        Data(SESSION, 0, 0, MAX_POSITION - MAX_ROWS, MAX_ROWS, Flags(0), None),
        Data(SESSION, 0, 0, MAX_POSITION - 1, 1, Flags(0), None),
        Gap(SESSION, 0, 0, 0),
        Gap(SESSION, 0, 0, MAX_POSITION),
        Logits(SESSION, 0, 0, 0, BLOB),
        Logits(SESSION, 0, 0, MAX_POSITION - 1, BLOB),
        Resume(SESSION, 0, BASE, MAX_POSITION, whole=True, lost=(Span(0, MAX_LAYERS),) * MAX_RANKS),
        Close(SESSION, 0, MAX_POSITION, (TALLY,) * MAX_RANKS),
        Fault(SESSION, 0, FaultCode.MODEL, 1, "x" * MAX_TEXT),
        KvRows(SESSION, MAX_LAYERS, MAX_POSITION - 3, 3, KV),
        replace(LOST, held=40),
    ],
    ids=[
        *("rows", "position", "empty gap", "gap", "first logits", "logits"),
        *("resume", "close", "fault", "KV rows", "all held"),
    ],
)
def test_a_number_at_its_limit_is_read(message: Message) -> None:
    assert decode(packed(message)) == message


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"", "0 bytes"),
        (b"\x01", "1 bytes"),
        (b"\x03\x01abc", "Hello of 5 bytes"),
        (packed(DATA)[:40], "header takes"),
        (packed(Logits(SESSION, 3, 1, 7, BLOB))[:30], "Blob of 0 bytes"),
        (packed(DATA)[:-2], "is 16 bytes, not 14"),
        (packed(FAULT)[:24] + b"\x01\x00\xff", "invalid UTF-8"),
        (packed(Resume(SESSION, 3, BASE, 1, whole=True))[:-7] + b"\x02\0\0", "2 whole"),
        (packed(Resume(SESSION, 3, BASE, 1, whole=True))[:-6] + b"\1\1", "257 lost spans"),
        (packed(LOST)[:-12] + b"\5\0\0\0\4\0\0\0", "4 last layer; allowed are 5 to"),
        (packed(replace(LOST, held=41)), "41 held; allowed are 0 to 40"),
        (packed(replace(KV_ROWS, blob=BLOB)), r"KvRows of shape \[1, 2, 4\]"),
        (packed(replace(KV_ROWS, blob=replace(KV, shape=(2, 1, 3, 4)))), r"KvRows of shape \[2, 1"),
        (packed(replace(KV_ROWS, split=4)), "4 split; allowed are 0 to 3"),
        (packed(replace(KV_ROWS, split=0)), "2 heads; allowed are 1 to 1"),
        (packed(replace(KV_ROWS, pos=MAX_POSITION - 2)), f"{MAX_POSITION - 2} pos"),
        (packed(replace(KV_ROWS, layer=MAX_LAYERS + 1)), f"{MAX_LAYERS + 1} layer"),
        (packed(LOST)[:-1], "Resume"),
        (packed(FAULT)[:24] + b"\x01\x02" + MAX_TEXT * b"xx", "513 bytes"),
        (packed(Close(SESSION, 0))[:26] + b"\x01\x00\xff\xff", "65535 bytes"),
    ],
)
def test_malformed_bytes_are_refused(encoded: bytes, words: str) -> None:
    with pytest.raises(PeerFault, match=words):
        decode(encoded)


@pytest.mark.parametrize(
    ("encoded", "words", "is_close"),
    [
        (packed(replace(DATA, rows=0)), "0 rows", False),
        (packed(replace(DATA, pos=MAX_POSITION)), f"{MAX_POSITION} pos", False),
        (packed(DATA)[:35] + b"\x63" + packed(DATA)[36:], "unknown dtype 99", False),
        (packed(DATA)[:36] + b"\x05" + packed(DATA)[37:], "5 dimensions", False),
        (packed(replace(DATA, blob=replace(BLOB, shape=(1, 3, 4)))), "24 bytes, not 16", False),
        (packed(DATA)[:-1], "is 16 bytes, not 15", False),
        (packed(DATA)[:36], "header takes", False),
        (packed(Logits(SESSION, 3, 1, MAX_POSITION, BLOB)), "pos", False),
        (packed(Gap(SESSION, 3, 1, MAX_POSITION + 1)), "kv_len", False),
        (packed(replace(LOST, held=41)), "41 held", False),
        (packed(FAULT)[:-1], "Fault of 21 bytes is truncated", False),
        (packed(Close(SESSION, 3, MAX_POSITION + 1)), "keep", True),
        (packed(Close(SESSION, 3, 17, (TALLY,)))[:-9], "Close of 34 bytes is truncated", True),
    ],
    ids=[
        *("rows", "position", "dtype", "dimensions", "shape", "payload", "header", "logits"),
        *("gap", "resume", "fault", "close", "tally"),
    ],
)
def test_invalid_content_names_the_session_that_it_ends(
    encoded: bytes, words: str, is_close: bool
) -> None:
    with pytest.raises(MalformedMessage, match=words) as caught:
        decode(encoded)

    text = str(caught.value)
    assert caught.value.message == Malformed(SESSION, 3, text, is_close=is_close)


@pytest.mark.parametrize(
    "encoded",
    [
        b"\x03",
        b"\x04" + packed(DATA)[1:],
        packed(DATA)[:34],
        packed(replace(KV_ROWS, split=4)),
        packed(Hello(NodeId(bytes(32)), 3, Digest(bytes(32)), GroupId(b"ring")))[:-1],
    ],
    ids=["no kind", "another version", "no fixed fields", "KV rows", "hello"],
)
def test_other_malformed_bytes_end_the_link(encoded: bytes) -> None:
    with pytest.raises(PeerFault) as caught:
        decode(encoded)

    assert not isinstance(caught.value, MalformedMessage)


def test_a_long_text_is_truncated_between_characters() -> None:
    fault = Fault(SESSION, 0, FaultCode.MODEL, 1, "é" * 300 + "\ud800")

    decoded = decode(packed(Fault(SESSION, 0, FaultCode.MODEL, 1, "x" + fault.text)))

    assert isinstance(decoded, Fault)
    assert decoded.text == "x" + "é" * 255
