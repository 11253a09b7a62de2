import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from meshllm.cli.shared import complete
from meshllm.cli.shared.options import docs
from tests.cli.conftest import Invoke


@dataclass
class Example:
    """A class with one documented field of two."""

    first: int = 1
    """What the first
    is for."""
    second: int = 2


def test_the_docstring_of_a_field_is_its_help_text() -> None:
    assert docs(Example) == {"first": "What the first\nis for."}


def test_help_shows_text_default_and_variable(meshllm: Invoke) -> None:
    text = " ".join(meshllm("chat", "--help").stdout.split())

    shown = "Keep the most likely tokens up to probability P."
    assert f"--top-p X {shown} [default: the model's; env: MESHLLM_TOP_P]" in text
    assert "gives the same text. [default: random; env: MESHLLM_SEED]" in text
    assert "[default: 512; env: MESHLLM_MAX_TOKENS]" in text
    assert "--state FOLDER Folder of" in text
    assert "--ends entry|client Which side holds the embedding and the LM head." in text


def test_models_are_completed_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "models--org--name").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert complete.models("") == ["builtin", "org/name"]
    assert complete.models("b") == ["builtin"]


def test_devices_are_completed_by_kind() -> None:
    assert complete.devices("c") == ["cpu", "cuda"]
    assert complete.devices("gpu") == []


def test_installed_transports_are_completed() -> None:
    assert "loopback" in complete.transports("loop")
    assert complete.transports("no-such") == []


@pytest.mark.parametrize(
    ("words", "offer"),
    [
        ("meshllm mod", "model"),
        ("meshllm chat --transport loop", "loopback"),
        ("meshllm help netw", "networking"),
        ("meshllm help cha", "chat"),
    ],
)
def test_tab_runs_the_command(words: str, offer: str) -> None:
    code = "import sys; sys.argv = ['meshllm']; from meshllm.cli.app import main; main()"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}

    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "_MESHLLM_COMPLETE": "complete_bash", **asked},
        capture_output=True,
        text=True,
        check=True,
    )

    assert told.stdout.split() == [offer]
