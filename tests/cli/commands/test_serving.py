"""`meshllm model serve` and `stop`, before a fake client of the node."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.shared.client import NodeClient
from meshllm.errors import ModelMissing
from meshllm.node.options import ModelOptions
from meshllm.status import ModelStatus
from tests.builders.model_configs import LLAMA_8B
from tests.cli.conftest import Invoke

SERVED = ModelStatus("org/m", 12, 64, "bfloat16", "none", replicas=2, key="00" * 8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the node is asked for."""
    found: list[object] = []

    async def serve(_: NodeClient, asked: ModelOptions) -> ModelStatus:
        found.append(asked)
        return replace(SERVED, name=asked.model, replicas=asked.replicas or 1)

    async def stop(_: NodeClient, model: str) -> str:
        found.append(model)
        return "fox\x1b[2J@int8" if model == "a0b1c2" else model

    monkeypatch.setattr(NodeClient, "serve", serve)
    monkeypatch.setattr(NodeClient, "stop", stop)
    return found


def test_only_given_options_are_changed(meshllm: Invoke, calls: list[object]) -> None:
    plain = meshllm("model", "serve", "org/m")
    full = meshllm(
        "model", "serve", "org/m", "--quant", "int8", "--members", "3", "--replicas", "2",
        "--policy", "throughput", "--context", "99", "--alias", "a", "--alias", "b",
    )  # fmt: skip

    assert (plain.stdout, full.stdout) == ("org/m\n", "org/m\n")
    assert "served by a ring with all 12 layers" in plain.stderr
    assert "served by up to 2 rings, each with all 12 layers" in full.stderr
    assert calls == [
        ModelOptions("org/m"),
        ModelOptions("org/m", "int8", "throughput", 3, 2, 99, ("a", "b")),
    ]


def test_variables_count_as_options_and_settings_of_files_do_not(
    meshllm: Invoke, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    meshllm("config", "set", "replicas", "4")
    meshllm("config", "set", "context", "512", "--project")
    monkeypatch.setenv("MESHLLM_QUANT", "int8")
    monkeypatch.setenv("MESHLLM_MEMBERS", "3")

    meshllm("model", "serve", "org/m", "--members", "2")

    assert calls == [ModelOptions("org/m", quant="int8", members=2)]


def test_a_folder_is_named_for_a_process_in_another_one(
    meshllm: Invoke, calls: list[object], tmp_path: Path
) -> None:
    (tmp_path / "qwen").mkdir()

    meshllm("model", "serve", "qwen")
    meshllm("model", "stop", "qwen")

    meshllm("model", "stop", "qwen@int8")
    meshllm("model", "stop", "owl@int8")

    folder = str(tmp_path / "qwen")
    assert calls == [ModelOptions(folder), folder, f"{folder}@int8", "owl@int8"]


def test_json(meshllm: Invoke, calls: list[object]) -> None:
    served = json.loads(meshllm("model", "serve", "org/m", "--json").stdout)
    stopped = json.loads(meshllm("model", "stop", "org/m", "--json").stdout)

    assert (served["schema"], served["name"], served["layers"]) == (1, "org/m", 12)
    assert stopped == {"schema": 1, "model": "org/m"}
    assert meshllm("model", "stop", "org/m").stderr == "org/m is no longer served\n"
    assert "\x1b" not in meshllm("model", "stop", "a0b1c2").stderr  # a name by another member


def test_without_a_node_there_is_nothing_to_serve(meshllm: Invoke) -> None:
    done = meshllm("model", "serve", "org/m")

    assert done.exit_code == 3
    assert "No node is running" in done.stderr
    assert "hint: start one with `meshllm node`" in done.stderr


WORKLOAD = """
[[model]]
name = "builtin"
rate = 500.0
prompt = 100
answer = 60
[[model]]
name = "big"
config = "big.json"
quant = "int8"
rate = 0.2
prompt = 200
answer = 100
[[machine]]
name = "desktop"
count = 4
memory = "7GB"
tflops = 2
gb_s = 60
"""

ENGINE = """
[[machine]]
name = "gpu"
memory = "80GB"
tflops = 300
gb_s = 2000
provider = true
"""


@pytest.fixture
def workload(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("meshllm.scheduler.schedule.REQUESTS", 500)  # simulated
    (home / "big.json").write_text(json.dumps(LLAMA_8B))
    path = home / "office.toml"
    path.write_text(WORKLOAD)
    return path


def test_the_models_of_a_plan_are_served_in_its_rings(
    meshllm: Invoke, calls: list[object], workload: Path
) -> None:
    planned = meshllm("ring", "plan", "--workload", str(workload), "--json").stdout
    sizes: dict[str, list[int]] = {"builtin": [], "big": []}
    for each in json.loads(planned)["placement"]["replicas"]:
        sizes[each["model"]].append(len(each["machines"]))

    done = meshllm("model", "serve", "--plan", str(workload))
    told = meshllm("model", "serve", "--plan", str(workload), "--json").stdout

    big, small = sizes["big"], sizes["builtin"]
    assert (min(big) > 1, len(small) > 1) == (True, True)  # both fields are told
    expected = {
        ModelOptions("builtin", "none", members=1, replicas=len(small)),
        ModelOptions("big", "int8", members=max(big, key=big.count), replicas=len(big)),
    }
    assert {*calls[:2]} == {*calls[2:]} == expected
    assert sorted(done.stdout.split()) == ["big", "builtin"]
    assert {each["name"] for each in json.loads(told)["models"]} == {"big", "builtin"}


def test_what_is_served_is_told_if_a_later_model_cannot_be(
    meshllm: Invoke, calls: list[object], workload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(_: NodeClient, asked: ModelOptions) -> ModelStatus:
        if calls:
            raise ModelMissing("No such model")
        calls.append(asked.model)
        return replace(SERVED, name=asked.model)

    monkeypatch.setattr(NodeClient, "serve", serve)

    done = meshllm("model", "serve", "--plan", str(workload), "--json")

    assert (done.exit_code, done.stderr) == (4, "error: No such model\n")
    assert [each["name"] for each in json.loads(done.stdout)["models"]] == calls


def test_engines_of_a_plan_serve_by_themselves(
    meshllm: Invoke, calls: list[object], workload: Path
) -> None:
    machine = WORKLOAD.index("[[machine]]")
    workload.write_text(WORKLOAD[:machine] + ENGINE + "count = 2\n")

    done = meshllm("model", "serve", "--plan", str(workload))

    assert (done.exit_code, calls) == (2, [])
    assert "no ring of nodes" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("org/m", "--plan", "x"),
        ("--plan", "x", "--members", "2"),
        ("--plan", "x", "--alias", "a"),
    ],
)
def test_a_model_or_a_plan_is_served(
    meshllm: Invoke, calls: list[object], words: tuple[str, ...]
) -> None:
    done = meshllm("model", "serve", *words)

    assert (done.exit_code, calls) == (2, [])
    assert "or `--plan FILE` alone" in done.stderr
