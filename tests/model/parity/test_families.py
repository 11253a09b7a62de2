from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig, JambaConfig, Phi3Config, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshllm.errors import ModelError
from meshllm.model.parity import families
from meshllm.model.parity.compare import measure
from meshllm.model.parity.families import (
    TINY_LAYERS,
    FamilyTable,
    read_table,
    shrink,
    text_types,
    tiny_config,
)
from meshllm.model.parity.verdict import known_verdicts, measured_verdicts
from tests.bench.families import render


@pytest.fixture(scope="module")
def table() -> FamilyTable:
    return read_table()


def test_every_registered_type_is_a_text_type_or_excluded_with_a_reason(table: FamilyTable) -> None:
    registered = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

    types = {name for name in text_types(table) if ":" not in name}

    assert types | table.wrappers.keys() | table.excluded.keys() == registered
    assert not types & table.excluded.keys()
    assert set(table.wrappers.values()) <= types
    assert all(table.excluded.values())


def test_the_data_has_no_unknown_type(table: FamilyTable) -> None:
    named = {name.partition(":")[0] for name in table.types}

    assert named <= set(text_types(table))


def test_the_written_verdicts_cover_every_text_type(table: FamilyTable) -> None:
    assert sorted(measured_verdicts()) == text_types(table)


def test_every_registered_type_has_a_verdict(table: FamilyTable) -> None:
    known = known_verdicts()

    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= known.keys()
    assert known["gemma3"] == replace(known["gemma3_text"], model_type="gemma3")
    assert known["bert"].reason == table.excluded["bert"]


def test_the_written_table_is_that_of_the_verdicts(table: FamilyTable) -> None:
    written = Path(families.__file__).with_name("FAMILIES.md").read_text("utf-8")

    assert written == render(measured_verdicts(), table)


def test_a_tiny_config_has_few_small_layers(table: FamilyTable) -> None:
    config = tiny_config("llama", table)

    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (6, 64, 128)


def test_a_variant_has_its_own_switches(table: FamilyTable) -> None:
    assert tiny_config("falcon:alibi", table).alibi
    assert not tiny_config("falcon", table).alibi


def test_an_unknown_type_is_refused_by_name(table: FamilyTable) -> None:
    with pytest.raises(ModelError, match="`llamma`"):
        tiny_config("llamma", table)


def test_shrinking_keeps_switches_and_drops_sizes(table: FamilyTable) -> None:
    real = Qwen3Config(attention_bias=True, tie_word_embeddings=True, rope_theta=5e5)

    tiny = shrink(real, table)

    assert (tiny.hidden_size, tiny.vocab_size, tiny.num_hidden_layers) == (64, 128, TINY_LAYERS)
    assert tiny.attention_bias
    assert tiny.tie_word_embeddings
    assert tiny.rope_parameters == real.rope_parameters


def test_shrinking_keeps_disabled_features_disabled(table: FamilyTable) -> None:
    real = Qwen3Config(sliding_window=None, num_key_value_heads=None)

    assert shrink(real, table).sliding_window is None


def test_shrinking_keeps_a_layer_of_each_kind(table: FamilyTable) -> None:
    kinds = ["sliding_attention"] * 25 + ["full_attention"]

    tiny = shrink(Gemma3TextConfig(num_hidden_layers=26, layer_types=kinds), table)

    assert tiny.layer_types == ["sliding_attention"] * 5 + ["full_attention"]


def test_shrinking_a_short_model_repeats_its_layers(table: FamilyTable) -> None:
    kinds = ["sliding_attention", "full_attention"]

    tiny = shrink(Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds), table)

    assert tiny.layer_types == kinds * 3


@pytest.mark.parametrize("part", [1.0, 0.75])
def test_shrinking_keeps_one_rotary_factor_per_pair(table: FamilyTable, part: float) -> None:
    factors = [1 + at / 10 for at in range(int(128 * part) // 2)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors[::-1]}
    real = Phi3Config(
        hidden_size=3072,
        num_attention_heads=24,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": part, **rope},
    )

    tiny = shrink(real, table)

    pairs = int(16 * part) // 2
    assert tiny.rope_parameters["short_factor"] == factors[:pairs]
    assert tiny.rope_parameters["long_factor"] == factors[::-1][:pairs]
    assert measure(tiny).equal


def test_shrinking_a_wrapper_gives_its_text_model(table: FamilyTable) -> None:
    real = PreTrainedConfig()
    real.text_config = JambaConfig()

    assert shrink(real, table).model_type == "jamba"
