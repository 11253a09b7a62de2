import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring.spec import MEASURED
from meshllm.model.locate import find_folder
from meshllm.names import Span
from meshllm.protocol.planning.policies import POLICIES
from meshllm.status import MeshStatus
from tests.builders.fake_client import FakeClient
from tests.builders.status import status_of, waiting, with_ring
from tests.cli.conftest import Invoke

LOAD = """
measured = true
[[model]]
name = "org/tiny"
rate = 1.0
prompt = 10
answer = 10
"""


def test_without_nodes_the_plan_is_for_this_machine(meshllm: Invoke) -> None:
    plan = json.loads(meshllm("ring", "plan", "--json").stdout)

    assert [stage["layers"] for stage in plan["stages"]] == ["0:8"]
    assert (plan["schema"], plan["model"], plan["standbys"]) == (1, "builtin", [])
    assert plan["stages"][0]["node"] == "this machine"
    assert plan["planned_for"] == "this machine alone: no node runs here"
    assert plan["stages"][0]["wire_ms"] == 0
    assert plan["stages"][0]["room_tokens"] >= plan["context"]


def test_a_plan_shows_layers_and_reasons(meshllm: Invoke) -> None:
    text = meshllm("ring", "plan", "--spec", "8GiB,4GiB@20ms").stdout

    assert text.startswith("`builtin` on the nodes of `--spec`\n\n")
    assert "   0  n1    0:8 " in text
    assert "\nstandby n2: its link adds 40.0 ms" in text
    assert " ms per token, " in text
    assert "\nproportional      2 " in text
    assert "\nassumed: 256 rows take 4.24 times as long as one row\n" in text
    assert "\nmeasured: " not in text


def test_a_policy_may_be_chosen(meshllm: Invoke) -> None:
    words = ("ring", "plan", "--spec", "2x1GiB:2ms@5ms", "--policy", "proportional", "--json")

    plan = json.loads(meshllm(*words).stdout)

    assert [stage["layers"] for stage in plan["stages"]] == ["0:4", "4:8"]
    assert [stage["wire_ms"] > 4 for stage in plan["stages"]] == [True, True]
    assert [each["policy"] for each in plan["policies"]] == [*POLICIES]


def test_each_policy_predicts_speculation_and_time_to_first_token(meshllm: Invoke) -> None:
    words = ("ring", "plan", "--spec", "2x1GiB:2ms@5ms", "--json", "--acceptance")

    good, useless = (json.loads(meshllm(*words, share).stdout) for share in ("0.9", "0"))

    for plan, drafts, gain in ((good, 16, 4), (useless, 0, 1)):
        assert plan["acceptance"] == (0.9 if drafts else 0)
        for each in (plan, *plan["policies"]):
            assert each["speculation"]["drafts"] == drafts
            assert each["ms_per_token"] > 0.99 * gain * each["speculation"]["ms_per_token"]
            assert each["ttft_ms"] > each["ms_per_token"]
        assert (plan["prompt_tokens"], plan["chunk"] <= 256) == (256, True)


def test_the_assumed_acceptance_rate_is_shown(meshllm: Invoke) -> None:
    text = meshllm("ring", "plan", "--spec", "2x1GiB:2ms@5ms").stdout

    assert " drafts per step\n" in text
    assert "  with drafts  first token ms  " in text
    assert text.endswith(
        "assumed: a draft is accepted with probability 0.5 if those before it are\n"
    )


def test_a_single_draft_is_not_plural(meshllm: Invoke) -> None:
    words = ("--spec", "2x1GiB:2ms@5ms", "--acceptance", "0.1")

    assert " with 1 draft per step\n" in meshllm("ring", "plan", *words).stdout


def test_an_acceptance_rate_above_one_is_refused(meshllm: Invoke) -> None:
    assert meshllm("ring", "plan", "--acceptance", "1.1").exit_code == 2


def test_nodes_may_be_in_a_file(meshllm: Invoke, home: Path) -> None:
    (home / "home.toml").write_text('[[node]]\nname = "attic"\nmemory = "8GiB"\n')

    text = meshllm("ring", "plan", "--nodes", "home.toml").stdout

    assert "   0  attic  0:8 " in text


def test_nodes_and_spec_exclude_each_other(meshllm: Invoke) -> None:
    result = meshllm("ring", "plan", "--nodes", "x.toml", "--spec", "8GiB")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: `--nodes` cannot be combined with `--spec`\n")


