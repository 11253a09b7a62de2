"""Types of packed matrices."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, int]
"""Outputs N and inputs K."""
Packed = Mapping[str, Tensor]
"""The tensors of a packed matrix: its ``data`` and ``scale``."""
Form = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Their shapes and dtypes."""


class Matrix(Protocol):
    """A packed matrix [N, K]."""

    @property
    def shape(self) -> Shape:
        """Outputs N and inputs K."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that it holds in memory."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply [M, K] to [M, N]."""
        ...
