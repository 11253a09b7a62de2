"""Several models in one mesh of processes: replicas of one, a ring of another, one killed."""

import json
from collections.abc import Iterator

import pytest
import torch

from meshllm.bench.ring_table import random_model
from tests.processes.fleet import ALONE, Fields, Fleet, Node, ask, meshllm, open_fleet, until

pytestmark = [pytest.mark.socket, pytest.mark.timeout(600)]

NAMES = ("attic", "bench", "cellar", "desk")
PROMPT = "A ring is"


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """A model of 12 random layers."""
    with random_model("tiny", torch.float32, layers=12) as folder:
        yield str(folder)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with open_fleet() as fleet:
        yield fleet


def rings(node: Node) -> dict[str, Fields]:
    """Return the rings that serve, by model and replica."""
    found = node.status().get("rings", ())
    return {
        f"{'random' if '/' in each['model'] else each['model']} {each['replica']}": each
        for each in found
        if each["state"] == "serving"
    }


def serve(fleet: Fleet, names: set[str]) -> None:
    """Wait until all running nodes see these rings serve."""
    running = [node for node in fleet.nodes.values() if node.is_running]
    until(
        lambda: all(rings(node).keys() == names for node in running),
        lambda: f"{[rings(node).keys() for node in running]}\n{fleet.told()}",
    )


def say(node: Node, model: str) -> str:
    done = meshllm("chat", "--model", model, "--max-tokens", "8", PROMPT, state=node.state)
    assert done.returncode == 0, f"{done.stderr}\n{node.stderr}"
    return done.stdout


def test_a_mesh_serves_replicas_and_another_model_and_any_node_may_die(
    fleet: Fleet, other: str
) -> None:
    ticket = fleet.found(NAMES[0])
    models = ("--model", f"builtin,{other}", *ALONE)
    fleet.node(NAMES[0]).start(*models, "--replicas", "2")
    for name in NAMES[1:]:
        fleet.node(name).start(*models, "--join", ticket)
    for node in fleet.nodes.values():
        until(node.is_up, fleet.told)
    door = fleet.node(NAMES[1])
    serve(fleet, {"builtin 0", "builtin 1"})
    answer = ask(door, PROMPT)

    made = meshllm(
        "model", "serve", other, "--members", "2", "--alias", "twelve", "--json", state=door.state
    )

    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["layers"] == 12
    serve(fleet, {"builtin 0", "builtin 1", "random 0"})
    assert len(rings(door)["random 0"]["stages"]) == 2
    random = say(door, "twelve")
    for node in fleet.nodes.values():
        assert ask(node, PROMPT) == answer
        assert say(node, "twelve") == say(node, other) == random

    victim = rings(door)["builtin 0"]["entry"]
    name = next(each["name"] for each in door.status()["nodes"] if each["node"] == victim)
    if name == door.name:
        door = fleet.node(NAMES[2])
    fleet.node(name).kill()

    assert [ask(door, PROMPT), say(door, "twelve"), ask(door, PROMPT)] == [answer, random, answer]
    serve(fleet, {"builtin 0", "builtin 1", "random 0"})
    assert [ask(door, PROMPT), say(door, "twelve")] == [answer, random]
