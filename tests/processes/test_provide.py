"""A provider in a process of its own, with an engine that it starts."""

import signal
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import QUESTION, Answers
from tests.processes.fleet import ALONE, Fleet, ask, meshllm, until

pytestmark = [pytest.mark.socket, pytest.mark.timeout(300)]


def test_the_models_of_an_engine_are_served_by_the_mesh(fleet: Fleet, answers: Answers) -> None:
    ticket = fleet.create_mesh("attic")
    attic, gpu = fleet.node("attic"), fleet.node("gpu")
    attic.start(*ALONE)
    engine = ("--", sys.executable, "-m", "tests.builders.fake_engine", "{port}")
    gpu.start("--join", ticket, "--no-discovery", *engine, command=("provide",))
    until(
        lambda: [each["name"] for each in attic.status().get("provided", ())] == ["fox"], fleet.told
    )

    said = meshllm("chat", "--model", "fox", "-q", "to be", state=attic.state)
    assert gpu.process is not None
    libraries = Path(f"/proc/{gpu.process.pid}/maps").read_text(encoding="utf-8")
    own = ask(attic, QUESTION)
    gpu.send(signal.SIGTERM)
    code = gpu.ended()
    until(lambda: not attic.status()["provided"], fleet.told)

    assert (said.stdout, said.stderr) == ("to be \n", "")
    assert own == answers[QUESTION]
    assert "libpython" in libraries or "/python" in libraries
    assert "libtorch" not in libraries
    assert code == 0
    assert "gpu provides fox" in attic.stderr
