"""Encoding of tensors as bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshllm.errors import ModelError
from meshllm.model.wire.payload import from_payload, to_payload

CODES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16}


@given(st.sampled_from(list(CODES)), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_tensor_survives_a_round_trip(code: int, shape: list[int]) -> None:
    hidden = torch.randn(shape).to(CODES[code])

    sent = to_payload(hidden)

    assert sent[:2] == (code, tuple(shape))
    assert sent[2].nbytes == len(sent[2]) == hidden.nbytes
    assert torch.equal(from_payload(*sent), hidden)


def test_contiguous_memory_is_shared_both_ways() -> None:
    hidden = torch.zeros(1, 2, 3)
    code, shape, payload = to_payload(hidden)
    seen = from_payload(code, shape, payload)

    hidden[0, 1, 2] = 7

    assert seen[0, 1, 2] == 7
    assert bytes(payload[-4:]) == b"\x00\x00\xe0\x40"  # little endian


def test_a_view_is_sent_in_c_order() -> None:
    hidden = torch.arange(6, dtype=torch.float32).view(2, 3).t()

    assert torch.equal(from_payload(*to_payload(hidden)), hidden)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_payload_inside_a_message_may_be_misaligned(kind: type[bytes | bytearray]) -> None:
    _, shape, payload = to_payload(torch.randn(1, 1, 4))
    message = memoryview(kind(b"x" + bytes(payload)))

    seen = from_payload(1, shape, message[1:])

    assert bytes(to_payload(seen)[2]) == bytes(payload)
    assert seen.data_ptr() % seen.itemsize == 0


def test_a_dtype_without_a_code_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Cannot send hidden states of `torch\.float64`"):
        to_payload(torch.zeros(1, dtype=torch.float64))


@pytest.mark.parametrize("code", list(CODES))
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_int8_is_decoded_to_the_original_dtype(
    code: int, offset: int, kind: type[bytes | bytearray]
) -> None:
    hidden = torch.randn(1, 3, 50).to(CODES[code])

    sent, shape, payload = to_payload(hidden, int8=True)
    message = memoryview(kind(offset * b"x" + bytes(payload)))
    back = from_payload(sent, shape, message[offset:])

    assert (sent, shape, len(payload)) == (code + 3, (1, 3, 50), 3 * (50 + 2 * 2))
    assert back.dtype == hidden.dtype
    assert torch.allclose(back.float(), hidden.float(), atol=0.05)


@pytest.mark.parametrize("code", list(CODES))
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_compressed_bytes_are_restored(
    code: int, offset: int, kind: type[bytes | bytearray]
) -> None:
    hidden = torch.randn(1, 3, 50).to(CODES[code])

    sent, shape, payload = to_payload(hidden, packed=True)
    message = memoryview(kind(offset * b"x" + bytes(payload)))
    back = from_payload(sent, shape, message[offset:])

    assert (sent, shape) == (code + 6, (1, 3, 50))
    assert len(payload) < hidden.nbytes
    assert back.dtype == hidden.dtype
    assert torch.equal(back, hidden)


def test_incompressible_values_are_sent_uncompressed() -> None:
    hidden = torch.tensor([[[1.5, -2e9]]])

    sent = to_payload(hidden, packed=True)

    assert (sent[0], len(sent[2])) == (1, 8)
    assert torch.equal(from_payload(*sent), hidden)


@pytest.mark.parametrize(
    ("code", "size"),
    [(10, 8), (0, 8), (-1, 8), (1, 7), (1, 9), (2, 8), (4, 3), (4, 5), (7, 6), (7, 8), (8, 2)],
)
def test_bytes_that_do_not_match_the_shape_are_refused(code: int, size: int) -> None:
    with pytest.raises(ModelError, match=f"{size} bytes, code {code}, shape "):
        from_payload(code, (1, 2), bytearray(size))
