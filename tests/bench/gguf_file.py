"""A model as a GGUF file, for llama.cpp; written by the package ``gguf``, which is not installed.

Only for timing: query and key rows keep the order of transformers, and there is no vocabulary, so
the file computes other numbers than the model.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

NAMES = {"none": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""The formats of llama.cpp of about as many bits as ours."""


def write_gguf(folder: Path, kind: str, file: Path) -> None:
    """Write a dense Llama or Qwen3 model of a folder, with all matrices in one format.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    gguf: Any = import_module("gguf")
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(file, config.model_type)
    _describe(writer, config)
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers
    )
    wanted = gguf.GGMLQuantizationType[NAMES[kind]]
    for name, tensor in _tensors(folder):
        place = names.get_name(name, try_suffixes=(".weight",))
        plain = tensor.float().numpy()
        if tensor.dim() < 2:  # a norm
            writer.add_tensor(place, plain)
        else:
            writer.add_tensor(place, gguf.quants.quantize(plain, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: Any, config: Any) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- not a mapping
                yield name, file.get_tensor(name)
