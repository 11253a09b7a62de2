import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring.workload_spec import read_workload
from meshllm.scheduler.search import search_locally
from tests.builders.fake_client import FakeClient
from tests.builders.status import status_of, with_ring
from tests.builders.workloads import PAIR, mesh_with_costs, without_load
from tests.cli.conftest import Invoke

REQUESTS, SAMPLES = 125, 2  # few: only what is told of the placements matters here


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.scheduler.schedule.REQUESTS", REQUESTS)
    monkeypatch.setattr("meshllm.scheduler.schedule.SAMPLES", SAMPLES)


def test_a_workload_is_placed_and_explained(meshllm: Invoke, pair: Path) -> None:
    text = meshllm("ring", "plan", "--workload", str(pair)).stdout

    assert text.startswith("model    replicas  machines")
    assert "\nbig " in text
    assert "\nbuiltin " in text
    assert " s per request, " in text
    assert "\nrunner-up, " in text
    assert "\nby memory alone, " in text
    assert "\none more desktop: " in text
    assert "\none more laptop: " in text
    assert "\nsearch: exact\n" in text
    assert text.endswith("assumed: links without a latency have 0.5 ms\n")


def test_machines_that_save_no_time_are_named(meshllm: Invoke, pair: Path) -> None:
    pair.write_text(PAIR.replace("count = 3", "count = 12"))

    text = meshllm("ring", "plan", "--workload", str(pair)).stdout
    plan = json.loads(meshllm("ring", "plan", "--workload", str(pair), "--json").stdout)

    spare = [f"{each['count']} {each['machine']}" for each in plan["unused"]]
    assert spare
    assert f"\nunused: {', '.join(spare)}\n" in text


def test_json_has_the_placement_the_predictions_and_the_alternatives(
    meshllm: Invoke, pair: Path
) -> None:
    plan = json.loads(meshllm("ring", "plan", "--workload", str(pair), "--json").stdout)

    best = plan["placement"]
    big = [each for each in best["replicas"] if each["model"] == "big"]
    assert big
    for each in big:
        assert each["layers"][0].startswith("0:")
        assert each["layers"][-1].endswith(":32")
        assert len(each["layers"]) == len(each["machines"])
    assert {each["model"] for each in best["models"]} == {"builtin", "big"}
    for each in best["models"]:
        assert each["refused"] == 0
        assert each["ttft_ms"]["median"] <= each["ttft_ms"]["p95"]
    for other in (plan["runner_up"], plan["by_memory"]):
        assert other["request_s"] >= best["request_s"]
        assert other["reason"]
    assert plan["searched"] == "exact"
    assert [each["machine"] for each in plan["one_more"]] == ["desktop", "laptop"]
    assert all(each["request_s"] <= best["request_s"] for each in plan["one_more"])


