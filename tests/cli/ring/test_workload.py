import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring.workload_spec import read_workload
from meshllm.errors import UserError
from meshllm.status import CostTable, MeshStatus, to_json
from meshllm.traces.trace import TraceLine
from tests.builders.fake_client import FakeClient
from tests.builders.meshes import NODE
from tests.builders.model_configs import LLAMA_8B
from tests.builders.status import node_id, status_of, waiting, with_node, with_ring
from tests.cli.conftest import Invoke

PAIR = """
[[model]]
name = "builtin"
rate = 50.0
prompt = [10, 100]
answer = 60
[[model]]
name = "big"
config = "big.json"
quant = "int8"
rate = 0.2
prompt = {median = 200, p90 = 600}
answer = 100
[[machine]]
name = "desktop"
count = 3
memory = "16GB"
tflops = 2
gb_s = 60
[[machine]]
name = "laptop"
memory = "8GB"
tflops = 1
gb_s = 40
[[link]]
a = "desktop"
b = "laptop"
latency_ms = 2
mbit_s = 100
"""


REQUESTS = 500  # simulated; the placements are those of the 4000 that the command has


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshllm.scheduler.schedule.REQUESTS", REQUESTS)


@pytest.fixture
def pair(home: Path) -> Path:
    (home / "big.json").write_text(json.dumps(LLAMA_8B))
    path = home / "pair.toml"
    path.write_text(PAIR)
    return path


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
    assert text.endswith("assumed: links without a latency have 0.5 ms\n")


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
    assert [each["machine"] for each in plan["one_more"]] == ["desktop", "laptop"]
    assert all(each["request_s"] <= best["request_s"] for each in plan["one_more"])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rate = 0.2", "", "A model has no `rate`"),
        ("rate = 0.2", "rate = -1", "`rate` must be a number above 0"),
        ("rate = 0.2", "speed = 1", "Unknown key `speed` in a model"),
        ("answer = 60", "answer = 0", "A length is outside of 1 to"),
        ("answer = 60", "answer = true", "A model needs a valid `answer`"),
        ("answer = 60", "answer = [9, 3]", "in ascending order"),
        ("p90 = 600", "p90 = 6", "Invalid lengths: median 200"),
        ("p90 = 600", "p99 = 600", "A model needs a valid `prompt`"),
        ('"int8"', '"int3"', "Unknown quantisation `int3`"),
        ('"big.json"', '"other.json"', "cannot be read"),
        ('"big.json"', '"pair.toml"', "Invalid JSON"),
        ("count = 3", "count = 0", "`count` must be a whole number"),
        ("count = 3", "count = 65", "`count` must be a whole number"),
        ("count = 3", "provider = 1", "`provider` must be `true` or `false`"),
        ("count = 3", "count = 64", "65 machines described"),
        ("tflops = 1\n", "", "A machine has no `tflops`"),
        ("tflops = 1\n", "ms_per_layer = 9\n", "Unknown key `gb_s` in a measured machine"),
        ("tflops = 1\ngb_s = 40", 'ms_per_layer = 9\nof = "x"', "`of` names no model"),
        ('b = "laptop"', 'b = "server"', "Invalid link `desktop` to `server`"),
        ("latency_ms = 2", "", "has no `latency_ms`"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    meshllm: Invoke, pair: Path, old: str, new: str, words: str
) -> None:
    assert PAIR.count(old) == 1
    pair.write_text(PAIR.replace(old, new))

    result = meshllm("ring", "plan", "--workload", str(pair))

    assert result.exit_code == 2
    assert words in result.stderr


def test_two_kinds_of_machines_have_two_names(meshllm: Invoke, pair: Path) -> None:
    pair.write_text(PAIR.replace("laptop", "desktop"))

    result = meshllm("ring", "plan", "--workload", str(pair))

    assert result.exit_code == 2
    assert "the same name" in result.stderr


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


COSTS = CostTable("builtin", ((1, 2.0), (8, 2.5), (32, 9.0)), 1.0)


def mesh_with_costs(costs: CostTable | None = COSTS) -> MeshStatus:
    status = status_of(2)
    assert status.model is not None
    named = replace(status, model=replace(status.model, name="builtin"))
    return with_node(named, 1, costs=costs)


def with_file(pair: Path, keys: str, status: object) -> None:
    """Let the laptop have the cost table of a node in a status."""
    pair.with_name("status.json").write_text(json.dumps(status))
    pair.write_text(PAIR.replace("tflops = 1\ngb_s = 40", f'costs = "status.json"\n{keys}'))


def test_a_node_of_the_running_mesh_has_its_measured_cost_table(pair: Path) -> None:
    pair.write_text("measured = true\n" + PAIR.partition('[[model]]\nname = "big"')[0])

    found = read_workload(pair, mesh_with_costs)

    attic, desk = found.workload.kinds
    assert attic.costs is None
    assert desk.costs is not None
    assert desk.costs.layer_s == ((1, 0.002), (8, 0.0025), (32, 0.009))
    assert desk.offer(NODE, found.workload.models[0].architecture).layer_s == desk.costs.layer_s
    assert any("256 rows" in each for each in found.assumed)  # of the other one


