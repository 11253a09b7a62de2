"""The network in training: a Qwen3 decoder in plain functions over named fp32 weights.

Names and shapes are those of transformers, so a saved dictionary is a model.
B batch, T tokens, D width, H query heads, K head width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS, WIDTH, HEADS, HEAD, INNER = 8, 256, 4, 64, 704  # one key-value head
BASE, EPSILON = 10000.0, 1e-6
MATRICES = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (HEAD, WIDTH),
    "self_attn.v_proj": (HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
VECTORS = {
    "input_layernorm": WIDTH,
    "post_attention_layernorm": WIDTH,
    "self_attn.q_norm": HEAD,
    "self_attn.k_norm": HEAD,
}


def settings(vocabulary: int, end: int, pad: int) -> dict[str, object]:
    """Return the content of config.json for transformers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": 2048,
        "max_window_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 1,
        "pad_token_id": pad,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_theta": BASE, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocabulary,
    }


def start(vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Initialise weights: normal matrices, ones for norms, zeros for output projections."""
    rng = torch.Generator().manual_seed(seed)
    weights = {"model.embed_tokens.weight": 0.02 * torch.randn(vocabulary, WIDTH, generator=rng)}
    for layer in range(LAYERS):
        for name, (rows, columns) in MATRICES.items():
            scale = 0.0 if name.endswith(("o_proj", "down_proj")) else columns**-0.5
            matrix = scale * torch.randn(rows, columns, generator=rng)
            weights[f"model.layers.{layer}.{name}.weight"] = matrix
        for name, width in VECTORS.items():
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(width)
    weights["model.norm.weight"] = torch.ones(WIDTH)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), EPSILON)


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)


def _angles(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    speed = BASE ** (-torch.arange(0, HEAD, 2, device=device) / HEAD)
    angle = torch.outer(torch.arange(length, device=device).float(), speed)  # [T, K/2]
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def forward(weights: dict[str, Tensor], tokens: Tensor, seen: Tensor) -> Tensor:
    """Run tokens [B, T], where `seen` [B, 1, T, T] lets them see; return [B, T, D], bf16."""
    batch, length = tokens.shape
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    cosine, sine = _angles(length, tokens.device)
    x = F.embedding(tokens, half["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        at = {name: half[f"model.layers.{layer}.{name}.weight"] for name in (*MATRICES, *VECTORS)}
        fused = torch.cat([at[f"self_attn.{name}_proj"] for name in "qkv"])
        y = F.linear(_norm(x, at["input_layernorm"]), fused)
        q, k, v = torch.split(y, [HEADS * HEAD, HEAD, HEAD], -1)
        q = _norm(q.view(batch, length, HEADS, HEAD), at["self_attn.q_norm"]).transpose(1, 2)
        k = _norm(k.view(batch, length, 1, HEAD), at["self_attn.k_norm"]).transpose(1, 2)
        q, k = _turn(q, cosine, sine), _turn(k, cosine, sine).expand_as(q)
        v = v.view(batch, 1, length, HEAD).expand_as(q)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y = y.transpose(1, 2).reshape(batch, length, HEADS * HEAD)
        x = x + F.linear(y, at["self_attn.o_proj"])
        fused = torch.cat([at["mlp.gate_proj"], at["mlp.up_proj"]])
        gate, up = F.linear(_norm(x, at["post_attention_layernorm"]), fused).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, at["mlp.down_proj"])
    return _norm(x, half["model.norm.weight"])


def loss(weights: dict[str, Tensor], hidden: Tensor, where: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of the targets.

    `where` [N] are flat positions in hidden [B, T, D], `target` [N] the tokens that follow.
    """
    half = weights["model.embed_tokens.weight"].bfloat16()
    logits = F.linear(hidden.flatten(0, 1)[where], half)
    return F.cross_entropy(logits.float(), target)
