"""Operations of torch are replaced only where a compiled function gives the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from meshllm.model.kernels import jit
from meshllm.model.steps.lowering import calls_for
from tests.builders.operands import FLOAT, aten, draw

pytestmark = pytest.mark.skipif(
    not jit.jit_available(), reason="executable memory is forbidden here"
)

OTHERS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "integers": (aten.mul.Tensor, (torch.ones(4, dtype=torch.int64), 2), {}),
    "a number of another dtype": (aten.add.Tensor, (draw(4), draw(dtype=FLOAT)), {}),
    "a factor": (aten.add.Tensor, (draw(4), draw(4)), {"alpha": 2}),
    "powers of a number": (aten.pow.Scalar, (2, draw(4)), {}),
    "float32": (aten.silu.default, (draw(4, dtype=FLOAT),), {}),
    "unknown": (aten.cos.default, (draw(4),), {}),
    "many dimensions": (aten.clone.default, (draw(2, 3, 4, 5, 6).permute(4, 2, 0, 3, 1),), {}),
    "nothing": (aten.neg.default, (draw(0),), {}),
    "two results": (aten.topk.default, (draw(4), 2), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_unsupported_operations_are_left_to_torch(name: str) -> None:
    function, args, kwargs = OTHERS[name]
    result = function(*args, **kwargs)

    outs = [result] if isinstance(result, Tensor) else list(result)
    assert calls_for(function, args, kwargs, [each.contiguous() for each in outs]) is None
