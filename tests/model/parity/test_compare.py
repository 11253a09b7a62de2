from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from meshllm.errors import ModelError
from meshllm.model.files.source import Source, open_folder
from meshllm.model.parity import compare as module
from meshllm.model.parity.cases import layout
from meshllm.model.parity.compare import Depth, compare, measure, random_model, run_stock
from meshllm.model.parity.families import read_table, tiny_config
from meshllm.model.split.shard import Shard
from meshllm.model.split.structure import PROBE_ERRORS
from meshllm.model.steps.load import load_shard
from meshllm.names import Span
from tests.builders.slow_cases import each_of

DENSE = ["llama", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox", "opt", "stablelm", "biogpt"]
EXPERTS = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe"]
SLIDING = ["mistral", "gemma2", "gemma3_text", "cohere2", "olmo3"]
ALIBI = ["bloom", "mpt", "falcon:alibi"]
HYBRID = ["qwen3_next", "jamba", "falcon_h1", "granitemoehybrid"]
STATE = ["mamba", "mamba2"]
CONVOLUTION = ["lfm2", "lfm2_moe"]
ALIKE = [  # built like another family here: only the slow tests run them too
    *("qwen2", "qwen3", "stablelm", "biogpt", "qwen3_moe", "olmoe", "granitemoe", "olmo3"),
    *("lfm2_moe", "qwen3_5_moe"),
]
FORGETFUL = ["jamba", "mamba"]  # whose stock forward drops its state in a second chunk
EYE = {
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
"""A tiny vision tower: each config class takes the fields that it has."""


FEW = Depth(layouts=("3", "entry"), crops=(1, 8))


ATTENTION = [*DENSE, *EXPERTS, *SLIDING, *ALIBI]
STATES = [*HYBRID, *STATE, *CONVOLUTION]


@pytest.mark.parametrize("name", each_of([*ATTENTION, *STATES], ALIKE))
def test_the_parts_are_the_whole(name: str) -> None:
    verdict = measure(tiny_config(name, read_table()), FEW)

    assert verdict.reason == ""
    assert verdict.equal
    assert verdict.croppable == (name in ATTENTION)  # a recurrent state cannot be cropped
    assert verdict.chunkable == (name not in FORGETFUL)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3_text", "mamba"])
def test_the_parts_are_the_whole_in_bfloat16(name: str) -> None:
    depth = Depth((torch.float32, torch.bfloat16), ("2",))

    assert measure(tiny_config(name, read_table()), depth).reason == ""


@pytest.mark.parametrize("name", each_of(read_table().wrappers, ALIKE))
def test_the_text_model_of_a_wrapper_is_split(name: str, tmp_path: Path) -> None:
    kind = CONFIG_MAPPING[name]
    eye = {key: size for key, size in EYE.items() if hasattr(kind().vision_config, key)}
    text = tiny_config(read_table().wrappers[name], read_table()).to_dict()
    config = kind(text_config=text, vision_config=eye)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    source = open_folder(name, tmp_path)
    stock = run_stock(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), (3,))

    finding = compare(source, layout("entry", 6), torch.float32, stock, (3,))

    assert finding.fault == ""


def test_state_outside_the_cache_is_refused() -> None:
    verdict = measure(tiny_config("recurrent_gemma", read_table()), Depth(layouts=("1",)))

    assert verdict.reason.startswith("two sessions: logits differ")


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(ModelError, match="does not continue from its cache"):
        measure(tiny_config("openai-gpt", read_table()), Depth(layouts=("1",)))


def test_one_wrong_weight_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_worn(source: Source, span: Span, **options: Any) -> Shard:
        shard = load_shard(source, span, **options)
        weight = next(p for p in shard.model.parameters() if not p.is_meta)
        weight.view(-1)[-1] += 0.01
        return shard

    monkeypatch.setattr(module, "load_shard", load_worn)

    verdict = measure(tiny_config("llama", read_table()), Depth(layouts=("3",)))

    assert not verdict.equal
    assert "logits differ" in verdict.reason


def test_a_type_that_cannot_be_split_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Source, *_: object, **__: object) -> Shard:
        raise ModelError(f"no list of layers in `{source.folder}`\nsecond line")

    monkeypatch.setattr(module, "load_shard", fail)

    verdict = measure(tiny_config("llama", read_table()), Depth(layouts=("1",)))

    assert not verdict.whole
    assert verdict.reason == "ModelError: no list of layers in `the model`, parts 0:6 in float32"


def test_a_random_model_is_reproducible_and_leaves_no_trace() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    with random_model(tiny_config("llama", read_table()), torch.float32) as (first, source):
        folder: Path = source.folder
        weights = first.state_dict()
    with random_model(tiny_config("llama", read_table()), torch.float32) as (second, _):
        again = second.state_dict()

    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not folder.exists()
    assert torch.equal(torch.rand(1), expected)  # the caller's random numbers are untouched


def test_a_config_that_fits_nothing_raises() -> None:
    config = tiny_config("llama", read_table())
    config.hidden_act = "none such"

    with pytest.raises(PROBE_ERRORS):
        measure(config, Depth(layouts=("1",)))
