"""The machines on which a model must be row-invariant."""

import pytest

from meshllm.model.modules.linear_bf16 import use_own_gemm
from meshllm.model.steps.runner import Runner
from meshllm.names import Quant


def require_row_invariant(runner: Runner) -> None:
    """Fail if steps must be row-invariant and are not; skip if that depends on the library.

    With our own GEMM nothing depends on the library; otherwise its kernels may use another
    summation order for a few rows.
    """
    if runner.is_row_invariant:
        return
    assert not use_own_gemm(), runner.execution.reason
    assert runner.shard.quant is Quant.NONE, runner.execution.reason
    pytest.skip(runner.execution.reason)
