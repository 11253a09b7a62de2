"""LoRA adapters (arXiv 2106.09685) of the linear modules of frozen layers.

An adapter adds ``B (A x)`` to the product of a module. A client owns it and sends it along, with
the scale of LoRA multiplied into ``B``; a layer may have several on one module. Its two matrices
are named ``lora.<layer>.<module>.<number>.a`` and ``.b``, such as
``lora.3.self_attn.q_proj.0.a``.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from meshllm.errors import PeerFault

LORA = "lora."
MAX_RANK = 4096
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAME = re.compile(r"lora\.([0-9]{1,5})\.(.+)\.([0-9]{1,5})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """The two matrices of an adapter."""

    name: str
    """The beginning of the names of its tensors."""
    a: Tensor
    """[R, K]."""
    b: Tensor
    """[N, R], scaled."""


Adapters = Mapping[int, Mapping[str, list[LoraPair]]]
"""By layer and by the name of the module in it."""


def pair_name(layer: int, module: str, number: int) -> str:
    """Return the beginning of the names of the tensors of an adapter."""
    return f"{LORA}{layer}.{module}.{number}"


def layer_of(name: str) -> int:
    """Return the layer that a tensor of an adapter belongs to, by its name."""
    return int(name.removeprefix(LORA).partition(".")[0])


def read_adapters(tensors: dict[str, Tensor]) -> Adapters:
    """Take the adapters out of named tensors.

    Raises:
        PeerFault: a name is malformed, or a matrix missing or of a wrong shape.
    """
    pairs = list[tuple[int, str, int, LoraPair]]()
    for full in [each for each in tensors if each.startswith(LORA) and each.endswith(".a")]:
        name = full.removesuffix(".a")
        a, b = tensors.pop(full), tensors.pop(f"{name}.b", None)
        if (parts := _NAME.fullmatch(name)) is None:
            raise PeerFault(f"Invalid name `{name[:100]}` of an adapter")
        if b is None or not _is_pair(a, b):
            raise PeerFault(f"The matrices of adapter `{name[:100]}` do not match")
        layer, module, number = parts.groups()
        pairs.append((int(layer), module, int(number), LoraPair(name, a, b)))
    found = dict[int, dict[str, list[LoraPair]]]()
    for layer_index, module, _, pair in sorted(pairs, key=lambda each: each[:3]):
        found.setdefault(layer_index, {}).setdefault(module, []).append(pair)
    return found


def _is_pair(a: Tensor, b: Tensor) -> bool:
    if a.dim() != 2 or b.dim() != 2 or a.dtype not in _FLOATS or b.dtype not in _FLOATS:
        return False
    return a.shape[0] == b.shape[1] and 0 < a.shape[0] <= MAX_RANK and a.dtype == b.dtype


@contextmanager
def applied(layers: Mapping[int, nn.Module], adapters: Adapters) -> Iterator[None]:
    """Apply adapters to layers, by their index, inside the context.

    Raises:
        PeerFault: a layer or module is not there, has another shape, or computed nothing.
    """
    unused = {each.name for modules in adapters.values() for each in chain(*modules.values())}
    with ExitStack() as stack:
        for index, by_module in adapters.items():
            if index not in layers:
                raise PeerFault(f"Adapter of layer {index}, which is not in the span")
            for name, pairs in by_module.items():
                module = _linear(layers[index], name)
                for pair in pairs:
                    if (pair.a.shape[1], pair.b.shape[0]) != module_shape(module):
                        raise PeerFault(f"Adapter `{pair.name[:100]}` does not fit its module")
                    hook = module.register_forward_hook(partial(_add, pair, unused))
                    stack.callback(hook.remove)
        yield
    if unused:  # some families multiply with the weights of a module without calling it
        raise PeerFault(f"The layers do not call the module of adapter `{min(unused)[:100]}`")


def _add(
    pair: LoraPair, unused: set[str], _module: nn.Module, args: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Add to the product [..., N] of a module with [..., K]."""
    unused.discard(pair.name)
    inner = linear(args[0].to(pair.a.dtype), pair.a)
    return (output + linear(inner, pair.b)).to(output.dtype)


def module_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (K, N) of a linear module; None if it is of another kind."""
    # Others may return something else than the product.
    if isinstance(module, nn.Linear) and type(module) is nn.Linear:
        return module.in_features, module.out_features
    if isinstance(module, Conv1D) and type(module) is Conv1D:
        return module.nx, module.nf
    return None


def _linear(layer: nn.Module, name: str) -> nn.Module:
    try:
        module = layer.get_submodule(name)
    except AttributeError:
        module = None
    if module is None or module_shape(module) is None:
        raise PeerFault(f"The layers have no linear module `{name[:100]}`")
    return module
