"""Which kernel supports which matrix."""

import dataclasses

import pytest
import torch
from torch import Tensor

from meshllm.errors import ModelError
from meshllm.model.modules.quant_kernels import KERNELS, kernel, packed_bytes, unsupported
from meshllm.model.modules.quant_matrix import Packed
from meshllm.names import Quant

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "reason"),
    [
        (Quant.INT8, (7, 5), BF16, ""),
        (Quant.INT8, (7, 65_794), BF16, ""),
        (Quant.INT8, (7, 0), BF16, "it is empty"),
        (Quant.INT4, (0, 64), BF16, "it is empty"),
        (Quant.INT4, (16, 64), BF16, ""),
        (Quant.INT4, (16, 65), BF16, "65 inputs are not a multiple of 64"),
        (Quant.INT4, (17, 64), BF16, ""),
        (Quant.INT8, (16, 64), torch.float64, "its weights are torch.float64"),
        (Quant.INT4, (16, 64), torch.int8, "its weights are torch.int8"),
    ],
)
def test_an_unsupported_matrix_has_a_reason(
    kind: Quant, shape: tuple[int, int], dtype: torch.dtype, reason: str
) -> None:
    assert unsupported(kind, shape, dtype) == reason


@pytest.mark.parametrize(
    ("kind", "shape", "size"),
    [
        (Quant.NONE, (1024, 1024), 2 << 20),
        (Quant.INT8, (1024, 1024), (1 << 20) + 4 * 1024),
        (Quant.INT4, (1024, 1024), (1 << 19) + (1 << 20) // 64 * 4),
        (Quant.INT4, (1000, 1000), 2_000_000),  # it stays plain
    ],
)
def test_the_memory_is_known_before_packing(kind: Quant, shape: tuple[int, int], size: int) -> None:
    assert packed_bytes(kind, shape, BF16) == size


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_the_predicted_memory_is_that_of_the_packed_tensors(kind: Quant) -> None:
    packed = KERNELS[kind].pack(torch.ones(512, 256, dtype=BF16))

    taken = sum(tensor.nbytes for tensor in packed.values())
    assert packed_bytes(kind, (512, 256), BF16) == pytest.approx(taken, rel=0.01)


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_a_missing_kernel_is_an_error(kind: Quant, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_weight: Tensor) -> Packed:
        raise RuntimeError("no such kernel\nat 0x0")

    monkeypatch.setitem(KERNELS, kind, dataclasses.replace(KERNELS[kind], pack=refuse))

    with pytest.raises(ModelError, match=f"No {kind} kernel on .*: no such kernel$") as error:
        kernel(kind)
    assert error.value.hint == "use `--quant none`"


@pytest.mark.parametrize("kind", [Quant.INT8, Quant.INT4])
def test_this_cpu_has_a_kernel(kind: Quant) -> None:
    assert kernel(kind) is KERNELS[kind]
