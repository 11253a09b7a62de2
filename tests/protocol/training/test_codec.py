import pytest

from meshllm.errors import PeerFault
from meshllm.names import Digest, Span
from meshllm.protocol.binary import sized
from meshllm.protocol.training.codec import (
    MAX_BATCH_BYTES,
    MAX_REASON_BYTES,
    TENSOR_CHUNK_BYTES,
    Direction,
    PassDone,
    PassRefused,
    StartPass,
    StillComputing,
    TensorBytes,
    TrainingMessage,
    decode,
    encode,
)

MODEL = Digest(bytes(range(32)))
START = StartPass(MODEL, Span(3, 7), Direction.BACKWARD, 9)


def on_the_wire(message: TrainingMessage) -> bytes:
    return b"".join(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        *(StartPass(MODEL, Span(0, 65535), each, MAX_BATCH_BYTES) for each in Direction),
        StartPass(MODEL, Span(65534, 65535), Direction.FORWARD, 1),
        START,
        TensorBytes(b"x"),
        TensorBytes(b"x" * TENSOR_CHUNK_BYTES),
        StillComputing(),
        PassDone(1),
        PassDone(MAX_BATCH_BYTES),
        PassRefused("it is not here", is_final=False),
        PassRefused("", is_final=True),
        PassRefused("x" * MAX_REASON_BYTES, is_final=False),
    ],
)
def test_a_message_survives_the_wire(message: TrainingMessage) -> None:
    assert decode(on_the_wire(message)) == message


def test_a_long_reason_is_cut_between_characters() -> None:
    found = decode(on_the_wire(PassRefused("é" * MAX_REASON_BYTES, is_final=True)))

    assert found == PassRefused("é" * (MAX_REASON_BYTES // 2), is_final=True)


def test_a_message_of_a_later_version_is_ignored() -> None:
    assert decode(b"\x06") is None
    assert decode(b"\xffmore") is None
    assert decode(on_the_wire(PassDone(7)) + b"more") == PassDone(7)
    assert decode(on_the_wire(START) + b"more") == START
    assert decode(on_the_wire(StillComputing()) + b"more") == StillComputing()
    refused = PassRefused("no", is_final=True)
    assert decode(on_the_wire(refused) + b"more") == refused


def test_a_chunk_is_not_copied() -> None:
    data = bytes(TENSOR_CHUNK_BYTES)

    assert encode(TensorBytes(data))[1] is data


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "without a kind"),
        (b"\x00", "without a kind"),
        (b"\x01" + bytes(31), "truncated"),
        (on_the_wire(START)[:-1], "truncated"),
        (on_the_wire(StartPass(MODEL, Span(4, 4), Direction.FORWARD, 9)), "empty span `4:4`"),
        (b"\x01" + MODEL + b"\x07\0\x03\0\x01" + bytes(8), "empty span"),
        (b"\x01" + MODEL + b"\x03\0\x07\0\x04\x01" + bytes(7), "unknown direction 4"),
        (b"\x01" + MODEL + b"\x03\0\x07\0\0\x01" + bytes(7), "unknown direction 0"),
        (on_the_wire(StartPass(MODEL, Span(0, 1), Direction.FORWARD, 0)), "with 0 bytes"),
        (
            on_the_wire(StartPass(MODEL, Span(0, 1), Direction.FORWARD, MAX_BATCH_BYTES + 1)),
            "bytes of a batch",
        ),
        (b"\x02", "TensorBytes of 0 bytes"),
        (b"\x02" + bytes(TENSOR_CHUNK_BYTES + 1), "TensorBytes of 262145 bytes"),
        (on_the_wire(PassDone(0)), "with 0 bytes"),
        (on_the_wire(PassDone(MAX_BATCH_BYTES + 1)), "allowed are 1 to"),
        (on_the_wire(PassDone(1))[:-1], "truncated"),
        (b"\x05", "truncated"),
        (b"\x05\x01" + sized(b"x" * (MAX_REASON_BYTES + 1)), "allowed are 0 to 512"),
        (b"\x05\x01" + sized(b"abc")[:-1], "truncated"),
        (b"\x05\x01\x01\x00\xff", "invalid UTF-8"),
    ],
)
def test_a_malformed_message_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(PeerFault, match=error):
        decode(data)
