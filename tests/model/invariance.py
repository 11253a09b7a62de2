"""Which machines must run a model row by row without a row minding its company."""

import pytest

from meshllm.model.modules.linear_bf16 import use_own_gemm
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant


def require_row_invariant(runner: Runner) -> None:
    """Fail where steps must be row-invariant and are not; skip where the library decides.

    Where products are our own, nothing depends on the library; elsewhere its kernels may add up
    few rows in another order.
    """
    if runner.is_steady:
        return
    assert not use_own_gemm(), runner.execution.reason
    assert runner.shard.quant is Quant.NONE, runner.execution.reason
    pytest.skip(runner.execution.reason)
