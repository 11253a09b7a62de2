"""Vectors of kernels: rounding is that of torch, and NaN stays NaN."""

import math
from collections.abc import Mapping
from functools import cache

import torch
from llvmlite import ir

from meshllm.model.kernels.ir import FLOAT, HALF, LANES, Code, bits_of, float_of
from meshllm.model.kernels.jit import JitFunction


@cache
def unary(name: str) -> JitFunction:
    """Compile a method of `Code` over vectors."""

    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        at = code.do.mul(block, code.index(LANES))
        if name == "narrow":
            value = code.narrow(code.load(FLOAT, fields["from"], at, LANES))
            code.store(HALF, value, fields["to"], at)
        else:
            value = code.widen(code.load(HALF, fields["from"], at, LANES))
            code.store(FLOAT, value, fields["to"], at)

    return JitFunction(("*from", "*to"), write)


def test_rounding_is_that_of_torch() -> None:
    drawn = torch.randint(-(2**31), 2**31 - 1, (1 << 16,)).to(torch.int32).view(torch.float32)
    values = torch.cat([drawn[drawn.isfinite()][: 1 << 15], torch.zeros(LANES)])
    values[-LANES:-6] = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, 1 + 2**-8, 1 + 3 * 2**-8, 1e-45, -1e-40, 3.4e38, 1.0]
    )
    narrow, wide = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values))

    unary("narrow")(len(values) // LANES, 1, values.data_ptr(), narrow.data_ptr())
    unary("widen")(len(values) // LANES, 1, narrow.data_ptr(), wide.data_ptr())

    assert torch.equal(narrow.view(torch.int16), values.bfloat16().view(torch.int16))
    assert torch.equal(wide.view(torch.int32), values.bfloat16().float().view(torch.int32))


def test_nan_stays_nan() -> None:
    values, narrow = torch.full((LANES,), math.nan), torch.zeros(LANES, dtype=torch.bfloat16)

    unary("narrow")(1, 1, values.data_ptr(), narrow.data_ptr())

    assert narrow.isnan().all()


def test_a_number_is_passed_by_its_bits() -> None:
    def write(code: Code, fields: Mapping[str, ir.Value], block: ir.Value, _: ir.Value) -> None:
        code.store(FLOAT, float_of(code, fields["number"]), fields["to"], block)

    function, to = JitFunction(("*to", "number"), write), torch.zeros(1)

    for number in (0.1, -0.5, -math.inf, 1e-40):
        function(1, 1, to.data_ptr(), bits_of(number))
        assert to.item() == torch.tensor(number).item()
