"""Shapes of models with real sizes."""

from pathlib import Path

import torch

from meshllm.bench.ring_table import DIMENSIONS
from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source
from meshllm.model.shape import ModelShape

NOWHERE = Path("/nonexistent")  # nothing is read


def qwen3_sized() -> ModelShape:
    """Return the shape of Qwen3-0.6B."""
    return shape_of(Source("big", NOWHERE, DIMENSIONS["qwen3-0.6b"]()), torch.bfloat16)
