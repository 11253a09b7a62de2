"""The model types that transformers registers as causal LMs, and a tiny config of each.

The data is in ``families.toml``: tiny sizes, further fields of each type, and excluded types.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshllm.errors import ModelError
from meshllm.model.parity.verdict import Verdict
from meshllm.model.split.meta_model import quiet

TINY_LAYERS = 6  # three parts of two layers; one period of the usual hybrid patterns

_FACTORS = frozenset({"short_factor", "long_factor"})
_STALE = frozenset({"quantization_config", "transformers_version", "dtype", "_name_or_path"})


@dataclass(frozen=True, slots=True)
class FamilyTable:
    """The content of ``families.toml``."""

    sizes: dict[str, Any]
    """Field -> tiny value, for every config class that has the field."""
    companions: dict[str, dict[str, Any]]
    """Field -> further fields that a config with it needs."""
    types: dict[str, dict[str, Any]]
    """Model type or ``type:variant`` -> its own fields."""
    obstacles: dict[str, str]
    """Model type or ``type:variant`` -> why one hidden state per token is not enough."""
    wrappers: dict[str, str]
    """Multimodal model type -> the type of its text model, which can be split."""
    excluded: dict[str, str]
    """Model type -> why it is not a text causal LM."""

    def explain(self, name: str, verdict: Verdict) -> Verdict:
        """Prepend the known obstacle to the measured reason."""
        if verdict.equal or name not in self.obstacles:
            return verdict
        return replace(verdict, reason=f"{self.obstacles[name]} ({verdict.reason})")


def read_table() -> FamilyTable:
    """Read the data file of the package."""
    text = resources.files(__package__).joinpath("families.toml").read_text("utf-8")
    data = tomllib.loads(text)
    excluded = {name: why for why, group in data["excluded"].items() for name in group["types"]}
    return FamilyTable(
        sizes=data["sizes"],
        companions=data["with"],
        types=data["types"],
        obstacles=data["obstacles"],
        wrappers=data["wrappers"],
        excluded=excluded,
    )


def text_types(table: FamilyTable) -> list[str]:
    """List every text causal-LM type that transformers registers, variants after their type."""
    others = table.excluded.keys() | table.wrappers.keys()
    variants = {name for name in table.types if ":" in name}
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - others | variants)


def tiny_config(name: str, table: FamilyTable) -> PreTrainedConfig:
    """Make the table's tiny config of a model type or ``type:variant``.

    Raises:
        ModelError: the type is unknown to transformers.
    """
    model_type = name.partition(":")[0]
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"Model type `{model_type}` is unknown to transformers")
    cls = CONFIG_MAPPING[model_type]
    fields = cls().to_dict()
    sizes = _sizes(fields, table, getattr(cls, "attribute_map", {}))
    with quiet():
        return cls(**sizes | table.types.get(name, table.types.get(model_type, {})))


def shrink(config: PreTrainedConfig, table: FamilyTable) -> PreTrainedConfig:
    """Make a tiny config with the switches and the kinds of layers of a real one.

    The result may be invalid for the class; then building the model raises.
    """
    text = config.get_text_config(decoder=True)
    fields = {name: value for name, value in text.to_dict().items() if name not in _STALE}
    used = {name: value for name, value in fields.items() if value}  # what is off stays off
    own = table.types.get(text.model_type, {})
    numbers = {name: own[name] for name in own.keys() & used if type(own[name]) in (int, float)}
    fields |= _per_layer(used, text.num_hidden_layers) | _sizes(used, table, {}) | numbers
    _cut_factors(fields)
    with quiet():
        return type(text)(**fields)


def _cut_factors(fields: dict[str, Any]) -> None:
    """Cut the rotary frequency factors (longrope) to the number of pairs of a tiny head."""
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and rope.keys() >= _FACTORS:
        head = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        pairs = int(head * rope.get("partial_rotary_factor", 1)) // 2
        fields["rope_parameters"] = rope | {name: rope[name][:pairs] for name in _FACTORS}


def _sizes(fields: dict[str, Any], table: FamilyTable, aliases: dict[str, str]) -> dict[str, Any]:
    """Return the tiny values of the fields that a config has, without a padding token."""
    known = fields.keys() | aliases.keys()
    sizes = {name: value for name, value in table.sizes.items() if name in known}
    for name, more in table.companions.items():
        if fields.get(name):
            sizes |= {other: value for other, value in more.items() if other in fields}
    if fields.get("sliding_window") is None:  # many classes then list no sliding layers
        sizes.pop("sliding_window", None)
    return sizes | ({"pad_token_id": None} if "pad_token_id" in fields else {})


def _per_layer(fields: dict[str, Any], layers: int) -> dict[str, list[Any]]:
    """Cut every list with one entry per layer to the same few layers, of every kind."""
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list) and len(value) == layers
    }
    if not lists:
        return {}
    chosen = _sample([repr(kind) for kind in zip(*lists.values(), strict=True)])
    return {name: [value[layer] for layer in chosen] for name, value in lists.items()}


def _sample(kinds: Sequence[str]) -> list[int]:
    """Choose layers of as many kinds as fit, in the order of the model."""
    if len(kinds) < TINY_LAYERS:
        return [layer % len(kinds) for layer in range(TINY_LAYERS)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:TINY_LAYERS]
    others = [layer for layer in range(len(kinds)) if layer not in firsts]
    return sorted([*firsts, *others[: TINY_LAYERS - len(firsts)]])
