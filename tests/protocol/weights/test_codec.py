import pytest

from meshllm.errors import PeerFault
from meshllm.names import Digest
from meshllm.protocol.weights.codec import (
    CHUNK_BYTES,
    MAX_FILE_BYTES,
    MAX_REASON_BYTES,
    FileChunk,
    FileRefused,
    FileSize,
    WantFile,
    WeightMessage,
    decode,
    encode,
)

MODEL = Digest(bytes(range(32)))


def on_the_wire(message: WeightMessage) -> bytes:
    return b"".join(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        WantFile(MODEL, "part-00003.safetensors", 1 << 33),
        FileSize(0),
        FileSize(MAX_FILE_BYTES),
        FileChunk(b"x" * CHUNK_BYTES),
        FileRefused("it is not here"),
    ],
)
def test_a_message_survives_the_wire(message: WeightMessage) -> None:
    assert decode(on_the_wire(message)) == message


def test_a_long_reason_is_cut_between_characters() -> None:
    found = decode(on_the_wire(FileRefused("é" * MAX_REASON_BYTES)))

    assert found == FileRefused("é" * (MAX_REASON_BYTES // 2))


def test_a_message_of_a_later_version_is_ignored() -> None:
    assert decode(b"\x05") is None
    assert decode(b"\xffmore") is None
    assert decode(on_the_wire(FileSize(7)) + b"more") == FileSize(7)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", "without a kind"),
        (b"\x00", "without a kind"),
        (b"\x01" + bytes(31), "truncated"),
        (on_the_wire(WantFile(MODEL, "x" * 65, 0)), "65 bytes"),
        (on_the_wire(WantFile(MODEL, "x", MAX_FILE_BYTES + 1)), "as offset"),
        (on_the_wire(FileSize(MAX_FILE_BYTES + 1)), "bytes of a file"),
        (on_the_wire(FileSize(1))[:-1], "truncated"),
        (b"\x03", "FileChunk of 0 bytes"),
        (b"\x03" + bytes(CHUNK_BYTES + 1), "FileChunk of 262145 bytes"),
        (b"\x04\x01\x00\xff", "invalid UTF-8"),
    ],
)
def test_a_malformed_message_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(PeerFault, match=error):
        decode(data)
