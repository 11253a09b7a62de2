"""Random tensors for elementwise operations."""

import torch
from torch import Tensor

aten = torch.ops.aten
HALF, FLOAT = torch.bfloat16, torch.float32


def draw(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(-8, 8, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**size).to(dtype)