@pytest.mark.parametrize(
    ("is_installed", "said"),
    [(False, "machines with `meshllm[plan]`"), (True, "machines without `meshllm[plan]`")],
)
def test_a_placement_that_other_machines_may_not_find_is_told_as_such(
    meshllm: Invoke, pair: Path, is_installed: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshllm.scheduler.search.MAX_SETS", 0)  # too many for the exact search
    monkeypatch.setattr("meshllm.scheduler.schedule.is_installed", lambda: is_installed)
    monkeypatch.setattr("meshllm.scheduler.schedule.search_by_solver", search_locally)

    text = meshllm("ring", "plan", "--workload", str(pair)).stdout

    (line,) = [each for each in text.splitlines() if each.startswith("search: ")]
    assert said in line


def test_quantisations_of_a_model_are_told_apart(meshllm: Invoke, pair: Path) -> None:
    pair.write_text(
        PAIR.replace('name = "big"', 'name = "builtin"').replace('config = "big.json"\n', "")
    )

    report = json.loads(meshllm("ring", "plan", "--workload", str(pair), "--json").stdout)

    names = {"builtin@bfloat16", "builtin@int8"}
    assert {each["model"] for each in report["placement"]["models"]} == names
    assert {each["model"] for each in report["placement"]["replicas"]} == names


def test_a_trace_tells_quantisations_apart_by_their_names(pair: Path, trace: Path) -> None:
    twice = PAIR.replace('name = "big"', 'name = "builtin"').replace('config = "big.json"\n', "")
    pair.write_text(without_load(twice))
    trace.write_bytes(trace.read_bytes().replace(b'"model":"big"', b'"model":"builtin@int8"'))

    spec = read_workload(pair, mesh_with_costs, trace)

    assert spec.requests is not None
    rates = [each.load.rate for each in spec.workload.models]
    assert [sum(each.model == model for each in spec.requests) for model in (0, 1)] == [200, 100]
    assert rates[0] == pytest.approx(2 * rates[1])


def test_models_that_do_not_fit_exit_4(meshllm: Invoke, pair: Path) -> None:
    pair.write_text(PAIR.replace("16GB", "2GB").replace("8GB", "1GB"))

    result = meshllm("ring", "plan", "--workload", str(pair))

    assert (result.exit_code, result.stdout) == (4, "")
    assert "error: No set of machines holds `big`" in result.stderr


def test_a_measured_machine_is_as_fast_as_its_layers(meshllm: Invoke, pair: Path) -> None:
    slow = PAIR.replace("tflops = 2\ngb_s = 60", 'ms_per_layer = 9000\nof = "big"')
    fast = slow.replace("9000", "2")

    times = []
    for text in (slow, fast):
        pair.write_text(text)
        plan = json.loads(meshllm("ring", "plan", "--workload", str(pair), "--json").stdout)
        times.append(plan["placement"]["request_s"])

    assert times[0] > 20 * times[1]
    assert "256 rows take 4.24 times as long as one row" in plan["assumed"]


def test_the_nodes_of_the_running_mesh_can_be_used(
    meshllm: Invoke, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_of(2)
    assert status.model is not None
    node = FakeClient(monkeypatch)
    node.statuses = [replace(status, model=replace(status.model, name="builtin"))]
    models = PAIR.partition('[[model]]\nname = "big"')[0]
    pair.write_text(f"measured = true\n{models}")

    plan = json.loads(meshllm("ring", "plan", "--workload", str(pair), "--json").stdout)

    assert [each["machine"] for each in plan["one_more"]] == ["0-attic", "1-desk"]
    used = {name for each in plan["placement"]["replicas"] for name in each["machines"]}
    assert used <= {"0-attic", "1-desk"}


def test_the_names_of_nodes_of_the_running_mesh_are_escaped(
    meshllm: Invoke, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = mesh_with_costs()
    stages = tuple(replace(each, name="\x1b[2J") for each in status.ring.stages)
    FakeClient(monkeypatch).statuses = [with_ring(status, stages=stages)]
    pair.write_text("measured = true\n" + PAIR.partition('[[model]]\nname = "big"')[0])

    result = meshllm("ring", "plan", "--workload", str(pair))

    assert "\\x1b[2J" in result.stdout
    assert "\x1b[2J" not in result.stdout


def test_a_workload_excludes_other_descriptions(meshllm: Invoke, pair: Path) -> None:
    result = meshllm("ring", "plan", "--workload", str(pair), "--spec", "8GiB")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: `--spec` cannot be combined with `--workload`\n")


@pytest.mark.parametrize(
    "words",
    [("--policy", "fastest"), ("--model", "m"), ("--context", "9"), ("--acceptance", "0.1")],
)
def test_options_that_a_workload_does_not_use_are_refused(
    meshllm: Invoke, pair: Path, words: tuple[str, str]
) -> None:
    result = meshllm("ring", "plan", "--workload", str(pair), *words)

    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: `{words[0]}` has no effect with `--workload`")


def test_the_load_is_that_of_a_trace(meshllm: Invoke, pair: Path, trace: Path) -> None:
    pair.write_text(without_load(PAIR))

    ran = meshllm("ring", "plan", "--workload", str(pair), "--trace", str(trace), "--json")

    plan = json.loads(ran.stdout)
    found = {each["model"]: each for each in plan["placement"]["models"]}
    assert {name: (each["served"], each["tokens"]) for name, each in found.items()} == {
        "builtin": (200, 6000),
        "big": (100, 3000),
    }
    assert found["builtin"]["rate"] == pytest.approx(200 / 399)
    assert "100 requests of the trace for other models are left out" in plan["assumed"]


def test_a_trace_without_a_workload_is_refused(meshllm: Invoke, trace: Path) -> None:
    ran = meshllm("ring", "plan", "--trace", str(trace))

    assert "`--trace` needs `--workload`" in ran.stderr
