"""Linear modules with random weights."""

import torch
from torch import nn


def linear(outputs: int = 512, inputs: int = 512, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias, dtype=torch.bfloat16)
