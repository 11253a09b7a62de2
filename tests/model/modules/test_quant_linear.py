"""Modules that read the same input share one product, and never a wrong one."""

import pytest
import torch
from torch import Tensor, nn

from meshllm.model.kernels import gemm_int8
from meshllm.model.modules.quant_linear import FusedProjections, QuantLinear
from meshllm.model.modules.quant_matrix import QuantMatrix


class Exact(QuantMatrix):
    """A plain matrix that counts how often it is used."""

    def __init__(self, *plain: nn.Linear) -> None:
        self.weight = torch.cat([linear.weight.detach() for linear in plain])
        self.calls = 0
        packed = {"data": self.weight, "scale": torch.ones(len(self.weight))}
        shape = len(self.weight), self.weight.shape[1]
        super().__init__(packed, shape, self._count, gemm_int8.dequantise)

    def _count(self, rows: Tensor, *_: Tensor) -> Tensor:
        self.calls += 1
        return (rows @ self.weight.T).float()


def family(
    *outputs: int, bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Exact, list[nn.Linear], list[QuantLinear]]:
    plain = [nn.Linear(8, size, bias=bias, dtype=dtype) for size in outputs]
    matrix = Exact(*plain)
    fused = FusedProjections(matrix, outputs)
    return matrix, plain, [QuantLinear(one, fused, i) for i, one in enumerate(plain)]


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def test_one_product_serves_all() -> None:
    matrix, plain, modules = family(4, 2, 3)
    x = torch.randn(2, 5, 8)

    results = [module(x) for module in modules]

    assert matrix.calls == 1
    for mine, theirs in zip(results, plain, strict=True):
        torch.testing.assert_close(mine, theirs(x))


def test_any_order_of_calls_gives_the_same_result() -> None:
    _, plain, modules = family(4, 2, 3)
    a, b = torch.randn(1, 8), torch.randn(3, 8)

    for index, x in ((2, a), (0, b), (1, a), (1, b), (0, a), (0, a), (2, b)):
        torch.testing.assert_close(modules[index](x), plain[index](x))


def test_input_that_changes_between_calls_is_multiplied_again() -> None:
    _, plain, modules = family(4, 2)
    x = torch.randn(1, 8)
    modules[0](x)

    x.add_(1)

    torch.testing.assert_close(modules[1](x), plain[1](x))


def test_input_of_another_dtype_is_multiplied_again() -> None:
    matrix, _, modules = family(4, 2, dtype=torch.bfloat16)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    modules[0](x)
    matrix.weight = matrix.weight.float()

    assert modules[1](x.float()).dtype == torch.float32
    assert matrix.calls == 2


def test_the_last_call_frees_the_memory() -> None:
    _, _, modules = family(4, 2)
    x = torch.randn(1, 8)

    for module in modules:
        module(x)

    assert not modules[0]._fused._parts
    assert modules[0]._fused._x is None


def test_a_single_module_caches_nothing() -> None:
    matrix, plain, [module] = family(4)
    x = torch.randn(1, 8)

    torch.testing.assert_close(module(x), plain[0](x))
    module(x)

    assert matrix.calls == 2
    assert module._fused._x is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_like_that_of_the_plain_module(dtype: torch.dtype) -> None:
    _, plain, modules = family(4, 2, bias=True, dtype=dtype)
    x = torch.randn(2, 3, 8).to(dtype)

    for mine, theirs in zip([m(x) for m in modules], [p(x) for p in plain], strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (dtype, theirs.shape, theirs.stride())
        torch.testing.assert_close(mine, theirs, atol=0.01, rtol=0.01)


def test_attributes_that_stock_code_reads_are_kept() -> None:
    _, plain, modules = family(4, bias=True)

    assert modules[0].weight is plain[0].weight
    assert modules[0].bias is plain[0].bias
    assert repr(modules[0]) == "QuantLinear(in_features=8, out_features=4)"