def test_a_model_that_does_not_fit_exits_4(meshllm: Invoke) -> None:
    result = meshllm("ring", "plan", "--spec", "2x1MiB")

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("error: The ring lacks ")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A mesh of two nodes that runs the built-in model."""
    client = FakeClient(monkeypatch)
    status = status_of(2)
    assert status.model
    named = replace(status, model=replace(status.model, name="builtin"))
    stages = [replace(each, layers=Span(4 * each.rank, 4 + 4 * each.rank))
              for each in status.ring.stages]  # fmt: skip
    client.statuses = [with_ring(named, stages=tuple(stages), policy="proportional")]
    monkeypatch.setattr("meshllm.cli.shared.client.is_running", lambda _: True)
    return client


def test_without_nodes_the_plan_is_for_the_running_mesh(
    meshllm: Invoke, running: FakeClient
) -> None:
    plan = json.loads(meshllm("ring", "plan", "--json").stdout)

    assert [stage["node"] for stage in plan["stages"]] == ["attic", "desk"]
    assert plan["model"] == "builtin"
    assert plan["planned_for"] == "the nodes of the running mesh"
    assert plan["measured"] == [MEASURED]
    assert not any("time per layer" in each for each in plan["assumed"])
    text = meshllm("ring", "plan").stdout
    assert text.startswith("`builtin` on the nodes of the running mesh\n\n")
    assert f"\nmeasured: {MEASURED}\nassumed: " in text
    fastest = json.loads(meshllm("ring", "plan", "--policy", "fastest", "--json").stdout)
    assert len(fastest["stages"]) == 1


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (("--model", "builtin"), "this machine alone: `--model` is given"),
        (("--spec", "8GiB"), "the nodes of `--spec`"),
    ],
)
def test_other_nodes_or_models_are_not_those_of_the_mesh(
    meshllm: Invoke, running: FakeClient, words: tuple[str, ...], subject: str
) -> None:
    plan = json.loads(meshllm("ring", "plan", *words, "--json").stdout)

    assert (plan["planned_for"], plan["measured"]) == (subject, [])


def test_a_mesh_without_a_ring_is_planned_for_this_machine(
    meshllm: Invoke, running: FakeClient
) -> None:
    running.statuses = [waiting("the nodes are loading the model")]

    plan = json.loads(meshllm("ring", "plan", "--json").stdout)

    assert plan["planned_for"] == "this machine alone: the node here has no ring yet"
    assert plan["measured"] == []


def test_the_plan_of_the_running_mesh_has_its_quantisation(
    meshllm: Invoke, running: FakeClient
) -> None:
    stored = json.loads(meshllm("ring", "plan", "--json").stdout)
    (status,) = running.statuses
    assert isinstance(status, MeshStatus)
    assert status.model
    running.statuses = [replace(status, model=replace(status.model, quant="int8"))]

    quantised = json.loads(meshllm("ring", "plan", "--json").stdout)

    assert quantised["stages"][0]["memory_bytes"] < stored["stages"][0]["memory_bytes"]


def test_a_model_that_came_from_other_nodes_is_planned(
    meshllm: Invoke, running: FakeClient, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    folder = home / "cache" / "meshllm" / "weights" / "0123-org-tiny"
    folder.mkdir(parents=True)
    config = json.loads((find_folder("builtin") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    index = {"metadata": {"name": "org/tiny"}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (status,) = running.statuses
    assert isinstance(status, MeshStatus)
    assert status.model
    running.statuses = [replace(status, model=replace(status.model, name="org/tiny"))]
    (home / "load.toml").write_text(LOAD)

    plan, placed = (
        json.loads(meshllm("ring", "plan", *words, "--json").stdout)
        for words in ((), ("--workload", "load.toml"))
    )

    assert (plan["model"], plan["planned_for"]) == ("org/tiny", "the nodes of the running mesh")
    assert placed["placement"]["replicas"][0]["model"] == "org/tiny"
    assert meshllm("ring", "plan", "--model", "org/none").exit_code == 4


def test_given_nodes_hold_the_model_as_the_settings_say(
    meshllm: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = json.loads(meshllm("ring", "plan", "--spec", "8GiB", "--json").stdout)
    monkeypatch.setenv("MESHLLM_DTYPE", "float32")

    wide = json.loads(meshllm("ring", "plan", "--spec", "8GiB", "--json").stdout)

    assert wide["stages"][0]["memory_bytes"] > stored["stages"][0]["memory_bytes"]
