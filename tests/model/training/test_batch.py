"""Batches as bytes: what is read, and what is refused."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.errors import PeerFault
from meshllm.model.training import batch as module
from meshllm.model.training.batch import MAX_ROWS, pack, read_batch, unpack
from meshllm.model.training.lora import pair_name

HIDDEN = torch.randn(2, 3, 8)
MASK = torch.tensor([[0, 1, 1], [1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2], [7, 8, 15]])
CUDA = torch.device("meta")  # a device that is not the CPU


def tensors_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def one_tensor(dtype: str, shape: Sequence[int], size: int) -> bytes:
    """Make the bytes of hidden states with a header that may be false."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    return tensors_file(json.dumps({"hidden": entry}).encode(), bytes(size))


def read(**tensors: Tensor) -> Any:
    return read_batch(pack(tensors), width=8, context=16)


def test_a_batch_survives_the_wire() -> None:
    name = pair_name(1, "mlp", 0)
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    adapter = {f"{name}.a": a, f"{name}.b": b}

    found = read(hidden=HIDDEN, grad=2 * HIDDEN, mask=MASK, positions=POSITIONS, **adapter)

    for own, sent in (
        (found.hidden, HIDDEN), (found.grad, 2 * HIDDEN), (found.mask, MASK),
        (found.positions, POSITIONS), (found.adapters[1]["mlp"][0].a, a),
    ):  # fmt: skip
        assert torch.equal(own, sent)
    assert (found.adapters[1]["mlp"][0].name, found.kept) == (name, b"")


def test_tensors_may_share_memory() -> None:
    found = read(hidden=HIDDEN, grad=HIDDEN, mask=MASK, positions=MASK)

    assert torch.equal(found.grad, HIDDEN)
    assert torch.equal(found.positions, MASK)


def test_only_hidden_states_are_required() -> None:
    found = read(hidden=HIDDEN.bfloat16())

    assert found.hidden.dtype is torch.bfloat16
    assert (found.grad, found.mask, found.positions, found.adapters) == (None, None, None, {})


def test_a_gradient_may_name_what_is_kept_instead() -> None:
    found = read(grad=HIDDEN, kept=torch.arange(16, dtype=torch.uint8))

    assert (found.hidden, found.kept) == (None, bytes(range(16)))


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({}, "without floating-point hidden states"),
        ({"hidden": HIDDEN[0]}, "without floating-point"),
        ({"hidden": HIDDEN.long()}, "without floating-point"),
        ({"hidden": HIDDEN.double()}, "without floating-point"),
        ({"hidden": HIDDEN[..., :7]}, "7 values; the model has 8"),
        ({"hidden": HIDDEN[:0]}, "0 sequences of 3 tokens"),
        ({"hidden": HIDDEN[:, :0]}, "2 sequences of 0 tokens"),
        ({"hidden": torch.zeros(1, 17, 8)}, "allowed are 1 to 16 tokens each"),
        ({"hidden": torch.zeros(MAX_ROWS // 16 + 1, 16, 8)}, f"{MAX_ROWS} in all"),
        ({"hidden": HIDDEN, "grad": HIDDEN[:1]}, "Gradient of shape"),
        ({"hidden": HIDDEN, "grad": HIDDEN.long()}, "Gradient of shape"),
        ({"hidden": HIDDEN, "mask": MASK[:, :2]}, "`mask` of shape"),
        ({"hidden": HIDDEN, "mask": MASK.int()}, "`mask` of shape"),
        ({"hidden": HIDDEN, "mask": 2 * MASK}, "outside 0 to 1"),
        ({"hidden": HIDDEN, "positions": POSITIONS - 1}, "outside 0 to 15"),
        ({"hidden": HIDDEN, "positions": POSITIONS + 1}, "outside 0 to 15"),
        ({"hidden": HIDDEN, "x" * 200: MASK}, "Unknown tensor `x{100}`"),
        ({"hidden": HIDDEN, "lora.0.mlp.0.b": HIDDEN[0]}, "Unknown tensor `lora"),
        ({"kept": MASK}, "without floating-point"),
        ({"hidden": HIDDEN, "grad": HIDDEN, "kept": MASK}, "without floating-point"),
        ({"grad": HIDDEN, "mask": MASK, "kept": MASK}, "without floating-point"),
        ({"grad": HIDDEN, "kept": MASK}, "Invalid secret or gradient"),
        ({"grad": HIDDEN, "kept": MASK[0].to(torch.int64)}, "Invalid secret or gradient"),
        ({"grad": HIDDEN.long(), "kept": torch.zeros(16, dtype=torch.uint8)}, "Invalid secret"),
    ],
)
def test_an_invalid_batch_is_refused(tensors: dict[str, Tensor], error: str) -> None:
    with pytest.raises(PeerFault, match=error):
        read(**tensors)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        pack({"hidden": HIDDEN})[:-1],
        pack({"hidden": HIDDEN}) + b"more",
        pack({"hidden": HIDDEN}).replace(b"F32", b"X32"),
        pack({"hidden": HIDDEN}).replace(b"[2,3,8]", b"[2,3,9]"),
        (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerFault, match="Invalid tensors"):
        unpack(data)


def test_the_number_of_tensors_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TENSORS", 1)

    assert len(unpack(pack({"hidden": HIDDEN}))) == 1
    with pytest.raises(PeerFault, match="Batch of 2 tensors, more than 1"):
        unpack(pack({"hidden": HIDDEN, "mask": MASK}))


def test_a_batch_moves_to_another_device_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def moved(x: Tensor, device: torch.device) -> Tensor:
        return x.to(device)

    monkeypatch.setattr(module, "to_device", moved)
    adapter = {"lora.1.mlp.0.a": torch.randn(2, 8), "lora.1.mlp.0.b": torch.randn(8, 2)}
    batch = read(hidden=HIDDEN, grad=HIDDEN, mask=MASK, **adapter)

    found = batch.on(CUDA)

    pair = found.adapters[1]["mlp"][0]
    assert {each.device for each in (found.hidden, found.grad, found.mask, pair.a, pair.b)} == {
        CUDA
    }
    assert found.positions is None
    assert batch.on(torch.device("cpu")) is batch


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (tensors_file(b"[" * 100_000), "Invalid tensors"),
        (one_tensor("F4", [1, 1, 8], 4), "Invalid tensors"),
        (one_tensor("F32", [1, 1, 8], 31), "Invalid tensors"),
        (one_tensor("F32", [1 << 62, 1 << 62, 0], 0), "Invalid tensors"),
        (one_tensor("F32", [1 << 62, 0, 8], 0), "of 0 tokens"),
        (one_tensor("F8_E4M3", [1, 1, 8], 8), "without floating-point"),
        (one_tensor("C64", [1, 1, 8], 64), "without floating-point"),
        (one_tensor("F32", [], 4), "without floating-point"),
        (one_tensor("F32", [1] * 1000, 4), "without floating-point"),
    ],
)
def test_a_hostile_header_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(PeerFault, match=error):
        read_batch(data, width=8, context=16)


def test_a_batch_of_the_largest_size_is_read() -> None:
    found = read(hidden=torch.zeros(MAX_ROWS // 16, 16, 8), positions=torch.full((4096, 16), 15))

    assert found.hidden.shape == (MAX_ROWS // 16, 16, 8)


def test_a_dimension_beyond_63_bits_is_refused() -> None:
    header = b'{"hidden":{"dtype":"F32","shape":[0,%d,8],"data_offsets":[0,0]}}' % (1 << 63)

    with pytest.raises(PeerFault):
        unpack(len(header).to_bytes(8, "little") + header)
