"""Tiny models with random weights, stored like a downloaded model."""

from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from meshllm.model.files.source import Source, load_stock, open_folder
from meshllm.model.parity.families import read_table, tiny_config
from meshllm.model.split.meta_model import quiet
from meshllm.model.split.onemkl import warm_up_onemkl


def tiny_model(
    folder: Path,
    name: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    file_bytes: int | None = None,
) -> Source:
    """Write a model of a ``type`` or ``type:variant`` with 6 random layers, reproducibly.

    With ``file_bytes`` the weights are sharded into files of about that size, with an index.
    """
    warm_up_onemkl()  # some families call LAPACK when they are built
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(name, read_table()), dtype=dtype)
        with torch.no_grad():  # zero biases and unit norms would hide a missing tensor
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.02)
        model.tie_weights()
        model.save_pretrained(folder, **({"max_shard_size": file_bytes} if file_bytes else {}))
    return open_folder(name, folder)


def stock_model(source: Source, dtype: torch.dtype | None = None) -> nn.Module:
    """Load the whole model with plain transformers, as the reference."""
    model: nn.Module = load_stock(source, dtype or "auto")
    return model