@pytest.mark.parametrize("node", ["", 'node = "desk"\n', f'node = "{node_id(1)[:9]}"\n'])
def test_a_machine_may_have_the_cost_table_of_a_status(pair: Path, node: str) -> None:
    with_file(pair, node, to_json(mesh_with_costs()))

    found = read_workload(pair, lambda: pytest.fail("it asks no mesh"))

    laptop = next(each for each in found.workload.kinds if each.name == "laptop")
    assert laptop.costs is not None
    assert laptop.costs.layer_s[1] == (8, 0.0025)
    assert laptop.costs.head_s == 0.001
    assert not any("256 rows" in each for each in found.assumed)


@pytest.mark.parametrize(
    ("keys", "costs", "words"),
    [
        ('node = "roof"', COSTS, "0 cost tables of `roof`, not 1"),
        ("", None, "0 cost tables of `a node`, not 1"),
        ('of = "x"', COSTS, "`of` names no model of the file: `x`"),
        ("", replace(COSTS, model="x"), "`of` names no model of the file: `x`"),
        ("", replace(COSTS, layer_ms=()), "Invalid cost table of `builtin`"),
        ("", replace(COSTS, layer_ms=((8, 1.0), (8, 2.0))), "Invalid cost table"),
        ("", replace(COSTS, layer_ms=((8, 0.0),)), "Invalid cost table"),
        ("", replace(COSTS, head_ms=-1.0), "Invalid cost table"),
        ("tflops = 2", COSTS, "Unknown key `tflops` in a machine with a cost table"),
    ],
)
def test_an_unusable_cost_table_is_refused(
    pair: Path, keys: str, costs: CostTable | None, words: str
) -> None:
    with_file(pair, keys, to_json(mesh_with_costs(costs)))

    with pytest.raises(UserError, match=words):
        read_workload(pair, lambda: pytest.fail("it asks no mesh"))


@pytest.mark.parametrize("status", [[], {"schema": 99}, {"nodes": 1}])
def test_a_file_that_is_not_a_status_is_refused(pair: Path, status: object) -> None:
    with_file(pair, "", status)

    with pytest.raises(UserError, match="not the status of a mesh"):
        read_workload(pair, lambda: pytest.fail("it asks no mesh"))


def test_a_cost_table_that_is_missing_is_named(pair: Path) -> None:
    with_file(pair, "", [])
    pair.with_name("status.json").unlink()

    with pytest.raises(UserError, match="cannot be read"):
        read_workload(pair, lambda: pytest.fail("it asks no mesh"))


def test_a_mesh_without_a_ring_has_no_times(
    meshllm: Invoke, pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeClient(monkeypatch)
    node.statuses = [waiting("1 of 2 nodes")]
    pair.write_text(f"measured = true\n{PAIR}")

    result = meshllm("ring", "plan", "--workload", str(pair))

    assert result.exit_code == 2
    assert "The times of the running mesh are not known yet" in result.stderr


def test_a_workload_excludes_other_descriptions(meshllm: Invoke, pair: Path) -> None:
    result = meshllm("ring", "plan", "--workload", str(pair), "--spec", "8GiB")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: `--spec` cannot be combined with `--workload`\n")


@pytest.fixture
def trace(home: Path) -> Path:
    path = home / "trace.jsonl"
    models = ["builtin", "big", "builtin", "other"]
    path.write_bytes(
        b"".join(
            TraceLine(
                at=1000.0 + at,
                model=models[at % 4],
                prompt_tokens=200,
                cached_tokens=50,
                new_tokens=30,
                max_tokens=64,
                ttft_ms=5.0,
                total_ms=100.0,
                finish_reason="stop",
            ).to_json()
            for at in range(400)
        )
    )
    return path


def without_load(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(each for each in lines if not each.startswith(("rate", "prompt", "answer")))


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


def test_a_trace_and_a_load_of_the_file_are_refused(
    meshllm: Invoke, pair: Path, trace: Path
) -> None:
    ran = meshllm("ring", "plan", "--workload", str(pair), "--trace", str(trace))

    assert "`builtin` has `rate` and `prompt` and `answer`, and a trace" in ran.stderr


def test_a_model_that_the_trace_lacks_is_refused(meshllm: Invoke, pair: Path, trace: Path) -> None:
    pair.write_text(without_load(PAIR))
    trace.write_bytes(trace.read_bytes().replace(b'"big"', b'"small"'))

    ran = meshllm("ring", "plan", "--workload", str(pair), "--trace", str(trace))

    assert "The trace has no request for `big`" in ran.stderr


def test_a_trace_without_a_workload_is_refused(meshllm: Invoke, trace: Path) -> None:
    ran = meshllm("ring", "plan", "--trace", str(trace))

    assert "`--trace` needs `--workload`" in ran.stderr
