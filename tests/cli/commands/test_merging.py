"""`meshllm model merge`, with an adapter of peft."""

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PromptTuningConfig, get_peft_model

from meshllm.model.files.source import open_folder
from meshllm.testing.models import stock_model
from tests.cli.conftest import Invoke

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft


def save(llama: Path, folder: Path, config: Any) -> str:
    model: Any = stock_model(open_folder("llama", llama))
    get_peft_model(model, config).save_pretrained(str(folder))
    return str(folder)


def test_an_adapter_is_merged_into_a_model_to_serve(
    meshllm: Invoke, llama: Path, tmp_path: Path
) -> None:
    adapter = save(llama, tmp_path / "adapter", LoraConfig(target_modules=["q_proj"]))

    result = meshllm("model", "merge", str(llama), adapter, str(tmp_path / "merged"))

    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'merged'}\n")
    assert meshllm("model", "show", str(tmp_path / "merged")).exit_code == 0


def test_an_adapter_that_changes_no_weights_is_refused(
    meshllm: Invoke, llama: Path, tmp_path: Path
) -> None:
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    adapter = save(llama, tmp_path / "adapter", config)

    result = meshllm("model", "merge", str(llama), adapter, str(tmp_path / "merged"))

    assert result.exit_code == 4
    assert "PROMPT_TUNING" in result.stderr
    assert not (tmp_path / "merged").exists()
