"""Decides which modules of a model are exchanged for faster ones: on load, for steps, in timing."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn

from meshllm.model.device import CPU
from meshllm.model.modules.linear_bf16 import MOST_ROWS
from meshllm.model.modules.linear_onednn import pack
from meshllm.model.modules.linear_padded import find_floors, loosen, steady
from meshllm.model.modules.quantize import quantise
from meshllm.model.modules.rms_norm import quicken, slow_down
from meshllm.names import Quant


def exchange_modules(  # noqa: PLR0913 -- what decides, each by its name
    model: nn.Module,
    device: torch.device,
    quant: Quant = Quant.NONE,
    cache: Path | None = None,
    *,
    skip: Collection[str] = (),
    digests: Mapping[str, str] | None = None,
    mapped: bool = True,
    whole: nn.Module | None = None,
) -> str:
    """Exchange modules in place; say why rows are not invariant where they should be, or "".

    On load, with ``quant``, matrices are quantised, but those in or under ``skip``. Without, they
    are laid out anew where that gives the same bits sooner, and where they are ``mapped``: of a
    cast matrix two copies would stay.

    For row-invariant steps, ``whole`` is the whole model, on meta: every shard of it concludes the
    same. On a GPU steps are row-invariant as they are, see `meshllm.model.steps.cuda_graph`.
    """
    if device != CPU:
        return ""
    if whole is not None:
        dtype = next(whole.parameters()).dtype
        floors = find_floors(whole, dtype, range(1, MOST_ROWS + 1))
        if floors is None or not steady(model, floors):
            return "this processor adds up few rows in another order than many"
        quicken(model)
    elif quant is not Quant.NONE:
        quantise(model, quant, skip=skip, digests=digests, cache=cache, mapped=mapped)
        quicken(model)
    elif mapped:
        pack(model, skip=skip)
    return ""


def restore_modules(model: nn.Module) -> None:
    """Take back what was exchanged for row-invariant steps."""
    loosen(model)
    slow_down(model)
