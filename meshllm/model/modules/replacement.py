"""Replaces modules of a model by faster ones: on load, for row-invariant steps, for timing."""

from collections.abc import Collection, Iterator, Mapping
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn

from meshllm.model.device import CPU
from meshllm.model.modules import quant_matrix
from meshllm.model.modules.linear_bf16 import MAX_ROWS, CompiledLinear
from meshllm.model.modules.linear_onednn import PackedLinear, replace_linears
from meshllm.model.modules.linear_padded import find_min_rows, pad_linears, unpad_linears
from meshllm.model.modules.quant_linear import QuantLinear
from meshllm.model.modules.quantise import quantise
from meshllm.model.modules.rms_norm import fuse_rms_norms, unfuse_rms_norms
from meshllm.names import Quant


def replace_modules(  # noqa: PLR0913 -- keyword options
    model: nn.Module,
    device: torch.device,
    quant: Quant = Quant.NONE,
    cache: Path | None = None,
    *,
    skip: Collection[str] = (),
    digests: Mapping[str, str] | None = None,
    mapped: bool = True,
    exact: bool = False,
    whole: nn.Module | None = None,
) -> str:
    """Replace modules in place; return why steps cannot be row-invariant as wanted, or "".

    On load, matrices are quantised to ``quant``, except those in or under ``skip``. Without
    ``quant`` they are repacked if that is faster with the same bits, and if they are ``mapped``
    from a file: of a cast matrix, both copies would stay in memory. ``exact`` says that steps will
    be those of the stock model.

    For row-invariant steps, ``whole`` is the whole model, on meta, so that all its shards decide
    alike. On a GPU, steps are row-invariant already, see `meshllm.model.steps.cuda_graph`.
    """
    if device != CPU:
        return ""
    if whole is not None:
        dtype = next(whole.parameters()).dtype
        floors = find_min_rows(whole, dtype, range(1, MAX_ROWS + 1))
        if floors is None or not pad_linears(model, floors):
            return "this CPU, or a special linear module, sums few rows in another order than many"
        fuse_rms_norms(model)
    elif quant is not Quant.NONE:
        quantise(model, quant, skip=skip, digests=digests, cache=cache, mapped=mapped)
        fuse_rms_norms(model)
    elif mapped:
        replace_linears(model, skip=skip, exact=exact)
    return ""


def most_invariant_rows(model: nn.Module) -> float:
    """Return the rows up to which matrices multiply each as if alone, after `replace_modules`."""
    most = inf
    for module in model.modules():
        match module:
            case CompiledLinear():
                most = min(most, module.most_rows)
            case QuantLinear():
                most = min(most, quant_matrix.most_rows())
            case nn.Embedding():
                pass
            case _ if any(_is_matrix(each) for each in module.parameters(recurse=False)):
                most = min(most, MAX_ROWS)
            case _:
                pass
    return most


def restore_modules(model: nn.Module) -> None:
    """Undo the replacements for row-invariant steps."""
    unpad_linears(model)
    unfuse_rms_norms(model)


def plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers in memory; one may occur several times.

    Those that a quantised matrix replaces are freed, or paged out and never read again, and so left
    out, unless another module reads them, such as an embedding. Those that oneDNN's copies replace
    stay mapped until the system needs their memory.
    """
    for module in model.modules():
        replaced = module.weight if isinstance(module, QuantLinear) else None
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor is not replaced and not tensor.is_meta:
                yield tensor


def packed_tensors(model: nn.Module) -> Collection[Tensor]:
    """Return the quantised matrices, and oneDNN's copies, which have no address."""
    packers = (each for each in model.modules() if isinstance(each, QuantLinear | PackedLinear))
    return {id(tensor): tensor for each in packers for tensor in each.packed}.values()


def _is_matrix(parameter: nn.Parameter) -> bool:
    return parameter.dim() > 1 and not parameter.is_meta
