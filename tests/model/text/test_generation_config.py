import json
from pathlib import Path
from typing import Any

import pytest

from meshllm.errors import ModelError
from meshllm.model.text.generation_config import read_config, recommended


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.95}, {}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
         {"repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 9},
         {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"do_sample": True, "temperature": "hot", "top_k": 2.5, "top_p": None, "min_p": True},
         {"temperature": 1.0}),
        ({"do_sample": "yes", "temperature": 0.6}, {}),
        ({"do_sample": True, "top_k": -1, "top_p": float("nan"), "repetition_penalty": 0,
          "min_p": 1.0}, {"temperature": 1.0, "min_p": 1.0}),
    ],
)  # fmt: skip
def test_only_numbers_for_known_parameters_count(
    config: dict[str, Any], values: dict[str, float]
) -> None:
    assert recommended(config) == values


def test_a_missing_file_recommends_nothing(tmp_path: Path) -> None:
    assert read_config(tmp_path / "generation_config.json") == {}


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)

    with pytest.raises(ModelError, match=r"generation_config.json` is damaged"):
        read_config(path)


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": 3}))

    assert read_config(path) == {"top_k": 3}
