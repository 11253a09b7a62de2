"""Loading of tensors from safetensors files into a stripped model.

Renamed keys, merged experts and ties are handled by the converting loader of transformers. It gets
only the tensors that have a place in the stripped model, and reads no others.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import EllipsisType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from meshllm.errors import ModelError
from meshllm.local_files import check_regular, read_regular, reason_of
from meshllm.model.device import CPU
from meshllm.model.locate import GGUF, INDEX
from meshllm.model.pages import prefer_huge_pages
from meshllm.model.split.meta_model import MetaModel, quiet
from meshllm.model.without_compiler import without_compiler

SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 64 << 20
MAX_TENSORS = 1 << 18  # of a model; the largest mixtures of experts have half of that
MAX_HEADER_BYTES = 16 << 20  # of one file; seconds to read, 100 bytes for each tensor
LENGTH_BYTES = 8
"""Of the header length that precedes the header of a file, little-endian."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

PICKLED = "pickled weights can run code and are never read: convert them to safetensors"
_UNTHREADED = {" ": "disk"}
"""Makes the converting loader read on this thread: mapping a tensor takes less than a switch.

It does so if a device map names the disk, here for parameters that no model has.
"""
_MIXED_UP = "config and weights belong to different models"


def list_weights(folder: Path) -> dict[str, str]:
    """Read which file holds which tensor: name of the tensor -> name of the file.

    Raises:
        ModelError: there are no safetensors weights, or their index is damaged.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            content = json.loads(read_regular(index, MAX_INDEX_BYTES))
            weights = {name: str(file) for name, file in content["weight_map"].items()}
        except (
            OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
        ) as error:  # fmt: skip
            raise ModelError(f"Invalid safetensors index `{index}`") from error
        if stray := [file for file in weights.values() if Path(file).name != file]:
            raise ModelError(f"`{index}` refers to a file outside its folder: `{stray[0]}`")
        if len(weights) > MAX_TENSORS:
            raise ModelError(f"`{index}` lists {len(weights)} tensors, more than {MAX_TENSORS}")
        return weights
    if not (folder / SINGLE).is_file():
        raise _no_weights(folder)
    with open_file(folder / SINGLE) as file:
        names = file.keys()
    if len(names) > MAX_TENSORS:
        raise ModelError(f"`{folder / SINGLE}` has {len(names)} tensors, more than {MAX_TENSORS}")
    return dict.fromkeys(names, SINGLE)


def first_dtype(folder: Path) -> torch.dtype:
    """Read the dtype of the first float tensor from the headers of the files that are here."""
    weights = list_weights(folder)
    here = {name: file for name, file in weights.items() if (folder / file).exists()}
    for name, file in (here or weights).items():
        with open_file(folder / file) as opened:
            if (dtype := _DTYPES.get(opened.get_slice(name).get_dtype())) is not None:
                return dtype
    raise ModelError(f"`{folder}` has no tensor of a float type")


def select(meta_model: MetaModel, names: Iterable[str]) -> dict[str, str]:
    """Keep the stored tensors that a stripped model has a place for: name -> its first place."""
    model = meta_model.model
    places = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    chosen = {}
    for name in names:
        place, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if place not in places and name in places:  # the renaming is for an older layout
            place = name
        if place in places:
            chosen[name] = place
    return chosen


def load(
    meta_model: MetaModel,
    folder: Path,
    dtype: torch.dtype,
    shared_model: nn.Module | None = None,
    device: torch.device = CPU,
) -> None:
    """Load a stripped model on meta; parameters that ``lender`` has are shared, not read.

    A tensor is copied to ``device`` as soon as it is read, and stays nowhere else in memory.

    Raises:
        ModelError: files are missing or damaged, or tensors are missing or of another shape.
    """
    model = meta_model.model
    shared = _share(model, shared_model) if shared_model is not None else set()
    weights = list_weights(folder)
    chosen = {n: place for n, place in select(meta_model, weights).items() if place not in shared}
    config = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=[
            _assembling(entry, device) for entry in get_model_conversion_mapping(model)
        ],
    )
    with quiet(), without_compiler(), ExitStack() as opened:
        files = {
            file: opened.enter_context(open_file(folder / file))
            for file in sorted({weights[name] for name in chosen})
        }
        missing = set(model.state_dict()) - shared
        for group in _groups(chosen):
            state = {name: _slice(files[weights[name]], name, folder) for name in group}
            is_merged = len({chosen[name] for name in group}) < len(group)
            info = (_merge if is_merged else _convert)(model, state, config)
            _refuse(info, folder)
            missing &= info.missing_keys
        _refuse_missing(model, missing, folder)
        info.missing_keys = missing
        # What no file holds, such as rotary tables, is made on the CPU: equal on every node.
        model._finalize_model_loading(model, replace(config, device_map=None), info)
    model.to(device).eval()
    for parameter in model.parameters():
        prefer_huge_pages(parameter)


def _share(model: nn.Module, shared_model: nn.Module) -> set[str]:
    """Share the parameters that both models have with ``model``; return their names."""
    places = model.state_dict()
    shared = {
        name: parameter
        for name, parameter in shared_model.named_parameters(remove_duplicate=False)
        if name in places and parameter.dtype == places[name].dtype
    }
    for name, parameter in shared.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)
    return set(shared)


def _groups(chosen: Mapping[str, str]) -> list[list[str]]:
    """List the tensors that become one parameter each, then each set that is merged into one."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in chosen.items():
        places[place].append(name)
    merged = [names for names in places.values() if len(names) > 1]
    return [[names[0] for names in places.values() if len(names) == 1], *merged]


