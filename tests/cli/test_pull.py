"""`meshllm model pull` in a subprocess, against a local hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshllm.model.locate import INDEX
from meshllm.testing.models import tiny_model
from tests.builders.hub import Hub, open_hub

pytestmark = pytest.mark.socket


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "model"
    tiny_model(folder, file_bytes=60_000)
    with open_hub({"Qwen/Qwen3-0.6B": folder}) as hub:
        yield hub


def run(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "meshllm", *words],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pull_fetches_the_files_of_the_layers_and_no_others(hub: Hub, tmp_path: Path) -> None:
    result = run(hub, tmp_path, "model", "pull", "Qwen/Qwen3-0.6B", "--layers", "0:2")

    assert result.returncode == 0, result.stderr
    there = {path.name for path in Path(result.stdout.strip()).iterdir()}
    whole = json.loads((hub.models["Qwen/Qwen3-0.6B"] / INDEX).read_bytes())["weight_map"]
    needed = {
        file
        for name, file in whole.items()
        if ".layers." not in name or name.split(".")[2] in {"0", "1"}
    }
    weights = {name for name in there if name.endswith(".safetensors")}
    assert needed <= weights < set(whole.values())
    assert {"config.json", INDEX} <= there
    assert len(hub.fetched) == len(set(hub.fetched)) == len(there)


def test_a_pulled_model_is_found_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    run(hub, tmp_path, "model", "pull", "Qwen/Qwen3-0.6B")
    fetched = list(hub.fetched)

    result = run(hub, tmp_path, "model", "show", "Qwen/Qwen3-0.6B", "--json")

    assert json.loads(result.stdout)["layers"] == 6
    assert hub.fetched == fetched


def test_a_model_missing_on_the_hub_is_refused(hub: Hub, tmp_path: Path) -> None:
    result = run(hub, tmp_path, "model", "pull", "org/missing")

    assert (result.returncode, result.stdout) == (4, "")
    assert f"Cannot fetch `org/missing` from {hub.endpoint}" in result.stderr
    assert "Traceback" not in result.stderr
