"""Names of models, and what is said about those that are none."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from meshllm.errors import ModelError
from meshllm.model.locate import find_folder, is_folder, is_model_id, no_config


def advice(name: str) -> str:
    """Return the hint for a name that is none of a model."""
    with pytest.raises(ModelError) as caught:
        find_folder(name)
    return caught.value.hint or ""


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()

    assert find_folder("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["x" * 300, "~/" + "x" * 300, "~no-such-user/model"])
def test_a_name_that_no_file_can_have_is_that_of_no_model(name: str) -> None:
    assert not is_folder(name)
    with pytest.raises(ModelError, match="There is no folder"):
        find_folder(name)


def test_a_file_is_not_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    for name in ("m/model.gguf", "m/model.safetensors"):
        (tmp_path / name).touch()

    with pytest.raises(ModelError, match=r"`m/model\.gguf` is a file, not a model folder"):
        find_folder("m/model.gguf")
    assert "meshllm provide" in advice("m/model.gguf")
    assert advice("m/model.safetensors") == "name the folder that it is in"
    assert not is_model_id("m/model.gguf")


def test_a_folder_with_gguf_files_only_is_explained(tmp_path: Path) -> None:
    assert no_config(tmp_path).hint == "choose a model folder"

    (tmp_path / "q4.gguf").touch()

    assert "only `q4.gguf`" in str(no_config(tmp_path))


def test_a_similar_name_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--Org--Alpha-1B").mkdir()

    assert advice("builtn") == "did you mean `builtin`?"
    assert advice("alpha-1b") == "did you mean `Org/Alpha-1B`?"
    assert advice("org/alpha/1b") == "did you mean `Org/Alpha-1B`?"
    assert advice("zzz").startswith("use `builtin`, a folder")
