"""A model with an adapter merged into its weights, against peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshllm.errors import ModelError, UserError
from meshllm.model.files.manifest import config_digest
from meshllm.model.files.source import Source, open_folder
from meshllm.model.training.merge import CONFIG, WEIGHTS, LoraAdapter, merge
from meshllm.testing.models import stock_model, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft

IDS = torch.arange(1, 9)[None]


@pytest.fixture
def source(llama: Path) -> Source:
    return open_folder("llama", llama)


def trained(source: Source, folder: Path, **options: Any) -> Path:
    """Save an adapter with random matrices."""
    fields: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    config = LoraConfig(**fields | options)
    model: Any = stock_model(source)
    tuned = get_peft_model(model, config)
    for name, each in tuned.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(each, std=0.1)
    tuned.save_pretrained(str(folder))
    return folder


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize(
    "options", [{}, {"lora_alpha": 3}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 4}}]
)
def test_a_merged_model_computes_what_peft_does(
    source: Source, tmp_path: Path, options: dict[str, Any]
) -> None:
    adapter = trained(source, tmp_path / "adapter", **options)
    stock: Any = stock_model(source)
    own: Any = PeftModel.from_pretrained(stock, str(adapter))

    (tmp_path / "new").mkdir()
    merge(source, LoraAdapter.read(adapter), tmp_path / "new" / "merged")

    merged = open_folder("merged", tmp_path / "new" / "merged")
    torch.testing.assert_close(logits(stock_model(merged)), logits(own.merge_and_unload()))
    assert config_digest(merged) != config_digest(source)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["merged"]


def test_the_files_of_a_sharded_model_are_merged_one_by_one(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "model", "gpt2", dtype=torch.bfloat16, file_bytes=100_000)
    adapter = trained(source, tmp_path / "adapter", target_modules=["c_attn"], fan_in_fan_out=True)
    steps = list[str]()

    merge(source, LoraAdapter.read(adapter), tmp_path / "merged", steps.append)

    stock: Any = stock_model(source)
    own: Any = PeftModel.from_pretrained(stock, str(adapter))
    merged = stock_model(open_folder("merged", tmp_path / "merged"))
    torch.testing.assert_close(logits(merged), logits(own.merge_and_unload()))
    names = {each.name for each in source.folder.iterdir()}
    assert {each.name for each in (tmp_path / "merged").iterdir()} == names
    assert len(steps) > 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "changes no weights"),
        ({"use_dora": True}, "`use_dora` cannot be merged"),
        ({"bias": "all"}, "`bias` cannot be merged"),
        ({"alpha_pattern": {"q_proj": 2}}, "`alpha_pattern`"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights`"),
        ({"init_lora_weights": "olora"}, "`init_lora_weights`"),
        ({"alora_invocation_tokens": [1]}, "`alora_invocation_tokens`"),
        ({"layer_replication": [[0, 2]]}, "`layer_replication`"),
        ({"of_a_later_version": True}, "`of_a_later_version`"),
        ({"lora_alpha": True}, "no number"),
        ({"lora_alpha": None}, "no number"),
    ],
)
def test_other_adapters_are_refused(
    source: Source, tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    path = trained(source, tmp_path / "adapter") / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(ModelError, match=error):
        LoraAdapter.read(path.parent)


@pytest.mark.parametrize("text", ["[]", "{", "\x00"])
def test_an_invalid_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG).write_text(text)

    with pytest.raises(ModelError, match="not a JSON object"):
        LoraAdapter.read(tmp_path)
    with pytest.raises(ModelError, match="has no"):
        LoraAdapter.read(tmp_path / "missing")


def test_a_prompt_is_not_merged(source: Source, tmp_path: Path) -> None:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    stock: Any = stock_model(source)
    get_peft_model(stock, config).save_pretrained(str(tmp_path))

    with pytest.raises(ModelError, match="PROMPT_TUNING"):
        LoraAdapter.read(tmp_path)


def test_an_adapter_of_another_model_is_refused(source: Source, tmp_path: Path) -> None:
    adapter = trained(source, tmp_path / "adapter")
    path = adapter / WEIGHTS
    tensors = load_file(path)
    own = {each.replace("layers.5.", "layers.7."): tensor for each, tensor in tensors.items()}
    ends = ("q_proj.lora_A.weight", "o_proj.lora_A.weight")
    narrow = {
        each: tensor[:, :1].contiguous() if each.endswith(ends) else tensor
        for each, tensor in tensors.items()
    }
    strange = tensors | {"base_model.model.x": torch.ones(1)}
    for wrong, error in (
        (own, "no weight `model.layers.7"),
        (narrow, "is for a weight of shape"),
        (strange, "other tensors than LoRA: `base_model.model.x`"),
    ):
        save_file(wrong, path)
        with pytest.raises(ModelError, match=error):
            merge(source, LoraAdapter.read(adapter), tmp_path / "merged")
        assert not list(tmp_path.glob("merged*"))
    path.unlink()
    with pytest.raises(ModelError, match="missing") as caught:
        merge(source, LoraAdapter.read(adapter), tmp_path / "merged")
    assert caught.value.hint == "save the adapter again with peft"


def test_a_folder_that_exists_is_left_alone(source: Source, tmp_path: Path) -> None:
    adapter = LoraAdapter.read(trained(source, tmp_path / "adapter"))
    (tmp_path / "merged").mkdir()
    (tmp_path / "file").write_text("x")

    with pytest.raises(UserError, match="exists"):
        merge(source, adapter, tmp_path / "merged")
    for parent in ("file", "missing"):
        with pytest.raises(UserError, match="cannot be written"):
            merge(source, adapter, tmp_path / parent / "merged")
    assert not (tmp_path / "missing").exists()


def test_models_merged_with_several_adapters_are_told_apart(source: Source, tmp_path: Path) -> None:
    names = "one", "two"
    made = [
        LoraAdapter.read(trained(source, tmp_path / name, lora_alpha=1 + at))
        for at, name in enumerate(names)
    ]
    merge(source, made[0], tmp_path / "m1")
    first = open_folder("m1", tmp_path / "m1")
    merge(source, made[1], tmp_path / "m2")
    merge(first, made[1], tmp_path / "m12")

    digests = {config_digest(open_folder(name, tmp_path / name)) for name in ("m1", "m2", "m12")}

    assert len(digests | {config_digest(source)}) == 4
