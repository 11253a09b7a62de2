import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from meshllm.cli.app import app
from tests.builders.fake_ring import FakeRing

Invoke = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for every test: no settings and no history of the developer."""
    for name in [name for name in os.environ if name.startswith("MESHLLM_")]:
        monkeypatch.delenv(name)
    for kind in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ring() -> FakeRing:
    return FakeRing()


@pytest.fixture
def meshllm(ring: FakeRing) -> Invoke:
    """Run a command line in this process, with a ring that echoes the prompt."""

    def invoke(*words: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(app, list(words), input=stdin, obj=ring, prog_name="meshllm")

    return invoke
