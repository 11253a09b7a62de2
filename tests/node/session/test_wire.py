"""Conversion between tensors and blobs: round trips, and refusal of invalid payloads."""

import pytest
import torch

from meshllm.errors import IntegrityFault, ModelError, PeerFault
from meshllm.model.wire.int8_rows import BLOCK, encoded_size
from meshllm.model.wire.payload import RowFormat
from meshllm.names import SessionId
from meshllm.node.session.wire import fault_code, opened, opened_rows, sealed
from meshllm.protocol.session.blob import seal, session_key
from meshllm.protocol.session.messages import INT8_BLOCK, Blob, DType, FaultCode

KEY = session_key(SessionId(bytes(16)))
HIDDEN = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_an_exact_hidden_state_comes_back_as_it_was() -> None:
    blob = sealed(KEY, HIDDEN)

    assert (blob.dtype, blob.shape) == (DType.BFLOAT16, (1, 3, 40))
    assert torch.equal(opened(KEY, blob), HIDDEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hidden_state_in_8_bits_comes_back_in_its_type(dtype: torch.dtype) -> None:
    blob = sealed(KEY, HIDDEN.to(dtype), int8=True)

    back = opened(KEY, blob)

    assert blob.dtype.name == f"{str(dtype).removeprefix('torch.').upper()}_INT8"
    assert back.dtype == dtype
    assert 0 < float((back.float() - HIDDEN.float()).abs().max()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_hidden_state_comes_back_as_it_was(dtype: torch.dtype) -> None:
    hidden = HIDDEN.to(dtype)

    blob = sealed(KEY, hidden, packed=True)

    assert blob.dtype.name == f"{str(dtype).removeprefix('torch.').upper()}_PACKED"
    assert len(blob.payload) < hidden.nbytes
    assert torch.equal(opened(KEY, blob), hidden)


def test_a_corrupt_packed_payload_is_a_peer_fault() -> None:
    payload = bytes(HIDDEN.numel() + 20)
    blob = seal(KEY, DType.BFLOAT16_PACKED, (1, 3, 40), payload)

    with pytest.raises(PeerFault, match="120 values") as caught:
        opened(KEY, blob)

    assert fault_code(caught.value) is FaultCode.RULES


@pytest.mark.parametrize("width", [1, 31, 32, 33, 40, 1024])
def test_model_and_protocol_count_the_same_bytes(width: int) -> None:
    assert BLOCK == INT8_BLOCK
    size = encoded_size((1, 3, width))
    assert DType.BFLOAT16_INT8.sizes((1, 3, width)) == range(size, size + 1)


def test_corrupt_bytes_are_detected_before_they_are_decoded() -> None:
    blob = sealed(KEY, HIDDEN, int8=True)
    payload = bytes(blob.payload[:-1]) + b"\x05"

    with pytest.raises(IntegrityFault):
        opened(KEY, Blob(blob.dtype, blob.shape, blob.digest, payload))


@pytest.mark.parametrize("scale", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x80\xbf", b"\0\0"])
def test_an_invalid_int8_scale_is_a_peer_fault(scale: bytes) -> None:
    payload = scale + bytes(sealed(KEY, HIDDEN, int8=True).payload)[2:]
    blob = seal(KEY, DType.BFLOAT16_INT8, (1, 3, 40), payload)

    with pytest.raises(PeerFault, match="with invalid scales") as caught:
        opened(KEY, blob)

    assert fault_code(caught.value) is FaultCode.RULES


FORM = RowFormat(40, torch.bfloat16)


def test_rows_of_the_expected_format_are_opened() -> None:
    assert torch.equal(opened_rows(KEY, sealed(KEY, HIDDEN), 3, FORM), HIDDEN)


@pytest.mark.parametrize(
    ("blob", "text"),
    [
        (None, "no hidden state"),
        (sealed(KEY, HIDDEN[:, :2]), r"\[1, 2, 40\] for \[1, 3, 40\]"),
        (sealed(KEY, HIDDEN[:, :, :39]), r"\[1, 3, 39\]"),
        (sealed(KEY, HIDDEN[0]), r"\[3, 40\]"),
        (sealed(KEY, HIDDEN.float()), "float32"),
        (seal(KEY, DType.BFLOAT16, (1, 3, 40), b"\xc0\x7f" * 120), "NaN"),
        (seal(KEY, DType.BFLOAT16, (1, 3, 40), bytes(238) + b"\x80\xff"), "infinite"),
    ],
)
def test_rows_of_another_format_are_a_fault_of_their_sender(blob: Blob | None, text: str) -> None:
    with pytest.raises(PeerFault, match=text):
        opened_rows(KEY, blob, 3, FORM)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_rank_sends_only_finite_rows(value: float) -> None:
    hidden = HIDDEN.clone()
    hidden[0, 1, 2] = value

    with pytest.raises(ModelError, match="infinite or NaN"):
        sealed(KEY, hidden)


def test_a_row_that_is_not_finite_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="not finite") as caught:
        sealed(KEY, HIDDEN / 0, int8=True)

    assert fault_code(caught.value) is FaultCode.MODEL
