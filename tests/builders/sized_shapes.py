"""Shapes of models with real sizes."""

from pathlib import Path

import torch
from transformers import LlamaConfig

from meshllm.model.capacity import shape_of
from meshllm.model.files.source import Source
from meshllm.model.shape import ModelShape

NOWHERE = Path("/nonexistent")  # nothing is read


def qwen3_sized() -> ModelShape:
    config = LlamaConfig(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    return shape_of(Source("big", NOWHERE, config), torch.bfloat16)
