"""Linear modules with packed matrices."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshllm.model.modules.quant_matrix import QuantMatrix


class FusedProjections:
    """Modules that read the same input, as query, key and value do, fused into one product.

    The first one called computes for all. Each compares its input with the one computed, so what a
    model family does between the calls affects the time but never the result.
    """

    __slots__ = ("_parts", "_x", "matrix", "sizes")

    def __init__(self, matrix: QuantMatrix, sizes: Sequence[int]) -> None:
        self.matrix = matrix
        self.sizes = list(sizes)
        """Outputs of each."""
        self._parts: dict[int, Tensor] = {}
        self._x: Tensor | None = None

    def multiply(self, index: int, x: Tensor) -> Tensor:
        """Multiply ``x`` [..., K], of M rows, by the matrix of one of the modules: [M, N]."""
        if index in self._parts and self._same(x):
            part = self._parts.pop(index)
            if not self._parts:  # the last one frees the memory
                self._x = None
            return part
        product = self.matrix(x.reshape(-1, x.shape[-1]))
        if len(self.sizes) == 1:
            return product
        self._parts = dict(enumerate(torch.split(product, self.sizes, 1)))
        self._x = x.clone()
        return self._parts.pop(index)

    def _same(self, x: Tensor) -> bool:
        return self._x is not None and x.dtype == self._x.dtype and torch.equal(x, self._x)


class QuantLinear(nn.Module):
    """A replacement of a linear module that multiplies by a packed matrix."""

    def __init__(self, plain: nn.Linear, fused: FusedProjections, index: int) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias = plain.weight, plain.bias
        self._fused, self._index = fused, index

    @property
    def packed(self) -> Sequence[Tensor]:
        """The tensors of its matrix, which other modules may share."""
        return self._fused.matrix.tensors

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 -- the name that stock code may use
        """Multiply [..., K] to [..., N], in the dtype of the input."""
        y = self._fused.multiply(self._index, input)
        if self.bias is not None:
            y = y + self.bias
        return y.to(input.dtype).contiguous().view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return the shape of the module that it replaces."""
        return f"in_features={self.in_features}, out_features={self.out_features}"
