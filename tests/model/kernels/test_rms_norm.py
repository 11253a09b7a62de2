"""The kernel of RMS norms refuses rows of another length."""

import pytest
import torch

from meshllm.model.kernels.rms_norm import norm


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 16 values for 8 weights"):
        norm(torch.zeros(1, 16).bfloat16(), torch.zeros(8).bfloat16(), 1e-6)
