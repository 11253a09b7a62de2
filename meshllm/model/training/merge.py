"""Merges a LoRA adapter, as ``peft`` saves it, into the weights of a model: a model of its own.

One file of weights is in memory at a time.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor

from meshllm.errors import ModelError, UserError
from meshllm.local_files import read_regular, reason_of
from meshllm.model.files.loader import list_weights, open_file
from meshllm.model.files.source import Source
from meshllm.model.locate import CONFIG as MODEL_CONFIG

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_HARMLESS = frozenset(
    {
        *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision"),
        *("auto_mapping", "inference_mode", "r", "rank_pattern", "lora_alpha", "use_rslora"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "bias"),
        "init_lora_weights",
    }
)
"""Fields of a config that leave what is added a plain product, or are read here. Any other one must
be empty: a variant of LoRA that this version does not know would be merged wrongly."""
_PLAIN_STARTS = True, False, None, "gaussian"
"""Values of ``init_lora_weights`` with which the weights of the model stay as they are."""
MERGED = "merged_adapter"
"""The field in the config of a merged model: blake3 of the adapter. Without it the model would have
the configuration of the one that it was made of, by which a mesh tells models apart."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter on disk."""

    folder: Path
    alpha: float
    is_by_root: bool
    """Whether the scale has the root of the rank (rank-stabilised LoRA, arXiv 2312.03732)."""
    is_transposed: bool
    """Whether the weights are [K, N], as in GPT-2."""

    @classmethod
    def read(cls, folder: Path) -> "LoraAdapter":
        """Read the config of an adapter; raise `ModelError` if it is not a plain LoRA."""
        raw = _read_config(folder)
        if (kind := raw.get("peft_type")) != "LORA":
            raise ModelError(
                f"`{folder}` is an adapter of type `{kind}`, which changes no weights",
                hint="LoRA can be merged",
            )
        others = [name for name, value in raw.items() if value and name not in _HARMLESS]
        if raw.get("bias", "none") != "none":
            others.append("bias")
        if raw.get("init_lora_weights", True) not in _PLAIN_STARTS:
            others.append("init_lora_weights")
        if others:
            raise ModelError(
                f"Adapters with `{others[0][:100]}` cannot be merged", hint="merge it with peft"
            )
        alpha = raw.get("lora_alpha")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise ModelError(f"`{folder / CONFIG}` has no number as `lora_alpha`")
        return cls(
            folder,
            alpha,
            is_by_root=bool(raw.get("use_rslora")),
            is_transposed=bool(raw.get("fan_in_fan_out")),
        )

    def modules(self) -> dict[str, str]:
        """Return the keys of the adapter's matrices, without their ends, by module."""
        with self._open() as file:
            keys = set(file.keys())
        found = {each.removesuffix(_A) for each in keys if each.endswith(_A)}
        expected = {f"{each}{end}" for each in found for end in (_A, _B)}
        if strange := sorted(keys ^ expected):
            raise ModelError(f"The adapter has other tensors than LoRA: `{strange[0][:100]}`")
        return {each.removeprefix(_PREFIX): each for each in found}

    @property
    def digest(self) -> str:
        """blake3 of its files, in hexadecimal."""
        parts = (blake3().update_mmap(self.folder / name) for name in (CONFIG, WEIGHTS))
        return blake3(b"".join(each.digest() for each in parts)).hexdigest()

    def _open(self) -> Any:
        try:
            return open_file(self.folder / WEIGHTS)
        except ModelError as error:
            raise ModelError(str(error), hint="save the adapter again with peft") from None

    def add(self, key: str, weight: Tensor) -> Tensor:
        """Return the weight of a module [N, K] with what the adapter adds, in its dtype.

        Raises:
            ModelError: the shapes do not match.
        """
        with self._open() as file:
            a, b = (_matrix(file, f"{key}{end}") for end in (_A, _B))
        rank = a.shape[0]
        delta = (b @ a) * (self.alpha / (rank**0.5 if self.is_by_root else rank))
        delta = delta.T if self.is_transposed else delta
        if delta.shape != weight.shape:
            raise ModelError(
                f"`{key[:100]}` of the adapter is for a weight of shape {list(delta.shape)};"
                f" that of the model has {list(weight.shape)}"
            )
        return (weight.float() + delta).to(weight.dtype)


def merge(
    source: Source,
    adapter: LoraAdapter,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Write a model with an adapter merged into its weights to a new folder.

    Raises:
        ModelError: they do not match, or a file is damaged.
        UserError: the folder exists, or cannot be written.
    """
    modules = {f"{name}.weight": key for name, key in adapter.modules().items()}
    weights = list_weights(source.folder)
    if missing := sorted(modules.keys() - weights.keys()):
        raise ModelError(
            f"The model has no weight `{missing[0][:100]}`, which the adapter changes",
            hint="merge it into the model that it was trained on",
        )
    if folder.exists():
        raise UserError(f"`{folder}` exists", hint="name a new folder")
    try:
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            partial = Path(temporary) / folder.name
            partial.mkdir()
            for each in source.folder.iterdir():
                if each.is_file() and each.suffix != ".safetensors":
                    shutil.copyfile(each, partial / each.name)
            _mark(partial / MODEL_CONFIG, adapter.digest)
            for at, name in enumerate(files := sorted(set(weights.values()))):
                progress(f"merging file {at + 1} of {len(files)}")
                with open_file(source.folder / name) as file:
                    tensors = dict(_merged(file, adapter, modules))
                    save_file(tensors, partial / name, metadata=file.metadata())
            partial.rename(folder)
    except OSError as error:
        raise UserError(f"`{folder}` cannot be written: {reason_of(error)}") from None


def _mark(path: Path, digest: str) -> None:
    """Note the adapter in the config of a merged model, beside those that it was merged with."""
    config = json.loads(path.read_text("utf-8"))
    before = config.get(MERGED)
    config[MERGED] = f"{before} {digest}" if before else digest
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _matrix(file: Any, name: str) -> Tensor:
    found: Tensor = file.get_tensor(name)
    return found.float()


def _merged(
    file: Any, adapter: LoraAdapter, modules: dict[str, str]
) -> Iterator[tuple[str, Tensor]]:
    with torch.inference_mode():
        for name in file.keys():  # noqa: SIM118 -- not a dictionary
            weight = file.get_tensor(name)
            yield name, adapter.add(modules[name], weight) if name in modules else weight


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        raw = json.loads(read_regular(path, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        hint = "name the folder that `save_pretrained` of peft has written"
        raise ModelError(f"`{folder}` has no `{CONFIG}`", hint=hint) from None
    except OSError as error:
        raise ModelError(f"`{path}` cannot be read: {reason_of(error)}") from None
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        raise ModelError(f"`{path}` is not a JSON object")
    return raw
