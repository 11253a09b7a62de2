"""Makes the first calls of functions whose first call may be wrong; knows no model.

torch computes functions like the cosine with oneMKL, some numbers in each thread. The library looks
for the code that suits the processor when a function is first called; where several threads do that
at once, one of them may run code of half the digits, that one time (oneMKL before 2025.0, see
https://github.com/pytorch/pytorch/issues/188792). A process would read its first prompt with other
bits than all others, once in twenty times. One number is computed by one thread.
"""

import torch

FUNCTIONS = (
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor",
    "log", "log10", "log1p", "log2", "round", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip


@torch.inference_mode()
def settle() -> None:
    """Call each function once; it takes some two milliseconds."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in FUNCTIONS:
            getattr(torch, name)(one)
