"""The size of a model, computed from its config alone."""

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil  # type: ignore[import-untyped]  # ships no types
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Qwen3Config,
)

from meshllm.errors import ModelError
from meshllm.model.capacity import UNLIMITED, shape_of
from meshllm.model.files.source import Source, open_folder
from meshllm.model.shape import cache_cost, free_memory, mean_kv_bytes, reclaim, workspace_bytes
from meshllm.model.steps.load import load_shard
from meshllm.names import Quant, Span
from meshllm.testing.models import tiny_model
from tests.builders.sized_shapes import NOWHERE, qwen3_sized


def test_the_parts_of_a_published_size_add_up() -> None:
    shape = qwen3_sized()

    assert shape.layers == 28
    assert shape.layer_bytes == (31_461_888,) * 28
    assert shape.embed_bytes == 151_936 * 1024 * 2
    assert (shape.head_bytes, shape.tied) == (1024 * 2, True)
    assert shape.kv_bytes_per_token == (2 * 8 * 128 * 2,) * 28
    assert (shape.context, shape.dtype, shape.itemsize) == (40_960, "bfloat16", 2)
    assert (shape.hidden_size, shape.vocab_size, shape.model_type) == (1024, 151_936, "qwen3")


def test_an_untied_head_counts() -> None:
    config = LlamaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)

    shape = shape_of(Source("untied", NOWHERE, config), torch.float32)

    assert not shape.tied
    assert shape.head_bytes == (100 * 64 + 64) * 4


def test_each_layer_counts_its_own_state() -> None:
    config = Lfm2Config(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
    )

    shape = shape_of(Source("mixed", NOWHERE, config), torch.float32)

    assert shape.kv_bytes_per_token == (0, 2 * 2 * 16 * 4, 0)
    assert shape.layer_bytes[0] == shape.layer_bytes[2] != shape.layer_bytes[1]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2", "qwen3_next", "mamba2"])
@torch.inference_mode()
def test_a_session_costs_what_its_cache_allocates(name: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path, name)
    shape = shape_of(source)
    shard = load_shard(source, Span(1, 5), embed=False, head=False)
    cache, cost = shard.new_cache(), cache_cost(shape, Span(1, 5))

    for rows in (1, 5, 60, 30):
        shard.forward(torch.ones(1, rows, shape.hidden_size, dtype=shard.model.dtype), cache)
        held, growth = cost(cache.length)
        assert 0.99 * held <= cache.bytes <= held
        assert 0 <= growth <= held


def test_the_cost_of_a_token_depends_on_the_session_length() -> None:
    shape = qwen3_sized()
    per_token = shape.kv_bytes_per_token[0]

    assert mean_kv_bytes(shape, 4096) == (per_token,) * 28
    assert mean_kv_bytes(shape, 128) == (2 * per_token,) * 28
    assert cache_cost(shape, Span(0, 7))(4096) == (7 * 4096 * per_token, 4096 * per_token)
    assert cache_cost(shape, Span(3, 3))(4096) == (0, 0)


def test_the_workspace_of_a_published_size_is_bounded() -> None:
    assert 64 << 20 < workspace_bytes(qwen3_sized()) < 256 << 20


def test_experts_count_with_their_layer() -> None:
    config = MixtralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )

    shape = shape_of(Source("experts", NOWHERE, config), torch.float32)

    assert shape.layer_bytes[0] > 4 * 3 * 64 * 96 * 4
    assert shape.kv_bytes_per_token == (2 * 2 * 16 * 4,) * 2


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_sizes_are_those_of_loaded_weights(name: str, tmp_path: Path) -> None:
    source = tiny_model(tmp_path, name)
    shape = shape_of(source)

    for layer in range(shape.layers):
        shard = load_shard(source, Span(layer, layer + 1), embed=False, head=False)
        held = sum(parameter.nbytes for parameter in shard.model.parameters())
        assert held == shape.layer_bytes[layer]


def test_a_config_without_a_context_length_has_no_limit(tmp_path: Path) -> None:
    assert shape_of(tiny_model(tmp_path, "bloom")).context == UNLIMITED


def test_a_dtype_is_needed_if_config_and_weights_have_none() -> None:
    with pytest.raises(ModelError, match="has neither"):
        shape_of(Source("x", NOWHERE, LlamaConfig(num_hidden_layers=1)))


def test_some_memory_is_free() -> None:
    assert free_memory() > 0


def test_special_linear_modules_are_counted_as_plain() -> None:
    config = FalconConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    source = Source("falcon", NOWHERE, config)

    plain, quantised = (shape_of(source, torch.bfloat16, kind) for kind in (Quant.NONE, Quant.INT8))

    assert quantised.layer_bytes == plain.layer_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which pages are mapped")
def test_code_that_ran_once_is_unmapped_and_runs_again() -> None:
    def mapped() -> int:
        areas = psutil.Process().memory_maps(grouped=False)
        return sum(area.rss for area in areas if "libtorch_cpu" in area.path and "x" in area.perms)

    product = torch.ones(64, 64) @ torch.ones(64, 64)
    before = mapped()

    reclaim()

    assert mapped() < before / 2
    assert torch.equal(torch.ones(64, 64) @ torch.ones(64, 64), product)


@pytest.mark.parametrize(
    ("changes", "is_unmapped"),
    [
        ({}, True), ({"perms": "r--p"}, False), ({"perms": "rwxp"}, False),
        ({"anonymous": 4096}, False), ({"swap": 4096}, False), ({"path": "[vdso]"}, False),
    ],
)  # fmt: skip
def test_only_code_that_this_process_has_not_written_is_unmapped(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], *, is_unmapped: bool
) -> None:
    given = {"addr": "1000-3000", "perms": "r-xp", "path": "/a.so", "anonymous": 0, "swap": 0}
    area, advised = SimpleNamespace(**(given | changes)), list[tuple[int | None, int]]()
    monkeypatch.setattr(psutil.Process, "memory_maps", lambda _, grouped: [area])
    library = SimpleNamespace(
        madvise=lambda begin, length, _: advised.append((begin.value, length.value))
    )
    monkeypatch.setattr("meshllm.model.shape.ctypes.CDLL", lambda _: library)

    reclaim()

    assert advised == ([(0x1000, 0x2000)] if is_unmapped else [])


@pytest.mark.parametrize("error", [psutil.AccessDenied(), AttributeError(), ValueError()])
def test_memory_is_reclaimed_where_the_maps_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "memory_maps", refuse)

    reclaim()


@pytest.mark.parametrize("tied", [True, False])
def test_quantised_weights_are_counted_as_stored_in_memory(tmp_path: Path, tied: bool) -> None:
    config = Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=tied,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    source = open_folder("small", tmp_path)
    plain, shape = shape_of(source), shape_of(source, None, Quant.INT8)

    assert 0.5 * plain.layer_bytes[0] < shape.layer_bytes[0] < 0.8 * plain.layer_bytes[0]
    assert shape.embed_bytes == plain.embed_bytes
    assert 512 * 64 <= shape.head_bytes <= 0.7 * plain.embed_bytes


def test_rows_of_float32_beside_weights_of_bfloat16_are_counted(tmp_path: Path) -> None:
    config = MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4)
    assert config.residual_in_fp32
    config.save_pretrained(tmp_path)

    shape = shape_of(open_folder("mamba", tmp_path), torch.bfloat16)

    assert (shape.dtype, shape.itemsize) == ("bfloat16", 4)