class _Assemble(ConversionOps):  # type: ignore[misc]  # transformers has no types
    """Stack the experts of a layer, and concatenate their matrices, in one new tensor.

    Every part is copied once, from the file to its place, and cast on the way. The library stacks
    each matrix of all experts and concatenates the stacks, so it briefly holds the layer twice.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def convert(
        self,
        input_dict: dict[str, list[Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> dict[str, Tensor]:
        """Merge E tensors [rows_i, ...] of each pattern into one of [E, sum of rows_i, ...]."""
        matrices = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        if len({(len(parts), part.shape[1:]) for parts in matrices for part in parts}) > 1:
            raise ValueError("the experts have different shapes")
        rows = [parts[0].shape[0] for parts in matrices]
        merged = torch.empty(
            (len(matrices[0]), sum(rows), *matrices[0][0].shape[1:]),
            dtype=model.get_parameter_or_buffer(full_layer_name).dtype,
            device=self._device,
        )
        for parts, place in zip(matrices, torch.split(merged, rows, dim=1), strict=True):
            for part, own in zip(parts, place, strict=True):
                own.copy_(part)
        return {target_patterns[0]: merged}


def _assembling(entry: Any, device: torch.device) -> Any:
    """Replace the operations of a converter that only stacks and concatenates by `_Assemble`."""
    stacks = [(MergeModulelist, 0), (Concatenate, 1)]
    if isinstance(entry, WeightConverter):
        operations = [
            (type(operation), vars(operation).get("dim")) for operation in entry.operations
        ]
        if operations in (stacks[:1], stacks) and len(entry.target_patterns) == 1:
            entry = copy(entry)
            entry.operations = [_Assemble(device)]
    return entry


class _Uncast:
    """A stored tensor that is not cast when the converting loader requests it."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.dtype: torch.dtype | None = None
        """The requested dtype."""

    def __getitem__(self, _: EllipsisType) -> Self:
        return self

    def to(self, *, dtype: torch.dtype, **_: Any) -> Tensor:
        """Read the tensor as stored; record the requested dtype."""
        self.dtype = dtype
        tensor: Tensor = self._stored[...]
        return tensor


