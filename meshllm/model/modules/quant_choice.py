"""Selects the modules of a model that can be quantised, and those that can share a matrix."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from meshllm.model.modules.quant_kernels import unsupported
from meshllm.names import Quant

FUSABLE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
"""Modules that usually read the same input; if they do not, sharing a matrix only costs time."""


@dataclass(frozen=True, slots=True)
class UnquantisedWeight:
    """A module or parameter that is multiplied by but not quantised."""

    name: str
    shape: tuple[int, ...]
    reason: str
    lossy: bool = False
    """It could be quantised, but its error would be too large."""


def choose(
    model: nn.Module, kind: Quant, skip: Iterable[str]
) -> tuple[dict[str, nn.Linear], list[UnquantisedWeight]]:
    """Return the linear modules that can be quantised, and what cannot."""
    unused = tuple(f"{name}." for name in skip)
    linears, plain = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not f"{name}.".startswith(unused):
            shape = module.out_features, module.in_features
            if reason := _obstacle(module) or unsupported(kind, shape, module.weight.dtype):
                plain.append(UnquantisedWeight(name, shape, reason))
            else:
                linears[name] = module
    plain += [
        UnquantisedWeight(name, tuple(parameter.shape), "it is a stack of matrices")
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and min(parameter.shape) > 1 and not name.startswith(unused)
    ]
    return linears, plain


def fusable_groups(linears: Mapping[str, nn.Linear]) -> Iterator[tuple[str, ...]]:
    """Group modules that read the same input, by their names."""
    done: set[str] = set()
    for name in linears:
        if name not in done:
            owner, dot, leaf = name.rpartition(".")
            group = next((group for group in FUSABLE if leaf in group), (leaf,))
            names = tuple(f"{owner}{dot}{sibling}" for sibling in group)
            family = names if _fusable([linears.get(sibling) for sibling in names]) else (name,)
            done.update(family)
            yield family


def _fusable(linears: Iterable[nn.Linear | None]) -> bool:
    """Whether all exist and fit in one matrix."""
    kinds = {linear and (linear.in_features, linear.weight.dtype) for linear in linears}
    return len(kinds) == 1 and None not in kinds


def _obstacle(module: nn.Linear) -> str:
    """Return why a module must not be replaced; empty if it may be."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks"
    return "" if module.weight.device.type == "cpu" else f"it is on {module.weight.device}"
