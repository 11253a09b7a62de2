"""Elementwise kernels give the bits of torch, for any strides."""

from typing import Any

import pytest
import torch

from meshllm.model.kernels import jit
from meshllm.model.kernels.elementwise import SOURCE, TARGET, copy_lines
from meshllm.model.kernels.jit import FIELDS
from meshllm.model.kernels.program import Program
from meshllm.model.steps.lowering import calls_for
from tests.builders.operands import FLOAT, HALF, aten, draw

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)


def check(function: Any, *args: Any, **kwargs: Any) -> None:
    """Run an operation both ways; memory around the result is unchanged."""
    expected = function(*args, **kwargs)
    around = torch.full((expected.numel() * 4 + 64,), 7.0, dtype=expected.dtype)
    out = around.as_strided(expected.shape, expected.stride(), 32)
    calls = calls_for(function, args, kwargs, [out])
    assert calls is not None, f"no kernel for {function}"

    Program(calls).run()

    assert torch.equal(out, expected)
    out.fill_(7.0)
    assert bool((around == 7.0).all())


SHAPES: dict[str, tuple[Any, Any]] = {
    "alike": (draw(1, 1, 1024), draw(1, 1, 1024, seed=1)),
    "heads": (draw(1, 5, 16, 128).transpose(1, 2), draw(1, 1, 5, 128, seed=1)),
    "one row": (draw(1, 1, 8, 64).transpose(1, 2), draw(1, 1, 1, 64, seed=1)),
    "odd": (draw(3, 7), draw(7, seed=1)),
    "transposed": (draw(3, 7).T, draw(7, 3, seed=1)),
    "gaps": (draw(4, 34)[:, ::2], draw(4, 17, seed=1)),
    "both dtypes": (draw(2, 48, dtype=FLOAT), draw(2, 48, seed=1)),
    "one number": (draw(1, 1, 1, dtype=FLOAT), draw(64, dtype=FLOAT, seed=1)),
    "scalar": (draw(5, 32), 0.3),
    "scalar and float32": (draw(5, 32, dtype=FLOAT), -1.7),
    "column and row": (draw(5, 1), draw(1, 32, seed=1)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor], ids=str)
def test_sums_and_products_are_those_of_torch(function: Any, shape: str) -> None:
    check(function, *SHAPES[shape])


UNARY: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "neg": (aten.neg.default, (), {}),
    "silu": (aten.silu.default, (), {}),
    "gelu": (aten.gelu.default, (), {}),
    "gelu by tanh": (aten.gelu.default, (), {"approximate": "tanh"}),
    "relu": (aten.relu.default, (), {}),
    "sigmoid": (aten.sigmoid.default, (), {}),
    "tanh": (aten.tanh.default, (), {}),
    "square": (aten.pow.Tensor_Scalar, (2,), {}),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary_functions_are_those_of_torch(name: str) -> None:
    function, args, kwargs = UNARY[name]
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(HALF)
    numbers = numbers[~function(numbers, *args, **kwargs).isnan()]  # NaN equals nothing

    check(function, numbers, *args, **kwargs)
    if name != "gelu":  # torch computes it otherwise for strided input
        check(function, draw(1, 3, 8, 64).transpose(1, 2), *args, **kwargs)


def test_copies_are_those_of_torch() -> None:
    x = draw(1, 3, 8, 64)
    check(aten.clone.default, x.transpose(1, 2), memory_format=torch.contiguous_format)
    check(aten.reshape.default, x.transpose(1, 2), [-1, 64])
    check(aten.to.dtype, x, FLOAT)
    check(aten.to.dtype, draw(5, 100, dtype=FLOAT), HALF)
    check(aten.cat.default, [-x[..., 32:], x[..., :32]], -1)
    check(aten.cat.default, [x, draw(1, 2, 8, 64, seed=1)], 1)
    check(aten.cat.default, [x[0, 0, 0], x[0, 0, 1]])


def test_lines_are_copied_to_an_address_set_later() -> None:
    x, target = draw(1, 5, 8, 48).transpose(1, 2), torch.zeros(1, 8, 20, 48, dtype=HALF)
    function, values = copy_lines(x.shape[1:], x.stride()[1:])
    given = function.given(1, *values)
    given[SOURCE] = x.data_ptr()
    given[TARGET] = [target[:, :, 7:].data_ptr(), *target.stride()[1:3]]

    function(1, 1, *given[FIELDS:])

    expected = torch.zeros_like(target)
    expected[:, :, 7:12] = x
    assert torch.equal(target, expected)