def _convert(model: Any, state: dict[str, Any], config: Any) -> Any:
    """Convert tensors; those that are only mapped from their file are read on this thread.

    Others are read in threads of the library, which are outside inference mode. So are these then,
    as kernels may round other than for tensors that were made in it.
    """
    kinds = {_DTYPES.get(stored.get_dtype()) for stored in state.values()}
    if config.device_map != {"": CPU} or kinds != {config.dtype}:
        return convert_and_load_state_dict_in_model(model, state, config)[0]
    config = replace(config, device_map=config.device_map | _UNTHREADED)
    with torch.inference_mode(False), torch.no_grad():
        return convert_and_load_state_dict_in_model(model, state, config)[0]


def _merge(model: Any, state: dict[str, Any], config: Any) -> Any:
    """Convert tensors that become one parameter; casting its parts first would copy them twice."""
    before = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    parts = {name: _Uncast(stored) for name, stored in state.items()}
    info, _ = convert_and_load_state_dict_in_model(model, parts, config)
    for name in before - info.missing_keys:
        tensor = model.get_parameter_or_buffer(name)
        tensor.data = tensor.data.to(config.device_map[""], next(iter(parts.values())).dtype)
    return info


def open_file(path: Path) -> Any:
    """Open a safetensors file; raise `ModelError` if it is missing, unreadable or damaged."""
    try:
        check_regular(path, sys.maxsize)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise ModelError(
                f"`{path}` is damaged: its header has {length} bytes, more than {MAX_HEADER_BYTES}"
            )
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(
            f"`{path}` is missing", hint="fetch it with `meshllm model pull`"
        ) from None
    except OSError as error:
        raise ModelError(f"`{path}` cannot be read: {reason_of(error)}") from error
    except SafetensorError as error:
        raise ModelError(f"`{path}` is damaged: {error}", hint="fetch it again") from None


def _slice(file: Any, name: str, folder: Path) -> Any:
    """Return a slice of an open file; its data is read when it is converted."""
    try:
        return file.get_slice(name)
    except SafetensorError:
        raise ModelError(
            f"Tensor `{name}` is not in the file that `{folder / INDEX}` lists"
        ) from None


def _refuse(info: Any, folder: Path) -> None:
    """Raise `ModelError` for tensors that the converting loader rejected."""
    for name, stored, expected in sorted(info.mismatched_keys):
        raise ModelError(
            f"Tensor `{name}` in `{folder}` has shape {list(stored)}, not {list(expected)}",
            hint=_MIXED_UP,
        )
    for name, report in info.conversion_errors.items():  # a traceback, its message, what it means
        reason = report.rpartition("\nError: ")[0].rpartition("\n")[2] or report
        raise ModelError(f"Tensor `{name}` in `{folder}` cannot be converted: {reason}")


def _refuse_missing(model: Any, missing: set[str], folder: Path) -> None:
    """Raise `ModelError` for a parameter that is neither stored nor tied to a stored one.

    Missing buffers are initialised by the stock model.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = [set(tie) for tie in model.all_tied_weights_keys.items()]
    tied = {name for tie in ties if tie - missing for name in tie}
    if lost := sorted((missing & parameters) - tied):
        raise ModelError(
            f"{len(lost)} tensors are missing in `{folder}`, the first is `{lost[0]}`",
            hint=_MIXED_UP,
        )


def _no_weights(folder: Path) -> ModelError:
    """Make the error for missing weights, with what is there instead of safetensors files."""
    for kind, hint in (("*.bin", PICKLED), ("*.pt", PICKLED), ("*.gguf", GGUF)):
        if others := sorted(path.name for path in folder.glob(kind)):
            return ModelError(
                f"`{folder}` has no safetensors weights, only `{others[0]}`", hint=hint
            )
    return ModelError(
        f"`{folder}` has neither `{SINGLE}` nor `{INDEX}`",
        hint="fetch the weights with `meshllm model pull`",
    )
