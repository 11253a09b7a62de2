"""Running only the modules after the layers, without the stock forward.

A shard that holds only the head runs the stock forward past a stub for every layer, with masks and
rotary tables that are never read: 1 ms of Python per token. In most models the head is a norm and a
matrix in sequence. If running these gives the logits of the stock forward bit for bit, on rows of
two magnitudes, they replace it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshllm.model.device import CPU
from meshllm.model.split.shard import Shard

_SIZES = (1.0, 40.0)  # magnitudes of rows: a cap of logits shows at one of them
_ROWS = 3


@torch.inference_mode()
def find_head_modules(shard: Shard) -> Sequence[str]:
    """Name the modules that, run in sequence, replace the forward of a head-only shard.

    Empty if the forward does more, and on a GPU, where Python overhead does not count.
    """
    if shard.span or shard.embed or not shard.head or shard.device != CPU:
        return ()
    names = _in_order(shard)
    rows = _rows(shard)
    return names if torch.equal(run_modules(shard, names, rows), shard.forward(rows, None)) else ()


@torch.inference_mode()
def run_modules(shard: Shard, names: Sequence[str], x: Tensor) -> Tensor:
    """Run rows [1, T, D] through modules of a shard; return [1, T, V]."""
    for name in names:
        x = shard.model.get_submodule(name)(x)
    return x


def _in_order(shard: Shard) -> list[str]:
    """Name the modules after the layers in the order in which the stock forward calls them."""
    called: list[str] = []

    def note(name: str, *_: Any) -> None:
        called.append(name)

    hooks = [
        shard.model.get_submodule(name).register_forward_hook(partial(note, name))
        for name in shard.outputs
    ]
    try:
        shard.forward(_rows(shard), None)
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _rows(shard: Shard) -> Tensor:
    width = shard.model.config.get_text_config(decoder=True).hidden_size
    drawn = torch.randn(len(_SIZES), _ROWS, width, generator=torch.Generator().manual_seed(0))
    sized = drawn * torch.tensor(_SIZES).view(-1, 1, 1)
    return sized.view(1, -1, width).to(shard.model.dtype)
