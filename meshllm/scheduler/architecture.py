"""The operators of a decoder-only transformer, counted from its `config.json`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from meshllm.errors import UserError
from meshllm.names import Quant
from meshllm.protocol.planning.plan import ModelSizes
from meshllm.protocol.session.waiting import RowQueueLimits

ITEM_BYTES = 2  # of a value in bfloat16: hidden states and KV caches
WEIGHT_BYTES = {Quant.NONE: 2.0, Quant.INT8: 1.0, Quant.INT4: 0.5625}
"""Bytes per weight; a group of 64 weights of 4 bits has a scale and a zero point."""

_CHUNK_ROWS, _STEP_ROWS = 1024, 32  # of a prefill chunk and of a step, as nodes bound them
_MASK_TOKENS = 4096  # most rows of one forward

MAX_DIMENSION = 1 << 24

_DTYPES = "bfloat16", "float16", "float32"

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ATTENTION = {"full_attention", "sliding_attention"}
_SEVERAL_KINDS = ("first_k_dense_replace", "mlp_only_layers", "full_attention_interval")


@dataclass(frozen=True, slots=True)
class Operator:
    """What one operator of a layer computes and moves for some rows."""

    flops: float
    moved_bytes: float
    """Weights, activations and cache, read and written once."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Dimensions of a model; all its layers are alike."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    is_tied: bool = False
    """Embedding and head share their weights."""
    experts: int = 1
    active_experts: int = 1
    """Experts that compute each row."""
    shared: int = 0
    """Width of the expert that computes all rows besides."""
    quant: Quant = Quant.NONE
    dtype: str = "bfloat16"
    """Of its weights without a quantisation, which only its name tells."""

    @property
    def precise_name(self) -> str:
        """The name that a mesh gives it beside other quantisations of the same model."""
        return f"{self.name}@{self.dtype if self.quant is Quant.NONE else self.quant}"

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any], quant: Quant = Quant.NONE) -> Self:
        """Read the dimensions from a `config.json`.

        Raises:
            UserError: a dimension is missing or invalid, attention is of another kind, or layers
                differ.
        """
        text = config.get("text_config", config)
        if not isinstance(text, Mapping) or text.get("kv_lora_rank"):
            raise UserError(
                f"The operators of `{name}` are unknown: its attention is latent or unknown",
                hint="measure it on its machines, and plan with `ring plan --nodes`",
            )
        kinds, sparse = text.get("layer_types") or [], text.get("decoder_sparse_step") or 1
        is_alike = isinstance(kinds, list) and all(str(each) in _ATTENTION for each in kinds)
        if not is_alike or sparse != 1 or any(text.get(key) for key in _SEVERAL_KINDS):
            raise UserError(
                f"The operators of `{name}` are unknown: its layers are of several kinds",
                hint="measure it on its machines, and plan with `ring plan --nodes`",
            )
        found = {field: _first(name, text, keys) for field, keys in _KEYS.items()}
        experts = next((int(text[key]) for key in _EXPERTS if text.get(key)), 1)
        dense = text.get("intermediate_size") or 4 * found["hidden"]
        width = text.get("moe_intermediate_size") or dense if experts > 1 else dense
        shared = text.get("shared_expert_intermediate_size")
        if shared is None and (count := text.get("n_shared_experts")):
            shared = _dimension(name, count) * _dimension(name, width)
        return cls(
            name=name,
            **found,
            kv_heads=_dimension(name, text.get("num_key_value_heads") or found["heads"]),
            head_width=_dimension(name, text.get("head_dim") or found["hidden"] // found["heads"]),
            intermediate=_dimension(name, width),
            is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings"))),
            experts=_dimension(name, experts),
            active_experts=_dimension(name, text.get("num_experts_per_tok") or 1),
            shared=_dimension(name, shared) if shared and experts > 1 else 0,
            quant=quant,
            dtype=next(_dtypes(config, text), "bfloat16"),
        )

    @property
    def attention_weights(self) -> int:
        """Count the weights of the projections of one attention."""
        return self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Count the weights of one gated MLP."""
        return 3 * self.hidden * self.intermediate

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one layer per token, in bytes."""
        return 2 * self.kv_heads * self.head_width * ITEM_BYTES

    def operators(self, rows: int) -> Iterator[Operator]:
        """Yield the operators of one layer for the first ``rows`` rows of one session.

        As in LLM-Viewer (Yuan et al., 2024), each is bound by its own computation or memory.
        """
        per_weight = WEIGHT_BYTES[self.quant]
        queries = self.heads * self.head_width
        keys = self.kv_heads * self.head_width
        for inputs, outputs in ((self.hidden, queries + 2 * keys), (queries, self.hidden)):
            yield self._linear(rows, inputs, outputs, per_weight)
        attended = rows * (rows + 1) / 2
        cache = rows * keys * ITEM_BYTES
        for _ in ("scores", "values"):
            yield Operator(2 * attended * queries, cache + rows * queries * ITEM_BYTES)
        # A router that spreads rows evenly leaves this many experts without any.
        idle = (1 - self.active_experts / self.experts) ** rows
        read = per_weight * self.experts * (1 - idle)
        mlp = rows * self.active_experts
        yield self._linear(mlp, self.hidden, 2 * self.intermediate, read)
        yield self._linear(mlp, self.intermediate, self.hidden, read)
        if self.shared:
            yield self._linear(rows, self.hidden, 2 * self.shared, per_weight)
            yield self._linear(rows, self.shared, self.hidden, per_weight)
        yield Operator(10 * rows * self.hidden, 8 * rows * self.hidden * ITEM_BYTES)  # two norms

    def head(self, rows: int) -> Operator:
        """Return the head as an operator."""
        return self._linear(rows, self.hidden, self.vocabulary, float(ITEM_BYTES))

    def sizes(self, context: int) -> ModelSizes:
        """Describe the model to the planner, with sessions of up to ``context`` tokens."""
        weights = self.attention_weights + self.experts * (self.expert_weights + self.hidden)
        weights += 3 * self.hidden * self.shared
        if self.experts == 1:
            weights -= self.hidden  # no router
        ends = self.vocabulary * self.hidden * ITEM_BYTES
        layer = round(weights * WEIGHT_BYTES[self.quant])
        return ModelSizes(
            name=self.name,
            layer_bytes=(layer,) * self.layers,
            kv_bytes_per_token=(self.kv_bytes_per_token,) * self.layers,
            embed_bytes=ends,
            head_bytes=0 if self.is_tied else ends,
            tied=self.is_tied,
            hidden_size=self.hidden,
            itemsize=ITEM_BYTES,
            context=context,
            workspace_bytes=self._workspace_bytes(layer, context),
        )

    def _workspace_bytes(self, layer: int, context: int) -> int:
        """Bound what a node needs besides weights and caches, as `meshllm.node.ring.shape` does."""
        row = 2 * layer // self.hidden + 8 * self.hidden + min(context, _MASK_TOKENS) * ITEM_BYTES
        forward = _CHUNK_ROWS * row + _STEP_ROWS * self.vocabulary * 4
        return forward + RowQueueLimits(self.hidden * ITEM_BYTES).total

    def _linear(self, rows: int, inputs: int, outputs: int, weight_bytes: float) -> Operator:
        moved = inputs * outputs * weight_bytes + rows * (inputs + outputs) * ITEM_BYTES
        return Operator(2.0 * rows * inputs * outputs, moved)


def _dtypes(*configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the data types of a mesh that a `config.json` states, in the order of precedence."""
    stated = (str(each.get(key)) for each in configs for key in ("dtype", "torch_dtype"))
    return (each for each in stated if each in _DTYPES)


def _first(name: str, config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return _dimension(name, next((config[key] for key in keys if key in config), None), keys[0])


def _dimension(name: str, value: Any, key: str = "a dimension") -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_DIMENSION:
        return value
    raise UserError(f"The config of `{name}` has no valid `{key}`: `{str(value)[:64]}`")
