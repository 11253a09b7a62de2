"""Write the built-in model as GGUF, for llama.cpp: ``python gguf_of.py FOLDER FILE``.

Runs in the environment of the engine, which has `gguf`, numpy and no torch.
"""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(folder: Path, target: Path) -> None:
    """Convert a Qwen3 model with bfloat16 weights and a byte-level BPE tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_name("builtin")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, folder, config)
    for name, values in _weights(folder / "model.safetensors"):
        writer.add_tensor(_renamed(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, int]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    tokens = {number: text for text, number in tokenizer["model"]["vocab"].items()} | special
    known = [number in tokens for number in range(config["vocab_size"])]
    kinds = gguf.TokenType
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")  # splits off single digits, as this tokenizer does
    writer.add_token_list([tokens.get(at, f"<unused {at}>") for at in range(len(known))])
    writer.add_token_types(
        [
            kinds.CONTROL if at in special else kinds.NORMAL if is_known else kinds.UNUSED
            for at, is_known in enumerate(known)
        ]
    )
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
    # The tokenizer puts a space before each text, which GGUF cannot say: the template does.
    spaced = "' ' + (message['content'] | trim)"
    writer.add_chat_template(settings["chat_template"].replace("message['content'] | trim", spaced))


def _weights(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights as float32; bfloat16 is its upper half."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    for name, each in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = each["data_offsets"]
            raw = np.frombuffer(data[8 + length + start : 8 + length + stop], "<u2")
            values = (raw.astype("<u4") << 16).view("<f4")
            yield name, values.reshape(each["shape"])


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
