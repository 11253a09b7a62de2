import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshllm.cli.shared import complete


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
