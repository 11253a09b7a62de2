import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshllm.cli.ring.workload_spec import read_workload
from meshllm.errors import UserError
from meshllm.status import CostTable, to_json
from tests.builders.fake_client import FakeClient
from tests.builders.meshes import NODE
from tests.builders.status import node_id, waiting
from tests.builders.workloads import COSTS, PAIR, mesh_with_costs, without_load
from tests.cli.conftest import Invoke


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
        ("count = 3", "models = []", "must list models of the file"),
        ("count = 3", 'models = ["builtin", "owl"]', "must list models of the file"),
        ("count = 3", "models = [[]]", "must list models of the file"),
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


def test_a_machine_may_be_kept_for_some_models(pair: Path) -> None:
    pair.write_text(PAIR.replace("count = 3", 'count = 3\nmodels = ["builtin"]'))

    kinds = read_workload(pair, mesh_with_costs).workload.kinds

    assert [each.models for each in kinds if each.count == 3] == [frozenset({"builtin"})]
    assert [each.models for each in kinds if each.count == 1] == [None]
    pair.write_text(PAIR.replace("count = 3", 'count = 3\nmodels = ["big@int8"]'))
    workload = read_workload(pair, mesh_with_costs).workload
    assert [workload.may_hold(0, model) for model in (0, 1)] == [False, True]


def test_two_kinds_of_machines_have_two_names(meshllm: Invoke, pair: Path) -> None:
    pair.write_text(PAIR.replace("laptop", "desktop"))

    result = meshllm("ring", "plan", "--workload", str(pair))

    assert result.exit_code == 2
    assert "the same name" in result.stderr


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
