"""Blobs: the header is checked before the hash, the hash before anything else."""

import pytest

from meshllm.errors import IntegrityFault, PeerFault
from meshllm.names import Digest, SessionId
from meshllm.protocol.session.blob import (
    HEADER,
    MAX_DIM,
    check,
    check_shape,
    pack_header,
    seal,
    session_key,
    unpack_header,
)
from meshllm.protocol.session.messages import Blob, DType

SESSION = SessionId(bytes(range(16)))
KEY = session_key(SESSION)
DIGEST = seal(KEY, DType.FLOAT16, (4,), b"abcdefgh").digest


def test_a_sealed_blob_is_accepted() -> None:
    payload = bytearray(b"abcdefgh")

    blob = seal(KEY, DType.BFLOAT16, (1, 2, 2), payload)

    check(KEY, blob)
    assert blob.payload is payload


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_hash_is_the_same_for_every_kind_of_buffer(kind: type) -> None:
    blob = seal(KEY, DType.FLOAT32, (2,), kind(b"abcdefgh"))

    assert blob.digest.hex().startswith("b1741d68")


@pytest.mark.parametrize(
    "blob",
    [
        Blob(DType.FLOAT16, (4,), Digest(bytes(32)), b"abcdefgh"),
        Blob(DType.BFLOAT16, (4,), DIGEST, b"abcdefgh"),
        Blob(
            DType.FLOAT16, (2, 2), seal(KEY, DType.FLOAT16, (4,), b"abcdefgh").digest, b"abcdefgh"
        ),
    ],
    ids=["digest", "dtype", "shape"],
)
def test_a_changed_blob_is_refused_with_its_session_and_numbers(blob: Blob) -> None:
    with pytest.raises(IntegrityFault, match=f"8 bytes.*`{SESSION.hex()[:8]}`"):
        check(KEY, blob)


def test_the_key_of_another_session_does_not_verify() -> None:
    blob = seal(KEY, DType.FLOAT16, (4,), b"abcdefgh")

    with pytest.raises(IntegrityFault):
        check(session_key(SessionId(bytes(16))), blob)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((), "0 dimensions"),
        ((1, 1, 1, 1, 4), "5 dimensions"),
        ((0, 4), "each dimension"),
        ((MAX_DIM + 1,), "each dimension"),
        ((3,), "is 6 bytes, not 8"),
        ((MAX_DIM,) * 4, "not 8"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_before_the_hash(
    shape: tuple[int, ...], words: str
) -> None:
    blob = Blob(DType.FLOAT16, shape, Digest(bytes(32)), b"abcdefgh")

    with pytest.raises(PeerFault, match=words) as caught:
        check(KEY, blob)

    assert not isinstance(caught.value, IntegrityFault)


@pytest.mark.parametrize("dtype", DType)
def test_a_shape_whose_size_overflows_is_refused(dtype: DType) -> None:
    blob = Blob(dtype, (MAX_DIM,) * 4, Digest(bytes(32)), b"abcde")

    with pytest.raises(PeerFault, match="bytes, not 5"):
        check(KEY, blob)


def test_a_header_round_trips() -> None:
    assert unpack_header(pack_header(DType.FLOAT32, (1, 7, 64))) == (DType.FLOAT32, (1, 7, 64))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (HEADER.pack(10, 1, 4, 0, 0, 0), "unknown dtype 10"),
        (HEADER.pack(1, 5, 1, 1, 1, 1), "5 dimensions"),
        (HEADER.pack(1, 1, 4, 4, 0, 0), "1 dimensions of sizes"),
    ],
)
def test_an_invalid_header_is_refused(header: bytes, words: str) -> None:
    with pytest.raises(PeerFault, match=words):
        unpack_header(header)


def test_the_secret_is_not_in_the_repr() -> None:
    assert "secret" not in repr(KEY)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (DType.FLOAT32, 3 * 4096),
        (DType.BFLOAT16, 3 * 2048),
        (DType.FLOAT16, 3 * 2048),
        (DType.FLOAT32_INT8, 3 * 1088),
        (DType.BFLOAT16_INT8, 3 * 1088),
        (DType.FLOAT16_INT8, 3 * 1088),
    ],
)
def test_rows_have_one_size_per_encoding(dtype: DType, size: int) -> None:
    check_shape(dtype, (1, 3, 1024), size)

    for other in (size - 1, size + 1):
        with pytest.raises(PeerFault, match=f"is {size} bytes, not {other}"):
            check_shape(dtype, (1, 3, 1024), other)


@pytest.mark.parametrize(("width", "size"), [(1, 3), (31, 33), (32, 34), (33, 37), (64, 68)])
def test_the_last_block_of_a_row_may_be_short(width: int, size: int) -> None:
    assert DType.BFLOAT16_INT8.sizes((1, 5, width)) == range(5 * size, 5 * size + 1)


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (DType.FLOAT32_PACKED, 3 * 3072 + 1, 3 * 4096 - 1),
        (DType.BFLOAT16_PACKED, 3 * 1024 + 1, 3 * 2048 - 1),
        (DType.FLOAT16_PACKED, 3 * 1024 + 1, 3 * 2048 - 1),
    ],
)
def test_packed_sizes_are_bounded_on_both_sides(dtype: DType, least: int, most: int) -> None:
    check_shape(dtype, (1, 3, 1024), least)
    check_shape(dtype, (1, 3, 1024), most)

    for other in (least - 1, most + 1):
        with pytest.raises(PeerFault, match=f"is {least} to {most} bytes, not {other}"):
            check_shape(dtype, (1, 3, 1024), other)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_single_value_cannot_be_packed(length: int) -> None:
    with pytest.raises(PeerFault, match="bfloat16_packed"):
        check_shape(DType.BFLOAT16_PACKED, (1, 1, 1), length)
