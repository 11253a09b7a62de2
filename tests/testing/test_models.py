"""Tiny models are the same in every process."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from meshllm.testing.models import tiny_model


def test_onemkl_is_warmed_up_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    build = AutoModelForCausalLM.from_config

    def building(*args: object, **options: object) -> object:
        calls.append("build")
        return build(*args, **options)

    monkeypatch.setattr(
        "meshllm.testing.models.warm_up_onemkl", lambda: calls.append("warm"), raising=False
    )
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", building)

    tiny_model(tmp_path)

    assert calls == ["warm", "build"]
