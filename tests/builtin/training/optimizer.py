"""Muon for matrices, Adam for the rest: converges much faster than Adam alone at this size.

Muon: https://kellerjordan.github.io/posts/muon/
"""

import torch
from torch import Tensor

MOMENTUM, BETAS, EPSILON = 0.95, (0.9, 0.98), 1e-10
SPEED = {"matrix": 0.02, "embedding": 0.004, "vector": 0.004}
DECAY = 0.01  # of matrices, times their speed
NEWTON = (3.4445, -4.7750, 2.0315)  # quintic of the Muon page


def orthogonal(x: Tensor) -> Tensor:
    """Bring the singular values of each matrix in a stack [G, R, C] near 1."""
    a, b, c = NEWTON
    tall = x.shape[1] > x.shape[2]
    x = x.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


class Optimizer:
    """State of all weights: a momentum for matrices, two moments for the rest."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        """Start with empty moments."""
        self.weights = weights
        self.state: dict[str, Tensor] = {}
        self.groups: dict[tuple[int, ...], list[str]] = {}
        for name, weight in weights.items():
            self.state[f"first.{name}"] = torch.zeros_like(weight, requires_grad=False)
            if weight.dim() == 2 and "embed" not in name:
                self.groups.setdefault(tuple(weight.shape), []).append(name)
            else:
                self.state[f"second.{name}"] = torch.zeros_like(weight, requires_grad=False)

    @torch.no_grad()
    def step(self, number: int, factor: float) -> None:
        """Apply the gradients; `number` counts from 1, `factor` scales every speed."""
        for shape, group in self.groups.items():
            self._muon(group, factor * SPEED["matrix"] * max(1.0, shape[0] / shape[1]) ** 0.5)
        for name in self.weights:
            if f"second.{name}" in self.state:
                kind = "embedding" if "embed" in name else "vector"
                self._adam(name, number, factor * SPEED[kind])
        for weight in self.weights.values():
            weight.grad = None

    def _muon(self, group: list[str], speed: float) -> None:
        weights = [self.weights[name] for name in group]
        gradient = torch.stack([_gradient(weight) for weight in weights])
        first = torch.stack([self.state[f"first.{name}"] for name in group])
        first.lerp_(gradient, 1 - MOMENTUM)
        for name, moment in zip(group, first, strict=True):
            self.state[f"first.{name}"] = moment
        for weight, change in zip(weights, orthogonal(gradient.lerp(first, MOMENTUM)), strict=True):
            weight.mul_(1 - speed * DECAY).add_(change, alpha=-speed)

    def _adam(self, name: str, number: int, speed: float) -> None:
        gradient = _gradient(self.weights[name])
        first, second = self.state[f"first.{name}"], self.state[f"second.{name}"]
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
        mean = first / (1 - BETAS[0] ** number)
        scale = (second / (1 - BETAS[1] ** number)).sqrt_().add_(EPSILON)
        self.weights[name].addcdiv_(mean, scale, value=-speed)
