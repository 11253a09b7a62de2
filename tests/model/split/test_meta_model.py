"""A whole model on meta, and what is left after stripping."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen3_5Config
from transformers.utils import logging

from meshllm.errors import ModelError
from meshllm.model.parity.families import read_table, tiny_config
from meshllm.model.split import meta_model as meta_models
from meshllm.model.split.meta_model import Part, build, quiet, row_dtype, strip
from meshllm.model.split.structure import ModelStructure, find_structure
from meshllm.model.split.stubs import EndStub, LayerStub
from meshllm.names import Span


def llama(*, tied: bool) -> PreTrainedConfig:
    config = tiny_config("llama", read_table())
    config.tie_word_embeddings = tied
    return config


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"residual_in_fp32": False}, torch.bfloat16),
        ({"residual_in_fp32": True}, torch.float32),
    ],
)
def test_rows_between_layers_may_be_wider_than_weights(
    fields: dict[str, bool], dtype: torch.dtype
) -> None:
    assert row_dtype(PreTrainedConfig(**fields), torch.bfloat16) is dtype


def held(config: PreTrainedConfig, part: Part) -> set[str]:
    """Return the names of the parameters that are left, except those inside a layer."""
    meta_model = build(config, torch.float32)
    strip(meta_model, part)
    names = dict(meta_model.model.named_parameters())
    return {name.removesuffix(".weight") for name in names if ".layers." not in name}


def test_nothing_is_allocated() -> None:
    config = LlamaConfig(hidden_size=16_384, intermediate_size=53_248, num_hidden_layers=126)

    model = build(config, torch.bfloat16).model

    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("part", "ends"),
    [
        (Part(Span(0, 0), embed=True, head=False), {"model.embed_tokens"}),
        (Part(Span(6, 6), embed=False, head=True), {"model.norm", "lm_head"}),
        (Part(Span(1, 3), embed=False, head=False), set()),
        (Part(Span(0, 6), embed=True, head=True), {"model.embed_tokens", "model.norm", "lm_head"}),
    ],
)
def test_the_ends_that_a_part_does_not_hold_are_stubs(part: Part, ends: set[str]) -> None:
    assert held(llama(tied=False), part) == ends


def test_both_sides_of_a_tie_stay_with_either_end() -> None:
    config = llama(tied=True)

    embed = held(config, Part(Span(0, 0), embed=True, head=False))
    head = held(config, Part(Span(6, 6), embed=False, head=True))

    assert embed == {"model.embed_tokens", "lm_head"}
    assert head == {"model.embed_tokens", "lm_head", "model.norm"}
    assert held(config, Part(Span(1, 2), embed=False, head=False)) == set()


def test_only_ties_of_weights_that_are_both_held_are_left() -> None:
    meta_model = build(llama(tied=False), torch.float32)
    first, middle, last = (f"model.layers.{n}.input_layernorm.weight" for n in (0, 2, 3))
    meta_model.model.all_tied_weights_keys = {middle: first, last: middle}

    strip(meta_model, Part(Span(2, 4), embed=False, head=False))

    assert meta_model.model.all_tied_weights_keys == {last: middle}


def test_stubs_keep_the_index_of_their_layer() -> None:
    meta_model = build(llama(tied=True), torch.float32)

    strip(meta_model, Part(Span(2, 4), embed=False, head=False))

    stubs = [isinstance(layer, LayerStub) for layer in meta_model.parts]
    assert stubs == [True, True, False, False, True, True]
    assert meta_model.model.model.layers[3].self_attn.layer_idx == 3
    assert isinstance(meta_model.model.model.norm, EndStub)


@pytest.mark.parametrize("tied", [False, True])
def test_copies_for_parts_leave_the_whole_as_it_is(tied: bool) -> None:
    whole = build(llama(tied=tied), torch.float32)
    layers, names = list(whole.parts), list(whole.model.state_dict())
    parts = [Part(Span(0, 2), embed=True, head=False), Part(Span(2, 6), embed=False, head=True)]

    copies = [whole.copy_for(part) for part in parts]

    for copy, part in zip(copies, parts, strict=True):
        strip(copy, part)
        fresh = build(llama(tied=tied), torch.float32)
        strip(fresh, part)
        assert list(copy.model.state_dict()) == list(fresh.model.state_dict())
        assert copy.model.all_tied_weights_keys == fresh.model.all_tied_weights_keys
        assert copy.model.config is not whole.model.config
        assert all(copy.parts[at] is not layers[at] for at in range(6))
        copy.model.to_empty(device="cpu")
    assert list(whole.parts) == layers
    assert list(whole.model.state_dict()) == names
    assert all(parameter.is_meta for parameter in whole.model.parameters())


def test_the_text_model_of_a_wrapper_takes_the_text_config() -> None:
    config = Qwen3_5Config(text_config=tiny_config("qwen3_5_text", read_table()).to_dict())

    meta_model = build(config, torch.float32)

    assert type(meta_model.model).__name__ == "Qwen3_5ForCausalLM"
    assert meta_model.layers == config.text_config.num_hidden_layers


def test_the_structures_of_the_last_configs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    examined = list[int]()

    def noted(model: nn.Module, count: int) -> ModelStructure:
        examined.append(count)
        return find_structure(model, count)

    monkeypatch.setattr(meta_models, "find_structure", noted)
    monkeypatch.setattr(meta_models, "MAX_STRUCTURES", 2)
    monkeypatch.setattr(
        meta_models, "_STRUCTURES", kept := dict[tuple[type, str], ModelStructure]()
    )
    for layers, count in ((2, 1), (3, 2), (2, 2), (3, 2), (4, 1)):
        build(LlamaConfig(num_hidden_layers=layers), torch.float32)
        assert len(kept) == count

    assert examined == [2, 3, 4]


def test_the_config_of_the_caller_is_unchanged() -> None:
    config = llama(tied=True)

    build(config, torch.float16, attention="eager")

    assert config.dtype is None
    assert config._attn_implementation is None


def test_a_config_that_no_model_can_be_built_from_is_refused() -> None:
    config = llama(tied=True)
    config.hidden_act = "wishful"

    with pytest.raises(ModelError, match=r"A `llama` cannot be built from its config: 'wishful'"):
        build(config, torch.float32)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 0),
        ("pad_token_id", 2**31),
        ("hidden_size", -1),
    ],
)
def test_values_of_no_model_are_refused(field: str, value: object) -> None:
    config = llama(tied=True)
    setattr(config, field, value)

    with pytest.raises(ModelError, match="A `llama` cannot be built from its config"):
        build(config, torch.float32)


@pytest.mark.parametrize("bar", [True, False])
def test_the_logging_of_transformers_is_restored(bar: bool) -> None:
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        (logging.enable_progress_bar if bar else logging.disable_progress_bar)()

        with quiet():
            inside = logging.get_verbosity(), logging.is_progress_bar_enabled()

        assert inside == (logging.ERROR, False)
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.INFO, bar)
    finally:
        logging.set_verbosity(level)
        (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
